/* RMSNorm of queries and keys: many short vectors per row. A warp processes one head at a time, in
 * steps of N consecutive elements per lane. Storage is fp32 or bf16, arithmetic fp32. */
#include "device/cuda/math_impl.cuh"
#include "device/cuda/sums_impl.h"

enum { WARPS = 8, THREADS = 32 * WARPS, BLOCKS = 4 }; /* BLOCKS: per multiprocessor, in the backward pass */

/* A block per row. */
template <typename T, typename P, int N> static __global__ void __launch_bounds__(THREADS) forward_kernel(qd_head_norm_args a)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, normed = a.heads + a.kv_heads;
    const int64_t row = blockIdx.x;
    const float more = a.plus_one ? 1.0f : 0.0f;
    const T *x = (const T *)a.x + row * a.row_stride;
    T *y = (T *)a.y + row * a.row_stride;
    for (int h = warp; h < normed; h += WARPS) {
        const P *gamma = (const P *)(h < a.heads ? a.q_gamma : a.k_gamma);
        const int64_t at = (int64_t)h * a.head_dim;
        float v[N], g[N], sum = 0.0f;
        for (int i = lane * N; i < a.head_dim; i += 32 * N) {
            load<N>(x + at + i, v);
#pragma unroll
            for (int e = 0; e < N; e++)
                sum = fmaf(v[e], v[e], sum);
        }
        const float rstd = 1.0f / sqrtf(warp_sum(sum) / (float)a.head_dim + a.eps);
        if (lane == 0)
            a.rstd[row * normed + h] = rstd;
        for (int i = lane * N; i < a.head_dim; i += 32 * N) {
            load<N>(x + at + i, v);
            load<N>(gamma + i, g);
#pragma unroll
            for (int e = 0; e < N; e++)
                v[e] = v[e] * rstd * (g[e] + more);
            store<N>(y + at + i, v);
        }
    }
    for (int64_t i = (int64_t)normed * a.head_dim + threadIdx.x; i < a.row_stride; i += THREADS)
        y[i] = x[i];
}

/* d in place, with xhat = x * rstd and g = d * gamma: rstd * (g - xhat * mean(g * xhat)). Each warp
 * iterates over rows and heads, and sums d * xhat of queries and of keys in its part of shared
 * memory, (2, head_dim); a lane accesses only its own elements. The block's sums, added in the
 * order of warps, are its part, (2, head_dim). */
template <typename T, typename P, int N>
static __global__ void __launch_bounds__(THREADS) backward_kernel(qd_head_norm_args a, float *parts)
{
    extern __shared__ __align__(16) float sums[];
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, normed = a.heads + a.kv_heads,
              width = 2 * a.head_dim;
    const float more = a.plus_one ? 1.0f : 0.0f;
    for (int i = threadIdx.x; i < warps * width; i += blockDim.x)
        sums[i] = 0.0f;
    __syncthreads();
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        for (int h = warp; h < normed; h += warps) {
            const bool query = h < a.heads;
            const P *gamma = (const P *)(query ? a.q_gamma : a.k_gamma);
            const int64_t at = row * a.row_stride + (int64_t)h * a.head_dim;
            const T *x = (const T *)a.x + at;
            T *d = (T *)a.d + at;
            float *sum = sums + warp * width + (query ? 0 : a.head_dim);
            const float rstd = a.rstd[row * normed + h];
            float dy[N], v[N], g[N], s[N], total = 0.0f;
            for (int i = lane * N; i < a.head_dim; i += 32 * N) {
                load<N>(d + i, dy);
                load<N>(x + i, v);
                load<N>(gamma + i, g);
                load<N>(sum + i, s);
#pragma unroll
                for (int e = 0; e < N; e++) {
                    const float hat = v[e] * rstd;
                    total = fmaf(dy[e] * (g[e] + more), hat, total);
                    s[e] = fmaf(dy[e], hat, s[e]);
                }
                store<N>(sum + i, s);
            }
            const float mean = warp_sum(total) / (float)a.head_dim;
            for (int i = lane * N; i < a.head_dim; i += 32 * N) {
                load<N>(d + i, dy);
                load<N>(x + i, v);
                load<N>(gamma + i, g);
#pragma unroll
                for (int e = 0; e < N; e++)
                    dy[e] = (dy[e] * (g[e] + more) - v[e] * rstd * mean) * rstd;
                store<N>(d + i, dy);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < warps; w++)
            sum += sums[w * width + i];
        parts[(int64_t)blockIdx.x * width + i] = sum;
    }
}

static qd_status check(const char *kernel, const qd_head_norm_args *a)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    QD_TRY(qd_check_float(kernel, "gamma", a->param_dtype));
    const int64_t width = (int64_t)(a->heads + a->kv_heads) * a->head_dim;
    if (a->head_dim < 1 || a->row_stride < width)
        return QD_FAIL(QD_USAGE, "%s: rows of %lld elements are shorter than their queries and keys, %lld elements", kernel,
                       (long long)a->row_stride, (long long)width);
    if (a->rows > INT32_MAX) /* limit of a grid dimension */
        return QD_FAIL(QD_UNSUPPORTED, "%s: %lld rows; up to 2^31 - 1 are supported", kernel, (long long)a->rows);
    return QD_OK;
}

/* Calls body with values of the element types, and with 4 or 1 elements per lane. */
template <typename F> static qd_status with_types(const qd_head_norm_args *a, F body)
{
    const bool vector = a->head_dim % 4 == 0 && a->row_stride % 4 == 0 && is_aligned(a->x) && is_aligned(a->y) && is_aligned(a->d) &&
                        is_aligned(a->q_gamma) && is_aligned(a->k_gamma);
    return with_type(a->dtype, [&](auto type) -> qd_status {
        return with_type(a->param_dtype, [&](auto param) -> qd_status {
            return vector ? body(type, param, std::integral_constant<int, 4>()) : body(type, param, std::integral_constant<int, 1>());
        });
    });
}

extern "C" qd_status qd_cuda_head_norm(qd_stream *stream, const qd_head_norm_args *a)
{
    QD_TRY(check("head_norm", a));
    if (a->rows <= 0)
        return QD_OK;
    return with_types(a, [&](auto type, auto param, auto n) -> qd_status {
        forward_kernel<decltype(type), decltype(param), decltype(n)::value>
            <<<(unsigned)a->rows, THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

extern "C" qd_status qd_cuda_head_norm_backward(qd_stream *stream, const qd_head_norm_args *a)
{
    QD_TRY(check("head_norm_backward", a));
    QD_TRY(qd_check_float("head_norm_backward", "gradient", a->grad_dtype));
    const qd_cuda_launch l = qd_cuda_launch_of(stream);
    if (a->rows <= 0 && !a->accumulate && a->q_grad && a->k_grad) {
        const size_t bytes = (size_t)a->head_dim * qd_dtype_size(a->grad_dtype);
        QD_CUDA_TRY(cudaMemsetAsync(a->q_grad, 0, bytes, l.stream));
        QD_CUDA_TRY(cudaMemsetAsync(a->k_grad, 0, bytes, l.stream));
    }
    if (a->rows <= 0)
        return QD_OK;
    const int64_t each = 2 * (int64_t)a->head_dim * (int64_t)sizeof(float); /* a warp's sums */
    int warps = WARPS;
    while (warps > 1 && warps * each > l.shared_most)
        warps /= 2;
    if (warps * each > l.shared_most)
        return QD_FAIL(QD_UNSUPPORTED, "head_norm_backward: head_dim %d; up to %lld are supported", a->head_dim,
                       (long long)(l.shared_most / (2 * (int64_t)sizeof(float))));
    const int64_t most = (int64_t)l.multiprocessors * BLOCKS, blocks = a->rows < most ? a->rows : most;
    void *parts;
    QD_TRY(qd_cuda_workspace(stream, blocks * each, &parts));
    QD_TRY(with_types(a, [&](auto type, auto param, auto n) -> qd_status {
        auto kernel = backward_kernel<decltype(type), decltype(param), decltype(n)::value>;
        QD_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(warps * each)));
        kernel<<<(unsigned)blocks, warps * 32, warps * each, l.stream>>>(*a, (float *)parts);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    }));
    if (!a->q_grad && !a->k_grad) /* frozen */
        return QD_OK;
    void *to[] = {a->q_grad, a->k_grad};
    return qd_cuda_add_parts(l.stream, to, 2, a->grad_dtype, (const float *)parts, (int)blocks, a->head_dim, a->accumulate);
}
