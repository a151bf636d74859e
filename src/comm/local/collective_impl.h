/* Inside src/comm/local: what collective.c, rounds.c (rounds through lanes, rings and remote
 * memory) and onepass.c share. */
#ifndef QD_COMM_LOCAL_COLLECTIVE_IMPL_H
#define QD_COMM_LOCAL_COLLECTIVE_IMPL_H

#include "comm/local/local_impl.h"

#define QD_LOCAL_SHARE_BYTES (128 << 10) /* one-way messages from this size on are copied by both sides */
#define QD_LOCAL_SUM_BLOCK 8192 /* bytes summed at a time where the sum is stored twice: the second store reads L1 */

/* Whether an operation takes one pass depends on where everybody's buffers are. */
typedef enum qd_local_pass {
    QD_LOCAL_ROUNDS,    /* no: it goes in rounds */
    QD_LOCAL_UNDECIDED, /* the posts that decide are not all here */
    QD_LOCAL_ONE_PASS
} qd_local_pass;

typedef struct qd_local_state {
    uint64_t base;    /* of counter values */
    uint64_t checked; /* ranks, as bits, that have posted and agree */
    int entered;      /* how many */
    qd_local_pass pass;
    bool direct;      /* all-reduce in one exchange */
    bool remote;      /* qd_local_group.remote when this operation began: it may change while the operation goes on */
    bool all_can_read;
    qd_copy_way large; /* how results are written */
    bool own_left;    /* the own part is still to be copied */
    bool done;
    bool common;      /* all-to-all: whoever runs does the work */

    /* one pass */
    uint64_t parts; /* ranks, as bits, with which (common: for which) something is left to do */
    int part;       /* the one that is being worked on, or -1 */
    int64_t at;     /* elements of it that are done */
    bool passed;    /* all parts are done, and the others know */

    /* rounds */
    int64_t part_elements, rounds; /* elements per part of a buffer; rounds of this operation, the same on all ranks */
    int64_t produced, combined, consumed;
    qd_local_way way; /* of this rank's data; the same on all ranks but in an all-to-all */
    uint64_t awaited; /* ranks, as bits, whose data are there when `produced` says so; those of others, with the post */
    bool reaches;     /* this rank goes into others' memory */
    bool fused;       /* all-gather: the own part is copied with each produced one, while that is in the cache */
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

/* all-to-all: what `rank` has for each rank. */
static inline qd_local_block *qd_local_blocks_of(const qd_transfer *op, int rank)
{
    return (qd_local_block *)qd_local_small_of(op, rank);
}

/* ---- rounds.c: what is done in a round, when everything it needs is there; false when the world is aborted
 * ---- */

/* Elements that `from` has for `to`. all-to-all: known only for this rank's own row, and for others
 * once posted. */
int64_t qd_local_elements_for(const qd_transfer *op, int from, int to);
void qd_local_produce(qd_transfer *op);
bool qd_local_combine(qd_transfer *op);
bool qd_local_consume(qd_transfer *op);
bool qd_local_push_share(qd_transfer *op); /* where both sides copy: this rank's share, into the memory of the consumers */
void qd_local_sum_direct(qd_transfer *op); /* a direct all-reduce */
/* How many of the elements that `from` has for a consumer the consumer reads where both copy;
 * `from` writes the others. */
int64_t qd_local_pulled(const qd_transfer *op, int from, int64_t elements);

/* ---- common.c: all-to-all between buffers that all reach by address ---- */

void qd_local_common_begin(qd_transfer *op);  /* before the post */
bool qd_local_common_decide(qd_transfer *op); /* when all have posted: whether it is done so */
bool qd_local_common_work(qd_transfer *op);   /* does a piece; false if nothing is left to be taken */
bool qd_local_common_is_done(qd_transfer *op); /* then adds what others copied for this rank to op->bytes */

/* ---- onepass.c; not for all-to-all, where each rank's blocks say how they travel ---- */

/* Messages of this size and more take one pass if they can: the same on all ranks. Smaller ones go
 * through the lanes. */
bool qd_local_pass_large(const qd_transfer *op);
/* Undecided if this rank's own buffers and the size allow one pass (at the start), then what the
 * posts say. */
qd_local_pass qd_local_pass_begin(const qd_transfer *op);
qd_local_pass qd_local_pass_decide(const qd_transfer *op);
/* What the root of a broadcast says in its post: elements that a consumer reads whose memory the
 * root reaches; the root writes the rest. */
int64_t qd_local_pass_pulled(const qd_transfer *op);
/* All-gather: the own part is better copied in the pass than at the start. */
bool qd_local_pass_leaves_own(const qd_transfer *op);
/* After the decision: what there is to do for this rank. */
void qd_local_pass_plan(qd_transfer *op);
/* Does a piece of it; false if there is nothing that can be done now. */
bool qd_local_pass_work(qd_transfer *op);
/* True if everything that touches this rank's buffers has been done; then adds what others wrote to
 * op->bytes. */
bool qd_local_pass_is_done(qd_transfer *op);
/* True if the buffers of this rank are touched by `peer`, which has not finished. */
bool qd_local_pass_waits_for(const qd_transfer *op, int peer);

#endif
