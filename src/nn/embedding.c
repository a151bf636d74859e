#include "nn/nn_impl.h"

qd_status qd_run_embed(const qd_op_call *c)
{
    const qd_model *model = call_model(c);
    return c->frame->kernels->embedding_forward(c->frame->stream, &(qd_embedding_forward_args){
        .tokens = input_tokens(c, 0),
        .positions = input_positions(c, 0),
        .token_table = c->at[1],
        .position_table = c->at[2],
        .y = c->at[3],
        .rows = c->op->m,
        .cols = c->op->n,
        .seq = c->frame->program->strategy.seq,
        .vocab = model->vocab,
        .first = c->op->first,
        .held = c->op->k,
        .dtype = call_dtype(c, 3),
        .param_dtype = call_dtype(c, 1),
    });
}

qd_status qd_run_embed_grad(const qd_op_call *c)
{
    return c->frame->kernels->embedding_backward(c->frame->stream, &(qd_embedding_backward_args){
        .tokens = input_tokens(c, 0),
        .positions = input_positions(c, 0),
        .dy = c->at[1],
        .token_grad = c->at[2],
        .position_grad = c->at[3],
        .rows = c->op->m,
        .cols = c->op->n,
        .seq = c->frame->program->strategy.seq,
        .vocab = call_model(c)->vocab,
        .first = c->op->first,
        .held = c->op->k,
        .dtype = call_dtype(c, 1),
        .grad_dtype = call_dtype(c, 2),
    });
}
