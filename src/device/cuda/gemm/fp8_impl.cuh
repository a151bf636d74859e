/* What kernels share that convert to fp8: the format, the largest magnitude, and tiles of codes in
 * both orders. GEMMs of fp8 operands read both along k, so many tensors are needed transposed
 * too. */
#ifndef QD_DEVICE_CUDA_GEMM_FP8_IMPL_CUH
#define QD_DEVICE_CUDA_GEMM_FP8_IMPL_CUH

#include "device/cuda/math_impl.cuh"
#include "device/cuda/sums_impl.h"

#include <cuda_fp8.h>

namespace qd_fp8 {

enum {
    THREADS = 256,
    BLOCKS_PER_UNIT = 8,
    AMAX_BLOCKS_PER_UNIT = 32, /* several rounds of blocks, as not all of a unit's are resident */
    TILE_ROWS = 128, /* of a transposed tile: a warp writes this many codes of a column at once */
    TILE_COLS = 64,
    CHUNK = 16,      /* codes that a thread stores at once */
    WORDS = TILE_COLS / 4,
    ROW_VECTORS = TILE_COLS / VECTOR,
    STEP_ROWS = THREADS / ROW_VECTORS, /* of a tile that a block reads at once */
    OUTPUTS_MOST = 3,
};

/* The factor that turns a value into a code, and its reciprocal, the scale. */
static __device__ __forceinline__ float2 factor_and_scale(float amax, bool e5m2)
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
static __device__ __forceinline__ void put_scale(void *codes, int64_t elements, float scale)
{
    if (codes && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *(float *)((char *)codes + (elements + 15) / 16 * 16) = scale;
}

template <bool E5M2> static __device__ __forceinline__ uint32_t pack_codes(float a, float b, float c, float d)
{
    constexpr __nv_fp8_interpretation_t as = E5M2 ? __NV_E5M2 : __NV_E4M3;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, as);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, as);
    return low | high << 16;
}

/* The magnitude of a bf16 pair, element by element; NaNs are above all numbers. */
static __device__ __forceinline__ uint32_t largest_pair(uint32_t most, uint32_t pair)
{
    return __vmaxu2(most, pair & 0x7fff7fffu);
}

/* Magnitudes compare as integers, NaNs above all numbers. Values are non-negative, so their order
 * does not depend on the order of the atomics. */
static __device__ __forceinline__ void put_largest(uint32_t bits, float *amax)
{
    bits = __reduce_max_sync(0xffffffffu, bits);
    __shared__ uint32_t of_warp[THREADS / 32];
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    bits = __reduce_max_sync(0xffffffffu, threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : 0);
    if (threadIdx.x == 0 && bits > *reinterpret_cast<volatile unsigned *>(amax)) /* most blocks do not raise it */
        atomicMax(reinterpret_cast<unsigned *>(amax), bits);
}

/* Words of a tile in shared memory: rotated, so that neither rows nor columns are all in a few
 * banks. The rows of four share a rotation, so that they are WORDS apart. */
static __device__ __forceinline__ uint32_t word_at(uint32_t row, uint32_t word)
{
    return row * WORDS + (word ^ (row / 4 % WORDS));
}

/* Transposes 4 x 4 codes: w[i] has four of row i, and then four of column i. */
static __device__ __forceinline__ void transpose_codes(uint32_t (&w)[4])
{
    const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

/* One of the tensors that a source gives: its columns are columns `first` on of a matrix with
 * `stride` columns. */
struct output {
    uint8_t *to, *transposed; /* may be NULL */
    const float *amax;
    int64_t stride, first;
};
struct outputs {
    output of[OUTPUTS_MOST];
    float *sums; /* (tiles of rows, cols): sums of the first output, or NULL */
};

/* A source S gives VECTOR bf16 values of S::OUTPUTS tensors at (row, col), as pairs. The first
 * S::GRADS of them are in the format E5M2 if that is set; the others are activations. SUMS: the
 * first is summed over rows, which S::SUMMED allows. */

/* How many vectors a thread loads before it uses the first, so that enough bytes are under way.
 * What is beyond the end is clamped to it: loads in branches would wait for each other. */
template <class S> struct ahead {
    enum { value = S::OUTPUTS == 1 ? 4 : 2 };
};

template <class S> static __global__ void __launch_bounds__(THREADS) amax_kernel(S source, int64_t rows, int64_t cols, float *amax)
{
    constexpr int AHEAD = ahead<S>::value;
    uint32_t most = 0;
    const int64_t step = (int64_t)gridDim.x * THREADS, per_row = cols / VECTOR, end = rows * per_row;
    for (int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x; first < end; first += AHEAD * step) {
        uint32_t pairs[AHEAD][S::OUTPUTS][VECTOR / 2];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int64_t row, col;
            split_index(min(first + i * step, end - 1), per_row, row, col);
            source.load(row, col * VECTOR, pairs[i]);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int o = 0; o < S::GRADS; o++)
#pragma unroll
                for (int k = 0; k < VECTOR / 2; k++)
                    most = largest_pair(most, pairs[i][o][k]);
    }
    put_largest(max(most << 16, most & 0xffff0000u), amax);
}

/* Codes of VECTOR values. */
template <bool E5M2> static __device__ __forceinline__ uint2 to_codes(const uint32_t (&pairs)[VECTOR / 2], float factor)
{
    float v[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR / 2; k++) {
        unpack(pairs[k], v[2 * k], v[2 * k + 1]);
        v[2 * k] *= factor;
        v[2 * k + 1] *= factor;
    }
    return make_uint2(pack_codes<E5M2>(v[0], v[1], v[2], v[3]), pack_codes<E5M2>(v[4], v[5], v[6], v[7]));
}

/* Codes in the order of the values; cols is a multiple of CHUNK. Casts begin at the end, which what
 * found the largest magnitude has read or written last: it may still be in the cache. */
template <class S, bool E5M2> static __global__ void __launch_bounds__(THREADS) rows_kernel(S source, output to, int64_t rows, int64_t cols)
{
    const float2 f = factor_and_scale(*to.amax, E5M2);
    const int64_t step = (int64_t)gridDim.x * THREADS, per_row = cols / CHUNK;
    put_scale(to.to, rows * cols, f.y);
    for (int64_t i = rows * per_row - 1 - ((int64_t)blockIdx.x * THREADS + threadIdx.x); i >= 0; i -= step) {
        uint32_t low[1][VECTOR / 2], high[1][VECTOR / 2];
        int64_t row, col;
        split_index(i, per_row, row, col);
        source.load(row, col * CHUNK, low);
        source.load(row, col * CHUNK + VECTOR, high);
        const uint2 a = to_codes<E5M2>(low[0], f.x), b = to_codes<E5M2>(high[0], f.x);
        *reinterpret_cast<uint4 *>(to.to + row * cols + col * CHUNK) = make_uint4(a.x, a.y, b.x, b.y);
    }
}

/* A tile of TILE_ROWS x TILE_COLS of each output, with transposed copies; rows and cols are
 * multiples of CHUNK. Eight threads read 128 bytes of a row. */
template <class S, bool E5M2, bool SUMS>
static __global__ void __launch_bounds__(THREADS) tile_kernel(S source, outputs to, int64_t rows, int64_t cols)
{
    constexpr uint32_t STEPS = TILE_ROWS / STEP_ROWS, AHEAD = ahead<S>::value;
    __shared__ uint32_t tile[S::OUTPUTS][TILE_ROWS * WORDS];
    const int64_t tile_row = gridDim.y - 1 - blockIdx.y, first_row = tile_row * TILE_ROWS;
    const int64_t first_col = (int64_t)(gridDim.x - 1 - blockIdx.x) * TILE_COLS;
    const uint32_t high = (uint32_t)min((int64_t)TILE_ROWS, rows - first_row), wide = (uint32_t)min((int64_t)TILE_COLS, cols - first_col);
    const uint32_t row = threadIdx.x / ROW_VECTORS, col = threadIdx.x % ROW_VECTORS * VECTOR; /* of the first vector */
    /* Of even and of odd steps, whose rotations differ by half of the words. The second word of a
     * vector is the first with its lowest bit changed. */
    static_assert(STEP_ROWS / 4 == WORDS / 2, "rotation of a step");
    const uint32_t even = word_at(row, col / 4), odd = even ^ (WORDS / 2);
    float factor[S::OUTPUTS] = {}, sums[VECTOR] = {};
#pragma unroll
    for (uint32_t step = 0; step < STEPS; step += AHEAD) {
        uint32_t pairs[AHEAD][S::OUTPUTS][VECTOR / 2];
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++)
            source.load(first_row + min(row + (step + i) * STEP_ROWS, high - 1), first_col + min(col, wide - VECTOR), pairs[i]);
#pragma unroll
        for (int o = 0; o < S::OUTPUTS && step == 0; o++) { /* while the first values are under way */
            const output &out = to.of[o];
            if (!out.to && !out.transposed)
                continue;
            const float2 f = factor_and_scale(*out.amax, E5M2 && o < S::GRADS);
            factor[o] = f.x;
            put_scale(out.to, rows * out.stride, f.y);
            put_scale(out.transposed, rows * out.stride, f.y);
        }
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) {
            const uint32_t down = (step + i) * STEP_ROWS, word = ((step + i) % 2 ? odd : even) + down * WORDS;
            if (row + down >= high || col >= wide)
                continue;
#pragma unroll
            for (int o = 0; o < S::OUTPUTS; o++) {
                const output &out = to.of[o];
                if (SUMS && o == 0)
#pragma unroll
                    for (int k = 0; k < VECTOR; k += 2) {
                        float low, high_half;
                        unpack(pairs[i][o][k / 2], low, high_half);
                        sums[k] += low;
                        sums[k + 1] += high_half;
                    }
                if (!out.to && !out.transposed)
                    continue;
                const uint2 codes = E5M2 && o < S::GRADS ? to_codes<true>(pairs[i][o], factor[o]) : to_codes<false>(pairs[i][o], factor[o]);
                if (out.to)
                    *reinterpret_cast<uint2 *>(out.to + (first_row + row + down) * out.stride + out.first + first_col + col) = codes;
                tile[o][word] = codes.x;
                tile[o][word ^ 1] = codes.y;
            }
        }
    }
    if constexpr (SUMS) { /* lanes with the same columns, then warps, in order */
        __shared__ float of_warp[THREADS / 32][TILE_COLS];
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, column = (int)threadIdx.x;
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            float sum = sums[k];
#pragma unroll
            for (int step = ROW_VECTORS; step < 32; step *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (lane < ROW_VECTORS)
                of_warp[warp][lane * VECTOR + k] = sum;
        }
        __syncthreads();
        if (column < TILE_COLS && first_col + column < cols) {
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < THREADS / 32; k++)
                sum += of_warp[k][column];
            to.sums[tile_row * cols + first_col + column] = sum;
        }
    } else {
        __syncthreads();
    }
    /* Four rows of four words, or columns, at a time: a warp writes 128 codes of each. */
    const uint32_t four = threadIdx.x % (TILE_ROWS / 4) * 4, word = threadIdx.x / (TILE_ROWS / 4);
#pragma unroll
    for (int o = 0; o < S::OUTPUTS; o++) {
        const output &out = to.of[o];
        if (!out.transposed)
            continue;
        uint8_t *at = out.transposed + (out.first + first_col + word * 4) * rows + first_row + four;
#pragma unroll
        for (uint32_t i = 0; i < WORDS; i += THREADS / (TILE_ROWS / 4), at += (THREADS / (TILE_ROWS / 4) - 1) * 4 * rows) {
            uint32_t w[4];
            const uint32_t from = word_at(four, word + i);
#pragma unroll
            for (int e = 0; e < 4; e++)
                w[e] = tile[o][from + e * WORDS];
            transpose_codes(w);
#pragma unroll
            for (int e = 0; e < 4; e++, at += rows)
                if (four < high && (word + i) * 4 < wide)
                    *reinterpret_cast<uint32_t *>(at) = w[e];
        }
    }
}

static inline unsigned blocks_for(const qd_cuda_launch *launch, int64_t items, int per_unit = BLOCKS_PER_UNIT)
{
    const int64_t most = (int64_t)launch->multiprocessors * per_unit, wanted = (items + THREADS - 1) / THREADS;
    return (unsigned)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

template <class S> static qd_status find_largest(qd_stream *stream, S source, int64_t rows, int64_t cols, float *amax)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    const unsigned blocks = blocks_for(&launch, rows * cols / VECTOR / ahead<S>::value, AMAX_BLOCKS_PER_UNIT);
    amax_kernel<<<blocks, THREADS, 0, launch.stream>>>(source, rows, cols, amax);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* Writes the outputs that are wanted; cols: of one output. The sums become those of `a`. */
template <class S, bool E5M2>
static qd_status write_codes(qd_stream *stream, S source, outputs to, const qd_fp8_cast_args *a, int64_t cols)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    const dim3 grid((unsigned)divide_up(cols, TILE_COLS), (unsigned)divide_up(a->rows, TILE_ROWS));
    if constexpr (S::OUTPUTS == 1)
        if (!to.of[0].transposed && !a->sums) {
            rows_kernel<S, E5M2><<<blocks_for(&launch, a->rows * cols / CHUNK), THREADS, 0, launch.stream>>>(source, to.of[0], a->rows,
                                                                                                             cols);
            QD_CUDA_LAUNCHED();
            return QD_OK;
        }
    if (!a->sums) {
        tile_kernel<S, E5M2, false><<<grid, THREADS, 0, launch.stream>>>(source, to, a->rows, cols);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    }
    if constexpr (S::SUMMED) {
        void *space, *const sums[] = {a->sums};
        QD_TRY(qd_cuda_workspace(stream, (int64_t)grid.y * cols * (int64_t)sizeof(float), &space));
        to.sums = (float *)space;
        tile_kernel<S, E5M2, true><<<grid, THREADS, 0, launch.stream>>>(source, to, a->rows, cols);
        QD_CUDA_LAUNCHED();
        return qd_cuda_add_parts(launch.stream, sums, 1, a->sums_dtype, to.sums, (int)grid.y, cols, a->accumulate);
    }
    return QD_FAIL(QD_UNSUPPORTED, "fp8_cast: sums of an activation, or of the gradient of a gated one");
}

} // namespace qd_fp8

/* fp8_activation.cu: amax and cast of the result of an activation, or of its gradient. */
qd_status qd_cuda_fp8_amax_activation(qd_stream *stream, const qd_amax_args *a);
qd_status qd_cuda_fp8_cast_activation(qd_stream *stream, const qd_fp8_cast_args *a);
/* fp8_scaled.cu: casts with scales of rows or blocks. */
qd_status qd_cuda_fp8_cast_scaled(qd_stream *stream, const qd_fp8_cast_args *a);
#endif
