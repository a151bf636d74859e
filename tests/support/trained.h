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

/* Ranks as threads, on random tokens: random->vocab is filled in, and *random outlives the team. */
qd_team *trained_team(const char *words, qd_random_tokens *random);
void trained_steps(qd_team *team, int count, double *losses); /* losses may be NULL */
/* Rank 0's program; destroy *arena. */
qd_program *trained_program(const char *words, qd_arena **arena);

/* Bytes of rank 0: what stays from step to step, and what a step takes on top of it. */
typedef struct trained_bytes {
    int64_t persistent, dynamic;
} trained_bytes;
trained_bytes trained_needs(const qd_config *config);

/* All parameters of one kind, one after another; free *out. */
void trained_read(qd_team *team, qd_tensor_kind kind, float **out, int64_t *count);

/* Trains on random tokens with ranks as threads; random.vocab is filled in. Free the weights. */
trained trained_run(const char *words, int steps, qd_random_tokens random);

/* One step, and what it leaves; free both. */
typedef struct trained_first {
    qd_step_output out;
    float *gradients, *weights;
    int64_t count;
} trained_first;
trained_first trained_step(const qd_config *config, const qd_batch_source *source);

/* Trains under one layout after another, `each` steps with each, and goes on from checkpoints in
 * the scratch folder. losses: of all steps. */
void trained_onward(const char *base, const char *const *layouts, size_t count, int each, qd_random_tokens random, double *losses);

/* Losses, norms and weights, bit by bit. */
void trained_same_bits(const trained *a, const trained *b, const char *what);

/* The bits of `base` with each variant against those without; with a sanitizer a part of the
 * variants and at most `few` steps. */
void trained_compare(const char *base, const char *const *variants, size_t count, int steps, int few, qd_random_tokens random);
#define TRAINED_COMPARE(base, variants, steps, few, ...) \
    trained_compare(base, variants, sizeof(variants) / sizeof *(variants), steps, few, (qd_random_tokens){__VA_ARGS__})

/* Leaves out one action after another of rank 0's program, on all ranks, out of those that `wanted`
 * picks: the run must fail or end with other bits. *met counts those, of which one in `every` is
 * tried with a sanitizer; *tried those. */
void trained_actions_matter(const char *words, int steps, bool (*wanted)(const qd_action *action), size_t every, size_t *met, int *tried);

/* For qd_team_call: the newest checkpoint of the scratch folder, into which `save` writes. */
qd_status trained_save(qd_trainer *trainer, qd_comm *world, void *argument);
qd_status trained_load(qd_trainer *trainer, qd_comm *world, void *argument);

/* Numbers of all ranks together. For qd_team_call(team, trained_count, &counts), which fails where
 * a rank has allocated anything else than it planned. */
typedef struct trained_counts {
    int64_t sent, calls; /* bytes that ranks took from each other so far, in how many operations, as the backend counts */
    int64_t planned;     /* bytes that the programs say of one step; every rank's program tells those of all ranks */
    int64_t uneven;      /* of these, what depends on the data */
    int64_t rows;        /* bytes sent to experts and back so far */
    int64_t rounds;      /* how often that took more than the planned room */
} trained_counts;
qd_status trained_count(qd_trainer *trainer, qd_comm *world, void *counts);

/* One step sends the bytes that the program says and, where only actions communicate and not
 * modules too (tp), in as many calls. */
void trained_plan_equals_run(const char *words);
#endif
