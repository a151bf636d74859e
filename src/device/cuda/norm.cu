/* LayerNorm and RMSNorm, and sums over rows. Storage fp32 or bf16, computed in fp32; sums are taken in an order fixed by
 * the shapes and the number of multiprocessors.
 *
 * Rows that can be read in vectors stay on chip, so that memory is read once: a group of threads, one warp for most models,
 * has a row, and a block has several groups. Groups walk over the rows, and the next rows are on their way into shared memory
 * while one is worked on. Each thread fetches what it will read itself, so there is nothing to wait for but its own copies.
 * These kernels are bound by instructions as much as by memory: hence few threads with many elements each (sums across
 * threads cost the same for few elements), and gamma and beta as fp32 in shared memory, ready to use.
 * Other rows are read again for each pass over them, mostly from the caches. */
#include "device/cuda/math_impl.cuh"
#include "device/cuda/sums_impl.h"

enum { BLOCK_THREADS = 256, GROUP_MOST = 512, WARPS_MOST = GROUP_MOST / 32 };
enum { FORWARD_PIECES = 8, BACKWARD_PIECES = 4 }; /* vectors of a row that a thread has, at most */
enum { LOOP_THREADS = 256 };

template <typename T> struct vector_size {
    enum { V = 16 / sizeof(T) };
};

/* Rows in shared memory, the one that is worked on included. */
template <int PIECES, bool FORWARD> struct stages {
    enum { COUNT = FORWARD && PIECES < FORWARD_PIECES ? 3 : 2 };
};

/* How a row is laid over threads; pieces 0: it is not. */
struct row_layout {
    int pieces, threads, groups;
};

static row_layout lay_out(int64_t cols, int vector, int most_pieces)
{
    const int64_t vectors = cols < vector ? 1 : cols / vector;
    row_layout l = {2, 0, 0};
    while (l.pieces < most_pieces && vectors > 32 * l.pieces)
        l.pieces *= 2;
    int64_t threads = divide_up(divide_up(vectors, l.pieces), 32) * 32;
    l.threads = (int)threads;
    l.groups = threads < BLOCK_THREADS ? (int)(BLOCK_THREADS / threads) : 1;
    if (threads > GROUP_MOST)
        l.pieces = 0;
    return l;
}

static __device__ __forceinline__ void copy_async(uint4 *to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
static __device__ __forceinline__ void copies_end_group()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Until at most PENDING of this thread's latest groups are under way. */
template <int PENDING> static __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* The block's part in the walk over rows, as one thread sees it. */
template <typename T, int PIECES> struct row_walk {
    enum { V = vector_size<T>::V };
    uint4 *slots; /* (stages, tensors, PIECES, threads of the block) */
    int64_t cols, row, step;
    int tensors, threads, self;

    __device__ row_walk(void *shared, int64_t columns, int tensor_count)
    {
        slots = (uint4 *)shared;
        cols = columns;
        tensors = tensor_count;
        threads = blockDim.x * blockDim.y;
        self = threadIdx.y * blockDim.x + threadIdx.x;
        row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
        step = (int64_t)gridDim.x * blockDim.y;
    }
    __device__ __forceinline__ int column(int p) const
    {
        return (p * (int)blockDim.x + (int)threadIdx.x) * V;
    }
    __device__ __forceinline__ uint4 *slot(int stage, int tensor, int p) const
    {
        return slots + ((stage * tensors + tensor) * PIECES + p) * threads + self;
    }
    __device__ __forceinline__ void fetch(int stage, int tensor, const void *base, int64_t from) const
    {
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            if (column(p) < cols)
                copy_async(slot(stage, tensor, p), (const T *)base + from * cols + column(p));
    }
    __device__ __forceinline__ void read(int stage, int tensor, int p, float (&v)[V]) const
    {
        load<V>((const T *)slot(stage, tensor, p), v);
    }
};

/* Where the warps of a group meet: (parity, sum, warp of the block). The parity, which changes from call to call, lets one call's
 * sums be read while the next one's are written, so one barrier each is enough. */
typedef float meeting_room[2][2][WARPS_MOST];

/* COUNT sums over a group, in every thread of it. */
template <int COUNT> static __device__ __forceinline__ void group_sums(float (&x)[COUNT], meeting_room &room, int &parity)
{
    const int warps = blockDim.x / 32, first = threadIdx.y * warps; /* the group's own */
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        x[i] = warp_sum(x[i]);
    if (warps == 1)
        return;
    parity ^= 1;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (threadIdx.x % 32 == 0)
            room[parity][i][first + threadIdx.x / 32] = x[i];
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory"); /* the group's */
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = 0.0f;
        for (int warp = 0; warp < warps; warp++)
            x[i] += room[parity][i][first + warp];
    }
}

/* gamma or beta as fp32; all threads of the block. */
static __device__ __forceinline__ void spread_params(float *to, const void *from, int64_t cols, bool half)
{
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < cols; c += blockDim.x * blockDim.y) {
        float v[1];
        load_as<1>(from, c, half, v);
        to[c] = v[0];
    }
}

/* ---- forward ---- */

struct row_statistics {
    float mean, rstd;
};

static __device__ __forceinline__ void keep_statistics(const qd_norm_forward_args &a, int64_t row, row_statistics s)
{
    if (threadIdx.x == 0) {
        if (a.mean)
            a.mean[row] = s.mean;
        a.rstd[row] = s.rstd;
    }
}

/* Shared memory: the rows' slots, gamma (cols), beta (cols) if there is one. */
template <typename T, int PIECES, bool RMS>
static __global__ void __launch_bounds__(GROUP_MOST) norm_forward_kernel(qd_norm_forward_args a, bool param_half)
{
    enum { V = vector_size<T>::V, STAGES = stages<PIECES, true>::COUNT };
    extern __shared__ uint4 shared[];
    __shared__ meeting_room room;
    row_walk<T, PIECES> w(shared, a.cols, a.add ? 2 : 1);
    float *gamma = (float *)(w.slots + STAGES * w.tensors * PIECES * w.threads), *beta = a.beta ? gamma + a.cols : NULL;
    auto fetch = [&](int64_t row, int stage) {
        if (row < a.rows) {
            w.fetch(stage, 0, a.x, row);
            if (a.add)
                w.fetch(stage, 1, a.add, row);
        }
        copies_end_group();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        fetch(w.row + s * w.step, s);
    spread_params(gamma, a.gamma, a.cols, param_half);
    if (a.beta)
        spread_params(beta, a.beta, a.cols, param_half);
    __syncthreads();
    const float share = 1.0f / (float)a.cols;
    int parity = 0;
    for (int stage = 0; w.row < a.rows; w.row += w.step, stage = stage + 1 == STAGES ? 0 : stage + 1) {
        fetch(w.row + (STAGES - 1) * w.step, stage == 0 ? STAGES - 1 : stage - 1);
        copies_wait<STAGES - 1>();
        T *y = (T *)a.y + w.row * a.cols;
        float x[PIECES][V], v[V], sum[1] = {0.0f};
        row_statistics s = {0.0f, 0.0f};
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int col = w.column(p);
            if (col >= a.cols)
                continue;
            w.read(stage, 0, p, x[p]);
            if (a.add) {
                w.read(stage, 1, p, v);
#pragma unroll
                for (int i = 0; i < V; i++)
                    x[p][i] = rounded<T>(x[p][i] + v[i]); /* as stored: the backward pass sees the rounded value too */
                store<V>((T *)a.sum + w.row * a.cols + col, x[p]);
            }
#pragma unroll
            for (int i = 0; i < V; i++)
                sum[0] = RMS ? fmaf(x[p][i], x[p][i], sum[0]) : sum[0] + x[p][i];
        }
        group_sums(sum, room, parity);
        if constexpr (!RMS) {
            s.mean = sum[0] * share;
            sum[0] = 0.0f;
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                if (w.column(p) < a.cols)
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        x[p][i] -= s.mean;
                        sum[0] = fmaf(x[p][i], x[p][i], sum[0]);
                    }
            group_sums(sum, room, parity);
        }
        s.rstd = 1.0f / sqrtf(sum[0] * share + a.eps);
        keep_statistics(a, w.row, s);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int col = w.column(p);
            if (col >= a.cols)
                continue;
            load<V>(gamma + col, v);
#pragma unroll
            for (int i = 0; i < V; i++)
                v[i] *= s.rstd;
            if (beta) {
                float b[V];
                load<V>(beta + col, b);
#pragma unroll
                for (int i = 0; i < V; i++)
                    x[p][i] = fmaf(x[p][i], v[i], b[i]);
            } else {
#pragma unroll
                for (int i = 0; i < V; i++)
                    x[p][i] *= v[i];
            }
            store<V>(y + col, x[p]);
        }
    }
    copies_wait<0>();
}

/* Any row, one element at a time. */
template <typename T, typename P> static __global__ void norm_forward_loop(qd_norm_forward_args a)
{
    __shared__ float room[2][32];
    const int64_t at = (int64_t)blockIdx.x * a.cols;
    const T *x = (const T *)a.x + at;
    float sum = 0.0f, squares = 0.0f, count = (float)a.cols;
    if (a.add) {
        T *stored = (T *)a.sum + at;
        for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
            float v[1] = {to_float(x[c]) + to_float(((const T *)a.add)[at + c])};
            store<1>(stored + c, v);
        }
        x = stored; /* each thread reads what it wrote itself */
    }
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS)
        sum += to_float(x[c]);
    row_statistics s = {0.0f, 0.0f};
    if (!a.rms)
        s.mean = block_sum(sum, room[0]) / count;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS)
        squares += (to_float(x[c]) - s.mean) * (to_float(x[c]) - s.mean);
    s.rstd = 1.0f / sqrtf(block_sum(squares, room[1]) / count + a.eps);
    keep_statistics(a, blockIdx.x, s);
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float v[1] = {(to_float(x[c]) - s.mean) * s.rstd * to_float(((const P *)a.gamma)[c])};
        if (a.beta)
            v[0] += to_float(((const P *)a.beta)[c]);
        store<1>((T *)a.y + at + c, v);
    }
}

template <int N> struct constant {
    enum { value = N };
};

/* Calls body with the number of pieces and whether it is RMSNorm as constants. */
template <int MOST, typename F> static qd_status with_layout(int pieces, bool rms, F body)
{
    auto choose = [&](auto count) -> qd_status { return rms ? body(count, constant<1>()) : body(count, constant<0>()); };
    if constexpr (MOST == 8)
        if (pieces == 8)
            return choose(constant<8>());
    return pieces == 4 ? choose(constant<4>()) : choose(constant<2>());
}

struct row_launch {
    unsigned blocks;
    size_t shared;
};

/* As many blocks as the multiprocessors hold at a time. tiles: rows in shared memory, of all tensors and stages; params: floats
 * after them; area: bytes that are needed at the end in any case. blocks 0: it does not fit. */
template <typename K>
static qd_status plan_launch(qd_stream *stream, K kernel, row_layout layout, int tiles, int64_t params, int64_t area, int64_t rows,
                             row_launch *launch)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int threads = layout.threads * layout.groups;
    int64_t shared = (int64_t)tiles * layout.pieces * threads * 16 + params * (int64_t)sizeof(float), most = divide_up(rows, layout.groups);
    int resident = 0;
    shared = shared < area ? area : shared;
    launch->blocks = 0;
    launch->shared = (size_t)shared;
    const int64_t allowed = l.shared_most - (int64_t)sizeof(meeting_room);
    if (shared > allowed)
        return QD_OK;
    /* Always the most there is: the setting belongs to the process, and ranks may be threads that launch the kernel with other sizes. */
    QD_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)allowed));
    QD_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, (size_t)shared));
    const int64_t blocks = (int64_t)l.multiprocessors * resident;
    launch->blocks = (unsigned)(blocks < most ? blocks : most);
    return QD_OK;
}

template <typename T, int PIECES, bool RMS>
static qd_status forward_rows(qd_stream *stream, const qd_norm_forward_args *a, row_layout layout, bool *done)
{
    auto kernel = norm_forward_kernel<T, PIECES, RMS>;
    row_launch launch;
    QD_TRY(plan_launch(stream, kernel, layout, stages<PIECES, true>::COUNT * (a->add ? 2 : 1), a->cols * (a->beta ? 2 : 1), 0, a->rows,
                       &launch));
    *done = launch.blocks > 0;
    if (*done)
        kernel<<<launch.blocks, dim3(layout.threads, layout.groups), launch.shared, qd_cuda_launch_of(stream).stream>>>(
            *a, a->param_dtype == QD_BF16);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_norm_forward(qd_stream *stream, const qd_norm_forward_args *a)
{
    QD_TRY(qd_cuda_check_float("norm_forward", "x", a->dtype));
    QD_TRY(qd_cuda_check_float("norm_forward", "gamma", a->param_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        row_layout layout = lay_out(a->cols, vector_size<T>::V, FORWARD_PIECES);
        bool done = false;
        if (can_vector(a->cols, a->x, a->add, a->y, a->sum) && layout.pieces)
            QD_TRY(with_layout<FORWARD_PIECES>(layout.pieces, a->rms, [&](auto pieces, auto rms) -> qd_status {
                return forward_rows<T, decltype(pieces)::value, decltype(rms)::value>(stream, a, layout, &done);
            }));
        if (done)
            return QD_OK;
        return with_type(a->param_dtype, [&](auto param) -> qd_status {
            norm_forward_loop<T, decltype(param)><<<(unsigned)a->rows, LOOP_THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
            QD_CUDA_LAUNCHED();
            return QD_OK;
        });
    });
}

/* ---- sums over rows: parts (count, width) of fp32 in the workspace, then their sum ---- */

enum { SUM_COLS = 32, SUM_LANES = 32 };

/* Block row 0: first (cols) += the sum over the parts; 1: second, of the next cols columns; part p is at parts + p * width. A block takes SUM_COLS
 * columns; its SUM_LANES rows of threads sum every SUM_LANES-th part each, and then their sums are added in a tree. */
struct part_sums {
    void *first, *second;
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
        G *grad = (G *)(blockIdx.y ? s.second : s.first) + col;
        float v[1] = {(s.accumulate ? to_float(*grad) : 0.0f) + sums[0][threadIdx.x]};
        store<1>(grad, v);
    }
}

extern "C" qd_status qd_cuda_add_parts(cudaStream_t stream, void *first, void *second, qd_dtype dtype, const float *parts, int count,
                                       int64_t cols, bool accumulate)
{
    part_sums s = {first ? first : second, second, parts, count, cols * ((first != NULL) + (second != NULL)), cols, accumulate};
    return with_type(dtype, [&](auto type) -> qd_status {
        dim3 grid((unsigned)divide_up(cols, SUM_COLS), first && second ? 2 : 1);
        add_parts_kernel<decltype(type)><<<grid, dim3(SUM_COLS, SUM_LANES), 0, stream>>>(s);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

/* Column sums of dy (rows, cols), or with xhat of dy * xhat and of dy together. */
struct column_source {
    const void *dy, *x;
    const float *mean, *rstd; /* of the scaled sums */
    int64_t rows, cols, rows_each;
    float *scaled, *plain; /* (parts, cols) with row stride `width`; either may be NULL */
    int64_t width;
};

enum { COLUMN_LANES = 8, COLUMN_THREADS = 32, COLUMN_BLOCKS = 4 }; /* rows and columns of a block's threads; blocks of a multiprocessor */

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

/* How many parts the rows are cut into: as many as make one round of blocks on all multiprocessors, but none too short. */
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
    return qd_cuda_add_parts(l.stream, scaled_grad, plain_grad, grad_dtype, (const float *)space, parts, s.cols, accumulate);
}

/* The sum of no rows; grad may be NULL. */
static qd_status clear_grad(qd_stream *stream, void *grad, int64_t cols, qd_dtype dtype)
{
    if (grad && cols > 0)
        QD_CUDA_TRY(cudaMemsetAsync(grad, 0, (size_t)cols * qd_dtype_size(dtype), qd_cuda_launch_of(stream).stream));
    return QD_OK;
}

extern "C" qd_status qd_cuda_bias_grad(qd_stream *stream, const qd_bias_grad_args *a)
{
    QD_TRY(qd_cuda_check_float("bias_grad", "dy", a->dtype));
    QD_TRY(qd_cuda_check_float("bias_grad", "grad", a->grad_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return a->accumulate ? QD_OK : clear_grad(stream, a->grad, a->cols, a->grad_dtype);
    column_source s = {};
    s.dy = a->dy;
    s.rows = a->rows;
    s.cols = a->cols;
    return sum_columns(stream, s, a->dtype, NULL, a->grad, a->grad_dtype, a->accumulate);
}

/* ---- backward ---- */

/* With xhat = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); RMSNorm has no
 * mean(g). Each thread keeps its columns' sums for dgamma and dbeta; the block's go to parts + block * width at the end: dgamma
 * (cols), then dbeta (cols), those that are wanted. Shared memory: the rows' slots, gamma (cols). */
template <typename T, int PIECES, bool RMS>
static __global__ void __launch_bounds__(PIECES == BACKWARD_PIECES ? GROUP_MOST : BLOCK_THREADS)
    norm_backward_kernel(qd_norm_backward_args a, bool param_half, float *parts, int64_t width)
{
    enum { V = vector_size<T>::V, STAGES = stages<PIECES, false>::COUNT };
    extern __shared__ uint4 shared[];
    __shared__ meeting_room room;
    row_walk<T, PIECES> w(shared, a.cols, a.add ? 3 : 2);
    float *gamma = (float *)(w.slots + STAGES * w.tensors * PIECES * w.threads);
    float dgamma[PIECES][V], dbeta[PIECES][V];
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int i = 0; i < V; i++)
            dgamma[p][i] = dbeta[p][i] = 0.0f;
    auto fetch = [&](int64_t row, int stage) {
        if (row < a.rows) {
            w.fetch(stage, 0, a.dy, row);
            w.fetch(stage, 1, a.x, row);
            if (a.add)
                w.fetch(stage, 2, a.add, row);
        }
        copies_end_group();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        fetch(w.row + s * w.step, s);
    spread_params(gamma, a.gamma, a.cols, param_half);
    __syncthreads();
    const float share = 1.0f / (float)a.cols;
    const bool with_beta = a.dbeta != NULL;
    int parity = 0;
    for (int stage = 0; w.row < a.rows; w.row += w.step, stage = stage + 1 == STAGES ? 0 : stage + 1) {
        fetch(w.row + (STAGES - 1) * w.step, stage == 0 ? STAGES - 1 : stage - 1);
        const float mean = RMS ? 0.0f : a.mean[w.row], rstd = a.rstd[w.row], offset = -mean * rstd;
        copies_wait<STAGES - 1>();
        T *dx = (T *)a.dx + w.row * a.cols;
        float sums[RMS ? 1 : 2] = {}; /* of g * xhat, of g */
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            if (w.column(p) >= a.cols)
                continue;
            float d[V], x[V], v[V];
            w.read(stage, 0, p, d);
            w.read(stage, 1, p, x);
            load<V>(gamma + w.column(p), v);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const float hat = RMS ? x[i] * rstd : fmaf(x[i], rstd, offset), g = d[i] * v[i];
                dgamma[p][i] = fmaf(d[i], hat, dgamma[p][i]);
                sums[0] = fmaf(g, hat, sums[0]);
                if constexpr (!RMS)
                    sums[1] += g;
            }
            if (with_beta)
#pragma unroll
                for (int i = 0; i < V; i++)
                    dbeta[p][i] += d[i];
        }
        group_sums(sums, room, parity);
        /* dx = g * rstd + x * slope + level, the last two made of the sums */
        const float slope = -sums[0] * share * rstd * rstd;
        float level = -mean * slope;
        if constexpr (!RMS)
            level -= sums[1] * share * rstd;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            if (w.column(p) >= a.cols)
                continue;
            float d[V], x[V], v[V]; /* from shared memory again: registers are dearer */
            w.read(stage, 0, p, d);
            w.read(stage, 1, p, x);
            load<V>(gamma + w.column(p), v);
#pragma unroll
            for (int i = 0; i < V; i++)
                d[i] = fmaf(d[i] * v[i], rstd, RMS ? x[i] * slope : fmaf(x[i], slope, level));
            if (a.add) {
                w.read(stage, 2, p, v);
#pragma unroll
                for (int i = 0; i < V; i++)
                    d[i] += v[i];
            }
            store<V>(dx + w.column(p), d);
        }
    }
    copies_wait<0>();
    /* The groups' sums, in order: (groups, cols) where the rows were. */
    float *area = (float *)shared;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        if (which == 0 ? !a.dgamma : !a.dbeta)
            continue;
        __syncthreads();
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            if (w.column(p) < a.cols)
                store<V>(area + threadIdx.y * a.cols + w.column(p), which == 0 ? dgamma[p] : dbeta[p]);
        __syncthreads();
        float *to = parts + blockIdx.x * width + (which == 1 && a.dgamma ? a.cols : 0);
        for (int c = w.self; c < a.cols; c += w.threads) {
            float sum = 0.0f;
            for (int group = 0; group < (int)blockDim.y; group++)
                sum += area[group * a.cols + c];
            to[c] = sum;
        }
    }
}

/* dx of any row, one element at a time; the columns are summed by another kernel. dx may be add: each thread reads its
 * elements before it writes them. */
template <typename T, typename P> static __global__ void norm_backward_loop(qd_norm_backward_args a)
{
    __shared__ float room[2][32];
    const int64_t row = blockIdx.x, at = row * a.cols;
    const T *dy = (const T *)a.dy + at, *x = (const T *)a.x + at;
    const P *gamma = (const P *)a.gamma;
    const float mean = a.rms ? 0.0f : a.mean[row], rstd = a.rstd[row], count = (float)a.cols;
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float g = to_float(dy[c]) * to_float(gamma[c]), hat = (to_float(x[c]) - mean) * rstd;
        sum_g += g;
        sum_gx += g * hat;
    }
    const float mean_g = a.rms ? 0.0f : block_sum(sum_g, room[0]) / count, mean_gx = block_sum(sum_gx, room[1]) / count;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float g = to_float(dy[c]) * to_float(gamma[c]), hat = (to_float(x[c]) - mean) * rstd;
        float v[1] = {(g - mean_g - hat * mean_gx) * rstd};
        if (a.add)
            v[0] += to_float(((const T *)a.add)[at + c]);
        store<1>((T *)a.dx + at + c, v);
    }
}

template <typename T, int PIECES, bool RMS>
static qd_status backward_rows(qd_stream *stream, const qd_norm_backward_args *a, row_layout layout, bool *done)
{
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    auto kernel = norm_backward_kernel<T, PIECES, RMS>;
    const int64_t width = a->cols * ((a->dgamma != NULL) + (a->dbeta != NULL));
    row_launch launch;
    void *parts;
    QD_TRY(plan_launch(stream, kernel, layout, stages<PIECES, false>::COUNT * (a->add ? 3 : 2), a->cols,
                       layout.groups * a->cols * (int64_t)sizeof(float), a->rows, &launch));
    *done = launch.blocks > 0;
    if (!*done)
        return QD_OK;
    QD_TRY(qd_cuda_workspace(stream, launch.blocks * width * (int64_t)sizeof(float), &parts));
    kernel<<<launch.blocks, dim3(layout.threads, layout.groups), launch.shared, s>>>(*a, a->param_dtype == QD_BF16, (float *)parts, width);
    QD_CUDA_LAUNCHED();
    if (width)
        QD_TRY(qd_cuda_add_parts(s, a->dgamma, a->dbeta, a->grad_dtype, (const float *)parts, (int)launch.blocks, a->cols, a->accumulate));
    return QD_OK;
}

/* The sums first: dx may lie where dy or x does. */
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
    return QD_OK;
}

extern "C" qd_status qd_cuda_norm_backward(qd_stream *stream, const qd_norm_backward_args *a)
{
    QD_TRY(qd_cuda_check_float("norm_backward", "x", a->dtype));
    QD_TRY(qd_cuda_check_float("norm_backward", "gamma", a->param_dtype));
    if (a->dgamma || a->dbeta)
        QD_TRY(qd_cuda_check_float("norm_backward", "dgamma", a->grad_dtype));
    if (a->rows <= 0 && !a->accumulate) {
        QD_TRY(clear_grad(stream, a->dgamma, a->cols, a->grad_dtype));
        QD_TRY(clear_grad(stream, a->dbeta, a->cols, a->grad_dtype));
    }
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        row_layout layout = lay_out(a->cols, vector_size<T>::V, BACKWARD_PIECES);
        bool done = false;
        if (can_vector(a->cols, a->dy, a->x, a->add, a->dx) && layout.pieces)
            QD_TRY(with_layout<BACKWARD_PIECES>(layout.pieces, a->rms, [&](auto pieces, auto rms) -> qd_status {
                return backward_rows<T, decltype(pieces)::value, decltype(rms)::value>(stream, a, layout, &done);
            }));
        if (done)
            return QD_OK;
        return with_type(a->param_dtype, [&](auto param) -> qd_status { return backward_any<T, decltype(param)>(stream, a); });
    });
}
