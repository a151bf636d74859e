/* Casts to fp8, with the largest magnitude that decides the scale and with transposed copies,
 * because GEMMs of fp8 operands read both along k. The definitions are those of base/fp8.h; the
 * rounding is the hardware's. */
#include "device/cuda/math_impl.cuh"

#include <cuda_fp8.h>

namespace {

enum {
    THREADS = 256,
    BLOCKS_PER_UNIT = 8,
    TILE_ROWS = 128, /* of a transposed tile: a warp writes this many codes of a column at once */
    TILE_COLS = 64,
    CHUNK = 16,      /* codes that a thread stores at once */
    WORDS = TILE_COLS / 4,
};

/* The factor that turns a value into a code, and its reciprocal, the scale. */
__device__ float2 factor_and_scale(float amax, bool e5m2)
{
    const uint32_t bits = __float_as_uint(amax) & 0x7fffffffu, below = e5m2 ? 15 : 8;
    uint32_t exponent = bits >> 23;
    if (bits == 0)
        return make_float2(1.0f, 1.0f);
    if (exponent == 255)
        return make_float2(1.0f, __uint_as_float(0x7fc00000u));
    exponent += (bits & 0x7fffffu) > 0x600000u;
    exponent = exponent > below ? exponent - below : 1u;
    return make_float2(__uint_as_float((254u - exponent) << 23), __uint_as_float(exponent << 23));
}

/* The scale follows the codes; one thread of the grid writes it. */
__device__ void put_scale(void *codes, int64_t elements, float scale)
{
    if (codes && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *(float *)((char *)codes + (elements + 15) / 16 * 16) = scale;
}

template <bool E5M2> __device__ __forceinline__ uint32_t pack_codes(float a, float b, float c, float d)
{
    constexpr __nv_fp8_interpretation_t as = E5M2 ? __NV_E5M2 : __NV_E4M3;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, as);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, as);
    return low | high << 16;
}

/* Magnitudes compare as integers, NaNs above all numbers. Values are non-negative, so their order
 * does not depend on the order of the atomics. */
__device__ void put_largest(uint32_t bits, float *amax)
{
    bits = __reduce_max_sync(0xffffffffu, bits);
    __shared__ uint32_t of_warp[THREADS / 32];
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    bits = __reduce_max_sync(0xffffffffu, threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : 0);
    if (threadIdx.x == 0)
        atomicMax(reinterpret_cast<unsigned *>(amax), bits);
}

__global__ void __launch_bounds__(THREADS) amax_bf16(const uint4 *x, int64_t n, float *amax)
{
    uint32_t most = 0;
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        const uint4 q = x[i];
        most = __vmaxu2(most, __vmaxu2(__vmaxu2(q.x & 0x7fff7fffu, q.y & 0x7fff7fffu), __vmaxu2(q.z & 0x7fff7fffu, q.w & 0x7fff7fffu)));
    }
    put_largest(max(most << 16, most & 0xffff0000u), amax);
}

template <typename T> __global__ void __launch_bounds__(THREADS) amax_any(const T *x, int64_t n, float *amax)
{
    uint32_t most = 0;
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        most = max(most, __float_as_uint((float)x[i]) & 0x7fffffffu);
    put_largest(most, amax);
}

template <typename T, bool E5M2> __global__ void __launch_bounds__(THREADS)
    cast_any(const T *x, const float *amax, uint8_t *to, uint8_t *transposed, int64_t rows, int64_t cols)
{
    const float2 f = factor_and_scale(*amax, E5M2);
    const int64_t step = (int64_t)gridDim.x * THREADS;
    put_scale(to, rows * cols, f.y);
    put_scale(transposed, rows * cols, f.y);
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < rows * cols; i += step) {
        const uint8_t code = (uint8_t)pack_codes<E5M2>((float)x[i] * f.x, 0.0f, 0.0f, 0.0f);
        if (to)
            to[i] = code;
        if (transposed)
            transposed[i % cols * rows + i / cols] = code;
    }
}

/* CHUNK codes of as many values. */
template <bool E5M2> __device__ __forceinline__ uint4 cast_chunk(const bf16 *x, float factor)
{
    float v[VECTOR], w[VECTOR];
    load<VECTOR>(x, v);
    load<VECTOR>(x + VECTOR, w);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        v[i] *= factor;
        w[i] *= factor;
    }
    return make_uint4(pack_codes<E5M2>(v[0], v[1], v[2], v[3]), pack_codes<E5M2>(v[4], v[5], v[6], v[7]),
                      pack_codes<E5M2>(w[0], w[1], w[2], w[3]), pack_codes<E5M2>(w[4], w[5], w[6], w[7]));
}

template <bool E5M2> __global__ void __launch_bounds__(THREADS) cast_rows(const bf16 *x, const float *amax, uint4 *to, int64_t chunks)
{
    const float2 f = factor_and_scale(*amax, E5M2);
    const int64_t step = (int64_t)gridDim.x * THREADS;
    put_scale(to, chunks * CHUNK, f.y);
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < chunks; i += step)
        to[i] = cast_chunk<E5M2>(x + i * CHUNK, f.x);
}

/* Words of a tile in shared memory: rotated, so that neither rows nor columns are all in a few
 * banks. */
__device__ __forceinline__ int word_at(int row, int word)
{
    return row * WORDS + (word ^ (row / 4 % WORDS));
}

/* Transposes 4 x 4 codes: w[i] has four of row i, and then four of column i. */
__device__ __forceinline__ void transpose_codes(uint32_t (&w)[4])
{
    const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

/* A tile of TILE_ROWS x TILE_COLS; rows and cols are multiples of CHUNK. */
template <bool E5M2> __global__ void __launch_bounds__(THREADS)
    cast_transposed(const bf16 *x, const float *amax, uint8_t *to, uint8_t *transposed, int64_t rows, int64_t cols)
{
    __shared__ uint32_t tile[TILE_ROWS * WORDS];
    const float2 f = factor_and_scale(*amax, E5M2);
    const int64_t first_row = (int64_t)blockIdx.y * TILE_ROWS, first_col = (int64_t)blockIdx.x * TILE_COLS;
    put_scale(to, rows * cols, f.y);
    put_scale(transposed, rows * cols, f.y);
#pragma unroll
    for (int i = 0; i < TILE_ROWS * TILE_COLS / CHUNK / THREADS; i++) {
        const int chunk = i * THREADS + (int)threadIdx.x, row = chunk / (TILE_COLS / CHUNK), word = chunk % (TILE_COLS / CHUNK) * 4;
        const int64_t at = (first_row + row) * cols + first_col + word * 4;
        if (first_row + row >= rows || first_col + word * 4 >= cols)
            continue;
        const uint4 codes = cast_chunk<E5M2>(x + at, f.x);
        if (to)
            *reinterpret_cast<uint4 *>(to + at) = codes;
        tile[word_at(row, word)] = codes.x;
        tile[word_at(row, word + 1)] = codes.y;
        tile[word_at(row, word + 2)] = codes.z;
        tile[word_at(row, word + 3)] = codes.w;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE_ROWS / 4 * WORDS / THREADS; i++) {
        const int block = i * THREADS + (int)threadIdx.x, row = block % (TILE_ROWS / 4) * 4, word = block / (TILE_ROWS / 4);
        if (first_row + row >= rows || first_col + word * 4 >= cols)
            continue;
        uint32_t w[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            w[e] = tile[word_at(row + e, word)];
        transpose_codes(w);
#pragma unroll
        for (int e = 0; e < 4; e++)
            *reinterpret_cast<uint32_t *>(transposed + (first_col + word * 4 + e) * rows + first_row + row) = w[e];
    }
}

unsigned blocks_for(const qd_cuda_launch *launch, int64_t items)
{
    const int64_t most = (int64_t)launch->multiprocessors * BLOCKS_PER_UNIT, wanted = (items + THREADS - 1) / THREADS;
    return (unsigned)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

template <bool E5M2> qd_status cast_as(qd_stream *stream, const qd_fp8_cast_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    uint8_t *to = (uint8_t *)a->to, *transposed = (uint8_t *)a->transposed;
    const bool whole = a->dtype == QD_BF16 && a->rows % CHUNK == 0 && a->cols % CHUNK == 0 && can_vector(CHUNK, a->x, to, transposed);
    if (!whole) {
        const unsigned blocks = blocks_for(&launch, a->rows * a->cols);
        if (a->dtype == QD_BF16)
            cast_any<bf16, E5M2><<<blocks, THREADS, 0, launch.stream>>>((const bf16 *)a->x, a->amax, to, transposed, a->rows, a->cols);
        else
            cast_any<float, E5M2><<<blocks, THREADS, 0, launch.stream>>>((const float *)a->x, a->amax, to, transposed, a->rows, a->cols);
    } else if (transposed) {
        const dim3 grid((unsigned)divide_up(a->cols, TILE_COLS), (unsigned)divide_up(a->rows, TILE_ROWS));
        cast_transposed<E5M2><<<grid, THREADS, 0, launch.stream>>>((const bf16 *)a->x, a->amax, to, transposed, a->rows, a->cols);
    } else {
        const int64_t chunks = a->rows * a->cols / CHUNK;
        cast_rows<E5M2><<<blocks_for(&launch, chunks), THREADS, 0, launch.stream>>>((const bf16 *)a->x, a->amax, (uint4 *)to, chunks);
    }
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

} // namespace

extern "C" qd_status qd_cuda_amax(qd_stream *stream, const qd_amax_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    QD_TRY(qd_check_float("amax", "x", a->dtype));
    QD_CUDA_TRY(cudaMemsetAsync(a->amax, 0, sizeof *a->amax, launch.stream));
    if (a->n < 1)
        return QD_OK;
    if (a->dtype == QD_F32)
        amax_any<float><<<blocks_for(&launch, a->n), THREADS, 0, launch.stream>>>((const float *)a->x, a->n, a->amax);
    else if (can_vector(a->n, a->x, NULL, NULL))
        amax_bf16<<<blocks_for(&launch, a->n / VECTOR), THREADS, 0, launch.stream>>>((const uint4 *)a->x, a->n / VECTOR, a->amax);
    else
        amax_any<bf16><<<blocks_for(&launch, a->n), THREADS, 0, launch.stream>>>((const bf16 *)a->x, a->n, a->amax);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_fp8_cast(qd_stream *stream, const qd_fp8_cast_args *a)
{
    QD_TRY(qd_fp8_cast_check(a));
    if ((!a->to && !a->transposed) || a->rows < 1 || a->cols < 1)
        return QD_OK;
    return a->to_dtype == QD_F8E5M2 ? cast_as<true>(stream, a) : cast_as<false>(stream, a);
}
