/* metrics.jsonl: one line per step, written when the step has ended. */
#ifndef QD_TRAIN_METRICS_H
#define QD_TRAIN_METRICS_H

#include <quadrille/train.h>

typedef struct qd_metrics qd_metrics;

/* Refuses (QD_USAGE) a file that another run is writing now; one that is not there is free. Changes nothing. */
qd_status qd_metrics_check_free(const char *path);
/* Starts a file with the lines of an earlier part of the run: those up to `step` (0: none, the file is new). The
 * file is locked until it is closed, where the file system knows locks: two runs never write the same one. */
qd_status qd_metrics_create(const char *path, int64_t step, qd_metrics **metrics);
/* The line is in the file when this returns, or, on a full disk, left out as a whole: training goes on without. *remark is NULL or
 * something to tell (the first that is left out); it lives until the next call. */
qd_status qd_metrics_write(qd_metrics *metrics, const qd_train_step *step, const char **remark);
/* How many were left out, in words; NULL: none, or no metrics. */
const char *qd_metrics_lost(qd_metrics *metrics);
void qd_metrics_destroy(qd_metrics *metrics); /* NULL is legal */
#endif
