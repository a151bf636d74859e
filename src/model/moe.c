/* Validates the fields of a model with experts. */
#include "model/model.h"

qd_status qd_moe_validate(const qd_model *m)
{
    const qd_moe *e = &m->moe;
    if (!qd_activation_is_swiglu(m->activation))
        return QD_FAIL(QD_USAGE, "model.experts: experts are gated by SiLU: set model.activation to swiglu or swiglu_clamped");
    if (m->mlp_bias && e->shared > 0)
        return QD_FAIL(QD_USAGE, "model.shared_experts is %d: shared experts have no biases; set model.mlp_bias=false", e->shared);
    if (e->logit_bias && e->bias)
        return QD_FAIL(QD_USAGE, "model.router_logit_bias and model.router_bias exclude each other: a router has one bias");
    if (e->per_token < 1 || e->per_token > e->experts)
        return QD_FAIL(QD_USAGE, "model.experts_per_token is %d: it must be from 1 to model.experts (%d)", e->per_token, e->experts);
    if (e->ffn < 1)
        return QD_FAIL(QD_USAGE, "model.expert_ffn is %lld: it must be at least 1", (long long)e->ffn);
    if (e->shared < 0 || e->first_dense < 0 || e->first_dense > m->layers)
        return QD_FAIL(QD_USAGE, "model.shared_experts must not be negative, model.first_dense must be from 0 to model.layers (%d)",
                       m->layers);
    if (e->shared == 0 && (e->shared_gate || e->shared_ffn > 0))
        return QD_FAIL(QD_USAGE, "model.shared_gate and model.shared_ffn are of shared experts: set model.shared_experts");
    if ((double)m->layers * ((double)e->experts * (double)e->ffn + (double)qd_moe_shared_width(e)) * (double)m->hidden > 1e15)
        return QD_FAIL(QD_USAGE,
                       "model.experts, expert_ffn, hidden and layers make more than 10^15 parameters together: lower one of them");
    if (e->groups < 1 || e->experts % e->groups != 0)
        return QD_FAIL(QD_USAGE, "model.router_groups is %d: it must divide model.experts (%d)", e->groups, e->experts);
    if (e->top_groups < 1 || e->top_groups > e->groups || e->top_groups * (e->experts / e->groups) < e->per_token)
        return QD_FAIL(QD_USAGE,
                       "model.router_top_groups is %d: it must be from 1 to model.router_groups (%d), and the groups must hold "
                       "%d experts together",
                       e->top_groups, e->groups, e->per_token);
    if (!(e->scale > 0.0))
        return QD_FAIL(QD_USAGE, "model.router_scale is %g: it must be above 0", e->scale);
    if (e->bias_rate > 0.0 && !e->bias)
        return QD_FAIL(QD_USAGE, "model.router_bias_rate moves the biases of experts: it needs model.router_bias");
    return QD_OK;
}

/* DeepSeek-V3 sums as many top scores as a token would choose from each group if it chose evenly;
 * with softmax (DeepSeek-V2) only the best score counts. */
int qd_moe_group_best(const qd_moe *e)
{
    if (e->group_best > 0)
        return e->group_best;
    int best = e->router == QD_ROUTER_SIGMOID ? e->per_token / e->top_groups : 1;
    return best < 1 ? 1 : best;
}
