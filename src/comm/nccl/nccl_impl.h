/* Internal to src/comm/nccl: the state of NCCL communicators and operations. README.md explains the
 * design. */
#ifndef QD_COMM_NCCL_NCCL_IMPL_H
#define QD_COMM_NCCL_NCCL_IMPL_H

#include "comm/comm_impl.h"
#include "comm/device.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

/* One NCCL communicator and its stream: for a group's collectives, or for the messages of a pair in
 * one direction. */
typedef struct qd_nccl_lane {
    pthread_mutex_t lock; /* guards everything below and every NCCL call: the watching thread may abort at any time */
    ncclComm_t comm;      /* NULL before it is created and after an abort */
    cudaStream_t stream;
    bool made;            /* creation is complete; until then it is polled */
    bool aborted;
    bool watched;         /* event `watch` follows an operation that is not known to have ended */
    cudaEvent_t watch;
    double watched_since;
} qd_nccl_lane;

/* Events of one operation of this rank. */
typedef struct qd_nccl_flight {
    cudaEvent_t ready, over;
    struct qd_nccl_flight *next;
} qd_nccl_flight;

/* comm->backend_data */
typedef struct qd_nccl_group {
    qd_comm *comm;
    qd_comm *match; /* the same ranks, for host memory: exchanges fingerprints */
    qd_nccl_lane collectives, *sends, *receives; /* (size) each */
    pthread_mutex_t lock; /* guards the next */
    qd_nccl_flight *free;
    pthread_t watcher;
    bool watching;
    pthread_mutex_t watch_lock; /* guards the next two */
    pthread_cond_t watch_change;
    bool stop;
} qd_nccl_group;

/* What ranks exchange before NCCL is called. */
typedef struct qd_nccl_hello {
    qd_fingerprint fingerprint;
    ncclUniqueId id; /* first message of a pair: chosen by the sender */
} qd_nccl_hello;

typedef struct qd_nccl_state {
    qd_nccl_flight *flight;
    qd_nccl_lane *lane;
    qd_work *work[2];        /* exchanges over `match` */
    qd_nccl_hello *hellos;   /* collectives: (size); messages: mine, theirs */
    int64_t *counts;         /* all-to-all: elements that each rank sends to this one */
    bool matched, enqueued;
} qd_nccl_state;

static inline qd_nccl_state *qd_nccl_state_of(const qd_transfer *op)
{
    return (qd_nccl_state *)op->state;
}

/* Records a failure of NCCL or of the CUDA runtime. */
qd_status qd_nccl_fail(const char *call, const qd_comm *comm, ncclResult_t result);
qd_status qd_nccl_cuda_fail(const char *call, const qd_comm *comm, cudaError_t error);
#define QD_NCCL_CUDA_TRY(comm, call)                                                                        \
    do {                                                                                                    \
        cudaError_t qd_nccl_error = (call);                                                                 \
        if (qd_nccl_error != cudaSuccess) return qd_nccl_cuda_fail(#call, (comm), qd_nccl_error);           \
    } while (0)

/* library.c: QD_UNSUPPORTED, with the loader's reason, when NCCL cannot be loaded. */
qd_status qd_nccl_load(void);

/* group.c */
qd_status qd_nccl_group_create(qd_comm *comm);
void qd_nccl_group_destroy(qd_comm *comm);
/* Starts the creation of the lane's communicator of `ranks` ranks. */
qd_status qd_nccl_lane_begin(const qd_comm *comm, qd_nccl_lane *lane, int ranks, int rank, const ncclUniqueId *id);
/* *ready: NCCL has finished its last request on the host. */
qd_status qd_nccl_lane_poll(const qd_comm *comm, qd_nccl_lane *lane, bool *ready);
/* An operation has been enqueued on the lane: watch it. The caller holds the lock. */
qd_status qd_nccl_lane_watch(const qd_comm *comm, qd_nccl_lane *lane);

/* calls.c: passes the operation to NCCL. The caller holds the lane's lock. QD_OK also while NCCL
 * has not finished. */
qd_status qd_nccl_call(qd_transfer *op);

#endif
