/* The table of ways of local collectives as text, its measurement, and the file that keeps it.
 * ctest: wrap qd_local_ways_measure */
#include "comm/local/ways.h"
#include "support/scratch.h"
#include "train/launch/collective_ways.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

void __real_qd_local_ways_measure(double seconds, char *text, size_t size, bool *settled);
void __wrap_qd_local_ways_measure(double seconds, char *text, size_t size, bool *settled);
static int measured;
static int disturbed; /* this many measurements do not settle */
void __wrap_qd_local_ways_measure(double seconds, char *text, size_t size, bool *settled)
{
    qd_local_ways ways = qd_local_ways_default();
    assert_true(seconds > 0 && seconds <= 0.2);
    ways.stream_bytes = 1000 + ++measured;
    qd_local_ways_write(&ways, text, size);
    *settled = disturbed <= 0;
    disturbed--;
}

static void test_text(void **state)
{
    (void)state;
    char text[QD_LOCAL_WAYS_MOST], again[QD_LOCAL_WAYS_MOST];
    qd_local_ways ways = qd_local_ways_default(), other = ways;
    const uint64_t mark = qd_local_ways_mark(&ways);
    assert_int_equal(qd_local_ways_read("stream_bytes=5 far_copy=lines  reach_most=-1", &ways), QD_OK);
    assert_true(ways.stream_bytes == 5 && ways.far_copy == QD_COPY_LINES && ways.reach_most == -1);
    assert_true(ways.stream_from == other.stream_from && qd_local_ways_mark(&ways) != mark);
    qd_local_ways_write(&ways, text, sizeof text);
    assert_int_equal(qd_local_ways_read(text, &other), QD_OK);
    qd_local_ways_write(&other, again, sizeof again);
    assert_string_equal(text, again);
    assert_memory_equal(&ways, &other, sizeof ways);
    static const char *const wrong[] = {
        "stream_bytes",    "stream_bytes=",  "stream_bytes=-1", "stream_bytes=1k",         "stream_bytes=99999999999999999999",
        "far_copy=3",      "pass_from=0",    "far_copy=linesx", "bytes_stream=1",          "=",
        "reach_most=-2",   "stream_bytes=5 far_copy",           "stream_bytes=5,stream_from=5"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(qd_local_ways_read(wrong[i], &other), QD_USAGE);
        assert_memory_equal(&ways, &other, sizeof ways);
    }
    /* The longest text fits. */
    const size_t members = sizeof ways / sizeof(int64_t);
    for (size_t i = 0; i < members; i++) ((int64_t *)&ways)[i] = INT64_MAX;
    ways.stream_copy = ways.far_copy = QD_COPY_PAGES;
    qd_local_ways_write(&ways, text, sizeof text);
    assert_int_equal(qd_local_ways_read(text, &other), QD_OK);
    assert_memory_equal(&ways, &other, sizeof ways);
}

static void test_measurement(void **state)
{
    (void)state;
    char text[QD_LOCAL_WAYS_MOST];
    bool settled;
    qd_local_ways ways = qd_local_ways_default();
    __real_qd_local_ways_measure(0.001, text, sizeof text, &settled);
    assert_int_equal(qd_local_ways_read(text, &ways), QD_OK);
    assert_true((!settled || ways.stream_bytes > 0) && ways.stream_from == -1);
    assert_true(ways.stream_copy != QD_COPY_NEAR && ways.far_copy != QD_COPY_NEAR);
}

static void put(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void get(const char *path, char *text, size_t size)
{
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
}

/* How many measurements are made for the file, and whether it has one afterwards. */
static void expect(const char *path, int measures, bool keeps)
{
    qd_collective_ways ways;
    const int before = measured;
    qd_collective_ways_find(path, true, &ways);
    assert_int_equal(measured - before, measures);
    assert_true(ways.kept == keeps && (ways.text[0] == '\0') == ways.disturbed);
    if (!keeps) return;
    qd_collective_ways known;
    qd_collective_ways_find(path, false, &known);
    assert_true(known.kept && known.seconds == 0);
    assert_string_equal(known.text, ways.text);
}

static void test_file(void **state)
{
    (void)state;
    char path[512], good[4096], text[4096], changed[8192];
    qd_collective_ways ways;
    snprintf(path, sizeof path, "%s/collectives", scratch_folder());
    qd_collective_ways_find(path, false, &ways); /* no file */
    assert_string_equal(ways.text, "");
    expect(path, 1, true);
    expect(path, 0, true);
    get(path, good, sizeof good);
    static const char *const damaged[] = {"",
                                          "quad",
                                          "quadrille collectives 2\n",
                                          "quadrille collectives 1\nmachine: stream_bytes=1 speed=2\n",
                                          "quadrille collectives 1\nno line end: stream_bytes=1",
                                          "quadrille collectives 1\n\n"};
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
        put(path, damaged[i]);
        expect(path, 1, true);
        expect(path, 0, true);
    }
    /* Another file, by a mistake in the path, is never replaced. */
    static const char *const others[] = {"x", "my notes\n", "quadrille tuning 4; a GPU\n"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        put(path, others[i]);
        expect(path, 1, false);
        get(path, changed, sizeof changed);
        assert_string_equal(changed, others[i]);
    }
    put(path, "");
    expect(path, 1, true);
    /* Cut off anywhere, it is used or measured again, but never misread. */
    for (size_t length = 0; length < strlen(good); length++) {
        snprintf(text, sizeof text, "%.*s", (int)length, good);
        put(path, text);
        expect(path, 1, true);
    }
    /* The line of another machine stays, and this machine does not use it. */
    put(path, "quadrille collectives 1\nAn Abacus, 1 core: stream_bytes=77\n");
    expect(path, 1, true);
    get(path, changed, sizeof changed);
    assert_non_null(strstr(changed, "An Abacus, 1 core: stream_bytes=77\n"));
    qd_collective_ways_find(path, false, &ways);
    assert_null(strstr(ways.text, "=77"));
    /* Disturbed by other programs: measured again; what never settles is neither used nor kept. */
    disturbed = 3;
    remove(path);
    expect(path, 3, false);
    disturbed = 2;
    expect(path, 3, true);
    disturbed = 1;
    remove(path);
    expect(path, 2, true);
    /* No file can be written, or none is wanted. */
    expect("/proc/none/collectives", 1, false);
    expect(scratch_folder(), 1, false);
    qd_collective_ways_find("none", true, &ways);
    assert_true(ways.text[0] == '\0' && !ways.kept);
}

/* Runs that start at once. */
static void test_at_once(void **state)
{
    (void)state;
    enum { RUNS = 6 };
    char path[512];
    pid_t runs[RUNS];
    snprintf(path, sizeof path, "%s/at-once", scratch_folder());
    put(path, "broken");
    for (int i = 0; i < RUNS; i++)
        if ((runs[i] = fork()) == 0) {
            qd_collective_ways ways;
            bool good = true;
            for (int k = 0; k < 20; k++) {
                if (k % 5 == i % 5) remove(path);
                qd_collective_ways_find(path, true, &ways);
                good = good && ways.text[0] && qd_local_ways_check(ways.text) == QD_OK;
            }
            _exit(!good);
        }
    for (int i = 0; i < RUNS; i++) {
        int status;
        assert_int_equal(waitpid(runs[i], &status, 0), runs[i]);
        assert_int_equal(status, 0);
    }
    expect(path, access(path, F_OK) != 0, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_text), cmocka_unit_test(test_measurement), cmocka_unit_test(test_file),
                                       cmocka_unit_test(test_at_once)};
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
