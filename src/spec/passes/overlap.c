/* Cuts products at the border of tensor parallelism into pieces of rows, so that the exchange of
 * one piece runs beside the product of the next (parallel.tp_overlap). A pass over a finished
 * list: a gather and the product that reads it become gathers of pieces, each awaited by its
 * part of the product; a product and the sum that follows it become parts, each followed by its
 * sum. Every row is computed and summed as before, so no bit changes. */
#include "spec/passes/passes.h"

#include <string.h>

static bool is_product(qd_op_kind kind)
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

/* The product that is the first to read what gather `index` brings, -1: something else is. */
static int reader_of(const qd_class_writer *w, int index)
{
    const qd_op *gather = &w->ops[index];
    for (int i = index + 1; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (w->ops[i].slot[j] == gather->slot[QD_ALL_GATHER_Y])
                return is_product(w->ops[i].kind) && j == qd_gemm_rows(w->ops[i].kind) && w->ops[i].m == w->rows ? i : -1;
    return -1;
}

/* Whether op `index` is a sum over tp of what the product before it has computed. */
static bool sums_product(const qd_class_writer *w, int index)
{
    const qd_op *op = &w->ops[index], *before = op - 1;
    return index > 0 && op->exchange.async && (op->kind == QD_OP_ALL_REDUCE || op->kind == QD_OP_REDUCE_SCATTER) && op->m == w->rows &&
           is_product(before->kind) && before->m == w->rows &&
           is_output(before, op->slot[op->kind == QD_OP_ALL_REDUCE ? QD_ALL_REDUCE_X : QD_REDUCE_SCATTER_X]);
}

typedef struct rewriting {
    qd_class_writer *w;
    qd_op *ops; /* the new list */
    int count, capacity;
    int *place; /* per op of the old list: its last op in the new one */
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

/* Rows of a piece: under sp each rank has a stretch of it, else it is one stretch. Returns how
 * many there are. */
static int stretches(const rewriting *r)
{
    return r->w->ledger->mesh.sp ? r->w->tensor.size : 1;
}

static void find_stretch(const rewriting *r, int piece, int stretch, int64_t *first, int64_t *rows)
{
    int64_t begin, count;
    qd_slice(r->w->rows, stretches(r), stretch, &begin, &count);
    qd_slice(count, r->pieces, piece, first, rows);
    *first += begin;
}

/* The part of a product that belongs to a piece; its first op waits for `after`. */
static void emit_product(rewriting *r, const qd_op *op, int piece, int after)
{
    for (int s = 0; s < stretches(r); s++) {
        int64_t first, rows;
        find_stretch(r, piece, s, &first, &rows);
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
    for (int s = 0; s < stretches(r); s++) {
        int64_t first, rows;
        find_stretch(r, piece, s, &first, &rows);
        all += rows;
    }
    if (all == 0)
        return;
    qd_op *part = emit(r, op);
    part->exchange.count = all * op->n;
    if (op->kind == QD_OP_ALL_REDUCE) {
        int64_t first, rows;
        find_stretch(r, piece, 0, &first, &rows);
        part->first = part->to = first;
        part->m = rows;
    } else {
        part->exchange.piece = piece;
        part->exchange.pieces = r->pieces;
    }
}

/* What an op of the old list waited for, in the new one. */
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
        reader[i] = -1; /* per product: the gather that it reads */
    for (int i = 0; i < w->op_count; i++) {
        const qd_op *op = &w->ops[i];
        int by = op->kind == QD_OP_ALL_GATHER && op->exchange.async ? reader_of(w, i) : -1;
        if (by >= 0 && !(by + 1 < w->op_count && sums_product(w, by + 1)))
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
                emit_product(&r, op, p, pieces_at[reader[i] * pieces + p]);
        } else if (i + 1 < w->op_count && sums_product(w, i + 1)) {
            for (int p = 0; p < pieces; p++) {
                emit_product(&r, op, p, moved(&r, op->after));
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
