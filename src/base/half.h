/* Conversions between fp32 and the two 16-bit types: round to nearest even, infinities and NaNs
 * preserved. Branch-free where that lets compilers vectorize. */
#ifndef QD_BASE_HALF_H
#define QD_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t qd_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float qd_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float qd_bf16_to_f32(uint16_t half)
{
    return qd_f32_from_bits((uint32_t)half << 16);
}

/* 1 sign, 4 exponent and 3 mantissa bits, bias 7; no infinities, and NaN only if all other bits are
 * set. */
static inline float qd_e4m3_to_f32(uint8_t byte)
{
    uint32_t exponent = byte >> 3 & 15u, mantissa = byte & 7u;
    float value = exponent > 0 ? qd_f32_from_bits((exponent + 120u) << 23 | mantissa << 20) : (float)mantissa * 0x1p-9f;
    value = (byte & 0x7fu) == 0x7fu ? qd_f32_from_bits(0x7fc00000u) : value;
    return byte & 0x80u ? -value : value;
}

static inline uint16_t qd_f32_to_bf16(float value)
{
    uint32_t bits = qd_f32_bits(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    /* Rounding could turn a NaN into an infinity: truncate it instead, and set the quiet bit so
     * that the mantissa is not zero. */
    uint32_t nan = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* Splits a float into its bf16 rounding (`half`) and the low 16 bits that the rounding cut off
 * (positive) or added (negative), as a difference of bit patterns.
 *
 * Joining them is exact except for 1 value in 131,072: for a tie that was rounded down the
 * difference is one too large for 16 bits, and the joined value is off by one unit in the last
 * place, toward the rounding. So `half` is always the rounding of the joined value. A NaN stays a
 * NaN: no difference is as large as the quiet bit that its rounding has. A finite value that rounds
 * to infinity stays finite. */
static inline int16_t qd_f32_rest(float value, uint16_t half)
{
    int32_t rest = (int32_t)(qd_f32_bits(value) - ((uint32_t)half << 16));
    return (int16_t)(rest > INT16_MAX ? INT16_MAX : rest < INT16_MIN ? INT16_MIN : rest);
}

static inline float qd_f32_join(uint16_t half, int16_t rest)
{
    return qd_f32_from_bits(((uint32_t)half << 16) + (uint32_t)(int32_t)rest);
}

static inline float qd_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7fffu;
    /* Normal numbers: shift and rebias the exponent. Subnormal numbers: an exact multiplication. */
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    uint32_t small = qd_f32_bits((float)magnitude * 0x1p-24f);
    uint32_t bits = magnitude >= 0x7c00u ? special : magnitude >= 0x0400u ? normal : small;
    return qd_f32_from_bits(sign | bits);
}

static inline uint16_t qd_f32_to_f16(float value)
{
    uint32_t bits = qd_f32_bits(value);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u)
        half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    else if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        half = 0x7c00u;
    else if (magnitude >= 0x38800000u) /* 2^-14 and above are normal */
        half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    else /* adding 2^23 steps of 2^-24 makes the hardware round to nearest even */
        half = qd_f32_bits(qd_f32_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    return (uint16_t)(sign | half);
}

#endif
