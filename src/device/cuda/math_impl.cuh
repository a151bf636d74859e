/* What the kernels share: vectors of elements in registers as fp32, sums over warps and blocks, and
 * launch helpers. */
#ifndef QD_DEVICE_CUDA_MATH_IMPL_CUH
#define QD_DEVICE_CUDA_MATH_IMPL_CUH

#include "device/cuda/launch_impl.h"

#include <cuda_bf16.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

/* Elements per access of a thread where everything is aligned: 16 bytes of bf16, twice 16 bytes of
 * fp32. */
#define VECTOR 8

/* Loads and stores of N consecutive elements, N 8, 4 or 1. For N > 1 the address is a multiple of N
 * elements. */

template <int N> static __device__ __forceinline__ void load(const float *p, float (&v)[N])
{
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 q = *reinterpret_cast<const float4 *>(p + i);
            v[i] = q.x, v[i + 1] = q.y, v[i + 2] = q.z, v[i + 3] = q.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = p[i];
    }
}

static __device__ __forceinline__ void unpack(uint32_t word, float &low, float &high)
{
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
}

template <int N> static __device__ __forceinline__ void load(const bf16 *p, float (&v)[N])
{
    if constexpr (N == 8) {
        uint4 q = *reinterpret_cast<const uint4 *>(p);
        unpack(q.x, v[0], v[1]), unpack(q.y, v[2], v[3]), unpack(q.z, v[4], v[5]), unpack(q.w, v[6], v[7]);
    } else if constexpr (N == 4) {
        uint2 q = *reinterpret_cast<const uint2 *>(p);
        unpack(q.x, v[0], v[1]), unpack(q.y, v[2], v[3]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = __bfloat162float(p[i]);
    }
}

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

template <int N> static __device__ __forceinline__ void store(float *p, const float (&v)[N])
{
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            *reinterpret_cast<float4 *>(p + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            p[i] = v[i];
    }
}

template <int N> static __device__ __forceinline__ void store(bf16 *p, const float (&v)[N])
{
    if constexpr (N == 8) {
        *reinterpret_cast<uint4 *>(p) =
            make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
    } else if constexpr (N == 4) {
        *reinterpret_cast<uint2 *>(p) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            p[i] = __float2bfloat16_rn(v[i]);
    }
}

/* fp32 values split into bf16 halves and the low 16 bits, as signed remainders (base/half.h). Pairs
 * are packed into 32-bit words. */
static __device__ __forceinline__ void join_pair(uint32_t halves, uint32_t rests, float &low, float &high)
{
    low = __uint_as_float((halves << 16) + (uint32_t)(int32_t)(int16_t)(rests & 0xffffu));
    high = __uint_as_float((halves & 0xffff0000u) + (uint32_t)((int32_t)rests >> 16));
}

static __device__ __forceinline__ uint32_t rest_of(float value, uint32_t half)
{
    int32_t rest = (int32_t)(__float_as_uint(value) - half); /* half: in the high bits */
    return (uint32_t)max(min(rest, 0x7fff), -0x8000) & 0xffffu;
}

static __device__ __forceinline__ void split_pair(float low, float high, uint32_t &halves, uint32_t &rests)
{
    halves = pack(low, high);
    rests = rest_of(low, halves << 16) | rest_of(high, halves & 0xffff0000u) << 16;
}

template <int N> static __device__ __forceinline__ void load_parts(const bf16 *half, const int16_t *rest, float (&v)[N])
{
    if constexpr (N == 4) {
        uint2 h = *reinterpret_cast<const uint2 *>(half), r = *reinterpret_cast<const uint2 *>(rest);
        join_pair(h.x, r.x, v[0], v[1]), join_pair(h.y, r.y, v[2], v[3]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = __uint_as_float(((uint32_t)__bfloat16_as_ushort(half[i]) << 16) + (uint32_t)(int32_t)rest[i]);
    }
}

template <int N> static __device__ __forceinline__ void store_parts(bf16 *half, int16_t *rest, const float (&v)[N])
{
    if constexpr (N == 4) {
        uint2 h, r;
        split_pair(v[0], v[1], h.x, r.x), split_pair(v[2], v[3], h.y, r.y);
        *reinterpret_cast<uint2 *>(half) = h;
        *reinterpret_cast<uint2 *>(rest) = r;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            half[i] = __float2bfloat16_rn(v[i]);
            rest[i] = (int16_t)rest_of(v[i], (uint32_t)__bfloat16_as_ushort(half[i]) << 16);
        }
    }
}

/* The type is known at run time; the branch is uniform. */
template <int N> static __device__ __forceinline__ void load_as(const void *p, int64_t i, bool is_bf16, float (&v)[N])
{
    if (is_bf16)
        load<N>((const bf16 *)p + i, v);
    else
        load<N>((const float *)p + i, v);
}

template <int N> static __device__ __forceinline__ void store_as(void *p, int64_t i, bool is_bf16, const float (&v)[N])
{
    if (is_bf16)
        store<N>((bf16 *)p + i, v);
    else
        store<N>((float *)p + i, v);
}

/* What a norm multiplies normalized values by: gamma, 1 + gamma, or 1 if there is no gamma. */
template <typename P, int N>
static __device__ __forceinline__ void load_factor(const void *gamma, int64_t at, bool plus_one, float (&v)[N])
{
    if (gamma)
        load<N>((const P *)gamma + at, v);
#pragma unroll
    for (int i = 0; i < N; i++)
        v[i] = !gamma ? 1.0f : plus_one ? 1.0f + v[i] : v[i];
}

static __device__ __forceinline__ float to_float(float x)
{
    return x;
}
static __device__ __forceinline__ float to_float(bf16 x)
{
    return __bfloat162float(x);
}
/* x after a round trip through storage type T. */
template <typename T> static __device__ __forceinline__ float rounded(float x)
{
    if constexpr (sizeof(T) == 2)
        return __bfloat162float(__float2bfloat16_rn(x));
    else
        return x;
}

#define ALL_LANES 0xffffffffu /* all lanes of a warp take part */

template <typename V> static __device__ __forceinline__ V warp_sum(V x)
{
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* Raises *amax to the largest magnitude of a row, or of several: a non-negative number, or a NaN,
 * whose bits are ordered as integers. Most rows do not raise it and only read it. */
static __device__ __forceinline__ void raise_amax(float *amax, float most)
{
    const unsigned bits = __reduce_max_sync(ALL_LANES, __float_as_uint(most));
    if (threadIdx.x % 32 == 0 && bits > *(volatile unsigned *)amax)
        atomicMax((unsigned *)amax, bits);
}

/* The larger magnitude of `most` and of the stored vector v, as numbers whose bits are compared. */
template <typename T, int V> static __device__ __forceinline__ float larger_magnitude(float most, const float (&v)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        most = __uint_as_float(max(__float_as_uint(most), __float_as_uint(rounded<T>(v[i])) & 0x7fffffffu));
    return most;
}

/* Inclusive prefix sum over the lanes. */
template <typename V> static __device__ __forceinline__ V warp_sum_so_far(V x)
{
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        V other = __shfl_up_sync(ALL_LANES, x, step);
        x += (int)threadIdx.x % 32 >= step ? other : V(0);
    }
    return x;
}

static __device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int step = 16; step; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

/* The sum over the block, in every thread. blockDim.x is a multiple of 32. `scratch` holds 32
 * values and may be reused after the next barrier. */
template <typename V> static __device__ __forceinline__ V block_sum(V x, V *scratch)
{
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (warps == 1)
        return x;
    if (lane == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : V(0));
}

/* Row and column of item i of a table with `cols` columns, in 32-bit arithmetic where possible. */
static __device__ __forceinline__ void split_index(int64_t i, int64_t cols, int64_t &row, int64_t &col)
{
    if ((uint64_t)i >> 32 == 0 && (uint64_t)cols >> 32 == 0) {
        row = (uint32_t)i / (uint32_t)cols;
        col = (uint32_t)i - (uint32_t)row * (uint32_t)cols;
    } else {
        row = i / cols;
        col = i - row * cols;
    }
}

static __device__ __forceinline__ void report_fault(qd_cuda_fault *fault, int kind, int64_t row, int value, int64_t bound)
{
    if (atomicCAS(&fault->kind, QD_CUDA_NO_FAULT, kind) == QD_CUDA_NO_FAULT) { /* only the first fault is recorded */
        fault->value = value;
        fault->row = row;
        fault->bound = bound;
    }
}

static inline int64_t divide_up(int64_t x, int64_t step)
{
    return (x + step - 1) / step;
}

static inline bool is_aligned(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

/* Whether rows of `cols` elements at these addresses can be read in vectors of VECTOR elements.
 * NULL counts as aligned. */
static inline bool can_vector(int64_t cols, const void *a, const void *b = NULL, const void *c = NULL, const void *d = NULL,
                              const void *e = NULL)
{
    return cols % VECTOR == 0 && is_aligned(a) && is_aligned(b) && is_aligned(c) && is_aligned(d) && is_aligned(e);
}

/* Calls body with a value of the element type. */
template <typename F> static qd_status with_type(qd_dtype dtype, F body)
{
    return dtype == QD_F32 ? body(float()) : body(bf16());
}

/* Use after each launch. */
#define QD_CUDA_LAUNCHED() QD_CUDA_TRY(cudaGetLastError())

#endif
