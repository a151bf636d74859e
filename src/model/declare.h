/* The vocabulary in which model families are declared: parameters with their placement rules, and
 * the forward pass, both for whole (unsharded) tensors.
 *
 * A family (family.h) is one file of functions that each declare one module: the embedding, a
 * layer, the head. Such a function fills a qd_layer with parameters and with a list of ops in SSA
 * form: every value is written once. What runs on a rank is derived from that list by the passes of
 * `spec`: gradients, local shapes and communication, fusion, order, aliasing. A declaration knows
 * nothing of ranks, memory or the backward pass. */
#ifndef QD_MODEL_DECLARE_H
#define QD_MODEL_DECLARE_H

#include "base/arena.h"
#include "model/model.h"

typedef enum qd_init { QD_INIT_ZERO, QD_INIT_ONE, QD_INIT_NORMAL } qd_init;

/* The placement rule of a parameter on tp. */
typedef enum qd_split {
    QD_SPLIT_NONE,  /* replicated, with the same gradient on every rank */
    QD_SPLIT_NORM,  /* replicated; under sp the gradient is a partial sum over the rows of each rank */
    QD_SPLIT_HEADS, /* replicated; the gradient is a partial sum over the heads of each rank: norms of queries and keys */
    QD_SPLIT_ROWS,  /* sharded by outputs */
    QD_SPLIT_COLS,  /* sharded by inputs */
    QD_SPLIT_KV,    /* sharded by outputs in whole kv heads; with more ranks than kv heads, neighbours hold the same head */
} qd_split;

typedef struct qd_decl_param {
    const char *suffix; /* of the logical name, after that of the module: "attn.q.weight" */
    int64_t rows, cols; /* cols 0: a vector */
    qd_init init;
    double init_std;
    qd_split split;
    int fuse;          /* parameters with the same number are adjacent in memory and read as one matrix (q, k, v) */
    int expert;        /* index of the expert it belongs to, -1: none */
    int8_t expert_dim; /* of an expert's matrix: the dimension that etp shards */
    bool counts;       /* its gradient counts tokens per expert (router biases) */
    bool tied;         /* shares the values of the token table */
    int ahead;         /* k: of prediction module k, counted from 1 (model.mtp_modules); 0: of no such module */
    bool adapter;      /* a factor of an adapter (lora.h); where a model has adapters, only these are trained */
} qd_decl_param;

/* Consecutive parameters of the layer that one op reads as one matrix or vector; count 0: none. */
typedef struct qd_weight {
    int param, count;
} qd_weight;

/* Declared ops. Shapes: T tokens, d the width of the residual stream, A assignments of tokens to
 * experts. */
#define QD_DECL_TABLE(X)                                                                                                                   \
    X(INPUT)              /* out (T, d): the output of the previous module */                                                              \
    X(OUTPUT)             /* x (T, d): the output of this module */                                                                        \
    X(EMBED)              /* out (T, d) = rows of weight, plus rows of weight2 by position */                                              \
    X(NORM)               /* out (T, d) = norm of x with scale weight and bias weight2 */                                                  \
    X(LINEAR)             /* out (T, n) = x · weightᵀ + weight2 */                                                                      \
    X(HEAD_NORM)          /* out = x with the heads of q and k normalized by weight and weight2 */                                         \
    X(QK_NORM)            /* out = x with q normalized as a whole by weight, and k by weight2 */                                           \
    X(CLIP)               /* out = x with q, k and v limited to the model's clip_qkv */                                                    \
    X(ROPE)               /* out = x with the heads of q and k rotated by position */                                                      \
    X(LATENT_QKV)         /* out (T, q + k + v): queries x, keys and values y (by head), rotary part of all keys z, rotated */             \
    X(ATTENTION)          /* out (T, heads · v) = causal attention of x (T, q + k + v); weight: a sink per head */                        \
    X(ACTIVATION)         /* out = the model's activation function of x; gated: half as wide */                                            \
    X(SCALE)              /* out = x times a factor */                                                                                     \
    X(DROPOUT)            /* out = x with some elements zeroed */                                                                          \
    X(ADD)                /* out = x + y */                                                                                                \
    X(GATE)               /* out (T, d) = each row of x times the sigmoid of that row's y (T, 1) */                                        \
    X(ADAPT)              /* out = y + x · weightᵀ by parts: matrix i reads part i of x, and adds to columns of y; also by expert */       \
    X(ROUTE)              /* out: experts and weights chosen for each token from logits x; weight: bias of the choice */                   \
    X(SEND)               /* out (A, d): copies of the rows of x, sorted by the expert that routing y chose */                             \
    X(GROUPED_LINEAR)     /* out (A, n) = each row of x times the matrix of its expert, plus its bias weight2 */                           \
    X(GROUPED_ACTIVATION) /* out = the activation function of x, by expert */                                                              \
    X(COLLECT)            /* out (T, d) = for each token the weighted sum of the rows x of its experts */                                  \
    X(LOSS)               /* the loss of the step from x (T, d) and weight (vocab, d); in generation, logits */

typedef enum qd_decl_kind {
#define QD_DECL_ENUM(kind) QD_DECL_##kind,
    QD_DECL_TABLE(QD_DECL_ENUM)
#undef QD_DECL_ENUM
        QD_DECL_KIND_COUNT
} qd_decl_kind;

typedef int qd_val; /* a value of the layer; -1: none */

#define QD_DROPOUTS_MOST 4 /* dropouts per module; masks are keyed by module and site. Site 0 is the embedding */
#define QD_ADAPTERS_MOST 16 /* linear layers with adapters per module; their dropouts have the sites after QD_DROPOUTS_MOST */
#define QD_PARTS_MOST 8 /* matrices of a linear layer */

typedef struct qd_decl_op {
    qd_decl_kind kind;
    qd_val x, y, out;
    qd_weight weight, weight2; /* adapt: weight2 is that of the layer; bit i of `parts`: its part i has an adapter */
    unsigned parts;
    qd_val z; /* LATENT_QKV: its third operand; other ops ignore it */
    int site;       /* dropout: index among the dropouts of the module */
    int64_t window; /* attention: how many of the last tokens a token attends to; 0: all */
    bool local;     /* rope: the angles of layers with windows (model.rope_local_base) */
    double factor;  /* scale; norm: its epsilon, 0: that of the model */
    int ahead;      /* k: of prediction module k, which a program runs only while it trains; embed, loss: of tokens k further on */
} qd_decl_op;

typedef struct qd_decl_value {
    const char *name;
    int64_t cols; /* unsharded width */
    bool fp32;    /* fp32 regardless of the activation type (router logits) */
} qd_decl_value;

/* One declared module. Everything is allocated in the arena. */
typedef struct qd_layer {
    const qd_model *model;
    qd_arena *arena;
    qd_decl_param *params;
    qd_decl_value *values;
    qd_decl_op *ops;
    int param_count, value_count, op_count;
    int param_capacity, value_capacity, op_capacity;
    int fuse, site, adapters;
    int ahead; /* prediction module that is being declared, counted from 1; names of its parameters begin with "mtp.<k - 1>." */
    bool no_memory;
} qd_layer;

qd_val qd_input(qd_layer *b);
void qd_output(qd_layer *b, qd_val x);

/* The model's norm (LayerNorm with a bias, or RMS norm) with parameters "<name>.weight" and
 * "<name>.bias". */
qd_val qd_norm(qd_layer *b, qd_val x, const char *name, const char *out);

/* A linear layer of one or more matrices with a common input, computed as one GEMM. */
typedef struct qd_linear_part {
    const char *name; /* parameters "<name>.weight" and "<name>.bias" */
    int64_t out;
    qd_split split; /* of the matrix; a bias is sharded with the outputs */
} qd_linear_part;
qd_val qd_linear(qd_layer *b, qd_val x, const qd_linear_part *parts, int count, bool bias, double init_std, const char *out);

/* Standard deviation of projections that write to the residual stream: smaller, so that its
 * variance does not grow with depth. */
double qd_residual_std(const qd_model *m);

/* Grouped-query attention with all its parameters; per-head norms and rotary positions if the model
 * has them. */
qd_val qd_attention_gqa(qd_layer *b, qd_val x);
/* What the attention of a model's layers may differ in: a variant is a set of these. Window: a
 * token attends to the last model.window tokens, itself included. No rope: queries and keys are not
 * rotated. */
enum { QD_ATTENTION_WINDOW = 1, QD_ATTENTION_NO_ROPE = 2, QD_ATTENTION_VARIANTS = 4 };
int qd_attention_variant(const qd_model *m, int layer);
qd_val qd_attention_as(qd_layer *b, qd_val x, int variant); /* qd_attention_gqa is variant 0 */
/* For families whose layers differ in the window only; 0: none. */
qd_val qd_attention_in(qd_layer *b, qd_val x, int64_t window);
/* Multi-head latent attention with all its parameters. */
qd_val qd_attention_latent(qd_layer *b, qd_val x);
const qd_decl_op *qd_layer_op(const qd_layer *b, qd_decl_kind kind); /* its first op of this kind; NULL: it has none */
int64_t qd_layer_window(const qd_layer *b);                          /* the window of its attention; 0: none */
/* The dense MLP: up, activation, down; with a gated activation, gate and up are one GEMM. */
qd_val qd_mlp(qd_layer *b, qd_val x);
/* Router, routed experts (gated MLPs) and shared experts. */
qd_val qd_mlp_experts(qd_layer *b, qd_val x);
/* Whether an op reads a value. */
bool qd_decl_reads(const qd_decl_op *op, qd_val value);
/* x + branch, with the model's dropout on the branch. */
qd_val qd_residual(qd_layer *b, qd_val x, qd_val branch, const char *dropped, const char *out);

/* Token table (and position table), scaled if the model does, with dropout. */
qd_val qd_embedding(qd_layer *b);
/* The head's matrix, tied or not, and the loss. */
qd_weight qd_head_loss(qd_layer *b, qd_val x);
/* Multi-token prediction (DeepSeek V3). qd_ahead_begin starts prediction module k, counted from 1:
 * it joins the normed rows x of what comes before it with the embeddings of the tokens k further
 * on. The family declares the layer between. qd_ahead_end norms it and adds the loss of the tokens
 * that follow those; it returns what the next module reads. All share the token table and the
 * head's matrix. */
qd_val qd_ahead_begin(qd_layer *b, qd_val x, qd_weight matrix, int k);
qd_val qd_ahead_end(qd_layer *b, qd_val x, qd_weight matrix);

/* Declares any op of the table, for families that need more than the functions above. */
qd_val qd_declare_op(qd_layer *b, qd_decl_op op, const char *out, int64_t cols);
qd_weight qd_declare_vector(qd_layer *b, const char *suffix, int64_t size, qd_init init, qd_split split);
#endif
