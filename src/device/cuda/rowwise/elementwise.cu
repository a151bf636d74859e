/* Element-wise kernels: sums, conversions, activations, dropout, rotary embedding. Storage is fp32
 * or bf16, arithmetic fp32. The thread that writes an element is the one that reads it first, so
 * results may overwrite inputs. */
#include "device/cuda/rowwise/activation_impl.cuh"

extern "C" {
#include "base/rng.h"
}

#include <math.h>
#include <stdio.h>

enum { THREADS = 256 };

static unsigned grid_for(int64_t items)
{
    return (unsigned)divide_up(items, THREADS);
}

static __device__ __forceinline__ int64_t item_index()
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}

template <int N> static __global__ void add_kernel(qd_add_args a, bool a_half, bool b_half, bool y_half)
{
    int64_t i = item_index() * N;
    if (i >= a.n)
        return;
    float x[N], y[N];
    load_as<N>(a.a, i, a_half, x);
    load_as<N>(a.b, i, b_half, y);
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] += y[j];
    store_as<N>(a.y, i, y_half, x);
}

extern "C" qd_status qd_cuda_add(qd_stream *stream, const qd_add_args *a)
{
    QD_TRY(qd_check_float("add", "a", a->a_dtype));
    QD_TRY(qd_check_float("add", "b", a->b_dtype));
    QD_TRY(qd_check_float("add", "y", a->y_dtype));
    if (a->n <= 0)
        return QD_OK;
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    bool ah = a->a_dtype == QD_BF16, bh = a->b_dtype == QD_BF16, yh = a->y_dtype == QD_BF16;
    if (can_vector(a->n, a->a, a->b, a->y))
        add_kernel<VECTOR><<<grid_for(a->n / VECTOR), THREADS, 0, l.stream>>>(*a, ah, bh, yh);
    else
        add_kernel<1><<<grid_for(a->n), THREADS, 0, l.stream>>>(*a, ah, bh, yh);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <int N> static __global__ void cast_kernel(qd_cast_args a, bool from_half, bool to_half)
{
    int64_t i = item_index() * N;
    if (i >= a.n)
        return;
    float x[N];
    load_as<N>(a.from, i, from_half, x);
    store_as<N>(a.to, i, to_half, x);
}

extern "C" qd_status qd_cuda_cast(qd_stream *stream, const qd_cast_args *a)
{
    QD_TRY(qd_check_float("cast", "from", a->from_dtype));
    QD_TRY(qd_check_float("cast", "to", a->to_dtype));
    if (a->n <= 0)
        return QD_OK;
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    bool from_half = a->from_dtype == QD_BF16, to_half = a->to_dtype == QD_BF16;
    if (can_vector(a->n, a->from, a->to))
        cast_kernel<VECTOR><<<grid_for(a->n / VECTOR), THREADS, 0, l.stream>>>(*a, from_half, to_half);
    else
        cast_kernel<1><<<grid_for(a->n), THREADS, 0, l.stream>>>(*a, from_half, to_half);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

static __global__ void copy_rows_kernel(qd_copy_rows_args a, bool from_half, bool to_half)
{
    int64_t i = item_index();
    if (i >= a.rows * a.cols)
        return;
    int64_t row = i / a.cols, col = i % a.cols;
    float x[1];
    load_as<1>(a.from, row * a.from_stride + col, from_half, x);
    if (a.accumulate) {
        float before[1];
        load_as<1>(a.to, row * a.to_stride + col, to_half, before);
        x[0] += before[0];
    }
    store_as<1>(a.to, row * a.to_stride + col, to_half, x);
}

extern "C" qd_status qd_cuda_copy_rows(qd_stream *stream, const qd_copy_rows_args *a)
{
    QD_TRY(qd_check_float("copy_rows", "from", a->from_dtype));
    QD_TRY(qd_check_float("copy_rows", "to", a->to_dtype));
    if (a->from_stride < a->cols || a->to_stride < a->cols)
        return QD_FAIL(QD_USAGE, "copy_rows: strides %lld and %lld are shorter than rows of %lld", (long long)a->from_stride,
                       (long long)a->to_stride, (long long)a->cols);
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    copy_rows_kernel<<<grid_for(a->rows * a->cols), THREADS, 0, l.stream>>>(*a, a->from_dtype == QD_BF16, a->to_dtype == QD_BF16);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* Items are vectors of N outputs, numbered across rows. */
template <int KIND, typename T, int N, bool BACKWARD> static __global__ void activation_kernel(qd_activation_args a)
{
    int64_t item = item_index(), per_row = a.cols / N, row = 0, col = item * N;
    if (item >= a.rows * per_row)
        return;
    if constexpr (gated<KIND>::value) {
        split_index(item, per_row, row, col);
        col *= N;
    }
    float x[N], up[N], y[N];
    activation_values<KIND, T, N, BACKWARD>(a, row, col, x, up, y);
    const int64_t y_at = row * a.cols + col, x_at = gated<KIND>::value ? y_at + row * a.cols : y_at;
    if (!BACKWARD || a.y)
        store<N>((T *)a.y + y_at, y);
    if constexpr (BACKWARD) {
        store<N>((T *)a.dx + x_at, x);
        if constexpr (gated<KIND>::value)
            store<N>((T *)a.dx + x_at + a.cols, up);
    }
}

template <int KIND, bool BACKWARD> static qd_status launch_activation(qd_stream *stream, const qd_activation_args *a)
{
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        qd_cuda_launch l = qd_cuda_launch_of(stream);
        int64_t n = a->rows * a->cols;
        if (n <= 0)
            return QD_OK;
        /* Only gated ones depend on rows, but the rows of all models are whole vectors. */
        if (can_vector(a->cols, a->x, a->y, BACKWARD ? a->dy : NULL, BACKWARD ? a->dx : NULL))
            activation_kernel<KIND, T, VECTOR, BACKWARD><<<grid_for(n / VECTOR), THREADS, 0, l.stream>>>(*a);
        else
            activation_kernel<KIND, T, 1, BACKWARD><<<grid_for(n), THREADS, 0, l.stream>>>(*a);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

template <bool BACKWARD> static qd_status run_activation(const char *kernel, qd_stream *stream, const qd_activation_args *a)
{
    QD_TRY(qd_activation_check(kernel, a));
    switch (a->kind) {
    case QD_ACT_GELU_TANH:
        return launch_activation<QD_ACT_GELU_TANH, BACKWARD>(stream, a);
    case QD_ACT_GELU:
        return launch_activation<QD_ACT_GELU, BACKWARD>(stream, a);
    case QD_ACT_SWIGLU:
        return launch_activation<QD_ACT_SWIGLU, BACKWARD>(stream, a);
    case QD_ACT_GEGLU_TANH:
        return launch_activation<QD_ACT_GEGLU_TANH, BACKWARD>(stream, a);
    case QD_ACT_GEGLU:
        return launch_activation<QD_ACT_GEGLU, BACKWARD>(stream, a);
    case QD_ACT_SWIGLU_CLAMPED:
        return launch_activation<QD_ACT_SWIGLU_CLAMPED, BACKWARD>(stream, a);
    }
    return QD_OK; /* not reached: other kinds are refused */
}

extern "C" qd_status qd_cuda_activation_forward(qd_stream *stream, const qd_activation_args *a)
{
    return run_activation<false>("activation_forward", stream, a);
}

extern "C" qd_status qd_cuda_activation_backward(qd_stream *stream, const qd_activation_args *a)
{
    return run_activation<true>("activation_backward", stream, a);
}

/* Philox4x32-10, as qd_philox4x32 in base/rng.c. */
static __device__ __forceinline__ void philox(uint32_t k0, uint32_t k1, uint64_t low, uint64_t high, uint32_t (&out)[4])
{
    uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high, c3 = (uint32_t)(high >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* One thread per Philox block: the four elements whose draws it holds, some of which may be outside
 * at either end. */
template <typename T>
static __global__ void dropout_kernel(qd_dropout_args a, qd_philox_key key, uint32_t least, float keep, int64_t blocks,
                                      bool aligned)
{
    int64_t block = item_index();
    if (block >= blocks)
        return;
    uint64_t first = (uint64_t)a.first_row * (uint64_t)a.cols; /* index of element 0 */
    int64_t n = a.rows * a.cols, at = block * 4 - (int64_t)(first % 4);
    uint32_t words[4];
    philox(key.k[0], key.k[1], first / 4 + (uint64_t)block, a.step, words);
    const T *x = (const T *)a.x;
    T *y = (T *)a.y;
    /* Dropped elements are multiplied by 0, not replaced by 0, so that non-finite values stay
     * visible. */
    if (aligned && at >= 0 && at + 4 <= n) {
        float v[4];
        load<4>(x + at, v);
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] *= words[i] >> 8 >= least ? keep : 0.0f;
        store<4>(y + at, v);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + i >= 0 && at + i < n) {
                float v[1] = {to_float(x[at + i]) * (words[i] >> 8 >= least ? keep : 0.0f)};
                store<1>(y + at + i, v);
            }
    }
}

extern "C" qd_status qd_cuda_dropout(qd_stream *stream, const qd_dropout_args *a)
{
    QD_TRY(qd_check_float("dropout", "x", a->dtype));
    if (!(a->p >= 0.0f && a->p < 1.0f))
        return QD_FAIL(QD_USAGE, "dropout: probability %g; it must be at least 0 and below 1", (double)a->p);
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        qd_cuda_launch l = qd_cuda_launch_of(stream);
        int64_t n = a->rows * a->cols, skipped = (int64_t)((uint64_t)a->first_row * (uint64_t)a->cols % 4);
        if (n <= 0)
            return QD_OK;
        char name[32]; /* of the random stream, as in cpu/rowwise/dropout.c */
        snprintf(name, sizeof name, "dropout.%u", (unsigned)a->site);
        qd_philox_key key = qd_rng_key(a->seed, name);
        uint32_t least = (uint32_t)ceilf(a->p * 0x1p24f); /* uniform >= p, in terms of its 24 bits */
        int64_t blocks = divide_up(skipped + n, 4);
        bool aligned = skipped == 0 && is_aligned(a->x) && is_aligned(a->y);
        dropout_kernel<T><<<grid_for(blocks), THREADS, 0, l.stream>>>(*a, key, least, 1.0f / (1.0f - a->p), blocks,
                                                                      aligned);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

enum { ROPE_HEADS = 4 }; /* heads that share a thread's cosines and sines */

/* Items: (row, group of heads, vector of N pairs). The heads of an item are `groups` apart. N is 1
 * for interleaved pairs. */
template <typename T, int N> static __global__ void rope_kernel(qd_rope_args a, int groups, int64_t items, qd_cuda_fault *fault)
{
    int64_t item = item_index(), row, rest;
    if (item >= items)
        return;
    int half = a.dims / 2, per_head = half / N;
    split_index(item, (int64_t)groups * per_head, row, rest);
    int group = (int)rest / per_head, i = ((int)rest - group * per_head) * N;
    int64_t position = a.positions ? a.positions[row] : row % a.seq;
    if (position < 0) {
        report_fault(fault, QD_CUDA_BAD_POSITION, row, (int)position, -1);
        return;
    }
    const float *table = a.table + (position * half + i) * 2;
    float cosine[N], sine[N], sign = a.inverse ? -1.0f : 1.0f;
    if constexpr (N > 1) {
        float pairs[2 * N];
        load<2 * N>(table, pairs);
#pragma unroll
        for (int j = 0; j < N; j++)
            cosine[j] = pairs[2 * j], sine[j] = sign * pairs[2 * j + 1];
    } else {
        cosine[0] = table[0], sine[0] = sign * table[1];
    }
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        int head = group + h * groups;
        if (head >= a.heads)
            break;
        const bool apart = N > 1 || !a.interleaved;
        T *low = (T *)a.x + row * a.row_stride + (int64_t)head * a.head_dim + (apart ? i : 2 * i), *high = low + (apart ? half : 1);
        float x[N], y[N];
        load<N>(low, x);
        load<N>(high, y);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float turned = x[j] * cosine[j] - y[j] * sine[j];
            y[j] = x[j] * sine[j] + y[j] * cosine[j];
            x[j] = turned;
        }
        store<N>(low, x);
        store<N>(high, y);
    }
}

extern "C" qd_status qd_cuda_rope(qd_stream *stream, const qd_rope_args *a)
{
    QD_TRY(qd_check_float("rope", "x", a->dtype));
    if (a->head_dim < 2 || a->head_dim % 2)
        return QD_FAIL(QD_USAGE, "rope: head size %d; it must be even, because pairs are rotated", a->head_dim);
    const int dims = a->dims ? a->dims : a->head_dim;
    if (dims < 2 || dims % 2 || dims > a->head_dim)
        return QD_FAIL(QD_USAGE, "rope: %d of the %d elements of a head; an even number of them is rotated", dims, a->head_dim);
    qd_rope_args rope = *a;
    rope.dims = dims;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        qd_cuda_launch l = qd_cuda_launch_of(stream);
        int groups = (int)divide_up(a->heads, ROPE_HEADS), half = dims / 2;
        bool vector = !a->interleaved && can_vector(half, a->x, a->table) && a->row_stride % VECTOR == 0 && a->head_dim % VECTOR == 0;
        int64_t items = a->rows * groups * (vector ? half / VECTOR : half);
        if (items <= 0)
            return QD_OK;
        if (vector)
            rope_kernel<T, VECTOR><<<grid_for(items), THREADS, 0, l.stream>>>(rope, groups, items, l.fault);
        else
            rope_kernel<T, 1><<<grid_for(items), THREADS, 0, l.stream>>>(rope, groups, items, l.fault);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

/* Random numbers for benchmarks. */

static __global__ void random_kernel(bf16 *to, int64_t n)
{
    int64_t i = item_index() * 4;
    uint32_t words[4];
    philox(1, 2, (uint64_t)i, 0, words);
    for (int j = 0; j < 4 && i + j < n; j++)
        to[i + j] = __float2bfloat16_rn((float)(int32_t)words[j] * 0x1p-31f);
}

extern "C" qd_status qd_cuda_fill_random(qd_stream *stream, void *to, int64_t n)
{
    if (n > 0)
        random_kernel<<<grid_for(divide_up(n, 4)), THREADS, 0, qd_cuda_launch_of(stream).stream>>>((bf16 *)to, n);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
