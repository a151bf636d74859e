/* The gate of shared experts: each row times the sigmoid of one number. A warp processes a row, in
 * steps of N consecutive elements per lane. Storage is fp32 or bf16, arithmetic fp32. */
#include "device/cuda/math_impl.cuh"

enum { WARPS = 8, THREADS = 32 * WARPS };

template <typename T, int N> static __global__ void __launch_bounds__(THREADS) forward_kernel(qd_gate_args a)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= a.rows)
        return;
    const float open = 1.0f / (1.0f + expf(-a.gate[row]));
    for (int64_t i = (int64_t)(threadIdx.x % 32) * N; i < a.cols; i += 32 * N) {
        float v[N];
        load<N>((const T *)a.x + row * a.cols + i, v);
#pragma unroll
        for (int e = 0; e < N; e++)
            v[e] *= open;
        store<N>((T *)a.y + row * a.cols + i, v);
    }
}

template <typename T, int N> static __global__ void __launch_bounds__(THREADS) backward_kernel(qd_gate_args a)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= a.rows)
        return;
    const float open = 1.0f / (1.0f + expf(-a.gate[row])), rest = 1.0f / (1.0f + expf(a.gate[row]));
    float dot = 0.0f;
    for (int64_t i = (int64_t)lane * N; i < a.cols; i += 32 * N) {
        float v[N], d[N];
        load<N>((const T *)a.x + row * a.cols + i, v);
        load<N>((const T *)a.dy + row * a.cols + i, d);
#pragma unroll
        for (int e = 0; e < N; e++) {
            dot = fmaf(d[e], v[e], dot);
            d[e] *= open;
        }
        store<N>((T *)a.dx + row * a.cols + i, d);
    }
    float sum[1] = {warp_sum(dot) * (open * rest)};
    if (lane == 0)
        store<1>((T *)a.d_gate + row, sum);
}

/* Calls body with a value of the element type, and with 4 or 1 elements per lane. */
template <typename F> static qd_status with_types(const char *kernel, const qd_gate_args *a, F body)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    const bool vector = a->cols % 4 == 0 && is_aligned(a->x) && is_aligned(a->y) && is_aligned(a->dy) && is_aligned(a->dx);
    return with_type(a->dtype, [&](auto type) -> qd_status {
        return vector ? body(type, std::integral_constant<int, 4>()) : body(type, std::integral_constant<int, 1>());
    });
}

extern "C" qd_status qd_cuda_gate(qd_stream *stream, const qd_gate_args *a)
{
    return with_types("gate", a, [&](auto type, auto n) -> qd_status {
        forward_kernel<decltype(type), decltype(n)::value>
            <<<(unsigned)divide_up(a->rows, WARPS), THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

extern "C" qd_status qd_cuda_gate_backward(qd_stream *stream, const qd_gate_args *a)
{
    return with_types("gate_backward", a, [&](auto type, auto n) -> qd_status {
        backward_kernel<decltype(type), decltype(n)::value>
            <<<(unsigned)divide_up(a->rows, WARPS), THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}
