/* Casts to fp8, with the largest magnitude that decides the scale, transposed copies and sums over
 * rows. The definitions are those of base/fp8.h; the rounding is the hardware's. */
#include "device/cuda/gemm/fp8_impl.cuh"

namespace {

using namespace qd_fp8;

struct stored_values {
    enum { OUTPUTS = 1, GRADS = 1, SUMMED = 1 };
    const bf16 *x;
    int64_t cols;
    __device__ __forceinline__ void load(int64_t row, int64_t col, uint32_t (&pairs)[1][VECTOR / 2]) const
    {
        const uint4 q = *reinterpret_cast<const uint4 *>(x + row * cols + col);
        pairs[0][0] = q.x, pairs[0][1] = q.y, pairs[0][2] = q.z, pairs[0][3] = q.w;
    }
};

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

template <typename T, bool E5M2> qd_status cast_each(qd_stream *stream, const qd_fp8_cast_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    cast_any<T, E5M2><<<blocks_for(&launch, a->rows * a->cols), THREADS, 0, launch.stream>>>(
        (const T *)a->x, a->amax, (uint8_t *)a->to, (uint8_t *)a->transposed, a->rows, a->cols);
    QD_CUDA_LAUNCHED();
    if (!a->sums)
        return QD_OK;
    const qd_bias_grad_args sums = {a->x, a->sums, a->rows, a->cols, a->accumulate, a->dtype, a->sums_dtype};
    return qd_cuda_bias_grad(stream, &sums);
}

template <bool E5M2> qd_status cast_as(qd_stream *stream, const qd_fp8_cast_args *a)
{
    if (a->dtype != QD_BF16)
        return cast_each<float, E5M2>(stream, a);
    if (a->rows % CHUNK != 0 || a->cols % CHUNK != 0 || !can_vector(CHUNK, a->x, a->to, a->transposed))
        return cast_each<bf16, E5M2>(stream, a);
    outputs to = {};
    to.of[0] = {(uint8_t *)a->to, (uint8_t *)a->transposed, a->amax, a->cols, 0};
    return write_codes<stored_values, E5M2>(stream, {(const bf16 *)a->x, a->cols}, to, a, a->cols);
}

} // namespace

extern "C" qd_status qd_cuda_amax(qd_stream *stream, const qd_amax_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    QD_TRY(qd_check_float("amax", "x", a->dtype));
    QD_CUDA_TRY(cudaMemsetAsync(a->amax, 0, sizeof *a->amax, launch.stream));
    if (a->n < 1)
        return QD_OK;
    if (a->of)
        return qd_cuda_fp8_amax_activation(stream, a);
    if (a->dtype == QD_F32)
        amax_any<float><<<blocks_for(&launch, a->n), THREADS, 0, launch.stream>>>((const float *)a->x, a->n, a->amax);
    else if (can_vector(a->n, a->x))
        return find_largest<stored_values>(stream, {(const bf16 *)a->x, a->n}, 1, a->n, a->amax);
    else
        amax_any<bf16><<<blocks_for(&launch, a->n), THREADS, 0, launch.stream>>>((const bf16 *)a->x, a->n, a->amax);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_fp8_cast(qd_stream *stream, const qd_fp8_cast_args *a)
{
    QD_TRY(qd_fp8_cast_check(a));
    if (a->rows < 1 || a->cols < 1)
        return QD_OK;
    if (a->scaling != QD_FP8_TENSOR)
        return qd_cuda_fp8_cast_scaled(stream, a);
    if (a->of)
        return qd_cuda_fp8_cast_activation(stream, a);
    return a->to_dtype == QD_F8E5M2 ? cast_as<true>(stream, a) : cast_as<false>(stream, a);
}
