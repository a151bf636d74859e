/* Attention with fp32 multiply-adds, for fp32 and for the head sizes and layouts that the
 * tensor-core kernels do not support.
 *
 * 256 threads, 16 x 16, share tiles of B rows of q, k, v and d_o as fp32 in shared memory. Of a B x
 * B tile of scores, thread (y, x) holds elements (y + 16 i, x + 16 j); of a B x D tile of results,
 * elements (y + 16 i, 4 x + 64 j ...), so that all reads of shared memory are 16 bytes wide and
 * free of bank conflicts. Rows and columns beyond the data are 0. Shape S is that of queries and
 * keys, V, with as many rows and at most as many columns, that of values and results. */
#include "device/cuda/attention/attention_runs_impl.cuh"

#include <math.h>

enum { SIDE = 16, THREADS = SIDE * SIDE };

/* Tile shape of a kernel: D columns of a head (padded), B rows. */
template <int HEAD, int BLOCK> struct shape {
    enum { D = HEAD, B = BLOCK, M = BLOCK / SIDE, J = HEAD / 64, STRIDE = HEAD + 4, W_STRIDE = BLOCK + 4 };
    enum { TILE = B * STRIDE, W_TILE = B * W_STRIDE }; /* floats */
};

/* Loads the rows of a span of one head of one sequence. */
template <typename S>
static __device__ __forceinline__ void load_tile(float *tile, const void *base, int64_t origin, int64_t stride, const span &rows,
                                                 int head_dim, bool half)
{
    for (int i = threadIdx.x; i < S::B * S::D; i += THREADS) {
        int row = i / S::D, col = i % S::D;
        float v[1] = {0.0f};
        if (row < rows.rows && col < head_dim)
            load_as<1>(base, origin + (rows.row + row) * stride + col, half, v);
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

/* An output: elements (row, head, i) of a sequence. */
struct result {
    void *base;
    int64_t origin, stride;
    bool half, add; /* add: accumulate */
};

/* Calls body(i, j, e, index) for this thread's valid elements of a B x D tile: row y + 16 i, column
 * 4 x + 64 j + e. */
template <typename S, typename F>
static __device__ __forceinline__ void for_elements(const result &to, const span &rows, int head_dim, F body)
{
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        const int row = y + SIDE * i;
        if (row >= rows.rows)
            continue;
#pragma unroll
        for (int j = 0; j < S::J; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int col = 4 * x + 64 * j + e;
                if (col < head_dim)
                    body(i, j, e, to.origin + (rows.row + row) * to.stride + col);
            }
    }
}

static __device__ __forceinline__ float &element(float4 &v, int e)
{
    return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
}

/* Stores the rows of a span, row y + 16 i times factor[i]. */
template <typename S>
static __device__ __forceinline__ void store_rows(const result &to, const span &rows, int head_dim, float4 (&sum)[S::M][S::J],
                                                  const float (&factor)[S::M])
{
    for_elements<S>(to, rows, head_dim, [&](int i, int j, int e, int64_t at) {
        float out[1] = {element(sum[i][j], e) * factor[i]}, old[1];
        if (to.add) {
            load_as<1>(to.base, at, to.half, old);
            out[0] += old[0];
        }
        store_as<1>(to.base, at, to.half, out);
    });
}

/* The first key that any row of a span of queries attends to. All threads call it; `scratch` may be
 * reused after the next barrier. */
template <typename S> static __device__ __forceinline__ int block_first_key(const job &a, int64_t batch, const span &q, int *scratch)
{
    if (!a.doc_start)
        return first_key(a, batch, q, 0);
    if (threadIdx.x == 0)
        *scratch = NO_KEY;
    __syncthreads();
    if (threadIdx.x < S::B)
        atomicMin(scratch, first_key(a, batch, q, (int)threadIdx.x));
    __syncthreads();
    return *scratch;
}

/* The score of a product of query and key, and the derivative of the soft-cap there. */
static __device__ __forceinline__ float score_of(const job &a, float product, float &slope)
{
    const float score = product * a.scale;
    slope = 1.0f;
    if (a.softcap == 0.0f)
        return score;
    const float t = tanhf(score / a.softcap);
    slope = 1.0f - t * t;
    return a.softcap * t;
}

/* Grids: x = tiles of rows (last first, because they attend to the most keys), y = head, z =
 * sequence. */
template <typename S, typename V> static __global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ job a)
{
    extern __shared__ __align__(16) float memory[];
    __shared__ int scratch;
    float *q = memory, *kv = q + S::TILE, *w = kv + S::TILE;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const int head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    const int64_t batch = blockIdx.z, row0 = batch * a.q_seq, key0 = batch * a.k_seq;
    const int64_t q_at = row0 * a.q_stride + (int64_t)head * a.head_dim, k_at = key0 * a.k_stride + (int64_t)kv_head * a.head_dim;
    const int64_t v_at = key0 * a.v_stride + (int64_t)kv_head * a.v_dim, o_at = row0 * a.o_stride + (int64_t)head * a.v_dim;
    const span own = tile_of<S::B>(a.q_runs, (int)(gridDim.x - 1 - blockIdx.x));
    const result out = {a.o, o_at, a.o_stride, a.half && !a.part, false};
    float *lse = a.lse + (batch * a.heads + head) * a.q_seq + own.row;
    const int end = own.position + own.rows, least = block_first_key<S>(a, batch, own, &scratch);
    key_walk now = first_keys<S::B>(a, least, end);
    if (a.merge && !has_keys(a, now))
        return; /* the running result stays */
    float most[S::M], total[S::M], largest = 0.0f; /* largest score of this call's keys; most: also of earlier keys */
    int low[S::M];
    float4 o[V::M][V::J];
    clear<V>(o);
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        const int row = y + SIDE * i;
        most[i] = a.merge && row < own.rows ? lse[row] : -INFINITY;
        total[i] = most[i] == -INFINITY ? 0.0f : 1.0f;
        low[i] = first_key(a, batch, own, row);
    }
    if (a.merge)
        for_elements<V>(out, own, a.v_dim, [&](int i, int j, int e, int64_t at) { element(o[i][j], e) = ((const float *)a.o)[at]; });
    load_tile<S>(q, a.q, q_at, a.q_stride, own, a.head_dim, a.half);
    for (; has_keys(a, now); now = next_keys<S::B>(a, least, end, now)) {
        const span k = span_of<S::B>(a.k_runs[now.run], now.at);
        float scores[S::M][S::M];
        __syncthreads(); /* the tiles may be overwritten */
        load_tile<S>(kv, a.k, k_at, a.k_stride, k, a.head_dim, a.half);
        __syncthreads();
        multiply_rows<S>(scores, q, kv);
#pragma unroll
        for (int i = 0; i < S::M; i++) {
            const int position = own.position + y + SIDE * i;
            float top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < S::M; j++) {
                const int col = x + SIDE * j, key = k.position + col;
                float slope;
                scores[i][j] = col < k.rows && key <= position && key >= low[i] ? score_of(a, scores[i][j], slope) : -INFINITY;
                top = fmaxf(top, scores[i][j]);
            }
#pragma unroll
            for (int step = SIDE / 2; step; step /= 2)
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            largest = fmaxf(largest, top);
            top = fmaxf(top, most[i]);
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
            for (int j = 0; j < V::J; j++)
                o[i][j].x *= shrink, o[i][j].y *= shrink, o[i][j].z *= shrink, o[i][j].w *= shrink;
        }
        __syncthreads(); /* keys have been read, weights written */
        load_tile<V>(kv, a.v, v_at, a.v_stride, k, a.v_dim, a.half);
        __syncthreads();
        add_weighted<V>(o, w, kv);
    }
    float factor[S::M];
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        const int row = y + SIDE * i;
        factor[i] = total[i] > 0.0f ? 1.0f / total[i] : total[i] == total[i] ? 0.0f : NAN;
        if (x == 0 && row < own.rows)
            lse[row] = most[i] + logf(total[i]);
    }
    if (a.maxima) {
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0)
            raise_to(a.maxima + head, largest);
    }
    store_rows<V>(out, own, a.v_dim, o, factor);
}

/* p and ds of a tile of queries (rows) and keys: scores become the weights, dp (d_o · vᵀ) the
 * gradients of the scores. */
template <typename S>
static __device__ __forceinline__ void score_gradients(const job &a, int64_t batch, int head, const span &q, const span &k,
                                                       float (&scores)[S::M][S::M], float (&dp)[S::M][S::M])
{
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const int64_t line = (batch * a.heads + head) * a.q_seq + q.row;
#pragma unroll
    for (int i = 0; i < S::M; i++) {
        const int row = y + SIDE * i, position = q.position + row;
        const float row_lse = row < q.rows ? a.lse[line + row] : 0.0f, row_delta = row < q.rows ? a.delta[line + row] : 0.0f;
        const int low = first_key(a, batch, q, row);
#pragma unroll
        for (int j = 0; j < S::M; j++) {
            const int col = x + SIDE * j, key = k.position + col;
            const bool seen = col < k.rows && key <= position && key >= low;
            float slope;
            scores[i][j] = seen ? expf(score_of(a, scores[i][j], slope) - row_lse) : 0.0f;
            dp[i][j] = seen ? scores[i][j] * (dp[i][j] - row_delta) * slope * a.scale : 0.0f;
        }
    }
}

/* dq of a tile of queries: iterates over all keys that it attends to. */
template <typename S, typename V> static __global__ void __launch_bounds__(THREADS) backward_dq_kernel(const __grid_constant__ job a)
{
    extern __shared__ __align__(16) float memory[];
    __shared__ int scratch;
    float *q = memory, *d_o = q + S::TILE, *k = d_o + V::TILE, *v = k + S::TILE, *w = v + V::TILE;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const int head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    const int64_t batch = blockIdx.z, row0 = batch * a.q_seq, key0 = batch * a.k_seq, q_col = (int64_t)head * a.head_dim;
    const int64_t o_col = (int64_t)head * a.v_dim;
    const int64_t k_at = key0 * a.k_stride + (int64_t)kv_head * a.head_dim, v_at = key0 * a.v_stride + (int64_t)kv_head * a.v_dim;
    const span own = tile_of<S::B>(a.q_runs, (int)(gridDim.x - 1 - blockIdx.x));
    const int end = own.position + own.rows, least = block_first_key<S>(a, batch, own, &scratch);
    key_walk now = first_keys<S::B>(a, least, end);
    if (a.part && !has_keys(a, now))
        return; /* nothing to add */
    float4 dq[S::M][S::J];
    clear<S>(dq);
    load_tile<S>(q, a.q, row0 * a.q_stride + q_col, a.q_stride, own, a.head_dim, a.half);
    load_tile<V>(d_o, a.d_o, row0 * a.o_stride + o_col, a.o_stride, own, a.v_dim, a.half);
    for (; has_keys(a, now); now = next_keys<S::B>(a, least, end, now)) {
        const span keys = span_of<S::B>(a.k_runs[now.run], now.at);
        float scores[S::M][S::M], dp[S::M][S::M];
        __syncthreads();
        load_tile<S>(k, a.k, k_at, a.k_stride, keys, a.head_dim, a.half);
        load_tile<V>(v, a.v, v_at, a.v_stride, keys, a.v_dim, a.half);
        __syncthreads();
        multiply_rows<S>(scores, q, k);
        multiply_rows<V>(dp, d_o, v);
        score_gradients<S>(a, batch, head, own, keys, scores, dp);
#pragma unroll
        for (int i = 0; i < S::M; i++)
#pragma unroll
            for (int j = 0; j < S::M; j++)
                w[(y + SIDE * i) * S::W_STRIDE + x + SIDE * j] = dp[i][j];
        __syncthreads();
        add_weighted<S>(dq, w, k);
    }
    float factor[S::M];
#pragma unroll
    for (int i = 0; i < S::M; i++)
        factor[i] = 1.0f;
    store_rows<S>(result{a.dq, row0 * a.dq_stride + q_col, a.dq_stride, a.half && !a.part, a.part}, own, a.head_dim, dq, factor);
}

/* dk and dv of a tile of keys of one key head: iterates over the queries of all its heads. Weights
 * are stored transposed, (key, query). */
template <typename S, typename V> static __global__ void __launch_bounds__(THREADS) backward_dkv_kernel(const __grid_constant__ job a)
{
    extern __shared__ __align__(16) float memory[];
    float *k = memory, *v = k + S::TILE, *q = v + V::TILE, *d_o = q + S::TILE, *w = d_o + V::TILE;
    const int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const int kv_head = blockIdx.y, group = a.heads / a.kv_heads, end_head = (kv_head + 1) * group;
    const int64_t batch = blockIdx.z, row0 = batch * a.q_seq, key0 = batch * a.k_seq, k_col = (int64_t)kv_head * a.head_dim;
    const int64_t v_col = (int64_t)kv_head * a.v_dim;
    const span own = tile_of<S::B>(a.k_runs, (int)blockIdx.x);
    float4 dk[S::M][S::J], dv[V::M][V::J];
    bool any = false;
    clear<S>(dk);
    clear<V>(dv);
    load_tile<S>(k, a.k, key0 * a.k_stride + k_col, a.k_stride, own, a.head_dim, a.half);
    load_tile<V>(v, a.v, key0 * a.v_stride + v_col, a.v_stride, own, a.v_dim, a.half);
    query_walk now = settle_queries(a, own, end_head, query_walk{kv_head * group, 0, first_query(a, own, 0)});
    for (; now.head < end_head; now = settle_queries(a, own, end_head, query_walk{now.head, now.run, now.at + S::B})) {
        const span queries = span_of<S::B>(a.q_runs[now.run], now.at);
        /* A barrier before the tiles are overwritten; also whether any of these queries attends to
         * any of the keys. */
        const bool sees = threadIdx.x < S::B && first_key(a, batch, queries, (int)threadIdx.x) < own.position + own.rows;
        if (!__syncthreads_or(sees))
            continue;
        const int64_t q_col = (int64_t)now.head * a.head_dim;
        float scores[S::M][S::M], dp[S::M][S::M];
        any = true;
        load_tile<S>(q, a.q, row0 * a.q_stride + q_col, a.q_stride, queries, a.head_dim, a.half);
        load_tile<V>(d_o, a.d_o, row0 * a.o_stride + (int64_t)now.head * a.v_dim, a.o_stride, queries, a.v_dim, a.half);
        __syncthreads();
        multiply_rows<S>(scores, q, k);
        multiply_rows<V>(dp, d_o, v);
        score_gradients<S>(a, batch, now.head, queries, own, scores, dp);
#pragma unroll
        for (int i = 0; i < S::M; i++)
#pragma unroll
            for (int j = 0; j < S::M; j++)
                w[(x + SIDE * j) * S::W_STRIDE + y + SIDE * i] = scores[i][j];
        __syncthreads();
        add_weighted<V>(dv, w, d_o);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < S::M; i++)
#pragma unroll
            for (int j = 0; j < S::M; j++)
                w[(x + SIDE * j) * S::W_STRIDE + y + SIDE * i] = dp[i][j];
        __syncthreads();
        add_weighted<S>(dk, w, q);
    }
    if (a.part && !any)
        return;
    float factor[S::M];
#pragma unroll
    for (int i = 0; i < S::M; i++)
        factor[i] = 1.0f;
    store_rows<S>(result{a.dk, key0 * a.dk_stride + k_col, a.dk_stride, a.half && !a.part, a.part}, own, a.head_dim, dk, factor);
    store_rows<V>(result{a.dv, key0 * a.dv_stride + v_col, a.dv_stride, a.half && !a.part, a.part}, own, a.v_dim, dv, factor);
}

/* A warp per (row, head). */
static __global__ void __launch_bounds__(THREADS) delta_kernel(qd_attention_args a, int v_dim, bool half)
{
    const int64_t item = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int64_t row, head;
    split_index(item, a.heads, row, head);
    if (row >= a.batch * a.seq)
        return;
    const int64_t at = row * a.o_stride + head * v_dim;
    float sum = 0.0f, o[1], d[1];
    for (int i = threadIdx.x % 32; i < v_dim; i += 32) {
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
    QD_TRY(qd_check_float("attention_delta", "o", a->dtype));
    if (items <= 0)
        return QD_OK;
    delta_kernel<<<(unsigned)divide_up(items, THREADS / 32), THREADS, 0, qd_cuda_launch_of(stream).stream>>>(
        *a, qd_attention_v_dim(a->head_dim, a->v_dim), a->dtype == QD_BF16);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* One block per tile of the runs and head. floats: shared memory for tiles of rows. */
template <typename S, typename K>
static qd_status launch(qd_stream *stream, const job *a, K kernel, int floats, const qd_cuda_run *runs, int run_count, int heads)
{
    const int bytes = (floats + S::W_TILE) * (int)sizeof(float);
    dim3 grid((unsigned)tile_count(runs, run_count, S::B), (unsigned)heads, (unsigned)a->batch);
    if (grid.x == 0)
        return QD_OK;
    QD_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<grid, THREADS, bytes, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* A pass for heads of up to D elements, values of up to VALUE, in tiles of B rows. */
template <int D, int VALUE, int B> struct forward {
    static qd_status run(qd_stream *stream, const job *a)
    {
        using S = shape<D, B>;
        return launch<S>(stream, a, forward_kernel<S, shape<VALUE, B>>, 2 * S::TILE, a->q_runs, a->q_run_count, a->heads);
    }
};

template <int D, int VALUE, int B> struct backward {
    static qd_status run(qd_stream *stream, const job *a)
    {
        using S = shape<D, B>;
        using V = shape<VALUE, B>;
        const int floats = 2 * (S::TILE + V::TILE);
        QD_TRY((launch<S>(stream, a, backward_dkv_kernel<S, V>, floats, a->k_runs, a->k_run_count, a->kv_heads)));
        return launch<S>(stream, a, backward_dq_kernel<S, V>, floats, a->q_runs, a->q_run_count, a->heads);
    }
};

/* Tiles of 32 rows for the largest heads, so that four of them fit in shared memory. */
template <template <int, int, int> class PASS> static qd_status run_pass(qd_stream *stream, const job *a)
{
    const int most = a->head_dim > a->v_dim ? a->head_dim : a->v_dim;
    if (most <= 64)
        return PASS<64, 64, 64>::run(stream, a);
    if (most <= 128)
        return PASS<128, 128, 64>::run(stream, a);
    return most <= 192 && a->v_dim <= 128 ? PASS<192, 128, 32>::run(stream, a) : PASS<256, 256, 32>::run(stream, a);
}

extern "C" qd_status qd_cuda_attention_forward_plain(qd_stream *stream, const job *a)
{
    return run_pass<forward>(stream, a);
}

extern "C" qd_status qd_cuda_attention_backward_plain(qd_stream *stream, const job *a)
{
    return run_pass<backward>(stream, a);
}
