/* RMSNorm of queries and keys: many short vectors per row. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>

/* The factor of some elements: gamma, or 1 + gamma. */
static inline vf factor(const qd_head_norm_args *a, const void *gamma, int64_t i, int n)
{
    vf value = vec_load(gamma, i, n, a->param_dtype);
    return a->plus_one ? value + 1.0f : value;
}

static void forward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_head_norm_args *a = context;
    int normed = a->heads + a->kv_heads;
    for (int64_t row = begin; row < end; row++) {
        for (int h = 0; h < normed; h++) {
            const void *gamma = h < a->heads ? a->q_gamma : a->k_gamma;
            int64_t at = row * a->row_stride + (int64_t)h * a->head_dim;
            const void *x = qd_cpu_at(a->x, at, a->dtype);
            void *y = qd_cpu_at_mut(a->y, at, a->dtype);
            vf squares = {0};
            QD_FOR_VECTORS(i, n, a->head_dim, {
                vf v = vec_load(x, i, n, a->dtype);
                squares += vec_first(v * v, n, 0.0f);
            });
            float rstd = (float)(1.0 / sqrt((double)vf_sum(squares) / a->head_dim + (double)a->eps));
            a->rstd[row * normed + h] = rstd;
            QD_FOR_VECTORS(i, n, a->head_dim, {
                vec_store(y, i, vec_load(x, i, n, a->dtype) * rstd * factor(a, gamma, i, n), n, a->dtype);
            });
        }
        int64_t done = (int64_t)normed * a->head_dim, at = row * a->row_stride + done;
        memcpy(qd_cpu_at_mut(a->y, at, a->dtype), qd_cpu_at(a->x, at, a->dtype),
               (size_t)(a->row_stride - done) * (a->dtype == QD_F32 ? 4 : 2));
    }
}

/* With xhat = x * rstd and g = d * gamma (or 1 + gamma): dx = rstd * (g - xhat * mean(g *
 * xhat)). */
static void backward(const qd_head_norm_args *a, int64_t begin, int64_t end, float *sums)
{
    int normed = a->heads + a->kv_heads;
    for (int64_t row = begin; row < end; row++) {
        for (int h = 0; h < normed; h++) {
            const void *gamma = h < a->heads ? a->q_gamma : a->k_gamma;
            float *sum = sums + (h < a->heads ? 0 : a->head_dim), rstd = a->rstd[row * normed + h];
            int64_t at = row * a->row_stride + (int64_t)h * a->head_dim;
            const void *x = qd_cpu_at(a->x, at, a->dtype);
            void *d = qd_cpu_at_mut(a->d, at, a->dtype);
            vf total = {0};
            QD_FOR_VECTORS(i, n, a->head_dim, {
                vf dy = vec_load(d, i, n, a->dtype);
                vf hat = vec_load(x, i, n, a->dtype) * rstd;
                total += vec_first(dy * factor(a, gamma, i, n) * hat, n, 0.0f);
                vec_store(sum, i, vec_load(sum, i, n, QD_F32) + dy * hat, n, QD_F32);
            });
            float mean = vf_sum(total) / (float)a->head_dim;
            QD_FOR_VECTORS(i, n, a->head_dim, {
                vf g = vec_load(d, i, n, a->dtype) * factor(a, gamma, i, n);
                vec_store(d, i, (g - vec_load(x, i, n, a->dtype) * rstd * mean) * rstd, n, a->dtype);
            });
        }
    }
}

const qd_cpu_head_norm_ops QD_ISA_NAME(qd_cpu_head_norm_ops) = {.forward = forward, .backward = backward};
