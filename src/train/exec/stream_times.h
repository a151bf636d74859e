/* Times of the communication of a traced step on a device, whose streams run behind the host: taken
 * from events on the communication stream. A wait inside a module is a piece of the compute stream,
 * which is idle for that time. */
#ifndef QD_TRAIN_EXEC_STREAM_TIMES_H
#define QD_TRAIN_EXEC_STREAM_TIMES_H

#include "device/timeline.h"
#include "parallel/exchange.h"
#include "train/exec/trace.h"

typedef struct qd_watch qd_watch;

/* *watch becomes NULL where there is nothing to watch: one rank, host memory, or communication on
 * NCCL's own streams. Pieces of the compute timeline get ids from first_id on; lower ids belong to
 * the caller. */
qd_status qd_watch_create(qd_bound *bound, qd_exchanger *exchanger, qd_timeline *compute, int first_id, qd_watch **watch);
void qd_watch_destroy(qd_watch *watch); /* NULL is legal, also below */

qd_status qd_watch_start(qd_watch *watch);                  /* a step begins; its compute timeline has been started */
void qd_watch_action(qd_watch *watch, int action);          /* operations started from now on belong to `action` */
void qd_watch_stood(qd_watch *watch, int id, double begin); /* an idle piece of the compute stream, id >= first_id */
/* Reads the communication stream. Call it before the compute stream is read. */
qd_status qd_watch_collect(qd_watch *watch);
void qd_watch_tell(qd_watch *watch, qd_trace *trace, int64_t step); /* adds the times to the trace; after the compute stream is read */
void qd_watch_stop(qd_watch *watch);                        /* stops watching */
#endif
