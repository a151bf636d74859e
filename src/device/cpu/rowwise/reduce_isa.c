/* Reductions on one range, vectorized: squares along rows, sums over rows, sums of partial sums. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

/* Lanes of the double sums: the same for every instruction set, so that the gradient norm is
 * bit-identical. */
#define LANES 16

QD_INLINE void add_squares(double sums[LANES], const float x[LANES])
{
    for (int l = 0; l < LANES; l++)
        sums[l] += (double)x[l] * (double)x[l];
}

static void row_squares(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_row_squares_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        const void *x = qd_cpu_at(a->x, row * a->cols, a->dtype);
        double sums[LANES] = {0};
        int64_t c = 0;
        for (; c + LANES <= a->cols; c += LANES) {
            float block[LANES];
            for (int l = 0; l < LANES; l += QD_VF)
                vf_store(block + l, vf_load_as(x, c + l, a->dtype));
            add_squares(sums, block);
        }
        for (int l = 0; c < a->cols; c++, l++) {
            double v = (double)load_as(x, c, a->dtype);
            sums[l] += v * v;
        }
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++)
                sums[l] += sums[l + half];
        a->out[row] = sums[0];
    }
}

/* Four rows at once: the sum is loaded and stored once for them. */
static void column_sums(const qd_bias_grad_args *a, int64_t begin, int64_t end, float *sum)
{
    int64_t cols = a->cols, row = begin;
    for (; row + 4 <= end; row += 4) {
        const void *r0 = qd_cpu_at(a->dy, row * cols, a->dtype), *r1 = qd_cpu_at(r0, cols, a->dtype);
        const void *r2 = qd_cpu_at(r1, cols, a->dtype), *r3 = qd_cpu_at(r2, cols, a->dtype);
        QD_FOR_VECTORS(i, n, cols, {
            vf s = vec_load(sum, i, n, QD_F32) + vec_load(r0, i, n, a->dtype);
            s = s + vec_load(r1, i, n, a->dtype);
            s = s + vec_load(r2, i, n, a->dtype);
            vec_store(sum, i, s + vec_load(r3, i, n, a->dtype), n, QD_F32);
        });
    }
    for (; row < end; row++) {
        const void *r = qd_cpu_at(a->dy, row * cols, a->dtype);
        QD_FOR_VECTORS(i, n, cols, {
            vec_store(sum, i, vec_load(sum, i, n, QD_F32) + vec_load(r, i, n, a->dtype), n, QD_F32);
        });
    }
}

static void add_parts(float *sum, const float *parts, int64_t count, int64_t width, int64_t begin, int64_t end)
{
    QD_FOR_VECTORS(i, n, end - begin, {
        vf s = vec_load(sum, begin + i, n, QD_F32);
        for (int64_t p = 0; p < count; p++)
            s += vec_load(parts, p * width + begin + i, n, QD_F32);
        vec_store(sum, begin + i, s, n, QD_F32);
    });
}

static void put_grad(void *grad, qd_dtype dtype, const float *sum, int64_t count, bool accumulate)
{
    QD_FOR_VECTORS(i, n, count, {
        vf s = vec_load(sum, i, n, QD_F32);
        vec_store(grad, i, accumulate ? vec_load(grad, i, n, dtype) + s : s, n, dtype);
    });
}

const qd_cpu_reduce_ops QD_ISA_NAME(qd_cpu_reduce_ops) = {
    .row_squares = row_squares, .column_sums = column_sums, .add_parts = add_parts, .put_grad = put_grad};
