/* Arguments of kernels that only some families of models need. Part of device.h. */
#ifndef QD_DEVICE_VARIANTS_H
#define QD_DEVICE_VARIANTS_H

#include "base/head_rows.h"

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

/* One more logit per head in the denominator of attention's softmax, for `batch` sequences of `seq`
 * rows. o: element (row, head, i) at row * o_stride + head * head_dim + i. lse, delta: (batch,
 * heads, seq), fp32.
 *   sink           o *= 1 / (1 + e^(sink - lse)), then lse = log(e^lse + e^sink)
 *   sink_backward  grad[head] = - sum of e^(sink - lse) * delta over the rows, from the new lse and
 *                  delta = rowsum(d_o * o); accumulated into if accumulate, else overwritten
 * sink and grad have `all` elements; the heads of o are those from `first` on. The others have no
 * gradient: without accumulate it is 0. */
typedef struct qd_sink_args {
    const void *sink;
    void *o;
    float *lse;
    int64_t batch, seq, o_stride;
    int heads, head_dim, first, all;
    qd_dtype dtype, param_dtype;
    const float *delta; /* sink_backward only */
    void *grad;
    bool accumulate;
    qd_dtype grad_dtype;
} qd_sink_args;

/* Biases of experts. x (rows, width): rows of experts, as `a` of qd_grouped_args: the call covers
 * rows [begin, begin + rows) of the list that counts describes. Of each row, the columns [first,
 * first + n) belong to the bias of its expert, (experts, n).
 *   grouped_bias       x += bias, in place
 *   grouped_bias_grad  bias = sum of the rows of x of each expert, sources in ascending order; 0
 *                      for an expert without rows. accumulate: added to bias */
typedef struct qd_grouped_bias_args {
    void *x, *bias; /* grouped_bias_grad: x is only read; grouped_bias: bias */
    const int32_t *counts;
    int64_t count_stride, begin, rows, width, first, n;
    int sources, experts;
    bool accumulate;
    qd_dtype dtype, bias_dtype;
} qd_grouped_bias_args;

/* Latent attention. q (rows, heads · (nope + rope)); kv (rows, heads · (nope + v)): for each head
 * the part of its key without position, then its value; k_rope (rows, rope): the rotary part of the
 * keys of all heads; qkv (rows, heads · (2 (nope + rope) + v)): queries, keys, values. The last
 * `rope` elements of query and key heads are rotated, in pairs (2i, 2i + 1) if interleaved, else
 * (i, i + rope / 2); table and positions as in qd_rope_args.
 *   latent_join   qkv from the others
 *   latent_split  the gradients of the others from that of qkv; that of k_rope is a sum over heads,
 *                 in their order */
typedef struct qd_latent_args {
    void *q, *kv, *k_rope, *qkv;
    const float *table;
    const int32_t *positions;
    int64_t rows, seq;
    int heads, nope, rope, v;
    bool interleaved;
    qd_dtype dtype;
} qd_latent_args;

/* QK-Clip. Multiplies the rows of heads whose score is finite and above the limit by a factor of
 * gamma = limit / score; gamma is 1 for other heads (device/head_clip.h).
 *   query           sqrt(gamma), or, where heads share a key head, gamma / (the factor of that)
 *   key             the smallest sqrt(gamma) of its query heads
 *   latent query    sqrt(gamma), rotary rows gamma
 *   latent key      sqrt(gamma), rows of values 1
 * The call covers elements [first, first + count) of the whole weight, which has `cols` columns;
 * addresses are those of its element `first`. master is the fp32 weight; a bf16 `param` is another
 * buffer, into which the result is rounded. `rest`: as in qd_adamw_args. If grad_scale is set and
 * not finite, nothing is written. */
typedef struct qd_head_clip_args {
    void *param;
    float *master;
    int16_t *rest;
    const float *scores; /* (heads) */
    int64_t first, count, cols;
    qd_head_rows rows;
    int heads, kv_heads, head_dim;
    int nope, v_dim; /* latent only */
    double limit;
    const double *grad_scale; /* device memory, or NULL */
    qd_dtype param_dtype;
} qd_head_clip_args;

#define QD_VARIANT_KERNEL_TABLE(X)                                                                          \
    X(qk_squares, qd_qk_norm_args)                                                                          \
    X(qk_norm, qd_qk_norm_args)                                                                             \
    X(qk_dots, qd_qk_norm_args)                                                                             \
    X(qk_norm_backward, qd_qk_norm_args)                                                                    \
    X(clip, qd_clip_args)                                                                                   \
    X(clip_backward, qd_clip_args)                                                                          \
    X(scale, qd_scale_args)                                                                                 \
    X(softcap, qd_softcap_args)                                                                             \
    X(latent_join, qd_latent_args)                                                                          \
    X(latent_split, qd_latent_args)                                                                         \
    X(sink, qd_sink_args)                                                                                   \
    X(sink_backward, qd_sink_args)                                                                          \
    X(grouped_bias, qd_grouped_bias_args)                                                                   \
    X(grouped_bias_grad, qd_grouped_bias_args)                                                              \
    X(head_clip, qd_head_clip_args)
#endif
