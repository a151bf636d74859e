/* Arguments of the kernels that convert to fp8 (base/fp8.h). Part of device.h. */
#ifndef QD_DEVICE_FP8_H
#define QD_DEVICE_FP8_H

#include <quadrille/types.h>

/* *amax = the largest magnitude of x (n), a NaN if it holds one. */
typedef struct qd_amax_args {
    const void *x;
    float *amax;
    int64_t n;
    qd_dtype dtype;
} qd_amax_args;

/* Codes of x (rows, cols), whose largest magnitude is *amax: `to` in its order, `transposed` as
 * (cols, rows); either may be NULL. The scale follows the codes (qd_fp8_scale_at). */
typedef struct qd_fp8_cast_args {
    const void *x;
    const float *amax;
    void *to, *transposed;
    int64_t rows, cols;
    qd_dtype dtype, to_dtype;
} qd_fp8_cast_args;

#define QD_FP8_KERNEL_TABLE(X)                                                                              \
    X(amax, qd_amax_args)                                                                                   \
    X(fp8_cast, qd_fp8_cast_args)
#endif
