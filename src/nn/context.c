/* Runners of context parallelism: attention over rows that are sharded over cp, and the copies of
 * rows and columns around it. */
#include "nn/nn_impl.h"

static void *shifted(void *base, int64_t elements, qd_dtype dtype)
{
    return base ? (char *)base + elements * (int64_t)qd_dtype_size(dtype) : NULL;
}

qd_status qd_run_zero(const qd_op_call *c)
{
    return qd_fill_zero(c->frame->stream, c->at[QD_ZERO_X], qd_slot_bytes(&c->slots[c->op->slot[QD_ZERO_X]]));
}

qd_status qd_run_columns(const qd_op_call *c)
{
    return c->frame->kernels->copy_rows(c->frame->stream, &(qd_copy_rows_args){
        .from = shifted(c->at[QD_COLUMNS_X], c->op->first, call_dtype(c, QD_COLUMNS_X)),
        .to = shifted(c->at[QD_COLUMNS_Y], c->op->to, call_dtype(c, QD_COLUMNS_Y)),
        .rows = c->op->m, .cols = c->op->n, .from_stride = call_stride(c, QD_COLUMNS_X), .to_stride = call_stride(c, QD_COLUMNS_Y),
        .from_dtype = call_dtype(c, QD_COLUMNS_X), .to_dtype = call_dtype(c, QD_COLUMNS_Y),
    });
}

/* The rows that attend to each other: this rank's queries, and the keys of the rank `round`
 * positions before it in cp, or all keys (round -1). */
typedef struct meeting {
    qd_row_run q[QD_CONTEXT_RUNS], k[QD_CONTEXT_RUNS];
    qd_attention_part_args args; /* common to forward and backward */
} meeting;

QD_SAME_PLACE(QKV, ATTENTION_PART, ATTENTION_PART_GRAD);
QD_SAME_PLACE(INPUT, ATTENTION_PART, ATTENTION_PART_GRAD);
QD_SAME_PLACE(KV, ATTENTION_PART, ATTENTION_PART_GRAD);

static void meet(const qd_op_call *c, meeting *m)
{
    const qd_program *p = c->frame->program;
    const qd_model *model = call_model(c);
    int coord, cp = qd_program_cp(p, &coord), of = (coord + cp - c->op->round) % cp;
    bool all = c->op->round < 0;
    const int v_dim = qd_model_v_dim(model);
    int64_t seq = p->strategy.seq, stride = call_stride(c, QD_ATTENTION_PART_QKV), kv_cols = call_stride(c, QD_ATTENTION_PART_KV);
    qd_dtype dtype = call_dtype(c, QD_ATTENTION_PART_QKV);
    m->args = (qd_attention_part_args){
        .q = c->at[QD_ATTENTION_PART_QKV],
        .k = c->at[QD_ATTENTION_PART_KV],
        .v = shifted(c->at[QD_ATTENTION_PART_KV], (int64_t)c->op->kv_heads * model->head_dim, dtype),
        .doc_start = input_documents(c, QD_ATTENTION_PART_INPUT),
        .q_runs = m->q,
        .k_runs = m->k,
        .q_run_count = qd_context_runs(seq, cp, coord, m->q),
        .k_run_count = all ? qd_context_runs(seq, 1, 0, m->k) : qd_context_runs(seq, cp, of, m->k),
        .batch = p->strategy.micro_batch,
        .q_seq = qd_context_rows(seq, cp, coord),
        .k_seq = all ? seq : qd_context_rows(seq, cp, of),
        .q_stride = stride,
        .k_stride = kv_cols,
        .v_stride = kv_cols,
        .o_stride = (int64_t)c->op->heads * v_dim,
        .heads = c->op->heads,
        .kv_heads = c->op->kv_heads,
        .head_dim = model->head_dim,
        .v_dim = v_dim,
        .window = c->op->window,
        .scale = qd_model_score_scale(model),
        .softcap = (float)model->score_softcap,
        .begin = c->op->round <= 0,
        .dtype = dtype,
    };
}

qd_status qd_run_attention_part(const qd_op_call *c)
{
    meeting m;
    meet(c, &m);
    m.args.o = c->at[QD_ATTENTION_PART_O];
    m.args.lse = c->at[QD_ATTENTION_PART_LSE];
    m.args.maxima = call_maxima(c);
    return c->frame->kernels->attention_part_forward(c->frame->stream, &m.args);
}

qd_status qd_run_attention_delta(const qd_op_call *c)
{
    const qd_program *p = c->frame->program;
    const qd_model *model = call_model(c);
    const int v_dim = qd_model_v_dim(model);
    int64_t q = (int64_t)c->op->heads * model->head_dim, o = (int64_t)c->op->heads * v_dim;
    return c->frame->kernels->attention_delta(c->frame->stream, &(qd_attention_args){
        .o = c->at[QD_ATTENTION_DELTA_O], .d_o = c->at[QD_ATTENTION_DELTA_D_O], .delta = c->at[QD_ATTENTION_DELTA_DELTA],
        .batch = p->strategy.micro_batch, .seq = qd_ledger_rows(p->ledger, p->rank, p->strategy.seq), .q_stride = q,
        .k_stride = q, .v_stride = o, .o_stride = o,
        .heads = c->op->heads, .kv_heads = c->op->kv_heads, .head_dim = model->head_dim, .v_dim = v_dim,
        .dtype = call_dtype(c, QD_ATTENTION_DELTA_O),
    });
}

qd_status qd_run_attention_part_grad(const qd_op_call *c)
{
    meeting m;
    meet(c, &m);
    int64_t kv_cols = call_stride(c, QD_ATTENTION_PART_GRAD_DKV);
    m.args.lse = c->at[QD_ATTENTION_PART_GRAD_LSE];
    m.args.d_o = c->at[QD_ATTENTION_PART_GRAD_D_O];
    m.args.delta = c->at[QD_ATTENTION_PART_GRAD_DELTA];
    m.args.dq = c->at[QD_ATTENTION_PART_GRAD_DQ];
    m.args.dk = c->at[QD_ATTENTION_PART_GRAD_DKV];
    m.args.dv = (float *)c->at[QD_ATTENTION_PART_GRAD_DKV] + (int64_t)c->op->kv_heads * call_model(c)->head_dim;
    m.args.dq_stride = call_stride(c, QD_ATTENTION_PART_GRAD_DQ);
    m.args.dk_stride = m.args.dv_stride = kv_cols;
    return c->frame->kernels->attention_part_backward(c->frame->stream, &m.args);
}

/* Ulysses: heads for positions. */

QD_SAME_PLACE(X, HEADS_SPLIT, HEADS_JOIN);
QD_SAME_PLACE(X, HEADS_SPLIT, ROWS_SPLIT);
QD_SAME_PLACE(X, HEADS_SPLIT, ROWS_JOIN);

static qd_status copy(const qd_op_call *c, const void *from, void *to, int64_t rows, int64_t cols, int64_t from_stride, int64_t to_stride,
                      bool add)
{
    qd_dtype dtype = call_dtype(c, QD_HEADS_SPLIT_X);
    return c->frame->kernels->copy_rows(c->frame->stream, &(qd_copy_rows_args){.from = from, .to = to, .rows = rows, .cols = cols,
                                                                               .from_stride = from_stride, .to_stride = to_stride,
                                                                               .accumulate = add, .from_dtype = dtype, .to_dtype = dtype});
}

/* x: rows of queries, keys and values (n, k and those of as many heads), or of results (k 0). by:
 * for each rank, all rows of the columns of its heads. A kv head that several ranks read is copied
 * to each; the reverse direction sums, in the order of ranks. */
static qd_status heads(const qd_op_call *c, void *x, void *by, bool split)
{
    qd_dtype dtype = call_dtype(c, QD_HEADS_SPLIT_X);
    const int64_t head_dim = call_model(c)->head_dim, v_dim = qd_model_v_dim(call_model(c)), kv_heads = c->op->k / head_dim;
    int coord, cp = qd_program_cp(c->frame->program, &coord);
    int64_t dims[3] = {c->op->k > 0 ? head_dim : v_dim, head_dim, v_dim}, widths[3] = {c->op->n, c->op->k, kv_heads * v_dim};
    int64_t kv_share = kv_heads > 0 ? qd_context_kv_share(cp, (int)kv_heads) : 0;
    int64_t stride = widths[0] + widths[1] + widths[2], rows = c->op->m, share = c->op->n / cp + kv_share * (head_dim + v_dim);
    for (int r = 0; r < cp; r++) {
        int64_t at = 0, to = r * rows * share;
        for (int i = 0; i < 3 && widths[i] > 0; i++) {
            int64_t cols = i == 0 ? c->op->n / cp : kv_share * dims[i], of_head = r * (widths[i] / dims[i]); /* in units of 1 / cp heads */
            void *there = shifted(x, at + of_head / cp * dims[i], dtype), *here = shifted(by, to, dtype);
            QD_TRY(split ? copy(c, there, here, rows, cols, stride, share, false)
                         : copy(c, here, there, rows, cols, share, stride, of_head % cp != 0));
            at += widths[i];
            to += cols;
        }
    }
    return QD_OK;
}

qd_status qd_run_heads_split(const qd_op_call *c)
{
    return heads(c, c->at[QD_HEADS_SPLIT_X], c->at[QD_HEADS_SPLIT_Y], true);
}

qd_status qd_run_heads_join(const qd_op_call *c)
{
    return heads(c, c->at[QD_HEADS_JOIN_Y], c->at[QD_HEADS_JOIN_X], false);
}

/* x: whole sequences in order of positions. by: for each rank, the rows that it holds. */
static qd_status rows(const qd_op_call *c, void *x, void *by, bool split)
{
    const qd_program *p = c->frame->program;
    qd_dtype dtype = call_dtype(c, QD_ROWS_SPLIT_X);
    int coord, cp = qd_program_cp(p, &coord);
    int64_t seq = p->strategy.seq, batch = p->strategy.micro_batch, cols = call_stride(c, split ? QD_ROWS_SPLIT_X : QD_ROWS_JOIN_Y),
        first = 0;
    for (int r = 0; r < cp; r++) {
        qd_row_run runs[QD_CONTEXT_RUNS];
        int count = qd_context_runs(seq, cp, r, runs);
        for (int64_t b = 0; b < batch; b++, first += qd_context_rows(seq, cp, r)) {
            for (int i = 0; i < count; i++) {
                void *there = shifted(x, (b * seq + runs[i].position) * cols, dtype),
                     *here = shifted(by, (first + runs[i].row) * cols, dtype);
                QD_TRY(copy(c, split ? there : here, split ? here : there, runs[i].count, cols, cols, cols, false));
            }
        }
    }
    return QD_OK;
}

qd_status qd_run_rows_split(const qd_op_call *c)
{
    return rows(c, c->at[QD_ROWS_SPLIT_X], c->at[QD_ROWS_SPLIT_Y], true);
}

qd_status qd_run_rows_join(const qd_op_call *c)
{
    return rows(c, c->at[QD_ROWS_JOIN_Y], c->at[QD_ROWS_JOIN_X], false);
}
