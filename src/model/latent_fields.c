/* The fields of latent attention and multi-token prediction (latent.c): widths that a configuration
 * leaves out, and which values are possible. */
#include "model/family.h"

void qd_latent_derive(qd_model *m)
{
    if (m->qk_nope_head_dim == 0 && m->heads > 0)
        m->qk_nope_head_dim = (int)(m->hidden / m->heads + 1) / 2 * 2;
    if (m->qk_rope_head_dim == 0)
        m->qk_rope_head_dim = (m->qk_nope_head_dim + 3) / 4 * 2;
    if (m->v_head_dim == 0)
        m->v_head_dim = m->qk_nope_head_dim;
    if (m->kv_lora_rank == 0)
        m->kv_lora_rank = 4 * m->v_head_dim;
    if (m->head_dim == 0)
        m->head_dim = m->qk_nope_head_dim + m->qk_rope_head_dim;
}

static qd_status positive(const char *key, int value)
{
    return value >= 1 ? QD_OK : QD_FAIL(QD_USAGE, "model.%s is %d: model.arch=deepseek needs at least 1", key, value);
}

qd_status qd_latent_validate(const qd_model *m)
{
    QD_TRY(positive("kv_lora_rank", m->kv_lora_rank));
    QD_TRY(positive("qk_nope_head_dim", m->qk_nope_head_dim));
    QD_TRY(positive("qk_rope_head_dim", m->qk_rope_head_dim));
    QD_TRY(positive("v_head_dim", m->v_head_dim));
    if (m->qk_rope_head_dim % 2 != 0)
        return QD_FAIL(QD_USAGE, "model.qk_rope_head_dim is %d: it must be even, because pairs are rotated", m->qk_rope_head_dim);
    if (m->head_dim != m->qk_nope_head_dim + m->qk_rope_head_dim)
        return QD_FAIL(QD_USAGE, "model.head_dim is %d: with model.arch=deepseek it is qk_nope_head_dim + qk_rope_head_dim (%d)",
                       m->head_dim, m->qk_nope_head_dim + m->qk_rope_head_dim);
    if (m->kv_heads != m->heads)
        return QD_FAIL(QD_USAGE, "model.kv_heads is %d: with model.arch=deepseek every head has its own keys (%d)", m->kv_heads, m->heads);
    if (m->v_head_dim > 256)
        return QD_FAIL(QD_USAGE, "model.v_head_dim is %d: it must be at most 256", m->v_head_dim);
    if (m->mtp_modules < 0 || !(m->mtp_weight >= 0.0))
        return QD_FAIL(QD_USAGE, "model.mtp_modules (%d) and model.mtp_weight (%g) must not be negative", m->mtp_modules, m->mtp_weight);
    if (m->mtp_modules > 1 && m->moe.experts > 0)
        return QD_FAIL(QD_USAGE, "model.mtp_modules is %d: a model with experts has at most 1", m->mtp_modules);
    if (m->mtp_modules > 0 && m->dropout > 0.0)
        return QD_FAIL(QD_USAGE, "model.dropout is %g: modules of model.mtp_modules have no dropout; set one of both to 0", m->dropout);
    if (m->mtp_modules > 0 && m->lora.rank > 0)
        return QD_FAIL(QD_USAGE, "model.mtp_modules is %d: adapters (lora.rank) are trained without them; set model.mtp_modules=0",
                       m->mtp_modules);
    if (!(m->latent_norm_eps > 0.0))
        return QD_FAIL(QD_USAGE, "model.latent_norm_eps is %g: it must be above 0", m->latent_norm_eps);
    const struct {
        const char *key;
        bool used;
    } absent[] = {{"window", m->window > 0},         {"qk_norm", m->qk_norm},    {"clip_qkv", m->clip_qkv > 0.0},
                  {"qkv_bias", m->qkv_bias},         {"out_bias", m->out_bias},  {"nope_every", m->rope.nope_every > 0},
                  {"rope_fraction", m->rope.fraction != 1.0},
                  {"sinks", m->sinks}};
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        if (absent[i].used)
            return QD_FAIL(QD_USAGE, "model.%s is not for model.arch=deepseek: leave it out", absent[i].key);
    return QD_OK;
}
