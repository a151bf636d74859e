/* Validation while training: the loss on held-out text, computed between steps on the training
 * layout, and which step has had the lowest one. */
#ifndef QD_TRAIN_RECORD_VALIDATION_H
#define QD_TRAIN_RECORD_VALIDATION_H

#include "data/windows.h"
#include "train/exec/trainer.h"
#include "train/run/run_corpus.h"

typedef struct qd_validation {
    qd_data *text; /* data.eval_path; NULL: the held-out part of the training data is evaluated */
    qd_windows windows;
    double since;     /* seconds of steps since the last evaluation */
    double best_loss; /* lowest so far, */
    int64_t best;     /* and its step; -1: none */
} qd_validation;

typedef struct qd_validated {
    double loss; /* mean over the tokens; NaN: not finite */
    int64_t tokens;
    double seconds;
    double margin, accuracy; /* of pairs, whose number is `tokens` */
} qd_validated;

/* For a run that validates (qd_config_validates). Not collective. `corpus` must outlive it. */
qd_status qd_validation_open(const qd_config *config, const qd_run_corpus *corpus, qd_validation *validation);
void qd_validation_close(qd_validation *validation); /* also of one that is all zero */

/* The state after `step` as the lines of metrics.jsonl give it: the time since the last evaluation,
 * and the best one, which is the last that was the best then. A missing file gives that of a new
 * run. */
qd_status qd_validation_restore(const char *metrics, int64_t step, qd_validation *validation);

/* Whether an evaluation is due after `step`, whose time `since` includes already. */
bool qd_validation_due(const qd_validation *validation, const qd_config *config, int64_t step);

/* Collective over the trainer's world: evaluates the present weights. */
qd_status qd_validation_run(qd_validation *validation, qd_trainer *trainer, const qd_config *config, qd_validated *result);

/* Notes the result of an evaluation after `step`. Returns whether it is the lowest so far. */
bool qd_validation_note(qd_validation *validation, int64_t step, double loss);
#endif
