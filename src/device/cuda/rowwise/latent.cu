/* Queries, keys and values of latent attention from their parts, and the gradients of the parts.
 * Bound by memory: a thread moves one vector, and rotates it if it belongs to a rotary part. */
#include "device/cuda/math_impl.cuh"

enum { THREADS = 256 };

/* The angles of a row, (rope / 2, 2): cosine, sine. */
static __device__ __forceinline__ const float *angles_of(const qd_latent_args &a, int64_t row, qd_cuda_fault *fault)
{
    const int64_t position = a.positions ? a.positions[row] : row % a.seq;
    if (position < 0) {
        report_fault(fault, QD_CUDA_BAD_POSITION, row, (int)position, -1);
        return a.table;
    }
    return a.table + position * a.rope;
}

/* The other element of the pair of element i of a rotary part. */
static __device__ __forceinline__ int partner(const qd_latent_args &a, int i)
{
    const int half = a.rope / 2;
    return a.interleaved ? i ^ 1 : i < half ? i + half : i - half;
}

/* x: N consecutive elements of a rotary part, from element i on; other: their partners. sign: -1
 * for the inverse rotation. */
template <int N>
static __device__ __forceinline__ void turn(const qd_latent_args &a, const float *angles, int i, float sign, const float (&other)[N],
                                            float (&x)[N])
{
    const int half = a.rope / 2;
#pragma unroll
    for (int e = 0; e < N; e++) {
        const int at = i + e, pair = a.interleaved ? at / 2 : at < half ? at : at - half;
        const bool low = a.interleaved ? at % 2 == 0 : at < half;
        const float2 angle = *(const float2 *)(angles + 2 * pair);
        x[e] = fmaf(x[e], angle.x, (low ? -sign : sign) * other[e] * angle.y);
    }
}

/* Whether the partners of a vector of N elements are in the same vector. */
template <int N> static __device__ __forceinline__ bool pairs_within(const qd_latent_args &a)
{
    return N > 1 && a.interleaved;
}

/* y: the partners of x if they are within the vector. */
template <int N> static __device__ __forceinline__ void swap_pairs(const float (&x)[N], float (&y)[N])
{
#pragma unroll
    for (int e = 0; e + 1 < N; e += 2)
        y[e] = x[e + 1], y[e + 1] = x[e];
}

/* x = N elements of a rotary part that starts at `part` in memory, from element i on, rotated. */
template <typename T, int N>
static __device__ __forceinline__ void load_turned(const qd_latent_args &a, const float *angles, const T *part, int i, float sign,
                                                   float (&x)[N])
{
    float other[N];
    load<N>(part + i, x);
    if (pairs_within<N>(a))
        swap_pairs(x, other);
    else
        load<N>(part + partner(a, i), other);
    turn<N>(a, angles, i, sign, other, x);
}

/* Where a vector of qkv comes from: element `at` of a head of q, or of the key or value of a
 * head. */
struct place {
    int64_t head;
    int at;
    enum { QUERY, KEY, VALUE } what;
};

static __device__ __forceinline__ place place_of(const qd_latent_args &a, int64_t col)
{
    const int dim = a.nope + a.rope, queries = a.heads * dim;
    const bool value = col >= 2 * queries;
    const int within = (int)(value ? col - 2 * queries : col >= queries ? col - queries : col), size = value ? a.v : dim;
    const int head = within / size;
    return place{head, within - head * size, value ? place::VALUE : col >= queries ? place::KEY : place::QUERY};
}

/* Items: (row, vector of qkv). */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) join_kernel(qd_latent_args a, int64_t items, qd_cuda_fault *fault)
{
    const int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, dim = a.nope + a.rope, pair = a.nope + a.v;
    const int64_t width = a.heads * (2 * dim + a.v);
    int64_t row, col;
    if (item >= items)
        return;
    split_index(item, width / N, row, col);
    const place p = place_of(a, col * N);
    const T *q = (const T *)a.q + (row * a.heads + p.head) * dim, *kv = (const T *)a.kv + (row * a.heads + p.head) * pair;
    float x[N];
    if (p.what == place::VALUE)
        load<N>(kv + a.nope + p.at, x);
    else if (p.at < a.nope)
        load<N>((p.what == place::QUERY ? q : kv) + p.at, x);
    else
        load_turned<T, N>(a, angles_of(a, row, fault), p.what == place::QUERY ? q + a.nope : (const T *)a.k_rope + row * a.rope,
                          p.at - a.nope, 1.0f, x);
    store<N>((T *)a.qkv + row * width + col * N, x);
}

/* Items: (row, vector of qkv); those of rotary parts of keys are left to the next kernel. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) split_kernel(qd_latent_args a, int64_t items, qd_cuda_fault *fault)
{
    const int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, dim = a.nope + a.rope, pair = a.nope + a.v;
    const int64_t width = a.heads * (2 * dim + a.v);
    int64_t row, col;
    if (item >= items)
        return;
    split_index(item, width / N, row, col);
    const place p = place_of(a, col * N);
    const T *from = (const T *)a.qkv + row * width + col * N;
    T *q = (T *)a.q + (row * a.heads + p.head) * dim, *kv = (T *)a.kv + (row * a.heads + p.head) * pair;
    float x[N];
    if (p.what != place::VALUE && p.at >= a.nope) {
        if (p.what == place::KEY)
            return;
        load_turned<T, N>(a, angles_of(a, row, fault), from - (p.at - a.nope), p.at - a.nope, -1.0f, x);
    } else {
        load<N>(from, x);
    }
    store<N>(p.what == place::QUERY ? q + p.at : kv + (p.what == place::VALUE ? a.nope : 0) + p.at, x);
}

/* Items: (row, vector of the shared rotary part). Sums over heads in their order, then rotates. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) rope_sum_kernel(qd_latent_args a, int64_t items, qd_cuda_fault *fault)
{
    const int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, dim = a.nope + a.rope;
    int64_t row, vector;
    if (item >= items)
        return;
    split_index(item, a.rope / N, row, vector);
    const int i = (int)vector * N, other = partner(a, i);
    const bool within = pairs_within<N>(a);
    const T *keys = (const T *)a.qkv + row * a.heads * (2 * dim + a.v) + a.heads * dim + a.nope;
    float sum[N] = {}, partners[N] = {}, x[N];
#pragma unroll 4
    for (int h = 0; h < a.heads; h++) {
        load<N>(keys + h * dim + i, x);
#pragma unroll
        for (int e = 0; e < N; e++)
            sum[e] += x[e];
        if (within)
            continue;
        load<N>(keys + h * dim + other, x);
#pragma unroll
        for (int e = 0; e < N; e++)
            partners[e] += x[e];
    }
    if (within)
        swap_pairs(sum, partners);
    turn<N>(a, angles_of(a, row, fault), i, -1.0f, partners, sum);
    store<N>((T *)a.k_rope + row * a.rope + i, sum);
}

static qd_status check(const char *kernel, const qd_latent_args *a)
{
    QD_TRY(qd_check_float(kernel, "qkv", a->dtype));
    if (a->heads < 1 || a->nope < 0 || a->v < 1 || a->rope < 2 || a->rope % 2)
        return QD_FAIL(QD_UNSUPPORTED, "%s: %d heads of %d + %d elements with values of %d; the rotated part must be even and at least 2",
                       kernel, a->heads, a->nope, a->rope, a->v);
    return QD_OK;
}

/* Whether vectors of VECTOR elements neither cross the end of a part nor separate pairs. */
static bool in_vectors(const qd_latent_args *a)
{
    const int step = a->interleaved ? VECTOR : 2 * VECTOR;
    return can_vector(a->nope, a->q, a->kv, a->k_rope, a->qkv) && a->v % VECTOR == 0 && a->rope % step == 0;
}

static unsigned blocks_of(int64_t items)
{
    return (unsigned)divide_up(items, THREADS);
}

template <typename T, int N> static qd_status join(qd_stream *stream, const qd_latent_args *a)
{
    const qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int64_t items = a->rows * a->heads * (2 * (a->nope + a->rope) + a->v) / N;
    join_kernel<T, N><<<blocks_of(items), THREADS, 0, l.stream>>>(*a, items, l.fault);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <typename T, int N> static qd_status split(qd_stream *stream, const qd_latent_args *a)
{
    const qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int64_t items = a->rows * a->heads * (2 * (a->nope + a->rope) + a->v) / N, shared = a->rows * a->rope / N;
    split_kernel<T, N><<<blocks_of(items), THREADS, 0, l.stream>>>(*a, items, l.fault);
    rope_sum_kernel<T, N><<<blocks_of(shared), THREADS, 0, l.stream>>>(*a, shared, l.fault);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_latent_join(qd_stream *stream, const qd_latent_args *a)
{
    QD_TRY(check("latent_join", a));
    if (a->rows <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return in_vectors(a) ? join<T, VECTOR>(stream, a) : join<T, 1>(stream, a);
    });
}

extern "C" qd_status qd_cuda_latent_split(qd_stream *stream, const qd_latent_args *a)
{
    QD_TRY(check("latent_split", a));
    if (a->rows <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return in_vectors(a) ? split<T, VECTOR>(stream, a) : split<T, 1>(stream, a);
    });
}
