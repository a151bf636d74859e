/* Which failure of a run with many ranks is reported: the one that came first in cause, not its
 * echo on another rank. */
#ifndef QD_TRAIN_RANKS_FAILURE_H
#define QD_TRAIN_RANKS_FAILURE_H

#include "base/error.h"

#include <stdbool.h>

typedef struct qd_failure {
    qd_status status; /* QD_OK: none yet */
    char message[QD_ERROR_MESSAGE_BYTES], trace[QD_ERROR_TRACE_BYTES];
} qd_failure;

/* Keeps what came first; a cause replaces an echo (QD_REMOTE, or a status whose message another
 * rank has). */
void qd_failure_add(qd_failure *failure, qd_status status, const char *message, const char *trace);
/* The same with the record of this thread. */
void qd_failure_add_own(qd_failure *failure, qd_status status);
/* Makes it the record of this thread and returns its status. */
qd_status qd_failure_raise(const qd_failure *failure);

/* A signal ended the run on all ranks after the same step: no other rank needs to know. */
bool qd_ended_in_order(qd_status status);
#endif
