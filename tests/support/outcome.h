/* The outcome of five steps of a layout, for comparison with one rank: losses, gradient norms, all
 * gradients after the first step, all weights after the fifth. During the run, planned memory is
 * compared with what is allocated, and planned bytes with what the backend counts. */
#ifndef QD_TESTS_SUPPORT_OUTCOME_H
#define QD_TESTS_SUPPORT_OUTCOME_H

#include "support/sample.h"
#include "support/trained.h"

#define OUTCOME_STEPS (QD_TEST_SANITIZED ? 2 : 5)
#define OUTCOME_TOLERANCE 1e-5

typedef struct outcome {
    double losses[OUTCOME_STEPS], norms[OUTCOME_STEPS];
    float *gradients, *weights; /* all parameters, concatenated */
    int64_t count;
    int64_t rounds; /* extra dispatch rounds beyond the planned ones */
} outcome;

/* Called before the first step of every run, unless NULL. */
extern void (*outcome_prepare)(qd_team *team);
/* Declares the modules of the models; NULL: the registry's choice. */
extern const qd_family *outcome_family;

/* Ranks as threads, random tokens; random.vocab is filled in. Fails the test on any error. */
outcome outcome_run(const char *words, qd_random_tokens random);
void outcome_free(outcome *outcome);
/* Within OUTCOME_TOLERANCE; tensors by ‖a−b‖ ≤ tolerance · max(‖b‖, 1e-3 · RMS norm over all
 * tensors). */
void outcome_compare(const char *words, const qd_ledger *ledger, const outcome *a, const outcome *b);
/* Compares each layout, added to the words of `base`, with `base` itself on one rank. */
void outcome_compare_all(const char *base, qd_random_tokens random, const char *const *layouts, size_t count);
/* Makes all tokens choose these experts, in models with router biases. */
void outcome_favour(qd_team *team, const int *experts, int count);
#endif
