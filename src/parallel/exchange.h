/* Executes the communicating ops of a program on the bound communicators: the implementation of a
 * frame's qd_exchange. */
#ifndef QD_PARALLEL_EXCHANGE_H
#define QD_PARALLEL_EXCHANGE_H

#include "device/timeline.h"
#include "nn/nn.h"
#include "parallel/bind.h"

typedef struct qd_exchanger qd_exchanger;

/* *exchanger becomes NULL when no op of the program communicates. */
qd_status qd_exchanger_create(qd_bound *bound, qd_exchanger **exchanger);
void qd_exchanger_destroy(qd_exchanger *exchanger); /* NULL is legal; nothing may be in flight */
/* statistics of the dispatch to experts (dispatch.h); NULL for NULL */
const struct qd_dispatcher *qd_exchanger_dispatcher(const qd_exchanger *exchanger);
const qd_exchange *qd_exchanger_view(qd_exchanger *exchanger); /* NULL for NULL */
/* Called when an exchange is complete: `index` of the op in its list, when it ran, and since when
 * the rank waited for it, in seconds of qd_clock_now(). For host memory only: on other devices an
 * exchange ends later than its calls. NULL: no observer. */
typedef void (*qd_exchange_observer)(void *context, int index, double begin, double end, double waited);
void qd_exchanger_observe(qd_exchanger *exchanger, qd_exchange_observer observer, void *context); /* exchanger NULL is legal */
/* Devices: from now on exchanges are recorded on the timeline of the communication stream with ids
 * first_id + index, and waits for them with the same ids on that of the compute stream. NULL
 * timelines: stop recording. */
typedef struct qd_exchange_watch {
    qd_timeline *compute, *comm;
    int first_id;
} qd_exchange_watch;
void qd_exchanger_watch(qd_exchanger *exchanger, qd_exchange_watch watch); /* exchanger NULL is legal */
/* After a failure: waits for exchanges that were started and never waited for. The communicators
 * have been aborted. NULL is legal. */
void qd_exchanger_drain(qd_exchanger *exchanger);
#endif
