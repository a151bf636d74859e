/* The second level of the step program: what a module does in each phase, as a list of ops over
 * slots.
 *
 * A *slot* is a tensor seen by one module: a parameter, a gradient, a port, an input of the step,
 * or a local value. How long a local value lives (and so whether it is scratch, or stashed for the
 * backward pass, and until which part of it) is derived from the ops that read and write it. An
 * *op* names the kernel, its slots and its sizes. `spec` writes the lists; `nn` executes them and
 * has no second copy. */
#ifndef QD_SPEC_OPS_OPS_H
#define QD_SPEC_OPS_OPS_H

#include "base/arena.h"
#include "spec/layout/context.h"
#include "spec/layout/ledger.h"
#include "spec/ops/op_table.h"

/* What the device does in one pass, and what suits it; the lists are written for it. One row per
 * kind of device in ops.c, so that `check` knows without the device what a run on it will do; a run
 * compares it with what its device says. */
typedef struct qd_device_traits {
    const char *device;         /* "cpu", "cuda" */
    bool fused_residual;        /* a product adds the residual stream */
    bool fused_gelu;            /* a product applies GELU (tanh form), or its derivative */
    bool fused_bias_grad;       /* the weight gradient's product gives the bias gradient */
    bool sums_in_norm;          /* the norm's gradient sums what it reads and writes, for the gradients of biases */
    bool ranks_as_threads;      /* local ranks share its memory, so they are threads of one process */
    /* dense blocks: SwiGLU's result is computed again beside its gradient, unless train.swiglu says
     * otherwise */
    bool remade_activation;
    bool squares_in_products;   /* products over experts sum the squares of the gradients that they write */
    bool narrow_logits;         /* logits have the type of the activations instead of fp32 */
    int64_t head_rows, head_logits; /* the head holds at most so many rows, and so many logits, at a time */
} qd_device_traits;
const qd_device_traits *qd_device_traits_find(const char *device); /* NULL: unknown */

/* Phases of a module for one micro-batch. I and W are the two halves of the backward pass:
 * gradients of the inputs, gradients of the weights. */
typedef enum qd_phase { QD_PHASE_FORWARD, QD_PHASE_INPUT, QD_PHASE_WEIGHT, QD_PHASE_COUNT } qd_phase;

/* What a block does not keep for its backward pass and computes again. Selective: results of ops
 * that only move bytes, where that frees more than their inputs take; the op is run again inside
 * the backward pass, just before its result is read. Full: everything but the port that enters the
 * block; the ops of phase F that the backward pass needs are run again before it, as an action of
 * their own. */
typedef enum qd_recompute { QD_RECOMPUTE_NONE, QD_RECOMPUTE_SELECTIVE, QD_RECOMPUTE_FULL, QD_RECOMPUTE_COUNT } qd_recompute;

/* SwiGLU's results: kept for the backward pass, or computed again in the pass that gives their
 * gradients. AUTO: again in routed experts, and where the device's traits say so. */
typedef enum qd_swiglu { QD_SWIGLU_AUTO, QD_SWIGLU_KEEP, QD_SWIGLU_AGAIN } qd_swiglu;

const char *qd_op_name(qd_op_kind kind);
const char *qd_op_roles(qd_op_kind kind);                  /* one letter per operand, see op_table.h */
const char *qd_op_operand_name(qd_op_kind kind, int place); /* "WEIGHT" */
bool qd_op_operand_needed(qd_op_kind kind, int place);      /* every op of the kind has it */
bool qd_decl_has_lowering(qd_decl_kind kind); /* a rule of the pass `forward`: every declared op needs one */
bool qd_op_has_gradient(qd_op_kind kind);  /* a rule of the pass `gradient`: ops that forward lists may hold */
bool qd_op_has_placement(qd_op_kind kind); /* a rule of the pass `place` */

/* What an op that communicates adds. Of all ranks of its group, each has the same op at the same
 * place of its list. An asynchronous one runs beside the ops after it, up to the first op that
 * names it or a later one in `after`; its slots must not be touched in between, except rows outside
 * its window. */
typedef struct qd_op_exchange {
    qd_group group;      /* size 0: the op does not communicate */
    int32_t index;       /* of the group in the program's groups; -1: one rank, nothing to do */
    qd_reduce_op reduce;
    int64_t count;       /* elements, as qd_coll_bytes counts them: the same on all ranks */
    qd_dtype dtype;
    int64_t bytes;       /* that all ranks of the world together send */
    bool uneven;         /* what is sent depends on the data: count and bytes are those of an even load */
    int32_t piece, pieces; /* gather and scatter by rows: of each rank's rows, piece `piece` of `pieces` */
    bool async;
    int32_t until;       /* async: the first op that waits for it; op_count: the end of the list */
} qd_op_exchange;

typedef struct qd_op {
    qd_op_kind kind;
    qd_phase phase;
    int16_t slot[QD_OP_SLOTS]; /* its operands, by their places (QD_LINEAR_X, …): indices into the class's slots; -1: absent */
    int64_t m, n, k;           /* products: y (m, n) over k; others: rows m, columns n; head: rows, vocab, hidden */
    int64_t first, to;         /* windows of rows: the first that is read, the first that is written (weight gradients: the
                                  first of x, the first of dy); dropout: the first row within the micro-batch; embedding:
                                  the first token that this rank's table holds; loss: the first row, the first token of
                                  this rank's logits */
    int32_t heads, kv_heads;   /* rope, attention: of this rank */
    int32_t experts, expert;   /* products over experts: how many this rank holds, and the first */
    int32_t round;             /* context: how many ranks back the keys come from; -1: all keys, in the order of positions */
    qd_op_exchange exchange;
    int32_t after;             /* an asynchronous op that must have ended, with all before it; -1: none */
    int64_t chunk;             /* head: rows of logits held at a time */
    int32_t site;              /* dropout: which of the module's dropouts */
    double scale;              /* loss and router gradients: the factor of each token's gradient, 1 / tokens of the global batch */
    double load_tokens;        /* router gradients: the tokens whose choices are summed in `load` */
    bool overwrites;           /* it is the first op to write its gradients, all of them, and overwrites them in an action that is
                                  the first to write them (qd_action.overwrite) */
    bool squares;              /* in an action that is the last to write its gradients (qd_action.squares) it also gives the sums of squares
                                  of their rows: nobody else adds to them */
    bool again;                /* phase F: also run by a recompute action; other phases: a second run of an op of phase F */
    double flops;
    int64_t bytes; /* least traffic with memory: every operand once */
} qd_op;

typedef enum qd_slot_kind {
    QD_SLOT_PARAM,    /* of this module: parameters param .. param + param_count - 1, contiguous */
    QD_SLOT_GRAD,     /* their gradients */
    QD_SLOT_IN,       /* port from the module before */
    QD_SLOT_OUT,      /* port to the module after */
    QD_SLOT_GRAD_OUT, /* gradient that arrives for OUT */
    QD_SLOT_GRAD_IN,  /* gradient that leaves for IN */
    QD_SLOT_INPUT,    /* tokens, targets (in generation: positions) and document starts: (3, rows) int32; with cp more: see
                         qd_context_select */
    QD_SLOT_ROPE,     /* table of angles */
    QD_SLOT_CACHE,    /* keys and values of this block: (2, context, kv_heads * head_dim) */
    QD_SLOT_LOGITS,   /* (1, vocab), the last row's */
    QD_SLOT_LOSS,     /* two doubles of the step: sum of losses, tokens counted */
    QD_SLOT_LOCAL
} qd_slot_kind;

/* How the rows and columns of a value are placed on tp. The rows of a port are those that a rank
 * has between modules: all R of its micro-batch, or under sp a slice of them. */
typedef enum qd_layout {
    QD_LAYOUT_NONE,    /* a parameter, an input, a result of its own shape */
    QD_LAYOUT_PORT,    /* the rows of a port, whole columns */
    QD_LAYOUT_ALL,     /* all rows, whole columns */
    QD_LAYOUT_COLUMNS, /* all rows, this rank's columns: its heads, its share of the inner width */
    QD_LAYOUT_PARTIAL, /* all rows, whole columns, a partial sum over tp */
    QD_LAYOUT_ROUTED,  /* rows of experts */
} qd_layout;

/* Where a local value lives, derived from its first write and last read. */
typedef enum qd_region {
    QD_REGION_NONE,    /* not local */
    QD_REGION_SCRATCH, /* one phase */
    QD_REGION_STASH_I, /* forward .. backward of the inputs */
    QD_REGION_STASH_W, /* forward .. backward of the weights */
    QD_REGION_MID,     /* backward of the inputs .. backward of the weights */
    QD_REGION_COUNT
} qd_region;

typedef struct qd_slot {
    const char *name;
    qd_slot_kind kind;
    qd_dtype dtype;
    int64_t rows, cols;
    int param, param_count; /* relative to the module's first */
    qd_layout layout;
    qd_region region;
    int64_t offset; /* bytes within the region */
} qd_slot;

/* A class of modules with the same lists: all blocks share one. */
typedef struct qd_module_class {
    int slot_count, op_count;
    qd_slot *slots;
    qd_op *ops;                        /* phase F first, then I and W as they interleave in a whole backward pass */
    int64_t region[QD_REGION_COUNT];   /* bytes */
    qd_phase in_until, grad_out_until; /* last phase that reads IN and GRAD_OUT: the program frees them after it */
    bool has_weight_phase, uses_input;
    /* bits 1 << qd_phase: those with ops that write gradients of parameters, that overwrite them,
     * that sum their squares */
    unsigned grad_phases, overwrite_phases, square_phases;
    qd_recompute recompute;
} qd_module_class;

typedef struct qd_class_config {
    int rank; /* whose local shapes */
    int64_t batch, seq; /* of a micro-batch on this rank */
    qd_dtype activation, param, grad;
    bool training; /* false: phase F only, nothing is stashed, the head computes losses and no gradients */
    int64_t context; /* > 0: generation; rows are new tokens of one sequence, earlier ones are in a cache of this length */
    int tensor_pieces; /* products next to an exchange over tp are cut into so many; 0 or 1: whole */
    double expert_rows; /* ep: room for so many times the rows of a mean load */
    qd_cp_mode cp_mode;
    bool overlap;  /* exchanges inside a module run beside its products */
    bool split;    /* the program runs I and W apart: values they share are kept between them */
    qd_recompute recompute; /* of blocks; the others keep next to nothing */
    qd_swiglu swiglu;
    const qd_device_traits *traits;
} qd_class_config;

/* Derives the lists of the modules with declaration `decl` of the ledger, for the rank of `config`.
 * Lives in `arena`. */
qd_status qd_module_class_create(const qd_ledger *ledger, int decl, const qd_class_config *config,
                                 qd_arena *arena, qd_module_class *out);

/* Phases that an action runs are bits 1 << qd_phase, or this: the ops of phase F that the backward
 * pass needs once more. */
#define QD_PHASES_AGAIN (1u << QD_PHASE_COUNT)
static inline bool qd_op_runs(const qd_op *op, unsigned phases)
{
    return phases == QD_PHASES_AGAIN ? op->phase == QD_PHASE_FORWARD && op->again : (phases & 1u << op->phase) != 0;
}
static inline bool qd_op_is_grouped(qd_op_kind kind) /* a grouped GEMM */
{
    return kind == QD_OP_EXPERTS || kind == QD_OP_EXPERTS_DX || kind == QD_OP_EXPERTS_DW || kind == QD_OP_EXPERTS_SWIGLU ||
           kind == QD_OP_EXPERTS_DX_SWIGLU;
}
static inline int qd_op_first(const qd_op *op) /* the slot of its first operand */
{
    return op->slot[0];
}
static inline bool qd_op_communicates(const qd_op *op)
{
    return op->exchange.group.size > 1;
}
/* An op as an action runs it: where it overwrites gradients it does not read them. */
qd_op qd_op_as_run(const qd_module_class *class_, int index, bool overwrite);
qd_coll_kind qd_op_collective(qd_op_kind kind); /* of an op that communicates */
/* Bytes that the ops of these phases make all ranks of the world send. */
int64_t qd_class_exchanged(const qd_module_class *class_, unsigned phases);

int64_t qd_slot_bytes(const qd_slot *slot);
double qd_class_flops(const qd_module_class *class_, qd_phase phase); /* of the model: what is computed again is not in it */
double qd_class_recompute_flops(const qd_module_class *class_);

/* Positions that must be known: those of a sequence, or of the whole context in generation. */
static inline int64_t qd_positions(int64_t seq, int64_t context)
{
    return context > 0 ? context : seq;
}

/* Rows of logits the head holds at a time: fixed by the vocabulary and the kind of device alone, so
 * that no sum depends on the layout. */
int64_t qd_head_chunk_rows(const qd_device_traits *traits, int64_t vocab);

/* The row stride of logits, in elements. A vocabulary, or a rank's part of one, may have any size;
 * rows that all begin at multiples of 128 bytes are what GEMMs on GPUs need to run at full speed.
 * What lies between the vocabulary and the stride is room only: the loss does not read it, and
 * zeroes it in gradients. */
static inline int64_t qd_logits_stride(int64_t tokens)
{
    return (tokens + 63) / 64 * 64;
}
#endif
