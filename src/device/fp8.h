/* Arguments of the kernels that convert to fp8 (base/fp8.h). Part of device.h. */
#ifndef QD_DEVICE_FP8_H
#define QD_DEVICE_FP8_H

#include "base/fp8.h"

#include <quadrille/types.h>

struct qd_activation_args;

/* *amax = the largest magnitude of x (n), a NaN if it holds one. With `of`, x is the result of that
 * activation or, if it has dy, the gradient of its input, rounded to its type, and nothing else is
 * written. */
typedef struct qd_amax_args {
    const void *x;
    float *amax;
    int64_t n;
    qd_dtype dtype;
    const struct qd_activation_args *of;
} qd_amax_args;

/* Codes of x (rows, cols), whose largest magnitude is *amax: `to` in its order, `transposed` as
 * (cols, rows); either may be NULL. The scale follows the codes (qd_fp8_scale_at). With `of`, x is
 * computed as in qd_amax_args; its gradient may also give the codes of the result of the
 * activation, in E4M3 and transposed, whose largest magnitude is *result_amax. With another scaling
 * than that of a tensor, amax and `of` are NULL, and the scales are those of rows or blocks of each
 * copy as it is stored. sums (cols): the sums of x over rows, accumulated into if accumulate, or
 * NULL. */
typedef struct qd_fp8_cast_args {
    const void *x;
    const float *amax;
    void *to, *transposed;
    int64_t rows, cols;
    qd_dtype dtype, to_dtype;
    qd_fp8_scaling scaling;
    const struct qd_activation_args *of;
    const float *result_amax;
    void *result_transposed;
    void *sums;
    bool accumulate;
    qd_dtype sums_dtype;
} qd_fp8_cast_args;

#define QD_FP8_KERNEL_TABLE(X)                                                                              \
    X(amax, qd_amax_args)                                                                                   \
    X(fp8_cast, qd_fp8_cast_args)
#endif
