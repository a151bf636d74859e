/* Conversions between fp32 and the two 16-bit types: round to nearest even, infinities kept, NaN
 * stays NaN. Written without branches where compilers vectorise them. */
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

static inline uint16_t qd_f32_to_bf16(float value)
{
    uint32_t bits = qd_f32_bits(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    /* Rounding could turn a NaN into an infinity: cut it instead, and set the quiet bit so that
     * something remains. */
    uint32_t nan = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* A float in two parts: its bf16 rounding, and what that has cut off (positive) or added
 * (negative), as a number on bits. The value comes back exactly, but for one in 131,072: of a tie
 * that was rounded down, what is missing is one more than fits, and the value moves by one unit in
 * its last place toward the rounding. So `half` is always the rounding of the value that the parts
 * give. A NaN stays one: no remainder is as large as the quiet bit, which its rounding has. A
 * finite value that rounds to infinity stays finite. */
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
    /* Normal numbers: shift and correct the exponent's bias. Subnormal ones: an exact product. */
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
    else /* adding 2^23 steps of 2^-24 lets the processor round to nearest even */
        half = qd_f32_bits(qd_f32_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    return (uint16_t)(sign | half);
}

#endif
