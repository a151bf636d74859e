/* Executes an operation with checksums (checked.h) as a sequence of the backend's own operations:
 *
 *   moves without sums    the data, then the checksums by an operation of the same kind
 *   reductions            pieces of the parts that each rank sums, by all-to-all into a buffer and
 *                         their checksums; this rank sums its part locally
 *   all-reduce            the same, then an all-gather of the sums and their checksums
 *   small all-reduce      one all-gather of inputs with their checksums appended
 *
 * All of them carry the fingerprint of the caller's operation, so ranks that disagree are reported
 * as without checksums. Each has a sequence number of its own. */
#include "comm/checked.h"

#include "comm/work.h"
#include "device/sum.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define PIECE_BYTES ((int64_t)4 << 20) /* of a buffer for received or packed parts of a reduction */

/* Of a communicator; its collectives run one after another. Arrays have one entry per rank. */
struct qd_checks {
    uint64_t *own, *theirs; /* checksums of what this rank sends to each, and of what each sends to it */
    int64_t *in_counts, *in_offsets, *out_counts, *out_offsets;
    int64_t *ones, *index; /* all 1; 0, 1, 2, … */
    const void **sources;
    unsigned char *buffer; /* from qd_comm_alloc() */
    int64_t buffer_bytes;
};

enum { DATA, MARKS, WHOLE, PIECE, PIECE_MARKS, SUMS, SUM_MARKS };

void qd_comm_check_messages(qd_comm *comm, bool check)
{
    comm->world->checks_messages = check;
}

void qd_checks_destroy(qd_comm *comm)
{
    if (!comm->checks) return;
    qd_comm_free(comm, comm->checks->buffer);
    free(comm->checks);
    comm->checks = NULL;
}

static qd_status checks_create(qd_comm *comm)
{
    if (comm->checks) return QD_OK;
    size_t n = (size_t)comm->size;
    qd_checks *k = calloc(1, sizeof *k + 9 * n * sizeof(int64_t)); /* one block: the struct, then its arrays */
    if (!k) return QD_FAIL(QD_NO_MEMORY, "no memory for the checksums of group %s", comm->name);
    k->own = (uint64_t *)(k + 1);
    k->theirs = k->own + n;
    k->in_counts = (int64_t *)(k->theirs + n);
    k->in_offsets = k->in_counts + n;
    k->out_counts = k->in_offsets + n;
    k->out_offsets = k->out_counts + n;
    k->ones = k->out_offsets + n;
    k->index = k->ones + n;
    k->sources = (const void **)(k->index + n);
    for (size_t i = 0; i < n; i++) {
        k->ones[i] = 1;
        k->index[i] = (int64_t)i;
    }
    comm->checks = k;
    return QD_OK;
}

static qd_status take_buffer(qd_comm *comm, int64_t bytes)
{
    qd_checks *k = comm->checks;
    if (bytes <= k->buffer_bytes) return QD_OK;
    qd_comm_free(comm, k->buffer);
    k->buffer = NULL;
    k->buffer_bytes = 0;
    void *memory;
    QD_TRY(qd_comm_alloc(comm, bytes, &memory));
    k->buffer = memory;
    k->buffer_bytes = bytes;
    return QD_OK;
}

static int64_t element_size(const qd_transfer *op)
{
    return (int64_t)qd_dtype_size(op->request.dtype);
}

static uint64_t mark_of(const void *data, int64_t bytes)
{
    return XXH3_64bits(bytes > 0 ? data : "", (size_t)bytes);
}

/* The part of `rank` in a full buffer, or packed: segments one after another, each seeded with the
 * checksum so far. */
static uint64_t mark_of_part(const qd_transfer *op, int rank, const void *data, bool packed)
{
    int64_t size = element_size(op), at = 0;
    uint64_t mark = 0;
    for (int i = 0; i < qd_transfer_segment_count(op, rank); i++) {
        qd_segment segment = qd_transfer_segment(op, rank, i);
        if (segment.count > 0)
            mark = XXH3_64bits_withSeed((const char *)data + (packed ? at : segment.offset) * size,
                                        (size_t)(segment.count * size), mark);
        at += segment.count;
    }
    return mark;
}

static qd_status compare(const qd_transfer *op, int peer, uint64_t sent, uint64_t arrived)
{
    if (sent == arrived) return QD_OK;
    const qd_comm *comm = op->comm;
    char call[192], place[QD_COMM_PLACE_BYTES];
    qd_comm_place_get(&comm->world->place, place);
    return QD_FAIL(QD_DIFFERENT,
                   "a message from rank %d to rank %d was damaged: %s%s%s%s: checksum %016llx when it was sent, %016llx when it arrived",
                   comm->world_ranks[peer], comm->world_ranks[comm->rank],
                   qd_call_text(&op->fingerprint, comm->name, call, sizeof call), place[0] ? ", at '" : "", place,
                   place[0] ? "'" : "", (unsigned long long)sent, (unsigned long long)arrived);
}

/* Moves without sums. In `sums` the call is an all-reduce whose sums are gathered. */

static qd_coll_kind move_kind(const qd_transfer *op, bool sums)
{
    return sums ? QD_COLL_ALL_GATHER : op->request.kind;
}

/* Checksums of what this rank sends. */
static void mark_data(qd_transfer *op, bool sums)
{
    const qd_coll_request *r = &op->request;
    qd_checks *k = op->comm->checks;
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = element_size(op);
    switch (move_kind(op, sums)) {
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER:
        k->own[me] = mark_of_part(op, me, sums ? r->out : r->in, !sums);
        break;
    case QD_COLL_BROADCAST:
        if (me == r->root) k->theirs[me] = mark_of(r->in, r->count * size);
        break;
    case QD_COLL_SCATTER:
        for (int p = 0; me == r->root && p < n; p++) k->own[p] = mark_of_part(op, p, r->in, false);
        break;
    case QD_COLL_ALL_TO_ALL:
        for (int p = 0; p < n; p++) {
            const char *block = r->in_counts[p] > 0 ? (const char *)r->in + r->in_offsets[p] * size : NULL;
            k->own[p] = mark_of(block, r->in_counts[p] * size);
        }
        break;
    case QD_COLL_SEND: op->checked.mark = mark_of(r->in, r->count * size); break;
    default: break;
    }
}

/* The operation that exchanges them. */
static qd_coll_request marks_request(const qd_transfer *op, bool sums)
{
    qd_checks *k = op->comm->checks;
    int n = op->comm->size;
    qd_coll_request r = {.kind = move_kind(op, sums), .dtype = QD_I64, .root = op->request.root, .count = n};
    switch (r.kind) {
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER:
        r.in = &k->own[op->comm->rank];
        r.out = k->theirs;
        break;
    case QD_COLL_BROADCAST:
        r.count = 1;
        r.in = r.out = &k->theirs[r.root];
        break;
    case QD_COLL_SCATTER:
        r.in = k->own;
        r.out = &k->theirs[r.root];
        break;
    case QD_COLL_ALL_TO_ALL:
        r.count = 0;
        r.in = k->own;
        r.out = k->theirs;
        r.in_counts = r.out_counts = k->ones;
        r.in_offsets = r.out_offsets = k->index;
        break;
    default: /* send and receive: the same member, on two ranks */
        r.count = 1;
        r.in = r.out = (uint64_t *)&op->checked.mark;
    }
    return r;
}

/* Compares what has arrived with the senders' checksums. */
static qd_status compare_data(qd_transfer *op, bool sums)
{
    const qd_coll_request *r = &op->request;
    const qd_checks *k = op->comm->checks;
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = element_size(op);
    switch (move_kind(op, sums)) {
    case QD_COLL_GATHER:
        if (me != r->root) return QD_OK;
        break;
    case QD_COLL_BROADCAST:
        return me == r->root ? QD_OK : compare(op, r->root, k->theirs[r->root], mark_of(r->out, r->count * size));
    case QD_COLL_SCATTER:
        return me == r->root ? QD_OK : compare(op, r->root, k->theirs[r->root], mark_of_part(op, me, r->out, true));
    case QD_COLL_ALL_TO_ALL:
        for (int p = 0; p < n; p++) {
            const char *block = r->out_counts[p] > 0 ? (const char *)r->out + r->out_offsets[p] * size : NULL;
            if (p != me) QD_TRY(compare(op, p, k->theirs[p], mark_of(block, r->out_counts[p] * size)));
        }
        return QD_OK;
    case QD_COLL_SEND: return QD_OK;
    case QD_COLL_RECV: return compare(op, r->root, op->checked.mark, mark_of(r->out, r->count * size));
    default: break;
    }
    for (int p = 0; p < n; p++)
        if (p != me) QD_TRY(compare(op, p, k->theirs[p], mark_of_part(op, p, r->out, false)));
    return QD_OK;
}

/* Small all-reduce: the input of each rank and its checksum, at a multiple of 64 bytes. */

static int64_t whole_bytes(const qd_transfer *op)
{
    return (op->request.count * element_size(op) + (int64_t)sizeof(uint64_t) + 63) / 64 * 64;
}

static qd_status whole_request(qd_transfer *op, qd_coll_request *request)
{
    qd_checks *k = op->comm->checks;
    int n = op->comm->size;
    int64_t bytes = op->request.count * element_size(op), stride = whole_bytes(op);
    QD_TRY(take_buffer(op->comm, n * stride));
    unsigned char *own = k->buffer + op->comm->rank * stride;
    memset(own + stride - 64, 0, 64);
    if (bytes > 0) memcpy(own, op->request.in, (size_t)bytes);
    uint64_t mark = mark_of(own, stride - (int64_t)sizeof mark);
    memcpy(own + stride - sizeof mark, &mark, sizeof mark);
    *request = (qd_coll_request){
        .kind = QD_COLL_ALL_GATHER, .dtype = QD_U8, .root = -1, .count = n * stride, .in = own, .out = k->buffer};
    return QD_OK;
}

static qd_status sum_whole(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    qd_checks *k = op->comm->checks;
    int64_t stride = whole_bytes(op);
    for (int p = 0; p < op->comm->size; p++) {
        const unsigned char *data = k->buffer + p * stride;
        uint64_t mark;
        memcpy(&mark, data + stride - sizeof mark, sizeof mark);
        if (p != op->comm->rank) QD_TRY(compare(op, p, mark, mark_of(data, stride - (int64_t)sizeof mark)));
        k->sources[p] = data;
    }
    if (r->count > 0) qd_sum_tree(r->out, k->sources, op->comm->size, r->count, r->dtype, r->reduce);
    return QD_OK;
}

/* Reductions, in pieces: elements [first, first + length) of the part that each rank sums. */

static bool is_rooted(const qd_transfer *op)
{
    return op->request.kind == QD_COLL_REDUCE;
}

static int64_t part_count(const qd_transfer *op, int rank)
{
    if (!is_rooted(op)) return qd_transfer_packed_count(op, rank);
    return rank == op->request.root ? op->request.count : 0;
}

static int64_t piece_elements(const qd_transfer *op)
{
    return PIECE_BYTES / op->comm->size / element_size(op);
}

static int64_t pieces(const qd_transfer *op)
{
    int64_t most = 0, per = piece_elements(op);
    for (int p = 0; p < op->comm->size; p++)
        if (part_count(op, p) > most) most = part_count(op, p);
    return (most + per - 1) / per;
}

static int64_t piece_length(const qd_transfer *op, int rank)
{
    int64_t rest = part_count(op, rank) - op->checked.piece * piece_elements(op);
    return rest < 0 ? 0 : rest < piece_elements(op) ? rest : piece_elements(op);
}

/* The buffer: received pieces of all ranks, then packed ones. */
static unsigned char *slot(const qd_transfer *op, int rank, bool packed)
{
    return op->comm->checks->buffer + ((packed ? op->comm->size : 0) + rank) * piece_elements(op) * element_size(op);
}

static bool is_packed(const qd_transfer *op)
{
    for (int p = 0; op->request.lists && p < op->comm->size; p++)
        if (op->request.lists[p].count > 1) return true;
    return false;
}

/* Offset in the full buffer, in elements; only of parts that are not packed. */
static int64_t piece_offset(const qd_transfer *op, int rank)
{
    int64_t first = op->checked.piece * piece_elements(op);
    if (is_rooted(op)) return first;
    return qd_transfer_segment_count(op, rank) > 0 ? qd_transfer_segment(op, rank, 0).offset + first : 0;
}

static qd_status piece_request(qd_transfer *op, qd_coll_request *request)
{
    const qd_coll_request *r = &op->request;
    qd_checks *k = op->comm->checks;
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = element_size(op), slots = piece_elements(op);
    bool packed = is_packed(op);
    QD_TRY(take_buffer(op->comm, (packed ? 2 : 1) * n * slots * size));
    for (int p = 0; p < n; p++) {
        int64_t length = piece_length(op, p);
        if (packed) qd_transfer_pack(op, p, op->checked.piece * slots, length, r->in, slot(op, p, true));
        k->in_counts[p] = p == me ? 0 : length;
        k->in_offsets[p] = packed ? (n + p) * slots : piece_offset(op, p);
        k->out_counts[p] = p == me ? 0 : piece_length(op, me);
        k->out_offsets[p] = p * slots;
        const char *in = packed ? (const char *)k->buffer : r->in;
        k->own[p] = k->in_counts[p] > 0 ? mark_of(in + k->in_offsets[p] * size, length * size) : mark_of("", 0);
    }
    *request = (qd_coll_request){.kind = QD_COLL_ALL_TO_ALL,
                                 .dtype = r->dtype,
                                 .root = -1,
                                 .in = packed ? k->buffer : r->in,
                                 .out = k->buffer,
                                 .in_counts = k->in_counts,
                                 .in_offsets = k->in_offsets,
                                 .out_counts = k->out_counts,
                                 .out_offsets = k->out_offsets};
    return QD_OK;
}

static qd_coll_request piece_marks_request(const qd_transfer *op)
{
    const qd_checks *k = op->comm->checks;
    return (qd_coll_request){.kind = QD_COLL_ALL_TO_ALL,
                             .dtype = QD_I64,
                             .root = -1,
                             .in = k->own,
                             .out = k->theirs,
                             .in_counts = k->ones,
                             .in_offsets = k->index,
                             .out_counts = k->ones,
                             .out_offsets = k->index};
}

static qd_status sum_piece(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    qd_checks *k = op->comm->checks;
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = element_size(op), length = piece_length(op, me), first = op->checked.piece * piece_elements(op);
    if (length == 0) return QD_OK;
    for (int p = 0; p < n; p++) {
        k->sources[p] = slot(op, p, false);
        if (p != me) QD_TRY(compare(op, p, k->theirs[p], mark_of(k->sources[p], length * size)));
    }
    k->sources[me] = is_packed(op) ? (const char *)slot(op, me, true) : (const char *)r->in + piece_offset(op, me) * size;
    int64_t at = r->kind == QD_COLL_ALL_REDUCE ? piece_offset(op, me) : first;
    qd_sum_tree((char *)r->out + at * size, k->sources, n, length, r->dtype, r->reduce);
    return QD_OK;
}

/* The sequence. Between the backend's operations op->request is the caller's. */

static qd_status begin(qd_transfer *op)
{
    qd_checked *c = &op->checked;
    qd_coll_request request = op->request;
    switch (c->stage) {
    case DATA: mark_data(op, false); break;
    case MARKS: request = marks_request(op, false); break;
    case WHOLE: QD_TRY(whole_request(op, &request)); break;
    case PIECE: QD_TRY(piece_request(op, &request)); break;
    case PIECE_MARKS: request = piece_marks_request(op); break;
    case SUMS: {
        qd_segment own = qd_transfer_segment(op, op->comm->rank, 0);
        mark_data(op, true);
        request.kind = QD_COLL_ALL_GATHER;
        request.in = own.count > 0 ? (char *)op->request.out + own.offset * element_size(op) : op->request.out;
        break;
    }
    default: request = marks_request(op, true);
    }
    op->request = request;
    op->fingerprint.sequence = qd_transfer_number(op->comm, &c->call);
    qd_last_call_set(op);
    c->running = true;
    return qd_op_start(op);
}

/* After a stage: whether another one follows. */
static qd_status end_stage(qd_transfer *op, bool *more)
{
    qd_checked *c = &op->checked;
    *more = true;
    switch (c->stage) {
    case DATA:
        *more = op->request.kind != QD_COLL_BARRIER;
        c->stage = MARKS;
        return QD_OK;
    case MARKS: *more = false; return compare_data(op, false);
    case WHOLE: *more = false; return sum_whole(op);
    case PIECE: c->stage = PIECE_MARKS; return QD_OK;
    case PIECE_MARKS:
        QD_TRY(sum_piece(op));
        c->stage = ++c->piece < pieces(op) ? PIECE : SUMS;
        *more = c->stage == PIECE || op->request.kind == QD_COLL_ALL_REDUCE;
        return QD_OK;
    case SUMS: c->stage = SUM_MARKS; return QD_OK;
    default: *more = false; return compare_data(op, true);
    }
}

qd_status qd_checked_start(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    op->checked = (qd_checked){.on = true, .call = *r};
    QD_TRY(r->kind == QD_COLL_SEND || r->kind == QD_COLL_RECV ? QD_OK : checks_create(op->comm));
    bool reduces = r->kind == QD_COLL_ALL_REDUCE || r->kind == QD_COLL_REDUCE || r->kind == QD_COLL_REDUCE_SCATTER;
    bool whole = r->kind == QD_COLL_ALL_REDUCE && qd_coll_direct(r->count * element_size(op), op->comm->size);
    op->checked.stage = whole ? WHOLE : reduces ? PIECE : DATA;
    return begin(op);
}

qd_status qd_checked_poll(qd_transfer *op, bool *done, bool *moved)
{
    bool ended = false;
    *done = false;
    QD_TRY(qd_op_poll(op, &ended, moved));
    if (!ended) return QD_OK;
    *moved = true;
    qd_checked_finish(op);
    bool more;
    QD_TRY(end_stage(op, &more));
    *done = !more;
    return more ? begin(op) : QD_OK;
}

void qd_checked_finish(qd_transfer *op)
{
    if (op->checked.running) qd_op_finish(op);
    op->checked.running = false;
    op->request = op->checked.call;
}
