/* Rules of attention and of the exchanges of queries, keys and values over the ranks of cp. Heads
 * are columns. Keys that several ranks of tp share are replicated where queries are not: each of
 * these ranks computes the gradient of its own queries only, a partial sum. */
#include "spec/proof/proof_impl.h"

#include <string.h>

static const proof_place *kv_place(const proof_value *qkv)
{
    return &qkv->place[qkv->parts - 1];
}

static bool is_cp(const proof_walk *w, int digit)
{
    return qd_proof_digit_axis(w->proof, digit) == QD_AXIS_CP;
}

/* Ranks of dp have different sequences. Ranks of tp, and of cp unless `parts`, must have whole
 * ones. */
static qd_status whole_sequences(const proof_walk *w, proof_operand operand, const proof_place *place, bool parts)
{
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        if (place->code[d] == CODE_ROWS && qd_proof_digit_axis(w->proof, d) != QD_AXIS_DP && !(parts && is_cp(w, d)))
            return qd_proof_fail(w, operand, FOLD_DENSE, d, "%s reads the rows of one rank, but others have rows of the same sequences",
                                 qd_op_name(w->op->kind));
    return QD_OK;
}

/* Reads queries, keys and values that belong together: the same heads, or keys that ranks share. */
static qd_status read_qkv(proof_walk *w, proof_value *qkv, bool parts)
{
    QD_TRY(qd_proof_read(w, QKV, qkv));
    QD_TRY(qd_proof_is_gradient(w, QKV, qkv, false));
    QD_TRY(qd_proof_no_sum(w, QKV, qkv));
    QD_TRY(whole_sequences(w, QKV, &qkv->place[0], parts));
    bool rotated = qd_model_has_rope(&w->ledger->model, w->ledger->modules[w->class_->module].layer);
    if (qkv->rotated != rotated)
        return qd_proof_fail(w, QKV, 0, -1, "positions are %s to queries and keys", rotated ? "not applied" : "applied");
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        int q = qkv->place[0].code[d], kv = kv_place(qkv)->code[d];
        if (q != kv && !(q == CODE_COLS && kv == CODE_SAME))
            return qd_proof_fail(w, QKV, FOLD_DENSE, d, "queries are %s, but keys %s", qd_proof_code_text((proof_code)q),
                                 qd_proof_code_text((proof_code)kv));
    }
    return QD_OK;
}

static proof_place kv_gradient(const proof_walk *w, const proof_value *qkv)
{
    proof_place place = *kv_place(qkv);
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        if (qkv->place[0].code[d] == CODE_COLS && place.code[d] == CODE_SAME)
            place.code[d] = CODE_SUM;
    return place;
}

/* Reads the gradient of the result for these queries. */
static qd_status read_d_o(proof_walk *w, const proof_value *qkv)
{
    proof_value d_o, of_o = qd_proof_value_of(w, &qkv->place[0], true);
    QD_TRY(qd_proof_read(w, D_O, &d_o));
    QD_TRY(qd_proof_is_gradient(w, D_O, &d_o, true));
    QD_TRY(qd_proof_no_sum(w, D_O, &d_o));
    return qd_proof_same_place(w, D_O, &d_o, QKV, &of_o);
}

qd_status qd_proof_rule_rope(proof_walk *w)
{
    proof_value qkv;
    QD_TRY(qd_proof_read(w, QKV, &qkv));
    if (w->op->kind == QD_OP_ROPE)
        QD_TRY(qd_proof_no_sum(w, QKV, &qkv));
    bool back = w->op->kind == QD_OP_ROPE_INVERSE;
    QD_TRY(qd_proof_is_gradient(w, QKV, &qkv, back));
    if (qkv.rotated != back)
        return qd_proof_fail(w, QKV, 0, -1, "positions are applied, or removed, twice");
    qkv.rotated = !back;
    return qd_proof_write(w, Y, &qkv);
}

qd_status qd_proof_rule_head_norm(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_write(w, STATE, &x));
    return qd_proof_write(w, QKV, &x);
}

qd_status qd_proof_rule_head_norm_grad(proof_walk *w)
{
    proof_value d, x, state;
    QD_TRY(qd_proof_read(w, D_QKV, &d));
    QD_TRY(qd_proof_is_gradient(w, D_QKV, &d, true));
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(qd_proof_read(w, STATE, &state));
    const proof_operand grads[] = {GAMMA_GRAD, K_GAMMA_GRAD};
    if (d.rotated)
        return qd_proof_fail(w, D_QKV, 0, -1, "positions are still in the gradient of queries and keys");
    for (int part = 0; part < 2; part++) { /* one vector for all heads: a sum over rows and heads */
        proof_place place = d.place[part < d.parts ? part : 0], of_x = x.place[part < x.parts ? part : 0];
        for (int i = 0; i < w->proof->frames[FOLD_DENSE].count; i++) {
            if (place.code[i] != of_x.code[i] && !(place.code[i] == CODE_SUM && of_x.code[i] == CODE_SAME))
                return qd_proof_fail(w, D_QKV, FOLD_DENSE, i, "it is %s, but the input of the norm is %s",
                                     qd_proof_code_text((proof_code)place.code[i]), qd_proof_code_text((proof_code)of_x.code[i]));
            if (place.code[i] == CODE_ROWS || place.code[i] == CODE_COLS)
                place.code[i] = CODE_SUM;
        }
        QD_TRY(qd_proof_write_param_grad(w, grads[part], (const proof_place[]){place, place}));
    }
    return qd_proof_write(w, DX, &d);
}

/* Attention over the rows of a rank. */

/* Largest scores are those of the prediction module whose tokens were looked up last. */
static qd_status check_ahead(const proof_walk *w)
{
    int ahead = w->class_->module > 0 ? w->class_->embeds : 0;
    if (w->op->ahead == ahead)
        return QD_OK;
    return qd_proof_fail(w, QKV, 0, -1, "it is attention of prediction module %d, not %d", w->op->ahead, ahead);
}

qd_status qd_proof_rule_attention(proof_walk *w)
{
    QD_TRY(check_ahead(w));
    proof_value qkv;
    QD_TRY(read_qkv(w, &qkv, false));
    proof_value o = qd_proof_value_of(w, &qkv.place[0], false);
    QD_TRY(qd_proof_write(w, LSE, &o));
    return qd_proof_write(w, O, &o);
}

qd_status qd_proof_rule_attention_cached(proof_walk *w)
{
    proof_value qkv;
    QD_TRY(read_qkv(w, &qkv, false));
    proof_value o = qd_proof_value_of(w, &qkv.place[0], false);
    QD_TRY(qd_proof_write(w, LSE, &o));
    return qd_proof_write(w, O, &o);
}

/* Each rank has the sinks of its heads: of its share of tp, and all of those where ranks of cp have
 * different heads. */
static qd_status check_sinks(proof_walk *w, proof_operand operand, const proof_value *v)
{
    proof_value sinks;
    QD_TRY(qd_proof_param(w, SINK, &sinks));
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        int has = sinks.place[0].code[d], code = v->place[0].code[d];
        if (has != (code == CODE_COLS && !is_cp(w, d) ? CODE_ROWS : CODE_SAME))
            return qd_proof_fail(w, operand, FOLD_DENSE, d, "it is %s, but the sinks are %s", qd_proof_code_text((proof_code)code),
                                 qd_proof_code_text((proof_code)has));
    }
    return QD_OK;
}

/* A finished result: a ring has added the keys of all ranks. */
qd_status qd_proof_rule_attention_sink(proof_walk *w)
{
    proof_value o, lse;
    QD_TRY(qd_proof_read(w, O, &o));
    QD_TRY(qd_proof_no_sum(w, O, &o));
    QD_TRY(qd_proof_is_gradient(w, O, &o, false));
    QD_TRY(qd_proof_read(w, LSE, &lse));
    QD_TRY(qd_proof_same_place(w, LSE, &lse, O, &o));
    QD_TRY(check_sinks(w, O, &o));
    QD_TRY(qd_proof_write(w, LSE, &lse));
    return qd_proof_write(w, O, &o);
}

/* A sum over rows, of this rank's heads; those that other ranks of cp have are 0. */
qd_status qd_proof_rule_attention_sink_grad(proof_walk *w)
{
    proof_value lse, delta;
    QD_TRY(qd_proof_read(w, LSE, &lse));
    QD_TRY(qd_proof_is_gradient(w, LSE, &lse, false));
    QD_TRY(qd_proof_read(w, DELTA, &delta));
    QD_TRY(qd_proof_is_gradient(w, DELTA, &delta, true));
    delta.parts = 1; /* those of queries */
    QD_TRY(qd_proof_no_sum(w, DELTA, &delta));
    QD_TRY(check_sinks(w, DELTA, &delta));
    proof_place place = delta.place[0];
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        place.code[d] = is_cp(w, d) && place.code[d] == CODE_COLS ? CODE_SUM
                                                                  : (uint8_t)qd_proof_code_row_sum((proof_code)place.code[d]);
    return qd_proof_write_param_grad(w, SINK_GRAD, (const proof_place[]){place, place});
}

qd_status qd_proof_rule_attention_grad(proof_walk *w)
{
    proof_value qkv, o, lse;
    QD_TRY(read_qkv(w, &qkv, false));
    QD_TRY(qd_proof_read(w, O, &o));
    QD_TRY(qd_proof_is_gradient(w, O, &o, false));
    QD_TRY(qd_proof_read(w, LSE, &lse));
    QD_TRY(read_d_o(w, &qkv));
    proof_value d = qd_proof_value_of(w, &qkv.place[0], true);
    d.parts = 2;
    d.split = qkv.split;
    d.place[1] = kv_gradient(w, &qkv);
    d.rotated = qkv.rotated;
    QD_TRY(qd_proof_write(w, DELTA, &d));
    return qd_proof_write(w, D_QKV, &d);
}

/* Attention over the rows of all ranks of cp: the keys and values of the rank `round` ranks back,
 * or of whole sequences. */
static qd_status read_kv(proof_walk *w, const proof_value *qkv, proof_value *kv)
{
    int round = w->op->round;
    QD_TRY(qd_proof_read_any(w, KV, kv));
    QD_TRY(qd_proof_is_gradient(w, KV, kv, false));
    QD_TRY(qd_proof_no_sum(w, KV, kv));
    if (kv->kind != KNOWN || (round >= 0 && kv->shift != round))
        return qd_proof_fail(w, KV, 0, -1, "keys that have been passed on %d times are taken for those of %d ranks back", kv->shift, round);
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        int wanted = is_cp(w, d) && round < 0 ? CODE_SAME : kv_place(qkv)->code[d];
        if (kv->place[0].code[d] != wanted)
            return qd_proof_fail(w, KV, FOLD_DENSE, d, "keys are %s where they must be %s",
                                 qd_proof_code_text((proof_code)kv->place[0].code[d]), qd_proof_code_text((proof_code)wanted));
    }
    return QD_OK;
}

int qd_proof_rounds(const proof_walk *w, int round)
{
    const int64_t seq = w->program->strategy.seq;
    int64_t window = qd_layer_window(&w->ledger->decls[w->ledger->modules[w->class_->module].decl]);
    return qd_context_rounds(seq, w->proof->mesh->degree[QD_AXIS_CP], qd_window_within(window, seq), round);
}

/* The sum over rounds, which must follow each other. */
static qd_status next_round(proof_walk *w, proof_operand operand, const proof_value *qkv, bool gradient)
{
    const proof_place *place = &qkv->place[0];
    int cp = w->proof->mesh->degree[QD_AXIS_CP], round = w->op->round, done = round < 0 ? 0 : qd_proof_rounds(w, round);
    proof_value v = qd_proof_value_of(w, place, gradient), before;
    if (round > 0) {
        QD_TRY(qd_proof_read_any(w, operand, &before));
        if (before.seen != done)
            return qd_proof_fail(w, operand, 0, -1, "round %d is added to the sum of %d rounds, where %d must be before it", round,
                                 before.seen, done);
    }
    v.seen = round < 0 || done + 1 == qd_proof_rounds(w, cp) ? 0 : done + 1;
    v.rotated = gradient && qkv->rotated;
    int slot = qd_proof_slot_of(w->op, operand);
    if (gradient && w->ops->slots[slot].cols > w->op->n) { /* the columns of queries in a slot with all of qkv */
        v.parts = 2;
        v.split = w->op->n;
        v.missing = 2;
    }
    return qd_proof_write(w, operand, &v);
}

qd_status qd_proof_rule_attention_part(proof_walk *w)
{
    QD_TRY(check_ahead(w));
    proof_value qkv, kv;
    QD_TRY(read_qkv(w, &qkv, true));
    QD_TRY(read_kv(w, &qkv, &kv));
    QD_TRY(next_round(w, LSE, &qkv, false));
    return next_round(w, O, &qkv, false);
}

qd_status qd_proof_rule_attention_delta(proof_walk *w)
{
    proof_value o, d_o;
    QD_TRY(qd_proof_read(w, O, &o));
    QD_TRY(qd_proof_no_sum(w, O, &o));
    QD_TRY(qd_proof_read(w, D_O, &d_o));
    QD_TRY(qd_proof_is_gradient(w, D_O, &d_o, true));
    QD_TRY(qd_proof_no_sum(w, D_O, &d_o));
    QD_TRY(qd_proof_same_place(w, D_O, &d_o, O, &o));
    return qd_proof_write(w, DELTA, &d_o);
}

qd_status qd_proof_rule_attention_part_grad(proof_walk *w)
{
    proof_value qkv, kv, lse, delta, before;
    int round = w->op->round;
    QD_TRY(read_qkv(w, &qkv, true));
    QD_TRY(read_kv(w, &qkv, &kv));
    QD_TRY(qd_proof_read(w, LSE, &lse));
    QD_TRY(qd_proof_read(w, DELTA, &delta));
    QD_TRY(read_d_o(w, &qkv));
    QD_TRY(qd_proof_read_any(w, D_Q, &before));
    if (round <= 0 && before.kind != ZEROES)
        return qd_proof_fail(w, D_Q, 0, -1, "gradients of queries are added to something that is not 0");
    QD_TRY(next_round(w, D_Q, &qkv, true));
    QD_TRY(qd_proof_read_any(w, D_KV, &before));
    if (before.kind != ZEROES)
        return qd_proof_fail(w, D_KV, 0, -1, "gradients of keys are added to something that is not 0");
    proof_place place = kv_gradient(w, &qkv);
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count && round < 0; d++)
        if (is_cp(w, d))
            place.code[d] = CODE_SUM; /* of whole sequences, from this rank's queries */
    proof_value d_kv = qd_proof_value_of(w, &place, true);
    d_kv.rotated = qkv.rotated;
    d_kv.shift = round < 0 ? 0 : round;
    d_kv.seen = round < 0 || qd_proof_rounds(w, w->proof->mesh->degree[QD_AXIS_CP]) == 1 ? 0 : 1;
    return qd_proof_write(w, D_KV, &d_kv);
}

/* Copies columns: of all of qkv, of its queries, or of its keys and values. */
qd_status qd_proof_rule_columns(proof_walk *w)
{
    const qd_op *op = w->op;
    int from = qd_proof_slot_of(op, X), to = qd_proof_slot_of(op, Y);
    proof_value x, y;
    if (from < 0 || to < 0)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "an operand is missing");
    QD_TRY(qd_proof_read(w, X, &x));
    if (x.parts == 2 && op->n < w->ops->slots[from].cols) {
        bool keys = op->first >= x.split;
        if (!keys && op->first + op->n > x.split)
            return qd_proof_fail(w, X, 0, -1, "columns of queries and of keys are copied together");
        x.place[0] = x.place[keys];
        x.parts = 1;
    }
    if (op->n == w->ops->slots[to].cols)
        return qd_proof_write(w, Y, &x);
    y = x;
    if (w->slots[to].count > 0)
        QD_TRY(qd_proof_read_any(w, Y, &y));
    bool keys = op->to > 0;
    if (y.kind != KNOWN || y.parts != 2)
        y = (proof_value){.kind = KNOWN,
                          .parts = 2,
                          .missing = 3,
                          .gradient = x.gradient,
                          .rotated = x.rotated,
                          .copies = 1,
                          .weight = -1,
                          .place = {x.place[0], x.place[0]}};
    if (y.gradient != x.gradient || y.rotated != x.rotated || !(y.missing & (1u << keys)))
        return qd_proof_fail(w, Y, 0, -1, "its columns of %s are overwritten", keys ? "keys and values" : "queries");
    if (y.seen > 0)
        return qd_proof_fail(w, Y, 0, -1, "the sum over rounds in its other columns is not complete");
    y.split = keys ? op->to : op->n;
    y.place[keys] = x.place[0];
    y.missing &= (uint8_t) ~(1u << keys);
    return qd_proof_write(w, Y, &y);
}

static qd_status over_cp(const proof_walk *w, proof_operand operand)
{
    const qd_op_exchange *e = &w->op->exchange;
    qd_group cp = qd_group_whole(w->proof->mesh, QD_AXIS_BIT(QD_AXIS_CP));
    if (!qd_group_equal(e->group, cp) || e->index < 0 || e->index >= w->program->group_count ||
        !qd_group_equal(w->program->groups[e->index], cp))
        return qd_proof_fail(w, operand, 0, -1, "its group is not cp");
    return QD_OK;
}

static qd_status exchange(proof_walk *w, proof_value *v, proof_code from, proof_code to)
{
    QD_TRY(over_cp(w, X));
    for (int part = 0; part < 2; part++)
        for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
            uint8_t *code = &v->place[part].code[d];
            if (!is_cp(w, d))
                continue;
            if (*code != from)
                return qd_proof_fail(w, X, FOLD_DENSE, d, "%s needs %s, but it is %s", qd_op_name(w->op->kind), qd_proof_code_text(from),
                                     qd_proof_code_text((proof_code)*code));
            *code = (uint8_t)to;
        }
    return QD_OK;
}

qd_status qd_proof_rule_context_shift(proof_walk *w)
{
    proof_value v;
    int cp = w->proof->mesh->degree[QD_AXIS_CP];
    QD_TRY(qd_proof_read_any(w, X, &v));
    QD_TRY(exchange(w, &v, CODE_ROWS, CODE_ROWS));
    if (w->op->round != v.shift)
        return qd_proof_fail(w, X, 0, -1, "rows that have been passed on %d times are taken for those of %d ranks back", v.shift,
                             w->op->round);
    if (w->op->hop < 1 || v.shift + w->op->hop > cp)
        return qd_proof_fail(w, X, 0, -1, "rows of %d ranks back are sent on by %d ranks, beyond their owner", v.shift, w->op->hop);
    v.shift = (v.shift + w->op->hop) % cp;
    if (v.shift == 0 && v.seen == qd_proof_rounds(w, cp))
        v.seen = 0;
    return qd_proof_write(w, Y, &v);
}

qd_status qd_proof_rule_context_gather(proof_walk *w)
{
    proof_value v;
    QD_TRY(qd_proof_read(w, X, &v));
    QD_TRY(exchange(w, &v, CODE_ROWS, CODE_SAME));
    return qd_proof_write(w, Y, &v);
}

qd_status qd_proof_rule_context_scatter(proof_walk *w)
{
    proof_value v;
    QD_TRY(qd_proof_read(w, X, &v));
    if (w->op->exchange.reduce != QD_SUM)
        return qd_proof_fail(w, X, 0, -1, "it is gathered instead of summed");
    QD_TRY(exchange(w, &v, CODE_SUM, CODE_ROWS));
    return qd_proof_write(w, Y, &v);
}

/* Ulysses: rows of all heads become all rows of some heads, in three ops, and the reverse.
 * HEADS_JOIN sums the contributions of several ranks to a kv head that they share. */
qd_status qd_proof_rule_cut(proof_walk *w)
{
    static const struct {
        qd_op_kind kind;
        proof_stage from, to;
        proof_code code;
    } steps[] = {{QD_OP_HEADS_SPLIT, AT_HOME, HEADS_CUT, CODE_ROWS},
                 {QD_OP_ROWS_JOIN, HEADS_SWAPPED, AT_HOME, CODE_COLS},
                 {QD_OP_ROWS_SPLIT, AT_HOME, ROWS_CUT, CODE_COLS},
                 {QD_OP_HEADS_JOIN, ROWS_SWAPPED, AT_HOME, CODE_ROWS}};
    proof_value v;
    size_t step = 0;
    while (steps[step].kind != w->op->kind)
        step++;
    QD_TRY(qd_proof_read(w, X, &v));
    if (v.stage != steps[step].from)
        return qd_proof_fail(w, X, 0, -1, "its rows and heads are not where %s takes them from", qd_op_name(w->op->kind));
    for (int part = 0; part < v.parts; part++)
        for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
            if (is_cp(w, d) && v.place[part].code[d] != steps[step].code)
                return qd_proof_fail(w, X, FOLD_DENSE, d, "it is %s where it must be %s",
                                     qd_proof_code_text((proof_code)v.place[part].code[d]), qd_proof_code_text(steps[step].code));
    v.stage = (uint8_t)steps[step].to;
    v.split = w->op->n; /* in columns of the slot on either side */
    if (v.stage == AT_HOME && w->op->kind == QD_OP_ROWS_JOIN)
        v.split = w->op->n / w->proof->mesh->degree[QD_AXIS_CP];
    return qd_proof_write(w, Y, &v);
}

qd_status qd_proof_rule_context_swap(proof_walk *w)
{
    proof_value v;
    QD_TRY(qd_proof_read(w, X, &v));
    if (v.stage != HEADS_CUT && v.stage != ROWS_CUT)
        return qd_proof_fail(w, X, 0, -1, "rows and heads are exchanged without being split by rank");
    bool to_heads = v.stage == HEADS_CUT;
    QD_TRY(exchange(w, &v, to_heads ? CODE_ROWS : CODE_COLS, to_heads ? CODE_COLS : CODE_ROWS));
    v.stage = to_heads ? HEADS_SWAPPED : ROWS_SWAPPED;
    return qd_proof_write(w, Y, &v);
}
