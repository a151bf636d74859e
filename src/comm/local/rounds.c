/* The steps of a round of a collective (produce, combine, consume). collective.c describes them and
 * decides when they run. */
#include "comm/local/collective_impl.h"
#include "device/sum.h"

#include <assert.h>
#include <string.h>

#define REMOTE_BLOCK 65536 /* bytes read from another process before they are summed: fits L2 */

typedef qd_local_state state;

/* See collective_impl.h. */
int64_t qd_local_elements_for(const qd_transfer *op, int from, int to)
{
    switch (op->request.kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_REDUCE_SCATTER:
    case QD_COLL_SCATTER: return qd_transfer_packed_count(op, to);
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER: return qd_transfer_packed_count(op, from);
    case QD_COLL_BROADCAST: return op->request.count;
    case QD_COLL_REDUCE: return qd_local_state_of(op)->combines ? qd_transfer_packed_count(op, to) : op->request.count;
    case QD_COLL_ALL_TO_ALL:
        if (from == op->comm->rank) return op->request.in_counts[to];
        return qd_local_blocks_of(op, from)[to].count;
    default: return 0;
    }
}

/* The range of round k within `elements`. */
static void round_range(const state *s, int64_t k, int64_t elements, int64_t *first, int64_t *count)
{
    *first = k * s->part_elements < elements ? k * s->part_elements : elements;
    *count = elements - *first < s->part_elements ? elements - *first : s->part_elements;
}

/* Part `index` of the buffer of `rank` in round k. */
static unsigned char *part_of(const qd_transfer *op, int rank, int64_t k, int index)
{
    const state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    unsigned char *buffer = s->way == QD_LOCAL_SMALL ? qd_local_small_of(op, rank) : qd_local_ring(group, rank, k);
    return buffer + (s->many ? index : 0) * s->part_elements * qd_local_element_size(op);
}

void qd_local_produce(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op), k = s->produced, first, count;
    if (s->way == QD_LOCAL_STAGED) qd_local_group_of(op)->ring_used = op->fingerprint.sequence;
    if (!s->many) {
        round_range(s, k, qd_local_elements_for(op, me, me), &first, &count);
        const char *from = (const char *)r->in + first * size;
        if (count > 0) memcpy(part_of(op, me, k, 0), from, (size_t)(count * size));
        char *own = s->fused ? (char *)r->out + (qd_transfer_segment(op, me, 0).offset + first) * size : NULL;
        if (count > 0 && own && own != from) qd_comm_copy(own, from, count * size, s->large);
    } else {
        for (int step = 1; step < n; step++) {
            int to = (me + step) % n;
            round_range(s, k, qd_local_elements_for(op, me, to), &first, &count);
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

/* Sums `length` elements of this rank's own segments over all ranks' inputs. in_full: their offset
 * in the full buffer; in_part: in a part of round k. Data read from other processes goes through
 * this rank's idle ring. */
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

/* Bytes of each source per block of a sum. */
static int64_t sum_block_bytes(const qd_transfer *op, bool copy)
{
    if (qd_local_state_of(op)->way != QD_LOCAL_MEMORY) return copy ? QD_LOCAL_SUM_BLOCK : INT64_MAX;
    /* All sources of a block must fit into the ring. */
    int64_t room = QD_LOCAL_RING * qd_local_group_of(op)->header->ring_bytes / op->comm->size / 64 * 64;
    return room < REMOTE_BLOCK ? room : REMOTE_BLOCK;
}

/* Sums packed elements [first, first + count) of this rank's own segments into `packed` (this
 * rank's packed buffer) or, if not NULL, to their offsets in `full`. If `copy` is not NULL, the
 * sums are stored there too, or only there if the other two are NULL. */
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
            char *to = full ? full + in_full * size : packed ? packed + b * size : NULL;
            char *part = copy ? copy + (b - first) * size : NULL;
            /* A large result is summed into the ring buffer and then copied with non-temporal
             * stores. */
            if (!sum_block(op, k, part && (s->large || !to) ? part : to, in_full, b - first, length)) return false;
            if (part && !to) continue;
            if (part && s->large)
                qd_comm_copy(to, part, length * size, s->large);
            else if (part)
                memcpy(part, to, (size_t)(length * size));
            if (block >= end - b) break;
        }
        at += segment.count;
    }
    return true;
}

bool qd_local_combine(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    int me = op->comm->rank;
    int64_t k = s->combined, first, count;
    round_range(s, k, qd_transfer_packed_count(op, me), &first, &count);
    bool root = me == op->request.root, rooted = op->request.kind == QD_COLL_REDUCE;
    char *full = rooted && !root ? NULL : op->request.out;
    char *part = s->way == QD_LOCAL_MEMORY || (rooted && root) ? NULL : (char *)part_of(op, me, k, me);
    assert(full || part); /* a reduce is never done by system call (reach_most): its sums would have no buffer */
    if (count > 0 && !sum_own(op, k, first, count, NULL, full, part)) return false;
    s->combined++;
    atomic_store_explicit(&qd_local_group_of(op)->lanes[me]->combined, s->base + (uint64_t)s->combined,
                          memory_order_release);
    return true;
}

/* The root, one against all, copies the smaller share: 1/size, and less where it must copy a part
 * of its own first. */
int64_t qd_local_pulled(const qd_transfer *op, int from, int64_t elements)
{
    qd_coll_kind kind = op->request.kind;
    int64_t of_root = elements / (op->comm->size * (kind == QD_COLL_BROADCAST ? 1 : kind == QD_COLL_GATHER ? 2 : 5));
    return from == op->request.root ? elements - of_root : of_root;
}

/* Writes this rank's share into the memory of the consumers. */
bool qd_local_push_share(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    state *s = qd_local_state_of(op);
    qd_local_lane *lane = qd_local_group_of(op)->lanes[op->comm->rank];
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op);
    for (int step = 1; step < n; step++) {
        int to = (me + step) % n;
        if (!qd_transfer_consumes(op, to)) continue;
        int64_t elements = qd_local_elements_for(op, me, to), first = qd_local_pulled(op, me, elements);
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

/* all-to-all: the block of `from`, whose post says how it moves. */
static bool consume_block(qd_transfer *op, int from)
{
    const qd_coll_request *r = &op->request;
    state *s = qd_local_state_of(op);
    int me = op->comm->rank;
    int64_t size = qd_local_element_size(op), k = s->consumed, first = 0, count;
    const qd_local_block *block = &qd_local_blocks_of(op, from)[me];
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
        if (!qd_local_counts(qd_local_group_of(op))) return false;
    } else {
        const unsigned char *source = post->way == QD_LOCAL_SMALL
                                          ? qd_local_small_of(op, from) + block->offset
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
    int64_t elements = s->combines ? qd_transfer_packed_count(op, from) : qd_local_elements_for(op, from, me);
    if (s->shares) elements = qd_local_pulled(op, from, elements);
    round_range(s, k, elements, &first, &count);
    if (count == 0) return true;
    /* Source: a part of the buffer, or an address in the other rank's memory. The destination is
     * set if it is contiguous. */
    const char *in = memory ? qd_local_post_of(op, from)->in : NULL;
    const char *source = memory ? in + first * size : (const char *)part_of(op, from, k, me);
    char *to = (char *)r->out + first * size;
    switch (r->kind) {
    case QD_COLL_REDUCE:
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

bool qd_local_consume(qd_transfer *op)
{
    state *s = qd_local_state_of(op);
    int me = op->comm->rank, n = op->comm->size;
    if (op->request.kind == QD_COLL_REDUCE_SCATTER) {
        int64_t first, count;
        round_range(s, s->consumed, qd_local_elements_for(op, me, me), &first, &count);
        if (!sum_own(op, s->consumed, first, count, op->request.out, NULL, NULL)) return false;
    } else if (op->request.kind == QD_COLL_REDUCE && !s->combines) { /* small: one round, summed by the root */
        if (!sum_block(op, 0, op->request.out, 0, 0, op->request.count)) return false;
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

void qd_local_sum_direct(qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    int n = op->comm->size;
    const void *sources[QD_LOCAL_MAX_RANKS];
    for (int p = 0; p < n; p++) sources[p] = qd_local_small_of(op, p);
    if (r->count > 0) qd_sum_tree(r->out, sources, n, r->count, r->dtype, r->reduce);
    op->bytes += r->count * qd_local_element_size(op) * (n - 1);
}
