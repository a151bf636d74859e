/* Cuts GEMMs next to a collective of tensor parallelism into pieces of rows, so that the collective
 * of one piece overlaps with the GEMM of the next (parallel.tp_overlap). Works on a finished list:
 * a gather and the GEMM that reads it become gathers of pieces, each awaited by its part of the
 * GEMM; a GEMM and the sum after it become parts, each followed by its sum. Every row is computed
 * and summed as before, so results are bit-identical. */
#include "spec/passes/passes.h"

#include <string.h>

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

/* The GEMM that is the first to read the result of gather `index`, -1: another op is. */
static int reader_of(const qd_class_writer *w, int index)
{
    const qd_op *gather = &w->ops[index];
    for (int i = index + 1; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (w->ops[i].slot[j] == gather->slot[QD_ALL_GATHER_Y])
                return is_gemm(w->ops[i].kind) && j == qd_gemm_rows(w->ops[i].kind) && w->ops[i].m == w->rows ? i : -1;
    return -1;
}

/* Whether op `index` is a sum over tp of the result of the GEMM before it. */
static bool sums_gemm(const qd_class_writer *w, int index)
{
    const qd_op *op = &w->ops[index], *before = op - 1;
    return index > 0 && op->exchange.async && (op->kind == QD_OP_ALL_REDUCE || op->kind == QD_OP_REDUCE_SCATTER) && op->m == w->rows &&
           is_gemm(before->kind) && before->m == w->rows &&
           is_output(before, op->slot[op->kind == QD_OP_ALL_REDUCE ? QD_ALL_REDUCE_X : QD_REDUCE_SCATTER_X]);
}

typedef struct rewriting {
    qd_class_writer *w;
    qd_op *ops; /* the new list */
    int count, capacity;
    int *place; /* per op of the old list: index of its last op in the new one */
    int pieces;
} rewriting;

static qd_op *emit(rewriting *r, const qd_op *op)
{
    static _Thread_local qd_op lost;
    if (r->count == r->capacity) {
        int wanted = 2 * r->capacity;
        qd_op *larger = qd_arena_array(r->w->arena, (size_t)wanted, sizeof *larger);
        if (!larger) {
            r->w->no_memory = true;
            return &lost;
        }
        memcpy(larger, r->ops, (size_t)r->count * sizeof *larger);
        r->ops = larger;
        r->capacity = wanted;
    }
    r->ops[r->count] = *op;
    return &r->ops[r->count++];
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
        qd_op *part = emit(r, op);
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
    qd_op *part = emit(r, op);
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
    rewriting r = {.w = w, .capacity = w->op_count + 1, .pieces = pieces};
    if (pieces <= 1 || w->tensor.size == 1 || !w->config->overlap)
        return QD_OK;
    int *reader = QD_ARENA_NEW(w->arena, int, w->op_count), *pieces_at = QD_ARENA_NEW(w->arena, int, (size_t)w->op_count *(size_t)pieces);
    r.place = QD_ARENA_NEW(w->arena, int, w->op_count);
    r.ops = QD_ARENA_NEW(w->arena, qd_op, r.capacity);
    if (!reader || !pieces_at || !r.place || !r.ops)
        return QD_NO_MEMORY;
    for (int i = 0; i < w->op_count; i++)
        reader[i] = -1; /* per GEMM: the gather that it reads */
    for (int i = 0; i < w->op_count; i++) {
        const qd_op *op = &w->ops[i];
        int by = op->kind == QD_OP_ALL_GATHER && op->exchange.async ? reader_of(w, i) : -1;
        if (by >= 0 && !(by + 1 < w->op_count && sums_gemm(w, by + 1)))
            reader[by] = i;
        else
            by = -1;
        if (by >= 0) {
            for (int p = 0; p < pieces; p++) {
                emit_exchange(&r, op, p);
                pieces_at[i * pieces + p] = r.count - 1;
            }
        } else if (reader[i] >= 0) {
            for (int p = 0; p < pieces; p++)
                emit_gemm(&r, op, p, pieces_at[reader[i] * pieces + p]);
        } else if (i + 1 < w->op_count && sums_gemm(w, i + 1)) {
            for (int p = 0; p < pieces; p++) {
                emit_gemm(&r, op, p, moved(&r, op->after));
                emit_exchange(&r, &w->ops[i + 1], p);
            }
            r.place[i] = r.count - 1;
            i++;
        } else {
            emit(&r, op)->after = moved(&r, op->after);
        }
        r.place[i] = r.count - 1;
    }
    w->ops = r.ops;
    w->op_count = r.count;
    w->op_capacity = r.capacity;
    return w->no_memory ? QD_NO_MEMORY : QD_OK;
}
