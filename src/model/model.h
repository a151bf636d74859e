/* The definition of a model: its dimensions and the kinds of its parts. Pure data. */
#ifndef QD_MODEL_MODEL_H
#define QD_MODEL_MODEL_H

#include "model/fields.h"
#include "model/lora.h"

#include <quadrille/status.h>
#include <quadrille/types.h>

#define QD_ARCH_ENUMERATOR(name, word, family) QD_ARCH_##name,
typedef enum qd_arch { QD_ARCHS(QD_ARCH_ENUMERATOR) QD_ARCH_COUNT } qd_arch;

/* The words of these enums are in fields.h, in the same order. */
/* LayerNorm with weight and bias, RMS norm, LayerNorm without either, RMS norm that scales by 1 +
 * weight. */
typedef enum qd_norm_kind { QD_NORM_LAYER, QD_NORM_RMS, QD_NORM_PLAIN, QD_NORM_RMS_ONE } qd_norm_kind;
typedef enum qd_qk_over { QD_QK_HEAD, QD_QK_WIDTH } qd_qk_over;
typedef enum qd_position_kind { QD_POSITION_LEARNED, QD_POSITION_ROPE } qd_position_kind;
typedef enum qd_rope_scaling { QD_ROPE_NONE, QD_ROPE_LLAMA3, QD_ROPE_LINEAR, QD_ROPE_YARN, QD_ROPE_DYNAMIC, QD_ROPE_LONG } qd_rope_scaling;
typedef enum qd_hf_type { QD_HF_DERIVED, QD_HF_MISTRAL, QD_HF_PHI3 } qd_hf_type;
typedef enum qd_router_kind { QD_ROUTER_SOFTMAX, QD_ROUTER_SIGMOID } qd_router_kind;
typedef enum qd_balance { QD_BALANCE_SEQUENCE, QD_BALANCE_BATCH } qd_balance;
typedef enum qd_drop { QD_DROP_LAST, QD_DROP_LEAST } qd_drop;

/* A list of at most as many numbers as a head has pairs of elements. */
enum { QD_NUMBERS_MOST = 128 };
typedef struct qd_number_list {
    int64_t count;
    double at[QD_NUMBERS_MOST]; /* 0 beyond count */
} qd_number_list;

/* The members and their meaning are in fields.h. */
typedef struct qd_rope {
    QD_ROPE_FIELDS(QD_FIELD_MEMBER, QD_FIELD_IMPLIED_MEMBER)
} qd_rope;

typedef struct qd_moe {
    QD_MOE_FIELDS(QD_FIELD_MEMBER, QD_FIELD_IMPLIED_MEMBER)
} qd_moe;

typedef struct qd_model {
    char name[64];
    QD_MODEL_SIZES(QD_FIELD_MEMBER, QD_FIELD_IMPLIED_MEMBER)
    qd_rope rope;
    QD_SCORE_FIELDS(QD_FIELD_MEMBER, QD_FIELD_IMPLIED_MEMBER)
    QD_LATENT_FIELDS(QD_FIELD_MEMBER, QD_FIELD_IMPLIED_MEMBER)
    QD_MODEL_KINDS(QD_FIELD_MEMBER, QD_FIELD_IMPLIED_MEMBER)
    qd_moe moe;
    qd_lora lora; /* not a field of the table: it belongs to a run, not to a model */
} qd_model;

/* The defaults of the table (fields.h), and those of the architecture where the table says auto;
 * required sizes are 0. */
qd_model qd_model_default(qd_arch arch);

/* QD_USAGE with one line that names the key and the remedy. */
qd_status qd_model_validate(const qd_model *model);

/* Number of parameter elements; tied parameters are counted once. */
int64_t qd_model_parameters(const qd_model *model);

/* Whether a block has experts. */
static inline bool qd_model_has_experts(const qd_model *model, int layer)
{
    return model->moe.experts > 0 && layer >= model->moe.first_dense;
}

/* Whether the attention of a block has a window. */
static inline bool qd_model_has_window(const qd_model *model, int layer)
{
    return model->window > 0 && layer >= model->window_from && !(model->full_every > 0 && (layer + 1) % model->full_every == 0);
}

/* Whether a block rotates its queries and keys. */
static inline bool qd_model_has_rope(const qd_model *model, int layer)
{
    return model->position == QD_POSITION_ROPE && !(model->rope.nope_every > 0 && (layer + 1) % model->rope.nope_every == 0);
}

/* Whether attention is multi-head latent attention. */
static inline bool qd_model_is_latent(const qd_model *model)
{
    return model->arch == QD_ARCH_DEEPSEEK;
}

/* Modules that predict further tokens. */
static inline int qd_model_ahead(const qd_model *model)
{
    return qd_model_is_latent(model) ? model->mtp_modules : 0;
}

/* Size of a head of values, and of the result of attention. */
static inline int qd_model_v_dim(const qd_model *model)
{
    return qd_model_is_latent(model) ? model->v_head_dim : model->head_dim;
}

/* Columns of queries, keys and values side by side, for these numbers of heads. */
static inline int64_t qd_model_qkv(const qd_model *model, int64_t heads, int64_t kv_heads)
{
    return (heads + kv_heads) * model->head_dim + kv_heads * qd_model_v_dim(model);
}

/* latent_fields.c: the part of qd_model_validate for latent attention, and defaults. */
qd_status qd_latent_validate(const qd_model *model);
void qd_latent_derive(qd_model *model); /* sizes that are 0, in DeepSeek V3's proportions; head_dim */

/* Factor on attention scores. */
float qd_model_score_scale(const qd_model *model);

/* Twice the mean number of keys that a token of a sequence attends to: seq without a window, so
 * that it is the number of keys in formulas for non-causal attention. */
static inline double qd_window_keys(int64_t window, int64_t seq)
{
    double w = (double)window, t = (double)seq;
    return window > 0 && window < seq ? 2.0 * w - w * w / t : t;
}

/* Whether norms divide by the root mean square, without subtracting the mean. */
static inline bool qd_model_norm_is_rms(const qd_model *model)
{
    return model->norm == QD_NORM_RMS || model->norm == QD_NORM_RMS_ONE;
}

static inline bool qd_model_is_gemma(const qd_model *model)
{
    return model->arch == QD_ARCH_GEMMA2 || model->arch == QD_ARCH_GEMMA3;
}

/* Whether what a branch adds to the residual stream is normed. */
static inline bool qd_model_norms_behind(const qd_model *model)
{
    return model->arch == QD_ARCH_OLMO2 || qd_model_is_gemma(model);
}

/* moe.c: the part of qd_model_validate for experts, and the number of top scores that make up the
 * score of a group. */
qd_status qd_moe_validate(const qd_model *model);
int qd_moe_group_best(const qd_moe *moe);
/* Inner width of the shared experts together. */
static inline int64_t qd_moe_shared_width(const qd_moe *moe)
{
    return moe->shared_ffn > 0 && moe->shared > 0 ? moe->shared_ffn : moe->shared * moe->ffn;
}

/* Model FLOPs per token of one training step: 6 per matrix element (the token table counts if it is
 * the head, not as a lookup; of experts only those that a token uses), and 12·L·T·d for non-causal
 * attention, the convention of most published figures; in layers with windows, twice what the
 * windows contain. With adapters, 4 per element of a frozen matrix, which has no gradient; adapters
 * themselves are not counted. */
double qd_model_flops_per_token(const qd_model *model, int64_t seq);
/* The part of attention; causal attention is half of it. */
double qd_model_attention_flops(const qd_model *model, int64_t seq);

/* rope.c: rotary embeddings. */
qd_status qd_rope_validate(const qd_model *model); /* a part of qd_model_validate */
int qd_rope_dims(const qd_model *model);           /* elements of a head that are rotated */
double qd_rope_mscale(double factor, double mscale); /* 0.1 · mscale · ln(factor) + 1, as yarn scales lengths */
bool qd_rope_is_local(const qd_model *model);      /* layers with windows have a table of their own */
/* Number of tables, (seq, qd_rope_dims) each: none, one, or a second one of layers with windows. */
int qd_rope_tables(const qd_model *model);
/* Angles: table (seq, qd_rope_dims / 2, 2) = cosine, sine, times the attention factor of yarn or
 * longrope. length: that of the sequences, by which dynamic and longrope scale; at most seq. local:
 * of the layers with windows. */
void qd_rope_table(const qd_model *model, int64_t seq, int64_t length, bool local, float *table);
/* Whether sequences of two lengths have different angles at the same positions, with longrope. */
bool qd_rope_switches(const qd_model *model, int64_t length, int64_t other);

/* Compares all fields that apply to either model; the name is ignored. */
bool qd_model_equal(const qd_model *a, const qd_model *b);

const char *qd_arch_name(qd_arch arch);
qd_arch qd_arch_find(const char *name); /* QD_ARCH_COUNT: unknown */
#endif
