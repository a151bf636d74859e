/* Runners of norms: of rows of the residual stream, and of the heads of queries and keys. */
#include "nn/nn_impl.h"

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
        .rows = c->op->m,
        .cols = c->op->n,
        .eps = (float)call_model(c)->norm_eps,
        .rms = call_model(c)->norm == QD_NORM_RMS,
        .dtype = call_dtype(c, QD_NORM_X),
        .param_dtype = call_dtype(c, QD_NORM_GAMMA),
    });
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
        .rows = c->op->m,
        .cols = c->op->n,
        .rms = call_model(c)->norm == QD_NORM_RMS,
        .accumulate = c->accumulate,
        .dtype = call_dtype(c, QD_NORM_GRAD_X),
        .param_dtype = call_dtype(c, QD_NORM_GRAD_GAMMA),
        .grad_dtype = call_dtype(c, QD_NORM_GRAD_GAMMA_GRAD),
    });
}

qd_status qd_run_head_norm(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->head_norm(c->frame->stream, &(qd_head_norm_args){
        .x = c->at[QD_HEAD_NORM_X], .q_gamma = c->at[QD_HEAD_NORM_Q_GAMMA], .k_gamma = c->at[QD_HEAD_NORM_K_GAMMA],
        .y = c->at[QD_HEAD_NORM_Y], .rstd = c->at[QD_HEAD_NORM_RSTD],
        .rows = c->op->m, .row_stride = c->op->n,
        .heads = c->op->heads, .kv_heads = c->op->kv_heads, .head_dim = m->head_dim,
        .eps = (float)m->norm_eps, .dtype = call_dtype(c, QD_HEAD_NORM_X), .param_dtype = call_dtype(c, QD_HEAD_NORM_Q_GAMMA),
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
        .dtype = call_dtype(c, QD_HEAD_NORM_GRAD_DY), .param_dtype = call_dtype(c, QD_HEAD_NORM_GRAD_Q_GAMMA),
        .grad_dtype = call_dtype(c, QD_HEAD_NORM_GRAD_Q_GAMMA_GRAD),
    });
}
