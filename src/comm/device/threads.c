/* Creates and destroys communicators on devices of one process, and defines the table that the core
 * calls. */
#include "comm/device/threads_impl.h"
#include "comm/work.h"

#include "base/clock.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_message(const qd_transfer *op)
{
    return op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
}

void qd_threads_ring(const qd_comm *comm, int rank)
{
    const qd_threads_group *group = comm->backend_data;
    qd_threads_lane *lane = &group->shared->lanes[rank];
    pthread_mutex_lock(&lane->lock);
    if (lane->world) qd_world_wake(lane->world);
    pthread_mutex_unlock(&lane->lock);
}

void qd_threads_ring_all(const qd_comm *comm)
{
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank) qd_threads_ring(comm, r);
}

void qd_threads_place(const qd_comm *comm, int rank, char place[QD_COMM_PLACE_BYTES])
{
    qd_world *world = comm->world;
    qd_comm_place_get(&world->backend->board(world, comm->world_ranks[rank])->place, place);
}

static bool world_failed(qd_world *world)
{
    int rank;
    char reason[QD_COMM_REASON_BYTES];
    return atomic_load(&world->failed) != QD_OK || world->backend->aborted(world, &rank, reason, sizeof reason);
}

bool qd_threads_enter(const qd_comm *comm)
{
    const qd_threads_group *group = comm->backend_data;
    atomic_fetch_add(&group->lane->inside, 1);
    if (!world_failed(comm->world)) return true;
    qd_threads_leave(comm);
    return false;
}

void qd_threads_leave(const qd_comm *comm)
{
    const qd_threads_group *group = comm->backend_data;
    atomic_fetch_sub(&group->lane->inside, 1);
}

void qd_threads_wait_outside(const qd_comm *comm)
{
    const qd_threads_group *group = comm->backend_data;
    for (int r = 0; r < comm->size; r++)
        while (r != comm->rank && atomic_load(&group->shared->lanes[r].inside)) sched_yield();
}

void qd_threads_batch_add(void *context, void *to, const void *from, int64_t bytes)
{
    qd_threads_batch *batch = context;
    if (batch->status != QD_OK || bytes == 0) return;
    batch->pieces[batch->count++] = (qd_piece){.from = from, .to = to, .bytes = bytes};
    if (batch->count == QD_THREADS_PIECES) qd_threads_batch_end(batch);
}

qd_status qd_threads_batch_end(qd_threads_batch *batch)
{
    if (batch->status == QD_OK && batch->count > 0) {
        const qd_kernels *kernels = qd_device_kernels(qd_stream_device(batch->stream));
        qd_copy_pieces_args args = {.pieces = batch->pieces, .count = batch->count};
        batch->status = kernels->copy_pieces(batch->stream, &args);
    }
    batch->count = 0;
    return batch->status;
}

static void flight_free(qd_flight *flight)
{
    if (!flight) return;
    qd_event_destroy(flight->ready);
    qd_event_destroy(flight->over);
    free(flight);
}

static qd_status flight_take(qd_comm *comm, qd_flight **out)
{
    qd_threads_group *group = comm->backend_data;
    pthread_mutex_lock(&group->lock);
    qd_flight *flight = group->free;
    if (flight) group->free = flight->next;
    pthread_mutex_unlock(&group->lock);
    *out = flight;
    if (flight) return QD_OK;
    flight = calloc(1, sizeof *flight);
    if (!flight) return QD_FAIL(QD_NO_MEMORY, "no memory for an operation of group %s", comm->name);
    qd_status status = qd_event_create(comm->device, &flight->ready);
    if (status == QD_OK) status = qd_event_create(comm->device, &flight->over);
    if (status != QD_OK)
        flight_free(flight);
    else
        *out = flight;
    return status;
}

static void flight_give(qd_comm *comm, qd_flight *flight)
{
    qd_threads_group *group = comm->backend_data;
    pthread_mutex_lock(&group->lock);
    flight->next = group->free;
    group->free = flight;
    pthread_mutex_unlock(&group->lock);
}

static qd_status submit(qd_transfer *op)
{
    qd_threads_base *base = (qd_threads_base *)op->state;
    qd_stream *compute = qd_device_compute_stream(op->comm->device);
    base->flight = NULL;
    if (op->comm->size == 1) {
        qd_threads_batch batch = {.stream = compute};
        qd_transfer_own_pieces(op, qd_threads_batch_add, &batch);
        return qd_threads_batch_end(&batch);
    }
    QD_TRY(flight_take(op->comm, &base->flight));
    return qd_event_record(base->flight->ready, compute);
}

static qd_status complete(qd_transfer *op, bool good)
{
    qd_flight *flight = ((qd_threads_base *)op->state)->flight;
    qd_status status = QD_OK;
    if (!flight) return QD_OK;
    if (good) status = qd_stream_wait_event(qd_device_compute_stream(op->comm->device), flight->over);
    flight_give(op->comm, flight);
    return status;
}

static qd_status start(qd_transfer *op)
{
    if (op->comm->size == 1) return QD_OK;
    return is_message(op) ? qd_threads_message_start(op) : qd_threads_collective_start(op);
}

static qd_status poll_op(qd_transfer *op, bool *done, bool *moved)
{
    if (op->comm->size == 1) {
        *done = *moved = true;
        return QD_OK;
    }
    return is_message(op) ? qd_threads_message_poll(op, done, moved) : qd_threads_collective_poll(op, done, moved);
}

static void finish(qd_transfer *op)
{
    if (op->comm->size == 1) return;
    if (is_message(op))
        qd_threads_message_finish(op);
    else
        qd_threads_collective_finish(op);
}

static bool late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    bool is_late = is_message(op) ? qd_threads_message_late(op, peer, &report->sequence)
                                  : qd_threads_collective_late(op, peer, &report->sequence);
    if (is_late) qd_threads_place(op->comm, peer, report->place);
    return is_late;
}

static void shared_drop(qd_threads_shared *shared)
{
    if (!shared || atomic_fetch_sub(&shared->refs, 1) > 1) return;
    for (int r = 0; r < shared->size; r++) pthread_mutex_destroy(&shared->lanes[r].lock);
    free(shared->lanes);
    free(shared->channels);
    free(shared);
}

/* `count` zeroed elements, aligned to cache lines. */
static void *take_lines(size_t count, size_t size)
{
    void *memory = aligned_alloc(QD_THREADS_LINE, count * size);
    if (memory) memset(memory, 0, count * size);
    return memory;
}

static qd_threads_shared *shared_new(int size)
{
    qd_threads_shared *shared = calloc(1, sizeof *shared);
    if (!shared) return NULL;
    size_t n = (size_t)size;
    atomic_store(&shared->refs, size);
    shared->size = size;
    shared->lanes = take_lines(n, sizeof *shared->lanes);
    shared->channels = take_lines(n * n, sizeof *shared->channels);
    if (!shared->lanes || !shared->channels) {
        free(shared->lanes);
        free(shared->channels);
        free(shared);
        return NULL;
    }
    for (int r = 0; r < size; r++) pthread_mutex_init(&shared->lanes[r].lock, NULL);
    return shared;
}

/* Frees this rank's own resources, also those of a partly created group. */
static void group_free(qd_comm *comm)
{
    qd_threads_group *group = comm->backend_data;
    qd_threads_lane *lane = group->lane;
    for (int i = 0; lane && i < 2; i++) {
        qd_event_destroy(lane->parity[i].done);
        qd_event_destroy(lane->parity[i].staged);
        qd_host_free(comm->device, lane->parity[i].staging);
    }
    for (int from = 0; lane && from < comm->size; from++)
        qd_event_destroy(qd_threads_channel_of(comm, from, comm->rank)->done);
    while (group->free) {
        qd_flight *flight = group->free;
        group->free = flight->next;
        flight_free(flight);
    }
    shared_drop(group->shared);
    pthread_mutex_destroy(&group->lock);
    free(group);
    comm->backend_data = NULL;
}

static qd_status fill_lane(qd_comm *comm, qd_threads_lane *lane)
{
    for (int i = 0; i < 2; i++) {
        QD_TRY(qd_event_create(comm->device, &lane->parity[i].done));
        QD_TRY(qd_event_create(comm->device, &lane->parity[i].staged));
        QD_TRY(qd_host_alloc(comm->device, QD_THREADS_STAGED_BYTES, &lane->parity[i].staging));
    }
    lane->device = comm->device;
    pthread_mutex_lock(&lane->lock);
    lane->world = comm->world;
    pthread_mutex_unlock(&lane->lock);
    return QD_OK;
}

typedef struct entry { /* what one rank tells all others */
    int64_t shared, device;
} entry;

/* Tells every rank the address of the shared memory. */
static qd_status meet(qd_comm *comm, entry *entries)
{
    qd_threads_group *group = comm->backend_data;
    bool one = false;
    QD_TRY(qd_comm_one_process(comm->host, &one));
    if (!one)
        return QD_FAIL(QD_UNSUPPORTED, "group %s: ranks that share device memory must be threads of one process "
                                       "(run.ranks_as=threads); for one rank per GPU there is run.backend=nccl", comm->name);
    qd_threads_shared *made = comm->rank == 0 ? shared_new(comm->size) : NULL;
    entries[comm->rank] = (entry){(int64_t)(intptr_t)made, (int64_t)(intptr_t)comm->device};
    /* If this fails on rank 0, others may have the address already: the memory is then leaked. */
    QD_TRY(qd_comm_all_gather(comm->host, &entries[comm->rank], entries, 2 * (int64_t)comm->size, QD_I64, NULL));
    if (!entries[0].shared) return QD_FAIL(QD_NO_MEMORY, "no memory for the shared state of group %s", comm->name);
    group->shared = (qd_threads_shared *)(intptr_t)entries[0].shared;
    group->lane = &group->shared->lanes[comm->rank];
    return QD_OK;
}

static void destroy(qd_comm *comm);

static qd_status create(qd_comm *comm)
{
    qd_status status = QD_OK;
    if (comm->size > QD_SUM_RANKS_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "group %s: %d ranks cannot share device memory; at most %d can", comm->name, comm->size,
                       QD_SUM_RANKS_MOST);
    qd_threads_group *group = calloc(1, sizeof *group);
    entry *entries = calloc((size_t)comm->size, sizeof *entries);
    if (!group || !entries) {
        free(group);
        free(entries);
        return QD_FAIL(QD_NO_MEMORY, "no memory for group %s on a device", comm->name);
    }
    pthread_mutex_init(&group->lock, NULL);
    comm->backend_data = group;
    if (comm->size > 1) {
        QD_TRY_DONE(meet(comm, entries));
        qd_status mine = fill_lane(comm, group->lane);
        for (int r = 0; r < comm->size && mine == QD_OK; r++)
            mine = qd_device_reach(comm->device, (qd_device *)(intptr_t)entries[r].device);
        char reason[QD_COMM_REASON_BYTES];
        if (mine != QD_OK) snprintf(reason, sizeof reason, "%s", qd_error_message());
        /* After this all lanes are filled, or no rank continues. */
        int32_t worst = mine != QD_OK ? comm->rank + 1 : 0;
        QD_TRY_DONE(qd_comm_all_reduce(comm->host, &worst, &worst, 1, QD_I32, QD_MAX, NULL));
        if (mine != QD_OK)
            status = QD_FAIL(mine, "%s", reason);
        else if (worst > 0)
            status = QD_FAIL(QD_REMOTE, "rank %d could not put group %s on its device", comm->world_ranks[worst - 1],
                             comm->name);
    }
done:
    free(entries);
    if (status != QD_OK) destroy(comm);
    return status;
}

/* Waits for peers that may be about to wait for events of this rank's last operations. They are
 * inside those operations, so this is short. */
static void wait_left(const qd_comm *comm)
{
    const qd_threads_group *group = comm->backend_data;
    for (int r = 0; r < comm->size; r++) {
        if (r == comm->rank) continue;
        qd_threads_lane *lane = &group->shared->lanes[r];
        qd_threads_channel *channel = qd_threads_channel_of(comm, r, comm->rank);
        while ((atomic_load(&lane->left) < atomic_load(&group->lane->left) ||
                atomic_load(&channel->left) < atomic_load(&channel->consumed)) &&
               !world_failed(comm->world))
            sched_yield();
    }
    if (world_failed(comm->world)) qd_threads_wait_outside(comm);
}

static void destroy(qd_comm *comm)
{
    qd_threads_group *group = comm->backend_data;
    if (group->lane) {
        wait_left(comm);
        pthread_mutex_lock(&group->lane->lock);
        group->lane->world = NULL;
        pthread_mutex_unlock(&group->lane->lock);
    }
    group_free(comm);
}

const qd_comm_device_ops qd_comm_device_threads = {
    .name = "local",
    .create = create,
    .destroy = destroy,
    .submit = submit,
    .start = start,
    .poll = poll_op,
    .finish = finish,
    .late = late,
    .complete = complete,
};
