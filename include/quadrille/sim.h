/* Simulation of a training step on any cluster: step time, where it is spent, and memory. It reads
 * the step program that the trainer executes. Needs no device and no ranks; nothing here is
 * collective. */
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

/* The keys of a cluster file, accelerator.*, node.*, network.*, software.* and cost.*, for
 * qd_options_create(). Static. */
QD_API qd_option_table qd_cluster_table(void);

/* Names of the built-in clusters, NULL-terminated. Static. */
QD_API const char *const *qd_cluster_names(void);

/* Fills the cluster keys of `options` from a built-in cluster or a YAML file. Keys set on the
 * command line stay. QD_USAGE for an unknown name or an invalid file. */
QD_API qd_status qd_cluster_load(qd_options *options, const char *cluster);

/* If model.preset is a model that this version cannot train, replaces it in `options` by the most
 * similar one that it can, and describes that in `note` (else ""). */
QD_API qd_status qd_simulate_nearest(qd_options *options, char *note, size_t size);

typedef struct qd_sim_line {
    const char *name;
    double value; /* seconds, or bytes */
} qd_sim_line;

enum { QD_SIM_LINES = 32, QD_SIM_LOSSES = 3 };

/* One stage of the pipeline; without a pipeline there is one. */
typedef struct qd_sim_stage {
    int64_t memory_bytes;            /* that the trainer allocates */
    double busy_seconds;             /* computing */
    double bubble_seconds;           /* waiting for another stage */
    double exposed_seconds;          /* in collectives that are not overlapped, or waiting for them */
} qd_sim_stage;

typedef struct qd_sim_report {
    char model[64], layout[96], cluster[64], profile[24];
    int gpus, stages;
    int64_t parameters, tokens_per_step, micro_batch, micro_batches, seq, global_batch;
    double step_seconds, tokens_per_second, tokens_per_gpu_second;
    double flops_per_step;             /* of the model, all ranks, attention counted once (causal) */
    double mfu, mfu_causal, hfu;       /* utilization: model FLOPs with full attention, with causal attention; all executed FLOPs */
    double compute_seconds;            /* of the stage that computes longest: GEMMs, attention and the rest */
    double product_seconds, attention_seconds, memory_seconds, optimizer_seconds, launch_seconds; /* parts of compute_seconds */
    double bubble_seconds;             /* mean over stages: waiting for other stages */
    double late_seconds;               /* after the last action: waiting for the slowest rank, and host work between steps */
    qd_sim_line exposed[8];            /* by axis: seconds of communication that is not overlapped, mean over stages */
    int exposed_count;
    qd_sim_line hidden[8];             /* by axis: seconds of communication overlapped with computation */
    int hidden_count;
    int64_t memory_bytes, memory_limit; /* of the stage that needs the most, with overhead_bytes; of the accelerator */
    int64_t overhead_bytes;             /* part of memory_bytes: driver, libraries, fragmentation, from the software profile */
    int64_t host_bytes;                 /* in addition, host memory: optimizer state */
    int fullest_stage;                  /* the stage that needs the most memory */
    bool fits;
    qd_sim_line memory[QD_SIM_LINES];   /* memory_bytes by kind */
    int memory_count;
    double watts;                      /* of all accelerators; 0: unknown */
    double joules_per_step;
    double cost_per_step;              /* 0: no price is set */
    char loss[QD_SIM_LOSSES][160];     /* the largest losses of time, as sentences */
    int loss_count;
    int64_t actions;                   /* simulated */
    int64_t built;                     /* actions of all programs that were built, a measure of the work done */
    double wall_seconds;               /* run time of the simulation */
} qd_sim_report;

/* A simulated step. */
typedef struct qd_simulation qd_simulation;

/* Simulates the configuration on the cluster, both in `options` (tables of qd_config_table() and
 * qd_cluster_table()). The caller owns *simulation. A layout that does not fit is simulated too,
 * with `fits` false. QD_USAGE for a configuration that cannot run. */
QD_API qd_status qd_simulate(const qd_options *options, qd_simulation **simulation);
QD_API void qd_simulation_destroy(qd_simulation *simulation); /* NULL is legal */
/* The report, and its stage 0 .. stages-1; owned by the simulation. */
QD_API const qd_sim_report *qd_simulation_report(const qd_simulation *simulation);
QD_API const qd_sim_stage *qd_simulation_stage(const qd_simulation *simulation, int stage);

/* Appends the report as one JSON object. */
QD_API void qd_simulation_json(const qd_simulation *simulation, qd_strbuf *out);
/* Writes the timeline as a Perfetto trace with the names of the trainer's trace, one process per
 * stage. QD_IO if it cannot be written. */
QD_API qd_status qd_simulation_trace(const qd_simulation *simulation, const char *path);
/* Appends the same trace as text. */
QD_API qd_status qd_simulation_trace_text(const qd_simulation *simulation, qd_strbuf *out);

/* Describes the simulated step for qd_report_write(): figures, memory and, with `timeline`, the
 * timeline. The simulation must outlive *view, which the caller owns. */
typedef struct qd_simulation_view qd_simulation_view;
QD_API qd_status qd_simulation_describe(const qd_simulation *simulation, bool timeline, qd_simulation_view **view);
QD_API const struct qd_report *qd_simulation_view_report(const qd_simulation_view *view);
QD_API void qd_simulation_view_destroy(qd_simulation_view *view); /* NULL is legal */

/* Appends the timeline as a character diagram of `width` columns, one line per stage. */
QD_API void qd_simulation_draw(const qd_simulation *simulation, int width, qd_strbuf *out);

typedef struct qd_scaling_point {
    int gpus;
    double step_seconds, tokens_per_second;
    double compute_seconds, communication_seconds; /* of a rank; communication that is not overlapped */
    bool fits, possible;
    char refusal[200]; /* why it is not possible */
} qd_scaling_point;

/* Simulates the layout with increasing data parallelism: from the fewest GPUs that the layout
 * allows, doubled up to `most`; at most `capacity` points. strong: the global batch stays constant;
 * otherwise it grows with the ranks. QD_USAGE if the layout needs more than `most`. */
QD_API qd_status qd_simulate_scaling(const qd_options *options, int most, bool strong, qd_scaling_point *points, int capacity, int *count);

/* A published run compared with its simulation. */
typedef struct qd_sim_score {
    char *id, *source;                    /* as in the file */
    char reason[200];                     /* why the row was skipped; "" if it was scored */
    bool core, held_out;                  /* held_out: not used to calibrate the constants */
    double predicted, published, error;   /* tokens per second and GPU; relative error of the step time */
    double predicted_memory, published_memory, memory_error; /* bytes; 0: none published */
    int outcome;                          /* published: 1 out of memory, 0 not */
    bool predicted_oom;
    bool offloads;                        /* part of its state is in host memory: memory and outcome are not scored */
} qd_sim_score;

typedef struct qd_sim_scores {
    size_t size;
    qd_sim_score *rows;
    int count, scored, skipped;
    double median, p90;                   /* absolute relative error of scored core rows */
    double median_seen, p90_seen, median_held_out, p90_held_out;
    double memory_median;                 /* of all rows with a memory figure */
    int memory_count;
    double oom_accuracy;                  /* fraction of rows whose outcome is predicted correctly */
    int oom_count;
} qd_sim_scores;
QD_SIZED_DEFAULT(qd_sim_scores)

/* Simulates the rows of a file in the format of data/published/runs.json; core_only: only those
 * marked core. The caller frees `scores`. QD_USAGE for another format. */
QD_API qd_status qd_simulate_published(const char *path, bool core_only, qd_sim_scores *scores);
/* Frees the rows. */
QD_API void qd_sim_scores_free(qd_sim_scores *scores);

/* A pipeline replayed with given action times. */
typedef struct qd_replay_report {
    size_t size;
    char schedule[24];
    int ranks, stages, micro_batches;
    double seconds;       /* of the forward and backward passes, without norm and update */
    double bubble;        /* fraction of ranks x seconds that ranks wait */
    double theory;        /* textbook bubble for uniform stages; -1: none known */
    double uneven;        /* compute time of the busiest rank over the mean, minus 1 */
    int in_flight[64];    /* of the first 64 ranks: most micro-batches whose input is in memory at once */
} qd_replay_report;
QD_SIZED_DEFAULT(qd_replay_report)

/* Replays the forward and backward passes of the configured pipeline along the dependencies of the
 * step programs; transfers take no time. seconds: [rank of the world][action of its program], for
 * example `pass` of qd_bench_measure_actions(). QD_USAGE for a configuration that cannot run. */
QD_API qd_status qd_replay_pipeline(const qd_options *options, const double *const *seconds, qd_replay_report *report);

#ifdef __cplusplus
}
#endif
#endif
