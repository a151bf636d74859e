/* Argument checks that all devices share. */
#ifndef QD_DEVICE_ARGUMENTS_IMPL_H
#define QD_DEVICE_ARGUMENTS_IMPL_H

#include "device/device.h"

/* QD_UNSUPPORTED unless dtype is a type in which kernels store activations and parameters. */
qd_status qd_check_float(const char *kernel, const char *what, qd_dtype dtype);

/* Checks types and which members may be combined. */
qd_status qd_grouped_check(const qd_grouped_args *a);
/* Whether it has strides, or adds to rows. */
bool qd_grouped_is_part(const qd_grouped_args *a);

/* Checks types, sizes, strides and which fused steps may be combined. */
qd_status qd_matmul_check(const qd_matmul_args *a);

/* Checks types, and the limit of a clamped SwiGLU. */
qd_status qd_activation_check(const char *kernel, const qd_activation_args *a);

/* Check types, and that heads or columns are within those that there are. */
qd_status qd_sink_check(const char *kernel, const qd_sink_args *a, bool backward);
qd_status qd_grouped_bias_check(const char *kernel, const qd_grouped_bias_args *a);
/* Checks types. */
qd_status qd_fp8_cast_check(const qd_fp8_cast_args *a);

/* QD_USAGE unless window and soft-cap are at least 0. */
qd_status qd_check_scores(const char *kernel, int64_t window, float softcap);

/* QD_USAGE unless the runs are within the part's rows and within `positions`, cover each row at
 * most once and are in ascending order of position. */
qd_status qd_row_runs_check(const char *kernel, const char *what, const qd_row_run *runs, int count, int64_t rows,
                            int64_t positions);

/* QD_USAGE unless the strides of dq, dk and dv are at least as long as rows of the heads. */
qd_status qd_attention_part_check_gradients(const char *kernel, const qd_attention_part_args *a);

/* QD_UNSUPPORTED unless values are as long as keys or, without v, at most as long. */
qd_status qd_attention_cached_check_values(const qd_attention_cached_args *a);
#endif
