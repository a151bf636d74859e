/* Looking at a run before it starts: memory, communication and the program itself. Needs no device
 * and no ranks. */
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
    int64_t bytes;    /* at the moment of the rank's peak */
} qd_check_line;

/* What an axis of model parallelism sends by a closed formula of the shapes, and what the program
 * says. */
typedef struct qd_check_formula {
    char text[160];
    int64_t bytes, planned; /* in one step, all ranks together */
} qd_check_formula;

#define QD_CHECK_FORMULAS 8

/* A rank of the pipeline: what it holds, and how it fares. */
typedef struct qd_check_stage {
    char modules[64];     /* "embed .. block.3", "block.0, block.7" */
    int64_t memory_bytes;  /* of the rank that needs most */
    double flops_per_step; /* all its ranks */
    int in_flight;        /* most pairs (stage, micro-batch) whose activations it keeps at once */
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
    double flops_per_step;     /* all ranks, of the model; what is computed again is not in it */
    double recompute_flops_per_step;
    int64_t comm_bytes;        /* sent by all ranks together in one step */
    qd_check_line traffic[QD_CHECK_TRAFFIC]; /* what they are, by purpose */
    int traffic_count;
    int pipeline;               /* ranks of it; 1: none */
    char schedule[24];
    double bubble;              /* for uniform stages, by replay; bubble_theory: by the textbook, -1: none known */
    double bubble_theory;
    qd_check_stage stages[QD_CHECK_STAGES];
    int stage_count, memory_stage; /* that the figures of memory are of: the one that needs most */
    int64_t pipeline_bytes, pipeline_theory_bytes; /* activations and their gradients between stages: as planned, and 2·b·s·h for each
                                                      boundary and micro-batch */
    int64_t zero_extra_bytes;   /* with a pipeline and zero 2 or 3: what is sent beyond what zero 1 sends */
    char theory[64];      /* "3Ψ(n-1)": what parameters and gradients take by the textbook, Ψ being all parameters */
    int64_t theory_bytes;
    int64_t kept_bytes;   /* less than that: modules that need not be gathered again */
    int64_t padding_bytes; /* more than that: padding between tensors, and short sums that every rank sends to every other */
    qd_check_formula formulas[QD_CHECK_FORMULAS];
    int formula_count;
    int nodes;                 /* that the ranks lie on */
    bool by_node;              /* rows go to the experts of a node once */
    int64_t across_flat_bytes, across_node_bytes; /* to experts on other nodes and back, at an even load: by flat dispatch; by node, 0:
                                                     experts do not lie across nodes so */
    double row_nodes;          /* nodes that a row's experts lie on, on average */
    int64_t state_bytes;       /* per rank: parameters, gradients and optimizer state that stay on the device from step to step */
    int64_t memory_bytes;      /* per rank: what the trainer will allocate */
    int64_t host_bytes;        /* beside that, in host memory: optimizer state that train.offload keeps there */
    qd_check_line host_lines[3]; /* by kind */
    int host_line_count;
    int64_t chunk_bytes;       /* of device memory in which that state passes through, a part at a time; counted in memory_bytes */
    int64_t snapshot_bytes;    /* beside that, in host memory: the copy of a rank's state that checkpoints are written from */
    qd_check_line lines[QD_CHECK_LINES];
    int line_count;
    int action_count;
    int64_t proved_values, proved_ops; /* of the proof of gradients: placements of values, ops that gave them */
} qd_check_report;
QD_SIZED_DEFAULT(qd_check_report)

/* Builds the program of every rank, proves that their communication matches and that together they
 * compute the gradient of the mean loss, and adds up memory. world 0: as in the configuration.
 * QD_USAGE for a configuration that cannot run, QD_MISMATCH for programs that do not match. */
QD_API qd_status qd_check(const qd_options *options, int world, qd_check_report *report);

/* Writes the program of one rank, a line per action. */
QD_API qd_status qd_check_print(const qd_options *options, int world, int rank, FILE *out);

/* Writes the pipeline's schedule: figures and a drawing of letters; lines that
 * parallel.schedule_file reads; or a drawing in SVG. */
typedef enum qd_drawing { QD_DRAWING_TEXT, QD_DRAWING_CSV, QD_DRAWING_SVG } qd_drawing;
QD_API qd_status qd_check_schedule(const qd_options *options, int world, qd_drawing drawing, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
