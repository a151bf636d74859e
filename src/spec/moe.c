/* What a model with experts must be, and how its options are read. */
#include "spec/config.h"
#include "spec/program_impl.h"

#include <string.h>

enum { GPU_EXPERTS = 512, GPU_CHOICES = 32 }; /* what the kernels of device/cuda take */

qd_status qd_moe_validate(const qd_model *m)
{
    const qd_moe *e = &m->moe;
    if (m->activation != QD_ACT_SWIGLU || m->linear_bias)
        return QD_FAIL(QD_USAGE, "model.experts: experts are gated MLPs without biases (model.activation swiglu, model.linear_bias false)");
    if (e->per_token < 1 || e->per_token > e->experts)
        return QD_FAIL(QD_USAGE, "model.experts_per_token is %d: it must be from 1 to model.experts (%d)", e->per_token, e->experts);
    if (e->ffn < 1)
        return QD_FAIL(QD_USAGE, "model.expert_ffn is %lld: it must be at least 1", (long long)e->ffn);
    if (e->shared < 0 || e->first_dense < 0 || e->first_dense > m->layers)
        return QD_FAIL(QD_USAGE, "model.shared_experts must not be negative, model.first_dense must be from 0 to model.layers (%d)",
                       m->layers);
    if ((double)m->layers * e->experts * (double)e->ffn * (double)m->hidden > 1e15)
        return QD_FAIL(QD_USAGE,
                       "model.experts, expert_ffn, hidden and layers make more than 10^15 parameters together: lower one of them");
    if (e->groups < 1 || e->experts % e->groups != 0)
        return QD_FAIL(QD_USAGE, "model.router_groups is %d: it must divide model.experts (%d)", e->groups, e->experts);
    if (e->top_groups < 1 || e->top_groups > e->groups || e->top_groups * (e->experts / e->groups) < e->per_token)
        return QD_FAIL(QD_USAGE, "model.router_top_groups is %d: it must be from 1 to model.router_groups (%d), and the groups must hold "
                                 "%d experts together", e->top_groups, e->groups, e->per_token);
    if (!(e->scale > 0.0))
        return QD_FAIL(QD_USAGE, "model.router_scale is %g: it must be above 0", e->scale);
    if (e->bias_rate > 0.0 && !e->bias)
        return QD_FAIL(QD_USAGE, "model.router_bias_rate moves the biases of experts: it needs model.router_bias");
    return QD_OK;
}

bool qd_moe_equal(const qd_moe *a, const qd_moe *b)
{
    if (a->experts == 0 || b->experts == 0)
        return a->experts == b->experts;
    return a->experts == b->experts && a->per_token == b->per_token && a->ffn == b->ffn && a->shared == b->shared &&
           a->first_dense == b->first_dense && a->router == b->router && a->normalised == b->normalised && a->scale == b->scale &&
           a->groups == b->groups && a->top_groups == b->top_groups && a->aux_loss == b->aux_loss && a->balance == b->balance &&
           a->z_loss == b->z_loss && a->bias == b->bias && a->bias_rate == b->bias_rate && a->capacity == b->capacity &&
           a->drop == b->drop;
}

/* DeepSeek-V3 adds the best scores that a token would choose from a group if it chose evenly; with softmax (DeepSeek-V2) the
 * best score alone counts. */
int qd_moe_group_best(const qd_moe *e)
{
    int best = e->router == QD_ROUTER_SIGMOID ? e->per_token / e->top_groups : 1;
    return best < 1 ? 1 : best;
}

static bool takes(const qd_options *o, const char *key, bool always)
{
    return always || qd_options_is_set(o, key);
}

qd_status qd_moe_check(const qd_model *m, const qd_strategy *s)
{
    bool cpu = strcmp(s->traits->device, "cpu") == 0;
    if (!cpu && (m->moe.experts > GPU_EXPERTS || m->moe.per_token > GPU_CHOICES))
        return QD_FAIL(QD_UNSUPPORTED, "on a GPU model.experts may be at most %d and model.experts_per_token %d; they are %d and %d",
                       GPU_EXPERTS, GPU_CHOICES, m->moe.experts, m->moe.per_token);
    if (m->moe.experts > 0 && m->moe.bias_rate > 0.0 && s->training && s->grad != QD_F32)
        return QD_FAIL(QD_USAGE, "model.router_bias_rate counts tokens beside the gradients, which train.grad_dtype=bf16 cannot: leave it "
                                 "at auto, or set fp32");
    return QD_OK;
}

/* `always`: without a preset the table's defaults count. */
void qd_moe_resolve(const qd_options *o, bool always, qd_model *m)
{
    qd_moe *e = &m->moe;
    const struct {
        const char *key;
        int *value;
    } sizes[] = {{"model.experts", &e->experts},          {"model.experts_per_token", &e->per_token},
                 {"model.shared_experts", &e->shared},    {"model.first_dense", &e->first_dense},
                 {"model.router_groups", &e->groups},     {"model.router_top_groups", &e->top_groups}};
    const struct {
        const char *key;
        double *value;
    } numbers[] = {{"model.router_scale", &e->scale},         {"model.aux_loss", &e->aux_loss},
                   {"model.z_loss", &e->z_loss},              {"model.router_bias_rate", &e->bias_rate},
                   {"model.expert_capacity", &e->capacity}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (takes(o, sizes[i].key, always))
            *sizes[i].value = (int)qd_options_int(o, sizes[i].key);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (takes(o, numbers[i].key, always))
            *numbers[i].value = qd_options_float(o, numbers[i].key);
    if (takes(o, "model.expert_ffn", always))
        e->ffn = qd_options_int(o, "model.expert_ffn");
    if (takes(o, "model.router", always))
        e->router = (qd_router_kind)qd_options_enum(o, "model.router");
    if (takes(o, "model.router_normalised", always))
        e->normalised = qd_options_bool(o, "model.router_normalised");
    if (takes(o, "model.balance", always))
        e->balance = (qd_balance)qd_options_enum(o, "model.balance");
    if (takes(o, "model.drop", always))
        e->drop = (qd_drop)qd_options_enum(o, "model.drop");
    int bias = qd_options_enum(o, "model.router_bias");
    if (bias > 0)
        e->bias = bias == 1;
    else if (qd_options_is_set(o, "model.router_bias_rate") || always)
        e->bias = e->bias_rate > 0.0;
    if (e->ffn == 0)
        e->ffn = m->ffn;
}
