/* The second level of the step program: what a module does in each phase, as a list of ops over
 * slots.
 *
 * A *slot* is a tensor as one module sees it: a parameter, a gradient, a port, an input of the
 * step, or a local value. The lifetime of a local value is derived from the ops that read and write
 * it; it decides whether the value is scratch or stashed, and until which half of the backward
 * pass. An *op* names a kernel, its slots and its sizes. `spec` builds the lists; `nn` executes
 * them. */
#ifndef QD_SPEC_OPS_OPS_H
#define QD_SPEC_OPS_OPS_H

#include "base/arena.h"
#include "base/fp8.h"
#include "spec/layout/context.h"
#include "spec/layout/ledger.h"
#include "spec/ops/op_table.h"

/* Which ops a kind of device fuses, and the sizes that suit it. Op lists are built for these
 * traits. The table is in ops.c, one row per kind of device, so that `check` can plan a run without
 * the device; a run compares its row with what the device reports. */
typedef struct qd_device_traits {
    const char *device;         /* "cpu", "cuda" */
    bool fused_residual;        /* a GEMM adds the residual stream in its epilogue */
    bool fused_gelu;            /* a GEMM applies GELU (tanh form), or its derivative, in its epilogue */
    bool fused_bias_grad;       /* the weight-gradient GEMM also produces the bias gradient */
    bool sums_in_norm;          /* the gradient of a norm also sums its input and output over rows, for bias gradients */
    bool ranks_as_threads;      /* local ranks share the device's memory, so they are threads of one process */
    /* Dense blocks recompute SwiGLU along with its gradient, unless train.swiglu overrides it. */
    bool remade_activation;
    bool squares_in_products;   /* grouped GEMMs sum the squares of the gradients they write */
    bool narrow_logits;         /* logits have the type of the activations instead of fp32 */
    int64_t head_rows, head_logits; /* limits of one chunk of the head: rows, and logits */
} qd_device_traits;
const qd_device_traits *qd_device_traits_find(const char *device); /* NULL: unknown */

/* Phases of a module for one micro-batch. INPUT and WEIGHT (I and W) are the two halves of the
 * backward pass: gradients of the inputs, gradients of the weights. */
typedef enum qd_phase { QD_PHASE_FORWARD, QD_PHASE_INPUT, QD_PHASE_WEIGHT, QD_PHASE_COUNT } qd_phase;

/* What a block recomputes in the backward pass instead of keeping it. Selective: results of
 * memory-bound ops, where that frees more memory than their inputs take; the op runs again inside
 * the backward pass, just before its result is read. Full: everything except the port that enters
 * the block; the ops of phase F that the backward pass needs run again before it, as an action of
 * their own. */
typedef enum qd_recompute { QD_RECOMPUTE_NONE, QD_RECOMPUTE_SELECTIVE, QD_RECOMPUTE_FULL, QD_RECOMPUTE_COUNT } qd_recompute;

/* Whether SwiGLU results are kept for the backward pass or recomputed along with their gradients.
 * AUTO recomputes in routed experts, and in dense blocks where the device's traits say so. */
typedef enum qd_swiglu { QD_SWIGLU_AUTO, QD_SWIGLU_KEEP, QD_SWIGLU_AGAIN } qd_swiglu;

/* Which values of an operand share a scale: all of them, those of a row along k, or blocks of 128
 * along k (of weights 128 x 128) as DeepSeek V3 was trained. */
typedef enum qd_fp8_recipe { QD_FP8_RECIPE_TENSOR, QD_FP8_RECIPE_ROW, QD_FP8_RECIPE_BLOCK } qd_fp8_recipe;
qd_fp8_scaling qd_fp8_scaling_of(qd_fp8_recipe recipe, bool weight);

/* When weights are cast: once per step, which keeps their copies until the last micro-batch, or for
 * each use. AUTO: once where that saves casts and weights stay in memory (spec/program/units.c). */
typedef enum qd_fp8_weights { QD_FP8_WEIGHTS_AUTO, QD_FP8_WEIGHTS_STEP, QD_FP8_WEIGHTS_USE } qd_fp8_weights;
/* What an action of its own finds for all passes of a step: their scales, which take no memory, or
 * copies too. */
typedef enum qd_fp8_once { QD_FP8_ONCE_NOTHING, QD_FP8_ONCE_SCALES, QD_FP8_ONCE_COPIES } qd_fp8_once;

/* train.precision=fp8: GEMMs of the linear layers of blocks have fp8 operands
 * (spec/passes/quantize.c). Weights and activations are E4M3. */
typedef struct qd_fp8 {
    bool on;
    qd_fp8_recipe recipe;
    qd_dtype grad;    /* of gradients of activations: QD_F8E5M2 or QD_F8E4M3 */
    qd_fp8_weights weights;
    char keep[256];   /* layers that stay in bf16: starts of their logical names, separated by commas */
} qd_fp8;
/* Whether a list of such starts has the layer with this logical name ("attn.q.weight"). */
bool qd_fp8_names(const char *list, const char *name);

const char *qd_op_name(qd_op_kind kind);
const char *qd_op_roles(qd_op_kind kind);                  /* one letter per operand, see op_table.h */
const char *qd_op_operand_name(qd_op_kind kind, int place); /* "WEIGHT" */
bool qd_op_operand_needed(qd_op_kind kind, int place);      /* not optional: every op of the kind has it */
bool qd_decl_has_lowering(qd_decl_kind kind); /* a rule of the pass `forward`; every declared op needs one */
bool qd_op_has_gradient(qd_op_kind kind);  /* a rule of the pass `gradient`; needed by every op of a forward list */
bool qd_op_has_placement(qd_op_kind kind); /* a rule of the pass `place` */

/* The communication of an op. Every rank of the group has the same op at the same position of its
 * list. An asynchronous op overlaps with the ops after it, up to the first op whose `after` names
 * it or a later one; until then its slots must not be accessed, except rows outside its window. */
typedef struct qd_op_exchange {
    qd_group group;      /* size 0: the op does not communicate */
    int32_t index;       /* in the program's groups; -1: a single rank, no communication */
    qd_reduce_op reduce;
    int64_t count;       /* elements as qd_coll_bytes counts them; the same on all ranks */
    qd_dtype dtype;
    int64_t bytes;       /* sent by all ranks of the world together */
    bool uneven;         /* the volume depends on the data: count and bytes assume a balanced load */
    int32_t piece, pieces; /* gather and scatter by rows: transfers piece `piece` of `pieces` of each rank's rows */
    bool async;
    int32_t until;       /* async: index of the first op that waits for it; op_count: the end of the list */
} qd_op_exchange;

typedef struct qd_op {
    qd_op_kind kind;
    qd_phase phase;
    int16_t slot[QD_OP_SLOTS]; /* operands by place (QD_LINEAR_X, …): indices into the class's slots; -1: absent */
    /* GEMM: y (m, n), inner dimension k; head: rows, vocab, hidden; others: m rows, n columns.
     * QK_SQUARES, QK_NORM_GRAD: k columns of keys that this rank counts, 0 where another rank with
     * the same keys does */
    int64_t m, n, k;
    /* Windows of rows: the first row read, the first row written. Weight gradients: the first row
     * of x, the first of dy. Dropout: the first row within the micro-batch. Embedding: the first
     * token in this rank's table. Loss: the first row, the first token of this rank's logits.
     * Attention sinks: the first head among those of the parameter. Biases of experts: the first
     * column that the rank's part of the bias belongs to. */
    int64_t first, to;
    int32_t heads, kv_heads;   /* rope, attention: on this rank */
    int64_t window;            /* attention: how many of the last positions a row attends to; 0: all */
    int32_t experts, expert;   /* grouped GEMM: number of experts on this rank, and the first of them */
    /* adapters: m rows of n columns, rank k. Part i reads columns [i k, (i + 1) k) of the narrow
     * operand and covers part_cols[i] columns of the wide one from part_at[i] on */
    int32_t parts, part_at[QD_PARTS_MOST], part_cols[QD_PARTS_MOST];
    int32_t round;             /* context parallelism: how many ranks back the keys come from; -1: all keys, in order of positions */
    int32_t hop;               /* context.shift: how many ranks ahead x is sent, so that y comes from as many back */
    qd_op_exchange exchange;
    int32_t after;             /* waits for this asynchronous op and all before it; -1: none */
    int64_t chunk;             /* head: rows of logits per chunk */
    int32_t ahead;             /* embedding, loss: of tokens that are this many further on; attention: of that prediction module */
    int32_t site;              /* dropout: index among the dropouts of the module */
    double scale;              /* loss and router gradients: weight of each token's gradient, 1 / tokens of the global batch
                                  (prediction modules: times mtp_weight / mtp_modules);
                                  scale: the factor */
    double eps;                /* norm: epsilon; 0: that of the model */
    double cap;                /* head, loss: soft-cap of the logits; 0: none */
    double load_tokens;        /* router gradients: number of tokens whose choices are summed in `load` */
    /* This op is the first to write its gradients and writes all of them. It overwrites instead of
     * accumulating when the action is the first to write them (qd_action.overwrite). */
    bool overwrites;
    /* No other op adds to its gradients. When the action is the last to write them
     * (qd_action.squares), this op also produces the sums of squares of their rows. */
    bool squares;
    bool again;                /* phase F: a recompute action runs it too; other phases: the second run of an op of phase F */
    bool once;                 /* phase F: a scale or cast of weights that an action of its own finds instead, for all passes */
    double flops;
    int64_t bytes; /* minimum memory traffic: every operand once */
} qd_op;

typedef enum qd_slot_kind {
    QD_SLOT_PARAM,    /* parameters param .. param + param_count - 1 of this module, contiguous */
    QD_SLOT_GRAD,     /* their gradients */
    QD_SLOT_IN,       /* port from the previous module */
    QD_SLOT_OUT,      /* port to the next module */
    QD_SLOT_GRAD_OUT, /* incoming gradient of OUT */
    QD_SLOT_GRAD_IN,  /* outgoing gradient of IN */
    /* Tokens, targets (in generation: positions) and document starts: (3, rows) int32; more with
     * cp, see qd_context_select; then tokens and targets of each module that predicts further
     * ones; with pairs, see base/preference.h. */
    QD_SLOT_INPUT,
    QD_SLOT_ROPE,     /* table of rotary angles; param 1: that of layers with windows */
    QD_SLOT_CACHE,    /* KV cache of this block: (2, qd_cache_rows, kv_heads * head_dim), or (context, latent) */
    QD_SLOT_LOGITS,   /* (1, vocab), of the last row */
    /* Two doubles of the step: sum of losses, number of tokens counted; two more of prediction
     * modules; of pairs, see QD_LOSS_MARGIN. */
    QD_SLOT_LOSS,
    QD_SLOT_SCORES,   /* of the sequences of a micro-batch that are compared in pairs: (batch · seq, 1) double */
    QD_SLOT_LOCAL
} qd_slot_kind;

/* How the rows and columns of a value are placed on tp. The rows of a port are those that a rank
 * holds between modules: all R rows of its micro-batch, or a slice of them under sp. */
typedef enum qd_layout {
    QD_LAYOUT_NONE,    /* a parameter, an input, a result with its own shape */
    QD_LAYOUT_PORT,    /* the rows of a port, all columns */
    QD_LAYOUT_ALL,     /* all rows, all columns */
    QD_LAYOUT_COLUMNS, /* all rows, this rank's columns: its heads, its share of the inner width */
    QD_LAYOUT_PARTIAL, /* all rows, all columns, a partial sum over tp */
    QD_LAYOUT_ROUTED,  /* rows sorted by expert */
} qd_layout;

/* Where a local value is stored, derived from its first write and last read. */
typedef enum qd_region {
    QD_REGION_NONE,    /* not a local value */
    QD_REGION_SCRATCH, /* within one phase */
    QD_REGION_STASH_I, /* from the forward pass to phase I */
    QD_REGION_STASH_W, /* from the forward pass to phase W */
    QD_REGION_MID,     /* from phase I to phase W */
    QD_REGION_WEIGHTS, /* copies and scales of weights, for all passes of a step */
    QD_REGION_COUNT
} qd_region;

typedef struct qd_slot {
    const char *name;
    qd_slot_kind kind;
    qd_dtype dtype;
    int64_t rows, cols;
    bool transposed; /* fp8 copies: stored by columns, as (cols, rows) */
    qd_fp8_scaling scaling; /* fp8 copies, as stored */
    int param, param_count; /* relative to the first parameter of the module */
    qd_layout layout;
    qd_region region;
    int64_t offset; /* bytes within the region */
} qd_slot;

/* Modules with identical op lists: all blocks of one variant share a class. */
typedef struct qd_module_class {
    int slot_count, op_count;
    qd_slot *slots;
    qd_op *ops;                        /* phase F first, then I and W interleaved as in an unsplit backward pass */
    int64_t region[QD_REGION_COUNT];   /* bytes */
    qd_phase in_until, grad_out_until; /* last phase that reads IN and GRAD_OUT; the program frees them after it */
    bool has_weight_phase, uses_input;
    /* Bits 1 << qd_phase: phases with ops that write parameter gradients, that can overwrite them,
     * and that sum their squares. */
    unsigned grad_phases, overwrite_phases, square_phases;
    qd_recompute recompute;
} qd_module_class;

typedef struct qd_class_config {
    int rank; /* the rank whose local shapes are used */
    int64_t batch, seq; /* of a micro-batch on this rank */
    qd_dtype activation, param, grad;
    bool training; /* false: phase F only; nothing is stashed, and the head computes losses without gradients */
    int64_t context; /* > 0: generation: rows are new tokens of one sequence, earlier ones are in a cache of this length */
    bool pairs;      /* the loss compares pairs of sequences (base/preference.h) */
    int tensor_pieces; /* GEMMs next to a tp collective are cut into this many pieces; 0 or 1: not cut */
    double expert_rows; /* ep: buffer capacity for rows of experts, as a multiple of the balanced load */
    qd_cp_mode cp_mode;
    bool overlap;  /* collectives inside a module overlap with its GEMMs */
    bool split;    /* the program runs I and W separately, so values they share are kept in between */
    qd_recompute recompute; /* of blocks; the other modules stash almost nothing */
    qd_swiglu swiglu;
    qd_fp8 fp8;
    qd_fp8_once weights_once;
    const qd_device_traits *traits;
} qd_class_config;

/* Derives the op lists of the modules with declaration `decl`, for the rank of `config`. Allocated
 * in `arena`. */
qd_status qd_module_class_create(const qd_ledger *ledger, int decl, const qd_class_config *config,
                                 qd_arena *arena, qd_module_class *out);

/* The phases that an action runs: bits 1 << qd_phase, or one of these values: the ops of phase F
 * that the backward pass recomputes, and those that cast weights for all passes of a step. */
#define QD_PHASES_AGAIN (1u << QD_PHASE_COUNT)
#define QD_PHASES_ONCE (1u << (QD_PHASE_COUNT + 1))
static inline bool qd_op_runs(const qd_op *op, unsigned phases)
{
    if (op->once)
        return phases == QD_PHASES_ONCE;
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
/* An op as an action runs it: one that overwrites its gradients does not read them. */
qd_op qd_op_as_run(const qd_module_class *class_, int index, bool overwrite);
qd_coll_kind qd_op_collective(qd_op_kind kind); /* of an op that communicates */
/* Bytes that all ranks of the world send for the ops of these phases. */
int64_t qd_class_exchanged(const qd_module_class *class_, unsigned phases);

int64_t qd_slot_bytes(const qd_slot *slot); /* of fp8: with the scale (base/fp8.h) */
double qd_class_flops(const qd_module_class *class_, qd_phase phase); /* of the model, without recompute */
double qd_class_recompute_flops(const qd_module_class *class_);

/* Number of positions: those of a sequence, or of the whole context in generation. */
static inline int64_t qd_positions(int64_t seq, int64_t context)
{
    return context > 0 ? context : seq;
}

/* Generation feeds at most this many tokens at a time. */
#define QD_GENERATION_PIECE 32
/* The window of a layer where sequences have this many positions; 0: it has none, or they fit into
 * it. */
static inline int64_t qd_window_within(int64_t window, int64_t positions)
{
    return window < positions ? window : 0;
}
/* Rows of keys in the cache of a layer. With a window it is a ring, which holds what the first of
 * the tokens fed attends to and all of them. */
static inline int64_t qd_cache_rows(int64_t window, int64_t context)
{
    int64_t rows = window + QD_GENERATION_PIECE - 1;
    return window > 0 && rows < context ? rows : context;
}

/* Rows of logits per chunk of the head. Depends on the vocabulary and the kind of device alone, so
 * that no sum depends on the layout. */
int64_t qd_head_chunk_rows(const qd_device_traits *traits, int64_t vocab);

/* Row stride of logits, in elements. A vocabulary, or a rank's shard of it, may have any size;
 * GEMMs on GPUs run at full speed only if every row starts at a multiple of 128 bytes. The columns
 * from the vocabulary to the stride are padding: the loss does not read them, and zeroes them in
 * gradients. */
static inline int64_t qd_logits_stride(int64_t tokens)
{
    return (tokens + 63) / 64 * 64;
}
#endif
