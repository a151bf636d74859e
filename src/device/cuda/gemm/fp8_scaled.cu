/* Casts to fp8 with scales of rows, or of blocks of 128 (base/fp8.h), which they find themselves. A
 * thread block converts a tile of 128 x 128, so blocks need one pass; rows and columns are longer
 * than a tile, so their largest magnitudes are found in a pass of their own. */
#include "device/cuda/gemm/fp8_impl.cuh"

namespace {

using namespace qd_fp8;

enum {
    SIDE = QD_FP8_BLOCK,
    STRIDE = SIDE / 2 + 1, /* words of a row of bf16 pairs: threads that read rows, or columns, use different banks */
    HALF = SIDE / 2,
};

/* One form of the result: its codes, and its scales by row and block of the dimension that is
 * summed over. */
struct scaled_form {
    uint8_t *codes;
    int64_t rows, k;
};

__device__ __forceinline__ float *scales_of(const scaled_form &f)
{
    return (float *)(f.codes + (f.rows * f.k + 15) / 16 * 16);
}

/* One line of a tile, or half of one, as codes: `get(i)` is its i-th value. */
template <bool E5M2, typename F> __device__ __forceinline__ void put_line(uint8_t *to, float factor, int count, F get)
{
    for (int i = 0; i < count; i += CHUNK) {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            words[k] = pack_codes<E5M2>(get(i + 4 * k) * factor, get(i + 4 * k + 1) * factor, get(i + 4 * k + 2) * factor,
                                        get(i + 4 * k + 3) * factor);
        *reinterpret_cast<uint4 *>(to + i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* What a launch does: find the largest magnitudes of rows and columns, or convert with scales of
 * one of the kinds. */
enum pass { FIND_ROWS, CONVERT_ROWS, CONVERT_VECTORS, CONVERT_BLOCKS };

/* qd_fp8_scale_index(). */
template <pass PASS> __device__ __forceinline__ int64_t index_of(const scaled_form &f, int64_t row, int64_t block)
{
    if (PASS == CONVERT_ROWS)
        return row;
    if (PASS == CONVERT_VECTORS)
        return block * f.rows + row;
    return row / SIDE * (((f.k + SIDE - 1) / SIDE + 3) / 4 * 4) + block;
}

/* `most`: largest magnitudes (bits) of the rows, then of the columns. The tile at (first_row,
 * first_col) of x (rows, cols). Thread t works on half t / SIDE of row, and of column, t % SIDE. */
template <pass PASS, bool E5M2> __global__ void __launch_bounds__(THREADS)
    scaled_kernel(const bf16 *x, int64_t rows, int64_t cols, uint32_t *most, scaled_form plain, scaled_form transposed)
{
    __shared__ uint32_t tile[SIDE * STRIDE];
    __shared__ uint32_t largest[2][2][SIDE]; /* rows, columns; half; index */
    const int64_t first_row = (int64_t)blockIdx.y * SIDE, first_col = (int64_t)blockIdx.x * SIDE;
    const int high = (int)min((int64_t)SIDE, rows - first_row), wide = (int)min((int64_t)SIDE, cols - first_col);
    const int line = (int)threadIdx.x % SIDE, half = (int)threadIdx.x / SIDE, from = half * HALF;
    for (int i = (int)threadIdx.x; i < SIDE * SIDE / VECTOR; i += THREADS) { /* beyond the edges: zero */
        const int row = i / (SIDE / VECTOR), col = i % (SIDE / VECTOR) * VECTOR;
        uint4 q = make_uint4(0, 0, 0, 0);
        if (row < high && col < wide)
            q = *reinterpret_cast<const uint4 *>(x + (first_row + row) * cols + first_col + col);
        uint32_t *to = tile + row * STRIDE + col / 2;
        to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w;
    }
    __syncthreads();
    auto of_row = [&](int i) { /* value from + i of row `line` */
        const uint32_t pair = tile[line * STRIDE + (from + i) / 2];
        return __uint_as_float((from + i) % 2 ? pair & 0xffff0000u : pair << 16);
    };
    auto of_col = [&](int i) {
        const uint32_t pair = tile[(from + i) * STRIDE + line / 2];
        return __uint_as_float(line % 2 ? pair & 0xffff0000u : pair << 16);
    };
    uint32_t row_most = 0, col_most = 0;
    if (PASS != CONVERT_ROWS) {
#pragma unroll 8
        for (int i = 0; i < HALF; i++) {
            row_most = max(row_most, __float_as_uint(of_row(i)) & 0x7fffffffu);
            col_most = max(col_most, __float_as_uint(of_col(i)) & 0x7fffffffu);
        }
        largest[0][half][line] = row_most;
        largest[1][half][line] = col_most;
        __syncthreads();
        row_most = max(largest[0][0][line], largest[0][1][line]);
        col_most = max(largest[1][0][line], largest[1][1][line]);
    }
    if (PASS == FIND_ROWS) {
        if (half == 0 && line < high)
            atomicMax(most + first_row + line, row_most);
        if (half == 1 && line < wide)
            atomicMax(most + rows + first_col + line, col_most);
        return;
    }
    if (PASS == CONVERT_ROWS) {
        row_most = line < high ? most[first_row + line] : 0;
        col_most = line < wide ? most[rows + first_col + line] : 0;
    }
    if (PASS == CONVERT_BLOCKS) {
        __syncthreads(); /* all have read their part */
        const uint32_t of_warp = __reduce_max_sync(0xffffffffu, row_most);
        if (threadIdx.x % 32 == 0)
            largest[0][0][threadIdx.x / 32] = of_warp;
        __syncthreads();
        row_most = 0;
        for (int i = 0; i < THREADS / 32; i++)
            row_most = max(row_most, largest[0][0][i]);
        col_most = row_most;
    }
    const float2 row_scale = factor_and_scale(__uint_as_float(row_most), E5M2);
    const float2 col_scale = factor_and_scale(__uint_as_float(col_most), E5M2);
    auto convert = [&](const scaled_form &to, int lines, int length, int64_t first_line, int64_t first, float2 scale, auto get) {
        if (!to.codes || line >= lines)
            return;
        const bool one = PASS != CONVERT_BLOCKS || line == 0, once = PASS != CONVERT_ROWS || first == 0;
        if (half == 0 && one && once)
            scales_of(to)[index_of<PASS>(to, first_line + line, first / SIDE)] = scale.y;
        const int count = min(length - from, (int)HALF);
        if (count > 0)
            put_line<E5M2>(to.codes + (first_line + line) * to.k + first + from, scale.x, count, get);
    };
    convert(plain, high, wide, first_row, first_col, row_scale, of_row);
    convert(transposed, wide, high, first_col, first_row, col_scale, of_col);
}

template <pass PASS, bool E5M2> qd_status run(qd_stream *stream, const qd_fp8_cast_args *a, uint32_t *most)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    const dim3 grid((unsigned)divide_up(a->cols, SIDE), (unsigned)divide_up(a->rows, SIDE));
    scaled_kernel<PASS, E5M2><<<grid, THREADS, 0, launch.stream>>>((const bf16 *)a->x, a->rows, a->cols, most,
                                                                   {(uint8_t *)a->to, a->rows, a->cols},
                                                                   {(uint8_t *)a->transposed, a->cols, a->rows});
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <bool E5M2> qd_status cast(qd_stream *stream, const qd_fp8_cast_args *a)
{
    if (a->scaling == QD_FP8_VECTORS)
        return run<CONVERT_VECTORS, E5M2>(stream, a, NULL);
    if (a->scaling == QD_FP8_BLOCKS)
        return run<CONVERT_BLOCKS, E5M2>(stream, a, NULL);
    const int64_t bytes = (a->rows + a->cols) * (int64_t)sizeof(uint32_t);
    void *most;
    QD_TRY(qd_cuda_workspace(stream, bytes, &most));
    QD_CUDA_TRY(cudaMemsetAsync(most, 0, (size_t)bytes, qd_cuda_launch_of(stream).stream));
    QD_TRY((run<FIND_ROWS, false>(stream, a, (uint32_t *)most)));
    return run<CONVERT_ROWS, E5M2>(stream, a, (uint32_t *)most);
}

} // namespace

qd_status qd_cuda_fp8_cast_scaled(qd_stream *stream, const qd_fp8_cast_args *a)
{
    if (a->dtype != QD_BF16 || a->rows % CHUNK != 0 || a->cols % CHUNK != 0 || !can_vector(CHUNK, a->x, a->to, a->transposed))
        return QD_FAIL(QD_UNSUPPORTED, "fp8_cast: %lld rows and %lld columns of %s with scales of rows or blocks; multiples of %d of bf16 "
                       "are supported", (long long)a->rows, (long long)a->cols, qd_dtype_name(a->dtype), (int)CHUNK);
    QD_TRY(a->to_dtype == QD_F8E5M2 ? cast<true>(stream, a) : cast<false>(stream, a));
    if (!a->sums)
        return QD_OK;
    const qd_bias_grad_args sums = {a->x, a->sums, a->rows, a->cols, a->accumulate, a->dtype, a->sums_dtype};
    return qd_cuda_bias_grad(stream, &sums);
}
