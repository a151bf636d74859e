/* Collectives as an exchange over links, one per peer.
 *
 *   heads   Every rank sends its fingerprint to all others, so that each sees a disagreement before
 *           it returns. In rooted operations of large groups it sends it only to the ranks it
 *           exchanges data with and to its right neighbour: ranks that disagree still meet,
 *           whichever operation each one called, and the others learn of it.
 *   first   Each rank sends every peer its part, which the receiver sums (all-reduce,
 *           reduce-scatter, reduce) or stores (all others).
 *   second  Sliced all-reduce and split reduce: the owner of a slice sends its sum to all ranks or
 *           to the root.
 *
 * Payloads are cut into chunks, so that sums, sends and receives of different chunks overlap and
 * staging stays small. The chunk size depends only on the operation and the group, so both ends of
 * a link use the same. */
#include "base/clock.h"
#include "comm/remote/remote.h"
#include "device/sum.h"

#include <stdlib.h>
#include <string.h>

/* Staging of a group, per peer: received chunks, and chunks packed for sending. */
enum { STAGE_RX, STAGE_PACK = QD_REMOTE_DEPTH, STAGES = 2 * QD_REMOTE_DEPTH };
#define STAGING_MOST ((int64_t)4 << 20) /* per stage, all peers together */
#define SUM_CHUNK_MOST ((int64_t)2 << 20)
#define SUM_CHUNK_LEAST ((int64_t)16 << 10)
#define SECOND_CHUNK ((int64_t)1 << 20) /* all-reduce: the fewest bytes of a chunk of sums */
/* Broadcast: a rank forwards one chunk while it receives the next. */
#define TREE_CHUNKS 8
#define TREE_CHUNK_LEAST ((int64_t)512 << 10)
/* The sum reads what a head has carried as one chunk. */
_Static_assert(QD_REMOTE_CARRY_LEAST <= SUM_CHUNK_LEAST && QD_REMOTE_CARRY_ALL <= STAGING_MOST / 2, "a head carries less than a chunk");
/* Rooted operations of larger groups do not send heads to all ranks. */
#define HEADS_TO_ALL_MOST 64
#define LARGE ((int64_t)64 << 10) /* copies and sums of this size and more are timed */
#define KEEP_PIECE ((int64_t)64 << 10)

typedef struct run {
    qd_remote_group *group;
    const unsigned char *in;
    unsigned char *out;
    int64_t size;        /* of an element */
    int64_t chunk;       /* elements */
    int64_t second_chunk; /* of the second phase: a multiple */
    int64_t stage_bytes; /* of one stage of one peer */
    int64_t own;         /* elements of our part: what we sum, or what we send in a gather */
    int64_t summed;      /* chunks */
    int parent;          /* broadcast: the rank we receive from, or -1 at the root */
    bool sums, second;   /* received parts are summed; the sums are sent in a second phase */
    bool sliced;         /* all-reduce, reduce: by qd_slice() */
    bool passes;         /* reduce: this rank does not keep its sums; they stay in a stage until they are sent */
    bool in_place;       /* the direct sum overwrites what is being sent */
    bool large;
    bool keeps;          /* the part that stays on this rank is not yet copied, but for its first */
    int64_t kept;        /* bytes */
    bool ended;
} run;
_Static_assert(sizeof(run) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static run *run_of(const qd_transfer *op)
{
    return (run *)(void *)op->state;
}

static int64_t chunks_of(int64_t count, int64_t chunk)
{
    return (count + chunk - 1) / chunk;
}

static int64_t chunk_length(const qd_remote_flow *flow, int64_t chunk, int64_t index)
{
    int64_t rest = flow->count - index * chunk;
    return rest < chunk ? rest : chunk;
}

static int request_of(int peer, int slot)
{
    return peer * QD_REMOTE_REQUESTS + slot;
}

static qd_status post_send(qd_remote_group *group, int peer, int channel, const void *data, int64_t bytes, int slot)
{
    group->active++;
    return qd_remote_send(group, peer, channel, data, bytes, group->requests, request_of(peer, slot));
}

static qd_status post_recv(qd_remote_group *group, int peer, int channel, void *data, int64_t bytes, int slot)
{
    group->active++;
    return qd_remote_recv(group, peer, channel, data, bytes, group->requests, request_of(peer, slot));
}

static unsigned char *stage_of(const run *r, int peer, int stage)
{
    return r->stage_bytes ? r->group->staging + (peer * STAGES + stage) * r->stage_bytes : NULL;
}

/* Whether the part of `rank` is contiguous in the full buffer. */
static bool contiguous(const qd_transfer *op, int rank)
{
    return qd_transfer_segment_count(op, rank) <= 1;
}

static int64_t part_offset(const qd_transfer *op, int rank)
{
    return qd_transfer_segment_count(op, rank) > 0 ? qd_transfer_segment(op, rank, 0).offset : 0;
}

static int64_t slice_offset(const qd_transfer *op, int rank)
{
    int64_t offset, length;
    qd_slice(op->request.count, op->comm->size, rank, &offset, &length);
    return offset;
}

static int64_t slice_length(const qd_transfer *op, int rank)
{
    int64_t offset, length;
    qd_slice(op->request.count, op->comm->size, rank, &offset, &length);
    return length;
}

/* Address of elements [first, first + count) of what `peer` gets in the first phase; packed into
 * `scratch` if they are not contiguous. peer may be this rank: its own contribution to a sum. */
static const void *first_source(const qd_transfer *op, int peer, int64_t first, int64_t count, void *scratch)
{
    const run *r = run_of(op);
    int64_t at = first;
    switch (op->request.kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_REDUCE:
        if (r->sliced)
            at += slice_offset(op, peer);
        break;
    case QD_COLL_REDUCE_SCATTER:
    case QD_COLL_SCATTER:
        if (!contiguous(op, peer)) {
            qd_transfer_pack(op, peer, first, count, r->in, scratch);
            return scratch;
        }
        at += part_offset(op, peer);
        break;
    case QD_COLL_ALL_TO_ALL:
        at += op->request.in_offsets[peer];
        break;
    case QD_COLL_BROADCAST:
        return r->out + at * r->size;
    default:
        break;
    }
    return r->in + at * r->size;
}

/* Destination of element `first` of what comes from `peer`; NULL if it must be unpacked. */
static unsigned char *first_place(const qd_transfer *op, int peer, int64_t first)
{
    const run *r = run_of(op);
    switch (op->request.kind) {
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER:
        if (!contiguous(op, peer))
            return NULL;
        return r->out + (part_offset(op, peer) + first) * r->size;
    case QD_COLL_ALL_TO_ALL:
        return r->out + (op->request.out_offsets[peer] + first) * r->size;
    default:
        return r->out + first * r->size;
    }
}

static int64_t sum_chunk_bytes(int ranks)
{
    int64_t bytes = SUM_CHUNK_MOST;
    while (bytes > SUM_CHUNK_LEAST && bytes * ranks > STAGING_MOST)
        bytes /= 2;
    return bytes;
}

/* Fills the flows of all links for the operation. */
static void plan_flows(qd_transfer *op)
{
    run *r = run_of(op);
    const qd_coll_request *q = &op->request;
    int n = op->comm->size, rank = op->comm->rank;
    /* Distance from the root in the binomial tree of a broadcast: the parent of v is v without its
     * lowest bit. */
    int v = q->root >= 0 ? (rank - q->root + n) % n : 0;
    r->parent = q->kind == QD_COLL_BROADCAST && v ? (q->root + (v & (v - 1))) % n : -1;
    for (int p = 0; p < n; p++) {
        qd_remote_link *link = &r->group->links[p];
        int64_t tx = 0, rx = 0, tx2 = 0, rx2 = 0;
        bool root = rank == q->root, to_root = p == q->root;
        switch (q->kind) {
        case QD_COLL_ALL_REDUCE:
            tx = r->sliced ? slice_length(op, p) : q->count;
            rx = r->own;
            tx2 = r->second ? r->own : 0;
            rx2 = r->second ? slice_length(op, p) : 0;
            break;
        case QD_COLL_REDUCE_SCATTER:
            tx = qd_transfer_packed_count(op, p);
            rx = r->own;
            break;
        case QD_COLL_ALL_GATHER:
            tx = r->own;
            rx = qd_transfer_packed_count(op, p);
            break;
        case QD_COLL_ALL_TO_ALL:
            tx = q->in_counts[p];
            rx = q->out_counts[p];
            break;
        case QD_COLL_BROADCAST: {
            int u = (p - q->root + n) % n;
            tx = u && (u & (u - 1)) == v ? q->count : 0;
            rx = p == r->parent ? q->count : 0;
            break;
        }
        case QD_COLL_REDUCE:
            tx = r->sliced ? slice_length(op, p) : to_root ? q->count : 0;
            rx = r->own;
            tx2 = r->second && to_root ? r->own : 0;
            rx2 = r->second && root ? slice_length(op, p) : 0;
            break;
        case QD_COLL_GATHER:
            tx = to_root ? r->own : 0;
            rx = root ? qd_transfer_packed_count(op, p) : 0;
            break;
        case QD_COLL_SCATTER:
            tx = root ? qd_transfer_packed_count(op, p) : 0;
            rx = to_root ? r->own : 0;
            break;
        default:
            break;
        }
        if (p == rank)
            tx = rx = tx2 = rx2 = 0;
        link->first_tx = (qd_remote_flow){.count = tx, .chunks = chunks_of(tx, r->chunk)};
        link->first_rx = (qd_remote_flow){.count = rx, .chunks = chunks_of(rx, r->chunk)};
        link->second_tx = (qd_remote_flow){.count = tx2, .chunks = chunks_of(tx2, r->second_chunk)};
        link->second_rx = (qd_remote_flow){.count = rx2, .chunks = chunks_of(rx2, r->second_chunk)};
        link->greeted = link->carried = false;
    }
}

static qd_status grow_staging(run *r)
{
    qd_remote_group *group = r->group;
    int64_t need = r->stage_bytes * STAGES * group->comm->size;
    if (need <= group->staging_bytes)
        return QD_OK;
    free(group->staging);
    group->staging_bytes = 0;
    group->staging = malloc((size_t)need);
    if (!group->staging)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld bytes of staging of group '%s'", (long long)need,
                       group->comm->name);
    group->staging_bytes = need;
    return QD_OK;
}

/* Decides which ranks sum, and the sizes of chunks and staging. */
static qd_status plan(qd_transfer *op)
{
    run *r = run_of(op);
    const qd_coll_request *q = &op->request;
    int n = op->comm->size, rank = op->comm->rank;
    r->size = (int64_t)qd_dtype_size(q->dtype);
    int64_t elements = q->count;
    for (int p = 0; q->kind == QD_COLL_ALL_TO_ALL && p < n; p++)
        elements += q->in_counts[p] + q->out_counts[p];
    int64_t bytes = elements * r->size;
    int64_t message = QD_REMOTE_MESSAGE_BYTES;
    bool staged = false;
    switch (q->kind) {
    case QD_COLL_ALL_REDUCE:
        r->sums = staged = true;
        r->sliced = r->second = !qd_coll_direct(bytes, n);
        r->own = r->sliced ? slice_length(op, rank) : q->count;
        r->in_place = !r->sliced && q->in == q->out;
        break;
    case QD_COLL_REDUCE_SCATTER:
        r->sums = staged = true;
        r->own = qd_transfer_packed_count(op, rank);
        break;
    case QD_COLL_REDUCE:
        staged = true;
        r->sliced = r->second = qd_transfer_is_split(op);
        r->sums = r->sliced || rank == q->root;
        r->passes = r->sliced && rank != q->root;
        r->own = r->sliced ? slice_length(op, rank) : r->sums ? q->count : 0;
        break;
    case QD_COLL_ALL_GATHER:
        staged = q->lists != NULL;
        r->own = qd_transfer_packed_count(op, rank);
        break;
    case QD_COLL_GATHER:
    case QD_COLL_SCATTER:
        r->own = qd_transfer_packed_count(op, rank);
        break;
    case QD_COLL_BROADCAST:
        if (n > 2)
            message = bytes / TREE_CHUNKS > TREE_CHUNK_LEAST ? bytes / TREE_CHUNKS : TREE_CHUNK_LEAST;
        break;
    default:
        break;
    }
    if (staged)
        message = sum_chunk_bytes(n);
    r->chunk = r->size ? message / r->size : 1;
    r->second_chunk = r->chunk * (q->kind == QD_COLL_ALL_REDUCE && message < SECOND_CHUNK ? SECOND_CHUNK / message : 1);
    r->large = bytes >= LARGE;
    r->stage_bytes = 0;
    if (staged && n > 1) {
        /* Any rank may own the longest part; short operations must not allocate whole chunks. */
        int64_t longest = q->count < r->chunk ? q->count : r->chunk;
        r->stage_bytes = (longest * r->size + 63) / 64 * 64;
        QD_TRY(grow_staging(r));
    }
    return QD_OK;
}

static bool tx_done(const qd_remote_flow *flow, int64_t chunk)
{
    return flow->done > chunk || flow->done == flow->chunks;
}

/* Destination of the sum of chunk c of our part. A rank receives nothing from itself, so its own
 * stage is free for it. */
static unsigned char *sum_place(const qd_transfer *op, int64_t c)
{
    const run *r = run_of(op);
    int rank = op->comm->rank;
    if (r->passes)
        return stage_of(r, rank, STAGE_RX + (int)(c % QD_REMOTE_DEPTH));
    return r->out + (c * r->chunk + (r->sliced ? slice_offset(op, rank) : 0)) * r->size;
}

/* Sums the next chunk of our part, if all its contributions have arrived. */
static bool sum_next(qd_transfer *op)
{
    run *r = run_of(op);
    qd_remote_group *group = r->group;
    int n = op->comm->size, rank = op->comm->rank, slot = (int)(r->summed % QD_REMOTE_DEPTH);
    int64_t c = r->summed;
    if (c == chunks_of(r->own, r->chunk))
        return false;
    if (r->passes && group->links[op->request.root].second_tx.done + QD_REMOTE_DEPTH <= c) /* one chunk each */
        return false;
    for (int p = 0; p < n; p++) {
        if (p == rank)
            continue;
        const qd_remote_link *link = &group->links[p];
        if (!link->carried && link->first_rx.done <= c)
            return false;
        if (r->in_place && !tx_done(&link->first_tx, c))
            return false;
    }
    int64_t first = c * r->chunk;
    int64_t count = r->own - first < r->chunk ? r->own - first : r->chunk;
    for (int p = 0; p < n; p++) {
        const qd_remote_link *link = &group->links[p];
        if (p == rank)
            group->sources[p] = first_source(op, p, first, count, stage_of(r, p, STAGE_PACK));
        else
            group->sources[p] = link->carried ? link->rx + sizeof(qd_remote_head) : stage_of(r, p, STAGE_RX + slot);
    }
    qd_sum_tree(sum_place(op, c), group->sources, n, count, op->request.dtype, op->request.reduce);
    r->summed++;
    return true;
}

/* How many chunks of the second phase are complete when `done` of `chunks` of the first one are. */
static int64_t sums_ready(const run *r, int64_t done, int64_t chunks)
{
    int64_t each = r->second_chunk / r->chunk;
    return done == chunks ? chunks_of(done, each) : done / each;
}

/* Whether the next chunk of `flow` may be posted, given that the first `ready` are ready. */
static bool may_post(const qd_remote_flow *flow, int64_t ready)
{
    return flow->posted < flow->chunks && flow->posted < ready && flow->posted < flow->done + QD_REMOTE_DEPTH;
}

/* Posts the sends to and receives from `peer` that are possible now. */
static qd_status post(qd_transfer *op, int peer)
{
    run *r = run_of(op);
    qd_remote_group *group = r->group;
    qd_remote_link *link = &group->links[peer];

    /* A chunk to be summed occupies its stage until it is summed. */
    qd_remote_flow *flow = &link->first_rx;
    int64_t ready = !link->greeted ? 0 : r->sums ? r->summed + QD_REMOTE_DEPTH : flow->chunks;
    for (; may_post(flow, ready); flow->posted++) {
        int64_t c = flow->posted, count = chunk_length(flow, r->chunk, c);
        int slot = (int)(c % QD_REMOTE_DEPTH);
        unsigned char *to = r->sums ? NULL : first_place(op, peer, c * r->chunk);
        QD_TRY(post_recv(group, peer, QD_REMOTE_TAG_FIRST, to ? to : stage_of(r, peer, STAGE_RX + slot), count * r->size,
                         QD_REMOTE_FIRST_RX + slot));
    }

    flow = &link->first_tx;
    ready = flow->chunks;
    if (r->parent >= 0 && !group->links[r->parent].carried)
        ready = group->links[r->parent].first_rx.done;
    for (; may_post(flow, ready); flow->posted++) {
        int64_t c = flow->posted, count = chunk_length(flow, r->chunk, c);
        int slot = (int)(c % QD_REMOTE_DEPTH);
        const void *from = first_source(op, peer, c * r->chunk, count, stage_of(r, peer, STAGE_PACK + slot));
        QD_TRY(post_send(group, peer, QD_REMOTE_TAG_FIRST, from, count * r->size, QD_REMOTE_FIRST_TX + slot));
    }

    flow = &link->second_tx;
    ready = sums_ready(r, r->summed, chunks_of(r->own, r->chunk));
    for (; may_post(flow, ready); flow->posted++) {
        int64_t c = flow->posted, count = chunk_length(flow, r->second_chunk, c);
        QD_TRY(post_send(group, peer, QD_REMOTE_TAG_SECOND, sum_place(op, c * (r->second_chunk / r->chunk)), count * r->size,
                         QD_REMOTE_SECOND_TX + (int)(c % QD_REMOTE_DEPTH)));
    }

    /* In place, the sum of a chunk overwrites our contribution to it: only after that was sent. */
    flow = &link->second_rx;
    ready = !link->greeted ? 0 : link->first_tx.done == link->first_tx.chunks ? flow->chunks
                                : sums_ready(r, link->first_tx.done, link->first_tx.chunks);
    for (; may_post(flow, ready); flow->posted++) {
        int64_t c = flow->posted, count = chunk_length(flow, r->second_chunk, c);
        QD_TRY(post_recv(group, peer, QD_REMOTE_TAG_SECOND, r->out + (slice_offset(op, peer) + c * r->second_chunk) * r->size,
                         count * r->size, QD_REMOTE_SECOND_RX + (int)(c % QD_REMOTE_DEPTH)));
    }
    return QD_OK;
}

static qd_status advance(qd_transfer *op)
{
    run *r = run_of(op);
    int n = op->comm->size;
    if (r->sums)
        while (sum_next(op)) {
        }
    for (int i = 1; i < n; i++)
        QD_TRY(post(op, (op->comm->rank + i) % n));
    return QD_OK;
}

/* The head of `peer` has arrived. */
static qd_status greet(qd_transfer *op, int peer)
{
    run *r = run_of(op);
    qd_remote_link *link = &r->group->links[peer];
    qd_remote_head head;
    memcpy(&head, link->rx, sizeof head);
    qd_remote_hear(r->group, peer, &head);
    link->entered = head.fingerprint.sequence;
    QD_TRY(qd_transfer_check(op, peer, &head.fingerprint, head.place));
    int64_t expected = link->first_rx.count;
    if (head.bytes != expected * r->size)
        return qd_transfer_check_pair(op, peer, head.bytes / r->size, expected, head.place);
    link->greeted = true;
    if (head.carried == 0)
        return QD_OK;
    link->carried = true;
    link->first_rx.chunks = 0;
    op->bytes += head.carried;
    if (r->sums)
        return QD_OK;
    unsigned char *to = first_place(op, peer, 0);
    if (to)
        memcpy(to, link->rx + sizeof head, (size_t)head.carried);
    else
        qd_transfer_unpack(op, peer, 0, expected, link->rx + sizeof head, r->out);
    return QD_OK;
}

/* The message in `slot` of `flow` has completed. Two in flight may complete in any order. Returns
 * its chunk. */
static int64_t end_chunk(qd_remote_flow *flow, int slot)
{
    int64_t c = flow->done;
    while (c % QD_REMOTE_DEPTH != slot)
        c++;
    flow->ended[slot] = true;
    while (flow->ended[flow->done % QD_REMOTE_DEPTH])
        flow->ended[flow->done++ % QD_REMOTE_DEPTH] = false;
    return c;
}

static qd_status complete(qd_transfer *op, int index)
{
    run *r = run_of(op);
    int peer = index / QD_REMOTE_REQUESTS, slot = index % QD_REMOTE_REQUESTS;
    qd_remote_link *link = &r->group->links[peer];
    if (slot == QD_REMOTE_HEAD_TX) {
        link->head_leaves = false;
        return QD_OK;
    }
    if (slot == QD_REMOTE_HEAD_RX)
        return greet(op, peer);
    if (slot < QD_REMOTE_FIRST_RX) {
        end_chunk(&link->first_tx, slot - QD_REMOTE_FIRST_TX);
    } else if (slot < QD_REMOTE_SECOND_TX) {
        slot -= QD_REMOTE_FIRST_RX;
        int64_t c = end_chunk(&link->first_rx, slot), count = chunk_length(&link->first_rx, r->chunk, c);
        op->bytes += count * r->size;
        if (!r->sums && !first_place(op, peer, 0))
            qd_transfer_unpack(op, peer, c * r->chunk, count, stage_of(r, peer, STAGE_RX + slot), r->out);
    } else if (slot < QD_REMOTE_SECOND_RX) {
        end_chunk(&link->second_tx, slot - QD_REMOTE_SECOND_TX);
    } else {
        int64_t c = end_chunk(&link->second_rx, slot - QD_REMOTE_SECOND_RX);
        op->bytes += chunk_length(&link->second_rx, r->second_chunk, c) * r->size;
    }
    return QD_OK;
}

static bool link_busy(const qd_remote_link *link)
{
    return link->head_leaves || (link->head_wanted && !link->greeted) || link->first_tx.done < link->first_tx.chunks ||
           link->first_rx.done < link->first_rx.chunks || link->second_tx.done < link->second_tx.chunks ||
           link->second_rx.done < link->second_rx.chunks;
}

typedef struct window {
    int64_t skip, left; /* bytes */
} window;

static void keep_piece(void *context, void *to, const void *from, int64_t bytes)
{
    window *w = context;
    const qd_copy_way way = qd_transfer_copy_way(bytes);
    const int64_t skip = w->skip < bytes ? w->skip : bytes;
    const int64_t take = w->left < bytes - skip ? w->left : bytes - skip;
    qd_comm_copy((char *)to + skip, (const char *)from + skip, take, way);
    w->skip -= skip;
    w->left -= take;
}

/* Copies the next bytes, at most so many, of the part that stays on this rank. */
static void keep_own(qd_transfer *op, int64_t most)
{
    run *r = run_of(op);
    window w = {.skip = r->kept, .left = most};
    if (!r->keeps)
        return;
    qd_transfer_own_pieces(op, keep_piece, &w);
    r->kept += most - w.left;
    r->keeps = w.left == 0;
}

qd_status qd_remote_coll_start(qd_transfer *op)
{
    run *r = run_of(op);
    qd_remote_group *group = op->comm->backend_data;
    const qd_coll_request *q = &op->request;
    int n = op->comm->size, rank = op->comm->rank;
    *r = (run){.group = group, .in = q->in, .out = q->out, .parent = -1};
    group->entered = op->fingerprint.sequence;
    group->asked = 0;
    QD_TRY(plan(op));
    plan_flows(op);
    if (q->kind == QD_COLL_ALL_TO_ALL && q->in_counts[rank] != q->out_counts[rank])
        return qd_transfer_check_pair(op, rank, q->in_counts[rank], q->out_counts[rank], "");
    bool everybody = q->root < 0 || r->second || n <= HEADS_TO_ALL_MOST;
    for (int i = 1; i < n; i++) {
        int p = (rank + i) % n;
        qd_remote_link *link = &group->links[p];
        bool sends = link->head_leaves = everybody || i == 1 || link->first_tx.count > 0;
        link->head_wanted = everybody || i == n - 1 || link->first_rx.count > 0;
        if (link->head_wanted)
            QD_TRY(post_recv(group, p, QD_REMOTE_TAG_HEAD, link->rx, link->head_bytes, QD_REMOTE_HEAD_RX));
        if (!sends)
            continue;
        int64_t bytes = link->first_tx.count * r->size;
        /* An inner rank of a broadcast tree has no data yet for its head to carry. */
        const void *payload = NULL;
        if (bytes > 0 && bytes <= qd_remote_carry(link) && r->parent < 0)
            payload = first_source(op, p, 0, link->first_tx.count, stage_of(r, p, STAGE_PACK));
        int64_t length = qd_remote_write_head(group->world, op, bytes, payload, payload ? bytes : 0, link->tx);
        if (length > (int64_t)sizeof(qd_remote_head))
            link->first_tx.chunks = 0;
        QD_TRY(post_send(group, p, QD_REMOTE_TAG_HEAD, link->tx, length, QD_REMOTE_HEAD_TX));
    }
    r->keeps = q->kind == QD_COLL_ALL_GATHER || q->kind == QD_COLL_ALL_TO_ALL || (q->kind == QD_COLL_GATHER && rank == q->root);
    if (!r->large)
        keep_own(op, INT64_MAX);
    return advance(op);
}

qd_status qd_remote_coll_poll(qd_transfer *op, bool *done, bool *moved)
{
    run *r = run_of(op);
    qd_remote_group *group = r->group;
    int n = op->comm->size, completed = 0;
    *moved = *done = false;
    double before = r->large ? qd_clock_now() : 0;
    if (group->active > 0)
        QD_TRY(group->world->transport->test_some(group->world->self, group->requests, n * QD_REMOTE_REQUESTS, &completed, group->indices));
    group->active -= completed;
    if (completed > 0) {
        *moved = true;
        for (int i = 0; i < completed; i++)
            QD_TRY(complete(op, group->indices[i]));
        QD_TRY(advance(op));
        if (r->large)
            op->busy_seconds += qd_clock_now() - before;
        atomic_store_explicit(&group->world->naps, 0, memory_order_relaxed);
    } else if (group->active > 0) {
        keep_own(op, KEEP_PIECE); /* while nothing arrives */
        qd_remote_ask(group, op, -1, &group->asked);
        return QD_OK;
    }
    if (group->active > 0)
        return QD_OK;
    for (int p = 0; p < n; p++)
        if (p != op->comm->rank && link_busy(&group->links[p]))
            return QD_OK;
    keep_own(op, INT64_MAX); /* what is left of it */
    if (op->request.kind == QD_COLL_SCATTER)
        qd_transfer_copy_own(op, NULL); /* in place: after everything was sent */
    r->ended = *done = *moved = true;
    return QD_OK;
}

void qd_remote_coll_finish(qd_transfer *op)
{
    run *r = run_of(op);
    if (r->ended)
        return;
    qd_remote_give_up(r->group->world, r->group->requests, op->comm->size * QD_REMOTE_REQUESTS);
    r->group->active = 0;
}

/* Whether the operation needs something from `peer` to continue. */
static bool waits_for(const qd_transfer *op, int peer)
{
    return peer != op->comm->rank && link_busy(&run_of(op)->group->links[peer]);
}

/* A rank that has answered and has entered the operation waits for another rank itself: it is not
 * the late one. */
static bool silent(const qd_transfer *op, int peer)
{
    const qd_remote_link *link = &run_of(op)->group->links[peer];
    if (peer == op->comm->rank || (link->greeted && !waits_for(op, peer)))
        return false;
    return !qd_remote_answers(run_of(op)->group, peer) || link->entered < op->fingerprint.sequence;
}

bool qd_remote_coll_late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    const qd_remote_group *group = run_of(op)->group;
    bool known = false;
    for (int p = 0; group->asked > 0 && p < op->comm->size; p++)
        known = known || silent(op, p);
    if (known ? !silent(op, peer) : !waits_for(op, peer))
        return false;
    const qd_remote_link *link = &group->links[peer];
    report->sequence = link->entered;
    memcpy(report->place, link->place, sizeof report->place);
    return true;
}
