/* Send and receive over a channel. Messages up to QD_LOCAL_MESSAGE_SMALL bytes are copied into the channel and the send
 * is done; larger ones go through the channel's ring (processes) or are read from the sender's buffer (threads). */
#include "comm/local/local_impl.h"

#include "base/clock.h"

#include <sched.h>
#include <string.h>

typedef struct state {
    qd_local_channel *channel;
    int64_t bytes, rounds, moved; /* rounds sent or received so far */
    uint64_t base;
    bool sends, small, pointers;
    bool remote; /* pointers into another process; the sender decides */
    bool posted; /* send: the post is visible; receive: it has been seen and agrees */
} state;
_Static_assert(sizeof(state) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static state *state_of(const qd_transfer *op)
{
    return (state *)op->state;
}

/* How a message travels: known to a sender at once and to a receiver with the sender's post. */
static void choose(state *s, bool threads, bool remote)
{
    s->remote = !s->small && !threads && remote;
    s->pointers = !s->small && (threads || remote);
    s->rounds = s->small || s->pointers ? 1 : (s->bytes + QD_LOCAL_MESSAGE_BUFFER - 1) / QD_LOCAL_MESSAGE_BUFFER;
}

qd_status qd_local_message_start(qd_transfer *op)
{
    state *s = state_of(op);
    const qd_coll_request *r = &op->request;
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank;
    memset(s, 0, sizeof *s);
    s->sends = r->kind == QD_COLL_SEND;
    s->channel = s->sends ? qd_local_channel_of(op->comm, me, r->root) : qd_local_channel_of(op->comm, r->root, me);
    s->bytes = r->count * (int64_t)qd_dtype_size(r->dtype);
    s->base = op->fingerprint.sequence << QD_LOCAL_ROUND_BITS;
    s->small = s->bytes <= QD_LOCAL_MESSAGE_SMALL;
    if (s->sends)
        choose(s, group->threads, atomic_load_explicit(&group->remote, memory_order_relaxed));
    if (!s->sends) {
        atomic_store_explicit(&s->channel->entered, op->fingerprint.sequence, memory_order_release);
        /* The sender does not wait for this; it only tells who is late. */
    }
    return QD_OK;
}

static uint64_t received(const state *s)
{
    return atomic_load_explicit(&s->channel->finished, memory_order_acquire);
}

static qd_status poll_send(qd_transfer *op, bool *done, bool *moved)
{
    state *s = state_of(op);
    const qd_coll_request *r = &op->request;
    uint64_t sequence = op->fingerprint.sequence;
    if (!s->posted) {
        if (received(s) + 2 < sequence) return QD_OK; /* the post of message sequence - 2 is still in use */
        qd_local_post *post = &s->channel->parity[sequence & 1].post;
        post->fingerprint = op->fingerprint;
        post->in = r->in;
        post->remote = s->remote;
        if (s->small && s->bytes > 0) memcpy(s->channel->parity[sequence & 1].small, r->in, (size_t)s->bytes);
        atomic_store_explicit(&post->posted, sequence, memory_order_release);
        qd_local_ring_rank(op->comm, r->root);
        s->posted = *moved = true;
    }
    if (s->small) {
        *done = true;
    } else if (s->pointers) {
        *done = received(s) >= sequence;
        if (*done) *moved = true;
    } else {
        while (s->moved < s->rounds) {
            bool free_buffer = s->moved < QD_LOCAL_RING
                                   ? received(s) + 1 >= sequence
                                   : atomic_load_explicit(&s->channel->consumed, memory_order_acquire) >=
                                         s->base + (uint64_t)(s->moved - QD_LOCAL_RING + 1);
            if (!free_buffer) return QD_OK;
            double began = qd_clock_now();
            int64_t first = s->moved * QD_LOCAL_MESSAGE_BUFFER;
            int64_t bytes = s->bytes - first < QD_LOCAL_MESSAGE_BUFFER ? s->bytes - first : QD_LOCAL_MESSAGE_BUFFER;
            memcpy(s->channel->ring[s->moved % QD_LOCAL_RING], (const char *)r->in + first, (size_t)bytes);
            s->moved++;
            atomic_store_explicit(&s->channel->produced, s->base + (uint64_t)s->moved, memory_order_release);
            qd_local_ring_rank(op->comm, r->root);
            op->busy_seconds += qd_clock_now() - began;
            *moved = true;
        }
        *done = true;
    }
    return QD_OK;
}

/* False when the world is aborted. */
static bool take(qd_transfer *op, int64_t first, int64_t bytes, const void *from)
{
    state *s = state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    if (bytes == 0) return true;
    if (s->remote) { /* a sender that is gone has aborted the world before its buffer went */
        if (!qd_local_read_remote(op->comm, op->request.root, (char *)op->request.out + first, from, bytes) ||
            atomic_load_explicit(&group->header->abort_state, memory_order_seq_cst) != 0)
            return false;
        op->bytes += bytes;
        return true;
    }
    if (s->pointers && !qd_local_read_begin(group, &s->channel->reading)) return false;
    memcpy((char *)op->request.out + first, from, (size_t)bytes);
    if (s->pointers) qd_local_read_end(&s->channel->reading);
    op->bytes += bytes;
    return true;
}

static qd_status poll_recv(qd_transfer *op, bool *done, bool *moved)
{
    state *s = state_of(op);
    int from = op->request.root;
    uint64_t sequence = op->fingerprint.sequence;
    qd_local_post *post = &s->channel->parity[sequence & 1].post;
    if (!s->posted) {
        if (atomic_load_explicit(&post->posted, memory_order_acquire) != sequence) return QD_OK;
        char place[QD_COMM_PLACE_BYTES];
        qd_comm_place_get(&qd_local_group_of(op)->ranks[op->comm->world_ranks[from]].place, place);
        qd_fingerprint theirs = post->fingerprint;
        QD_TRY(qd_transfer_check(op, from, &theirs, place));
        choose(s, qd_local_group_of(op)->threads, post->remote);
        s->posted = *moved = true;
    }
    while (s->moved < s->rounds) {
        const void *data = s->small      ? s->channel->parity[sequence & 1].small
                           : s->pointers ? post->in
                                         : s->channel->ring[s->moved % QD_LOCAL_RING];
        int64_t chunk = s->small || s->pointers ? s->bytes : QD_LOCAL_MESSAGE_BUFFER;
        int64_t first = s->moved * chunk;
        int64_t bytes = s->bytes - first < chunk ? s->bytes - first : chunk;
        if (!s->small && !s->pointers &&
            atomic_load_explicit(&s->channel->produced, memory_order_acquire) < s->base + (uint64_t)s->moved + 1)
            return QD_OK;
        double began = s->small ? 0 : qd_clock_now();
        if (!take(op, first, bytes, data)) return QD_OK; /* the core sees the abort record next */
        s->moved++;
        *moved = true;
        if (!s->small) {
            atomic_store_explicit(&s->channel->consumed, s->base + (uint64_t)s->moved, memory_order_release);
            qd_local_ring_rank(op->comm, from);
            op->busy_seconds += qd_clock_now() - began;
        }
    }
    *done = true;
    return QD_OK;
}

qd_status qd_local_message_poll(qd_transfer *op, bool *done, bool *moved)
{
    return state_of(op)->sends ? poll_send(op, done, moved) : poll_recv(op, done, moved);
}

void qd_local_message_finish(qd_transfer *op)
{
    state *s = state_of(op);
    if (!s->sends) {
        if (s->posted && s->moved == s->rounds) {
            atomic_store_explicit(&s->channel->finished, op->fingerprint.sequence, memory_order_release);
            qd_local_ring_rank(op->comm, op->request.root);
        }
        return;
    }
    /* A failed send: the world is aborted and nobody begins to read any more; wait for a reader that is at it. */
    if (s->pointers && !s->remote && s->posted && received(s) < op->fingerprint.sequence)
        while (atomic_load_explicit(&s->channel->reading, memory_order_seq_cst)) sched_yield();
}

bool qd_local_message_late(const qd_transfer *op, int peer, uint64_t *sequence)
{
    const state *s = state_of(op);
    if (peer != op->request.root) return false;
    if (s->sends) {
        *sequence = atomic_load(&s->channel->entered);
    } else {
        uint64_t even = atomic_load(&s->channel->parity[0].post.posted), odd = atomic_load(&s->channel->parity[1].post.posted);
        *sequence = even > odd ? even : odd;
    }
    return true;
}
