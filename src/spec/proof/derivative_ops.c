/* The role of each kind of op in the derivative: which value it computes, or the gradient of which
 * op it is. */
#include "spec/proof/derivative_impl.h"

#include <math.h>

/* y = x·Wᵀ (+ add); with an activation: applied to that sum. */
static qd_status linear(derivation *d)
{
    qd_op_kind kind = d->w->op->kind;
    bool active = kind == QD_OP_LINEAR_GELU || kind == QD_OP_EXPERTS_SWIGLU;
    uint64_t key = qd_known_param(d, WEIGHT), x = qd_known_at(d, X).value, add = qd_known_at(d, ADD).value, bias = qd_known_param(d, BIAS);
    uint64_t y = number(FACT_LINEAR, key, x, add) ^ bias << 8;
    if (qd_op_is_grouped(d->w->op->kind) || qd_proof_has(d->w, COUNTS))
        QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
    QD_TRY(qd_derivation_note(d, (fact){.kind = FACT_LINEAR, .key = key, .x = x, .add = add, .y = y, .bias = bias}));
    if (active) {
        uint64_t sum = y;
        y = number(FACT_ACT, sum, 0, 0);
        QD_TRY(qd_derivation_note(d, (fact){.kind = FACT_ACT, .key = sum, .x = sum, .y = y}));
        qd_known_set_value(d, SUMS, sum);
    }
    qd_known_set_value(d, Y, y);
    return QD_OK;
}

/* The GEMM with a weight whose gradient an op computes. Several GEMMs may read the head's matrix:
 * then the one whose result has the gradient DY. */
static const fact *linear_of(const derivation *d, proof_operand weight)
{
    uint64_t key = qd_known_param(d, weight), dy = qd_known_at(d, DY).value;
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == FACT_LINEAR && d->facts[i].key == key && d->facts[i].y == dy)
            return &d->facts[i];
    return qd_derivation_find(d, FACT_LINEAR, key);
}

static qd_status linear_dx(derivation *d)
{
    qd_op_kind kind = d->w->op->kind;
    const fact *f = linear_of(d, WEIGHT);
    if (!f)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, DY, f->y));
    if (qd_op_is_grouped(d->w->op->kind) || qd_proof_has(d->w, COUNTS))
        QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
    known dx = qd_known_gradient(f->x, f->y);
    if (kind == QD_OP_LINEAR_DX_GELU || kind == QD_OP_EXPERTS_DX_SWIGLU) { /* continue through the activation */
        proof_operand operand = kind == QD_OP_LINEAR_DX_GELU ? SUMS : X;
        uint64_t sum = qd_known_at(d, operand).value, y = number(FACT_ACT, sum, 0, 0);
        if (f->x != y || !qd_derivation_has_all(d, &dx, y))
            return qd_derivation_fail(d, operand, "it is not an operand of the op of the forward pass");
        dx = qd_known_gradient(sum, y);
        qd_known_set_value(d, Y, y);
    }
    qd_known_set(d, DX, dx);
    return QD_OK;
}

static qd_status linear_dw(derivation *d)
{
    const fact *f = linear_of(d, WEIGHT_GRAD);
    if (!f)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, DY, f->y));
    if (qd_op_is_grouped(d->w->op->kind) || qd_proof_has(d->w, COUNTS))
        QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
    qd_derivation_trains(d, FACT_LINEAR, f->y);
    if (f->bias != 0 && qd_proof_has(d->w, BIAS_GRAD) && qd_known_param(d, BIAS_GRAD) != f->bias)
        return qd_derivation_fail(d, BIAS_GRAD, "it is not the bias that the forward pass adds");
    return qd_derivation_is_value(d, X, f->x);
}

static qd_status norm(derivation *d)
{
    uint64_t x = qd_known_at(d, X).value, key = qd_known_param(d, GAMMA);
    if (qd_proof_has(d->w, ADD)) {
        uint64_t add = qd_known_at(d, ADD).value, sum = number(FACT_SUM, x, add, 0);
        QD_TRY(qd_derivation_note(d, (fact){.kind = FACT_SUM, .x = x, .add = add, .y = sum}));
        x = sum;
    }
    uint64_t y = number(FACT_NORM, key, x, qd_known_param(d, BETA));
    QD_TRY(qd_derivation_note(d, (fact){.kind = FACT_NORM, .key = key, .x = x, .y = y}));
    qd_known_set_value(d, SUMS, x);
    qd_known_set_value(d, STATE, number(NORM_STATE, y, 1, 0));
    qd_known_set_value(d, STATE2, number(NORM_STATE, y, 2, 0));
    qd_known_set_value(d, AMAX, number(LARGEST, y, false, 0));
    qd_known_set_value(d, Y, y);
    return QD_OK;
}

/* The bias is part of the grouped GEMM before it: its result contains it from here on. */
static qd_status experts_bias(derivation *d)
{
    uint64_t before = qd_known_at(d, X).value, bias = qd_known_param(d, BIAS), after = before ^ bias << 8;
    const fact *f = qd_derivation_find_result(d, FACT_LINEAR, before);
    QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
    if (qd_known_at(d, X).gradient || !f || f->bias != 0)
        return qd_derivation_fail(d, X, "it is not the result of a grouped GEMM without its bias");
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == FACT_LINEAR && d->facts[i].y == before) {
            d->facts[i].y = after;
            d->facts[i].bias = bias;
        }
    for (int i = 0; i < d->use_count; i++)
        d->uses[i].result = d->uses[i].result == before ? after : d->uses[i].result;
    qd_known_set_value(d, Y, after);
    return QD_OK;
}

/* The norm that a gradient belongs to: by its weight, or without one by its operand. */
static const fact *norm_of(const derivation *d)
{
    uint64_t weight = qd_known_param(d, GAMMA), x = qd_known_at(d, X).value;
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == FACT_NORM && d->facts[i].key == weight && (weight != 0 || d->facts[i].x == x))
            return &d->facts[i];
    return NULL;
}

/* Whether the gradient that an op writes is that of the parameter it reads, or there is none
 * because the parameter is frozen. */
static bool own_gradient(const derivation *d, proof_operand gradient, proof_operand param)
{
    int slot = qd_proof_slot_of(d->w->op, param);
    int first = d->w->ledger->modules[d->w->class_->module].param_begin;
    bool frozen = slot >= 0 && d->w->ledger->params[first + d->w->ops->slots[slot].param].frozen;
    return qd_known_param(d, gradient) == (frozen ? 0 : qd_known_param(d, param));
}

static qd_status norm_grad(derivation *d)
{
    const fact *f = norm_of(d);
    if (!f || !own_gradient(d, GAMMA_GRAD, GAMMA))
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, DY, f->y));
    QD_TRY(qd_derivation_is_value(d, X, f->x));
    QD_TRY(qd_derivation_is_value(d, STATE, number(NORM_STATE, f->y, 1, 0)));
    if (!qd_model_norm_is_rms(&d->w->ledger->model))
        QD_TRY(qd_derivation_is_value(d, STATE2, number(NORM_STATE, f->y, 2, 0)));
    known dx = qd_known_gradient(f->x, f->y);
    if (qd_proof_has(d->w, ADD)) {
        QD_TRY(qd_derivation_join(d, ADD, qd_known_at(d, ADD), f->x, &dx));
        QD_TRY(qd_derivation_bias_sums(d, qd_known_at(d, ADD), ADD_SUMS));
    }
    QD_TRY(qd_derivation_bias_sums(d, dx, DX_SUMS));
    qd_known_set_value(d, AMAX, number(LARGEST, dx.value, true, 0));
    qd_known_set(d, DX, dx);
    return QD_OK;
}

/* Forward: y = x + add. Backward: the sum of terms of one gradient. */
static qd_status add(derivation *d)
{
    known x = qd_known_at(d, X), b = qd_known_at(d, ADD);
    if (x.gradient) {
        if (qd_proof_slot_of(d->w->op, X) == qd_proof_slot_of(d->w->op, Y) &&
            b.value == x.value) { /* a ring adds the same terms of other ranks */
            qd_known_set(d, Y, x);
            return QD_OK;
        }
        QD_TRY(qd_derivation_join(d, ADD, b, x.value, &x));
        qd_known_set(d, Y, x);
        return QD_OK;
    }
    uint64_t y = number(FACT_SUM, x.value, b.value, 0);
    qd_known_set_value(d, Y, y);
    return qd_derivation_note(d, (fact){.kind = FACT_SUM, .x = x.value, .add = b.value, .y = y});
}

/* Ops with one operand and without parameters, and their gradients. `key` identifies the op, as a
 * dropout site does. */
static qd_status forward_unary(derivation *d, fact_kind kind, uint64_t key, proof_operand from, proof_operand to)
{
    bool by_operand = kind == FACT_ACT || kind == FACT_CLIP;
    uint64_t x = qd_known_at(d, from).value, y = number(kind, by_operand ? x : key, by_operand ? 0 : x, 0);
    qd_known_set_value(d, to, y);
    return qd_derivation_note(d, (fact){.kind = kind, .key = by_operand ? x : key, .x = x, .y = y});
}

static qd_status backward_unary(derivation *d, const fact *f, proof_operand from, proof_operand to)
{
    if (!f)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, from, f->y));
    qd_known_set(d, to, qd_known_gradient(f->x, f->y));
    return QD_OK;
}

/* Both passes multiply by the factor that the model declares. */
static qd_status scale(derivation *d)
{
    const qd_layer *decl = &d->w->ledger->decls[d->w->ledger->modules[d->w->class_->module].decl];
    known x = qd_known_at(d, X);
    bool declared = false;
    for (int i = 0; i < decl->op_count; i++) /* rounded to the type of the weights */
        declared = declared || (decl->ops[i].kind == QD_DECL_SCALE && fabs(d->w->op->scale / decl->ops[i].factor - 1.0) < 0.005);
    if (!declared)
        return qd_derivation_fail(d, NO_OPERAND, "its factor is not the one that the model declares");
    return x.gradient ? backward_unary(d, qd_derivation_find_result(d, FACT_SCALE, x.value), X, Y)
                      : forward_unary(d, FACT_SCALE, (uint64_t)llround(d->w->op->scale * 1024.0), X, Y);
}

static qd_status gate(derivation *d)
{
    uint64_t x = qd_known_at(d, X).value, by = qd_known_at(d, COMBINE_WEIGHT).value, y = number(FACT_GATE, x, by, 0);
    if (d->w->op->kind == QD_OP_GATE) {
        qd_known_set_value(d, Y, y);
        return qd_derivation_note(d, (fact){.kind = FACT_GATE, .key = y, .x = x, .weight = by, .y = y});
    }
    const fact *f = qd_derivation_find(d, FACT_GATE, y);
    if (!f)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, DY, y));
    qd_known_set(d, DX, qd_known_gradient(x, y));
    qd_known_set(d, D_COMBINE_WEIGHT, qd_known_gradient(by, y));
    return QD_OK;
}

static qd_status activation_grad(derivation *d)
{
    const fact *f = qd_derivation_find(d, FACT_ACT, qd_known_at(d, X).value);
    if (!f)
        return qd_derivation_no_fact(d);
    uint64_t y = f->y;
    QD_TRY(backward_unary(d, f, DY, DX));
    qd_known_set_value(d, Y, y);
    return QD_OK;
}

static qd_status head_norm_grad(derivation *d)
{
    const fact *f = qd_derivation_find(d, FACT_HEAD_NORM, number(0, qd_known_param(d, GAMMA), qd_known_param(d, K_GAMMA), 0));
    if (!f || !own_gradient(d, GAMMA_GRAD, GAMMA) || !own_gradient(d, K_GAMMA_GRAD, K_GAMMA))
        return qd_derivation_no_fact(d);
    uint64_t x = f->x, state = number(NORM_STATE, f->y, 1, 0);
    QD_TRY(qd_derivation_is_value(d, X, x)); /* before it is overwritten in place */
    QD_TRY(qd_derivation_is_value(d, STATE, state));
    return backward_unary(d, f, D_QKV, DX);
}

/* Identifies an attention: what it reads, and its window. */
static uint64_t attention_key(const derivation *d)
{
    return number(FACT_ATTENTION, qd_known_at(d, QKV).value, (uint64_t)d->w->op->window, 0);
}

/* Norms of all queries and of all keys: squares, then the norm; dots, then the gradient. */

static uint64_t qk_key(const derivation *d)
{
    return number(1, qd_known_param(d, GAMMA), qd_known_param(d, K_GAMMA), 0);
}

static qd_status qk_norm(derivation *d)
{
    QD_TRY(qd_derivation_is_value(d, STATE, number(NORM_STATE, qd_known_at(d, X).value, 3, 0)));
    return forward_unary(d, FACT_QK_NORM, qk_key(d), X, QKV);
}

static qd_status qk_norm_grad(derivation *d)
{
    bool dots = d->w->op->kind == QD_OP_QK_DOTS;
    const fact *f = qd_derivation_find(d, FACT_QK_NORM, qk_key(d));
    if (!f)
        return qd_derivation_no_fact(d);
    uint64_t sums = number(NORM_DOTS, f->y, 0, 0);
    QD_TRY(qd_derivation_is_value(d, X, f->x));
    if (dots) {
        qd_known_set_value(d, DELTA, sums);
        return qd_derivation_whole(d, D_QKV, f->y);
    }
    if (!own_gradient(d, GAMMA_GRAD, GAMMA) || !own_gradient(d, K_GAMMA_GRAD, K_GAMMA))
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_is_value(d, STATE, number(NORM_STATE, f->x, 3, 0)));
    QD_TRY(qd_derivation_is_value(d, DELTA, sums));
    return backward_unary(d, f, D_QKV, DX);
}

/* The result of an attention with sinks is the one that contains them; `bias` is their
 * parameter. */
static qd_status has_sink(const derivation *d, const fact *f)
{
    return (f->bias != 0) == d->w->ledger->model.sinks ? QD_OK : qd_derivation_fail(d, LSE, "the sinks of its heads are not in it");
}

static qd_status sink(derivation *d)
{
    uint64_t before = qd_known_at(d, O).value, param = qd_known_param(d, SINK), after = number(FACT_ATTENTION, before, param, 1);
    const fact *f = qd_derivation_find_result(d, FACT_ATTENTION, before);
    if (qd_known_at(d, O).gradient || !f || f->bias != 0)
        return qd_derivation_fail(d, O, "it is not the result of attention, or contains the sinks already");
    QD_TRY(qd_derivation_is_value(d, LSE, number(LOG_SUMS, before, 0, 0)));
    for (int i = 0; i < d->fact_count; i++)
        if (d->facts[i].kind == FACT_ATTENTION && d->facts[i].y == before) {
            d->facts[i].y = after;
            d->facts[i].bias = param;
        }
    for (int i = 0; i < d->use_count; i++)
        d->uses[i].result = d->uses[i].result == before ? after : d->uses[i].result;
    qd_known_set_value(d, O, after);
    qd_known_set_value(d, LSE, number(LOG_SUMS, after, 0, 0));
    return QD_OK;
}

static qd_status sink_grad(const derivation *d)
{
    uint64_t param = qd_known_param(d, SINK);
    for (int i = 0; i < d->fact_count; i++) {
        const fact *f = &d->facts[i];
        if (f->kind != FACT_ATTENTION || f->bias != param || qd_known_param(d, SINK_GRAD) != param)
            continue;
        QD_TRY(qd_derivation_is_value(d, LSE, number(LOG_SUMS, f->y, 0, 0)));
        return qd_derivation_is_value(d, DELTA, number(DELTAS, f->y, 0, 0));
    }
    return qd_derivation_no_fact(d);
}

static qd_status attention_grad(derivation *d, proof_operand dq, proof_operand dkv)
{
    const fact *f = qd_derivation_find(d, FACT_ATTENTION, attention_key(d));
    if (!f)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, D_O, f->y));
    QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
    QD_TRY(qd_derivation_is_value(d, LSE, number(LOG_SUMS, f->y, 0, 0)));
    if (qd_proof_has(d->w, O))
        QD_TRY(qd_derivation_is_value(d, O, f->y));
    if (qd_proof_has(d->w, KV)) {
        QD_TRY(qd_derivation_is_value(d, KV, f->x));
        QD_TRY(qd_derivation_is_value(d, DELTA, number(DELTAS, f->y, 0, 0)));
    }
    QD_TRY(has_sink(d, f));
    if (dq == dkv)
        qd_known_set_value(d, DELTA, number(DELTAS, f->y, 0, 0));
    known g = qd_known_gradient(f->x, f->y);
    g.part = dq == dkv ? 0 : 1;
    qd_known_set(d, dq, g);
    g.part = dq == dkv ? 0 : 2;
    qd_known_set(d, dkv, g);
    return QD_OK;
}

/* Rows to experts and back: PERMUTE, and COMBINE without weights, are each other's gradient. */

static qd_status permute(derivation *d)
{
    known x = qd_known_at(d, X);
    uint64_t list = list_of(qd_known_at(d, FROM).value, LIST_FROM);
    if (list == 0)
        return qd_derivation_fail(d, FROM, "it is not a list of rows");
    QD_TRY(qd_derivation_is_value(d, COUNTS, list_part((int)list, LIST_COUNTS)));
    if (qd_proof_has(d->w, PLACE))
        QD_TRY(qd_derivation_is_value(d, PLACE, list_part((int)list, LIST_PLACE)));
    if (!x.gradient) {
        uint64_t y = number(FACT_PERMUTE, list, x.value, 0);
        qd_known_set_value(d, Y, y);
        return qd_derivation_note(d, (fact){.kind = FACT_PERMUTE, .key = list, .x = x.value, .y = y});
    }
    return backward_unary(d, qd_derivation_find(d, FACT_COMBINE, list), X, Y);
}

static qd_status combine(derivation *d)
{
    known rows = qd_known_at(d, ROWS);
    uint64_t list = list_of(qd_known_at(d, PLACE).value, LIST_PLACE), weight = qd_known_at(d, COMBINE_WEIGHT).value,
             more = qd_known_at(d, ADD).value;
    if (list == 0)
        return qd_derivation_fail(d, PLACE, "it is not a list of rows");
    if (!rows.gradient) {
        uint64_t y = number(FACT_COMBINE, rows.value, weight, more) ^ list;
        qd_known_set_value(d, Y, y);
        return qd_derivation_note(d, (fact){.kind = FACT_COMBINE, .key = list, .x = rows.value, .add = more, .weight = weight, .y = y});
    }
    const fact *f = qd_derivation_find(d, FACT_PERMUTE, list);
    if (!f)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_whole(d, ROWS, f->y));
    known dx = qd_known_gradient(f->x, f->y);
    if (qd_proof_has(d->w, ADD))
        QD_TRY(qd_derivation_join(d, ADD, qd_known_at(d, ADD), f->x, &dx));
    qd_known_set(d, Y, dx);
    return QD_OK;
}

static qd_status combine_grad(derivation *d)
{
    uint64_t list = list_of(qd_known_at(d, FROM).value, LIST_FROM);
    const fact *f = qd_derivation_find(d, FACT_COMBINE, list);
    if (list == 0 || !f || f->weight == 0)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_is_value(d, PLACE, list_part((int)list, LIST_PLACE)));
    QD_TRY(qd_derivation_is_value(d, COUNTS, list_part((int)list, LIST_COUNTS)));
    QD_TRY(qd_derivation_whole(d, DY, f->y));
    QD_TRY(qd_derivation_is_value(d, ROWS, f->x));
    QD_TRY(qd_derivation_is_value(d, COMBINE_WEIGHT, f->weight));
    qd_known_set(d, D_ROWS, qd_known_gradient(f->x, f->y));
    qd_known_set(d, D_COMBINE_WEIGHT, qd_known_gradient(f->weight, f->y));
    return QD_OK;
}

static qd_status route_grad(derivation *d)
{
    const fact *f = qd_derivation_find(d, FACT_ROUTE, qd_known_at(d, LOGITS).value);
    if (!f)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_is_value(d, CHOICE, thing(CHOICES)));
    QD_TRY(qd_derivation_is_value(d, COMBINE_WEIGHT, f->y));
    QD_TRY(qd_derivation_is_value(d, LOAD, thing(LOADS)));
    return backward_unary(d, f, D_COMBINE_WEIGHT, DX);
}

/* Lists of rows, derived from the router's choices. */
static qd_status plan(derivation *d)
{
    int list = d->w->op->kind == QD_OP_ROUTE_PLAN ? BY_EXPERT_LIST : d->w->op->kind == QD_OP_NODE_PLAN ? BY_NODE_LIST : RELAY_LIST;
    if (list != RELAY_LIST) {
        QD_TRY(qd_derivation_is_value(d, CHOICE, thing(CHOICES)));
        if (!qd_derivation_find_result(d, FACT_ROUTE, qd_known_at(d, COMBINE_WEIGHT).value))
            return qd_derivation_fail(d, COMBINE_WEIGHT, "it is not the weights that the router chose");
    }
    if (list == BY_NODE_LIST) {
        QD_TRY(qd_derivation_is_value(d, PLACE, list_part(BY_EXPERT_LIST, LIST_PLACE)));
        QD_TRY(qd_derivation_is_value(d, COUNTS, list_part(BY_EXPERT_LIST, LIST_COUNTS)));
    } else if (list == RELAY_LIST) {
        QD_TRY(qd_derivation_is_value(d, COUNTS, thing(NODE_TABLE)));
    }
    qd_known_set_value(d, list == BY_NODE_LIST ? NODE_PLACE : PLACE, list_part(list, LIST_PLACE));
    qd_known_set_value(d, FROM, list_part(list, LIST_FROM));
    qd_known_set_value(d, list == BY_NODE_LIST ? TAKEN : list == RELAY_LIST ? STATE : COUNTS, list_part(list, LIST_COUNTS));
    if (list == BY_EXPERT_LIST) {
        d->rows = list_part(list, LIST_COUNTS);
        return QD_OK;
    }
    qd_known_set_value(d, NODE_COUNTS, thing(list == BY_NODE_LIST ? NODE_TABLE : RELAY_TABLE));
    if (list == RELAY_LIST)
        d->rows = thing(RELAY_TABLE);
    if (list == RELAY_LIST)
        qd_known_set(d, COMBINE_WEIGHT, qd_known_at(d, RELAY_CHOSEN));
    else
        qd_known_set(d, CHOSEN, qd_known_at(d, COMBINE_WEIGHT));
    return QD_OK;
}

/* The biases of extra dispatch rounds are those of the first one: those that are added again, and
 * those whose gradients are. */
static qd_status round_biases(const derivation *d, bool back)
{
    static const proof_operand matrices[] = {UP, DOWN}, biases[] = {UP_BIAS, DOWN_BIAS}, grads[] = {UP_BIAS_GRAD, DOWN_BIAS_GRAD};
    bool relay = d->w->op->kind == QD_OP_RELAY_ROUNDS || d->w->op->kind == QD_OP_RELAY_ROUNDS_GRAD;
    for (int i = 0; i < 2; i++) {
        const fact *f = qd_derivation_find(d, FACT_LINEAR, qd_known_param(d, matrices[i]));
        bool added = i == 0 || !back || relay, written = back && qd_proof_has(d->w, UP_GRAD);
        if (!f || qd_known_param(d, biases[i]) != (added ? f->bias : 0) || qd_known_param(d, grads[i]) != (written ? f->bias : 0))
            return qd_derivation_no_fact(d);
    }
    return QD_OK;
}

/* Extra dispatch rounds work on the same rows and lists as the first one. */
static qd_status rounds(derivation *d)
{
    bool relay = d->w->op->kind == QD_OP_RELAY_ROUNDS || d->w->op->kind == QD_OP_RELAY_ROUNDS_GRAD;
    bool back = d->w->op->kind == QD_OP_EXPERT_ROUNDS_GRAD || d->w->op->kind == QD_OP_RELAY_ROUNDS_GRAD;
    const fact *sent = qd_derivation_find(d, FACT_PERMUTE, relay ? BY_NODE_LIST : BY_EXPERT_LIST);
    const fact *added = qd_derivation_find(d, FACT_COMBINE, relay ? RELAY_LIST : BY_EXPERT_LIST);
    if (!sent || (back && (!added || !qd_known_at(d, DY).gradient || qd_known_at(d, DY).value != (relay ? added->y : added->x))))
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_is_value(d, COUNTS, relay ? thing(NODE_TABLE) : d->rows));
    if (relay) {
        QD_TRY(qd_derivation_is_value(d, RELAY_CHOSEN, qd_known_at(d, COMBINE_WEIGHT).value));
        if (back)
            QD_TRY(qd_derivation_is_value(d, COMBINE_WEIGHT, added->weight));
    } else if (back) {
        QD_TRY(qd_derivation_is_value(d, FROM, list_part(BY_EXPERT_LIST, LIST_FROM)));
        QD_TRY(qd_derivation_is_value(d, PLACE, list_part(BY_EXPERT_LIST, LIST_COUNTS)));
    }
    if (back && ((qd_proof_has(d->w, UP_GRAD) && qd_known_param(d, UP_GRAD) != qd_known_param(d, UP)) ||
                 (qd_proof_has(d->w, DOWN_GRAD) && qd_known_param(d, DOWN_GRAD) != qd_known_param(d, DOWN))))
        return qd_derivation_no_fact(d);
    QD_TRY(round_biases(d, back));
    return qd_derivation_is_value(d, X, relay || !back ? sent->y : sent->x);
}

/* Rows are sent to the relays of other nodes a second time. */
static qd_status resend(derivation *d)
{
    const fact *sent = qd_derivation_find(d, FACT_PERMUTE, BY_NODE_LIST);
    if (!sent)
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_is_value(d, X, sent->x));
    QD_TRY(qd_derivation_is_value(d, FROM, list_part(BY_NODE_LIST, LIST_FROM)));
    QD_TRY(qd_derivation_is_value(d, TAKEN, list_part(BY_NODE_LIST, LIST_COUNTS)));
    QD_TRY(qd_derivation_is_value(d, COUNTS, thing(NODE_TABLE)));
    qd_known_set_value(d, Y, sent->y);
    qd_known_set_value(d, RELAY, sent->y);
    return QD_OK;
}

static qd_status attention(derivation *d)
{
    uint64_t qkv = qd_known_at(d, QKV).value;
    QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
    if (qd_proof_has(d->w, KV))
        QD_TRY(qd_derivation_is_value(d, KV, qkv));
    QD_TRY(forward_unary(d, FACT_ATTENTION, attention_key(d), QKV, O));
    qd_known_set_value(d, LSE, number(LOG_SUMS, qd_known_at(d, O).value, 0, 0));
    return QD_OK;
}

static qd_status attention_delta(derivation *d)
{
    known o = qd_known_at(d, O);
    if (o.gradient || !qd_derivation_find_result(d, FACT_ATTENTION, o.value))
        return qd_derivation_fail(d, O, "it is not the result of attention");
    QD_TRY(qd_derivation_whole(d, D_O, o.value));
    qd_known_set_value(d, DELTA, number(DELTAS, o.value, 0, 0));
    return QD_OK;
}

/* Joins the gradients of queries with those of keys and values. */
static qd_status columns(derivation *d)
{
    known x = qd_known_at(d, X);
    if (x.part != 0 && (x.part == 2) != (d->w->op->to > 0))
        return qd_derivation_fail(d, X, "gradients of queries and keys are swapped");
    x.part = 0;
    qd_known_set(d, Y, x);
    return QD_OK;
}

static qd_status rope(derivation *d)
{
    const proof_walk *w = d->w;
    const qd_model *m = &w->ledger->model;
    bool local = qd_model_has_window(m, w->ledger->modules[w->class_->module].layer) && m->rope.local_base > 0.0;
    QD_TRY(qd_derivation_is_value(d, TABLE, number(ROPE_TABLE, local, 0, 0)));
    uint64_t key = qd_proof_has(d->w, INPUT);
    if (d->w->op->kind == QD_OP_ROPE)
        return forward_unary(d, FACT_ROPE, key, QKV, Y);
    const fact *f = qd_derivation_find_result(d, FACT_ROPE, qd_known_at(d, QKV).value);
    return f && f->key == key ? backward_unary(d, f, QKV, Y) : qd_derivation_no_fact(d);
}

static qd_status move(const derivation *d, proof_operand from, proof_operand to)
{
    qd_known_set(d, to, qd_known_at(d, from));
    return QD_OK;
}

/* Queries, keys and values of latent attention, from three operands. */
static qd_status latent_qkv(derivation *d)
{
    uint64_t q = qd_known_at(d, X).value, kv = qd_known_at(d, KV).value, k_rope = qd_known_at(d, ADD).value,
             y = number(FACT_LATENT, q, kv, k_rope);
    QD_TRY(qd_derivation_is_value(d, TABLE, number(ROPE_TABLE, 0, 0, 0)));
    qd_known_set_value(d, QKV, y);
    return qd_derivation_note(d, (fact){.kind = FACT_LATENT, .key = qd_proof_has(d->w, INPUT), .x = q, .weight = kv, .more = k_rope,
                                        .y = y});
}

static qd_status latent_qkv_grad(derivation *d)
{
    const fact *f = qd_derivation_find_result(d, FACT_LATENT, qd_known_at(d, D_QKV).value);
    if (!f || f->key != qd_proof_has(d->w, INPUT))
        return qd_derivation_no_fact(d);
    QD_TRY(qd_derivation_is_value(d, TABLE, number(ROPE_TABLE, 0, 0, 0)));
    QD_TRY(qd_derivation_whole(d, D_QKV, f->y));
    qd_known_set(d, D_Q, qd_known_gradient(f->x, f->y));
    qd_known_set(d, D_KV, qd_known_gradient(f->weight, f->y));
    qd_known_set(d, DX, qd_known_gradient(f->more, f->y));
    return QD_OK;
}

qd_status qd_derivation_op(derivation *d)
{
    const qd_op *op = d->w->op;
    switch (op->kind) {
    case QD_OP_EMBED:
        qd_known_set_value(d, Y, number(EMBEDDED, (uint64_t)op->ahead, 0, 0));
        QD_TRY(qd_derivation_note(d, (fact){.kind = FACT_EMBED, .key = qd_known_param(d, WEIGHT), .y = qd_known_at(d, Y).value}));
        return qd_derivation_is_value(d, INPUT, thing(INPUTS));
    case QD_OP_EMBED_GRAD:
        QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
        qd_derivation_trains(d, FACT_EMBED, number(EMBEDDED, (uint64_t)op->ahead, 0, 0));
        return qd_derivation_whole(d, DY, number(EMBEDDED, (uint64_t)op->ahead, 0, 0));
    case QD_OP_NORM:
        return norm(d);
    case QD_OP_NORM_GRAD:
        return norm_grad(d);
    case QD_OP_LINEAR:
    case QD_OP_LINEAR_ADD:
    case QD_OP_LINEAR_GELU:
    case QD_OP_ADAPT:
    case QD_OP_EXPERTS:
    case QD_OP_EXPERTS_SWIGLU:
        return linear(d);
    case QD_OP_LINEAR_DX:
    case QD_OP_LINEAR_DX_GELU:
    case QD_OP_ADAPT_DX:
    case QD_OP_EXPERTS_DX:
    case QD_OP_EXPERTS_DX_SWIGLU:
        return linear_dx(d);
    case QD_OP_LINEAR_DW:
    case QD_OP_ADAPT_DW:
    case QD_OP_EXPERTS_DW:
        return linear_dw(d);
    case QD_OP_BIAS_GRAD:
        return qd_derivation_bias_grad(d, qd_known_at(d, DY));
    case QD_OP_AMAX:
    case QD_OP_CAST:
    case QD_OP_ACTIVATION_AMAX:
    case QD_OP_ACTIVATION_CAST:
    case QD_OP_ACTIVATION_GRAD_AMAX:
    case QD_OP_ACTIVATION_GRAD_CAST:
        return qd_derivation_fp8(d);
    case QD_OP_ROPE:
    case QD_OP_ROPE_INVERSE:
        return rope(d);
    case QD_OP_LATENT_QKV:
        return latent_qkv(d);
    case QD_OP_LATENT_QKV_GRAD:
        return latent_qkv_grad(d);
    case QD_OP_HEAD_NORM:
        QD_TRY(forward_unary(d, FACT_HEAD_NORM, number(0, qd_known_param(d, GAMMA), qd_known_param(d, K_GAMMA), 0), X, QKV));
        qd_known_set_value(d, STATE, number(NORM_STATE, qd_known_at(d, QKV).value, 1, 0));
        return QD_OK;
    case QD_OP_HEAD_NORM_GRAD:
        return head_norm_grad(d);
    case QD_OP_QK_SQUARES:
        qd_known_set_value(d, STATE, number(NORM_STATE, qd_known_at(d, X).value, 3, 0));
        return QD_OK;
    case QD_OP_QK_NORM:
        return qk_norm(d);
    case QD_OP_QK_DOTS:
    case QD_OP_QK_NORM_GRAD:
        return qk_norm_grad(d);
    case QD_OP_ATTENTION:
    case QD_OP_ATTENTION_PART:
        return attention(d);
    case QD_OP_ATTENTION_GRAD:
        return attention_grad(d, D_QKV, D_QKV);
    case QD_OP_ATTENTION_PART_GRAD:
        return attention_grad(d, D_Q, D_KV);
    case QD_OP_ATTENTION_DELTA:
        return attention_delta(d);
    case QD_OP_ATTENTION_SINK:
        return sink(d);
    case QD_OP_ATTENTION_SINK_GRAD:
        return sink_grad(d);
    case QD_OP_EXPERTS_BIAS:
        return experts_bias(d);
    case QD_OP_EXPERTS_BIAS_GRAD:
        QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
        return qd_derivation_bias_grad(d, qd_known_at(d, DY));
    case QD_OP_EXPERT_ACTIVATION:
        QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
        return forward_unary(d, FACT_ACT, 0, X, Y);
    case QD_OP_ACTIVATION:
        return forward_unary(d, FACT_ACT, 0, X, Y);
    case QD_OP_EXPERT_ACTIVATION_GRAD:
        QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
        return activation_grad(d);
    case QD_OP_ACTIVATION_GRAD:
    case QD_OP_ACTIVATION_GRAD_Y:
        return activation_grad(d);
    case QD_OP_CLIP:
        return forward_unary(d, FACT_CLIP, 0, X, Y);
    case QD_OP_CLIP_GRAD:
        return backward_unary(d, qd_derivation_find(d, FACT_CLIP, qd_known_at(d, X).value), D_QKV, DX);
    case QD_OP_ADD:
        return add(d);
    case QD_OP_SCALE:
        return scale(d);
    case QD_OP_GATE:
    case QD_OP_GATE_GRAD:
        return gate(d);
    case QD_OP_DROPOUT:
        return qd_known_at(d, X).gradient ? backward_unary(d, qd_derivation_find(d, FACT_DROP, (uint64_t)op->site), X, Y)
                                          : forward_unary(d, FACT_DROP, (uint64_t)op->site, X, Y);
    case QD_OP_HEAD_LOSS:
        QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
        QD_TRY(qd_derivation_uses(d, qd_known_at(d, X).value, LOSS_TERM));
        if (qd_proof_has(d->w, WEIGHT_GRAD) && qd_known_param(d, WEIGHT_GRAD) != qd_known_param(d, WEIGHT))
            return qd_derivation_no_fact(d);
        QD_TRY(qd_derivation_note(d, (fact){.kind = FACT_HEAD_LOSS, .key = qd_known_param(d, WEIGHT), .y = (uint64_t)op->ahead,
                                            .trains = qd_proof_has(d->w, WEIGHT_GRAD)}));
        qd_known_set(d, DX, qd_known_gradient(qd_known_at(d, X).value, LOSS_TERM));
        return QD_OK;
    case QD_OP_LOSS_MAX:
        qd_known_set_value(d, TOP, number(ROW_MAXIMA, qd_known_at(d, LOGITS).value, 0, 0));
        return QD_OK;
    case QD_OP_LOSS_PART:
        QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
        QD_TRY(qd_derivation_is_value(d, TOP, number(ROW_MAXIMA, qd_known_at(d, LOGITS).value, 0, 0)));
        qd_known_set_value(d, SUMS, number(ROW_SUMS, qd_known_at(d, LOGITS).value, 0, 0));
        return QD_OK;
    case QD_OP_LOSS_ROWS:
    case QD_OP_LOSS_GRAD: {
        uint64_t logits = qd_known_at(d, LOGITS).value;
        QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
        QD_TRY(qd_derivation_is_value(d, TOP, number(ROW_MAXIMA, logits, 0, 0)));
        QD_TRY(qd_derivation_is_value(d, SUMS, number(ROW_SUMS, logits, 0, 0)));
        qd_known_set_value(d, LOSSES, number(ROW_LOSSES, (uint64_t)op->ahead, 0, 0));
        if (qd_proof_has(d->w, FACTORS))
            QD_TRY(qd_derivation_is_value(d, FACTORS, thing(PAIR_FACTORS)));
        if (op->kind == QD_OP_LOSS_ROWS)
            return QD_OK;
        QD_TRY(qd_derivation_uses(d, logits, LOSS_TERM));
        qd_known_set(d, LOGITS, qd_known_gradient(logits, LOSS_TERM));
        return QD_OK;
    }
    case QD_OP_PAIR_SUMS:
    case QD_OP_PAIR_LOSS:
        return qd_derivation_pairs(d, op->kind == QD_OP_PAIR_SUMS);
    case QD_OP_LOSS_SUM:
        QD_TRY(qd_derivation_is_value(d, INPUT, thing(INPUTS)));
        return qd_derivation_is_value(d, LOSSES, number(ROW_LOSSES, (uint64_t)op->ahead, 0, 0));
    case QD_OP_ROUTE:
        qd_known_set_value(d, CHOICE, thing(CHOICES));
        qd_known_set_value(d, LOAD, thing(LOADS));
        return forward_unary(d, FACT_ROUTE, qd_known_at(d, LOGITS).value, LOGITS, COMBINE_WEIGHT);
    case QD_OP_ROUTE_GRAD:
        return route_grad(d);
    case QD_OP_ROUTE_LOAD:
        return qd_derivation_is_value(d, CHOICE, thing(CHOICES));
    case QD_OP_ROUTE_PLAN:
    case QD_OP_NODE_PLAN:
    case QD_OP_RELAY_PLAN:
        return plan(d);
    case QD_OP_PERMUTE:
        return permute(d);
    case QD_OP_COMBINE:
        return combine(d);
    case QD_OP_COMBINE_GRAD:
        return combine_grad(d);
    case QD_OP_EXPERT_ROUNDS:
    case QD_OP_EXPERT_ROUNDS_GRAD:
    case QD_OP_RELAY_ROUNDS:
    case QD_OP_RELAY_ROUNDS_GRAD:
        return rounds(d);
    case QD_OP_NODE_RESEND:
        return resend(d);
    case QD_OP_NODE_DISPATCH:
        QD_TRY(qd_derivation_is_value(d, COUNTS, thing(NODE_TABLE)));
        qd_known_set(d, RELAY_CHOSEN, qd_known_at(d, CHOSEN));
        return move(d, X, Y);
    case QD_OP_NODE_RETURN:
        QD_TRY(qd_derivation_is_value(d, COUNTS, thing(NODE_TABLE)));
        qd_known_set(d, STATE, qd_known_at(d, D_COMBINE_WEIGHT));
        return move(d, X, Y);
    case QD_OP_NODE_WEIGHTS:
        QD_TRY(qd_derivation_is_value(d, CHOICE, thing(CHOICES)));
        QD_TRY(qd_derivation_is_value(d, PLACE, list_part(BY_EXPERT_LIST, LIST_PLACE)));
        QD_TRY(qd_derivation_is_value(d, NODE_PLACE, list_part(BY_NODE_LIST, LIST_PLACE)));
        return move(d, STATE, D_COMBINE_WEIGHT);
    case QD_OP_DISPATCH:
    case QD_OP_RETURN:
        QD_TRY(qd_derivation_is_value(d, COUNTS, d->rows));
        return move(d, X, Y);
    case QD_OP_COLUMNS:
        return columns(d);
    case QD_OP_ALL_GATHER:
    case QD_OP_REDUCE_SCATTER:
    case QD_OP_HEADS_SPLIT:
    case QD_OP_HEADS_JOIN:
    case QD_OP_ROWS_SPLIT:
    case QD_OP_ROWS_JOIN:
    case QD_OP_CONTEXT_SHIFT:
    case QD_OP_CONTEXT_GATHER:
    case QD_OP_CONTEXT_SCATTER:
    case QD_OP_CONTEXT_SWAP:
        return move(d, X, Y);
    case QD_OP_ATTENTION_LATENT: /* occur only in programs without gradients, or work in place */
    case QD_OP_ATTENTION_CACHED:
    case QD_OP_HEAD_LOGITS:
    case QD_OP_ALL_REDUCE:
    case QD_OP_ZERO:
    case QD_OP_KIND_COUNT:
        break;
    }
    return QD_OK;
}
