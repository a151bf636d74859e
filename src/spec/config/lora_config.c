/* The lora.* options: which adapters a run trains, and what layouts and devices cannot do with
 * them. */
#include "spec/config/config.h"

#include <float.h>
#include <string.h>

static qd_status parse_targets(const char *text, unsigned *targets)
{
    char word[32];
    *targets = 0;
    for (const char *at = text; *at;) {
        size_t length = strcspn(at, ", ");
        if (length >= sizeof word)
            length = sizeof word - 1;
        memcpy(word, at, length);
        word[length] = '\0';
        unsigned found = length > 0 ? qd_lora_find(word) : 0;
        if (length > 0 && found == 0)
            return QD_FAIL(QD_USAGE,
                           "lora.targets: '%s' is none of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, router, "
                           "shared_expert_gate and all-linear",
                           word);
        *targets |= found;
        at += length;
        at += strspn(at, ", ");
    }
    return *targets ? QD_OK : QD_FAIL(QD_USAGE, "lora.targets is empty: name layers, such as q_proj,v_proj, or all-linear");
}

/* Whether routed experts have adapters. */
static bool adapts_experts(const qd_model *m)
{
    return m->moe.experts > 0 && qd_lora_takes(&m->lora, "gate") + qd_lora_takes(&m->lora, "up") + qd_lora_takes(&m->lora, "down") > 0;
}

static qd_status check_model(const qd_model *m)
{
    bool gated = qd_activation_is_gated(m->activation) || m->moe.experts > 0;
    if (m->lora.targets & 1u << QD_LORA_GATE && !gated)
        return QD_FAIL(QD_USAGE, "lora.targets: the MLP of this model has no gate_proj; up_proj and down_proj are its layers");
    const unsigned absent = 1u << QD_LORA_K | 1u << QD_LORA_V | (m->q_lora_rank > 0 ? 1u << QD_LORA_Q : 0);
    if (qd_model_is_latent(m) && m->lora.targets & absent)
        return QD_FAIL(QD_USAGE, "lora.targets: latent attention has no %sk_proj and v_proj; all-linear includes its layers",
                       m->q_lora_rank > 0 ? "q_proj, " : "");
    if (m->lora.targets & 1u << QD_LORA_ROUTER && m->moe.experts == 0)
        return QD_FAIL(QD_USAGE, "lora.targets: the model has no router");
    if (m->lora.targets & 1u << QD_LORA_SHARED_GATE && (m->moe.experts == 0 || m->moe.shared == 0 || !m->moe.shared_gate))
        return QD_FAIL(QD_USAGE, "lora.targets: the model has no shared_expert_gate (model.shared_gate)");
    if (m->lora.dropout > 0.0 && adapts_experts(m))
        return QD_FAIL(QD_UNSUPPORTED, "lora.dropout does not reach the adapters of routed experts: set it to 0, or leave gate_proj, "
                                       "up_proj and down_proj out of lora.targets");
    return QD_OK;
}

qd_status qd_lora_resolve(const qd_options *o, qd_model *m)
{
    qd_lora *l = &m->lora;
    *l = (qd_lora){.rank = (int)qd_options_int(o, "lora.rank"),
                   .alpha = qd_options_float(o, "lora.alpha"),
                   .dropout = qd_options_float(o, "lora.dropout"),
                   .rslora = qd_options_bool(o, "lora.rslora"),
                   .stored = qd_options_string(o, "run.weights")[0] != '\0'};
    const struct {
        const char *key;
        bool set;
    } others[] = {{"lora.alpha", l->alpha != 0.0}, {"lora.dropout", l->dropout != 0.0}, {"lora.rslora", l->rslora},
                  {"lora.targets", strcmp(qd_options_string(o, "lora.targets"), QD_LORA_ALL_WORD) != 0}};
    for (size_t i = 0; i < sizeof others / sizeof *others && l->rank == 0; i++)
        if (others[i].set)
            return QD_FAIL(QD_USAGE, "%s has no effect without lora.rank: set it, to 16 for example", others[i].key);
    if (l->rank == 0)
        return QD_OK;
    if (l->alpha == 0.0)
        l->alpha = l->rank;
    if ((float)qd_lora_scale(l) < FLT_MIN)
        return QD_FAIL(QD_USAGE, "lora.alpha is %g: what adapters add would be 0; 0 stands for the rank", l->alpha);
    QD_TRY(parse_targets(qd_options_string(o, "lora.targets"), &l->targets));
    return check_model(m);
}

qd_status qd_lora_check(const qd_config *c)
{
    const qd_model *m = &c->model;
    int tp = c->degrees[QD_AXIS_TP];
    if (m->lora.rank == 0)
        return QD_OK;
    if (c->etp > 1 && adapts_experts(m))
        return QD_FAIL(QD_UNSUPPORTED, "parallel.etp=%d shards the matrices of experts, which their adapters do not support: set "
                                       "parallel.ep instead, or leave gate_proj, up_proj and down_proj out of lora.targets",
                       c->etp);
    if (m->lora.dropout > 0.0 && tp > 1 && m->ffn % tp != 0 && qd_lora_takes(&m->lora, "down"))
        return QD_FAIL(QD_UNSUPPORTED, "lora.dropout on down_proj: parallel.tp=%d does not divide the inner width of the MLP (%lld)", tp,
                       (long long)m->ffn);
    return QD_OK;
}
