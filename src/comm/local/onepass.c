/* Collectives in one pass, where the buffers involved are reached by address.
 *
 * After the posts every rank does its share of the copies and sums straight from buffer to buffer
 * and publishes that in `consumed`; a rank waits for those that access its buffers. Buffers that
 * must be reached, by kind:
 *   all-reduce       in and out of all     a rank sums its slice and writes it into all outputs
 *   reduce           in of all, root's out the same, into the root's output
 *   reduce-scatter   in of all             a rank sums its own slice
 *   all-gather       in and out of all     a rank writes its part into all outputs: it is read once
 *   broadcast        the root's data       a rank copies its slice into all outputs, if they are
 *                                          reached and the message is large; else into its own
 *   scatter          the root's input      the others copy their slices
 *   gather           the root's output     the others write their slices into it
 * In place is safe: the part of another rank's buffer that a rank overwrites is read by that rank
 * only. A copy begins as soon as its other side has posted; a sum and a slice need all posts.
 *
 * Slices of a broadcast depend on the rank, not on the root: where one is passed on by another, a
 * core finds in its caches what it wrote with the one before. */
#include "comm/local/collective_impl.h"
#include "device/sum.h"

#include <string.h>

#define OWN_BYTES (512 << 10)   /* all-gather: own parts up to this size are copied while in the cache */

/* Messages of ways.pass_from bytes and more take one pass: smaller ones are faster if they do not
 * wait for their readers. */
typedef enum passes {
    NEVER,  /* an all-to-all decides otherwise; a reduce takes one pass where it is split */
    LARGER, /* larger ones only: those of just this size are direct, or faster through the lanes */
    FROM,
    EARLY /* from a smaller limit where no more ranks than cores run: only the root is waited for */
} passes;
static const passes takes_pass[QD_COLL_KIND_COUNT] = {
    [QD_COLL_ALL_REDUCE] = LARGER, [QD_COLL_REDUCE_SCATTER] = LARGER, [QD_COLL_ALL_GATHER] = FROM,
    [QD_COLL_BROADCAST] = LARGER,  [QD_COLL_GATHER] = EARLY,          [QD_COLL_SCATTER] = EARLY,
};

static bool reached(int64_t place)
{
    return place != QD_LOCAL_NOWHERE;
}

/* Whether the buffers of `rank` allow one pass. */
static bool allows(const qd_transfer *op, int rank, const qd_local_post *post)
{
    const qd_coll_request *r = &op->request;
    switch (r->kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_ALL_GATHER: return reached(post->in_at) && reached(post->out_at);
    case QD_COLL_REDUCE_SCATTER: return reached(post->in_at);
    case QD_COLL_REDUCE: return reached(post->in_at) && (rank != r->root || reached(post->out_at));
    case QD_COLL_BROADCAST:
    case QD_COLL_SCATTER: return rank != r->root || reached(post->in_at);
    case QD_COLL_GATHER: return rank != r->root || reached(post->out_at);
    default: return false;
    }
}

static bool is_rooted(const qd_transfer *op)
{
    qd_coll_kind kind = op->request.kind;
    return kind == QD_COLL_BROADCAST || kind == QD_COLL_SCATTER || kind == QD_COLL_GATHER;
}

bool qd_local_pass_large(const qd_transfer *op)
{
    /* A rank that waits for the decision has posted without its data. Rounds say in `produced` when
     * it is there; a direct all-reduce reads it as soon as all ranks have posted. */
    if (qd_local_is_direct(op)) return false;
    const qd_local_ways *ways = &qd_local_group_of(op)->header->ways;
    int64_t bytes = op->request.count * qd_local_element_size(op), from = ways->pass_from;
    passes takes = takes_pass[op->request.kind];
    if (takes == EARLY && op->comm->world->spin > 0 && ways->rooted_from < from) from = ways->rooted_from;
    return qd_transfer_is_split(op) || (takes >= FROM && bytes >= from) || (takes == LARGER && bytes > from);
}

qd_local_pass qd_local_pass_begin(const qd_transfer *op)
{
    return qd_local_pass_large(op) && allows(op, op->comm->rank, qd_local_post_of(op, op->comm->rank)) ? QD_LOCAL_UNDECIDED
                                                                                                        : QD_LOCAL_ROUNDS;
}

/* A broadcast that all ranks copy together where they reach all outputs. */
static bool may_be_sliced(const qd_transfer *op)
{
    const qd_coll_request *r = &op->request;
    return r->kind == QD_COLL_BROADCAST && r->count * qd_local_element_size(op) >= QD_LOCAL_SHARE_BYTES;
}

qd_local_pass qd_local_pass_decide(const qd_transfer *op)
{
    for (int r = 0; r < op->comm->size; r++) {
        if (is_rooted(op) && r != op->request.root) continue;
        if (!qd_local_has_posted(op, r)) return QD_LOCAL_UNDECIDED;
        if (!allows(op, r, qd_local_post_of(op, r))) return QD_LOCAL_ROUNDS;
    }
    return may_be_sliced(op) && qd_local_state_of(op)->entered < op->comm->size ? QD_LOCAL_UNDECIDED : QD_LOCAL_ONE_PASS;
}

bool qd_local_pass_leaves_own(const qd_transfer *op)
{
    return op->request.kind == QD_COLL_ALL_GATHER &&
           qd_transfer_packed_count(op, op->comm->rank) * qd_local_element_size(op) > OWN_BYTES;
}

/* Whether `rank` accesses this rank's buffers. */
static bool touches(const qd_transfer *op, int rank)
{
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank;
    if (rank == me) return false;
    switch (r->kind) {
    case QD_COLL_BROADCAST: return me == r->root || qd_local_state_of(op)->sliced;
    case QD_COLL_SCATTER:
    case QD_COLL_GATHER: return me == r->root;
    default: return true;
    }
}

void qd_local_pass_plan(qd_transfer *op)
{
    qd_local_state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    int me = op->comm->rank, n = op->comm->size;
    uint64_t own = (uint64_t)1 << me;
    s->large = qd_local_copy_way(op, r->count * qd_local_element_size(op), true);
    if (s->large && is_rooted(op)) /* a root's data is often the result of such a call: in no cache */
        s->large = (qd_copy_way)qd_local_group_of(op)->header->ways.far_copy;
    s->part = -1;
    memset(qd_local_pushed_of(op, me), 0, (size_t)n * sizeof(int64_t));
    switch (r->kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_REDUCE_SCATTER:
    case QD_COLL_REDUCE:
    case QD_COLL_ALL_GATHER: s->parts = own; break;
    case QD_COLL_BROADCAST:
        s->sliced = may_be_sliced(op);
        for (int p = 0; p < n; p++) s->sliced = s->sliced && reached(qd_local_post_of(op, p)->out_at);
        s->parts = s->sliced ? own : me == r->root ? 0 : (uint64_t)1 << r->root;
        break;
    default: s->parts = me == r->root ? 0 : (uint64_t)1 << r->root; /* gather, scatter */
    }
}

/* A contiguous run of elements: starts at in_full of the full buffer and at in_packed of the rank's
 * packed one. */
typedef struct run {
    int64_t in_full, in_packed, length;
} run;

static void sum_run(qd_transfer *op, const run *at)
{
    const qd_coll_request *r = &op->request;
    const qd_local_state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank, n = op->comm->size;
    bool all = r->kind == QD_COLL_ALL_REDUCE, for_root = r->kind == QD_COLL_REDUCE && me != r->root;
    char *out = for_root ? qd_local_at(group, qd_local_post_of(op, r->root)->out_at) : r->out;
    int64_t size = qd_local_element_size(op);
    int64_t first = r->kind == QD_COLL_REDUCE_SCATTER ? at->in_packed : at->in_full;
    int64_t block = s->large || all ? QD_LOCAL_SUM_BLOCK / size : at->length;
    _Alignas(64) unsigned char room[QD_LOCAL_SUM_BLOCK];
    for (int64_t b = 0; b < at->length; b += block) {
        int64_t length = at->length - b < block ? at->length - b : block, bytes = length * size;
        const void *sources[QD_LOCAL_MAX_RANKS];
        for (int p = 0; p < n; p++)
            sources[p] = (const char *)qd_local_at(group, qd_local_post_of(op, p)->in_at) + (at->in_full + b) * size;
        sources[me] = (const char *)r->in + (at->in_full + b) * size;
        char *own = out + (first + b) * size;
        char *sum = s->large ? (char *)room : own;
        qd_sum_tree(sum, sources, n, length, r->dtype, r->reduce);
        for (int p = 0; s->large && b + block < at->length && p < n; p++) /* prefetch the next block */
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)sources[p] + bytes + line);
        void *to[QD_LOCAL_MAX_RANKS] = {own};
        int places = s->large ? 1 : 0; /* else the sum is there already */
        for (int step = 1; all && step < n; step++) {
            int rank = (me + step) % n;
            to[places++] = (char *)qd_local_at(group, qd_local_post_of(op, rank)->out_at) + (first + b) * size;
            qd_local_pushed_of(op, me)[rank] += bytes;
        }
        qd_comm_spread(to, places, sum, bytes, s->large);
        if (for_root) qd_local_pushed_of(op, me)[r->root] += bytes;
        op->bytes += bytes * (n - 1);
    }
}

static void copy_run(qd_transfer *op, int peer, const run *at)
{
    const qd_coll_request *r = &op->request;
    const qd_local_state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    const qd_local_post *post = qd_local_post_of(op, peer);
    int64_t size = qd_local_element_size(op), bytes = at->length * size;
    int64_t full = at->in_full * size, packed = at->in_packed * size;
    bool pushes = r->kind == QD_COLL_GATHER;
    const char *from = pushes ? r->in : qd_local_at(group, post->in_at);
    char *to = pushes ? qd_local_at(group, post->out_at) : r->out;
    qd_comm_copy(to + (pushes ? full : packed), from + (pushes ? packed : full), bytes, s->large);
    if (pushes)
        qd_local_pushed_of(op, op->comm->rank)[peer] += bytes;
    else
        op->bytes += bytes;
}

/* All-gather: copies a run of this rank's part into the outputs of all ranks. Broadcast: a run of
 * its slice. */
static void spread_run(qd_transfer *op, const run *at)
{
    const qd_coll_request *r = &op->request;
    const qd_local_state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank, n = op->comm->size;
    int64_t size = qd_local_element_size(op), bytes = at->length * size;
    const char *from = s->sliced && me != r->root
                           ? (const char *)qd_local_at(group, qd_local_post_of(op, r->root)->in_at) + at->in_full * size
                           : (const char *)r->in + at->in_packed * size;
    void *to[QD_LOCAL_MAX_RANKS];
    int places = 0;
    for (int step = 0; step < n; step++) {
        int rank = (me + step) % n;
        char *out = step == 0 ? r->out : qd_local_at(group, qd_local_post_of(op, rank)->out_at);
        if (s->sliced ? rank == r->root : step == 0 && (!s->own_left || out + at->in_full * size == from)) continue;
        to[places++] = out + at->in_full * size;
        if (step > 0)
            qd_local_pushed_of(op, me)[rank] += bytes;
        else if (s->sliced)
            op->bytes += bytes;
    }
    qd_comm_spread(to, places, from, bytes, s->large);
}

static bool sums(const qd_transfer *op)
{
    qd_coll_kind kind = op->request.kind;
    return kind == QD_COLL_ALL_REDUCE || kind == QD_COLL_REDUCE_SCATTER || kind == QD_COLL_REDUCE;
}

/* The rank whose segments a part consists of; -1: the whole message. */
static int segments_of(const qd_transfer *op)
{
    switch (op->request.kind) {
    case QD_COLL_BROADCAST: return -1;
    default: return op->comm->rank;
    }
}

/* Moves up to QD_LOCAL_PIECE bytes of the part with `peer`; true if that was the last of it. */
static bool move_piece(qd_transfer *op, int peer)
{
    qd_local_state *s = qd_local_state_of(op);
    const qd_coll_request *r = &op->request;
    int owner = segments_of(op);
    int64_t begin = 0, end = owner < 0 ? r->count : qd_transfer_packed_count(op, owner);
    if (s->sliced) {
        qd_slice(r->count, op->comm->size, op->comm->rank, &begin, &end);
        end += begin;
    }
    int64_t first = begin + s->at, last = first + QD_LOCAL_PIECE / qd_local_element_size(op), at = 0;
    if (last > end) last = end;
    int segments = owner < 0 ? 1 : qd_transfer_segment_count(op, owner);
    for (int i = 0; i < segments && at < last; i++) {
        qd_segment segment = owner < 0 ? (qd_segment){0, r->count} : qd_transfer_segment(op, owner, i);
        int64_t from = first > at ? first : at, to = last < at + segment.count ? last : at + segment.count;
        run piece = {.in_full = segment.offset + from - at, .in_packed = from, .length = to - from};
        if (from < to && sums(op))
            sum_run(op, &piece);
        else if (from < to && (s->sliced || r->kind == QD_COLL_ALL_GATHER))
            spread_run(op, &piece);
        else if (from < to)
            copy_run(op, peer, &piece);
        at += segment.count;
    }
    s->at = last - begin;
    return last == end;
}

bool qd_local_pass_work(qd_transfer *op)
{
    qd_local_state *s = qd_local_state_of(op);
    qd_local_group *group = qd_local_group_of(op);
    int me = op->comm->rank, n = op->comm->size;
    for (int step = 0; step < n && s->part < 0; step++) {
        int peer = (me + step) % n;
        if (!(s->parts >> peer & 1) || !(peer == me ? s->entered == n : qd_local_has_posted(op, peer))) continue;
        s->part = peer;
        s->at = 0;
    }
    if (s->part >= 0) {
        _Atomic uint32_t *inside = &group->lanes[me]->inside;
        if (!qd_local_enter(group, inside)) return false;
        bool last = move_piece(op, s->part);
        qd_local_leave(inside);
        if (!qd_local_counts(group)) return false;
        if (last) {
            s->parts &= ~((uint64_t)1 << s->part);
            s->part = -1;
        }
    } else if (s->parts || s->passed) {
        return false;
    }
    if (!s->parts && !s->passed) {
        s->passed = true;
        atomic_store_explicit(&group->lanes[me]->consumed, s->base + 1, memory_order_release);
    }
    return true;
}

bool qd_local_pass_waits_for(const qd_transfer *op, int peer)
{
    return touches(op, peer) && atomic_load_explicit(&qd_local_group_of(op)->lanes[peer]->consumed,
                                                     memory_order_acquire) < qd_local_state_of(op)->base + 1;
}

bool qd_local_pass_is_done(qd_transfer *op)
{
    const qd_local_state *s = qd_local_state_of(op);
    int me = op->comm->rank, n = op->comm->size;
    if (!s->passed || s->entered < n) return false;
    for (int r = 0; r < n; r++)
        if (qd_local_pass_waits_for(op, r)) return false;
    for (int r = 0; r < n; r++)
        if (touches(op, r)) op->bytes += qd_local_pushed_of(op, r)[me];
    return true;
}
