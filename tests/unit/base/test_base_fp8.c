/* fp8 conversions: all codes, all midpoints between neighbours, PyTorch's codes of all bf16 values,
 * and the scale of a tensor. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/fp8.h"

#include <math.h>

static const struct {
    qd_dtype dtype;
    int mantissa, bias;
    uint8_t most;
    double largest, smallest;
    uint64_t torch; /* tools/fp8_golden.py */
} formats[] = {
    {QD_F8E4M3, 3, 7, 0x7e, 448.0, 0x1p-9, UINT64_C(0x02b5889fa6ad3c93)},
    {QD_F8E5M2, 2, 15, 0x7b, 57344.0, 0x1p-16, UINT64_C(0x3e601f0d5cef2ed3)},
};
enum { FORMATS = sizeof formats / sizeof *formats };

/* The value of a positive code up to the largest number, by definition. */
static double value_of(int format, int code)
{
    int mantissa = code & ((1 << formats[format].mantissa) - 1), exponent = code >> formats[format].mantissa;
    double fraction = (exponent > 0) + ldexp(mantissa, -formats[format].mantissa);
    return ldexp(fraction, (exponent > 0 ? exponent : 1) - formats[format].bias);
}

static void every_code(void **state)
{
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        qd_dtype dtype = formats[f].dtype;
        assert_true(qd_dtype_is_fp8(dtype));
        assert_true(value_of(f, formats[f].most) == formats[f].largest && value_of(f, 1) == formats[f].smallest);
        for (int code = 0; code < 256; code++) {
            int magnitude = code & 0x7f;
            float value = qd_fp8_to_f32((uint8_t)code, dtype);
            if (magnitude > formats[f].most) { /* E5M2 has an infinity, which is never written */
                bool infinite = dtype == QD_F8E5M2 && magnitude == 0x7c;
                assert_true(infinite ? isinf(value) : isnan(value));
                continue;
            }
            assert_true(value == (code & 0x80 ? -1.0 : 1.0) * value_of(f, magnitude));
            assert_int_equal(qd_f32_to_fp8(value, dtype), code);
        }
        assert_int_equal(qd_f32_to_fp8(NAN, dtype) & 0x7f, 0x7f);
        assert_int_equal(qd_f32_to_fp8(INFINITY, dtype), formats[f].most);
        assert_int_equal(qd_f32_to_fp8(-1e30f, dtype), 0x80 | formats[f].most);
    }
    assert_false(qd_dtype_is_fp8(QD_BF16) || qd_dtype_is_fp8(QD_U8));
}

/* Halfway between neighbours the even code wins; next to it, the nearer one. */
static void midpoints(void **state)
{
    (void)state;
    for (int f = 0; f < FORMATS; f++)
        for (int code = 0; code < formats[f].most; code++) {
            float middle = (float)(0.5 * (value_of(f, code) + value_of(f, code + 1)));
            assert_int_equal(qd_f32_to_fp8(middle, formats[f].dtype), code + (code & 1));
            assert_int_equal(qd_f32_to_fp8(nextafterf(middle, 0.0f), formats[f].dtype), code);
            assert_int_equal(qd_f32_to_fp8(nextafterf(middle, INFINITY), formats[f].dtype), code + 1);
            assert_int_equal(qd_f32_to_fp8(-middle, formats[f].dtype), 0x80 | (code + (code & 1)));
        }
}

/* A hash of the codes of all bf16 values within the format, in the order of their patterns. */
static void as_torch(void **state)
{
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        uint64_t hash = UINT64_C(14695981039346656037);
        for (uint32_t pattern = 0; pattern < 0x10000; pattern++) {
            float value = qd_bf16_to_f32((uint16_t)pattern);
            if (fabs(value) <= formats[f].largest)
                hash = (hash ^ qd_f32_to_fp8(value, formats[f].dtype)) * UINT64_C(1099511628211);
        }
        assert_int_equal(hash, formats[f].torch);
    }
}

/* The smallest power of two with which the largest value fits. */
static void scales(void **state)
{
    (void)state;
    for (int f = 0; f < FORMATS; f++) {
        qd_dtype dtype = formats[f].dtype;
        const float exact = (float)formats[f].largest;
        assert_true(qd_fp8_scale(exact, dtype) == 1.0f);
        assert_true(qd_fp8_scale(nextafterf(exact, INFINITY), dtype) == 2.0f);
        assert_true(qd_fp8_scale(0.5f * exact, dtype) == 0.5f);
        assert_true(qd_fp8_scale(0.0f, dtype) == 1.0f);
        assert_true(isnan(qd_fp8_scale(INFINITY, dtype)) && isnan(qd_fp8_scale(NAN, dtype)));
        for (uint32_t bits = 1; bits < 0x7f800000u; bits += 9973) {
            float amax = qd_f32_from_bits(bits), scale = qd_fp8_scale(amax, dtype);
            int exponent;
            assert_true(frexpf(scale, &exponent) == 0.5f);
            assert_true(isfinite(1.0f / scale) && (1.0f / scale) * scale == 1.0f);
            assert_true(amax / scale <= exact);
            assert_true(scale == 0x1p-126f || 2.0f * amax / scale > exact);
        }
        assert_true(qd_fp8_scale_at(17) == 32 && qd_fp8_bytes(16) == 32);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_code), cmocka_unit_test(midpoints), cmocka_unit_test(as_torch),
                                       cmocka_unit_test(scales)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
