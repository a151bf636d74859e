/* Attention on bf16 tensor cores, for document masks and for the shapes that cuDNN does not take.
 *
 * Four warps per block; each has 16 rows of the block's 64 (queries forward and for dq, keys for dk and dv) and the tiles of
 * the other side go by in shared memory, fetched one ahead. Products are mma.m16n8k16: a warp's result of 16 x 8 n is held as
 * n fragments of 4 floats per lane: rows lane / 4 and lane / 4 + 8, columns 8 n + lane % 4 * 2 and the next. Two such fragments,
 * rounded to bf16, are a left operand of the next product, so scores never leave registers. Rows of a tile are padded by 16
 * bytes, which keeps ldmatrix free of bank conflicts. Rows and columns beyond the data are 0. */
#include "device/cuda/attention_impl.h"
#include "device/cuda/tensor_impl.cuh"

#include <math.h>

enum { WARPS = 4, THREADS = 32 * WARPS, ROWS = 16 * WARPS };
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- tiles ---- */

template <int D> struct row_of {
    enum { STRIDE = D + 8 };
};

/* Rows [first, first + R) of one head; `base` points to its row 0, which has `rows` rows. */
template <int D, int R>
static __device__ __forceinline__ void fetch_tile(bf16 *tile, const bf16 *base, int64_t stride, int first, int rows, int head_dim)
{
#pragma unroll
    for (int i = threadIdx.x; i < R * (D / 8); i += THREADS) {
        const int row = i / (D / 8), col = i % (D / 8) * 8;
        const bool valid = first + row < rows && col < head_dim;
        copy_async(tile + row * row_of<D>::STRIDE + col, valid ? base + (first + row) * stride + col : base, valid);
    }
}

/* The left operand: 16 rows from `rows` on, columns 16 k .. */
template <int D> static __device__ __forceinline__ void load_left(uint32_t (&a)[4], const bf16 *rows, int k)
{
    const int lane = threadIdx.x % 32;
    load_matrices(a, rows + lane % 16 * row_of<D>::STRIDE + k * 16 + lane / 16 * 8);
}

/* c[2 p], c[2 p + 1] += a times rows 16 p .. 16 p + 15 of the tile, at columns 16 k .. */
template <int D, int N>
static __device__ __forceinline__ void multiply_step(float (&c)[N][4], const uint32_t (&a)[4], const bf16 *tile, int k)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < N / 2; p++) {
        uint32_t b[4];
        load_matrices(b, tile + (p * 16 + lane / 16 * 8 + lane % 8) * row_of<D>::STRIDE + k * 16 + lane / 8 % 2 * 8);
        multiply_add(c[2 * p], a, b[0], b[1]);
        multiply_add(c[2 * p + 1], a, b[2], b[3]);
    }
}

template <int N> static __device__ __forceinline__ void clear(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            c[n][i] = 0.0f;
}

/* c (16 x 8 N) = the 16 rows from `rows` on times the 8 N rows of the tile. */
template <int D, int N>
static __device__ __forceinline__ void multiply_rows(float (&c)[N][4], const bf16 *rows, const bf16 *tile)
{
    clear(c);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[4];
        load_left<D>(a, rows, k);
        multiply_step<D, N>(c, a, tile, k);
    }
}

/* sum (16 x D) += w (16 x 8 N), rounded to bf16, times the tile (8 N x D). */
template <int D, int N>
static __device__ __forceinline__ void add_weighted(float (&sum)[D / 8][4], const float (&w)[N][4], const bf16 *tile)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        const uint32_t a[4] = {pack(w[2 * k][0], w[2 * k][1]), pack(w[2 * k][2], w[2 * k][3]),
                               pack(w[2 * k + 1][0], w[2 * k + 1][1]), pack(w[2 * k + 1][2], w[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            load_transposed(b, tile + (k * 16 + lane % 16) * row_of<D>::STRIDE + n * 16 + lane / 16 * 8);
            multiply_add(sum[2 * n], a, b[0], b[1]);
            multiply_add(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/* Rows lane / 4 and lane / 4 + 8 from `first` on, times their factors. */
template <int D>
static __device__ __forceinline__ void store_rows(bf16 *base, int64_t stride, int first, int rows, int head_dim,
                                                  const float (&sum)[D / 8][4], float factor0, float factor1)
{
    const int lane = threadIdx.x % 32, row = first + lane / 4;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        if (n * 8 >= head_dim)
            break;
        const int col = n * 8 + lane % 4 * 2;
        if (row < rows)
            *(uint32_t *)(base + row * stride + col) = pack(sum[n][0] * factor0, sum[n][1] * factor0);
        if (row + 8 < rows)
            *(uint32_t *)(base + (row + 8) * stride + col) = pack(sum[n][2] * factor1, sum[n][3] * factor1);
    }
}

/* ---- what a row sees ---- */

/* The first key, or more than any for rows beyond the sequence. */
static __device__ __forceinline__ int first_key(const qd_attention_args &a, int64_t batch, int row)
{
    if (row >= a.seq)
        return 0x7fffffff;
    int start = a.doc_start ? a.doc_start[batch * a.seq + row] : 0;
    return start > 0 ? start : 0;
}

/* The first key that any of `count` rows sees; the same in every warp. */
static __device__ __forceinline__ int lowest_key(const qd_attention_args &a, int64_t batch, int first, int count)
{
    if (!a.doc_start)
        return 0;
    int low = 0x7fffffff;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
        int key = first_key(a, batch, first + i);
        low = key < low ? key : low;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        int other = __shfl_xor_sync(0xffffffffu, low, step);
        low = other < low ? other : low;
    }
    return low;
}

/* Addresses of one head of one sequence. */
struct views {
    const bf16 *q, *k, *v, *d_o;
    bf16 *o, *dq, *dk, *dv;
    const float *lse, *delta;
};

static __device__ __forceinline__ views view(const qd_attention_args &a, int64_t batch, int head, int kv_head)
{
    const int64_t row = batch * a.seq, q = row * a.q_stride + (int64_t)head * a.head_dim;
    const int64_t k = row * a.k_stride + (int64_t)kv_head * a.head_dim, v = row * a.v_stride + (int64_t)kv_head * a.head_dim;
    const int64_t o = row * a.o_stride + (int64_t)head * a.head_dim, line = (batch * a.heads + head) * a.seq;
    views w;
    w.q = (const bf16 *)a.q + q;
    w.k = (const bf16 *)a.k + k;
    w.v = (const bf16 *)a.v + v;
    w.d_o = (const bf16 *)a.d_o + o;
    w.o = (bf16 *)a.o + o;
    w.dq = (bf16 *)a.dq + q;
    w.dk = (bf16 *)a.dk + k;
    w.dv = (bf16 *)a.dv + v;
    w.lse = a.lse + line;
    w.delta = a.delta + line;
    return w;
}

/* Grids: x = blocks of rows, y = head, z = sequence. */

/* ---- forward ---- */

template <int D, int KEYS> static __global__ void __launch_bounds__(THREADS) forward_kernel(qd_attention_args a)
{
    enum { STRIDE = row_of<D>::STRIDE, N = KEYS / 8, TILE = KEYS * STRIDE };
    extern __shared__ __align__(16) bf16 memory[];
    bf16 *q = memory, *keys = q + ROWS * STRIDE, *values = keys + 2 * TILE; /* two of each, used in turn */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, seq = (int)a.seq;
    const int head = blockIdx.y, first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS; /* the longest first */
    const int64_t batch = blockIdx.z;
    const views w = view(a, batch, head, head / (a.heads / a.kv_heads));
    const int row = first + warp * 16 + lane / 4, low0 = first_key(a, batch, row), low1 = first_key(a, batch, row + 8);
    const float scale = a.scale * LOG2_E;
    const int end = first + ROWS < seq ? first + ROWS : seq;
    int key = lowest_key(a, batch, first, ROWS) / KEYS * KEYS, stage = 0;
    float o[D / 8][4], most0 = -INFINITY, most1 = -INFINITY, total0 = 0.0f, total1 = 0.0f;
    uint32_t left[D / 16][4];
    clear(o);
    fetch_tile<D, ROWS>(q, w.q, a.q_stride, first, seq, a.head_dim);
    copies_end_group();
    if (key < end) {
        fetch_tile<D, KEYS>(keys, w.k, a.k_stride, key, seq, a.head_dim);
        fetch_tile<D, KEYS>(values, w.v, a.v_stride, key, seq, a.head_dim);
    }
    copies_end_group();
    copies_wait<1>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        load_left<D>(left[k], q + warp * 16 * STRIDE, k);
    for (; key < end; key += KEYS, stage ^= 1) {
        if (key + KEYS < end) {
            fetch_tile<D, KEYS>(keys + (stage ^ 1) * TILE, w.k, a.k_stride, key + KEYS, seq, a.head_dim);
            fetch_tile<D, KEYS>(values + (stage ^ 1) * TILE, w.v, a.v_stride, key + KEYS, seq, a.head_dim);
        }
        copies_end_group();
        copies_wait<1>();
        __syncthreads();
        float s[N][4];
        clear(s);
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            multiply_step<D, N>(s, left[k], keys + stage * TILE, k);
        const bool masked = a.doc_start || key + KEYS - 1 > first + warp * 16;
        float top0 = most0, top1 = most1;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int col = key + n * 8 + lane % 4 * 2 + i;
                s[n][i] *= scale;
                s[n][2 + i] *= scale;
                if (masked) {
                    s[n][i] = col <= row && col >= low0 ? s[n][i] : -INFINITY;
                    s[n][2 + i] = col <= row + 8 && col >= low1 ? s[n][2 + i] : -INFINITY;
                }
                top0 = fmaxf(top0, s[n][i]);
                top1 = fmaxf(top1, s[n][2 + i]);
            }
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) {
            top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, step));
            top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, step));
        }
        const float shift0 = top0 == -INFINITY ? 0.0f : top0, shift1 = top1 == -INFINITY ? 0.0f : top1;
        const float shrink0 = exp2_fast(most0 - shift0), shrink1 = exp2_fast(most1 - shift1);
        most0 = top0;
        most1 = top1;
        total0 *= shrink0; /* each lane's share; the four are added at the end */
        total1 *= shrink1;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[n][i] = exp2_fast(s[n][i] - shift0);
                s[n][2 + i] = exp2_fast(s[n][2 + i] - shift1);
                total0 += s[n][i];
                total1 += s[n][2 + i];
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            o[n][0] *= shrink0, o[n][1] *= shrink0, o[n][2] *= shrink1, o[n][3] *= shrink1;
        add_weighted<D, N>(o, s, values + stage * TILE);
        __syncthreads(); /* the tiles are free for the fetch after the next */
    }
    copies_wait<0>();
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        total0 += __shfl_xor_sync(0xffffffffu, total0, step);
        total1 += __shfl_xor_sync(0xffffffffu, total1, step);
    }
    float *lse = a.lse + (batch * a.heads + head) * a.seq;
    if (lane % 4 == 0 && row < seq)
        lse[row] = (most0 + log2f(total0)) * LN_2;
    if (lane % 4 == 0 && row + 8 < seq)
        lse[row + 8] = (most1 + log2f(total1)) * LN_2;
    store_rows<D>(w.o, a.o_stride, first + warp * 16, seq, a.head_dim, o, total0 == 0.0f ? 0.0f : 1.0f / total0,
                  total1 == 0.0f ? 0.0f : 1.0f / total1);
}

/* ---- backward: dq ---- */

template <int D, int KEYS> static __global__ void __launch_bounds__(THREADS) backward_dq_kernel(qd_attention_args a)
{
    enum { STRIDE = row_of<D>::STRIDE, N = KEYS / 8, TILE = KEYS * STRIDE };
    extern __shared__ __align__(16) bf16 memory[];
    bf16 *q = memory, *d_o = q + ROWS * STRIDE, *keys = d_o + ROWS * STRIDE, *values = keys + 2 * TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, seq = (int)a.seq;
    const int head = blockIdx.y, first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS;
    const int64_t batch = blockIdx.z;
    const views w = view(a, batch, head, head / (a.heads / a.kv_heads));
    const int row = first + warp * 16 + lane / 4, low0 = first_key(a, batch, row), low1 = first_key(a, batch, row + 8);
    const float lse0 = row < seq ? w.lse[row] * LOG2_E : 0.0f, lse1 = row + 8 < seq ? w.lse[row + 8] * LOG2_E : 0.0f;
    const float delta0 = row < seq ? w.delta[row] : 0.0f, delta1 = row + 8 < seq ? w.delta[row + 8] : 0.0f;
    const float scale = a.scale * LOG2_E;
    const int end = first + ROWS < seq ? first + ROWS : seq;
    int key = lowest_key(a, batch, first, ROWS) / KEYS * KEYS, stage = 0;
    float dq[D / 8][4];
    clear(dq);
    fetch_tile<D, ROWS>(q, w.q, a.q_stride, first, seq, a.head_dim);
    fetch_tile<D, ROWS>(d_o, w.d_o, a.o_stride, first, seq, a.head_dim);
    if (key < end) {
        fetch_tile<D, KEYS>(keys, w.k, a.k_stride, key, seq, a.head_dim);
        fetch_tile<D, KEYS>(values, w.v, a.v_stride, key, seq, a.head_dim);
    }
    copies_end_group();
    for (; key < end; key += KEYS, stage ^= 1) {
        if (key + KEYS < end) {
            fetch_tile<D, KEYS>(keys + (stage ^ 1) * TILE, w.k, a.k_stride, key + KEYS, seq, a.head_dim);
            fetch_tile<D, KEYS>(values + (stage ^ 1) * TILE, w.v, a.v_stride, key + KEYS, seq, a.head_dim);
        }
        copies_end_group();
        copies_wait<1>();
        __syncthreads();
        float s[N][4], t[N][4];
        multiply_rows<D, N>(s, q + warp * 16 * STRIDE, keys + stage * TILE);
        multiply_rows<D, N>(t, d_o + warp * 16 * STRIDE, values + stage * TILE);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int col = key + n * 8 + lane % 4 * 2 + i;
                const float p0 = col <= row && col >= low0 ? exp2_fast(s[n][i] * scale - lse0) : 0.0f;
                const float p1 = col <= row + 8 && col >= low1 ? exp2_fast(s[n][2 + i] * scale - lse1) : 0.0f;
                s[n][i] = p0 * (t[n][i] - delta0);
                s[n][2 + i] = p1 * (t[n][2 + i] - delta1);
            }
        add_weighted<D, N>(dq, s, keys + stage * TILE);
        __syncthreads();
    }
    copies_wait<0>();
    store_rows<D>(w.dq, a.q_stride, first + warp * 16, seq, a.head_dim, dq, a.scale, a.scale);
}

/* ---- backward: dk and dv ---- */

/* The queries of all heads that use a key head go by, block by block; this one says where the next that matter are. */
struct query_walk {
    int head, first;
};

template <int QUERIES>
static __device__ __forceinline__ query_walk next_queries(const qd_attention_args &a, int64_t batch, int key, int end_head, query_walk at)
{
    while (at.head < end_head) {
        if (at.first >= a.seq) {
            at.head++;
            at.first = key;
        } else if (lowest_key(a, batch, at.first, QUERIES) < key + ROWS) {
            break;
        } else {
            at.first += QUERIES;
        }
    }
    return at;
}

template <int D, int QUERIES> static __global__ void __launch_bounds__(THREADS) backward_dkv_kernel(qd_attention_args a)
{
    enum { STRIDE = row_of<D>::STRIDE, N = QUERIES / 8, TILE = QUERIES * STRIDE };
    extern __shared__ __align__(16) bf16 memory[];
    __shared__ float lse[2][QUERIES], delta[2][QUERIES];
    __shared__ int low[2][QUERIES];
    bf16 *k = memory, *v = k + ROWS * STRIDE, *queries = v + ROWS * STRIDE, *d_os = queries + 2 * TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, seq = (int)a.seq;
    const int kv_head = blockIdx.y, group = a.heads / a.kv_heads, end_head = (kv_head + 1) * group, key = (int)blockIdx.x * ROWS;
    const int64_t batch = blockIdx.z;
    const int row = key + warp * 16 + lane / 4; /* the lane's first key; the second is 8 further */
    const float scale = a.scale * LOG2_E;
    const views own = view(a, batch, kv_head * group, kv_head);
    float dk[D / 8][4], dv[D / 8][4];
    clear(dk);
    clear(dv);

    auto fetch = [&](query_walk at, int stage) {
        const views w = view(a, batch, at.head, kv_head);
        fetch_tile<D, QUERIES>(queries + stage * TILE, w.q, a.q_stride, at.first, seq, a.head_dim);
        fetch_tile<D, QUERIES>(d_os + stage * TILE, w.d_o, a.o_stride, at.first, seq, a.head_dim);
        if (threadIdx.x < QUERIES) {
            const int query = at.first + (int)threadIdx.x;
            lse[stage][threadIdx.x] = query < seq ? w.lse[query] * LOG2_E : 0.0f;
            delta[stage][threadIdx.x] = query < seq ? w.delta[query] : 0.0f;
            low[stage][threadIdx.x] = first_key(a, batch, query);
        }
    };

    int stage = 0;
    query_walk at = next_queries<QUERIES>(a, batch, key, end_head, query_walk{kv_head * group, key});
    fetch_tile<D, ROWS>(k, own.k, a.k_stride, key, seq, a.head_dim);
    fetch_tile<D, ROWS>(v, own.v, a.v_stride, key, seq, a.head_dim);
    if (at.head < end_head)
        fetch(at, 0);
    copies_end_group();
    while (at.head < end_head) {
        const query_walk next = next_queries<QUERIES>(a, batch, key, end_head, query_walk{at.head, at.first + QUERIES});
        if (next.head < end_head)
            fetch(next, stage ^ 1);
        copies_end_group();
        copies_wait<1>();
        __syncthreads();
        const bf16 *q = queries + stage * TILE, *d_o = d_os + stage * TILE;
        float s[N][4], t[N][4]; /* (keys, queries) */
        multiply_rows<D, N>(s, k + warp * 16 * STRIDE, q);
        multiply_rows<D, N>(t, v + warp * 16 * STRIDE, d_o);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int col = n * 8 + lane % 4 * 2 + i, query = at.first + col;
                const float shift = lse[stage][col], row_delta = delta[stage][col];
                const int from = low[stage][col];
                const float p0 = row <= query && row >= from ? exp2_fast(s[n][i] * scale - shift) : 0.0f;
                const float p1 = row + 8 <= query && row + 8 >= from ? exp2_fast(s[n][2 + i] * scale - shift) : 0.0f;
                s[n][i] = p0;
                s[n][2 + i] = p1;
                t[n][i] = p0 * (t[n][i] - row_delta);
                t[n][2 + i] = p1 * (t[n][2 + i] - row_delta);
            }
        add_weighted<D, N>(dv, s, d_o);
        add_weighted<D, N>(dk, t, q);
        __syncthreads();
        stage ^= 1;
        at = next;
    }
    copies_wait<0>();
    store_rows<D>(own.dk, a.k_stride, key + warp * 16, seq, a.head_dim, dk, a.scale, a.scale);
    store_rows<D>(own.dv, a.v_stride, key + warp * 16, seq, a.head_dim, dv, 1.0f, 1.0f);
}

/* ---- launches ---- */

/* Two tiles of ROWS (one forward) and twice two of `other` rows. */
template <int D, typename K>
static qd_status launch(qd_stream *stream, const qd_attention_args *a, K kernel, int own_tiles, int other, int heads)
{
    const int bytes = (own_tiles * ROWS + 4 * other) * row_of<D>::STRIDE * (int)sizeof(bf16);
    dim3 grid((unsigned)divide_up(a->seq, ROWS), (unsigned)heads, (unsigned)a->batch);
    QD_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<grid, THREADS, bytes, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <int D> static qd_status forward(qd_stream *stream, const qd_attention_args *a)
{
    return launch<D>(stream, a, forward_kernel<D, 64>, 1, 64, a->heads);
}

/* Other tiles of 32 rows where the accumulators of larger heads need the registers. */
template <int D> static qd_status backward(qd_stream *stream, const qd_attention_args *a)
{
    constexpr int OTHER = D <= 64 ? 64 : 32;
    QD_TRY((launch<D>(stream, a, backward_dkv_kernel<D, OTHER>, 2, OTHER, a->kv_heads)));
    QD_TRY((launch<D>(stream, a, backward_dq_kernel<D, OTHER>, 2, OTHER, a->heads)));
    return QD_OK;
}

extern "C" qd_status qd_cuda_attention_forward_tensor(qd_stream *stream, const qd_attention_args *a)
{
    return a->head_dim <= 64 ? forward<64>(stream, a) : a->head_dim <= 96 ? forward<96>(stream, a) : forward<128>(stream, a);
}

extern "C" qd_status qd_cuda_attention_backward_tensor(qd_stream *stream, const qd_attention_args *a)
{
    return a->head_dim <= 64 ? backward<64>(stream, a) : a->head_dim <= 96 ? backward<96>(stream, a) : backward<128>(stream, a);
}
