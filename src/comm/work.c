/* Executes operations: queues, blocking calls, work handles, deadlines and world-wide failure. */
#include "comm/work.h"

#include "base/clock.h"
#include "base/thread.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_YIELDS 200    /* before a waiting caller sleeps */
#define IDLE_CHECK 64      /* idle polls between checks of the abort record and the clock */
#define SLEEP_SECONDS 0.02 /* a sleeping thread checks the deadline this often */
#define NOTE_SECONDS 0.05  /* waits longer than this publish a note */

qd_status qd_world_check(qd_world *world)
{
    int failed = atomic_load_explicit(&world->failed, memory_order_acquire);
    if (failed == QD_OK) {
        int rank = -1;
        char reason[QD_COMM_REASON_BYTES] = "";
        qd_world_lock(world);
        bool aborted = world->backend->aborted(world, &rank, reason, sizeof reason);
        qd_world_unlock(world);
        if (!aborted) return QD_OK;
        if (rank == world->rank)
            qd_world_fail(world, QD_FAIL(QD_REMOTE, "this rank (%d) has aborted the run: %s", rank, reason));
        else
            qd_world_fail(world, QD_FAIL(QD_REMOTE, "rank %d failed: %s", rank, reason));
        failed = atomic_load_explicit(&world->failed, memory_order_acquire);
    }
    return QD_FAIL((qd_status)failed, "%s", world->failure);
}

void qd_world_fail(qd_world *world, qd_status status)
{
    if (atomic_exchange(&world->failing, 1)) {
        /* Another thread reports the failure. Wait until it is published: before that, no operation
         * may free its memory. */
        while (atomic_load_explicit(&world->failed, memory_order_acquire) == QD_OK) sched_yield();
        return;
    }
    snprintf(world->failure, sizeof world->failure, "%s", qd_error_message());
    if (status != QD_REMOTE) {
        qd_world_lock(world);
        world->backend->abort(world, world->failure);
        qd_world_unlock(world);
    }
    atomic_store_explicit(&world->failed, (int)status, memory_order_release);
    qd_world_wake(world);
}

void qd_world_wake(qd_world *world)
{
    world->backend->wake(world);
}

/* Starts or polls. moved_at == 0 means "not read yet": the clock is read only when nothing
 * moves. */
static qd_status op_step(qd_transfer *op, bool *done, bool *moved)
{
    qd_status status = QD_OK;
    qd_op_lock(op);
    if (!op->started) {
        op->started = true;
        op->moved_at = 0;
        if (!op->checked.on) qd_last_call_set(op);
        status = op->checked.on ? qd_checked_start(op) : qd_op_start(op);
        *moved = true;
    }
    if (status == QD_OK) status = op->checked.on ? qd_checked_poll(op, done, moved) : qd_op_poll(op, done, moved);
    qd_op_unlock(op);
    if (*moved) {
        op->moved_at = 0;
        if (op->note >= 0) qd_wait_clear(op);
    }
    return status;
}

/* For an operation without progress: checks the abort record and the deadline, and writes its note.
 * holds: see qd_wait_note. */
static qd_status op_check_idle(qd_transfer *op, bool holds)
{
    QD_TRY(qd_world_check(op->comm->world));
    double now = qd_clock_now(), deadline = op->comm->world->config.deadline_seconds;
    if (op->moved_at == 0) {
        op->moved_at = op->checked_at = now;
        return QD_OK;
    }
    /* If the job was suspended and continued, the peers had no time to make progress either. */
    op->moved_at += qd_clock_lost(&op->checked_at, now);
    const qd_comm_backend_ops *backend = op->comm->world->backend;
    if ((backend->excused && backend->excused(op->comm->world)) || qd_guard_excused(op->comm->world->guard)) op->moved_at = now;
    double waited = now - op->moved_at;
    if (waited > deadline) return qd_wait_verdict(op);
    if (waited > NOTE_SECONDS || waited > deadline / 4)
        if (op->note < 0 || now - op->noted_at > deadline / 16) qd_wait_write(op, now, holds);
    return QD_OK;
}

/* After the last poll, whatever the status. */
static void op_end(qd_transfer *op, qd_status status)
{
    qd_comm *comm = op->comm;
    if (status != QD_OK)
        qd_world_fail(comm->world, status); /* the note stays: the others follow it to find the cause */
    else if (op->note >= 0)
        qd_wait_clear(op);
    if (op->started && status == QD_OK) qd_last_call_end(op);
    if (op->started) {
        qd_op_lock(op);
        op->checked.on ? qd_checked_finish(op) : qd_op_finish(op);
        qd_op_unlock(op);
    }
    pthread_mutex_lock(&comm->stats_lock);
    comm->stats.calls[op->request.kind]++;
    comm->stats.bytes[op->request.kind] += op->bytes;
    comm->stats.busy_seconds += op->busy_seconds;
    pthread_mutex_unlock(&comm->stats_lock);
}

/* In the caller's thread: before the operation is queued, and when it is over. No-ops for host
 * memory. */
static qd_status op_submit(qd_transfer *op)
{
    if (!op->comm->on_device) return QD_OK;
    qd_status status = op->comm->on_device->submit(op);
    if (status != QD_OK) qd_world_fail(op->comm->world, status); /* its sequence number is used: peers would wait for it */
    return status;
}
static qd_status op_complete(qd_transfer *op, qd_status status)
{
    if (!op->comm->on_device) return status;
    qd_status ordered = op->comm->on_device->complete(op, status == QD_OK);
    return status == QD_OK ? ordered : status;
}

typedef struct blocking_wait {
    qd_transfer *op;
    qd_status status;
    bool done;
} blocking_wait;

static bool blocking_again(void *context)
{
    blocking_wait *wait = context;
    bool moved = false;
    wait->status = op_step(wait->op, &wait->done, &moved);
    if (wait->status == QD_OK && !wait->done && !moved) wait->status = op_check_idle(wait->op, true);
    return wait->status != QD_OK || wait->done || moved;
}

static qd_status run_blocking(qd_transfer *op)
{
    blocking_wait wait = {.op = op};
    qd_idle idle = {.spins = op->comm->world->spin, .yields = WAIT_YIELDS};
    while (wait.status == QD_OK && !wait.done) {
        bool moved = false;
        wait.status = op_step(op, &wait.done, &moved);
        if (wait.status != QD_OK || wait.done) break;
        if (moved) {
            idle.step = 0;
            continue;
        }
        if (idle.step % IDLE_CHECK == IDLE_CHECK - 1 && (wait.status = op_check_idle(op, true)) != QD_OK) break;
        qd_world_idle(op->comm->world, &idle, blocking_again, &wait);
    }
    op_end(op, wait.status);
    return wait.status;
}

void qd_world_idle(qd_world *world, qd_idle *idle, qd_again again, void *context)
{
    if (idle->step < idle->spins) {
        idle->step++;
        qd_pause();
    } else if (idle->step < idle->spins + idle->yields) {
        idle->step++;
        sched_yield();
    } else { /* from here on: poll, then sleep if nothing moved */
        uint32_t ticket = world->backend->sleep_prepare(world);
        if (again(context)) {
            world->backend->sleep_cancel(world);
            idle->step = 0;
        } else {
            world->backend->sleep(world, ticket, SLEEP_SECONDS);
        }
    }
}

void qd_queue_init(qd_queue *queue, qd_world *world)
{
    memset(queue, 0, sizeof *queue);
    queue->world = world;
    pthread_mutex_init(&queue->lock, NULL);
}

void qd_queue_destroy(qd_queue *queue)
{
    pthread_mutex_destroy(&queue->lock);
}

static void work_complete(qd_queue *queue, qd_work *work, qd_status status)
{
    work->status = status;
    work->end = qd_clock_now();
    if (status != QD_OK) snprintf(work->message, sizeof work->message, "%s", qd_error_message());
    op_end(&work->op, status);
    pthread_mutex_lock(&queue->lock);
    queue->head = work->next;
    if (!queue->head) queue->tail = NULL;
    pthread_mutex_unlock(&queue->lock);
    atomic_fetch_sub_explicit(&queue->length, 1, memory_order_release);
    qd_world *world = queue->world;
    atomic_store_explicit(&work->done, 1, memory_order_release); /* from here on the waiter may free it */
    qd_world_wake(world);
}

/* The caller holds the queue's turn. */
static void poll_head(qd_queue *queue, bool *moved)
{
    for (;;) {
        pthread_mutex_lock(&queue->lock);
        qd_work *work = queue->head;
        pthread_mutex_unlock(&queue->lock);
        if (!work) return;
        bool done = false, stepped = false;
        qd_status status = QD_OK;
        if (!work->op.started) work->begin = qd_clock_now();
        if (atomic_load_explicit(&queue->world->failed, memory_order_acquire) != QD_OK)
            status = qd_world_check(queue->world);
        else
            status = op_step(&work->op, &done, &stepped);
        if (status == QD_OK && !done && !stepped)
            status = op_check_idle(&work->op, atomic_load_explicit(&queue->waiters, memory_order_relaxed) > 0);
        if (stepped) *moved = true;
        if (status == QD_OK && !done) return;
        *moved = true;
        work_complete(queue, work, status);
    }
}

void qd_queue_poll(qd_queue *queue, bool *moved)
{
    if (atomic_load_explicit(&queue->length, memory_order_acquire) == 0) return;
    if (atomic_exchange_explicit(&queue->turn, 1, memory_order_acquire)) return;
    poll_head(queue, moved);
    atomic_store_explicit(&queue->turn, 0, memory_order_release);
}

static qd_queue *queue_of(qd_comm *comm, const qd_coll_request *request)
{
    if (request->kind == QD_COLL_SEND) return &comm->queues[1 + request->root];
    if (request->kind == QD_COLL_RECV) return &comm->queues[1 + comm->size + request->root];
    return &comm->queues[0];
}

uint64_t qd_transfer_number(qd_comm *comm, const qd_coll_request *request)
{
    return request->kind == QD_COLL_SEND   ? ++comm->sent[request->root]
           : request->kind == QD_COLL_RECV ? ++comm->received[request->root]
                                           : ++comm->sequence;
}

static void op_fill(qd_transfer *op, qd_comm *comm, const qd_coll_request *request, uint64_t shape)
{
    op->comm = comm;
    op->request = *request;
    op->bytes = 0;
    op->busy_seconds = 0;
    op->moved_at = op->checked_at = op->noted_at = 0;
    op->note = -1;
    op->started = false;
    op->timeline = comm->timeline;
    op->timeline_id = comm->timeline_id;
    op->checked.on = comm->world->checks_messages && !comm->on_device && comm->size > 1;
    op->fingerprint = (qd_fingerprint){.sequence = op->checked.on ? 0 : qd_transfer_number(comm, request),
                                       .count = request->count,
                                       .shape = shape,
                                       .root = request->root,
                                       .kind = (uint8_t)request->kind,
                                       .dtype = (uint8_t)request->dtype,
                                       .reduce = (uint8_t)request->reduce};
}

qd_status qd_transfer_submit(qd_comm *comm, const qd_coll_request *request, uint64_t shape, void *owned,
                             qd_work **work)
{
    qd_world *world = comm->world;
    qd_queue *queue = queue_of(comm, request);
    qd_status status = QD_OK;
    if (atomic_load_explicit(&world->failed, memory_order_acquire) != QD_OK) {
        free(owned);
        return qd_world_check(world);
    }
    bool alone = comm->size == 1 && !comm->on_device;
    if (!work && (alone || atomic_load_explicit(&queue->length, memory_order_acquire) == 0)) {
        qd_transfer op;
        op_fill(&op, comm, request, shape);
        if (alone) {
            qd_transfer_copy_own(&op, NULL);
            op_end(&op, QD_OK);
        } else {
            status = op_submit(&op);
            if (status == QD_OK) status = run_blocking(&op);
            status = op_complete(&op, status);
        }
        free(owned);
        return status;
    }
    qd_work *item = aligned_alloc(64, (sizeof *item + 63) / 64 * 64);
    if (!item) {
        free(owned);
        return QD_FAIL(QD_NO_MEMORY, "no memory for an asynchronous %s of group %s",
                       qd_coll_kind_name(request->kind), comm->name);
    }
    op_fill(&item->op, comm, request, shape);
    item->next = NULL;
    item->queue = queue;
    item->begin = item->end = 0;
    atomic_init(&item->done, 0);
    item->status = QD_OK;
    item->message[0] = '\0';
    item->owned = owned;
    status = op_submit(&item->op);
    if (status != QD_OK) {
        op_complete(&item->op, status);
        free(item->owned);
        free(item);
        return status;
    }
    if (alone) {
        item->begin = qd_clock_now();
        qd_transfer_copy_own(&item->op, NULL);
        op_end(&item->op, QD_OK);
        item->end = qd_clock_now();
        atomic_store(&item->done, 1);
    } else {
        pthread_mutex_lock(&queue->lock);
        if (queue->tail)
            queue->tail->next = item;
        else
            queue->head = item;
        queue->tail = item;
        atomic_fetch_add_explicit(&queue->length, 1, memory_order_release);
        pthread_mutex_unlock(&queue->lock);
        /* Peers may already be waiting: start at once if no other thread holds the queue's turn,
         * then leave the rest to the progress thread. */
        if (work) {
            bool moved = false;
            qd_queue_poll(queue, &moved);
            if (!atomic_load_explicit(&item->done, memory_order_acquire)) {
                status = qd_progress_add(world, queue);
                if (status != QD_OK) qd_world_fail(world, status); /* its waiter completes the work with this status */
            }
        }
    }
    if (work) {
        *work = item;
        return QD_OK;
    }
    return qd_work_wait(item);
}

typedef struct work_waiter {
    qd_work *work;
    bool turn; /* this thread holds the queue's turn and polls in place of the progress thread */
} work_waiter;

static bool work_again(void *context)
{
    work_waiter *waiter = context;
    bool moved = false;
    if (atomic_load_explicit(&waiter->work->done, memory_order_acquire)) return true;
    if (!waiter->turn) waiter->turn = !atomic_exchange_explicit(&waiter->work->queue->turn, 1, memory_order_acquire);
    if (waiter->turn) poll_head(waiter->work->queue, &moved);
    return moved || atomic_load_explicit(&waiter->work->done, memory_order_acquire);
}

qd_status qd_work_wait(qd_work *work)
{
    return qd_work_wait_timed(work, NULL, NULL);
}

qd_status qd_work_wait_timed(qd_work *work, double *begin, double *end)
{
    if (!work) return QD_FAIL(QD_USAGE, "qd_work_wait needs a work handle, not NULL");
    work_waiter waiter = {.work = work};
    qd_queue *queue = work->queue;
    qd_idle idle = {.spins = queue->world->spin, .yields = WAIT_YIELDS};
    atomic_fetch_add_explicit(&queue->waiters, 1, memory_order_relaxed);
    while (!atomic_load_explicit(&work->done, memory_order_acquire)) {
        if (work_again(&waiter))
            idle.step = 0;
        else
            qd_world_idle(queue->world, &idle, work_again, &waiter);
    }
    atomic_fetch_sub_explicit(&queue->waiters, 1, memory_order_relaxed);
    if (waiter.turn) {
        atomic_store_explicit(&queue->turn, 0, memory_order_release);
        if (atomic_load_explicit(&queue->length, memory_order_acquire) > 0) qd_progress_nudge(queue->world);
    }
    qd_status status = work->status == QD_OK ? op_complete(&work->op, QD_OK) : work->status;
    if (begin) *begin = work->begin;
    if (end) *end = work->end;
    if (work->status != QD_OK) {
        op_complete(&work->op, status);
        QD_FAIL(status, "%s", work->message);
    }
    free(work->owned);
    free(work);
    return status;
}

bool qd_work_done(const qd_work *work)
{
    return atomic_load_explicit(&work->done, memory_order_acquire) != 0;
}
