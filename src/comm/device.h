/* Communicators whose buffers are device memory.
 *
 * Every operation of <quadrille/comm.h> works on such a communicator; buffers are device addresses
 * of the rank's device. Matching, deadlines, failure and statistics are the same. Operations are
 * ordered on streams, and the host does not wait for the device:
 *
 *   - An operation reads its buffers after the work that was on the caller's compute stream at the
 *     call.
 *   - Data moves on the rank's communication stream.
 *   - A blocking call, or qd_work_wait() of an asynchronous one, returns when all ranks have called
 *     and everything is enqueued. Work put on the compute stream from then on runs after the
 *     operation. Until the call or the wait has returned, do not enqueue anything that touches the
 *     buffers. To read the result on the host, wait for the compute stream.
 *   - When a rank's operation has completed on its stream, its peers have read its buffers, so they
 *     may be overwritten.
 *   - qd_work_wait_timed() returns the times of enqueueing.
 *   - qd_comm_barrier() orders the streams: work after it, on any rank, runs after the work before
 *     it on all ranks.
 *   - Operations of different communicators of one rank share its communication stream and run in
 *     the order in which they are enqueued.
 *
 * Backends: "local" is for ranks that are threads of one process, on one device or on several that
 * reach each other's memory. Ranks meet on the host and events order their streams; no kernel waits
 * for another one, so any number of ranks may share a device. Sums follow the tree of
 * <quadrille/comm.h> and are bit-identical to the CPU's. "nccl" is for one rank per GPU and sums in
 * NCCL's own order. */
#ifndef QD_COMM_DEVICE_H
#define QD_COMM_DEVICE_H

#include "device/device.h"
#include "device/timeline.h"

#include <quadrille/comm.h>

/* `backend` NULL: "local" where all ranks are threads of one process, else "nccl". Collective over
 * `host`, which must outlive *comm (matching and splitting use it) and remains the communicator for
 * host memory. The device must outlive *comm. Groups split from *comm are on the same device. */
qd_status qd_comm_on_device(qd_comm *host, qd_device *device, const char *backend, qd_comm **comm);

/* Records operations of `comm` that start from now on as pieces `id` of a timeline of the rank's
 * communication stream. A piece is the time in which this rank's share of the data moves; for a
 * send, until the receiver has it. Returns false, and records nothing, where the backend has its
 * own streams (nccl). */
bool qd_comm_watch(qd_comm *comm, qd_timeline *timeline, int id);

/* "2.28.3"; false where NCCL is not built in or cannot be loaded. */
bool qd_nccl_version(char *text, size_t size);

#endif
