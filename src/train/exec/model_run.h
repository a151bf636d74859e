/* A trained model in this process, without optimizer: what evaluation and generation stand on. */
#ifndef QD_TRAIN_EXEC_MODEL_RUN_H
#define QD_TRAIN_EXEC_MODEL_RUN_H

#include "ckpt/checkpoint.h"
#include "train/exec/trainer.h"

#include <limits.h>

enum { QD_MODEL_WARNING = 1024 };

typedef struct qd_model_run {
    qd_checkpoint *checkpoint;
    qd_options *options; /* the configuration the model was trained with */
    qd_config config;    /* data.tokenizer: the file that counts, "bytes", or "" where no tokenizer is known */
    char folder[PATH_MAX], tokenizer[PATH_MAX]; /* of the run; what config points to */
    char warning[QD_MODEL_WARNING]; /* "", or which checkpoints were skipped and which one is used */
    qd_local_world *local;
    qd_comm *world; /* of one rank */
    qd_trainer *trainer;
} qd_model_run;

/* The checkpoint that a path names: itself, or the newest sound one of a run folder. folder: of the
 * run (PATH_MAX). warning: as in qd_model_run. */
qd_status qd_model_checkpoint_open(const char *path, qd_checkpoint **checkpoint, char *folder, char warning[QD_MODEL_WARNING]);

/* path: a run folder (its newest sound checkpoint counts) or a checkpoint. Reads the configuration;
 * no trainer yet. */
qd_status qd_model_run_open(const char *path, const char *device, qd_model_run *run);
/* Creates the trainer for run->config as the caller has changed it (strategy, batch), and loads the
 * weights. */
qd_status qd_model_run_start(qd_model_run *run, const qd_batch_source *source);
void qd_model_run_close(qd_model_run *run); /* also of a half-built one */

/* A second program over the weights of run->trainer, for passes of another shape. */
typedef struct qd_side_program {
    qd_arena *arena;
    qd_program *program;
    qd_bound *bound;
    qd_interpreter *interpreter;
} qd_side_program;

/* Persistent buffers of the same kind and size are the trainer's. Closed before the run, also where
 * it failed. */
qd_status qd_side_program_open(qd_model_run *run, const qd_config *config, qd_side_program *side);
void qd_side_program_close(qd_side_program *side);
#endif
