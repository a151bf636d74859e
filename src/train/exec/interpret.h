/* The interpreter: executes the step program, one function per kind of action. There is no other
 * loop over layers or micro-batches. */
#ifndef QD_TRAIN_EXEC_INTERPRET_H
#define QD_TRAIN_EXEC_INTERPRET_H

#include "data/data.h"
#include "nn/nn.h"
#include "optim/optim.h"
#include "parallel/bind.h"
#include "train/exec/trace.h"

typedef struct qd_interpreter qd_interpreter;

/* Time of the compute stream by kind. Waiting for the communication stream is counted
 * separately. */
typedef struct qd_step_profile {
    qd_op_profile ops;
    double action_seconds[QD_ACTION_KIND_COUNT], wait_seconds;
    int64_t action_calls[QD_ACTION_KIND_COUNT];
} qd_step_profile;

/* What a rank finds when a step is repeated to locate the source of non-finite numbers. */
typedef struct qd_nonfinite_finding {
    bool loss;    /* this rank's own, before the sum over ranks */
    int gradient; /* first parameter whose gradient is not finite on this rank, before the sum over ranks; -1: none */
} qd_nonfinite_finding;

/* Hashes of what a rank contributes to sums (faults/contribution.h), of a step that is executed
 * twice: by action. */
typedef struct qd_gradient_check {
    uint64_t *hashes;
    bool second; /* the first time nothing is updated */
    int first;   /* the first action whose hash differs the second time; -1: none */
} qd_gradient_check;

/* What a step may have, to be applied; 0: anything. */
typedef struct qd_step_limits {
    double norm, loss;
} qd_step_limits;

typedef struct qd_step_input {
    int64_t step;         /* from 1 */
    int64_t first_sample; /* index in the run of the global batch's first sequence */
    int64_t global_batch;
    int64_t past; /* generation: number of tokens in the KV cache */
    uint64_t seed;
    const qd_batch_source *source;
    const qd_optim *optim;
    qd_step_limits limits;
    qd_trace *trace;          /* NULL: none */
    qd_step_profile *profile; /* NULL: none */
    double *cpu_seconds;        /* NULL, or (actions): CPU time of the calling thread in the actions of modules */
    qd_nonfinite_finding *look; /* NULL, or filled in; then nothing is updated */
    qd_gradient_check *check;   /* NULL, or filled in */
} qd_step_input;

typedef struct qd_step_output {
    double loss;      /* mean over the counted tokens of the global batch, or over its pairs */
    double mtp_loss;  /* mean over the modules that predict further tokens, each normalized by the same tokens; 0: there are none */
    double tokens;    /* counted; with pairs: pairs */
    /* With pairs, means over them: reward margin, reward of the chosen completion, how many margins
     * are positive. A reward is beta times the log-probability ratio. */
    double margin, chosen_reward, accuracy;
    double grad_norm; /* before clipping */
    double lr;
    double max_score; /* with train.qk_clip: the largest attention score, before the update; 0: not known */
    bool skipped;          /* the loss or a gradient was not finite, or above a limit: weights and optimizer state are unchanged */
    bool spike;            /* it was above a limit */
    char not_finite[160];  /* a description; "": everything is finite */
    char different[160];   /* ranks whose gradients differed when they were computed twice; "": none, or computed once */
    bool torn; /* after a failure: the updates had begun, so the state is that of no step. Nothing else is set then */
} qd_step_output;

/* load_input.c: what LOAD copies to the device. Elements of the buffer for whole sequences, from
 * which a rank of cp selects its rows; */
int64_t qd_input_whole(const qd_program *program);
/* fills `host` (qd_program_input elements) with the micro-batch of samples from `first` on. */
qd_status qd_input_fill(const qd_program *program, const qd_batch_source *source, int64_t first, int32_t *whole, int32_t *host);

qd_status qd_interpreter_create(qd_bound *bound, qd_interpreter **interpreter);
/* Expert dispatch of this rank so far: bytes sent to experts of other ranks and back; rounds beyond
 * the planned one; crossed: bytes to other nodes; flat: what flat dispatch would have sent
 * there. */
typedef struct qd_dispatched {
    int64_t bytes, rounds, crossed, flat;
} qd_dispatched;
qd_dispatched qd_interpreter_dispatched(const qd_interpreter *interpreter);

void qd_interpreter_destroy(qd_interpreter *interpreter); /* NULL is legal */

/* Collective over the bound world. In training, non-finite numbers are not an error: all ranks see
 * them and skip the update. On failure this rank's communicators are aborted and no work is
 * pending. */
qd_status qd_interpret(qd_interpreter *interpreter, const qd_step_input *input, qd_step_output *output);
#endif
