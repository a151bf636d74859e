/* The error record: message, context, trace, threads, and overflow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/error.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static qd_status inner(int value)
{
    if (value < 0)
        return QD_FAIL(QD_IO, "value %d is negative; it must be 0 or more", value);
    return QD_OK;
}

static qd_status outer(int value)
{
    QD_TRY(inner(value));
    return QD_OK;
}

static qd_status with_cleanup(int value, int *cleaned)
{
    qd_status status = QD_OK;
    QD_TRY_DONE(outer(value));
done:
    ++*cleaned;
    return status;
}

static void message_and_trace(void **state)
{
    (void)state;
    int cleaned = 0;
    qd_error_clear();
    assert_string_equal(qd_error_message(), "");
    assert_int_equal(with_cleanup(3, &cleaned), QD_OK);
    assert_string_equal(qd_error_message(), "");
    assert_int_equal(with_cleanup(-3, &cleaned), QD_IO);
    assert_int_equal(cleaned, 2);
    assert_string_equal(qd_error_message(), "value -3 is negative; it must be 0 or more");
    /* Innermost first, one location per line. */
    const char *first = strstr(qd_error_trace(), "inner"), *second = strstr(qd_error_trace(), "outer");
    const char *third = strstr(qd_error_trace(), "with_cleanup");
    assert_non_null(first);
    assert_true(first < second && second < third);
    qd_error_clear();
    assert_string_equal(qd_error_trace(), "");
}

static void prefix_and_replace(void **state)
{
    (void)state;
    assert_int_equal(qd_error_prefix(QD_FAIL(QD_USAGE, "bad"), "%s:%d: ", "run.yaml", 3), QD_USAGE);
    assert_string_equal(qd_error_message(), "run.yaml:3: bad");
    /* The old message may be an argument of the new one. */
    assert_int_equal(QD_FAIL(QD_REMOTE, "rank 1: %s", qd_error_message()), QD_REMOTE);
    assert_string_equal(qd_error_message(), "rank 1: run.yaml:3: bad");
    qd_error_prefix(QD_USAGE, "[%s] ", qd_error_message());
    assert_string_equal(qd_error_message(), "[rank 1: run.yaml:3: bad] rank 1: run.yaml:3: bad");
}

/* A saved error is restored completely, whatever fails meanwhile. */
static void keeping(void **state)
{
    (void)state;
    qd_error_record kept;
    assert_int_equal(QD_FAIL(QD_IO, "the first"), QD_IO);
    char trace[256];
    snprintf(trace, sizeof trace, "%s", qd_error_trace());
    qd_error_keep(&kept);
    assert_int_equal(QD_FAIL(QD_USAGE, "another"), QD_USAGE);
    qd_error_put_back(&kept);
    assert_string_equal(qd_error_message(), "the first");
    assert_string_equal(qd_error_trace(), trace);
    qd_error_clear();
}

static void overflow(void **state)
{
    (void)state;
    char long_text[5001];
    for (size_t i = 0; i < 5000; i += 2)
        memcpy(long_text + i, "\xc3\xa9", 2); /* two bytes each: truncation must not split one */
    long_text[5000] = '\0';
    QD_FAIL(QD_USAGE, "x%s", long_text);
    size_t length = strlen(qd_error_message());
    assert_true(length > 1000 && length < 5000);
    assert_int_equal(length % 2, 1);
    assert_memory_equal(qd_error_message(), "x\xc3\xa9", 3);
    for (int i = 0; i < 1000; i++)
        qd_error_frame("somewhere/far/away.c", i, "function");
    assert_non_null(strstr(qd_error_trace(), "away.c:0 function"));
    assert_non_null(strstr(qd_error_trace(), " more"));
    assert_true(strlen(qd_error_trace()) < 4096);
    for (int i = 0; i < 100; i++)
        qd_error_prefix(QD_USAGE, "%s", long_text);
    assert_true(strlen(qd_error_message()) < 5000);
}

static void *other_thread(void *argument)
{
    (void)argument;
    const char *before = qd_error_message();
    if (before[0] != '\0')
        return "the record of another thread was visible";
    QD_FAIL(QD_TIMEOUT, "theirs");
    return NULL;
}

static void per_thread(void **state)
{
    (void)state;
    pthread_t thread;
    void *complaint;
    QD_FAIL(QD_IO, "mine");
    assert_int_equal(pthread_create(&thread, NULL, other_thread, NULL), 0);
    pthread_join(thread, &complaint);
    assert_null(complaint);
    assert_string_equal(qd_error_message(), "mine");
}

static void texts(void **state)
{
    (void)state;
    assert_string_equal(qd_status_text(QD_OK), "ok");
    assert_string_equal(qd_status_text(QD_NO_MEMORY), "out of memory");
    assert_string_equal(qd_status_text(QD_SYSTEM), "a library or system call failed");
    assert_string_equal(qd_status_text((qd_status)99), "unknown status");
    assert_string_equal(qd_status_text((qd_status)-1), "unknown status");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(message_and_trace),
        cmocka_unit_test(prefix_and_replace),
        cmocka_unit_test(keeping),
        cmocka_unit_test(overflow),
        cmocka_unit_test(per_thread),
        cmocka_unit_test(texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
