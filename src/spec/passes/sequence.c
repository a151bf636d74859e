/* Emits sequences of ops from tables (sequence.h). */
#include "spec/passes/sequence.h"

#include <string.h>

void qd_sequence_begin(qd_sequence *s)
{
    memset(s->slot, 0xff, sizeof s->slot);
}

void qd_sequence_take(qd_sequence *s, const qd_op *op, qd_operands values)
{
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (values.slot[j] > 0)
            s->slot[values.slot[j] - 1] = op->slot[j];
}

int qd_sequence_slot(qd_sequence *s, int value)
{
    const qd_sequence_value *v = &s->values[value];
    const qd_dtype types[] = {s->w->config->activation, QD_F32, QD_F64, QD_I32};
    if (s->slot[value] < 0 && v->name)
        s->slot[value] =
            qd_class_slot(s->w, v->name, v->kind ? v->kind : QD_SLOT_LOCAL, types[v->type], s->number[v->rows], s->number[v->cols]);
    return s->slot[value];
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
        qd_op_sizes(op, s->number[step->m], s->number[step->n], s->number[step->k], 0.0);
        s->finish(s, step, op);
    }
}
