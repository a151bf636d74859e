/* What a layout gives in five steps, for comparisons with one rank: losses, gradient norms, all
 * gradients after the first step, all weights after the fifth. While it runs, planned memory is
 * compared with what is allocated, and planned bytes with what the backend counts. */
#ifndef QD_TESTS_SUPPORT_OUTCOME_H
#define QD_TESTS_SUPPORT_OUTCOME_H

#include "support/sample.h"
#include "support/trained.h"

#define OUTCOME_STEPS (QD_TEST_SANITIZED ? 2 : 5)
#define OUTCOME_TOLERANCE 1e-5

typedef struct outcome {
    double losses[OUTCOME_STEPS], norms[OUTCOME_STEPS];
    float *gradients, *weights; /* all parameters one after another */
    int64_t count;
    int64_t rounds; /* of exchanges with experts, beyond the planned ones */
} outcome;

/* Called before the first step of every run, if it is not NULL. */
extern void (*outcome_prepare)(qd_team *team);
/* What declares the modules of the models; NULL: the registry's choice. */
extern const qd_family *outcome_family;

/* Ranks as threads, random tokens; random.vocab is filled in. Fails the test when something
 * does. */
outcome outcome_run(const char *words, qd_random_tokens random);
void outcome_free(outcome *outcome);
/* Within OUTCOME_TOLERANCE; tensors by ‖a−b‖ ≤ tolerance · max(‖b‖, 1e-3 · RMS norm over all
 * tensors). */
void outcome_compare(const char *words, const qd_ledger *ledger, const outcome *a, const outcome *b);
/* Each layout, added to the words of `base`, against `base` itself on one rank. */
void outcome_compare_all(const char *base, qd_random_tokens random, const char *const *layouts, size_t count);
/* All tokens choose these experts, in models with router biases. */
void outcome_favour(qd_team *team, const int *experts, int count);
#endif
