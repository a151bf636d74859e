/* Placement of attention: over this rank's own rows, or under cp over the rows of all its ranks. R
 * is the number of rows of the micro-batch on this rank (batch × seq / cp), S that of whole
 * sequences.
 *
 * - ring: keys and values pass from rank to rank n - 1 times; each part is attended to while the
 *   next is in flight. The backward pass repeats this, and the gradients of keys and values follow
 *   n times, the last time back to their owner. With a window, they skip the ranks that are beyond
 *   all windows: rank r has the chunks r and 2n - 1 - r, so a short window reaches the ranks r - 1
 *   and r + 1, and a part is sent on twice.
 * - gather: every rank gathers the keys and values of whole sequences, and again in the backward
 *   pass, where their gradients are reduce-scattered.
 * - ulysses: an all-to-all gives each rank whole sequences of its share of the heads, and another
 *   returns the result by rows. */
#include "spec/passes/sequence.h"

enum {
    QD_CLASS_NUMBERS,
    QKV_SHARE, O_SHARE,                /* columns of this rank's share of the heads */
    QKV_SHARES, O_SHARES,              /* the shares of all ranks */
    SHARE, KV_SHARE,                   /* in ulysses: of its share of the heads */
    SINK_ROWS, SINK_COLS, SINK_HEADS, FIRST_SINK, /* of the heads that o and lse have: its share of them in ulysses */
    WINDOW, ROUND_BACK, ALL_KEYS,      /* round of the ring: ranks that the keys come from, -1: all keys at once */
    OTHERS,                            /* other ranks of cp */
    HOP,                               /* ranks to the next round of the ring, or to the owner of the keys */
    AHEAD,                             /* prediction module */
};

enum {
    /* Given by the list. o: the result; sums: the running result, which is fp32. */
    QKV, INPUT, O, LSE, SINK, D_O, D_QKV, DELTA, D_SINK,
    SUMS, DQ,
    KV_HERE, KV_NEXT, KV_AGAIN, KV_NEXT_AGAIN, KV_OWN, KV_ALL, D_KV_HERE, D_KV_NEXT, D_KV_PART, D_KV_ALL, D_KV_OWN,
    QKV_BY_RANK, QKV_OF_RANKS, HEADS_QKV, HEADS_O, O_BY_RANK, O_OF_RANKS,
    D_O_BY_RANK, D_O_OF_RANKS, HEADS_D_O, HEADS_D_QKV, D_QKV_BY_RANK, D_QKV_OF_RANKS,
    VALUES
};

/* Facts. PARTS: ring or gather. NARROW: activations are not fp32. FIRST and LAST: the round of the
 * ring. SINKS: they join the result when it has the keys of all ranks, and before it leaves the
 * rank that has its log-sum-exps. ALONE: windows reach no other rank, so that there is one
 * round. */
enum { RING = 1, GATHER = 2, PARTS = 4, ULYSSES = 8, NARROW = 16, FIRST = 32, LAST = 64, SINKS = 128, ALONE = 256 };

static const qd_sequence_value values[VALUES] = {
    [SUMS] = {"attended in fp32", QD_VALUE_F32, ROWS, .cols = O_COLS, .same = 1 + O, .unless = NARROW},
    [DQ] = {"d_q in fp32", QD_VALUE_F32, ROWS, .cols = Q, .same = 1 + D_QKV, .unless = NARROW},
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
    [HEADS_QKV] = {"qkv of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = QKV_SHARE, .same = 1 + QKV, .unless = ULYSSES},
    [HEADS_O] = {"attended of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE, .same = 1 + O, .unless = ULYSSES},
    [O_BY_RANK] = {"by rank", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE},
    [O_OF_RANKS] = {"of ranks", QD_VALUE_ACTIVATION, ROWS, .cols = O_SHARES},
    [D_O_BY_RANK] = {"by rank", QD_VALUE_ACTIVATION, ROWS, .cols = O_SHARES},
    [D_O_OF_RANKS] = {"of ranks", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE},
    [HEADS_D_O] = {"d_attended of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = O_SHARE, .same = 1 + D_O, .unless = ULYSSES},
    [HEADS_D_QKV] = {"d_qkv of own heads", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = QKV_SHARE, .same = 1 + D_QKV, .unless = ULYSSES},
    [D_QKV_BY_RANK] = {"by rank", QD_VALUE_ACTIVATION, WHOLE_ROWS, .cols = QKV_SHARE},
    [D_QKV_OF_RANKS] = {"of ranks", QD_VALUE_ACTIVATION, ROWS, .cols = QKV_SHARES},
};

/* ROUND: once per rank of cp whose keys any rank needs, in the ring. */
enum { BEGIN, ROUND, END, GRAD_BEGIN, GRAD_ROUND, GRAD_END, SINK_ALONE, SINK_GRAD };

enum { PLAIN, FROM_KEYS, TO_KEYS, TO_ROWS, TO_HEADS, GATHERED, SHIFTED, WHOLE, WHOLE_GRAD, PART, PART_GRAD, BY_HEAD, WITH_SINKS };
enum { FORWARD, BACKWARD }; /* FLOPs */
static const qd_manner manners[] = {
    [PLAIN] = {0},
    /* Of copies of columns: the first column read, or the first written, is that of the keys. */
    [FROM_KEYS] = {.first = Q},
    [TO_KEYS] = {.to = Q},
    [TO_ROWS] = {.over = 1, .count = OTHERS}, /* ulysses */
    [TO_HEADS] = {.over = 1, .count = OTHERS, .round = ONE},
    [GATHERED] = {.over = 1, .round = ROUND_BACK},
    [SHIFTED] = {.over = 1, .round = ROUND_BACK, .hop = HOP, .async = true},
    [WHOLE] = {.heads = SHARE, .kv_heads = KV_SHARE, .window = WINDOW, .work = QD_WORK_GIVEN, .part = FORWARD, .ahead = AHEAD},
    [WHOLE_GRAD] = {.heads = SHARE, .kv_heads = KV_SHARE, .window = WINDOW, .work = QD_WORK_GIVEN, .part = BACKWARD},
    [PART] = {.heads = HEADS, .kv_heads = KV_HEADS, .window = WINDOW, .round = ROUND_BACK, .work = QD_WORK_GIVEN, .part = FORWARD,
              .ahead = AHEAD},
    [PART_GRAD] = {.heads = HEADS, .kv_heads = KV_HEADS, .window = WINDOW, .round = ROUND_BACK, .work = QD_WORK_GIVEN, .part = BACKWARD},
    [BY_HEAD] = {.heads = HEADS, .kv_heads = KV_HEADS},
    [WITH_SINKS] = {.heads = SINK_HEADS, .first = FIRST_SINK},
};

static const qd_step steps[] = {
    /* One rank, or ulysses: heads of whole sequences. Kv heads that several ranks read are sent to
     * all of them. */
    QD_STEP(BEGIN, ULYSSES, 0, HEADS_SPLIT, PLAIN, ROWS, Q, K, (X, QKV), (Y, QKV_BY_RANK)),
    QD_STEP(BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_HEADS, WHOLE_ROWS, QKV_SHARE, NONE, (X, QKV_BY_RANK), (Y, QKV_OF_RANKS)),
    QD_STEP(BEGIN, ULYSSES, 0, ROWS_JOIN, PLAIN, ROWS, Q, K, (X, QKV_OF_RANKS), (Y, HEADS_QKV)),
    QD_STEP(BEGIN, 0, PARTS, ATTENTION, WHOLE, ROWS, Q, SEQ, (QKV, HEADS_QKV), (INPUT, INPUT), (O, HEADS_O), (LSE, LSE)),
    QD_STEP(BEGIN, SINKS, PARTS, ATTENTION_SINK, WITH_SINKS, SINK_ROWS, SINK_COLS, NONE, (O, HEADS_O), (LSE, LSE), (SINK, SINK)),
    QD_STEP(BEGIN, ULYSSES, 0, ROWS_SPLIT, PLAIN, ROWS, O_COLS, NONE, (X, HEADS_O), (Y, O_BY_RANK)),
    QD_STEP(BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_ROWS, WHOLE_ROWS, O_SHARE, NONE, (X, O_BY_RANK), (Y, O_OF_RANKS)),
    QD_STEP(BEGIN, ULYSSES, 0, HEADS_JOIN, PLAIN, ROWS, O_COLS, NONE, (X, O_OF_RANKS), (Y, O)),

    QD_STEP(BEGIN, GATHER, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_OWN)),
    QD_STEP(BEGIN, GATHER, 0, CONTEXT_GATHER, GATHERED, WHOLE_ROWS, KV, NONE, (X, KV_OWN), (Y, KV_ALL)),
    QD_STEP(BEGIN, GATHER, 0, ATTENTION_PART, PART, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_ALL), (O, SUMS), (LSE, LSE)),

    QD_STEP(BEGIN, RING, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_HERE)),
    QD_STEP(ROUND, 0, LAST, CONTEXT_SHIFT, SHIFTED, WHOLE_ROWS, KV, NONE, (X, KV_HERE), (Y, KV_NEXT)),
    QD_STEP(ROUND, 0, 0, ATTENTION_PART, PART, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_HERE), (O, SUMS), (LSE, LSE)),
    QD_STEP(END, SINKS, 0, ATTENTION_SINK, WITH_SINKS, SINK_ROWS, SINK_COLS, NONE, (O, SUMS), (LSE, LSE), (SINK, SINK)),
    QD_STEP(END, NARROW, 0, COLUMNS, PLAIN, ROWS, O_COLS, NONE, (X, SUMS), (Y, O)),

    /* The reverse of ulysses sums the gradients of kv heads that several ranks read. */
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, HEADS_SPLIT, PLAIN, ROWS, O_COLS, NONE, (X, D_O), (Y, D_O_BY_RANK)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_HEADS, WHOLE_ROWS, O_SHARE, NONE, (X, D_O_BY_RANK), (Y, D_O_OF_RANKS)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, ROWS_JOIN, PLAIN, ROWS, O_COLS, NONE, (X, D_O_OF_RANKS), (Y, HEADS_D_O)),
    QD_STEP(GRAD_BEGIN, 0, PARTS, ATTENTION_GRAD, WHOLE_GRAD, ROWS, Q, SEQ, (QKV, HEADS_QKV), (INPUT, INPUT), (O, HEADS_O), (LSE, LSE),
            (D_O, HEADS_D_O), (D_QKV, HEADS_D_QKV), (DELTA, DELTA)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, ROWS_SPLIT, PLAIN, ROWS, Q, K, (X, HEADS_D_QKV), (Y, D_QKV_BY_RANK)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, CONTEXT_SWAP, TO_ROWS, WHOLE_ROWS, QKV_SHARE, NONE, (X, D_QKV_BY_RANK), (Y, D_QKV_OF_RANKS)),
    QD_STEP(GRAD_BEGIN, ULYSSES, 0, HEADS_JOIN, PLAIN, ROWS, Q, K, (X, D_QKV_OF_RANKS), (Y, D_QKV)),

    QD_STEP(GRAD_BEGIN, PARTS, 0, ZERO, PLAIN, NONE, NONE, NONE, (X, DQ)),
    QD_STEP(GRAD_BEGIN, PARTS, 0, ATTENTION_DELTA, BY_HEAD, ROWS, Q, NONE, (O, O), (D_O, D_O), (DELTA, DELTA)),

    QD_STEP(GRAD_BEGIN, GATHER, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_OWN)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, CONTEXT_GATHER, GATHERED, WHOLE_ROWS, KV, NONE, (X, KV_OWN), (Y, KV_ALL)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, ZERO, PLAIN, NONE, NONE, NONE, (X, D_KV_ALL)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, ATTENTION_PART_GRAD, PART_GRAD, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_ALL), (LSE, LSE),
            (D_O, D_O), (DELTA, DELTA), (DQ, DQ), (DKV, D_KV_ALL)),
    QD_STEP(GRAD_BEGIN, GATHER, 0, CONTEXT_SCATTER, GATHERED, WHOLE_ROWS, KV, NONE, (X, D_KV_ALL), (Y, D_KV_OWN)),

    /* The gradients of one part of the keys are computed while those accumulated by the previous
     * ranks are in flight, then added to them. */
    QD_STEP(GRAD_BEGIN, RING, 0, COLUMNS, FROM_KEYS, ROWS, KV, NONE, (X, QKV), (Y, KV_AGAIN)),
    QD_STEP(GRAD_ROUND, 0, LAST, CONTEXT_SHIFT, SHIFTED, WHOLE_ROWS, KV, NONE, (X, KV_AGAIN), (Y, KV_NEXT_AGAIN)),
    QD_STEP(GRAD_ROUND, FIRST, 0, ZERO, PLAIN, NONE, NONE, NONE, (X, D_KV_HERE)),
    QD_STEP(GRAD_ROUND, FIRST, 0, ATTENTION_PART_GRAD, PART_GRAD, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_AGAIN), (LSE, LSE),
            (D_O, D_O), (DELTA, DELTA), (DQ, DQ), (DKV, D_KV_HERE)),
    QD_STEP(GRAD_ROUND, 0, FIRST, ZERO, PLAIN, NONE, NONE, NONE, (X, D_KV_PART)),
    QD_STEP(GRAD_ROUND, 0, FIRST, ATTENTION_PART_GRAD, PART_GRAD, ROWS, Q, SEQ, (QKV, QKV), (INPUT, INPUT), (KV, KV_AGAIN), (LSE, LSE),
            (D_O, D_O), (DELTA, DELTA), (DQ, DQ), (DKV, D_KV_PART)),
    QD_STEP(GRAD_ROUND, 0, FIRST, ADD, PLAIN, MOST_ROWS, KV, NONE, (A, D_KV_HERE), (B, D_KV_PART), (Y, D_KV_HERE)),
    QD_STEP(GRAD_ROUND, 0, ALONE, CONTEXT_SHIFT, SHIFTED, WHOLE_ROWS, KV, NONE, (X, D_KV_HERE), (Y, D_KV_NEXT)),

    QD_STEP(GRAD_END, NARROW, 0, COLUMNS, PLAIN, ROWS, Q, NONE, (X, DQ), (Y, D_QKV)),
    QD_STEP(GRAD_END, RING, 0, COLUMNS, TO_KEYS, ROWS, KV, NONE, (X, D_KV_HERE), (Y, D_QKV)),
    QD_STEP(GRAD_END, GATHER, 0, COLUMNS, TO_KEYS, ROWS, KV, NONE, (X, D_KV_OWN), (Y, D_QKV)),

    QD_STEP(SINK_ALONE, 0, 0, ATTENTION_SINK, WITH_SINKS, SINK_ROWS, SINK_COLS, NONE, (O, O), (LSE, LSE), (SINK, SINK)),
    QD_STEP(SINK_GRAD, 0, 0, ATTENTION_SINK_GRAD, WITH_SINKS, SINK_ROWS, SINK_COLS, NONE, (LSE, LSE), (DELTA, DELTA), (SINK, SINK),
            (SINK_GRAD, D_SINK)),
};

/* FLOPs of the forward pass on this rank: QKᵀ and PV over the causal half, or the windows. The
 * zigzag assignment of chunks gives all ranks the same work, or with windows nearly so. `round`:
 * only with the keys of the rank that many ranks back; with windows its share of the pairs of
 * queries and keys, of which some rounds have none. */
static double flops_of(const qd_sequence *s, int round)
{
    const qd_class_writer *w = s->w;
    int n = s->group[0].size, coord = qd_group_coord(&w->ledger->mesh, s->group[0], w->config->rank);
    int64_t window = s->number[WINDOW], seq = w->config->seq;
    double flops = (double)w->rows * qd_window_keys(window, seq) * (double)(s->number[Q] + s->number[O_COLS]), all = 0.0;
    if (round < 0 || window == 0)
        return round < 0 ? flops : flops / n;
    for (int t = 0; t < n; t++)
        all += qd_context_pairs(seq, n, coord, (coord + n - t) % n, window);
    return flops * qd_context_pairs(seq, n, coord, (coord + n - round) % n, window) / all;
}

/* -1: all keys at once. */
static void set_round(qd_sequence *s, int round)
{
    double q = (double)s->number[Q], o = (double)s->number[O_COLS];
    s->number[ROUND_BACK] = round;
    s->flops[FORWARD] = flops_of(s, round);
    s->flops[BACKWARD] = (3.0 * q + 2.0 * o) / (q + o) * s->flops[FORWARD]; /* QKᵀ again, dQ and dK; dP and dV */
}

static qd_sequence begin(qd_class_writer *w, int64_t window)
{
    const qd_class_config *c = w->config;
    qd_group group = qd_group_whole(&w->ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP));
    const qd_model *m = w->model;
    int n = group.size, kv_share = qd_context_kv_share(n, w->kv_heads);
    bool ulysses = n > 1 && c->cp_mode == QD_CP_ULYSSES;
    int64_t o = w->number[O_COLS], share = qd_model_qkv(m, w->heads / n, kv_share);
    int64_t sinks = ulysses ? w->heads / n : w->heads, coord = qd_group_coord(&w->ledger->mesh, group, c->rank);
    static const unsigned modes[] = {[QD_CP_RING] = RING | PARTS, [QD_CP_GATHER] = GATHER | PARTS, [QD_CP_ULYSSES] = ULYSSES};
    qd_sequence s = {
        w, QD_SEQUENCE_TABLES(values, steps), manners,
        .facts = (n > 1 ? modes[c->cp_mode] : 0) | (c->activation != QD_F32 ? NARROW : 0),
        .group = {group},
        .number = {[QKV_SHARE] = share, [O_SHARE] = o / n, [QKV_SHARES] = n * share, [O_SHARES] = n * (o / n), [SHARE] = w->heads / n,
                   [KV_SHARE] = kv_share, [SINK_ROWS] = c->batch * (ulysses ? c->seq : w->seq), [SINK_COLS] = sinks * m->head_dim,
                   [SINK_HEADS] = sinks, [FIRST_SINK] = ulysses ? coord * sinks : 0, [WINDOW] = window, [OTHERS] = n - 1}};
    qd_sequence_begin(&s);
    set_round(&s, -1);
    return s;
}

static void swap(qd_sequence *s, int one, int other)
{
    int slot = s->slot[one];
    s->slot[one] = s->slot[other];
    s->slot[other] = slot;
}

/* Emits the stages `begin`, round and end. Keys, and their gradients, move on after each round. */
static void emit(qd_sequence *s, int begin_stage)
{
    int n = s->group[0].size;
    unsigned facts = s->facts;
    qd_sequence_emit(s, begin_stage);
    for (int round = 0, next; facts & RING && round < n; round = next) {
        next = qd_context_next_round(s->number[SEQ], n, s->number[WINDOW], round);
        const unsigned alone = round == 0 && next == n ? ALONE : 0;
        s->facts = facts | (round == 0 ? FIRST : 0) | (next == n ? LAST : 0) | alone;
        s->number[HOP] = next - round;
        set_round(s, round);
        qd_sequence_emit(s, begin_stage + 1);
        swap(s, KV_HERE, KV_NEXT);
        swap(s, KV_AGAIN, KV_NEXT_AGAIN);
        if (!alone)
            swap(s, D_KV_HERE, D_KV_NEXT);
    }
    s->facts = facts;
    if (facts & PARTS)
        qd_sequence_emit(s, begin_stage + 2);
}

/* Log-sum-exps and deltas: per head and position. */
static void shape_per_head(const qd_sequence *s, int slot)
{
    qd_class_writer *w = s->w;
    w->slots[slot].rows = w->config->batch * s->number[SINK_HEADS];
    w->slots[slot].cols = s->number[SINK_ROWS] / w->config->batch;
}

void qd_place_attention(qd_placing *p, const qd_op *op)
{
    qd_sequence s = begin(p->w, op->window);
    int *slot = s.slot, lse = op->slot[QD_ATTENTION_LSE];
    const qd_op *next = p->at + 1 < p->old.count ? &p->old.ops[p->at + 1] : NULL;
    if (next && next->kind == QD_OP_ATTENTION_SINK) {
        slot[SINK] = next->slot[QD_ATTENTION_SINK_SINK];
        s.facts |= SINKS;
    }
    s.number[AHEAD] = op->ahead;
    QD_SEQUENCE_TAKE(&s, op, ATTENTION, (QKV, QKV), (INPUT, INPUT), (O, O), (LSE, LSE));
    shape_per_head(&s, lse);
    emit(&s, BEGIN);
    p->slot[lse].attended[0] = qd_sequence_slot(&s, HEADS_QKV);
    p->slot[lse].attended[1] = qd_sequence_slot(&s, HEADS_O);
}

void qd_place_attention_grad(qd_placing *p, const qd_op *op)
{
    qd_sequence s = begin(p->w, op->window);
    int *slot = s.slot, lse = op->slot[QD_ATTENTION_GRAD_LSE];
    slot[QKV] = slot[HEADS_QKV] = p->slot[lse].attended[0];
    slot[O] = slot[HEADS_O] = p->slot[lse].attended[1];
    QD_SEQUENCE_TAKE(&s, op, ATTENTION_GRAD, (INPUT, INPUT), (LSE, LSE), (D_O, D_O), (D_QKV, D_QKV), (DELTA, DELTA));
    shape_per_head(&s, slot[DELTA]);
    emit(&s, GRAD_BEGIN);
}

/* In training the rule of attention emits it. */
void qd_place_sink(qd_placing *p, const qd_op *op)
{
    qd_sequence s = begin(p->w, 0);
    QD_SEQUENCE_TAKE(&s, op, ATTENTION_SINK, (O, O), (LSE, LSE), (SINK, SINK));
    if (p->w->config->context > 0)
        qd_sequence_emit(&s, SINK_ALONE);
}

void qd_place_sink_grad(qd_placing *p, const qd_op *op)
{
    qd_sequence s = begin(p->w, 0);
    QD_SEQUENCE_TAKE(&s, op, ATTENTION_SINK_GRAD, (LSE, LSE), (DELTA, DELTA), (SINK, SINK), (SINK_GRAD, D_SINK));
    qd_sequence_emit(&s, SINK_GRAD);
}

/* Generation: log-sum-exps per head and new token, if there are sinks. */
void qd_place_cached(qd_placing *p, const qd_op *op)
{
    qd_sequence s = begin(p->w, 0);
    if (op->slot[QD_ATTENTION_CACHED_LSE] >= 0)
        shape_per_head(&s, op->slot[QD_ATTENTION_CACHED_LSE]);
    qd_place_keep(p, op);
}
