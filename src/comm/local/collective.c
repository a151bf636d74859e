/* Collectives over a slot, in rounds where they do not take one pass (onepass.c).
 *
 * A rank's contribution is cut into rounds of at most `part` elements per destination. In each round a rank
 *   produces   copies its parts into a buffer of its lane (nothing when the others read its memory directly)
 *   combines   all-reduce only: sums its slice over all ranks and publishes the result in its own part of the buffer
 *   consumes   takes what the others produced (or combined) into `out`
 * and the three run as far ahead of each other as the ring of buffers allows. Small messages are one round in the
 * lane's small buffer, written before the post. Small all-reduces (qd_coll_direct) need no second exchange: every rank
 * sums everything.
 *
 * Layout of a buffer, by kind: "many" kinds hold a part for each rank (all-reduce, reduce-scatter, scatter,
 * all-to-all); the part of the producer itself is empty, or its result in an all-reduce. "One" kinds hold one part that
 * everybody reads (all-gather, gather, broadcast, reduce). */
#include "comm/local/collective_impl.h"
#include "device/sum.h"

#include "base/clock.h"

#include <assert.h>
#include <string.h>

#define STREAM_BYTES (4 << 20) /* results of larger messages are written past the caches */
#define PLACED_STREAM_BYTES (384 << 10) /* of an all-to-all between memories that are reached by address, without own blocks */
#define PLACED_LEAST (32 << 10) /* smaller ones go through the lanes, and where there are more ranks than cores */
#define PART_LEAST (16 << 10)  /* bytes of a part of a ring buffer, where the ring is not smaller */
#define REMOTE_BLOCK 65536     /* bytes read at a time from another process before they are summed: fits L2 */

/* Processes: messages above REACH_LEAST bytes (of the whole message) go from memory to memory, and those above these
 * limits through the ring. Measured: below, the system call costs more than a second copy; above, pinning pages does.
 * Where several ranks read the same data, the ring is better at all sizes; a reduce is summed straight from it. */
#define REACH_LEAST (64 << 10)
static const int64_t reach_most[QD_COLL_KIND_COUNT][2] = { /* 2 ranks, more ranks */
    [QD_COLL_ALL_REDUCE] = {2 << 20, 0},      [QD_COLL_REDUCE_SCATTER] = {4 << 20, 0},
    [QD_COLL_ALL_GATHER] = {4 << 20, 0},      [QD_COLL_ALL_TO_ALL] = {4 << 20, 4 << 20},
    [QD_COLL_BROADCAST] = {8 << 20, 0},       [QD_COLL_GATHER] = {INT64_MAX, 8 << 20},
    [QD_COLL_SCATTER] = {INT64_MAX, 8 << 20}, [QD_COLL_REDUCE] = {0, 0},
};

typedef qd_local_state state;

static unsigned char *small_of(const qd_transfer *op, int rank)
{
    return qd_local_group_of(op)->lanes[rank]->parity[op->fingerprint.sequence & 1].small;
}

/* all-to-all: what `rank` has for each rank. */
static qd_local_block *blocks_of(const qd_transfer *op, int rank)
{
    return (qd_local_block *)small_of(op, rank);
}

/* Elements that `from` has for `to`. all-to-all: known only for this rank's own row, and for others once posted. */
static int64_t elements_for(const qd_transfer *op, int from, int to)
{
    switch (op->request.kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_REDUCE_SCATTER:
    case QD_COLL_SCATTER: return qd_transfer_packed_count(op, to);
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER: return qd_transfer_packed_count(op, from);
    case QD_COLL_BROADCAST:
    case QD_COLL_REDUCE: return op->request.count;
    case QD_COLL_ALL_TO_ALL:
        if (from == op->comm->rank) return op->request.in_counts[to];
        return blocks_of(op, from)[to].count;
    default: return 0;
    }
}

/* The range of round k within `elements`. */
static void round_range(const state *s, int64_t k, int64_t elements, int64_t *first, int64_t *count)
{
    *first = k * s->part_elements < elements ? k * s->part_elements : elements;
    *count = elements - *first < s->part_elements ? elements - *first : s->part_elements;
}

/* ---- addresses ---- */

/* Part `index` of the buffer of `rank` in round k. */
static unsigned char *part_of(const qd_transfer *op, int rank, int64_t k, int index)
{
    const state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    unsigned char *buffer = s->way == QD_LOCAL_SMALL ? small_of(op, rank) : qd_local_ring(group, rank, k);
    return buffer + (s->many ? index : 0) * s->part_elements * qd_local_element_size(op);
}

/* ---- start ---- */

/* Between processes: from memory to memory? Ranks with lists of segments go through the ring. */
static bool reaches_memory(const qd_transfer *op, int64_t bytes)
{
    return qd_local_state_of(op)->remote && !op->request.lists && bytes > REACH_LEAST && bytes <= reach_most[op->request.kind][op->comm->size > 2];
}

/* all-to-all: ranks know only their own counts when they begin, so each decides for its own blocks. */
static void plan_blocks(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op), head = (n * (int64_t)sizeof(qd_local_block) + 63) / 64 * 64, end = head, bytes = 0;
    for (int to = 0; to < n; to++) {
        if (to == me) continue;
        bytes += r->in_counts[to] * size;
        end += (r->in_counts[to] * size + 63) / 64 * 64;
    }
    /* Of the whole message, to be compared with the other kinds: even blocks, with the own one. */
    bool reached = reaches_memory(op, bytes / (n - 1) * n);
    bool placed = qd_local_place(group, r->in) != QD_LOCAL_NOWHERE;
    bool waits = placed ? bytes >= PLACED_LEAST && op->comm->world->spin > 0 : reached; /* for those who read */
    s->way = end <= QD_LOCAL_SMALL_BYTES && !waits ? QD_LOCAL_SMALL
             : placed                              ? QD_LOCAL_PLACED
             : reached                             ? QD_LOCAL_MEMORY
                                                   : QD_LOCAL_STAGED;
    s->part_elements = group->header->ring_bytes / n / size;
    s->large = bytes >= (placed ? PLACED_STREAM_BYTES : STREAM_BYTES);
    qd_local_block *blocks = blocks_of(op, me);
    end = head;
    for (int to = 0; to < n; to++) {
        blocks[to].count = r->in_counts[to];
        blocks[to].offset = s->way == QD_LOCAL_SMALL ? end : r->in_offsets[to] * size;
        if (to == me || r->in_counts[to] == 0) continue;
        if (s->way == QD_LOCAL_SMALL)
            memcpy(small_of(op, me) + end, (const char *)r->in + r->in_offsets[to] * size,
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

/* Parts, rounds and buffers. Everything here must come out equal on all ranks (all-to-all: rounds come later). */
static void plan(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    qd_local_group *group = qd_local_group_of(op);
    int n = op->comm->size;
    int64_t size = qd_local_element_size(op), most = 0;
    s->many = r->kind == QD_COLL_ALL_REDUCE || r->kind == QD_COLL_REDUCE_SCATTER || r->kind == QD_COLL_SCATTER ||
              r->kind == QD_COLL_ALL_TO_ALL;
    s->combines = r->kind == QD_COLL_ALL_REDUCE;
    s->large = r->count * size >= STREAM_BYTES;
    if (r->kind == QD_COLL_ALL_REDUCE && qd_coll_direct(r->count * size, n)) {
        assert(r->count * size <= QD_LOCAL_SMALL_BYTES);
        s->direct = true;
        return;
    }
    if (r->kind == QD_COLL_ALL_TO_ALL) {
        plan_blocks(op);
        return;
    }
    for (int i = 0; i < n; i++) {
        bool whole_message = r->kind == QD_COLL_BROADCAST || r->kind == QD_COLL_REDUCE;
        int64_t elements = whole_message ? r->count : qd_transfer_packed_count(op, i);
        if (elements > most) most = elements;
    }
    if (most == 0) return; /* no rounds */
    int64_t line = 64 / size; /* parts begin on cache lines */
    int64_t whole = (most + line - 1) / line * line;
    bool reached = reaches_memory(op, r->count * size);
    int64_t small_most = r->kind == QD_COLL_REDUCE && !group->view->all_reached ? 2 * PART_LEAST - 1 : QD_LOCAL_SMALL_BYTES;
    if ((s->many ? n : 1) * whole * size <= small_most && !reached) {
        s->way = QD_LOCAL_SMALL;
        s->part_elements = whole;
        s->rounds = 1;
        /* A rank that hoped for one pass has posted before it produces. */
        s->awaited = qd_local_pass_large(op) ? producers(op) : 0;
    } else if (reached) {
        s->way = QD_LOCAL_MEMORY;
        s->reaches = true;
        s->part_elements = most;
        s->rounds = 1;
        /* The root of a scatter has its own part to copy, and could help several others only with trifles. */
        s->shares = r->count * size >= QD_LOCAL_SHARE_BYTES && (r->kind == QD_COLL_BROADCAST || r->kind == QD_COLL_GATHER ||
                                                       (r->kind == QD_COLL_SCATTER && n == 2));
    } else {
        s->way = QD_LOCAL_STAGED;
        /* Several rounds even of middling messages, so that ranks work at the same time. */
        int64_t least = PART_LEAST / size, room = group->header->ring_bytes / (s->many ? n : 1) / size / line * line;
        s->part_elements = whole / 16 / line * line > least ? whole / 16 / line * line : least;
        if (s->part_elements > room) s->part_elements = room;
        s->fused = r->kind == QD_COLL_ALL_GATHER && !r->lists;
        s->rounds = (most + s->part_elements - 1) / s->part_elements;
        s->awaited = producers(op);
    }
}

/* All peers have left the last operation that used this rank's ring. */
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

static void produce(qd_transfer *op);

/* Rounds: what this rank does in them. Also produces the first one if there is room for it. */
static void begin_rounds(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank;
    plan(op);
    s->produces = qd_transfer_produces(op, me) && !s->direct &&
                  (s->way == QD_LOCAL_STAGED || (s->way == QD_LOCAL_SMALL && r->kind != QD_COLL_ALL_TO_ALL));
    s->consumes = qd_transfer_consumes(op, me) && !s->direct;
    s->pushes = s->shares && qd_transfer_produces(op, me);
    if (r->kind == QD_COLL_ALL_TO_ALL) qd_local_post_of(op, me)->way = s->way;
    if (s->direct) {
        if (r->count > 0) memcpy(small_of(op, me), r->in, (size_t)(r->count * qd_local_element_size(op)));
    } else if (s->produces && (s->rounds > 0 || r->kind == QD_COLL_ALL_TO_ALL) &&
               (s->way == QD_LOCAL_SMALL || ring_is_free(op))) {
        produce(op); /* all-to-all: staged blocks are not empty, so there is a round */
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
        post->pulled = qd_local_pass_pulled(op);
        s->own_left = qd_local_pass_leaves_own(op);
    } else {
        begin_rounds(op);
    }
    atomic_store_explicit(&post->posted, sequence, memory_order_release);
    qd_local_ring_all(op->comm);
    if (!s->direct && !s->fused && !s->own_left) qd_transfer_copy_own(op, s->large);
    return QD_OK;
}

/* ---- the three steps ---- */

static void produce(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op), k = s->produced, first, count;
    if (s->way == QD_LOCAL_STAGED) qd_local_group_of(op)->ring_used = op->fingerprint.sequence;
    if (!s->many) {
        round_range(s, k, elements_for(op, me, me), &first, &count);
        const char *from = (const char *)r->in + first * size;
        if (count > 0) memcpy(part_of(op, me, k, 0), from, (size_t)(count * size));
        char *own = s->fused ? (char *)r->out + (qd_transfer_segment(op, me, 0).offset + first) * size : NULL;
        if (count > 0 && own && own != from) qd_comm_copy(own, from, count * size, s->large);
    } else {
        for (int step = 1; step < n; step++) {
            int to = (me + step) % n;
            round_range(s, k, elements_for(op, me, to), &first, &count);
            if (count == 0) continue;
            if (r->kind == QD_COLL_ALL_TO_ALL)
                memcpy(part_of(op, me, k, to), (const char *)r->in + (r->in_offsets[to] + first) * size,
                       (size_t)(count * size));
            else
                qd_transfer_pack(op, to, first, count, r->in, part_of(op, me, k, to));
        }
    }
    s->produced++;
    atomic_store_explicit(&qd_local_group_of(op)->lanes[me]->produced, s->base + (uint64_t)s->produced,
                          memory_order_release);
}

/* `length` elements of this rank's own segments, summed over every rank's input. in_full: where they are in the full
 * buffer; in_part: where in a part of round k. Reads from other processes go through this rank's idle ring. */
static bool sum_block(qd_transfer *op, int64_t k, void *to, int64_t in_full, int64_t in_part, int64_t length)
{
    const qd_coll_request *r = &op->request;
    const state *s = qd_local_state_of(op);
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op);
    const void *sources[QD_LOCAL_MAX_RANKS];
    unsigned char *room = qd_local_ring(qd_local_group_of(op), me, 0);
    for (int p = 0; p < n; p++) {
        if (p == me) {
            sources[p] = (const char *)r->in + in_full * size;
        } else if (s->way == QD_LOCAL_MEMORY) {
            const char *from = (const char *)qd_local_post_of(op, p)->in + in_full * size;
            if (!qd_local_pull(op->comm, p, room, from, length * size)) return false;
            sources[p] = room;
            room += length * size;
        } else {
            sources[p] = part_of(op, p, k, s->many ? me : 0) + in_part * size;
        }
    }
    qd_sum_tree(to, sources, n, length, r->dtype, r->reduce);
    op->bytes += length * size * (n - 1);
    return true;
}

/* Bytes of each source that are summed at a time. */
static int64_t sum_block_bytes(const qd_transfer *op, bool copy)
{
    if (qd_local_state_of(op)->way != QD_LOCAL_MEMORY) return copy ? QD_LOCAL_SUM_BLOCK : INT64_MAX;
    /* All sources of a block must fit into the ring. */
    int64_t room = QD_LOCAL_RING * qd_local_group_of(op)->header->ring_bytes / op->comm->size / 64 * 64;
    return room < REMOTE_BLOCK ? room : REMOTE_BLOCK;
}

/* Sums packed elements [first, first + count) of this rank's own segments into `packed` (this rank's packed buffer) or,
 * if full, to their places in it; also into `copy` if not NULL. */
static bool sum_own(qd_transfer *op, int64_t k, int64_t first, int64_t count, char *packed, char *full, char *copy)
{
    const state *s = qd_local_state_of(op);
    int me = op->comm->rank;
    int64_t size = qd_local_element_size(op), at = 0, block = sum_block_bytes(op, copy != NULL) / size;
    for (int i = 0; i < qd_transfer_segment_count(op, me) && at < first + count; i++) {
        qd_segment segment = qd_transfer_segment(op, me, i);
        int64_t begin = first > at ? first : at;
        int64_t end = first + count < at + segment.count ? first + count : at + segment.count;
        for (int64_t b = begin; b < end; b += block) {
            int64_t length = end - b < block ? end - b : block, in_full = segment.offset + b - at;
            char *to = full ? full + in_full * size : packed + b * size;
            char *part = copy ? copy + (b - first) * size : NULL;
            /* A large result goes to the buffer first and is then streamed out. */
            if (!sum_block(op, k, part && s->large ? part : to, in_full, b - first, length)) return false;
            if (part && s->large)
                qd_comm_copy(to, part, length * size, true);
            else if (part)
                memcpy(part, to, (size_t)(length * size));
            if (block >= end - b) break;
        }
        at += segment.count;
    }
    return true;
}

static bool combine(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    int me = op->comm->rank;
    int64_t k = s->combined, first, count;
    round_range(s, k, qd_transfer_packed_count(op, me), &first, &count);
    if (count > 0 &&
        !sum_own(op, k, first, count, NULL, op->request.out,
                 s->way == QD_LOCAL_MEMORY ? NULL : (char *)part_of(op, me, k, me)))
        return false;
    s->combined++;
    atomic_store_explicit(&qd_local_group_of(op)->lanes[me]->combined, s->base + (uint64_t)s->combined,
                          memory_order_release);
    return true;
}

/* Reduce: the root sums whole messages. */
static bool consume_reduce(qd_transfer *op, int64_t first, int64_t count)
{
    bool large = qd_local_state_of(op)->large;
    int64_t size = qd_local_element_size(op), block = sum_block_bytes(op, large) / size;
    _Alignas(64) unsigned char room[QD_LOCAL_SUM_BLOCK];
    for (int64_t b = 0; b < count; b += block) {
        int64_t length = count - b < block ? count - b : block;
        char *to = (char *)op->request.out + (first + b) * size;
        if (!sum_block(op, qd_local_state_of(op)->consumed, large ? (char *)room : to, first + b, b, length)) return false;
        if (large) qd_comm_copy(to, room, length * size, true);
        if (block >= count - b) break;
    }
    return true;
}

/* The root, one against all, copies the smaller share: 1/size, and less where it has a part of its own to copy first. */
int64_t qd_local_pulled(const qd_transfer *op, int from, int64_t elements)
{
    qd_coll_kind kind = op->request.kind;
    int64_t of_root = elements / (op->comm->size * (kind == QD_COLL_BROADCAST ? 1 : kind == QD_COLL_GATHER ? 2 : 5));
    return from == op->request.root ? elements - of_root : of_root;
}

/* Writes this rank's share into the memory of the consumers. */
static bool push(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    state *s = qd_local_state_of(op);
    qd_local_lane *lane = qd_local_group_of(op)->lanes[op->comm->rank];
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n;
        if (!qd_transfer_consumes(op, to)) continue;
        int64_t elements = elements_for(op, me, to), first = qd_local_pulled(op, me, elements);
        int64_t bytes = (elements - first) * size;
        const char *source = (const char *)r->in + first * size;
        char *target = (char *)qd_local_post_of(op, to)->out + first * size;
        if (r->kind == QD_COLL_SCATTER) source += qd_transfer_segment(op, to, 0).offset * size;
        if (r->kind == QD_COLL_GATHER) target += qd_transfer_segment(op, me, 0).offset * size;
        if (bytes > 0 && !qd_local_push(op->comm, to, target, source, bytes)) return false;
        lane->parity[op->fingerprint.sequence & 1].pushed[to] = bytes;
    }
    s->produced = 1;
    atomic_store_explicit(&lane->produced, s->base + 1, memory_order_release);
    return true;
}

/* all-to-all: the block of `from`, which says itself how it travels. */
static bool consume_block(qd_transfer *op, int from)
{
    const qd_coll_request *r = &op->request;
    state *s = qd_local_state_of(op);
    int me = op->comm->rank;
    int64_t size = qd_local_element_size(op), k = s->consumed, first = 0, count;
    const qd_local_block *block = &blocks_of(op, from)[me];
    const qd_local_post *post = qd_local_post_of(op, from);
    count = post->way == QD_LOCAL_STAGED ? 0 : k == 0 ? block->count : 0;
    if (post->way == QD_LOCAL_STAGED) round_range(s, k, block->count, &first, &count);
    if (count == 0) return true;
    char *to = (char *)r->out + (r->out_offsets[from] + first) * size;
    if (post->way == QD_LOCAL_MEMORY) {
        if (!qd_local_pull(op->comm, from, to, (const char *)post->in + block->offset, count * size)) return false;
    } else if (post->way == QD_LOCAL_PLACED) {
        const char *in = qd_local_at(qd_local_group_of(op), post->in_at);
        qd_comm_copy(to, in + block->offset, count * size, s->large);
    } else {
        const unsigned char *source = post->way == QD_LOCAL_SMALL
                                          ? small_of(op, from) + block->offset
                                          : qd_local_ring(qd_local_group_of(op), from, k) + me * s->part_elements * size;
        qd_comm_copy(to, source, count * size, s->large);
    }
    op->bytes += count * size;
    return true;
}

static bool consume_from(qd_transfer *op, int from)
{
    const qd_coll_request *r = &op->request;
    const state *s = qd_local_state_of(op);
    int me = op->comm->rank;
    int64_t size = qd_local_element_size(op), k = s->consumed, first, count;
    if (r->kind == QD_COLL_ALL_TO_ALL) return consume_block(op, from);
    bool memory = s->way == QD_LOCAL_MEMORY;
    int64_t elements = r->kind == QD_COLL_ALL_REDUCE ? qd_transfer_packed_count(op, from) : elements_for(op, from, me);
    if (s->shares) elements = qd_local_pulled(op, from, elements);
    round_range(s, k, elements, &first, &count);
    if (count == 0) return true;
    /* Where it is: a part of the buffer, or a place in the other's memory. Where it goes, if it is in one piece. */
    const char *in = memory ? qd_local_post_of(op, from)->in : NULL;
    const char *source = memory ? in + first * size : (const char *)part_of(op, from, k, me);
    char *to = (char *)r->out + first * size;
    switch (r->kind) {
    case QD_COLL_ALL_REDUCE: {
        int64_t offset = (qd_transfer_segment(op, from, 0).offset + first) * size;
        source = memory ? (const char *)qd_local_post_of(op, from)->out + offset : (const char *)part_of(op, from, k, from);
        to = (char *)r->out + offset;
        break;
    }
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER:
        to = qd_transfer_segment_count(op, from) == 1
                 ? (char *)r->out + (qd_transfer_segment(op, from, 0).offset + first) * size
                 : NULL;
        break;
    case QD_COLL_SCATTER:
        if (memory) source = in + (qd_transfer_segment(op, me, 0).offset + first) * size;
        break;
    case QD_COLL_BROADCAST: break;
    default: assert(false);
    }
    if (!to)
        qd_transfer_unpack(op, from, first, count, source, r->out);
    else if (!memory)
        qd_comm_copy(to, source, count * size, s->large);
    else if (!qd_local_pull(op->comm, from, to, source, count * size))
        return false;
    op->bytes += count * size;
    return true;
}

static bool consume(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    int me = op->comm->rank, n = op->comm->size;
    int64_t first, count;
    if (op->request.kind == QD_COLL_REDUCE_SCATTER || op->request.kind == QD_COLL_REDUCE) {
        round_range(s, s->consumed, elements_for(op, me, me), &first, &count);
        bool good = op->request.kind == QD_COLL_REDUCE
                        ? consume_reduce(op, first, count)
                        : sum_own(op, s->consumed, first, count, op->request.out, NULL, NULL);
        if (!good) return false;
    } else {
        for (int step = 1; step < n; step++) {
            int from = (me + step) % n;
            if (qd_transfer_produces(op, from) && !consume_from(op, from)) return false;
        }
    }
    s->consumed++;
    atomic_store_explicit(&qd_local_group_of(op)->lanes[me]->consumed, s->base + (uint64_t)s->consumed,
                          memory_order_release);
    return true;
}

/* ---- what may run now ---- */

typedef bool (*role)(const qd_transfer *op, int rank);

static bool is_awaited(const qd_transfer *op, int rank)
{
    return qd_local_state_of(op)->awaited >> rank & 1;
}

static bool everyone(const qd_transfer *op, int rank)
{
    return rank < op->comm->size;
}

/* True if `counter` of all peers with the role has reached `value`. */
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
    return ALL_REACHED(op, consumed, qd_transfer_consumes, s->base + (uint64_t)(s->produced - QD_LOCAL_RING + 1));
}

static bool inputs_ready(const qd_transfer *op, int64_t k)
{
    const state *s = qd_local_state_of(op);
    if (s->entered < op->comm->size) return false;
    return !s->awaited || ALL_REACHED(op, produced, is_awaited, s->base + (uint64_t)k + 1);
}

/* A sum takes the place of that of QD_LOCAL_RING rounds before. That a peer has produced this round does not say that it has
 * fetched the old sum: it waited for the others to consume, not for itself. */
static uint64_t old_sum_fetched(const state *s)
{
    return s->base + (uint64_t)(s->combined - QD_LOCAL_RING + 1);
}

static bool can_combine(const qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    if (!s->combines || s->combined >= s->rounds || !inputs_ready(op, s->combined)) return false;
    return s->combined < QD_LOCAL_RING || ALL_REACHED(op, consumed, everyone, old_sum_fetched(s));
}

static bool can_consume(const qd_transfer *op)
{
    const state *s = qd_local_state_of(op);
    if (!s->consumes || s->consumed == s->rounds) return false;
    if (!s->combines) return inputs_ready(op, s->consumed);
    return s->combined > s->consumed && ALL_REACHED(op, combined, everyone, s->base + (uint64_t)s->consumed + 1);
}

/* ---- poll ---- */

/* See the top of local_impl.h: the answer of this operation is used from the next one on. */
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

/* Calls must agree before data is used: everybody's in rounds, those of the two sides of a copy in one pass. */
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
                if (s->pass == QD_LOCAL_ROUNDS) return QD_OK; /* the later ones are of no use before this one */
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
    /* Now all counts are known: compare the pairs, and count the rounds. */
    for (int from = 0; from < comm->size; from++) {
        qd_local_way way = qd_local_post_of(op, from)->way;
        bool staged = way == QD_LOCAL_STAGED;
        s->awaited |= (uint64_t)staged << from;
        s->reaches = s->reaches || way == QD_LOCAL_MEMORY || way == QD_LOCAL_PLACED;
        for (int to = 0; to < comm->size; to++) {
            if (from == to) continue;
            int64_t elements = elements_for(op, from, to), rounds = staged ? (elements + s->part_elements - 1) / s->part_elements : 1;
            if (elements > 0 && rounds > s->rounds) s->rounds = rounds;
            if (to != comm->rank || elements == op->request.out_counts[from]) continue;
            char place[QD_COMM_PLACE_BYTES];
            qd_comm_place_get(&qd_local_group_of(op)->ranks[comm->world_ranks[from]].board.place, place);
            QD_TRY(qd_transfer_check_pair(op, from, elements, op->request.out_counts[from], place));
        }
    }
    return QD_OK;
}

static void sum_direct(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    int n = op->comm->size;
    const void *sources[QD_LOCAL_MAX_RANKS];
    for (int p = 0; p < n; p++) sources[p] = small_of(op, p);
    if (r->count > 0) qd_sum_tree(r->out, sources, n, r->count, r->dtype, r->reduce);
    op->bytes += r->count * qd_local_element_size(op) * (n - 1);
}

/* One step that may go into other ranks' memory; false when the world is aborted. */
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

/* Others go into this rank's memory. */
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
           ALL_REACHED(op, consumed, qd_transfer_consumes, s->base + (uint64_t)s->rounds);
}

/* One pass, when it is decided. */
static void poll_pass(qd_transfer *op, bool *done, bool *moved)
{
    double began = qd_clock_now();
    bool worked = false;
    while (qd_local_pass_work(op)) {
        worked = true;
        if (qd_local_state_of(op)->part >= 0) break; /* a piece at a time */
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
            if (s->produced > 0) qd_local_ring_all(op->comm);
            if (s->own_left && !s->fused) qd_transfer_copy_own(op, s->large);
        }
    }
    if (s->pass == QD_LOCAL_ONE_PASS) {
        poll_pass(op, done, moved);
        return QD_OK;
    }
    if (s->direct) {
        *done = s->entered == op->comm->size;
        if (*done) sum_direct(op);
        return QD_OK;
    }
    bool timed = s->rounds > 1 || is_exposed(op);
    double began = timed ? qd_clock_now() : 0;
    bool worked = false;
    if (can_consume(op) && guarded(op, consume)) worked = true;
    if (can_combine(op) && guarded(op, combine)) worked = true;
    if (s->pushes && s->produced == 0 && s->entered == op->comm->size && guarded(op, push)) worked = true;
    if (can_produce(op)) {
        produce(op);
        worked = true;
    }
    *done = s->done = is_done(op);
    if (*done && s->shares && s->consumes)
        for (int r = 0; r < op->comm->size; r++)
            if (r != op->comm->rank && qd_transfer_produces(op, r))
                op->bytes += group->lanes[r]->parity[op->fingerprint.sequence & 1].pushed[op->comm->rank];
    if (worked) {
        *moved = true;
        /* The last thing a rank does in an operation of small messages is of no interest to anybody. */
        if (!(*done && s->way == QD_LOCAL_SMALL && !s->awaited)) qd_local_ring_all(op->comm);
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
    /* Failed with our buffers still known to others: the world is aborted, so nobody enters them any more; wait for
     * those who are inside. */
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
    if (s->consumes && s->consumed < s->rounds) {
        if (s->combines && s->combined > s->consumed)
            return atomic_load(&lane->combined) < s->base + (uint64_t)s->consumed + 1;
        if (is_awaited(op, peer) && atomic_load(&lane->produced) < s->base + (uint64_t)s->consumed + 1) return true;
        if (s->combines && s->combined < s->rounds && s->combined >= QD_LOCAL_RING &&
            atomic_load(&lane->consumed) < old_sum_fetched(s))
            return true;
    }
    if (s->shares && s->consumes)
        return qd_transfer_produces(op, peer) && atomic_load(&lane->produced) < s->base + 1;
    if (!qd_transfer_consumes(op, peer)) return false;
    if (s->produces && s->produced < s->rounds)
        return atomic_load(&lane->consumed) < s->base + (uint64_t)(s->produced - QD_LOCAL_RING + 1);
    return is_exposed(op) && qd_transfer_produces(op, op->comm->rank) &&
           atomic_load(&lane->consumed) < s->base + (uint64_t)s->rounds;
}
