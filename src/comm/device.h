/* Communicators whose buffers are device memory.
 *
 * Every operation of <quadrille/comm.h> works on such a communicator; the addresses it is given are
 * device addresses of the rank's device. Matching, deadlines, failure and statistics are the same.
 * What differs is time: operations are ordered on streams, and the host does not wait for the
 * device.
 *
 *   - The operation's buffers are ready when the work that the caller's compute stream held at the
 *     call has run.
 *   - Data moves on the rank's communication stream.
 *   - A blocking call, and qd_work_wait() of an asynchronous one, returns when all ranks have come
 *     and everything is enqueued; work that is put on the compute stream from then on runs after
 *     the operation. Until the call or the wait has returned, nothing that touches the buffers may
 *     be enqueued. Whoever wants to see the result on the host waits for the compute stream.
 *   - That a rank's operation is over means that its peers have read its buffers, so it may
 *     overwrite them.
 *   - Times of qd_work_wait_timed() are those of enqueuing.
 *   - qd_comm_barrier() orders the streams: work behind it, on any rank, runs after the work before
 *     it, on all ranks.
 *   - Operations of different communicators of one rank share its communication stream: one that is
 *     enqueued later runs later.
 *
 * Backends: "local" for ranks that are threads of one process, on one device or several that reach
 * each other. Ranks meet on the host, and events order their streams; no kernel ever waits for
 * another one, so any number of ranks may share a device. Sums follow the tree of
 * <quadrille/comm.h>: the bits are those of the CPU. "nccl": one rank per GPU; sums in NCCL's own
 * order. */
#ifndef QD_COMM_DEVICE_H
#define QD_COMM_DEVICE_H

#include "device/device.h"
#include "device/timeline.h"

#include <quadrille/comm.h>

/* `backend` NULL: "local" where all ranks are threads of one process, else "nccl". Collective over
 * `host`, which must outlive *comm (for messages and splitting) and remains the way to exchange
 * host memory. The device must outlive *comm. Groups split from *comm are on the same device. */
qd_status qd_comm_on_device(qd_comm *host, qd_device *device, const char *backend, qd_comm **comm);

/* Operations of `comm` that start from now on become pieces `id` of a timeline of the rank's
 * communication stream: the time in which this rank's share of the data moves; of a send, until the
 * receiver has it. False where the backend has streams of its own (nccl): then there are no
 * pieces. */
bool qd_comm_watch(qd_comm *comm, qd_timeline *timeline, int id);

/* "2.28.3"; false where NCCL is not built in or cannot be loaded. */
bool qd_nccl_version(char *text, size_t size);

#endif
