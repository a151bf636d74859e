/* Pass 4: fuses ops that the device can do in one pass over memory, by rewrite rules that its
 * traits enable.
 *
 * Rules look at def-use chains only: if anything else accesses the value between two ops (an
 * exchange, dropout), they are not fused. So the resulting list is exactly what runs, and what the
 * simulator prices. */
#include "spec/layout/experts.h"
#include "spec/passes/passes.h"

/* How the second op of a rule is found: as the only op that accesses a local result of the first,
 * as the first op that reads it, or as an op, or an earlier op, that has the same value as an
 * operand. */
typedef enum link { ONLY_READER, FIRST_READER, SHARES, SHARES_EARLIER } link;

/* When a rule applies: in the forward pass, or if the device's traits and the model allow
 * it (see `enabled`). */
typedef enum guard { FORWARD, RESIDUAL_IN_GEMM, GELU_IN_GEMM, SUMS_IN_NORM, SUMS_IN_GEMM, ONE_SOURCE } guard;

/* Two ops become one. The result stands at the place of the first, or of the second (`at`). Its
 * operands are operands of the two, a() and b(); if its kind is that of the op at its place, it
 * keeps the others. */
typedef struct fusion {
    guard guard;
    qd_op_kind first;
    int value; /* operand of the first op */
    link link;
    qd_op_kind second;
    int as;    /* operand of the second op that is this value */
    enum { AT_FIRST, AT_SECOND } at;
    qd_op_kind result;
    qd_operands operands;
    int absent; /* 1 + an operand that the op at the place of the result must not have yet; 0: none */
    int early;  /* 1 + an operand of the second op that must be available before the first; 0: none */
    void (*rule)(qd_class_writer *w, int i); /* instead of all this: rewrites op i */
} fusion;
enum { SECOND = 32 };
#define a(operand) QD_##operand
#define b(operand) (SECOND + QD_##operand)
#define FUSE(when, one, of_one, how, two, of_two, where, kind, ...) \
    .guard = when, .first = QD_OP_##one, .value = QD_##one##_##of_one, .link = how, .second = QD_OP_##two, .as = QD_##two##_##of_two, \
    .at = where, .result = QD_OP_##kind, .operands = QD_OPERAND_TABLE(kind, __VA_ARGS__)

static void add_in_shared(qd_class_writer *w, int i);
static void bias_in_grouped(qd_class_writer *w, int i);
static void remake_swiglu(qd_class_writer *w, int i);
static void squares_in_grouped(qd_class_writer *w, int i);

/* Applied one after another, each to the whole list. */
static const fusion fusions[] = {
    /* The sum over experts adds the result of shared experts, or the residual. */
    {FUSE(FORWARD, COMBINE, Y, ONLY_READER, ADD, B, AT_FIRST, COMBINE, (ADD, b(ADD_A)), (Y, b(ADD_Y))), .absent = 1 + QD_COMBINE_ADD,
     .early = 1 + QD_ADD_A},
    {.rule = add_in_shared},
    {FUSE(RESIDUAL_IN_GEMM, LINEAR, Y, ONLY_READER, ADD, B, AT_FIRST, LINEAR_ADD, (X, a(LINEAR_X)), (WEIGHT, a(LINEAR_WEIGHT)),
          (BIAS, a(LINEAR_BIAS)), (ADD, b(ADD_A)), (Y, b(ADD_Y))),
     .early = 1 + QD_ADD_A},
    {FUSE(FORWARD, ADD, Y, FIRST_READER, NORM, X, AT_SECOND, NORM, (X, a(ADD_A)), (ADD, a(ADD_B)), (SUM, a(ADD_Y))),
     .absent = 1 + QD_NORM_ADD},
    {FUSE(GELU_IN_GEMM, LINEAR, Y, FIRST_READER, ACTIVATION, X, AT_FIRST, LINEAR_GELU, (X, a(LINEAR_X)), (WEIGHT, a(LINEAR_WEIGHT)),
          (BIAS, a(LINEAR_BIAS)), (SUM, a(LINEAR_Y)), (Y, b(ACTIVATION_Y)))},
    {FUSE(GELU_IN_GEMM, LINEAR_DX, DX, ONLY_READER, ACTIVATION_GRAD, DY, AT_FIRST, LINEAR_DX_GELU, (DY, a(LINEAR_DX_DY)),
          (WEIGHT, a(LINEAR_DX_WEIGHT)), (SUM, b(ACTIVATION_GRAD_X)), (DX, b(ACTIVATION_GRAD_DX)))},
    {.rule = remake_swiglu},
    /* The gradient of a norm writes and reads the gradients of the biases on either side of it, and
     * sums them over rows on the way. */
    {FUSE(SUMS_IN_NORM, BIAS_GRAD, DY, SHARES, NORM_GRAD, DX, AT_SECOND, NORM_GRAD, (DX_SUMS, a(BIAS_GRAD_GRAD))),
     .absent = 1 + QD_NORM_GRAD_DX_SUMS},
    {FUSE(SUMS_IN_NORM, BIAS_GRAD, DY, SHARES, NORM_GRAD, ADD, AT_SECOND, NORM_GRAD, (ADD_SUMS, a(BIAS_GRAD_GRAD))),
     .absent = 1 + QD_NORM_GRAD_ADD_SUMS},
    /* The GEMM that gives a weight's gradient reads what reached the bias, and sums its rows. */
    {FUSE(SUMS_IN_GEMM, BIAS_GRAD, DY, SHARES_EARLIER, LINEAR_DW, DY, AT_SECOND, LINEAR_DW, (BIAS_GRAD, a(BIAS_GRAD_GRAD))),
     .absent = 1 + QD_LINEAR_DW_BIAS_GRAD},
    {.rule = bias_in_grouped},
    {FUSE(ONE_SOURCE, EXPERTS, Y, FIRST_READER, EXPERT_ACTIVATION, X, AT_FIRST, EXPERTS_SWIGLU, (X, a(EXPERTS_X)),
          (WEIGHT, a(EXPERTS_WEIGHT)), (COUNT, a(EXPERTS_COUNT)), (GATE_UP, a(EXPERTS_Y)), (Y, b(EXPERT_ACTIVATION_Y)),
          (BIASES, a(EXPERTS_BIASES)))},
    {FUSE(ONE_SOURCE, EXPERTS_DX, DX, ONLY_READER, EXPERT_ACTIVATION_GRAD, DY, AT_FIRST, EXPERTS_DX_SWIGLU, (DY, a(EXPERTS_DX_DY)),
          (WEIGHT, a(EXPERTS_DX_WEIGHT)), (COUNT, a(EXPERTS_DX_COUNT)), (GATE_UP, b(EXPERT_ACTIVATION_GRAD_X)),
          (D_ACTIVE, a(EXPERTS_DX_DX)), (D_GATE_UP, b(EXPERT_ACTIVATION_GRAD_DX)), (Y, b(EXPERT_ACTIVATION_GRAD_Y)))},
    {.rule = squares_in_grouped},
};
QD_SAME_PLACE(COUNT, EXPERTS, EXPERTS_DX);

/* The only op that accesses what op `index` writes to `slot`, if it reads it; op_count: none, or
 * several. A value that leaves the module has other readers. */
static int only_reader(const qd_class_writer *w, int index, int slot)
{
    if (slot < 0 || w->slots[slot].kind != QD_SLOT_LOCAL)
        return w->op_count;
    int reader = qd_class_next(w, slot, QD_TOUCHES, index + 1);
    bool only = reader < w->op_count && qd_op_access(&w->ops[reader], slot) == QD_READS &&
                qd_class_next(w, slot, QD_TOUCHES, reader + 1) == w->op_count;
    return only ? reader : w->op_count;
}

static void remove_op(qd_class_writer *w, int index)
{
    qd_class_move(w, index, w->op_count - 1);
    w->op_count--;
}

/* Whether a value is available before op `index` runs, so that the op can use it. */
static bool is_there(const qd_class_writer *w, int slot, int index)
{
    return qd_class_definition(w, slot, w->op_count) < index;
}

/* Whether to recompute SwiGLU in the backward pass. `by_default` applies if train.swiglu is
 * auto. */
static bool remakes(const qd_class_writer *w, bool by_default)
{
    return w->config->swiglu == QD_SWIGLU_AGAIN || (w->config->swiglu == QD_SWIGLU_AUTO && by_default);
}

static bool enabled(const qd_class_writer *w, guard g, const qd_op *op)
{
    const qd_device_traits *traits = w->config->traits;
    bool selective = w->config->recompute == QD_RECOMPUTE_SELECTIVE; /* needs activations as separate ops */
    bool fp8 = w->config->fp8.on && w->config->training;              /* its GEMMs have no such epilogues */
    switch (g) {
    case FORWARD: return op->phase == QD_PHASE_FORWARD;
    case RESIDUAL_IN_GEMM: return traits->fused_residual;
    case GELU_IN_GEMM: return traits->fused_gelu && w->model->activation == QD_ACT_GELU_TANH && !selective && !fp8;
    case SUMS_IN_NORM: return traits->sums_in_norm && traits->fused_residual && w->tensor.size == 1;
    case SUMS_IN_GEMM: return traits->fused_bias_grad && !fp8;
    /* all rows come from one rank: the device then knows their number */
    case ONE_SOURCE:
        return qd_activation_is_swiglu(w->model->activation) && w->slots[op->slot[QD_EXPERTS_COUNT]].rows == 1 &&
               (!selective || remakes(w, true));
    }
    return false;
}

static int find_second(const qd_class_writer *w, const fusion *f, int i)
{
    int value = w->ops[i].slot[f->value];
    if (f->link == ONLY_READER)
        return only_reader(w, i, value);
    if (f->link == FIRST_READER)
        return qd_class_next(w, value, QD_READS, i + 1);
    for (int k = 0; k < (f->link == SHARES ? w->op_count : i); k++)
        if (w->ops[k].kind == f->second && w->ops[k].slot[f->as] == value && w->ops[k].slot[f->absent - 1] < 0)
            return k;
    return w->op_count;
}

static void fuse(qd_class_writer *w, const fusion *f, int i)
{
    if (w->ops[i].kind != f->first || !enabled(w, f->guard, &w->ops[i]))
        return;
    int k = find_second(w, f, i);
    if (k == w->op_count || w->ops[k].kind != f->second || w->ops[k].slot[f->as] != w->ops[i].slot[f->value])
        return;
    const qd_op first = w->ops[i], second = w->ops[k];
    int at = f->at == AT_FIRST ? i : k;
    if ((f->absent > 0 && w->ops[at].slot[f->absent - 1] >= 0) || (f->early > 0 && !is_there(w, second.slot[f->early - 1], i)))
        return;
    qd_op *op = &w->ops[at];
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        int source = f->operands.slot[j] - 1;
        if (source >= 0)
            op->slot[j] = source < SECOND ? first.slot[source] : second.slot[source - SECOND];
        else if (op->kind != f->result)
            op->slot[j] = -1;
    }
    op->kind = f->result;
    qd_class_count_bytes(w, op);
    remove_op(w, at == i ? k : i);
}

QD_SAME_PLACE(BIAS, LINEAR, LINEAR_ADD);

/* The sum over experts adds the result of shared experts. What is added to both, the residual, is
 * added by the GEMM of the shared experts, so that the last sum covers all. */
static void add_in_shared(qd_class_writer *w, int i)
{
    qd_op *op = &w->ops[i];
    if (op->kind != QD_OP_COMBINE || op->phase != QD_PHASE_FORWARD || op->slot[QD_COMBINE_ADD] < 0)
        return;
    int by = only_reader(w, i, op->slot[QD_COMBINE_Y]);
    if (by == w->op_count || w->ops[by].kind != QD_OP_ADD || w->ops[by].slot[QD_ADD_B] != op->slot[QD_COMBINE_Y])
        return;
    const qd_op add = w->ops[by];
    int k = qd_class_definition(w, op->slot[QD_COMBINE_ADD], i);
    if (!w->config->traits->fused_residual || k < 0 || w->ops[k].kind != QD_OP_LINEAR ||
        only_reader(w, k, op->slot[QD_COMBINE_ADD]) != i || !is_there(w, add.slot[QD_ADD_A], k))
        return;
    qd_op *shared = &w->ops[k];
    shared->kind = QD_OP_LINEAR_ADD;
    shared->slot[QD_LINEAR_ADD_Y] = shared->slot[QD_LINEAR_Y];
    shared->slot[QD_LINEAR_ADD_ADD] = add.slot[QD_ADD_A];
    qd_class_count_bytes(w, shared);
    op->slot[QD_COMBINE_Y] = add.slot[QD_ADD_Y];
    remove_op(w, by);
}

QD_SAME_PLACE(X, LINEAR_DW, EXPERTS_DW);
QD_SAME_PLACE(X, ACTIVATION, EXPERT_ACTIVATION);
QD_SAME_PLACE(X, ACTIVATION_GRAD, EXPERT_ACTIVATION_GRAD);
QD_SAME_PLACE(DY, ACTIVATION_GRAD, ACTIVATION_GRAD_Y);
QD_SAME_PLACE(DX, ACTIVATION_GRAD, ACTIVATION_GRAD_Y);

/* The op that computes the gradients of gate and up also recomputes SwiGLU's result, which need not
 * be kept. The weight gradient that reads the result runs after that op. */
static void remake_swiglu(qd_class_writer *w, int i)
{
    qd_op *grad = &w->ops[i];
    bool routed = grad->kind == QD_OP_EXPERT_ACTIVATION_GRAD;
    bool fp8 = w->config->fp8.on && w->config->training; /* casts of both cost no more than one that keeps the result */
    if (!routed && (grad->kind != QD_OP_ACTIVATION_GRAD || !(fp8 || qd_activation_is_swiglu(w->model->activation))))
        return;
    if (!remakes(w, routed || fp8 || (w->config->traits->remade_activation && !w->experts)))
        return;
    int made = qd_class_next(w, grad->slot[QD_ACTIVATION_GRAD_X], QD_READS, 0);
    if (w->ops[made].kind != (routed ? QD_OP_EXPERT_ACTIVATION : QD_OP_ACTIVATION))
        return;
    int active = w->ops[made].slot[routed ? QD_EXPERT_ACTIVATION_Y : QD_ACTIVATION_Y], dw = qd_class_read_backward(w, active);
    if (dw == w->op_count || w->ops[dw].kind != (routed ? QD_OP_EXPERTS_DW : QD_OP_LINEAR_DW))
        return; /* the layer is frozen */
    int again = qd_class_like(w, qd_class_name(w, "", active, "_again"), active);
    grad->kind = routed ? grad->kind : QD_OP_ACTIVATION_GRAD_Y;
    grad->slot[routed ? QD_EXPERT_ACTIVATION_GRAD_Y : QD_ACTIVATION_GRAD_Y_Y] = (int16_t)again;
    w->ops[dw].slot[QD_LINEAR_DW_X] = (int16_t)again;
    qd_class_count_bytes(w, grad);
    if (dw < i)
        qd_class_move(w, dw, i);
}

/* A grouped GEMM adds the biases of all its columns. Of the columns of a partial sum, a rank has
 * only its share. */
static void bias_in_grouped(qd_class_writer *w, int i)
{
    qd_op *op = &w->ops[i];
    int by = op->kind == QD_OP_EXPERTS ? only_reader(w, i, op->slot[QD_EXPERTS_Y]) : w->op_count;
    if (by == w->op_count || w->ops[by].kind != QD_OP_EXPERTS_BIAS || w->ops[by].n != op->n)
        return;
    op->slot[QD_EXPERTS_BIASES] = w->ops[by].slot[QD_EXPERTS_BIAS_BIAS];
    op->slot[QD_EXPERTS_Y] = w->ops[by].slot[QD_EXPERTS_BIAS_Y];
    qd_class_count_bytes(w, op);
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
    for (const fusion *f = fusions; f < fusions + sizeof fusions / sizeof *fusions; f++)
        for (int i = 0, before; i < w->op_count; i += w->op_count == before) { /* where an op was fused, another may be there */
            before = w->op_count;
            if (f->rule)
                f->rule(w, i);
            else
                fuse(w, f, i);
        }
}
