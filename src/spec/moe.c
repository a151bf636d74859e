/* What the kernels ask of a model with experts, and how its options are read. */
#include "spec/config.h"
#include "spec/program_impl.h"

#include <string.h>

enum { GPU_EXPERTS = 512, GPU_CHOICES = 32 }; /* what the kernels of device/cuda take */

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
