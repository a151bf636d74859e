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

/* Writes the largest magnitude of x. */
static qd_status write_largest(proof_walk *w, const proof_value *x)
{
    proof_value amax = qd_proof_value_of(w, &x->place[0], x->gradient);
    amax.parts = x->parts;
    amax.place[1] = x->place[1];
    return qd_proof_write(w, STATE, &amax);
}

qd_status qd_proof_rule_amax(proof_walk *w)
{
    proof_value x;
    QD_TRY(read_source(w, &x));
    return write_largest(w, &x);
}

/* Writes a copy, whose scale follows from `amax`: the largest magnitude of all that the rank casts,
 * since that of fewer rows would let others exceed the format. */
static qd_status write_copy(proof_walk *w, proof_operand amax, const proof_value *x, proof_operand operand, bool transposed)
{
    proof_value largest, copy = *x;
    if (!qd_proof_has(w, operand))
        return QD_OK;
    const qd_slot *slot = &w->ops->slots[qd_proof_slot_of(w->op, operand)];
    if (!qd_dtype_is_fp8(slot->dtype) || slot->transposed != transposed)
        return qd_proof_fail(w, operand, 0, -1, "it is not a copy in fp8 of the form that this operand has");
    if ((slot->scaling == QD_FP8_TENSOR) != qd_proof_has(w, amax))
        return qd_proof_fail(w, operand, 0, -1, "its scale follows from a largest magnitude if it has only one");
    if (qd_proof_has(w, amax)) {
        QD_TRY(qd_proof_read(w, amax, &largest));
        QD_TRY(qd_proof_same_place(w, amax, &largest, X, x));
    }
    copy.by = w->index;
    return qd_proof_write(w, operand, &copy);
}

qd_status qd_proof_rule_cast(proof_walk *w)
{
    proof_value x;
    QD_TRY(read_source(w, &x));
    QD_TRY(write_copy(w, STATE, &x, Y, false));
    QD_TRY(write_copy(w, STATE, &x, SUMS, true));
    return qd_proof_bias_sums(w, X, &x);
}

qd_status qd_proof_rule_activation_fp8(proof_walk *w)
{
    bool largest = w->op->kind == QD_OP_ACTIVATION_AMAX || w->op->kind == QD_OP_ACTIVATION_GRAD_AMAX;
    proof_value x, dx;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    dx = x;
    if (qd_proof_has(w, DY)) {
        QD_TRY(qd_proof_read(w, DY, &dx));
        QD_TRY(qd_proof_is_gradient(w, DY, &dx, true));
        QD_TRY(qd_proof_no_sum(w, DY, &dx));
        QD_TRY(qd_proof_same_place(w, DY, &dx, X, &x));
    }
    if (largest)
        return write_largest(w, &dx);
    QD_TRY(write_copy(w, STATE, &dx, DX, false));
    QD_TRY(write_copy(w, STATE, &dx, DX_AGAIN, true));
    QD_TRY(write_copy(w, STATE, &x, Y, false));
    QD_TRY(write_copy(w, dx.gradient ? STATE2 : STATE, &x, SUMS, true));
    return qd_proof_bias_sums(w, DY, &dx);
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
    const qd_fp8 *as = &w->program->strategy.fp8;
    int fp8 = 0;
    for (int j = 0; j < QD_OP_SLOTS; j++)
        fp8 += w->op->slot[j] >= 0 && qd_dtype_is_fp8(w->ops->slots[w->op->slot[j]].dtype);
    bool casts = w->op->kind == QD_OP_CAST || w->op->kind == QD_OP_ACTIVATION_CAST || w->op->kind == QD_OP_ACTIVATION_GRAD_CAST;
    if (fp8 == 0 || casts)
        return QD_OK;
    if (!forms[w->op->kind].gemm || fp8 != 2)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "it reads a value in fp8, which only a GEMM of two such values does");
    for (int i = 0; i < 2; i++) {
        const proof_operand operand = forms[w->op->kind].operand[i];
        const bool transposed = forms[w->op->kind].transposed[i];
        const qd_slot *slot = &w->ops->slots[qd_proof_slot_of(w->op, operand)];
        if (!qd_dtype_is_fp8(slot->dtype) || slot->transposed != transposed)
            return qd_proof_fail(w, operand, 0, -1, "the GEMM needs it %s", transposed ? "transposed" : "as it is");
        if (slot->scaling != qd_fp8_scaling_of(as->recipe, operand == WEIGHT))
            return qd_proof_fail(w, operand, 0, -1, "its scales are not those of fp8.recipe");
        if (slot->dtype != (operand == DY ? as->grad : QD_F8E4M3))
            return qd_proof_fail(w, operand, 0, -1, "it is %s: gradients are in the format of fp8.grad, everything else in E4M3",
                                 qd_dtype_name(slot->dtype));
    }
    return QD_OK;
}

/* A copy in fp8 stands for its source, and its scale comes from the largest magnitude of that. */
static qd_status copy_known(const derivation *d, proof_operand amax, known x, uint64_t param, proof_operand plain, proof_operand transposed)
{
    if (!qd_proof_has(d->w, plain) && !qd_proof_has(d->w, transposed))
        return QD_OK;
    if (qd_proof_has(d->w, amax))
        QD_TRY(qd_derivation_is_value(d, amax, number(LARGEST, x.value, x.gradient, param)));
    qd_known_set(d, plain, x);
    qd_known_set(d, transposed, x);
    return QD_OK;
}

/* Casts of activations: x becomes the result, or the gradient of the input. */
static qd_status activation(derivation *d, known *x, known *result)
{
    const uint64_t sum = x->value, y = number(FACT_ACT, sum, 0, 0);
    *result = (known){.value = y};
    if (!qd_proof_has(d->w, DY)) {
        *x = *result;
        const fact made = {.kind = FACT_ACT, .key = sum, .x = sum, .y = y};
        return d->w->op->kind == QD_OP_ACTIVATION_CAST ? qd_derivation_note(d, made) : QD_OK;
    }
    if (!qd_derivation_find(d, FACT_ACT, sum))
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, DY, y));
    *x = qd_known_gradient(sum, y);
    return QD_OK;
}

qd_status qd_derivation_fp8(derivation *d)
{
    const qd_op_kind kind = d->w->op->kind;
    known x = qd_known_at(d, X), result = {0};
    bool is_param = d->w->ops->slots[qd_proof_slot_of(d->w->op, X)].kind == QD_SLOT_PARAM;
    uint64_t param = is_param ? qd_known_param(d, X) : 0;
    if (kind != QD_OP_AMAX && kind != QD_OP_CAST)
        QD_TRY(activation(d, &x, &result));
    if (kind == QD_OP_AMAX || kind == QD_OP_ACTIVATION_AMAX || kind == QD_OP_ACTIVATION_GRAD_AMAX) {
        qd_known_set_value(d, STATE, number(LARGEST, x.value, x.gradient, param));
        return QD_OK;
    }
    if (kind == QD_OP_ACTIVATION_GRAD_CAST) {
        QD_TRY(copy_known(d, STATE, x, 0, DX, DX_AGAIN));
        QD_TRY(copy_known(d, STATE2, result, 0, Y, SUMS));
    } else {
        QD_TRY(copy_known(d, STATE, x, param, Y, SUMS));
    }
    return qd_derivation_bias_grad(d, x);
}
