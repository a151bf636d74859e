/* Placement of attention: over this rank's own rows, or under cp over the rows of all its ranks. R
 * is the number of rows of the micro-batch on this rank (batch × seq / cp), S that of whole
 * sequences.
 *
 * - ring: keys and values pass from rank to rank n - 1 times; each part is attended to while the
 *   next is in flight. The backward pass repeats this, and the gradients of keys and values follow
 *   n times, the last time back to their owner.
 * - gather: every rank gathers the keys and values of whole sequences, and again in the backward
 *   pass, where their gradients are reduce-scattered.
 * - ulysses: an all-to-all gives each rank whole sequences of its share of the heads, and another
 *   returns the result by rows. */
#include "spec/passes/passes.h"

typedef struct attention {
    qd_class_writer *w;
    qd_group group; /* the ranks of cp */
    int input;
    int64_t q, kv, batch, most; /* columns of queries, of keys; the most rows of a sequence on any rank of cp */
    int64_t kv_share;           /* ulysses: columns of keys that a rank receives, whole heads */
    int64_t window;             /* 0: none */
    double flops;               /* of the forward pass on this rank */
} attention;

/* What the forward pass keeps for the backward pass, as slots. Ulysses: this rank's heads at all
 * positions; otherwise this rank's rows. */
typedef struct attention_state {
    int qkv, o, lse;
} attention_state;

static attention begin(qd_class_writer *w, int input, int64_t window)
{
    attention a = {.w = w, .group = qd_group_whole(&w->ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP)), .input = input, .batch = w->config->batch,
                   .window = window};
    a.q = (int64_t)w->heads * w->model->head_dim;
    a.kv = (int64_t)w->kv_heads * w->model->head_dim;
    a.kv_share = qd_context_kv_share(a.group.size, a.kv, w->model->head_dim);
    a.most = qd_context_most_rows(w->config->seq, a.group.size);
    /* QKᵀ and PV over the causal half, or the windows. The zigzag assignment of chunks gives all
     * ranks the same work, or with windows nearly so. */
    a.flops = 2.0 * (double)w->rows * qd_window_keys(window, w->config->seq) * (double)a.q;
    return a;
}

/* FLOPs of the forward pass with the keys of the rank `round` ranks back: with windows, the share
 * of the pairs of queries and keys, of which some rounds have none. */
static double round_flops(const attention *a, int round)
{
    int n = a->group.size, coord = qd_group_coord(&a->w->ledger->mesh, a->group, a->w->config->rank);
    double all = 0.0, pairs = 0.0;
    for (int t = 0; t < n && a->window > 0; t++) {
        double here = qd_context_pairs(a->w->config->seq, n, coord, (coord + n - t) % n, a->window);
        all += here;
        pairs = t == round ? here : pairs;
    }
    return a->window > 0 ? a->flops * pairs / all : a->flops / n;
}

static int whole_rows(const attention *a, const char *name, qd_dtype dtype, int64_t cols)
{
    return qd_class_slot(a->w, name, QD_SLOT_LOCAL, dtype, a->batch * a->w->config->seq, cols);
}

static int most_rows(const attention *a, const char *name, qd_dtype dtype, int64_t cols)
{
    return qd_class_slot(a->w, name, QD_SLOT_LOCAL, dtype, a->batch * a->most, cols);
}

QD_SAME_PLACE(X, CONTEXT_SWAP, CONTEXT_SHIFT);
QD_SAME_PLACE(Y, CONTEXT_SWAP, CONTEXT_SHIFT);
QD_SAME_PLACE(X, CONTEXT_SWAP, CONTEXT_GATHER);
QD_SAME_PLACE(Y, CONTEXT_SWAP, CONTEXT_GATHER);
QD_SAME_PLACE(X, CONTEXT_SWAP, CONTEXT_SCATTER);
QD_SAME_PLACE(Y, CONTEXT_SWAP, CONTEXT_SCATTER);

/* Appends an op that communicates `count` elements, as qd_coll_bytes counts them. */
static void exchange(const attention *a, qd_op_kind kind, int from, int to, int64_t cols, int64_t count, int round, bool async)
{
    qd_class_writer *w = a->w;
    qd_op *op = qd_class_exchange(w, kind, a->group, QD_OPERANDS(CONTEXT_SWAP, (X, from), (Y, to)), 0, a->batch * w->config->seq, cols);
    op->exchange.count = count;
    op->round = round;
    op->exchange.async = async && w->config->overlap;
}

/* y[:, to ..] = x[:, from ..], `cols` columns of all of this rank's rows. */
static void columns(const attention *a, int x, int64_t from, int y, int64_t to, int64_t cols)
{
    qd_op *op = QD_CLASS_OP(a->w, COLUMNS, (X, x), (Y, y));
    qd_op_sizes(op, a->w->rows, cols, 0, 0.0);
    op->first = from;
    op->to = to;
    op->bytes = a->w->rows * cols * (int64_t)(qd_dtype_size(a->w->slots[x].dtype) + qd_dtype_size(a->w->slots[y].dtype));
}

static void zero(const attention *a, int x)
{
    qd_op_sizes(QD_CLASS_OP(a->w, ZERO, (X, x)), a->w->slots[x].rows, a->w->slots[x].cols, 0, 0.0);
}

/* Window and sizes of an attention op over `heads` heads of this rank's columns. */
static qd_op *over_heads(const attention *a, qd_op *op, int heads, int kv_heads, double flops)
{
    qd_op_sizes(op, a->w->rows, a->q, a->w->config->seq, flops);
    op->window = a->window;
    op->heads = heads;
    op->kv_heads = kv_heads;
    return op;
}

/* Ring and gather: partial attention to the keys and values of some ranks. */

static void part(const attention *a, int qkv, int kv, int o, int lse, int round, double flops)
{
    over_heads(a, QD_CLASS_OP(a->w, ATTENTION_PART, (QKV, qkv), (INPUT, a->input), (KV, kv), (O, o), (LSE, lse)),
               a->w->heads, a->w->kv_heads, flops)->round = round;
}

static void part_grad(const attention *a, attention_state s, int kv, int d_o, int delta, int dq, int dkv, int round, double flops)
{
    over_heads(a, QD_CLASS_OP(a->w, ATTENTION_PART_GRAD, (QKV, s.qkv), (INPUT, a->input), (KV, kv), (LSE, s.lse), (D_O, d_o),
                              (DELTA, delta), (DQ, dq), (DKV, dkv)),
               a->w->heads, a->w->kv_heads, flops)->round = round;
}

/* Gathers keys and values of whole sequences. */
static int gather(const attention *a, int qkv)
{
    int own = qd_class_local(a->w, "kv", a->w->rows, 2 * a->kv),
        all = whole_rows(a, "kv of whole sequences", a->w->config->activation, 2 * a->kv);
    columns(a, qkv, a->q, own, 0, 2 * a->kv);
    exchange(a, QD_OP_CONTEXT_GATHER, own, all, 2 * a->kv, a->batch * a->w->config->seq * 2 * a->kv, -1, false);
    return all;
}

static void ring(const attention *a, int qkv, int o, int lse)
{
    int n = a->group.size;
    int64_t cols = 2 * a->kv, count = a->batch * a->w->config->seq * cols;
    int kv[2] = {most_rows(a, "kv", a->w->config->activation, cols), most_rows(a, "kv passed on", a->w->config->activation, cols)};
    columns(a, qkv, a->q, kv[0], 0, cols);
    for (int t = 0; t < n; t++) {
        if (t < n - 1)
            exchange(a, QD_OP_CONTEXT_SHIFT, kv[t % 2], kv[1 - t % 2], cols, count, t, true);
        part(a, qkv, kv[t % 2], o, lse, t, round_flops(a, t));
    }
}

/* The gradients of one part of the keys are computed while those accumulated by the previous ranks
 * are in flight, then added to them. Returns the slot with the gradients of this rank's own
 * keys. */
static int ring_grad(const attention *a, attention_state s, int d_o, int delta, int dq)
{
    int n = a->group.size;
    int64_t cols = 2 * a->kv, count = a->batch * a->w->config->seq * cols;
    qd_dtype dtype = a->w->config->activation;
    int kv[2] = {most_rows(a, "kv again", dtype, cols), most_rows(a, "kv passed on again", dtype, cols)};
    int dkv[2] = {most_rows(a, "d_kv", QD_F32, cols), most_rows(a, "d_kv passed on", QD_F32, cols)};
    int own = most_rows(a, "d_kv of own queries", QD_F32, cols);
    columns(a, s.qkv, a->q, kv[0], 0, cols);
    for (int t = 0; t < n; t++) {
        int to = t == 0 ? dkv[0] : own;
        if (t < n - 1)
            exchange(a, QD_OP_CONTEXT_SHIFT, kv[t % 2], kv[1 - t % 2], cols, count, t, true);
        zero(a, to);
        part_grad(a, s, kv[t % 2], d_o, delta, dq, to, t, 2.5 * round_flops(a, t));
        if (t > 0)
            qd_op_sizes(QD_CLASS_OP(a->w, ADD, (A, dkv[t % 2]), (B, own), (Y, dkv[t % 2])), a->batch * a->most, cols, 0, 0.0);
        exchange(a, QD_OP_CONTEXT_SHIFT, dkv[t % 2], dkv[1 - t % 2], cols, count, t, true);
    }
    return dkv[n % 2];
}

static int gather_grad(const attention *a, attention_state s, int d_o, int delta, int dq)
{
    int64_t cols = 2 * a->kv;
    int kv = gather(a, s.qkv), all = whole_rows(a, "d_kv of whole sequences", QD_F32, cols);
    int own = qd_class_f32(a->w, "d_kv", a->w->rows, cols);
    zero(a, all);
    part_grad(a, s, kv, d_o, delta, dq, all, -1, 2.5 * a->flops);
    exchange(a, QD_OP_CONTEXT_SCATTER, all, own, cols, a->batch * a->w->config->seq * cols, -1, false);
    return own;
}

/* Ulysses: exchanges this rank's rows with q + 2 kv columns (kv 0: of the output) for whole
 * sequences of its share of the heads, or the reverse. Kv heads that several ranks read are sent to
 * all of them; the reverse direction sums their gradients. */
static void swap(const attention *a, int from, int to, int64_t q, int64_t kv, bool to_heads)
{
    qd_class_writer *w = a->w;
    int n = a->group.size;
    int64_t share = q / n + (kv > 0 ? 2 * a->kv_share : 0);
    qd_dtype dtype = w->slots[from].dtype;
    int out = to_heads ? qd_class_local(w, "by rank", w->rows, n * share) : whole_rows(a, "by rank", dtype, share);
    int in = to_heads ? whole_rows(a, "of ranks", dtype, share) : qd_class_local(w, "of ranks", w->rows, n * share);
    qd_op *split = to_heads ? QD_CLASS_OP(w, HEADS_SPLIT, (X, from), (Y, out)) : QD_CLASS_OP(w, ROWS_SPLIT, (X, from), (Y, out));
    qd_op_sizes(split, w->rows, q, kv, 0.0);
    exchange(a, QD_OP_CONTEXT_SWAP, out, in, share, a->batch * w->config->seq * share * (n - 1), to_heads, false);
    qd_op *join = to_heads ? QD_CLASS_OP(w, ROWS_JOIN, (X, in), (Y, to)) : QD_CLASS_OP(w, HEADS_JOIN, (X, in), (Y, to));
    qd_op_sizes(join, w->rows, q, kv, 0.0);
}

/* On this rank, or in ulysses in its share. */
static int own_kv_heads(const attention *a)
{
    return (int)(a->kv_share / a->w->model->head_dim);
}

static void plain(const attention *a, attention_state s)
{
    over_heads(a, QD_CLASS_OP(a->w, ATTENTION, (QKV, s.qkv), (INPUT, a->input), (O, s.o), (LSE, s.lse)),
               a->w->heads / a->group.size, own_kv_heads(a), a->flops);
}

static void plain_grad(const attention *a, attention_state s, int d_o, int d_qkv, int delta)
{
    a->w->slots[delta].rows = a->batch * a->w->heads / a->group.size;
    a->w->slots[delta].cols = a->w->config->seq;
    over_heads(a, QD_CLASS_OP(a->w, ATTENTION_GRAD, (QKV, s.qkv), (INPUT, a->input), (O, s.o), (LSE, s.lse), (D_O, d_o), (D_QKV, d_qkv),
                              (DELTA, delta)),
               a->w->heads / a->group.size, own_kv_heads(a), 2.5 * a->flops);
}

void qd_place_attention(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    attention a = begin(w, op->slot[QD_ATTENTION_INPUT], op->window);
    int n = a.group.size, qkv = qd_place_want(p, op->slot[QD_ATTENTION_QKV], QD_LAYOUT_COLUMNS), o = op->slot[QD_ATTENTION_O];
    bool ulysses = n > 1 && w->config->cp_mode == QD_CP_ULYSSES, narrow = w->config->activation != QD_F32;
    attention_state s = {qkv, o, op->slot[QD_ATTENTION_LSE]};
    qd_place_give(p, o, QD_LAYOUT_COLUMNS, a.q);
    w->slots[s.lse].rows = a.batch * w->heads / (ulysses ? n : 1);
    w->slots[s.lse].cols = n == 1 || ulysses ? w->config->seq : w->seq;
    if (n == 1) {
        plain(&a, s);
    } else if (ulysses) {
        s.qkv = whole_rows(&a, "qkv of own heads", w->config->activation, a.q / n + 2 * a.kv_share);
        s.o = whole_rows(&a, "attended of own heads", w->config->activation, a.q / n);
        swap(&a, qkv, s.qkv, a.q, a.kv, true);
        plain(&a, s);
        swap(&a, s.o, o, a.q, 0, false);
    } else {
        int sum = narrow ? qd_class_f32(w, "attended in fp32", w->rows, a.q) : o; /* the running result is fp32 */
        if (w->config->cp_mode == QD_CP_RING)
            ring(&a, qkv, sum, s.lse);
        else
            part(&a, qkv, gather(&a, qkv), sum, s.lse, -1, a.flops);
        if (narrow)
            columns(&a, sum, 0, o, 0, a.q);
    }
    p->attended[0][s.lse] = s.qkv;
    p->attended[1][s.lse] = s.o;
}

void qd_place_attention_grad(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    attention a = begin(w, op->slot[QD_ATTENTION_GRAD_INPUT], op->window);
    int n = a.group.size, lse = op->slot[QD_ATTENTION_GRAD_LSE],
        d_o = qd_place_want(p, op->slot[QD_ATTENTION_GRAD_D_O], QD_LAYOUT_COLUMNS), d_qkv = op->slot[QD_ATTENTION_GRAD_D_QKV],
        delta = op->slot[QD_ATTENTION_GRAD_DELTA];
    attention_state s = {p->attended[0][lse], p->attended[1][lse], lse};
    bool narrow = w->config->activation != QD_F32;
    qd_place_give(p, d_qkv, QD_LAYOUT_COLUMNS, a.q + 2 * a.kv);
    if (n == 1) {
        plain_grad(&a, s, d_o, d_qkv, delta);
        return;
    }
    if (w->config->cp_mode == QD_CP_ULYSSES) {
        int own_d_o = whole_rows(&a, "d_attended of own heads", w->config->activation, a.q / n);
        int own_d_qkv = whole_rows(&a, "d_qkv of own heads", w->config->activation, a.q / n + 2 * a.kv_share);
        swap(&a, d_o, own_d_o, a.q, 0, true);
        plain_grad(&a, s, own_d_o, own_d_qkv, delta);
        swap(&a, own_d_qkv, d_qkv, a.q, a.kv, false);
        return;
    }
    w->slots[delta].rows = a.batch * w->heads;
    w->slots[delta].cols = w->seq;
    int dq = narrow ? qd_class_f32(w, "d_q in fp32", w->rows, a.q) : d_qkv;
    zero(&a, dq);
    over_heads(&a, QD_CLASS_OP(w, ATTENTION_DELTA, (O, s.o), (D_O, d_o), (DELTA, delta)), w->heads, w->kv_heads, 0.0)->k = 0;
    w->ops[w->op_count - 1].window = 0; /* it has no scores */
    int dkv = w->config->cp_mode == QD_CP_RING ? ring_grad(&a, s, d_o, delta, dq) : gather_grad(&a, s, d_o, delta, dq);
    if (narrow)
        columns(&a, dq, 0, d_qkv, 0, a.q);
    columns(&a, dkv, 0, d_qkv, a.q, 2 * a.kv);
}
