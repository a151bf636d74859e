/* How the time for kernel searches is divided among the GEMMs of a step: those of GPT-2 124M with
 * 64 x 1024 tokens. */
#include "device/tune_share.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { ROWS = 65536, CHUNK = 8192, LAYERS = 12, COUNT = 7 };

static void fill(qd_tune_item *items)
{
    static const struct {
        int64_t m, n, k;
        int times;
    } gemms[COUNT] = {{ROWS, 2304, 768, LAYERS}, {ROWS, 768, 768, LAYERS},  {ROWS, 3072, 768, LAYERS}, {CHUNK, 50256, 768, 8},
                      {CHUNK, 1, 768, 8},        {CHUNK, 768, 50256, 8},    {50256, 768, CHUNK, 7}};
    for (int i = 0; i < COUNT; i++) {
        items[i] = (qd_tune_item){.call = {.m = gemms[i].m, .n = gemms[i].n, .k = gemms[i].k, .a_dtype = QD_BF16, .b_dtype = QD_BF16,
                                           .c_dtype = QD_BF16}};
        items[i].cost = qd_tune_cost(&items[i].call) * gemms[i].times;
    }
}

static double sum_of(const qd_tune_item *items)
{
    double sum = 0;
    for (int i = 0; i < COUNT; i++)
        sum += items[i].seconds;
    return sum;
}

/* All of the time is used; a GEMM that takes more of a step gets more, and comes later; a remainder
 * of one column gets none. */
static void by_what_they_take(void **state)
{
    (void)state;
    qd_tune_item items[COUNT];
    fill(items);
    assert_int_equal(qd_tune_share(items, COUNT, 4), COUNT - 1);
    assert_float_equal(sum_of(items), 4, 1e-9);
    assert_int_equal(items[0].call.n, 1);
    assert_true(items[0].seconds == 0);
    for (int i = 1; i < COUNT; i++)
        assert_true(items[i].cost >= items[i - 1].cost && items[i].seconds >= items[i - 1].seconds);
    assert_true(items[1].seconds > 0.2);
}

/* GEMMs that a file already contains give up their time; those that were too small for a search
 * before do not get one now. */
static void known_ones_take_nothing(void **state)
{
    (void)state;
    qd_tune_item items[COUNT], all[COUNT];
    fill(all);
    qd_tune_share(all, COUNT, 4);
    fill(items);
    for (int i = 1; i < COUNT; i++)
        items[i].known = i != 4;
    assert_int_equal(qd_tune_share(items, COUNT, 4), 1);
    assert_true(sum_of(items) < 1);
    for (int i = 0; i < COUNT; i++)
        if (items[i].seconds > 0)
            assert_float_equal(items[i].seconds, all[i].seconds, 1e-12);
    fill(items);
    for (int i = 0; i < COUNT; i++)
        items[i].known = i != 4;
    assert_int_equal(qd_tune_share(items, COUNT, 4), 0);
}

static void no_limit_and_no_time(void **state)
{
    (void)state;
    qd_tune_item items[COUNT];
    fill(items);
    assert_int_equal(qd_tune_share(items, COUNT, INFINITY), COUNT);
    for (int i = 0; i < COUNT; i++)
        assert_true(isinf(items[i].seconds));
    assert_int_equal(qd_tune_share(items, COUNT, 0), 0);
    assert_int_equal(qd_tune_share(items, 0, 4), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(by_what_they_take), cmocka_unit_test(known_ones_take_nothing),
                                       cmocka_unit_test(no_limit_and_no_time)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
