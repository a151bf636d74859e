/* Sampling: draws the next token from logits. The order is that of transformers: repetition
 * penalty, temperature, top-k, top-p of what is left, min-p. */
#ifndef QD_TRAIN_GENERATE_SAMPLING_H
#define QD_TRAIN_GENERATE_SAMPLING_H

#include <quadrille/status.h>

#include <stddef.h>
#include <stdint.h>

typedef struct qd_sampling {
    double temperature; /* 0: always the most likely token */
    int top_k;          /* 0: all */
    double top_p;       /* 1: all */
    double min_p;       /* least probability, as a fraction of the highest; 0: all */
    double repetition_penalty; /* divides the positive logits of tokens in the history, multiplies negative ones; 1 or 0: none */
    uint64_t seed, stream; /* stream: the number of the text, for texts that differ with one seed */
} qd_sampling;

typedef struct qd_sampler qd_sampler;

qd_status qd_sampler_create(int64_t vocab, qd_sampler **sampler);
void qd_sampler_destroy(qd_sampler *sampler); /* NULL is legal */

/* Draws a token from finite logits (vocab). A pure function of its arguments. history: all tokens
 * of the sequence so far; their number selects the random numbers. */
int32_t qd_sampler_draw(qd_sampler *sampler, const qd_sampling *sampling, const float *logits, const int32_t *history, size_t count);
#endif
