/* Runners of latent attention: queries, keys and values from their parts, and attention to a cache
 * of compressed keys. */
#include "nn/nn_impl.h"

/* Latent attention: parts of queries, keys and values, and the buffer that has them by head. */
static qd_latent_args latent_args(const qd_op_call *c, int table, int input)
{
    const qd_model *m = call_model(c);
    return (qd_latent_args){
        .table = c->at[table],
        .positions = c->at[input] ? input_positions(c, input) : NULL,
        .rows = c->op->m,
        .seq = c->frame->program->strategy.seq,
        .heads = c->op->heads,
        .nope = m->qk_nope_head_dim,
        .rope = m->qk_rope_head_dim,
        .v = m->v_head_dim,
        .interleaved = m->rope_interleave,
        .dtype = call_dtype(c, 0),
    };
}

qd_status qd_run_latent_qkv(const qd_op_call *c)
{
    qd_latent_args args = latent_args(c, QD_LATENT_QKV_TABLE, QD_LATENT_QKV_INPUT);
    args.q = c->at[QD_LATENT_QKV_Q];
    args.kv = c->at[QD_LATENT_QKV_KV];
    args.k_rope = c->at[QD_LATENT_QKV_K_ROPE];
    args.qkv = c->at[QD_LATENT_QKV_QKV];
    return c->frame->kernels->latent_join(c->frame->stream, &args);
}

qd_status qd_run_latent_qkv_grad(const qd_op_call *c)
{
    qd_latent_args args = latent_args(c, QD_LATENT_QKV_GRAD_TABLE, QD_LATENT_QKV_GRAD_INPUT);
    args.q = c->at[QD_LATENT_QKV_GRAD_DQ];
    args.kv = c->at[QD_LATENT_QKV_GRAD_DKV];
    args.k_rope = c->at[QD_LATENT_QKV_GRAD_DK_ROPE];
    args.qkv = c->at[QD_LATENT_QKV_GRAD_D_QKV];
    return c->frame->kernels->latent_split(c->frame->stream, &args);
}

/* Rotates the part of `heads` heads that starts at x, in place. */
static qd_status turn(const qd_op_call *c, void *x, int heads, int head_dim, qd_dtype dtype)
{
    const qd_model *m = call_model(c);
    return c->frame->kernels->rope(c->frame->stream, &(qd_rope_args){
        .x = x, .table = c->at[QD_ATTENTION_LATENT_TABLE], .positions = input_positions(c, QD_ATTENTION_LATENT_INPUT), .rows = c->op->m,
        .seq = c->frame->program->strategy.seq, .row_stride = (int64_t)heads * head_dim, .heads = heads, .head_dim = head_dim,
        .dims = m->qk_rope_head_dim, .interleaved = m->rope_interleave, .dtype = dtype,
    });
}

/* to[:, at ..] = columns of x from `first` on. */
static qd_status copy(const qd_op_call *c, int x, int64_t first, int64_t cols, int to, int64_t at)
{
    const qd_dtype dtype = call_dtype(c, x);
    const int64_t size = (int64_t)qd_dtype_size(dtype);
    return c->frame->kernels->copy_rows(c->frame->stream, &(qd_copy_rows_args){
        .from = (char *)c->at[x] + first * size, .to = (char *)c->at[to] + at * size, .rows = c->op->m, .cols = cols,
        .from_stride = call_stride(c, x), .to_stride = call_stride(c, to), .from_dtype = dtype, .to_dtype = dtype,
    });
}

/* For one head: y[:, to ..] = x[:, from ..] · W with W the (k, n) matrix, or its transpose, from
 * this row of the weight on. */
static qd_status multiply(const qd_op_call *c, int x, int64_t from, int64_t k, int64_t row, bool transposed, int y, int64_t to, int64_t n)
{
    const qd_dtype dtype = call_dtype(c, x);
    const int64_t size = (int64_t)qd_dtype_size(dtype), stride = call_stride(c, QD_ATTENTION_LATENT_WEIGHT);
    return c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = (char *)c->at[x] + from * size, .b = call_row(c, QD_ATTENTION_LATENT_WEIGHT, row), .c = (char *)c->at[y] + to * size,
        .m = c->op->m, .n = n, .k = k, .lda = call_stride(c, x), .ldb = stride, .ldc = call_stride(c, y), .trans_b = transposed,
        .a_dtype = dtype, .b_dtype = call_dtype(c, QD_ATTENTION_LATENT_WEIGHT), .c_dtype = dtype,
    });
}

/* A key of head h is W_h · latent and its rotary part, so its score with a query q is that of the
 * latent with W_hᵀ · q. Likewise the weighted sum of values is V_h times that of latents. All heads
 * then read the same cache. */
qd_status qd_run_attention_latent(const qd_op_call *c)
{
    const qd_model *m = call_model(c);
    const qd_dtype dtype = call_dtype(c, QD_ATTENTION_LATENT_Q);
    const int64_t size = (int64_t)qd_dtype_size(dtype), rank = m->kv_lora_rank, nope = m->qk_nope_head_dim, rope = m->qk_rope_head_dim,
                  v = m->v_head_dim, key = rank + rope;
    QD_TRY(turn(c, (char *)c->at[QD_ATTENTION_LATENT_Q] + nope * size, c->op->heads, m->head_dim, dtype));
    QD_TRY(turn(c, c->at[QD_ATTENTION_LATENT_K_ROPE], 1, (int)rope, dtype));
    QD_TRY(copy(c, QD_ATTENTION_LATENT_LATENT, 0, rank, QD_ATTENTION_LATENT_KEY, 0));
    QD_TRY(copy(c, QD_ATTENTION_LATENT_K_ROPE, 0, rope, QD_ATTENTION_LATENT_KEY, rank));
    for (int64_t h = 0; h < c->op->heads; h++) {
        QD_TRY(multiply(c, QD_ATTENTION_LATENT_Q, h * m->head_dim, nope, h * (nope + v), false, QD_ATTENTION_LATENT_ABSORBED, h * key,
                        rank));
        QD_TRY(copy(c, QD_ATTENTION_LATENT_Q, h * m->head_dim + nope, rope, QD_ATTENTION_LATENT_ABSORBED, h * key + rank));
    }
    QD_TRY(c->frame->kernels->attention_cached(c->frame->stream, &(qd_attention_cached_args){
        .q = c->at[QD_ATTENTION_LATENT_ABSORBED], .k = c->at[QD_ATTENTION_LATENT_KEY], .o = c->at[QD_ATTENTION_LATENT_MIXED],
        .k_cache = c->at[QD_ATTENTION_LATENT_CACHE], .rows = c->op->m, .past = c->frame->past,
        .context = c->frame->program->strategy.context, .q_stride = c->op->heads * key, .k_stride = key, .o_stride = c->op->heads * rank,
        .heads = c->op->heads, .kv_heads = 1, .head_dim = (int)key, .v_dim = (int)rank, .scale = qd_model_score_scale(m),
        .softcap = (float)m->score_softcap, .dtype = dtype,
    }));
    for (int64_t h = 0; h < c->op->heads; h++)
        QD_TRY(multiply(c, QD_ATTENTION_LATENT_MIXED, h * rank, rank, h * (nope + v) + nope, true, QD_ATTENTION_LATENT_O, h * v, v));
    return QD_OK;
}
