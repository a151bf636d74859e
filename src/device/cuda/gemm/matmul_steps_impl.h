/* Steps around a GEMM that its epilogue does not do, and random data for timing GEMMs
 * (matmul_steps.cu). Sizes are in elements; rows are `columns` long and ld apart. */
#ifndef QD_DEVICE_CUDA_GEMM_MATMUL_STEPS_IMPL_H
#define QD_DEVICE_CUDA_GEMM_MATMUL_STEPS_IMPL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "device/cuda/launch_impl.h"

/* to = x + y + bias, row by row; x, y and bias may be NULL (zero), and x or y may be `to`. Summed
 * in fp32, rounded once. */
typedef struct qd_gemm_sum {
    void *to;
    const void *x, *y, *bias; /* bias: (columns) */
    int64_t rows, columns, to_ld, x_ld, y_ld;
    qd_dtype to_dtype, x_dtype, y_dtype, bias_dtype;
} qd_gemm_sum;
qd_status qd_gemm_sum_run(qd_stream *stream, const qd_gemm_sum *s);

/* to (m) = sum over k of x (m, k), or of x (k, m) if transposed [+ to if accumulate], in fp32, in
 * an order fixed by the sizes. */
typedef struct qd_gemm_row_sums {
    void *to;
    const void *x;
    int64_t m, k, ld;
    bool transposed, accumulate;
    qd_dtype to_dtype, x_dtype;
} qd_gemm_row_sums;
qd_status qd_gemm_row_sums_run(qd_stream *stream, const qd_gemm_row_sums *s);

/* Fills with uniform random numbers in (-1, 1), from a counter. */
qd_status qd_gemm_fill_random(qd_stream *stream, void *to, int64_t elements, qd_dtype dtype, uint32_t seed);

/* sums[0] = sum of (x - y)², sums[1] = sum of y²; device memory. The order of summation is not
 * fixed. */
qd_status qd_gemm_compare(qd_stream *stream, const void *x, const void *y, int64_t elements, qd_dtype dtype, double *sums);

#ifdef __cplusplus
}
#endif
#endif
