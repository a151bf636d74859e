/* Send and receive over a channel.
 *
 * Messages up to QD_LOCAL_MESSAGE_SMALL bytes are copied into the channel, which completes the
 * send. Larger ones go from memory to memory: by address where the sender's memory has a place, by
 * system call otherwise. From ways.send_share_from on both sides copy:
 *   - By address each claims chunks while there are any, the receiver from the front and the sender
 *     from the back. Where ranks share cores, the side that is scheduled does the work.
 *   - By system call the receiver reads the first half and the sender writes the second if cores
 *     are free, else the receiver reads all.
 * Processes use the channel's ring for medium messages, and for all messages where they cannot
 * reach each other's memory. */
#include "comm/local/local_impl.h"

#include "base/clock.h"

#include <string.h>

/* Where ranks share cores, a second copy of less than that is cheaper than a sender that waits for
 * its receiver. */
#define REACH_LEAST_CROWDED (64 * 1024)
#define STREAM_FROM (768 * 1024) /* larger messages bypass the caches where both sides reach the memory by address */

typedef struct state {
    qd_local_channel *channel;
    int64_t bytes, rounds, moved; /* rounds sent or received so far */
    uint64_t base;
    int64_t pulled; /* by system call: bytes that the receiver reads; the sender writes the rest */
    int64_t copied; /* by address, both sides copying: bytes that this side has copied */
    qd_local_way way; /* the sender decides */
    bool sends;
    bool posted; /* send: the post is published; receive: it was seen and agrees */
    bool pushed; /* the sender's share, if any, is written */
    bool shares; /* by address, both sides copying */
    bool claimed, done; /* the same: no chunk is left to claim; all chunks are copied */
} state;
_Static_assert(sizeof(state) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static state *state_of(const qd_transfer *op)
{
    return (state *)op->state;
}

static bool from_memory(const state *s)
{
    return s->way == QD_LOCAL_MEMORY || s->way == QD_LOCAL_PLACED;
}

/* As if every rank of the group sent such a message. */
static qd_copy_way write_way(const qd_transfer *op)
{
    const qd_local_ways *ways = &qd_local_group_of(op)->header->ways;
    int64_t bytes = state_of(op)->bytes;
    return qd_local_ways_copy(ways, bytes, STREAM_FROM, 2 * op->comm->size * bytes);
}

/* Sets how the message moves: a sender knows at once, a receiver from the sender's post. */
static void choose(state *s, qd_local_way way)
{
    s->way = way;
    s->rounds = way == QD_LOCAL_STAGED ? (s->bytes + QD_LOCAL_MESSAGE_BUFFER - 1) / QD_LOCAL_MESSAGE_BUFFER : 1;
    s->pulled = s->bytes;
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
    bool crowded = op->comm->world->spin == 0; /* more ranks than cores */
    const qd_local_ways *ways = &group->header->ways;
    bool costly = crowded && ways->send_reach_from > 1 && ways->send_reach_from < REACH_LEAST_CROWDED;
    bool reached = s->bytes >= (costly ? REACH_LEAST_CROWDED : ways->send_reach_from) &&
                   atomic_load_explicit(&group->remote, memory_order_relaxed);
    bool placed = qd_local_place(group, r->in) != QD_LOCAL_NOWHERE && (group->view->all_reached || s->bytes >= ways->send_placed_from);
    if (s->sends)
        choose(s, s->bytes <= QD_LOCAL_MESSAGE_SMALL ? QD_LOCAL_SMALL
                  : placed                           ? QD_LOCAL_PLACED
                  : reached                          ? QD_LOCAL_MEMORY
                                                     : QD_LOCAL_STAGED);
    s->shares = s->way == QD_LOCAL_PLACED && s->bytes >= ways->send_share_from;
    /* With fewer cores than ranks, other pairs need the sender's core. */
    if (s->way == QD_LOCAL_MEMORY && s->bytes >= ways->send_share_from && !crowded)
        s->pulled = s->bytes / 2 / 64 * 64;
    s->pushed = s->pulled == s->bytes;
    if (!s->sends) /* the sender does not wait for this; it only helps to name the late rank */
        atomic_store_explicit(&s->channel->entered, op->fingerprint.sequence, memory_order_release);
    return QD_OK;
}

static uint64_t received(const state *s)
{
    return atomic_load_explicit(&s->channel->finished, memory_order_acquire);
}

static bool is_accepted(const qd_transfer *op)
{
    return atomic_load_explicit(&state_of(op)->channel->accepted, memory_order_acquire) >= op->fingerprint.sequence;
}

/* The sender's half, once the receiver has agreed to the message. */
static void push(qd_transfer *op, bool *moved)
{
    state *s = state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    if (!is_accepted(op)) return;
    double began = qd_clock_now();
    int64_t bytes = s->bytes - s->pulled;
    if (!qd_local_enter(group, &s->channel->writing)) return; /* the core sees the abort record next */
    /* `out` was written before `accepted`. */
    bool good = qd_local_push(op->comm, op->request.root, (char *)s->channel->out + s->pulled,
                              (const char *)op->request.in + s->pulled, bytes);
    qd_local_leave(&s->channel->writing);
    if (!good) return;
    atomic_store_explicit(&s->channel->parity[op->fingerprint.sequence & 1].pushed, bytes, memory_order_relaxed);
    s->pushed = *moved = true;
    atomic_store_explicit(&s->channel->produced, s->base + 1, memory_order_release);
    qd_local_ring_rank(op->comm, op->request.root);
    op->busy_seconds += qd_clock_now() - began;
}

/* A message that both sides copy and that the receiver has accepted: copies the chunks it can
 * claim. True if the whole message has been copied. */
static bool copy_chunks(qd_transfer *op, bool *moved)
{
    state *s = state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    qd_local_channel *channel = s->channel;
    uint64_t parity = op->fingerprint.sequence & 1;
    _Atomic int64_t *pushed = &channel->parity[parity].pushed;
    if (!s->claimed) {
        double began = qd_clock_now();
        _Atomic uint32_t *mark = s->sends ? &channel->writing : &channel->reading;
        if (!qd_local_enter(group, mark)) return false; /* the core sees the abort record next */
        const char *in = s->sends ? op->request.in : qd_local_at(group, channel->parity[parity].post.in_at);
        char *out = s->sends ? qd_local_at(group, channel->out_at) : op->request.out;
        int64_t chunk = qd_local_chunk_bytes(s->bytes), chunks = (s->bytes + chunk - 1) / chunk, index, moving = 0;
        bool counts = true;
        while (counts && moving < QD_LOCAL_PIECE && (index = qd_local_claim(&channel->claims, s->base, chunks, s->sends)) >= 0) {
            int64_t first = index * chunk, bytes = s->bytes - first < chunk ? s->bytes - first : chunk;
            qd_comm_copy(out + first, in + first, bytes, write_way(op));
            moving += bytes;
            counts = qd_local_counts(group);
        }
        qd_local_leave(mark);
        if (!counts) return false;
        s->claimed = moving < QD_LOCAL_PIECE;
        s->copied += moving;
        if (!s->sends) op->bytes += moving;
        atomic_store_explicit(s->sends ? pushed : &channel->taken, s->copied, memory_order_release);
        qd_local_ring_rank(op->comm, op->request.root);
        op->busy_seconds += qd_clock_now() - began;
        *moved = true;
    }
    int64_t others = atomic_load_explicit(s->sends ? &channel->taken : pushed, memory_order_acquire);
    if (s->copied + others < s->bytes) return false;
    if (!s->sends) op->bytes += others;
    return true;
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
        post->in_at = qd_local_place(qd_local_group_of(op), r->in);
        post->way = s->way;
        post->pulled = s->pulled;
        post->shares = s->shares;
        atomic_store_explicit(&s->channel->parity[sequence & 1].pushed, 0, memory_order_relaxed);
        if (s->way == QD_LOCAL_SMALL && s->bytes > 0)
            memcpy(s->channel->parity[sequence & 1].small, r->in, (size_t)s->bytes);
        atomic_store_explicit(&post->posted, sequence, memory_order_release);
        qd_local_ring_rank(op->comm, r->root);
        s->posted = *moved = true;
    }
    if (s->way == QD_LOCAL_SMALL) {
        *done = true;
    } else if (s->shares) {
        if (!is_accepted(op)) return QD_OK;
        s->shares = s->channel->out_at != QD_LOCAL_NOWHERE; /* else the receiver copies everything */
        *done = s->done = s->shares && copy_chunks(op, moved);
        if (*done || !s->shares) *moved = true;
    } else if (from_memory(s)) {
        if (!s->pushed) push(op, moved);
        *done = s->pushed &&
                atomic_load_explicit(&s->channel->consumed, memory_order_acquire) >= s->base + 1;
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

/* Copies received data to its place; false when the world was aborted. */
static bool take(qd_transfer *op, int64_t first, int64_t bytes, const void *from)
{
    state *s = state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    char *to = (char *)op->request.out + first;
    bool good = true;
    if (bytes == 0) return true;
    if (from_memory(s)) {
        if (!qd_local_enter(group, &s->channel->reading)) return false;
        if (s->way == QD_LOCAL_PLACED) /* large messages are shared, unless the sender cannot reach the receiver's memory */
            qd_comm_copy(to, from, bytes, write_way(op));
        else
            good = qd_local_pull(op->comm, op->request.root, to, from, bytes);
        qd_local_leave(&s->channel->reading);
        good = good && qd_local_counts(group);
    } else {
        memcpy(to, from, (size_t)bytes);
    }
    if (good) op->bytes += bytes;
    return good;
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
        qd_comm_place_get(&qd_local_group_of(op)->ranks[op->comm->world_ranks[from]].board.place, place);
        qd_fingerprint theirs = post->fingerprint;
        QD_TRY(qd_transfer_check(op, from, &theirs, place));
        choose(s, (qd_local_way)post->way);
        s->posted = *moved = true;
        s->pulled = post->pulled;
        s->pushed = s->pulled == s->bytes;
        s->shares = post->shares;
        if (s->shares || !s->pushed) {
            s->channel->out = op->request.out;
            s->channel->out_at = qd_local_place(qd_local_group_of(op), op->request.out);
            if (s->shares) s->shares = s->channel->out_at != QD_LOCAL_NOWHERE;
            atomic_store_explicit(&s->channel->taken, 0, memory_order_relaxed);
            atomic_store_explicit(&s->channel->claims, s->base, memory_order_relaxed);
            atomic_store_explicit(&s->channel->accepted, sequence, memory_order_release);
            qd_local_ring_rank(op->comm, from);
        }
    }
    if (s->shares) {
        *done = s->done = copy_chunks(op, moved);
        return QD_OK;
    }
    while (s->moved < s->rounds) {
        const void *data = s->way == QD_LOCAL_SMALL    ? s->channel->parity[sequence & 1].small
                           : s->way == QD_LOCAL_MEMORY ? post->in
                           : s->way == QD_LOCAL_PLACED ? qd_local_at(qd_local_group_of(op), post->in_at)
                                                       : s->channel->ring[s->moved % QD_LOCAL_RING];
        int64_t chunk = s->way == QD_LOCAL_SMALL ? s->bytes : from_memory(s) ? s->pulled : QD_LOCAL_MESSAGE_BUFFER;
        int64_t first = s->moved * chunk;
        int64_t bytes = s->bytes - first < chunk ? s->bytes - first : chunk;
        if (s->way == QD_LOCAL_STAGED &&
            atomic_load_explicit(&s->channel->produced, memory_order_acquire) < s->base + (uint64_t)s->moved + 1)
            return QD_OK;
        double began = s->way == QD_LOCAL_SMALL ? 0 : qd_clock_now();
        if (!take(op, first, bytes, data)) return QD_OK; /* the core sees the abort record next */
        s->moved++;
        *moved = true;
        if (s->way != QD_LOCAL_SMALL) {
            atomic_store_explicit(&s->channel->consumed, s->base + (uint64_t)s->moved, memory_order_release);
            qd_local_ring_rank(op->comm, from);
            op->busy_seconds += qd_clock_now() - began;
        }
    }
    if (!s->pushed && atomic_load_explicit(&s->channel->produced, memory_order_acquire) >= s->base + 1) {
        op->bytes += atomic_load_explicit(&s->channel->parity[sequence & 1].pushed, memory_order_relaxed);
        s->pushed = *moved = true;
    }
    *done = s->pushed;
    return QD_OK;
}

qd_status qd_local_message_poll(qd_transfer *op, bool *done, bool *moved)
{
    return state_of(op)->sends ? poll_send(op, done, moved) : poll_recv(op, done, moved);
}

void qd_local_message_finish(qd_transfer *op)
{
    state *s = state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    bool memory = from_memory(s);
    if (s->sends && s->done) return;
    if (!s->sends && s->posted && (s->shares ? s->done : s->moved == s->rounds && s->pushed)) {
        atomic_store_explicit(&s->channel->finished, op->fingerprint.sequence, memory_order_release);
        qd_local_ring_rank(op->comm, op->request.root);
        return;
    }
    /* Failed: the world is aborted, so the other side does not enter our memory any more, but it
     * may be inside. */
    if (!memory || !s->posted) return;
    if (!s->sends)
        qd_local_wait_left(group, &s->channel->writing);
    else if (atomic_load_explicit(&s->channel->consumed, memory_order_acquire) < s->base + 1)
        qd_local_wait_left(group, &s->channel->reading);
}

bool qd_local_message_late(const qd_transfer *op, int peer, uint64_t *sequence)
{
    const state *s = state_of(op);
    if (peer != op->request.root) return false;
    if (s->sends) {
        *sequence = atomic_load(&s->channel->entered);
    } else {
        uint64_t even = atomic_load(&s->channel->parity[0].post.posted);
        uint64_t odd = atomic_load(&s->channel->parity[1].post.posted);
        *sequence = even > odd ? even : odd;
    }
    return true;
}
