/* Blocks with experts. */
#include "nn/nn_impl.h"

#include <math.h>

qd_status qd_run_head_norm(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->head_norm(c->frame->stream, &(qd_head_norm_args){
        .x = c->at[0], .q_gamma = c->at[1], .k_gamma = c->at[2], .y = c->at[3], .rstd = c->at[4],
        .rows = c->op->m, .row_stride = c->op->n,
        .heads = c->op->heads, .kv_heads = c->op->kv_heads, .head_dim = m->head_dim,
        .eps = (float)m->norm_eps, .dtype = call_dtype(c, 0), .param_dtype = call_dtype(c, 1),
    });
}

qd_status qd_run_head_norm_grad(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->head_norm_backward(c->frame->stream, &(qd_head_norm_args){
        .d = c->at[0], .x = c->at[1], .q_gamma = c->at[2], .k_gamma = c->at[3], .rstd = c->at[4], .q_grad = c->at[5], .k_grad = c->at[6],
        .rows = c->op->m, .row_stride = c->op->n,
        .heads = c->op->heads, .kv_heads = c->op->kv_heads, .head_dim = m->head_dim, .accumulate = c->accumulate,
        .dtype = call_dtype(c, 0), .param_dtype = call_dtype(c, 2), .grad_dtype = call_dtype(c, 5),
    });
}

/* ---- the router ---- */

static qd_route_rule route_rule(const qd_op_call *c)
{
    const qd_moe *e = &call_model(c)->moe;
    return (qd_route_rule){.experts = e->experts, .per_token = e->per_token, .groups = e->groups, .top_groups = e->top_groups,
                           .group_best = qd_moe_group_best(e), .sigmoid = e->router == QD_ROUTER_SIGMOID,
                           .normalised = e->normalised, .scale = (float)e->scale};
}

qd_status qd_run_route(const qd_op_call *c)
{
    return c->frame->kernels->route(c->frame->stream, &(qd_route_args){
        .logits = c->at[0], .bias = c->at[1], .choice = c->at[2], .weight = c->at[3], .load = c->at[4],
        .rows = c->op->m, .first_row = c->op->first, .load_rows = c->op->k, .loads = c->slots[c->op->slot[4]].rows,
        .rule = route_rule(c), .bias_dtype = c->at[1] ? call_dtype(c, 1) : QD_F32,
    });
}

/* The balance: f of an expert is its load divided by the mean load, over the tokens of a sequence or of all that is computed
 * at the same time. Each token's part of the loss has the scale of its part of the loss of the model. */
qd_status qd_run_route_grad(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    const float scale = (float)c->op->scale;
    return c->frame->kernels->route_grad(c->frame->stream, &(qd_route_grad_args){
        .logits = c->at[0], .choice = c->at[1], .weight = c->at[2], .d_weight = c->at[3], .load = c->at[4], .d_logits = c->at[5],
        .rows = c->op->m, .first_row = c->op->first, .load_rows = c->op->k,
        .aux = (float)m->moe.aux_loss * scale,
        .load_scale = (float)(m->moe.experts / (m->moe.per_token * c->op->load_tokens)),
        .z = (float)m->moe.z_loss * scale,
        .rule = route_rule(c), .grad_dtype = call_dtype(c, 5),
    });
}

qd_status qd_run_route_plan(const qd_op_call *c)
{
    const qd_moe *e = &call_model(c)->moe;
    double mean = (double)c->op->m * e->per_token / e->experts;
    bool limited = e->capacity > 0.0 && c->frame->program->strategy.training; /* evaluation drops nothing */
    return c->frame->kernels->route_plan(c->frame->stream, &(qd_route_plan_args){
        .choice = c->at[0], .weight = c->at[1], .place = c->at[2], .from = c->at[3], .count = c->at[4],
        .rows = c->op->m, .limit = limited ? (int64_t)ceil(e->capacity * mean) : 0,
        .experts = e->experts, .per_token = e->per_token, .least = e->drop == QD_DROP_LEAST,
    });
}

qd_status qd_run_route_load(const qd_op_call *c)
{
    const qd_moe *e = &call_model(c)->moe;
    return c->frame->kernels->route_load(c->frame->stream, &(qd_route_load_args){
        .choice = c->at[0], .total = c->at[1], .assignments = c->op->m * e->per_token, .experts = e->experts});
}

/* ---- rows ---- */

/* Slots say how many choices a row has and what it chooses from: experts, or nodes (parallel.dispatch). */
static int choices_of(const qd_op_call *c, int from)
{
    return c->op->m > 0 ? (int)(c->slots[c->op->slot[from]].cols / c->op->m) : 1;
}

qd_status qd_run_permute(const qd_op_call *c)
{
    return c->frame->kernels->permute(c->frame->stream, &(qd_permute_args){
        .x = c->at[0], .from = c->at[1], .count = c->at[2], .y = c->at[3], .place = c->at[4],
        .rows = c->op->m, .cols = c->op->n, .per_token = choices_of(c, 1), .experts = (int)c->slots[c->op->slot[2]].cols,
        .dtype = call_dtype(c, 0),
    });
}

/* Rows of one of the copies that `slot` holds. */
static int64_t copy_rows(const qd_op_call *c, int slot)
{
    return c->slots[c->op->slot[slot]].rows / c->op->k;
}

qd_status qd_run_combine(const qd_op_call *c)
{
    return c->frame->kernels->combine(c->frame->stream, &(qd_combine_args){
        .x = c->at[0], .place = c->at[1], .weight = c->at[2], .add = c->at[3], .y = c->at[4],
        .rows = c->op->m, .cols = c->op->n, .per_token = (int)c->slots[c->op->slot[1]].cols, .copies = (int)c->op->k,
        .copy_rows = copy_rows(c, 0), .dtype = call_dtype(c, 0),
    });
}

qd_status qd_run_combine_grad(const qd_op_call *c)
{
    return c->frame->kernels->permute(c->frame->stream, &(qd_permute_args){
        .x = c->at[0], .old = c->at[1], .from = c->at[2], .place = c->at[3], .count = c->at[4], .weight = c->at[5], .y = c->at[6],
        .d_weight = c->at[7],
        .rows = c->op->m, .cols = c->op->n, .per_token = choices_of(c, 2), .experts = (int)c->slots[c->op->slot[4]].cols,
        .copies = (int)c->op->k, .copy_rows = copy_rows(c, 1), .dtype = call_dtype(c, 0),
    });
}

/* ---- products over experts: n, k of the op are those of one expert's matrix as the product sees it ---- */

static qd_grouped_args grouped(const qd_op_call *c, int a, int b, int counts, int y)
{
    const qd_slot *table = &c->slots[c->op->slot[counts]];
    return (qd_grouped_args){
        .a = c->at[a], .b = c->at[b], .c = c->at[y], .counts = (const int32_t *)c->at[counts] + c->op->expert, .count_stride = table->cols,
        .rows = c->op->m, .n = c->op->n, .k = c->op->k, .sources = (int)table->rows,
        .experts = c->op->experts,
        .a_dtype = call_dtype(c, a), .b_dtype = call_dtype(c, b), .c_dtype = call_dtype(c, y),
    };
}

/* y (rows, n) = x (rows, k) · W (n, k)ᵀ */
qd_status qd_run_experts(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, 0, 1, 2, 3);
    a.trans_b = true;
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* dx (rows, n) = dy (rows, k) · W (k, n) */
qd_status qd_run_experts_dx(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, 0, 1, 2, 3);
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* gate and up (rows, n) = x (rows, k) · W (n, k)ᵀ, y (rows, n / 2) = SwiGLU of them */
qd_status qd_run_experts_swiglu(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, 0, 1, 2, 3);
    a.trans_b = true;
    a.active = c->at[4];
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* d (rows, n) = dy (rows, k) · W (k, n), and from it the gradients of gate and up (rows, 2 n) */
qd_status qd_run_experts_dx_swiglu(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, 0, 1, 2, 4);
    a.gate_up = c->at[3];
    a.d_gate_up = c->at[5];
    a.active = c->at[6];
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* dW (n, k) [+]= dy (rows, n)ᵀ · x (rows, k) */
qd_status qd_run_experts_dw(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, 1, 3, 2, 0);
    a.by_experts = true;
    a.accumulate = c->accumulate;
    const qd_program *p = c->frame->program;
    int first = p->ledger->modules[c->frame->module].param_begin + c->slots[c->op->slot[3]].param;
    double *squares = c->frame->squares[p->ledger->params[first].family];
    if (c->op->squares && squares)
        a.squares = squares + p->storage.shard_row[first];
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* Rows that are there: of all sources, for this rank's experts. Where the host has no counts, because there is one source and the
 * counts are the device's affair, all of the room: nobody reads what becomes of the rest. */
static qd_status expert_rows(const qd_op_call *c, int counts, int64_t *rows)
{
    const qd_slot *table = &c->slots[c->op->slot[counts]];
    const int32_t *count;
    *rows = c->op->m;
    if (table->rows == 1 && !qd_device_get_caps(qd_stream_device(c->frame->stream))->host_memory)
        return QD_OK;
    QD_TRY(qd_host_counts(c, counts, &count));
    int64_t found = 0;
    for (int64_t source = 0; source < table->rows; source++)
        for (int e = 0; e < c->op->experts; e++)
            found += count[source * table->cols + c->op->expert + e];
    *rows = found < c->op->m ? found : c->op->m;
    return QD_OK;
}

qd_status qd_host_counts(const qd_op_call *c, int i, const int32_t **counts)
{
    const qd_exchange *e = c->frame->exchange;
    *counts = c->at[i];
    if (qd_device_get_caps(qd_stream_device(c->frame->stream))->host_memory)
        return QD_OK;
    if (!e)
        return QD_FAIL(QD_SYSTEM, "no ranks have gathered their counts");
    return e->counts(e->context, c->at[i], counts);
}

qd_status qd_run_expert_activation(const qd_op_call *c)
{
    int64_t rows;
    QD_TRY(expert_rows(c, 1, &rows));
    return c->frame->kernels->activation_forward(c->frame->stream, &(qd_activation_args){
        .kind = QD_ACT_SWIGLU, .x = c->at[0], .y = c->at[2], .rows = rows, .cols = c->op->n, .dtype = call_dtype(c, 0)});
}

qd_status qd_run_expert_activation_grad(const qd_op_call *c)
{
    int64_t rows;
    QD_TRY(expert_rows(c, 2, &rows));
    return c->frame->kernels->activation_backward(c->frame->stream, &(qd_activation_args){
        .kind = QD_ACT_SWIGLU, .x = c->at[0], .dy = c->at[1], .dx = c->at[3], .y = c->at[4], .rows = rows, .cols = c->op->n,
        .dtype = call_dtype(c, 0)});
}
