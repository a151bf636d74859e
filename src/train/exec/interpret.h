/* The interpreter: walks the step program and does what it says. There is no other loop over layers
 * or micro-batches. */
#ifndef QD_TRAIN_EXEC_INTERPRET_H
#define QD_TRAIN_EXEC_INTERPRET_H

#include "data/data.h"
#include "nn/nn.h"
#include "optim/optim.h"
#include "parallel/bind.h"
#include "train/exec/trace.h"

typedef struct qd_interpreter qd_interpreter;

/* Where the time of the compute stream goes. Waiting for the communication stream is counted
 * apart. */
typedef struct qd_step_profile {
    qd_op_profile ops;
    double action_seconds[QD_ACTION_KIND_COUNT], wait_seconds;
    int64_t action_calls[QD_ACTION_KIND_COUNT];
} qd_step_profile;

/* What a rank finds when a step is gone through again to see where numbers stop being finite. */
typedef struct qd_nonfinite_finding {
    bool loss;    /* this rank's own, before the sum over ranks */
    int gradient; /* -1, or the first parameter whose gradient is not finite on this rank, before the sum over ranks */
} qd_nonfinite_finding;

typedef struct qd_step_input {
    int64_t step;         /* from 1 */
    int64_t first_sample; /* index in the run of the global batch's first sequence */
    int64_t global_batch;
    int64_t past; /* generation: tokens that are in the cache */
    uint64_t seed;
    const qd_batch_source *source;
    const qd_optim *optim;
    qd_trace *trace;          /* NULL: none */
    qd_step_profile *profile; /* NULL: none */
    double *cpu_seconds;        /* NULL, or per action: what the calling thread spends in those of modules */
    qd_nonfinite_finding *look; /* NULL, or filled in; nothing is updated then */
} qd_step_input;

typedef struct qd_step_output {
    double loss;      /* mean over the counted tokens of the global batch */
    double tokens;    /* counted */
    double grad_norm; /* before clipping */
    double lr;
    bool skipped;          /* the loss or a gradient was not finite: weights and optimizer state are untouched */
    char not_finite[160];  /* what it was */
} qd_step_output;

qd_status qd_interpreter_create(qd_bound *bound, qd_interpreter **interpreter);
/* What this rank has sent to experts of other ranks and back so far; rounds: beyond the planned
 * one; crossed: bytes to other nodes; flat: what flat dispatch would have sent there. */
typedef struct qd_dispatched {
    int64_t bytes, rounds, crossed, flat;
} qd_dispatched;
qd_dispatched qd_interpreter_dispatched(const qd_interpreter *interpreter);

void qd_interpreter_destroy(qd_interpreter *interpreter); /* NULL is legal */

/* Collective over the bound world. Numbers that are not finite are no failure in training: all
 * ranks see them and leave out the update. When it fails, this rank's communicators are aborted and
 * no work is left pending. */
qd_status qd_interpret(qd_interpreter *interpreter, const qd_step_input *input, qd_step_output *output);
#endif
