/* The step program while it is written. */
#ifndef QD_SPEC_PROGRAM_PROGRAM_IMPL_H
#define QD_SPEC_PROGRAM_PROGRAM_IMPL_H

#include "spec/program/program.h"

/* One piece of the step in the order of execution: a pass of a module for a micro-batch. */
typedef struct qd_step_item {
    uint8_t pass; /* qd_pass */
    int32_t module, microbatch;
} qd_step_item;

/* The phases of the op lists that a pass runs: bits 1 << qd_phase. */
static inline unsigned qd_pass_phases(qd_pass pass)
{
    static const unsigned phases[QD_PASS_COUNT] = {1u << QD_PHASE_FORWARD, 1u << QD_PHASE_INPUT | 1u << QD_PHASE_WEIGHT,
                                                   1u << QD_PHASE_INPUT, 1u << QD_PHASE_WEIGHT};
    return phases[pass];
}

/* Buffers of a module for a micro-batch that is in flight; -1: none. */
typedef struct qd_flight {
    int port, port_grad; /* behind the module */
    int stash_i, stash_w, mid;
    int arrives, grad_arrives; /* RECV of port and port_grad that their first reader waits for */
} qd_flight;

typedef struct qd_transfers qd_transfers;

/* Modules whose parameters a pass of a module reads. */
typedef struct qd_pass_units {
    int unit[2];
    int8_t count;
    bool found; /* false: nobody has asked yet */
} qd_pass_units;

/* A module's parameters, as seen by the step: where they are now. */
typedef struct qd_unit {
    int buffer;    /* zero 3: that holds them, -1: they are not here */
    bool gathered; /* zero 1, 2: in this step */
    int pending[QD_FAMILY_COUNT]; /* GATHERs that must have ended before they are read, -1: none */
    int packed[QD_FAMILY_COUNT];  /* what those send, to be freed after them; -1: nothing */
    bool is_kept;  /* the next gather is among the ranks of a smaller group, */
    int kept[QD_FAMILY_COUNT]; /* from this rank's part, -1: it has no row of it */
    int uses_left;
    int cast;       /* the buffer for scales and copies of its weights in fp8, -1: none */
    bool is_cast;   /* it has them */
    int casts_left; /* items that may read them */
    int in_window; /* number of the item whose window it was last found in */
    qd_pass_units read[QD_PASS_COUNT]; /* by its own passes */
    int tied;      /* one of its parameters that is tied to another module's, -1: none */
    bool untied;   /* it has others */
} qd_unit;

/* Gradients that are reduced together: those of modules low .. high, of one stage. */
typedef struct qd_grad_block {
    int low, high;
    bool reduced; /* once at least */
} qd_grad_block;

/* What a block collects between two of its reductions: the gradients of the step, or of one
 * micro-batch of those in flight. */
typedef struct qd_grad_slot {
    int buffer; /* where they are collected, -1: in GRAD, or not allocated */
    int done;   /* modules whose gradients are complete */
    int pending, pending_count; /* its latest reductions */
    bool reducing;              /* the buffer waits for them */
} qd_grad_slot;

/* A reduction under way, and what follows it. */
typedef struct qd_pending {
    int action;       /* the last one: REDUCE or REDUCE_SCATTER */
    int low;          /* lowest module whose gradients it carries */
    int param, params;
    int64_t first, count; /* of the result: elements of a whole or sharded buffer */
    int from;         /* where the gradients were collected */
    int part;         /* where the result is, if neither GRAD nor the block; -1 */
    bool overwrite;   /* nothing is in GRAD that the result would be added to */
    bool replicas;    /* still to be summed over the replicas */
    int slot;         /* whose buffer may be freed after it, -1: none */
} qd_pending;

/* The groups that the step communicates in, as indices of qd_program.groups; -1: one rank. Arrays
 * are per family of parameters. */
typedef struct qd_build_groups {
    int data[QD_FAMILY_COUNT], shard[QD_FAMILY_COUNT], replica[QD_FAMILY_COUNT];
    /* Groups that keep gathered parameters between the passes, in this many parts; 0: none. */
    int kept[QD_FAMILY_COUNT], kept_parts[QD_FAMILY_COUNT];
    int data_axes, shard_axes; /* of parameters that are not experts' */
    int pipeline;
} qd_build_groups;

/* The order of the step: turns of the schedule on this rank, each a run of items. */
typedef struct qd_build_order {
    const qd_schedule *schedule;
    int stage_rank;   /* this rank's coordinate on pp */
    bool asked_split; /* by parallel.split_backward, not by the schedule */
    qd_step_item *items;
    int item_count;
    int *turn_begin; /* first item of each turn, and one past the last */
    int turn_count;
} qd_build_order;

/* Activations in flight. */
typedef struct qd_build_flights {
    int depth;               /* micro-batches that can be in flight at once */
    qd_flight *modules;      /* modules × depth */
    int *input, *input_left; /* per micro-batch in flight: buffer, and items still to come */
} qd_build_flights;

/* gradients.c: gradients on their way to the norm and the update. */
typedef struct qd_build_gradients {
    bool in_blocks;    /* collected in buffers of their own until they are reduced */
    bool *overwritten; /* per parameter: an op overwrites its gradient; others are zeroed first */
    uint8_t *phases;   /* per module and slot of a block: phases whose gradients have been written */
    int *tied;         /* per slot of a block: buffer of the tied gradient, -1: not allocated */
    int *tied_arrives; /* per slot: RECV of the tied gradient */
    int last_action;   /* that wrote gradients */
    int *block_of;     /* per module */
    qd_grad_block *blocks; /* from the last module to the first */
    int block_count;
    qd_grad_slot *slots; /* block_count × depth */
    int depth; /* 1, or with a reduction after each micro-batch as many as are in flight */
    qd_pending *pending; /* in the order of their start */
    int pending_count, pending_done, pending_capacity;
} qd_build_gradients;

/* units.c: parameters that are gathered before use. */
typedef struct qd_build_gathers {
    qd_unit *units; /* per module */
    int *window;    /* modules that are needed next, from item window_item on */
    int window_count, window_item;
} qd_build_gathers;

typedef struct qd_builder {
    qd_program *p;
    const qd_ledger *ledger;
    const qd_strategy *strategy;
    int modules;
    struct {
        int actions, buffers, deps;
    } capacity; /* of the growing lists (build.c) */
    qd_build_groups group;
    qd_build_order order;
    qd_build_flights flight;
    qd_build_gradients grad;
    qd_build_gathers gather;
    qd_transfers *transfers;    /* NULL: no pipeline */
    struct qd_muon *muon;       /* NULL: another optimizer */
    struct qd_offload *offload; /* NULL: the optimizer's state is in device memory */
    bool no_memory;
} qd_builder;

static inline qd_flight *qd_flight_of(const qd_builder *b, int module, int microbatch)
{
    return &b->flight.modules[(size_t)module * (size_t)b->flight.depth + (size_t)(microbatch % b->flight.depth)];
}

static inline bool qd_build_holds(const qd_builder *b, int module)
{
    return b->ledger->modules[module].stage_rank == b->order.stage_rank;
}

/* build.c: the growing lists. When memory is out, no_memory is set and the build fails as a
 * whole. */
void *qd_build_grow(qd_builder *b, void *array, int count, int *capacity, size_t size);
int qd_build_buffer(qd_builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes, bool persistent);
qd_action *qd_build_action(qd_builder *b, qd_action_kind kind, int module, int microbatch);
void qd_build_dep(qd_builder *b, int on); /* the newest action waits for `on`; -1: nothing */
void qd_build_wait(qd_builder *b, int *on);  /* the same, once */
int qd_build_alloc(qd_builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes); /* -1 for 0 bytes */
void qd_build_free(qd_builder *b, int *buffer); /* if there is one; a second call does nothing */
void qd_build_zero(qd_builder *b, int buffer, int64_t first, int64_t count, qd_dtype dtype);
int qd_build_group(qd_builder *b, qd_group group); /* index; -1 for one rank */
/* Where the elements of a module begin in buffers of all gradients. Tied parameters are not among
 * them, and a module may have no others. */
int64_t qd_build_module_first(const qd_builder *b, int module);
int64_t qd_build_module_values(const qd_builder *b, int module); /* the same in buffers of values; `modules`: their end */
int qd_build_last_compute(const qd_builder *b);    /* last action that computes; -1: none */
/* REDUCE, REDUCE_SCATTER or GATHER of `count` elements, on a stream of its own if the strategy
 * overlaps; it then starts when action `after` has ended. */
qd_action *qd_build_collective(qd_builder *b, qd_action_kind kind, int module, int group, int64_t count, qd_dtype dtype, int after);

/* moe.c: what cannot be done with experts, or with norms of queries and keys, is refused. */
qd_status qd_moe_check(const qd_model *model, const qd_strategy *strategy);

int64_t qd_build_port_bytes(const qd_builder *b);  /* of what passes between two modules, on this rank */

/* transfers.c: what passes between the ranks of a pipeline. Turns are this rank's. */
qd_status qd_transfers_create(qd_builder *b, qd_arena *arena);
void qd_transfers_before(qd_builder *b, int turn);
void qd_transfers_after(qd_builder *b, int turn);
void qd_transfers_finish(qd_builder *b);
void qd_transfers_values(qd_builder *b); /* of tied parameters, after the update */
/* SEND or RECV of elements of a buffer, to or from a rank of the pipeline. */
qd_action *qd_transfers_action(qd_builder *b, qd_action_kind kind, int module, int microbatch, int peer, int buffer, int64_t first,
                               int64_t count, qd_dtype dtype);

/* units.c: parameters that are gathered, and cast once per step. */
qd_status qd_units_casts(const qd_strategy *strategy, qd_fp8_once *once); /* whether they are (fp8.weights) */
qd_status qd_units_create(qd_builder *b, qd_arena *arena);
void qd_units_before(qd_builder *b, int item); /* gathers what it and the items after it need */
void qd_units_wait(qd_builder *b, int item);   /* the newest action reads them */
void qd_units_after(qd_builder *b, int item);  /* frees what is not needed soon */
void qd_units_uses(const qd_builder *b, int module, int32_t *use); /* buffers of parameters and of their copies */

/* gradients.c: where gradients are collected, how they are reduced, and what becomes of them. */
qd_status qd_gradients_create(qd_builder *b, qd_arena *arena);
void qd_gradients_begin(qd_builder *b);                          /* of the step */
void qd_gradients_before(qd_builder *b, int item);               /* a place for what the item writes */
void qd_gradients_after(qd_builder *b, int item);
void qd_gradients_finish(qd_builder *b);                         /* norm and update */
void qd_gradients_uses(const qd_builder *b, int module, int microbatch, int32_t *use);
/* Whether an action that runs these phases of a module is the first to do so with its gradients
 * there, and has some to overwrite. Each action asks once. */
bool qd_gradients_first(qd_builder *b, int module, int microbatch, unsigned phases);
bool qd_gradients_sums(const qd_builder *b); /* the norm's sums of each parameter come from several ranks of tp or pp */
int64_t qd_gradients_storage(const qd_builder *b, bool *sharded); /* elements of GRAD; 0: none */

/* muon.c: matrices and who orthogonalizes them. All but the first do nothing for other
 * optimizers. */
qd_status qd_muon_create(qd_builder *b, qd_arena *arena, int64_t *moment2); /* *moment2: elements of MOMENT2 */
void qd_muon_begin(qd_builder *b);  /* after the norm: work that can overlap with it */
void qd_muon_finish(qd_builder *b);

/* clip.c: attention scores and their limit. All but the first do nothing without train.qk_clip. */
qd_status qd_clip_check(const qd_model *model, const qd_strategy *strategy); /* what has no such limit is refused */
void qd_clip_begin(qd_builder *b);    /* scores of this step */
void qd_clip_exchange(qd_builder *b); /* before the norm, whose figures the host reads together with the scores */
/* After the update of elements [first, first + count) of state, which a chunk on the device has:
 * rescales the master weights among them. */
void qd_clip_chunk(qd_builder *b, int buffer, unsigned states, int64_t first, int64_t count, int module);
void qd_clip_finish(qd_builder *b); /* after the update; nothing where master weights are in host memory */

/* offload.c: optimizer state in host memory. All but the first two do nothing without
 * it. */
qd_status qd_offload_check(const qd_strategy *strategy); /* there must be some */
void qd_offload_create(qd_builder *b, qd_arena *arena);
void qd_offload_begin(qd_builder *b);   /* allocates chunks; the first are fetched while gradients are still reduced */
bool qd_offload_updates(qd_builder *b); /* UPDATE of all modules, chunk by chunk; false: there are no chunks */
/* Brings this rank's box of a matrix's state to the device: the chunk it is in, -1: it is there,
 * or the rank has none. */
int qd_offload_matrix_begin(qd_builder *b, int matrix, qd_buffer_kind kind);
/* `action`, the newest, works on it; then it is stored. chunk -1: nothing. */
void qd_offload_matrix_end(qd_builder *b, int matrix, qd_buffer_kind kind, qd_action *action, int chunk);
void qd_offload_finish(qd_builder *b);
#endif
