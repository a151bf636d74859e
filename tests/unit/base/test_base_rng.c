/* Philox against the published vectors, and the distributions drawn from it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* kat_vectors of the Random123 distribution, "philox4x32 10". */
static void known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } rows[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < 3; i++) {
        qd_philox_key key = {{rows[i].key[0], rows[i].key[1]}};
        uint32_t out[4];
        qd_philox4x32(key, (uint64_t)rows[i].counter[1] << 32 | rows[i].counter[0],
                      (uint64_t)rows[i].counter[3] << 32 | rows[i].counter[2], out);
        assert_memory_equal(out, rows[i].out, sizeof out);
    }
}

static void keys_differ(void **state)
{
    (void)state;
    qd_philox_key a = qd_rng_key(1, "block.0.q"), again = qd_rng_key(1, "block.0.q");
    qd_philox_key name = qd_rng_key(1, "block.0.k"), seed = qd_rng_key(2, "block.0.q");
    assert_memory_equal(&a, &again, sizeof a);
    assert_memory_not_equal(&a, &name, sizeof a);
    assert_memory_not_equal(&a, &seed, sizeof a);
}

static void normal_numbers(void **state)
{
    (void)state;
    enum { COUNT = 200000 };
    static float all[COUNT], part[COUNT];
    qd_philox_key key = qd_rng_key(7, "weights");
    qd_rng_normal(key, 0, COUNT, 0.02, all);
    double sum = 0, square = 0, fourth = 0;
    for (int i = 0; i < COUNT; i++) {
        double x = all[i] / 0.02;
        sum += x;
        square += x * x;
        fourth += x * x * x * x;
    }
    /* Five standard errors. */
    assert_true(fabs(sum / COUNT) < 5 / sqrt(COUNT));
    assert_true(fabs(square / COUNT - 1) < 5 * sqrt(2.0 / COUNT));
    assert_true(fabs(fourth / COUNT - 3) < 5 * sqrt(96.0 / COUNT));
    /* Any range, odd or even, is bit-identical to the same range of the whole. */
    for (int first = 0; first < 9; first++) {
        for (int count = 0; count < 9; count++) {
            memset(part, 0xff, sizeof part[0] * 16);
            qd_rng_normal(key, 1000 + first, count, 0.02, part);
            assert_memory_equal(part, all + 1000 + first, (size_t)count * sizeof part[0]);
            uint32_t untouched;
            memcpy(&untouched, part + count, sizeof untouched);
            assert_int_equal(untouched, 0xffffffff);
        }
    }
    /* Indices beyond 2^32 are distinct elements. */
    qd_rng_normal(key, INT64_C(1) << 34, 4, 0.02, part);
    assert_memory_not_equal(part, all, 4 * sizeof part[0]);
}

static void uniform_numbers(void **state)
{
    (void)state;
    assert_true(qd_rng_to_uniform(0) == 0.0f);
    assert_true(qd_rng_to_uniform(0xffffffff) < 1.0f);
    qd_philox_key key = qd_rng_key(3, "sampler");
    int counts[10] = {0};
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t draw = qd_rng_below(key, i, 10);
        assert_true(draw < 10);
        counts[draw]++;
    }
    for (int i = 0; i < 10; i++)
        assert_true(abs(counts[i] - 10000) < 500);
    assert_int_equal(qd_rng_below(key, 5, 1), 0);
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t bound = UINT64_C(0xfedcba9876543210), draw = qd_rng_below(key, i, bound);
        assert_true(draw < bound);
        /* The high word of the multiplication, checked with the compiler's own wide type. */
        uint32_t words[4];
        qd_philox4x32(key, i, 0, words);
        __extension__ typedef unsigned __int128 wide;
        wide product = (wide)((uint64_t)words[1] << 32 | words[0]) * bound;
        assert_true(draw == (uint64_t)(product >> 64));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(keys_differ),
        cmocka_unit_test(normal_numbers),
        cmocka_unit_test(uniform_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
