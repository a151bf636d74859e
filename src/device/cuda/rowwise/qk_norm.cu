/* RMSNorm of all queries of a row together, and of all keys: two long vectors per row, of which a
 * rank may have some columns. The steps and the sums between ranks are described in
 * device/variants.h. Storage is fp32 or bf16, arithmetic fp32; sums over a row are in double, so
 * that they do not depend on how columns are distributed. */
#include "device/cuda/math_impl.cuh"
#include "device/cuda/sums_impl.h"

#include <type_traits>

enum { THREADS = 256, COLUMN_ROWS = 8, COLUMN_BLOCKS = 4 }; /* rows of a block's threads, blocks per multiprocessor, in the sums */

/* The queries (0) or keys (1) of a row. */
struct part {
    int64_t at, cols; /* first element, in the buffers of the rows */
    const void *gamma;
};

static __device__ __forceinline__ part part_of(const qd_qk_norm_args &a, int64_t row, int which)
{
    part p;
    p.at = row * a.row_stride + (which ? a.q_cols : 0);
    p.cols = which ? a.k_cols : a.q_cols;
    p.gamma = which ? a.k_gamma : a.q_gamma;
    return p;
}

static __device__ __forceinline__ float rstd_of(const qd_qk_norm_args &a, int64_t row, int which)
{
    const int64_t width = which ? a.k_width : a.q_width;
    return (float)(1.0 / sqrt((double)a.sums[2 * row + which] / (double)width + (double)a.eps));
}

/* Block (row, which): the sum of x², or with DOTS of d * gamma * x. */
template <typename T, typename P, int N, bool DOTS> static __global__ void __launch_bounds__(THREADS) total_kernel(qd_qk_norm_args a)
{
    __shared__ double scratch[32];
    const int64_t row = blockIdx.x;
    const int which = blockIdx.y;
    const part p = part_of(a, row, which);
    const bool counted = DOTS || which == 0 || a.counts_keys;
    double sum = 0;
    for (int64_t i = (int64_t)threadIdx.x * N; counted && i < p.cols; i += THREADS * N) {
        float x[N], d[N], g[N], here = 0.0f;
        load<N>((const T *)a.x + p.at + i, x);
        if constexpr (DOTS) {
            load<N>((const T *)a.d + p.at + i, d);
            load<N>((const P *)p.gamma + i, g);
        }
#pragma unroll
        for (int e = 0; e < N; e++)
            here = fmaf(x[e], DOTS ? d[e] * g[e] : x[e], here);
        sum += (double)here;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0)
        (DOTS ? a.dots : a.sums)[2 * row + which] = (float)sum;
}

/* Block: a row. Columns after the keys are copied. */
template <typename T, typename P, int N> static __global__ void __launch_bounds__(THREADS) forward_kernel(qd_qk_norm_args a)
{
    const int64_t row = blockIdx.x;
    for (int which = 0; which < 2; which++) {
        const part p = part_of(a, row, which);
        const float rstd = rstd_of(a, row, which);
        for (int64_t i = (int64_t)threadIdx.x * N; i < p.cols; i += THREADS * N) {
            float x[N], g[N];
            load<N>((const T *)a.x + p.at + i, x);
            load<N>((const P *)p.gamma + i, g);
#pragma unroll
            for (int e = 0; e < N; e++)
                x[e] = x[e] * rstd * g[e];
            store<N>((T *)a.y + p.at + i, x);
        }
    }
    for (int64_t i = a.q_cols + a.k_cols + threadIdx.x; i < a.row_stride; i += THREADS)
        ((T *)a.y)[row * a.row_stride + i] = ((const T *)a.x)[row * a.row_stride + i];
}

/* Block (32 N columns, range of rows), 32 x COLUMN_ROWS threads: with xhat = x * rstd and g = d *
 * gamma, d becomes rstd * (g - xhat * mean(g * xhat)), where the mean is rstd * dots / width. The
 * block's sums of d * xhat are its part: parts are (blocks, q_cols), then (blocks, k_cols). Queries
 * end at a multiple of N. */
template <typename T, typename P, int N>
static __global__ void __launch_bounds__(32 * COLUMN_ROWS) backward_kernel(qd_qk_norm_args a, int64_t rows_each, float *parts)
{
    __shared__ float sums[COLUMN_ROWS][32 * N];
    const int64_t cols = a.q_cols + a.k_cols, col = ((int64_t)blockIdx.x * 32 + threadIdx.x) * N;
    const int which = col >= a.q_cols;
    const int64_t begin = blockIdx.y * rows_each, end = begin + rows_each < a.rows ? begin + rows_each : a.rows;
    const double width = (double)(which ? a.k_width : a.q_width);
    float gamma[N] = {}, sum[N] = {};
    if (col < cols)
        load<N>((const P *)(which ? a.k_gamma : a.q_gamma) + col - (which ? a.q_cols : 0), gamma);
    for (int64_t row = begin + threadIdx.y; col < cols && row < end; row += COLUMN_ROWS) {
        const int64_t at = row * a.row_stride + col;
        const float rstd = rstd_of(a, row, which);
        const double dots = which == 0 || a.counts_keys ? (double)a.dots[2 * row + which] : 0.0;
        const float mean = (float)(dots * (double)rstd / width);
        float d[N], x[N];
        load<N>((const T *)a.d + at, d);
        load<N>((const T *)a.x + at, x);
#pragma unroll
        for (int e = 0; e < N; e++) {
            const float hat = x[e] * rstd;
            sum[e] = fmaf(d[e], hat, sum[e]);
            d[e] = (d[e] * gamma[e] - hat * mean) * rstd;
        }
        store<N>((T *)a.d + at, d);
    }
#pragma unroll
    for (int e = 0; e < N; e++)
        sums[threadIdx.y][threadIdx.x * N + e] = sum[e];
    __syncthreads();
    for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * N; c += 32 * COLUMN_ROWS) {
        const int64_t to = (int64_t)blockIdx.x * 32 * N + c;
        float total = 0.0f;
#pragma unroll
        for (int r = 0; r < COLUMN_ROWS; r++)
            total += sums[r][c];
        if (to < a.q_cols)
            parts[blockIdx.y * a.q_cols + to] = total;
        else if (to < cols)
            parts[gridDim.y * a.q_cols + blockIdx.y * a.k_cols + to - a.q_cols] = total;
    }
}

static qd_status check(const char *kernel, const qd_qk_norm_args *a, bool gammas)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    if (gammas)
        QD_TRY(qd_check_float(kernel, "gamma", a->param_dtype));
    if (a->q_cols < 1 || a->k_cols < 1 || a->q_width < a->q_cols || a->k_width < a->k_cols || a->row_stride < a->q_cols + a->k_cols)
        return QD_FAIL(QD_USAGE, "%s: rows of %lld elements cannot have %lld of %lld query columns and %lld of %lld key columns", kernel,
                       (long long)a->row_stride, (long long)a->q_cols, (long long)a->q_width, (long long)a->k_cols, (long long)a->k_width);
    if (a->rows > INT32_MAX) /* limit of a grid dimension */
        return QD_FAIL(QD_UNSUPPORTED, "%s: %lld rows; up to 2^31 - 1 are supported", kernel, (long long)a->rows);
    return QD_OK;
}

/* Calls body with values of the element types, and with 4 or 1 elements per access. */
template <typename F> static qd_status with_types(const qd_qk_norm_args *a, F body)
{
    const bool vector = a->q_cols % 4 == 0 && a->k_cols % 4 == 0 && a->row_stride % 4 == 0 && is_aligned(a->x) && is_aligned(a->y) &&
                        is_aligned(a->d) && is_aligned(a->q_gamma) && is_aligned(a->k_gamma);
    return with_type(a->dtype, [&](auto type) -> qd_status {
        return with_type(a->param_dtype, [&](auto param) -> qd_status {
            return vector ? body(type, param, std::integral_constant<int, 4>()) : body(type, param, std::integral_constant<int, 1>());
        });
    });
}

template <bool DOTS> static qd_status run_totals(const char *kernel, qd_stream *stream, const qd_qk_norm_args *a)
{
    QD_TRY(check(kernel, a, DOTS));
    if (a->rows <= 0)
        return QD_OK;
    return with_types(a, [&](auto type, auto param, auto n) -> qd_status {
        total_kernel<decltype(type), decltype(param), decltype(n)::value, DOTS>
            <<<dim3((unsigned)a->rows, 2), THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

extern "C" qd_status qd_cuda_qk_squares(qd_stream *stream, const qd_qk_norm_args *a)
{
    return run_totals<false>("qk_squares", stream, a);
}

extern "C" qd_status qd_cuda_qk_dots(qd_stream *stream, const qd_qk_norm_args *a)
{
    return run_totals<true>("qk_dots", stream, a);
}

extern "C" qd_status qd_cuda_qk_norm(qd_stream *stream, const qd_qk_norm_args *a)
{
    QD_TRY(check("qk_norm", a, true));
    if (a->rows <= 0)
        return QD_OK;
    return with_types(a, [&](auto type, auto param, auto n) -> qd_status {
        forward_kernel<decltype(type), decltype(param), decltype(n)::value>
            <<<(unsigned)a->rows, THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

extern "C" qd_status qd_cuda_qk_norm_backward(qd_stream *stream, const qd_qk_norm_args *a)
{
    QD_TRY(check("qk_norm_backward", a, true));
    QD_TRY(qd_check_float("qk_norm_backward", "gradient", a->grad_dtype));
    const qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int64_t cols = a->q_cols + a->k_cols;
    const bool clears = a->rows <= 0 && !a->accumulate; /* gradients of frozen gammas are NULL */
    if (clears && a->q_grad)
        QD_CUDA_TRY(cudaMemsetAsync(a->q_grad, 0, (size_t)a->q_cols * qd_dtype_size(a->grad_dtype), l.stream));
    if (clears && a->k_grad)
        QD_CUDA_TRY(cudaMemsetAsync(a->k_grad, 0, (size_t)a->k_cols * qd_dtype_size(a->grad_dtype), l.stream));
    if (a->rows <= 0)
        return QD_OK;
    void *parts = NULL;
    int64_t blocks = 0;
    QD_TRY(with_types(a, [&](auto type, auto param, auto n) -> qd_status {
        enum { N = decltype(n)::value };
        const int64_t tiles = divide_up(cols, 32 * N), most = divide_up(a->rows, 4 * COLUMN_ROWS);
        blocks = (int64_t)l.multiprocessors * COLUMN_BLOCKS / tiles;
        blocks = blocks < 1 ? 1 : blocks < most ? blocks : most;
        const int64_t rows_each = divide_up(a->rows, blocks);
        QD_TRY(qd_cuda_workspace(stream, blocks * cols * (int64_t)sizeof(float), &parts));
        backward_kernel<decltype(type), decltype(param), N>
            <<<dim3((unsigned)tiles, (unsigned)blocks), dim3(32, COLUMN_ROWS), 0, l.stream>>>(*a, rows_each, (float *)parts);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    }));
    const float *k_parts = (const float *)parts + blocks * a->q_cols;
    QD_TRY(qd_cuda_add_parts(l.stream, &a->q_grad, 1, a->grad_dtype, (const float *)parts, (int)blocks, a->q_cols, a->accumulate));
    return qd_cuda_add_parts(l.stream, &a->k_grad, 1, a->grad_dtype, k_parts, (int)blocks, a->k_cols, a->accumulate);
}
