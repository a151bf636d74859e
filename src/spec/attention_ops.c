/* Attention of a block: over this rank's own rows, or with cp over the rows of all its ranks. R is the micro-batch's rows on
 * this rank (batch × seq / cp), S those of whole sequences.
 *
 * ring     keys and values pass from rank to rank, n - 1 times, each part meeting the queries while the next is on its way. In
 *          the backward pass they pass once more, and their gradients follow them, n times: the last time home.
 * gather   every rank gets the keys and values of whole sequences, and again in the backward pass, where their gradients are
 *          summed over the ranks.
 * ulysses  each rank gets whole sequences of a share of the heads, and gives the result back by rows. */
#include "spec/ops_impl.h"

typedef struct attention {
    qd_class_writer *w;
    qd_group group; /* the ranks of cp */
    int heads, kv_heads, input;
    int64_t q, kv, batch, most; /* columns of queries, of keys; the most rows of a sequence on any rank of cp */
    int64_t kv_share;           /* ulysses: columns of keys that a rank gets, whole heads */
    double flops;               /* of the forward pass on this rank */
} attention;

static attention begin(qd_class_writer *w, int input, int heads, int kv_heads)
{
    attention a = {.w = w, .group = qd_group_whole(&w->ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP)), .heads = heads, .kv_heads = kv_heads,
                   .input = input, .batch = w->config->batch};
    a.q = (int64_t)heads * w->model->head_dim;
    a.kv = (int64_t)kv_heads * w->model->head_dim;
    a.kv_share = qd_context_kv_share(a.group.size, a.kv, w->model->head_dim);
    a.most = qd_context_most_rows(w->config->seq, a.group.size);
    /* QKᵀ and PV over the causal half. Chunks are dealt out so that all ranks see the same. */
    a.flops = 2.0 * (double)w->rows * (double)w->config->seq * (double)a.q;
    return a;
}

static int whole_rows(const attention *a, const char *name, qd_dtype dtype, int64_t cols)
{
    return qd_class_slot(a->w, name, QD_SLOT_LOCAL, dtype, a->batch * a->w->config->seq, cols);
}

static int most_rows(const attention *a, const char *name, qd_dtype dtype, int64_t cols)
{
    return qd_class_slot(a->w, name, QD_SLOT_LOCAL, dtype, a->batch * a->most, cols);
}

/* An op that communicates: `count` elements, as qd_coll_bytes counts them. Returns its index if it runs beside others. */
static int exchange(const attention *a, qd_op_kind kind, int from, int to, int64_t cols, int64_t count, int round, bool async)
{
    qd_class_writer *w = a->w;
    qd_op *op = qd_class_exchange(w, kind, a->group, (const int[]){from, to}, 2, 0, a->batch * w->config->seq, cols);
    op->exchange.count = count;
    op->round = round;
    op->exchange.async = async && w->config->overlap;
    return op->exchange.async ? w->op_count - 1 : -1;
}

/* y[:, to ..] = x[:, from ..], `cols` columns of all of this rank's rows. */
static void columns(const attention *a, int x, int64_t from, int y, int64_t to, int64_t cols)
{
    qd_op *op = QD_CLASS_OP(a->w, COLUMNS, x, y);
    qd_op_sizes(op, a->w->rows, cols, 0, 0.0);
    op->first = from;
    op->to = to;
    op->bytes = a->w->rows * cols * (int64_t)(qd_dtype_size(a->w->slots[x].dtype) + qd_dtype_size(a->w->slots[y].dtype));
}

static void zero(const attention *a, int x)
{
    qd_op_sizes(QD_CLASS_OP(a->w, ZERO, x), a->w->slots[x].rows, a->w->slots[x].cols, 0, 0.0);
}

/* ---- ring and gather ---- */

static void part(const attention *a, int qkv, int kv, int o, int lse, int round, double flops)
{
    qd_op *op = qd_op_heads(QD_CLASS_OP(a->w, ATTENTION_PART, qkv, a->input, kv, o, lse), a->w->rows, a->q, a->heads, a->kv_heads);
    op->k = a->w->config->seq;
    op->round = round;
    op->flops = flops;
}

static void part_grad(const attention *a, qd_class_attention_state s, int kv, int d_o, int delta, int dq, int dkv, int round,
                      double flops)
{
    qd_op *op = qd_op_heads(QD_CLASS_OP(a->w, ATTENTION_PART_GRAD, s.qkv, a->input, kv, s.lse, d_o, delta, dq, dkv), a->w->rows, a->q,
                            a->heads, a->kv_heads);
    op->k = a->w->config->seq;
    op->round = round;
    op->flops = flops;
}

/* Keys and values of whole sequences. */
static int gather(const attention *a, int qkv)
{
    int own = qd_class_local(a->w, "kv", 2 * a->kv), all = whole_rows(a, "kv of whole sequences", a->w->config->activation, 2 * a->kv);
    columns(a, qkv, a->q, own, 0, 2 * a->kv);
    exchange(a, QD_OP_CONTEXT_GATHER, own, all, 2 * a->kv, a->batch * a->w->config->seq * 2 * a->kv, -1, false);
    return all;
}

static void ring(const attention *a, int qkv, int o, int lse)
{
    int n = a->group.size, shift = -1;
    int kv[2] = {most_rows(a, "kv", a->w->config->activation, 2 * a->kv),
                 most_rows(a, "kv passed on", a->w->config->activation, 2 * a->kv)};
    columns(a, qkv, a->q, kv[0], 0, 2 * a->kv);
    for (int t = 0; t < n; t++) {
        int before = shift;
        if (t < n - 1) {
            shift =
                exchange(a, QD_OP_CONTEXT_SHIFT, kv[t % 2], kv[1 - t % 2], 2 * a->kv, a->batch * a->w->config->seq * 2 * a->kv, t, true);
            qd_class_await(a->w, before);
        }
        part(a, qkv, kv[t % 2], o, lse, t, a->flops / n);
        if (t == n - 1)
            qd_class_await(a->w, before);
    }
}

/* The gradients of a part of the keys are computed while those of the ranks before arrive, then added to them. Returns the slot
 * of this rank's own, and in *pending the op that must have ended. */
static int ring_grad(const attention *a, qd_class_attention_state s, int d_o, int delta, int dq, int *pending)
{
    int n = a->group.size, kv_shift = -1, dkv_shift = -1;
    int64_t cols = 2 * a->kv, count = a->batch * a->w->config->seq * cols;
    qd_dtype dtype = a->w->config->activation;
    int kv[2] = {most_rows(a, "kv again", dtype, cols), most_rows(a, "kv passed on again", dtype, cols)};
    int dkv[2] = {most_rows(a, "d_kv", QD_F32, cols), most_rows(a, "d_kv passed on", QD_F32, cols)};
    int own = most_rows(a, "d_kv of own queries", QD_F32, cols);
    columns(a, s.qkv, a->q, kv[0], 0, cols);
    for (int t = 0; t < n; t++) {
        int before = kv_shift, to = t == 0 ? dkv[0] : own;
        if (t < n - 1) {
            kv_shift = exchange(a, QD_OP_CONTEXT_SHIFT, kv[t % 2], kv[1 - t % 2], cols, count, t, true);
            qd_class_await(a->w, before);
        }
        zero(a, to);
        part_grad(a, s, kv[t % 2], d_o, delta, dq, to, t, 2.5 * a->flops / n);
        if (t == n - 1)
            qd_class_await(a->w, before);
        if (t > 0) {
            qd_op_sizes(QD_CLASS_OP(a->w, ADD, dkv[t % 2], own, dkv[t % 2]), a->batch * a->most, cols, 0, 0.0);
            qd_class_await(a->w, dkv_shift);
        }
        dkv_shift = exchange(a, QD_OP_CONTEXT_SHIFT, dkv[t % 2], dkv[1 - t % 2], cols, count, t, true);
    }
    *pending = dkv_shift;
    return dkv[n % 2];
}

static int gather_grad(const attention *a, qd_class_attention_state s, int d_o, int delta, int dq)
{
    int64_t cols = 2 * a->kv;
    int kv = gather(a, s.qkv), all = whole_rows(a, "d_kv of whole sequences", QD_F32, cols);
    int own = qd_class_local_f32(a->w, "d_kv", a->w->rows, cols);
    zero(a, all);
    part_grad(a, s, kv, d_o, delta, dq, all, -1, 2.5 * a->flops);
    exchange(a, QD_OP_CONTEXT_SCATTER, all, own, cols, a->batch * a->w->config->seq * cols, -1, false);
    return own;
}

/* ---- ulysses ---- */

/* Rows of this rank, q + 2 kv columns (kv 0: of the output), become whole sequences of its share of the heads, or back. Kv heads
 * that several ranks read go to all of them; the way back adds. */
static void swap(const attention *a, int from, int to, int64_t q, int64_t kv, bool to_heads)
{
    qd_class_writer *w = a->w;
    int n = a->group.size;
    int64_t share = q / n + (kv > 0 ? 2 * a->kv_share : 0);
    qd_dtype dtype = w->slots[from].dtype;
    int out = to_heads ? qd_class_local(w, "by rank", n * share) : whole_rows(a, "by rank", dtype, share);
    int in = to_heads ? whole_rows(a, "of ranks", dtype, share) : qd_class_local(w, "of ranks", n * share);
    qd_op *split = to_heads ? QD_CLASS_OP(w, HEADS_SPLIT, from, out) : QD_CLASS_OP(w, ROWS_SPLIT, from, out);
    qd_op_sizes(split, w->rows, q, kv, 0.0);
    exchange(a, QD_OP_CONTEXT_SWAP, out, in, share, a->batch * w->config->seq * share * (n - 1), to_heads, false);
    qd_op *join = to_heads ? QD_CLASS_OP(w, ROWS_JOIN, in, to) : QD_CLASS_OP(w, HEADS_JOIN, in, to);
    qd_op_sizes(join, w->rows, q, kv, 0.0);
}

/* Of one rank alone, or in ulysses of its share. */
static int own_kv_heads(const attention *a)
{
    return (int)(a->kv_share / a->w->model->head_dim);
}

static void plain(const attention *a, qd_class_attention_state s)
{
    int n = a->group.size;
    qd_op *op = qd_op_heads(QD_CLASS_OP(a->w, ATTENTION, s.qkv, a->input, s.o, s.lse), a->w->rows, a->q, a->heads / n, own_kv_heads(a));
    op->k = a->w->config->seq;
    op->flops = a->flops;
}

static void plain_grad(const attention *a, qd_class_attention_state s, int d_o, int d_qkv)
{
    int n = a->group.size;
    int delta = qd_class_local_f32(a->w, "delta", a->batch * a->heads / n, a->w->config->seq);
    qd_op *op = qd_op_heads(QD_CLASS_OP(a->w, ATTENTION_GRAD, s.qkv, a->input, s.o, s.lse, d_o, d_qkv, delta), a->w->rows, a->q,
                            a->heads / n, own_kv_heads(a));
    op->k = a->w->config->seq;
    op->flops = 2.5 * a->flops;
}

/* ---- */

qd_class_attention_state qd_class_attention(qd_class_writer *w, int qkv, int input, int o, int heads, int kv_heads)
{
    attention a = begin(w, input, heads, kv_heads);
    int n = a.group.size;
    bool ulysses = n > 1 && w->config->cp_mode == QD_CP_ULYSSES;
    qd_class_attention_state s = {qkv, o, -1};
    if (n == 1 || ulysses) {
        s.lse = qd_class_local_f32(w, "lse", a.batch * heads / n, w->config->seq);
        if (ulysses) {
            s.qkv = whole_rows(&a, "qkv of own heads", w->config->activation, a.q / n + 2 * a.kv_share);
            s.o = whole_rows(&a, "attended of own heads", w->config->activation, a.q / n);
            swap(&a, qkv, s.qkv, a.q, a.kv, true);
        }
        plain(&a, s);
        if (ulysses)
            swap(&a, s.o, o, a.q, 0, false);
        return s;
    }
    s.lse = qd_class_local_f32(w, "lse", a.batch * heads, w->seq);
    bool narrow = w->config->activation != QD_F32; /* the running result is fp32 */
    int sum = narrow ? qd_class_local_f32(w, "attended in fp32", w->rows, a.q) : o;
    if (w->config->cp_mode == QD_CP_RING)
        ring(&a, qkv, sum, s.lse);
    else
        part(&a, qkv, gather(&a, qkv), sum, s.lse, -1, a.flops);
    if (narrow)
        columns(&a, sum, 0, o, 0, a.q);
    return s;
}

void qd_class_attention_grad(qd_class_writer *w, qd_class_attention_state s, int input, int d_o, int d_qkv, int heads, int kv_heads)
{
    attention a = begin(w, input, heads, kv_heads);
    int n = a.group.size, pending = -1;
    if (n == 1) {
        plain_grad(&a, s, d_o, d_qkv);
        return;
    }
    if (w->config->cp_mode == QD_CP_ULYSSES) {
        int own_d_o = whole_rows(&a, "d_attended of own heads", w->config->activation, a.q / n);
        int own_d_qkv = whole_rows(&a, "d_qkv of own heads", w->config->activation, a.q / n + 2 * a.kv_share);
        swap(&a, d_o, own_d_o, a.q, 0, true);
        plain_grad(&a, s, own_d_o, own_d_qkv);
        swap(&a, own_d_qkv, d_qkv, a.q, a.kv, false);
        return;
    }
    bool narrow = w->config->activation != QD_F32;
    int delta = qd_class_local_f32(w, "delta", a.batch * heads, w->seq);
    int dq = narrow ? qd_class_local_f32(w, "d_q in fp32", w->rows, a.q) : d_qkv;
    zero(&a, dq);
    qd_op_heads(QD_CLASS_OP(w, ATTENTION_DELTA, s.o, d_o, delta), w->rows, a.q, heads, kv_heads);
    int dkv = w->config->cp_mode == QD_CP_RING ? ring_grad(&a, s, d_o, delta, dq, &pending) : gather_grad(&a, s, d_o, delta, dq);
    if (narrow)
        columns(&a, dq, 0, d_qkv, 0, a.q);
    columns(&a, dkv, 0, d_qkv, a.q, 2 * a.kv);
    qd_class_await(w, pending);
}
