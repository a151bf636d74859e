/* Which rows of SQUARES make up a parameter. */
#ifndef QD_TRAIN_EXEC_ROW_SUMS_H
#define QD_TRAIN_EXEC_ROW_SUMS_H

#include "device/device.h"
#include "spec/program/program.h"

/* Runs of SQUARES by parameter, the rows of each in their order, whoever of the ranks that share
 * them has squared them: the same sums in every stage and bucketing. Parameters that another rank
 * speaks for have none. Free *runs. */
qd_status qd_row_runs(const qd_program *program, qd_sum_run **runs, int64_t *count);
#endif
