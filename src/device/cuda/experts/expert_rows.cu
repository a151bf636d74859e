/* Permute and combine: rows on their way to experts and back. These kernels are bound by memory:
 * each row of the side that has fewer is read once (its other readers find it in a cache), in
 * accesses of 16 bytes. */
#include "device/cuda/math_impl.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, TOGETHER = 4 };

/* Elements in 16 bytes. */
template <typename T> static constexpr int vector_of()
{
    return 16 / (int)sizeof(T);
}

template <typename T, int N> struct alignas(N * sizeof(T)) raw_vector {
    T v[N];
};

/* y = x, by a warp. Separate from move_row, which would need 78 registers for it instead of 64. */
template <typename T, int N> static __device__ __forceinline__ void copy_row(const T *x, T *y, int64_t cols, int lane)
{
    using V = raw_vector<T, N>;
    const int64_t vectors = cols / N;
    for (int64_t at = lane; at < vectors; at += 32 * TOGETHER) {
        V v[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            if (at + t * 32 < vectors)
                v[t] = ((const V *)x)[at + t * 32];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            if (at + t * 32 < vectors)
                ((V *)y)[at + t * 32] = v[t];
    }
}

/* One assignment, by a warp: y = x [* weight], and the sum over columns and copies of x * old.
 * `old` is the first copy. Vectors stay in their storage type until they are used, which leaves
 * registers for more warps. */
template <typename T, int N, bool WEIGHTED, bool BACK>
static __device__ __forceinline__ float move_row(const T *x, T *y, float weight, const T *old, int64_t copy_stride, int copies,
                                                 int64_t cols, int lane)
{
    using V = raw_vector<T, N>;
    float dot = 0.0f;
    for (int64_t at = (int64_t)lane * N; at < cols; at += 32 * N * TOGETHER) {
        V v[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            if (at + t * 32 * N < cols)
                v[t] = *(const V *)(x + at + t * 32 * N);
        if constexpr (BACK) {
            for (int copy = 0; copy < copies; copy++) {
                V o[TOGETHER];
#pragma unroll
                for (int t = 0; t < TOGETHER; t++)
                    if (at + t * 32 * N < cols)
                        o[t] = *(const V *)(old + copy * copy_stride + at + t * 32 * N);
#pragma unroll
                for (int t = 0; t < TOGETHER; t++) {
                    if (at + t * 32 * N >= cols)
                        continue;
                    float here[N], there[N];
                    load<N>(v[t].v, here);
                    load<N>(o[t].v, there);
#pragma unroll
                    for (int i = 0; i < N; i++)
                        dot = fmaf(here[i], there[i], dot);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            if (at + t * 32 * N >= cols)
                continue;
            if constexpr (WEIGHTED) {
                float scaled[N];
                load<N>(v[t].v, scaled);
#pragma unroll
                for (int i = 0; i < N; i++)
                    scaled[i] *= weight;
                store<N>(y + at + t * 32 * N, scaled);
            } else {
                *(V *)(y + at + t * 32 * N) = v[t];
            }
        }
    }
    return BACK ? warp_sum(dot) : 0.0f;
}

/* A warp per assignment, in order of rows: the choices of a row are consecutive, so that its reads
 * hit the cache. Without the table of places, a warp per place, as many as the counts say. */
template <typename T, int N, bool WEIGHTED, bool BACK> static __global__ void __launch_bounds__(THREADS) permute_kernel(qd_permute_args a)
{
    const int lane = threadIdx.x % 32;
    const int64_t assignments = a.rows * a.per_token, cols = a.cols, step = (int64_t)gridDim.x * WARPS;
    int64_t items = assignments;
    if (!a.place) {
        int places = 0;
        for (int e = lane; e < a.experts; e += 32)
            places += a.count[e];
        items = min(items, (int64_t)warp_sum(places));
    }
    for (int64_t item = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; item < items; item += step) {
        const int64_t from = a.place ? item : a.from[item], place = a.place ? a.place[item] : item;
        if (place < 0) {
            if (BACK && lane == 0)
                a.d_weight[from] = 0.0f;
            continue;
        }
        const T *x = (const T *)a.x + from / a.per_token * cols;
        T *y = (T *)a.y + place * cols;
        if constexpr (!WEIGHTED && !BACK) {
            copy_row<T, N>(x, y, cols, lane);
        } else {
            float dot =
                move_row<T, N, WEIGHTED, BACK>(x, y, WEIGHTED ? a.weight[from] : 1.0f, BACK ? (const T *)a.old + place * cols : NULL,
                                               (a.copy_rows > 0 ? a.copy_rows : assignments) * cols, a.copies, cols, lane);
            if (BACK && lane == 0)
                a.d_weight[from] = dot;
        }
    }
}

template <typename T, int N> static qd_status launch_permute(qd_stream *stream, const qd_permute_args *a)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    int64_t blocks = divide_up(a->rows * a->per_token, WARPS), most = (int64_t)l.multiprocessors * 8;
    if (!a->place && blocks > most)
        blocks = most;
    const unsigned grid = (unsigned)blocks;
    if (a->old && a->weight)
        permute_kernel<T, N, true, true><<<grid, THREADS, 0, l.stream>>>(*a);
    else if (a->old)
        permute_kernel<T, N, false, true><<<grid, THREADS, 0, l.stream>>>(*a);
    else if (a->weight)
        permute_kernel<T, N, true, false><<<grid, THREADS, 0, l.stream>>>(*a);
    else
        permute_kernel<T, N, false, false><<<grid, THREADS, 0, l.stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_permute(qd_stream *stream, const qd_permute_args *a)
{
    QD_TRY(qd_check_float("permute", "x", a->dtype));
    if (a->old && !a->place)
        return QD_FAIL(QD_USAGE, "permute: the gradient of the weights needs `place`");
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        if (can_vector(a->cols, a->x, a->y, a->old))
            return launch_permute<T, vector_of<T>()>(stream, a);
        return launch_permute<T, 1>(stream, a);
    });
}

/* An item is CHUNKS equidistant vectors of N columns of a row. The loads of CHOICES choices are in
 * flight together, in their storage type; they are added in the order of the choices. ONCE: there
 * are no more choices than that. */
template <typename T, int N, bool WEIGHTED, int CHOICES, int CHUNKS, bool ONCE>
static __global__ void __launch_bounds__(THREADS, !ONCE ? 1 : CHOICES <= 2 ? 4 : 3) combine_kernel(qd_combine_args a)
{
    using V = raw_vector<T, N>;
    const int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, per_row = a.cols / (N * CHUNKS), apart = per_row * N;
    const int64_t copy_stride = (a.copy_rows > 0 ? a.copy_rows : a.rows * a.per_token) * a.cols;
    if (item >= a.rows * per_row)
        return;
    int64_t row, col;
    split_index(item, per_row, row, col);
    col *= N;
    V first_add[CHUNKS];
    if (a.add)
#pragma unroll
        for (int q = 0; q < CHUNKS; q++)
            first_add[q] = *(const V *)((const T *)a.add + row * a.cols + col + q * apart);
    float sum[CHUNKS][N];
    for (int first = 0; first < (ONCE ? 1 : a.per_token); first += CHOICES) {
        int place[CHOICES];
        float weight[CHOICES];
        V v[CHOICES][CHUNKS];
#pragma unroll
        for (int t = 0; t < CHOICES; t++) {
            const int64_t at = row * a.per_token + first + t;
            const bool there = first + t < a.per_token;
            place[t] = there ? a.place[at] : -1;
            weight[t] = WEIGHTED && there ? a.weight[at] : 1.0f;
        }
#pragma unroll
        for (int t = 0; t < CHOICES; t++)
#pragma unroll
            for (int q = 0; q < CHUNKS; q++)
                if (place[t] >= 0)
                    v[t][q] = *(const V *)((const T *)a.x + place[t] * a.cols + col + q * apart);
        const bool last = ONCE || first + CHOICES >= a.per_token;
#pragma unroll
        for (int q = 0; q < CHUNKS; q++) {
            if (first == 0 && a.add)
                load<N>(first_add[q].v, sum[q]);
#pragma unroll
            for (int i = 0; i < N && first == 0 && !a.add; i++)
                sum[q][i] = 0.0f;
#pragma unroll
            for (int t = 0; t < CHOICES; t++) {
                if (place[t] < 0)
                    continue;
                float value[N], more[N];
                load<N>(v[t][q].v, value);
                for (int copy = 1; copy < a.copies; copy++) {
                    load<N>((const T *)a.x + copy * copy_stride + place[t] * a.cols + col + q * apart, more);
#pragma unroll
                    for (int i = 0; i < N; i++)
                        value[i] += more[i];
                }
#pragma unroll
                for (int i = 0; i < N; i++)
                    sum[q][i] = WEIGHTED ? fmaf(value[i], weight[t], sum[q][i]) : sum[q][i] + value[i];
            }
            if (last)
                store<N>((T *)a.y + row * a.cols + col + q * apart, sum[q]);
        }
    }
}

/* Few choices leave registers for more columns in flight. */
template <typename T, int N, bool WEIGHTED> static qd_status launch_combine(qd_stream *stream, const qd_combine_args *a)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int chunks = a->per_token <= 2 && a->cols % (2 * N) == 0 ? 2 : 1;
    const unsigned grid = (unsigned)divide_up(a->rows * (a->cols / (N * chunks)), THREADS);
    if (chunks == 2)
        combine_kernel<T, N, WEIGHTED, 2, 2, true><<<grid, THREADS, 0, l.stream>>>(*a);
    else if (a->per_token <= 6)
        combine_kernel<T, N, WEIGHTED, 6, 1, true><<<grid, THREADS, 0, l.stream>>>(*a);
    else
        combine_kernel<T, N, WEIGHTED, 6, 1, false><<<grid, THREADS, 0, l.stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_combine(qd_stream *stream, const qd_combine_args *a)
{
    QD_TRY(qd_check_float("combine", "x", a->dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        constexpr int N = vector_of<T>();
        if (can_vector(a->cols, a->x, a->add, a->y))
            return a->weight ? launch_combine<T, N, true>(stream, a) : launch_combine<T, N, false>(stream, a);
        return a->weight ? launch_combine<T, 1, true>(stream, a) : launch_combine<T, 1, false>(stream, a);
    });
}
