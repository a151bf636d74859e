/* What tensor parallelism puts between the products of a module: sums over tp, or under sp gathers and scatters of rows. */
#include "spec/ops_impl.h"

#include <string.h>

qd_op *qd_class_exchange(qd_class_writer *w, qd_op_kind kind, qd_group group, const int *slots, int count, int64_t first, int64_t rows,
                         int64_t cols)
{
    qd_op *op = qd_class_op(w, kind, slots, count);
    op->m = rows;
    op->n = cols;
    op->first = op->to = first;
    op->exchange.group = group;
    op->exchange.count = rows * cols;
    op->exchange.dtype = w->slots[slots[0]].dtype;
    op->exchange.reduce = QD_SUM;
    return op;
}

static int note_pending(const qd_class_writer *w)
{
    return w->config->overlap ? w->op_count - 1 : -1;
}

int qd_class_enter(qd_class_writer *w, const char *name, int x, int *pending)
{
    *pending = -1;
    if (!w->ledger->mesh.sp)
        return x;
    int64_t cols = w->slots[x].cols;
    int all = qd_class_local(w, name, cols);
    qd_class_exchange(w, QD_OP_ALL_GATHER, w->tensor, (const int[]){x, all}, 2, 0, w->rows, cols)->exchange.async = w->config->overlap;
    *pending = note_pending(w);
    return all;
}

int qd_class_leave(qd_class_writer *w, const char *name, int y, int *pending)
{
    int64_t cols = w->slots[y].cols;
    *pending = -1;
    if (w->tensor.size == 1)
        return y;
    int own = w->ledger->mesh.sp ? qd_class_port(w, name, cols) : y;
    qd_op *op = own == y ? qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, (const int[]){y}, 1, 0, w->rows, cols)
                         : qd_class_exchange(w, QD_OP_REDUCE_SCATTER, w->tensor, (const int[]){y, own}, 2, 0, w->rows, cols);
    op->exchange.async = w->config->overlap;
    *pending = note_pending(w);
    return own;
}

/* The rows of x were not kept gathered: they are gathered again for dW while dx is computed; the sum of dx runs beside dW. */
int qd_class_enter_grad(qd_class_writer *w, const char *name, int dy, int x, qd_class_weight matrix, qd_class_weight bias, int dx_all,
                        int *pending)
{
    int gathered;
    w->phase = QD_PHASE_WEIGHT;
    int all = qd_class_enter(w, w->slots[x].name, x, &gathered);
    w->phase = QD_PHASE_INPUT;
    qd_class_linear_input_grad(w, dy, matrix, -1, dx_all);
    int dx = qd_class_leave(w, name, dx_all, pending);
    qd_class_linear_weight_grad(w, dy, all, matrix, bias);
    qd_class_await(w, gathered);
    return dx;
}

void qd_class_await(qd_class_writer *w, int index)
{
    if (index < 0 || w->no_memory || w->wrong)
        return;
    qd_op *op = &w->ops[w->op_count - 1];
    op->after = index > op->after ? index : op->after;
}

qd_class_weight qd_class_bias_once(const qd_class_writer *w, qd_class_weight bias)
{
    if (w->tensor_coord > 0)
        bias.value = -1;
    return bias;
}

static bool writes(const qd_op *op, int j)
{
    return qd_op_roles(op->kind)[j] != 'r';
}

/* Whether two ops may touch the same rows of a slot. Ops without a window touch all. */
static bool meet(const qd_op *a, const qd_op *b, const qd_slot *slot)
{
    bool windows = a->kind == QD_OP_ALL_REDUCE && a->m < slot->rows && (b->kind == QD_OP_ALL_REDUCE || b->kind == QD_OP_LINEAR) &&
                   b->m < slot->rows;
    return !windows || (a->first < b->to + b->m && b->to < a->first + a->m);
}

qd_status qd_class_settle(qd_class_writer *w)
{
    for (int i = 0; i < w->op_count; i++) {
        qd_op *op = &w->ops[i];
        if (!op->exchange.async)
            continue;
        op->exchange.until = w->op_count;
        for (int k = i + 1; k < w->op_count && op->exchange.until == w->op_count; k++)
            if (w->ops[k].after >= i)
                op->exchange.until = k;
        for (int k = i + 1; k < op->exchange.until; k++)
            for (int j = 0; j < QD_OP_SLOTS; j++)
                for (int s = 0; s < QD_OP_SLOTS && op->slot[s] >= 0; s++)
                    if (w->ops[k].slot[j] >= 0 && w->ops[k].slot[j] == op->slot[s] && (writes(&w->ops[k], j) || writes(op, s)) && meet(op, &w->ops[k], &w->slots[op->slot[s]]))
                        return QD_FAIL(QD_SYSTEM, "%s touches '%s' while an exchange that nobody has waited for works on it",
                                       qd_op_name(w->ops[k].kind), w->slots[op->slot[s]].name);
    }
    return QD_OK;
}
