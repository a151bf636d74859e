/* Reductions of several ranks' values: all instruction sets give bit-identical results, including
 * NaN.
 * ctest: timeout 60 */
#include "device/sum.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SOURCES_MOST = 9, COUNT_MOST = 131, SHIFT_MOST = 3, BYTES_MOST = (COUNT_MOST + SHIFT_MOST) * 8 };

static const char *const faster[] = {"avx2", "avx512"};

/* Special bit patterns of all types: signed zeros, infinities, quiet NaNs of either sign, values
 * that cancel, the largest and the smallest. They are mixed with random bits so that each meets
 * each. */
static const uint32_t special32[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000,
                                     0x7f7fffff, 0x00000001, 0x3f800000, 0xbf800000};
static const uint16_t special16[] = {0x0000, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0x7f80, 0xff80, 0x7fc0,
                                     0x7bff, 0x0001, 0x3c00, 0xbc00, 0x3f80, 0xbf80};

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 24 ^ *state << 17;
}

/* Finite values of moderate size, so that sums round; with `with_special` also the patterns
 * above. */
static void fill(unsigned char *to, qd_dtype dtype, int64_t count, bool with_special, uint64_t *state)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = next(state);
        bool special = with_special && next(state) % 3 == 0;
        double value = ((double)(bits % 2000003) - 1000001.0) / 1024.0;
        switch (dtype) {
        case QD_F32: {
            float f = (float)value;
            memcpy(to + 4 * i, special ? (const void *)&special32[bits % 10] : (const void *)&f, 4);
            break;
        }
        case QD_F64: {
            memcpy(to + 8 * i, &value, 8);
            break;
        }
        case QD_BF16:
        case QD_F16: {
            /* Exponents around 1: neither type overflows in a sum of nine. */
            uint16_t half = dtype == QD_F16 ? (uint16_t)((bits & 0x83ff) | (0x3000 + (bits >> 20 & 0xc00)))
                                            : (uint16_t)((bits & 0x807f) | (0x3e80 + (bits >> 20 & 0x380)));
            memcpy(to + 2 * i, special ? &special16[bits % 14] : &half, 2);
            break;
        }
        default: memcpy(to + (int64_t)qd_dtype_size(dtype) * i, &bits, qd_dtype_size(dtype)); break;
        }
    }
}

static void test_instruction_sets_agree(void **unused)
{
    (void)unused;
    static const qd_dtype dtypes[] = {QD_F32, QD_F64, QD_BF16, QD_F16, QD_I32, QD_I64};
    static const int64_t counts[] = {1, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, COUNT_MOST};
    static _Alignas(64) unsigned char values[SOURCES_MOST][BYTES_MOST + 64], expected[BYTES_MOST], found[BYTES_MOST];
    uint64_t state = 1;
    int compared = 0;
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (int n = 1; n <= SOURCES_MOST; n++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
                for (int op = 0; op < 3; op++) {
                    int64_t bytes = counts[c] * (int64_t)qd_dtype_size(dtypes[d]);
                    const void *sources[SOURCES_MOST];
                    /* The NaN bits of a sum may come from either operand, which is unspecified. So
                     * sums get finite values, and maxima everything. */
                    for (int s = 0; s < n; s++) {
                        unsigned char *at = values[s] + (n + s) % SHIFT_MOST * (int64_t)qd_dtype_size(dtypes[d]);
                        fill(at, dtypes[d], counts[c], op == QD_MAX, &state);
                        sources[s] = at;
                    }
                    assert_true(qd_sum_use("generic"));
                    qd_sum_tree(expected, sources, n, counts[c], dtypes[d], (qd_reduce_op)op);
                    for (size_t i = 0; i < sizeof faster / sizeof *faster; i++) {
                        if (!qd_sum_use(faster[i])) continue;
                        memset(found, 0xa5, sizeof found);
                        qd_sum_tree(found, sources, n, counts[c], dtypes[d], (qd_reduce_op)op);
                        if (memcmp(found, expected, (size_t)bytes) != 0)
                            fail_msg("%s differs from generic: %s, %d sources, %lld values, operation %d", faster[i],
                                     qd_dtype_name(dtypes[d]), n, (long long)counts[c], op);
                        assert_int_equal(found[bytes], 0xa5);
                        compared++;
                    }
                }
#if defined(__x86_64__)
    assert_true(compared > 0 || !__builtin_cpu_supports("avx2"));
#endif
}

/* The maximum is NaN exactly where some source is NaN. */
static void test_maximum_keeps_nan(void **unused)
{
    (void)unused;
    static const char *const sets[] = {"generic", "avx2", "avx512"};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (!qd_sum_use(sets[i])) continue;
        for (int n = 2; n <= 5; n++)
            for (int who = 0; who < n; who++)
                for (int where = 0; where < 37; where++) {
                    float values[5][37], out[37];
                    const void *sources[5];
                    for (int s = 0; s < n; s++) {
                        for (int e = 0; e < 37; e++) values[s][e] = (float)((s * 7 + e) % 5);
                        sources[s] = values[s];
                    }
                    values[who][where] = NAN;
                    qd_sum_tree(out, sources, n, 37, QD_F32, QD_MAX);
                    for (int e = 0; e < 37; e++) assert_int_equal(isnan(out[e]) != 0, e == where);
                }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_instruction_sets_agree),
        cmocka_unit_test(test_maximum_keeps_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
