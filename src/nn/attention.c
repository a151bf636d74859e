/* qkv is one buffer (rows, (heads + 2·kv_heads)·head_dim): queries, keys, values side by side. */
#include "nn/nn_impl.h"

#include <math.h>

static qd_status rope(const qd_op_call *c, const int32_t *positions, bool inverse)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->rope(c->frame->stream, &(qd_rope_args){
        .x = c->at[0], /* queries and keys are adjacent: one call turns both */
        .table = c->at[1],
        .positions = positions,
        .rows = c->op->m,
        .seq = c->frame->program->strategy.seq,
        .row_stride = c->slots[c->op->slot[0]].cols,
        .heads = c->op->heads + c->op->kv_heads,
        .head_dim = m->head_dim,
        .inverse = inverse,
        .dtype = call_dtype(c, 0),
    });
}

qd_status qd_run_rope(const qd_op_call *c)
{
    return rope(c, c->at[2] ? input_positions(c, 2) : NULL, false);
}

qd_status qd_run_rope_inverse(const qd_op_call *c)
{
    return rope(c, c->at[2] ? input_positions(c, 2) : NULL, true);
}

/* What forward and backward share: views of qkv, shapes, mask. */
static qd_attention_args attention_args(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    const qd_strategy *s = &c->frame->program->strategy;
    qd_dtype dtype = call_dtype(c, 0);
    int64_t stride = c->slots[c->op->slot[0]].cols, size = (int64_t)qd_dtype_size(dtype);
    const char *qkv = c->at[0];
    return (qd_attention_args){
        .q = qkv,
        .k = qkv + (int64_t)c->op->heads * m->head_dim * size,
        .v = qkv + (int64_t)(c->op->heads + c->op->kv_heads) * m->head_dim * size,
        .o = c->at[2],
        .lse = c->at[3],
        .doc_start = input_whole_documents(c, 1),
        .batch = s->micro_batch,
        .seq = s->seq,
        .q_stride = stride,
        .k_stride = stride,
        .v_stride = stride,
        .o_stride = c->slots[c->op->slot[2]].cols,
        .heads = c->op->heads,
        .kv_heads = c->op->kv_heads,
        .head_dim = m->head_dim,
        .scale = 1.0f / sqrtf((float)m->head_dim),
        .dtype = dtype,
    };
}

qd_status qd_run_attention(const qd_op_call *c)
{
    qd_attention_args args = attention_args(c);
    return c->frame->kernels->attention_forward(c->frame->stream, &args);
}

qd_status qd_run_attention_grad(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    qd_attention_args args = attention_args(c);
    int64_t size = (int64_t)qd_dtype_size(args.dtype);
    char *dqkv = c->at[5];
    args.d_o = c->at[4];
    args.dq = dqkv;
    args.dk = dqkv + (int64_t)c->op->heads * m->head_dim * size;
    args.dv = dqkv + (int64_t)(c->op->heads + c->op->kv_heads) * m->head_dim * size;
    args.delta = c->at[6];
    return c->frame->kernels->attention_backward(c->frame->stream, &args);
}

/* The cache of a block: all keys, then all values. */
qd_status qd_run_attention_cached(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    const qd_strategy *s = &c->frame->program->strategy;
    qd_dtype dtype = call_dtype(c, 0);
    int64_t stride = c->slots[c->op->slot[0]].cols, size = (int64_t)qd_dtype_size(dtype);
    const char *qkv = c->at[0];
    char *cache = c->at[1];
    return c->frame->kernels->attention_cached(c->frame->stream, &(qd_attention_cached_args){
        .q = qkv,
        .k = qkv + (int64_t)c->op->heads * m->head_dim * size,
        .v = qkv + (int64_t)(c->op->heads + c->op->kv_heads) * m->head_dim * size,
        .o = c->at[2],
        .k_cache = cache,
        .v_cache = cache + s->context * c->op->kv_heads * m->head_dim * size,
        .rows = c->op->m,
        .past = c->frame->past,
        .context = s->context,
        .q_stride = stride,
        .k_stride = stride,
        .v_stride = stride,
        .o_stride = c->slots[c->op->slot[2]].cols,
        .heads = c->op->heads,
        .kv_heads = c->op->kv_heads,
        .head_dim = m->head_dim,
        .scale = 1.0f / sqrtf((float)m->head_dim),
        .dtype = dtype,
    });
}
