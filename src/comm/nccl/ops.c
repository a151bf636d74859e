/* The table that the core calls: an operation is matched on the host, enqueued on its own stream,
 * and ordered with the compute stream. */
#include "comm/nccl/nccl_impl.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(qd_nccl_state) <= QD_TRANSFER_STATE_BYTES, "the state must fit into the operation");

static bool is_message(const qd_transfer *op)
{
    return op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
}

static cudaStream_t compute_stream(const qd_comm *comm)
{
    return qd_stream_native(qd_device_compute_stream(comm->device));
}

static qd_status flight_take(qd_comm *comm, qd_nccl_flight **out)
{
    qd_nccl_group *group = comm->backend_data;
    pthread_mutex_lock(&group->lock);
    qd_nccl_flight *flight = group->free;
    if (flight) group->free = flight->next;
    pthread_mutex_unlock(&group->lock);
    *out = flight;
    if (flight) return QD_OK;
    flight = calloc(1, sizeof *flight);
    if (!flight) return QD_FAIL(QD_NO_MEMORY, "no memory for an operation of group %s", comm->name);
    cudaError_t error = cudaEventCreateWithFlags(&flight->ready, cudaEventDisableTiming);
    if (error == cudaSuccess) {
        error = cudaEventCreateWithFlags(&flight->over, cudaEventDisableTiming);
        if (error != cudaSuccess) cudaEventDestroy(flight->ready);
    }
    if (error != cudaSuccess) {
        free(flight);
        return qd_nccl_cuda_fail("cudaEventCreate", comm, error);
    }
    *out = flight;
    return QD_OK;
}

static qd_status submit(qd_transfer *op)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    memset(s, 0, sizeof *s);
    QD_TRY(qd_device_make_current(op->comm->device));
    QD_TRY(flight_take(op->comm, &s->flight));
    QD_NCCL_CUDA_TRY(op->comm, cudaEventRecord(s->flight->ready, compute_stream(op->comm)));
    return QD_OK;
}

static qd_status complete(qd_transfer *op, bool good)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    qd_nccl_group *group = op->comm->backend_data;
    if (!s->flight) return QD_OK;
    cudaError_t error = cudaSuccess;
    if (good) error = cudaStreamWaitEvent(compute_stream(op->comm), s->flight->over, 0);
    pthread_mutex_lock(&group->lock);
    s->flight->next = group->free;
    group->free = s->flight;
    pthread_mutex_unlock(&group->lock);
    return error == cudaSuccess ? QD_OK : qd_nccl_cuda_fail("cudaStreamWaitEvent", op->comm, error);
}

static qd_status start_collective(qd_transfer *op, qd_nccl_group *group)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    int n = op->comm->size, me = op->comm->rank;
    s->lane = &group->collectives;
    s->hellos = calloc((size_t)n, sizeof *s->hellos);
    s->counts = calloc((size_t)n, sizeof *s->counts);
    if (!s->hellos || !s->counts) return QD_FAIL(QD_NO_MEMORY, "no memory for an operation of group %s", op->comm->name);
    s->hellos[me].fingerprint = op->fingerprint;
    QD_TRY(qd_comm_all_gather(group->match, &s->hellos[me], s->hellos, n * (int64_t)sizeof *s->hellos, QD_U8, &s->work[0]));
    return QD_OK;
}

/* Both sides send a hello. The sender of a pair's first message chooses the id of the communicator
 * that they will create. */
static qd_status start_message(qd_transfer *op, qd_nccl_group *group)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    bool sends = op->request.kind == QD_COLL_SEND;
    int peer = op->request.root;
    s->lane = sends ? &group->sends[peer] : &group->receives[peer];
    s->hellos = calloc(2, sizeof *s->hellos);
    if (!s->hellos) return QD_FAIL(QD_NO_MEMORY, "no memory for a message of group %s", op->comm->name);
    s->hellos[0].fingerprint = op->fingerprint;
    if (sends && !s->lane->comm) {
        ncclResult_t result = ncclGetUniqueId(&s->hellos[0].id);
        if (result != ncclSuccess) return qd_nccl_fail("ncclGetUniqueId", op->comm, result);
    }
    QD_TRY(qd_comm_send(group->match, &s->hellos[0], sizeof *s->hellos, QD_U8, peer, &s->work[0]));
    return qd_comm_recv(group->match, &s->hellos[1], sizeof *s->hellos, QD_U8, peer, &s->work[1]);
}

static qd_status start(qd_transfer *op)
{
    qd_nccl_group *group = op->comm->backend_data;
    return is_message(op) ? start_message(op, group) : start_collective(op, group);
}

/* Collects finished exchanges. *all is false while one is pending. */
static qd_status exchanged(qd_transfer *op, bool *all)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    *all = true;
    for (int i = 0; i < 2; i++) {
        if (!s->work[i]) continue;
        if (!qd_work_done(s->work[i])) {
            *all = false;
            continue;
        }
        qd_work *work = s->work[i];
        s->work[i] = NULL;
        QD_TRY(qd_work_wait(work));
    }
    return QD_OK;
}

static qd_status check_peer(const qd_transfer *op, int peer, const qd_fingerprint *theirs)
{
    char place[QD_COMM_PLACE_BYTES];
    qd_world *world = op->comm->world;
    qd_comm_place_get(&world->backend->board(world, op->comm->world_ranks[peer])->place, place);
    return qd_transfer_check(op, peer, theirs, place);
}

/* All have called: compares the calls. An all-to-all then exchanges its counts. */
static qd_status match_collective(qd_transfer *op, bool *matched)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    qd_nccl_group *group = op->comm->backend_data;
    bool pairs = op->request.kind == QD_COLL_ALL_TO_ALL;
    if (s->hellos) {
        for (int p = 0; p < op->comm->size; p++)
            if (p != op->comm->rank) QD_TRY(check_peer(op, p, &s->hellos[p].fingerprint));
        free(s->hellos);
        s->hellos = NULL;
        *matched = !pairs;
        return pairs ? qd_comm_all_to_all(group->match, op->request.in_counts, s->counts, 1, QD_I64, &s->work[0]) : QD_OK;
    }
    for (int p = 0; p < op->comm->size; p++)
        QD_TRY(qd_transfer_check_pair(op, p, s->counts[p], op->request.out_counts[p], ""));
    *matched = true;
    return QD_OK;
}

/* Compares the calls. For the first message of a pair, a communicator of two is created; the sender
 * is its rank 0. */
static qd_status match_message(qd_transfer *op, bool *matched)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    bool sends = op->request.kind == QD_COLL_SEND, ready = false;
    if (s->hellos) {
        QD_TRY(check_peer(op, op->request.root, &s->hellos[1].fingerprint));
        if (!s->lane->comm) QD_TRY(qd_nccl_lane_begin(op->comm, s->lane, 2, sends ? 0 : 1, &s->hellos[sends ? 0 : 1].id));
        free(s->hellos);
        s->hellos = NULL;
    }
    if (!s->lane->made) {
        QD_TRY(qd_nccl_lane_poll(op->comm, s->lane, &ready));
        s->lane->made = ready;
    }
    *matched = s->lane->made;
    return QD_OK;
}

static qd_status enqueue(qd_transfer *op)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    QD_NCCL_CUDA_TRY(op->comm, cudaStreamWaitEvent(s->lane->stream, s->flight->ready, 0));
    return qd_nccl_call(op);
}

static qd_status end(qd_transfer *op)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    QD_NCCL_CUDA_TRY(op->comm, cudaEventRecord(s->flight->over, s->lane->stream));
    return qd_nccl_lane_watch(op->comm, s->lane);
}

/* Calls `step` under the lane's lock, unless the lane was aborted, which the core sees next. */
static qd_status guarded(qd_transfer *op, qd_status (*step)(qd_transfer *), bool *did)
{
    qd_nccl_lane *lane = qd_nccl_state_of(op)->lane;
    qd_status status = QD_OK;
    QD_TRY(qd_device_make_current(op->comm->device));
    pthread_mutex_lock(&lane->lock);
    *did = !lane->aborted;
    if (*did) status = step(op);
    pthread_mutex_unlock(&lane->lock);
    return status;
}

static qd_status poll_op(qd_transfer *op, bool *done, bool *moved)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    bool all = false, ready = false;
    if (!s->matched) {
        QD_TRY(exchanged(op, &all));
        if (!all) return QD_OK;
        QD_TRY(is_message(op) ? match_message(op, &s->matched) : match_collective(op, &s->matched));
        if (!s->matched) return QD_OK;
        *moved = true;
    }
    if (!s->enqueued) {
        QD_TRY(guarded(op, enqueue, &s->enqueued));
        if (!s->enqueued) return QD_OK;
    }
    QD_TRY(qd_nccl_lane_poll(op->comm, s->lane, &ready));
    if (!ready) return QD_OK;
    QD_TRY(guarded(op, end, done));
    if (*done) *moved = true;
    return QD_OK;
}

static void finish(qd_transfer *op)
{
    qd_nccl_state *s = qd_nccl_state_of(op);
    for (int i = 0; i < 2; i++) /* only after a failure, which ends them too */
        if (s->work[i]) qd_work_wait(s->work[i]);
    free(s->hellos);
    free(s->counts);
}

/* The exchange over the host communicator finds and reports the late rank. */
static bool late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    (void)op;
    (void)peer;
    (void)report;
    return false;
}

const qd_comm_device_ops qd_comm_device_nccl = {
    .name = "nccl",
    .create = qd_nccl_group_create,
    .destroy = qd_nccl_group_destroy,
    .submit = submit,
    .start = start,
    .poll = poll_op,
    .finish = finish,
    .late = late,
    .complete = complete,
};
