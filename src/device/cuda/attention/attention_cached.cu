/* Attention of a few new rows to a key/value cache, for generation: bound by reading the cache.
 * Each (row, head) is split into stretches of the context, enough to keep the multiprocessors busy.
 * A block sums one stretch, with one key per warp and step. The values of latent attention are the
 * beginnings of its keys, and there is one cache. */
#include "device/cuda/attention/attention_impl.h"
#include "device/cuda/math_impl.cuh"

#include <math.h>

enum { THREADS = 128, WARPS = THREADS / 32, STRETCH_LEAST = 64, HEAD_MOST = 1024 };

/* Where a cache keeps a position: with a window it is a ring. */
static __device__ __forceinline__ int64_t cache_row(const qd_attention_cached_args &a, int64_t position)
{
    return a.window ? position % a.context : position;
}

/* Elements of a head of values and results. */
static __host__ __device__ __forceinline__ int value_dim(const qd_attention_cached_args &a)
{
    return a.v ? a.head_dim : a.v_dim;
}

/* Stores the new rows in both caches: positions past .. past + rows - 1. Items: (row, column). */
static __global__ void __launch_bounds__(THREADS) store_rows_kernel(qd_attention_cached_args a, int64_t cols, bool half)
{
    int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, row, col;
    if (item >= a.rows * cols)
        return;
    split_index(item, cols, row, col);
    float v[1];
    load_as<1>(a.k, row * a.k_stride + col, half, v);
    const int64_t to = cache_row(a, a.past + row) * cols + col;
    store_as<1>(a.k_cache, to, half, v);
    if (!a.v)
        return;
    load_as<1>(a.v, row * a.v_stride + col, half, v);
    store_as<1>(a.v_cache, to, half, v);
}

/* Partial result of a stretch: maximum and sum of exponentials. Its weighted values are not yet
 * divided by the sum. */
struct partial {
    float most, total;
};

/* Block (stretch, head, row). lse_rows: rows of a.lse, which may be those of several launches. With
 * one stretch, writes the result; else its part: partials (rows, heads, stretches) and sums (rows,
 * heads, stretches, value_dim). PER: elements of a head per lane. */
template <int PER>
static __global__ void __launch_bounds__(THREADS)
    stretch_kernel(qd_attention_cached_args a, int64_t keys_each, partial *partials, float *sums, int64_t lse_rows, bool half)
{
    __shared__ partial parts[WARPS];
    __shared__ float values[WARPS][PER * 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y, d = a.head_dim, v_dim = value_dim(a);
    const int64_t row = blockIdx.z, cols = (int64_t)a.kv_heads * d, from = (int64_t)(head / (a.heads / a.kv_heads)) * d;
    const int64_t keys = a.past + row + 1, first = a.window && keys > a.window ? keys - a.window : 0;
    const int64_t begin = first + blockIdx.x * keys_each, end = begin + keys_each < keys ? begin + keys_each : keys;
    float q[PER], o[PER], most = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        float v[1] = {0.0f};
        if (lane + 32 * i < d)
            load_as<1>(a.q, row * a.q_stride + (int64_t)head * d + lane + 32 * i, half, v);
        q[i] = v[0] * a.scale;
        o[i] = 0.0f;
    }
    for (int64_t key = begin + warp; key < end; key += WARPS) {
        const int64_t at = cache_row(a, key) * cols + from;
        float score = 0.0f, v[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) {
            float k[1] = {0.0f}, value[1] = {0.0f};
            if (lane + 32 * i < d) {
                load_as<1>(a.k_cache, at + lane + 32 * i, half, k);
                if (a.v)
                    load_as<1>(a.v_cache, at + lane + 32 * i, half, value);
            }
            score = fmaf(q[i], k[0], score);
            v[i] = a.v ? value[0] : k[0];
        }
        score = warp_sum(score);
        if (a.softcap != 0.0f)
            score = a.softcap * tanhf(score / a.softcap);
        const float top = fmaxf(most, score), shift = top == -INFINITY ? 0.0f : top;
        const float shrink = expf(most - shift), weight = expf(score - shift);
        total = total * shrink + weight;
        most = top;
#pragma unroll
        for (int i = 0; i < PER; i++)
            o[i] = o[i] * shrink + weight * v[i];
    }
    if (lane == 0) {
        parts[warp].most = most;
        parts[warp].total = total;
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        values[warp][lane + 32 * i] = o[i];
    __syncthreads();
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        top = fmaxf(top, parts[w].most);
    const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        sum += parts[w].total * expf(parts[w].most - shift);
    const int64_t place = (row * a.heads + head) * gridDim.x + blockIdx.x;
    if (gridDim.x > 1 && threadIdx.x == 0) {
        partials[place].most = top;
        partials[place].total = sum;
    }
    if (gridDim.x == 1 && threadIdx.x == 0 && a.lse)
        a.lse[head * lse_rows + row] = shift + logf(sum);
    for (int i = threadIdx.x; i < v_dim; i += THREADS) {
        float v[1] = {0.0f};
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            v[0] += values[w][i] * expf(parts[w].most - shift);
        if (gridDim.x > 1) {
            sums[place * v_dim + i] = v[0];
        } else {
            v[0] /= sum;
            store_as<1>(a.o, row * a.o_stride + (int64_t)head * v_dim + i, half, v);
        }
    }
}

/* Block (head, row): combines the stretches in order. */
static __global__ void __launch_bounds__(THREADS)
    join_kernel(qd_attention_cached_args a, const partial *partials, const float *sums, int stretches, int64_t lse_rows, bool half)
{
    const int head = blockIdx.x, d = value_dim(a);
    const int64_t row = blockIdx.y, place = (row * a.heads + head) * stretches;
    float top = -INFINITY, total = 0.0f;
    for (int s = 0; s < stretches; s++)
        top = fmaxf(top, partials[place + s].most);
    const float shift = top == -INFINITY ? 0.0f : top;
    for (int s = 0; s < stretches; s++)
        total += partials[place + s].total * expf(partials[place + s].most - shift);
    if (threadIdx.x == 0 && a.lse)
        a.lse[head * lse_rows + row] = shift + logf(total);
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float v[1] = {0.0f};
        for (int s = 0; s < stretches; s++)
            v[0] += sums[(place + s) * d + i] * expf(partials[place + s].most - shift);
        v[0] /= total;
        store_as<1>(a.o, row * a.o_stride + (int64_t)head * d + i, half, v);
    }
}

extern "C" qd_status qd_cuda_attention_cached(qd_stream *stream, const qd_attention_cached_args *a)
{
    QD_TRY(qd_check_float("attention_cached", "q", a->dtype));
    QD_TRY(qd_check_scores("attention_cached", a->window, a->softcap));
    const bool ring = a->window > 0 && a->window + a->rows - 1 <= a->context;
    if (a->past < 0 || a->rows < 0 || (a->past + a->rows > a->context && !ring))
        return QD_FAIL(QD_USAGE, "attention_cached: positions %lld to %lld do not fit in a cache of %lld", (long long)a->past,
                       (long long)(a->past + a->rows), (long long)a->context);
    if (a->head_dim > HEAD_MOST || a->heads % a->kv_heads != 0)
        return QD_FAIL(QD_UNSUPPORTED, "attention_cached: head size %d with %d heads on %d; sizes up to %d, heads a multiple of "
                                       "key heads", a->head_dim, a->heads, a->kv_heads, HEAD_MOST);
    QD_TRY(qd_attention_cached_check_values(a));
    if (a->rows == 0)
        return QD_OK;
    const int64_t most_rows = 65535; /* limit of a grid dimension: longer prompts take several launches */
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    const bool half = a->dtype == QD_BF16;
    const int64_t cols = (int64_t)a->kv_heads * a->head_dim;
    store_rows_kernel<<<(unsigned)divide_up(a->rows * cols, THREADS), THREADS, 0, l.stream>>>(*a, cols, half);
    QD_CUDA_LAUNCHED();
    for (int64_t first = 0; first < a->rows; first += most_rows) {
        qd_attention_cached_args part = *a;
        part.rows = a->rows - first < most_rows ? a->rows - first : most_rows;
        part.past = a->past + first;
        part.q = (const char *)a->q + first * a->q_stride * (half ? 2 : 4);
        part.lse = a->lse ? a->lse + first : NULL;
        part.o = (char *)a->o + first * a->o_stride * (half ? 2 : 4);
        const int64_t all = part.past + part.rows, keys = a->window && a->window < all ? a->window : all, pairs = part.rows * a->heads;
        int64_t stretches = divide_up(4 * l.multiprocessors, pairs), most = divide_up(keys, STRETCH_LEAST);
        stretches = stretches < most ? stretches : most;
        const int64_t each = divide_up(keys, stretches);
        stretches = divide_up(keys, each);
        void *space = NULL;
        partial *partials = NULL;
        float *sums = NULL;
        if (stretches > 1) {
            QD_TRY(qd_cuda_workspace(stream, pairs * stretches * (int64_t)(sizeof(partial) + (size_t)value_dim(*a) * sizeof(float)),
                                     &space));
            partials = (partial *)space;
            sums = (float *)(partials + pairs * stretches);
        }
        auto kernel = a->head_dim <= 256 ? stretch_kernel<8> : a->head_dim <= 576 ? stretch_kernel<18> : stretch_kernel<32>;
        kernel<<<dim3((unsigned)stretches, (unsigned)a->heads, (unsigned)part.rows), THREADS, 0, l.stream>>>(part, each, partials, sums,
                                                                                                         a->rows, half);
        QD_CUDA_LAUNCHED();
        if (stretches > 1) {
            join_kernel<<<dim3((unsigned)a->heads, (unsigned)part.rows), THREADS, 0, l.stream>>>(part, partials, sums, (int)stretches,
                                                                                                 a->rows, half);
            QD_CUDA_LAUNCHED();
        }
    }
    return QD_OK;
}
