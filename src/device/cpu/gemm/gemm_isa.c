/* GEMM: a register tile of MR x NR is accumulated along a panel of op(a) and a panel of op(b),
 * which are as wide as the tile. A panel has 32 bits for each line and step of k: a float, or a
 * pair of bf16 elements for dot products (qd_gemm_block.pairs). Panels of b are (kc, NR), packed:
 * transposed, converted and padded as needed. Panels of a are
 *   by rows     (MR, kc): row stride `lda` if read in place, kc if packed. bf16 rows that are
 *               multiplied as floats are widened a panel at a time, right before its tiles
 *   by columns  (kc, MR), packed, if a is stored transposed
 * Single steps of a are broadcast, so both orders are equally fast, and a is packed only where
 * it is not stored so.
 *
 * Each element of c is the sum over blocks of qd_gemm_k_block steps of k, blocks in ascending
 * order, each block summed in ascending k. This holds for every position, so results are
 * bit-identical however c is split. A dot product is two fused multiply-adds, the pair's second
 * element first, with subnormal operands and results flushed to 0. */
#include "device/cpu/dots_impl.h"
#include "device/cpu/gemm/matmul_impl.h"
#include "device/cpu/transpose_impl.h"
#include "device/cpu/vec_math.h"

/* MR x NV vectors of accumulators, NV vectors of b and one of a must fit in registers. Wide rather
 * than tall: each row costs a load. MR is half a vector, or a multiple of one. */
#if QD_VF == 16
enum { MR = 8, NV = 3 };
#elif QD_VF == 8
enum { MR = 4, NV = 3 };
#elif defined(__aarch64__)
enum { MR = 8, NV = 3 };
#else
enum { MR = 4, NV = 2 };
#endif
enum { NR = NV * QD_VF, LINE = 16 /* floats per cache line */ };
_Static_assert(MR % QD_VF == 0 || MR * 2 == QD_VF, "panels of a are whole or half vectors");

#if QD_VF >= 8
typedef float half __attribute__((vector_size(QD_VF * 2)));
#endif

QD_INLINE int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

/* Padded by a cache line, so that the same position in several panels maps to different cache
 * sets. */
QD_INLINE int64_t stride_of_panel(int width, int64_t kc)
{
    return width * kc + LINE;
}

/* From this size in floats on, a packed b that is used once is written with non-temporal stores: it
 * would not stay in the caches, and the lines to overwrite are not read first. A step of a panel
 * must be whole cache lines. */
enum { STREAMED_FLOATS = 1 << 18 };

/* Stores one vector, whose lanes are lines at one step of k, to panels (…, kc, width). `to`: the
 * address of its first lane. */
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
    memcpy(to + stride_of_panel(width, kc), &high, sizeof high);
#else
    (void)kc;
#endif
}

/* The 32 bits of a panel: a float, a bf16 element widened to a float, or two bf16 elements that
 * follow each other in k. */
typedef enum slot { FLOATS, WIDENED, PAIRS } slot;

QD_INLINE slot slot_of(const qd_gemm_block *g, qd_dtype dtype)
{
    return g->pairs ? PAIRS : dtype == QD_F32 ? FLOATS : WIDENED;
}

QD_INLINE const char *element(const void *x, int64_t i, slot kind)
{
    return (const char *)x + i * (kind == FLOATS ? 4 : 2);
}

/* QD_VF steps of one line, which starts at element `at`. */
QD_INLINE vf load_steps(const void *x, int64_t at, slot kind)
{
    return kind == PAIRS ? vf_load_bits(element(x, at, kind)) : vf_load_as(x, at, kind == FLOATS ? QD_F32 : QD_BF16);
}

/* The same from `count` elements, where fewer are left; 0 beyond them. */
QD_INLINE vf load_last_steps(const void *x, int64_t at, int64_t count, slot kind)
{
    vf bits = {0};
    if (kind != PAIRS)
        return vf_load_n_as(x, at, (int)count, kind == FLOATS ? QD_F32 : QD_BF16);
    memcpy(&bits, element(x, at, kind), (size_t)count * 2);
    return bits;
}

/* One step of the first n of QD_VF lines. A pair's second element is `stride` elements after the
 * first, or 0 if it is beyond the end of k. */
QD_INLINE vf load_lines(const void *x, int64_t at, int64_t stride, bool second, int n, slot kind)
{
    if (kind != PAIRS)
        return n == QD_VF ? load_steps(x, at, kind) : load_last_steps(x, at, n, kind);
    vh low = {0}, high = {0};
    memcpy(&low, element(x, at, kind), n == QD_VF ? sizeof low : (size_t)n * 2);
    if (second)
        memcpy(&high, element(x, at + stride, kind), n == QD_VF ? sizeof high : (size_t)n * 2);
    return (vf)((vu)vf_from_bf16(high) | (vu)vf_from_bf16(low) >> 16);
}

/* Prefetch distance, in elements along a row and in rows: the hardware prefetcher follows neither
 * many rows at once nor pieces of rows far apart. */
enum { AHEAD = 64, ROWS_AHEAD = 6 };

/* What to pack: lines [begin, end), of which `lines` exist; of each, steps [from, until) of kc.
 * Line 0 starts at element `first`; each has `left` elements from there on. */
typedef struct part {
    int64_t first, stride, begin, end, lines, from, until, kc, left;
    bool streamed; /* non-temporal stores, where whole panels are written along the rows of x */
} part;

/* by_line: x is stored (lines, k), else (k, lines). */
QD_INLINE void pack_as(float *to, int width, const void *x, const part *of, bool by_line, slot kind)
{
    const int per = kind == PAIRS ? 2 : 1; /* elements of a step */
    const int wide = width > QD_VF ? width : QD_VF; /* lines written together: whole panels and whole vectors */
    const int64_t first = of->first, stride = of->stride, begin = of->begin, end = of->end;
    const int64_t lines = of->lines, from = of->from, until = of->until, kc = of->kc;
    if (by_line) {
        for (int64_t l = begin; l < end; l += QD_VF) {
            float *out = to + l / width * stride_of_panel(width, kc) + l % width + from * width;
            int here = lines - l < QD_VF ? (int)(lines - l > 0 ? lines - l : 0) : QD_VF;
            for (int64_t p = from; p < until; p += QD_VF, out += QD_VF * width) {
                int steps = until - p < QD_VF ? (int)(until - p) : QD_VF;
                int64_t at = first + l * stride + p * per, count = smaller(steps * per, of->left - p * per);
                vf r[QD_VF];
                if (here == QD_VF && count == QD_VF * per) {
#pragma GCC unroll 16
                    for (int i = 0; i < QD_VF; i++) {
                        __builtin_prefetch(element(x, at + i * stride + AHEAD * per, kind), 0, 2);
                        r[i] = load_steps(x, at + i * stride, kind);
                    }
                    transpose_square(r);
#pragma GCC unroll 16
                    for (int i = 0; i < QD_VF; i++)
                        put_lanes(out + i * width, width, kc, r[i]);
                } else {
#pragma GCC unroll 16
                    for (int i = 0; i < QD_VF; i++)
                        r[i] = i < here ? load_last_steps(x, at + i * stride, count, kind) : (vf){0};
                    transpose_square(r);
                    for (int i = 0; i < steps; i++)
                        put_lanes(out + i * width, width, kc, r[i]);
                }
            }
        }
        return;
    }
    for (int64_t p = from; p < until; p++) { /* along the rows of x, which are long */
        const bool second = (p + 1) * per <= of->left;
        int64_t at = first + p * per * stride, l = begin, next_panels = wide / width * stride_of_panel(width, kc);
        float *out = to + begin / width * stride_of_panel(width, kc) + p * width; /* begin is a multiple of the panel width */
        int64_t whole = end < lines ? end : lines;
        for (; l + wide <= whole; l += wide, out += next_panels) {
#pragma GCC unroll 4
            for (int v = 0; v < wide; v += QD_VF) {
#pragma GCC unroll 2
                for (int e = 0; e < per; e++)
                    __builtin_prefetch(element(x, at + l + v + (ROWS_AHEAD + e) * stride, kind), 0, 2);
                vf lanes = load_lines(x, at + l + v, stride, second, QD_VF, kind);
                if (width >= QD_VF && of->streamed)
                    stream_store(out + v, lanes);
                else
                    put_lanes(out + v, width, kc, lanes);
            }
        }
        for (; l < end; l += wide, out += next_panels)
            for (int v = 0; v < wide; v += QD_VF) {
                int64_t rest = lines - l - v;
                int here = rest < QD_VF ? (int)(rest > 0 ? rest : 0) : QD_VF;
                put_lanes(out + v, width, kc, load_lines(x, at + l + v, stride, second, here, kind));
            }
    }
}

QD_INLINE void pack_slots(float *to, int width, const void *x, const part *of, bool by_line, slot kind)
{
    if (kind == FLOATS)
        pack_as(to, width, x, of, by_line, FLOATS);
    else if (kind == WIDENED)
        pack_as(to, width, x, of, by_line, WIDENED);
    else
        pack_as(to, width, x, of, by_line, PAIRS);
}

/* to (panels, MR, kc) = rows of x, which are bf16: in fp32, or in pairs. */
static void pack_rows(float *to, const void *x, const part *of, bool pairs)
{
    for (int64_t l = of->begin; l < of->end; l++) {
        float *out = to + l / MR * stride_of_panel(MR, of->kc) + l % MR * of->kc + of->from;
        const int64_t at = of->first + l * of->stride, count = of->until - of->from;
        if (l >= of->lines || pairs)
            memset(out, 0, (size_t)count * sizeof *out);
        if (l >= of->lines)
            continue;
        if (pairs)
            memcpy(out, element(x, at + 2 * of->from, PAIRS), (size_t)smaller(2 * count, of->left - 2 * of->from) * 2);
        else
            QD_FOR_VECTORS(p, n, count, { vec_store(out, p, vec_load(x, at + of->from + p, n, QD_BF16), n, QD_F32); });
    }
}

static void pack_a(const qd_gemm_block *g, float *to, int64_t begin, int64_t end, int64_t from, int64_t until)
{
    const qd_matmul_args *a = g->args;
    const int64_t k = qd_gemm_element(g->k, g->pairs);
    part of = {.first = a->trans_a ? k * a->lda + g->m : g->m * a->lda + k, .stride = a->lda, .begin = begin, .end = end,
               .lines = g->rows, .from = from, .until = until, .kc = g->kc, .left = a->k - k};
    if (a->trans_a)
        pack_slots(to, MR, a->a, &of, false, slot_of(g, a->a_dtype));
    else
        pack_rows(to, a->a, &of, g->pairs);
}

/* Panels of `width` columns, stored for kc steps: those of the block, or more. */
QD_INLINE void pack_b_as(const qd_gemm_block *g, int width, int64_t kc, float *to, int64_t begin, int64_t end, int64_t from, int64_t until)
{
    const qd_matmul_args *a = g->args;
    const int64_t k = qd_gemm_element(g->k, g->pairs);
    part of = {.first = a->trans_b ? g->n * a->ldb + k : k * a->ldb + g->n, .stride = a->ldb, .begin = begin, .end = end,
               .lines = g->cols, .from = from, .until = until, .kc = kc, .left = a->k - k,
               .streamed = !g->b_stays && g->cols * g->kc >= STREAMED_FLOATS};
    pack_slots(to, width, a->b, &of, a->trans_b, slot_of(g, a->b_dtype));
    if (of.streamed)
        stream_fence();
}

static void pack_b(const qd_gemm_block *g, float *to, int64_t begin, int64_t end, int64_t from, int64_t until)
{
    pack_b_as(g, NR, g->kc, to, begin, end, from, until);
}

static int64_t offset_a(int64_t line, int64_t kc)
{
    return line / MR * stride_of_panel(MR, kc);
}

static int64_t offset_b(int64_t line, int64_t kc)
{
    return line / NR * stride_of_panel(NR, kc);
}

typedef struct tile {
    int64_t kc;
    const char *a;
    const float *b;
    int64_t a_row;    /* bytes between the rows of a panel stored by rows */
    const char *next; /* prefetched: a later panel, in MR pieces, `next_row` bytes apart */
    int64_t next_row, next_step; /* one cache line of each piece every four steps, `next_step` bytes apart */
    const vf *bias;
    bool add;
    float *c;
    int64_t ldc;
    const char *expected; /* prefetched for writing: c, or where its values go afterwards */
    int64_t expected_row; /* bytes */
} tile;

#if defined(__AVX512F__)
#include "device/cpu/gemm/tile_avx512_impl.h"
#else
/* Cache lines per piece of the next panel that a tile of kc steps prefetches: one every four steps
 * of a row of c. */
QD_INLINE int64_t lines_fetched(int64_t kc)
{
    return kc / 4 / MR;
}

/* Rows of a are addressed relative to every third row: base, base + row and base + 2 row are
 * addressing modes of one instruction. */
enum { BASES = (MR + 2) / 3 };

/* sum (MR, NV) += column of a (MR) x row of b (NR), of floats or of pairs */
QD_INLINE void micro_step(vf sum[MR][NV], const char *const base[BASES], int64_t row, int64_t at, const float *restrict b, bool pairs)
{
    vf line[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++)
        line[j] = vf_load(b + j * QD_VF);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
        float value;
        memcpy(&value, base[i / 3] + i % 3 * row + at, sizeof value);
        vf_factor x = vf_factor_of(value);
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            sum[i][j] = pairs ? add_dot(sum[i][j], x, line[j]) : vf_add_product(sum[i][j], x, line[j]);
    }
}

/* c (MR, NR) = a · b [+ bias] [+ c]. row, a_step: bytes between a panel's rows and steps. */
QD_INLINE void micro_tile_as(const tile *t, int64_t row, int64_t a_step, bool pairs)
{
    vf sum[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            sum[i][j] = (vf){0};
    const char *base[BASES];
    int64_t kc = t->kc;
    QD_HIDE(row);
#pragma GCC unroll 8
    for (int i = 0; i < BASES; i++) {
        base[i] = t->a + 3 * i * row;
        QD_HIDE(base[i]); /* else the compiler would use one pointer for all rows and a register per offset */
    }
    const float *restrict b = t->b;
    float *restrict c = t->c;
    /* Rows of c are prefetched one at a time: all at once would delay the loads of a and b. */
    int64_t p = 0, fours = kc / 4 / MR;
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 4
        for (int j = 0; j < NR; j += LINE)
            __builtin_prefetch(t->expected + r * t->expected_row + 4 * j, 1);
        __builtin_prefetch(t->expected + r * t->expected_row + 4 * NR - 4, 1);
        const char *next = t->next + r * t->next_row;
        for (int64_t four = 0; four < fours; four++, p += 4, b += 4 * NR, next += t->next_step) {
            __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++)
                micro_step(sum, base, row, q * a_step, b + q * NR, pairs);
#pragma GCC unroll 8
            for (int i = 0; i < BASES; i++)
                base[i] += 4 * a_step;
        }
    }
    for (; p < kc; p++, b += NR) {
        micro_step(sum, base, row, 0, b, pairs);
#pragma GCC unroll 8
        for (int i = 0; i < BASES; i++)
            base[i] += a_step;
    }
    if (t->bias) {
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++)
                sum[i][j] += t->bias[j];
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
            float *to = c + i * t->ldc + j * QD_VF;
            vf_store(to, t->add ? vf_load(to) + sum[i][j] : sum[i][j]);
        }
    }
}

static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void micro_tile_rows(const tile *t)
{
    micro_tile_as(t, t->a_row, 4, false);
}

static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void micro_tile_columns(const tile *t)
{
    micro_tile_as(t, 4, MR * 4, false);
}

#ifdef QD_ISA_emulated
#define QD_TILE_PAIRS 1
static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void pairs_by_rows(const tile *t)
{
    micro_tile_as(t, t->a_row, 4, true);
}

static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void pairs_by_columns(const tile *t)
{
    micro_tile_as(t, 4, MR * 4, true);
}

static void micro_tile_pair_rows(const tile *t)
{
    const unsigned saved = flush_subnormals();
    pairs_by_rows(t);
    restore_subnormals(saved);
}

static void micro_tile_pair_columns(const tile *t)
{
    const unsigned saved = flush_subnormals();
    pairs_by_columns(t);
    restore_subnormals(saved);
}
#endif
#endif
#ifndef QD_TILE_PAIRS /* the device chooses pairs only where this instruction set has dot products */
#define micro_tile_pair_rows micro_tile_rows
#define micro_tile_pair_columns micro_tile_columns
#endif

#include "device/cpu/gemm/row_impl.h"

typedef void micro_tile(const tile *t);

/* A tile that extends beyond the edge of c: computed in a full tile on the stack. */
static void edge_tile(micro_tile *micro, const tile *t, int rows, int cols)
{
    float side[MR * NR] __attribute__((aligned(64)));
    if (t->add) {
        memset(side, 0, sizeof side);
        for (int i = 0; i < rows; i++)
            memcpy(side + i * NR, t->c + i * t->ldc, (size_t)cols * sizeof(float));
    }
    tile whole = *t;
    whole.c = side;
    whole.ldc = NR;
    micro(&whole);
    for (int i = 0; i < rows; i++)
        memcpy(t->c + i * t->ldc, side + i * NR, (size_t)cols * sizeof(float));
}

/* Rounds finished sums (rows, cols; row stride ld) into a bf16 c, from row m and column n on.
 * before: sums of earlier blocks of k, row stride ld_before, or NULL. */
QD_INLINE void round_sums(const qd_matmul_args *a, int64_t m, int64_t n, const float *sums, int64_t ld, const float *before,
                          int64_t ld_before, int64_t rows, int64_t cols)
{
    const int64_t ldc = a->ldc;
    const bool accumulate = a->accumulate;
    uint16_t *c = (uint16_t *)a->c + m * ldc + n;
    for (int64_t i = 0; i < rows; i++, c += ldc) {
        QD_FOR_VECTORS(j, here, cols, {
            vf value = vec_load(sums + i * ld, j, here, QD_F32);
            if (before)
                value = vec_load(before + i * ld_before, j, here, QD_F32) + value;
            if (accumulate)
                value += vec_load(c, j, here, QD_BF16);
            vec_store(c, j, value, here, QD_BF16);
        });
    }
}

/* A tile of a bf16 c in the last block of k: rounded from the stack. */
static void rounded_tile(micro_tile *micro, const tile *t, const qd_matmul_args *a, int64_t m, int64_t n, const float *before,
                         int64_t ld_before, int rows, int cols)
{
    float side[MR * NR] __attribute__((aligned(64)));
    tile whole = *t;
    whole.c = side;
    whole.ldc = NR;
    whole.add = false;
    micro(&whole);
    if (cols == NR)
        round_sums(a, m, n, side, NR, before, ld_before, rows, NR);
    else
        round_sums(a, m, n, side, NR, before, ld_before, rows, cols);
}

/* Memory layout of the panels of a. */
typedef struct layout {
    int64_t row, panel; /* bytes between the rows of a panel, and between panels */
    bool by_rows;
} layout;

/* a is read in place and widened to fp32, a panel at a time. */
static bool widens(const qd_gemm_block *g)
{
    return g->direct && qd_gemm_widens(g->args, g->pairs);
}

static layout layout_of_a(const qd_gemm_block *g)
{
    const qd_matmul_args *a = g->args;
    if (g->direct) {
        const int64_t row = a->lda * (a->a_dtype == QD_BF16 ? 2 : 4);
        return (layout){.row = row, .panel = MR * row, .by_rows = true};
    }
    return (layout){.row = 4 * (a->trans_a ? 1 : g->kc), .panel = 4 * stride_of_panel(MR, g->kc), .by_rows = !a->trans_a};
}

/* What a tile prefetches of the next panel: its share, 1 / staying, of every piece. row: bytes
 * between pieces; length: floats of a piece. */
static void share_next(tile *t, const void *panel, int64_t row, int64_t length, int64_t share, int64_t staying)
{
    int64_t lines = (length / LINE + staying - 1) / staying, fetched = lines_fetched(t->kc);
    t->next = (const char *)panel + 4 * share * lines * LINE;
    t->next_row = row;
    t->next_step = fetched ? 4 * ((lines * LINE + fetched - 1) / fetched) : 0;
}

/* For the thread sanitizer: the memory that the tiles of a block read and write. c is NULL if they
 * write a bf16 c, which the sanitizer sees. */
static void show_block(const qd_gemm_block *g, float *c, int64_t ldc, int64_t high, int64_t wide)
{
    layout a = layout_of_a(g);
    if (!g->direct)
        show_reads(g->a, high, a.panel, MR * g->kc);
    else if (!widens(g))
        show_reads(g->a, g->rows, a.row, g->kc);
    show_reads(g->b, wide, 4 * stride_of_panel(NR, g->kc), NR * g->kc);
    if (c)
        show_writes(c, g->rows, ldc, g->cols);
}

/* to (MR, kc; row stride `ld`) = a panel of an a that is read in place, but cannot be multiplied
 * there: bf16 elements become floats, and rows beyond the last one 0. */
static void copy_panel(float *to, int64_t ld, const qd_gemm_block *g, const char *rows, int64_t row, int64_t count)
{
    for (int64_t i = 0; i < MR; i++, to += ld, rows += row) {
        if (i >= count)
            memset(to, 0, (size_t)g->kc * sizeof *to);
        else if (widens(g))
            QD_FOR_VECTORS(p, n, g->kc, { vec_store(to, p, vec_load(rows, p, n, QD_BF16), n, QD_F32); });
        else
            memcpy(to, rows, (size_t)g->kc * sizeof *to);
    }
}

static void multiply(const qd_gemm_block *g)
{
    const qd_matmul_args *args = g->args;
    const bool direct = args->c_dtype == QD_F32, add = g->k > 0 || (args->accumulate && direct);
    const bool use_bias = args->bias && g->k == 0, rounds = !direct && g->k + g->kc >= qd_gemm_steps(args, g->pairs);
    const int size = direct ? 4 : 2;
    float *c = direct ? (float *)args->c + g->m * args->ldc + g->n : g->sums; /* NULL: there is only one block of k */
    char *values = (char *)args->c + (g->m * args->ldc + g->n) * size;
    int64_t ldc = direct ? args->ldc : g->ld_sums, kc = g->kc;
    int64_t high = (g->rows + MR - 1) / MR, wide = (g->cols + NR - 1) / NR;
    layout a = layout_of_a(g);
    show_block(g, rounds ? NULL : c, ldc, high, wide);
    micro_tile *micro = g->pairs ? (a.by_rows ? micro_tile_pair_rows : micro_tile_pair_columns)
                                 : (a.by_rows ? micro_tile_rows : micro_tile_columns);
    const char *panels = g->a;
    /* The rows are a line apart from a whole page, so that they do not share cache sets. */
    float copied[MR * (QD_GEMM_KC + LINE)] __attribute__((aligned(64)));
    const int64_t ld_copied = kc + LINE;
    int64_t passing = g->b_stays ? high : wide, staying = g->b_stays ? wide : high, held = -1; /* held: the copied panel */
    tile t = {.kc = kc, .add = add, .ldc = ldc};
    for (int64_t o = 0; o < passing; o++) {
        for (int64_t s = 0; s < staying; s++) {
            int64_t i = g->b_stays ? o : s, j = g->b_stays ? s : o;
            int mr = (int)smaller(MR, g->rows - i * MR), nr = (int)smaller(NR, g->cols - j * NR);
            const bool copies = g->direct && (mr < MR || widens(g));
            if (copies && held != i)
                copy_panel(copied, ld_copied, g, panels + i * a.panel, a.row, mr);
            held = copies ? i : held;
            t.a = copies ? (const char *)copied : panels + i * a.panel;
            t.a_row = copies ? 4 * ld_copied : a.row;
            t.b = g->b + j * stride_of_panel(NR, kc);
            t.c = c ? c + i * MR * ldc + j * NR : NULL;
            t.expected = rounds || direct ? values + (i * MR * args->ldc + j * NR) * size : (const char *)t.c;
            t.expected_row = rounds || direct ? args->ldc * size : 4 * ldc;
            vf bias[NV] = {0};
            for (int v = 0; use_bias && v * QD_VF < nr; v++)
                bias[v] = vf_load_n_as(args->bias, g->n + j * NR + v * QD_VF, (int)smaller(nr - v * QD_VF, QD_VF),
                                       args->b_dtype);
            t.bias = use_bias ? bias : NULL;
            if (o + 1 == passing)
                share_next(&t, t.b, 0, 0, 0, 1);
            else if (!g->b_stays)
                share_next(&t, t.b + stride_of_panel(NR, kc), 4 * (NR * kc / MR), NR * kc / MR, s, staying);
            else
                share_next(&t, panels + (i + 1) * a.panel, a.by_rows ? a.row : 4 * kc, widens(g) ? kc / 2 : kc, s, staying);
            if (rounds)
                rounded_tile(micro, &t, args, g->m + i * MR, g->n + j * NR, add ? t.c : NULL, ldc, mr, nr);
            else if (mr == MR && nr == NR)
                micro(&t);
            else
                edge_tile(micro, &t, mr, nr);
        }
    }
}

/* Processors with AVX-512 have L2 caches of 1 MiB or more, others often of half that. */
enum { OWN_FLOATS = (QD_VF == 16 ? 176 : 112) << 10 };

const qd_cpu_gemm QD_ISA_NAME(qd_cpu_gemm) = {
    .mr = MR, .nr = NR, .row_step = MR > QD_VF ? MR : QD_VF, .tile_steps = 1, .chunk_floats = 96 << 10, .own_floats = OWN_FLOATS,
    .offset_a = offset_a, .offset_b = offset_b,
    .pack_a = pack_a, .pack_b = pack_b, .multiply = multiply, .multiply_row = multiply_row,
};

#if defined(__AVX512F__) || defined(QD_ISA_emulated)
#include "device/cpu/gemm/gemm_amx_impl.h"
#endif
