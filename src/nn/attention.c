/* Runners of rotary embedding and attention. qkv is one buffer with queries, keys and values side
 * by side: (rows, (heads + kv_heads)·head_dim + kv_heads·v_dim). */
#include "nn/nn_impl.h"

QD_SAME_PLACE(X, ROPE, ROPE_INVERSE);
QD_SAME_PLACE(TABLE, ROPE, ROPE_INVERSE);

static qd_status rope(const qd_op_call *c, const int32_t *positions, bool inverse)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->rope(c->frame->stream, &(qd_rope_args){
        .x = c->at[QD_ROPE_X], /* queries and keys are adjacent: one call rotates both */
        .table = c->at[QD_ROPE_TABLE],
        .positions = positions,
        .rows = c->op->m,
        .seq = c->frame->program->strategy.seq,
        .row_stride = call_stride(c, QD_ROPE_X),
        .heads = c->op->heads + c->op->kv_heads,
        .head_dim = m->head_dim,
        .dims = qd_rope_dims(m),
        .inverse = inverse,
        .dtype = call_dtype(c, QD_ROPE_X),
    });
}

qd_status qd_run_rope(const qd_op_call *c)
{
    return rope(c, c->at[QD_ROPE_INPUT] ? input_positions(c, QD_ROPE_INPUT) : NULL, false);
}

qd_status qd_run_rope_inverse(const qd_op_call *c)
{
    return rope(c, c->at[QD_ROPE_INVERSE_INPUT] ? input_positions(c, QD_ROPE_INVERSE_INPUT) : NULL, true);
}

QD_SAME_PLACE(QKV, ATTENTION, ATTENTION_GRAD);
QD_SAME_PLACE(INPUT, ATTENTION, ATTENTION_GRAD);
QD_SAME_PLACE(O, ATTENTION, ATTENTION_GRAD);
QD_SAME_PLACE(LSE, ATTENTION, ATTENTION_GRAD);

/* Arguments common to forward and backward: views of qkv, shapes, mask. */
static qd_attention_args attention_args(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    const qd_strategy *s = &c->frame->program->strategy;
    qd_dtype dtype = call_dtype(c, QD_ATTENTION_QKV);
    int64_t stride = call_stride(c, QD_ATTENTION_QKV), size = (int64_t)qd_dtype_size(dtype);
    const char *qkv = c->at[QD_ATTENTION_QKV];
    return (qd_attention_args){
        .q = qkv,
        .k = qkv + (int64_t)c->op->heads * m->head_dim * size,
        .v = qkv + (int64_t)(c->op->heads + c->op->kv_heads) * m->head_dim * size,
        .o = c->at[QD_ATTENTION_O],
        .lse = c->at[QD_ATTENTION_LSE],
        .doc_start = input_whole_documents(c, QD_ATTENTION_INPUT),
        .batch = s->micro_batch,
        .seq = s->seq,
        .q_stride = stride,
        .k_stride = stride,
        .v_stride = stride,
        .o_stride = call_stride(c, QD_ATTENTION_O),
        .heads = c->op->heads,
        .kv_heads = c->op->kv_heads,
        .head_dim = m->head_dim,
        .v_dim = qd_model_v_dim(m),
        .window = c->op->window,
        .scale = qd_model_score_scale(m),
        .softcap = (float)m->score_softcap,
        .dtype = dtype,
    };
}

qd_status qd_run_attention(const qd_op_call *c)
{
    qd_attention_args args = attention_args(c);
    args.maxima = call_maxima(c);
    return c->frame->kernels->attention_forward(c->frame->stream, &args);
}

qd_status qd_run_attention_grad(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    qd_attention_args args = attention_args(c);
    int64_t size = (int64_t)qd_dtype_size(args.dtype);
    char *dqkv = c->at[QD_ATTENTION_GRAD_D_QKV];
    args.d_o = c->at[QD_ATTENTION_GRAD_D_O];
    args.dq = dqkv;
    args.dk = dqkv + (int64_t)c->op->heads * m->head_dim * size;
    args.dv = dqkv + (int64_t)(c->op->heads + c->op->kv_heads) * m->head_dim * size;
    args.delta = c->at[QD_ATTENTION_GRAD_DELTA];
    return c->frame->kernels->attention_backward(c->frame->stream, &args);
}

/* The KV cache of a block: all keys, then all values. */
qd_status qd_run_attention_cached(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    qd_dtype dtype = call_dtype(c, QD_ATTENTION_CACHED_QKV);
    int64_t stride = call_stride(c, QD_ATTENTION_CACHED_QKV), size = (int64_t)qd_dtype_size(dtype);
    const char *qkv = c->at[QD_ATTENTION_CACHED_QKV];
    char *cache = c->at[QD_ATTENTION_CACHED_CACHE];
    int64_t rows = qd_cache_rows(c->op->window, c->frame->program->strategy.context);
    return c->frame->kernels->attention_cached(c->frame->stream, &(qd_attention_cached_args){
        .q = qkv,
        .k = qkv + (int64_t)c->op->heads * m->head_dim * size,
        .v = qkv + (int64_t)(c->op->heads + c->op->kv_heads) * m->head_dim * size,
        .o = c->at[QD_ATTENTION_CACHED_O],
        .k_cache = cache,
        .v_cache = cache + rows * c->op->kv_heads * m->head_dim * size,
        .rows = c->op->m,
        .past = c->frame->past,
        .context = rows,
        .q_stride = stride,
        .k_stride = stride,
        .v_stride = stride,
        .o_stride = call_stride(c, QD_ATTENTION_CACHED_O),
        .heads = c->op->heads,
        .kv_heads = c->op->kv_heads,
        .head_dim = m->head_dim,
        .window = c->op->window,
        .scale = qd_model_score_scale(m),
        .softcap = (float)m->score_softcap,
        .lse = c->at[QD_ATTENTION_CACHED_LSE],
        .dtype = dtype,
    });
}

/* Arguments common to forward and backward; lse is (sequences · heads, rows of a sequence). */
static qd_sink_args sink_args(const qd_op_call *c, int lse, int sink)
{
    const qd_slot *sums = &c->slots[c->op->slot[lse]];
    return (qd_sink_args){
        .sink = c->at[sink],
        .lse = c->at[lse],
        .batch = sums->rows / c->op->heads,
        .seq = sums->cols,
        .heads = c->op->heads,
        .head_dim = call_model(c)->head_dim,
        .first = (int)c->op->first,
        .all = (int)c->slots[c->op->slot[sink]].rows,
        .param_dtype = call_dtype(c, sink),
    };
}

qd_status qd_run_attention_sink(const qd_op_call *c)
{
    qd_sink_args args = sink_args(c, QD_ATTENTION_SINK_LSE, QD_ATTENTION_SINK_SINK);
    args.o = c->at[QD_ATTENTION_SINK_O];
    args.o_stride = call_stride(c, QD_ATTENTION_SINK_O);
    args.dtype = call_dtype(c, QD_ATTENTION_SINK_O);
    return c->frame->kernels->sink(c->frame->stream, &args);
}

qd_status qd_run_attention_sink_grad(const qd_op_call *c)
{
    qd_sink_args args = sink_args(c, QD_ATTENTION_SINK_GRAD_LSE, QD_ATTENTION_SINK_GRAD_SINK);
    args.delta = c->at[QD_ATTENTION_SINK_GRAD_DELTA];
    args.grad = c->at[QD_ATTENTION_SINK_GRAD_SINK_GRAD];
    args.grad_dtype = call_dtype(c, QD_ATTENTION_SINK_GRAD_SINK_GRAD);
    args.accumulate = c->accumulate;
    return c->frame->kernels->sink_backward(c->frame->stream, &args);
}
