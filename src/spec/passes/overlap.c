/* Cuts GEMMs next to a collective of tensor parallelism into pieces of rows, so that the collective
 * of one piece overlaps with the GEMM of the next (parallel.tp_overlap). Works on a finished list:
 * a gather and the GEMM that reads it become gathers of pieces, each awaited by its part of the
 * GEMM; a GEMM and the sum after it become parts, each followed by its sum. Every row is computed
 * and summed as before, so results are bit-identical. */
#include "spec/passes/passes.h"

/* The GEMM that is the first to read the result of gather `index`; op_count: another op is. */
static int reader_of(const qd_class_writer *w, int index)
{
    int slot = w->ops[index].slot[QD_ALL_GATHER_Y], i = qd_class_next(w, slot, QD_TOUCHES, index + 1);
    const qd_op *op = &w->ops[i];
    bool cuts = i < w->op_count && qd_op_is_gemm(op->kind) && op->slot[qd_gemm_rows(op->kind)] == slot && op->m == w->rows;
    return cuts ? i : w->op_count;
}

/* Whether op `index` is a sum over tp of the result of the GEMM before it. */
static bool sums_gemm(const qd_class_writer *w, int index)
{
    const qd_op *op = &w->ops[index], *before = op - 1;
    return index > 0 && index < w->op_count && op->exchange.async &&
           (op->kind == QD_OP_ALL_REDUCE || op->kind == QD_OP_REDUCE_SCATTER) && op->m == w->rows &&
           qd_op_is_gemm(before->kind) && before->m == w->rows && qd_op_access(before, qd_op_first(op)) == QD_WRITES;
}

/* Emits piece `piece` of an op: under sp a range of each rank's rows, otherwise one range. A gather
 * or scatter transfers all ranges at once. */
static void emit_piece(qd_class_writer *w, const qd_op *op, int piece)
{
    bool at_once = op->kind == QD_OP_ALL_GATHER || op->kind == QD_OP_REDUCE_SCATTER;
    int ranges = w->ledger->mesh.sp ? w->tensor.size : 1, pieces = w->config->tensor_pieces;
    int64_t all = 0;
    for (int s = 0; s < ranges; s++) {
        int64_t begin, count, first, rows;
        qd_slice(w->rows, ranges, s, &begin, &count);
        qd_slice(count, pieces, piece, &first, &rows);
        all += rows;
        if (rows == 0 || at_once)
            continue;
        qd_op *part = qd_class_keep(w, op);
        part->first = part->to = begin + first;
        part->m = rows;
        part->flops = op->flops * (double)rows / (double)op->m;
        part->bytes = qd_op_communicates(op) ? op->bytes : op->bytes * rows / op->m;
        part->exchange.count = op->exchange.count * rows / op->m;
    }
    if (all == 0 || !at_once)
        return;
    qd_op *part = qd_class_keep(w, op);
    part->exchange.count = all * op->n;
    part->exchange.piece = piece;
    part->exchange.pieces = pieces;
}

void qd_pass_overlap(qd_class_writer *w)
{
    if (w->config->tensor_pieces <= 1 || w->tensor.size == 1 || !w->config->overlap)
        return;
    /* Per op: how many ops from it on are cut together, piece by piece; 0: the op is kept whole. */
    int *together = QD_CLASS_NEW(w, int, w->op_count);
    for (int i = 0; i < w->op_count && together; i++) {
        bool gathers = w->ops[i].kind == QD_OP_ALL_GATHER && w->ops[i].exchange.async;
        int by = gathers ? reader_of(w, i) : w->op_count;
        if (by < w->op_count && !sums_gemm(w, by + 1))
            together[i] = together[by] = 1;
        else if (together[i] == 0 && sums_gemm(w, i + 1))
            together[i] = 2;
    }
    qd_old_list old = qd_class_restart(w);
    for (int i = 0; i < old.count && together; i += together[i] == 2 ? 2 : 1) {
        if (together[i] == 0)
            qd_class_keep(w, &old.ops[i]);
        for (int piece = 0; piece < w->config->tensor_pieces; piece++)
            for (int k = 0; k < together[i]; k++)
                emit_piece(w, &old.ops[i + k], piece);
    }
}
