/* Internal to src/comm/local: the state of a collective, and what collective.c (decisions),
 * rounds.c (rounds through lanes, rings and remote memory), onepass.c and common.c share. */
#ifndef QD_COMM_LOCAL_COLLECTIVE_IMPL_H
#define QD_COMM_LOCAL_COLLECTIVE_IMPL_H

#include "comm/local/local_impl.h"

#define QD_LOCAL_SHARE_BYTES (128 << 10) /* one-way messages of this size and more are copied by both sides */
#define QD_LOCAL_SUM_BLOCK 8192 /* bytes per block where a sum is stored twice: the second store reads L1 */

/* Whether an operation is done in one pass depends on where the buffers of all ranks are. */
typedef enum qd_local_pass {
    QD_LOCAL_ROUNDS,    /* no: in rounds */
    QD_LOCAL_UNDECIDED, /* some of the posts that decide have not arrived */
    QD_LOCAL_ONE_PASS
} qd_local_pass;

typedef struct qd_local_state {
    uint64_t base;    /* of counter values */
    uint64_t checked; /* bit mask: ranks that have posted and agree */
    int entered;      /* number of them */
    qd_local_pass pass;
    bool direct;      /* all-reduce in one exchange */
    bool remote;      /* qd_local_group.remote when this operation began; the group's may change during the operation */
    bool all_can_read;
    qd_copy_way large; /* how results are written */
    bool own_left;    /* the own part is not copied yet */
    bool sliced;      /* one pass, broadcast: each rank copies a slice for all */
    bool done;
    bool chunked;     /* all-to-all: other ranks may copy what this rank receives, if all agree (common.c) */
    bool common;      /* they do */

    /* one pass */
    uint64_t parts; /* bit mask: ranks with which (common: for which) work is left */
    int part;       /* the rank being worked on, or -1 */
    int64_t at;     /* elements of it that are done */
    bool passed;    /* all parts are done and this is published */

    /* rounds */
    int64_t part_elements, rounds; /* elements per part of a buffer; number of rounds, the same on all ranks */
    int64_t produced, combined, consumed;
    qd_local_way way; /* of this rank's data; the same on all ranks except in an all-to-all */
    uint64_t awaited; /* bit mask: ranks whose data is ready when `produced` says so; the others' data comes with the post */
    bool reaches;     /* this rank accesses other ranks' memory */
    bool fused;       /* all-gather: the own part is copied together with each produced one, while that is in the cache */
    bool shares;      /* producers write part of their data into the consumers' memory */
    bool many, combines;
    bool produces, consumes, pushes;
} qd_local_state;
_Static_assert(sizeof(qd_local_state) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static inline qd_local_state *qd_local_state_of(const qd_transfer *op)
{
    return (qd_local_state *)op->state;
}

static inline int64_t qd_local_element_size(const qd_transfer *op)
{
    return (int64_t)qd_dtype_size(op->request.dtype);
}

static inline qd_local_post *qd_local_post_of(const qd_transfer *op, int rank)
{
    return &qd_local_group_of(op)->lanes[rank]->parity[op->fingerprint.sequence & 1].post;
}

static inline int64_t *qd_local_pushed_of(const qd_transfer *op, int rank)
{
    return qd_local_group_of(op)->lanes[rank]->parity[op->fingerprint.sequence & 1].pushed;
}

static inline bool qd_local_has_posted(const qd_transfer *op, int rank)
{
    return qd_local_state_of(op)->checked >> rank & 1;
}

static inline unsigned char *qd_local_small_of(const qd_transfer *op, int rank)
{
    return qd_local_group_of(op)->lanes[rank]->parity[op->fingerprint.sequence & 1].small;
}

/* all-to-all: the blocks of `rank`, one for each peer. */
static inline qd_local_block *qd_local_blocks_of(const qd_transfer *op, int rank)
{
    return (qd_local_block *)qd_local_small_of(op, rank);
}

/* Whether an all-reduce is done in one exchange, where every rank sums everything. */
static inline bool qd_local_is_direct(const qd_transfer *op)
{
    return op->request.kind == QD_COLL_ALL_REDUCE &&
           qd_coll_direct(op->request.count * qd_local_element_size(op), op->comm->size);
}

/* How the results of an operation with a message of this size are written. placed: straight from
 * buffer to buffer. all-to-all: the bytes that a rank sends to others. */
qd_copy_way qd_local_copy_way(const qd_transfer *op, int64_t message_bytes, bool placed);

/* rounds.c: the steps of a round. Each runs when all its inputs are ready; false: the world was
 * aborted. */

/* Elements that `from` has for `to`. all-to-all: known for this rank's own row, and for other rows
 * once posted. */
int64_t qd_local_elements_for(const qd_transfer *op, int from, int to);
void qd_local_produce(qd_transfer *op);
bool qd_local_combine(qd_transfer *op);
bool qd_local_consume(qd_transfer *op);
bool qd_local_push_share(qd_transfer *op); /* where both sides copy: this rank's share, into the consumers' memory */
void qd_local_sum_direct(qd_transfer *op); /* a direct all-reduce */
/* Where both sides copy: how many of the elements from `from` a consumer reads. `from` writes the
 * rest. */
int64_t qd_local_pulled(const qd_transfer *op, int from, int64_t elements);

/* common.c: all-to-all between buffers that all ranks reach by address. */

void qd_local_common_begin(qd_transfer *op);  /* before the post */
bool qd_local_common_decide(qd_transfer *op); /* after all posts: whether the operation is done this way */
bool qd_local_common_work(qd_transfer *op);   /* copies chunks; false if none is left to claim */
bool qd_local_common_is_done(qd_transfer *op); /* then adds what others copied for this rank to op->bytes */

/* onepass.c: all kinds except all-to-all, where each rank chooses the way of its own blocks. */

/* Whether a message is large enough for one pass: the same on all ranks. Smaller ones, and direct
 * all-reduces of any size, use the lanes. */
bool qd_local_pass_large(const qd_transfer *op);
/* begin, at the start: undecided if this rank's own buffers and the size allow one pass. decide:
 * the result of the posts so far. */
qd_local_pass qd_local_pass_begin(const qd_transfer *op);
qd_local_pass qd_local_pass_decide(const qd_transfer *op);
/* All-gather: whether to copy the own part in the pass and not at the start. */
bool qd_local_pass_leaves_own(const qd_transfer *op);
/* After the decision: sets up this rank's work. */
void qd_local_pass_plan(qd_transfer *op);
/* Does a piece of it; false if nothing can be done now. */
bool qd_local_pass_work(qd_transfer *op);
/* True if all access to this rank's buffers is over; then adds what others wrote to op->bytes. */
bool qd_local_pass_is_done(qd_transfer *op);
/* True if `peer` accesses this rank's buffers and has not finished. */
bool qd_local_pass_waits_for(const qd_transfer *op, int peer);

#endif
