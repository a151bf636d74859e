/* Carries out the ops of a program that communicate, on the bound communicators: what a frame's
 * exchange points to. */
#ifndef QD_PARALLEL_EXCHANGE_H
#define QD_PARALLEL_EXCHANGE_H

#include "device/timeline.h"
#include "nn/nn.h"
#include "parallel/bind.h"

typedef struct qd_exchanger qd_exchanger;

/* *exchanger becomes NULL when no op of the program communicates. */
qd_status qd_exchanger_create(qd_bound *bound, qd_exchanger **exchanger);
void qd_exchanger_destroy(qd_exchanger *exchanger); /* NULL is legal; nothing may be under way */
/* what was sent to experts (dispatch.h); NULL for NULL */
const struct qd_dispatcher *qd_exchanger_dispatcher(const qd_exchanger *exchanger);
const qd_exchange *qd_exchanger_view(qd_exchanger *exchanger); /* NULL for NULL */
/* Who is told when an exchange has ended: `index` of the op in its list, when it ran, and from when
 * on the rank waited for it, all in seconds of qd_clock_now(). For host memory: on other devices an
 * exchange ends later than its calls. NULL: nobody. */
typedef void (*qd_exchange_observer)(void *context, int index, double begin, double end, double waited);
void qd_exchanger_observe(qd_exchanger *exchanger, qd_exchange_observer observer, void *context); /* exchanger NULL is legal */
/* Devices: exchanges from now on become pieces first_id + index of the communication stream's
 * timeline, and waits for them pieces of the same number of the compute stream's. NULL timelines:
 * no more. */
typedef struct qd_exchange_watch {
    qd_timeline *compute, *comm;
    int first_id;
} qd_exchange_watch;
void qd_exchanger_watch(qd_exchanger *exchanger, qd_exchange_watch watch); /* exchanger NULL is legal */
/* After a failure: waits for what was started and never waited for. The communicators have been
 * aborted. NULL is legal. */
void qd_exchanger_drain(qd_exchanger *exchanger);
#endif
