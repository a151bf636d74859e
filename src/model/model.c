/* Validates models, and counts their parameters and FLOPs. */
#include "model/model.h"

#include <math.h>

static qd_status need_positive(const char *key, int64_t value)
{
    if (value < 1)
        return QD_FAIL(QD_USAGE, "model.%s is %lld: it must be at least 1", key, (long long)value);
    return QD_OK;
}

/* Whether Mistral of transformers, and Phi-3, compute this model. */
static bool is_mistral(const qd_model *m)
{
    bool biases = m->qkv_bias || m->out_bias || m->mlp_bias;
    return m->norm == QD_NORM_RMS && m->position == QD_POSITION_ROPE && m->activation == QD_ACT_SWIGLU && !biases && !m->qk_norm &&
           m->clip_qkv == 0.0 && !m->sinks && !m->embed_scaled && m->logit_softcap == 0.0 && m->moe.experts == 0 &&
           !(m->window > 0 && (m->window_from > 0 || m->full_every > 0));
}

qd_status qd_model_validate(const qd_model *m)
{
    QD_TRY(need_positive("layers", m->layers));
    QD_TRY(need_positive("hidden", m->hidden));
    QD_TRY(need_positive("heads", m->heads));
    QD_TRY(need_positive("kv_heads", m->kv_heads));
    QD_TRY(need_positive("head_dim", m->head_dim));
    QD_TRY(need_positive("ffn", m->ffn));
    QD_TRY(need_positive("vocab", m->vocab));
    if (m->vocab > INT32_MAX)
        return QD_FAIL(QD_USAGE, "model.vocab is %lld: token ids are 32 bit, at most 2147483647", (long long)m->vocab);
    double width = (double)m->hidden + (double)m->heads * m->head_dim + (double)m->ffn;
    if ((double)m->layers * (double)m->hidden * width + (double)m->vocab * (double)m->hidden > 1e15)
        return QD_FAIL(QD_USAGE, "model.layers, hidden, ffn and vocab make more than 10^15 parameters together: lower one of them");
    /* Lists of tensors are built next. Llama 3 405B has about 1,100, DeepSeek V3 45,000. */
    const double most_tensors = 1e6, tensors = (double)m->layers * (12.0 + 3.0 * (double)m->moe.experts);
    if (tensors > most_tensors)
        return QD_FAIL(QD_USAGE, "model.layers=%d with model.experts=%d make about %.3g tensors, and at most %.0f are supported: lower one "
                                 "of them", (int)m->layers, (int)m->moe.experts, tensors, most_tensors);
    if (m->heads % m->kv_heads != 0)
        return QD_FAIL(QD_USAGE, "model.heads (%d) must be a multiple of model.kv_heads (%d)", m->heads, m->kv_heads);
    if (m->head_dim % 2 != 0 || m->head_dim > 256)
        return QD_FAIL(QD_USAGE, "model.head_dim is %d: it must be even and at most 256", m->head_dim);
    if (m->position == QD_POSITION_LEARNED)
        QD_TRY(need_positive("max_seq", m->max_seq));
    if (qd_model_is_latent(m))
        QD_TRY(qd_latent_validate(m));
    else if (m->mtp_modules > 0)
        return QD_FAIL(QD_USAGE, "model.mtp_modules is %d: only model.arch=deepseek has prediction modules", m->mtp_modules);
    QD_TRY(qd_rope_validate(m));
    if (m->window < 0 || m->window_from < 0 || m->full_every < 0)
        return QD_FAIL(QD_USAGE, "model.window, window_from and full_every must not be negative");
    if (m->window > 0 && m->window_from >= m->layers)
        return QD_FAIL(QD_USAGE, "model.window_from is %d: the model has %d layers, so none has the window; set model.window=0",
                       m->window_from, m->layers);
    if (m->window > 0 && m->full_every == 1)
        return QD_FAIL(QD_USAGE, "model.full_every is 1, so no layer has the window: set model.window=0");
    if (!(m->score_scale >= 0.0 && m->score_softcap >= 0.0))
        return QD_FAIL(QD_USAGE, "model.score_scale (%g) and model.score_softcap (%g) must not be negative", m->score_scale,
                       m->score_softcap);
    if (m->hf_type != QD_HF_DERIVED && !is_mistral(m))
        return QD_FAIL(QD_USAGE, "model.hf_type is %s, which has RMS norms, rotary positions, SwiGLU, a window in all layers or "
                                 "in none, and neither biases, norms or clipping of queries and keys nor experts: set "
                                 "model.hf_type=derived", m->hf_type == QD_HF_MISTRAL ? "mistral" : "phi3");
    if (!(m->dropout >= 0.0 && m->dropout < 1.0))
        return QD_FAIL(QD_USAGE, "model.dropout is %g: it must be at least 0 and below 1", m->dropout);
    if (!(m->norm_eps > 0.0))
        return QD_FAIL(QD_USAGE, "model.norm_eps is %g: it must be above 0", m->norm_eps);
    if (!(m->init_std >= 0.0))
        return QD_FAIL(QD_USAGE, "model.init_std is %g: it must not be negative", m->init_std);
    if (m->norm == QD_NORM_RMS_ONE && m->qk_norm && m->qk_over == QD_QK_WIDTH)
        return QD_FAIL(QD_USAGE, "model.qk_norm_over=width: in model.arch=%s each head has its own norm; set model.qk_norm_over=head",
                       qd_arch_name(m->arch));
    if (qd_model_norms_behind(m) && m->moe.experts > 0)
        return QD_FAIL(QD_USAGE, "model.experts is %d: model.arch=%s has no experts", m->moe.experts, qd_arch_name(m->arch));
    return m->moe.experts > 0 ? qd_moe_validate(m) : QD_OK;
}

/* Elements of the matrices of attention. */
static int64_t attention_weights(const qd_model *m)
{
    int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim, o = (int64_t)m->heads * qd_model_v_dim(m);
    if (!qd_model_is_latent(m))
        return m->hidden * (q + 2 * kv) + o * m->hidden;
    int64_t queries = m->q_lora_rank > 0 ? m->q_lora_rank * (m->hidden + q) : m->hidden * q;
    return queries + m->hidden * (m->kv_lora_rank + m->qk_rope_head_dim) +
           (int64_t)m->kv_lora_rank * m->heads * (m->qk_nope_head_dim + m->v_head_dim) + o * m->hidden;
}

/* Layers of prediction modules follow those of the trunk, and are like the last of them. */
static int all_layers(const qd_model *m)
{
    return m->layers + qd_model_ahead(m);
}

static bool has_experts(const qd_model *m, int layer)
{
    return qd_model_has_experts(m, layer < m->layers ? layer : m->layers - 1);
}

/* Elements of the matrices of all blocks and prediction modules, with `experts` experts in each
 * block that has them. */
static int64_t matrix_weights(const qd_model *m, int experts)
{
    int64_t matrices = qd_activation_is_gated(m->activation) ? 3 : 2, total = 2 * m->hidden * m->hidden * qd_model_ahead(m);
    for (int layer = 0; layer < all_layers(m); layer++) {
        total += attention_weights(m);
        if (has_experts(m, layer))
            total += m->hidden * (m->moe.experts + (m->moe.shared > 0 && m->moe.shared_gate)) +
                     matrices * m->hidden * (m->moe.ffn * experts + qd_moe_shared_width(&m->moe));
        else
            total += matrices * m->hidden * m->ffn;
    }
    return total;
}

int64_t qd_model_parameters(const qd_model *m)
{
    int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
    int64_t norm = m->norm == QD_NORM_PLAIN ? 0 : m->norm == QD_NORM_LAYER ? 2 * m->hidden : m->hidden;
    int64_t block = (qd_model_is_gemma(m) ? 4 : 2) * norm + (!m->qk_norm ? 0 : m->qk_over == QD_QK_WIDTH ? q + kv : 2 * m->head_dim);
    if (qd_model_is_latent(m))
        block += m->q_lora_rank + m->kv_lora_rank;
    if (m->qkv_bias)
        block += q + 2 * kv;
    if (m->out_bias)
        block += m->hidden;
    if (m->sinks)
        block += m->heads;
    int64_t wide = qd_activation_is_gated(m->activation) ? 2 : 1;
    int64_t total = matrix_weights(m, m->moe.experts) + all_layers(m) * block + norm + m->vocab * m->hidden * (m->tied ? 1 : 2);
    total += 3 * norm * qd_model_ahead(m); /* of the embeddings, of what comes before, and of the result */
    if (m->position == QD_POSITION_LEARNED)
        total += m->max_seq * m->hidden;
    for (int layer = 0; layer < all_layers(m); layer++) {
        bool routed = has_experts(m, layer);
        if (m->mlp_bias)
            total += routed ? m->moe.experts * (m->hidden + wide * m->moe.ffn) : m->hidden + wide * m->ffn;
        total += routed && (m->moe.bias || m->moe.logit_bias) ? m->moe.experts : 0;
    }
    return total;
}

double qd_model_flops_per_token(const qd_model *m, int64_t seq)
{
    double weights = (double)matrix_weights(m, m->moe.per_token) + (double)m->vocab * (double)m->hidden * (1 + qd_model_ahead(m));
    return (m->lora.rank > 0 ? 4.0 : 6.0) * weights + qd_model_attention_flops(m, seq);
}

double qd_model_attention_flops(const qd_model *m, int64_t seq)
{
    double keys = 0.0;
    for (int layer = 0; layer < all_layers(m); layer++)
        keys += qd_window_keys(qd_model_has_window(m, layer) ? m->window : 0, seq);
    return 6.0 * keys * ((double)m->heads * (m->head_dim + qd_model_v_dim(m)));
}

float qd_model_score_scale(const qd_model *m)
{
    if (m->score_scale > 0.0)
        return (float)m->score_scale;
    double all = qd_model_is_latent(m) && m->rope.scaling == QD_ROPE_YARN && m->rope.mscale_all_dim > 0.0
                     ? qd_rope_mscale(m->rope.factor, m->rope.mscale_all_dim)
                     : 1.0;
    return (float)(all * all) * (1.0f / sqrtf((float)m->head_dim));
}
