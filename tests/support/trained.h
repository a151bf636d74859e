/* The results of short training runs of small models, for bitwise comparison. */
#ifndef QD_TESTS_SUPPORT_TRAINED_H
#define QD_TESTS_SUPPORT_TRAINED_H

#include "support/layout.h"

typedef struct trained {
    double losses[50], norms[50];
    float *weights; /* all parameters, concatenated in ledger order */
    int64_t count;
    int steps;
} trained;

/* Fails the test with the library's message. */
void trained_ok(qd_status status);

/* Ranks as threads, on random tokens: random->vocab is filled in, and *random must outlive the
 * team. */
qd_team *trained_team(const char *words, qd_random_tokens *random);
void trained_steps(qd_team *team, int count, double *losses); /* losses may be NULL */
/* Rank 0's program; destroy *arena. */
qd_program *trained_program(const char *words, qd_arena **arena);

/* Bytes of rank 0: persistent, and additionally during a step. */
typedef struct trained_bytes {
    int64_t persistent, dynamic;
} trained_bytes;
trained_bytes trained_needs(const qd_config *config);

/* All parameters of one kind, concatenated; free *out. */
void trained_read(qd_team *team, qd_tensor_kind kind, float **out, int64_t *count);

/* Trains on random tokens with ranks as threads; random.vocab is filled in. Free the weights. */
trained trained_run(const char *words, int steps, qd_random_tokens random);

/* One step and its results; free both. */
typedef struct trained_first {
    qd_step_output out;
    float *gradients, *weights;
    int64_t count;
} trained_first;
trained_first trained_step(const qd_config *config, const qd_batch_source *source);

/* Trains under one layout after another, `each` steps with each, resuming from checkpoints in the
 * scratch folder. losses: of all steps. */
void trained_onward(const char *base, const char *const *layouts, size_t count, int each, qd_random_tokens random, double *losses);

/* Asserts that losses, norms and weights are bit-identical. */
void trained_same_bits(const trained *a, const trained *b, const char *what);

/* Asserts that `base` with each variant is bit-identical to `base`; with a sanitizer for a part of
 * the variants and at most `few` steps. */
void trained_compare(const char *base, const char *const *variants, size_t count, int steps, int few, qd_random_tokens random);
#define TRAINED_COMPARE(base, variants, steps, few, ...) \
    trained_compare(base, variants, sizeof(variants) / sizeof *(variants), steps, few, (qd_random_tokens){__VA_ARGS__})

/* Removes each action of rank 0's program that `wanted` selects, one at a time, on all ranks: the
 * run must fail or give a different result. *met counts the selected ones, of which one in `every`
 * is tried with a sanitizer; *tried counts those. */
void trained_actions_matter(const char *words, int steps, bool (*wanted)(const qd_action *action), size_t every, size_t *met, int *tried);

/* For qd_team_call: the newest checkpoint of the scratch folder, which `save` writes. */
qd_status trained_save(qd_trainer *trainer, qd_comm *world, void *argument);
qd_status trained_load(qd_trainer *trainer, qd_comm *world, void *argument);

/* Totals over all ranks. For qd_team_call(team, trained_count, &counts), which fails if a rank has
 * not allocated exactly what it planned. */
typedef struct trained_counts {
    int64_t sent, calls; /* bytes sent so far, and operations, as counted by the backend */
    int64_t planned;     /* bytes of one step according to the programs; each program gives the total of all ranks */
    int64_t uneven;      /* the data-dependent part of these */
    int64_t rows;        /* bytes sent to experts and back so far */
    int64_t rounds;      /* extra dispatch rounds beyond the planned capacity */
} trained_counts;
qd_status trained_count(qd_trainer *trainer, qd_comm *world, void *counts);

/* One step sends the bytes that the program says and, if only actions communicate (neither tp nor
 * cp), in as many calls. */
void trained_plan_equals_run(const char *words);
#endif
