/* Matrix products: op(a) and op(b) are packed into panels as wide as a register tile (transposed, converted to fp32 and
 * padded as needed), and a register tile of MR x NR is multiplied along two panels.
 *
 * Each element of c is the sum over blocks of QD_GEMM_KC steps of k, blocks in ascending order, each block summed in
 * ascending k. This holds wherever the element lies, so cutting c differently changes no bit. */
#include "device/cpu/matmul_impl.h"
#include "device/cpu/transpose_impl.h"

/* MR x NV vectors of accumulators, NV vectors of b and one of a must fit in the registers. Wide rather than high: a row
 * costs a load of its own. MR is half a vector, or a multiple of one. */
#if QD_VF == 16
enum { MR = 8, NV = 3 };
#elif QD_VF == 8
enum { MR = 4, NV = 3 };
#elif defined(__aarch64__)
enum { MR = 8, NV = 3 };
#else
enum { MR = 4, NV = 2 };
#endif
enum { NR = NV * QD_VF, LINE = 16 /* floats of a cache line */ };
_Static_assert(MR % QD_VF == 0 || MR * 2 == QD_VF, "panels of a are whole vectors or halves");

/* ---- packing ---- */

#if QD_VF >= 8
typedef float half __attribute__((vector_size(QD_VF * 2)));
#endif

/* The vector's lanes are lines at one step of k: to panels (…, kc, width), `to` being the place of its first lane. */
QD_INLINE void put_lanes(float *to, int width, int64_t kc, vf lanes)
{
    if (width >= QD_VF) {
        vf_store(to, lanes);
        return;
    }
#if QD_VF >= 8
#if QD_VF == 16
    half low = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7);
    half high = __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    half low = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3);
    half high = __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7);
#endif
    memcpy(to, &low, sizeof low);
    memcpy(to + width * kc, &high, sizeof high);
#else
    (void)kc;
#endif
}

QD_INLINE const char *element(const void *x, int64_t i, qd_dtype dtype)
{
    return (const char *)x + i * (dtype == QD_F32 ? 4 : 2);
}

/* What is fetched ahead, in elements along a row and in rows: the machine's own prefetching follows neither many rows at
 * once nor pieces of rows far apart. */
enum { AHEAD = 64, ROWS_AHEAD = 6 };

/* Lines [begin, end) of which `lines` exist, kc steps of each from element `first` on (of line 0). by_line: x is stored
 * (lines, k), otherwise (k, lines). */
QD_INLINE void pack_as(float *to, int width, const void *x, int64_t first, int64_t stride, bool by_line, int64_t begin,
                       int64_t end, int64_t lines, int64_t kc, qd_dtype dtype)
{
    if (by_line) {
        for (int64_t l = begin; l < end; l += QD_VF) {
            float *out = to + l / width * width * kc + l % width;
            int here = lines - l < QD_VF ? (int)(lines - l > 0 ? lines - l : 0) : QD_VF;
            for (int64_t p = 0; p < kc; p += QD_VF, out += QD_VF * width) {
                int steps = kc - p < QD_VF ? (int)(kc - p) : QD_VF;
                int64_t at = first + l * stride + p;
                vf r[QD_VF];
                if (here == QD_VF && steps == QD_VF) {
#pragma GCC unroll 16
                    for (int i = 0; i < QD_VF; i++) {
                        __builtin_prefetch(element(x, at + i * stride + AHEAD, dtype), 0, 2);
                        r[i] = vf_load_as(x, at + i * stride, dtype);
                    }
                    transpose_square(r);
#pragma GCC unroll 16
                    for (int i = 0; i < QD_VF; i++)
                        put_lanes(out + i * width, width, kc, r[i]);
                } else {
                    load_square(r, x, at, stride, here, steps, dtype);
                    transpose_square(r);
                    for (int i = 0; i < steps; i++)
                        put_lanes(out + i * width, width, kc, r[i]);
                }
            }
        }
        return;
    }
    for (int64_t p = 0; p < kc; p++) { /* along the rows of x, which are long */
        int64_t at = first + p * stride, l = begin;
        float *out = to + begin * kc + p * width; /* begin is a whole panel */
        int64_t panel = (width > QD_VF ? width : QD_VF), whole = end < lines ? end : lines;
        for (; l + panel <= whole; l += panel, out += panel * kc) {
#pragma GCC unroll 4
            for (int v = 0; v < panel; v += QD_VF) {
                __builtin_prefetch(element(x, at + l + v + ROWS_AHEAD * stride, dtype), 0, 2);
                put_lanes(out + v, width, kc, vf_load_as(x, at + l + v, dtype));
            }
        }
        for (; l < end; l += panel, out += panel * kc)
            for (int v = 0; v < panel; v += QD_VF) {
                int64_t rest = lines - l - v;
                int here = rest < QD_VF ? (int)(rest > 0 ? rest : 0) : QD_VF;
                put_lanes(out + v, width, kc, vf_load_n_as(x, at + l + v, here, dtype));
            }
    }
}

static void pack_a(const qd_gemm_block *g, int64_t begin, int64_t end)
{
    const qd_matmul_args *a = g->args;
    int64_t first = a->trans_a ? g->k * a->lda + g->m : g->m * a->lda + g->k;
    if (a->a_dtype == QD_F32)
        pack_as(g->a, MR, a->a, first, a->lda, !a->trans_a, begin, end, g->rows, g->kc, QD_F32);
    else
        pack_as(g->a, MR, a->a, first, a->lda, !a->trans_a, begin, end, g->rows, g->kc, QD_BF16);
}

static void pack_b(const qd_gemm_block *g, int64_t begin, int64_t end)
{
    const qd_matmul_args *a = g->args;
    int64_t first = a->trans_b ? g->n * a->ldb + g->k : g->k * a->ldb + g->n;
    if (a->b_dtype == QD_F32)
        pack_as(g->b, NR, a->b, first, a->ldb, a->trans_b, begin, end, g->cols, g->kc, QD_F32);
    else
        pack_as(g->b, NR, a->b, first, a->ldb, a->trans_b, begin, end, g->cols, g->kc, QD_BF16);
}

/* ---- multiplying ---- */

/* sum (MR, NV) += column of a (MR) x row of b (NR) */
QD_INLINE void micro_step(vf sum[MR][NV], const float *restrict a, const float *restrict b)
{
    vf line[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
        line[j] = vf_load(b + j * QD_VF);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
        vf x = vf_set(a[i]);
        QD_IN_REGISTER(x); /* or each multiply-add would load it again */
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            sum[i][j] = vf_add_product(sum[i][j], x, line[j]);
    }
}

/* c (MR, NR) = a · b [+ bias] [+ c]; a (kc, MR), b (kc, NR) packed. `next`: what comes after b, fetched on the way. */
static void micro_tile(int64_t kc, const float *restrict a, const float *restrict b, const float *next, const vf *bias,
                       bool add, float *restrict c, int64_t ldc)
{
    vf sum[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            sum[i][j] = (vf){0};
    /* the rows of c are fetched one after another: all at once they would hold up the loads of a and b */
    int64_t p = 0, fours = kc / 4 / MR;
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < NR; j += LINE)
            __builtin_prefetch(c + r * ldc + j, 1);
        __builtin_prefetch(c + r * ldc + NR - 1, 1);
        for (int64_t four = 0; four < fours; four++, p += 4, a += 4 * MR, b += 4 * NR, next += LINE) {
            __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++)
                micro_step(sum, a + q * MR, b + q * NR);
        }
    }
    for (; p < kc; p++, a += MR, b += NR)
        micro_step(sum, a, b);
    if (bias) {
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++)
                sum[i][j] += bias[j];
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
            float *to = c + i * ldc + j * QD_VF;
            vf_store(to, add ? vf_load(to) + sum[i][j] : sum[i][j]);
        }
    }
}

/* The tile hangs over the edge of c: through a full one on the side. */
static void edge_tile(int64_t kc, const float *a, const float *b, const vf *bias, bool add, float *c, int64_t ldc,
                      int rows, int cols)
{
    float side[MR * NR];
    if (add) {
        memset(side, 0, sizeof side);
        for (int i = 0; i < rows; i++)
            memcpy(side + i * NR, c + i * ldc, (size_t)cols * sizeof(float));
    }
    micro_tile(kc, a, b, b, bias, add, side, NR);
    for (int i = 0; i < rows; i++)
        memcpy(c + i * ldc, side + i * NR, (size_t)cols * sizeof(float));
}

/* Rounds finished sums into a bf16 c. */
static void store_sums(const qd_gemm_block *g)
{
    const qd_matmul_args *a = g->args;
    for (int64_t i = 0; i < g->rows; i++) {
        for (int64_t j = 0; j < g->cols; j += QD_VF) {
            int here = g->cols - j < QD_VF ? (int)(g->cols - j) : QD_VF;
            int64_t at = (g->m + i) * a->ldc + g->n + j;
            vf value = vf_load_n(g->sums + i * g->ld_sums + j, here);
            if (a->accumulate)
                value += vf_load_n_as(a->c, at, here, QD_BF16);
            vf_store_n_as(a->c, at, value, here, QD_BF16);
        }
    }
}

static int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

static void multiply(const qd_gemm_block *g)
{
    const qd_matmul_args *args = g->args;
    bool direct = args->c_dtype == QD_F32, add = g->k > 0 || (args->accumulate && direct);
    bool use_bias = args->bias && g->k == 0;
    float *c = direct ? (float *)args->c + g->m * args->ldc + g->n : g->sums;
    int64_t ldc = direct ? args->ldc : g->ld_sums, kc = g->kc;
    int64_t high = (g->rows + MR - 1) / MR, wide = (g->cols + NR - 1) / NR;
    /* the panels of the smaller side stay in the second-level cache, those of the other go by once */
    bool by_rows = g->rows > g->cols;
    int64_t passing = by_rows ? high : wide, staying = by_rows ? wide : high, width = by_rows ? MR : NR;
    for (int64_t o = 0; o < passing; o++) {
        for (int64_t s = 0; s < staying; s++) {
            int64_t i = by_rows ? o : s, j = by_rows ? s : o;
            const float *a = g->a + i * MR * kc, *b = g->b + j * NR * kc;
            float *to = c + i * MR * ldc + j * NR;
            int mr = (int)smaller(MR, g->rows - i * MR), nr = (int)smaller(NR, g->cols - j * NR);
            vf bias[NV] = {0};
            for (int v = 0; use_bias && v * QD_VF < nr; v++)
                bias[v] = vf_load_n_as(args->bias, g->n + j * NR + v * QD_VF, (int)smaller(nr - v * QD_VF, QD_VF),
                                       args->b_dtype);
            /* a tile's share of the next panel that goes by: a line for each four steps, until all is fetched */
            int64_t share = s * (kc / 4) * LINE;
            const float *next = o + 1 < passing && share < width * kc ? (by_rows ? a : b) + width * kc + share : b;
            if (mr == MR && nr == NR)
                micro_tile(kc, a, b, next, use_bias ? bias : NULL, add, to, ldc);
            else
                edge_tile(kc, a, b, use_bias ? bias : NULL, add, to, ldc, mr, nr);
        }
    }
    if (!direct && g->k + kc >= args->k)
        store_sums(g);
}

const qd_cpu_gemm QD_ISA_NAME(qd_cpu_gemm) = {
    .mr = MR, .nr = NR, .row_step = MR > QD_VF ? MR : QD_VF, .pack_a = pack_a, .pack_b = pack_b, .multiply = multiply,
};
