/* Work that takes longer than the deadline: ranks that wait for it stay alive, and an error of one
 * rank is reported as its own.
 * ctest: timeout 60 */
#include "support/ranks.h"
#include "train/ranks/long_work.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/ok.h"

enum { RANKS = 3, SLOW = 1 };
/* A busy machine may delay any rank for seconds: both the ranks that stay in touch and those that
 * must notice get that long. */
static const double deadline = 4.0, long_time = 5.0, early_deadline = 0.5;

typedef struct job {
    int rank;
    bool fails;
    int ran;
} job;

static qd_status work(void *context)
{
    job *j = context;
    j->ran++;
    if (j->rank == SLOW) {
        struct timespec time = {.tv_sec = (time_t)long_time, .tv_nsec = (long)((long_time - (double)(time_t)long_time) * 1e9)};
        nanosleep(&time, NULL);
    }
    return j->fails && j->rank == SLOW ? QD_FAIL(QD_CORRUPT, "rank %d has found damage", j->rank) : QD_OK;
}

static qd_status all_work(qd_comm *world, void *arg)
{
    int rank = qd_comm_rank(world);
    int32_t sum = rank;
    job j = {.rank = rank, .fails = strcmp(((const qd_ranks_call *)arg)->text, "fails") == 0};
    qd_status status = qd_long_work_run_all(world, work, &j);
    if (status != (j.fails && rank == SLOW ? QD_CORRUPT : QD_OK) || j.ran != 1)
        return QD_FAIL(QD_DIFFERENT, "rank %d: status %d, ran %d times: %s", rank, (int)status, j.ran, qd_error_message());
    if (status != QD_OK && !strstr(qd_error_message(), "has found damage"))
        return QD_FAIL(QD_DIFFERENT, "another message: %s", qd_error_message());
    qd_error_clear();
    return qd_comm_all_reduce(world, &sum, &sum, 1, QD_I32, QD_SUM, NULL); /* the world still works */
}

/* What the others would do without it. */
static qd_status no_touch(qd_comm *world, void *arg)
{
    (void)arg;
    int32_t sum = 1;
    job j = {.rank = qd_comm_rank(world)};
    QD_TRY(work(&j));
    return qd_comm_all_reduce(world, &sum, &sum, 1, QD_I32, QD_SUM, NULL);
}

static const qd_ranks_entry bodies[] = {{"all_work", all_work}, {"no_touch", no_touch}};

static void slow_ranks_are_waited_for(void **state)
{
    (void)state;
    qd_ranks_result results[RANKS];
    qd_ranks_options options = {.text = "", .deadline_seconds = deadline};
    ok(qd_ranks_run_ok("all_work", QD_RANKS_PROCESSES, RANKS, &options, results));
    options.text = "fails";
    ok(qd_ranks_run_ok("all_work", QD_RANKS_THREADS, RANKS, &options, results));
    options.deadline_seconds = early_deadline;
    ok(qd_ranks_run("no_touch", QD_RANKS_THREADS, RANKS, &options, results));
    /* The first rank that notices aborts the run, and the others get its error. */
    int noticed = 0;
    for (int rank = 0; rank < RANKS; rank++)
        noticed += results[rank].status == QD_TIMEOUT;
    assert_true(noticed > 0);
}

int main(int argc, char **argv)
{
    qd_ranks_main(argc, argv, bodies, 2);
    const struct CMUnitTest tests[] = {cmocka_unit_test(slow_ranks_are_waited_for)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
