/* Collectives over a slot: decides between one pass (onepass.c, common.c) and rounds, and runs the
 * rounds (rounds.c).
 *
 * A rank's contribution is cut into rounds of at most `part` elements per destination. In each
 * round a rank
 *   produces   copies its parts into a buffer of its lane (nothing if others read its memory)
 *   combines   all-reduce and split reduce only: sums its slice over all ranks and publishes the
 *              result in its own part of the buffer
 *   consumes   copies what the others produced (or combined) into `out`
 * and the three run as far ahead of each other as the ring of buffers allows. Small messages take
 * one round in the lane's small buffer, written before the post. Small all-reduces (qd_coll_direct)
 * need no second exchange: every rank sums everything.
 *
 * Layout of a buffer, by kind: "many" kinds hold a part for each rank (all-reduce, split reduce,
 * reduce-scatter, scatter, all-to-all); the producer's own part is empty, or holds the result it
 * combines. "One" kinds hold one part that all ranks read (all-gather, gather, broadcast, small
 * reduce). */
#include "comm/local/collective_impl.h"

#include "base/clock.h"

#include <assert.h>
#include <string.h>

#define PART_LEAST (16 << 10)  /* bytes of a part of a ring buffer, unless the ring is smaller */

/* Processes: messages of at least ways.reach_from bytes (of the whole message) go from memory to
 * memory, and those above these limits through the ring. Measured: below reach_from the system call
 * costs more than a second copy, above the limits pinning pages does. Where several ranks read the
 * same data, the ring is better at all sizes. A reduce cannot: its sums would have no buffer. */
static const int64_t reach_most[QD_COLL_KIND_COUNT][2] = { /* 2 ranks, more ranks */
    [QD_COLL_ALL_REDUCE] = {2 << 20, 0},      [QD_COLL_REDUCE_SCATTER] = {4 << 20, 0},
    [QD_COLL_ALL_GATHER] = {4 << 20, 0},      [QD_COLL_ALL_TO_ALL] = {4 << 20, 4 << 20},
    [QD_COLL_BROADCAST] = {8 << 20, 0},       [QD_COLL_GATHER] = {INT64_MAX, 8 << 20},
    [QD_COLL_SCATTER] = {INT64_MAX, 8 << 20}, [QD_COLL_REDUCE] = {0, 0},
};

/* Results of messages of this size and more bypass the caches, unless the machine's measurement has
 * a higher limit (ways.stream_bytes). Measured; higher where the result is the source of the next
 * message. all-to-all: what a rank sends to others. */
#define ROUNDS_STREAM_FROM (4 << 20)
static const int64_t stream_from[QD_COLL_KIND_COUNT] = { /* straight from buffer to buffer */
    [QD_COLL_ALL_REDUCE] = 768 << 10, [QD_COLL_REDUCE_SCATTER] = 4 << 20, [QD_COLL_ALL_GATHER] = 768 << 10,
    [QD_COLL_BROADCAST] = 4 << 20,    [QD_COLL_REDUCE] = 8 << 20,         [QD_COLL_GATHER] = 4 << 20,
    [QD_COLL_SCATTER] = 4 << 20,      [QD_COLL_ALL_TO_ALL] = 384 << 10,
};
#define OWN_STREAM_FROM (1 << 20) /* bytes of a rank's own part, which is in no other rank's cache */

typedef qd_local_state state;

static const qd_local_ways *ways_of(const qd_transfer *op)
{
    return &qd_local_group_of(op)->header->ways;
}

/* Bytes of the buffers of all ranks. all-to-all: as if all ranks sent as much as this one. */
static int64_t touched_bytes(const qd_transfer *op, int64_t bytes)
{
    int64_t n = op->comm->size;
    switch (op->request.kind) {
    case QD_COLL_ALL_TO_ALL: return 2 * n * (bytes / (n - 1) * n);
    case QD_COLL_ALL_REDUCE: return 2 * n * bytes;
    case QD_COLL_BROADCAST: return n * bytes;
    case QD_COLL_SCATTER: return 2 * bytes;
    default: return (n + 1) * bytes;
    }
}

qd_copy_way qd_local_copy_way(const qd_transfer *op, int64_t message_bytes, bool placed)
{
    const qd_local_ways *ways = ways_of(op);
    int64_t from = placed ? stream_from[op->request.kind] : ROUNDS_STREAM_FROM, touched = touched_bytes(op, message_bytes);
    return qd_local_ways_copy(ways, message_bytes, from, touched);
}

/* What a rank sends to others in an all-to-all; for other kinds the whole message. */
static int64_t message_bytes(const qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    int64_t elements = r->count;
    if (r->kind == QD_COLL_ALL_TO_ALL) {
        elements = 0;
        for (int to = 0; to < op->comm->size; to++) elements += to == op->comm->rank ? 0 : r->in_counts[to];
    }
    return elements * qd_local_element_size(op);
}

/* Copies the part that stays on this rank: as the other results are written or, while that is not
 * known, by its size. */
static void copy_own(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank;
    qd_copy_way way = qd_local_state_of(op)->large;
    if (way == QD_COPY_NEAR) {
        int64_t own = (r->kind == QD_COLL_ALL_TO_ALL ? r->in_counts[me] : qd_transfer_packed_count(op, me)) * qd_local_element_size(op);
        way = qd_local_ways_copy(ways_of(op), own, OWN_STREAM_FROM, touched_bytes(op, message_bytes(op)));
    }
    qd_transfer_copy_own(op, &way);
}

/* Whether processes copy from memory to memory. Ranks with segment lists use the ring. */
static bool reaches_memory(const qd_transfer *op, int64_t bytes)
{
    const qd_local_ways *ways = ways_of(op);
    qd_coll_kind kind = op->request.kind;
    int64_t most = ways->reach_most >= 0 && kind != QD_COLL_REDUCE ? ways->reach_most : reach_most[kind][op->comm->size > 2];
    return qd_local_state_of(op)->remote && !op->request.lists && bytes >= ways->reach_from && bytes <= most;
}

/* all-to-all: at the start a rank knows only its own counts, so each decides for its own blocks. */
static void plan_blocks(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op), head = (n * (int64_t)sizeof(qd_local_block) + 63) / 64 * 64, end = head;
    int64_t bytes = message_bytes(op);
    for (int to = 0; to < n; to++) {
        if (to == me) continue;
        end += (r->in_counts[to] * size + 63) / 64 * 64;
    }
    /* Size of the whole message as for other kinds: even blocks, including the own one. */
    bool reached = reaches_memory(op, bytes / (n - 1) * n);
    bool placed = qd_local_place(group, r->in) != QD_LOCAL_NOWHERE;
    bool waits = placed ? bytes >= ways_of(op)->placed_from && op->comm->world->spin > 0 : reached; /* for the readers */
    s->way = end <= QD_LOCAL_SMALL_BYTES && !waits ? QD_LOCAL_SMALL
             : placed                              ? QD_LOCAL_PLACED
             : reached                             ? QD_LOCAL_MEMORY
                                                   : QD_LOCAL_STAGED;
    s->part_elements = group->header->ring_bytes / n / size;
    s->large = qd_local_copy_way(op, bytes, placed);
    /* Data that stays in the second-level caches is better copied by the rank that reads it. */
    s->chunked = placed && bytes >= ways_of(op)->common_from;
    qd_local_block *blocks = qd_local_blocks_of(op, me);
    end = head;
    for (int to = 0; to < n; to++) {
        blocks[to].count = r->in_counts[to];
        blocks[to].offset = s->way == QD_LOCAL_SMALL ? end : r->in_offsets[to] * size;
        blocks[to].expected = r->out_counts[to];
        blocks[to].out_offset = r->out_offsets[to] * size;
        if (to == me || r->in_counts[to] == 0) continue;
        if (s->way == QD_LOCAL_SMALL)
            memcpy(qd_local_small_of(op, me) + end, (const char *)r->in + r->in_offsets[to] * size,
                   (size_t)(r->in_counts[to] * size));
        end += (r->in_counts[to] * size + 63) / 64 * 64;
    }
}

static uint64_t producers(const qd_transfer *op)
{
    uint64_t ranks = 0;
    for (int r = 0; r < op->comm->size; r++) ranks |= qd_transfer_produces(op, r) ? (uint64_t)1 << r : 0;
    return ranks;
}

/* Chooses parts, rounds and buffers. All results must be equal on all ranks (all-to-all: rounds are
 * counted later). */
static void plan(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    qd_local_group *group = qd_local_group_of(op);
    int n = op->comm->size;
    int64_t size = qd_local_element_size(op), most = 0;
    s->combines = r->kind == QD_COLL_ALL_REDUCE || qd_transfer_is_split(op);
    s->many = s->combines || r->kind == QD_COLL_REDUCE_SCATTER || r->kind == QD_COLL_SCATTER ||
              r->kind == QD_COLL_ALL_TO_ALL;
    s->large = qd_local_copy_way(op, r->count * size, false);
    if (qd_local_is_direct(op)) {
        assert(r->count * size <= QD_LOCAL_SMALL_BYTES);
        s->direct = true;
        return;
    }
    if (r->kind == QD_COLL_ALL_TO_ALL) {
        plan_blocks(op);
        return;
    }
    for (int i = 0; i < n; i++) {
        bool whole_message = r->kind == QD_COLL_BROADCAST || (r->kind == QD_COLL_REDUCE && !s->combines);
        int64_t elements = whole_message ? r->count : qd_transfer_packed_count(op, i);
        if (elements > most) most = elements;
    }
    if (most == 0) return; /* no rounds */
    int64_t line = 64 / size; /* parts are aligned to cache lines */
    int64_t whole = (most + line - 1) / line * line;
    bool reached = reaches_memory(op, r->count * size);
    if ((s->many ? n : 1) * whole * size <= QD_LOCAL_SMALL_BYTES && !reached) {
        s->way = QD_LOCAL_SMALL;
        s->part_elements = whole;
        s->rounds = 1;
        /* A rank that was undecided about one pass has posted before it produces. */
        s->awaited = qd_local_pass_large(op) ? producers(op) : 0;
    } else if (reached) {
        s->way = QD_LOCAL_MEMORY;
        s->reaches = true;
        s->part_elements = most;
        s->rounds = 1;
        /* The root of a scatter has its own part to copy; its share of several consumers' parts
         * would be negligible. */
        s->shares = r->count * size >= QD_LOCAL_SHARE_BYTES && (r->kind == QD_COLL_BROADCAST || r->kind == QD_COLL_GATHER ||
                                                       (r->kind == QD_COLL_SCATTER && n == 2));
    } else {
        s->way = QD_LOCAL_STAGED;
        /* Several rounds also for medium messages, so that ranks work concurrently. */
        int64_t least = PART_LEAST / size, room = group->header->ring_bytes / (s->many ? n : 1) / size / line * line;
        s->part_elements = whole / 16 / line * line > least ? whole / 16 / line * line : least;
        if (s->part_elements > room) s->part_elements = room;
        s->fused = r->kind == QD_COLL_ALL_GATHER && !r->lists;
        s->rounds = (most + s->part_elements - 1) / s->part_elements;
        s->awaited = producers(op);
    }
}

/* Whether `rank` consumes: only the root takes the sums of a split reduce. */
static bool fetches(const qd_transfer *op, int rank)
{
    return op->request.kind == QD_COLL_REDUCE ? rank == op->request.root : qd_transfer_consumes(op, rank);
}

/* Whether all peers have left the last operation that used this rank's ring. */
static bool ring_is_free(const qd_transfer *op)
{
    qd_local_group *group = qd_local_group_of(op);
    if (group->ring_used == 0) return true;
    for (int r = 0; r < op->comm->size; r++)
        if (r != op->comm->rank &&
            atomic_load_explicit(&group->lanes[r]->finished, memory_order_acquire) < group->ring_used)
            return false;
    return true;
}

/* Sets up this rank's steps. Produces the first round if its buffer is free. */
static void begin_rounds(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank;
    plan(op);
    s->produces = qd_transfer_produces(op, me) && !s->direct &&
                  (s->way == QD_LOCAL_STAGED || (s->way == QD_LOCAL_SMALL && r->kind != QD_COLL_ALL_TO_ALL));
    s->consumes = fetches(op, me) && !s->direct;
    s->pushes = s->shares && qd_transfer_produces(op, me);
    if (r->kind == QD_COLL_ALL_TO_ALL) {
        qd_local_post_of(op, me)->way = s->way;
        if (s->way == QD_LOCAL_PLACED) qd_local_common_begin(op);
    }
    if (s->direct) {
        if (r->count > 0) memcpy(qd_local_small_of(op, me), r->in, (size_t)(r->count * qd_local_element_size(op)));
    } else if (s->produces && (s->rounds > 0 || r->kind == QD_COLL_ALL_TO_ALL) &&
               (s->way == QD_LOCAL_SMALL || ring_is_free(op))) {
        qd_local_produce(op); /* all-to-all: staged blocks are not empty, so there is at least one round */
    }
}

qd_status qd_local_collective_start(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank;
    uint64_t sequence = op->fingerprint.sequence;
    memset(s, 0, sizeof *s);
    s->base = sequence << QD_LOCAL_ROUND_BITS;
    qd_local_post *post = qd_local_post_of(op, me);
    post->fingerprint = op->fingerprint;
    post->in = r->in;
    post->out = r->out;
    post->in_at = qd_local_place(group, r->in);
    post->out_at = qd_local_place(group, r->out);
    post->can_read = group->can_read;
    s->all_can_read = group->can_read;
    s->remote = atomic_load_explicit(&group->remote, memory_order_relaxed);
    s->pass = qd_local_pass_begin(op);
    if (s->pass == QD_LOCAL_UNDECIDED) {
        s->own_left = qd_local_pass_leaves_own(op);
    } else {
        begin_rounds(op);
    }
    atomic_store_explicit(&post->posted, sequence, memory_order_release);
    qd_local_ring_all(op->comm);
    if (!s->direct && !s->fused && !s->own_left) copy_own(op);
    return QD_OK;
}

typedef bool (*role)(const qd_transfer *op, int rank);

static bool is_awaited(const qd_transfer *op, int rank)
{
    return qd_local_state_of(op)->awaited >> rank & 1;
}

static bool everyone(const qd_transfer *op, int rank)
{
    return rank < op->comm->size;
}

/* True if `counter` of all peers in this role has reached `value`. */
#define ALL_REACHED(op, counter, has_role, value)                                                           \
    all_reached((op), offsetof(qd_local_lane, counter), (has_role), (value))
static bool all_reached(const qd_transfer *op, size_t counter, role has_role, uint64_t value)
{
    qd_local_group *group = qd_local_group_of(op);
    for (int r = 0; r < op->comm->size; r++) {
        if (r == op->comm->rank || !has_role(op, r)) continue;
        _Atomic uint64_t *at = (_Atomic uint64_t *)((char *)group->lanes[r] + counter);
        if (atomic_load_explicit(at, memory_order_acquire) < value) return false;
    }
    return true;
}

static bool can_produce(const qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    if (!s->produces || s->produced >= s->rounds) return false;
    if (s->way == QD_LOCAL_SMALL) return true;
    if (s->produced < QD_LOCAL_RING) return s->entered == op->comm->size || ring_is_free(op);
    /* A peer that has combined (or consumed, where no rank combines) has read what this rank
     * produced for it. */
    uint64_t read = s->base + (uint64_t)(s->produced - QD_LOCAL_RING + 1);
    return s->combines ? ALL_REACHED(op, combined, everyone, read) : ALL_REACHED(op, consumed, fetches, read);
}

static bool inputs_ready(const qd_transfer *op, int64_t k)
{
    const state *s = qd_local_state_of(op);
    if (s->entered < op->comm->size) return false;
    return !s->awaited || ALL_REACHED(op, produced, is_awaited, s->base + (uint64_t)k + 1);
}

/* A sum overwrites that of QD_LOCAL_RING rounds ago. A peer that has produced this round has not
 * necessarily fetched the old sum: it waited only for the others to combine. */
static uint64_t old_sum_fetched(const state *s)
{
    return s->base + (uint64_t)(s->combined - QD_LOCAL_RING + 1);
}

static bool can_combine(const qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    if (!s->combines || s->combined >= s->rounds || !inputs_ready(op, s->combined)) return false;
    return s->combined < QD_LOCAL_RING || ALL_REACHED(op, consumed, fetches, old_sum_fetched(s));
}

static bool can_consume(const qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    if (!s->consumes || s->consumed == s->rounds) return false;
    if (!s->combines) return inputs_ready(op, s->consumed);
    return s->combined > s->consumed && ALL_REACHED(op, combined, everyone, s->base + (uint64_t)s->consumed + 1);
}

/* See the top of local_impl.h: the result takes effect with the next operation. */
static void agree_on_reading(qd_transfer *op)
{
    qd_local_group *group = qd_local_group_of(op);
    if (op->comm->id == 0 && !group->met) {
        group->met = true;
        qd_local_choose_spin(op->comm);
    }
    if (group->threads) return;
    if (!group->probed) {
        group->probed = true;
        group->can_read = qd_local_probe(op->comm);
    }
    bool now = qd_local_state_of(op)->all_can_read;
    if (now == atomic_load_explicit(&group->remote, memory_order_relaxed)) return;
    atomic_store_explicit(&group->remote, now, memory_order_relaxed);
    if (op->comm->id == 0) atomic_store_explicit(&group->view->remote, now, memory_order_relaxed);
}

/* Calls must agree before data is used: those of all ranks in rounds, those of the two sides of a
 * copy in one pass. */
static qd_status enter(qd_transfer *op, bool *moved)
{
    state *s = qd_local_state_of(op);
    const qd_comm *comm = op->comm;
    uint64_t sequence = op->fingerprint.sequence;
    for (int peer = 0; peer < comm->size; peer++) {
        if (qd_local_has_posted(op, peer)) continue;
        if (peer != comm->rank) {
            const qd_local_post *post = qd_local_post_of(op, peer);
            if (atomic_load_explicit(&post->posted, memory_order_acquire) != sequence) {
                if (s->pass == QD_LOCAL_ROUNDS) return QD_OK; /* rounds need this one before the later ones */
                continue;
            }
            qd_fingerprint theirs = post->fingerprint;
            if (memcmp(&theirs, &op->fingerprint, sizeof theirs) != 0) {
                char place[QD_COMM_PLACE_BYTES];
                qd_comm_place_get(&qd_local_group_of(op)->ranks[comm->world_ranks[peer]].board.place, place);
                QD_TRY(qd_transfer_check(op, peer, &theirs, place));
            }
            s->all_can_read = s->all_can_read && post->can_read;
        }
        s->checked |= (uint64_t)1 << peer;
        s->entered++;
        *moved = true;
    }
    if (s->entered == comm->size) agree_on_reading(op);
    if (s->entered < comm->size || op->request.kind != QD_COLL_ALL_TO_ALL) return QD_OK;
    /* All counts are known now: compare the pairs and count the rounds. */
    for (int from = 0; from < comm->size; from++) {
        qd_local_way way = qd_local_post_of(op, from)->way;
        bool staged = way == QD_LOCAL_STAGED;
        s->awaited |= (uint64_t)staged << from;
        s->reaches = s->reaches || way == QD_LOCAL_MEMORY || way == QD_LOCAL_PLACED;
        for (int to = 0; to < comm->size; to++) {
            if (from == to) continue;
            int64_t elements = qd_local_elements_for(op, from, to),
                    rounds = staged ? (elements + s->part_elements - 1) / s->part_elements : 1;
            if (elements > 0 && rounds > s->rounds) s->rounds = rounds;
            if (to != comm->rank || elements == op->request.out_counts[from]) continue;
            char place[QD_COMM_PLACE_BYTES];
            qd_comm_place_get(&qd_local_group_of(op)->ranks[comm->world_ranks[from]].board.place, place);
            QD_TRY(qd_transfer_check_pair(op, from, elements, op->request.out_counts[from], place));
        }
    }
    s->common = qd_local_common_decide(op);
    return QD_OK;
}

/* Runs a step that may access other ranks' memory; false when the world was aborted. */
static bool guarded(qd_transfer *op, bool (*step)(qd_transfer *))
{
    qd_local_group *group = qd_local_group_of(op);
    if (!qd_local_state_of(op)->reaches) return step(op);
    _Atomic uint32_t *inside = &group->lanes[op->comm->rank]->inside;
    if (!qd_local_enter(group, inside)) return false;
    bool good = step(op);
    qd_local_leave(inside);
    return good;
}

/* Whether others access this rank's memory. */
static bool is_exposed(const qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    return s->pass != QD_LOCAL_ROUNDS || s->way == QD_LOCAL_MEMORY || s->way == QD_LOCAL_PLACED;
}

static bool is_done(const qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    if (s->entered < op->comm->size) return false;
    if ((s->consumes && s->consumed < s->rounds) || (s->combines && s->combined < s->rounds) ||
        ((s->produces || s->pushes) && s->produced < s->rounds))
        return false;
    if (s->shares && s->consumes && !ALL_REACHED(op, produced, qd_transfer_produces, s->base + 1)) return false;
    /* Others may still be reading this rank's own buffers. */
    return !is_exposed(op) || !qd_transfer_produces(op, op->comm->rank) ||
           ALL_REACHED(op, consumed, fetches, s->base + (uint64_t)s->rounds);
}

static void poll_common(qd_transfer *op, bool *done, bool *moved)
{
    double began = qd_clock_now();
    bool worked = qd_local_common_work(op);
    *done = qd_local_state_of(op)->done = qd_local_common_is_done(op);
    if (!worked) return;
    *moved = true;
    qd_local_ring_all(op->comm);
    op->busy_seconds += qd_clock_now() - began;
}

/* After the decision for one pass. */
static void poll_pass(qd_transfer *op, bool *done, bool *moved)
{
    double began = qd_clock_now();
    bool worked = false;
    while (qd_local_pass_work(op)) {
        worked = true;
        if (qd_local_state_of(op)->part >= 0) break; /* one piece per poll */
    }
    *done = qd_local_state_of(op)->done = qd_local_pass_is_done(op);
    if (!worked) return;
    *moved = true;
    if (qd_local_state_of(op)->passed) qd_local_ring_all(op->comm);
    op->busy_seconds += qd_clock_now() - began;
}

qd_status qd_local_collective_poll(qd_transfer *op, bool *done, bool *moved)
{
    state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    if (s->entered < op->comm->size) QD_TRY(enter(op, moved));
    if (s->pass == QD_LOCAL_UNDECIDED) {
        s->pass = qd_local_pass_decide(op);
        if (s->pass == QD_LOCAL_UNDECIDED) return QD_OK;
        *moved = true;
        if (s->pass == QD_LOCAL_ONE_PASS) {
            qd_local_pass_plan(op);
        } else {
            begin_rounds(op);
            assert(!s->direct); /* its data would be late: see qd_local_pass_large() */
            if (s->produced > 0) qd_local_ring_all(op->comm);
            if (s->own_left && !s->fused) copy_own(op);
        }
    }
    if (s->pass == QD_LOCAL_ONE_PASS) {
        poll_pass(op, done, moved);
        return QD_OK;
    }
    if (s->common) {
        poll_common(op, done, moved);
        return QD_OK;
    }
    if (s->direct) {
        *done = s->entered == op->comm->size;
        if (*done) qd_local_sum_direct(op);
        return QD_OK;
    }
    bool timed = s->rounds > 1 || is_exposed(op);
    double began = timed ? qd_clock_now() : 0;
    bool worked = false;
    if (can_consume(op) && guarded(op, qd_local_consume)) worked = true;
    if (can_combine(op) && guarded(op, qd_local_combine)) worked = true;
    if (s->pushes && s->produced == 0 && s->entered == op->comm->size && guarded(op, qd_local_push_share)) worked = true;
    if (can_produce(op)) {
        qd_local_produce(op);
        worked = true;
    }
    *done = s->done = is_done(op);
    if (*done && s->shares && s->consumes)
        for (int r = 0; r < op->comm->size; r++)
            if (r != op->comm->rank && qd_transfer_produces(op, r))
                op->bytes += group->lanes[r]->parity[op->fingerprint.sequence & 1].pushed[op->comm->rank];
    if (worked) {
        *moved = true;
        /* No rank waits for the last step of an operation of small messages, unless it is a sum
         * for the root. */
        bool silent = *done && s->way == QD_LOCAL_SMALL && !s->awaited && (s->consumes || !s->combines);
        if (!silent) qd_local_ring_all(op->comm);
        if (timed) op->busy_seconds += qd_clock_now() - began;
    }
    return QD_OK;
}

void qd_local_collective_finish(qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank;
    atomic_store_explicit(&group->lanes[me]->finished, op->fingerprint.sequence, memory_order_release);
    if (!is_exposed(op) || s->done) return;
    /* Failed while others know our buffers. The world is aborted, so no rank enters them any more;
     * wait for the ranks that are inside. */
    for (int r = 0; r < op->comm->size; r++)
        if (r != me) qd_local_wait_left(group, &group->lanes[r]->inside);
}

bool qd_local_collective_late(const qd_transfer *op, int peer, uint64_t *sequence)
{
    const state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    qd_local_lane *lane = group->lanes[peer];
    uint64_t even = atomic_load(&lane->parity[0].post.posted), odd = atomic_load(&lane->parity[1].post.posted);
    *sequence = even > odd ? even : odd;
    if (*sequence < op->fingerprint.sequence) return true;
    if (s->pass == QD_LOCAL_ONE_PASS) return s->passed && qd_local_pass_waits_for(op, peer);
    if (s->entered < op->comm->size) return false;
    if (s->common) return atomic_load(&lane->inside);
    if (s->combines && s->consumes && s->consumed < s->combined)
        return atomic_load(&lane->combined) < s->base + (uint64_t)s->consumed + 1;
    int64_t next = s->combines ? s->combined : s->consumed;
    if ((s->combines || s->consumes) && next < s->rounds) {
        if (is_awaited(op, peer) && atomic_load(&lane->produced) < s->base + (uint64_t)next + 1) return true;
        if (s->combines && s->combined >= QD_LOCAL_RING && fetches(op, peer) &&
            atomic_load(&lane->consumed) < old_sum_fetched(s))
            return true;
    }
    if (s->shares && s->consumes)
        return qd_transfer_produces(op, peer) && atomic_load(&lane->produced) < s->base + 1;
    if (s->produces && s->produced < s->rounds) {
        uint64_t read = s->base + (uint64_t)(s->produced - QD_LOCAL_RING + 1);
        return s->combines ? atomic_load(&lane->combined) < read : fetches(op, peer) && atomic_load(&lane->consumed) < read;
    }
    return fetches(op, peer) && is_exposed(op) && qd_transfer_produces(op, op->comm->rank) &&
           atomic_load(&lane->consumed) < s->base + (uint64_t)s->rounds;
}
