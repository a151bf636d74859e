/* The boundary between matmul.c (checks, cuts, threads), gemm_isa.c (one tile, vectorised)
 * and blas.c (a library's product). */
#ifndef QD_DEVICE_CPU_MATMUL_IMPL_H
#define QD_DEVICE_CPU_MATMUL_IMPL_H

#include "device/cpu/cpu_impl.h"

/* Steps of k that are summed in registers before they are added to c. The only thing about blocking that changes bits,
 * so it is the same for every shape, tile and thread count. */
#define QD_GEMM_KC 384
/* Largest n of a tile; and largest n and m of a tile whose c is not fp32 (it is summed in the workspace). */
#define QD_GEMM_NT 1536
#define QD_GEMM_NT_ROUNDED 768
#define QD_GEMM_MT_ROUNDED 336

typedef struct qd_cpu_gemm {
    int mr, nr; /* the register tile */
    /* c (rows, cols; row stride ldc) += bias (cols) */
    void (*add_bias)(float *c, int64_t ldc, int64_t rows, int64_t cols, const float *bias);
    /* c[m0..m1, n0..n1] of the product, within the limits above. */
    void (*tile)(const qd_matmul_args *a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, void *workspace);
} qd_cpu_gemm;
QD_CPU_TABLE(qd_cpu_gemm, qd_cpu_gemm)

/* A library's fp32 product, run by one thread: c = op(a) · op(b) [+ c]. */
struct qd_cpu_blas {
    const char *name;
    void (*sgemm)(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                  const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);
};

#endif
