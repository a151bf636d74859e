/* The thread pool: each range runs once, on any number of threads, awake or asleep, and the cost of
 * waking it.
 * ctest: processors 2 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct tally {
    int64_t count, grain;
    int threads;
    unsigned char *visits; /* plain bytes: a range that runs twice concurrently is a race for the sanitizer */
    _Atomic int wrong;
    int64_t delay_item; /* takes a while; -1: none */
} tally;

static void visit(void *context, int64_t begin, int64_t end, int thread)
{
    tally *all = context;
    if (begin % all->grain != 0 || (end - begin != all->grain && end != all->count) || end <= begin || thread < 0 ||
        thread >= all->threads)
        atomic_fetch_add(&all->wrong, 1);
    for (int64_t i = begin; i < end; i++) {
        all->visits[i]++;
        if (i == all->delay_item)
            usleep(3000);
    }
}

static void each_range_once(void **state)
{
    (void)state;
    static const int64_t counts[] = {0, 1, 2, 7, 64, 1000, 4097};
    for (int threads = 1; threads <= 5; threads++) {
        qd_pool *pool;
        assert_int_equal(qd_pool_create(threads, -1, &pool), QD_OK);
        assert_int_equal(qd_pool_threads(pool), threads);
        for (int round = 0; round < 60; round++) {
            tally all = {.count = counts[round % 7], .grain = 1 + round % 11, .threads = threads, .delay_item = -1};
            all.visits = calloc((size_t)all.count + 1, 1);
            if (round % 10 == 9) {
                usleep(2000); /* let them fall asleep */
                all.delay_item = all.count - 1;
            }
            qd_pool_for(pool, all.count, all.grain, visit, &all);
            assert_int_equal(all.wrong, 0);
            for (int64_t i = 0; i < all.count; i++)
                assert_int_equal(all.visits[i], 1);
            free(all.visits);
        }
        qd_pool_destroy(pool);
    }
    qd_pool_destroy(NULL);
}

typedef struct chain {
    double *from, *to;
} chain;

static void step(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    chain *link = context;
    for (int64_t i = begin; i < end; i++)
        link->to[i] = link->from[(i + 1) % 256] + 1.0;
}

/* Each job reads what other threads wrote in the previous one: visibility in both directions. */
static void jobs_see_each_others_results(void **state)
{
    (void)state;
    qd_pool *pool;
    static double a[256], b[256];
    memset(a, 0, sizeof a);
    assert_int_equal(qd_pool_create(3, -1, &pool), QD_OK);
    for (int i = 0; i < 4000; i++) {
        chain link = {i % 2 ? b : a, i % 2 ? a : b};
        qd_pool_for(pool, 256, 16, step, &link);
    }
    for (int i = 0; i < 256; i++)
        assert_true(a[i] == 4000.0);
    qd_pool_destroy(pool);
}

static void nothing(void *context, int64_t begin, int64_t end, int thread)
{
    (void)context;
    (void)begin;
    (void)end;
    (void)thread;
}

static void *own_pool(void *argument)
{
    qd_pool *pool;
    _Atomic int *failures = argument;
    if (qd_pool_create(2, -1, &pool) != QD_OK) {
        atomic_fetch_add(failures, 1);
        return NULL;
    }
    tally all = {.count = 500, .grain = 3, .threads = 2, .delay_item = -1};
    all.visits = calloc(500, 1);
    for (int i = 0; i < 100; i++)
        qd_pool_for(pool, 500, 3, visit, &all);
    for (int i = 0; i < 500; i++)
        if (all.visits[i] != 100)
            atomic_fetch_add(failures, 1);
    free(all.visits);
    qd_pool_destroy(pool);
    return NULL;
}

/* Ranks as threads: each with its own pool, more threads than cores. */
static void pools_are_independent(void **state)
{
    (void)state;
    pthread_t ranks[4];
    _Atomic int failures = 0;
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&ranks[i], NULL, own_pool, &failures), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(ranks[i], NULL);
    assert_int_equal(failures, 0);
}

static double process_cpu(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void idle_pools_sleep(void **state)
{
    (void)state;
    qd_pool *pool;
    assert_int_equal(qd_pool_create(4, -1, &pool), QD_OK);
    qd_pool_for(pool, 100, 1, nothing, NULL);
    usleep(20000);
    double start = process_cpu();
    usleep(200000);
    double used = process_cpu() - start;
    assert_true(used < 0.05);
    /* A job far too short to wake a thread for does not wait for the sleepers. The limit is
     * generous: the machine may be busy. */
    start = qd_clock_now();
    for (int i = 0; i < 1000; i++)
        qd_pool_for(pool, 8, 1, nothing, NULL);
    double each = (qd_clock_now() - start) / 1000;
    print_message("an empty job on 4 threads: %.1f us\n", 1e6 * each);
    assert_true(each < 2e-3);
    qd_pool_destroy(pool);
}

static void bad_arguments(void **state)
{
    (void)state;
    qd_pool *pool = (qd_pool *)1;
    assert_int_equal(qd_pool_create(0, -1, &pool), QD_USAGE);
    assert_null(pool);
    assert_int_equal(qd_pool_create(2, 100000, &pool), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "core 100000"));
    assert_int_equal(qd_pool_create(1, -1, &pool), QD_OK);
    qd_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_range_once),       cmocka_unit_test(jobs_see_each_others_results),
        cmocka_unit_test(pools_are_independent), cmocka_unit_test(idle_pools_sleep),
        cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
