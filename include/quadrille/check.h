/* Checks a run before it starts: memory, communication and the step program. Needs no device and no
 * ranks; nothing here is collective. */
#ifndef QUADRILLE_CHECK_H
#define QUADRILLE_CHECK_H

#include <quadrille/export.h>
#include <quadrille/options.h>
#include <quadrille/sized.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_check_line {
    const char *name; /* "parameters", "gradients", … */
    int64_t bytes;    /* at the rank's memory peak */
} qd_check_line;

/* Traffic of an axis of model parallelism: by a closed formula of the shapes, and as planned in the
 * program. */
typedef struct qd_check_formula {
    char text[160];
    int64_t bytes, planned; /* per step, sum over ranks */
} qd_check_formula;

#define QD_CHECK_FORMULAS 8

/* One rank of the pipeline: its modules, memory and work. */
typedef struct qd_check_stage {
    char modules[64];     /* "embed .. block.3", "block.0, block.7" */
    int64_t memory_bytes;  /* of the rank that needs the most */
    double flops_per_step; /* sum over its ranks */
    int in_flight;        /* most pairs (stage, micro-batch) whose activations it holds at once */
} qd_check_stage;

#define QD_CHECK_STAGES 64
#define QD_CHECK_LINES 32
#define QD_CHECK_TRAFFIC 32
typedef struct qd_check_report {
    size_t size;
    char model[64], layout[128]; /* "dp 4", "pp 2 × dp 2" */
    int world;
    int64_t parameters, tokens_per_step;
    int64_t micro_batch, micro_batches, seq, global_batch;
    double flops_per_step;     /* of the model, all ranks, without recompute */
    double recompute_flops_per_step;
    int64_t comm_bytes;        /* sent per step, sum over ranks */
    qd_check_line traffic[QD_CHECK_TRAFFIC]; /* comm_bytes by purpose */
    int traffic_count;
    int pipeline;               /* pipeline ranks; 1: no pipeline */
    char schedule[24];
    double bubble;              /* for uniform stages, by replay */
    double bubble_theory;       /* for uniform stages, by the textbook formula; -1: none known */
    qd_check_stage stages[QD_CHECK_STAGES];
    int stage_count, memory_stage; /* memory_stage: the stage that needs the most memory, which the memory figures describe */
    int64_t pipeline_bytes, pipeline_theory_bytes; /* activations and their gradients between stages: as planned, and 2·b·s·h
                                                      for each boundary and micro-batch */
    int64_t zero_extra_bytes;   /* with a pipeline and zero 2 or 3: bytes sent in addition to those of zero 1 */
    char theory[64];      /* "3Ψ(n-1)": textbook traffic of parameters and gradients; Ψ is all parameters */
    int64_t theory_bytes;
    int64_t kept_bytes;   /* less than theory_bytes: modules that are not gathered a second time */
    int64_t padding_bytes; /* more than theory_bytes: padding between tensors, and short sums sent all-to-all */
    qd_check_formula formulas[QD_CHECK_FORMULAS];
    int formula_count;
    int nodes;                 /* on which the ranks are placed */
    bool by_node;              /* hierarchical dispatch: a row is sent once to each node that has experts for it */
    int64_t across_flat_bytes, across_node_bytes; /* to experts on other nodes and back, at an even load: with flat dispatch, and with
                                                     dispatch by node (0: the placement of experts does not allow it) */
    double row_nodes;          /* average number of nodes that hold a row's experts */
    int64_t state_bytes;       /* per rank: parameters, gradients and optimizer state that stay on the device between steps */
    int64_t memory_bytes;      /* per rank: device memory that the trainer will allocate */
    int64_t host_bytes;        /* in addition, host memory: optimizer state offloaded by train.offload */
    qd_check_line host_lines[3]; /* host_bytes by kind */
    int host_line_count;
    int64_t chunk_bytes;       /* device buffer through which that state is streamed in chunks; included in memory_bytes */
    int64_t snapshot_bytes;    /* in addition, host memory: the snapshot of a rank's state that checkpoints are written from */
    qd_check_line lines[QD_CHECK_LINES];
    int line_count;
    int action_count;
    int64_t proved_values, proved_ops; /* gradient proof: values whose placement is proved, and the ops that compute them */
    int64_t evaluation_bytes; /* with train.eval_every: activations of an evaluation, which runs between steps and reuses the
                                 memory of a step; memory_bytes includes what it needs beyond that */
} qd_check_report;
QD_SIZED_DEFAULT(qd_check_report)

/* Builds the program of every rank, proves that their communication matches and that together they
 * compute the gradient of the mean loss, and adds up memory. world: number of ranks; 0: as
 * configured. QD_USAGE for a configuration that cannot run, QD_MISMATCH if programs do not
 * match. */
QD_API qd_status qd_check(const qd_options *options, int world, qd_check_report *report);

/* Writes the program of one rank to `out`, one line per action. QD_USAGE for a configuration that
 * cannot run or a rank that does not exist. */
QD_API qd_status qd_check_print(const qd_options *options, int world, int rank, FILE *out);

/* TEXT: figures and a character diagram; CSV: the format of parallel.schedule_file; SVG: a
 * diagram. */
typedef enum qd_drawing { QD_DRAWING_TEXT, QD_DRAWING_CSV, QD_DRAWING_SVG } qd_drawing;
/* Writes the schedule of the pipeline to `out`. QD_USAGE for a configuration that cannot run. */
QD_API qd_status qd_check_schedule(const qd_options *options, int world, qd_drawing drawing, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
