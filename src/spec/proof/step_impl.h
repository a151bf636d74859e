/* A program's actions as they are followed: step.c has the actions of passes and parameters,
 * step_gradients.c those of gradients, loss and norm. */
#ifndef QD_SPEC_PROOF_STEP_IMPL_H
#define QD_SPEC_PROOF_STEP_IMPL_H

#include "spec/proof/proof_impl.h"

/* What a buffer of activations holds: the output of a module for a micro-batch. */
typedef struct proof_content {
    int32_t module, microbatch; /* -1: nothing */
    int32_t by;                 /* the action that wrote it */
} proof_content;

/* How far each stream has come, as an action knows it: the last action of the stream that has ended
 * before it begins. */
typedef struct proof_clock {
    int32_t at[QD_STREAM_COUNT];
} proof_clock;

typedef struct proof_run {
    qd_proof *proof;
    proof_program *of;
    const qd_program *program;
    const qd_ledger *ledger;
    const qd_action *action;
    int index;
    proof_content *contents;          /* per buffer */
    proof_memory *memory;             /* per buffer */
    int *packed;                      /* per buffer of parts of parameters: into how many parts they are cut; 0: nothing */
    uint8_t *done;                    /* per module and micro-batch: phases that have run */
    bool *loaded;                     /* per micro-batch */
    int *fresh;                       /* per parameter: the buffer that has all of it, up to date; -1: none */
    int *fresh_by;                    /* and the action that brought it there */
    proof_clock *clocks;              /* per action */
    proof_clock now[QD_STREAM_COUNT]; /* per stream, after its last action */
    int64_t *updated;                 /* per parameter: elements */
    bool *squared;                    /* per module: SQUARES has run */
    bool *summed;                     /* per parameter: an op has summed the squares */
    int *held;                        /* parameters that the rank has and that are not tied, in order */
    int held_count;
    int gathered[QD_FAMILY_COUNT]; /* SQUARES of other ranks */
    qd_group sums[4];              /* groups over which SUMS has been summed */
    int sum_count;
    bool sums_known, norm_known;
    proof_gradient loss;
    int loss_by, norm_by; /* the last action that worked on the loss, and on the squares, sums and norm; -1: none */
    int loss_stages; /* times that the loss has been summed over pp */
    int received;    /* gradients of tied parameters */
    bool copy_fresh; /* values of a tied parameter have come from the stage that updates them */
} proof_run;

qd_status qd_proof_action_fail(const proof_run *r, int param, int fold, int digit, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Refuses an action that does not wait for another one, of another stream, that has touched what it
 * touches. */
qd_status qd_proof_waits(const proof_run *r, int param, const char *what, int by);
/* The same, and from now on it is this action that has. */
qd_status qd_proof_follows(const proof_run *r, const char *what, int *by);
const proof_class *qd_proof_class_of(const proof_run *r, int module);

/* step_gradients.c */
qd_status qd_proof_gradients_alloc(proof_run *r, int buffer);
qd_status qd_proof_gradients_module(proof_run *r); /* what the ops of the action add */
qd_status qd_proof_gradients_action(proof_run *r); /* all other actions that touch gradients, loss or norm */
qd_status qd_proof_gradients_end(proof_run *r);
#endif
