/* Runners of the embedding lookup and its gradient. */
#include "nn/nn_impl.h"

qd_status qd_run_embed(const qd_op_call *c)
{
    const qd_model *model = call_model(c);
    return c->frame->kernels->embedding_forward(c->frame->stream, &(qd_embedding_forward_args){
        .tokens = input_tokens(c, QD_EMBED_INPUT),
        .positions = input_positions(c, QD_EMBED_INPUT),
        .token_table = c->at[QD_EMBED_TOKEN_TABLE],
        .position_table = c->at[QD_EMBED_POSITION_TABLE],
        .y = c->at[QD_EMBED_Y],
        .rows = c->op->m,
        .cols = c->op->n,
        .seq = c->frame->program->strategy.seq,
        .vocab = model->vocab,
        .first = c->op->first,
        .held = c->op->k,
        .dtype = call_dtype(c, QD_EMBED_Y),
        .param_dtype = call_dtype(c, QD_EMBED_TOKEN_TABLE),
    });
}

qd_status qd_run_embed_grad(const qd_op_call *c)
{
    return c->frame->kernels->embedding_backward(c->frame->stream, &(qd_embedding_backward_args){
        .tokens = input_tokens(c, QD_EMBED_GRAD_INPUT),
        .positions = input_positions(c, QD_EMBED_GRAD_INPUT),
        .dy = c->at[QD_EMBED_GRAD_DY],
        .token_grad = c->at[QD_EMBED_GRAD_TOKEN_GRAD],
        .position_grad = c->at[QD_EMBED_GRAD_POSITION_GRAD],
        .rows = c->op->m,
        .cols = c->op->n,
        .seq = c->frame->program->strategy.seq,
        .vocab = call_model(c)->vocab,
        .first = c->op->first,
        .held = c->op->k,
        .dtype = call_dtype(c, QD_EMBED_GRAD_DY),
        .grad_dtype = call_dtype(c, QD_EMBED_GRAD_TOKEN_GRAD),
    });
}
