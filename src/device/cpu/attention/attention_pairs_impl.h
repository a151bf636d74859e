/* Blocks of bf16 operands for attention with AMX tiles and with dot products: rows as they are, and
 * pairs: two elements that follow each other along the sum, in 32 bits. Included by
 * attention_isa.c. */
#ifndef QD_DEVICE_CPU_ATTENTION_ATTENTION_PAIRS_IMPL_H
#define QD_DEVICE_CPU_ATTENTION_ATTENTION_PAIRS_IMPL_H

#include "device/cpu/attention/attention_blocks_impl.h"

enum { PAIR_ROWS = BLOCK / 2 };

/* The rounded values of two rows, in pairs. */
QD_INLINE vf pair_of(vf even, vf odd)
{
    return (vf)((vf_round_to_bf16(odd) & 0xffff0000u) | vf_round_to_bf16(even) >> 16);
}

/* to (all, dim) = rows of x; the rest 0. */
static void half_rows(uint16_t *to, const void *x, int64_t first, int64_t stride, int rows, int all, int dim)
{
    for (int r = 0; r < rows; r++)
        memcpy(to + r * dim, (const uint16_t *)x + first + r * stride, (size_t)dim * 2);
    memset(to + rows * dim, 0, (size_t)((all - rows) * dim) * 2);
}

/* Pairs along the rows of x, (dim / wide, PAIR_ROWS, wide); rows from `rows` on are 0. */
QD_INLINE void pairs_of_rows(float *to, int wide, const void *x, int64_t first, int64_t stride, int rows, int dim)
{
    for (int r = 0; r < BLOCK; r += 2)
        for (int i = 0; i < dim; i += QD_VF) {
            const uint16_t *at = (const uint16_t *)x + first + r * stride + i;
            vh low = {0}, high = {0};
            if (r < rows)
                memcpy(&low, at, sizeof low);
            if (r + 1 < rows)
                memcpy(&high, at + stride, sizeof high);
            vf_store(to + (i / wide * PAIR_ROWS + r / 2) * wide + i % wide, (vf)((vu)vf_from_bf16(high) | (vu)vf_from_bf16(low) >> 16));
        }
}

/* Pairs along the columns of x: of its transpose, (BLOCK / wide, dim / 2, wide). */
QD_INLINE void pairs_of_columns(float *to, int wide, const void *x, int64_t first, int64_t stride, int rows, int dim)
{
    for (int r = 0; r < BLOCK; r += QD_VF)
        for (int p = 0; p < dim / 2; p += QD_VF) {
            vf square[QD_VF];
#pragma GCC unroll 16
            for (int i = 0; i < QD_VF; i++)
                square[i] = r + i < rows ? vf_load_bits((const uint16_t *)x + first + (r + i) * stride + 2 * p) : (vf){0};
            transpose_square(square);
#pragma GCC unroll 16
            for (int i = 0; i < QD_VF; i++)
                vf_store(to + (r / wide * (dim / 2) + p + i) * wide + r % wide, square[i]);
        }
}

/* to (rows, BLOCK) = rows of s, rounded. */
QD_INLINE void round_rows(uint16_t *to, const float *s, int rows, int keys)
{
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < keys; i += QD_VF)
            vf_store_as(to, r * BLOCK + i, vf_load(s + r * BLOCK + i), QD_BF16);
}

/* In the backward pass, a buffer of rows is followed by the same rows in pairs. */
QD_INLINE float *pairs_behind(float *rows, int64_t ld)
{
    return rows + BLOCK * ld / 2;
}

#endif
