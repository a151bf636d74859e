/* The boundary between matmul.c (checks, blocks, threads) and gemm_isa.c (packing and multiplying, vectorised). */
#ifndef QD_DEVICE_CPU_MATMUL_IMPL_H
#define QD_DEVICE_CPU_MATMUL_IMPL_H

#include "device/cpu/cpu_impl.h"

/* Steps of k that are summed in registers before they are added to c. The only thing about blocking that changes bits,
 * so it is the same for every shape, block and thread count. */
#define QD_GEMM_KC 384

/* Rows [m, m + rows) x columns [n, n + cols) x steps [k, k + kc) of a product. */
typedef struct qd_gemm_block {
    const qd_matmul_args *args;
    int64_t m, rows, n, cols, k, kc;
    float *a;    /* (panels of rows, kc, mr), with room for a multiple of row_step rows */
    float *b;    /* (panels of cols, kc, nr) */
    float *sums; /* (rows, cols; row stride ld_sums): c in the making where c is not fp32 */
    int64_t ld_sums;
} qd_gemm_block;

typedef struct qd_cpu_gemm {
    int mr, nr;   /* the register tile: widths of the panels of a and b */
    int row_step; /* rows of op(a) are packed in multiples of this, columns of op(b) of nr */
    /* Packs rows of op(a), columns of op(b), [begin, end) of the block; those beyond its last become 0. */
    void (*pack_a)(const qd_gemm_block *g, int64_t begin, int64_t end);
    void (*pack_b)(const qd_gemm_block *g, int64_t begin, int64_t end);
    /* c [+]= a · b */
    void (*multiply)(const qd_gemm_block *g);
} qd_cpu_gemm;
QD_CPU_TABLE(qd_cpu_gemm, qd_cpu_gemm)

#endif
