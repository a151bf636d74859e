/* metrics.jsonl: one line per step, written when the step has ended. */
#ifndef QD_TRAIN_RUN_METRICS_H
#define QD_TRAIN_RUN_METRICS_H

#include <quadrille/train.h>
#include <stdatomic.h>

typedef struct qd_metrics qd_metrics;

/* QD_BUSY for a file that another run is writing now; one that is not there is free. Changes
 * nothing. */
qd_status qd_metrics_check_free(const char *path);
/* The same, but waits up to `seconds` for the other run to end, and logs that it does: ranks of a
 * run that was killed hold the file until the system has taken all of their memory back. stop: a
 * signal that was asked for ends the wait (QD_INTERRUPTED); NULL is legal. */
qd_status qd_metrics_wait_free(const char *path, double seconds, const atomic_int *stop);
/* Starts a file with the lines of an earlier part of the run: those up to `step` (0: none, the file
 * is new). The file is locked until it is closed, where the file system knows locks: two runs never
 * write the same one. */
qd_status qd_metrics_create(const char *path, int64_t step, qd_metrics **metrics);
/* The line is in the file when this returns, or, on a disk that is full, fails or cannot be written
 * for now, left out as a whole: training continues without it. *remark is NULL or a warning (of the
 * first that is left out) that lives until the next call. */
qd_status qd_metrics_write(qd_metrics *metrics, const qd_train_step *step, const char **remark);
/* The lines so far are on the disk when this returns: a checkpoint is about to refer to them.
 * Returns NULL or a warning (the first time that the disk refuses), as above. NULL is legal. */
const char *qd_metrics_sync(qd_metrics *metrics);
/* How many were left out, in words; NULL: none, or no metrics. */
const char *qd_metrics_lost(qd_metrics *metrics);
void qd_metrics_destroy(qd_metrics *metrics); /* NULL is legal */
#endif
