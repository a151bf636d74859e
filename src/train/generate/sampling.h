/* Sampling: draws the next token from logits. */
#ifndef QD_TRAIN_GENERATE_SAMPLING_H
#define QD_TRAIN_GENERATE_SAMPLING_H

#include <quadrille/status.h>

#include <stdint.h>

typedef struct qd_sampling {
    double temperature; /* 0: always the most likely token */
    int top_k;          /* 0: all */
    double top_p;       /* 1: all */
    uint64_t seed;
} qd_sampling;

typedef struct qd_sampler qd_sampler;

qd_status qd_sampler_create(int64_t vocab, qd_sampler **sampler);
void qd_sampler_destroy(qd_sampler *sampler); /* NULL is legal */

/* Draws a token from finite logits (vocab). A pure function of its arguments: `position`, the index
 * of the token in its sequence, selects the random numbers. */
int32_t qd_sampler_draw(qd_sampler *sampler, const qd_sampling *sampling, const float *logits, int64_t position);
#endif
