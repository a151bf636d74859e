/* The 8-bit floating-point formats of fp8 training and the scale of a tensor. E4M3 (1 sign, 4
 * exponent and 3 mantissa bits) reaches 448, E5M2 reaches 57344. A tensor is stored as codes and
 * one fp32 scale, or one for each row or block: value = code * scale.
 *
 * Scales are powers of two, the smallest with which none of their values exceeds the format. So
 * scaling never rounds: ranks that choose different scales for parts of one tensor round its
 * values alike, except for those that are subnormal in the format. */
#ifndef QD_BASE_FP8_H
#define QD_BASE_FP8_H

#include "base/half.h"

#include <quadrille/types.h>

/* What has a scale of its own among codes that are stored as (rows, k), along the dimension k that
 * a GEMM sums over. */
typedef enum qd_fp8_scaling {
    QD_FP8_TENSOR,
    QD_FP8_ROWS,
    QD_FP8_VECTORS, /* 128 codes of a row */
    QD_FP8_BLOCKS,  /* 128 codes of 128 rows */
} qd_fp8_scaling;

enum { QD_FP8_BLOCK = 128 };

/* Codes of a row that share a scale, and rows. */
static inline int64_t qd_fp8_scale_length(qd_fp8_scaling scaling, int64_t k)
{
    return scaling == QD_FP8_VECTORS || scaling == QD_FP8_BLOCKS ? QD_FP8_BLOCK : k;
}
static inline int64_t qd_fp8_scale_rows(qd_fp8_scaling scaling, int64_t rows)
{
    return scaling == QD_FP8_TENSOR ? rows : scaling == QD_FP8_BLOCKS ? QD_FP8_BLOCK : 1;
}

/* Index of the scale of row `row` and of the block'th block of k. Vectors: (blocks of k, rows).
 * Blocks: (blocks of rows, blocks of k), rows of a multiple of 4. */
static inline int64_t qd_fp8_scale_index(qd_fp8_scaling scaling, int64_t rows, int64_t k, int64_t row, int64_t block)
{
    const int64_t stride = ((k + QD_FP8_BLOCK - 1) / QD_FP8_BLOCK + 3) / 4 * 4;
    switch (scaling) {
    case QD_FP8_TENSOR: return 0;
    case QD_FP8_ROWS: return row;
    case QD_FP8_VECTORS: return block * rows + row;
    case QD_FP8_BLOCKS: return row / QD_FP8_BLOCK * stride + block;
    }
    return 0;
}
static inline int64_t qd_fp8_scale_count(qd_fp8_scaling scaling, int64_t rows, int64_t k)
{
    return rows < 1 || k < 1 ? 1 : qd_fp8_scale_index(scaling, rows, k, rows - 1, (k - 1) / QD_FP8_BLOCK) + 1;
}

static inline bool qd_dtype_is_fp8(qd_dtype dtype)
{
    return dtype == QD_F8E4M3 || dtype == QD_F8E5M2;
}

static inline float qd_e5m2_to_f32(uint8_t byte)
{
    return qd_f16_to_f32((uint16_t)(byte << 8)); /* fp16 with 2 instead of 10 mantissa bits */
}

static inline float qd_fp8_to_f32(uint8_t byte, qd_dtype dtype)
{
    return dtype == QD_F8E5M2 ? qd_e5m2_to_f32(byte) : qd_e4m3_to_f32(byte);
}

/* Rounds to nearest even. What exceeds the format, infinities included, becomes its largest value;
 * a NaN stays one. */
static inline uint8_t qd_f32_to_fp8(float value, qd_dtype dtype)
{
    const bool wide = dtype == QD_F8E5M2; /* in exponent */
    const uint32_t shift = wide ? 21 : 20, bias = wide ? 112u << 23 : 120u << 23, most = wide ? 0x7bu : 0x7eu;
    const float steps = wide ? 0x1p7f : 0x1p14f; /* 2^23 times the smallest value: adding it rounds a subnormal number */
    uint32_t bits = qd_f32_bits(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu, code;
    if (magnitude > 0x7f800000u)
        code = 0x7fu;
    else if (magnitude >= bias + (1u << 23))
        code = (magnitude - bias + (1u << (shift - 1)) - 1u + (magnitude >> shift & 1u)) >> shift;
    else
        code = qd_f32_bits(qd_f32_from_bits(magnitude) + steps) - qd_f32_bits(steps);
    if (magnitude <= 0x7f800000u && code > most)
        code = most;
    return (uint8_t)(sign | code);
}

/* The scale of a tensor whose largest magnitude is `amax`: 1 if that is 0, NaN if it is not finite,
 * so that every product with the tensor becomes NaN too and the step is reported. The reciprocal of
 * a scale is exact. */
static inline float qd_fp8_scale(float amax, qd_dtype dtype)
{
    uint32_t bits = qd_f32_bits(amax) & 0x7fffffffu, exponent = bits >> 23, below = dtype == QD_F8E5M2 ? 15 : 8;
    if (bits == 0)
        return 1.0f;
    if (exponent == 255)
        return qd_f32_from_bits(0x7fc00000u);
    exponent += (bits & 0x7fffffu) > 0x600000u; /* both formats end at 1.75 times a power of two */
    return qd_f32_from_bits((exponent > below ? exponent - below : 1u) << 23);
}

/* Codes of a tensor are followed by its scale, or scales, at this offset in bytes. */
static inline int64_t qd_fp8_scale_at(int64_t elements)
{
    return (elements + 15) / 16 * 16;
}
static inline int64_t qd_fp8_bytes(int64_t elements)
{
    return qd_fp8_scale_at(elements) + 16;
}
static inline int64_t qd_fp8_scaled_bytes(qd_fp8_scaling scaling, int64_t rows, int64_t k)
{
    return qd_fp8_scale_at(rows * k) + (4 * qd_fp8_scale_count(scaling, rows, k) + 15) / 16 * 16;
}
#endif
