/* Queues, work handles and waiting, shared by comm.c, calls.c, work.c, progress.c and waits.c. Most
 * backends do not need it. */
#ifndef QD_COMM_WORK_H
#define QD_COMM_WORK_H

#include "comm/comm_impl.h"

struct qd_work {
    qd_transfer op;
    qd_work *next;
    qd_queue *queue;
    double begin, end; /* of its execution, by qd_clock_now() */
    _Atomic int done;
    qd_status status;
    char message[QD_COMM_REASON_BYTES];
    void *owned; /* copies of lists and counts, so that the caller may free its own */
};

/* Works in the order of their calls. `turn` is a lock: only the thread that holds it starts, polls
 * and removes the head. */
struct qd_queue {
    qd_world *world;
    pthread_mutex_t lock; /* head, tail */
    qd_work *head, *tail;
    _Atomic int length;
    _Atomic int turn;
    _Atomic int waiters; /* threads in qd_work_wait() for a work of this queue */
    bool listed; /* in the progress thread's list; under its lock */
    qd_queue *next;
};

void qd_queue_init(qd_queue *queue, qd_world *world);
void qd_queue_destroy(qd_queue *queue);
/* Polls the head, and the next ones as long as they complete at once. Sets *moved on any
 * progress. */
void qd_queue_poll(qd_queue *queue, bool *moved);

/* Runs or queues an operation whose request is filled. `owned` (may be NULL) is freed when it is
 * done. */
qd_status qd_transfer_submit(qd_comm *comm, const qd_coll_request *request, uint64_t shape, void *owned,
                             qd_work **work);

/* The failure of this world, with its message recorded; QD_OK if none. Also asks the backend. */
qd_status qd_world_check(qd_world *world);
/* Records a failure of this rank (the calling thread's message) and reports it to the other ranks,
 * unless another rank failed first. */
void qd_world_fail(qd_world *world, qd_status status);

/* Waiting. A thread spins, then yields, then sleeps; it resets `step` to 0 after progress. */
typedef struct qd_idle {
    int step, spins, yields;
} qd_idle;
/* One idle step. `again` is called between announcing the sleep and sleeping; if it returns true,
 * the thread does not sleep. */
typedef bool (*qd_again)(void *context);
void qd_world_idle(qd_world *world, qd_idle *idle, qd_again again, void *context);
void qd_world_wake(qd_world *world);

/* The sequence number of the next operation (or message) of this kind. */
uint64_t qd_transfer_number(qd_comm *comm, const qd_coll_request *request);

/* checked.c: like the functions of a backend, for an operation with checksums. start assigns its
 * sequence numbers. */
typedef struct qd_checks qd_checks;
qd_status qd_checked_start(qd_transfer *op);
qd_status qd_checked_poll(qd_transfer *op, bool *done, bool *moved);
void qd_checked_finish(qd_transfer *op);
void qd_checks_destroy(qd_comm *comm);

/* waits.c */
void qd_wait_write(qd_transfer *op, double now, bool holds); /* writes or renews the operation's note */
void qd_wait_clear(qd_transfer *op);                         /* removes the note after progress */
qd_status qd_wait_verdict(const qd_transfer *op);            /* after the deadline: QD_TIMEOUT that names the late ranks */

/* "all-reduce of 100 fp32 (sum), operation 3 of group world": text is returned. */
const char *qd_call_text(const qd_fingerprint *fingerprint, const char *group, char *text, size_t bytes);

/* guard.c. A copy of this rank's board for the others of its machine. */
typedef struct qd_guard qd_guard;
qd_wait_board *qd_guard_board(const qd_guard *guard);
bool qd_guard_excused(const qd_guard *guard); /* a debugger holds a rank of this machine; false without a guard */
void qd_guard_destroy(qd_guard *guard);

/* progress.c */
typedef struct qd_progress qd_progress;
qd_status qd_progress_add(qd_world *world, qd_queue *queue); /* the queue has become non-empty */
void qd_progress_remove(qd_world *world, qd_queue *queue);   /* the queue will be freed */
void qd_progress_nudge(qd_world *world);                     /* a waiter has released a non-empty queue */
void qd_progress_destroy(qd_world *world);

static inline void qd_world_lock(qd_world *world)
{
    if (world->backend->serialized) pthread_mutex_lock(&world->serialize);
}
static inline void qd_world_unlock(qd_world *world)
{
    if (world->backend->serialized) pthread_mutex_unlock(&world->serialize);
}

/* Dispatch to the world's backend, or to the table of a communicator on a device. */
static inline qd_status qd_op_start(qd_transfer *op)
{
    const qd_comm_device_ops *on_device = op->comm->on_device;
    return on_device ? on_device->start(op) : op->comm->world->backend->start(op);
}
static inline qd_status qd_op_poll(qd_transfer *op, bool *done, bool *moved)
{
    const qd_comm_device_ops *on_device = op->comm->on_device;
    return on_device ? on_device->poll(op, done, moved) : op->comm->world->backend->poll(op, done, moved);
}
static inline void qd_op_finish(qd_transfer *op)
{
    if (op->comm->on_device)
        op->comm->on_device->finish(op);
    else
        op->comm->world->backend->finish(op);
}
static inline bool qd_op_late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    const qd_comm_device_ops *on_device = op->comm->on_device;
    return on_device ? on_device->late(op, peer, report) : op->comm->world->backend->late(op, peer, report);
}

/* Held around calls marked [S] for an operation. Device tables do their own locking. */
static inline void qd_op_lock(const qd_transfer *op)
{
    if (!op->comm->on_device) qd_world_lock(op->comm->world);
}
static inline void qd_op_unlock(const qd_transfer *op)
{
    if (!op->comm->on_device) qd_world_unlock(op->comm->world);
}

#endif
