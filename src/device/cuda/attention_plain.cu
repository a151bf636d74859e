/* Attention with fp32 multiply-adds, for fp32 and for the head sizes and layouts that the tensor-core kernels do not take.
 *
 * 256 threads, 16 x 16, share tiles of B rows of q, k, v and d_o as fp32 in shared memory. Of a B x B tile of scores thread
 * (y, x) holds elements (y + 16 i, x + 16 j); of a B x D tile of results elements (y + 16 i, 4 x + 64 j ...), so that all
 * reads of shared memory are 16 bytes wide and free of bank conflicts. Rows and columns beyond the data are 0. */
#include "device/cuda/attention_impl.h"
#include "device/cuda/math_impl.cuh"

#include <math.h>

enum { SIDE = 16, THREADS = SIDE * SIDE };

/* The shape of a kernel: D columns of a head (padded), B rows of a tile. */
template <int HEAD, int BLOCK> struct shape {
    enum { D = HEAD, B = BLOCK, M = BLOCK / SIDE, J = HEAD / 64, STRIDE = HEAD + 4, W_STRIDE = BLOCK + 4 };
    enum { TILE = B * STRIDE, W_TILE = B * W_STRIDE }; /* floats */
};

/* Rows [first, first + B) of one head of one sequence; `rows` counts the sequence's rows. */
template <typename S>
static __device__ __forceinline__ void load_tile(float *tile, const void *base, int64_t origin, int64_t stride, int first, int rows,
                                                 int head_dim, bool half)
{
    for (int i = threadIdx.x; i < S::B * S::D; i += THREADS) {
        int row = i / S::D, col = i % S::D;
        float v[1] = {0.0f};
        if (first + row < rows && col < head_dim)
            load_as<1>(base, origin + (first + row) * stride + col, half, v);
        tile[row * S::STRIDE + col] = v[0];
    }
}

/* scores[i][j] = row y + 16 i of a times row x + 16 j of b. */
template <typename S>
static __device__ __forceinline__ void multiply_rows(float (&scores)[S::M][S::M], const float *a, const float *b)
{
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < S::M; i++)
#pragma unroll
        for (int j = 0; j < S::M; j++)
            scores[i][j] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < S::D; d += 4) {
        float4 p[S::M], q[S::M];
#pragma unroll
        for (int i = 0; i < S::M; i++) {
            p[i] = *(const float4 *)(a + (y + SIDE * i) * S::STRIDE + d);
            q[i] = *(const float4 *)(b + (x + SIDE * i) * S::STRIDE + d);
        }
#pragma unroll
        for (int i = 0; i < S::M; i++)
#pragma unroll
            for (int j = 0; j < S::M; j++) {
                scores[i][j] = fmaf(p[i].x, q[j].x, scores[i][j]);
                scores[i][j] = fmaf(p[i].y, q[j].y, scores[i][j]);
                scores[i][j] = fmaf(p[i].z, q[j].z, scores[i][j]);
                scores[i][j] = fmaf(p[i].w, q[j].w, scores[i][j]);
            }
    }
}

/* sum[i][j] += row y + 16 i of w (B x B) times the columns 4 x + 64 j .. of the tile. */
template <typename S>
static __device__ __forceinline__ void add_weighted(float4 (&sum)[S::M][S::J], const float *w, const float *tile)
{
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll 2
    for (int k = 0; k < S::B; k += 4) {
        float weights[S::M][4];
#pragma unroll
        for (int i = 0; i < S::M; i++) {
            float4 v = *(const float4 *)(w + (y + SIDE * i) * S::W_STRIDE + k);
            weights[i][0] = v.x, weights[i][1] = v.y, weights[i][2] = v.z, weights[i][3] = v.w;
        }
#pragma unroll
        for (int step = 0; step < 4; step++)
#pragma unroll
            for (int j = 0; j < S::J; j++) {
                float4 v = *(const float4 *)(tile + (k + step) * S::STRIDE + 4 * x + 64 * j);
#pragma unroll
                for (int i = 0; i < S::M; i++) {
                    sum[i][j].x = fmaf(weights[i][step], v.x, sum[i][j].x);
                    sum[i][j].y = fmaf(weights[i][step], v.y, sum[i][j].y);
                    sum[i][j].z = fmaf(weights[i][step], v.z, sum[i][j].z);
                    sum[i][j].w = fmaf(weights[i][step], v.w, sum[i][j].w);
                }
            }
    }
}

template <typename S> static __device__ __forceinline__ void clear(float4 (&sum)[S::M][S::J])
{
#pragma unroll
    for (int i = 0; i < S::M; i++)
#pragma unroll
        for (int j = 0; j < S::J; j++)
            sum[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/* Writes rows [first, first + B) of a result, row y + 16 i times factor[i]. */
template <typename S>
static __device__ __forceinline__ void store_rows(void *base, int64_t origin, int64_t stride, int first, int rows, int head_dim,
                                                  bool half, const float4 (&sum)[S::M][S::J], const float (&factor)[S::M])
{
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        int row = first + y + SIDE * i;
        if (row >= rows)
            continue;
#pragma unroll
        for (int j = 0; j < S::J; j++) {
            const float v[4] = {sum[i][j].x, sum[i][j].y, sum[i][j].z, sum[i][j].w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int col = 4 * x + 64 * j + e;
                float out[1] = {v[e] * factor[i]};
                if (col < head_dim)
                    store_as<1>(base, origin + row * stride + col, half, out);
            }
        }
    }
}

/* The first key that a row sees. */
static __device__ __forceinline__ int first_key(const qd_attention_args &a, int64_t batch, int row)
{
    if (!a.doc_start || row >= a.seq)
        return 0;
    int start = a.doc_start[batch * a.seq + row];
    return start > 0 ? start : 0;
}

/* The first key that any row of [first, first + B) sees. All threads call it; `room` is free after the next barrier. */
template <typename S> static __device__ __forceinline__ int block_first_key(const qd_attention_args &a, int64_t batch, int first, int *room)
{
    if (!a.doc_start)
        return 0;
    if (threadIdx.x == 0)
        *room = 0x7fffffff;
    __syncthreads();
    if (threadIdx.x < S::B && first + (int)threadIdx.x < a.seq)
        atomicMin(room, first_key(a, batch, first + (int)threadIdx.x));
    __syncthreads();
    return *room;
}

/* Grids: x = (blocks of rows, last first, because they see the most keys), y = head, z = sequence. */
template <typename S> static __global__ void __launch_bounds__(THREADS) forward_kernel(qd_attention_args a)
{
    extern __shared__ __align__(16) float memory[];
    __shared__ int room;
    float *q = memory, *kv = q + S::TILE, *w = kv + S::TILE;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE, seq = (int)a.seq;
    const int head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), first = (int)(gridDim.x - 1 - blockIdx.x) * S::B;
    const int64_t batch = blockIdx.z, row0 = batch * a.seq;
    const bool half = a.dtype == QD_BF16;
    const int64_t q_at = row0 * a.q_stride + (int64_t)head * a.head_dim, k_at = row0 * a.k_stride + (int64_t)kv_head * a.head_dim;
    const int64_t v_at = row0 * a.v_stride + (int64_t)kv_head * a.head_dim, o_at = row0 * a.o_stride + (int64_t)head * a.head_dim;
    float most[S::M], total[S::M];
    int low[S::M];
    float4 o[S::M][S::J];
    clear<S>(o);
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        most[i] = -INFINITY;
        total[i] = 0.0f;
        low[i] = first_key(a, batch, first + y + SIDE * i);
    }
    load_tile<S>(q, a.q, q_at, a.q_stride, first, seq, a.head_dim, half);
    const int end = first + S::B < seq ? first + S::B : seq;
    for (int key = block_first_key<S>(a, batch, first, &room) / S::B * S::B; key < end; key += S::B) {
        float scores[S::M][S::M];
        __syncthreads(); /* the tiles are free */
        load_tile<S>(kv, a.k, k_at, a.k_stride, key, seq, a.head_dim, half);
        __syncthreads();
        multiply_rows<S>(scores, q, kv);
#pragma unroll
        for (int i = 0; i < S::M; i++) {
            const int row = first + y + SIDE * i;
            float top = most[i], sum = 0.0f;
#pragma unroll
            for (int j = 0; j < S::M; j++) {
                const int col = key + x + SIDE * j;
                scores[i][j] = col <= row && col >= low[i] && row < seq ? scores[i][j] * a.scale : -INFINITY;
                top = fmaxf(top, scores[i][j]);
            }
#pragma unroll
            for (int step = SIDE / 2; step; step /= 2)
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            const float shift = top == -INFINITY ? 0.0f : top, shrink = expf(most[i] - shift);
#pragma unroll
            for (int j = 0; j < S::M; j++) {
                const float p = expf(scores[i][j] - shift);
                sum += p;
                w[(y + SIDE * i) * S::W_STRIDE + x + SIDE * j] = p;
            }
#pragma unroll
            for (int step = SIDE / 2; step; step /= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            total[i] = total[i] * shrink + sum;
            most[i] = top;
#pragma unroll
            for (int j = 0; j < S::J; j++)
                o[i][j].x *= shrink, o[i][j].y *= shrink, o[i][j].z *= shrink, o[i][j].w *= shrink;
        }
        __syncthreads(); /* keys were read, weights are written */
        load_tile<S>(kv, a.v, v_at, a.v_stride, key, seq, a.head_dim, half);
        __syncthreads();
        add_weighted<S>(o, w, kv);
    }
    float factor[S::M];
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        const int row = first + y + SIDE * i;
        factor[i] = total[i] > 0.0f ? 1.0f / total[i] : total[i] == total[i] ? 0.0f : NAN;
        if (x == 0 && row < seq)
            a.lse[(batch * a.heads + head) * a.seq + row] = most[i] + logf(total[i]);
    }
    store_rows<S>(a.o, o_at, a.o_stride, first, seq, a.head_dim, half, o, factor);
}

/* p and ds of a tile of queries (rows) and keys: scores become the weights, products the gradients of the scores. lse and
 * delta are those of the sequence and head. */
template <typename S>
static __device__ __forceinline__ void score_gradients(const qd_attention_args &a, int64_t batch, int head, int first, int key,
                                                       float (&scores)[S::M][S::M], float (&products)[S::M][S::M])
{
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE, seq = (int)a.seq;
    const float *lse = a.lse + (batch * a.heads + head) * a.seq, *delta = a.delta + (batch * a.heads + head) * a.seq;
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        const int row = first + y + SIDE * i;
        const float row_lse = row < seq ? lse[row] : 0.0f, row_delta = row < seq ? delta[row] : 0.0f;
        const int low = first_key(a, batch, row);
#pragma unroll
        for (int j = 0; j < S::M; j++) {
            const int col = key + x + SIDE * j;
            const bool seen = row < seq && col <= row && col >= low;
            scores[i][j] = seen ? expf(scores[i][j] * a.scale - row_lse) : 0.0f;
            products[i][j] = seen ? scores[i][j] * (products[i][j] - row_delta) * a.scale : 0.0f;
        }
    }
}

/* dq of a block of queries: all keys that it sees go by. */
template <typename S> static __global__ void __launch_bounds__(THREADS) backward_dq_kernel(qd_attention_args a)
{
    extern __shared__ __align__(16) float memory[];
    __shared__ int room;
    float *q = memory, *d_o = q + S::TILE, *k = d_o + S::TILE, *v = k + S::TILE, *w = v + S::TILE;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE, seq = (int)a.seq;
    const int head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), first = (int)(gridDim.x - 1 - blockIdx.x) * S::B;
    const int64_t batch = blockIdx.z, row0 = batch * a.seq;
    const bool half = a.dtype == QD_BF16;
    const int64_t q_at = row0 * a.q_stride + (int64_t)head * a.head_dim, k_at = row0 * a.k_stride + (int64_t)kv_head * a.head_dim;
    const int64_t v_at = row0 * a.v_stride + (int64_t)kv_head * a.head_dim, o_at = row0 * a.o_stride + (int64_t)head * a.head_dim;
    float4 dq[S::M][S::J];
    clear<S>(dq);
    load_tile<S>(q, a.q, q_at, a.q_stride, first, seq, a.head_dim, half);
    load_tile<S>(d_o, a.d_o, o_at, a.o_stride, first, seq, a.head_dim, half);
    const int end = first + S::B < seq ? first + S::B : seq;
    for (int key = block_first_key<S>(a, batch, first, &room) / S::B * S::B; key < end; key += S::B) {
        float scores[S::M][S::M], products[S::M][S::M];
        __syncthreads();
        load_tile<S>(k, a.k, k_at, a.k_stride, key, seq, a.head_dim, half);
        load_tile<S>(v, a.v, v_at, a.v_stride, key, seq, a.head_dim, half);
        __syncthreads();
        multiply_rows<S>(scores, q, k);
        multiply_rows<S>(products, d_o, v);
        score_gradients<S>(a, batch, head, first, key, scores, products);
#pragma unroll
        for (int i = 0; i < S::M; i++)
#pragma unroll
            for (int j = 0; j < S::M; j++)
                w[(y + SIDE * i) * S::W_STRIDE + x + SIDE * j] = products[i][j];
        __syncthreads();
        add_weighted<S>(dq, w, k);
    }
    float factor[S::M];
#pragma unroll
    for (int i = 0; i < S::M; i++)
        factor[i] = 1.0f;
    store_rows<S>(a.dq, q_at, a.q_stride, first, seq, a.head_dim, half, dq, factor);
}

/* dk and dv of a block of keys of one key head: the queries of all its heads go by. Weights lie transposed, (key, query). */
template <typename S> static __global__ void __launch_bounds__(THREADS) backward_dkv_kernel(qd_attention_args a)
{
    extern __shared__ __align__(16) float memory[];
    float *k = memory, *v = k + S::TILE, *q = v + S::TILE, *d_o = q + S::TILE, *w = d_o + S::TILE;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE, seq = (int)a.seq;
    const int kv_head = blockIdx.y, group = a.heads / a.kv_heads, key = (int)blockIdx.x * S::B;
    const int64_t batch = blockIdx.z, row0 = batch * a.seq;
    const bool half = a.dtype == QD_BF16;
    const int64_t k_at = row0 * a.k_stride + (int64_t)kv_head * a.head_dim, v_at = row0 * a.v_stride + (int64_t)kv_head * a.head_dim;
    float4 dk[S::M][S::J], dv[S::M][S::J];
    clear<S>(dk);
    clear<S>(dv);
    load_tile<S>(k, a.k, k_at, a.k_stride, key, seq, a.head_dim, half);
    load_tile<S>(v, a.v, v_at, a.v_stride, key, seq, a.head_dim, half);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const int64_t q_at = row0 * a.q_stride + (int64_t)head * a.head_dim, o_at = row0 * a.o_stride + (int64_t)head * a.head_dim;
        for (int first = key; first < seq; first += S::B) {
            /* A barrier before the tiles are overwritten, and whether any of these queries sees any of the keys. */
            const int row = first + (int)threadIdx.x;
            const bool sees = threadIdx.x < S::B && row < seq && first_key(a, batch, row) < key + S::B;
            if (!__syncthreads_or(sees))
                continue;
            float scores[S::M][S::M], products[S::M][S::M];
            load_tile<S>(q, a.q, q_at, a.q_stride, first, seq, a.head_dim, half);
            load_tile<S>(d_o, a.d_o, o_at, a.o_stride, first, seq, a.head_dim, half);
            __syncthreads();
            multiply_rows<S>(scores, q, k);
            multiply_rows<S>(products, d_o, v);
            score_gradients<S>(a, batch, head, first, key, scores, products);
#pragma unroll
            for (int i = 0; i < S::M; i++)
#pragma unroll
                for (int j = 0; j < S::M; j++)
                    w[(x + SIDE * j) * S::W_STRIDE + y + SIDE * i] = scores[i][j];
            __syncthreads();
            add_weighted<S>(dv, w, d_o);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < S::M; i++)
#pragma unroll
                for (int j = 0; j < S::M; j++)
                    w[(x + SIDE * j) * S::W_STRIDE + y + SIDE * i] = products[i][j];
            __syncthreads();
            add_weighted<S>(dk, w, q);
        }
    }
    float factor[S::M];
#pragma unroll
    for (int i = 0; i < S::M; i++)
        factor[i] = 1.0f;
    store_rows<S>(a.dk, k_at, a.k_stride, key, seq, a.head_dim, half, dk, factor);
    store_rows<S>(a.dv, v_at, a.v_stride, key, seq, a.head_dim, half, dv, factor);
}

/* A warp per (row, head). */
static __global__ void __launch_bounds__(THREADS) delta_kernel(qd_attention_args a, bool half)
{
    const int64_t item = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int64_t row, head;
    split_index(item, a.heads, row, head);
    if (row >= a.batch * a.seq)
        return;
    const int64_t at = row * a.o_stride + head * a.head_dim;
    float sum = 0.0f, o[1], d[1];
    for (int i = threadIdx.x % 32; i < a.head_dim; i += 32) {
        load_as<1>(a.o, at + i, half, o);
        load_as<1>(a.d_o, at + i, half, d);
        sum += o[0] * d[0];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        a.delta[(row / a.seq * a.heads + head) * a.seq + row % a.seq] = sum;
}

extern "C" qd_status qd_cuda_attention_delta(qd_stream *stream, const qd_attention_args *a)
{
    int64_t items = a->batch * a->seq * a->heads;
    delta_kernel<<<(unsigned)divide_up(items, THREADS / 32), THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a, a->dtype == QD_BF16);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <typename S, typename K>
static qd_status launch(qd_stream *stream, const qd_attention_args *a, K kernel, int tiles, int heads)
{
    const int bytes = (tiles * S::TILE + S::W_TILE) * (int)sizeof(float);
    dim3 grid((unsigned)divide_up(a->seq, S::B), (unsigned)heads, (unsigned)a->batch);
    QD_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<grid, THREADS, bytes, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <int D, int B> static qd_status forward(qd_stream *stream, const qd_attention_args *a)
{
    return launch<shape<D, B>>(stream, a, forward_kernel<shape<D, B>>, 2, a->heads);
}

template <int D, int B> static qd_status backward(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY((launch<shape<D, B>>(stream, a, backward_dkv_kernel<shape<D, B>>, 4, a->kv_heads)));
    QD_TRY((launch<shape<D, B>>(stream, a, backward_dq_kernel<shape<D, B>>, 4, a->heads)));
    return QD_OK;
}

extern "C" qd_status qd_cuda_attention_forward_plain(qd_stream *stream, const qd_attention_args *a)
{
    return a->head_dim <= 64 ? forward<64, 64>(stream, a) : a->head_dim <= 128 ? forward<128, 64>(stream, a) : forward<256, 32>(stream, a);
}

/* Tiles of 32 rows for the largest heads, so that four of them fit into shared memory. */
extern "C" qd_status qd_cuda_attention_backward_plain(qd_stream *stream, const qd_attention_args *a)
{
    return a->head_dim <= 64 ? backward<64, 64>(stream, a) : a->head_dim <= 128 ? backward<128, 64>(stream, a) : backward<256, 32>(stream, a);
}
