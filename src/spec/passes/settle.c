/* Last pass over the ops: until when asynchronous exchanges are in flight. The first op that
 * accesses rows of an exchange, and may not do so while it is in flight, waits for it. */
#include "spec/passes/passes.h"
#include "spec/layout/tensor.h"

/* The rows of operand j that an op accesses, as up to `tensor.size` ranges; returns their
 * number. */
static int ranges(const qd_class_writer *w, const qd_op *op, int j, int64_t (*range)[2])
{
    const qd_op_exchange *e = &op->exchange;
    bool gathers = op->kind == QD_OP_ALL_GATHER, scatters = op->kind == QD_OP_REDUCE_SCATTER;
    bool own = j == (scatters ? QD_REDUCE_SCATTER_Y : QD_ALL_GATHER_X);
    bool reads = op->kind == QD_OP_ALL_REDUCE || (qd_op_is_gemm(op->kind) && j == qd_gemm_rows(op->kind));
    bool writes = qd_op_is_gemm(op->kind) && qd_op_writes(op, j);
    range[0][0] = reads ? op->first : writes ? op->to : 0;
    range[0][1] = range[0][0] + (reads || writes ? op->m : w->slots[op->slot[j]].rows);
    int count = !gathers && !scatters ? 0 : own ? 1 : e->group.size;
    for (int r = 0; r < count; r++) {
        int64_t first, rows, piece;
        qd_slice(op->m, e->group.size, own ? w->tensor_coord : r, &first, &rows);
        qd_slice(rows, e->pieces, e->piece, &piece, &rows);
        range[r][0] = (own ? 0 : first) + piece;
        range[r][1] = range[r][0] + rows;
    }
    return count > 0 ? count : 1;
}

/* Whether two ops access the same rows of a slot. */
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

bool qd_ops_conflict(const qd_class_writer *w, const qd_op *a, const qd_op *b)
{
    for (int i = 0; i < QD_OP_SLOTS; i++)
        for (int j = 0; j < QD_OP_SLOTS && a->slot[i] >= 0; j++)
            if (a->slot[i] == b->slot[j] && (qd_op_writes(a, i) || qd_op_writes(b, j)) && meet(w, a, i, b, j))
                return true;
    return false;
}

int qd_class_conflict(const qd_class_writer *w, int index)
{
    int k = index + 1;
    while (k < w->op_count && !qd_ops_conflict(w, &w->ops[index], &w->ops[k]))
        k++;
    return k;
}

void qd_pass_settle(qd_class_writer *w)
{
    int until = w->op_count; /* an op that waits for an exchange waits for all before it */
    for (int i = w->op_count - 1; i >= 0; i--) {
        if (!w->ops[i].exchange.async)
            continue;
        int by = qd_class_conflict(w, i);
        until = by < until ? by : until;
        w->ops[i].exchange.until = until;
        if (by < w->op_count && w->ops[by].after < 0)
            w->ops[by].after = i;
    }
}
