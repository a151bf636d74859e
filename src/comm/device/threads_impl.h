/* Device memory between ranks that are threads of one process: the state that the ranks of a
 * communicator share, and the protocol.
 *
 * Ranks meet on the host, and events order their streams. For a collective, each rank
 *   posts      its call: fingerprint, addresses, and the event after which its buffers are ready
 *   enqueues   once all have posted: its communication stream waits for the peers' events, does
 *              this rank's share of the work, and records `done`
 *   leaves     once the peers that access its buffers have enqueued: its stream waits for their
 *              `done` and records the event that the compute stream will wait for
 * Every event is recorded before it is published, so streams wait only for work that is already
 * enqueued: they cannot deadlock, and no kernel waits for another one.
 *
 * A rank leaves operation s only after all have posted it, so no rank is more than one operation
 * ahead, and what belongs to operation s (its post, its `done`) may be reused in operation
 * s + 2. */
#ifndef QD_COMM_DEVICE_THREADS_IMPL_H
#define QD_COMM_DEVICE_THREADS_IMPL_H

#include "comm/comm_impl.h"
#include "device/device.h"
#include "device/timeline.h"

#define QD_THREADS_LINE 128
#define QD_THREADS_STAGED_BYTES (16 << 10) /* the largest direct all-reduce must fit */

/* The events of one operation of this rank: from submit to complete. */
typedef struct qd_flight {
    qd_event *ready; /* compute stream, at the call */
    qd_event *over;  /* communication stream: the operation has run, and the peers no longer use this rank's buffers */
    struct qd_flight *next;
} qd_flight;

typedef struct qd_threads_post {
    _Atomic uint64_t posted; /* operation or message number; stored last */
    qd_fingerprint fingerprint;
    qd_coll_request request; /* the arrays it points to stay valid until the rank has left */
    qd_event *ready;
} qd_threads_post;

/* What a rank publishes to its group. Everything except `inside` is written by this rank only. */
typedef struct qd_threads_lane {
    _Alignas(QD_THREADS_LINE) _Atomic uint64_t enqueued; /* operation number */
    _Atomic uint64_t left;     /* operation number: this rank no longer needs the others' events */
    _Atomic uint64_t drained;  /* operation number: after a failure in it, this rank's stream has drained */
    _Atomic uint32_t inside;   /* number of this rank's threads that use other ranks' resources */
    struct {
        qd_threads_post post;
        qd_event *done;
        qd_event *staged; /* direct all-reduces: this rank's input is in `staging` */
        void *staging;    /* page-locked host memory that all devices reach */
        int64_t pushed;   /* bytes written into each peer's memory; readable with `enqueued` */
    } parity[2];
    qd_device *device;
    pthread_mutex_t lock; /* guards the next */
    qd_world *world;      /* to wake the rank; NULL once it has left */
} qd_threads_lane;

/* Messages of one sender to one receiver. */
typedef struct qd_threads_channel {
    _Alignas(QD_THREADS_LINE) qd_threads_post post; /* sender */
    _Atomic uint64_t left;     /* sender: message number */
    _Alignas(QD_THREADS_LINE) _Atomic uint64_t entered; /* receiver: message number */
    _Atomic uint64_t consumed; /* receiver: message number; the copy is enqueued */
    qd_event *done;            /* receiver; created with its first message, valid once `consumed` is set */
} qd_threads_channel;

/* Heap memory of the process; freed by the last rank that leaves. */
typedef struct qd_threads_shared {
    _Atomic int refs;
    int size;
    qd_threads_lane *lanes;       /* (size) */
    qd_threads_channel *channels; /* (size, size), sender first */
} qd_threads_shared;

/* comm->backend_data: this rank's view. */
typedef struct qd_threads_group {
    qd_threads_shared *shared;
    qd_threads_lane *lane; /* its own */
    pthread_mutex_t lock;  /* guards the next */
    qd_flight *free;
} qd_threads_group;

/* At the start of a transfer's state, from submit on. */
typedef struct qd_threads_base {
    qd_flight *flight; /* NULL: a group of one, whose copies are on the compute stream already */
} qd_threads_base;

static inline qd_threads_group *qd_threads_of(const qd_transfer *op)
{
    return op->comm->backend_data;
}

static inline qd_threads_lane *qd_threads_lane_of(const qd_transfer *op, int rank)
{
    return &qd_threads_of(op)->shared->lanes[rank];
}

static inline qd_threads_channel *qd_threads_channel_of(const qd_comm *comm, int from, int to)
{
    const qd_threads_group *group = comm->backend_data;
    return &group->shared->channels[from * comm->size + to];
}

static inline qd_stream *qd_threads_stream(const qd_transfer *op)
{
    return qd_device_comm_stream(op->comm->device);
}

/* Around this rank's share of an operation: records it on the timeline, if there is one. */
static inline qd_status qd_threads_piece_begin(qd_transfer *op)
{
    return op->timeline ? qd_timeline_begin(op->timeline, op->timeline_id, &op->piece) : QD_OK;
}

static inline qd_status qd_threads_piece_end(qd_transfer *op)
{
    return op->timeline ? qd_timeline_end(op->timeline, op->piece) : QD_OK;
}

/* Wakes sleeping threads of one rank, or of all other ranks. Call it after the store that they wait
 * for. */
void qd_threads_ring(const qd_comm *comm, int rank);
void qd_threads_ring_all(const qd_comm *comm);
/* The current, or last known, place of a rank. */
void qd_threads_place(const qd_comm *comm, int rank, char place[QD_COMM_PLACE_BYTES]);

/* Bracket the use of other ranks' resources: events, arrays, addresses. enter returns false when
 * the world has failed: they may be gone then and must not be touched. A rank that fails waits for
 * the others to be outside before it frees its own. */
bool qd_threads_enter(const qd_comm *comm);
void qd_threads_leave(const qd_comm *comm);
void qd_threads_wait_outside(const qd_comm *comm);

/* Collects pieces and submits them to the device when the batch is full and at the end. */
enum { QD_THREADS_PIECES = 64 };
typedef struct qd_threads_batch {
    qd_stream *stream;
    qd_status status;
    int count;
    qd_piece pieces[QD_THREADS_PIECES];
} qd_threads_batch;
void qd_threads_batch_add(void *batch, void *to, const void *from, int64_t bytes); /* a qd_transfer_visit */
qd_status qd_threads_batch_end(qd_threads_batch *batch);

/* collective.c, message.c */
qd_status qd_threads_collective_start(qd_transfer *op);
qd_status qd_threads_collective_poll(qd_transfer *op, bool *done, bool *moved);
void qd_threads_collective_finish(qd_transfer *op);
bool qd_threads_collective_late(const qd_transfer *op, int peer, uint64_t *sequence);
qd_status qd_threads_message_start(qd_transfer *op);
qd_status qd_threads_message_poll(qd_transfer *op, bool *done, bool *moved);
void qd_threads_message_finish(qd_transfer *op);
bool qd_threads_message_late(const qd_transfer *op, int peer, uint64_t *sequence);

#endif
