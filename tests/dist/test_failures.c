/* Ranks that disagree, stay away, stop or die: every other rank gets an error that names them
 * within the deadline, and all exit. Ranks mostly wait here, so the kinds of ranks are tested
 * concurrently, and another test may run at the same time.
 * ctest: timeout 400 */
#include "support/ranks.h"
#include "support/sample.h"

#include "base/clock.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 3, CULPRIT = 1, ELEMENTS = 100, LARGE = 500000 };
static const double deadline = 1.5;

static bool is(const void *arg, const char *scenario)
{
    return strcmp(((const qd_ranks_call *)arg)->text, scenario) == 0;
}

static void stop_now(int signal_number)
{
    (void)signal_number;
    raise(SIGSTOP);
}

static void die_now(int signal_number)
{
    (void)signal_number;
    raise(SIGKILL);
}

/* Large messages all the time; the culprit stops or dies by a timer, most likely in the middle of
 * one. One-way operations are those in which ranks write into each other's memory; in an all-to-all
 * in shared memory they do each other's work. */
typedef enum traffic { SUMS, ONE_WAY, EXCHANGES } traffic;

static qd_status end_in_the_middle(qd_comm *world, float *data, bool culprit, traffic what, void (*end)(int))
{
    int rank = qd_comm_rank(world);
    int64_t first, count;
    qd_slice(LARGE, RANKS, rank, &first, &count);
    if (culprit) {
        signal(SIGALRM, end);
        struct itimerval timer = {.it_value = {.tv_usec = 100000}};
        setitimer(ITIMER_REAL, &timer, NULL);
    }
    for (int i = 0; i < 100000; i++) {
        if (what == SUMS) QD_TRY(qd_comm_all_reduce(world, data, data, LARGE, QD_F32, QD_AVG, NULL));
        if (what == EXCHANGES) QD_TRY(qd_comm_all_to_all(world, data, data + LARGE / 2, LARGE / 2 / RANKS, QD_F32, NULL));
        if (what != ONE_WAY) continue;
        QD_TRY(qd_comm_broadcast(world, data, LARGE / 2, QD_F32, i % RANKS, NULL));
        QD_TRY(qd_comm_gather(world, data + first, data, LARGE, QD_F32, i % RANKS, NULL));
        if (rank == CULPRIT) QD_TRY(qd_comm_send(world, data, LARGE, QD_F32, 0, NULL));
        if (rank == 0) QD_TRY(qd_comm_recv(world, data, LARGE, QD_F32, CULPRIT, NULL));
    }
    return QD_FAIL(QD_DIFFERENT, "the culprit never stopped");
}

/* All ranks exchange their process ids. */
static qd_status find_culprit(qd_comm *world, pid_t *process)
{
    int64_t all[RANKS] = {0};
    all[qd_comm_rank(world)] = getpid();
    QD_TRY(qd_comm_all_reduce(world, all, all, RANKS, QD_I64, QD_MAX, NULL));
    *process = (pid_t)all[CULPRIT];
    return QD_OK;
}

/* The culprit stops in the middle of a large message and continues when the others have given up
 * and their memory is gone: it must not touch that memory. Memory is mapped, so that a touch is a
 * crash. */
static qd_status continue_late(qd_comm *world, bool culprit)
{
    pid_t process;
    size_t bytes = LARGE * sizeof(float);
    QD_TRY(find_culprit(world, &process));
    float *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return QD_FAIL(QD_NO_MEMORY, "no memory");
    qd_status status = end_in_the_middle(world, data, culprit, false, stop_now);
    munmap(data, bytes);
    if (qd_comm_rank(world) == 0) kill(process, SIGCONT);
    return status;
}

/* Rank 0 waits for rank 2, which waits for the culprit in another group. */
static qd_status chain(qd_comm *world, float *data, bool culprit, bool returns)
{
    qd_comm *group = NULL;
    int rank = qd_comm_rank(world);
    QD_TRY(qd_comm_split(world, rank == 0 ? -1 : 0, 0, "pair", &group));
    qd_status status = QD_OK;
    if (culprit && !returns) raise(SIGSTOP);
    if (rank == 0)
        status = qd_comm_recv(world, data, ELEMENTS, QD_F32, 2, NULL);
    else if (!culprit)
        status = qd_comm_all_reduce(group, data, data, ELEMENTS, QD_F32, QD_SUM, NULL);
    qd_comm_destroy(group);
    return status;
}

/* Work in flight on two communicators when the culprit does not arrive. */
static qd_status pending_work(qd_comm *world, float *data, bool culprit)
{
    qd_comm *group = NULL;
    qd_work *works[4];
    QD_TRY(qd_comm_split(world, 0, 0, "pending", &group));
    if (culprit) {
        qd_comm_destroy(group);
        return QD_OK;
    }
    float *other = calloc(LARGE, sizeof *other);
    QD_TRY(qd_comm_all_reduce(world, data, data, 10, QD_F32, QD_SUM, &works[0]));
    QD_TRY(qd_comm_all_gather(world, data + 50, data + 50, 12, QD_F32, &works[1]));
    QD_TRY(qd_comm_all_reduce(group, other, other, LARGE, QD_F32, QD_SUM, &works[2]));
    QD_TRY(qd_comm_recv(group, data + 80, 4, QD_F32, CULPRIT, &works[3]));
    qd_status first = QD_OK;
    char message[512] = "";
    for (int i = 0; i < 4; i++) {
        qd_status status = qd_work_wait(works[i]);
        if (status == QD_OK) return QD_FAIL(QD_DIFFERENT, "work %d succeeded without rank %d", i, CULPRIT);
        if (first == QD_OK) {
            first = status;
            snprintf(message, sizeof message, "%s", qd_error_message());
        }
    }
    qd_comm_destroy(group);
    free(other);
    return QD_FAIL(first, "%s", message);
}

static qd_status misbehave(qd_comm *world, const void *arg, float *data)
{
    bool culprit = qd_comm_rank(world) == CULPRIT;
    const int64_t n = ELEMENTS;
    if (is(arg, "kind"))
        return culprit ? qd_comm_all_gather(world, data, data, n, QD_F32, NULL)
                       : qd_comm_all_reduce(world, data, data, n, QD_F32, QD_SUM, NULL);
    if (is(arg, "count")) return qd_comm_all_reduce(world, data, data, culprit ? 50 : n, QD_F32, QD_SUM, NULL);
    if (is(arg, "large count")) return qd_comm_all_reduce(world, data, data, culprit ? LARGE : n, QD_F32, QD_SUM, NULL);
    if (is(arg, "type")) return qd_comm_all_reduce(world, data, data, n, culprit ? QD_I32 : QD_F32, QD_SUM, NULL);
    if (is(arg, "reduction"))
        return qd_comm_all_reduce(world, data, data, n, QD_F32, culprit ? QD_MAX : QD_SUM, NULL);
    if (is(arg, "root")) return qd_comm_broadcast(world, data, n, QD_F32, culprit ? 1 : 0, NULL);
    if (is(arg, "segments")) {
        qd_segment parts[2][RANKS] = {{{0, 10}, {10, 10}, {20, 10}}, {{0, 10}, {20, 10}, {10, 10}}};
        qd_segment_list lists[RANKS];
        for (int r = 0; r < RANKS; r++) lists[r] = (qd_segment_list){&parts[culprit][r], 1};
        return qd_comm_all_gather_v(world, data + 60, data, lists, QD_F32, NULL);
    }
    if (is(arg, "pair")) {
        int64_t in[RANKS] = {2, 2, 2}, out[RANKS] = {2, 2, 2}, at[RANKS] = {0, 10, 20};
        if (culprit) in[2] = 5;
        QD_TRY(qd_comm_all_to_all_v(world, data, in, at, data + 50, out, at, QD_F32, NULL));
        return qd_comm_barrier(world, NULL); /* rank 0 and the culprit may complete these without error */
    }
    if (is(arg, "order")) {
        if (culprit) {
            QD_TRY(qd_comm_barrier(world, NULL));
            return qd_comm_all_reduce(world, data, data, n, QD_F32, QD_SUM, NULL);
        }
        QD_TRY(qd_comm_all_reduce(world, data, data, n, QD_F32, QD_SUM, NULL));
        return qd_comm_barrier(world, NULL);
    }
    if (is(arg, "message")) { /* the receiver expects less than the culprit sends */
        if (culprit) QD_TRY(qd_comm_send(world, data, LARGE, QD_F32, 0, NULL));
        if (qd_comm_rank(world) == 0) QD_TRY(qd_comm_recv(world, data, 7, QD_F32, CULPRIT, NULL));
        return qd_comm_barrier(world, NULL);
    }
    if (is(arg, "abort")) {
        if (culprit) {
            qd_comm_abort(world, "the disk is full");
            qd_status after = qd_comm_barrier(world, NULL);
            return after == QD_REMOTE ? QD_OK : QD_FAIL(QD_DIFFERENT, "an aborted world still works");
        }
        QD_TRY(qd_comm_all_reduce(world, data, data, LARGE, QD_F32, QD_SUM, NULL));
        return qd_comm_barrier(world, NULL);
    }
    if (is(arg, "missing")) return culprit ? QD_OK : qd_comm_all_reduce(world, data, data, n, QD_F32, QD_SUM, NULL);
    if (is(arg, "missing large"))
        return culprit ? QD_OK : qd_comm_all_reduce(world, data, data, LARGE, QD_F32, QD_SUM, NULL);
    if (is(arg, "missing send"))
        return culprit ? QD_OK : qd_comm_recv(world, data, n, QD_F32, CULPRIT, NULL);
    if (is(arg, "indirect") || is(arg, "stop indirectly")) return chain(world, data, culprit, is(arg, "indirect"));
    if (is(arg, "pending")) return pending_work(world, data, culprit);
    if (is(arg, "split")) {
        qd_comm *group = NULL;
        return culprit ? QD_OK : qd_comm_split(world, 0, 0, "never", &group);
    }
    if (is(arg, "stop") || is(arg, "kill")) {
        if (culprit) raise(is(arg, "stop") ? SIGSTOP : SIGKILL);
        return qd_comm_all_reduce(world, data, data, n, QD_F32, QD_SUM, NULL);
    }
    if (is(arg, "continues")) return continue_late(world, culprit);
    static const struct {
        const char *name;
        traffic what;
        void (*end)(int);
    } ends[] = {{"stop in the middle", SUMS, stop_now},
                {"stop while writing", ONE_WAY, stop_now},
                {"stop while writing, shared", ONE_WAY, stop_now},
                {"stop while helping, shared", EXCHANGES, stop_now},
                {"kill while writing", ONE_WAY, die_now},
                {"kill while writing, shared", ONE_WAY, die_now},
                {"kill while helping, shared", EXCHANGES, die_now}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (is(arg, ends[i].name)) return end_in_the_middle(world, data, culprit, ends[i].what, ends[i].end);
    return QD_FAIL(QD_USAGE, "no such scenario");
}

static qd_status body(qd_comm *world, void *arg)
{
    float *data = NULL;
    bool shared = strstr(((const qd_ranks_call *)arg)->text, "shared") != NULL;
    if (shared) QD_TRY(qd_comm_alloc(world, LARGE * (int64_t)sizeof *data, (void **)&data));
    if (!shared) data = calloc(LARGE, sizeof *data);
    if (!data) return QD_FAIL(QD_NO_MEMORY, "no memory");
    /* Operations 1 and 2 are correct, so messages must say 3. */
    qd_status status = QD_OK;
    for (int i = 0; i < 2 && status == QD_OK; i++) status = qd_comm_barrier(world, NULL);
    qd_comm_at(world, qd_comm_rank(world) == CULPRIT ? "step 3, block.1" : "step 3, block.0");
    if (status == QD_OK) status = misbehave(world, arg, data);
    if (shared)
        qd_comm_free(world, data);
    else
        free(data);
    return status;
}

static const qd_ranks_entry bodies[] = {{"misbehave", body}};

typedef struct scenario {
    const char *name;
    qd_status status;       /* what at least one of the others must get; they may get QD_REMOTE instead */
    const char *text;       /* in every message, besides the culprit's name */
    bool culprit_fails;     /* and the expected error: mismatch or remote */
    bool processes_only;    /* or, if the name begins with "stop", MPI or UCX */
} scenario;

/* The largest delay of a thread that sleeps for 10 ms at a time, in seconds. */
typedef struct sleeper {
    pthread_t thread;
    atomic_bool stop;
    double latest;
} sleeper;

static void *sleep_on(void *context)
{
    sleeper *s = context;
    while (!atomic_load(&s->stop)) {
        double before = qd_clock_now();
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        double late = qd_clock_now() - before - 0.01;
        s->latest = late > s->latest ? late : s->latest;
    }
    return NULL;
}

/* The kind of ranks that this process tests. */
static qd_ranks_mode mode;

#define COMPLAIN(...) return snprintf(why, size, __VA_ARGS__), false

/* What rank r of a scenario must have got. */
static bool good_result(const scenario *s, int r, const qd_ranks_result *got, char *why, size_t size)
{
    const char *ranks = qd_ranks_mode_name(mode);
    if (r == CULPRIT) {
        bool died = strncmp(s->name, "kill", 4) == 0 || strncmp(s->name, "stop", 4) == 0;
        /* mpirun continues a stopped process before it ends it, and that process may finish
         * first. */
        if (got->returned == died && !(died && mode == QD_RANKS_MPI))
            COMPLAIN("%s, %s: the culprit %s", s->name, ranks, died ? "lives" : "did not return");
        if (!died && (got->status != QD_OK) != s->culprit_fails)
            COMPLAIN("%s, %s: the culprit got '%s'", s->name, ranks, got->message);
        return true;
    }
    if (!got->returned) COMPLAIN("%s, %s: rank %d did not return", s->name, ranks, r);
    if (got->status != s->status && got->status != QD_REMOTE)
        COMPLAIN("%s, %s: rank %d got status %d: %s", s->name, ranks, r, (int)got->status, got->message);
    /* The culprit is the rank that did not arrive, also for a rank that waits for it indirectly. */
    bool missing = strncmp(s->text, "did not arrive", 14) == 0;
    bool other = strstr(got->message, "rank 0 (last in") || strstr(got->message, "rank 2 (last in");
    if (!strstr(got->message, missing ? "rank 1 (last in" : "rank 1") || (missing && other) || !strstr(got->message, s->text))
        COMPLAIN("%s, %s: rank %d: '%s' does not name rank 1 alone and say '%s'", s->name, ranks, r, got->message, s->text);
    if (mode != QD_RANKS_MPI && got->seconds > deadline + 5) /* generous: the machine may be busy */
        COMPLAIN("%s, %s: rank %d took %.1f s", s->name, ranks, r, got->seconds);
    return true;
}

static bool good_run(const scenario *s, bool tell, char *why, size_t size)
{
    qd_ranks_result results[RANKS];
    qd_ranks_options options = {
        .text = s->name, .deadline_seconds = deadline, .limit_seconds = 60, .tell_deaths = tell};
    if (qd_ranks_run("misbehave", mode, RANKS, &options, results) != QD_OK)
        COMPLAIN("%s, %s: %s", s->name, qd_ranks_mode_name(mode), qd_error_message());
    bool seen = false;
    for (int r = 0; r < RANKS; r++) {
        if (!good_result(s, r, &results[r], why, size)) return false;
        seen = seen || (r != CULPRIT && results[r].status == s->status);
    }
    /* The culprit may find a mismatch first; then all others get its error. */
    if (!seen && s->status != QD_MISMATCH)
        COMPLAIN("%s, %s: no rank got '%s'", s->name, qd_ranks_mode_name(mode), qd_status_text(s->status));
    return true;
}

/* On a machine where a thread wakes up as late as half the deadline, innocent ranks miss it too,
 * and are rightly named with the culprit. Such a run shows nothing and is repeated. */
static void run_scenario(const scenario *s, bool tell)
{
    for (int attempt = 1;; attempt++) {
        char why[2048] = "";
        sleeper watch = {.latest = 0.0};
        pthread_create(&watch.thread, NULL, sleep_on, &watch);
        bool good = good_run(s, tell, why, sizeof why);
        atomic_store(&watch.stop, true);
        pthread_join(watch.thread, NULL);
        if (good) return;
        if (watch.latest < deadline / 2 || attempt == 5) fail_msg("%s (woke up %.2f s late)", why, watch.latest);
        printf("again, the machine was %.2f s late: %s\n", watch.latest, why);
    }
}

static void run_scenarios(const scenario *scenarios, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!sample_has(i, (size_t)mode, 2)) continue;
        bool stops = strncmp(scenarios[i].name, "stop", 4) == 0;
        bool stoppable = mode == QD_RANKS_PROCESSES || (stops && (mode == QD_RANKS_MPI || mode == QD_RANKS_UCX));
        if (scenarios[i].processes_only && !stoppable) continue;
        run_scenario(&scenarios[i], false);
    }
}

static void test_mismatch(void **unused)
{
    (void)unused;
    static const scenario scenarios[] = {
        {"kind", QD_MISMATCH, "all-gather of 100 fp32", true, false},
        {"count", QD_MISMATCH, "all-reduce of 50 fp32 (sum)", true, false},
        {"large count", QD_MISMATCH, "as operation 3 of group world", true, false},
        {"type", QD_MISMATCH, "all-reduce of 100 int32 (sum)", true, false},
        {"reduction", QD_MISMATCH, "all-reduce of 100 fp32 (max)", true, false},
        {"root", QD_MISMATCH, "(root 1)", true, false},
        {"segments", QD_MISMATCH, "segment", true, false},
        {"pair", QD_MISMATCH, "sends 5 elements to rank 2, which expects 2", true, false},
        {"order", QD_MISMATCH, "'step 3, block.1'", true, false},
        {"message", QD_MISMATCH, "500000 fp32", true, false},
    };
    run_scenarios(scenarios, sizeof scenarios / sizeof *scenarios);
}

static void test_missing(void **unused)
{
    (void)unused;
    static const scenario scenarios[] = {
        {"missing", QD_TIMEOUT, "'step 3, block.1'", false, false},
        {"missing large", QD_TIMEOUT, "operation 3 of group world", false, false},
        {"missing send", QD_TIMEOUT, "recv of 100 fp32", false, false},
        {"pending", QD_TIMEOUT, "did not arrive", false, false},
        {"indirect", QD_TIMEOUT, "did not arrive within 1.5 s in all-reduce of 100 fp32 (sum), operation 1 of group pair",
         false, false},
        {"split", QD_TIMEOUT, "all-gather", false, false},
    };
    run_scenarios(scenarios, sizeof scenarios / sizeof *scenarios);
}

static void test_abort(void **unused)
{
    (void)unused;
    static const scenario scenarios[] = {{"abort", QD_REMOTE, "the disk is full", false, false}};
    run_scenarios(scenarios, 1);
}

static void test_stopped(void **unused)
{
    (void)unused;
    static const scenario scenarios[] = {
        {"stop", QD_TIMEOUT, "did not arrive", false, true},
        {"stop in the middle", QD_TIMEOUT, "did not arrive", false, true},
        {"stop while writing", QD_TIMEOUT, "did not arrive", false, true},
        {"stop while writing, shared", QD_TIMEOUT, "did not arrive", false, true},
        {"stop while helping, shared", QD_TIMEOUT, "did not arrive", false, true},
        {"stop indirectly", QD_TIMEOUT, "did not arrive within 1.5 s in all-reduce", false, true},
    };
    run_scenarios(scenarios, sizeof scenarios / sizeof *scenarios);
    static const scenario late = {"continues", QD_TIMEOUT, "did not arrive", true, true};
    if (mode == QD_RANKS_PROCESSES || mode == QD_RANKS_STAGED || mode == QD_RANKS_MPI || mode == QD_RANKS_UCX)
        run_scenario(&late, false);
}

static void test_killed(void **unused)
{
    (void)unused;
    /* Without a launcher: the connections of the rendezvous tell. */
    static const scenario alone = {"kill", QD_REMOTE, "its process has ended", false, true};
    static const scenario in_between = {"kill while writing", QD_REMOTE, "its process has ended", false, true};
    if (mode == QD_RANKS_UCX) {
        run_scenario(&alone, false);
        run_scenario(&in_between, false);
    }
    if (mode != QD_RANKS_PROCESSES) return;
    static const scenario silent = {"kill", QD_TIMEOUT, "did not arrive", false, true};
    run_scenario(&silent, false);
    static const scenario told = {"kill", QD_REMOTE, "killed by signal 9", false, true};
    run_scenario(&told, true);
    static const scenario writing = {"kill while writing", QD_REMOTE, "killed by signal 9", false, true};
    run_scenario(&writing, true);
    static const scenario shared = {"kill while writing, shared", QD_REMOTE, "killed by signal 9", false, true};
    run_scenario(&shared, true);
    static const scenario helping = {"kill while helping, shared", QD_REMOTE, "killed by signal 9", false, true};
    run_scenario(&helping, true);
}

static int run_all(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_mismatch), cmocka_unit_test(test_missing),
                                       cmocka_unit_test(test_abort), cmocka_unit_test(test_stopped),
                                       cmocka_unit_test(test_killed)};
    return cmocka_run_group_tests_name(qd_ranks_mode_name(mode), tests, NULL, NULL);
}

/* A process for each kind of ranks; their output is printed one after another. */
int main(int argc, char **argv)
{
    qd_ranks_main(argc, argv, bodies, sizeof bodies / sizeof *bodies);
    pid_t children[QD_RANKS_MODE_COUNT] = {0};
    FILE *said[QD_RANKS_MODE_COUNT] = {NULL};
    for (int i = 0; i < QD_RANKS_MODE_COUNT; i++) {
        if (!qd_ranks_mode_available((qd_ranks_mode)i) || !(said[i] = tmpfile())) continue;
        if ((children[i] = fork()) != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fileno(said[i]), STDOUT_FILENO);
        dup2(fileno(said[i]), STDERR_FILENO);
        mode = (qd_ranks_mode)i;
        exit(run_all());
    }
    bool good = true;
    for (int i = 0; i < QD_RANKS_MODE_COUNT; i++) {
        int status = 1;
        if (!qd_ranks_mode_available((qd_ranks_mode)i)) continue;
        good = children[i] > 0 && waitpid(children[i], &status, 0) == children[i] && status == 0 && good;
        if (!said[i]) continue;
        rewind(said[i]);
        for (int c; (c = getc(said[i])) != EOF;) putchar(c);
        fclose(said[i]);
    }
    return good ? 0 : 1;
}
