/* Pass 7: ops whose kernels work in place. The result takes the slot of the operand if nothing
 * reads the operand afterwards; otherwise the operand is copied first. */
#include "spec/passes/passes.h"

/* The operand that the kernel overwrites, and the result. */
static const struct {
    bool works;
    int operand, result;
} in_place[QD_OP_KIND_COUNT] = {
    [QD_OP_ROPE] = {true, QD_ROPE_X, QD_ROPE_Y},
    [QD_OP_ROPE_INVERSE] = {true, QD_ROPE_INVERSE_X, QD_ROPE_INVERSE_Y},
    [QD_OP_HEAD_NORM_GRAD] = {true, QD_HEAD_NORM_GRAD_DY, QD_HEAD_NORM_GRAD_DX},
    [QD_OP_QK_NORM_GRAD] = {true, QD_QK_NORM_GRAD_DY, QD_QK_NORM_GRAD_DX},
    [QD_OP_ADAPT] = {true, QD_ADAPT_ADD, QD_ADAPT_Y},
    [QD_OP_EXPERTS_BIAS] = {true, QD_EXPERTS_BIAS_X, QD_EXPERTS_BIAS_Y},
};

/* Copies the operand into the slot of the result before op `index`. */
static void copy_first(qd_class_writer *w, int index, int operand, int result)
{
    const qd_op op = w->ops[index];
    w->phase = op.phase;
    qd_class_measure(w, QD_CLASS_OP(w, COLUMNS, (X, op.slot[operand]), (Y, op.slot[result])));
    w->ops[index].slot[operand] = op.slot[result];
    qd_class_move(w, w->op_count - 1, index);
}

void qd_pass_alias(qd_class_writer *w)
{
    for (int i = 0; i < w->op_count; i++) {
        int operand = in_place[w->ops[i].kind].operand, result = in_place[w->ops[i].kind].result;
        if (!in_place[w->ops[i].kind].works)
            continue;
        int x = w->ops[i].slot[operand], y = w->ops[i].slot[result];
        if (x == y)
            continue;
        if (w->slots[x].kind == QD_SLOT_LOCAL && qd_class_next(w, x, QD_TOUCHES, i + 1) == w->op_count)
            w->slots[y].kind == QD_SLOT_LOCAL ? qd_class_replace(w, y, x, false) : qd_class_replace(w, x, y, false);
        else
            copy_first(w, i, operand, result);
    }
}
