/* bf16 and fp16 conversions, for all 16-bit patterns and against arithmetic in double. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/half.h"
#include "base/rng.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

/* The value of an fp16 or bf16 pattern, by definition. */
static double value_of(uint16_t half, int exponent_bits)
{
    int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = half >> mantissa_bits & ((1 << exponent_bits) - 1);
    double mantissa = half & ((1 << mantissa_bits) - 1), sign = half & 0x8000 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1)
        return mantissa != 0 ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

static void every_pattern(void **state)
{
    (void)state;
    for (uint32_t pattern = 0; pattern < 0x10000; pattern++) {
        uint16_t half = (uint16_t)pattern;
        double bf16 = value_of(half, 8), f16 = value_of(half, 5);
        if (isnan(bf16)) {
            assert_true(isnan(qd_bf16_to_f32(half)));
            assert_true(isnan(qd_bf16_to_f32(qd_f32_to_bf16(qd_bf16_to_f32(half)))));
        } else {
            assert_true(qd_bf16_to_f32(half) == bf16);
            assert_int_equal(qd_f32_to_bf16(qd_bf16_to_f32(half)), half);
        }
        if (isnan(f16)) {
            assert_true(isnan(qd_f16_to_f32(half)));
            assert_true(isnan(qd_f16_to_f32(qd_f32_to_f16(qd_f16_to_f32(half)))));
        } else {
            assert_true(qd_f16_to_f32(half) == f16);
            assert_int_equal(qd_f32_to_f16(qd_f16_to_f32(half)), half);
        }
    }
}

/* The result must be the nearest of the neighbours, or the even one of two equally near. */
static void check_nearest(float value, uint16_t got, int exponent_bits)
{
    double exact = value, chosen = value_of(got, exponent_bits);
    int top = ((1 << exponent_bits) - 1) << (15 - exponent_bits); /* infinity */
    if ((got & 0x7fff) == top) {
        /* Infinity from half a step above the largest number on. */
        double largest = value_of((uint16_t)(top - 1), exponent_bits),
               below = value_of((uint16_t)(top - 2), exponent_bits);
        assert_true(fabs(exact) >= largest + (largest - below) / 2);
        return;
    }
    double error = fabs(exact - chosen);
    for (int step = -1; step <= 1; step += 2) {
        uint16_t neighbour = (uint16_t)(got + step);
        double other = value_of(neighbour, exponent_bits);
        if ((neighbour & 0x7fff) == top || isnan(other) || ((neighbour ^ got) & 0x8000))
            continue;
        double other_error = fabs(exact - other);
        assert_true(error < other_error || (error == other_error && (got & 1) == 0));
    }
}

static void rounds_to_nearest_even(void **state)
{
    (void)state;
    qd_philox_key key = qd_rng_key(1, "half");
    for (uint64_t i = 0; i < 500000; i++) {
        uint32_t words[4];
        qd_philox4x32(key, i, 0, words);
        float any = qd_f32_from_bits(words[0]);
        /* The second is in fp16's range, including subnormals; the third is on ties. */
        float fitting = qd_f32_from_bits((words[1] & 0x80ffffffu) % 0x80800000u + ((100 + words[2] % 45) << 23));
        float tie = qd_f32_from_bits((words[3] & 0xffffe000u) | 0x1000u);
        if (isfinite(any)) {
            check_nearest(any, qd_f32_to_bf16(any), 8);
            check_nearest(any, qd_f32_to_f16(any), 5);
        }
        if (isfinite(fitting))
            check_nearest(fitting, qd_f32_to_f16(fitting), 5);
        if (isfinite(tie))
            check_nearest(tie, qd_f32_to_f16(tie), 5);
        float bf16_tie = qd_f32_from_bits((words[3] & 0xffff0000u) | 0x8000u);
        if (isfinite(bf16_tie))
            check_nearest(bf16_tie, qd_f32_to_bf16(bf16_tie), 8);
    }
}

static void special_values(void **state)
{
    (void)state;
    assert_int_equal(qd_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(qd_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(qd_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(qd_f32_to_f16(-0.0f), 0x8000);
    assert_int_equal(qd_f32_to_f16(0x1p-25f), 0x0000); /* a tie, to even */
    assert_int_equal(qd_f32_to_f16(0x1.8p-25f), 0x0001);
    assert_int_equal(qd_f32_to_bf16(INFINITY), 0x7f80);
    assert_int_equal(qd_f32_to_bf16(3.3961775e38f), 0x7f80);
    assert_int_equal(qd_f32_to_bf16(-0.0f), 0x8000);
    /* A NaN whose payload is in the truncated bits stays a NaN, with its sign. */
    assert_int_equal(qd_f32_to_bf16(qd_f32_from_bits(0xff800001)), 0xffc0);
    assert_true(isnan(qd_f16_to_f32(qd_f32_to_f16(qd_f32_from_bits(0x7f800001)))));
}

/* Every upper half with lower halves around the values where the rounding changes: joining the
 * parts restores the bits, except for ties that were rounded down, and the upper part is the
 * rounding of the joined value. */
static void parts_give_the_value_back(void **state)
{
    (void)state;
    static const uint16_t lower[] = {0, 1, 0x1234, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xfffe, 0xffff};
    int moved = 0;
    for (uint32_t upper = 0; upper <= 0xffff; upper++)
        for (size_t i = 0; i < sizeof lower / sizeof *lower; i++) {
            float value = qd_f32_from_bits(upper << 16 | lower[i]);
            uint16_t half = qd_f32_to_bf16(value);
            float back = qd_f32_join(half, qd_f32_rest(value, half));
            if (isnan(value)) {
                assert_true(isnan(back));
                continue;
            }
            bool tie_down = lower[i] == 0x8000 && half == upper;
            assert_int_equal(qd_f32_bits(back), qd_f32_bits(value) - tie_down);
            assert_int_equal(qd_f32_to_bf16(back), half);
            assert_true(isinf(back) == isinf(value));
            moved += tie_down;
        }
    assert_int_equal(moved, 0x7f80); /* the even ones among those that are finite */
    float largest = qd_f32_from_bits(0x7f7fffff); /* an infinite weight, a finite master */
    assert_int_equal(qd_f32_rest(largest, 0x7f80), -1);
    assert_int_equal(qd_f32_rest(qd_f32_from_bits(0x3f808000), 0x3f80), 0x7fff);
    assert_int_equal(qd_f32_rest(qd_f32_from_bits(0x3f818000), 0x3f82), -0x8000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_give_the_value_back),
        cmocka_unit_test(every_pattern),
        cmocka_unit_test(rounds_to_nearest_even),
        cmocka_unit_test(special_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
