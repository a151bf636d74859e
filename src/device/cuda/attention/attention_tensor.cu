/* Attention on bf16 tensor cores, for document masks and for shapes that cuDNN does not support.
 *
 * Four warps per block; each has 16 of the block's 64 rows (queries in the forward pass and for dq,
 * keys for dk and dv). The tiles of the other side are streamed through shared memory, prefetched
 * by one tile. The instruction is mma.m16n8k16: a warp holds a result of 16 x 8 n as n fragments of
 * 4 floats per lane: rows lane / 4 and lane / 4 + 8, columns 8 n + lane % 4 * 2 and the next. Two
 * such fragments, rounded to bf16, are a left operand of the next GEMM, so scores never leave
 * registers. Rows of a tile are padded by 16 bytes, which keeps ldmatrix free of bank conflicts.
 * Rows and columns beyond the data are 0. Kernels have D columns of queries and keys and V of
 * values and results. */
#include "device/cuda/attention/attention_runs_impl.cuh"
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

/* Scores in units of log 2, so that the exponential is 2^x. Without a soft-cap: product · scale. */
struct scoring {
    float scale; /* of a product, or of the argument of tanh in units of log 2 / 2 */
    float cap;   /* 0: none */
};

static __device__ __forceinline__ scoring scoring_of(const job &a)
{
    if (a.softcap == 0.0f)
        return scoring{a.scale * LOG2_E, 0.0f};
    return scoring{2.0f * LOG2_E * a.scale / a.softcap, a.softcap * LOG2_E};
}

/* tanh through e^2x: an absolute error of some 1e-7, which the soft-cap multiplies. e^2x may
 * overflow to infinity. */
static __device__ __forceinline__ float score_of(const scoring &how, float product, float &slope)
{
    slope = 1.0f;
    if (how.cap == 0.0f)
        return product * how.scale;
    float part;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.0f + exp2_fast(product * how.scale)));
    const float t = fmaf(-2.0f, part, 1.0f);
    slope = fmaf(-t, t, 1.0f);
    return how.cap * t;
}

template <int D> struct row_of {
    enum { STRIDE = D + 8 };
};

/* Fetches the rows of a span, up to R, of one head, with T threads; `base` points to row 0 of the
 * sequence. */
template <int D, int R, int T = THREADS>
static __device__ __forceinline__ void fetch_tile(bf16 *tile, const bf16 *base, int64_t stride, const span &rows, int head_dim)
{
#pragma unroll
    for (int i = threadIdx.x; i < R * (D / 8); i += T) {
        const int row = i / (D / 8), col = i % (D / 8) * 8;
        const bool valid = row < rows.rows && col < head_dim;
        copy_async(tile + row * row_of<D>::STRIDE + col, valid ? base + (rows.row + row) * stride + col : base, valid);
    }
}

/* The left operand: 16 rows starting at `rows`, columns 16 k .. */
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

/* c (16 x 8 N) = the 16 rows starting at `rows` times the 8 N rows of the tile. */
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

/* sum (16 x W) += a (16 x 16) times W columns of rows 16 k .. 16 k + 15 of the tile (D columns). */
template <int D, int W>
static __device__ __forceinline__ void add_step(float (&sum)[W / 8][4], const uint32_t (&a)[4], const bf16 *tile, int k)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        uint32_t b[4];
        load_transposed(b, tile + (k * 16 + lane % 16) * row_of<D>::STRIDE + n * 16 + lane / 16 * 8);
        multiply_add(sum[2 * n], a, b[0], b[1]);
        multiply_add(sum[2 * n + 1], a, b[2], b[3]);
    }
}

/* sum (16 x D) += w (16 x 8 N), rounded to bf16, times the tile (8 N x D). */
template <int D, int N>
static __device__ __forceinline__ void add_weighted(float (&sum)[D / 8][4], const float (&w)[N][4], const bf16 *tile)
{
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        const uint32_t a[4] = {pack(w[2 * k][0], w[2 * k][1]), pack(w[2 * k][2], w[2 * k][3]),
                               pack(w[2 * k + 1][0], w[2 * k + 1][1]), pack(w[2 * k + 1][2], w[2 * k + 1][3])};
        add_step<D, D>(sum, a, tile, k);
    }
}

/* sum (16 x W) += 16 rows of weights in shared memory (16 x K) times W columns of the tile (K x
 * D). */
template <int D, int K, int W>
static __device__ __forceinline__ void add_shared(float (&sum)[W / 8][4], const bf16 *weights, const bf16 *tile)
{
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        uint32_t a[4];
        load_left<K>(a, weights, k);
        add_step<D, W>(sum, a, tile, k);
    }
}

/* Stores the warp's 16 rows of weights, rounded to bf16, at columns from `first` on of rows of
 * K. */
template <int K, int N> static __device__ __forceinline__ void share(bf16 *rows, int first, const float (&w)[N][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint32_t *)(rows + (lane / 4 + 8 * half) * row_of<K>::STRIDE + first + n * 8 + lane % 4 * 2) =
                pack(w[n][2 * half], w[n][2 * half + 1]);
}

/* Calls body(n, half, index) for the lane's valid pairs of elements of the block's rows x D:
 * fragment n, elements 2 half and 2 half + 1; index of the first in a matrix with this stride. */
template <int D, typename F>
static __device__ __forceinline__ void for_pairs(int64_t origin, int64_t stride, const span &rows, int head_dim, F body)
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % WARPS * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        if (n * 8 >= head_dim)
            break;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (row + 8 * half < rows.rows)
                body(n, half, origin + (rows.row + row + 8 * half) * stride + n * 8 + lane % 4 * 2);
    }
}

/* Stores the block's rows, the lane's first and second times their factors: as bf16, or as fp32
 * [added to the existing values]. */
template <int D>
static __device__ __forceinline__ void store_rows(void *to, int64_t origin, int64_t stride, const span &rows, int head_dim,
                                                  const float (&sum)[D / 8][4], float factor0, float factor1, bool wide, bool add)
{
    for_pairs<D>(origin, stride, rows, head_dim, [&](int n, int half, int64_t at) {
        const float factor = half ? factor1 : factor0;
        float x = sum[n][2 * half] * factor, y = sum[n][2 * half + 1] * factor;
        if (!wide) {
            *(uint32_t *)((bf16 *)to + at) = pack(x, y);
            return;
        }
        float2 *pair = (float2 *)((float *)to + at);
        if (add)
            x += pair->x, y += pair->y;
        *pair = make_float2(x, y);
    });
}

/* The first key that any of a span of queries attends to; the same in every warp. */
static __device__ __forceinline__ int lowest_key(const job &a, int64_t batch, const span &q)
{
    if (!a.doc_start)
        return first_key(a, batch, q, 0);
    int low = NO_KEY;
    for (int i = threadIdx.x % 32; i < q.rows; i += 32)
        low = smaller(low, first_key(a, batch, q, i));
#pragma unroll
    for (int step = 16; step; step /= 2)
        low = smaller(low, __shfl_xor_sync(0xffffffffu, low, step));
    return low;
}

/* The columns of a tile of keys that one row attends to: [from, to]. */
struct window {
    int from, to;
};

static __device__ __forceinline__ window window_of(const span &k, int low, int position)
{
    return window{low - k.position, smaller(position - k.position, k.rows - 1)};
}

static __device__ __forceinline__ bool sees(const window &w, int col)
{
    return col <= w.to && col >= w.from;
}

/* Addresses of row 0 of one head of one sequence. */
struct views {
    const bf16 *q, *k, *v, *d_o;
    float *lse;
    const float *delta;
};

static __device__ __forceinline__ views view(const job &a, int64_t batch, int head, int kv_head)
{
    const int64_t row = batch * a.q_seq, key = batch * a.k_seq, q_col = (int64_t)head * a.head_dim, k_col = (int64_t)kv_head * a.head_dim;
    const int64_t o_col = (int64_t)head * a.v_dim, v_col = (int64_t)kv_head * a.v_dim;
    const int64_t line = (batch * a.heads + head) * a.q_seq;
    views w;
    w.q = (const bf16 *)a.q + row * a.q_stride + q_col;
    w.k = (const bf16 *)a.k + key * a.k_stride + k_col;
    w.v = (const bf16 *)a.v + key * a.v_stride + v_col;
    w.d_o = (const bf16 *)a.d_o + row * a.o_stride + o_col;
    w.lse = a.lse + line;
    w.delta = a.delta + line;
    return w;
}

/* Grids: x = tiles of rows, y = head, z = sequence. */

template <int D, int V, int KEYS> static __global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ job a)
{
    enum { STRIDE = row_of<D>::STRIDE, N = KEYS / 8, TILE = KEYS * STRIDE, V_TILE = KEYS * row_of<V>::STRIDE };
    extern __shared__ __align__(16) bf16 memory[];
    bf16 *q = memory, *keys = q + ROWS * STRIDE, *values = keys + 2 * TILE; /* double-buffered keys and values */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
    const int64_t batch = blockIdx.z, o_at = batch * a.q_seq * a.o_stride + (int64_t)head * a.v_dim;
    const views w = view(a, batch, head, head / (a.heads / a.kv_heads));
    const span own = tile_of<ROWS>(a.q_runs, (int)(gridDim.x - 1 - blockIdx.x)); /* longest first */
    const int row = warp * 16 + lane / 4, low0 = first_key(a, batch, own, row), low1 = first_key(a, batch, own, row + 8);
    const scoring how = scoring_of(a);
    const int end = own.position + own.rows, least = lowest_key(a, batch, own);
    key_walk now = first_keys<KEYS>(a, least, end);
    if (a.merge && !has_keys(a, now))
        return; /* the running result stays */
    int stage = 0;
    float o[V / 8][4], most0 = -INFINITY, most1 = -INFINITY, total0 = 0.0f, total1 = 0.0f;
    float largest = 0.0f; /* score of this call's keys; most0 and most1 may also have the log-sum-exp of earlier keys */
    constexpr bool HELD = D <= 192; /* the queries stay in registers */
    uint32_t left[HELD ? D / 16 : 1][4];

    auto fetch = [&](key_walk at, int to) {
        const span k = span_of<KEYS>(a.k_runs[at.run], at.at);
        fetch_tile<D, KEYS>(keys + to * TILE, w.k, a.k_stride, k, a.head_dim);
        fetch_tile<V, KEYS>(values + to * V_TILE, w.v, a.v_stride, k, a.v_dim);
    };

    fetch_tile<D, ROWS>(q, w.q, a.q_stride, own, a.head_dim);
    copies_end_group();
    if (has_keys(a, now))
        fetch(now, 0);
    copies_end_group();
    clear(o);
    if (a.merge) {
        if (row < own.rows)
            most0 = w.lse[own.row + row] * LOG2_E;
        if (row + 8 < own.rows)
            most1 = w.lse[own.row + row + 8] * LOG2_E;
        /* Each lane has a share of the total; the four are added at the end. */
        total0 = lane % 4 == 0 && most0 != -INFINITY ? 1.0f : 0.0f;
        total1 = lane % 4 == 0 && most1 != -INFINITY ? 1.0f : 0.0f;
        for_pairs<V>(o_at, a.o_stride, own, a.v_dim, [&](int n, int half, int64_t at) {
            const float2 pair = *(const float2 *)((const float *)a.o + at);
            o[n][2 * half] = pair.x;
            o[n][2 * half + 1] = pair.y;
        });
    }
    copies_wait<1>();
    __syncthreads();
    if constexpr (HELD)
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            load_left<D>(left[k], q + warp * 16 * STRIDE, k);
    while (has_keys(a, now)) {
        const key_walk next = next_keys<KEYS>(a, least, end, now);
        if (has_keys(a, next))
            fetch(next, stage ^ 1);
        copies_end_group();
        copies_wait<1>();
        __syncthreads();
        float s[N][4];
        clear(s);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            if constexpr (!HELD)
                load_left<D>(left[0], q + warp * 16 * STRIDE, k);
            multiply_step<D, N>(s, left[HELD ? k : 0], keys + stage * TILE, k);
        }
        const span k = span_of<KEYS>(a.k_runs[now.run], now.at);
        const window seen0 = window_of(k, low0, own.position + row), seen1 = window_of(k, low1, own.position + row + 8);
        const bool masked = a.doc_start || k.rows < KEYS || k.position + KEYS - 1 > own.position + warp * 16 ||
                            k.position < window_start(a, own.position + warp * 16 + 15);
        float top0 = -INFINITY, top1 = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int col = n * 8 + lane % 4 * 2 + i;
                float slope;
                s[n][i] = score_of(how, s[n][i], slope);
                s[n][2 + i] = score_of(how, s[n][2 + i], slope);
                if (masked) {
                    s[n][i] = sees(seen0, col) ? s[n][i] : -INFINITY;
                    s[n][2 + i] = sees(seen1, col) ? s[n][2 + i] : -INFINITY;
                }
                top0 = fmaxf(top0, s[n][i]);
                top1 = fmaxf(top1, s[n][2 + i]);
            }
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) {
            top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, step));
            top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, step));
        }
        largest = fmaxf(largest, fmaxf(top0, top1));
        top0 = fmaxf(top0, most0);
        top1 = fmaxf(top1, most1);
        const float shift0 = top0 == -INFINITY ? 0.0f : top0, shift1 = top1 == -INFINITY ? 0.0f : top1;
        const float shrink0 = exp2_fast(most0 - shift0), shrink1 = exp2_fast(most1 - shift1);
        most0 = top0;
        most1 = top1;
        total0 *= shrink0;
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
        for (int n = 0; n < V / 8; n++)
            o[n][0] *= shrink0, o[n][1] *= shrink0, o[n][2] *= shrink1, o[n][3] *= shrink1;
        add_weighted<V, N>(o, s, values + stage * V_TILE);
        __syncthreads(); /* the tiles may be overwritten by the fetch after the next */
        now = next;
        stage ^= 1;
    }
    copies_wait<0>();
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        total0 += __shfl_xor_sync(0xffffffffu, total0, step);
        total1 += __shfl_xor_sync(0xffffffffu, total1, step);
    }
    if (a.maxima) {
        largest = warp_max(largest) * LN_2;
        if (lane == 0)
            raise_to(a.maxima + head, largest);
    }
    if (lane % 4 == 0 && row < own.rows)
        w.lse[own.row + row] = (most0 + log2f(total0)) * LN_2;
    if (lane % 4 == 0 && row + 8 < own.rows)
        w.lse[own.row + row + 8] = (most1 + log2f(total1)) * LN_2;
    store_rows<V>(a.o, o_at, a.o_stride, own, a.v_dim, o, total0 == 0.0f ? 0.0f : 1.0f / total0, total1 == 0.0f ? 0.0f : 1.0f / total1,
                  a.part, false);
}

template <int D, int V, int KEYS> static __global__ void __launch_bounds__(THREADS) backward_dq_kernel(const __grid_constant__ job a)
{
    enum { STRIDE = row_of<D>::STRIDE, V_STRIDE = row_of<V>::STRIDE, N = KEYS / 8, TILE = KEYS * STRIDE, V_TILE = KEYS * V_STRIDE };
    extern __shared__ __align__(16) bf16 memory[];
    bf16 *q = memory, *d_o = q + ROWS * STRIDE, *keys = d_o + ROWS * V_STRIDE, *values = keys + 2 * TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
    const int64_t batch = blockIdx.z;
    const views w = view(a, batch, head, head / (a.heads / a.kv_heads));
    const span own = tile_of<ROWS>(a.q_runs, (int)(gridDim.x - 1 - blockIdx.x));
    const int row = warp * 16 + lane / 4, low0 = first_key(a, batch, own, row), low1 = first_key(a, batch, own, row + 8);
    const bool is0 = row < own.rows, is1 = row + 8 < own.rows;
    const float lse0 = is0 ? w.lse[own.row + row] * LOG2_E : 0.0f, lse1 = is1 ? w.lse[own.row + row + 8] * LOG2_E : 0.0f;
    const float delta0 = is0 ? w.delta[own.row + row] : 0.0f, delta1 = is1 ? w.delta[own.row + row + 8] : 0.0f;
    const scoring how = scoring_of(a);
    const int end = own.position + own.rows, least = lowest_key(a, batch, own);
    key_walk now = first_keys<KEYS>(a, least, end);
    if (a.part && !has_keys(a, now))
        return; /* nothing to add */
    int stage = 0;
    float dq[D / 8][4];
    clear(dq);

    auto fetch = [&](key_walk at, int to) {
        const span k = span_of<KEYS>(a.k_runs[at.run], at.at);
        fetch_tile<D, KEYS>(keys + to * TILE, w.k, a.k_stride, k, a.head_dim);
        fetch_tile<V, KEYS>(values + to * V_TILE, w.v, a.v_stride, k, a.v_dim);
    };

    fetch_tile<D, ROWS>(q, w.q, a.q_stride, own, a.head_dim);
    fetch_tile<V, ROWS>(d_o, w.d_o, a.o_stride, own, a.v_dim);
    if (has_keys(a, now))
        fetch(now, 0);
    copies_end_group();
    while (has_keys(a, now)) {
        const key_walk next = next_keys<KEYS>(a, least, end, now);
        if (has_keys(a, next))
            fetch(next, stage ^ 1);
        copies_end_group();
        copies_wait<1>();
        __syncthreads();
        float s[N][4], t[N][4];
        multiply_rows<D, N>(s, q + warp * 16 * STRIDE, keys + stage * TILE);
        multiply_rows<V, N>(t, d_o + warp * 16 * V_STRIDE, values + stage * V_TILE);
        const span k = span_of<KEYS>(a.k_runs[now.run], now.at);
        const window seen0 = window_of(k, low0, own.position + row), seen1 = window_of(k, low1, own.position + row + 8);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int col = n * 8 + lane % 4 * 2 + i;
                float slope0, slope1;
                const float score0 = score_of(how, s[n][i], slope0), score1 = score_of(how, s[n][2 + i], slope1);
                const float p0 = sees(seen0, col) ? exp2_fast(score0 - lse0) : 0.0f;
                const float p1 = sees(seen1, col) ? exp2_fast(score1 - lse1) : 0.0f;
                s[n][i] = p0 * (t[n][i] - delta0) * slope0;
                s[n][2 + i] = p1 * (t[n][2 + i] - delta1) * slope1;
            }
        add_weighted<D, N>(dq, s, keys + stage * TILE);
        __syncthreads();
        now = next;
        stage ^= 1;
    }
    copies_wait<0>();
    store_rows<D>(a.dq, batch * a.q_seq * a.dq_stride + (int64_t)head * a.head_dim, a.dq_stride, own, a.head_dim, dq, a.scale, a.scale,
                  a.part, a.part);
}

/* Iterates over the queries of all heads that use a key head, tile by tile: this tile, or the next
 * one in which any query attends to any of the keys. */
template <int QUERIES>
static __device__ __forceinline__ query_walk next_queries(const job &a, int64_t batch, const span &k, int end_head, query_walk at)
{
    for (;; at.at += QUERIES) {
        at = settle_queries(a, k, end_head, at);
        if (at.head >= end_head || lowest_key(a, batch, span_of<QUERIES>(a.q_runs[at.run], at.at)) < k.position + k.rows)
            return at;
    }
}

/* All columns of dk and dv do not fit in the registers of a warp for large heads: with SPLIT 2,
 * twice as many warps have half of them each. Each then computes the weights of half of the
 * queries, and they exchange them in shared memory. */
template <int D, int V, int QUERIES, int SPLIT>
static __global__ void __launch_bounds__(SPLIT *THREADS) backward_dkv_kernel(const __grid_constant__ job a)
{
    enum { STRIDE = row_of<D>::STRIDE, V_STRIDE = row_of<V>::STRIDE, TILE = QUERIES * STRIDE, V_TILE = QUERIES * V_STRIDE };
    enum { N = QUERIES / 8 / SPLIT, W = D / SPLIT, V_W = V / SPLIT, ALL = SPLIT * THREADS, SHARED = ROWS * row_of<QUERIES>::STRIDE };
    extern __shared__ __align__(16) bf16 memory[];
    __shared__ float lse[2][QUERIES], delta[2][QUERIES];
    __shared__ int low[2][QUERIES];
    bf16 *k = memory, *v = k + ROWS * STRIDE, *queries = v + ROWS * V_STRIDE, *d_os = queries + 2 * TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, part = threadIdx.x / THREADS;
    const int kv_head = blockIdx.y, group = a.heads / a.kv_heads, end_head = (kv_head + 1) * group;
    const int64_t batch = blockIdx.z;
    const span own = tile_of<ROWS>(a.k_runs, (int)blockIdx.x);
    const int position = own.position + warp * 16 + lane / 4; /* of the lane's first key; the second is 8 positions later */
    const scoring how = scoring_of(a);
    const views w0 = view(a, batch, kv_head * group, kv_head);
    float dk[W / 8][4], dv[V_W / 8][4];
    clear(dk);
    clear(dv);

    auto fetch = [&](query_walk at, int stage) {
        const views w = view(a, batch, at.head, kv_head);
        const span rows = span_of<QUERIES>(a.q_runs[at.run], at.at);
        fetch_tile<D, QUERIES, ALL>(queries + stage * TILE, w.q, a.q_stride, rows, a.head_dim);
        fetch_tile<V, QUERIES, ALL>(d_os + stage * V_TILE, w.d_o, a.o_stride, rows, a.v_dim);
        if (threadIdx.x < QUERIES) {
            const int i = (int)threadIdx.x;
            lse[stage][i] = i < rows.rows ? w.lse[rows.row + i] * LOG2_E : 0.0f;
            delta[stage][i] = i < rows.rows ? w.delta[rows.row + i] : 0.0f;
            low[stage][i] = first_key(a, batch, rows, i);
        }
    };

    int stage = 0;
    query_walk at = next_queries<QUERIES>(a, batch, own, end_head, query_walk{kv_head * group, 0, first_query(a, own, 0)});
    if (a.part && at.head >= end_head)
        return; /* nothing to add */
    fetch_tile<D, ROWS, ALL>(k, w0.k, a.k_stride, own, a.head_dim);
    fetch_tile<V, ROWS, ALL>(v, w0.v, a.v_stride, own, a.v_dim);
    if (at.head < end_head)
        fetch(at, 0);
    copies_end_group();
    while (at.head < end_head) {
        const query_walk next = next_queries<QUERIES>(a, batch, own, end_head, query_walk{at.head, at.run, at.at + QUERIES});
        if (next.head < end_head)
            fetch(next, stage ^ 1);
        copies_end_group();
        copies_wait<1>();
        __syncthreads();
        const bf16 *q = queries + stage * TILE, *d_o = d_os + stage * V_TILE;
        const int first = a.q_runs[at.run].position + at.at; /* position of the tile's first query */
        float s[N][4], t[N][4]; /* (keys, queries) */
        multiply_rows<D, N>(s, k + warp * 16 * STRIDE, q + part * 8 * N * STRIDE);
        multiply_rows<V, N>(t, v + warp * 16 * V_STRIDE, d_o + part * 8 * N * V_STRIDE);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int col = (part * N + n) * 8 + lane % 4 * 2 + i, query = first + col;
                const float shift = lse[stage][col], row_delta = delta[stage][col];
                const int from = low[stage][col];
                float slope0, slope1;
                const float score0 = score_of(how, s[n][i], slope0), score1 = score_of(how, s[n][2 + i], slope1);
                const float p0 = position <= query && position >= from ? exp2_fast(score0 - shift) : 0.0f;
                const float p1 = position + 8 <= query && position + 8 >= from ? exp2_fast(score1 - shift) : 0.0f;
                s[n][i] = p0;
                s[n][2 + i] = p1;
                t[n][i] = p0 * (t[n][i] - row_delta) * slope0;
                t[n][2 + i] = p1 * (t[n][2 + i] - row_delta) * slope1;
            }
        if constexpr (SPLIT == 1) {
            add_weighted<V, N>(dv, s, d_o);
            add_weighted<D, N>(dk, t, q);
        } else {
            bf16 *p = d_os + 2 * V_TILE + warp * 16 * row_of<QUERIES>::STRIDE, *ds = p + SHARED;
            share<QUERIES>(p, part * 8 * N, s);
            share<QUERIES>(ds, part * 8 * N, t);
            __syncthreads();
            add_shared<V, QUERIES, V_W>(dv, p, d_o + part * V_W);
            add_shared<D, QUERIES, W>(dk, ds, q + part * W);
        }
        __syncthreads();
        stage ^= 1;
        at = next;
    }
    copies_wait<0>();
    const int64_t key0 = batch * a.k_seq;
    store_rows<W>(a.dk, key0 * a.dk_stride + (int64_t)kv_head * a.head_dim + part * W, a.dk_stride, own, a.head_dim - part * W, dk, a.scale,
                  a.scale, a.part, a.part);
    store_rows<V_W>(a.dv, key0 * a.dv_stride + (int64_t)kv_head * a.v_dim + part * V_W, a.dv_stride, own, a.v_dim - part * V_W, dv, 1.0f,
                    1.0f, a.part, a.part);
}

/* One block per tile of the runs and head. elements: shared memory. */
template <typename K>
static qd_status launch(qd_stream *stream, const job *a, K kernel, int threads, int elements, const qd_cuda_run *runs, int run_count,
                        int heads)
{
    const int bytes = elements * (int)sizeof(bf16);
    dim3 grid((unsigned)tile_count(runs, run_count, ROWS), (unsigned)heads, (unsigned)a->batch);
    if (grid.x == 0)
        return QD_OK;
    QD_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<grid, threads, bytes, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* A pass for heads of up to D elements, values of up to V. Shared memory holds one tile of ROWS
 * queries, or one of each of two operands, and double buffers of OTHER rows of two. */
template <int D, int V> struct forward {
    static qd_status run(qd_stream *stream, const job *a)
    {
        enum { OTHER = D <= 192 ? 64 : 32, PAIR = row_of<D>::STRIDE + row_of<V>::STRIDE };
        return launch(stream, a, forward_kernel<D, V, OTHER>, THREADS, ROWS * row_of<D>::STRIDE + 2 * OTHER * PAIR, a->q_runs,
                      a->q_run_count, a->heads);
    }
};

/* Tiles of 32 rows for the other side where the accumulators of larger heads need the registers, or
 * the tiles the shared memory. */
template <int D, int V> struct backward {
    static qd_status run(qd_stream *stream, const job *a)
    {
        enum { KEYS = D <= 64 ? 64 : 32, SPLIT = D <= 128 ? 1 : 2, QUERIES = SPLIT == 2 && D <= 192 ? 64 : KEYS };
        enum { PAIR = row_of<D>::STRIDE + row_of<V>::STRIDE, SHARED = SPLIT > 1 ? 2 * ROWS * row_of<QUERIES>::STRIDE : 0 };
        QD_TRY(launch(stream, a, backward_dkv_kernel<D, V, QUERIES, SPLIT>, SPLIT * THREADS, (ROWS + 2 * QUERIES) * PAIR + SHARED,
                      a->k_runs, a->k_run_count, a->kv_heads));
        return launch(stream, a, backward_dq_kernel<D, V, KEYS>, THREADS, (ROWS + 2 * KEYS) * PAIR, a->q_runs, a->q_run_count,
                      a->heads);
    }
};

template <template <int, int> class PASS> static qd_status run_pass(qd_stream *stream, const job *a)
{
    const int most = a->head_dim > a->v_dim ? a->head_dim : a->v_dim;
    if (most <= 64)
        return PASS<64, 64>::run(stream, a);
    if (most <= 96)
        return PASS<96, 96>::run(stream, a);
    if (most <= 128)
        return PASS<128, 128>::run(stream, a);
    return most <= 192 && a->v_dim <= 128 ? PASS<192, 128>::run(stream, a) : PASS<256, 256>::run(stream, a);
}

extern "C" qd_status qd_cuda_attention_forward_tensor(qd_stream *stream, const job *a)
{
    return run_pass<forward>(stream, a);
}

extern "C" qd_status qd_cuda_attention_backward_tensor(qd_stream *stream, const job *a)
{
    return run_pass<backward>(stream, a);
}
