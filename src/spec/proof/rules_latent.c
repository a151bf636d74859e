/* Rules of latent attention: queries, keys and values by head from their parts. Heads are columns;
 * the rotary part of the key is one vector for all heads, so every rank has it whole, and a partial
 * sum of its gradient. */
#include "spec/proof/proof_impl.h"

/* Reads a part, which must be a value with the rows that attention gets. */
static qd_status read_part(proof_walk *w, proof_operand operand, proof_value *v)
{
    QD_TRY(qd_proof_read(w, operand, v));
    QD_TRY(qd_proof_is_gradient(w, operand, v, false));
    return qd_proof_no_sum(w, operand, v);
}

qd_status qd_proof_rule_latent_qkv(proof_walk *w)
{
    proof_value q, kv, k_rope;
    QD_TRY(read_part(w, X, &q));
    QD_TRY(read_part(w, KV, &kv));
    QD_TRY(read_part(w, ADD, &k_rope));
    QD_TRY(qd_proof_same_place(w, KV, &kv, X, &q));
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        int heads = q.place[0].code[d], shared = k_rope.place[0].code[d];
        if (shared != (heads == CODE_COLS ? CODE_SAME : heads))
            return qd_proof_fail(w, ADD, FOLD_DENSE, d, "it is %s, but the heads that share it are %s",
                                 qd_proof_code_text((proof_code)shared), qd_proof_code_text((proof_code)heads));
    }
    proof_value qkv = qd_proof_value_of(w, &q.place[0], false);
    qkv.rotated = true;
    return qd_proof_write(w, QKV, &qkv);
}

qd_status qd_proof_rule_latent_qkv_grad(proof_walk *w)
{
    proof_value d;
    QD_TRY(qd_proof_read(w, D_QKV, &d));
    QD_TRY(qd_proof_is_gradient(w, D_QKV, &d, true));
    QD_TRY(qd_proof_no_sum(w, D_QKV, &d));
    if (!d.rotated)
        return qd_proof_fail(w, D_QKV, 0, -1, "positions are removed twice from the gradient of queries and keys");
    proof_place place = d.place[0];
    for (int part = 0; part < d.parts; part++)
        if (!qd_proof_place_equal(w->proof, &d.place[part], &place))
            return qd_proof_fail(w, D_QKV, 0, -1, "the gradients of queries and of keys are placed differently");
    proof_value heads = qd_proof_value_of(w, &place, true);
    QD_TRY(qd_proof_write(w, D_Q, &heads));
    QD_TRY(qd_proof_write(w, D_KV, &heads));
    for (int i = 0; i < w->proof->frames[FOLD_DENSE].count; i++)
        if (place.code[i] == CODE_COLS)
            place.code[i] = CODE_SUM;
    proof_value sum = qd_proof_value_of(w, &place, true);
    return qd_proof_write(w, DX, &sum);
}

/* Generation, without gradients. */
qd_status qd_proof_rule_attention_latent(proof_walk *w)
{
    proof_value q, latent, k_rope;
    QD_TRY(read_part(w, X, &q));
    QD_TRY(read_part(w, KV, &latent));
    QD_TRY(read_part(w, ADD, &k_rope));
    proof_value o = qd_proof_value_of(w, &q.place[0], false);
    QD_TRY(qd_proof_write(w, SUMS, &latent));
    QD_TRY(qd_proof_write(w, STATE, &o));
    QD_TRY(qd_proof_write(w, STATE2, &o));
    return qd_proof_write(w, O, &o);
}
