/* Send and receive between devices of one process. The sender posts its message. Once both have
 * called, the receiver copies it on its own stream and publishes an event; the sender's stream
 * waits for that event. A sender posts message s + 1 only after it has left message s, so one post
 * and one event per channel are enough. */
#include "comm/device/threads_impl.h"

typedef struct state {
    qd_threads_base base;
    qd_threads_channel *channel;
    bool sends, over;
} state;
_Static_assert(sizeof(state) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static state *state_of(const qd_transfer *op)
{
    return (state *)op->state;
}

qd_status qd_threads_message_start(qd_transfer *op)
{
    state *s = state_of(op);
    int me = op->comm->rank, peer = op->request.root;
    s->sends = op->request.kind == QD_COLL_SEND;
    s->over = false;
    s->channel = s->sends ? qd_threads_channel_of(op->comm, me, peer) : qd_threads_channel_of(op->comm, peer, me);
    if (s->sends) {
        qd_threads_post *post = &s->channel->post;
        post->fingerprint = op->fingerprint;
        post->request = op->request;
        post->ready = s->base.flight->ready;
        atomic_store_explicit(&post->posted, op->fingerprint.sequence, memory_order_release);
        qd_threads_ring(op->comm, peer);
    } else { /* the sender does not wait for this; it only helps to name the late rank */
        atomic_store_explicit(&s->channel->entered, op->fingerprint.sequence, memory_order_release);
    }
    return QD_OK;
}

static qd_status end_send(qd_transfer *op)
{
    state *s = state_of(op);
    QD_TRY(qd_threads_piece_begin(op));
    QD_TRY(qd_stream_wait_event(qd_threads_stream(op), s->channel->done));
    QD_TRY(qd_threads_piece_end(op));
    return qd_event_record(s->base.flight->over, qd_threads_stream(op));
}

static qd_status receive(qd_transfer *op)
{
    state *s = state_of(op);
    qd_stream *stream = qd_threads_stream(op);
    int64_t bytes = op->request.count * (int64_t)qd_dtype_size(op->request.dtype);
    qd_threads_batch batch = {.stream = stream};
    if (!s->channel->done) QD_TRY(qd_event_create(op->comm->device, &s->channel->done));
    QD_TRY(qd_stream_wait_event(stream, s->base.flight->ready));
    QD_TRY(qd_stream_wait_event(stream, s->channel->post.ready));
    QD_TRY(qd_threads_piece_begin(op));
    qd_threads_batch_add(&batch, op->request.out, s->channel->post.request.in, bytes);
    QD_TRY(qd_threads_batch_end(&batch));
    QD_TRY(qd_threads_piece_end(op));
    op->bytes += bytes;
    QD_TRY(qd_event_record(s->channel->done, stream));
    return qd_event_record(s->base.flight->over, stream);
}

qd_status qd_threads_message_poll(qd_transfer *op, bool *done, bool *moved)
{
    state *s = state_of(op);
    int peer = op->request.root;
    uint64_t sequence = op->fingerprint.sequence;
    const qd_threads_post *post = &s->channel->post;
    if (s->sends) {
        if (atomic_load_explicit(&s->channel->consumed, memory_order_acquire) < sequence) return QD_OK;
    } else {
        if (atomic_load_explicit(&post->posted, memory_order_acquire) != sequence) return QD_OK;
        char place[QD_COMM_PLACE_BYTES];
        qd_threads_place(op->comm, peer, place);
        qd_fingerprint theirs = post->fingerprint;
        QD_TRY(qd_transfer_check(op, peer, &theirs, place));
    }
    if (!qd_threads_enter(op->comm)) return QD_OK; /* the core sees the abort record next */
    qd_status status = s->sends ? end_send(op) : receive(op);
    qd_threads_leave(op->comm);
    QD_TRY(status);
    s->over = *done = *moved = true;
    if (s->sends) {
        atomic_store_explicit(&s->channel->left, sequence, memory_order_release);
    } else {
        atomic_store_explicit(&s->channel->consumed, sequence, memory_order_release);
        qd_threads_ring(op->comm, peer);
    }
    return QD_OK;
}

void qd_threads_message_finish(qd_transfer *op)
{
    state *s = state_of(op);
    if (s->over) return;
    /* Failed: the other side starts nothing new, but may be enqueueing its copy. Running copies are
     * waited for when the buffers are freed. */
    qd_threads_wait_outside(op->comm);
}

bool qd_threads_message_late(const qd_transfer *op, int peer, uint64_t *sequence)
{
    const state *s = state_of(op);
    if (peer != op->request.root) return false;
    *sequence = atomic_load(s->sends ? &s->channel->entered : &s->channel->post.posted);
    return true;
}
