/* GEMM of bf16 operands with AMX tiles. Included by gemm_isa.c for AVX-512 and its
 * emulation; shares its packing.
 *
 * Panels of b are (k, 32) pairs, as for dot products. Panels of a are 32 rows: in place if a is not
 * transposed and k is whole tiles, else packed as (tiles of k, 32, 16) pairs. The last tile of k is
 * padded with 0. A block of k is summed in tiles from 0 on and then added to c, like the blocks of
 * the other register tiles, so neither threads nor blocking change a bit. */
#ifndef QD_DEVICE_CPU_GEMM_GEMM_AMX_IMPL_H
#define QD_DEVICE_CPU_GEMM_GEMM_AMX_IMPL_H

#include "device/cpu/amx_impl.h"

enum { AMX_PANEL_STEP = AMX_LINES * AMX_STEPS }; /* pairs of a panel for one tile of k */

/* Steps of k with the padding of the last tile. */
QD_INLINE int64_t whole_tiles(int64_t kc)
{
    return (kc + AMX_STEPS - 1) / AMX_STEPS * AMX_STEPS;
}

static int64_t amx_offset(int64_t line, int64_t kc)
{
    return line / AMX_LINES * stride_of_panel(AMX_LINES, whole_tiles(kc));
}

/* 16 steps from p on of 16 lines of op(a) from line l on. `left`: elements of k from the block's
 * first on; lines and elements beyond the last ones are 0. */
QD_INLINE void load_pairs(vf *square, const qd_gemm_block *g, int64_t l, int64_t p, int64_t left)
{
    const qd_matmul_args *a = g->args;
    const int here = (int)(g->rows - l < 0 ? 0 : smaller(g->rows - l, QD_VF));
    const int64_t k = qd_gemm_element(g->k + p, true);
    if (a->trans_a) {
        const int64_t at = k * a->lda + g->m + l;
#pragma GCC unroll 16
        for (int i = 0; i < QD_VF; i++) {
            const int64_t element_k = 2 * (p + i);
            square[i] = element_k < left ? load_lines(a->a, at + 2 * i * a->lda, a->lda, element_k + 1 < left, here, PAIRS) : (vf){0};
        }
        transpose_square(square);
        return;
    }
    const int64_t at = (g->m + l) * a->lda + k, count = smaller(left - 2 * p, 2 * QD_VF);
    for (int i = 0; i < QD_VF; i++)
        square[i] = i < here ? load_last_steps(a->a, at + i * a->lda, count, PAIRS) : (vf){0};
}

static void amx_pack_a(const qd_gemm_block *g, float *to, int64_t begin, int64_t end, int64_t from, int64_t until)
{
    const int64_t left = g->args->k - qd_gemm_element(g->k, true);
    for (int64_t l = begin; l < end; l += QD_VF) {
        float *out = to + amx_offset(l, g->kc) + from * AMX_LINES + l % AMX_LINES * AMX_STEPS;
        for (int64_t p = from; p < until; p += AMX_STEPS, out += AMX_PANEL_STEP) {
            vf square[QD_VF];
            load_pairs(square, g, l, p, left);
#pragma GCC unroll 16
            for (int i = 0; i < QD_VF; i++)
                vf_store(out + i * AMX_STEPS, square[i]);
        }
    }
}

static void amx_pack_b(const qd_gemm_block *g, float *to, int64_t begin, int64_t end, int64_t from, int64_t until)
{
    const int64_t padded = whole_tiles(g->kc);
    pack_b_as(g, AMX_LINES, padded, to, begin, end, from, until);
    for (int64_t l = begin; l < end && until == g->kc && g->kc < padded; l += AMX_LINES)
        memset(to + amx_offset(l, g->kc) + g->kc * AMX_LINES, 0, (size_t)((padded - g->kc) * AMX_LINES) * sizeof *to);
}

/* Adds to a finished block of sums (32, 32) what c needs, and writes rows x cols of it: to c, or to
 * sums of several blocks of k. */
static void amx_finish(const qd_gemm_block *g, float *side, int64_t m, int64_t n, int rows, int cols, float *c, int64_t ldc, bool add)
{
    const qd_matmul_args *a = g->args;
    const bool use_bias = a->bias && g->k == 0;
    for (int i = 0; i < rows && (c || use_bias); i++) {
        float *line = side + i * AMX_LINES, *to = c ? c + i * ldc : line;
        QD_FOR_VECTORS(j, here, cols, {
            vf value = vec_load(line, j, here, QD_F32);
            if (use_bias)
                value += vf_load_n_as(a->bias, g->n + n + j, here, a->b_dtype);
            if (add)
                value += vec_load(to, j, here, QD_F32);
            vec_store(to, j, value, here, QD_F32);
        });
    }
    if (!c)
        round_sums(a, g->m + m, g->n + n, side, AMX_LINES, NULL, 0, rows, cols);
}

/* Rows of op(a) beyond the last one must not be read: `edge` (32, kc) pairs gets the last panel of
 * an a that is read in place. */
static void amx_copy_edge(char *edge, const char *panel, int64_t row, int64_t rows, int64_t bytes)
{
    memset(edge + rows * bytes, 0, (size_t)((AMX_LINES - rows) * bytes));
    for (int64_t i = 0; i < rows; i++)
        memcpy(edge + i * bytes, panel + i * row, (size_t)bytes);
}

static void amx_multiply(const qd_gemm_block *g)
{
    const qd_matmul_args *args = g->args;
    const bool direct = args->c_dtype == QD_F32, add = g->k > 0 || (args->accumulate && direct);
    float *c = direct ? (float *)args->c + g->m * args->ldc + g->n : g->sums; /* NULL: tiles are rounded into c */
    const int64_t ldc = direct ? args->ldc : g->ld_sums, padded = whole_tiles(g->kc);
    const int64_t high = (g->rows + AMX_LINES - 1) / AMX_LINES, wide = (g->cols + AMX_LINES - 1) / AMX_LINES;
    const int64_t stride = 4 * stride_of_panel(AMX_LINES, padded), a_row = g->direct ? 2 * args->lda : 4 * AMX_STEPS;
    const int64_t a_panel = g->direct ? AMX_LINES * a_row : stride;
    const char *panels = g->a, *b = (const char *)g->b;
    show_reads(g->a, g->direct ? g->rows : high, g->direct ? a_row : stride, g->direct ? g->kc : AMX_LINES * padded);
    show_reads(g->b, wide, stride, AMX_LINES * padded);
    if (c)
        show_writes(c, g->rows, ldc, g->cols);
    char edge[AMX_LINES * QD_GEMM_KC * 4];
    const int64_t edge_rows = g->direct ? g->rows % AMX_LINES : 0;
    if (edge_rows)
        amx_copy_edge(edge, panels + (high - 1) * a_panel, a_row, edge_rows, 4 * g->kc);
    const int64_t passing = g->b_stays ? high : wide, staying = g->b_stays ? wide : high;
    amx_block t = {.tiles = padded / AMX_STEPS};
    /* Each block fetches its share of the next panel that passes by; rows of an a in place are left
     * to the hardware. */
    const int64_t lines = g->b_stays && g->direct ? 0 : padded * AMX_LINES / LINE, blocks = staying * t.tiles;
    t.fetched = blocks > 0 ? (lines + blocks - 1) / blocks : 0;
    for (int64_t o = 0; o < passing; o++) {
        for (int64_t s = 0; s < staying; s++) {
            const int64_t i = g->b_stays ? o : s, j = g->b_stays ? s : o;
            const bool on_edge = edge_rows && i == high - 1;
            const int rows = (int)smaller(AMX_LINES, g->rows - i * AMX_LINES), cols = (int)smaller(AMX_LINES, g->cols - j * AMX_LINES);
            float side[AMX_LINES * AMX_LINES] __attribute__((aligned(64)));
            float *to = c ? c + i * AMX_LINES * ldc + j * AMX_LINES : NULL;
            const bool in_place = to && !add && !(args->bias && g->k == 0) && rows == AMX_LINES && cols == AMX_LINES;
            t.a = on_edge ? edge : panels + i * a_panel;
            t.a_row = on_edge ? 4 * g->kc : a_row;
            t.a_step = g->direct ? 4 * AMX_STEPS : 4 * AMX_PANEL_STEP;
            t.b = b + j * stride;
            t.next = (g->b_stays ? panels + (o + 1) * a_panel : b + (o + 1) * stride) + s * t.tiles * t.fetched * 64;
            t.c = in_place ? to : side;
            t.ldc = in_place ? ldc : AMX_LINES;
            if (o + 1 == passing)
                t.fetched = 0;
            amx_multiply_tiles(&t);
            if (!in_place)
                amx_finish(g, side, i * AMX_LINES, j * AMX_LINES, rows, cols, to, ldc, add);
        }
    }
    if (g->sums && g->k + g->kc >= qd_gemm_steps(args, g->pairs))
        round_sums(args, g->m, g->n, g->sums, g->ld_sums, NULL, 0, g->rows, g->cols);
}

/* Twice the chunks of the other tiles: a core computes eight times as fast, and its operands must
 * come from its own L2 cache. */
#define AMX_TABLE                                                                                           \
    .mr = AMX_LINES, .nr = AMX_LINES, .row_step = AMX_LINES, .tile_steps = AMX_STEPS, .chunk_floats = 192 << 10, \
    .own_floats = 224 << 10, .offset_a = amx_offset, .offset_b = amx_offset, .pack_a = amx_pack_a, .pack_b = amx_pack_b

static void amx_multiply_gemm(const qd_gemm_block *g)
{
    amx_begin();
    amx_multiply(g);
    amx_end();
}

#ifdef QD_ISA_emulated
const qd_cpu_gemm qd_cpu_gemm_amx_emulated = {AMX_TABLE, .multiply = amx_multiply_gemm};
#else
const qd_cpu_gemm qd_cpu_gemm_amx = {AMX_TABLE, .multiply = amx_multiply_gemm};
#endif

#endif
