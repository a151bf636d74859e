/* RMSNorm of all queries of a row, and of all keys: two long vectors per row, of which a rank may
 * have some columns. Sums over a row are kept per vector lane over stretches of SUM_STRETCH
 * columns, whose totals are added in double. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>

#define SUM_STRETCH 4096

/* The queries (0) or keys (1) of a row. */
typedef struct part {
    const void *x, *gamma;
    void *y, *d;
    int64_t cols, width;
} part;

QD_INLINE part part_of(const qd_qk_norm_args *a, int64_t row, int which)
{
    int64_t at = row * a->row_stride + (which ? a->q_cols : 0);
    return (part){qd_cpu_at(a->x, at, a->dtype),
                  which ? a->k_gamma : a->q_gamma,
                  a->y ? qd_cpu_at_mut(a->y, at, a->dtype) : NULL,
                  a->d ? qd_cpu_at_mut(a->d, at, a->dtype) : NULL,
                  which ? a->k_cols : a->q_cols,
                  which ? a->k_width : a->q_width};
}

/* The sum of x², or of d * gamma * x if d is given. */
QD_INLINE float total(const qd_qk_norm_args *a, const part *p)
{
    double sum = 0;
    for (int64_t first = 0; first < p->cols; first += SUM_STRETCH) {
        int64_t count = p->cols - first < SUM_STRETCH ? p->cols - first : SUM_STRETCH;
        vf lanes = {0};
        QD_FOR_VECTORS(i, n, count, {
            vf x = vec_load(p->x, first + i, n, a->dtype), other = x;
            if (p->d)
                other = vec_load(p->d, first + i, n, a->dtype) * vec_load(p->gamma, first + i, n, a->param_dtype);
            lanes += vec_first(x * other, n, 0.0f);
        });
        sum += (double)vf_sum(lanes);
    }
    return (float)sum;
}

static void squares(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_qk_norm_args *a = context;
    for (int64_t row = begin; row < end; row++)
        for (int which = 0; which < 2; which++) {
            part p = part_of(a, row, which);
            a->sums[2 * row + which] = which == 0 || a->counts_keys ? total(a, &p) : 0.0f;
        }
}

static void dots(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_qk_norm_args *a = context;
    for (int64_t row = begin; row < end; row++)
        for (int which = 0; which < 2; which++) {
            part p = part_of(a, row, which);
            a->dots[2 * row + which] = total(a, &p);
        }
}

QD_INLINE float rstd_of(const qd_qk_norm_args *a, const part *p, int64_t row, int which)
{
    return (float)(1.0 / sqrt((double)a->sums[2 * row + which] / (double)p->width + (double)a->eps));
}

static void forward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_qk_norm_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        for (int which = 0; which < 2; which++) {
            part p = part_of(a, row, which);
            float rstd = rstd_of(a, &p, row, which);
            QD_FOR_VECTORS(i, n, p.cols, {
                vec_store(p.y, i, vec_load(p.x, i, n, a->dtype) * rstd * vec_load(p.gamma, i, n, a->param_dtype), n, a->dtype);
            });
        }
        int64_t done = a->q_cols + a->k_cols, at = row * a->row_stride + done;
        memcpy(qd_cpu_at_mut(a->y, at, a->dtype), qd_cpu_at(a->x, at, a->dtype),
               (size_t)(a->row_stride - done) * (a->dtype == QD_F32 ? 4 : 2));
    }
}

/* With xhat = x * rstd and g = d * gamma: dx = rstd * (g - xhat * mean(g * xhat)); the mean is rstd
 * * dots / width. */
static void backward(const qd_qk_norm_args *a, int64_t begin, int64_t end, float *sums)
{
    for (int64_t row = begin; row < end; row++)
        for (int which = 0; which < 2; which++) {
            part p = part_of(a, row, which);
            float *sum = sums + (which ? a->q_cols : 0), rstd = rstd_of(a, &p, row, which);
            double once = which == 0 || a->counts_keys ? (double)a->dots[2 * row + which] : 0.0;
            float mean = (float)(once * (double)rstd / (double)p.width);
            QD_FOR_VECTORS(i, n, p.cols, {
                vf dy = vec_load(p.d, i, n, a->dtype);
                vf hat = vec_load(p.x, i, n, a->dtype) * rstd;
                vec_store(sum, i, vec_load(sum, i, n, QD_F32) + dy * hat, n, QD_F32);
                vec_store(p.d, i, (dy * vec_load(p.gamma, i, n, a->param_dtype) - hat * mean) * rstd, n, a->dtype);
            });
        }
}

const qd_cpu_qk_norm_ops QD_ISA_NAME(qd_cpu_qk_norm_ops) = {
    .squares = squares, .forward = forward, .dots = dots, .backward = backward};
