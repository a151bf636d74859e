/* The boundary between matmul.c (checks, blocks, threads) and gemm_isa.c (packing and multiplying,
 * vectorized). */
#ifndef QD_DEVICE_CPU_GEMM_MATMUL_IMPL_H
#define QD_DEVICE_CPU_GEMM_MATMUL_IMPL_H

#include "device/cpu/cpu_impl.h"

/* k is counted in steps: single elements, or pairs where GEMMs of bf16 operands use dot products.
 * An odd k ends in a pair whose second element is 0. */
static inline int64_t qd_gemm_steps(const qd_matmul_args *a, bool pairs)
{
    return pairs ? (a->k + 1) / 2 : a->k;
}

/* The first element of a step. */
static inline int64_t qd_gemm_element(int64_t step, bool pairs)
{
    return pairs ? 2 * step : step;
}

/* Most steps of k that are summed in registers before they are added to c: each pass over c costs a
 * read and a write of it. A longer k is split into blocks of equal length (qd_gemm_k_block). This
 * is the only blocking parameter that changes bits, so it depends on k and `pairs` alone. */
#define QD_GEMM_KC 1024

static inline int64_t qd_gemm_k_block(int64_t steps)
{
    int64_t blocks = (steps + QD_GEMM_KC - 1) / QD_GEMM_KC;
    return blocks < 2 ? steps : ((steps + blocks - 1) / blocks + 15) / 16 * 16;
}

/* Rows [m, m + rows) x columns [n, n + cols) x steps [k, k + kc) of a GEMM. */
typedef struct qd_gemm_block {
    const qd_matmul_args *args;
    int64_t m, rows, n, cols, k, kc;
    bool pairs;     /* a and b are bf16, and dot products multiply them in pairs */
    bool direct;    /* op(a) is read in place (qd_gemm_direct); if it is widened, b_stays */
    const void *a; /* row m: in place if direct, else packed and padded to a multiple of row_step rows */
    const float *b; /* column n, packed */
    bool b_stays;   /* b's few panels stay in cache while a's stream by, or the reverse; set before packing */
    float *sums;    /* (rows, cols; row stride ld_sums): fp32 sums of a bf16 c over several blocks of k; else NULL */
    int64_t ld_sums;
} qd_gemm_block;

#define QD_GEMM_ROW_COLUMNS 192

typedef struct qd_cpu_gemm {
    int mr, nr;   /* register tile: panel widths of a and b */
    int row_step; /* rows of op(a) are packed in multiples of this, columns of op(b) in multiples of nr */
    int tile_steps; /* pairs of k that a tile multiplies at once */
    int chunk_floats; /* of a packed chunk: part of an L2 cache, through which the other operand streams */
    int own_floats;   /* of the workspace, for a chunk with the padding between panels */
    /* Floats (or pairs) from the first panel of a packed operand to that of line `line` (a multiple
     * of row_step or nr). */
    int64_t (*offset_a)(int64_t line, int64_t kc);
    int64_t (*offset_b)(int64_t line, int64_t kc);
    /* Packs rows of op(a) or columns of op(b), [begin, end) of the block, steps [from, until) of
     * its k. Lines beyond the last one become 0. `to` is the first panel of the block. */
    void (*pack_a)(const qd_gemm_block *g, float *to, int64_t begin, int64_t end, int64_t from, int64_t until);
    void (*pack_b)(const qd_gemm_block *g, float *to, int64_t begin, int64_t end, int64_t from, int64_t until);
    /* c [+]= a · b */
    void (*multiply)(const qd_gemm_block *g);
    /* Columns [begin, end), at most QD_GEMM_ROW_COLUMNS, of a GEMM with one row and b stored (n,
     * k): c [+]= a · b, without packing. NULL: not for this tile. */
    void (*multiply_row)(const qd_matmul_args *args, bool pairs, int64_t begin, int64_t end);
} qd_cpu_gemm;
QD_CPU_TABLE_EMULATED(qd_cpu_gemm, qd_cpu_gemm)
#if defined(__x86_64__)
extern const qd_cpu_gemm qd_cpu_gemm_amx, qd_cpu_gemm_amx_emulated; /* of pairs only */
#endif

/* The kernels for a GEMM of single elements, or of bf16 pairs. */
static inline const qd_cpu_gemm *qd_cpu_gemm_of(const qd_cpu *cpu, bool pairs)
{
#if defined(__x86_64__)
    if (pairs && cpu->isa == QD_CPU_amx)
        return &qd_cpu_gemm_amx;
    if (pairs && cpu->isa == QD_CPU_amx_emulated)
        return &qd_cpu_gemm_amx_emulated;
#endif
    (void)pairs;
    return qd_cpu_gemm_for(cpu);
}

/* bf16 elements that fp32 multiply-adds need as floats. */
static inline bool qd_gemm_widens(const qd_matmul_args *a, bool pairs)
{
    return !pairs && a->a_dtype == QD_BF16;
}

/* op(a) can be read in place if it is not transposed and holds what tiles multiply: fp32, whole
 * tiles of pairs, or bf16 elements, a panel of which is widened for each chunk of b. */
static inline bool qd_gemm_direct(const qd_cpu_gemm *gemm, const qd_matmul_args *a, bool pairs)
{
    return !a->trans_a && (pairs ? a->k % (2 * gemm->tile_steps) == 0 : a->a_dtype == QD_F32 || a->a_dtype == QD_BF16);
}

#endif
