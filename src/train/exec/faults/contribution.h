/* What this rank contributes to sums over ranks. Once it is added to the others', a wrong number
 * cannot be assigned to a rank any more; so when a step is repeated, contributions are searched for
 * non-finite numbers (nonfinite.h) or compared with those of the first time (gradients.h) before
 * they are summed. */
#ifndef QD_TRAIN_EXEC_FAULTS_CONTRIBUTION_H
#define QD_TRAIN_EXEC_FAULTS_CONTRIBUTION_H

#include "train/exec/interpret.h"

/* Before an action of the kind REDUCE, whose data is at `data`; REDUCE_SCATTER; and SQUARES, for
 * gradients that no other rank contributes to. Nothing in ordinary steps. */
qd_status qd_contribution_reduced(const qd_bound *bound, const qd_step_input *in, const qd_action *a, int index, const void *data);
qd_status qd_contribution_scattered(const qd_bound *bound, const qd_step_input *in, const qd_action *a, int index);
void qd_contribution_kept(const qd_bound *bound, const qd_step_input *in, const qd_action *a, int index);
#endif
