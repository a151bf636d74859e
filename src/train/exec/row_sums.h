/* Maps the rows of the SQUARES buffer to parameters, for the gradient norm. */
#ifndef QD_TRAIN_EXEC_ROW_SUMS_H
#define QD_TRAIN_EXEC_ROW_SUMS_H

#include "device/device.h"
#include "spec/program/program.h"

/* Runs of SQUARES by parameter, the rows of each in order, whichever rank has squared them: the
 * sums are the same for every ZeRO stage and bucket size. A parameter that another rank counts has
 * no run. The caller frees *runs. */
qd_status qd_row_runs(const qd_program *program, qd_sum_run **runs, int64_t *count);
#endif
