/* Biases of experts, vectorized. Sums over rows go through totals of SUM_ROWS rows, so that their
 * rounding errors grow slowly with the number of rows. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#define SUM_ROWS 64

static void add(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_cpu_grouped_bias_job *job = context;
    const qd_grouped_bias_args *a = job->args;
    const void *bias = qd_cpu_at(a->bias, job->expert * a->n, a->bias_dtype);
    for (int64_t row = job->row + begin; row < job->row + end; row++) {
        void *x = qd_cpu_at_mut(a->x, row * a->width + a->first, a->dtype);
        QD_FOR_VECTORS(i, n, a->n, {
            vec_store(x, i, vec_load(x, i, n, a->dtype) + vec_load(bias, i, n, a->bias_dtype), n, a->dtype);
        });
    }
}

/* The sum of columns [i, i + n) over the rows of an expert. */
QD_INLINE vf column_sum(const qd_grouped_bias_args *a, int expert, int64_t i, int n)
{
    int64_t at = 0, end = a->begin + a->rows, held = 0;
    vf sum = {0}, part = {0};
    for (int s = 0; s < a->sources; s++)
        for (int e = 0; e < a->experts; e++) {
            int64_t first = at, last = at + a->counts[s * a->count_stride + e];
            at = last;
            first = first < a->begin ? a->begin : first;
            last = last > end ? end : last;
            for (int64_t row = first; row < last && e == expert; row++) {
                part += vec_load(a->x, (row - a->begin) * a->width + a->first + i, n, a->dtype);
                if (++held % SUM_ROWS == 0) {
                    sum += part;
                    part = vf_set(0.0f);
                }
            }
        }
    return sum + part;
}

static void sum(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_grouped_bias_args *a = context;
    for (int64_t expert = begin; expert < end; expert++) {
        void *grad = qd_cpu_at_mut(a->bias, expert * a->n, a->bias_dtype);
        QD_FOR_VECTORS(i, n, a->n, {
            vf total = column_sum(a, (int)expert, i, n);
            if (a->accumulate)
                total += vec_load(grad, i, n, a->bias_dtype);
            vec_store(grad, i, total, n, a->bias_dtype);
        });
    }
}

const qd_cpu_grouped_bias_ops QD_ISA_NAME(qd_cpu_grouped_bias_ops) = {.add = add, .sum = sum};
