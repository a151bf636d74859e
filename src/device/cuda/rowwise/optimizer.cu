/* Parameter updates in one pass: read gradient, master weight and state, write them back, and round
 * the master weight into the parameter. With `rest`, the master weight is joined from parameter and
 * low 16 bits and split again: 26 bytes per element instead of 28 (AdamW). One launch updates all
 * ranges of a call: their table is a kernel argument. Also the gradient norm: sums of squares of
 * rows, sums of those, and the factor that updates read. */
#include "device/cuda/math_impl.cuh"
#include "device/cuda/sums_impl.h"
#include "device/grad_norm.h"
#include "device/split_master.h"

#include <math.h>

/* Elements that a block updates: short blocks keep the memory streams close together. */
enum { THREADS = 256, STEP = 4, CHUNK = THREADS * STEP };
enum { TABLE = 960 }; /* ranges per launch: with 16 bytes each, half of the limit of kernel arguments */

struct range_table {
    int64_t offset[TABLE];
    uint32_t count_low[TABLE]; /* low bits of the number of elements; high bits in count_high */
    uint32_t first_chunk[TABLE + 1];
    uint8_t count_high[TABLE], decay[TABLE];
    int ranges;
};
static_assert(sizeof(range_table) <= 24 << 10, "must fit in the kernel arguments with the rest");

struct part {
    int64_t begin, end; /* elements */
    bool decay, aligned;
};

/* The elements that this block updates. */
static __device__ __forceinline__ part find_part(const range_table &t, bool aligned)
{
    int low = 0, high = t.ranges - 1;
    while (low < high) { /* the last range whose first chunk is not after this one */
        int middle = (low + high + 1) / 2;
        if (t.first_chunk[middle] <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    int64_t count = (int64_t)t.count_high[low] << 32 | t.count_low[low];
    int64_t first = (int64_t)(blockIdx.x - t.first_chunk[low]) * CHUNK, left = count - first;
    part p;
    p.begin = t.offset[low] + first;
    p.end = p.begin + (left < CHUNK ? left : CHUNK);
    p.decay = t.decay[low];
    p.aligned = aligned && t.offset[low] % STEP == 0;
    return p;
}

/* Calls `step` for the STEP elements of this thread, or `one` for single elements: at the end of a
 * range, and where it is not aligned. */
template <typename F, typename G> static __device__ __forceinline__ void for_elements(const part &p, F step, G one)
{
    int64_t i = p.begin;
    if (p.aligned) {
        int64_t whole = p.begin + (p.end - p.begin) / STEP * STEP, own = i + threadIdx.x * STEP;
        if (own < whole)
            step(own);
        i = whole;
    }
    for (i += threadIdx.x; i < p.end; i += THREADS)
        one(i);
}

/* Addresses of the fp32 values. */
struct values {
    void *param; /* bf16; NULL: only the master is stored */
    float *master;
    int16_t *rest; /* low 16 bits of the master weight, if there is no master */
};

static values values_of(void *param, float *master, int16_t *rest, qd_dtype dtype)
{
    values x;
    x.param = dtype == QD_F32 ? NULL : param; /* the addresses do not show it: those of element 0 may be equal by chance */
    x.master = master;
    x.rest = rest;
    return x;
}

static bool is_aligned(const values &x)
{
    return is_aligned(x.param) && is_aligned(x.master) && is_aligned(x.rest);
}

template <bool SPLIT, int N> static __device__ __forceinline__ void load_values(const values &x, int64_t i, float (&p)[N])
{
    if constexpr (SPLIT)
        load_parts<N>((const bf16 *)x.param + i, x.rest + i, p);
    else
        load<N>(x.master + i, p);
}

template <bool SPLIT, int N> static __device__ __forceinline__ void store_values(const values &x, int64_t i, const float (&p)[N])
{
    if constexpr (SPLIT) {
        store_parts<N>((bf16 *)x.param + i, x.rest + i, p);
    } else {
        store<N>(x.master + i, p);
        if (x.param)
            store<N>((bf16 *)x.param + i, p);
    }
}

/* Calls body with a type that says whether the values are split. */
template <bool B> struct truth {
    static constexpr bool value = B;
};
template <typename F> static qd_status with_split(const int16_t *rest, F body)
{
    return rest ? body(truth<true>()) : body(truth<false>());
}

struct adamw_numbers {
    values x;
    const void *grad;
    float *m, *v;
    const double *scale;
    float eps, new1, new2, rate, correction, decay;
};

/* Relative error 2^-23. Together with the quotient below, which is as accurate, this takes 40 %
 * fewer instructions than correctly rounded ones. */
static __device__ __forceinline__ float root_of(float x)
{
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <typename G, bool SPLIT, int N>
static __device__ __forceinline__ void adamw_step(const adamw_numbers &a, int64_t i, float scale, float decay)
{
    float g[N], m[N], v[N], p[N];
    load<N>((const G *)a.grad + i, g);
    load<N>(a.m + i, m);
    load<N>(a.v + i, v);
    load_values<SPLIT>(a.x, i, p);
    if (!isfinite(scale)) /* checked when the loads are in flight */
        return;
#pragma unroll
    for (int j = 0; j < N; j++) {
        g[j] *= scale;
        m[j] = m[j] - m[j] * a.new1 + g[j] * a.new1;
        v[j] = v[j] - v[j] * a.new2 + g[j] * g[j] * a.new2;
        p[j] = p[j] - (__fdividef(a.rate * m[j], root_of(v[j]) * a.correction + a.eps) + decay * p[j]);
    }
    store<N>(a.m + i, m);
    store<N>(a.v + i, v);
    store_values<SPLIT>(a.x, i, p);
}

template <typename G, bool SPLIT>
static __global__ void __launch_bounds__(THREADS) adamw_kernel(const __grid_constant__ range_table table, adamw_numbers a, bool aligned)
{
    const float scale = (float)*a.scale;
    part p = find_part(table, aligned);
    for_elements(p, [&](int64_t i) { adamw_step<G, SPLIT, STEP>(a, i, scale, p.decay ? a.decay : 0.0f); },
                 [&](int64_t i) { adamw_step<G, SPLIT, 1>(a, i, scale, p.decay ? a.decay : 0.0f); });
}

struct sgd_numbers {
    values x;
    const void *grad;
    float *m; /* NULL: no momentum */
    const double *scale;
    float momentum, lr, decay;
};

template <typename G, bool SPLIT, int N>
static __device__ __forceinline__ void sgd_step(const sgd_numbers &a, int64_t i, float scale, float decay)
{
    float d[N], m[N], p[N];
    load<N>((const G *)a.grad + i, d);
    load_values<SPLIT>(a.x, i, p);
    if (a.m)
        load<N>(a.m + i, m);
    if (!isfinite(scale))
        return;
#pragma unroll
    for (int j = 0; j < N; j++) {
        d[j] *= scale;
        if (a.m)
            d[j] = m[j] = m[j] * a.momentum + d[j];
        p[j] = p[j] - a.lr * (d[j] + decay * p[j]);
    }
    if (a.m)
        store<N>(a.m + i, m);
    store_values<SPLIT>(a.x, i, p);
}

template <typename G, bool SPLIT>
static __global__ void __launch_bounds__(THREADS) sgd_kernel(const __grid_constant__ range_table table, sgd_numbers a, bool aligned)
{
    const float scale = (float)*a.scale;
    part p = find_part(table, aligned);
    for_elements(p, [&](int64_t i) { sgd_step<G, SPLIT, STEP>(a, i, scale, p.decay ? a.decay : 0.0f); },
                 [&](int64_t i) { sgd_step<G, SPLIT, 1>(a, i, scale, p.decay ? a.decay : 0.0f); });
}

/* Calls launch(table, blocks) for the ranges, TABLE per launch. */
template <typename F> static qd_status for_ranges(const char *kernel, const qd_param_range *ranges, int count, F launch)
{
    range_table table;
    for (int first = 0; first < count;) {
        uint64_t chunks = 0;
        int taken = 0;
        for (; first < count && taken < TABLE; first++) {
            qd_param_range r = ranges[first];
            if (r.count <= 0)
                continue;
            int last = first; /* adjacent ranges are merged, so that there are fewer to search */
            while (last + 1 < count && ranges[last + 1].offset == r.offset + r.count && ranges[last + 1].decay == r.decay &&
                   (r.count + ranges[last + 1].count) >> 40 == 0)
                r.count += ranges[++last].count;
            uint64_t more = (uint64_t)divide_up(r.count, CHUNK);
            if (r.count >> 40)
                return QD_FAIL(QD_UNSUPPORTED, "%s: a range of %lld elements; fewer than 2^40 are supported", kernel, (long long)r.count);
            if (chunks + more > 0x7fffffffu)
                break; /* left to the next launch */
            first = last;
            table.offset[taken] = r.offset;
            table.count_low[taken] = (uint32_t)r.count;
            table.count_high[taken] = (uint8_t)(r.count >> 32);
            table.decay[taken] = r.decay;
            table.first_chunk[taken++] = (uint32_t)chunks;
            chunks += more;
        }
        table.ranges = taken;
        if (taken)
            QD_TRY(launch(table, (unsigned)chunks));
    }
    return QD_OK;
}

extern "C" qd_status qd_cuda_adamw(qd_stream *stream, const qd_adamw_args *a)
{
    QD_TRY(qd_check_float("adamw", "the parameter", a->param_dtype));
    QD_TRY(qd_check_float("adamw", "the gradient", a->grad_dtype));
    QD_TRY(qd_check_rest("adamw", a->rest, a->param_dtype));
    if (!(a->bias_correction1 > 0 && a->bias_correction2 > 0))
        return QD_FAIL(QD_USAGE, "adamw: bias corrections %g and %g; both are 1 - beta^step and above 0", a->bias_correction1,
                       a->bias_correction2);
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    adamw_numbers n;
    n.x = values_of(a->param, a->master, a->rest, a->param_dtype);
    n.grad = a->grad;
    n.m = a->m;
    n.v = a->v;
    n.scale = a->grad_scale;
    n.eps = (float)a->eps;
    n.new1 = (float)(1.0 - a->beta1);
    n.new2 = (float)(1.0 - a->beta2);
    n.rate = (float)(a->lr / a->bias_correction1);
    n.correction = (float)(1.0 / sqrt(a->bias_correction2));
    n.decay = (float)(a->lr * a->weight_decay);
    bool aligned = is_aligned(n.x) && is_aligned(n.grad) && is_aligned(n.m) && is_aligned(n.v);
    return with_type(a->grad_dtype, [&](auto type) -> qd_status {
        using G = decltype(type);
        return with_split(a->rest, [&](auto split) -> qd_status {
            return for_ranges("adamw", a->ranges, a->range_count, [&](const range_table &table, unsigned blocks) -> qd_status {
                adamw_kernel<G, decltype(split)::value><<<blocks, THREADS, 0, s>>>(table, n, aligned);
                QD_CUDA_LAUNCHED();
                return QD_OK;
            });
        });
    });
}

extern "C" qd_status qd_cuda_sgd(qd_stream *stream, const qd_sgd_args *a)
{
    QD_TRY(qd_check_float("sgd", "the parameter", a->param_dtype));
    QD_TRY(qd_check_float("sgd", "the gradient", a->grad_dtype));
    QD_TRY(qd_check_rest("sgd", a->rest, a->param_dtype));
    if (!a->m && a->momentum != 0)
        return QD_FAIL(QD_USAGE, "sgd: momentum %g needs a momentum buffer", a->momentum);
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    sgd_numbers n;
    n.x = values_of(a->param, a->master, a->rest, a->param_dtype);
    n.grad = a->grad;
    n.m = a->m;
    n.scale = a->grad_scale;
    n.momentum = (float)a->momentum;
    n.lr = (float)a->lr;
    n.decay = (float)a->weight_decay;
    bool aligned = is_aligned(n.x) && is_aligned(n.grad) && is_aligned(n.m);
    return with_type(a->grad_dtype, [&](auto type) -> qd_status {
        using G = decltype(type);
        return with_split(a->rest, [&](auto split) -> qd_status {
            return for_ranges("sgd", a->ranges, a->range_count, [&](const range_table &table, unsigned blocks) -> qd_status {
                sgd_kernel<G, decltype(split)::value><<<blocks, THREADS, 0, s>>>(table, n, aligned);
                QD_CUDA_LAUNCHED();
                return QD_OK;
            });
        });
    });
}

enum { FEW = 32, SHORT_ROW = 8192, SEGMENT = 65536 }; /* most columns per thread, per warp, per block */
enum { WARP_ROWS = 2, BLOCK_ROWS = WARP_ROWS * THREADS / 32 }; /* per warp, sequentially: finding the matrix takes as long as half a row */
enum { MATRICES = 128 };                             /* per launch */

/* A matrix and its blocks. Rows longer than a segment leave (rows, segments) sums in `out`, which
 * are joined later. */
struct square_rows {
    const void *x;
    double *out;
    int64_t rows, cols;
    uint32_t first_block, segments;
};

struct square_table {
    square_rows matrix[MATRICES];
    int count;
};
static_assert(sizeof(square_table) <= 24 << 10, "must fit in the kernel arguments");

/* Squares of columns lane, lane + lanes, ... (in vectors of N) of one stretch, in double: the norm
 * decides about clipping and is compared between layouts. */
template <typename T, int N>
static __device__ __forceinline__ double sum_squares(const T *x, int64_t cols, int lane, int lanes)
{
    double sum = 0;
#pragma unroll 4
    for (int64_t c = (int64_t)lane * N; c < cols; c += (int64_t)lanes * N) {
        float v[N];
        load<N>(x + c, v);
#pragma unroll
        for (int i = 0; i < N; i++)
            sum += (double)v[i] * (double)v[i];
    }
    return sum;
}

/* What the lanes sum together of [first, first + count) of a row; in vectors where rows and address
 * allow it. */
template <typename T>
static __device__ __forceinline__ double sum_stretch(const square_rows &m, int64_t row, int64_t first, int64_t count, int lane, int lanes)
{
    const T *x = (const T *)m.x + row * m.cols + first;
    return m.cols % VECTOR == 0 && (uintptr_t)m.x % 16 == 0 ? sum_squares<T, VECTOR>(x, count, lane, lanes)
                                                            : sum_squares<T, 1>(x, count, lane, lanes);
}

template <typename T> static __global__ void __launch_bounds__(THREADS) row_squares_kernel(const __grid_constant__ square_table table)
{
    __shared__ double scratch[32];
    int low = 0, high = table.count - 1;
    while (low < high) { /* the last matrix whose first block is not after this one */
        int middle = (low + high + 1) / 2;
        if (table.matrix[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    const square_rows &m = table.matrix[low];
    const int64_t block = blockIdx.x - m.first_block;
    if (m.cols <= FEW) { /* a thread per row */
        const int64_t row = block * THREADS + threadIdx.x;
        if (row < m.rows)
            m.out[row] = sum_squares<T, 1>((const T *)m.x + row * m.cols, m.cols, 0, 1);
    } else if (m.cols <= SHORT_ROW) { /* a warp per row */
        const int64_t first = block * BLOCK_ROWS + threadIdx.x / 32, end = min(m.rows, (block + 1) * BLOCK_ROWS);
        for (int64_t row = first; row < end; row += THREADS / 32) {
            const double sum = warp_sum(sum_stretch<T>(m, row, 0, m.cols, threadIdx.x % 32, 32));
            if (threadIdx.x % 32 == 0)
                m.out[row] = sum;
        }
    } else { /* a block per segment of a row */
        const int64_t row = block / m.segments, first = block % m.segments * SEGMENT;
        const int64_t count = m.cols - first < SEGMENT ? m.cols - first : SEGMENT;
        const double sum = block_sum(sum_stretch<T>(m, row, first, count, threadIdx.x, THREADS), scratch);
        if (threadIdx.x == 0)
            m.out[block] = sum;
    }
}

static __global__ void __launch_bounds__(THREADS) join_segments_kernel(double *out, const double *parts, int64_t rows, int segments)
{
    int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows)
        return;
    double sum = 0;
    for (int s = 0; s < segments; s++)
        sum += parts[row * segments + s];
    out[row] = sum;
}

extern "C" qd_status qd_cuda_join_squares(cudaStream_t stream, double *out, const double *parts, int64_t rows, int count)
{
    join_segments_kernel<<<(unsigned)divide_up(rows, THREADS), THREADS, 0, stream>>>(out, parts, rows, count);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

static int64_t square_blocks(const qd_row_squares_args *a)
{
    return a->cols <= FEW         ? divide_up(a->rows, THREADS)
           : a->cols <= SHORT_ROW ? divide_up(a->rows, BLOCK_ROWS)
                                  : a->rows * divide_up(a->cols, SEGMENT);
}

/* One launch for the matrices from *a on, as many as fit; advances *a. A matrix with rows of
 * several segments has a launch of its own. */
template <typename T> static qd_status launch_squares(qd_stream *stream, const qd_row_squares_args **a)
{
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    const qd_row_squares_args *first = *a;
    square_table table;
    table.count = 0;
    int64_t blocks = 0;
    void *parts = NULL;
    int segments = (int)divide_up(first->cols, SEGMENT);
    if (segments > 1)
        QD_TRY(qd_cuda_workspace(stream, first->rows * segments * (int64_t)sizeof(double), &parts));
    for (; *a && table.count < MATRICES && (*a)->dtype == first->dtype; *a = (*a)->next) {
        const qd_row_squares_args *m = *a;
        if (m != first && (segments > 1 || m->cols > SEGMENT || blocks + square_blocks(m) > 0x7fffffff))
            break;
        if (m->rows <= 0)
            continue;
        square_rows *to = &table.matrix[table.count++];
        to->x = m->x;
        to->out = segments > 1 ? (double *)parts : m->out;
        to->rows = m->rows;
        to->cols = m->cols;
        to->first_block = (uint32_t)blocks;
        to->segments = (uint32_t)(segments > 1 ? segments : 1);
        blocks += square_blocks(m);
    }
    if (!blocks)
        return QD_OK;
    row_squares_kernel<T><<<(unsigned)blocks, THREADS, 0, s>>>(table);
    QD_CUDA_LAUNCHED();
    return segments > 1 ? qd_cuda_join_squares(s, first->out, (const double *)parts, first->rows, segments) : QD_OK;
}

extern "C" qd_status qd_cuda_row_squares(qd_stream *stream, const qd_row_squares_args *a)
{
    while (a) {
        QD_TRY(qd_check_float("row_squares", "x", a->dtype));
        QD_TRY(with_type(a->dtype, [&](auto type) -> qd_status { return launch_squares<decltype(type)>(stream, &a); }));
    }
    return QD_OK;
}

enum { RUNS = 1200 }; /* per launch */

/* Block b has one sum: runs [begin[b], begin[b + 1]). A sum whose runs do not fit in one launch
 * continues in the next with the partial sums of its threads. Their buffer alternates between
 * launches, because the first block of a launch may still read it while the last block writes for
 * the next one. */
struct run_table {
    int64_t first[RUNS];
    uint32_t count[RUNS];
    int32_t sum[RUNS];
    uint16_t begin[RUNS + 1];
    bool continues, unfinished; /* whether the first block's sum continues an earlier one, and the last block's continues later */
};
static_assert(sizeof(run_table) <= 24 << 10, "must fit in the kernel arguments");

/* Thread t has elements t, t + THREADS, ... of all elements of a sum, however they are split. */
static __global__ void __launch_bounds__(THREADS) run_sums_kernel(const __grid_constant__ run_table table, const double *x, double *sums,
                                                                  const double *found, double *left, int64_t before)
{
    __shared__ double scratch[32];
    const bool last = blockIdx.x + 1 == gridDim.x;
    int64_t number = blockIdx.x == 0 ? before : 0; /* elements of the sum before this run */
    double sum = blockIdx.x == 0 && table.continues ? found[threadIdx.x] : 0.0;
    for (int r = table.begin[blockIdx.x]; r < table.begin[blockIdx.x + 1]; r++) {
        const int64_t skip = (THREADS - number % THREADS + threadIdx.x) % THREADS;
        for (int64_t i = skip; i < table.count[r]; i += THREADS)
            sum += x[table.first[r] + i];
        number += table.count[r];
    }
    if (last && table.unfinished) {
        left[threadIdx.x] = sum;
        return;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0)
        sums[table.sum[table.begin[blockIdx.x]]] = sum;
}

extern "C" qd_status qd_cuda_run_sums(qd_stream *stream, const qd_run_sums_args *a)
{
    run_table table;
    void *parts;
    QD_TRY(qd_cuda_workspace(stream, 2 * THREADS * (int64_t)sizeof(double), &parts));
    double *found = (double *)parts, *left = found + THREADS;
    table.unfinished = false;
    for (int64_t r = 0, before = 0; r < a->run_count;) {
        int64_t taken = 0, blocks = 0, number = before;
        table.continues = table.unfinished;
        for (; taken < RUNS && r < a->run_count; r++, taken++) {
            const qd_sum_run *run = &a->runs[r];
            if (run->count >> 32)
                return QD_FAIL(QD_UNSUPPORTED, "run_sums: a run of %lld elements; fewer than 2^32 are supported", (long long)run->count);
            if (taken == 0 || run->sum != run[-1].sum) {
                table.begin[blocks++] = (uint16_t)taken;
                number = taken == 0 ? before : 0;
            }
            table.first[taken] = run->first;
            table.count[taken] = (uint32_t)run->count;
            table.sum[taken] = run->sum;
            number += run->count;
        }
        table.begin[blocks] = (uint16_t)taken;
        table.unfinished = r < a->run_count && a->runs[r].sum == a->runs[r - 1].sum;
        run_sums_kernel<<<(unsigned)blocks, THREADS, 0, qd_cuda_launch_of(stream).stream>>>(table, a->x, a->sums, found, left, before);
        QD_CUDA_LAUNCHED();
        before = table.unfinished ? number : 0;
        double *next = found;
        found = left;
        left = next;
    }
    return QD_OK;
}

static __global__ void __launch_bounds__(THREADS) grad_norm_kernel(qd_grad_norm_args a)
{
    __shared__ double scratch[32];
    __shared__ unsigned long long first_bad;
    if (threadIdx.x == 0)
        first_bad = (unsigned long long)a.count;
    __syncthreads();
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < a.count; i += THREADS) {
        sum += a.sums[i];
        if (!isfinite(a.sums[i]))
            atomicMin(&first_bad, (unsigned long long)i);
    }
    sum = block_sum(sum, scratch);
    __syncthreads();
    if (threadIdx.x == 0)
        qd_grad_norm_finish(&a, sum, (int64_t)first_bad);
}

extern "C" qd_status qd_cuda_grad_norm(qd_stream *stream, const qd_grad_norm_args *a)
{
    grad_norm_kernel<<<1, THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
