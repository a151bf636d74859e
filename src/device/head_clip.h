/* Factors of the head_clip kernel, shared by all devices so that they agree. */
#ifndef QD_DEVICE_HEAD_CLIP_H
#define QD_DEVICE_HEAD_CLIP_H

#include "device/device.h"

#include <math.h>

#ifdef __CUDACC__
#define QD_HEAD_CLIP_ON __device__
#else
#define QD_HEAD_CLIP_ON
#endif

/* An infinite score has made the loss meaningless, and no factor would help. */
QD_HEAD_CLIP_ON static inline double qd_head_gamma(const qd_head_clip_args *a, int64_t head)
{
    const double score = (double)a->scores[head];
    return score > a->limit && isfinite(score) ? a->limit / score : 1.0;
}

QD_HEAD_CLIP_ON static inline double qd_head_smallest_gamma(const qd_head_clip_args *a, int64_t kv_head)
{
    const int64_t group = a->heads / a->kv_heads;
    double least = 1.0;
    for (int64_t i = kv_head * group; i < (kv_head + 1) * group; i++)
        least = fmin(least, qd_head_gamma(a, i));
    return least;
}

/* What a row is multiplied by. */
QD_HEAD_CLIP_ON static inline double qd_head_factor(const qd_head_clip_args *a, int64_t row)
{
    const int64_t head = row / a->head_dim, each = a->nope + a->v_dim;
    switch (a->rows) {
    case QD_HEAD_ROWS_QUERY:
        return a->heads == a->kv_heads ? sqrt(qd_head_gamma(a, head))
                                       : qd_head_gamma(a, head) / sqrt(qd_head_smallest_gamma(a, head / (a->heads / a->kv_heads)));
    case QD_HEAD_ROWS_KEY:
        return sqrt(qd_head_smallest_gamma(a, head));
    case QD_HEAD_ROWS_LATENT_QUERY:
        return row % a->head_dim < a->nope ? sqrt(qd_head_gamma(a, head)) : qd_head_gamma(a, head);
    case QD_HEAD_ROWS_LATENT_KEY:
        return row % each < a->nope ? sqrt(qd_head_gamma(a, row / each)) : 1.0;
    default:
        return 1.0;
    }
}
#endif
