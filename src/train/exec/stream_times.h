/* When the communication of a traced step ran on a device, whose streams run behind the host: from
 * events on the communication stream. A wait inside a module is a piece of the compute stream: for
 * so long it stood still. */
#ifndef QD_TRAIN_EXEC_STREAM_TIMES_H
#define QD_TRAIN_EXEC_STREAM_TIMES_H

#include "device/timeline.h"
#include "parallel/exchange.h"
#include "train/exec/trace.h"

typedef struct qd_watch qd_watch;

/* *watch becomes NULL where there is nothing to watch: one rank, host memory, or communication on
 * streams of its own (NCCL). Pieces of the compute stream's timeline get numbers from first_id on;
 * those below are the caller's. */
qd_status qd_watch_create(qd_bound *bound, qd_exchanger *exchanger, qd_timeline *compute, int first_id, qd_watch **watch);
void qd_watch_destroy(qd_watch *watch); /* NULL is legal, also below */

qd_status qd_watch_start(qd_watch *watch);                                        /* a step begins, whose compute timeline has started */
void qd_watch_action(qd_watch *watch, int action);                                /* what is started from now on belongs to it */
void qd_watch_stood(qd_watch *watch, int id, double begin);                       /* a piece of the compute stream, id >= first_id */
/* reads the communication stream; before the compute stream */
qd_status qd_watch_collect(qd_watch *watch);
void qd_watch_tell(qd_watch *watch, qd_trace *trace, int64_t step);               /* and forgets; after it */
void qd_watch_stop(qd_watch *watch);                                              /* later steps are not watched */
#endif
