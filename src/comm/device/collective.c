/* Collectives between devices of one process; see the top of threads_impl.h.
 *
 * All-reduce: each rank sums its slice of all inputs and writes it into all outputs. No other rank
 * touches that slice of any buffer, so the operation works in place and needs no second round.
 * Large reduces do the same with one output. Small all-reduces of more than two ranks are summed by
 * every rank (qd_coll_direct) from copies in page-locked memory, since inputs may be outputs. */
#include "comm/device/threads_impl.h"

#include "base/clock.h"

#include <assert.h>
#include <sched.h>
#include <string.h>

#define DRAIN_SECONDS 5 /* how long to wait for the stream of a failed peer to drain */

typedef struct state {
    qd_threads_base base;
    int entered;   /* peers 0 .. entered-1 have posted and agree */
    bool direct, posted, enqueued;
    int64_t pushed; /* bytes that this rank writes into each peer's memory */
} state;
_Static_assert(sizeof(state) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static state *state_of(const qd_transfer *op)
{
    return (state *)op->state;
}

static int64_t element_size(const qd_transfer *op)
{
    return (int64_t)qd_dtype_size(op->request.dtype);
}

static int parity_of(const qd_transfer *op)
{
    return (int)(op->fingerprint.sequence & 1);
}

static const qd_threads_post *post_of(const qd_transfer *op, int rank)
{
    return &qd_threads_lane_of(op, rank)->parity[parity_of(op)].post;
}

static const char *input_of(const qd_transfer *op, int rank)
{
    return rank == op->comm->rank ? op->request.in : post_of(op, rank)->request.in;
}

/* Whether this rank uses what `peer` has posted: its stream then waits for the peer's event. */
static bool waits_for(const qd_transfer *op, int peer)
{
    return state_of(op)->direct || op->request.kind == QD_COLL_BARRIER ||
           (qd_transfer_produces(op, peer) && qd_transfer_consumes(op, op->comm->rank));
}

/* Whether `peer` uses what this rank has posted: this rank then stays until the peer is done. */
static bool awaited_by(const qd_transfer *op, int peer)
{
    if (state_of(op)->direct) return false;
    return op->request.kind == QD_COLL_BARRIER ||
           (qd_transfer_produces(op, op->comm->rank) && qd_transfer_consumes(op, peer));
}

/* Copies the input of a direct all-reduce to where all ranks read it. The last user of this staging
 * buffer was operation s - 2, which every rank has left. */
static qd_status stage(qd_transfer *op)
{
    qd_stream *stream = qd_threads_stream(op);
    int me = op->comm->rank, parity = parity_of(op);
    qd_threads_lane *lane = qd_threads_lane_of(op, me);
    QD_TRY(qd_stream_wait_event(stream, state_of(op)->base.flight->ready));
    for (int r = 0; r < op->comm->size; r++)
        if (r != me) QD_TRY(qd_stream_wait_event(stream, qd_threads_lane_of(op, r)->parity[parity].done));
    qd_threads_batch batch = {.stream = stream};
    qd_threads_batch_add(&batch, lane->parity[parity].staging, op->request.in, op->request.count * element_size(op));
    QD_TRY(qd_threads_batch_end(&batch));
    return qd_event_record(lane->parity[parity].staged, stream);
}

qd_status qd_threads_collective_start(qd_transfer *op)
{
    state *s = state_of(op);
    const qd_coll_request *r = &op->request;
    int64_t bytes = r->count * element_size(op);
    qd_threads_lane *lane = qd_threads_lane_of(op, op->comm->rank);
    qd_threads_post *post = &lane->parity[parity_of(op)].post;
    s->entered = 0;
    s->posted = s->enqueued = false;
    s->pushed = 0;
    /* With two ranks both ways move the same bytes. */
    s->direct = r->kind == QD_COLL_ALL_REDUCE && op->comm->size > 2 && qd_coll_direct(bytes, op->comm->size);
    post->ready = s->base.flight->ready;
    if (s->direct) {
        assert(bytes <= QD_THREADS_STAGED_BYTES);
        if (!qd_threads_enter(op->comm)) return QD_OK; /* the core sees the abort record next */
        qd_status status = stage(op);
        qd_threads_leave(op->comm);
        QD_TRY(status);
        post->ready = lane->parity[parity_of(op)].staged;
    }
    post->fingerprint = op->fingerprint;
    post->request = *r;
    s->posted = true;
    atomic_store_explicit(&post->posted, op->fingerprint.sequence, memory_order_release);
    qd_threads_ring_all(op->comm);
    return QD_OK;
}

/* Reduces this rank's segments over all inputs. to_full: results are stored at their offset in the
 * full buffer, of every rank or of the root. */
static qd_status sum_segments(qd_transfer *op, bool to_full)
{
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank, n = op->comm->size, count = 0, segments = qd_transfer_segment_count(op, me);
    int64_t size = element_size(op), packed = 0;
    const void *sources[QD_SUM_RANKS_MOST];
    void *outs[QD_SUM_RANKS_MOST] = {r->out};
    qd_sum_segment batch[64];
    qd_stream *stream = qd_threads_stream(op);
    for (int p = 0; p < n; p++) {
        sources[p] = input_of(op, p);
        if (to_full && r->root < 0) outs[p] = p == me ? r->out : post_of(op, p)->request.out;
    }
    if (r->root >= 0 && r->root != me) outs[0] = post_of(op, r->root)->request.out;
    qd_sum_ranks_args args = {.sources = sources, .outs = outs, .segments = batch, .source_count = n,
                              .out_count = to_full && r->root < 0 ? n : 1, .dtype = r->dtype, .reduce = r->reduce};
    for (int i = 0; i < segments; i++) {
        qd_segment segment = qd_transfer_segment(op, me, i);
        if (segment.count > 0)
            batch[count++] = (qd_sum_segment){segment.offset, to_full ? segment.offset : packed, segment.count};
        packed += segment.count;
        if (count == 0 || (count < 64 && i + 1 < segments)) continue;
        args.segment_count = count;
        count = 0;
        QD_TRY(qd_device_kernels(op->comm->device)->sum_ranks(stream, &args));
    }
    op->bytes += packed * size * (n - 1);
    if (to_full) state_of(op)->pushed = packed * size;
    return QD_OK;
}

/* Reduces the whole message into this rank's output. */
static qd_status sum_whole(qd_transfer *op, bool staged)
{
    const qd_coll_request *r = &op->request;
    int n = op->comm->size;
    const void *sources[QD_SUM_RANKS_MOST];
    qd_sum_segment whole = {0, 0, r->count};
    for (int p = 0; p < n; p++)
        sources[p] = staged ? qd_threads_lane_of(op, p)->parity[parity_of(op)].staging : input_of(op, p);
    qd_sum_ranks_args args = {.sources = sources, .outs = (void *const[]){r->out}, .segments = &whole, .source_count = n,
                              .out_count = 1, .segment_count = 1, .dtype = r->dtype, .reduce = r->reduce};
    op->bytes += r->count * element_size(op) * (n - 1);
    return r->count > 0 ? qd_device_kernels(op->comm->device)->sum_ranks(qd_threads_stream(op), &args) : QD_OK;
}

/* Adds the pieces that `from` has for this rank to the batch. */
static void take_from(qd_transfer *op, int from, qd_threads_batch *batch)
{
    const qd_coll_request *r = &op->request, *theirs = &post_of(op, from)->request;
    int me = op->comm->rank;
    int64_t size = element_size(op), packed = 0;
    const char *in = theirs->in;
    char *out = r->out;
    switch (r->kind) {
    case QD_COLL_BROADCAST:
        qd_threads_batch_add(batch, out, in, r->count * size);
        op->bytes += r->count * size;
        return;
    case QD_COLL_SCATTER: {
        qd_segment segment = qd_transfer_segment(op, me, 0);
        if (segment.count > 0) qd_threads_batch_add(batch, out, in + segment.offset * size, segment.count * size);
        op->bytes += segment.count * size;
        return;
    }
    case QD_COLL_ALL_TO_ALL: {
        int64_t count = theirs->in_counts[me];
        if (count > 0)
            qd_threads_batch_add(batch, out + r->out_offsets[from] * size, in + theirs->in_offsets[me] * size, count * size);
        op->bytes += count * size;
        return;
    }
    default: break; /* all-gather, gather */
    }
    for (int i = 0; i < qd_transfer_segment_count(op, from); i++) {
        qd_segment segment = qd_transfer_segment(op, from, i);
        if (segment.count > 0)
            qd_threads_batch_add(batch, out + segment.offset * size, in + packed * size, segment.count * size);
        packed += segment.count;
    }
    op->bytes += packed * size;
}

static qd_status share(qd_transfer *op)
{
    int me = op->comm->rank, n = op->comm->size;
    switch (op->request.kind) {
    case QD_COLL_BARRIER: return QD_OK;
    case QD_COLL_ALL_REDUCE: return state_of(op)->direct ? sum_whole(op, true) : sum_segments(op, true);
    case QD_COLL_REDUCE_SCATTER: return sum_segments(op, false);
    case QD_COLL_REDUCE:
        if (qd_transfer_is_split(op)) return sum_segments(op, true);
        return me == op->request.root ? sum_whole(op, false) : QD_OK;
    default: break;
    }
    qd_threads_batch batch = {.stream = qd_threads_stream(op)};
    qd_transfer_own_pieces(op, qd_threads_batch_add, &batch);
    for (int step = 1; step < n; step++) {
        int from = (me + step) % n;
        if (waits_for(op, from)) take_from(op, from, &batch);
    }
    return qd_threads_batch_end(&batch);
}

static qd_status check_pairs(const qd_transfer *op)
{
    for (int from = 0; from < op->comm->size; from++) {
        if (from == op->comm->rank) continue;
        int64_t sends = post_of(op, from)->request.in_counts[op->comm->rank];
        if (sends == op->request.out_counts[from]) continue;
        char place[QD_COMM_PLACE_BYTES];
        qd_threads_place(op->comm, from, place);
        QD_TRY(qd_transfer_check_pair(op, from, sends, op->request.out_counts[from], place));
    }
    return QD_OK;
}

static qd_status enqueue(qd_transfer *op)
{
    qd_stream *stream = qd_threads_stream(op);
    int me = op->comm->rank;
    if (op->request.kind == QD_COLL_ALL_TO_ALL) QD_TRY(check_pairs(op));
    QD_TRY(qd_stream_wait_event(stream, state_of(op)->base.flight->ready));
    for (int p = 0; p < op->comm->size; p++)
        if (p != me && waits_for(op, p)) QD_TRY(qd_stream_wait_event(stream, post_of(op, p)->ready));
    QD_TRY(qd_threads_piece_begin(op));
    QD_TRY(share(op));
    QD_TRY(qd_threads_piece_end(op));
    qd_threads_lane *lane = qd_threads_lane_of(op, me);
    lane->parity[parity_of(op)].pushed = state_of(op)->pushed;
    return qd_event_record(lane->parity[parity_of(op)].done, stream);
}

/* The peers that access this rank's buffers have enqueued their share: after that, the operation is
 * over. */
static qd_status end(qd_transfer *op)
{
    qd_stream *stream = qd_threads_stream(op);
    for (int p = 0; p < op->comm->size; p++) {
        if (p == op->comm->rank || !awaited_by(op, p)) continue;
        qd_threads_lane *lane = qd_threads_lane_of(op, p);
        QD_TRY(qd_stream_wait_event(stream, lane->parity[parity_of(op)].done));
        if (op->request.root < 0 || op->request.root == op->comm->rank) op->bytes += lane->parity[parity_of(op)].pushed;
    }
    return qd_event_record(state_of(op)->base.flight->over, stream);
}

/* The calls of all ranks must agree before any data is used. */
static qd_status enter(qd_transfer *op, bool *moved)
{
    state *s = state_of(op);
    while (s->entered < op->comm->size) {
        int peer = s->entered;
        if (peer != op->comm->rank) {
            const qd_threads_post *post = post_of(op, peer);
            if (atomic_load_explicit(&post->posted, memory_order_acquire) != op->fingerprint.sequence) return QD_OK;
            qd_fingerprint theirs = post->fingerprint;
            if (memcmp(&theirs, &op->fingerprint, sizeof theirs) != 0) {
                char place[QD_COMM_PLACE_BYTES];
                qd_threads_place(op->comm, peer, place);
                QD_TRY(qd_transfer_check(op, peer, &theirs, place));
            }
        }
        s->entered++;
        *moved = true;
    }
    return QD_OK;
}

static bool peers_enqueued(const qd_transfer *op)
{
    for (int p = 0; p < op->comm->size; p++)
        if (p != op->comm->rank && awaited_by(op, p) &&
            atomic_load_explicit(&qd_threads_lane_of(op, p)->enqueued, memory_order_acquire) < op->fingerprint.sequence)
            return false;
    return true;
}

qd_status qd_threads_collective_poll(qd_transfer *op, bool *done, bool *moved)
{
    state *s = state_of(op);
    uint64_t sequence = op->fingerprint.sequence;
    if (!s->posted) return QD_OK; /* the world has failed */
    if (s->entered < op->comm->size) QD_TRY(enter(op, moved));
    if (s->entered < op->comm->size) return QD_OK;
    qd_threads_lane *lane = qd_threads_lane_of(op, op->comm->rank);
    if (!s->enqueued) {
        if (!qd_threads_enter(op->comm)) return QD_OK;
        qd_status status = enqueue(op);
        qd_threads_leave(op->comm);
        QD_TRY(status);
        s->enqueued = *moved = true;
        atomic_store_explicit(&lane->enqueued, sequence, memory_order_release);
        qd_threads_ring_all(op->comm);
    }
    if (!peers_enqueued(op) || !qd_threads_enter(op->comm)) return QD_OK;
    qd_status status = end(op);
    qd_threads_leave(op->comm);
    QD_TRY(status);
    atomic_store_explicit(&lane->left, sequence, memory_order_release);
    *done = *moved = true;
    return QD_OK;
}

/* Whether the peer's stream may still use this rank's buffers. */
static bool still_runs(const qd_transfer *op, int peer)
{
    qd_threads_lane *lane = qd_threads_lane_of(op, peer);
    uint64_t sequence = op->fingerprint.sequence;
    return atomic_load(&lane->enqueued) >= sequence && atomic_load(&lane->drained) < sequence &&
           atomic_load(&lane->left) < sequence;
}

void qd_threads_collective_finish(qd_transfer *op)
{
    qd_threads_lane *lane = qd_threads_lane_of(op, op->comm->rank);
    if (atomic_load(&lane->left) >= op->fingerprint.sequence) return;
    /* Failed while others know our buffers. The world has failed, so no rank begins to use them any
     * more. Wait until the ranks that do have enqueued their work, and until it has run. */
    qd_threads_wait_outside(op->comm);
    qd_stream_wait(qd_threads_stream(op)); /* errors of this stream no longer matter */
    atomic_store(&lane->drained, op->fingerprint.sequence);
    double until = qd_clock_now() + DRAIN_SECONDS;
    for (int p = 0; p < op->comm->size; p++)
        while (p != op->comm->rank && still_runs(op, p) && qd_clock_now() < until) sched_yield();
}

bool qd_threads_collective_late(const qd_transfer *op, int peer, uint64_t *sequence)
{
    const state *s = state_of(op);
    qd_threads_lane *lane = qd_threads_lane_of(op, peer);
    uint64_t even = atomic_load(&lane->parity[0].post.posted), odd = atomic_load(&lane->parity[1].post.posted);
    *sequence = even > odd ? even : odd;
    if (*sequence < op->fingerprint.sequence) return true;
    return s->entered == op->comm->size && awaited_by(op, peer) && atomic_load(&lane->enqueued) < op->fingerprint.sequence;
}
