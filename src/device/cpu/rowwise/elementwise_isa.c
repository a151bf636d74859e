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

static void clip(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_clip_args *a = context;
    const void *x = qd_cpu_at(a->x, begin, a->dtype);
    void *y = qd_cpu_at_mut(a->y, begin, a->dtype);
    vf low = vf_set(-a->limit), high = vf_set(a->limit);
    QD_FOR_VECTORS(i, n, end - begin, {
        vf v = vec_load(x, i, n, a->dtype);
        vec_store(y, i, vf_select(v < low, low, vf_select(v > high, high, v)), n, a->dtype);
    });
}

static void clip_backward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_clip_args *a = context;
    const void *x = qd_cpu_at(a->x, begin, a->dtype), *dy = qd_cpu_at(a->dy, begin, a->dtype);
    void *dx = qd_cpu_at_mut(a->y, begin, a->dtype);
    vf low = vf_set(-a->limit), high = vf_set(a->limit);
    QD_FOR_VECTORS(i, n, end - begin, {
        vf v = vec_load(x, i, n, a->dtype);
        vec_store(dx, i, vf_select((v < low) | (v > high), vf_set(0.0f), vec_load(dy, i, n, a->dtype)), n, a->dtype);
    });
}

static void scale(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_scale_args *a = context;
    const void *x = qd_cpu_at(a->x, begin, a->dtype);
    void *y = qd_cpu_at_mut(a->y, begin, a->dtype);
    QD_FOR_VECTORS(i, n, end - begin, { vec_store(y, i, vec_load(x, i, n, a->dtype) * a->factor, n, a->dtype); });
}

static void softcap(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_softcap_args *a = context;
    void *x = qd_cpu_at_mut(a->x, begin, a->dtype);
    QD_FOR_VECTORS(i, n, end - begin, { vec_store(x, i, vec_tanh(vec_load(x, i, n, a->dtype) / a->cap) * a->cap, n, a->dtype); });
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

const qd_cpu_elementwise_ops QD_ISA_NAME(qd_cpu_elementwise_ops) = {
    .add = add, .cast = cast, .clip = clip, .clip_backward = clip_backward, .scale = scale,
    .softcap = softcap, .copy_rows = copy_rows};
