/* Cuts GEMMs next to a collective of tensor parallelism into pieces of rows, so that the collective
 * of one piece overlaps with the GEMM of the next (parallel.tp_overlap). Works on a finished list:
 * a gather and the GEMM that reads it become gathers of pieces, each awaited by its part of the
 * GEMM; a GEMM and the sum after it become parts, each followed by its sum. Every row is computed
 * and summed as before, so results are bit-identical. */
#include "spec/passes/passes.h"

static bool is_gemm(qd_op_kind kind)
{
    return kind == QD_OP_LINEAR || kind == QD_OP_LINEAR_GELU || kind == QD_OP_LINEAR_DX || kind == QD_OP_LINEAR_DX_GELU;
}

static bool is_output(const qd_op *op, int slot)
{
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (op->slot[j] == slot && slot >= 0 && qd_op_roles(op->kind)[j] == 'w')
            return true;
    return false;
}

typedef struct rewriting {
    qd_class_writer *w;
    qd_old_list old;
    int *place; /* per op of the old list: index of its last op in the new one */
    int pieces;
} rewriting;

/* The GEMM that is the first to read the result of gather `index`, -1: another op is. */
static int reader_of(const rewriting *r, int index)
{
    const qd_op *gather = &r->old.ops[index];
    for (int i = index + 1; i < r->old.count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (r->old.ops[i].slot[j] == gather->slot[QD_ALL_GATHER_Y])
                return is_gemm(r->old.ops[i].kind) && j == qd_gemm_rows(r->old.ops[i].kind) && r->old.ops[i].m == r->w->rows ? i : -1;
    return -1;
}

/* Whether op `index` is a sum over tp of the result of the GEMM before it. */
static bool sums_gemm(const rewriting *r, int index)
{
    const qd_op *op = &r->old.ops[index], *before = op - 1;
    return index > 0 && index < r->old.count && op->exchange.async &&
           (op->kind == QD_OP_ALL_REDUCE || op->kind == QD_OP_REDUCE_SCATTER) && op->m == r->w->rows &&
           is_gemm(before->kind) && before->m == r->w->rows &&
           is_output(before, op->slot[op->kind == QD_OP_ALL_REDUCE ? QD_ALL_REDUCE_X : QD_REDUCE_SCATTER_X]);
}

/* A piece consists of one range of rows per rank under sp, otherwise of one range. Returns the
 * number of ranges. */
static int ranges(const rewriting *r)
{
    return r->w->ledger->mesh.sp ? r->w->tensor.size : 1;
}

static void find_range(const rewriting *r, int piece, int range, int64_t *first, int64_t *rows)
{
    int64_t begin, count;
    qd_slice(r->w->rows, ranges(r), range, &begin, &count);
    qd_slice(count, r->pieces, piece, first, rows);
    *first += begin;
}

/* Emits the part of a GEMM for a piece; its first op waits for `after`. */
static void emit_gemm(rewriting *r, const qd_op *op, int piece, int after)
{
    for (int s = 0; s < ranges(r); s++) {
        int64_t first, rows;
        find_range(r, piece, s, &first, &rows);
        if (rows == 0)
            continue;
        qd_op *part = qd_class_keep(r->w, op);
        part->first = part->to = first;
        part->m = rows;
        part->flops = op->flops * (double)rows / (double)op->m;
        part->bytes = op->bytes * rows / op->m;
        part->after = after;
    }
}

static void emit_exchange(rewriting *r, const qd_op *op, int piece)
{
    int64_t all = 0;
    for (int s = 0; s < ranges(r); s++) {
        int64_t first, rows;
        find_range(r, piece, s, &first, &rows);
        all += rows;
    }
    if (all == 0)
        return;
    qd_op *part = qd_class_keep(r->w, op);
    part->exchange.count = all * op->n;
    if (op->kind == QD_OP_ALL_REDUCE) {
        int64_t first, rows;
        find_range(r, piece, 0, &first, &rows);
        part->first = part->to = first;
        part->m = rows;
    } else {
        part->exchange.piece = piece;
        part->exchange.pieces = r->pieces;
    }
}

/* Maps the index of an op waited for from the old list to the new one. */
static int moved(const rewriting *r, int after)
{
    return after < 0 ? -1 : r->place[after];
}

qd_status qd_pass_overlap(qd_class_writer *w, int pieces)
{
    rewriting r = {.w = w, .pieces = pieces};
    int count = w->op_count;
    if (pieces <= 1 || w->tensor.size == 1 || !w->config->overlap)
        return QD_OK;
    int *reader = QD_ARENA_NEW(w->arena, int, count), *pieces_at = QD_ARENA_NEW(w->arena, int, (size_t)count *(size_t)pieces);
    r.place = QD_ARENA_NEW(w->arena, int, count);
    if (!reader || !pieces_at || !r.place)
        return QD_NO_MEMORY;
    r.old = qd_class_restart(w);
    for (int i = 0; i < count; i++)
        reader[i] = -1; /* per GEMM: the gather that it reads */
    for (int i = 0; i < count && !w->no_memory; i++) {
        const qd_op *op = &r.old.ops[i];
        int by = op->kind == QD_OP_ALL_GATHER && op->exchange.async ? reader_of(&r, i) : -1;
        if (by >= 0 && !sums_gemm(&r, by + 1)) {
            reader[by] = i;
            for (int p = 0; p < pieces; p++) {
                emit_exchange(&r, op, p);
                pieces_at[i * pieces + p] = w->op_count - 1;
            }
        } else if (reader[i] >= 0) {
            for (int p = 0; p < pieces; p++)
                emit_gemm(&r, op, p, pieces_at[reader[i] * pieces + p]);
        } else if (sums_gemm(&r, i + 1)) {
            for (int p = 0; p < pieces; p++) {
                emit_gemm(&r, op, p, moved(&r, op->after));
                emit_exchange(&r, op + 1, p);
            }
            r.place[i++] = w->op_count - 1;
        } else {
            qd_class_keep(w, op)->after = moved(&r, op->after);
        }
        r.place[i] = w->op_count - 1;
    }
    return w->no_memory ? QD_NO_MEMORY : QD_OK;
}
