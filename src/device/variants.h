/* Arguments of kernels that only some families of models need. Part of device.h. */
#ifndef QD_DEVICE_VARIANTS_H
#define QD_DEVICE_VARIANTS_H

#include <quadrille/types.h>

/* RMSNorm of all queries of a row together, and of all keys. x (rows, row_stride): q_cols queries,
 * then k_cols keys, then columns that are copied; they are this rank's columns of vectors with
 * q_width and k_width elements. In steps, so that ranks can sum in between:
 *   qk_squares        sums (rows, 2) = sum of x² over the queries, over the keys
 *   qk_norm           y = x * rstd * gamma, rstd = 1 / sqrt(sums / width + eps)
 *   qk_dots           dots (rows, 2) = sum of d * gamma * x over the queries, over the keys
 *   qk_norm_backward  d, the gradient of y, is replaced in place by that of x; gradients of the
 *                     gammas are accumulated into if accumulate, else overwritten
 * counts_keys: ranks with the same keys count them once. The others leave their squares 0 and,
 * because the gradients of keys are then summed over these ranks, do not subtract the dots. */
typedef struct qd_qk_norm_args {
    const void *x, *q_gamma, *k_gamma;
    void *y, *d;
    float *sums, *dots;
    int64_t rows, row_stride, q_cols, k_cols, q_width, k_width;
    bool counts_keys;
    float eps;
    qd_dtype dtype, param_dtype;
    void *q_grad, *k_grad; /* qk_norm_backward only */
    bool accumulate;
    qd_dtype grad_dtype;
} qd_qk_norm_args;

/* clip: y = x limited to [-limit, limit]. clip_backward: y = dy where x is within these limits,
 * else 0. */
typedef struct qd_clip_args {
    const void *x, *dy;
    void *y;
    int64_t n;
    float limit;
    qd_dtype dtype;
} qd_clip_args;

/* y = x * factor. */
typedef struct qd_scale_args {
    const void *x;
    void *y;
    int64_t n;
    float factor;
    qd_dtype dtype;
} qd_scale_args;

/* x = cap * tanh(x / cap), in place. */
typedef struct qd_softcap_args {
    void *x;
    int64_t n;
    float cap;
    qd_dtype dtype;
} qd_softcap_args;

/* Kernels without a CUDA version, which the CUDA device refuses by name (cuda/refused.c). Models
 * that need them are refused earlier (spec/config/device_models.c). None at present. */
#define QD_CPU_KERNEL_TABLE(X)

#define QD_VARIANT_KERNEL_TABLE(X)                                                                          \
    X(qk_squares, qd_qk_norm_args)                                                                          \
    X(qk_norm, qd_qk_norm_args)                                                                             \
    X(qk_dots, qd_qk_norm_args)                                                                             \
    X(qk_norm_backward, qd_qk_norm_args)                                                                    \
    X(clip, qd_clip_args)                                                                                   \
    X(clip_backward, qd_clip_args)                                                                          \
    X(scale, qd_scale_args)                                                                                 \
    X(softcap, qd_softcap_args)                                                                             \
    QD_CPU_KERNEL_TABLE(X)
#endif
