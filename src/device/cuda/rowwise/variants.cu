/* Element-wise kernels that only some families of models need: limits on queries, keys and values,
 * scaled embeddings, capped logits. Storage is fp32 or bf16, arithmetic fp32. Results may overwrite
 * inputs. */
#include "device/cuda/math_impl.cuh"

#include <math.h>

enum { THREADS = 256 };

/* y[i] = body(x[i], other[i]) for n elements; other may be NULL, then body gets 0. */
template <typename T, int N, typename F> static __global__ void __launch_bounds__(THREADS)
    map_kernel(const T *x, const T *other, T *y, int64_t n, F body)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n)
        return;
    float v[N], w[N] = {};
    load<N>(x + i, v);
    if (other)
        load<N>(other + i, w);
#pragma unroll
    for (int e = 0; e < N; e++)
        v[e] = body(v[e], w[e]);
    store<N>(y + i, v);
}

template <typename F>
static qd_status map(qd_stream *stream, const char *kernel, qd_dtype dtype, const void *x, const void *other, void *y, int64_t n, F body)
{
    QD_TRY(qd_check_float(kernel, "x", dtype));
    if (n <= 0)
        return QD_OK;
    return with_type(dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        cudaStream_t on = qd_cuda_launch_of(stream).stream;
        if (can_vector(n, x, other, y))
            map_kernel<T, VECTOR><<<(unsigned)divide_up(n / VECTOR, THREADS), THREADS, 0, on>>>((const T *)x, (const T *)other, (T *)y, n,
                                                                                             body);
        else
            map_kernel<T, 1><<<(unsigned)divide_up(n, THREADS), THREADS, 0, on>>>((const T *)x, (const T *)other, (T *)y, n, body);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

/* Comparisons instead of fminf and fmaxf, which would drop a NaN. */
struct clip_to {
    float limit;
    __device__ float operator()(float x, float) const { return x < -limit ? -limit : x > limit ? limit : x; }
};
struct clip_gradient {
    float limit;
    __device__ float operator()(float x, float dy) const { return x < -limit || x > limit ? 0.0f : dy; }
};
struct scale_by {
    float factor;
    __device__ float operator()(float x, float) const { return x * factor; }
};
struct cap_at {
    float cap;
    __device__ float operator()(float x, float) const { return cap * tanhf(x / cap); }
};

extern "C" qd_status qd_cuda_clip(qd_stream *stream, const qd_clip_args *a)
{
    return map(stream, "clip", a->dtype, a->x, NULL, a->y, a->n, clip_to{a->limit});
}

extern "C" qd_status qd_cuda_clip_backward(qd_stream *stream, const qd_clip_args *a)
{
    return map(stream, "clip_backward", a->dtype, a->x, a->dy, a->y, a->n, clip_gradient{a->limit});
}

extern "C" qd_status qd_cuda_scale(qd_stream *stream, const qd_scale_args *a)
{
    return map(stream, "scale", a->dtype, a->x, NULL, a->y, a->n, scale_by{a->factor});
}

extern "C" qd_status qd_cuda_softcap(qd_stream *stream, const qd_softcap_args *a)
{
    return map(stream, "softcap", a->dtype, a->x, NULL, a->x, a->n, cap_at{a->cap});
}
