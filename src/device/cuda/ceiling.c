/* The reference of `bench` on a GPU: one large bf16 GEMM, on random numbers because zeros run
 * faster. */
#include "device/cuda/cuda_impl.h"

qd_status qd_cuda_run_fma(qd_stream *stream, double *flops)
{
    qd_cuda *cuda = qd_cuda_of(stream);
    const int64_t size = QD_CUDA_CEILING_SIZE;
    if (!cuda->ceiling) {
        QD_CUDA_TRY(cudaMalloc(&cuda->ceiling, QD_CUDA_CEILING_BYTES));
        QD_TRY(qd_cuda_fill_random(stream, cuda->ceiling, 2 * size * size));
    }
    uint16_t *a = cuda->ceiling, *b = a + size * size, *c = b + size * size;
    qd_matmul_args args = {.a = a, .b = b, .c = c, .m = size, .n = size, .k = size, .lda = size, .ldb = size, .ldc = size,
                           .trans_b = true, .a_dtype = QD_BF16, .b_dtype = QD_BF16, .c_dtype = QD_BF16};
    *flops = 2.0 * (double)size * (double)size * (double)size;
    QD_TRY(qd_cuda_matmul(stream, &args));
    return QD_OK;
}
