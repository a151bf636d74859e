/* Computes the gradients of a step twice and compares them. A processor that computes wrongly, or a
 * bit that flips in activations or gradients, reaches all replicas alike once gradients are summed,
 * so comparing replicas does not show it. On CPUs the same computation is bit-identical, so each
 * rank can be compared with itself: a difference names the rank. It costs as much as a step. */
#ifndef QD_TRAIN_EXEC_FAULTS_GRADIENTS_H
#define QD_TRAIN_EXEC_FAULTS_GRADIENTS_H

#include "train/exec/interpret.h"

/* Collective over `world`, which the interpreter is bound to: a step as qd_interpret() executes it,
 * after a first time without its update. output->different names the ranks whose gradients
 * differed; the update has been applied nevertheless. */
qd_status qd_gradients_twice(qd_interpreter *interpreter, const qd_program *program, qd_comm *world, const qd_step_input *input,
                             qd_step_output *output);
#endif
