/* The loss of a trained model on given tokens. */
#ifndef QD_TRAIN_EVALUATE_H
#define QD_TRAIN_EVALUATE_H

#include <quadrille/status.h>
#include <quadrille/types.h>

typedef struct qd_evaluation {
    double loss;    /* mean, nats per token */
    int64_t tokens; /* predicted */
} qd_evaluation;

/* Cuts the tokens into windows of `seq` (0: as in training), each predicted from the ones before it in its window: every
 * token but the first is counted once. progress (may be NULL) is called with windows done and in all. */
typedef void (*qd_evaluate_progress)(void *context, int64_t done, int64_t all);
qd_status qd_evaluate_tokens(const char *model, const int32_t *tokens, int64_t count, int64_t seq, int threads,
                             qd_evaluate_progress progress, void *context, qd_evaluation *result);
#endif
