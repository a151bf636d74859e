/* NCCL communicators: creation without blocking, a thread that watches running operations, abort
 * and destruction. */
#include "comm/nccl/nccl_impl.h"
#include "comm/work.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WATCH_SECONDS 0.05

qd_status qd_nccl_fail(const char *call, const qd_comm *comm, ncclResult_t result)
{
    return QD_FAIL(QD_SYSTEM, "NCCL, group %s: %s: %s (%s)", comm->name, call, ncclGetErrorString(result), ncclGetLastError(NULL));
}

qd_status qd_nccl_cuda_fail(const char *call, const qd_comm *comm, cudaError_t error)
{
    return QD_FAIL(QD_SYSTEM, "NCCL, group %s: %s: %s", comm->name, call, cudaGetErrorString(error));
}

bool qd_nccl_version(char *text, size_t size)
{
    int version = 0;
    if (ncclGetVersion(&version) != ncclSuccess) return false; /* also if NCCL cannot be loaded */
    snprintf(text, size, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return true;
}

qd_status qd_nccl_lane_begin(const qd_comm *comm, qd_nccl_lane *lane, int ranks, int rank, const ncclUniqueId *id)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    QD_TRY(qd_device_make_current(comm->device));
    pthread_mutex_lock(&lane->lock);
    cudaError_t error = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&lane->watch, cudaEventDisableTiming);
    ncclResult_t result = ncclSuccess;
    if (error == cudaSuccess) result = ncclCommInitRankConfig(&lane->comm, ranks, *id, rank, &config);
    pthread_mutex_unlock(&lane->lock);
    if (error != cudaSuccess) return qd_nccl_cuda_fail("cudaStreamCreate", comm, error);
    if (result != ncclSuccess && result != ncclInProgress) return qd_nccl_fail("ncclCommInitRankConfig", comm, result);
    return QD_OK;
}

qd_status qd_nccl_lane_poll(const qd_comm *comm, qd_nccl_lane *lane, bool *ready)
{
    ncclResult_t state = ncclInternalError, result = ncclSuccess;
    *ready = false;
    pthread_mutex_lock(&lane->lock);
    bool aborted = lane->aborted;
    if (!aborted) result = ncclCommGetAsyncError(lane->comm, &state);
    pthread_mutex_unlock(&lane->lock);
    if (aborted) return QD_OK; /* the world has failed; the core sees that next */
    if (result != ncclSuccess) return qd_nccl_fail("ncclCommGetAsyncError", comm, result);
    if (state != ncclSuccess && state != ncclInProgress) return qd_nccl_fail("an operation", comm, state);
    *ready = state == ncclSuccess;
    return QD_OK;
}

qd_status qd_nccl_lane_watch(const qd_comm *comm, qd_nccl_lane *lane)
{
    if (lane->watched) return QD_OK; /* an earlier operation is still being watched */
    QD_NCCL_CUDA_TRY(comm, cudaEventRecord(lane->watch, lane->stream));
    lane->watched = true;
    lane->watched_since = qd_clock_now();
    return QD_OK;
}

static void lane_abort(qd_nccl_lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    if (lane->comm && !lane->aborted) ncclCommAbort(lane->comm);
    lane->comm = NULL;
    lane->aborted = true;
    pthread_mutex_unlock(&lane->lock);
}

/* Waits, up to the deadline, for NCCL to finish pending work. */
static void lane_end(const qd_comm *comm, qd_nccl_lane *lane)
{
    double seen = qd_clock_now(), until = seen + comm->world->config.deadline_seconds;
    if (lane->comm && lane->made && atomic_load(&comm->world->failed) == QD_OK) {
        ncclResult_t state = ncclCommFinalize(lane->comm);
        while ((state == ncclSuccess || state == ncclInProgress) && qd_clock_now() < until) {
            if (ncclCommGetAsyncError(lane->comm, &state) != ncclSuccess || state != ncclInProgress) break;
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
            until += qd_clock_lost(&seen, qd_clock_now());
        }
        if (state == ncclSuccess && ncclCommDestroy(lane->comm) == ncclSuccess) lane->comm = NULL;
    }
    lane_abort(lane);
    if (lane->watch) cudaEventDestroy(lane->watch);
    if (lane->stream) cudaStreamDestroy(lane->stream);
    pthread_mutex_destroy(&lane->lock);
}

/* False when the lane's oldest operation has not ended within the deadline. lost: seconds in which
 * this process was suspended. */
static bool lane_moves(const qd_comm *comm, qd_nccl_lane *lane, double lost)
{
    pthread_mutex_lock(&lane->lock);
    lane->watched_since += lost;
    if (lane->watched && cudaEventQuery(lane->watch) != cudaErrorNotReady) lane->watched = false;
    bool late = lane->watched && qd_clock_now() - lane->watched_since > comm->world->config.deadline_seconds;
    pthread_mutex_unlock(&lane->lock);
    return !late;
}

static qd_nccl_lane *lane_at(qd_nccl_group *group, int index)
{
    int n = group->comm->size;
    return index == 0 ? &group->collectives : index <= n ? &group->sends[index - 1] : &group->receives[index - 1 - n];
}

static void *watch_main(void *context)
{
    qd_nccl_group *group = context;
    qd_comm *comm = group->comm;
    int lanes = 1 + 2 * comm->size;
    double seen = qd_clock_now();
    qd_device_make_current(comm->device);
    pthread_mutex_lock(&group->watch_lock);
    while (!group->stop) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)(WATCH_SECONDS * 1e9);
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&group->watch_change, &group->watch_lock, &until);
        bool moves = true;
        double lost = qd_clock_lost(&seen, qd_clock_now());
        for (int i = 0; i < lanes && moves; i++) moves = lane_moves(comm, lane_at(group, i), lost);
        if (!moves)
            qd_world_fail(comm->world, QD_FAIL(QD_TIMEOUT, "an operation of group %s has not ended on the GPU of rank %d within "
                                                           "%g s: a peer's GPU or link does not answer",
                                               comm->name, comm->world->rank, comm->world->config.deadline_seconds));
        if (qd_world_check(comm->world) == QD_OK) continue;
        for (int i = 0; i < lanes; i++) lane_abort(lane_at(group, i));
        break;
    }
    pthread_mutex_unlock(&group->watch_lock);
    return NULL;
}

static qd_status make(qd_comm *comm, qd_nccl_group *group)
{
    ncclUniqueId id;
    int32_t state = 0;
    QD_TRY(qd_comm_split(comm->host, 0, comm->rank, comm->name, &group->match));
    if (comm->rank == 0) state = (int32_t)ncclGetUniqueId(&id);
    QD_TRY(qd_comm_broadcast(comm->host, &state, 1, QD_I32, 0, NULL));
    if (state != (int32_t)ncclSuccess) return qd_nccl_fail("ncclGetUniqueId on the group's first rank", comm, (ncclResult_t)state);
    QD_TRY(qd_comm_broadcast(comm->host, &id, sizeof id, QD_U8, 0, NULL));
    QD_TRY(qd_nccl_lane_begin(comm, &group->collectives, comm->size, comm->rank, &id));
    double seen = qd_clock_now(), until = seen + comm->world->config.deadline_seconds;
    bool ready = false;
    while (!ready) {
        QD_TRY(qd_nccl_lane_poll(comm, &group->collectives, &ready));
        QD_TRY(qd_world_check(comm->world));
        until += qd_clock_lost(&seen, qd_clock_now());
        if (!ready && qd_clock_now() > until)
            return QD_FAIL(QD_TIMEOUT, "NCCL did not connect the %d ranks of group %s within %g s (set NCCL_DEBUG=INFO for details)",
                           comm->size, comm->name, comm->world->config.deadline_seconds);
        if (!ready) nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    group->collectives.made = true;
    if (pthread_create(&group->watcher, NULL, watch_main, group) != 0)
        return QD_FAIL(QD_SYSTEM, "group %s: cannot start the thread that watches NCCL", comm->name);
    group->watching = true;
    return QD_OK;
}

qd_status qd_nccl_group_create(qd_comm *comm)
{
    if (strcmp(qd_device_get_caps(comm->device)->name, "cuda") != 0)
        return QD_FAIL(QD_USAGE, "group %s: NCCL moves the memory of GPUs, and this device is %s", comm->name,
                       qd_device_get_caps(comm->device)->name);
    QD_TRY(qd_nccl_load());
    size_t n = (size_t)comm->size;
    qd_nccl_group *group = calloc(1, sizeof *group);
    qd_nccl_lane *lanes = calloc(2 * n, sizeof *lanes);
    if (!group || !lanes) {
        free(group);
        free(lanes);
        return QD_FAIL(QD_NO_MEMORY, "no memory for group %s", comm->name);
    }
    group->comm = comm;
    group->sends = lanes;
    group->receives = lanes + n;
    pthread_mutex_init(&group->lock, NULL);
    pthread_mutex_init(&group->watch_lock, NULL);
    pthread_cond_init(&group->watch_change, NULL);
    for (int i = 0; i < 1 + 2 * comm->size; i++) pthread_mutex_init(&lane_at(group, i)->lock, NULL);
    comm->backend_data = group;
    qd_status status = make(comm, group);
    if (status != QD_OK) qd_nccl_group_destroy(comm);
    return status;
}

void qd_nccl_group_destroy(qd_comm *comm)
{
    qd_nccl_group *group = comm->backend_data;
    qd_device_make_current(comm->device);
    if (group->watching) {
        pthread_mutex_lock(&group->watch_lock);
        group->stop = true;
        pthread_cond_signal(&group->watch_change);
        pthread_mutex_unlock(&group->watch_lock);
        pthread_join(group->watcher, NULL);
    }
    for (int i = 0; i < 1 + 2 * comm->size; i++) lane_end(comm, lane_at(group, i));
    while (group->free) {
        qd_nccl_flight *flight = group->free;
        group->free = flight->next;
        cudaEventDestroy(flight->ready);
        cudaEventDestroy(flight->over);
        free(flight);
    }
    qd_comm_destroy(group->match);
    pthread_mutex_destroy(&group->lock);
    pthread_mutex_destroy(&group->watch_lock);
    pthread_cond_destroy(&group->watch_change);
    free(group->sends);
    free(group);
    comm->backend_data = NULL;
}
