/* Pass 6: ops whose kernels work in place. Their result takes the slot of their operand, if
 * nothing reads that afterwards; else the operand is copied first. */
#include "spec/passes/passes.h"

/* The operand that the kernel overwrites, and the result; false: it does not work in place. */
static bool in_place(qd_op_kind kind, int *operand, int *result)
{
    *operand = 0;
    *result = kind == QD_OP_HEAD_NORM_GRAD ? 7 : 3;
    return kind == QD_OP_ROPE || kind == QD_OP_ROPE_INVERSE || kind == QD_OP_HEAD_NORM_GRAD;
}

static void replace(qd_class_writer *w, int slot, int by)
{
    for (int i = 0; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (w->ops[i].slot[j] == slot)
                w->ops[i].slot[j] = (int16_t)by;
}

/* A copy of the operand, in the slot of the result, before op `index`. */
static void copy_first(qd_class_writer *w, int index, int operand, int result)
{
    qd_op op = w->ops[index], *copy;
    int x = op.slot[operand], y = op.slot[result];
    w->phase = op.phase;
    QD_CLASS_OP(w, COLUMNS, x, y);
    if (w->no_memory || w->wrong)
        return;
    for (int i = w->op_count - 1; i > index; i--)
        w->ops[i] = w->ops[i - 1];
    copy = &w->ops[index];
    *copy = (qd_op){.kind = QD_OP_COLUMNS,
                    .phase = op.phase,
                    .slot = {(int16_t)x, (int16_t)y},
                    .exchange.index = -1,
                    .exchange.pieces = 1,
                    .after = op.after};
    for (int j = 2; j < QD_OP_SLOTS; j++)
        copy->slot[j] = -1;
    qd_class_measure(w, copy);
    for (int i = index + 1; i < w->op_count; i++)
        w->ops[i].after += w->ops[i].after >= index;
    w->ops[index + 1].slot[operand] = (int16_t)y;
}

void qd_pass_alias(qd_class_writer *w)
{
    for (int i = 0; i < w->op_count && !w->no_memory; i++) {
        int operand, result;
        if (!in_place(w->ops[i].kind, &operand, &result))
            continue;
        int x = w->ops[i].slot[operand], y = w->ops[i].slot[result], last = i;
        if (x == y)
            continue;
        for (int k = i + 1; k < w->op_count; k++)
            last = qd_op_touches(&w->ops[k], x, false) ? k : last;
        if (w->slots[x].kind == QD_SLOT_LOCAL && last == i)
            w->slots[y].kind == QD_SLOT_LOCAL ? replace(w, y, x) : replace(w, x, y);
        else
            copy_first(w, i, operand, result);
    }
}
