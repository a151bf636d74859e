/* Checks of arguments that all devices share. */
#ifndef QD_DEVICE_ARGUMENTS_IMPL_H
#define QD_DEVICE_ARGUMENTS_IMPL_H

#include "device/device.h"

/* QD_UNSUPPORTED unless dtype is one that kernels store activations and parameters in. */
qd_status qd_check_float(const char *kernel, const char *what, qd_dtype dtype);

/* Types, and what may go with what. */
qd_status qd_grouped_check(const qd_grouped_args *a);

/* Types, sizes, strides, and which steps go with which. */
qd_status qd_matmul_check(const qd_matmul_args *a);

/* QD_USAGE unless runs cover each of a part's rows at most once, lie within them and within
 * `positions`, and go up in position. */
qd_status qd_row_runs_check(const char *kernel, const char *what, const qd_row_run *runs, int count, int64_t rows,
                            int64_t positions);

/* QD_USAGE unless the strides of dq, dk and dv hold the heads. */
qd_status qd_attention_part_check_gradients(const char *kernel, const qd_attention_part_args *a);
#endif
