/* The figures of the steps in the formats of other programs: TensorBoard event files
 * (run.tensorboard) and CSV (run.csv), next to metrics.jsonl. */
#ifndef QD_TRAIN_RECORD_RECORDER_H
#define QD_TRAIN_RECORD_RECORDER_H

#include "spec/config/config.h"

#include <quadrille/train.h>

typedef struct qd_recorder qd_recorder;

/* Opens what the configuration asks for, in run.dir. The lines of steps up to `step` stay, those of
 * later steps are dropped. */
qd_status qd_recorder_create(const qd_config *config, int64_t step, qd_recorder **recorder);
/* Continues after `step`, as for a run that resumes from there. */
qd_status qd_recorder_rewind(qd_recorder *recorder, int64_t step);
/* Adds a step. A disk that is full or fails loses steps, not the run. Returns NULL or, the first
 * time, a warning that is valid until the next call. */
const char *qd_recorder_write(qd_recorder *recorder, const qd_train_step *step);
void qd_recorder_destroy(qd_recorder *recorder); /* NULL is legal */

/* Removes the files of an earlier run in run.dir. */
qd_status qd_recorder_clear(const qd_config *config);
#endif
