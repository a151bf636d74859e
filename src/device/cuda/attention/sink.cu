/* Attention sinks: a logit per head that takes a share of the softmax and has no value. Applied to
 * finished results, so the kernels of attention do not know of it: with the new log-sum-exps, their
 * backward pass computes the gradients of attention with sinks. */
#include "device/cuda/math_impl.cuh"

#include <math.h>

enum { THREADS = 256, SUM_THREADS = 1024 };

static __device__ __forceinline__ float sink_of(const qd_sink_args &a, int head, bool half)
{
    float v[1];
    load_as<1>(a.sink, a.first + head, half, v);
    return v[0];
}

/* `lanes`, a power of two, threads of a warp share a (row, head): they read its log-sum-exp before
 * one of them overwrites it. */
template <typename T, int N> static __global__ void __launch_bounds__(THREADS) sink_kernel(qd_sink_args a, int lanes, bool param_half)
{
    const int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, pair = item / lanes;
    const int lane = (int)(item % lanes);
    const bool is = pair < a.batch * a.seq * a.heads;
    float *lse = NULL, old = 0.0f, logit = 0.0f;
    if (is) {
        int64_t row, head, sequence, t;
        split_index(pair, a.heads, row, head);
        split_index(row, a.seq, sequence, t);
        lse = &a.lse[(sequence * a.heads + head) * a.seq + t];
        old = *lse;
        logit = sink_of(a, (int)head, param_half);
        const float share = 1.0f / (1.0f + expf(logit - old));
        T *o = (T *)a.o + row * a.o_stride + head * a.head_dim;
        for (int i = lane * N; i < a.head_dim; i += lanes * N) {
            float v[N];
            load<N>(o + i, v);
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] *= share;
            store<N>(o + i, v);
        }
    }
    __syncwarp();
    if (is && lane == 0)
        *lse = fmaxf(logit, old) + log1pf(expf(-fabsf(logit - old)));
}

extern "C" qd_status qd_cuda_sink(qd_stream *stream, const qd_sink_args *a)
{
    QD_TRY(qd_sink_check("sink", a, false));
    const int64_t pairs = a->batch * a->seq * a->heads;
    if (pairs == 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        const bool vector = can_vector(a->head_dim, a->o) && a->o_stride % VECTOR == 0, half = a->param_dtype == QD_BF16;
        int lanes = 1;
        while (lanes < 32 && lanes * (vector ? VECTOR : 1) < a->head_dim)
            lanes *= 2;
        const unsigned blocks = (unsigned)divide_up(pairs * lanes, THREADS);
        cudaStream_t on = qd_cuda_launch_of(stream).stream;
        if (vector)
            sink_kernel<T, VECTOR><<<blocks, THREADS, 0, on>>>(*a, lanes, half);
        else
            sink_kernel<T, 1><<<blocks, THREADS, 0, on>>>(*a, lanes, half);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

/* Block: one of all heads. Each thread adds every SUM_THREADS-th row in double, then the threads'
 * sums are added: always in the same order. */
static __global__ void __launch_bounds__(SUM_THREADS) sink_backward_kernel(qd_sink_args a, bool param_half, bool grad_half)
{
    __shared__ double scratch[32];
    const int head = (int)blockIdx.x - a.first;
    double sum = 0.0;
    if (head >= 0 && head < a.heads) {
        const float logit = sink_of(a, head, param_half);
        for (int64_t b = 0; b < a.batch; b++) {
            const int64_t at = (b * a.heads + head) * a.seq;
            for (int64_t t = threadIdx.x; t < a.seq; t += SUM_THREADS)
                sum -= (double)(expf(logit - a.lse[at + t]) * a.delta[at + t]);
        }
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        float v[1] = {0.0f};
        if (a.accumulate)
            load_as<1>(a.grad, blockIdx.x, grad_half, v);
        v[0] = (float)((double)v[0] + sum);
        store_as<1>(a.grad, blockIdx.x, grad_half, v);
    }
}

extern "C" qd_status qd_cuda_sink_backward(qd_stream *stream, const qd_sink_args *a)
{
    QD_TRY(qd_sink_check("sink_backward", a, true));
    sink_backward_kernel<<<(unsigned)a->all, SUM_THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a, a->param_dtype == QD_BF16,
                                                                                                a->grad_dtype == QD_BF16);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
