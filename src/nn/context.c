/* Attention over rows that are shared out over the ranks of cp, and the moves of rows and columns around it. */
#include "nn/nn_impl.h"

#include <math.h>

static void *shifted(void *base, int64_t elements, qd_dtype dtype)
{
    return base ? (char *)base + elements * (int64_t)qd_dtype_size(dtype) : NULL;
}

qd_status qd_run_zero(const qd_op_call *c)
{
    return qd_fill_zero(c->frame->stream, c->at[0], qd_slot_bytes(&c->slots[c->op->slot[0]]));
}

qd_status qd_run_columns(const qd_op_call *c)
{
    return c->frame->kernels->copy_rows(c->frame->stream, &(qd_copy_rows_args){
        .from = shifted(c->at[0], c->op->first, call_dtype(c, 0)), .to = shifted(c->at[1], c->op->to, call_dtype(c, 1)),
        .rows = c->op->m, .cols = c->op->n, .from_stride = c->slots[c->op->slot[0]].cols, .to_stride = c->slots[c->op->slot[1]].cols,
        .from_dtype = call_dtype(c, 0), .to_dtype = call_dtype(c, 1),
    });
}

/* Which rows meet: this rank's queries, and the keys of the rank that stands `round` before it in cp, or all (round -1). */
typedef struct meeting {
    qd_row_run q[QD_CONTEXT_RUNS], k[QD_CONTEXT_RUNS];
    qd_attention_part_args args; /* what forward and backward share */
} meeting;

static void meet(const qd_op_call *c, meeting *m)
{
    const qd_program *p = c->frame->program;
    const qd_model *model = call_model(c);
    int coord, cp = qd_program_cp(p, &coord), of = (coord + cp - c->op->round) % cp;
    bool all = c->op->round < 0;
    int64_t seq = p->strategy.seq, stride = c->slots[c->op->slot[0]].cols, kv_cols = c->slots[c->op->slot[2]].cols;
    qd_dtype dtype = call_dtype(c, 0);
    m->args = (qd_attention_part_args){
        .q = c->at[0],
        .k = c->at[2],
        .v = shifted(c->at[2], kv_cols / 2, dtype),
        .doc_start = input_documents(c, 1),
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
        .o_stride = (int64_t)c->op->heads * model->head_dim,
        .heads = c->op->heads,
        .kv_heads = c->op->kv_heads,
        .head_dim = model->head_dim,
        .scale = 1.0f / sqrtf((float)model->head_dim),
        .begin = c->op->round <= 0,
        .dtype = dtype,
    };
}

qd_status qd_run_attention_part(const qd_op_call *c)
{
    meeting m;
    meet(c, &m);
    m.args.o = c->at[3];
    m.args.lse = c->at[4];
    return c->frame->kernels->attention_part_forward(c->frame->stream, &m.args);
}

qd_status qd_run_attention_delta(const qd_op_call *c)
{
    const qd_program *p = c->frame->program;
    const qd_model *model = call_model(c);
    int64_t cols = (int64_t)c->op->heads * model->head_dim;
    return c->frame->kernels->attention_delta(c->frame->stream, &(qd_attention_args){
        .o = c->at[0], .d_o = c->at[1], .delta = c->at[2], .batch = p->strategy.micro_batch,
        .seq = qd_ledger_rows(p->ledger, p->rank, p->strategy.seq), .q_stride = cols, .k_stride = cols, .v_stride = cols, .o_stride = cols,
        .heads = c->op->heads, .kv_heads = c->op->kv_heads, .head_dim = model->head_dim, .dtype = call_dtype(c, 0),
    });
}

qd_status qd_run_attention_part_grad(const qd_op_call *c)
{
    meeting m;
    meet(c, &m);
    int64_t kv_cols = c->slots[c->op->slot[7]].cols;
    m.args.lse = c->at[3];
    m.args.d_o = c->at[4];
    m.args.delta = c->at[5];
    m.args.dq = c->at[6];
    m.args.dk = c->at[7];
    m.args.dv = (float *)c->at[7] + kv_cols / 2;
    m.args.dq_stride = c->slots[c->op->slot[6]].cols;
    m.args.dk_stride = m.args.dv_stride = kv_cols;
    return c->frame->kernels->attention_part_backward(c->frame->stream, &m.args);
}

/* ---- heads for positions ---- */

static qd_status copy(const qd_op_call *c, const void *from, void *to, int64_t rows, int64_t cols, int64_t from_stride, int64_t to_stride,
                      bool add)
{
    qd_dtype dtype = call_dtype(c, 0);
    return c->frame->kernels->copy_rows(c->frame->stream, &(qd_copy_rows_args){.from = from, .to = to, .rows = rows, .cols = cols,
                                                                               .from_stride = from_stride, .to_stride = to_stride,
                                                                               .accumulate = add, .from_dtype = dtype, .to_dtype = dtype});
}

/* x: rows of queries, keys and values (n, k, k columns), or of queries alone (k 0). by: for each rank, all rows of its heads'
 * columns of each of them. A kv head that several ranks read goes to each; what they give back is added, in the order of ranks. */
static qd_status heads(const qd_op_call *c, void *x, void *by, bool split)
{
    qd_dtype dtype = call_dtype(c, 0);
    int64_t head_dim = call_model(c)->head_dim;
    int coord, cp = qd_program_cp(c->frame->program, &coord);
    int64_t widths[3] = {c->op->n, c->op->k, c->op->k}, stride = c->op->n + 2 * c->op->k, rows = c->op->m;
    int64_t kv_share = c->op->k > 0 ? qd_context_kv_share(cp, c->op->k, head_dim) : 0, share = c->op->n / cp + 2 * kv_share;
    for (int r = 0; r < cp; r++) {
        int64_t at = 0, to = r * rows * share;
        for (int i = 0; i < 3 && widths[i] > 0; i++) {
            int64_t cols = i == 0 ? c->op->n / cp : kv_share, of_head = r * (widths[i] / head_dim); /* in units of 1 / cp heads */
            void *there = shifted(x, at + of_head / cp * head_dim, dtype), *here = shifted(by, to, dtype);
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
    return heads(c, c->at[0], c->at[1], true);
}

qd_status qd_run_heads_join(const qd_op_call *c)
{
    return heads(c, c->at[1], c->at[0], false);
}

/* x: whole sequences in the order of positions. by: for each rank, the rows that it holds. */
static qd_status rows(const qd_op_call *c, void *x, void *by, bool split)
{
    const qd_program *p = c->frame->program;
    qd_dtype dtype = call_dtype(c, 0);
    int coord, cp = qd_program_cp(p, &coord);
    int64_t seq = p->strategy.seq, batch = p->strategy.micro_batch, cols = c->slots[c->op->slot[split ? 0 : 1]].cols, first = 0;
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
    return rows(c, c->at[0], c->at[1], true);
}

qd_status qd_run_rows_join(const qd_op_call *c)
{
    return rows(c, c->at[1], c->at[0], false);
}
