/* Rules of adapters. Each part is a GEMM of its own: a narrow operand, one matrix per part, and
 * columns of a wide operand. Queries, and keys and values, may be placed differently; so may their
 * matrices. */
#include "spec/proof/proof_impl.h"

/* The place of the columns that part `part` covers in a wide value. */
static proof_place *place_of_part(const proof_walk *w, proof_value *wide, int part)
{
    return &wide->place[wide->parts > 1 && w->op->part_at[part] >= wide->split];
}

static proof_place place_of_matrix(const proof_walk *w, proof_operand operand, int part)
{
    const qd_slot *slot = &w->ops->slots[qd_proof_slot_of(w->op, operand)];
    int first = w->ledger->modules[w->class_->module].param_begin + slot->param;
    return qd_proof_param_place(w->proof, w->ledger, first + (w->ledger->params[first].expert < 0 ? part : 0));
}

/* Reads an operand; with experts, in their fold and with rows that are at their experts. */
static qd_status read(proof_walk *w, proof_operand operand, bool gradient, proof_value *v)
{
    QD_TRY(qd_proof_read(w, operand, v));
    QD_TRY(qd_proof_is_gradient(w, operand, v, gradient));
    if (v->rotated && gradient)
        return qd_proof_fail(w, operand, 0, -1, "positions are still in the gradient of queries and keys");
    return qd_proof_has(w, COUNTS) ? qd_proof_with_experts(w, operand, v) : qd_proof_in_fold(w, operand, v, FOLD_DENSE);
}

static qd_status misplaced(const proof_walk *w, proof_operand operand, const proof_place *place, int digit, proof_code matrix)
{
    return qd_proof_fail(w, operand, place->fold, digit, "it is %s, but the adapter's matrix is %s",
                         qd_proof_code_text((proof_code)place->code[digit]), qd_proof_code_text(matrix));
}

qd_status qd_proof_rule_adapt(proof_walk *w)
{
    proof_value x, add, weight;
    QD_TRY(read(w, X, false, &x));
    QD_TRY(read(w, ADD, false, &add));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, ADD, &add));
    QD_TRY(qd_proof_param(w, WEIGHT, &weight));
    if (x.parts > 1 || x.stage != add.stage)
        return qd_proof_fail(w, X, 0, -1, "its rows or columns are not those of the layer's result");
    for (int part = 0; part < w->op->parts; part++) {
        proof_place matrix = place_of_matrix(w, WEIGHT, part), *wide = place_of_part(w, &add, part);
        if (!qd_proof_place_convert(w->proof, &matrix, x.place[0].fold))
            return qd_proof_fail(w, WEIGHT, 0, -1, "the adapter's matrix is not placed like its rows");
        for (int d = 0; d < w->proof->frames[wide->fold].count; d++) {
            proof_code code = qd_proof_code_linear((proof_code)x.place[0].code[d], (proof_code)matrix.code[d]);
            if (code == CODE_PART)
                return misplaced(w, X, &x.place[0], d, (proof_code)matrix.code[d]);
            if (code != wide->code[d])
                return qd_proof_fail(w, ADD, wide->fold, d, "it is %s, but what the adapter adds is %s",
                                     qd_proof_code_text((proof_code)wide->code[d]), qd_proof_code_text(code));
        }
    }
    add.overflow = add.overflow || x.overflow;
    return qd_proof_write(w, Y, &add);
}

qd_status qd_proof_rule_adapt_dx(proof_walk *w)
{
    proof_value dy, weight;
    QD_TRY(read(w, DY, true, &dy));
    QD_TRY(qd_proof_param(w, WEIGHT, &weight));
    proof_value dx = dy;
    dx.parts = 1;
    for (int part = 0; part < w->op->parts; part++) {
        proof_place matrix = place_of_matrix(w, WEIGHT, part), *wide = place_of_part(w, &dy, part);
        if (!qd_proof_place_convert(w->proof, &matrix, wide->fold))
            return qd_proof_fail(w, WEIGHT, 0, -1, "the adapter's matrix is not placed like its rows");
        for (int d = 0; d < w->proof->frames[wide->fold].count; d++) {
            proof_code code = qd_proof_code_linear_dx((proof_code)wide->code[d], (proof_code)matrix.code[d]);
            if (code == CODE_PART)
                return misplaced(w, DY, wide, d, (proof_code)matrix.code[d]);
            if (part > 0 && code != dx.place[0].code[d])
                return qd_proof_fail(w, DY, wide->fold, d, "parts give gradients that are %s and %s",
                                     qd_proof_code_text((proof_code)dx.place[0].code[d]), qd_proof_code_text(code));
            dx.place[0].code[d] = dx.place[1].code[d] = (uint8_t)code;
        }
    }
    return qd_proof_write(w, DX, &dx);
}

qd_status qd_proof_rule_adapt_dw(proof_walk *w)
{
    proof_value dy, x;
    QD_TRY(read(w, DY, true, &dy));
    QD_TRY(read(w, X, false, &x));
    proof_place places[2];
    for (int part = 0; part < w->op->parts; part++) {
        proof_place place = *place_of_part(w, &dy, part);
        for (int d = 0; d < w->proof->frames[place.fold].count; d++) {
            proof_code code = qd_proof_code_linear_dw((proof_code)place.code[d], (proof_code)x.place[0].code[d]);
            if (code == CODE_PART)
                return qd_proof_fail(w, X, place.fold, d, "it is %s, but the gradient of the result is %s",
                                     qd_proof_code_text((proof_code)x.place[0].code[d]),
                                     qd_proof_code_text((proof_code)place.code[d]));
            place.code[d] = (uint8_t)code;
        }
        if (part > 1 && !qd_proof_place_equal(w->proof, &place, &places[1]))
            return qd_proof_fail(w, DY, 0, -1, "its parts are placed in more than two ways");
        places[part > 0] = place;
        if (part == 0)
            places[1] = place;
    }
    QD_TRY(qd_proof_write_param_grad(w, WEIGHT_GRAD, places));
    if (dy.overflow || x.overflow)
        qd_proof_note_overflow(w);
    return QD_OK;
}
