/* The passes that derive the op lists of a rank from a declaration (model/declare.h). Each pass is
 * one file; it reads the list that the previous pass left in a qd_class_writer, and leaves a new
 * one:
 *
 *   forward    lowers declared ops to ops over whole (unsharded) values
 *   gradient   the backward pass, in an input and a weight half, from one table of rules
 *   place      local shapes and communication, from parameter placements and one rule per op
 *   fuse       rewrite rules that the device's traits enable
 *   order      which ops overlap with an exchange
 *   quantize   casts to fp8, and GEMMs of their results
 *   alias      ops that work in place
 *   recompute  which ops run again in the backward pass
 *   overlap    cuts GEMMs next to an exchange into pieces (parallel.tp_overlap)
 *   settle     which op waits for each exchange
 *   lifetimes  where local values are stored
 *
 * No pass searches: a value that cannot be converted to the layout an op needs is an error. */
#ifndef QD_SPEC_PASSES_PASSES_H
#define QD_SPEC_PASSES_PASSES_H

#include "spec/ops/ops.h"

struct qd_sequence;

/* Numbers of a class that shapes and sizes of ops are given in. Tables name them without a prefix,
 * and may continue the list with numbers of their own: enum { QD_CLASS_NUMBERS, CHUNK_ROWS }.
 *
 * Rows of a micro-batch: ROWS of this rank, WHOLE_ROWS of whole sequences, MOST_ROWS of the rank of
 * cp with the most, PORT_ROWS between modules, LOAD_ROWS whose choices are summed in one load (on
 * the rank of cp with the most rows). SEQ: positions of a sequence on all ranks of cp; POSITIONS:
 * the same, in generation CACHE_LENGTH. Columns of this rank: Q, K, QK of queries, keys and both,
 * KV of keys and values, QKV_COLS of all three, O_COLS of what heads attend to, EXPANDED_COLS of
 * keys without position and values (expanded from latents), COUNTED_KEYS of the keys that this rank
 * counts in sums over all ranks. */
#define QD_CLASS_NUMBERS \
    NONE, ONE, TWO, ROWS, WHOLE_ROWS, MOST_ROWS, PORT_ROWS, LOAD_ROWS, SEQ, POSITIONS, CACHE_LENGTH, HIDDEN, HEADS, KV_HEADS, ALL_HEADS, \
        Q, K, QK, KV, QKV_COLS, O_COLS, EXPANDED_COLS, COUNTED_KEYS, EXPERTS, PER_TOKEN
#define QD_CLASS_NUMBER_COUNT 25

/* A list under construction. It grows; everything is allocated in `arena`. */
typedef struct qd_class_writer {
    const qd_ledger *ledger;
    const qd_model *model;
    const qd_class_config *config;
    const qd_module *module; /* any module of the class: local names and shapes are the same in all */
    const qd_layer *decl;    /* its declaration */
    qd_arena *arena;
    int64_t seq, rows;              /* positions of a sequence on this rank; R, rows of a micro-batch */
    int64_t port_first, port_rows;  /* rows between modules: all R, or this rank's slice under sp */
    qd_group tensor;                /* the ranks of tp; size 1: none */
    int tensor_coord;               /* this rank's position among them */
    int heads, kv_heads;            /* on this rank */
    int64_t number[QD_CLASS_NUMBER_COUNT];
    int *weights;                   /* per parameter of the module: slot of the weight that begins with it, -1: none */
    struct qd_sequence *experts;    /* how rows are dispatched to experts, NULL: the module has none */
    int held, first_held;           /* experts of this rank, and the first among those of its node */
    int64_t routed_rows;            /* buffer space for rows of these experts */
    double load;                    /* their number if the load is balanced */
    qd_slot *slots;
    qd_op *ops;
    int slot_count, op_count, slot_capacity, op_capacity;
    qd_phase phase;    /* of the ops that are appended next */
    qd_module_class *out; /* what `lifetimes` finds besides the places of values */
    const char *wrong; /* why the lists cannot be built, NULL: no error */
    qd_status status;  /* of `wrong` */
} qd_class_writer;

/* The build fails as a whole, with the first message (NULL: out of memory). The pass may continue:
 * slots and ops that are added from now on are dropped. */
void qd_class_fail(qd_class_writer *w, qd_status status, const char *message);
#define QD_CLASS_FAIL(w, status, ...) qd_class_fail((w), (status), qd_arena_printf((w)->arena, __VA_ARGS__))
/* Zeroed memory of the arena; NULL: the build fails. */
void *qd_class_memory(qd_class_writer *w, int64_t count, size_t size);
#define QD_CLASS_NEW(w, type, count) ((type *)qd_class_memory((w), (count), sizeof(type)))
int *qd_class_table(qd_class_writer *w, int entries); /* all -1 */

/* Adding a slot or an op may move the list, so no pointer into it outlives a call. */
int qd_class_slot(qd_class_writer *w, const char *name, qd_slot_kind kind, qd_dtype dtype, int64_t rows, int64_t cols);
int qd_class_f32(qd_class_writer *w, const char *name, int64_t rows, int64_t cols); /* a local value */
int qd_class_like(qd_class_writer *w, const char *name, int slot); /* with kind, shape and layout of another */
const char *qd_class_name(qd_class_writer *w, const char *before, int slot, const char *behind); /* a name derived from that of a slot */
/* The slot of a weight's values; the slot of its gradient is the next one. -1: there is no such
 * weight. */
int qd_class_weight(qd_class_writer *w, qd_weight weight);
static inline int qd_class_gradient(int weight)
{
    return weight < 0 ? -1 : weight + 1;
}

/* The first parameter of a weight, or of its gradient. */
static inline const qd_param *qd_class_param(const qd_class_writer *w, int weight)
{
    return &w->ledger->params[w->module->param_begin + w->slots[weight].param];
}

/* The gradient of a weight that is trained; -1: it is frozen, or counts choices of the router that
 * nothing reads. */
static inline int qd_class_trained(const qd_class_writer *w, int weight)
{
    const qd_param *param = weight < 0 ? NULL : qd_class_param(w, weight);
    bool fixed = !param || param->frozen || (param->counts && w->model->moe.bias_rate <= 0.0);
    return fixed ? -1 : qd_class_gradient(weight);
}

/* Whether a weight, or its gradient, is that of experts, one after another. */
static inline bool qd_class_of_experts(const qd_class_writer *w, int weight)
{
    return weight >= 0 && w->decl->params[w->slots[weight].param].expert >= 0;
}

/* The operands of an op: slot + 1 by place, so that operands that are not given are absent (0).
 * QD_OPERANDS(LINEAR, (X, x), (WEIGHT, weight), (Y, y)); a slot of -1 is absent too. */
typedef struct qd_operands {
    int slot[QD_OP_SLOTS];
} qd_operands;
#define QD_OPERANDS(kind, ...) ((qd_operands)QD_OPERAND_TABLE(kind, __VA_ARGS__))
#define QD_OPERAND_TABLE(kind, ...) {{QD_EACH(QD_OPERAND_GIVEN, kind, __VA_ARGS__)}} /* as an initializer: rules of tables */
#define QD_OPERAND_GIVEN(kind, pair) [QD_OPERAND_PLACE(kind, QD_PAIR_FIRST pair)] = 1 + (QD_PAIR_SECOND pair),

/* Appends an op. A missing required operand is an error of the pass. */
qd_op *qd_class_op(qd_class_writer *w, qd_op_kind kind, qd_operands operands);
#define QD_CLASS_OP(w, kind, ...) qd_class_op((w), QD_OP_##kind, QD_OPERANDS(kind, __VA_ARGS__))
/* Sets sizes, FLOPs and bytes of an op from the shapes of its slots. */
void qd_class_measure(const qd_class_writer *w, qd_op *op);
void qd_class_count_bytes(const qd_class_writer *w, qd_op *op); /* only the bytes */
int64_t qd_class_outputs(const qd_class_writer *w, int weight); /* of a matrix on this rank, or of one expert's */
int64_t qd_class_first_token(const qd_class_writer *w, int table); /* in this rank's shard of a table */
/* Makes an op communicate its m × n elements, of the type of its first operand. */
void qd_op_communicate(const qd_class_writer *w, qd_op *op, qd_group group);
/* Appends a gather or scatter of rows, or an all-reduce in place (`to` -1), of whole slots. */
qd_op *qd_class_exchange(qd_class_writer *w, qd_op_kind kind, qd_group group, int from, int to);
/* GEMMs that tensor parallelism may cut by rows. */
static inline bool qd_op_is_gemm(qd_op_kind kind)
{
    return kind == QD_OP_LINEAR || kind == QD_OP_LINEAR_GELU || kind == QD_OP_LINEAR_DX || kind == QD_OP_LINEAR_DX_GELU;
}
/* The place of the operand that a GEMM multiplies with its weight: x, or dy. */
static inline int qd_gemm_rows(qd_op_kind kind)
{
    return kind == QD_OP_LINEAR_DX || kind == QD_OP_LINEAR_DX_GELU ? QD_LINEAR_DX_DY : QD_LINEAR_X;
}
QD_SAME_PLACE(X, LINEAR, LINEAR_ADD);
QD_SAME_PLACE(X, LINEAR, LINEAR_GELU);
QD_SAME_PLACE(DY, LINEAR_DX, LINEAR_DX_GELU);
static inline bool qd_op_reads(const qd_op *op, int j)
{
    return op->slot[j] >= 0 && qd_op_roles(op->kind)[j] != 'w';
}
static inline bool qd_op_writes(const qd_op *op, int j)
{
    return op->slot[j] >= 0 && qd_op_roles(op->kind)[j] != 'r';
}
/* How an op accesses a slot: bits; 0: it is no operand. */
enum { QD_READS = 1, QD_WRITES = 2, QD_TOUCHES = QD_READS | QD_WRITES };
unsigned qd_op_access(const qd_op *op, int slot);
/* The first op from `first` on that accesses the slot in one of these ways; op_count: none. */
int qd_class_next(const qd_class_writer *w, int slot, unsigned access, int first);
/* The first op of the backward pass, which follows phase F, that reads the slot; op_count: none. */
int qd_class_read_backward(const qd_class_writer *w, int slot);
/* The first op after op `index` that must come after it, because both access the same rows of a
 * slot and one of them writes them; op_count: none. */
bool qd_ops_conflict(const qd_class_writer *w, const qd_op *a, const qd_op *b);
int qd_class_conflict(const qd_class_writer *w, int index);
/* The last op before `before` that writes the slot, -1: none. */
int qd_class_definition(const qd_class_writer *w, int slot, int before);
/* Starts the list of the writer anew, to be rebuilt op by op; returns the old one. */
typedef struct qd_old_list {
    const qd_op *ops;
    int count;
} qd_old_list;
qd_old_list qd_class_restart(qd_class_writer *w);
qd_op *qd_class_keep(qd_class_writer *w, const qd_op *op); /* appends a copy */
void qd_class_move(qd_class_writer *w, int from, int to);
/* All ops, or those of the backward pass, access slot `by` instead. */
void qd_class_replace(qd_class_writer *w, int slot, int by, bool backward);
int qd_op_weight(const qd_class_writer *w, const qd_op *op); /* the slot of its weight, or of the gradient; -1: it has none */

void qd_pass_forward(qd_class_writer *w);
void qd_pass_gradient(qd_class_writer *w);
void qd_pass_place(qd_class_writer *w);
void qd_pass_fuse(qd_class_writer *w);
void qd_pass_order(qd_class_writer *w);
void qd_pass_quantize(qd_class_writer *w);
void qd_pass_alias(qd_class_writer *w);
void qd_pass_recompute(qd_class_writer *w);
void qd_pass_overlap(qd_class_writer *w);
void qd_pass_settle(qd_class_writer *w);
void qd_pass_lifetimes(qd_class_writer *w);

/* Placement rules that emit several ops (place_*.c). */

/* State of the pass `place`. */
typedef struct qd_placing {
    qd_class_writer *w;
    qd_old_list old;  /* the list that is being placed */
    int at;           /* index of the current op in it */
    struct qd_placed_slot {
        int now;         /* the slot with its value in the layout of the port (summed over tp; for experts: rows returned) */
        int gathered[2]; /* its rows gathered over tp, in the forward and in the backward pass; -1: not gathered */
        bool collected;  /* rows of experts that are combined next */
        int attended[2]; /* log-sum-exps of an attention: qkv and result as the backward pass reads them (place_attention.c) */
    } *slot;             /* per slot of the old list */
    int slots;        /* number of slots of the old list */
} qd_placing;

/* Emits an op, with its sizes. */
void qd_place_keep(qd_placing *p, const qd_op *op);

/* Rules of ops that become several. The op's operands and results are in the layouts that the table
 * of place.c states. */
void qd_place_attention(qd_placing *p, const qd_op *op);
void qd_place_attention_grad(qd_placing *p, const qd_op *op);
void qd_place_sink(qd_placing *p, const qd_op *op);
void qd_place_sink_grad(qd_placing *p, const qd_op *op);
void qd_place_cached(qd_placing *p, const qd_op *op);
void qd_place_loss(qd_placing *p, const qd_op *op);
void qd_place_route(qd_placing *p, const qd_op *op);
void qd_place_send(qd_placing *p, const qd_op *op);
void qd_place_rows(qd_placing *p, int result); /* after an op that gives rows sorted by expert */
void qd_place_grouped(qd_placing *p, const qd_op *op);
void qd_place_expert_bias(qd_placing *p, const qd_op *op);
void qd_place_collect(qd_placing *p, const qd_op *op);
void qd_place_collect_grad(qd_placing *p, const qd_op *op);
#endif
