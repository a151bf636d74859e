/* State while the actions of a program are followed: step.c handles passes and parameters,
 * step_gradients.c gradients, loss and norm. */
#ifndef QD_SPEC_PROOF_STEP_IMPL_H
#define QD_SPEC_PROOF_STEP_IMPL_H

#include "spec/program/offload.h"
#include "spec/proof/proof_impl.h"

/* What a buffer of activations holds: the output of a module for a micro-batch. */
typedef struct proof_content {
    int32_t module, microbatch; /* -1: nothing */
    int32_t by;                 /* the action that wrote it */
} proof_content;

/* Progress of each stream as an action knows it: the last action of the stream that is complete
 * before it starts. */
typedef struct proof_clock {
    int32_t at[QD_STREAM_COUNT];
} proof_clock;

/* What a chunk of optimizer state holds. */
typedef struct proof_chunk {
    qd_section sections[QD_STATE_KINDS];
    int count;    /* of sections; 0: it has not been fetched */
    int by;       /* the last action on it; -1: none */
    bool changed; /* since it was fetched or stored */
} proof_chunk;

/* What is known of the direction in which Muon updates a matrix. */
typedef enum proof_direction { NO_DIRECTION, MOMENTUM_DIRECTION, ORTHOGONAL_DIRECTION } proof_direction;

typedef struct proof_run {
    qd_proof *proof;
    proof_program *of;
    const qd_program *program;
    const qd_ledger *ledger;
    const qd_action *action;
    int index;
    proof_content *contents;          /* per buffer */
    proof_memory *memory;             /* per buffer */
    int *packed;                      /* per buffer of parameter parts: the number of parts that parameters are cut into; 0: empty */
    uint8_t *done;                    /* per module and micro-batch: phases that have run */
    bool *loaded;                     /* per micro-batch */
    int *fresh;                       /* per parameter: the buffer that has all of it, up to date; -1: none */
    int *fresh_by;                    /* and the action that wrote it there */
    proof_clock *clocks;              /* per action */
    proof_clock now[QD_STREAM_COUNT]; /* per stream, after its last action */
    int64_t *updated;                 /* per parameter: number of elements updated */
    proof_chunk *chunks;              /* per buffer */
    uint8_t *directions;              /* per parameter: proof_direction */
    bool *squared;                    /* per module: SQUARES has run */
    bool *summed;                     /* per parameter: an op has summed its squares */
    int *held;                        /* untied parameters that the rank holds, in order */
    int held_count;
    int tied;                      /* the parameter that is tied to another one; -1: none */
    int gathered[QD_FAMILY_COUNT]; /* times that SQUARES of other ranks were gathered */
    qd_group sums[4];              /* groups over which SUMS has been reduced */
    int sum_count;
    bool sums_known, norm_known;
    proof_gradient loss;
    int loss_by, norm_by; /* the last action that worked on the loss, and on the squares, sums and norm; -1: none */
    int loss_stages; /* times that the loss has been summed over pp */
    int received;    /* number of received gradients of tied parameters */
    /* step_clip.c: largest scores are 0 before the first pass; complete on all ranks; and the last
     * action that worked on them. */
    bool scores_zero, scores_known;
    int scores_by;
    int64_t *clipped; /* per parameter: elements rescaled */
    bool copy_fresh; /* the copy of a tied parameter was received from the stage that updates it */
} proof_run;

qd_status qd_proof_action_fail(const proof_run *r, int param, int fold, int digit, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Fails if the action does not wait for action `by` of another stream, which accesses the same
 * data. */
qd_status qd_proof_waits(const proof_run *r, int param, const char *what, int by);
/* The same, and from now on it is this action that has. */
qd_status qd_proof_follows(const proof_run *r, const char *what, int *by);
const proof_class *qd_proof_class_of(const proof_run *r, int module);

/* step_gradients.c */
qd_status qd_proof_gradients_alloc(proof_run *r, int buffer);
qd_status qd_proof_gradients_module(proof_run *r); /* adds what the ops of the action write */
qd_status qd_proof_gradients_action(proof_run *r); /* all other actions on gradients, loss or norm */
qd_status qd_proof_gradients_end(proof_run *r);

/* Number of elements of a parameter that an update covers: all that this rank owns, or those of its
 * chunk; *from: the first of them. */
int64_t qd_proof_covered(const proof_run *r, int param, int64_t *from);
/* step_clip.c: actions on the largest scores of heads, and the end of the step. */
qd_status qd_proof_clip_action(proof_run *r);
qd_status qd_proof_clip_end(const proof_run *r);
/* step_offload.c: chunks of optimizer state; of all actions, before what else is followed. */
qd_status qd_proof_chunk_action(proof_run *r);
qd_status qd_proof_chunk_end(const proof_run *r);
#endif
