/* What a short training run of a small model gave, for comparisons to the bit. */
#ifndef QD_TESTS_SUPPORT_TRAINED_H
#define QD_TESTS_SUPPORT_TRAINED_H

#include "support/layout.h"

typedef struct trained {
    double losses[50], norms[50];
    float *weights; /* all parameters one after another, in ledger order */
    int64_t count;
    int steps;
} trained;

/* Fails the test with the library's message. */
void trained_ok(qd_status status);

/* All parameters of one kind, one after another; free *out. */
void trained_read(qd_team *team, qd_tensor_kind kind, float **out, int64_t *count);

/* Trains on random tokens with ranks as threads; random.vocab is filled in. Free the weights. */
trained trained_run(const char *words, int steps, qd_random_tokens random);

/* Losses, norms and weights, bit by bit. */
void trained_same_bits(const trained *a, const trained *b, const char *what);
#endif
