/* All ranks of a layout as threads of this process, driven step by step from one thread. For
 * verify, and for tests that run hundreds of layouts. */
#ifndef QD_TRAIN_EXEC_TEAM_H
#define QD_TRAIN_EXEC_TEAM_H

#include "train/exec/trainer.h"

typedef struct qd_team qd_team;

/* Starts the ranks and creates their trainers. */
qd_status qd_team_create(const qd_config *config, const qd_batch_source *source, qd_team **team);
void qd_team_destroy(qd_team *team); /* NULL is legal */

/* Calls `function` on every rank's thread and waits for all. Returns the first failure that is not
 * a consequence of another rank's failure. After a failure the team can only be destroyed. */
typedef qd_status (*qd_team_function)(qd_trainer *trainer, qd_comm *world, void *argument);
qd_status qd_team_call(qd_team *team, qd_team_function function, void *argument);

qd_status qd_team_step(qd_team *team, qd_step_output *output);
/* A logical parameter's value or gradient, as rank 0 reads it. */
qd_status qd_team_read(qd_team *team, const char *name, qd_tensor_kind kind, float *out, int64_t count);
qd_status qd_team_write(qd_team *team, const char *name, const float *values, int64_t count);

/* Rank 0's program; the ledger names the parameters. */
const qd_program *qd_team_program(const qd_team *team);
qd_device *qd_team_device(const qd_team *team); /* rank 0's */
int qd_team_size(const qd_team *team);
#endif
