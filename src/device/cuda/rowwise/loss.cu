/* Cross-entropy: softmax, loss and gradient in one pass over memory, and the sum of losses. */
#include "device/cuda/math_impl.cuh"

#include <math.h>

#define LOG2_E 1.4426950408889634f

/* Running maximum and sum of exponentials. Empty: most = -infinity, sum = 0. */
struct running {
    float most, sum;
};

static __device__ __forceinline__ float shift_of(float most)
{
    return most == -INFINITY ? 0.0f : most; /* avoids infinity minus infinity */
}

/* 2^x in one instruction; results below 2^-126 become 0. */
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* e^(x - shift). For bf16 logits, with shift times LOG2_E precomputed: one rounding of an argument
 * that has few digits itself. */
template <typename T> static __device__ __forceinline__ float exp_of(float x, float shift, float shift2)
{
    return sizeof(T) == 2 ? exp2_fast(fmaf(x, LOG2_E, -shift2)) : exp2_fast((x - shift) * LOG2_E);
}

static __device__ __forceinline__ running join(running a, running b)
{
    running r;
    r.most = fmaxf(a.most, b.most);
    float shift = shift_of(r.most);
    r.sum = a.sum * exp_of<float>(a.most, shift, 0.0f) + b.sum * exp_of<float>(b.most, shift, 0.0f);
    return r;
}

static __device__ __forceinline__ running warp_join(running r)
{
#pragma unroll
    for (int step = 16; step; step /= 2) {
        running other = {__shfl_xor_sync(0xffffffffu, r.most, step), __shfl_xor_sync(0xffffffffu, r.sum, step)};
        /* the same operand order in both lanes, so that both results are bit-identical */
        r = threadIdx.x & step ? join(other, r) : join(r, other);
    }
    return r;
}

/* Adds COUNT logits. */
template <typename T, int COUNT> static __device__ __forceinline__ void take(running &r, const float (&x)[COUNT])
{
    float most = x[0], sum = 0.0f;
#pragma unroll
    for (int j = 1; j < COUNT; j++)
        most = fmaxf(most, x[j]);
    if (most > r.most) { /* rarely, after the first few */
        r.sum *= exp_of<float>(r.most, shift_of(most), 0.0f);
        r.most = most;
    }
    const float shift = shift_of(r.most), shift2 = shift * LOG2_E;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        sum += exp_of<T>(x[j], shift, shift2);
    r.sum += sum;
}

/* cap · tanh(x / cap); cap 0: x. Increases with x, so the largest logit stays the largest. */
struct soft_cap {
    float cap, inverse;
};

static __device__ __forceinline__ soft_cap soft_cap_of(float cap)
{
    return soft_cap{cap, cap == 0.0f ? 0.0f : 1.0f / cap};
}

/* For bf16 logits tanh through e^2x, with an absolute error of some 1e-7; e^2x may overflow to
 * infinity. */
template <typename T> static __device__ __forceinline__ float capped(float x, soft_cap c)
{
    if (c.cap == 0.0f)
        return x;
    if constexpr (sizeof(T) == 4)
        return c.cap * tanhf(x / c.cap);
    float part;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.0f + exp2_fast(x * (2.0f * LOG2_E * c.inverse))));
    return c.cap * fmaf(-2.0f, part, 1.0f);
}

/* Its derivative, from the result; without a cap: 1. */
static __device__ __forceinline__ float cap_slope(float y, soft_cap c)
{
    return 1.0f - (y * c.inverse) * (y * c.inverse);
}

/* The gradient of the target's logit, which is `shifted` above `top`. */
static __device__ __forceinline__ float target_gradient(double shifted, double sum, float top, float scale, float cap)
{
    const double y = (shifted + (double)top) / (double)cap;
    return (float)((exp(shifted) / sum - 1.0) * (double)scale * (cap == 0.0f ? 1.0 : 1.0 - y * y));
}

template <typename T, int N> struct alignas(N * sizeof(T)) vector_of {
    T v[N];
};

enum { TOGETHER = 4 }; /* vectors per thread whose loads are in flight together */

/* One block per row. The first `kept` vectors of the row stay in shared memory between the two
 * passes; the others are read again, from the L2 cache if they are still there. N: 16 bytes of
 * elements, or 1. */
template <typename T, int N, bool CAPPED>
static __global__ void __launch_bounds__(1024) cross_entropy_kernel(qd_cross_entropy_args a, int64_t kept, qd_cuda_fault *fault)
{
    using V = vector_of<T, N>;
    extern __shared__ uint4 shared[];
    __shared__ running scratch[32];
    T *row = (T *)a.logits + (int64_t)blockIdx.x * a.ld;
    V *vectors = (V *)row, *keep = (V *)shared;
    const int whole = (int)(a.vocab / N), left = (int)(a.vocab % N), stored = (int)kept; /* vectors; logits in the partial last one */
    const int target = a.targets[blockIdx.x];
    const V zero = {};
    const soft_cap cap = soft_cap_of(CAPPED ? a.cap : 0.0f);
    if (target < 0 || target >= a.vocab) {
        if (threadIdx.x == 0) {
            a.losses[blockIdx.x] = 0.0f;
            if (target >= 0)
                report_fault(fault, QD_CUDA_BAD_TARGET, blockIdx.x, target, a.vocab);
        }
        for (int i = threadIdx.x; a.grad && i < (int)(a.ld / N); i += blockDim.x)
            vectors[i] = zero;
        return;
    }
    const float chosen = capped<T>(to_float(row[target]), cap); /* before any thread overwrites it: see the barrier below */

    running r = {-INFINITY, 0.0f};
    int i = threadIdx.x;
    for (; i + (TOGETHER - 1) * (int)blockDim.x < whole; i += TOGETHER * blockDim.x) {
        V raw[TOGETHER];
        float x[TOGETHER * N];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            raw[t] = vectors[i + t * (int)blockDim.x];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            if (i + t * (int)blockDim.x < stored)
                keep[i + t * (int)blockDim.x] = raw[t]; /* each thread reads back only what it wrote */
#pragma unroll
            for (int j = 0; j < N; j++)
                x[t * N + j] = capped<T>(to_float(raw[t].v[j]), cap);
        }
        take<T>(r, x);
    }
    for (; i < whole; i += blockDim.x) {
        V raw = vectors[i];
        float x[N];
        if (i < stored)
            keep[i] = raw;
#pragma unroll
        for (int j = 0; j < N; j++)
            x[j] = capped<T>(to_float(raw.v[j]), cap);
        take<T>(r, x);
    }
    if (i == whole) /* the thread that would be next */
        for (int j = 0; j < left; j++) {
            float x[1] = {capped<T>(to_float(row[whole * (int64_t)N + j]), cap)};
            take<T>(r, x);
        }
    r = warp_join(r);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = r;
    __syncthreads(); /* also: all threads have read `chosen` */
    r = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : running{-INFINITY, 0.0f};
    r = warp_join(r);

    const float shift = shift_of(r.most), shift2 = shift * LOG2_E;
    const double shifted = (double)chosen - (double)shift;
    if (threadIdx.x == 0)
        a.losses[blockIdx.x] = (float)(log((double)r.sum) - shifted);
    if (!a.grad)
        return;
    const float factor = a.scale / r.sum;
#pragma unroll 2
    for (i = threadIdx.x; i < whole; i += blockDim.x) {
        V raw = i < stored ? keep[i] : vectors[i];
        float x[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float y = capped<T>(to_float(raw.v[j]), cap);
            x[j] = exp_of<T>(y, shift, shift2) * factor * cap_slope(y, cap);
        }
        store<N>(row + (int64_t)i * N, x);
        if (i == target / N) { /* after the store, by the same thread */
            float v[1] = {target_gradient(shifted, (double)r.sum, shift, a.scale, cap.cap)};
            store<1>(row + target, v);
        }
    }
    if (i == whole && left > 0) { /* the partial last vector, if there is one */
        for (int j = 0; j < N; j++) {
            const int64_t at = whole * (int64_t)N + j;
            float v[1] = {0.0f};
            if (j < left) {
                const float y = capped<T>(to_float(row[at]), cap);
                v[0] = exp_of<T>(y, shift, shift2) * factor * cap_slope(y, cap);
            }
            if (at == target)
                v[0] = target_gradient(shifted, (double)r.sum, shift, a.scale, cap.cap);
            store<1>(row + at, v);
        }
    }
    for (i = whole + (left > 0) + (int)threadIdx.x; i < (int)(a.ld / N); i += blockDim.x)
        vectors[i] = zero;
}

template <typename T, int N> static qd_status launch_cross_entropy(qd_stream *stream, const qd_cross_entropy_args *a)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int64_t vectors = a->vocab / N, size = N * (int64_t)sizeof(T);
    const int64_t spare = 2048; /* shared memory used by the kernel itself and the system */
    int64_t most = l.shared_most - spare;
    /* Two or three blocks per multiprocessor where as many rows fit: some compute while others load
     * or store. The register file has 56 registers for each of three times 384 threads. */
    bool two = vectors * size <= l.shared_most / 2 - spare, three = vectors * size <= l.shared_most / 3 - spare && vectors >= 1024;
    int64_t kept = !a->grad ? 0 : vectors * size <= most ? vectors : most / size;
    int threads = three ? 384 : two ? 512 : 1024;
    while (threads > 32 && threads / 2 >= vectors)
        threads /= 2;
    auto kernel = a->cap > 0.0f ? cross_entropy_kernel<T, N, true> : cross_entropy_kernel<T, N, false>;
    QD_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most));
    kernel<<<(unsigned)a->rows, threads, (size_t)(kept * size), l.stream>>>(*a, kept, l.fault);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_cross_entropy(qd_stream *stream, const qd_cross_entropy_args *a)
{
    QD_TRY(qd_check_float("cross_entropy", "logits", a->dtype));
    if (a->ld < a->vocab)
        return QD_FAIL(QD_USAGE, "cross_entropy: row stride %lld is less than the vocabulary of %lld", (long long)a->ld,
                       (long long)a->vocab);
    if (a->rows <= 0 || a->vocab <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return can_vector(a->ld, a->logits) ? launch_cross_entropy<T, 16 / sizeof(T)>(stream, a)
                                            : launch_cross_entropy<T, 1>(stream, a);
    });
}

/* One block: thread t sums rows t, t + 1024, ... in double; the threads' sums are added in a fixed
 * tree. */
static __global__ void __launch_bounds__(1024) loss_sum_kernel(qd_loss_sum_args a)
{
    __shared__ double scratch[2][32];
    double total = 0, counted = 0;
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < a.rows; row += 1024) {
        total += (double)a.losses[row];
        counted += a.targets[row] >= 0;
    }
    total = block_sum(total, scratch[0]);
    counted = block_sum(counted, scratch[1]);
    if (threadIdx.x == 0) {
        *a.total += total;
        *a.counted += counted;
    }
}

extern "C" qd_status qd_cuda_loss_sum(qd_stream *stream, const qd_loss_sum_args *a)
{
    loss_sum_kernel<<<1, 1024, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* Cross-entropy over a sharded vocabulary: one block per row, one stage per launch. */

static __device__ __forceinline__ float block_max(float x, float *scratch)
{
#pragma unroll
    for (int step = 16; step; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : -INFINITY;
#pragma unroll
    for (int step = 16; step; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

template <typename T>
static __global__ void __launch_bounds__(1024) cross_entropy_part_kernel(qd_cross_entropy_part_args a, qd_cuda_fault *fault)
{
    __shared__ float most[32];
    __shared__ double scratch[32];
    T *row = (T *)a.logits + (int64_t)blockIdx.x * a.ld;
    const soft_cap cap = soft_cap_of(a.cap);
    if (a.stage == QD_CROSS_ENTROPY_MAX) {
        float x = -INFINITY;
        for (int64_t i = threadIdx.x; i < a.vocab; i += blockDim.x)
            x = fmaxf(x, to_float(row[i]));
        x = block_max(x, most);
        if (threadIdx.x == 0)
            a.top[blockIdx.x] = capped<float>(x, cap);
        return;
    }
    const int target = a.targets[blockIdx.x];
    const int64_t here = target - a.first;
    const bool held = target >= 0 && here >= 0 && here < a.vocab;
    const float top = shift_of(a.top[blockIdx.x]);
    if (target >= a.all && threadIdx.x == 0)
        report_fault(fault, QD_CUDA_BAD_TARGET, blockIdx.x, target, a.all);
    if (a.stage == QD_CROSS_ENTROPY_SUM) {
        double sum = 0;
        for (int64_t i = threadIdx.x; i < a.vocab; i += blockDim.x)
            sum += (double)exp_of<float>(capped<T>(to_float(row[i]), cap), top, 0.0f);
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0) {
            a.sums[2 * (int64_t)blockIdx.x] = (float)sum;
            a.sums[2 * (int64_t)blockIdx.x + 1] = held ? capped<float>(to_float(row[here]), cap) - top : 0.0f;
        }
        return;
    }
    const double sum = (double)a.sums[2 * (int64_t)blockIdx.x], shifted = (double)a.sums[2 * (int64_t)blockIdx.x + 1];
    if (threadIdx.x == 0)
        a.losses[blockIdx.x] = target < 0 ? 0.0f : (float)(log(sum) - shifted);
    const float scale = a.factors ? a.scale * a.factors[blockIdx.x] : a.scale, factor = (float)((double)scale / sum);
    for (int64_t i = threadIdx.x; a.grad && i < a.ld; i += blockDim.x) {
        float v[1] = {0.0f};
        if (target >= 0 && i < a.vocab) {
            const float y = capped<T>(to_float(row[i]), cap);
            v[0] = held && i == here ? target_gradient(shifted, sum, top, scale, a.cap)
                                     : exp_of<float>(y, top, 0.0f) * factor * cap_slope(y, cap);
        }
        store<1>(row + i, v);
    }
}

extern "C" qd_status qd_cuda_cross_entropy_part(qd_stream *stream, const qd_cross_entropy_part_args *a)
{
    QD_TRY(qd_check_float("cross_entropy_part", "logits", a->dtype));
    if (a->ld < a->vocab)
        return QD_FAIL(QD_USAGE, "cross_entropy_part: row stride %lld is less than the %lld tokens of a row", (long long)a->ld,
                       (long long)a->vocab);
    if (a->rows <= 0 || a->vocab <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        qd_cuda_launch l = qd_cuda_launch_of(stream);
        /* Always 1024 threads: block_sum needs whole blocks, and the order of summation is fixed by
         * the shape. */
        cross_entropy_part_kernel<T><<<(unsigned)a->rows, 1024, 0, l.stream>>>(*a, l.fault);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}
