/* Proves that the backward pass of an op list is the derivative of its forward pass, operand by
 * operand.
 *
 * Values of the forward pass are numbered by how they are computed: the op and the numbers of its
 * operands. Communication and recompute keep the number. Each op that reads a value is one of its
 * *uses*. A gradient belongs to one value and contains the terms of some of its uses. An op of the
 * backward pass reads the gradient of the result of one op of the forward pass, which must contain
 * the terms of all uses, and the operands of that op; it produces the terms of one use of each
 * operand. A residual is a sum: the gradient of the sum is a term of both gradients. */
#include "spec/proof/derivative_impl.h"

#include <stdlib.h>

known qd_known_at(const derivation *d, proof_operand operand)
{
    int slot = qd_proof_slot_of(d->w->op, operand);
    return slot < 0 ? (known){0} : d->slots[slot];
}

void qd_known_set(const derivation *d, proof_operand operand, known k)
{
    int slot = qd_proof_slot_of(d->w->op, operand);
    if (slot >= 0)
        d->slots[slot] = k;
}

void qd_known_set_value(const derivation *d, proof_operand operand, uint64_t value)
{
    qd_known_set(d, operand, (known){.value = value});
}

known qd_known_gradient(uint64_t value, uint64_t term)
{
    return (known){.value = value, .gradient = true, .terms = {term}, .count = 1};
}

/* The parameter of a slot, of its values or of its gradient. */
uint64_t qd_known_param(const derivation *d, proof_operand operand)
{
    int slot = qd_proof_source(d->w->ops, qd_proof_slot_of(d->w->op, operand));
    return slot < 0 ? 0 : 1 + (uint64_t)d->w->ops->slots[slot].param;
}

static bool grow(void **array, int count, int *capacity, size_t size)
{
    if (count < *capacity)
        return true;
    int wanted = *capacity ? 2 * *capacity : 64;
    void *larger = realloc(*array, (size_t)wanted * size);
    if (!larger)
        return false;
    *array = larger;
    *capacity = wanted;
    return true;
}

qd_status qd_derivation_uses(derivation *d, uint64_t value, uint64_t result)
{
    for (int i = 0; i < d->use_count; i++)
        if (value == 0 || (d->uses[i].value == value && d->uses[i].result == result))
            return QD_OK;
    if (!grow((void **)&d->uses, d->use_count, &d->use_capacity, sizeof *d->uses))
        return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    d->uses[d->use_count++] = (use){value, result};
    return QD_OK;
}

qd_status qd_derivation_note(derivation *d, fact f)
{
    QD_TRY(qd_derivation_uses(d, f.x, f.y));
    QD_TRY(qd_derivation_uses(d, f.add, f.y));
    QD_TRY(qd_derivation_uses(d, f.weight, f.y));
    QD_TRY(qd_derivation_uses(d, f.more, f.y));
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == f.kind && d->facts[i].y == f.y)
            return QD_OK; /* recomputed, or for other rows */
    if (!grow((void **)&d->facts, d->fact_count, &d->fact_capacity, sizeof *d->facts))
        return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    d->facts[d->fact_count++] = f;
    return QD_OK;
}

const fact *qd_derivation_find(const derivation *d, fact_kind kind, uint64_t key)
{
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == kind && d->facts[i].key == key)
            return &d->facts[i];
    return NULL;
}

const fact *qd_derivation_find_result(const derivation *d, fact_kind kind, uint64_t y)
{
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == kind && d->facts[i].y == y)
            return &d->facts[i];
    return NULL;
}

void qd_derivation_trains(derivation *d, fact_kind kind, uint64_t y)
{
    for (int i = 0; i < d->fact_count; i++)
        d->facts[i].trains = d->facts[i].trains || (d->facts[i].kind == kind && d->facts[i].y == y);
}

qd_status qd_derivation_fail(const derivation *d, proof_operand operand, const char *why)
{
    return qd_proof_fail(d->w, operand, 0, -1, "%s", why);
}

static bool has_term(const known *g, uint64_t term)
{
    for (int i = 0; i < g->count; i++)
        if (g->terms[i] == term)
            return true;
    return false;
}

/* Whether a gradient of `value` has the terms of all of its uses. */
bool qd_derivation_has_all(const derivation *d, const known *g, uint64_t value)
{
    for (int i = 0; i < d->use_count; i++)
        if (d->uses[i].value == value && !has_term(g, d->uses[i].result))
            return false;
    return true;
}

/* Interprets a gradient as one of `value`: it is one, or it is the gradient of a sum with that
 * value as an operand (or of a sum of sums) and thus one term. */
bool qd_derivation_as_gradient(const derivation *d, const known *g, uint64_t value, known *out)
{
    *out = *g;
    if (g->value == value)
        return true;
    for (int i = 0; i < d->fact_count; i++) {
        const fact *f = &d->facts[i];
        known sum;
        if ((f->add == value || (f->kind == FACT_SUM && f->x == value)) && qd_derivation_as_gradient(d, g, f->y, &sum) &&
            qd_derivation_has_all(d, &sum, f->y)) {
            *out = qd_known_gradient(value, f->y);
            return true;
        }
    }
    return false;
}

/* Adds the terms that a gradient has for `value`. */
qd_status qd_derivation_join(const derivation *d, proof_operand operand, known from, uint64_t value, known *to)
{
    known own;
    if (!from.gradient || from.value == 0 || !qd_derivation_as_gradient(d, &from, value, &own))
        return qd_derivation_fail(d, operand, "it is not the gradient of the value that it is used for");
    for (int i = 0; i < own.count; i++) {
        if (has_term(to, own.terms[i]))
            return qd_derivation_fail(d, operand, "a term of a gradient is added twice");
        if (to->count == TERMS_MOST)
            return qd_derivation_fail(d, operand, "its value has more uses than the proof can follow");
        to->terms[to->count++] = own.terms[i];
    }
    return QD_OK;
}

/* Checks that an operand is the whole gradient of `value`. */
qd_status qd_derivation_whole(const derivation *d, proof_operand operand, uint64_t value)
{
    known sum = {.value = value, .gradient = true};
    QD_TRY(qd_derivation_join(d, operand, qd_known_at(d, operand), value, &sum));
    return qd_derivation_has_all(d, &sum, value) ? QD_OK : qd_derivation_fail(d, operand, "it lacks the terms of some uses of its value");
}

qd_status qd_derivation_is_value(const derivation *d, proof_operand operand, uint64_t value)
{
    known k = qd_known_at(d, operand);
    return !k.gradient && k.value == value ? QD_OK : qd_derivation_fail(d, operand, "it is not an operand of the op of the forward pass");
}

qd_status qd_derivation_no_fact(const derivation *d)
{
    return qd_derivation_fail(d, NO_OPERAND, "it is not the gradient of any op of the forward pass");
}

static qd_status follow(derivation *d, unsigned phases)
{
    for (int i = 0; i < d->w->ops->op_count; i++) {
        d->w->op = &d->w->ops->ops[i];
        d->w->index = i;
        if (qd_op_runs(d->w->op, phases))
            QD_TRY(qd_derivation_op(d));
    }
    return QD_OK;
}

/* Ports: the input is a value of its own, and the output is used by the next module. */
static qd_status ports(derivation *d, bool begin)
{
    uint64_t out = 0;
    for (int i = 0; i < d->w->ops->slot_count; i++) {
        const qd_slot *slot = &d->w->ops->slots[i];
        if (begin)
            d->slots[i].value = slot->kind == QD_SLOT_IN      ? thing(PORT_IN)
                                : slot->kind == QD_SLOT_INPUT ? thing(INPUTS)
                                : slot->kind == QD_SLOT_ROPE  ? number(ROPE_TABLE, (uint64_t)slot->param, 0, 0)
                                                              : 0;
        if (!begin && slot->kind == QD_SLOT_OUT)
            out = d->slots[i].value;
    }
    for (int i = 0; i < d->w->ops->slot_count && !begin && out != 0; i++)
        if (d->w->ops->slots[i].kind == QD_SLOT_GRAD_OUT)
            d->slots[i] = qd_known_gradient(out, PORT_TERM);
    return qd_derivation_uses(d, out, PORT_TERM);
}

static qd_status input_gradient(const derivation *d)
{
    for (int i = 0; i < d->w->ops->slot_count; i++) {
        const known *g = &d->slots[i];
        if (d->w->ops->slots[i].kind == QD_SLOT_GRAD_IN && (g->value != thing(PORT_IN) || !qd_derivation_has_all(d, g, g->value)))
            return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s, value '%s': it is not the gradient of the module's input with all terms",
                           d->w->program->rank, d->w->ledger->modules[d->w->class_->module].name, d->w->ops->slots[i].name);
    }
    return QD_OK;
}

/* Several ops may read one parameter (the token table and the head's matrix of prediction modules):
 * its gradient has a part of each. */
static qd_status shared_gradients(const derivation *d)
{
    const qd_module *module = &d->w->ledger->modules[d->w->class_->module];
    for (int i = 0; i < d->fact_count; i++)
        for (int k = 0; k < d->fact_count && d->facts[i].trains; k++) {
            const fact *f = &d->facts[k];
            bool reads = f->kind == FACT_LINEAR || f->kind == FACT_EMBED || f->kind == FACT_HEAD_LOSS;
            if (reads && f->key == d->facts[i].key && !f->trains)
                return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s: the gradient of %s has no part of one of the ops that read it",
                               d->w->program->rank, module->name, d->w->ledger->params[module->param_begin + (int)f->key - 1].name);
        }
    return QD_OK;
}

qd_status qd_proof_derivative(proof_walk *w)
{
    derivation d = {.w = w, .slots = calloc((size_t)w->ops->slot_count + 1, sizeof *d.slots)};
    qd_status status = d.slots ? ports(&d, true) : QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    if (status == QD_OK)
        status = follow(&d, QD_PHASES_ONCE);
    if (status == QD_OK)
        status = follow(&d, 1u << QD_PHASE_FORWARD);
    if (status == QD_OK)
        status = ports(&d, false);
    if (status == QD_OK)
        status = follow(&d, 1u << QD_PHASE_INPUT | 1u << QD_PHASE_WEIGHT);
    if (status == QD_OK)
        status = input_gradient(&d);
    if (status == QD_OK)
        status = shared_gradients(&d);
    free(d.slots);
    free(d.facts);
    free(d.uses);
    return status;
}

qd_status qd_derivation_pairs(derivation *d, bool sums)
{
    QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
    QD_TRY(qd_derivation_is_value(d, sums ? LOSSES : SCORES, sums ? number(ROW_LOSSES, 0, 0, 0) : thing(PAIR_SCORES)));
    qd_known_set_value(d, sums ? SCORES : FACTORS, thing(sums ? PAIR_SCORES : PAIR_FACTORS));
    return QD_OK;
}

qd_status qd_derivation_bias_sums(const derivation *d, known g, proof_operand operand)
{
    uint64_t bias = qd_known_param(d, operand);
    known own;
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == FACT_LINEAR && d->facts[i].bias == bias && qd_derivation_as_gradient(d, &g, d->facts[i].y, &own) &&
            qd_derivation_has_all(d, &own, d->facts[i].y))
            return QD_OK;
    return bias == 0 ? QD_OK : qd_derivation_fail(d, operand, "the rows that are summed are not those of the gradient of this bias");
}

qd_status qd_derivation_bias_grad(const derivation *d, known g)
{
    uint64_t bias = qd_known_param(d, BIAS_GRAD);
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == FACT_LINEAR && d->facts[i].bias == bias)
            return qd_derivation_bias_sums(d, g, BIAS_GRAD);
    return QD_OK;
}
