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
#include "spec/passes/sequence.h"

enum {
    NONE, ROWS, WHOLE_ROWS, MOST_ROWS, /* rows on this rank; of whole sequences; on the rank of cp with the most */
    SEQ,
    Q, K, KV, O_COLS,                  /* columns of queries, of keys, of keys and values, of the result */
    QKV_SHARE, O_SHARE,                /* columns of this rank's share of the heads */
    QKV_SHARES, O_SHARES,              /* the shares of all ranks */
};

enum {
    /* Given by the list. o: the result; sums: the running result, which is fp32. */
    QKV, INPUT, O, LSE, SINK, D_O, D_QKV, DELTA,
    SUMS, DQ,
    KV_HERE, KV_NEXT, KV_AGAIN, KV_NEXT_AGAIN, KV_OWN, KV_ALL, D_KV_HERE, D_KV_NEXT, D_KV_PART, D_KV_ALL, D_KV_OWN,
    QKV_BY_RANK, QKV_OF_RANKS, HEADS_QKV, HEADS_O, O_BY_RANK, O_OF_RANKS,
    D_O_BY_RANK, D_O_OF_RANKS, HEADS_D_O, HEADS_D_QKV, D_QKV_BY_RANK, D_QKV_OF_RANKS,
    VALUES
};

static const qd_sequence_value values[VALUES] = {
    [SUMS] = {"attended in fp32", QD_VALUE_F32, ROWS, .cols = O_COLS},
    [DQ] = {"d_q in fp32", QD_VALUE_F32, ROWS, .cols = Q},
    [KV_HERE] = {"kv", QD_VALUE_ACTIVATION, MOST_ROWS, .cols = KV},
    [KV_NEXT] = {"kv passed on", QD_VALUE_ACTIVATION, MOST_ROWS, .cols = KV},
    [KV_AGAIN] = {"kv again", QD_VALUE_ACTIVATION, MOST_ROWS, .cols = KV},
    [KV_NEXT_AGAIN] = {"kv passed on again", QD_VALUE_ACTIVATION, MOST_ROWS, .cols = KV},
    [KV_OWN] = {"kv", QD_VALUE_ACTIVATION, ROWS, .cols = KV},
    [KV_ALL] = {"kv of whole sequences", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = KV},
    [D_KV_HERE] = {"d_kv", QD_VALUE_F32, MOST_ROWS, .cols = KV},
    [D_KV_NEXT] = {"d_kv passed on", QD_VALUE_F32, MOST_ROWS, .cols = KV},
    [D_KV_PART] = {"d_kv of own queries", QD_VALUE_F32, MOST_ROWS, .cols = KV},
    [D_KV_ALL] = {"d_kv of whole sequences", QD_VALUE_F32, WHOLE_ROWS, .cols = KV},
    [D_KV_OWN] = {"d_kv", QD_VALUE_F32, ROWS, .cols = KV},
    [QKV_BY_RANK] = {"by rank", QD_VALUE_ACTIVATION, ROWS, .cols = QKV_SHARES},
    [QKV_OF_RANKS] = {"of ranks", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = QKV_SHARE},
    [HEADS_QKV] = {"qkv of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = QKV_SHARE},
    [HEADS_O] = {"attended of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE},
    [O_BY_RANK] = {"by rank", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE},
    [O_OF_RANKS] = {"of ranks", QD_VALUE_ACTIVATION, ROWS, .cols = O_SHARES},
    [D_O_BY_RANK] = {"by rank", QD_VALUE_ACTIVATION, ROWS, .cols = O_SHARES},
    [D_O_OF_RANKS] = {"of ranks", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE},
    [HEADS_D_O] = {"d_attended of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE},
    [HEADS_D_QKV] = {"d_qkv of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = QKV_SHARE},
    [D_QKV_BY_RANK] = {"by rank", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = QKV_SHARE},
    [D_QKV_OF_RANKS] = {"of ranks", QD_VALUE_ACTIVATION, ROWS, .cols = QKV_SHARES},
};

/* Facts. PARTS: ring or gather. NARROW: activations are not fp32. FIRST and LAST: the round of the
 * ring. SINKS: they join the result when it has the keys of all ranks, and before it leaves the
 * rank that has its log-sum-exps. */
enum { RING = 1, GATHER = 2, PARTS = 4, ULYSSES = 8, NARROW = 16, FIRST = 32, LAST = 64, SINKS = 128 };

/* ROUND: once per rank of cp, in the ring. */
enum { BEGIN, ROUND, END, GRAD_BEGIN, GRAD_ROUND, GRAD_END };

/* Of copies of columns: the first column read, or the first written, is that of the keys. Of
 * ulysses: the direction. */
enum { PLAIN, FROM_KEYS, TO_KEYS, TO_ROWS = 0, TO_HEADS };

static const qd_step steps[] = {
    /* One rank, or ulysses: heads of whole sequences. Kv heads that several ranks read are sent to
     * all of them. */
    QD_STEP(BEGIN, ULYSSES, 0, HEADS_SPLIT, PLAIN, ROWS, Q, K, (X, QKV), (Y, QKV_BY_RANK)),
    QD_STEP(BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_HEADS, WHOLE_ROWS, QKV_SHARE, NONE, (X, QKV_BY_RANK), (Y, QKV_OF_RANKS)),
    QD_STEP(BEGIN, ULYSSES, 0, ROWS_JOIN, PLAIN, ROWS, Q, K, (X, QKV_OF_RANKS), (Y, HEADS_QKV)),
    QD_STEP(BEGIN, 0, PARTS, ATTENTION, PLAIN, ROWS, Q, SEQ, (QKV, HEADS_QKV), (INPUT, INPUT), (O, HEADS_O), (LSE, LSE)),
    QD_STEP(BEGIN, SINKS, PARTS, ATTENTION_SINK, PLAIN, NONE, NONE, NONE, (O, HEADS_O), (LSE, LSE), (SINK, SINK)),
    QD_STEP(BEGIN, ULYSSES, 0, ROWS_SPLIT, PLAIN, ROWS, O_COLS, NONE, (X, HEADS_O), (Y, O_BY_RANK)),
    QD_STEP(BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_ROWS, WHOLE_ROWS, O_SHARE, NONE, (X, O_BY_RANK), (Y, O_OF_RANKS)),
    QD_STEP(BEGIN, ULYSSES, 0, HEADS_JOIN, PLAIN, ROWS, O_COLS, NONE, (X, O_OF_RANKS), (Y, O)),

    QD_STEP(BEGIN, GATHER, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_OWN)),
    QD_STEP(BEGIN, GATHER, 0, CONTEXT_GATHER, PLAIN, WHOLE_ROWS, KV, NONE, (X, KV_OWN), (Y, KV_ALL)),
    QD_STEP(BEGIN, GATHER, 0, ATTENTION_PART, PLAIN, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_ALL), (O, SUMS), (LSE, LSE)),

    QD_STEP(BEGIN, RING, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_HERE)),
    QD_STEP(ROUND, 0, LAST, CONTEXT_SHIFT, PLAIN, WHOLE_ROWS, KV, NONE, (X, KV_HERE), (Y, KV_NEXT)),
    QD_STEP(ROUND, 0, 0, ATTENTION_PART, PLAIN, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_HERE), (O, SUMS), (LSE, LSE)),
    QD_STEP(END, SINKS, 0, ATTENTION_SINK, PLAIN, NONE, NONE, NONE, (O, SUMS), (LSE, LSE), (SINK, SINK)),
    QD_STEP(END, NARROW, 0, COLUMNS, PLAIN, ROWS, O_COLS, NONE, (X, SUMS), (Y, O)),

    /* The reverse of ulysses sums the gradients of kv heads that several ranks read. */
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, HEADS_SPLIT, PLAIN, ROWS, O_COLS, NONE, (X, D_O), (Y, D_O_BY_RANK)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_HEADS, WHOLE_ROWS, O_SHARE, NONE, (X, D_O_BY_RANK), (Y, D_O_OF_RANKS)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, ROWS_JOIN, PLAIN, ROWS, O_COLS, NONE, (X, D_O_OF_RANKS), (Y, HEADS_D_O)),
    QD_STEP(GRAD_BEGIN, 0, PARTS, ATTENTION_GRAD, PLAIN, ROWS, Q, SEQ, (QKV, HEADS_QKV), (INPUT, INPUT), (O, HEADS_O), (LSE, LSE),
            (D_O, HEADS_D_O), (D_QKV, HEADS_D_QKV), (DELTA, DELTA)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, ROWS_SPLIT, PLAIN, ROWS, Q, K, (X, HEADS_D_QKV), (Y, D_QKV_BY_RANK)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_ROWS, WHOLE_ROWS, QKV_SHARE, NONE, (X, D_QKV_BY_RANK), (Y, D_QKV_OF_RANKS)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, HEADS_JOIN, PLAIN, ROWS, Q, K, (X, D_QKV_OF_RANKS), (Y, D_QKV)),

    QD_STEP(GRAD_BEGIN, PARTS, 0, ZERO, PLAIN, NONE, NONE, NONE, (X, DQ)),
    QD_STEP(GRAD_BEGIN, PARTS, 0, ATTENTION_DELTA, PLAIN, ROWS, Q, NONE, (O, O), (D_O, D_O), (DELTA, DELTA)),

    QD_STEP(GRAD_BEGIN, GATHER, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_OWN)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, CONTEXT_GATHER, PLAIN, WHOLE_ROWS, KV, NONE, (X, KV_OWN), (Y, KV_ALL)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, ZERO, PLAIN, NONE, NONE, NONE, (X, D_KV_ALL)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, ATTENTION_PART_GRAD, PLAIN, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_ALL), (LSE, LSE),
            (D_O, D_O), (DELTA, DELTA), (DQ, DQ), (DKV, D_KV_ALL)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, CONTEXT_SCATTER, PLAIN, WHOLE_ROWS, KV, NONE, (X, D_KV_ALL), (Y, D_KV_OWN)),

    /* The gradients of one part of the keys are computed while those accumulated by the previous
     * ranks are in flight, then added to them. */
    QD_STEP(GRAD_BEGIN, RING, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_AGAIN)),
    QD_STEP(GRAD_ROUND, 0, LAST, CONTEXT_SHIFT, PLAIN, WHOLE_ROWS, KV, NONE, (X, KV_AGAIN), (Y, KV_NEXT_AGAIN)),
    QD_STEP(GRAD_ROUND, FIRST, 0, ZERO, PLAIN, NONE, NONE, NONE, (X, D_KV_HERE)),
    QD_STEP(GRAD_ROUND, FIRST, 0, ATTENTION_PART_GRAD, PLAIN, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_AGAIN), (LSE, LSE),
            (D_O, D_O), (DELTA, DELTA), (DQ, DQ), (DKV, D_KV_HERE)),
    QD_STEP(GRAD_ROUND, 0, FIRST, ZERO, PLAIN, NONE, NONE, NONE, (X, D_KV_PART)),
    QD_STEP(GRAD_ROUND, 0, FIRST, ATTENTION_PART_GRAD, PLAIN, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_AGAIN), (LSE, LSE),
            (D_O, D_O), (DELTA, DELTA), (DQ, DQ), (DKV, D_KV_PART)),
    QD_STEP(GRAD_ROUND, 0, FIRST, ADD, PLAIN, MOST_ROWS, KV, NONE, (A, D_KV_HERE), (B, D_KV_PART), (Y, D_KV_HERE)),
    QD_STEP(GRAD_ROUND, 0, 0, CONTEXT_SHIFT, PLAIN, WHOLE_ROWS, KV, NONE, (X, D_KV_HERE), (Y, D_KV_NEXT)),

    QD_STEP(GRAD_END, NARROW, 0, COLUMNS, PLAIN, ROWS, Q, NONE, (X, DQ), (Y, D_QKV)),
    QD_STEP(GRAD_END, RING, 0, COLUMNS, TO_KEYS, ROWS, KV, NONE, (X, D_KV_HERE), (Y, D_QKV)),
    QD_STEP(GRAD_END, GATHER, 0, COLUMNS, TO_KEYS, ROWS, KV, NONE, (X, D_KV_OWN), (Y, D_QKV)),
};

typedef struct attention {
    qd_sequence s;
    qd_group group;   /* the ranks of cp */
    int kv_heads;     /* in ulysses: of this rank's share of the heads */
    int64_t window;   /* 0: none */
    double flops;     /* of the forward pass on this rank */
    int round;        /* of the ring; -1: all keys at once */
} attention;

/* FLOPs of the forward pass with the keys of the rank `round` ranks back: with windows, the share
 * of the pairs of queries and keys, of which some rounds have none. */
static double round_flops(const attention *a, int round)
{
    int n = a->group.size, coord = qd_group_coord(&a->s.w->ledger->mesh, a->group, a->s.w->config->rank);
    double all = 0.0, pairs = 0.0;
    for (int t = 0; t < n && a->window > 0; t++) {
        double here = qd_context_pairs(a->s.w->config->seq, n, coord, (coord + n - t) % n, a->window);
        all += here;
        pairs = t == round ? here : pairs;
    }
    return a->window > 0 ? a->flops * pairs / all : a->flops / n;
}

/* Sinks of the heads that o and lse have: all of this rank's, or in ulysses its share of them. */
static void over_sinks(const qd_class_writer *w, qd_op *op, int lse)
{
    const qd_mesh *mesh = &w->ledger->mesh;
    qd_group group = qd_group_whole(mesh, QD_AXIS_BIT(QD_AXIS_CP));
    bool share = group.size > 1 && w->config->cp_mode == QD_CP_ULYSSES;
    op->heads = share ? w->heads / group.size : w->heads;
    op->first = share ? (int64_t)qd_group_coord(mesh, group, w->config->rank) * op->heads : 0;
    qd_class_count_bytes(w, op);
    qd_op_sizes(op, w->slots[lse].rows / op->heads * w->slots[lse].cols, (int64_t)op->heads * w->model->head_dim, 0, 0.0);
}

/* FLOPs of the backward pass relative to those of the forward pass: QKᵀ again, dQ and dK; dP and
 * dV. */
static double backward(const attention *a)
{
    double q = (double)a->s.number[Q], o = (double)a->s.number[O_COLS];
    return (3.0 * q + 2.0 * o) / (q + o);
}

static void finish(qd_sequence *s, const qd_step *step, qd_op *op)
{
    const attention *a = (const attention *)(const void *)s;
    qd_class_writer *w = s->w;
    int n = a->group.size;
    double flops = a->round < 0 ? a->flops : round_flops(a, a->round);
    switch (op->kind) {
    case QD_OP_ZERO:
        qd_op_sizes(op, w->slots[qd_op_first(op)].rows, w->slots[qd_op_first(op)].cols, 0, 0.0);
        break;
    case QD_OP_COLUMNS:
        op->first = step->how == FROM_KEYS ? s->number[Q] : 0;
        op->to = step->how == TO_KEYS ? s->number[Q] : 0;
        op->bytes = op->m * op->n * (int64_t)(qd_dtype_size(w->slots[op->slot[QD_COLUMNS_X]].dtype) +
                                              qd_dtype_size(w->slots[op->slot[QD_COLUMNS_Y]].dtype));
        break;
    case QD_OP_CONTEXT_SHIFT:
    case QD_OP_CONTEXT_GATHER:
    case QD_OP_CONTEXT_SCATTER:
    case QD_OP_CONTEXT_SWAP:
        qd_op_communicate(w, op, a->group);
        op->round = op->kind == QD_OP_CONTEXT_SWAP ? step->how : a->round;
        op->exchange.count *= op->kind == QD_OP_CONTEXT_SWAP ? n - 1 : 1;
        op->exchange.async = op->kind == QD_OP_CONTEXT_SHIFT && w->config->overlap;
        break;
    case QD_OP_ATTENTION_SINK:
        over_sinks(w, op, op->slot[QD_ATTENTION_SINK_LSE]);
        break;
    case QD_OP_ATTENTION:
    case QD_OP_ATTENTION_GRAD:
        op->flops = op->kind == QD_OP_ATTENTION ? flops : backward(a) * flops;
        op->window = a->window;
        op->heads = w->heads / n;
        op->kv_heads = a->kv_heads;
        break;
    case QD_OP_ATTENTION_PART:
    case QD_OP_ATTENTION_PART_GRAD:
        op->flops = op->kind == QD_OP_ATTENTION_PART ? flops : backward(a) * flops;
        op->window = a->window;
        op->round = a->round; /* fall through */
    case QD_OP_ATTENTION_DELTA:
        op->heads = w->heads;
        op->kv_heads = w->kv_heads;
        break;
    default:
        break;
    }
}

static attention begin(qd_class_writer *w, int64_t window)
{
    qd_group group = qd_group_whole(&w->ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP));
    const qd_model *m = w->model;
    int n = group.size, kv_share = qd_context_kv_share(n, w->kv_heads);
    int64_t q = (int64_t)w->heads * m->head_dim, o = (int64_t)w->heads * qd_model_v_dim(m), share = qd_model_qkv(m, w->heads / n, kv_share);
    int64_t whole = w->config->batch * w->config->seq, most = w->config->batch * qd_context_most_rows(w->config->seq, n);
    static const unsigned modes[] = {[QD_CP_RING] = RING | PARTS, [QD_CP_GATHER] = GATHER | PARTS, [QD_CP_ULYSSES] = ULYSSES};
    attention a = {
        .s = {w, QD_SEQUENCE_TABLES(values, steps), finish,
              .facts = (n > 1 ? modes[w->config->cp_mode] : 0) | (w->config->activation != QD_F32 ? NARROW : 0),
              .number = {[ROWS] = w->rows, [WHOLE_ROWS] = whole, [MOST_ROWS] = most, [SEQ] = w->config->seq, [Q] = q,
                         [K] = (int64_t)w->kv_heads * m->head_dim, [KV] = qd_model_qkv(m, 0, w->kv_heads), [O_COLS] = o,
                         [QKV_SHARE] = share, [O_SHARE] = o / n, [QKV_SHARES] = n * share, [O_SHARES] = n * (o / n)}},
        .group = group, .kv_heads = kv_share, .window = window, .round = -1};
    /* QKᵀ and PV over the causal half, or the windows. The zigzag assignment of chunks gives all
     * ranks the same work, or with windows nearly so. */
    a.flops = (double)w->rows * qd_window_keys(window, w->config->seq) * (double)(q + o);
    qd_sequence_begin(&a.s);
    return a;
}

static void swap(attention *a, int one, int other)
{
    int slot = a->s.slot[one];
    a->s.slot[one] = a->s.slot[other];
    a->s.slot[other] = slot;
}

/* Emits the stages `begin`, round and end. Keys, and their gradients, move on after each round. */
static void emit(attention *a, int begin_stage)
{
    int n = a->group.size;
    unsigned facts = a->s.facts;
    qd_sequence_emit(&a->s, begin_stage);
    for (a->round = 0; facts & RING && a->round < n; a->round++) {
        a->s.facts = facts | (a->round == 0 ? FIRST : 0) | (a->round == n - 1 ? LAST : 0);
        qd_sequence_emit(&a->s, begin_stage + 1);
        swap(a, KV_HERE, KV_NEXT);
        swap(a, KV_AGAIN, KV_NEXT_AGAIN);
        swap(a, D_KV_HERE, D_KV_NEXT);
    }
    a->s.facts = facts;
    if (facts & PARTS)
        qd_sequence_emit(&a->s, begin_stage + 2);
}

/* Log-sum-exps and deltas: per head and position. */
static void shape_per_head(const attention *a, int slot)
{
    qd_class_writer *w = a->s.w;
    w->slots[slot].rows = w->config->batch * w->heads / (a->s.facts & PARTS ? 1 : a->group.size);
    w->slots[slot].cols = a->s.facts & PARTS ? w->seq : w->config->seq;
}

void qd_place_attention(qd_placing *p, const qd_op *op)
{
    attention a = begin(p->w, op->window);
    int *slot = a.s.slot, lse = op->slot[QD_ATTENTION_LSE];
    const qd_op *next = p->at + 1 < p->old.count ? &p->old.ops[p->at + 1] : NULL;
    if (next && next->kind == QD_OP_ATTENTION_SINK) {
        slot[SINK] = next->slot[QD_ATTENTION_SINK_SINK];
        a.s.facts |= SINKS;
    }
    QD_SEQUENCE_TAKE(&a.s, op, ATTENTION, (QKV, QKV), (INPUT, INPUT), (O, O), (LSE, LSE));
    slot[HEADS_QKV] = a.s.facts & ULYSSES ? -1 : slot[QKV];
    slot[HEADS_O] = a.s.facts & ULYSSES ? -1 : slot[O];
    slot[SUMS] = a.s.facts & NARROW ? -1 : slot[O];
    shape_per_head(&a, lse);
    emit(&a, BEGIN);
    p->attended[0][lse] = slot[HEADS_QKV];
    p->attended[1][lse] = slot[HEADS_O];
}

void qd_place_attention_grad(qd_placing *p, const qd_op *op)
{
    attention a = begin(p->w, op->window);
    int *slot = a.s.slot, lse = op->slot[QD_ATTENTION_GRAD_LSE];
    slot[QKV] = slot[HEADS_QKV] = p->attended[0][lse];
    slot[O] = slot[HEADS_O] = p->attended[1][lse];
    QD_SEQUENCE_TAKE(&a.s, op, ATTENTION_GRAD, (INPUT, INPUT), (LSE, LSE), (D_O, D_O), (D_QKV, D_QKV), (DELTA, DELTA));
    slot[HEADS_D_O] = a.s.facts & ULYSSES ? -1 : slot[D_O];
    slot[HEADS_D_QKV] = a.s.facts & ULYSSES ? -1 : slot[D_QKV];
    slot[DQ] = a.s.facts & NARROW ? -1 : slot[D_QKV];
    shape_per_head(&a, slot[DELTA]);
    emit(&a, GRAD_BEGIN);
}

/* In training the rule of attention emits it. */
void qd_place_sink(qd_placing *p, const qd_op *op)
{
    if (p->w->config->context > 0)
        over_sinks(p->w, qd_class_keep(p->w, op), op->slot[QD_ATTENTION_SINK_LSE]);
}

void qd_place_sink_grad(qd_placing *p, const qd_op *op)
{
    over_sinks(p->w, qd_class_keep(p->w, op), op->slot[QD_ATTENTION_SINK_GRAD_LSE]);
}

/* Generation: log-sum-exps per head and new token, if there are sinks. */
void qd_place_cached(qd_placing *p, const qd_op *op)
{
    int lse = op->slot[QD_ATTENTION_CACHED_LSE];
    if (lse >= 0) {
        p->w->slots[lse].rows = p->w->heads;
        p->w->slots[lse].cols = p->w->rows;
    }
    qd_place_keep(p, op);
}
