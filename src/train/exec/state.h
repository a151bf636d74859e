/* A trainer's state to and from checkpoints. */
#ifndef QD_TRAIN_EXEC_STATE_H
#define QD_TRAIN_EXEC_STATE_H

#include "ckpt/checkpoint.h"
#include "train/exec/trainer.h"

/* Collective over the trainer's world: qd_saver, and waits. Writes <root>/step-…; keep: how many
 * stay (0: all). config: YAML of the run. What fails on one rank is returned on all (QD_IO), and
 * training can go on. */
qd_status qd_state_save(qd_trainer *trainer, qd_comm *world, const char *root, const char *config, int keep);

/* Collective. Weights, and unless weights_only optimizer state and position, from a checkpoint of
 * any layout. */
qd_status qd_state_load(qd_trainer *trainer, qd_checkpoint *checkpoint, bool weights_only);
#endif
