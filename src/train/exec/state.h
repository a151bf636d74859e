/* Saves a trainer's state to checkpoints and loads it. */
#ifndef QD_TRAIN_EXEC_STATE_H
#define QD_TRAIN_EXEC_STATE_H

#include "ckpt/checkpoint.h"
#include "train/exec/trainer.h"

/* Collective over the trainer's world: saves with qd_saver and waits. Writes <root>/step-…; keep:
 * how many checkpoints to keep (0: all). config: YAML of the run. A failure of one rank is returned
 * on all ranks (QD_IO), and training can continue. */
qd_status qd_state_save(qd_trainer *trainer, qd_comm *world, const char *root, const char *config, int keep);

/* Hands over a box of a logical tensor as fp32, as qd_checkpoint_read() does. */
typedef qd_status (*qd_state_read)(void *context, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out);
/* Not collective. Fills this rank's weights and optimizer state from `read`. */
qd_status qd_state_load_from(qd_trainer *trainer, qd_state_read read, void *context);
/* Collective: the same with a `read` that communicates. All ranks call it for all tensors, in the
 * same order; a rank that needs nothing of one, with an empty box. */
qd_status qd_state_load_together(qd_trainer *trainer, qd_state_read read, void *context);
/* Whether the source of `read` has a tensor. */
typedef bool (*qd_state_has)(void *context, const char *name);
/* Not collective. Fills this rank's weights from `read`. Adapters that the source does not have are
 * left as they are; has NULL: it has none. */
qd_status qd_state_load_weights(qd_trainer *trainer, qd_state_read read, qd_state_has has, void *context);

/* Collective. Loads weights and, unless weights_only, optimizer state and position, from a
 * checkpoint of any layout. */
qd_status qd_state_load(qd_trainer *trainer, qd_checkpoint *checkpoint, bool weights_only);
#endif
