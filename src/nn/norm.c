/* Runners of norms: of rows of the residual stream, of the heads of queries and keys, and of all of
 * them together. */
#include "nn/nn_impl.h"

/* Norms without weights have neither that operand nor its gradient. */
static qd_dtype weight_dtype(const qd_op_call *c, int weight, int otherwise)
{
    return call_dtype(c, c->op->slot[weight] >= 0 ? weight : otherwise);
}

qd_status qd_run_norm(const qd_op_call *c)
{
    return c->frame->kernels->norm_forward(c->frame->stream, &(qd_norm_forward_args){
        .x = c->at[QD_NORM_X],
        .add = c->at[QD_NORM_ADD],
        .gamma = c->at[QD_NORM_GAMMA],
        .beta = c->at[QD_NORM_BETA],
        .sum = c->at[QD_NORM_SUM],
        .y = c->at[QD_NORM_Y],
        .mean = c->at[QD_NORM_MEAN],
        .rstd = c->at[QD_NORM_RSTD],
        .amax = c->at[QD_NORM_AMAX],
        .rows = c->op->m,
        .cols = c->op->n,
        .eps = (float)(c->op->eps > 0.0 ? c->op->eps : call_model(c)->norm_eps),
        .rms = qd_model_norm_is_rms(call_model(c)),
        .plus_one = call_model(c)->norm == QD_NORM_RMS_ONE,
        .dtype = call_dtype(c, QD_NORM_X),
        .param_dtype = weight_dtype(c, QD_NORM_GAMMA, QD_NORM_X),
    });
}

/* Of the gradients that the op has: of weights, or of biases next to it. */
static qd_dtype grad_dtype(const qd_op_call *c)
{
    static const int grads[] = {QD_NORM_GRAD_GAMMA_GRAD, QD_NORM_GRAD_BETA_GRAD, QD_NORM_GRAD_ADD_SUMS, QD_NORM_GRAD_DX_SUMS};
    for (size_t i = 0; i < sizeof grads / sizeof *grads; i++)
        if (c->op->slot[grads[i]] >= 0)
            return call_dtype(c, grads[i]);
    return QD_F32;
}

qd_status qd_run_norm_grad(const qd_op_call *c)
{
    return c->frame->kernels->norm_backward(c->frame->stream, &(qd_norm_backward_args){
        .dy = c->at[QD_NORM_GRAD_DY],
        .x = c->at[QD_NORM_GRAD_X],
        .gamma = c->at[QD_NORM_GRAD_GAMMA],
        .add = c->at[QD_NORM_GRAD_ADD],
        .mean = c->at[QD_NORM_GRAD_MEAN],
        .rstd = c->at[QD_NORM_GRAD_RSTD],
        .dx = c->at[QD_NORM_GRAD_DX],
        .dgamma = c->at[QD_NORM_GRAD_GAMMA_GRAD],
        .dbeta = c->at[QD_NORM_GRAD_BETA_GRAD],
        .add_grad = c->at[QD_NORM_GRAD_ADD_SUMS],
        .dx_grad = c->at[QD_NORM_GRAD_DX_SUMS],
        .amax = c->at[QD_NORM_GRAD_AMAX],
        .rows = c->op->m,
        .cols = c->op->n,
        .rms = qd_model_norm_is_rms(call_model(c)),
        .plus_one = call_model(c)->norm == QD_NORM_RMS_ONE,
        .accumulate = c->accumulate,
        .dtype = call_dtype(c, QD_NORM_GRAD_X),
        .param_dtype = weight_dtype(c, QD_NORM_GRAD_GAMMA, QD_NORM_GRAD_X),
        .grad_dtype = grad_dtype(c),
    });
}

/* Frozen norms have no gradient. */
static qd_dtype frozen_dtype(const qd_op_call *c, int grad)
{
    return c->op->slot[grad] >= 0 ? call_dtype(c, grad) : QD_F32;
}

qd_status qd_run_head_norm(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->head_norm(c->frame->stream, &(qd_head_norm_args){
        .x = c->at[QD_HEAD_NORM_X], .q_gamma = c->at[QD_HEAD_NORM_Q_GAMMA], .k_gamma = c->at[QD_HEAD_NORM_K_GAMMA],
        .y = c->at[QD_HEAD_NORM_Y], .rstd = c->at[QD_HEAD_NORM_RSTD],
        .rows = c->op->m, .row_stride = c->op->n,
        .heads = c->op->heads, .kv_heads = c->op->kv_heads, .head_dim = m->head_dim,
        .eps = (float)m->norm_eps, .plus_one = m->norm == QD_NORM_RMS_ONE,
        .dtype = call_dtype(c, QD_HEAD_NORM_X), .param_dtype = call_dtype(c, QD_HEAD_NORM_Q_GAMMA),
    });
}

qd_status qd_run_head_norm_grad(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->head_norm_backward(c->frame->stream, &(qd_head_norm_args){
        .d = c->at[QD_HEAD_NORM_GRAD_DY], .x = c->at[QD_HEAD_NORM_GRAD_X], .q_gamma = c->at[QD_HEAD_NORM_GRAD_Q_GAMMA],
        .k_gamma = c->at[QD_HEAD_NORM_GRAD_K_GAMMA], .rstd = c->at[QD_HEAD_NORM_GRAD_RSTD],
        .q_grad = c->at[QD_HEAD_NORM_GRAD_Q_GAMMA_GRAD], .k_grad = c->at[QD_HEAD_NORM_GRAD_K_GAMMA_GRAD],
        .rows = c->op->m, .row_stride = c->op->n,
        .heads = c->op->heads, .kv_heads = c->op->kv_heads, .head_dim = m->head_dim, .accumulate = c->accumulate,
        .plus_one = m->norm == QD_NORM_RMS_ONE,
        .dtype = call_dtype(c, QD_HEAD_NORM_GRAD_DY), .param_dtype = call_dtype(c, QD_HEAD_NORM_GRAD_Q_GAMMA),
        .grad_dtype = frozen_dtype(c, QD_HEAD_NORM_GRAD_Q_GAMMA_GRAD),
    });
}

/* The norms of all queries, and of all keys: what the four ops share. */
static qd_qk_norm_args qk_norm_args(const qd_op_call *c, int x)
{
    const qd_model *m = call_model(c);
    return (qd_qk_norm_args){
        .x = c->at[x], .rows = c->op->m, .row_stride = c->op->n,
        .q_cols = (int64_t)c->op->heads * m->head_dim, .k_cols = (int64_t)c->op->kv_heads * m->head_dim,
        .q_width = (int64_t)m->heads * m->head_dim, .k_width = (int64_t)m->kv_heads * m->head_dim,
        .counts_keys = c->op->k > 0, .eps = (float)m->norm_eps, .dtype = call_dtype(c, x),
    };
}

qd_status qd_run_qk_squares(const qd_op_call *c)
{
    qd_qk_norm_args a = qk_norm_args(c, QD_QK_SQUARES_X);
    a.sums = c->at[QD_QK_SQUARES_SUMS];
    return c->frame->kernels->qk_squares(c->frame->stream, &a);
}

qd_status qd_run_qk_norm(const qd_op_call *c)
{
    qd_qk_norm_args a = qk_norm_args(c, QD_QK_NORM_X);
    a.sums = c->at[QD_QK_NORM_SUMS];
    a.q_gamma = c->at[QD_QK_NORM_Q_GAMMA];
    a.k_gamma = c->at[QD_QK_NORM_K_GAMMA];
    a.y = c->at[QD_QK_NORM_Y];
    a.param_dtype = call_dtype(c, QD_QK_NORM_Q_GAMMA);
    return c->frame->kernels->qk_norm(c->frame->stream, &a);
}

qd_status qd_run_qk_dots(const qd_op_call *c)
{
    qd_qk_norm_args a = qk_norm_args(c, QD_QK_DOTS_X);
    a.d = c->at[QD_QK_DOTS_DY];
    a.q_gamma = c->at[QD_QK_DOTS_Q_GAMMA];
    a.k_gamma = c->at[QD_QK_DOTS_K_GAMMA];
    a.dots = c->at[QD_QK_DOTS_DOTS];
    a.param_dtype = call_dtype(c, QD_QK_DOTS_Q_GAMMA);
    return c->frame->kernels->qk_dots(c->frame->stream, &a);
}

qd_status qd_run_qk_norm_grad(const qd_op_call *c)
{
    qd_qk_norm_args a = qk_norm_args(c, QD_QK_NORM_GRAD_X);
    a.d = c->at[QD_QK_NORM_GRAD_DY];
    a.sums = c->at[QD_QK_NORM_GRAD_SUMS];
    a.dots = c->at[QD_QK_NORM_GRAD_DOTS];
    a.q_gamma = c->at[QD_QK_NORM_GRAD_Q_GAMMA];
    a.k_gamma = c->at[QD_QK_NORM_GRAD_K_GAMMA];
    a.q_grad = c->at[QD_QK_NORM_GRAD_Q_GAMMA_GRAD];
    a.k_grad = c->at[QD_QK_NORM_GRAD_K_GAMMA_GRAD];
    a.accumulate = c->accumulate;
    a.param_dtype = call_dtype(c, QD_QK_NORM_GRAD_Q_GAMMA);
    a.grad_dtype = frozen_dtype(c, QD_QK_NORM_GRAD_Q_GAMMA_GRAD);
    return c->frame->kernels->qk_norm_backward(c->frame->stream, &a);
}
