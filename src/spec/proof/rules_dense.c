/* Rules of row-wise ops (embedding, norm, GEMMs, activations, the loss), and of the collectives
 * over tp. */
#include "spec/proof/proof_impl.h"

#include <math.h>

proof_code qd_proof_code_linear(proof_code x, proof_code weight) /* y (rows, out) = x (rows, in) · W (out, in)ᵀ */
{
    if (weight == CODE_SAME && x != CODE_COLS && x != CODE_EXPERTS)
        return x;
    if (weight == CODE_ROWS && x == CODE_SAME)
        return CODE_COLS;
    if (weight == CODE_COLS && x == CODE_COLS)
        return CODE_SUM;
    return weight == CODE_EXPERTS && x == CODE_EXPERTS ? CODE_EXPERTS : CODE_PART;
}

proof_code qd_proof_code_linear_dx(proof_code dy, proof_code weight) /* dx (rows, in) = dy (rows, out) · W (out, in) */
{
    if (weight == CODE_SAME && dy != CODE_COLS && dy != CODE_EXPERTS)
        return dy;
    if (weight == CODE_ROWS && dy == CODE_COLS)
        return CODE_SUM;
    if (weight == CODE_COLS && dy == CODE_SAME)
        return CODE_COLS;
    return weight == CODE_EXPERTS && dy == CODE_EXPERTS ? CODE_EXPERTS : CODE_PART;
}

proof_code qd_proof_code_linear_dw(proof_code dy, proof_code x) /* dW (out, in) = dyᵀ (out, rows) · x (rows, in) */
{
    if (dy == CODE_ROWS && x == CODE_ROWS)
        return CODE_SUM;
    if (dy == CODE_COLS && x == CODE_SAME)
        return CODE_ROWS;
    if (dy == CODE_SAME && x == CODE_COLS)
        return CODE_COLS;
    if (dy == CODE_SUM && x == CODE_SAME)
        return CODE_SUM;
    return dy == x && (dy == CODE_SAME || dy == CODE_EXPERTS) ? dy : CODE_PART;
}

proof_code qd_proof_code_row_sum(proof_code dy) /* db (out) = sum over the rows of dy (rows, out) */
{
    switch (dy) {
    case CODE_ROWS:
        return CODE_SUM;
    case CODE_COLS:
        return CODE_ROWS;
    case CODE_SAME:
    case CODE_SUM:
        return dy;
    default:
        return CODE_PART;
    }
}

static proof_code norm_sum(proof_code x) /* gradients of norm parameters, whose columns are whole on every rank */
{
    return x == CODE_ROWS ? CODE_SUM : x;
}

/* The row sums of a value, as gradients of a vector of its columns. */
static qd_status row_sums(proof_walk *w, proof_operand of, const proof_value *v, proof_operand grad, proof_code (*rule)(proof_code))
{
    proof_place place[2] = {v->place[0], v->place[v->parts - 1]};
    for (int part = 0; part < 2; part++)
        for (int d = 0; d < w->proof->frames[place[part].fold].count; d++) {
            proof_code code = rule((proof_code)place[part].code[d]);
            if (code == CODE_PART)
                return qd_proof_fail(w, of, place[part].fold, d, "it is %s, which cannot be summed over rows",
                                     qd_proof_code_text((proof_code)place[part].code[d]));
            place[part].code[d] = (uint8_t)code;
        }
    return qd_proof_write_param_grad(w, grad, place);
}

static qd_status whole_columns(const proof_walk *w, proof_operand operand, const proof_value *v)
{
    for (int d = 0; d < w->proof->frames[v->place[0].fold].count; d++)
        if (v->place[0].code[d] != CODE_SAME && v->place[0].code[d] != CODE_ROWS)
            return qd_proof_fail(w, operand, v->place[0].fold, d, "%s needs whole rows, but it is %s", qd_op_name(w->op->kind),
                                 qd_proof_code_text((proof_code)v->place[0].code[d]));
    return QD_OK;
}

/* Parameters of ops on whole rows must be whole. */
static qd_status whole_param(proof_walk *w, proof_operand operand)
{
    proof_value v;
    if (!qd_proof_has(w, operand))
        return QD_OK;
    QD_TRY(qd_proof_param(w, operand, &v));
    for (int d = 0; d < w->proof->frames[v.place[0].fold].count; d++)
        if (v.place[0].code[d] != CODE_SAME)
            return qd_proof_fail(w, operand, v.place[0].fold, d, "the parameter is %s, but %s needs all of it",
                                 qd_proof_code_text((proof_code)v.place[0].code[d]), qd_op_name(w->op->kind));
    return QD_OK;
}

/* A replicated term (a bias, a position) is added to y: on every rank, or on exactly one if y is a
 * partial sum. */
static qd_status joins_once(proof_walk *w, const proof_value *y, proof_operand operand)
{
    int ranks, present = qd_proof_present(w, &y->place[0], operand, &ranks), sum = -1;
    for (int d = 0; d < w->proof->frames[y->place[0].fold].count; d++)
        sum = sum < 0 && y->place[0].code[d] == CODE_SUM ? d : sum;
    if (present < 0)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "ranks that share its result have a different op at this position");
    if (sum >= 0 && present > 1)
        return qd_proof_fail(w, operand, y->place[0].fold, sum, "%d of %d ranks add it to a partial sum, so that it counts %d times",
                             present, ranks, present);
    if (sum < 0 && present != 0 && present != ranks)
        return qd_proof_fail(w, operand, FOLD_DENSE, 0, "%d of %d ranks with the same result add it", present, ranks);
    return QD_OK;
}

/* The first token in this rank's shard of a table. */
static int64_t first_token(const proof_walk *w, int slot)
{
    int param = w->ledger->modules[w->class_->module].param_begin + w->ops->slots[slot].param;
    return qd_ledger_atom(w->ledger, param, w->program->rank).begin[0];
}

qd_status qd_proof_rule_embed(proof_walk *w)
{
    proof_value input, table;
    QD_TRY(qd_proof_read(w, INPUT, &input));
    QD_TRY(qd_proof_param(w, WEIGHT, &table));
    int ahead = w->class_->embeds++ + (w->class_->module > 0); /* the head looks up the tokens that its losses predict from */
    if (w->op->ahead != ahead)
        return qd_proof_fail(w, INPUT, 0, -1, "tokens %d further on are looked up, not those %d further on", w->op->ahead, ahead);
    proof_value y = qd_proof_value_of(w, &input.place[0], false);
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        if (table.place[0].code[d] == CODE_ROWS && input.place[0].code[d] == CODE_SAME)
            y.place[0].code[d] = CODE_SUM; /* tokens in the shard of another rank yield 0 */
        else if (table.place[0].code[d] != CODE_SAME)
            return qd_proof_fail(w, WEIGHT, FOLD_DENSE, d, "the table is %s, but the tokens are %s",
                                 qd_proof_code_text((proof_code)table.place[0].code[d]),
                                 qd_proof_code_text((proof_code)input.place[0].code[d]));
    }
    if (w->op->first != first_token(w, qd_proof_slot_of(w->op, WEIGHT)) || w->op->k != w->ops->slots[qd_proof_slot_of(w->op, WEIGHT)].rows)
        return qd_proof_fail(w, WEIGHT, 0, -1, "tokens from %lld on are looked up, but the table begins with token %lld",
                             (long long)w->op->first, (long long)first_token(w, qd_proof_slot_of(w->op, WEIGHT)));
    QD_TRY(whole_param(w, POSITIONS));
    QD_TRY(joins_once(w, &y, POSITIONS));
    return qd_proof_write(w, Y, &y);
}

qd_status qd_proof_rule_embed_grad(proof_walk *w)
{
    proof_value dy;
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(whole_columns(w, DY, &dy));
    int slot = qd_proof_slot_of(w->op, WEIGHT_GRAD);
    if (slot < 0 || w->ops->slots[slot].kind != QD_SLOT_GRAD)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "the table's gradient is missing");
    proof_place table =
        qd_proof_param_place(w->proof, w->ledger, w->ledger->modules[w->class_->module].param_begin + w->ops->slots[slot].param);
    proof_place place = dy.place[0];
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        if (table.code[d] == CODE_ROWS && dy.place[0].code[d] != CODE_SAME)
            return qd_proof_fail(w, DY, FOLD_DENSE, d, "it is %s, but tokens of all ranks have rows in this rank's part of the table",
                                 qd_proof_code_text((proof_code)dy.place[0].code[d]));
        place.code[d] = table.code[d] == CODE_ROWS ? CODE_ROWS : norm_sum((proof_code)dy.place[0].code[d]);
    }
    if (w->op->first != first_token(w, slot))
        return qd_proof_fail(w, WEIGHT_GRAD, 0, -1, "tokens from %lld on are added to a table that begins with token %lld",
                             (long long)w->op->first, (long long)first_token(w, slot));
    QD_TRY(qd_proof_write_param_grad(w, WEIGHT_GRAD, (const proof_place[]){place, place}));
    return qd_proof_has(w, POSITIONS_GRAD) ? row_sums(w, DY, &dy, POSITIONS_GRAD, norm_sum) : QD_OK;
}

qd_status qd_proof_rule_norm(proof_walk *w)
{
    proof_value x, add;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(whole_columns(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    if (qd_proof_has(w, ADD)) {
        QD_TRY(qd_proof_read(w, ADD, &add));
        QD_TRY(qd_proof_no_sum(w, ADD, &add));
        QD_TRY(qd_proof_same_place(w, ADD, &add, X, &x));
    }
    QD_TRY(whole_param(w, GAMMA));
    QD_TRY(whole_param(w, BETA));
    proof_value y = qd_proof_value_of(w, &x.place[0], false);
    QD_TRY(qd_proof_write(w, SUMS, &y));
    QD_TRY(qd_proof_write(w, STATE, &y));
    QD_TRY(qd_proof_write(w, STATE2, &y));
    QD_TRY(qd_proof_write(w, AMAX, &y));
    return qd_proof_write(w, Y, &y);
}

qd_status qd_proof_rule_norm_grad(proof_walk *w)
{
    proof_value dy, x, add, state;
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_no_sum(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(whole_columns(w, X, &x));
    QD_TRY(qd_proof_same_place(w, DY, &dy, X, &x));
    QD_TRY(qd_proof_read(w, STATE, &state));
    QD_TRY(qd_proof_same_place(w, STATE, &state, X, &x));
    QD_TRY(whole_param(w, GAMMA));
    if (qd_proof_has(w, ADD)) {
        QD_TRY(qd_proof_read(w, ADD, &add));
        QD_TRY(qd_proof_is_gradient(w, ADD, &add, true));
        QD_TRY(qd_proof_same_place(w, ADD, &add, DY, &dy));
        QD_TRY(row_sums(w, ADD, &add, ADD_SUMS, norm_sum));
    }
    proof_value dx = qd_proof_value_of(w, &x.place[0], true);
    if (qd_proof_has(w, GAMMA_GRAD))
        QD_TRY(row_sums(w, DY, &dy, GAMMA_GRAD, norm_sum));
    if (qd_proof_has(w, BETA_GRAD))
        QD_TRY(row_sums(w, DY, &dy, BETA_GRAD, norm_sum));
    if (qd_proof_has(w, DX_SUMS))
        QD_TRY(row_sums(w, DX, &dx, DX_SUMS, norm_sum));
    QD_TRY(qd_proof_write(w, AMAX, &dx));
    return qd_proof_write(w, DX, &dx);
}

/* Handles each part of a matrix's outputs with its part of the bias. */
qd_status qd_proof_rule_linear(proof_walk *w)
{
    const qd_op *op = w->op;
    bool windows = op->kind != QD_OP_LINEAR_ADD;
    int64_t from = windows ? op->first : 0, to = windows ? op->to : 0;
    proof_value x, weight, bias, add;
    QD_TRY(qd_proof_read_rows(w, X, from, op->m, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_param(w, WEIGHT, &weight));
    QD_TRY(qd_proof_in_fold(w, X, &x, weight.place[0].fold));
    if (x.parts > 1)
        return qd_proof_fail(w, X, 0, -1, "its columns are placed in several ways");
    proof_value y = qd_proof_value_of(w, &x.place[0], false);
    y.parts = weight.parts;
    y.split = weight.split;
    y.weight = qd_proof_slot_of(op, WEIGHT);
    for (int part = 0; part < 2; part++)
        for (int d = 0; d < w->proof->frames[y.place[part].fold].count; d++) {
            proof_code a = (proof_code)x.place[0].code[d], b = (proof_code)weight.place[part].code[d], code = qd_proof_code_linear(a, b);
            if (code == CODE_PART)
                return qd_proof_fail(w, X, y.place[part].fold, d, "it is %s, but the matrix is %s", qd_proof_code_text(a),
                                     qd_proof_code_text(b));
            y.place[part].code[d] = (uint8_t)code;
        }
    QD_TRY(joins_once(w, &y, BIAS));
    if (qd_proof_has(w, BIAS)) {
        QD_TRY(qd_proof_param(w, BIAS, &bias));
        for (int part = 0; part < y.parts; part++)
            for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
                int of_y = y.place[part].code[d], of_bias = bias.place[part].code[d];
                if (of_bias != (of_y == CODE_COLS ? CODE_ROWS : CODE_SAME))
                    return qd_proof_fail(w, BIAS, FOLD_DENSE, d, "the bias is %s, but the result is %s",
                                         qd_proof_code_text((proof_code)of_bias), qd_proof_code_text((proof_code)of_y));
            }
    }
    if (qd_proof_has(w, ADD)) {
        QD_TRY(qd_proof_read(w, ADD, &add));
        QD_TRY(qd_proof_same_place(w, ADD, &add, Y, &y));
    }
    if (op->kind == QD_OP_LINEAR_GELU) {
        QD_TRY(qd_proof_no_sum(w, Y, &y));
        QD_TRY(qd_proof_write_rows(w, SUMS, to, op->m, &y));
    }
    return qd_proof_write_rows(w, Y, to, op->m, &y);
}

static qd_status of_result(const proof_walk *w, const proof_value *dy)
{
    if (dy->rotated)
        return qd_proof_fail(w, DY, 0, -1, "positions are still in the gradient of queries and keys");
    return qd_proof_is_gradient(w, DY, dy, true);
}

qd_status qd_proof_rule_linear_dx(proof_walk *w)
{
    const qd_op *op = w->op;
    proof_value dy, weight, sum;
    QD_TRY(qd_proof_read_rows(w, DY, op->first, op->m, &dy));
    QD_TRY(of_result(w, &dy));
    QD_TRY(qd_proof_param(w, WEIGHT, &weight));
    QD_TRY(qd_proof_in_fold(w, DY, &dy, weight.place[0].fold));
    proof_value dx = qd_proof_value_of(w, &dy.place[0], true);
    for (int part = 0; part < 2; part++)
        for (int d = 0; d < w->proof->frames[dx.place[0].fold].count; d++) {
            proof_code a = (proof_code)dy.place[part < dy.parts ? part : 0].code[d], b = (proof_code)weight.place[part].code[d];
            proof_code code = qd_proof_code_linear_dx(a, b);
            if (code == CODE_PART)
                return qd_proof_fail(w, DY, dx.place[0].fold, d, "it is %s, but the matrix is %s", qd_proof_code_text(a),
                                     qd_proof_code_text(b));
            if (part == 1 && code != dx.place[0].code[d])
                return qd_proof_fail(w, DY, dx.place[0].fold, d, "queries and keys give gradients that are %s and %s",
                                     qd_proof_code_text((proof_code)dx.place[0].code[d]), qd_proof_code_text(code));
            if (part == 0)
                dx.place[0].code[d] = dx.place[1].code[d] = (uint8_t)code;
        }
    if (op->kind == QD_OP_LINEAR_DX_GELU) { /* dx times the derivative */
        QD_TRY(qd_proof_read_rows(w, SUMS, op->to, op->m, &sum));
        QD_TRY(qd_proof_no_sum(w, SUMS, &sum));
        QD_TRY(qd_proof_is_gradient(w, SUMS, &sum, false));
        QD_TRY(qd_proof_no_sum(w, DX, &dx));
        QD_TRY(qd_proof_same_place(w, DX, &dx, SUMS, &sum));
    }
    return qd_proof_write_rows(w, DX, op->to, op->m, &dx);
}

qd_status qd_proof_rule_linear_dw(proof_walk *w)
{
    const qd_op *op = w->op;
    proof_value dy, x;
    QD_TRY(qd_proof_read_rows(w, DY, op->to, op->k, &dy));
    QD_TRY(of_result(w, &dy));
    QD_TRY(qd_proof_read_rows(w, X, op->first, op->k, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_in_fold(w, X, &x, dy.place[0].fold));
    proof_place place[2] = {dy.place[0], dy.place[0]};
    for (int part = 0; part < 2; part++)
        for (int d = 0; d < w->proof->frames[dy.place[0].fold].count; d++) {
            proof_code a = (proof_code)dy.place[part < dy.parts ? part : 0].code[d], b = (proof_code)x.place[0].code[d];
            proof_code code = qd_proof_code_linear_dw(a, b);
            if (code == CODE_PART)
                return qd_proof_fail(w, X, dy.place[0].fold, d, "it is %s, but the gradient of the result is %s", qd_proof_code_text(b),
                                     qd_proof_code_text(a));
            place[part].code[d] = (uint8_t)code;
        }
    QD_TRY(qd_proof_write_param_grad(w, WEIGHT_GRAD, place));
    return qd_proof_has(w, BIAS_GRAD) ? row_sums(w, DY, &dy, BIAS_GRAD, qd_proof_code_row_sum) : QD_OK;
}

qd_status qd_proof_rule_bias_grad(proof_walk *w)
{
    proof_value dy;
    QD_TRY(qd_proof_read(w, DY, &dy));
    return qd_proof_bias_sums(w, DY, &dy);
}

qd_status qd_proof_bias_sums(proof_walk *w, proof_operand operand, const proof_value *dy)
{
    if (!qd_proof_has(w, BIAS_GRAD))
        return QD_OK;
    QD_TRY(of_result(w, dy));
    return row_sums(w, operand, dy, BIAS_GRAD, qd_proof_code_row_sum);
}

qd_status qd_proof_rule_activation(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_rule_activation_grad(proof_walk *w)
{
    proof_value x, dy;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(qd_proof_no_sum(w, DY, &dy));
    QD_TRY(qd_proof_same_place(w, DY, &dy, X, &x));
    QD_TRY(qd_proof_write(w, Y, &x));
    return qd_proof_write(w, DX, &dy);
}

/* Rows times a number each. Both must be whole. */
static qd_status rows_and_gates(proof_walk *w, proof_value *x)
{
    proof_value gate;
    QD_TRY(qd_proof_read(w, X, x));
    QD_TRY(qd_proof_is_gradient(w, X, x, false));
    QD_TRY(qd_proof_no_sum(w, X, x));
    QD_TRY(whole_columns(w, X, x));
    QD_TRY(qd_proof_read(w, COMBINE_WEIGHT, &gate));
    QD_TRY(qd_proof_is_gradient(w, COMBINE_WEIGHT, &gate, false));
    QD_TRY(qd_proof_no_sum(w, COMBINE_WEIGHT, &gate));
    return qd_proof_same_place(w, COMBINE_WEIGHT, &gate, X, x);
}

qd_status qd_proof_rule_gate(proof_walk *w)
{
    proof_value x;
    QD_TRY(rows_and_gates(w, &x));
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_rule_gate_grad(proof_walk *w)
{
    proof_value x, dy;
    QD_TRY(rows_and_gates(w, &x));
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(qd_proof_no_sum(w, DY, &dy));
    QD_TRY(qd_proof_same_place(w, DY, &dy, X, &x));
    QD_TRY(qd_proof_write(w, D_COMBINE_WEIGHT, &dy));
    return qd_proof_write(w, DX, &dy);
}

/* Sums of values placed alike; for gradients of a ring, adds those of one more rank. */
qd_status qd_proof_rule_add(proof_walk *w)
{
    proof_value a, b;
    QD_TRY(qd_proof_read_any(w, X, &a));
    if (a.gradient && qd_proof_slot_of(w->op, X) == qd_proof_slot_of(w->op, ADD))
        return qd_proof_fail(w, ADD, 0, -1, "a gradient is added to itself");
    if (a.seen > 0 || a.shift > 0) {
        QD_TRY(qd_proof_read_any(w, ADD, &b));
        if (b.shift != a.shift || b.seen != 1 || a.seen != qd_proof_rounds(w, a.shift))
            return qd_proof_fail(w, ADD, 0, -1, "terms of %d ranks, %d ranks away from home, join those of %d, %d ranks away", b.seen,
                                 b.shift, a.seen, a.shift);
        QD_TRY(qd_proof_same_place(w, ADD, &b, X, &a));
        a.seen++;
        return qd_proof_write(w, Y, &a);
    }
    QD_TRY(qd_proof_read(w, X, &a));
    QD_TRY(qd_proof_read(w, ADD, &b));
    QD_TRY(qd_proof_same_place(w, ADD, &b, X, &a));
    QD_TRY(qd_proof_is_gradient(w, ADD, &b, a.gradient));
    if (a.stage != b.stage || a.copies != b.copies)
        return qd_proof_fail(w, ADD, 0, -1, "rows in a different order are added");
    return qd_proof_write(w, Y, &a);
}

qd_status qd_proof_rule_dropout(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_rule_zero(proof_walk *w)
{
    proof_value y = {.kind = ZEROES, .parts = 1, .copies = 1, .weight = -1};
    return qd_proof_write(w, Y, &y);
}

/* The gradient of each token's loss is divided by the number of tokens of the global batch, in
 * every layout. */
static qd_status mean_over_batch(const proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    const qd_model *m = &w->ledger->model;
    double tokens = (double)s->micro_batch * (double)s->micro_batches * (double)s->seq * w->proof->mesh->degree[QD_AXIS_DP];
    double weight = w->op->ahead > 0 ? m->mtp_weight / m->mtp_modules : 1.0;
    if (w->op->ahead > 0 && fabs(w->op->scale * tokens - weight) > 1e-9 * weight)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "losses of further tokens are multiplied by %g, but it is %g / %.0f tokens",
                             w->op->scale, weight, tokens);
    if (w->op->ahead == 0 && fabs(w->op->scale * tokens - 1.0) > 1e-9)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "losses are divided by %.0f tokens, but the global batch has %.0f",
                             w->op->scale > 0.0 ? 1.0 / w->op->scale : 0.0, tokens);
    return QD_OK;
}

/* Every op of the head caps logits as the model says: the loss, its parts and its gradient. */
static qd_status capped(const proof_walk *w)
{
    if (w->op->cap != w->ledger->model.logit_softcap)
        return qd_proof_fail(w, LOGITS, 0, -1, "they are capped at %g, but the model says %g", w->op->cap, w->ledger->model.logit_softcap);
    return QD_OK;
}

/* The losses of a micro-batch are of the next token, then of the token after it, and so on. */
static qd_status in_turn(const proof_walk *w)
{
    if (w->op->ahead != w->class_->losses && w->class_->losses <= qd_program_ahead(w->program)) /* else: add_loss refuses it */
        return qd_proof_fail(w, INPUT, 0, -1, "it reads targets %d tokens further on, but loss %d of the head is next", w->op->ahead,
                             w->class_->losses);
    return QD_OK;
}

static qd_status add_loss(proof_walk *w, proof_operand of, const proof_value *losses)
{
    proof_place place = losses->place[0];
    for (int d = 0; d < w->proof->frames[place.fold].count; d++)
        place.code[d] = (uint8_t)norm_sum((proof_code)place.code[d]);
    if (w->class_->losses > qd_program_ahead(w->program))
        return qd_proof_fail(w, of, 0, -1, "the losses of a micro-batch are added a second time");
    w->class_->losses++;
    w->class_->loss = place;
    proof_value v = qd_proof_value_of(w, &place, false);
    return qd_proof_write(w, LOSS, &v);
}

qd_status qd_proof_rule_head_loss(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(whole_columns(w, X, &x));
    QD_TRY(whole_param(w, WEIGHT));
    QD_TRY(capped(w));
    QD_TRY(in_turn(w));
    if (w->op->chunk < 1)
        return qd_proof_fail(w, LOGITS, 0, -1, "no row fits");
    proof_value losses = qd_proof_value_of(w, &x.place[0], false), dx = qd_proof_value_of(w, &x.place[0], true);
    QD_TRY(add_loss(w, LOSSES, &losses));
    if (!qd_proof_has(w, DX))
        return QD_OK;
    QD_TRY(mean_over_batch(w));
    QD_TRY(row_sums(w, X, &x, WEIGHT_GRAD, norm_sum));
    return qd_proof_write(w, DX, &dx);
}

qd_status qd_proof_rule_head_logits(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(whole_columns(w, X, &x));
    QD_TRY(whole_param(w, WEIGHT));
    QD_TRY(capped(w));
    return qd_proof_write(w, LOGITS, &x);
}

/* Reads logits of this rank's tokens, with the matrix that produced them. */
static qd_status read_logits(proof_walk *w, proof_value *logits)
{
    QD_TRY(capped(w));
    QD_TRY(qd_proof_read_rows(w, LOGITS, 0, w->op->m, logits));
    QD_TRY(qd_proof_no_sum(w, LOGITS, logits));
    QD_TRY(qd_proof_is_gradient(w, LOGITS, logits, false));
    if (w->op->kind != QD_OP_LOSS_MAX && logits->weight >= 0 && w->op->to != first_token(w, logits->weight))
        return qd_proof_fail(w, LOGITS, 0, -1, "the first one is used as token %lld, but the matrix begins with %lld", (long long)w->op->to,
                             (long long)first_token(w, logits->weight));
    return QD_OK;
}

/* A value per row, reduced from columns that are sharded. */
static proof_value of_columns(const proof_walk *w, const proof_value *logits, proof_code becomes)
{
    proof_value v = qd_proof_value_of(w, &logits->place[0], false);
    for (int d = 0; d < w->proof->frames[v.place[0].fold].count; d++)
        if (v.place[0].code[d] == CODE_COLS)
            v.place[0].code[d] = (uint8_t)becomes;
    return v;
}

/* Reads per-row values that must be complete on all ranks that hold columns of the row. */
static qd_status read_reduced(proof_walk *w, proof_operand operand, const proof_value *logits)
{
    proof_value v, wanted = of_columns(w, logits, CODE_SAME);
    QD_TRY(qd_proof_read_rows(w, operand, w->op->first, w->op->m, &v));
    QD_TRY(qd_proof_no_sum(w, operand, &v));
    return qd_proof_same_place(w, operand, &v, LOGITS, &wanted);
}

qd_status qd_proof_rule_loss_max(proof_walk *w)
{
    proof_value logits;
    QD_TRY(read_logits(w, &logits));
    proof_value top = of_columns(w, &logits, CODE_MAX);
    return qd_proof_write_rows(w, TOP, w->op->first, w->op->m, &top);
}

qd_status qd_proof_rule_loss_part(proof_walk *w)
{
    proof_value logits;
    QD_TRY(in_turn(w));
    QD_TRY(read_logits(w, &logits));
    QD_TRY(read_reduced(w, TOP, &logits));
    proof_value sums = of_columns(w, &logits, CODE_SUM);
    return qd_proof_write_rows(w, SUMS, w->op->first, w->op->m, &sums);
}

qd_status qd_proof_rule_loss_grad(proof_walk *w)
{
    proof_value logits;
    QD_TRY(read_logits(w, &logits));
    QD_TRY(read_reduced(w, TOP, &logits));
    QD_TRY(read_reduced(w, SUMS, &logits));
    QD_TRY(in_turn(w));
    if (w->program->strategy.training)
        QD_TRY(mean_over_batch(w));
    if (w->program->strategy.preference.kind && !qd_proof_has(w, FACTORS))
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "losses of tokens are minimized, and not those of pairs");
    if (qd_proof_has(w, FACTORS) && w->op->ahead != 0)
        return qd_proof_fail(w, FACTORS, 0, -1, "they are of the losses of pairs, and not of further tokens");
    if (qd_proof_has(w, FACTORS))
        QD_TRY(read_reduced(w, FACTORS, &logits));
    proof_value losses = of_columns(w, &logits, CODE_SAME);
    QD_TRY(qd_proof_write_rows(w, LOSSES, w->op->first, w->op->m, &losses));
    logits.gradient = true;
    return qd_proof_write_rows(w, LOGITS, 0, w->op->m, &logits);
}

qd_status qd_proof_rule_loss_sum(proof_walk *w)
{
    proof_value losses;
    QD_TRY(qd_proof_read(w, LOSSES, &losses));
    QD_TRY(qd_proof_no_sum(w, LOSSES, &losses));
    QD_TRY(in_turn(w));
    if (w->program->strategy.preference.kind)
        return qd_proof_fail(w, LOSSES, 0, -1, "losses of tokens are added, and not those of pairs");
    return add_loss(w, LOSSES, &losses);
}

qd_status qd_proof_rule_loss_rows(proof_walk *w)
{
    proof_value logits;
    QD_TRY(read_logits(w, &logits));
    QD_TRY(read_reduced(w, TOP, &logits));
    QD_TRY(read_reduced(w, SUMS, &logits));
    QD_TRY(in_turn(w));
    proof_value losses = of_columns(w, &logits, CODE_SAME);
    return qd_proof_write_rows(w, LOSSES, w->op->first, w->op->m, &losses);
}

/* The rows of a sequence are on the ranks of cp: each has a term of its sum. Ranks of dp have other
 * sequences. */
qd_status qd_proof_rule_pair_sums(proof_walk *w)
{
    proof_value losses;
    QD_TRY(qd_proof_read(w, LOSSES, &losses));
    QD_TRY(qd_proof_no_sum(w, LOSSES, &losses));
    proof_place *place = &losses.place[0];
    for (int d = 0; d < w->proof->frames[place->fold].count; d++)
        if (place->code[d] == CODE_ROWS && qd_proof_digit_axis(w->proof, d) == QD_AXIS_CP)
            place->code[d] = CODE_SUM;
    return qd_proof_write(w, SCORES, &losses);
}

/* Every rank of cp has the scores of all sequences; each counts the pairs that begin in its
 * rows. */
qd_status qd_proof_rule_pair_loss(proof_walk *w)
{
    proof_value scores, rows;
    QD_TRY(qd_proof_read(w, SCORES, &scores));
    QD_TRY(qd_proof_no_sum(w, SCORES, &scores));
    QD_TRY(qd_proof_read(w, INPUT, &rows));
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        proof_code wanted = qd_proof_digit_axis(w->proof, d) == QD_AXIS_CP ? CODE_SAME : (proof_code)rows.place[0].code[d];
        if (scores.place[0].code[d] != wanted)
            return qd_proof_fail(w, SCORES, FOLD_DENSE, d, "they are not those of this rank's sequences");
    }
    proof_value factors = qd_proof_value_of(w, &rows.place[0], false);
    QD_TRY(qd_proof_write(w, FACTORS, &factors));
    return add_loss(w, SCORES, &factors);
}

static qd_status exchange(proof_walk *w, proof_operand operand, proof_value *v, proof_code from, proof_code to)
{
    const qd_op_exchange *e = &w->op->exchange;
    char group[48];
    qd_group_name(w->proof->mesh, e->group, group, sizeof group);
    if (e->index < 0 || e->index >= w->program->group_count || !qd_group_equal(w->program->groups[e->index], e->group))
        return qd_proof_fail(w, operand, 0, -1, "it is exchanged in a group that is not the one the op names, %s", group);
    for (int part = 0; part < v->parts; part++) {
        proof_place *place = &v->place[part];
        int digit = qd_proof_place_exchange(w->proof, place, e->group, from, to);
        if (digit == -2)
            return qd_proof_fail(w, operand, 0, -1, "it is exchanged over %s, along which it is not placed in one way", group);
        if (digit >= 0 && from == CODE_SUM && place->code[digit] == CODE_SAME)
            return qd_proof_fail(w, operand, place->fold, digit, "it is replicated: summing it over %s multiplies it by %d", group,
                                 qd_proof_digit_size(w->proof, place->fold, digit));
        if (digit >= 0)
            return qd_proof_fail(w, operand, place->fold, digit, "%s over %s needs %s, but it is %s", qd_op_name(w->op->kind), group,
                                 qd_proof_code_text(from), qd_proof_code_text((proof_code)place->code[digit]));
    }
    return QD_OK;
}

qd_status qd_proof_rule_all_reduce(proof_walk *w)
{
    const qd_op *op = w->op;
    proof_value v;
    if (op->exchange.count != op->m * op->n)
        return qd_proof_fail(w, X, 0, -1, "%lld of %lld elements are reduced", (long long)op->exchange.count, (long long)(op->m * op->n));
    QD_TRY(qd_proof_read_rows(w, X, op->first, op->m, &v));
    if (op->exchange.reduce != QD_SUM && op->exchange.reduce != QD_MAX)
        return qd_proof_fail(w, X, 0, -1, "it is reduced by an operation that gradients cannot use");
    QD_TRY(exchange(w, X, &v, op->exchange.reduce == QD_MAX ? CODE_MAX : CODE_SUM, CODE_SAME));
    return qd_proof_write_rows(w, X, op->first, op->m, &v);
}

/* A gather or scatter moves one piece of each rank's rows: the piece of rank r; `own`: relative to
 * this rank's own rows. */
static void piece_rows(const proof_walk *w, int r, bool own, int64_t *first, int64_t *rows)
{
    const qd_op_exchange *e = &w->op->exchange;
    int64_t begin, count, at;
    qd_slice(w->op->m, e->group.size, r, &begin, &count);
    qd_slice(count, e->pieces, e->piece, &at, rows);
    *first = (own ? 0 : begin) + at;
}

static qd_status own_rows(const proof_walk *w, proof_operand operand, int64_t *first, int64_t *rows)
{
    const qd_op_exchange *e = &w->op->exchange;
    int slot = qd_proof_slot_of(w->op, operand), self = qd_group_coord(w->proof->mesh, e->group, w->program->rank);
    int64_t begin, count, all = 0, at;
    qd_slice(w->op->m, e->group.size, self, &begin, &count);
    for (int r = 0; r < e->group.size; r++) {
        piece_rows(w, r, false, &at, rows);
        all += *rows;
    }
    if (slot < 0 || w->ops->slots[slot].rows != count || e->count != all * w->op->n)
        return qd_proof_fail(w, operand, 0, -1, "it is %lld rows of this rank, but the exchange has %lld for it",
                             slot < 0 ? 0LL : (long long)w->ops->slots[slot].rows, (long long)count);
    piece_rows(w, self, true, first, rows);
    return QD_OK;
}

qd_status qd_proof_rule_all_gather(proof_walk *w)
{
    proof_value v;
    int64_t first, rows;
    QD_TRY(own_rows(w, X, &first, &rows));
    QD_TRY(qd_proof_read_rows(w, X, first, rows, &v));
    QD_TRY(exchange(w, X, &v, CODE_ROWS, CODE_SAME));
    for (int r = 0; r < w->op->exchange.group.size; r++) {
        piece_rows(w, r, false, &first, &rows);
        if (rows > 0)
            QD_TRY(qd_proof_write_rows(w, Y, first, rows, &v));
    }
    return QD_OK;
}

qd_status qd_proof_rule_reduce_scatter(proof_walk *w)
{
    proof_value v, other;
    int64_t first, rows;
    bool any = false;
    if (w->op->exchange.reduce != QD_SUM)
        return qd_proof_fail(w, X, 0, -1, "it is reduced by an operation that gradients cannot use");
    for (int r = 0; r < w->op->exchange.group.size; r++) {
        piece_rows(w, r, false, &first, &rows);
        if (rows == 0)
            continue;
        QD_TRY(qd_proof_read_rows(w, X, first, rows, &other));
        if (any)
            QD_TRY(qd_proof_same_place(w, X, &other, X, &v));
        v = other;
        any = true;
    }
    if (!any)
        return QD_OK;
    QD_TRY(exchange(w, X, &v, CODE_SUM, CODE_ROWS));
    QD_TRY(own_rows(w, Y, &first, &rows));
    return qd_proof_write_rows(w, Y, first, rows, &v);
}
