/* Pass 5: the order of ops around exchanges.
 *
 * The previous passes leave ops in the order of their definitions, with an exchange next to the op
 * that needs it. This pass overlaps them:
 * - the gather for a weight gradient starts one GEMM earlier,
 * - weight gradients of experts run after their input gradients, while those are returned,
 * - ops that do not depend on rows in flight to experts run before the op that needs these rows.
 * The first op that accesses the result of an asynchronous exchange waits for it (`settle`). */
#include "spec/passes/passes.h"

/* Whether an op is a GEMM that can overlap with the gather for weight gradient `dw`: the input
 * gradient of the same weight; if the halves of the backward pass run separately, another weight
 * gradient, because the gather belongs to that half. */
static bool hides_gather(const qd_class_writer *w, const qd_op *op, const qd_op *dw)
{
    if (w->config->split)
        return op->kind == QD_OP_LINEAR_DW;
    return (op->kind == QD_OP_LINEAR_DX || op->kind == QD_OP_LINEAR_DX_GELU) && op->slot[QD_LINEAR_DX_DY] == dw->slot[QD_LINEAR_DW_DY] &&
           qd_class_gradient(op->slot[QD_LINEAR_DX_WEIGHT]) == dw->slot[QD_LINEAR_DW_WEIGHT_GRAD];
}

static void start_gathers(qd_class_writer *w)
{
    for (int i = 1; i + 1 < w->op_count; i++) {
        const qd_op *gather = &w->ops[i], *dw = gather + 1;
        if (gather->kind != QD_OP_ALL_GATHER || gather->phase != QD_PHASE_WEIGHT || dw->kind != QD_OP_LINEAR_DW)
            continue;
        int k = i - 1;
        while (k >= 0 && !hides_gather(w, &w->ops[k], dw))
            k--;
        if (k >= 0)
            qd_class_move(w, i, k);
    }
}

/* Whether an op gives, or returns, gradients of rows of experts. */
static bool returns_rows(const qd_op *op)
{
    return op->phase == QD_PHASE_INPUT &&
           (op->kind == QD_OP_EXPERTS_DX || op->kind == QD_OP_EXPERTS_DX_SWIGLU || op->kind == QD_OP_RETURN);
}

static void delay_expert_weights(qd_class_writer *w)
{
    int last = w->op_count - 1;
    while (last >= 0 && !returns_rows(&w->ops[last]))
        last--;
    for (int i = last, to = last; i >= 0; i--)
        if (w->ops[i].kind == QD_OP_EXPERTS_DW)
            qd_class_move(w, i, to--);
    for (int i = last + 1; i < w->op_count; i++) /* before the extra dispatch rounds, which add to them */
        if (w->ops[i].kind == QD_OP_EXPERTS_DW)
            qd_class_move(w, i, ++last);
}

static bool carries_rows(const qd_op *op)
{
    return op->exchange.uneven && op->exchange.count > 0;
}

/* Whether the result of an earlier exchange is still in flight at op `index`. */
static bool on_its_way(const qd_class_writer *w, int exchange, int index)
{
    return carries_rows(&w->ops[exchange]) && qd_class_conflict(w, exchange) >= index;
}

/* Op `index` is the first that needs rows of experts: moves later ops of the layer's MLP that do
 * not need them before it, in their order. */
static void fill(qd_class_writer *w, int index)
{
    for (int k = index + 1; k < w->op_count && w->ops[k].kind != QD_OP_NORM_GRAD; k++) {
        const qd_op *op = &w->ops[k];
        bool free = !qd_op_communicates(op) && (op->phase == QD_PHASE_FORWARD) == (w->ops[index].phase == QD_PHASE_FORWARD);
        for (int i = index; i < k && free; i++)
            free = !qd_ops_conflict(w, &w->ops[i], op);
        for (int i = 0; i < index && free; i++)
            free = !on_its_way(w, i, index) || !qd_ops_conflict(w, &w->ops[i], op);
        if (free)
            qd_class_move(w, k, index++);
    }
}

/* If all experts are on this rank nothing is in flight, and the order does not change. */
static void fill_waits(qd_class_writer *w)
{
    for (int i = 0; i < w->op_count; i++) {
        const qd_op *op = &w->ops[i];
        int k = qd_class_conflict(w, i);
        if (k < w->op_count && (carries_rows(op) || (op->kind == QD_OP_COMBINE_GRAD && qd_op_is_grouped(w->ops[k].kind))))
            fill(w, k);
    }
}

void qd_pass_order(qd_class_writer *w)
{
    start_gathers(w);
    delay_expert_weights(w);
    fill_waits(w);
    for (int i = 0; i < w->op_count; i++) /* not if the first reader is outside the module */
        w->ops[i].exchange.async = w->ops[i].exchange.async && qd_class_conflict(w, i) < w->op_count;
}
