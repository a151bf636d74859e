/* The step program while it is written. */
#ifndef QD_SPEC_PROGRAM_IMPL_H
#define QD_SPEC_PROGRAM_IMPL_H

#include "spec/program.h"

/* One piece of the step in the order of execution: a module's forward or backward pass for a micro-batch. */
typedef struct qd_step_item {
    bool backward;
    int32_t module, microbatch;
} qd_step_item;

/* A module's parameters, as seen by the step: where they are now. */
typedef struct qd_unit {
    int buffer;    /* zero 3: that holds them, -1: they are not here */
    bool gathered; /* zero 1, 2: in this step */
    int pending;   /* GATHER that must have ended before they are read, -1: none */
    int packed;    /* what that gather sends, to be freed after it; -1: nothing */
    bool is_kept;  /* the next gather is among the ranks of a smaller group, */
    int kept;      /* from this rank's part, -1: it has no row of it */
    int uses_left;
    int in_window; /* number of the item whose window it was last found in */
} qd_unit;

/* Gradients that are reduced together: those of modules low .. high. */
typedef struct qd_grad_block {
    int low, high;
    int buffer; /* where they are collected, -1: in GRAD, or not allocated */
    int pending, pending_count; /* its latest reductions */
    bool reducing;              /* the buffer waits for them */
} qd_grad_block;

/* A reduction under way, and what follows it. */
typedef struct qd_pending {
    int action;       /* the last one: REDUCE or REDUCE_SCATTER */
    int low;          /* lowest module whose gradients it carries */
    int param, params;
    int64_t first, count; /* of the result: elements of a whole or sharded buffer */
    int part;         /* where the result is, if neither GRAD nor the block; -1 */
    bool replicas;    /* still to be summed over the replicas */
    int block;        /* that may be freed after it, -1: none */
} qd_pending;

typedef struct qd_builder {
    qd_program *p;
    const qd_ledger *ledger;
    const qd_strategy *strategy;
    int modules, action_capacity, buffer_capacity, dep_capacity, pending_capacity;
    int *port, *port_grad, *stash_i, *stash_w, *mid; /* buffer of each module (port: behind it) in this micro-batch */
    int input;
    int data_group, shard_group, replica_group, kept_group; /* -1: one rank */
    bool blocks;          /* gradients are collected in buffers of their own until they are reduced */
    int tied_grad;        /* buffer of the tied gradient, -1: not allocated */
    int last_gradient;    /* last action that wrote gradients */
    qd_step_item *items;
    int item_count;
    qd_unit *units;        /* per module */
    int *window;           /* modules that are needed next, */
    int window_count, window_item; /* from this item on */
    int *block_of;         /* per module */
    qd_grad_block *grads;  /* from the last module to the first */
    int block_count;
    qd_pending *pending;   /* in the order of their start */
    int pending_count, pending_done;
    bool no_memory;
} qd_builder;

/* build.c: the growing lists. When memory is out, no_memory is set and the build fails as a whole. */
void *qd_build_grow(qd_builder *b, void *array, int count, int *capacity, size_t size);
int qd_build_buffer(qd_builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes, bool persistent);
qd_action *qd_build_action(qd_builder *b, qd_action_kind kind, int module, int microbatch);
void qd_build_dep(qd_builder *b, int on); /* the newest action waits for `on`; -1: nothing */
int qd_build_alloc(qd_builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes); /* -1 for 0 bytes */
void qd_build_free(qd_builder *b, int *buffer); /* if there is one; a second call does nothing */
void qd_build_zero(qd_builder *b, int buffer, qd_dtype dtype); /* -1: nothing */
int qd_build_group(qd_builder *b, qd_group group); /* index; -1 for one rank */
int qd_build_last_compute(const qd_builder *b);    /* last action that computes; -1: none */
/* REDUCE, REDUCE_SCATTER or GATHER of `count` elements, on a stream of its own if the strategy overlaps; it then starts when
 * action `after` has ended. */
qd_action *qd_build_collective(qd_builder *b, qd_action_kind kind, int module, int group, int64_t count, qd_dtype dtype, int after);

/* units.c: parameters that are gathered. */
qd_status qd_units_create(qd_builder *b, qd_arena *arena);
void qd_units_before(qd_builder *b, int item); /* gathers what it and the items after it need */
void qd_units_wait(qd_builder *b, int item);   /* the newest action reads them */
void qd_units_after(qd_builder *b, int item);  /* gives back what is not needed soon */
void qd_units_uses(const qd_builder *b, int module, int32_t *use); /* buffers of parameters */

/* gradients.c: where gradients are collected, how they are reduced, and what becomes of them. */
qd_status qd_gradients_create(qd_builder *b, qd_arena *arena);
void qd_gradients_begin(qd_builder *b);                          /* of the step */
void qd_gradients_before(qd_builder *b, int item);               /* a place for what the item writes */
void qd_gradients_after(qd_builder *b, int item);
void qd_gradients_finish(qd_builder *b);                         /* norm and update */
void qd_gradients_uses(const qd_builder *b, int module, int32_t *use);
int64_t qd_gradients_storage(const qd_builder *b, bool *sharded); /* elements of GRAD; 0: none */
#endif
