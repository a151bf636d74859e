#include "nn/nn_impl.h"

qd_status qd_run_norm(const qd_op_call *c)
{
    return c->frame->kernels->norm_forward(c->frame->stream, &(qd_norm_forward_args){
        .x = c->at[0],
        .add = c->at[1],
        .gamma = c->at[2],
        .beta = c->at[3],
        .sum = c->at[4],
        .y = c->at[5],
        .mean = c->at[6],
        .rstd = c->at[7],
        .rows = c->op->m,
        .cols = c->op->n,
        .eps = (float)call_model(c)->norm_eps,
        .rms = call_model(c)->norm == QD_NORM_RMS,
        .dtype = call_dtype(c, 0),
        .param_dtype = call_dtype(c, 2),
    });
}

qd_status qd_run_norm_grad(const qd_op_call *c)
{
    return c->frame->kernels->norm_backward(c->frame->stream, &(qd_norm_backward_args){
        .dy = c->at[0],
        .x = c->at[1],
        .gamma = c->at[2],
        .add = c->at[3],
        .mean = c->at[4],
        .rstd = c->at[5],
        .dx = c->at[6],
        .dgamma = c->at[7],
        .dbeta = c->at[8],
        .add_grad = c->at[9],
        .dx_grad = c->at[10],
        .rows = c->op->m,
        .cols = c->op->n,
        .rms = call_model(c)->norm == QD_NORM_RMS,
        .accumulate = c->accumulate,
        .dtype = call_dtype(c, 1),
        .param_dtype = call_dtype(c, 2),
        .grad_dtype = call_dtype(c, 7),
    });
}
