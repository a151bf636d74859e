/* Simulating a training step on a cluster that need not exist: how long it takes, what fills the
 * time, what fits. Reads the step program that the trainer interprets. Needs no device and no
 * ranks. */
#ifndef QUADRILLE_SIM_H
#define QUADRILLE_SIM_H

#include <quadrille/export.h>
#include <quadrille/options.h>
#include <quadrille/sized.h>
#include <quadrille/strbuf.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- clusters ---- */

/* accelerator.*, node.*, network.*, software.*, cost.*: what a cluster file says and a command line
 * may change. */
QD_API qd_option_table qd_cluster_table(void);

/* Names of the clusters that are built in, NULL-terminated. */
QD_API const char *const *qd_cluster_names(void);

/* Fills the cluster keys of `options`: `cluster` is a built-in name or a YAML file. What the user
 * has set on the command line stays. */
QD_API qd_status qd_cluster_load(qd_options *options, const char *cluster);

/* Where model.preset names a model that this version cannot train, puts the nearest one that it can
 * into `options`, and says so in `note` (else ""). */
QD_API qd_status qd_simulate_nearest(qd_options *options, char *note, size_t size);

/* ---- one layout ---- */

typedef struct qd_sim_line {
    const char *name;
    double value; /* seconds, or bytes */
} qd_sim_line;

enum { QD_SIM_LINES = 32, QD_SIM_LOSSES = 3 };

/* What one stage of the pipeline looks like; without a pipeline there is one. */
typedef struct qd_sim_stage {
    int64_t memory_bytes;            /* what the trainer allocates */
    double busy_seconds;             /* computing */
    double bubble_seconds;           /* waiting for another stage */
    double exposed_seconds;          /* waiting for collectives, or inside them */
} qd_sim_stage;

typedef struct qd_sim_report {
    char model[64], layout[96], cluster[64], profile[24];
    int gpus, stages;
    int64_t parameters, tokens_per_step, micro_batch, micro_batches, seq, global_batch;
    double step_seconds, tokens_per_second, tokens_per_gpu_second;
    double flops_per_step;             /* of the model, all ranks, attention counted once (causal) */
    double mfu, mfu_causal, hfu;       /* model FLOPs with full attention, with half of it; and all FLOPs that are computed */
    double compute_seconds;            /* of the stage that computes longest: products, attention and the rest */
    double product_seconds, attention_seconds, memory_seconds, optimizer_seconds, launch_seconds; /* parts of that */
    double bubble_seconds;             /* mean over stages: waiting for other stages */
    double late_seconds;               /* after the last action: for the slowest rank, and what the host does between steps */
    qd_sim_line exposed[8];            /* by axis: seconds of communication that nothing hides, mean over stages */
    int exposed_count;
    qd_sim_line hidden[8];             /* by axis: seconds of communication beside computation */
    int hidden_count;
    int64_t memory_bytes, memory_limit; /* of the fullest stage, with `overhead_bytes`; of the accelerator */
    int64_t overhead_bytes;             /* of it: driver, libraries, fragments, as the profile says */
    int64_t host_bytes;                 /* beside it, in host memory: optimizer state */
    int fullest_stage;
    bool fits;
    qd_sim_line memory[QD_SIM_LINES];   /* of the fullest stage, by kind */
    int memory_count;
    double watts;                      /* of all accelerators; 0: not known */
    double joules_per_step;
    double cost_per_step;              /* 0: no price is given */
    char loss[QD_SIM_LOSSES][160];     /* the largest losses in words */
    int loss_count;
    int64_t actions;                   /* simulated */
    int64_t built;                     /* actions of the stages' programs, simulated or not: how much work the report took */
    double wall_seconds;               /* that the simulation took */
} qd_sim_report;

typedef struct qd_simulation qd_simulation;

/* Simulates the configuration on the cluster, both in `options` (tables of qd_config_table() and
 * qd_cluster_table()). A layout that does not fit is simulated too; `fits` says so. QD_USAGE for
 * what cannot run. */
QD_API qd_status qd_simulate(const qd_options *options, qd_simulation **simulation);
QD_API void qd_simulation_destroy(qd_simulation *simulation); /* NULL is legal */
QD_API const qd_sim_report *qd_simulation_report(const qd_simulation *simulation);
QD_API const qd_sim_stage *qd_simulation_stage(const qd_simulation *simulation, int stage);

/* The report as one JSON object. */
QD_API void qd_simulation_json(const qd_simulation *simulation, qd_strbuf *out);
/* The timeline in Perfetto's format, with the names that the trainer's trace has; one process per
 * stage. */
QD_API qd_status qd_simulation_trace(const qd_simulation *simulation, const char *path);
/* The timeline as lines of characters, one per stage, `width` columns. */
QD_API void qd_simulation_draw(const qd_simulation *simulation, int width, qd_strbuf *out);

/* ---- many sizes ---- */

typedef struct qd_scaling_point {
    int gpus;
    double step_seconds, tokens_per_second, compute_seconds, communication_seconds; /* the last two: of a rank, exposed */
    bool fits, possible;
    char refusal[200]; /* why it is not possible */
} qd_scaling_point;

/* The same layout with more and more data parallelism: gpus from the smallest that the layout
 * allows, doubled up to `most`. strong: the global batch stays, else it grows with the ranks.
 * QD_USAGE when the layout needs more than `most`. */
QD_API qd_status qd_simulate_scaling(const qd_options *options, int most, bool strong, qd_scaling_point *points, int capacity, int *count);

/* ---- against published runs ---- */

typedef struct qd_sim_score {
    char *id, *source;                    /* as in the file */
    char reason[200];                     /* why it was skipped; "" when it was scored */
    bool core, held_out;                  /* held out: kept out of the search for constants */
    double predicted, published, error;   /* tokens per second and GPU; relative error of the step time */
    double predicted_memory, published_memory, memory_error; /* bytes; 0: none published */
    int outcome;                          /* published: 1 out of memory, 0 not */
    bool predicted_oom;
    bool offloads;                        /* a part of its memory is the host's: its memory and outcome are not scored */
} qd_sim_score;

typedef struct qd_sim_scores {
    size_t size;
    qd_sim_score *rows;
    int count, scored, skipped;
    double median, p90;                   /* absolute relative error of scored core rows */
    double median_seen, p90_seen, median_held_out, p90_held_out;
    double memory_median;                 /* of all rows with a memory figure */
    int memory_count;
    double oom_accuracy;                  /* share of rows whose outcome is told right */
    int oom_count;
} qd_sim_scores;
QD_SIZED_DEFAULT(qd_sim_scores)

/* Simulates every row of a file in the format of data/published/runs.json. core_only: the others
 * are skipped. */
QD_API qd_status qd_simulate_published(const char *path, bool core_only, qd_sim_scores *scores);
QD_API void qd_sim_scores_free(qd_sim_scores *scores);

/* ---- replay of measured times ---- */

/* A pipeline whose actions take given times. */
typedef struct qd_replay_report {
    size_t size;
    char schedule[24];
    int ranks, stages, micro_batches;
    double seconds;       /* of the passes: norm and update are not in it */
    double bubble;        /* part of ranks x seconds in which ranks wait */
    double theory;        /* the textbook's, for uniform stages; -1: none known */
    double uneven;        /* how much longer the busiest rank computes than the mean of all */
    int in_flight[64];    /* of the first 64 ranks: most micro-batches whose input is in memory at once */
} qd_replay_report;
QD_SIZED_DEFAULT(qd_replay_report)

/* Replays the forward and backward passes of the configured pipeline through the dependencies of
 * the step programs, transfers taking no time. seconds: per rank of the world and action of its
 * program. */
QD_API qd_status qd_replay_pipeline(const qd_options *options, const double *const *seconds, qd_replay_report *report);

#ifdef __cplusplus
}
#endif
#endif
