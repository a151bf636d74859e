/* Pass 6: ops whose kernels work in place. The result takes the slot of the operand if nothing
 * reads the operand afterwards; otherwise the operand is copied first. */
#include "spec/passes/passes.h"

QD_SAME_PLACE(X, ROPE, ROPE_INVERSE);
QD_SAME_PLACE(Y, ROPE, ROPE_INVERSE);

/* The operand that the kernel overwrites, and the result. Returns false for kinds that do not work
 * in place. */
static bool in_place(qd_op_kind kind, int *operand, int *result)
{
    *operand = kind == QD_OP_HEAD_NORM_GRAD ? QD_HEAD_NORM_GRAD_DY : kind == QD_OP_QK_NORM_GRAD ? QD_QK_NORM_GRAD_DY
               : kind == QD_OP_ADAPT          ? QD_ADAPT_ADD
                                              : QD_ROPE_X;
    *result = kind == QD_OP_HEAD_NORM_GRAD ? QD_HEAD_NORM_GRAD_DX : kind == QD_OP_QK_NORM_GRAD ? QD_QK_NORM_GRAD_DX
              : kind == QD_OP_ADAPT          ? QD_ADAPT_Y
                                             : QD_ROPE_Y;
    return kind == QD_OP_ROPE || kind == QD_OP_ROPE_INVERSE || kind == QD_OP_HEAD_NORM_GRAD || kind == QD_OP_QK_NORM_GRAD ||
           kind == QD_OP_ADAPT;
}

static void replace(qd_class_writer *w, int slot, int by)
{
    for (int i = 0; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (w->ops[i].slot[j] == slot)
                w->ops[i].slot[j] = (int16_t)by;
}

/* Copies the operand into the slot of the result before op `index`. */
static void copy_first(qd_class_writer *w, int index, int operand, int result)
{
    const qd_op op = w->ops[index];
    int x = op.slot[operand], y = op.slot[result];
    w->phase = op.phase;
    qd_op copy = *QD_CLASS_OP(w, COLUMNS, (X, x), (Y, y));
    if (w->no_memory || w->wrong)
        return;
    copy.after = op.after;
    qd_class_measure(w, &copy);
    for (int i = w->op_count - 1; i > index; i--)
        w->ops[i] = w->ops[i - 1];
    w->ops[index] = copy;
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
