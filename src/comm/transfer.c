/* Properties of a single operation: its segments, which ranks produce and consume, its fingerprint,
 * and the error message when ranks disagree. */
#include "comm/comm_impl.h"

#include <stdio.h>
#include <string.h>

void qd_comm_place_set(qd_comm_place *place, const char *text)
{
    uint64_t words[QD_COMM_PLACE_BYTES / 8] = {0};
    size_t length = strnlen(text, QD_COMM_PLACE_BYTES - 1);
    memcpy(words, text, length);
    for (size_t i = 0; i < QD_COMM_PLACE_BYTES / 8; i++)
        atomic_store_explicit(&place->words[i], words[i], memory_order_relaxed);
}

void qd_comm_place_get(const qd_comm_place *place, char text[QD_COMM_PLACE_BYTES])
{
    for (size_t i = 0; i < QD_COMM_PLACE_BYTES / 8; i++) {
        uint64_t word = atomic_load_explicit(&place->words[i], memory_order_relaxed);
        memcpy(text + 8 * i, &word, 8);
    }
    text[QD_COMM_PLACE_BYTES - 1] = '\0';
}

int qd_transfer_segment_count(const qd_transfer *op, int rank)
{
    return op->request.lists ? op->request.lists[rank].count : 1;
}

qd_segment qd_transfer_segment(const qd_transfer *op, int rank, int i)
{
    if (op->request.lists) return op->request.lists[rank].segments[i];
    qd_segment segment;
    qd_slice(op->request.count, op->comm->size, rank, &segment.offset, &segment.count);
    return segment;
}

int64_t qd_transfer_packed_count(const qd_transfer *op, int rank)
{
    int64_t count = 0;
    int segments = qd_transfer_segment_count(op, rank);
    for (int i = 0; i < segments; i++) count += qd_transfer_segment(op, rank, i).count;
    return count;
}

/* Copies packed range [first, first + count) of `rank` between the full and the packed buffer,
 * segment by segment. */
static void copy_pieces(const qd_transfer *op, int rank, int64_t first, int64_t count, char *full, char *packed,
                        bool pack)
{
    int64_t size = (int64_t)qd_dtype_size(op->request.dtype), at = 0;
    int segments = qd_transfer_segment_count(op, rank);
    for (int i = 0; i < segments && at < first + count; i++) {
        qd_segment segment = qd_transfer_segment(op, rank, i);
        int64_t begin = first > at ? first : at;
        int64_t end = first + count < at + segment.count ? first + count : at + segment.count;
        if (begin < end) {
            char *in_full = full + (segment.offset + begin - at) * size, *in_packed = packed + (begin - first) * size;
            if (pack)
                memcpy(in_packed, in_full, (size_t)((end - begin) * size));
            else
                memcpy(in_full, in_packed, (size_t)((end - begin) * size));
        }
        at += segment.count;
    }
}

void qd_transfer_pack(const qd_transfer *op, int rank, int64_t first, int64_t count, const void *full, void *packed)
{
    copy_pieces(op, rank, first, count, (char *)full, packed, true);
}

void qd_transfer_unpack(const qd_transfer *op, int rank, int64_t first, int64_t count, const void *packed, void *full)
{
    copy_pieces(op, rank, first, count, full, (char *)packed, false);
}

bool qd_transfer_is_split(const qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    return r->kind == QD_COLL_REDUCE && qd_coll_split(r->count * (int64_t)qd_dtype_size(r->dtype));
}

bool qd_transfer_produces(const qd_transfer *op, int rank)
{
    switch (op->request.kind) {
    case QD_COLL_BROADCAST:
    case QD_COLL_SCATTER: return rank == op->request.root;
    case QD_COLL_REDUCE: return rank != op->request.root || qd_transfer_is_split(op);
    case QD_COLL_GATHER: return rank != op->request.root;
    case QD_COLL_SEND: return rank == op->comm->rank;
    case QD_COLL_RECV: return rank == op->request.root;
    case QD_COLL_BARRIER: return false;
    default: return true;
    }
}

bool qd_transfer_consumes(const qd_transfer *op, int rank)
{
    switch (op->request.kind) {
    case QD_COLL_BROADCAST:
    case QD_COLL_SCATTER: return rank != op->request.root;
    case QD_COLL_REDUCE: return rank == op->request.root || qd_transfer_is_split(op);
    case QD_COLL_GATHER: return rank == op->request.root;
    case QD_COLL_SEND: return rank == op->request.root;
    case QD_COLL_RECV: return rank == op->comm->rank;
    case QD_COLL_BARRIER: return false;
    default: return true;
    }
}

void qd_transfer_own_pieces(const qd_transfer *op, qd_transfer_visit visit, void *context)
{
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank;
    int64_t size = (int64_t)qd_dtype_size(r->dtype), packed = 0;
    bool gathers = r->kind == QD_COLL_ALL_GATHER || r->kind == QD_COLL_GATHER;
    char *to = r->out;
    const char *from = r->in;
    switch (r->kind) {
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER:
        if (me != r->root) return;
        break;
    case QD_COLL_REDUCE_SCATTER:
        if (op->comm->size > 1) return;
        break;
    case QD_COLL_ALL_GATHER: break;
    case QD_COLL_ALL_TO_ALL:
        to += r->in_counts[me] > 0 ? r->out_offsets[me] * size : 0;
        from += r->in_counts[me] > 0 ? r->in_offsets[me] * size : 0;
        if (r->in_counts[me] > 0 && to != from) visit(context, to, from, r->in_counts[me] * size);
        return;
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_REDUCE:
        if (op->comm->size == 1 && r->count > 0 && to != from) visit(context, to, from, r->count * size);
        return;
    default: return;
    }
    for (int i = 0; i < qd_transfer_segment_count(op, me); i++) {
        qd_segment segment = qd_transfer_segment(op, me, i);
        if (segment.count > 0) {
            char *piece_to = to + (gathers ? segment.offset : packed) * size;
            const char *piece_from = from + (gathers ? packed : segment.offset) * size;
            if (piece_to != piece_from) visit(context, piece_to, piece_from, segment.count * size);
        }
        packed += segment.count;
    }
}

#define STREAM_BYTES (1 << 20) /* without a given way, pieces of this size and more bypass the caches */
#define PAGES_BYTES (8 << 20)  /* beyond the reach of the TLB */

qd_copy_way qd_transfer_copy_way(int64_t bytes)
{
    return bytes < STREAM_BYTES ? QD_COPY_NEAR : bytes < PAGES_BYTES ? QD_COPY_PAGE : QD_COPY_PAGES;
}

static void copy_piece(void *context, void *to, const void *from, int64_t bytes)
{
    const qd_copy_way *way = context;
    qd_comm_copy(to, from, bytes, way ? *way : qd_transfer_copy_way(bytes));
}

void qd_transfer_copy_own(const qd_transfer *op, const qd_copy_way *way)
{
    qd_transfer_own_pieces(op, copy_piece, (void *)(uintptr_t)way);
}

static const char *reduce_text(const qd_fingerprint *f)
{
    switch (f->kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_REDUCE:
    case QD_COLL_REDUCE_SCATTER: return qd_reduce_op_name((qd_reduce_op)f->reduce);
    default: return NULL;
    }
}

const char *qd_fingerprint_text(const qd_fingerprint *f, char *buffer, size_t bytes)
{
    const char *kind = f->kind < QD_COLL_KIND_COUNT ? qd_coll_kind_name((qd_coll_kind)f->kind) : "unknown operation";
    const char *type = f->dtype < QD_DTYPE_COUNT ? qd_dtype_name((qd_dtype)f->dtype) : "unknown type";
    const char *reduce = reduce_text(f);
    char detail[64] = "";
    switch (f->kind) {
    case QD_COLL_BARRIER: snprintf(buffer, bytes, "%s", kind); return buffer;
    case QD_COLL_ALL_TO_ALL: snprintf(buffer, bytes, "%s of %s", kind, type); return buffer;
    case QD_COLL_BROADCAST:
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER: snprintf(detail, sizeof detail, " (root %d)", f->root); break;
    case QD_COLL_REDUCE: snprintf(detail, sizeof detail, " (%s, root %d)", reduce, f->root); break;
    case QD_COLL_SEND: snprintf(detail, sizeof detail, " to rank %d of the group", f->root); break;
    case QD_COLL_RECV: snprintf(detail, sizeof detail, " from rank %d of the group", f->root); break;
    default:
        if (reduce) snprintf(detail, sizeof detail, " (%s)", reduce);
    }
    snprintf(buffer, bytes, "%s of %lld %s%s%s", kind, (long long)f->count, type, detail,
             f->shape ? " in segments" : "");
    return buffer;
}

/* " at 'step 3'", or "". */
static const char *place_text(const char *place, char *buffer, size_t bytes)
{
    buffer[0] = '\0';
    if (place[0]) snprintf(buffer, bytes, " at '%s'", place);
    return buffer;
}

static qd_status mismatch(const qd_transfer *op, int peer, const qd_fingerprint *theirs, const char *peer_place,
                          const char *extra)
{
    const qd_comm *comm = op->comm;
    char mine_text[128], theirs_text[128], mine_at[96], theirs_at[96], mine_place[QD_COMM_PLACE_BYTES];
    qd_comm_place_get(&comm->world->place, mine_place);
    const char *number = op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV ? "message" : "operation";
    return QD_FAIL(QD_MISMATCH, "rank %d called %s as %s %llu of group %s%s, but rank %d called %s%s%s",
                   comm->world_ranks[peer], qd_fingerprint_text(theirs, theirs_text, sizeof theirs_text), number,
                   (unsigned long long)theirs->sequence, comm->name, place_text(peer_place, theirs_at, sizeof theirs_at),
                   comm->world_ranks[comm->rank], qd_fingerprint_text(&op->fingerprint, mine_text, sizeof mine_text),
                   place_text(mine_place, mine_at, sizeof mine_at), extra);
}

qd_status qd_transfer_check(const qd_transfer *op, int peer, const qd_fingerprint *theirs, const char *peer_place)
{
    const qd_fingerprint *mine = &op->fingerprint;
    bool same = mine->sequence == theirs->sequence && mine->count == theirs->count && mine->shape == theirs->shape &&
                mine->dtype == theirs->dtype;
    if (mine->kind == QD_COLL_SEND || mine->kind == QD_COLL_RECV)
        same = same && theirs->kind == (mine->kind == QD_COLL_SEND ? QD_COLL_RECV : QD_COLL_SEND);
    else
        same = same && mine->kind == theirs->kind && mine->root == theirs->root && mine->reduce == theirs->reduce;
    if (same) return QD_OK;
    const char *extra = mine->shape != theirs->shape && mine->count == theirs->count && mine->kind == theirs->kind
                            ? "; their segment lists differ"
                            : "";
    return mismatch(op, peer, theirs, peer_place, extra);
}

qd_status qd_transfer_check_pair(const qd_transfer *op, int peer, int64_t sends, int64_t expected,
                                 const char *peer_place)
{
    if (sends == expected) return QD_OK;
    qd_fingerprint theirs = op->fingerprint;
    char extra[128];
    snprintf(extra, sizeof extra, ": rank %d sends %lld elements to rank %d, which expects %lld",
             op->comm->world_ranks[peer], (long long)sends, op->comm->world_ranks[op->comm->rank],
             (long long)expected);
    return mismatch(op, peer, &theirs, peer_place, extra);
}
