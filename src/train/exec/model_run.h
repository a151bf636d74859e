/* A trained model without optimizer state, on one rank or several: the basis of evaluation and
 * generation. */
#ifndef QD_TRAIN_EXEC_MODEL_RUN_H
#define QD_TRAIN_EXEC_MODEL_RUN_H

#include "ckpt/checkpoint.h"
#include "train/exec/weights_copy.h"

#include <limits.h>

enum { QD_MODEL_WARNING = 1024 };

/* What a model is made from: a checkpoint, or ranks that train it. */
typedef struct qd_model_source {
    const char *path; /* a run folder (its newest valid checkpoint is used) or a checkpoint; NULL: what follows */
    const qd_options *options; /* of the run, and what it was resolved to */
    const qd_config *config;
    const qd_weights_copy *weights; /* complete */
    int64_t step;
    const char *precision; /* fp32 or bf16: how weights and activations are stored; NULL or "": as in training */
    qd_comm *world; /* of the ranks that run the model, which call together; NULL: one rank */
    int tp, pp, ep; /* its layout, where there is a world; the rest is dp */
} qd_model_source;

typedef struct qd_model_run {
    const char *name; /* in messages */
    qd_checkpoint *checkpoint;      /* NULL: there is a copy of the weights, */
    const qd_weights_copy *weights; /* which is the source's */
    int64_t step;        /* that the weights are of */
    qd_options *options; /* the configuration the model was trained with */
    qd_config trained;   /* what it was trained with */
    qd_config config;    /* the same on the ranks of now. data.tokenizer: the file in use, "bytes", or "" where none is known */
    char folder[PATH_MAX], tokenizer[PATH_MAX]; /* the run folder; the string that config.tokenizer points to */
    char chat_template[PATH_MAX]; /* the string that config.data.chat_template may point to */
    char warning[QD_MODEL_WARNING]; /* "", or which checkpoints were skipped and which one is used */
    qd_local_world *local;
    qd_comm *world; /* the source's, or of one rank: there is a local world then */
    qd_trainer *trainer;
} qd_model_run;

/* Opens the checkpoint that a path names: itself, or the newest valid one of a run folder. folder:
 * the run folder (PATH_MAX). warning: as in qd_model_run. */
qd_status qd_model_checkpoint_open(const char *path, qd_checkpoint **checkpoint, char *folder, char warning[QD_MODEL_WARNING]);

/* Reads the configuration; no trainer yet. The source must outlive the run. device: NULL for the
 * CPU. */
qd_status qd_model_run_open(const qd_model_source *source, const char *device, qd_model_run *run);
/* Collective over the source's world, as is close. Creates the trainer for run->config, which the
 * caller may have changed (strategy, batch), and loads the weights. */
qd_status qd_model_run_start(qd_model_run *run, const qd_batch_source *source);
void qd_model_run_close(qd_model_run *run); /* also after a failed open or start */
#endif
