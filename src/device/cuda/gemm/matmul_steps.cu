/* Steps around a GEMM; see matmul_steps_impl.h. They are simple, because they serve only shapes
 * that no epilogue supports. */
#include "device/cuda/gemm/matmul_steps_impl.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace {

enum { THREADS = 256 };

__device__ float load(const void *p, int64_t i, qd_dtype dtype)
{
    return dtype == QD_F32 ? ((const float *)p)[i] : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}

__device__ void store(void *p, int64_t i, qd_dtype dtype, float value)
{
    if (dtype == QD_F32)
        ((float *)p)[i] = value;
    else if (dtype == QD_F8E4M3 || dtype == QD_F8E5M2)
        ((__nv_fp8_storage_t *)p)[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, dtype == QD_F8E4M3 ? __NV_E4M3 : __NV_E5M2);
    else
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(value);
}

__global__ void sum_rows(qd_gemm_sum s)
{
    const int64_t count = s.rows * s.columns, step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
        const int64_t row = i / s.columns, column = i % s.columns;
        float value = 0;
        if (s.x)
            value += load(s.x, row * s.x_ld + column, s.x_dtype);
        if (s.y)
            value += load(s.y, row * s.y_ld + column, s.y_dtype);
        if (s.bias)
            value += load(s.bias, column, s.bias_dtype);
        store(s.to, row * s.to_ld + column, s.to_dtype, value);
    }
}

/* One block per sum: strided partial sums, then a tree. */
__global__ void sum_along_k(qd_gemm_row_sums s)
{
    __shared__ float partial[THREADS];
    for (int64_t row = blockIdx.x; row < s.m; row += gridDim.x) {
        float sum = 0;
        for (int64_t k = threadIdx.x; k < s.k; k += THREADS)
            sum += load(s.x, s.transposed ? k * s.ld + row : row * s.ld + k, s.x_dtype);
        partial[threadIdx.x] = sum;
        __syncthreads();
        for (int half = THREADS / 2; half > 0; half /= 2) {
            if (threadIdx.x < half)
                partial[threadIdx.x] += partial[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0)
            store(s.to, row, s.to_dtype, (s.accumulate ? load(s.to, row, s.to_dtype) : 0) + partial[0]);
        __syncthreads();
    }
}

__global__ void fill_random(void *to, int64_t elements, qd_dtype dtype, uint32_t seed)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < elements; i += step) {
        uint32_t x = (uint32_t)i * 0x9E3779B9u ^ (uint32_t)(i >> 32) ^ seed * 0x85EBCA6Bu;
        x = (x ^ x >> 16) * 0x7FEB352Du;
        x = (x ^ x >> 15) * 0x846CA68Bu;
        x ^= x >> 16;
        store(to, i, dtype, (float)(int32_t)x * 0x1p-31f);
    }
}

__global__ void compare(const void *x, const void *y, int64_t elements, qd_dtype dtype, double *sums)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    double difference = 0, norm = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < elements; i += step) {
        const double a = load(x, i, dtype), b = load(y, i, dtype);
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        difference += __shfl_down_sync(0xFFFFFFFFu, difference, lane);
        norm += __shfl_down_sync(0xFFFFFFFFu, norm, lane);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&sums[0], difference);
        atomicAdd(&sums[1], norm);
    }
}

unsigned blocks_for(const qd_cuda_launch *launch, int64_t items)
{
    const int64_t most = (int64_t)launch->multiprocessors * 16;
    return (unsigned)(items < 1 ? 1 : items < most ? items : most);
}

} // namespace

qd_status qd_gemm_sum_run(qd_stream *stream, const qd_gemm_sum *s)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    if (s->rows < 1 || s->columns < 1)
        return QD_OK;
    sum_rows<<<blocks_for(&launch, (s->rows * s->columns + THREADS - 1) / THREADS), THREADS, 0, launch.stream>>>(*s);
    QD_CUDA_TRY(cudaGetLastError());
    return QD_OK;
}

qd_status qd_gemm_row_sums_run(qd_stream *stream, const qd_gemm_row_sums *s)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    if (s->m < 1)
        return QD_OK;
    sum_along_k<<<blocks_for(&launch, s->m), THREADS, 0, launch.stream>>>(*s);
    QD_CUDA_TRY(cudaGetLastError());
    return QD_OK;
}

qd_status qd_gemm_fill_random(qd_stream *stream, void *to, int64_t elements, qd_dtype dtype, uint32_t seed)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    if (elements < 1)
        return QD_OK;
    fill_random<<<blocks_for(&launch, (elements + THREADS - 1) / THREADS), THREADS, 0, launch.stream>>>(to, elements, dtype, seed);
    QD_CUDA_TRY(cudaGetLastError());
    return QD_OK;
}

qd_status qd_gemm_compare(qd_stream *stream, const void *x, const void *y, int64_t elements, qd_dtype dtype, double *sums)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    QD_CUDA_TRY(cudaMemsetAsync(sums, 0, 2 * sizeof *sums, launch.stream));
    compare<<<blocks_for(&launch, (elements + THREADS - 1) / THREADS), THREADS, 0, launch.stream>>>(x, y, elements, dtype, sums);
    QD_CUDA_TRY(cudaGetLastError());
    return QD_OK;
}
