/* What tensor parallelism puts between the products of a module: sums over tp, or under sp gathers and scatters of rows. */
#include "spec/ops_impl.h"
#include "spec/tensor.h"

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

/* The rows of the slot at place j of an op that it touches, as up to `tensor.size` ranges; returns how many. */
static int ranges(const qd_class_writer *w, const qd_op *op, int j, int64_t (*range)[2])
{
    const qd_slot *slot = &w->slots[op->slot[j]];
    const qd_op_exchange *e = &op->exchange;
    range[0][0] = 0;
    range[0][1] = slot->rows;
    switch (op->kind) {
    case QD_OP_LINEAR:
    case QD_OP_LINEAR_GELU:
    case QD_OP_LINEAR_DX:
    case QD_OP_LINEAR_DX_GELU:
    case QD_OP_ALL_REDUCE:
        if (j != 0 && !writes(op, j))
            return 1;
        range[0][0] = j == 0 ? op->first : op->to;
        range[0][1] = range[0][0] + op->m;
        return 1;
    case QD_OP_ALL_GATHER:
    case QD_OP_REDUCE_SCATTER: break;
    default: return 1;
    }
    bool own = j == (op->kind == QD_OP_REDUCE_SCATTER);
    for (int r = 0; r < e->group.size; r++) {
        int64_t first, rows, piece, count;
        qd_slice(op->m, e->group.size, own ? w->tensor_coord : r, &first, &rows);
        qd_slice(rows, e->pieces, e->piece, &piece, &count);
        range[r][0] = (own ? 0 : first) + piece;
        range[r][1] = range[r][0] + count;
        if (own)
            return 1;
    }
    return e->group.size;
}

/* Whether two ops touch the same rows of a slot. */
static bool meet(const qd_class_writer *w, const qd_op *a, int i, const qd_op *b, int j)
{
    int64_t x[QD_TENSOR_MOST][2], y[QD_TENSOR_MOST][2];
    int n = ranges(w, a, i, x), m = ranges(w, b, j, y);
    for (int k = 0; k < n; k++)
        for (int l = 0; l < m; l++)
            if (x[k][0] < y[l][1] && y[l][0] < x[k][1])
                return true;
    return false;
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
                for (int s = 0; s < QD_OP_SLOTS; s++)
                    if (op->slot[s] >= 0 && w->ops[k].slot[j] == op->slot[s] && (writes(&w->ops[k], j) || writes(op, s)) &&
                        meet(w, op, s, &w->ops[k], j))
                        return QD_FAIL(QD_SYSTEM, "%s touches '%s' while an exchange that nobody has waited for works on it",
                                       qd_op_name(w->ops[k].kind), w->slots[op->slot[s]].name);
    }
    return QD_OK;
}
