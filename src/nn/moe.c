/* Runners of blocks with experts: router, permutation of rows, grouped GEMMs. */
#include "nn/nn_impl.h"
#include "spec/layout/experts.h"

#include <math.h>

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
        .logits = c->at[QD_ROUTE_LOGITS], .bias = c->at[QD_ROUTE_BIAS], .choice = c->at[QD_ROUTE_CHOICE],
        .weight = c->at[QD_ROUTE_WEIGHT], .load = c->at[QD_ROUTE_LOAD],
        .rows = c->op->m, .first_row = c->op->first, .load_rows = c->op->k, .loads = c->slots[c->op->slot[QD_ROUTE_LOAD]].rows,
        .rule = route_rule(c), .bias_dtype = c->at[QD_ROUTE_BIAS] ? call_dtype(c, QD_ROUTE_BIAS) : QD_F32,
    });
}

/* Load balance: f of an expert is its load divided by the mean load, over the tokens of a sequence
 * or of all that is computed at the same time. Each token's part of the auxiliary loss has the same
 * scale as its part of the model's loss. */
qd_status qd_run_route_grad(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    const float scale = (float)c->op->scale;
    return c->frame->kernels->route_grad(c->frame->stream, &(qd_route_grad_args){
        .logits = c->at[QD_ROUTE_GRAD_LOGITS], .choice = c->at[QD_ROUTE_GRAD_CHOICE], .weight = c->at[QD_ROUTE_GRAD_WEIGHT],
        .d_weight = c->at[QD_ROUTE_GRAD_D_WEIGHT], .load = c->at[QD_ROUTE_GRAD_LOAD], .d_logits = c->at[QD_ROUTE_GRAD_D_LOGITS],
        .rows = c->op->m, .first_row = c->op->first, .load_rows = c->op->k,
        .aux = (float)m->moe.aux_loss * scale,
        .load_scale = (float)(m->moe.experts / (m->moe.per_token * c->op->load_tokens)),
        .z = (float)m->moe.z_loss * scale,
        .rule = route_rule(c), .grad_dtype = call_dtype(c, QD_ROUTE_GRAD_D_LOGITS),
    });
}

qd_status qd_run_route_plan(const qd_op_call *c)
{
    const qd_moe *e = &call_model(c)->moe;
    double mean = (double)c->op->m * e->per_token / e->experts;
    bool limited = e->capacity > 0.0 && c->frame->program->strategy.training; /* evaluation drops nothing */
    return c->frame->kernels->route_plan(c->frame->stream, &(qd_route_plan_args){
        .choice = c->at[QD_ROUTE_PLAN_CHOICE], .weight = c->at[QD_ROUTE_PLAN_WEIGHT], .place = c->at[QD_ROUTE_PLAN_PLACE],
        .from = c->at[QD_ROUTE_PLAN_FROM], .count = c->at[QD_ROUTE_PLAN_COUNT],
        .rows = c->op->m, .limit = limited ? (int64_t)ceil(e->capacity * mean) : 0,
        .experts = e->experts, .per_token = e->per_token, .least = e->drop == QD_DROP_LEAST,
    });
}

qd_status qd_run_route_load(const qd_op_call *c)
{
    const qd_moe *e = &call_model(c)->moe;
    return c->frame->kernels->route_load(c->frame->stream, &(qd_route_load_args){
        .choice = c->at[QD_ROUTE_LOAD_CHOICE], .total = c->at[QD_ROUTE_LOAD_BIAS_GRAD], .assignments = c->op->m * e->per_token,
        .experts = e->experts});
}

/* The number of choices per row, from the shapes of slots; rows choose experts, or nodes
 * (parallel.dispatch). */
static int choices_of(const qd_op_call *c, int from)
{
    return c->op->m > 0 ? (int)(call_stride(c, from) / c->op->m) : 1;
}

qd_status qd_run_permute(const qd_op_call *c)
{
    return c->frame->kernels->permute(c->frame->stream, &(qd_permute_args){
        .x = c->at[QD_PERMUTE_X], .from = c->at[QD_PERMUTE_FROM], .count = c->at[QD_PERMUTE_COUNT], .y = c->at[QD_PERMUTE_Y],
        .place = c->at[QD_PERMUTE_PLACE],
        .rows = c->op->m, .cols = c->op->n, .per_token = choices_of(c, QD_PERMUTE_FROM), .experts = (int)call_stride(c, QD_PERMUTE_COUNT),
        .dtype = call_dtype(c, QD_PERMUTE_X),
    });
}

/* Rows of one of the copies in `slot`. */
static int64_t copy_rows(const qd_op_call *c, int slot)
{
    return c->slots[c->op->slot[slot]].rows / c->op->k;
}

qd_status qd_run_combine(const qd_op_call *c)
{
    return c->frame->kernels->combine(c->frame->stream, &(qd_combine_args){
        .x = c->at[QD_COMBINE_ROWS], .place = c->at[QD_COMBINE_PLACE], .weight = c->at[QD_COMBINE_WEIGHT],
        .add = c->at[QD_COMBINE_ADD], .y = c->at[QD_COMBINE_Y],
        .rows = c->op->m, .cols = c->op->n, .per_token = (int)call_stride(c, QD_COMBINE_PLACE), .copies = (int)c->op->k,
        .copy_rows = copy_rows(c, QD_COMBINE_ROWS), .dtype = call_dtype(c, QD_COMBINE_ROWS),
    });
}

qd_status qd_run_combine_grad(const qd_op_call *c)
{
    return c->frame->kernels->permute(c->frame->stream, &(qd_permute_args){
        .x = c->at[QD_COMBINE_GRAD_DY], .old = c->at[QD_COMBINE_GRAD_ROWS], .from = c->at[QD_COMBINE_GRAD_FROM],
        .place = c->at[QD_COMBINE_GRAD_PLACE], .count = c->at[QD_COMBINE_GRAD_COUNT], .weight = c->at[QD_COMBINE_GRAD_WEIGHT],
        .y = c->at[QD_COMBINE_GRAD_D_ROWS], .d_weight = c->at[QD_COMBINE_GRAD_D_WEIGHT],
        .rows = c->op->m, .cols = c->op->n, .per_token = choices_of(c, QD_COMBINE_GRAD_FROM),
        .experts = (int)call_stride(c, QD_COMBINE_GRAD_COUNT), .copies = (int)c->op->k,
        .copy_rows = copy_rows(c, QD_COMBINE_GRAD_ROWS), .dtype = call_dtype(c, QD_COMBINE_GRAD_DY),
    });
}

/* Grouped GEMMs. n and k of the op are those of one expert's matrix as the GEMM sees it. */

static qd_grouped_args grouped(const qd_op_call *c, int a, int b, int counts, int y)
{
    const qd_slot *table = &c->slots[c->op->slot[counts]];
    const qd_model *m = call_model(c);
    const bool clamped = m->activation == QD_ACT_SWIGLU_CLAMPED;
    return (qd_grouped_args){
        .a = c->at[a], .b = c->at[b], .c = c->at[y], .counts = (const int32_t *)c->at[counts] + c->op->expert, .count_stride = table->cols,
        .rows = c->op->m, .n = c->op->n, .k = c->op->k, .sources = (int)table->rows,
        .experts = c->op->experts, .alpha = clamped ? (float)m->swiglu_alpha : 0.0f, .limit = clamped ? (float)m->swiglu_limit : 0.0f,
        .a_dtype = call_dtype(c, a), .b_dtype = call_dtype(c, b), .c_dtype = call_dtype(c, y),
    };
}

/* y [+ bias of each row's expert] */
static void add_bias(const qd_op_call *c, qd_grouped_args *a, int bias)
{
    a->bias = c->at[bias];
    a->bias_dtype = a->bias ? call_dtype(c, bias) : QD_F32;
}

/* y (rows, n) = x (rows, k) · W (n, k)ᵀ [+ bias] */
qd_status qd_run_experts(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, QD_EXPERTS_X, QD_EXPERTS_WEIGHT, QD_EXPERTS_COUNT, QD_EXPERTS_Y);
    a.trans_b = true;
    add_bias(c, &a, QD_EXPERTS_BIASES);
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* dx (rows, n) = dy (rows, k) · W (k, n) */
qd_status qd_run_experts_dx(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, QD_EXPERTS_DX_DY, QD_EXPERTS_DX_WEIGHT, QD_EXPERTS_DX_COUNT, QD_EXPERTS_DX_DX);
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* gate and up (rows, n) = x (rows, k) · W (n, k)ᵀ, y (rows, n / 2) = SwiGLU of both */
qd_status qd_run_experts_swiglu(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, QD_EXPERTS_SWIGLU_X, QD_EXPERTS_SWIGLU_WEIGHT, QD_EXPERTS_SWIGLU_COUNT, QD_EXPERTS_SWIGLU_GATE_UP);
    a.trans_b = true;
    a.active = c->at[QD_EXPERTS_SWIGLU_Y];
    add_bias(c, &a, QD_EXPERTS_SWIGLU_BIASES);
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* d (rows, n) = dy (rows, k) · W (k, n), and from it the gradients of gate and up (rows, 2 n) */
qd_status qd_run_experts_dx_swiglu(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, QD_EXPERTS_DX_SWIGLU_DY, QD_EXPERTS_DX_SWIGLU_WEIGHT, QD_EXPERTS_DX_SWIGLU_COUNT,
                                QD_EXPERTS_DX_SWIGLU_D_ACTIVE);
    a.gate_up = c->at[QD_EXPERTS_DX_SWIGLU_GATE_UP];
    a.d_gate_up = c->at[QD_EXPERTS_DX_SWIGLU_D_GATE_UP];
    a.active = c->at[QD_EXPERTS_DX_SWIGLU_Y];
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* dW (n, k) [+]= dy (rows, n)ᵀ · x (rows, k) */
qd_status qd_run_experts_dw(const qd_op_call *c)
{
    qd_grouped_args a = grouped(c, QD_EXPERTS_DW_X, QD_EXPERTS_DW_WEIGHT_GRAD, QD_EXPERTS_DW_COUNT, QD_EXPERTS_DW_DY);
    a.by_experts = true;
    a.accumulate = c->accumulate;
    const qd_program *p = c->frame->program;
    int first = p->ledger->modules[c->frame->module].param_begin + c->slots[c->op->slot[QD_EXPERTS_DW_WEIGHT_GRAD]].param;
    double *squares = c->frame->squares[p->ledger->params[first].family];
    if (c->op->squares && squares)
        a.squares = squares + p->storage.shard_row[first];
    return c->frame->kernels->grouped(c->frame->stream, &a);
}

/* Number of rows for this rank's experts, from all sources. With a single source the counts stay on
 * the device, and the whole capacity is used; the results of the excess rows are never read. */
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
    QD_TRY(expert_rows(c, QD_EXPERT_ACTIVATION_COUNT, &rows));
    qd_activation_args a = call_activation(c, rows, c->op->n, call_dtype(c, QD_EXPERT_ACTIVATION_X));
    a.x = c->at[QD_EXPERT_ACTIVATION_X];
    a.y = c->at[QD_EXPERT_ACTIVATION_Y];
    return c->frame->kernels->activation_forward(c->frame->stream, &a);
}

qd_status qd_run_expert_activation_grad(const qd_op_call *c)
{
    int64_t rows;
    QD_TRY(expert_rows(c, QD_EXPERT_ACTIVATION_GRAD_COUNT, &rows));
    qd_activation_args a = call_activation(c, rows, c->op->n, call_dtype(c, QD_EXPERT_ACTIVATION_GRAD_X));
    a.x = c->at[QD_EXPERT_ACTIVATION_GRAD_X];
    a.dy = c->at[QD_EXPERT_ACTIVATION_GRAD_DY];
    a.dx = c->at[QD_EXPERT_ACTIVATION_GRAD_DX];
    a.y = c->at[QD_EXPERT_ACTIVATION_GRAD_Y];
    return c->frame->kernels->activation_backward(c->frame->stream, &a);
}

static qd_grouped_bias_args bias_args(const qd_op_call *c, int counts)
{
    const qd_slot *table = &c->slots[c->op->slot[counts]];
    return (qd_grouped_bias_args){.counts = (const int32_t *)c->at[counts] + c->op->expert, .count_stride = table->cols,
                                  .rows = c->op->m, .n = c->op->n, .first = c->op->first, .sources = (int)table->rows,
                                  .experts = c->op->experts};
}

qd_status qd_run_experts_bias(const qd_op_call *c)
{
    qd_grouped_bias_args a = bias_args(c, QD_EXPERTS_BIAS_COUNT);
    a.bias = c->at[QD_EXPERTS_BIAS_BIAS];
    a.x = c->at[QD_EXPERTS_BIAS_Y]; /* in place */
    a.width = call_stride(c, QD_EXPERTS_BIAS_Y);
    a.dtype = call_dtype(c, QD_EXPERTS_BIAS_Y);
    a.bias_dtype = call_dtype(c, QD_EXPERTS_BIAS_BIAS);
    return c->frame->kernels->grouped_bias(c->frame->stream, &a);
}

qd_status qd_run_experts_bias_grad(const qd_op_call *c)
{
    qd_grouped_bias_args a = bias_args(c, QD_EXPERTS_BIAS_GRAD_COUNT);
    a.bias = c->at[QD_EXPERTS_BIAS_GRAD_GRAD];
    a.x = c->at[QD_EXPERTS_BIAS_GRAD_DY];
    a.width = call_stride(c, QD_EXPERTS_BIAS_GRAD_DY);
    a.dtype = call_dtype(c, QD_EXPERTS_BIAS_GRAD_DY);
    a.bias_dtype = call_dtype(c, QD_EXPERTS_BIAS_GRAD_GRAD);
    a.accumulate = c->accumulate;
    return c->frame->kernels->grouped_bias_grad(c->frame->stream, &a);
}

qd_status qd_round_bias(const qd_op_call *c, qd_grouped_bias_args rows, int bias, bool grad)
{
    const qd_program *p = c->frame->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    const qd_kernels *k = c->frame->kernels;
    if (!c->at[bias])
        return QD_OK;
    rows.bias = c->at[bias];
    rows.bias_dtype = call_dtype(c, bias);
    rows.rows = c->op->m;
    rows.experts = c->op->experts;
    rows.n = c->slots[c->op->slot[bias]].rows / c->op->experts;
    if (rows.n < rows.width) /* a share of the columns of a partial sum */
        qd_slice(rows.width, mesh->etp, qd_group_coord(mesh, qd_expert_group(mesh), p->rank) % mesh->etp, &rows.first, &rows.n);
    rows.accumulate = grad;
    return (grad ? k->grouped_bias_grad : k->grouped_bias)(c->frame->stream, &rows);
}

qd_status qd_run_gate(const qd_op_call *c)
{
    return c->frame->kernels->gate(c->frame->stream, &(qd_gate_args){
        .x = c->at[QD_GATE_X], .gate = c->at[QD_GATE_GATE], .y = c->at[QD_GATE_Y], .rows = c->op->m, .cols = c->op->n,
        .dtype = call_dtype(c, QD_GATE_X)});
}

qd_status qd_run_gate_grad(const qd_op_call *c)
{
    return c->frame->kernels->gate_backward(c->frame->stream, &(qd_gate_args){
        .x = c->at[QD_GATE_GRAD_X], .dy = c->at[QD_GATE_GRAD_DY], .gate = c->at[QD_GATE_GRAD_GATE], .dx = c->at[QD_GATE_GRAD_DX],
        .d_gate = c->at[QD_GATE_GRAD_D_GATE], .rows = c->op->m, .cols = c->op->n, .dtype = call_dtype(c, QD_GATE_GRAD_X)});
}
