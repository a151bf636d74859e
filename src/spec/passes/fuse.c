/* Pass 4: fuses ops that the device can do in one pass over memory, by rewrite rules that its
 * traits enable.
 *
 * Rules look at def-use chains only: if anything else accesses the value between two ops (an
 * exchange, dropout), they are not fused. So the resulting list is exactly what runs, and what the
 * simulator prices. */
#include "spec/layout/experts.h"
#include "spec/passes/passes.h"

enum { GONE = QD_OP_KIND_COUNT }; /* an op that was fused into another */

/* Number of ops from `first` on that access a slot; the last of them in *last. */
static int touched(const qd_class_writer *w, int slot, int first, int *last)
{
    int count = 0;
    for (int i = first; i < w->op_count; i++)
        if ((int)w->ops[i].kind != GONE && qd_op_touches(&w->ops[i], slot, false)) {
            *last = i;
            count++;
        }
    return count;
}

/* The only op that reads what op `index` writes to `slot`, -1: none or several. A value that leaves
 * the module has other readers. */
static int only_reader(const qd_class_writer *w, int index, int slot)
{
    int reader = -1;
    if (slot < 0 || w->slots[slot].kind != QD_SLOT_LOCAL || touched(w, slot, index + 1, &reader) != 1)
        return -1;
    return qd_op_touches(&w->ops[reader], slot, true) ? -1 : reader;
}

static void remove_op(qd_class_writer *w, int index)
{
    w->ops[index].kind = (qd_op_kind)GONE;
    for (int j = 0; j < QD_OP_SLOTS; j++)
        w->ops[index].slot[j] = -1;
}

/* Whether a value is available before op `index` runs, so that the op can use it. */
static bool is_there(const qd_class_writer *w, int slot, int index)
{
    return qd_class_definition(w, slot, w->op_count) < index;
}

/* Changes kind and operands of op `index`; phase, sizes and FLOPs stay. */
static void rewrite(qd_class_writer *w, int index, qd_op_kind kind, qd_operands operands)
{
    qd_op *op = &w->ops[index];
    op->kind = kind;
    qd_op_set_operands(op, operands);
    qd_class_count_bytes(w, op);
}

/* Fuses an addition into op `index`, y = x·Wᵀ + b; the sum is written to `y`. */
static void take_add(qd_class_writer *w, int index, int add, int y)
{
    const qd_op *op = &w->ops[index];
    rewrite(w, index, QD_OP_LINEAR_ADD,
            QD_OPERANDS(LINEAR_ADD, (X, op->slot[QD_LINEAR_X]), (WEIGHT, op->slot[QD_LINEAR_WEIGHT]), (BIAS, op->slot[QD_LINEAR_BIAS]),
                        (ADD, add), (Y, y)));
}

/* x·Wᵀ + b, then + a: one GEMM. */
static void add_in_linear(qd_class_writer *w, int i)
{
    const qd_op *op = &w->ops[i];
    int by = op->kind == QD_OP_LINEAR ? only_reader(w, i, op->slot[QD_LINEAR_Y]) : -1;
    if (!w->config->traits->fused_residual || by < 0 || w->ops[by].kind != QD_OP_ADD)
        return;
    const qd_op *add = &w->ops[by];
    if (add->slot[QD_ADD_B] != op->slot[QD_LINEAR_Y] || !is_there(w, add->slot[QD_ADD_A], i))
        return;
    take_add(w, i, add->slot[QD_ADD_A], add->slot[QD_ADD_Y]);
    remove_op(w, by);
}

/* Fuses additions into the sum over experts. With shared experts it adds their result; where GEMMs
 * can add, the GEMM of the shared experts adds the residual, so that the last sum covers all. */
static void add_in_combine(qd_class_writer *w, int i)
{
    qd_op *op = &w->ops[i];
    int by = op->kind == QD_OP_COMBINE && op->phase == QD_PHASE_FORWARD ? only_reader(w, i, op->slot[QD_COMBINE_Y]) : -1;
    if (by < 0 || w->ops[by].kind != QD_OP_ADD || w->ops[by].slot[QD_ADD_B] != op->slot[QD_COMBINE_Y])
        return;
    int add = w->ops[by].slot[QD_ADD_A], sum = w->ops[by].slot[QD_ADD_Y];
    if (!is_there(w, add, i))
        return;
    if (op->slot[QD_COMBINE_ADD] < 0) {
        op->slot[QD_COMBINE_ADD] = (int16_t)add;
    } else {
        int shared = qd_class_definition(w, op->slot[QD_COMBINE_ADD], i);
        if (!w->config->traits->fused_residual || shared < 0 || w->ops[shared].kind != QD_OP_LINEAR ||
            only_reader(w, shared, op->slot[QD_COMBINE_ADD]) != i || !is_there(w, add, shared))
            return;
        take_add(w, shared, add, w->ops[shared].slot[QD_LINEAR_Y]);
    }
    op->slot[QD_COMBINE_Y] = (int16_t)sum;
    remove_op(w, by);
    qd_class_count_bytes(w, op);
    add_in_combine(w, i); /* what is added to that result */
}

/* sum = x + branch, y = norm(sum): one pass. */
static void add_in_norm(qd_class_writer *w, int i)
{
    const qd_op *op = &w->ops[i];
    if (op->kind != QD_OP_ADD || op->phase != QD_PHASE_FORWARD)
        return;
    int by = qd_class_reader(w, op->slot[QD_ADD_Y], i + 1);
    if (by < 0 || w->ops[by].kind != QD_OP_NORM || w->ops[by].slot[QD_NORM_X] != op->slot[QD_ADD_Y] ||
        w->ops[by].slot[QD_NORM_ADD] >= 0)
        return;
    qd_op *norm = &w->ops[by];
    norm->slot[QD_NORM_X] = op->slot[QD_ADD_A];
    norm->slot[QD_NORM_ADD] = op->slot[QD_ADD_B];
    norm->slot[QD_NORM_SUM] = op->slot[QD_ADD_Y];
    qd_class_count_bytes(w, norm);
    remove_op(w, i);
}

/* Fuses GELU, or its derivative, into a GEMM. Selective recompute of GELU needs it as a separate
 * op. */
static void gelu_in_linear(qd_class_writer *w, int i)
{
    const qd_op *op = &w->ops[i];
    bool forward = op->kind == QD_OP_LINEAR;
    if (!w->config->traits->fused_gelu || w->model->activation != QD_ACT_GELU_TANH || w->config->recompute == QD_RECOMPUTE_SELECTIVE ||
        (!forward && op->kind != QD_OP_LINEAR_DX))
        return;
    int by = forward ? qd_class_reader(w, op->slot[QD_LINEAR_Y], i + 1) : only_reader(w, i, op->slot[QD_LINEAR_DX_DX]);
    if (by < 0)
        return;
    const qd_op *act = &w->ops[by];
    if (forward && act->kind == QD_OP_ACTIVATION) {
        rewrite(w, i, QD_OP_LINEAR_GELU,
                QD_OPERANDS(LINEAR_GELU, (X, op->slot[QD_LINEAR_X]), (WEIGHT, op->slot[QD_LINEAR_WEIGHT]), (BIAS, op->slot[QD_LINEAR_BIAS]),
                            (SUM, op->slot[QD_LINEAR_Y]), (Y, act->slot[QD_ACTIVATION_Y])));
        remove_op(w, by);
    } else if (!forward && act->kind == QD_OP_ACTIVATION_GRAD) {
        rewrite(w, i, QD_OP_LINEAR_DX_GELU,
                QD_OPERANDS(LINEAR_DX_GELU, (DY, op->slot[QD_LINEAR_DX_DY]), (WEIGHT, op->slot[QD_LINEAR_DX_WEIGHT]),
                            (SUM, act->slot[QD_ACTIVATION_GRAD_X]), (DX, act->slot[QD_ACTIVATION_GRAD_DX])));
        remove_op(w, by);
    }
}

/* Whether to recompute SwiGLU in the backward pass. `by_default` applies if train.swiglu is
 * auto. */
static bool remakes(const qd_class_writer *w, bool by_default)
{
    return w->config->swiglu == QD_SWIGLU_AGAIN || (w->config->swiglu == QD_SWIGLU_AUTO && by_default);
}

QD_SAME_PLACE(X, LINEAR_DW, EXPERTS_DW);

/* The op that computes the gradients of gate and up also recomputes SwiGLU's result, which need not
 * be kept. The weight gradient that reads the result runs after that op. */
static void remake_swiglu(qd_class_writer *w, int i)
{
    qd_op *grad = &w->ops[i];
    bool routed = grad->kind == QD_OP_EXPERT_ACTIVATION_GRAD;
    if (!routed && (grad->kind != QD_OP_ACTIVATION_GRAD || w->model->activation != QD_ACT_SWIGLU))
        return;
    if (!remakes(w, routed || (w->config->traits->remade_activation && !w->experts)))
        return;
    int x = grad->slot[routed ? QD_EXPERT_ACTIVATION_GRAD_X : QD_ACTIVATION_GRAD_X], active = -1, made = -1;
    for (int k = 0; k < i && made < 0; k++) {
        const qd_op *op = &w->ops[k];
        if (op->kind == QD_OP_ACTIVATION && op->slot[QD_ACTIVATION_X] == x) {
            made = k;
            active = op->slot[QD_ACTIVATION_Y];
        } else if (op->kind == QD_OP_EXPERT_ACTIVATION && op->slot[QD_EXPERT_ACTIVATION_X] == x) {
            made = k;
            active = op->slot[QD_EXPERT_ACTIVATION_Y];
        }
    }
    bool read = false; /* frozen layers need no weight gradient */
    for (int k = made + 1; k < w->op_count && made >= 0; k++)
        read = read || ((w->ops[k].kind == QD_OP_LINEAR_DW || w->ops[k].kind == QD_OP_EXPERTS_DW) &&
                        w->ops[k].slot[QD_LINEAR_DW_X] == active);
    if (!read)
        return;
    int again = qd_class_local(w, qd_class_name(w, "", active, "_again"), w->slots[active].rows, w->slots[active].cols);
    if (w->no_memory)
        return;
    w->slots[again].layout = w->slots[active].layout;
    if (routed) {
        grad->slot[QD_EXPERT_ACTIVATION_GRAD_Y] = (int16_t)again;
        qd_class_count_bytes(w, grad);
    } else {
        rewrite(w, i, QD_OP_ACTIVATION_GRAD_Y,
                QD_OPERANDS(ACTIVATION_GRAD_Y, (X, x), (DY, grad->slot[QD_ACTIVATION_GRAD_DY]), (DX, grad->slot[QD_ACTIVATION_GRAD_DX]),
                            (Y, again)));
    }
    for (int k = made + 1; k < w->op_count; k++) {
        qd_op *op = &w->ops[k];
        if ((op->kind != QD_OP_LINEAR_DW && op->kind != QD_OP_EXPERTS_DW) || op->slot[QD_LINEAR_DW_X] != active)
            continue;
        op->slot[QD_LINEAR_DW_X] = (int16_t)again;
        if (k > i)
            continue;
        qd_op late = *op;
        for (; k < i; k++)
            w->ops[k] = w->ops[k + 1];
        w->ops[i] = late;
        return;
    }
}

/* The gradient of a norm reads and writes the gradients of the biases on either side of it, and can
 * sum them over rows on the way. */
static void bias_sums_in_norm(qd_class_writer *w, int i)
{
    const qd_op *op = &w->ops[i];
    if (!w->config->traits->sums_in_norm || !w->config->traits->fused_residual || op->kind != QD_OP_BIAS_GRAD || w->tensor.size > 1)
        return;
    for (int k = 0; k < w->op_count; k++) {
        qd_op *norm = &w->ops[k];
        if (norm->kind != QD_OP_NORM_GRAD)
            continue;
        int dy = op->slot[QD_BIAS_GRAD_DY];
        int sums = norm->slot[QD_NORM_GRAD_ADD] == dy  ? QD_NORM_GRAD_ADD_SUMS
                   : norm->slot[QD_NORM_GRAD_DX] == dy ? QD_NORM_GRAD_DX_SUMS
                                                       : -1;
        if (sums < 0 || norm->slot[sums] >= 0)
            continue;
        norm->slot[sums] = op->slot[QD_BIAS_GRAD_GRAD];
        remove_op(w, i);
        qd_class_count_bytes(w, norm);
        return;
    }
}

/* The GEMM that gives a weight's gradient reads what reached the bias, and sums its rows. */
static void bias_sums_in_linear(qd_class_writer *w, int i)
{
    const qd_op *op = &w->ops[i];
    if (!w->config->traits->fused_bias_grad || op->kind != QD_OP_BIAS_GRAD)
        return;
    for (int k = i - 1; k >= 0; k--) {
        qd_op *dw = &w->ops[k];
        if (dw->kind != QD_OP_LINEAR_DW || dw->slot[QD_LINEAR_DW_DY] != op->slot[QD_BIAS_GRAD_DY] || dw->slot[QD_LINEAR_DW_BIAS_GRAD] >= 0)
            continue;
        dw->slot[QD_LINEAR_DW_BIAS_GRAD] = op->slot[QD_BIAS_GRAD_GRAD];
        remove_op(w, i);
        qd_class_count_bytes(w, dw);
        return;
    }
}

/* Fuses a grouped GEMM with the SwiGLU after it, or with its gradient, if all rows come from one
 * rank: the device then knows the number of rows. Selective recompute of SwiGLU needs it as a
 * separate op. */
static void swiglu_in_grouped(qd_class_writer *w, int i)
{
    const qd_op *op = &w->ops[i];
    bool forward = op->kind == QD_OP_EXPERTS;
    if ((!forward && op->kind != QD_OP_EXPERTS_DX) || w->slots[op->slot[forward ? QD_EXPERTS_COUNT : QD_EXPERTS_DX_COUNT]].rows != 1 ||
        (w->config->recompute == QD_RECOMPUTE_SELECTIVE && !remakes(w, true)))
        return;
    int by = forward ? qd_class_reader(w, op->slot[QD_EXPERTS_Y], i + 1) : only_reader(w, i, op->slot[QD_EXPERTS_DX_DX]);
    if (by < 0)
        return;
    const qd_op *act = &w->ops[by];
    if (forward && act->kind == QD_OP_EXPERT_ACTIVATION)
        rewrite(w, i, QD_OP_EXPERTS_SWIGLU,
                QD_OPERANDS(EXPERTS_SWIGLU, (X, op->slot[QD_EXPERTS_X]), (WEIGHT, op->slot[QD_EXPERTS_WEIGHT]),
                            (COUNT, op->slot[QD_EXPERTS_COUNT]), (GATE_UP, op->slot[QD_EXPERTS_Y]),
                            (Y, act->slot[QD_EXPERT_ACTIVATION_Y])));
    else if (!forward && act->kind == QD_OP_EXPERT_ACTIVATION_GRAD)
        rewrite(w, i, QD_OP_EXPERTS_DX_SWIGLU,
                QD_OPERANDS(EXPERTS_DX_SWIGLU, (DY, op->slot[QD_EXPERTS_DX_DY]), (WEIGHT, op->slot[QD_EXPERTS_DX_WEIGHT]),
                            (COUNT, op->slot[QD_EXPERTS_DX_COUNT]), (GATE_UP, act->slot[QD_EXPERT_ACTIVATION_GRAD_X]),
                            (D_ACTIVE, op->slot[QD_EXPERTS_DX_DX]), (D_GATE_UP, act->slot[QD_EXPERT_ACTIVATION_GRAD_DX]),
                            (Y, act->slot[QD_EXPERT_ACTIVATION_GRAD_Y])));
    else
        return;
    remove_op(w, by);
}

/* Grouped GEMMs that are the last to write the gradients of their matrices sum their squares for
 * the norm. That requires that nothing is added later, by extra dispatch rounds or by other
 * ranks. */
static void squares_in_grouped(qd_class_writer *w, int i)
{
    qd_op *op = &w->ops[i];
    if (op->kind != QD_OP_EXPERTS_DW || !w->config->traits->squares_in_products || w->slots[op->slot[QD_EXPERTS_DW_COUNT]].rows != 1)
        return;
    int param = w->module->param_begin + w->slots[op->slot[QD_EXPERTS_DW_WEIGHT_GRAD]].param;
    op->squares = qd_expert_ranks(&w->ledger->mesh) == 1 && qd_ledger_data_group(w->ledger, w->ledger->params[param].family).size == 1 &&
                  qd_ledger_tensor_group(w->ledger, param).size == 1;
}

void qd_pass_fuse(qd_class_writer *w)
{
    static void (*const rules[])(qd_class_writer *, int) = {
        add_in_combine, add_in_linear,     add_in_norm,         gelu_in_linear,    remake_swiglu,
        bias_sums_in_norm, bias_sums_in_linear, swiglu_in_grouped, squares_in_grouped,
    };
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++)
        for (int i = 0; i < w->op_count && !w->no_memory; i++)
            rules[r](w, i);
    int kept = 0;
    for (int i = 0; i < w->op_count; i++)
        if ((int)w->ops[i].kind != GONE)
            w->ops[kept++] = w->ops[i];
    w->op_count = kept;
}
