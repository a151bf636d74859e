#include "nn/nn_impl.h"

qd_status qd_run_activation(const qd_op_call *c)
{
    return c->frame->kernels->activation_forward(c->frame->stream, &(qd_activation_args){
        .kind = call_model(c)->activation, .x = c->at[0], .y = c->at[1],
        .rows = c->op->m, .cols = c->op->n, .dtype = call_dtype(c, 0),
    });
}

qd_status qd_run_activation_grad(const qd_op_call *c)
{
    return c->frame->kernels->activation_backward(c->frame->stream, &(qd_activation_args){
        .kind = call_model(c)->activation, .x = c->at[0], .dy = c->at[1], .dx = c->at[2],
        .rows = c->op->m, .cols = c->op->n, .dtype = call_dtype(c, 0),
    });
}

qd_status qd_run_activation_grad_y(const qd_op_call *c)
{
    return c->frame->kernels->activation_backward(c->frame->stream, &(qd_activation_args){
        .kind = call_model(c)->activation, .x = c->at[0], .dy = c->at[1], .dx = c->at[2], .y = c->at[3],
        .rows = c->op->m, .cols = c->op->n, .dtype = call_dtype(c, 0),
    });
}

qd_status qd_run_add(const qd_op_call *c)
{
    return c->frame->kernels->add(c->frame->stream, &(qd_add_args){
        .a = c->at[0], .b = c->at[1], .y = c->at[2], .n = c->op->m * c->op->n,
        .a_dtype = call_dtype(c, 0), .b_dtype = call_dtype(c, 1), .y_dtype = call_dtype(c, 2),
    });
}

qd_status qd_run_dropout(const qd_op_call *c)
{
    const qd_frame *f = c->frame;
    return f->kernels->dropout(f->stream, &(qd_dropout_args){
        .x = c->at[0], .y = c->at[1], .rows = c->op->m, .cols = c->op->n, .first_row = f->first_row + c->op->first,
        .p = (float)call_model(c)->dropout, .seed = f->seed, .step = f->step,
        .site = (uint32_t)(4 * f->module + c->op->site), /* sites of one module are 0 to 3 */
        .dtype = call_dtype(c, 0),
    });
}
