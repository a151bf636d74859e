/* LayerNorm and RMSNorm, row by row. Storage is fp32 or bf16, arithmetic fp32. Sums over a row are
 * kept per vector lane over stretches of SUM_STRETCH columns, whose totals are added in double. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>

#define SUM_STRETCH 4096

/* Sum of (x - centre)^power over one row, power 1 or 2. */
QD_INLINE double row_moment(const void *x, int64_t cols, qd_dtype dtype, float centre, int power)
{
    double total = 0;
    for (int64_t first = 0; first < cols; first += SUM_STRETCH) {
        int64_t count = cols - first < SUM_STRETCH ? cols - first : SUM_STRETCH;
        vf even = {0}, odd = {0}; /* two chains of additions hide half of their latency */
        QD_FOR_VECTORS(i, n, count, {
            vf v = vec_load(x, first + i, n, dtype) - centre;
            vf term = vec_first(power == 1 ? v : v * v, n, 0.0f);
            vf sum = even + term;
            even = odd;
            odd = sum;
        });
        total += (double)vf_sum(even + odd);
    }
    return total;
}

/* What normalized values are multiplied by: gamma, 1, or 1 + gamma. The loops are compiled for
 * each. */
typedef enum factor { GAMMA, ONE, ONE_PLUS } factor;

QD_INLINE vf times_factor(vf x, const void *gamma, int64_t i, int64_t n, qd_dtype dtype, factor by)
{
    if (by == ONE)
        return x;
    vf g = vec_load(gamma, i, n, dtype);
    return by == ONE_PLUS ? x * (g + 1.0f) : x * g;
}

static factor factor_of(const void *gamma, bool plus_one)
{
    return !gamma ? ONE : plus_one ? ONE_PLUS : GAMMA;
}

QD_INLINE void forward_by(const qd_norm_forward_args *a, int64_t begin, int64_t end, factor by)
{
    int64_t cols = a->cols;
    for (int64_t row = begin; row < end; row++) {
        const void *x = qd_cpu_at(a->x, row * cols, a->dtype);
        void *y = qd_cpu_at_mut(a->y, row * cols, a->dtype);
        if (a->add) {
            const void *add = qd_cpu_at(a->add, row * cols, a->dtype);
            void *sum = qd_cpu_at_mut(a->sum, row * cols, a->dtype);
            QD_FOR_VECTORS(i, n, cols, {
                vec_store(sum, i, vec_load(x, i, n, a->dtype) + vec_load(add, i, n, a->dtype), n, a->dtype);
            });
            x = sum; /* as stored: the backward pass reads the rounded value too */
        }
        float mean = a->rms ? 0.0f : (float)(row_moment(x, cols, a->dtype, 0.0f, 1) / (double)cols);
        double variance = row_moment(x, cols, a->dtype, mean, 2) / (double)cols;
        float rstd = (float)(1.0 / sqrt(variance + (double)a->eps));
        if (a->mean)
            a->mean[row] = mean;
        a->rstd[row] = rstd;
        if (a->beta)
            QD_FOR_VECTORS(i, n, cols, {
                vf hat = (vec_load(x, i, n, a->dtype) - mean) * rstd;
                vf scaled = times_factor(hat, a->gamma, i, n, a->param_dtype, by);
                vec_store(y, i, scaled + vec_load(a->beta, i, n, a->param_dtype), n, a->dtype);
            });
        else
            QD_FOR_VECTORS(i, n, cols, {
                vf hat = (vec_load(x, i, n, a->dtype) - mean) * rstd;
                vec_store(y, i, times_factor(hat, a->gamma, i, n, a->param_dtype, by), n, a->dtype);
            });
    }
}

static void forward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_norm_forward_args *a = context;
    switch (factor_of(a->gamma, a->plus_one)) {
    case GAMMA: forward_by(a, begin, end, GAMMA); break;
    case ONE: forward_by(a, begin, end, ONE); break;
    case ONE_PLUS: forward_by(a, begin, end, ONE_PLUS); break;
    }
}

/* With xhat = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - mean(g) - xhat * mean(g *
 * xhat)); RMSNorm has no mean(g). */
QD_INLINE void backward_by(const qd_norm_backward_args *a, int64_t begin, int64_t end, float *dgamma, float *dbeta, factor by)
{
    int64_t cols = a->cols;
    for (int64_t row = begin; row < end; row++) {
        const void *dy = qd_cpu_at(a->dy, row * cols, a->dtype);
        const void *x = qd_cpu_at(a->x, row * cols, a->dtype);
        void *dx = qd_cpu_at_mut(a->dx, row * cols, a->dtype);
        float mean = a->rms ? 0.0f : a->mean[row], rstd = a->rstd[row];
        double total_g = 0, total_gx = 0;
        for (int64_t first = 0; first < cols; first += SUM_STRETCH) {
            int64_t count = cols - first < SUM_STRETCH ? cols - first : SUM_STRETCH;
            vf sum_g = {0}, sum_gx = {0};
            QD_FOR_VECTORS(i, n, count, {
                int64_t c = first + i;
                vf d = vec_load(dy, c, n, a->dtype);
                vf hat = (vec_load(x, c, n, a->dtype) - mean) * rstd;
                vf g = times_factor(d, a->gamma, c, n, a->param_dtype, by);
                sum_g += vec_first(g, n, 0.0f);
                sum_gx += vec_first(g * hat, n, 0.0f);
                if (dgamma)
                    vec_store(dgamma, c, vec_load(dgamma, c, n, QD_F32) + d * hat, n, QD_F32);
                if (dbeta)
                    vec_store(dbeta, c, vec_load(dbeta, c, n, QD_F32) + d, n, QD_F32);
            });
            total_g += (double)vf_sum(sum_g);
            total_gx += (double)vf_sum(sum_gx);
        }
        float mean_g = a->rms ? 0.0f : (float)(total_g / (double)cols), mean_gx = (float)(total_gx / (double)cols);
        const void *add = a->add ? qd_cpu_at(a->add, row * cols, a->dtype) : NULL;
        QD_FOR_VECTORS(i, n, cols, {
            vf hat = (vec_load(x, i, n, a->dtype) - mean) * rstd;
            vf g = times_factor(vec_load(dy, i, n, a->dtype), a->gamma, i, n, a->param_dtype, by);
            vf d = (g - mean_g - hat * mean_gx) * rstd;
            if (add)
                d += vec_load(add, i, n, a->dtype);
            vec_store(dx, i, d, n, a->dtype);
        });
    }
}

static void backward(const qd_norm_backward_args *a, int64_t begin, int64_t end, float *dgamma, float *dbeta)
{
    switch (factor_of(a->gamma, a->plus_one)) {
    case GAMMA: backward_by(a, begin, end, dgamma, dbeta, GAMMA); break;
    case ONE: backward_by(a, begin, end, dgamma, dbeta, ONE); break;
    case ONE_PLUS: backward_by(a, begin, end, dgamma, dbeta, ONE_PLUS); break;
    }
}

const qd_cpu_norm_ops QD_ISA_NAME(qd_cpu_norm_ops) = {.forward = forward, .backward = backward};
