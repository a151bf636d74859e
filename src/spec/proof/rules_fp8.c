/* Rules of fp8: casts keep the placement of what they cast, GEMMs read copies in the form that
 * they need, and no other op reads one. */
#include "base/fp8.h"
#include "spec/proof/derivative_impl.h"

int qd_proof_source(const qd_module_class *ops, int slot)
{
    if (slot < 0 || !qd_dtype_is_fp8(ops->slots[slot].dtype))
        return slot;
    for (int i = 0; i < ops->op_count; i++)
        if (ops->ops[i].kind == QD_OP_CAST && (ops->ops[i].slot[QD_CAST_Y] == slot || ops->ops[i].slot[QD_CAST_YT] == slot))
            return ops->ops[i].slot[QD_CAST_X];
    return slot;
}

/* The value of what is cast: a parameter, or a local value. A scale belongs to one rank, so what
 * is still to be summed over ranks must not be rounded with it. */
static qd_status read_source(proof_walk *w, proof_value *x)
{
    if (w->ops->slots[qd_proof_slot_of(w->op, X)].kind == QD_SLOT_PARAM)
        return qd_proof_param(w, X, x);
    QD_TRY(qd_proof_read(w, X, x));
    return qd_proof_no_sum(w, X, x);
}

qd_status qd_proof_rule_amax(proof_walk *w)
{
    proof_value x;
    QD_TRY(read_source(w, &x));
    proof_value amax = qd_proof_value_of(w, &x.place[0], x.gradient);
    return qd_proof_write(w, STATE, &amax);
}

qd_status qd_proof_rule_cast(proof_walk *w)
{
    proof_value x, amax;
    const proof_operand copies[] = {Y, SUMS};
    QD_TRY(read_source(w, &x));
    QD_TRY(qd_proof_read(w, STATE, &amax));
    x.by = w->index;
    for (int i = 0; i < 2; i++) {
        if (!qd_proof_has(w, copies[i]))
            continue;
        const qd_slot *copy = &w->ops->slots[qd_proof_slot_of(w->op, copies[i])];
        if (!qd_dtype_is_fp8(copy->dtype) || copy->transposed != (copies[i] == SUMS))
            return qd_proof_fail(w, copies[i], 0, -1, "it is not a copy in fp8 of the form that this operand has");
        QD_TRY(qd_proof_write(w, copies[i], &x));
    }
    return QD_OK;
}

/* Whether operands of a GEMM are transposed copies, where they are in fp8. */
static const struct {
    proof_operand operand[2];
    bool transposed[2], gemm;
} forms[QD_OP_KIND_COUNT] = {
    [QD_OP_LINEAR] = {{X, WEIGHT}, {false, false}, true},
    [QD_OP_LINEAR_ADD] = {{X, WEIGHT}, {false, false}, true},
    [QD_OP_LINEAR_DX] = {{DY, WEIGHT}, {false, true}, true},
    [QD_OP_LINEAR_DW] = {{DY, X}, {true, true}, true},
};

qd_status qd_proof_formats(const proof_walk *w)
{
    int fp8 = 0, wide = 0;
    for (int j = 0; j < QD_OP_SLOTS; j++)
        fp8 += w->op->slot[j] >= 0 && qd_dtype_is_fp8(w->ops->slots[w->op->slot[j]].dtype);
    if (fp8 == 0 || w->op->kind == QD_OP_CAST)
        return QD_OK;
    if (!forms[w->op->kind].gemm || fp8 != 2)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "it reads a value in fp8, which only a GEMM of two such values does");
    for (int i = 0; i < 2; i++) {
        const qd_slot *slot = &w->ops->slots[qd_proof_slot_of(w->op, forms[w->op->kind].operand[i])];
        wide += slot->dtype == QD_F8E5M2;
        if (!qd_dtype_is_fp8(slot->dtype) || slot->transposed != forms[w->op->kind].transposed[i])
            return qd_proof_fail(w, forms[w->op->kind].operand[i], 0, -1, "the GEMM needs it %s", forms[w->op->kind].transposed[i]
                                                                                                  ? "transposed" : "as it is");
    }
    return wide < 2 ? QD_OK : qd_proof_fail(w, NO_OPERAND, 0, -1, "both of its operands are E5M2");
}

/* A copy in fp8 stands for its source, and its scale comes from the largest magnitude of that. */
qd_status qd_derivation_fp8(derivation *d)
{
    known x = qd_known_at(d, X);
    bool param = d->w->ops->slots[qd_proof_slot_of(d->w->op, X)].kind == QD_SLOT_PARAM;
    uint64_t largest = number(LARGEST, x.value, x.gradient, param ? qd_known_param(d, X) : 0);
    if (d->w->op->kind == QD_OP_AMAX) {
        qd_known_set_value(d, STATE, largest);
        return QD_OK;
    }
    QD_TRY(qd_derivation_is_value(d, STATE, largest));
    qd_known_set(d, Y, x);
    qd_known_set(d, SUMS, x);
    return QD_OK;
}
