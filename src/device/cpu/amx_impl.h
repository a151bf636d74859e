/* AMX: a block of 32 x 32 sums in four tile registers: by instructions, or emulated. Included by
 * *_isa.c files that are compiled for AVX-512 or its emulation.
 *
 * A tile holds 16 rows of 64 bytes. TDPBF16PS multiplies a tile of a (16 rows, 16 pairs of k) by a
 * tile of b (16 pairs of k, 16 columns of pairs), and adds to a tile of fp32 sums:
 *   c[m][n] += (sum over k of a[m][2k] b[k][2n]) + (sum over k of a[m][2k+1] b[k][2n+1])
 * Both inner sums start at 0 and are fused multiply-adds in ascending k. All operations round to
 * nearest even, and subnormal operands and results are 0, whatever MXCSR says. The emulation
 * computes exactly this (Intel's manual, volume 2, TDPBF16PS) in multiply-adds, so that tests cover
 * packing, edges and blocking on machines without AMX. */
#ifndef QD_DEVICE_CPU_AMX_IMPL_H
#define QD_DEVICE_CPU_AMX_IMPL_H

#ifdef QD_ISA_emulated
#include "device/cpu/dots_emulated_impl.h"
#else
#include "device/cpu/amx_registers_impl.h"
#endif

enum {
    AMX_LINES = 32,             /* rows and columns of a block: two tiles each way */
    AMX_STEPS = 16,             /* pairs of k in a tile */
    AMX_WIDTH = AMX_LINES * 4,  /* bytes of a step of b */
};

/* c (32, 32; row stride ldc floats) = a · b [+ c, if `add`] over `tiles` times 16 pairs of k. b is
 * (k, 32) pairs. Rows of a are a_row bytes apart, the next 16 pairs of a row a_step bytes. Every
 * tile prefetches `fetched` cache lines from `next` on. */
typedef struct amx_block {
    const char *a, *b, *next;
    int64_t a_row, a_step, tiles, fetched;
    bool add;
    float *c;
    int64_t ldc;
} amx_block;

#ifndef QD_ISA_emulated
/* tmm0 .. 3: sums; 4, 5: rows of a; 6, 7: columns of b. Four loads of 8 cycles for four TDPBF16PS
 * of 16: loading is not the limit as long as the operands are in the L2 cache. */
static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void amx_multiply_tiles(const amx_block *t)
{
    const char *a = t->a, *below = t->a + 16 * t->a_row, *b = t->b, *next = t->next;
    if (t->add) {
        AMX_LOAD(0, t->c, 4 * t->ldc);
        AMX_LOAD(1, t->c + 16, 4 * t->ldc);
        AMX_LOAD(2, t->c + 16 * t->ldc, 4 * t->ldc);
        AMX_LOAD(3, t->c + 16 * t->ldc + 16, 4 * t->ldc);
    } else {
        AMX_ZERO(0);
        AMX_ZERO(1);
        AMX_ZERO(2);
        AMX_ZERO(3);
    }
    for (int64_t i = 0; i < t->tiles; i++) {
        AMX_LOAD(6, b, AMX_WIDTH);
        AMX_LOAD(4, a, t->a_row);
        AMX_DOT(0, 4, 6);
        AMX_LOAD(7, b + AMX_WIDTH / 2, AMX_WIDTH);
        AMX_DOT(1, 4, 7);
        AMX_LOAD(5, below, t->a_row);
        AMX_DOT(2, 5, 6);
        AMX_DOT(3, 5, 7);
        for (int64_t line = 0; line < t->fetched; line++, next += 64)
            __builtin_prefetch(next, 0, 2);
        a += t->a_step;
        below += t->a_step;
        b += AMX_STEPS * AMX_WIDTH;
    }
    AMX_STORE(0, t->c, 4 * t->ldc);
    AMX_STORE(1, t->c + 16, 4 * t->ldc);
    AMX_STORE(2, t->c + 16 * t->ldc, 4 * t->ldc);
    AMX_STORE(3, t->c + 16 * t->ldc + 16, 4 * t->ldc);
}
#else
enum { EMULATED_ROWS = 4 }; /* rows whose sums are in registers at once */

/* sum[r][v] += the product of one tile, for rows r of a and vectors v of columns. */
QD_INLINE void amx_emulate_tile(vf sum[EMULATED_ROWS][2], const char *a, int64_t a_row, const char *b)
{
    vf even[EMULATED_ROWS][2] = {{{0}}}, odd[EMULATED_ROWS][2] = {{{0}}};
    for (int k = 0; k < AMX_STEPS; k++) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            const vu pairs = (vu)vf_load_bits(b + k * AMX_WIDTH + v * 64);
#pragma GCC unroll 4
            for (int r = 0; r < EMULATED_ROWS; r++) {
                uint32_t bits;
                memcpy(&bits, a + r * a_row + 4 * k, sizeof bits);
                even[r][v] = vf_add_product(even[r][v], (vf)((vu){0} + (bits << 16)), (vf)(pairs << 16));
                odd[r][v] = vf_add_product(odd[r][v], (vf)((vu){0} + (bits & 0xffff0000u)), (vf)(pairs & 0xffff0000u));
            }
        }
    }
    for (int r = 0; r < EMULATED_ROWS; r++)
        for (int v = 0; v < 2; v++)
            sum[r][v] = sum[r][v] + (even[r][v] + odd[r][v]);
}

static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void amx_emulate(const amx_block *t)
{
    for (int i = 0; i < AMX_LINES; i += EMULATED_ROWS) {
        vf sum[EMULATED_ROWS][2] = {{{0}}};
        for (int r = 0; r < EMULATED_ROWS && t->add; r++)
            for (int v = 0; v < 2; v++)
                sum[r][v] = vf_load(t->c + (i + r) * t->ldc + v * QD_VF);
        for (int64_t k = 0; k < t->tiles; k++)
            amx_emulate_tile(sum, t->a + i * t->a_row + k * t->a_step, t->a_row, t->b + k * AMX_STEPS * AMX_WIDTH);
        for (int r = 0; r < EMULATED_ROWS; r++)
            for (int v = 0; v < 2; v++)
                vf_store(t->c + (i + r) * t->ldc + v * QD_VF, sum[r][v]);
    }
}

QD_INLINE void amx_begin(void)
{
}

QD_INLINE void amx_end(void)
{
}

static void amx_multiply_tiles(const amx_block *t)
{
    const unsigned saved = flush_subnormals();
    amx_emulate(t);
    restore_subnormals(saved);
}
#endif

#endif
