/* metrics.jsonl: one line per step, written when the step is done. The file also locks the run
 * folder. */
#ifndef QD_TRAIN_RUN_METRICS_H
#define QD_TRAIN_RUN_METRICS_H

#include <quadrille/train.h>
#include <stdatomic.h>

typedef struct qd_metrics qd_metrics;

/* QD_BUSY for a file that another run is writing now; a file that does not exist is free. Changes
 * nothing. */
qd_status qd_metrics_check_free(const char *path);
/* The same, but waits up to `seconds` for the other run to end, and logs that: ranks of a killed
 * run hold the file until the kernel has freed all of their memory. A signal in `stop` (may be
 * NULL) ends the wait (QD_INTERRUPTED). */
qd_status qd_metrics_wait_free(const char *path, double seconds, const atomic_int *stop);
/* Opens the file and keeps its lines up to `step` from an earlier part of the run (0: none, a new
 * file). The file is locked until it is closed, where the file system supports locks: two runs
 * never write the same one. */
qd_status qd_metrics_create(const char *path, int64_t step, qd_metrics **metrics);
/* The file ends after the line of `step` again, as for a run that resumes from there. */
qd_status qd_metrics_rewind(qd_metrics *metrics, int64_t step);
/* Writes one line. If the disk is full, fails or cannot be written now, the whole line is omitted
 * and training continues. *warning is NULL or, for the first omitted line, a message that is valid
 * until the next call. */
qd_status qd_metrics_write(qd_metrics *metrics, const qd_train_step *step, const char **warning);
/* The lines so far are on the disk when this returns: a checkpoint is about to refer to them.
 * Returns NULL or a warning (the first time that the disk refuses), as above. NULL is legal. */
const char *qd_metrics_sync(qd_metrics *metrics);
/* How many were left out, in words; NULL: none, or no metrics. */
const char *qd_metrics_lost(qd_metrics *metrics);
void qd_metrics_destroy(qd_metrics *metrics); /* NULL is legal */
#endif
