/* The measurement of collectives covers every operation, next to MPI's own where there is MPI, and
 * reports failures instead of hanging.
 * ctest: timeout 120
 * ctest: processors 2 */
#include <quadrille/bench.h>
#include <quadrille/comm.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define RANK_WORD "--bench-rank"

static char self[4096];

static qd_bench_collectives_config small(int ranks)
{
    qd_bench_collectives_config config = qd_bench_collectives_config_default();
    static const char *command[] = {self, RANK_WORD, NULL};
    config.ranks = ranks;
    config.smallest_bytes = 4;
    config.largest_bytes = 16384;
    config.seconds = 0.01;
    config.rank_command = command;
    return config;
}

static bool mpi_here(void)
{
    return qd_mpi_built() && system("command -v mpirun >/dev/null 2>&1") == 0;
}

/* 4 B to 16 KiB in steps of four are 7 sizes. Where the message is split into parts, the smallest
 * are rounded up to one element per rank: at 2 ranks 4 B becomes 8 B; at 4 ranks 4 B becomes 16 B,
 * which is then measured once. */
static int sizes_of(qd_coll_kind kind, int ranks)
{
    switch (kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_BROADCAST:
    case QD_COLL_REDUCE:
    case QD_COLL_SEND:
        return 7;
    case QD_COLL_BARRIER:
        return 1;
    case QD_COLL_RECV: /* measured with send */
        return 0;
    default:
        return ranks == 4 ? 6 : 7;
    }
}

static void expect_rows(const qd_bench_collectives_result *result, int ranks, bool mpi)
{
    int seen[QD_COLL_KIND_COUNT] = {0};
    int64_t last = 0;
    for (int i = 0; i < result->count; i++) {
        const qd_bench_collectives_row *row = &result->rows[i];
        bool first = seen[row->kind]++ == 0;
        assert_int_equal(row->ranks, ranks);
        assert_true(row->local_seconds > 0 && row->local_seconds < 10);
        if (mpi) {
            assert_true(row->mpi_seconds > 0 && row->mpi_backend_seconds > 0);
            assert_true(row->ratio * row->local_seconds > 0.999 * row->mpi_seconds);
            assert_true(row->ratio * row->local_seconds < 1.001 * row->mpi_seconds);
        } else {
            assert_true(row->mpi_seconds == 0 && row->mpi_backend_seconds == 0 && row->ratio == 0);
        }
        if (row->kind == QD_COLL_BARRIER)
            continue;
        assert_true(first || row->bytes > last);
        /* Rates are neither zero nor terabytes per second. */
        assert_true(row->local_bandwidth > 1 && row->local_bandwidth < 1e12);
        last = row->bytes;
    }
    for (int k = 0; k < QD_COLL_KIND_COUNT; k++)
        assert_int_equal(seen[k], sizes_of((qd_coll_kind)k, ranks));
}

static void test_ours_alone(void **state)
{
    (void)state;
    qd_bench_collectives_config config = small(2);
    qd_bench_collectives_result result = qd_bench_collectives_result_default();
    qd_status status = qd_bench_collectives(&config, &result);
    if (status != QD_OK)
        fail_msg("%s", qd_error_message());
    assert_string_equal(result.mpi_version, "");
    expect_rows(&result, 2, false);
    qd_bench_collectives_free(&result);
    assert_null(result.rows);
}

/* Bare copies are measured for operations that only copy, where processes may read each other's
 * memory. */
static void test_copies_alone(void **state)
{
    (void)state;
    qd_bench_collectives_config config = small(2);
    qd_bench_collectives_result result = qd_bench_collectives_result_default();
    config.smallest_bytes = config.largest_bytes = 65536;
    if (qd_bench_collectives(&config, &result) != QD_OK)
        fail_msg("%s", qd_error_message());
    int copied = 0, copying = 0;
    for (int i = 0; i < result.count; i++) {
        qd_coll_kind kind = result.rows[i].kind;
        bool sums = kind == QD_COLL_ALL_REDUCE || kind == QD_COLL_REDUCE_SCATTER || kind == QD_COLL_REDUCE;
        double seconds = result.rows[i].copy_seconds;
        assert_true(seconds >= 0 && seconds < 1);
        if (sums || kind == QD_COLL_BARRIER)
            assert_true(seconds == 0);
        else
            copying++, copied += seconds > 0;
    }
    assert_int_equal(copying, 6);
    assert_true(copied == 0 || copied == copying);
    qd_bench_collectives_free(&result);
}

static void test_beside_mpi(void **state)
{
    (void)state;
    if (!mpi_here())
        skip();
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        qd_bench_collectives_config config = small(ranks);
        qd_bench_collectives_result result = qd_bench_collectives_result_default();
        config.against_mpi = true;
        qd_status status = qd_bench_collectives(&config, &result);
        if (status != QD_OK)
            fail_msg("%s", qd_error_message());
        assert_true(strlen(result.mpi_version) > 3);
        expect_rows(&result, ranks, true);
        qd_bench_collectives_free(&result);
    }
}

static void test_bad_settings(void **state)
{
    (void)state;
    qd_bench_collectives_result result = qd_bench_collectives_result_default();
    qd_bench_collectives_config config = small(0);
    assert_int_equal(qd_bench_collectives(&config, &result), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "ranks is 0"));
    config = small(2);
    config.smallest_bytes = 1 << 20;
    assert_int_equal(qd_bench_collectives(&config, &result), QD_USAGE);
    config = small(2);
    config.rank_command = NULL;
    assert_int_equal(qd_bench_collectives(&config, &result), QD_USAGE);
    config = small(2);
    config.against_mpi = true;
    if (!qd_mpi_built())
        assert_int_equal(qd_bench_collectives(&config, &result), QD_UNSUPPORTED);
}

static void test_ranks_that_fail(void **state)
{
    (void)state;
    qd_bench_collectives_result result = qd_bench_collectives_result_default();
    qd_bench_collectives_config config = small(2);
    static const char *missing[] = {"/nowhere/no-such-program", NULL}, *failing[] = {"false", NULL};
    config.rank_command = missing;
    assert_int_equal(qd_bench_collectives(&config, &result), QD_SYSTEM);
    assert_non_null(strstr(qd_error_message(), "/nowhere/no-such-program"));
    config.rank_command = failing;
    assert_int_equal(qd_bench_collectives(&config, &result), QD_REMOTE);
    assert_null(result.rows);
    char *by_hand[] = {"1", "2"};
    assert_int_equal(qd_bench_collectives_rank(2, by_hand), QD_USAGE);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], RANK_WORD) == 0)
        return qd_bench_collectives_rank(argc - 2, argv + 2) == QD_OK ? 0 : 1;
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0)
        return 1;
    /* For the ranks: Open MPI leaks at exit and takes its own locks in two orders. Other tests
     * check ours. */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
    setenv("TSAN_OPTIONS", "detect_deadlocks=0", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ours_alone),
        cmocka_unit_test(test_copies_alone),
        cmocka_unit_test(test_beside_mpi),
        cmocka_unit_test(test_bad_settings),
        cmocka_unit_test(test_ranks_that_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
