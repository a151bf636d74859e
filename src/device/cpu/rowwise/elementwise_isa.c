/* Element-wise kernels on one range, vectorized. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

static void add(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_add_args *a = context;
    const void *x = qd_cpu_at(a->a, begin, a->a_dtype), *y = qd_cpu_at(a->b, begin, a->b_dtype);
    void *sum = qd_cpu_at_mut(a->y, begin, a->y_dtype);
    QD_FOR_VECTORS(i, n, end - begin, {
        vec_store(sum, i, vec_load(x, i, n, a->a_dtype) + vec_load(y, i, n, a->b_dtype), n, a->y_dtype);
    });
}

static void cast(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_cast_args *a = context;
    const void *from = qd_cpu_at(a->from, begin, a->from_dtype);
    void *to = qd_cpu_at_mut(a->to, begin, a->to_dtype);
    QD_FOR_VECTORS(i, n, end - begin, {
        vec_store(to, i, vec_load(from, i, n, a->from_dtype), n, a->to_dtype);
    });
}

static void copy_rows(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_copy_rows_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        const void *from = qd_cpu_at(a->from, row * a->from_stride, a->from_dtype);
        void *to = qd_cpu_at_mut(a->to, row * a->to_stride, a->to_dtype);
        QD_FOR_VECTORS(i, n, a->cols, {
            vf x = vec_load(from, i, n, a->from_dtype);
            if (a->accumulate)
                x += vec_load(to, i, n, a->to_dtype);
            vec_store(to, i, x, n, a->to_dtype);
        });
    }
}

const qd_cpu_elementwise_ops QD_ISA_NAME(qd_cpu_elementwise_ops) = {.add = add, .cast = cast, .copy_rows = copy_rows};
