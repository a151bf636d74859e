/* Rules of queries and keys between their projection and attention: clipping, and the norms over
 * all queries of a row, and over all keys. Under tp a rank has some columns of both vectors, so the
 * squares, and the dots of the backward pass, are partial sums. Keys that several ranks hold must
 * be counted by exactly one of them: in the squares, and in the gradient of x, which these ranks
 * have as terms of a sum. */
#include "spec/proof/proof_impl.h"

static const proof_place *part_of(const proof_value *v, int part)
{
    return &v->place[part < v->parts ? part : 0];
}

/* The placement of sums over the columns of queries. */
static proof_place over_columns(const proof_walk *w, const proof_place *x)
{
    proof_place place = *x;
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        if (place.code[d] == CODE_COLS)
            place.code[d] = CODE_SUM;
    return place;
}

/* Keys are counted once: by every rank that has keys of its own, or by one of the ranks that
 * `sharing` names with CODE_SUM. */
static qd_status keys_once(const proof_walk *w, proof_operand operand, const proof_place *sharing)
{
    int ranks, shared = -1;
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        shared = sharing->code[d] == CODE_SUM ? d : shared;
    if (shared < 0)
        return w->op->k > 0 ? QD_OK : qd_proof_fail(w, operand, 0, -1, "no rank counts this rank's keys");
    int counting = qd_proof_present(w, sharing, NO_OPERAND, &ranks);
    if (counting < 0)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "ranks that share its result have a different op at this position");
    if (counting != 1)
        return qd_proof_fail(w, operand, FOLD_DENSE, shared, "%d of %d ranks with the same keys count them", counting, ranks);
    return QD_OK;
}

/* The digits of tp on which queries differ and keys do not. */
static proof_place shared_keys(const proof_walk *w, const proof_value *x)
{
    proof_place place = {.fold = FOLD_DENSE};
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        place.code[d] = part_of(x, 0)->code[d] == CODE_COLS && part_of(x, 1)->code[d] == CODE_SAME ? CODE_SUM : CODE_SAME;
    return place;
}

static qd_status read_x(proof_walk *w, proof_value *x)
{
    QD_TRY(qd_proof_read(w, X, x));
    QD_TRY(qd_proof_no_sum(w, X, x));
    return qd_proof_is_gradient(w, X, x, false);
}

/* Two numbers per row, whole on all ranks that have columns of the row. */
static qd_status read_sums(proof_walk *w, proof_operand operand, const proof_value *x)
{
    proof_value sums, wanted = qd_proof_value_of(w, part_of(x, 0), false);
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        if (wanted.place[0].code[d] == CODE_COLS)
            wanted.place[0].code[d] = CODE_SAME;
    QD_TRY(qd_proof_read(w, operand, &sums));
    QD_TRY(qd_proof_no_sum(w, operand, &sums));
    return qd_proof_same_place(w, operand, &sums, X, &wanted);
}

/* Each rank has the elements of gamma for its columns. */
static qd_status check_gammas(proof_walk *w, const proof_value *x)
{
    static const proof_operand gammas[] = {GAMMA, K_GAMMA};
    for (int part = 0; part < 2; part++) {
        proof_value gamma;
        QD_TRY(qd_proof_param(w, gammas[part], &gamma));
        for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
            int of_x = part_of(x, part)->code[d], has = gamma.place[0].code[d];
            if (has != (of_x == CODE_COLS ? CODE_ROWS : CODE_SAME))
                return qd_proof_fail(w, gammas[part], FOLD_DENSE, d, "the weight is %s, but what it scales is %s",
                                     qd_proof_code_text((proof_code)has), qd_proof_code_text((proof_code)of_x));
        }
    }
    return QD_OK;
}

qd_status qd_proof_rule_qk_squares(proof_walk *w)
{
    proof_value x;
    QD_TRY(read_x(w, &x));
    proof_place sharing = shared_keys(w, &x), place = over_columns(w, part_of(&x, 0));
    QD_TRY(keys_once(w, X, &sharing));
    proof_value sums = qd_proof_value_of(w, &place, false);
    return qd_proof_write(w, STATE, &sums);
}

qd_status qd_proof_rule_qk_norm(proof_walk *w)
{
    proof_value x;
    QD_TRY(read_x(w, &x));
    QD_TRY(read_sums(w, STATE, &x));
    QD_TRY(check_gammas(w, &x));
    return qd_proof_write(w, QKV, &x);
}

/* Reads the gradient of the norms' result. That of shared keys is a sum over the ranks that share
 * them. */
static qd_status read_dy(proof_walk *w, const proof_value *x, proof_value *dy)
{
    QD_TRY(qd_proof_read(w, D_QKV, dy));
    QD_TRY(qd_proof_is_gradient(w, D_QKV, dy, true));
    if (dy->rotated)
        return qd_proof_fail(w, D_QKV, 0, -1, "positions are still in the gradient of queries and keys");
    for (int part = 0; part < 2; part++)
        for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
            int has = part_of(dy, part)->code[d], of_x = part_of(x, part)->code[d];
            if (has != of_x && !(part == 1 && has == CODE_SUM && of_x == CODE_SAME && part_of(x, 0)->code[d] == CODE_COLS))
                return qd_proof_fail(w, D_QKV, FOLD_DENSE, d, "it is %s, but the operand of the forward pass is %s",
                                     qd_proof_code_text((proof_code)has), qd_proof_code_text((proof_code)of_x));
        }
    return QD_OK;
}

/* Element by element: terms of a sum give terms of a sum. */
qd_status qd_proof_rule_clip_grad(proof_walk *w)
{
    proof_value x, dy;
    QD_TRY(read_x(w, &x));
    QD_TRY(read_dy(w, &x, &dy));
    return qd_proof_write(w, DX, &dy);
}

/* Linear in the gradient: terms of a sum give terms of a sum. */
qd_status qd_proof_rule_qk_dots(proof_walk *w)
{
    proof_value x, dy;
    QD_TRY(read_x(w, &x));
    QD_TRY(read_dy(w, &x, &dy));
    QD_TRY(check_gammas(w, &x));
    proof_place place = over_columns(w, part_of(&dy, 0)), keys = over_columns(w, part_of(&dy, 1));
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
        if (place.code[d] != keys.code[d])
            return qd_proof_fail(w, D_QKV, FOLD_DENSE, d, "the sums of queries are %s, but those of keys %s",
                                 qd_proof_code_text((proof_code)place.code[d]), qd_proof_code_text((proof_code)keys.code[d]));
    proof_value dots = qd_proof_value_of(w, &place, false);
    return qd_proof_write(w, DELTA, &dots);
}

qd_status qd_proof_rule_qk_norm_grad(proof_walk *w)
{
    static const proof_operand grads[] = {GAMMA_GRAD, K_GAMMA_GRAD};
    proof_value x, dy;
    QD_TRY(read_x(w, &x));
    QD_TRY(read_dy(w, &x, &dy));
    QD_TRY(read_sums(w, STATE, &x));
    QD_TRY(read_sums(w, DELTA, &x));
    QD_TRY(check_gammas(w, &x));
    QD_TRY(keys_once(w, D_QKV, part_of(&dy, 1)));
    for (int part = 0; part < 2; part++) {
        proof_place place = *part_of(&dy, part);
        for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++)
            place.code[d] = (uint8_t)qd_proof_code_row_sum((proof_code)place.code[d]);
        QD_TRY(qd_proof_write_param_grad(w, grads[part], (const proof_place[]){place, place}));
    }
    return qd_proof_write(w, DX, &dy);
}
