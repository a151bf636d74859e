/* A tile of a matrix product: panels of op(a) and op(b) are packed (transposed, converted to fp32 and padded as needed)
 * into the workspace, and a register tile of MR x NR is multiplied along them.
 *
 * Each element of c is the sum over blocks of QD_GEMM_KC steps of k, blocks in ascending order, each block summed in
 * ascending k. This holds wherever the element lies in its tile, so cutting c differently changes no bit. */
#include "device/cpu/matmul_impl.h"
#include "device/cpu/transpose_impl.h"

/* MR x NV vectors of accumulators, NV vectors of b and one of a must fit in the registers. */
#if QD_VF == 16
enum { MR = 6, NV = 4 };
#elif QD_VF == 8
enum { MR = 6, NV = 2 };
#elif defined(__aarch64__)
enum { MR = 8, NV = 3 };
#else
enum { MR = 4, NV = 2 };
#endif
/* LA: row stride of packed a; not a multiple of a page, so that the rows of a register tile lie in different sets. */
enum { NR = NV * QD_VF, KC = QD_GEMM_KC, MC = 336, LA = KC + 16 };
_Static_assert(MC % MR == 0, "a block is whole register tiles");

/* Workspace: packed a, packed b, and c where c is not fp32. */
enum {
    A_FLOATS = MC * LA,
    B_FLOATS = (QD_GEMM_NT + NR) * KC,
    C_FLOATS = QD_GEMM_MT_ROUNDED * QD_GEMM_NT_ROUNDED,
};
_Static_assert((A_FLOATS + B_FLOATS + C_FLOATS) * 4 <= QD_CPU_WORKSPACE_BYTES, "the panels must fit the workspace");

/* to (lines, LA) = kc columns of rows of x, the first row starting at element `first`. */
QD_INLINE void copy_rows(float *to, const void *x, int64_t first, int64_t stride, int64_t lines, int64_t kc,
                         qd_dtype dtype)
{
    for (int64_t l = 0; l < lines; l++, to += LA, first += stride) {
        int64_t p = 0;
        for (; p + QD_VF <= kc; p += QD_VF)
            vf_store(to + p, vf_load_as(x, first + p, dtype));
        if (p < kc)
            vf_store(to + p, vf_load_n_as(x, first + p, (int)(kc - p), dtype));
    }
}

/* Packs `lines` x `kc` of op(a) into rows of stride LA, and zeroes rows up to a multiple of MR. */
static void pack_a(float *to, const qd_matmul_args *a, int64_t m, int64_t lines, int64_t k, int64_t kc)
{
    if (a->trans_a) { /* stored (k, m) */
        int64_t first = k * a->lda + m;
        if (a->a_dtype == QD_F32)
            transpose_panel(to, LA, a->a, first, a->lda, kc, lines, QD_F32);
        else
            transpose_panel(to, LA, a->a, first, a->lda, kc, lines, QD_BF16);
    } else {
        int64_t first = m * a->lda + k;
        if (a->a_dtype == QD_F32)
            copy_rows(to, a->a, first, a->lda, lines, kc, QD_F32);
        else
            copy_rows(to, a->a, first, a->lda, lines, kc, QD_BF16);
    }
    for (int64_t l = lines; l % MR; l++)
        memset(to + l * LA, 0, (size_t)kc * sizeof(float));
}

/* Packs `lines` columns x `kc` of op(b) into panels (lines / NR, kc, NR); columns beyond `lines` are 0. */
QD_INLINE void pack_panels(float *to, const qd_matmul_args *a, int64_t first, int64_t lines, int64_t kc,
                           qd_dtype dtype)
{
    for (int64_t l = 0; l < lines; l += NR, to += kc * NR) {
        int here = lines - l < NR ? (int)(lines - l) : NR;
        if (a->trans_b) { /* stored (n, k) */
            if (here < NR)
                memset(to, 0, (size_t)(kc * NR) * sizeof(float));
            transpose_panel(to, NR, a->b, first + l * a->ldb, a->ldb, here, kc, dtype);
            continue;
        }
        for (int64_t p = 0; p < kc; p++) {
            int64_t at = first + l + p * a->ldb;
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                int rest = here - v * QD_VF;
                vf x = rest >= QD_VF ? vf_load_as(a->b, at + v * QD_VF, dtype)
                       : rest > 0    ? vf_load_n_as(a->b, at + v * QD_VF, rest, dtype)
                                     : (vf){0};
                vf_store(to + p * NR + v * QD_VF, x);
            }
        }
    }
}

static void pack_b(float *to, const qd_matmul_args *a, int64_t n, int64_t lines, int64_t k, int64_t kc)
{
    int64_t first = a->trans_b ? n * a->ldb + k : k * a->ldb + n;
    if (a->b_dtype == QD_F32)
        pack_panels(to, a, first, lines, kc, QD_F32);
    else
        pack_panels(to, a, first, lines, kc, QD_BF16);
}

/* sum (MR, NV) += column of a (MR rows of stride LA) x b (NR) */
QD_INLINE void micro_step(vf sum[MR][NV], const float *restrict a, const float *restrict b)
{
    vf line[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
        line[j] = vf_load(b + j * QD_VF);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
        vf x = vf_set(a[i * LA]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            sum[i][j] = x * line[j] + sum[i][j];
    }
}

/* c (MR, NR) = a · b [+ bias] [+ c]; a (MR, LA), b (kc, NR) packed. */
QD_INLINE void micro_tile(int64_t kc, const float *restrict a, const float *restrict b, const vf *bias, bool add,
                          float *restrict c, int64_t ldc)
{
    vf sum[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            sum[i][j] = (vf){0};
    int64_t p = 0;
    for (; p + 4 <= kc; p += 4, a += 4, b += 4 * NR) {
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++)
            micro_step(sum, a + q, b + q * NR);
    }
    for (; p < kc; p++, a++, b += NR)
        micro_step(sum, a, b);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
            float *to = c + i * ldc + j * QD_VF;
            vf value = bias ? sum[i][j] + bias[j] : sum[i][j];
            vf_store(to, add ? vf_load(to) + value : value);
        }
    }
}

/* One call per (add, bias), so that the inner part has no branches. */
static void micro_set(int64_t kc, const float *a, const float *b, const vf *bias, float *c, int64_t ldc)
{
    (void)bias;
    micro_tile(kc, a, b, NULL, false, c, ldc);
}
static void micro_add(int64_t kc, const float *a, const float *b, const vf *bias, float *c, int64_t ldc)
{
    (void)bias;
    micro_tile(kc, a, b, NULL, true, c, ldc);
}
static void micro_set_bias(int64_t kc, const float *a, const float *b, const vf *bias, float *c, int64_t ldc)
{
    micro_tile(kc, a, b, bias, false, c, ldc);
}
static void micro_add_bias(int64_t kc, const float *a, const float *b, const vf *bias, float *c, int64_t ldc)
{
    micro_tile(kc, a, b, bias, true, c, ldc);
}

typedef void micro(int64_t kc, const float *a, const float *b, const vf *bias, float *c, int64_t ldc);

/* The tile hangs over the edge of c: through a full one on the side. */
static void edge_tile(micro *kernel, bool add, int64_t kc, const float *a, const float *b, const vf *bias, float *c,
                      int64_t ldc, int rows, int cols)
{
    float side[MR * NR];
    if (add) {
        memset(side, 0, sizeof side);
        for (int i = 0; i < rows; i++)
            memcpy(side + i * NR, c + i * ldc, (size_t)cols * sizeof(float));
    }
    kernel(kc, a, b, bias, side, NR);
    for (int i = 0; i < rows; i++)
        memcpy(c + i * ldc, side + i * NR, (size_t)cols * sizeof(float));
}

static void block_product(const float *a, const float *b, const qd_matmul_args *args, int64_t n0, bool use_bias,
                          bool add, int64_t rows, int64_t cols, int64_t kc, float *c, int64_t ldc)
{
    micro *kernel = use_bias ? (add ? micro_add_bias : micro_set_bias) : add ? micro_add : micro_set;
    for (int64_t j = 0; j < cols; j += NR) { /* the panel of b stays in the first-level cache */
        int nr = cols - j < NR ? (int)(cols - j) : NR;
        vf bias[NV] = {0};
        for (int v = 0; use_bias && v * QD_VF < nr; v++) {
            int here = nr - v * QD_VF < QD_VF ? nr - v * QD_VF : QD_VF;
            bias[v] = vf_load_n_as(args->bias, n0 + j + v * QD_VF, here, args->b_dtype);
        }
        for (int64_t i = 0; i < rows; i += MR) {
            int mr = rows - i < MR ? (int)(rows - i) : MR;
            float *to = c + i * ldc + j;
            for (int r = 0; r < mr; r++) {
                __builtin_prefetch(to + r * ldc, 1);
                __builtin_prefetch(to + r * ldc + nr - 1, 1);
            }
            if (mr == MR && nr == NR)
                kernel(kc, a + i * LA, b + j * kc, bias, to, ldc);
            else
                edge_tile(kernel, add, kc, a + i * LA, b + j * kc, bias, to, ldc, mr, nr);
        }
    }
}

/* Rounds the finished tile into a bf16 c. */
static void store_tile(const qd_matmul_args *a, const float *c, int64_t m0, int64_t m1, int64_t n0, int64_t n1)
{
    int64_t cols = n1 - n0;
    for (int64_t i = m0; i < m1; i++, c += cols) {
        for (int64_t j = 0; j < cols; j += QD_VF) {
            int here = cols - j < QD_VF ? (int)(cols - j) : QD_VF;
            int64_t at = i * a->ldc + n0 + j;
            vf value = vf_load_n(c + j, here);
            if (a->accumulate)
                value += vf_load_n_as(a->c, at, here, QD_BF16);
            vf_store_n_as(a->c, at, value, here, QD_BF16);
        }
    }
}

static void tile(const qd_matmul_args *a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, void *workspace)
{
    float *pa = workspace, *pb = pa + A_FLOATS, *pc = pb + B_FLOATS;
    bool direct = a->c_dtype == QD_F32;
    float *c = direct ? (float *)a->c + m0 * a->ldc + n0 : pc;
    int64_t ldc = direct ? a->ldc : n1 - n0;
    /* k == 0 still writes c: one empty block */
    for (int64_t k = 0; k < a->k || k == 0; k += KC) {
        int64_t kc = a->k - k < KC ? a->k - k : KC;
        bool add = k > 0 || (a->accumulate && direct);
        pack_b(pb, a, n0, n1 - n0, k, kc);
        for (int64_t m = m0; m < m1; m += MC) {
            int64_t rows = m1 - m < MC ? m1 - m : MC;
            pack_a(pa, a, m, rows, k, kc);
            block_product(pa, pb, a, n0, a->bias && k == 0, add, rows, n1 - n0, kc, c + (m - m0) * ldc, ldc);
        }
    }
    if (!direct)
        store_tile(a, pc, m0, m1, n0, n1);
}

static void add_bias(float *c, int64_t ldc, int64_t rows, int64_t cols, const float *bias)
{
    for (int64_t i = 0; i < rows; i++, c += ldc)
        for (int64_t j = 0; j < cols; j++)
            c[j] += bias[j];
}

const qd_cpu_gemm QD_ISA_NAME(qd_cpu_gemm) = {.mr = MR, .nr = NR, .add_bias = add_bias, .tile = tile};
