/* The weights of a model as whole fp32 tensors in host memory, collected from the ranks that
 * train it: what a session evaluates and generates with, without a checkpoint on a disk. */
#ifndef QD_TRAIN_EXEC_WEIGHTS_COPY_H
#define QD_TRAIN_EXEC_WEIGHTS_COPY_H

#include "train/exec/trainer.h"

typedef struct qd_weights_copy qd_weights_copy;

/* Memory for the parameters of a ledger, which must outlive the copy. */
qd_status qd_weights_copy_create(const qd_ledger *ledger, qd_weights_copy **copy);
void qd_weights_copy_destroy(qd_weights_copy *copy); /* NULL is legal */

/* Not collective: the part that this rank would write into a checkpoint with all weights, also
 * those that are stored elsewhere (run.weights of adapters). Complete once every rank has added its
 * own; ranks may do so concurrently. */
qd_status qd_weights_copy_add(qd_weights_copy *copy, qd_trainer *trainer);

/* Fills the weights of a trainer of the same model, in any layout. */
qd_status qd_weights_copy_load(const qd_weights_copy *copy, qd_trainer *trainer);
#endif
