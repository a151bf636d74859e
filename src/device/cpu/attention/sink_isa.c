/* Attention sinks: a logit per head that takes a share of the softmax and has no value. Applied to
 * finished results, so the kernels of attention do not know of it. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>

static float scalar(const void *p, int64_t i, qd_dtype dtype)
{
    return vec_load(p, i, 1, dtype)[0];
}

static void forward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_sink_args *a = context;
    for (int64_t row = begin; row < end; row++)
        for (int h = 0; h < a->heads; h++) {
            float *lse = &a->lse[(row / a->seq * a->heads + h) * a->seq + row % a->seq];
            double sink = (double)scalar(a->sink, a->first + h, a->param_dtype), old = (double)*lse, most = fmax(sink, old);
            double both = most + log(exp(sink - most) + exp(old - most));
            float share = (float)exp(old - both);
            void *o = qd_cpu_at_mut(a->o, row * a->o_stride + (int64_t)h * a->head_dim, a->dtype);
            QD_FOR_VECTORS(i, n, a->head_dim, { vec_store(o, i, vec_load(o, i, n, a->dtype) * share, n, a->dtype); });
            *lse = (float)both;
        }
}

/* Rows of a head are added in ascending order, in double. */
static void backward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_sink_args *a = context;
    for (int64_t i = begin; i < end; i++) {
        int64_t h = i - a->first;
        double sum = 0.0, sink = (double)scalar(a->sink, i, a->param_dtype);
        for (int64_t b = 0; b < a->batch && h >= 0 && h < a->heads; b++)
            for (int64_t t = 0, at = (b * a->heads + h) * a->seq; t < a->seq; t++)
                sum -= exp(sink - (double)a->lse[at + t]) * (double)a->delta[at + t];
        float before = a->accumulate ? scalar(a->grad, i, a->grad_dtype) : 0.0f;
        vec_store(a->grad, i, vf_set((float)((double)before + sum)), 1, a->grad_dtype);
    }
}

const qd_cpu_sink_ops QD_ISA_NAME(qd_cpu_sink_ops) = {.forward = forward, .backward = backward};
