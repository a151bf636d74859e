/* Emits sequences of ops from tables (sequence.h). */
#include "spec/passes/sequence.h"

#include <string.h>

void qd_sequence_begin(qd_sequence *s)
{
    memset(s->slot, 0xff, sizeof s->slot);
    memcpy(s->number, s->w->number, sizeof s->w->number);
}

void qd_sequence_take(qd_sequence *s, const qd_op *op, qd_operands values)
{
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (values.slot[j] > 0)
            s->slot[values.slot[j] - 1] = op->slot[j];
}

int qd_sequence_slot(qd_sequence *s, int value)
{
    qd_class_writer *w = s->w;
    const qd_sequence_value *v = &s->values[value];
    const qd_dtype types[] = {w->config->activation, QD_F32, QD_F64, QD_I32};
    if (s->slot[value] < 0 && v->same > 0 && !(s->facts & v->unless))
        s->slot[value] = qd_sequence_slot(s, v->same - 1);
    if (s->slot[value] >= 0 || !v->name)
        return s->slot[value];
    const char *name = v->of > 0 ? qd_class_name(w, v->before ? v->before : "", s->slot[v->of - 1], v->name) : v->name;
    s->slot[value] = qd_class_slot(w, name, v->kind ? v->kind : QD_SLOT_LOCAL, types[v->type], s->number[v->rows], s->number[v->cols]);
    w->slots[s->slot[value]].param = v->param;
    return s->slot[value];
}

/* Sizes of an op and what else it states. */
static void state(const qd_sequence *s, const qd_step *step, qd_op *op)
{
    static const qd_manner plain;
    const qd_manner *how = s->manners ? &s->manners[step->how] : &plain;
    const int64_t *number = s->number;
    const qd_slot *first = &s->w->slots[qd_op_first(op)];
    bool whole = step->m == 0;
    op->m = whole ? first->rows : number[step->m];
    op->n = whole ? first->cols : number[step->n];
    op->k = number[step->k];
    if (how->work != QD_WORK_NONE)
        op->flops = how->work == QD_WORK_GEMM ? 2.0 * (double)op->m * (double)op->n * (double)op->k : s->flops[how->part];
    op->first = number[how->first];
    op->to = number[how->to];
    op->heads = (int32_t)number[how->heads];
    op->kv_heads = (int32_t)number[how->kv_heads];
    op->experts = (int32_t)number[how->experts];
    op->expert = (int32_t)number[how->expert];
    op->window = number[how->window];
    op->round = (int32_t)number[how->round];
    op->hop = (int32_t)number[how->hop];
    op->chunk = number[how->chunk];
    op->ahead = (int32_t)number[how->ahead];
    op->cap = how->capped ? s->w->model->logit_softcap : 0.0;
    if (op->kind == QD_OP_COLUMNS) /* not of whole slots */
        op->bytes = op->m * op->n * (int64_t)(qd_dtype_size(first->dtype) + qd_dtype_size(s->w->slots[op->slot[QD_COLUMNS_Y]].dtype));
    if (how->over == 0)
        return;
    qd_op_communicate(s->w, op, s->group[how->over - 1]);
    op->exchange.count = how->uneven ? number[how->count] : op->exchange.count * (how->count ? number[how->count] : 1);
    op->exchange.reduce = how->reduce;
    op->exchange.uneven = how->uneven;
    op->exchange.async = how->async && s->w->config->overlap;
}

void qd_sequence_emit(qd_sequence *s, int stage)
{
    for (int i = 0; i < s->value_count; i++)
        if (s->values[i].buffer)
            s->slot[i] = -1;
    for (int i = 0; i < s->step_count; i++) {
        const qd_step *step = &s->steps[i];
        if (step->stage != stage || (s->facts & (step->when | step->unless)) != step->when)
            continue;
        qd_operands operands = {{0}};
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (step->operands.slot[j] > 0)
                operands.slot[j] = 1 + qd_sequence_slot(s, step->operands.slot[j] - 1);
        qd_op *op = qd_class_op(s->w, step->op, operands);
        if (s->w->wrong)
            return;
        state(s, step, op);
    }
}
