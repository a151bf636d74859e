/* LayerNorm and RMSNorm, and sums over rows. Storage is fp32 or bf16, arithmetic fp32; the order of
 * summation is fixed by the shapes and the number of multiprocessors.
 *
 * Rows that can be read in vectors stay in registers, in their storage type, so that memory is read
 * once. Derived values are recomputed in each phase instead of being kept, because occupancy is
 * what hides the memory latency.
 *
 *   forward   A warp per row without shared memory, or a block per row if rows are too long for
 *             that. No loop over rows.
 *   backward  Threads keep the sums of their columns, so blocks iterate over the rows, a few at a
 *             time, and prefetch the next ones.
 *
 * Other rows are read again in each pass over them, mostly from the caches. Barriers are those of
 * whole blocks. */
#include "device/cuda/math_impl.cuh"
#include "device/cuda/sums_impl.h"

enum { FORWARD_WARPS = 4, WIDE_THREADS = 512, LOOP_THREADS = 256 }; /* rows per block; threads of a block that has one row */
enum { BLOCK_THREADS = 256, GROUP_MOST = 512 }; /* backward: threads of a block with short rows, and maximum */

/* Elements in 16 bytes. */
template <typename T> struct vector_size {
    enum { V = 16 / sizeof(T) };
};

template <int N> struct constant {
    enum { value = N };
};

template <typename T> static __device__ __forceinline__ uint4 fetch_vector(const void *base, int64_t element)
{
    return __ldcg((const uint4 *)((const T *)base + element));
}

/* Hides q from the optimizer: values derived from it are recomputed instead of being kept in
 * registers. */
static __device__ __forceinline__ void forget(uint4 &q)
{
    asm volatile("" : "+r"(q.x), "+r"(q.y), "+r"(q.z), "+r"(q.w));
}

struct row_statistics {
    float mean, rstd;
};

static __device__ __forceinline__ void keep_statistics(const qd_norm_forward_args &a, int64_t row, row_statistics s)
{
    if (a.mean)
        a.mean[row] = s.mean;
    a.rstd[row] = s.rstd;
}

/* The lanes of a row are those of a warp or, if WIDE, of the block. gamma and beta have the type of
 * x: a branch on their type for each piece would keep their loads from overlapping. */
template <typename T, int PIECES, bool RMS, bool ADD, bool WIDE>
static __global__ void __launch_bounds__(WIDE ? WIDE_THREADS : 32 * FORWARD_WARPS, WIDE ? 1 : PIECES <= 8 && !ADD ? 8 : 4)
    norm_forward_kernel(qd_norm_forward_args a)
{
    enum { V = vector_size<T>::V };
    __shared__ float scratch[2][32];
    const int lane = WIDE ? threadIdx.x : threadIdx.x % 32, lanes = WIDE ? blockDim.x : 32, cols = (int)a.cols;
    const int64_t row = WIDE ? blockIdx.x : (int64_t)blockIdx.x * FORWARD_WARPS + threadIdx.x / 32, at = row * a.cols;
    if (row >= a.rows)
        return; /* whole warps only; never if WIDE */
    auto column = [&](int p) { return (p * lanes + lane) * V; };
    auto row_sum = [&](float x, float *where) { return WIDE ? block_sum(x, where) : warp_sum(x); };
    uint4 raw[PIECES] = {};
    float x[V], sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if (column(p) < cols)
            raw[p] = fetch_vector<T>(a.x, at + column(p));
    if constexpr (ADD) {
        uint4 add[PIECES] = {};
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            if (column(p) < cols)
                add[p] = fetch_vector<T>(a.add, at + column(p));
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            float v[V];
            load<V>((const T *)&raw[p], x);
            load<V>((const T *)&add[p], v);
#pragma unroll
            for (int i = 0; i < V; i++)
                x[i] += v[i];
            store<V>((T *)&raw[p], x); /* as stored: the backward pass reads the rounded value too */
            if (column(p) < cols)
                *(uint4 *)((T *)a.sum + at + column(p)) = raw[p];
        }
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        load<V>((const T *)&raw[p], x);
#pragma unroll
        for (int i = 0; i < V; i++)
            sum = RMS ? fmaf(x[i], x[i], sum) : sum + x[i];
    }
    sum = row_sum(sum, scratch[0]);
    row_statistics s = {0.0f, 0.0f};
    const float share = 1.0f / (float)cols;
    if constexpr (!RMS) {
        s.mean = sum * share;
        sum = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            if (column(p) < cols) {
                forget(raw[p]);
                load<V>((const T *)&raw[p], x);
#pragma unroll
                for (int i = 0; i < V; i++)
                    sum = fmaf(x[i] - s.mean, x[i] - s.mean, sum);
            }
        sum = row_sum(sum, scratch[1]);
    }
    s.rstd = 1.0f / sqrtf(sum * share + a.eps);
    if (lane == 0)
        keep_statistics(a, row, s);
    float most = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        if (column(p) >= cols)
            continue;
        float gamma[V], beta[V] = {};
        forget(raw[p]);
        load<V>((const T *)&raw[p], x);
        load_factor<T>(a.gamma, column(p), a.plus_one, gamma);
        if (a.beta)
            load<V>((const T *)a.beta + column(p), beta);
#pragma unroll
        for (int i = 0; i < V; i++)
            x[i] = fmaf((x[i] - s.mean) * s.rstd, gamma[i], beta[i]);
        store<V>((T *)a.y + at + column(p), x);
        if (a.amax)
            most = larger_magnitude<T>(most, x);
    }
    if (a.amax)
        raise_amax(a.amax, most);
}

/* Any row, one element per access. */
template <typename T, typename P> static __global__ void norm_forward_loop(qd_norm_forward_args a)
{
    __shared__ float scratch[2][32];
    const int64_t at = (int64_t)blockIdx.x * a.cols;
    const T *x = (const T *)a.x + at;
    float sum = 0.0f, squares = 0.0f, count = (float)a.cols;
    if (a.add) {
        T *stored = (T *)a.sum + at;
        for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
            float v[1] = {to_float(x[c]) + to_float(((const T *)a.add)[at + c])};
            store<1>(stored + c, v);
        }
        x = stored; /* each thread reads only what it wrote */
    }
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS)
        sum += to_float(x[c]);
    row_statistics s = {0.0f, 0.0f};
    if (!a.rms)
        s.mean = block_sum(sum, scratch[0]) / count;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS)
        squares += (to_float(x[c]) - s.mean) * (to_float(x[c]) - s.mean);
    s.rstd = 1.0f / sqrtf(block_sum(squares, scratch[1]) / count + a.eps);
    if (threadIdx.x == 0)
        keep_statistics(a, blockIdx.x, s);
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float gamma[1];
        load_factor<P>(a.gamma, c, a.plus_one, gamma);
        float v[1] = {(to_float(x[c]) - s.mean) * s.rstd * gamma[0]};
        if (a.beta)
            v[0] += to_float(((const P *)a.beta)[c]);
        store<1>((T *)a.y + at + c, v);
    }
}

template <typename T, int PIECES, bool WIDE> static qd_status forward_rows(cudaStream_t stream, const qd_norm_forward_args *a, int threads)
{
    const unsigned blocks = (unsigned)(WIDE ? a->rows : divide_up(a->rows, FORWARD_WARPS));
    auto launch = [&](auto rms, auto add) -> qd_status {
        norm_forward_kernel<T, PIECES, decltype(rms)::value, decltype(add)::value, WIDE><<<blocks, threads, 0, stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    };
    auto with_add = [&](auto rms) -> qd_status { return a->add ? launch(rms, constant<1>()) : launch(rms, constant<0>()); };
    return a->rms ? with_add(constant<1>()) : with_add(constant<0>());
}

/* Kernels of whole vectors find the largest magnitude themselves. */
static qd_status find_amax(qd_stream *stream, const void *x, int64_t n, qd_dtype dtype, float *amax)
{
    const qd_amax_args args = {x, amax, n, dtype, NULL};
    return amax ? qd_cuda_amax(stream, &args) : QD_OK;
}

template <typename T> static qd_status forward_any(qd_stream *to, const qd_norm_forward_args *a)
{
    cudaStream_t stream = qd_cuda_launch_of(to).stream;
    enum { V = vector_size<T>::V, WIDE_PIECES = 8, THREADS = 32 * FORWARD_WARPS };
    const int64_t vectors = a->cols / V, wide = divide_up(divide_up(vectors, WIDE_PIECES), 32) * 32;
    if ((a->param_dtype == a->dtype || (!a->gamma && !a->beta)) && can_vector(a->cols, a->x, a->add, a->y, a->sum) &&
        is_aligned(a->gamma) && is_aligned(a->beta)) {
        if (a->amax)
            QD_CUDA_TRY(cudaMemsetAsync(a->amax, 0, sizeof *a->amax, stream));
        if (vectors <= 2 * 32)
            return forward_rows<T, 2, false>(stream, a, THREADS);
        if (vectors <= 4 * 32)
            return forward_rows<T, 4, false>(stream, a, THREADS);
        if (vectors <= 8 * 32)
            return forward_rows<T, 8, false>(stream, a, THREADS);
        if (vectors <= 16 * 32)
            return forward_rows<T, 16, false>(stream, a, THREADS);
        if (wide <= WIDE_THREADS)
            return forward_rows<T, WIDE_PIECES, true>(stream, a, (int)wide);
    }
    return with_type(a->param_dtype, [&](auto param) -> qd_status {
        norm_forward_loop<T, decltype(param)><<<(unsigned)a->rows, LOOP_THREADS, 0, stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return find_amax(to, a->y, a->rows * a->cols, a->dtype, a->amax);
    });
}

extern "C" qd_status qd_cuda_norm_forward(qd_stream *stream, const qd_norm_forward_args *a)
{
    QD_TRY(qd_check_float("norm_forward", "x", a->dtype));
    QD_TRY(qd_check_float("norm_forward", "gamma", a->param_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status { return forward_any<decltype(type)>(stream, a); });
}

/* Sums over rows: parts (count, width) of fp32 in the workspace, then their sum. */

enum { SUM_COLS = 32, SUM_LANES = 32 };

/* Block row i: to[i] (cols) = the sum over the parts of their columns i * cols ..., [+ to[i] if
 * accumulate]; part p is at parts + p * width. A block has SUM_COLS columns; each of its SUM_LANES
 * rows of threads sums every SUM_LANES-th part, and their sums are added in a tree. */
struct part_sums {
    void *to[QD_CUDA_PARTS_MOST];
    const float *parts;
    int count;
    int64_t width, cols;
    bool accumulate;
};

template <typename G> static __global__ void __launch_bounds__(SUM_COLS *SUM_LANES) add_parts_kernel(part_sums s)
{
    __shared__ float sums[SUM_LANES][SUM_COLS + 1];
    const int64_t col = (int64_t)blockIdx.x * SUM_COLS + threadIdx.x;
    const float *parts = s.parts + blockIdx.y * s.cols;
    float sum = 0.0f;
    if (col < s.cols)
#pragma unroll 4
        for (int p = threadIdx.y; p < s.count; p += SUM_LANES)
            sum += parts[p * s.width + col];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (int half = SUM_LANES / 2; half; half /= 2) {
        if ((int)threadIdx.y < half)
            sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.y == 0 && col < s.cols) {
        G *grad = (G *)s.to[blockIdx.y] + col;
        float v[1] = {(s.accumulate ? to_float(*grad) : 0.0f) + sums[0][threadIdx.x]};
        store<1>(grad, v);
    }
}

extern "C" qd_status qd_cuda_add_parts(cudaStream_t stream, void *const *to, int outputs, qd_dtype dtype, const float *parts, int count,
                                       int64_t cols, bool accumulate)
{
    part_sums s = {{}, parts, count, 0, cols, accumulate};
    int wanted = 0;
    for (int i = 0; i < outputs; i++)
        if (to[i])
            s.to[wanted++] = to[i];
    s.width = wanted * cols;
    if (wanted == 0)
        return QD_OK;
    return with_type(dtype, [&](auto type) -> qd_status {
        dim3 grid((unsigned)divide_up(cols, SUM_COLS), (unsigned)wanted);
        add_parts_kernel<decltype(type)><<<grid, dim3(SUM_COLS, SUM_LANES), 0, stream>>>(s);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

/* Column sums of dy (rows, cols); with xhat, of dy * xhat and of dy together. */
struct column_source {
    const void *dy, *x;
    const float *mean, *rstd; /* for the scaled sums */
    int64_t rows, cols, rows_each;
    float *scaled, *plain; /* (parts, cols) with row stride `width`; either may be NULL */
    int64_t width;
};

enum { COLUMN_LANES = 8, COLUMN_THREADS = 32, COLUMN_BLOCKS = 4 }; /* rows and columns of a block's threads; blocks per multiprocessor */

/* Block (column tile, part): sums rows [part * rows_each, ...) of N columns per thread. */
template <typename T, int N, bool SCALED>
static __global__ void __launch_bounds__(COLUMN_LANES *COLUMN_THREADS, COLUMN_BLOCKS) column_sums_kernel(column_source s)
{
    __shared__ float sums[1 + SCALED][COLUMN_LANES][COLUMN_THREADS * N];
    int64_t col = ((int64_t)blockIdx.x * COLUMN_THREADS + threadIdx.x) * N;
    int64_t begin = blockIdx.y * s.rows_each, end = begin + s.rows_each;
    end = end < s.rows ? end : s.rows;
    float plain[N], scaled[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        plain[i] = scaled[i] = 0.0f;
    if (col < s.cols) {
        const T *at = (const T *)s.dy + (begin + threadIdx.y) * s.cols + col;
#pragma unroll 8
        for (int64_t row = begin + threadIdx.y; row < end; row += COLUMN_LANES, at += COLUMN_LANES * s.cols) {
            float d[N];
            load<N>(at, d);
#pragma unroll
            for (int i = 0; i < N; i++)
                plain[i] += d[i];
            if constexpr (SCALED) {
                float x[N], rstd = s.rstd[row], mean = s.mean ? s.mean[row] : 0.0f;
                load<N>((const T *)s.x + row * s.cols + col, x);
#pragma unroll
                for (int i = 0; i < N; i++)
                    scaled[i] += d[i] * ((x[i] - mean) * rstd);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        sums[0][threadIdx.y][threadIdx.x * N + i] = plain[i];
        if constexpr (SCALED)
            sums[SCALED][threadIdx.y][threadIdx.x * N + i] = scaled[i];
    }
    __syncthreads();
    for (int c = threadIdx.y * COLUMN_THREADS + threadIdx.x; c < COLUMN_THREADS * N; c += COLUMN_LANES * COLUMN_THREADS) {
        int64_t to = (int64_t)blockIdx.x * COLUMN_THREADS * N + c;
        if (to >= s.cols)
            break;
        float p = 0.0f, q = 0.0f;
#pragma unroll
        for (int lane = 0; lane < COLUMN_LANES; lane++) {
            p += sums[0][lane][c];
            if constexpr (SCALED)
                q += sums[SCALED][lane][c];
        }
        if (s.plain)
            s.plain[blockIdx.y * s.width + to] = p;
        if (s.scaled)
            s.scaled[blockIdx.y * s.width + to] = q;
    }
}

/* Number of parts that the rows are split into: enough for one wave of blocks on all
 * multiprocessors, but none too short. */
static int part_count(int64_t rows, int64_t tiles, int multiprocessors)
{
    int64_t parts = (int64_t)multiprocessors * COLUMN_BLOCKS / tiles, most = divide_up(rows, 4 * COLUMN_LANES);
    parts = parts < most ? parts : most;
    return (int)(parts < 1 ? 1 : parts > 4096 ? 4096 : parts);
}

static qd_status sum_columns(qd_stream *stream, column_source s, qd_dtype dtype, void *scaled_grad, void *plain_grad,
                             qd_dtype grad_dtype, bool accumulate)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    bool vector = can_vector(s.cols, s.dy, s.x);
    int64_t tiles = divide_up(s.cols, COLUMN_THREADS * (vector ? VECTOR : 1));
    int parts = part_count(s.rows, tiles, l.multiprocessors);
    void *space;
    s.width = s.cols * ((scaled_grad != NULL) + (plain_grad != NULL));
    QD_TRY(qd_cuda_workspace(stream, parts * s.width * (int64_t)sizeof(float), &space));
    s.rows_each = divide_up(s.rows, parts);
    s.scaled = scaled_grad ? (float *)space : NULL;
    s.plain = plain_grad ? (float *)space + (scaled_grad ? s.cols : 0) : NULL;
    QD_TRY(with_type(dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        dim3 grid((unsigned)tiles, (unsigned)parts), block(COLUMN_THREADS, COLUMN_LANES);
        if (vector && scaled_grad)
            column_sums_kernel<T, VECTOR, true><<<grid, block, 0, l.stream>>>(s);
        else if (vector)
            column_sums_kernel<T, VECTOR, false><<<grid, block, 0, l.stream>>>(s);
        else if (scaled_grad)
            column_sums_kernel<T, 1, true><<<grid, block, 0, l.stream>>>(s);
        else
            column_sums_kernel<T, 1, false><<<grid, block, 0, l.stream>>>(s);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    }));
    void *to[] = {scaled_grad, plain_grad};
    return qd_cuda_add_parts(l.stream, to, 2, grad_dtype, (const float *)space, parts, s.cols, accumulate);
}

/* The gradient of zero rows; grad may be NULL. */
static qd_status clear_grad(qd_stream *stream, void *grad, int64_t cols, qd_dtype dtype)
{
    if (grad && cols > 0)
        QD_CUDA_TRY(cudaMemsetAsync(grad, 0, (size_t)cols * qd_dtype_size(dtype), qd_cuda_launch_of(stream).stream));
    return QD_OK;
}

extern "C" qd_status qd_cuda_bias_grad(qd_stream *stream, const qd_bias_grad_args *a)
{
    QD_TRY(qd_check_float("bias_grad", "dy", a->dtype));
    QD_TRY(qd_check_float("bias_grad", "grad", a->grad_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return a->accumulate ? QD_OK : clear_grad(stream, a->grad, a->cols, a->grad_dtype);
    column_source s = {};
    s.dy = a->dy;
    s.rows = a->rows;
    s.cols = a->cols;
    return sum_columns(stream, s, a->dtype, NULL, a->grad, a->grad_dtype, a->accumulate);
}

/* COUNT (1, 2 or 4) sums over the lanes of a warp; lane l ends with sum number l / (32 / COUNT). */
template <int COUNT> static __device__ __forceinline__ float scattered_sums(float (&x)[COUNT])
{
    const int lane = threadIdx.x % 32;
    int step = 16;
#pragma unroll
    for (int n = COUNT / 2; n >= 1; n /= 2, step /= 2)
#pragma unroll
        for (int i = 0; i < n; i++) { /* a lane keeps half of its sums and sends the other half to its partner */
            const float keep = lane & step ? x[i + n] : x[i], give = lane & step ? x[i] : x[i + n];
            x[i] = keep + __shfl_xor_sync(0xffffffffu, give, step);
        }
    float sum = x[0];
#pragma unroll
    for (; step >= 1; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

enum { SUMS_MOST = 4, WARPS_MOST = GROUP_MOST / 32 };
/* Shared memory in which warps exchange sums: (parity, warp of the block, sum). The parity
 * alternates between calls: sums of one call may be read while the next one's are written, so one
 * barrier per call is enough. */
typedef float exchange[2][WARPS_MOST * SUMS_MOST];

/* COUNT sums over the threads of one row (blockDim.x of them), in each thread. Called by the whole
 * block. */
template <int COUNT> static __device__ __forceinline__ void row_sums(float (&x)[COUNT], exchange &scratch, int &parity)
{
    enum { EACH = 32 / COUNT };
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    float sum = scattered_sums(x);
    if (warps == 1) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] = __shfl_sync(0xffffffffu, sum, i * EACH);
        return;
    }
    parity ^= 1;
    float *mine = scratch[parity] + threadIdx.y * warps * COUNT;
    if (lane % EACH == 0)
        mine[threadIdx.x / 32 * COUNT + lane / EACH] = sum;
    __syncthreads();
    sum = 0.0f; /* lane l: sum number l % COUNT of warps l / COUNT, l / COUNT + EACH, ... */
#pragma unroll
    for (int warp = lane / COUNT; warp < WARPS_MOST; warp += EACH)
        if (warp < warps)
            sum += mine[warp * COUNT + lane % COUNT];
#pragma unroll
    for (int step = 16; step >= COUNT; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        x[i] = __shfl_sync(0xffffffffu, sum, i);
}

/* Parameters of the backward pass with PIECES vectors of a row per thread; BRANCHES: with sums of
 * add and dx. */
template <int PIECES, bool RMS, bool BRANCHES> struct backward_way {
    enum {
        ROWS = PIECES == 1 && !BRANCHES ? 2 : 1, /* rows of a group processed together */
        AHEAD = PIECES <= 2,        /* the next rows are prefetched; else there are not enough registers */
        ADD_AHEAD = AHEAD && (PIECES == 1 || RMS),
    };
};

/* With xhat = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - mean(g) - xhat * mean(g *
 * xhat)); RMSNorm has no mean(g). A block has blockDim.y groups of blockDim.x threads. Each group
 * processes ROWS rows per iteration, and all groups have the same number of iterations. Each thread
 * keeps the sums of its columns for dgamma and dbeta and, with BRANCHES, of add and dx. At the end
 * the block's sums are stored at parts + block * width, (cols) of each that is requested, in this
 * order. Shared memory: (groups, cols) floats if there are several groups. RMSNorm: dbeta is
 * NULL. */
template <typename T, int PIECES, bool RMS, bool ADD, bool BRANCHES>
static __global__ void __launch_bounds__(GROUP_MOST, 1)
    norm_backward_kernel(qd_norm_backward_args a, bool param_half, float *parts, int64_t width)
{
    using way = backward_way<PIECES, RMS, BRANCHES>;
    enum { V = vector_size<T>::V, ROWS = way::ROWS, SUMS = RMS ? 1 : 2 };
    __shared__ exchange scratch;
    extern __shared__ float area[];
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const int cols = (int)a.cols;
    const float share = 1.0f / (float)cols;
    const int64_t stride = blockDim.y, step = gridDim.x * stride * ROWS; /* between rows of a group; between its iterations */
    int64_t row = blockIdx.x * stride * ROWS + threadIdx.y;
    auto column = [&](int p) { return (p * (int)blockDim.x + (int)threadIdx.x) * V; };
    float gamma[PIECES][V], dgamma[PIECES][V], dbeta[PIECES][V], add_sums[PIECES][V], dx_sums[PIECES][V];
    auto read_gamma = [&](int p) {
        if (column(p) < cols && param_half)
            load_factor<bf16>(a.gamma, column(p), a.plus_one, gamma[p]);
        else if (column(p) < cols)
            load_factor<float>(a.gamma, column(p), a.plus_one, gamma[p]);
    };
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
        for (int i = 0; i < V; i++)
            gamma[p][i] = dgamma[p][i] = dbeta[p][i] = add_sums[p][i] = dx_sums[p][i] = 0.0f;
        if (way::AHEAD)
            read_gamma(p);
    }
    /* Rows beyond the last and columns beyond the end are zero and add nothing. */
    uint4 dy_next[ROWS][PIECES], x_next[ROWS][PIECES], add_next[ROWS][PIECES];
    float mean_next[ROWS], rstd_next[ROWS];
    auto fetch = [&](int64_t first) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int64_t at = first + r * stride;
            const bool there = at < a.rows;
            rstd_next[r] = there ? a.rstd[at] : 0.0f;
            mean_next[r] = there && !RMS ? a.mean[at] : 0.0f;
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                const bool has = there && column(p) < cols;
                const int64_t from = at * a.cols + column(p);
                dy_next[r][p] = has ? fetch_vector<T>(a.dy, from) : zero;
                x_next[r][p] = has ? fetch_vector<T>(a.x, from) : zero;
                if (ADD && way::ADD_AHEAD)
                    add_next[r][p] = has ? fetch_vector<T>(a.add, from) : zero;
            }
        }
    };
    int parity = 0;
    float most = 0.0f;
    if (way::AHEAD)
        fetch(row);
    for (int64_t base = blockIdx.x * stride * ROWS; base < a.rows; base += step, row += step) {
        uint4 dy[ROWS][PIECES], x[ROWS][PIECES], add[ROWS][PIECES];
        float mean[ROWS], rstd[ROWS], sums[SUMS * ROWS]; /* of g * xhat, per row; then of g */
        if (!way::AHEAD)
            fetch(row);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            mean[r] = mean_next[r], rstd[r] = rstd_next[r];
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                dy[r][p] = dy_next[r][p], x[r][p] = x_next[r][p];
                if (ADD && way::ADD_AHEAD)
                    add[r][p] = add_next[r][p];
                else if (ADD)
                    add[r][p] = row + r * stride < a.rows && column(p) < cols
                                    ? fetch_vector<T>(a.add, (row + r * stride) * a.cols + column(p))
                                    : zero;
            }
        }
        if (way::AHEAD)
            fetch(row + step);
#pragma unroll
        for (int i = 0; i < SUMS * ROWS; i++)
            sums[i] = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            if (!way::AHEAD)
                read_gamma(p);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float offset = -mean[r] * rstd[r];
                float d[V], v[V];
                load<V>((const T *)&dy[r][p], d);
                load<V>((const T *)&x[r][p], v);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    const float hat = RMS ? v[i] * rstd[r] : fmaf(v[i], rstd[r], offset), g = d[i] * gamma[p][i];
                    dgamma[p][i] = fmaf(d[i], hat, dgamma[p][i]);
                    sums[r] = fmaf(g, hat, sums[r]);
                    if constexpr (!RMS) {
                        sums[ROWS + r] += g;
                        dbeta[p][i] += d[i];
                    }
                }
            }
        }
        row_sums(sums, scratch, parity);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int64_t at = row + r * stride;
            if (at >= a.rows)
                break;
            /* dx = g * rstd + x * slope + level; slope and level follow from the sums */
            const float slope = -sums[r] * share * rstd[r] * rstd[r];
            float level = -mean[r] * slope;
            if constexpr (!RMS)
                level -= sums[ROWS + r] * share * rstd[r];
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                if (column(p) >= cols)
                    continue;
                float d[V], v[V];
                if (!way::AHEAD)
                    read_gamma(p);
                forget(dy[r][p]);
                forget(x[r][p]);
                load<V>((const T *)&dy[r][p], d);
                load<V>((const T *)&x[r][p], v);
#pragma unroll
                for (int i = 0; i < V; i++)
                    d[i] = fmaf(d[i] * gamma[p][i], rstd[r], RMS ? v[i] * slope : fmaf(v[i], slope, level));
                if constexpr (ADD) {
                    load<V>((const T *)&add[r][p], v);
#pragma unroll
                    for (int i = 0; i < V; i++)
                        d[i] += v[i];
                    if constexpr (BRANCHES)
#pragma unroll
                        for (int i = 0; i < V; i++) {
                            add_sums[p][i] += v[i];
                            dx_sums[p][i] += d[i];
                        }
                }
                store<V>((T *)a.dx + at * a.cols + column(p), d);
                if (a.amax)
                    most = larger_magnitude<T>(most, d);
            }
        }
    }
    if (a.amax)
        raise_amax(a.amax, most);
    /* Adds the sums of the groups, in order. */
    float *to = parts + blockIdx.x * width;
    auto leave = [&](const float (&sums)[PIECES][V], bool wanted) {
        if (!wanted)
            return;
        if (blockDim.y > 1)
            __syncthreads(); /* earlier values have been read */
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            if (column(p) < cols)
                store<V>((blockDim.y > 1 ? area + threadIdx.y * cols : to) + column(p), sums[p]);
        if (blockDim.y > 1) {
            __syncthreads();
            for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < cols; c += blockDim.x * blockDim.y) {
                float sum = 0.0f;
                for (int group = 0; group < (int)blockDim.y; group++)
                    sum += area[group * cols + c];
                to[c] = sum;
            }
        }
        to += cols;
    };
    leave(dgamma, a.dgamma);
    if constexpr (!RMS)
        leave(dbeta, a.dbeta);
    if constexpr (BRANCHES) {
        leave(add_sums, a.add_grad);
        leave(dx_sums, a.dx_grad);
    }
}

/* dx of any row, one element per access; another kernel sums the columns. dx may be add: each
 * thread reads its elements before it writes them. */
template <typename T, typename P> static __global__ void norm_backward_loop(qd_norm_backward_args a)
{
    __shared__ float scratch[2][32];
    const int64_t row = blockIdx.x, at = row * a.cols;
    const T *dy = (const T *)a.dy + at, *x = (const T *)a.x + at;
    const float mean = a.rms ? 0.0f : a.mean[row], rstd = a.rstd[row], count = (float)a.cols;
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float gamma[1];
        load_factor<P>(a.gamma, c, a.plus_one, gamma);
        float g = to_float(dy[c]) * gamma[0], hat = (to_float(x[c]) - mean) * rstd;
        sum_g += g;
        sum_gx += g * hat;
    }
    const float mean_g = a.rms ? 0.0f : block_sum(sum_g, scratch[0]) / count, mean_gx = block_sum(sum_gx, scratch[1]) / count;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float gamma[1];
        load_factor<P>(a.gamma, c, a.plus_one, gamma);
        float g = to_float(dy[c]) * gamma[0], hat = (to_float(x[c]) - mean) * rstd;
        float v[1] = {(g - mean_g - hat * mean_gx) * rstd};
        if (a.add)
            v[0] += to_float(((const T *)a.add)[at + c]);
        store<1>((T *)a.dx + at + c, v);
    }
}

template <typename T, int PIECES, bool RMS, bool ADD, bool BRANCHES>
static qd_status backward_rows(qd_stream *stream, const qd_norm_backward_args *a)
{
    const qd_cuda_launch l = qd_cuda_launch_of(stream);
    auto kernel = norm_backward_kernel<T, PIECES, RMS, ADD, BRANCHES>;
    const int threads = (int)divide_up(divide_up(a->cols, PIECES * vector_size<T>::V), 32) * 32,
              groups = threads < BLOCK_THREADS ? BLOCK_THREADS / threads : 1;
    /* at most BLOCK_THREADS * PIECES * V elements */
    const size_t shared = groups > 1 ? (size_t)groups * (size_t)a->cols * sizeof(float) : 0;
    void *to[] = {a->dgamma, a->dbeta, BRANCHES ? a->add_grad : NULL, BRANCHES ? a->dx_grad : NULL}, *parts;
    enum { OUTPUTS = sizeof to / sizeof *to };
    int64_t width = 0;
    for (int i = 0; i < OUTPUTS; i++)
        width += to[i] ? a->cols : 0;
    int resident = 0;
    QD_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads * groups, shared));
    const int64_t scratch = (int64_t)l.multiprocessors * resident,
                  most = divide_up(a->rows, groups * backward_way<PIECES, RMS, BRANCHES>::ROWS);
    const int64_t blocks = scratch < most ? scratch : most;
    QD_TRY(qd_cuda_workspace(stream, blocks * width * (int64_t)sizeof(float), &parts));
    if (a->amax)
        QD_CUDA_TRY(cudaMemsetAsync(a->amax, 0, sizeof *a->amax, l.stream));
    kernel<<<(unsigned)blocks, dim3(threads, groups), shared, l.stream>>>(*a, a->param_dtype == QD_BF16, (float *)parts, width);
    QD_CUDA_LAUNCHED();
    if (width == 0) /* frozen */
        return QD_OK;
    return qd_cuda_add_parts(l.stream, to, OUTPUTS, a->grad_dtype, (const float *)parts, (int)blocks, a->cols, a->accumulate);
}

/* Rows of vectors with PIECES per thread; RMSNorm has no gradient of beta here. */
template <typename T, int PIECES> static qd_status backward_pieces(qd_stream *stream, const qd_norm_backward_args *a)
{
    auto with_add = [&](auto rms) -> qd_status {
        constexpr bool RMS = decltype(rms)::value;
        return a->add ? backward_rows<T, PIECES, RMS, true, false>(stream, a) : backward_rows<T, PIECES, RMS, false, false>(stream, a);
    };
    return a->rms ? with_add(constant<1>()) : with_add(constant<0>());
}

/* The sums first: dx may overwrite dy or x. */
template <typename T, typename P> static qd_status backward_any(qd_stream *stream, const qd_norm_backward_args *a)
{
    column_source s = {};
    s.dy = a->dy;
    s.x = a->x;
    s.mean = a->rms ? NULL : a->mean;
    s.rstd = a->rstd;
    s.rows = a->rows;
    s.cols = a->cols;
    if (a->dgamma || a->dbeta)
        QD_TRY(sum_columns(stream, s, a->dtype, a->dgamma, a->dbeta, a->grad_dtype, a->accumulate));
    norm_backward_loop<T, P><<<(unsigned)a->rows, LOOP_THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return find_amax(stream, a->dx, a->rows * a->cols, a->dtype, a->amax);
}

/* Whether vectors of n elements, 16 bytes or less, can be read from here. NULL: yes. */
static bool has_vectors(const void *p, qd_dtype dtype, int n)
{
    const size_t bytes = (size_t)n * qd_dtype_size(dtype);
    return (uintptr_t)p % (bytes < 16 ? bytes : 16) == 0;
}

/* dx, dgamma and dbeta. vectors: rows can be read in vectors, and no gradient of beta is requested
 * for RMSNorm. */
template <typename T> static qd_status backward(qd_stream *stream, const qd_norm_backward_args *a, bool vectors)
{
    const int64_t count = a->cols / vector_size<T>::V;
    if (vectors && count <= BLOCK_THREADS)
        return backward_pieces<T, 1>(stream, a);
    if (vectors && count <= 2 * GROUP_MOST)
        return backward_pieces<T, 2>(stream, a);
    if (vectors && count <= 4 * GROUP_MOST)
        return backward_pieces<T, 4>(stream, a);
    return with_type(a->param_dtype, [&](auto param) -> qd_status { return backward_any<T, decltype(param)>(stream, a); });
}

static qd_status branch_grad(qd_stream *stream, const qd_norm_backward_args *a, const void *dy, void *grad)
{
    const qd_bias_grad_args sums = {dy, grad, a->rows, a->cols, a->accumulate, a->dtype, a->grad_dtype};
    return grad ? qd_cuda_bias_grad(stream, &sums) : QD_OK;
}

extern "C" qd_status qd_cuda_norm_backward(qd_stream *stream, const qd_norm_backward_args *a)
{
    void *const grads[] = {a->dgamma, a->dbeta, a->add_grad, a->dx_grad};
    QD_TRY(qd_check_float("norm_backward", "x", a->dtype));
    QD_TRY(qd_check_float("norm_backward", "gamma", a->param_dtype));
    for (void *grad : grads)
        if (grad)
            QD_TRY(qd_check_float("norm_backward", "dgamma", a->grad_dtype));
    if (a->rows <= 0 && !a->accumulate)
        for (void *grad : grads)
            QD_TRY(clear_grad(stream, grad, a->cols, a->grad_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        enum { V = vector_size<T>::V };
        const bool vectors =
            can_vector(a->cols, a->dy, a->x, a->add, a->dx) && has_vectors(a->gamma, a->param_dtype, V) && !(a->rms && a->dbeta);
        if (vectors && a->cols <= BLOCK_THREADS * V && !a->rms && a->add && (a->add_grad || a->dx_grad))
            return backward_rows<T, 1, false, true, true>(stream, a);
        QD_TRY(branch_grad(stream, a, a->add, a->add_grad)); /* first, because dx may overwrite add */
        QD_TRY(backward<T>(stream, a, vectors));
        return branch_grad(stream, a, a->dx, a->dx_grad);
    });
}
