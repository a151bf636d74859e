/* Biases of experts. Rows of an expert are found as in grouped GEMMs: each block reads the counts
 * and visits its share of the tiles. Gradients are sums over an expert's rows, in two kernels:
 * columns of each tile, then the tiles of an expert in ascending order of source and row, so that
 * the result does not depend on which block is faster. */
#include "device/cuda/experts/grouped_impl.cuh"

namespace {

enum { THREADS = 256, WARPS = THREADS / 32 };
enum { ADD_ROWS = 16, ADD_COLUMNS = THREADS * VECTOR };
enum { SUM_ROWS = 128, SUM_COLUMNS = 32 * VECTOR };

/* Whether the tile has N columns from `at` on. */
template <int N> __device__ __forceinline__ bool within(const grouped_tile &t, int at)
{
    return at + N <= t.columns;
}

/* Each thread has N columns and walks down the rows of a tile. */
template <int N> __global__ void __launch_bounds__(THREADS) add_kernel(qd_grouped_bias_args a, qd_grouped_args g, bool half, bool bias_half)
{
    __shared__ grouped_segments table;
    if (threadIdx.x < 32)
        plan_segments(g, ADD_ROWS, &table);
    __syncthreads();
    grouped_tiles<false, ADD_ROWS, ADD_COLUMNS> list(g, table, blockIdx.x, gridDim.x);
    grouped_tile t;
    while (list.next(t))
        for (int at = threadIdx.x * N; within<N>(t, at); at += THREADS * N) {
            float bias[N];
            load_as<N>(a.bias, t.expert * a.n + t.column + at, bias_half, bias);
#pragma unroll 4
            for (int r = 0; r < t.rows; r++) {
                const int64_t to = (t.row + r) * a.width + a.first + t.column + at;
                float v[N];
                load_as<N>(a.x, to, half, v);
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[j] += bias[j];
                store_as<N>(a.x, to, half, v);
            }
        }
}

/* parts (row tiles, n): the column sums of each tile. A warp adds every WARPS-th row, in fp32. */
template <int N>
__global__ void __launch_bounds__(THREADS) sum_tiles_kernel(qd_grouped_bias_args a, qd_grouped_args g, float *parts, bool half)
{
    __shared__ grouped_segments table;
    __shared__ float sums[WARPS][SUM_COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0)
        plan_segments(g, SUM_ROWS, &table);
    __syncthreads();
    grouped_tiles<false, SUM_ROWS, SUM_COLUMNS> list(g, table, blockIdx.x, gridDim.x);
    grouped_tile t;
    while (list.next(t)) {
        for (int at = lane * N; within<N>(t, at); at += 32 * N) {
            float sum[N] = {};
#pragma unroll 8
            for (int r = warp; r < t.rows; r += WARPS) {
                float v[N];
                load_as<N>(a.x, (t.row + r) * a.width + a.first + t.column + at, half, v);
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum[j] += v[j];
            }
#pragma unroll
            for (int j = 0; j < N; j++)
                sums[warp][at + j] = sum[j];
        }
        __syncthreads();
        const int64_t line = table.tile[list.segment] + (t.row - table.row[list.segment]) / SUM_ROWS;
        for (int i = threadIdx.x; i < t.columns; i += THREADS) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                total += sums[w][i];
            parts[line * a.n + t.column + i] = total;
        }
        __syncthreads();
    }
}

/* Block (columns, expert). */
__global__ void __launch_bounds__(THREADS) join_tiles_kernel(qd_grouped_bias_args a, qd_grouped_args g, const float *parts, bool bias_half)
{
    __shared__ grouped_segments table;
    if (threadIdx.x < 32)
        plan_segments(g, SUM_ROWS, &table);
    __syncthreads();
    const int expert = blockIdx.y;
    const int64_t column = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (column >= a.n)
        return;
    float total[1] = {0.0f};
    for (int source = 0; source < a.sources; source++) {
        const int segment = source * a.experts + expert;
#pragma unroll 8
        for (int tile = table.tile[segment]; tile < table.tile[segment + 1]; tile++)
            total[0] += parts[(int64_t)tile * a.n + column];
    }
    if (a.accumulate) {
        float old[1];
        load_as<1>(a.bias, expert * a.n + column, bias_half, old);
        total[0] += old[0];
    }
    store_as<1>(a.bias, expert * a.n + column, bias_half, total);
}

bool in_vectors(const qd_grouped_bias_args *a)
{
    return can_vector(a->n, a->x, a->bias) && a->width % VECTOR == 0 && a->first % VECTOR == 0;
}

/* The same list of rows, as the functions of grouped GEMMs read it. */
qd_grouped_args rows_of(const qd_grouped_bias_args *a)
{
    qd_grouped_args g = {};
    g.counts = a->counts;
    g.count_stride = a->count_stride;
    g.begin = a->begin;
    g.rows = a->rows;
    g.n = a->n;
    g.sources = a->sources;
    g.experts = a->experts;
    return g;
}

qd_status check(const char *kernel, const qd_grouped_bias_args *a)
{
    QD_TRY(qd_grouped_bias_check(kernel, a));
    if ((int64_t)a->sources * a->experts > QD_GROUPED_SEGMENTS)
        return QD_FAIL(QD_UNSUPPORTED, "%s: %d experts times %d sources; the product must not exceed %d", kernel, a->experts, a->sources,
                       (int)QD_GROUPED_SEGMENTS);
    if (a->rows >= (int64_t)1 << 31 || a->n >= (int64_t)1 << 31)
        return QD_FAIL(QD_UNSUPPORTED, "%s: rows %lld, n %lld; each must be below 2^31", kernel, (long long)a->rows, (long long)a->n);
    return QD_OK;
}

} // namespace

extern "C" qd_status qd_cuda_grouped_bias(qd_stream *stream, const qd_grouped_bias_args *a)
{
    QD_TRY(check("grouped_bias", a));
    if (a->rows == 0 || a->n == 0)
        return QD_OK;
    const qd_cuda_launch l = qd_cuda_launch_of(stream);
    const bool half = a->dtype == QD_BF16, bias_half = a->bias_dtype == QD_BF16;
    const unsigned blocks = (unsigned)l.multiprocessors * 4;
    if (in_vectors(a))
        add_kernel<VECTOR><<<blocks, THREADS, 0, l.stream>>>(*a, rows_of(a), half, bias_half);
    else
        add_kernel<1><<<blocks, THREADS, 0, l.stream>>>(*a, rows_of(a), half, bias_half);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_grouped_bias_grad(qd_stream *stream, const qd_grouped_bias_args *a)
{
    QD_TRY(check("grouped_bias_grad", a));
    if (a->experts == 0 || a->n == 0)
        return QD_OK;
    const qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int64_t tiles = a->rows / SUM_ROWS + (int64_t)a->sources * a->experts; /* at most */
    void *parts;
    QD_TRY(qd_cuda_workspace(stream, tiles * a->n * (int64_t)sizeof(float), &parts));
    if (a->rows > 0) {
        const bool half = a->dtype == QD_BF16;
        const unsigned blocks = (unsigned)l.multiprocessors * 4;
        if (in_vectors(a))
            sum_tiles_kernel<VECTOR><<<blocks, THREADS, 0, l.stream>>>(*a, rows_of(a), (float *)parts, half);
        else
            sum_tiles_kernel<1><<<blocks, THREADS, 0, l.stream>>>(*a, rows_of(a), (float *)parts, half);
        QD_CUDA_LAUNCHED();
    }
    join_tiles_kernel<<<dim3((unsigned)divide_up(a->n, THREADS), (unsigned)a->experts), THREADS, 0, l.stream>>>(
        *a, rows_of(a), (const float *)parts, a->bias_dtype == QD_BF16);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
