/* Data types, slices, and the traffic of collectives. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <quadrille/types.h>
#include <string.h>

static void names_and_sizes(void **state)
{
    (void)state;
    static const struct {
        qd_dtype dtype;
        const char *name;
        size_t size;
    } rows[] = {{QD_F32, "fp32", 4},  {QD_BF16, "bf16", 2}, {QD_F16, "fp16", 2}, {QD_I32, "int32", 4},
                {QD_I64, "int64", 8}, {QD_F64, "fp64", 8},  {QD_U8, "uint8", 1},
                {QD_F8E4M3, "fp8_e4m3", 1}, {QD_F8E5M2, "fp8_e5m2", 1}};
    assert_int_equal(sizeof rows / sizeof rows[0], QD_DTYPE_COUNT);
    for (int i = 0; i < QD_DTYPE_COUNT; i++) {
        assert_string_equal(qd_dtype_name(rows[i].dtype), rows[i].name);
        assert_int_equal(qd_dtype_size(rows[i].dtype), rows[i].size);
    }
    assert_int_equal(qd_dtype_size(QD_DTYPE_COUNT), 0);
    assert_string_equal(qd_reduce_op_name(QD_AVG), "avg");
    assert_string_equal(qd_coll_kind_name(QD_COLL_ALL_REDUCE), "all-reduce");
    assert_string_equal(qd_coll_kind_name(QD_COLL_BARRIER), "barrier");
    for (int kind = 0; kind < QD_COLL_KIND_COUNT; kind++)
        for (int other = 0; other < kind; other++)
            assert_string_not_equal(qd_coll_kind_name(kind), qd_coll_kind_name(other));
}

static void slices_cover_everything(void **state)
{
    (void)state;
    for (int64_t count = 0; count < 40; count++) {
        for (int parts = 1; parts <= 9; parts++) {
            int64_t expected = 0, longest = 0, shortest = count;
            for (int i = 0; i < parts; i++) {
                int64_t offset, length;
                qd_slice(count, parts, i, &offset, &length);
                assert_int_equal(offset, expected);
                expected += length;
                longest = length > longest ? length : longest;
                shortest = length < shortest ? length : shortest;
            }
            assert_int_equal(expected, count);
            assert_true(longest - shortest <= 1);
        }
    }
    int64_t offset, length;
    qd_slice(INT64_C(1) << 61, 7, 6, &offset, &length); /* no overflow in between */
    assert_int_equal(offset + length, INT64_C(1) << 61);
}

static void direct_thresholds(void **state)
{
    (void)state;
    assert_true(qd_coll_direct(0, 8));
    assert_true(qd_coll_direct(16 * 1024, 8));
    assert_false(qd_coll_direct(16 * 1024 + 1, 8));
    assert_true(qd_coll_direct(64 * 1024, 2));
    assert_false(qd_coll_direct(64 * 1024 + 1, 2));
    assert_false(qd_coll_direct(64 * 1024, 3));
}

static void bytes_moved(void **state)
{
    (void)state;
    static const struct {
        qd_coll_kind kind;
        int64_t count;
        qd_dtype dtype;
        int size;
        int64_t bytes;
    } rows[] = {
        {QD_COLL_ALL_REDUCE, 10, QD_F32, 4, 4 * 3 * 40},                /* direct: every rank reads from every other */
        {QD_COLL_ALL_REDUCE, 1 << 20, QD_F32, 4, INT64_C(2) * 3 << 22}, /* sliced: reduce-scatter and all-gather */
        {QD_COLL_ALL_REDUCE, 1 << 20, QD_BF16, 1, 0},                   /* alone */
        {QD_COLL_REDUCE_SCATTER, 1001, QD_F32, 3, 2 * 4004},
        {QD_COLL_ALL_GATHER, 1001, QD_BF16, 3, 2 * 2002},
        {QD_COLL_BROADCAST, 5, QD_I64, 8, 7 * 40},
        {QD_COLL_REDUCE, 5, QD_I64, 8, 7 * 40},
        {QD_COLL_REDUCE, 1 << 20, QD_F32, 4, (INT64_C(3) << 22) + (INT64_C(3) << 20)}, /* split: slices to their owners, sums to the root */
        {QD_COLL_GATHER, 10, QD_U8, 3, 6}, /* the root's slice of 4 stays */
        {QD_COLL_SCATTER, 10, QD_F32, 3, 24},
        {QD_COLL_ALL_TO_ALL, 12, QD_F32, 4, 48},
        {QD_COLL_SEND, 7, QD_F32, 2, 0},
        {QD_COLL_RECV, 7, QD_F32, 2, 28},
        {QD_COLL_BARRIER, 0, QD_U8, 8, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        assert_int_equal(qd_coll_bytes(rows[i].kind, rows[i].count, rows[i].dtype, rows[i].size), rows[i].bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_sizes),
        cmocka_unit_test(slices_cover_everything),
        cmocka_unit_test(direct_thresholds),
        cmocka_unit_test(bytes_moved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
