/* Finds the rank and the tensor that a non-finite number came from. */
#ifndef QD_TRAIN_EXEC_NONFINITE_H
#define QD_TRAIN_EXEC_NONFINITE_H

#include "train/exec/trainer.h"

/* Collective, after a step in which all ranks saw a non-finite number. Checks the weights, repeats
 * the step and checks what each rank contributes to the sums; output->not_finite then names the
 * rank and the tensor. */
qd_status qd_nonfinite_explain(qd_trainer *trainer, qd_interpreter *interpreter, qd_comm *world, const qd_step_input *input,
                               qd_step_output *output);
#endif
