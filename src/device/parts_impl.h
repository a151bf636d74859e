/* Checks of attention over parts of sequences that all devices share. */
#ifndef QD_DEVICE_PARTS_IMPL_H
#define QD_DEVICE_PARTS_IMPL_H

#include "device/device.h"

/* QD_USAGE unless runs cover each of a part's rows at most once, lie within them and within `positions`, and go up in position. */
qd_status qd_row_runs_check(const char *kernel, const char *what, const qd_row_run *runs, int count, int64_t rows, int64_t positions);

/* QD_USAGE unless the strides of dq, dk and dv hold the heads. */
qd_status qd_attention_part_check_gradients(const char *kernel, const qd_attention_part_args *a);
#endif
