/* The loss of a trained model on windows of tokens. */
#ifndef QD_APP_EVALUATE_H
#define QD_APP_EVALUATE_H

#include "train/exec/model_run.h"

#include <quadrille/evaluate.h>

/* qd_evaluate() with any model; options->model is not read, and both structs are whole. */
qd_status qd_evaluate_from(const qd_model_source *model, const qd_evaluate_options *options, qd_evaluate_report *report);

typedef struct qd_evaluation {
    double loss;    /* mean, nats per token */
    int64_t tokens; /* predicted */
} qd_evaluation;

typedef struct qd_evaluate_passes {
    int64_t seq, per_pass; /* tokens of a window, windows per pass; 0: see <quadrille/evaluate.h> */
    int64_t micro;         /* windows that a pass computes at once, a divisor of per_pass; 0: all */
    const char *device; /* NULL: cpu */
    int threads;
    bool (*progress)(void *context, int64_t done, int64_t all);
    void *context;
} qd_evaluate_passes;

/* Runs windows 0 .. all-1 of the source through the model. Asks the source for others only where
 * memory is short: it fills those with targets of -1. `run` has been opened; its trainer is created
 * here. */
qd_status qd_evaluate_windows(qd_model_run *run, const qd_batch_source *source, int64_t all,
                              const qd_evaluate_passes *passes, qd_evaluation *result);

/* The same for tokens in memory, which are cut into windows. */
qd_status qd_evaluate_tokens(const char *model, const int32_t *tokens, int64_t count, const qd_evaluate_passes *passes,
                             qd_evaluation *result);
#endif
