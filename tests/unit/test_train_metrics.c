/* metrics.jsonl on a disk that fills up or fails: whole lines only, training continues, and what is
 * left out is counted. Lines are on the disk before a checkpoint refers to them.
 * ctest: wrap write ftruncate fdatasync renameat2 */
#include "support/layout.h"
#include "support/scratch.h"
#include "train/run/metrics.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

static int error;      /* 0: the disk has space */
static bool cut_short; /* half of a line still fits */

ssize_t __real_write(int fd, const void *data, size_t count);
ssize_t __wrap_write(int fd, const void *data, size_t count);

ssize_t __wrap_write(int fd, const void *data, size_t count)
{
    if (error == 0)
        return __real_write(fd, data, count);
    if (cut_short) {
        cut_short = false;
        return __real_write(fd, data, count / 2);
    }
    errno = error;
    return -1;
}

int __real_ftruncate(int fd, off_t length);
int __wrap_ftruncate(int fd, off_t length);

int __wrap_ftruncate(int fd, off_t length)
{
    if (error != EROFS && error != EIO)
        return __real_ftruncate(fd, length);
    errno = error;
    return -1;
}

static int sync_error;      /* 0: the disk keeps what it was given */
static off_t synced;        /* bytes of the file at the last sync */
static off_t synced_before; /* the same, when the last checkpoint got its name */

int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);

int __wrap_fdatasync(int fd)
{
    struct stat info;
    if (sync_error != 0) {
        errno = sync_error;
        return -1;
    }
    assert_int_equal(fstat(fd, &info), 0);
    synced = info.st_size;
    return __real_fdatasync(fd);
}

int __real_renameat2(int a, const char *from, int b, const char *to, unsigned flags);
int __wrap_renameat2(int a, const char *from, int b, const char *to, unsigned flags);

int __wrap_renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    if (strstr(to, "checkpoints/step-"))
        synced_before = synced;
    return __real_renameat2(a, from, b, to, flags);
}

/* The steps of the file's lines, "1 2 5 "; a line that is torn fails. */
static void lines_are(const char *path, const char *expected)
{
    size_t length;
    char found[256] = "", *text = (char *)scratch_read(path, &length);
    text = realloc(text, length + 1);
    assert_non_null(text);
    text[length] = '\0';
    for (char *line = text, *end; *line; line = end + 1) {
        long long step;
        end = strchr(line, '\n');
        assert_non_null(end);
        assert_int_equal(end[-1], '}');
        assert_int_equal(sscanf(line, "{\"step\":%lld", &step), 1);
        snprintf(found + strlen(found), sizeof found - strlen(found), "%lld ", step);
    }
    free(text);
    assert_string_equal(found, expected);
}

static void full_disk(void **state)
{
    const char *path = scratch_path(state, "metrics.jsonl"), *remark;
    for (int resumed = 0; resumed < 2; resumed++) { /* the second resumes after step 2 of the first */
        qd_metrics *m;
        ok(qd_metrics_create(path, resumed ? 2 : 0, &m));
        for (int step = resumed ? 3 : 1; step <= 9; step++) {
            error = step == 4 || step == 7 ? ENOSPC : step == 5 ? EDQUOT : 0;
            cut_short = step == 4 || step == 5;
            ok(qd_metrics_write(m, &(qd_train_step){.step = step, .loss = 1.5}, &remark));
            if (step == 4)
                assert_non_null(strstr(remark, "metrics.jsonl: No space left on device: "));
            else
                assert_null(remark);
        }
        assert_non_null(strstr(qd_metrics_lost(m), "metrics.jsonl: 3 steps were not written"));
        qd_metrics_destroy(m);
        lines_are(path, "1 2 3 6 8 9 ");
    }
}

/* A failing disk, and a file system that became read-only because of it, refuse everything,
 * including the removal of a partial line: that is done before the next line. */
static void failing_disk(void **state)
{
    const char *path = scratch_path(state, "metrics.jsonl"), *remark;
    static const int errors[] = {0, EIO, EIO, EROFS, 0, 0, ESTALE, 0};
    qd_metrics *m;
    ok(qd_metrics_create(path, 0, &m));
    for (int step = 1; step <= 8; step++) {
        error = errors[step - 1];
        cut_short = step == 2;
        ok(qd_metrics_write(m, &(qd_train_step){.step = step, .loss = 1.5}, &remark));
        if (step == 2)
            assert_non_null(strstr(remark, "metrics.jsonl: Input/output error: steps are not written until it can be written again"));
        else
            assert_null(remark);
    }
    assert_non_null(strstr(qd_metrics_lost(m), "metrics.jsonl: 4 steps were not written: Input/output error"));
    qd_metrics_destroy(m);
    lines_are(path, "1 5 6 8 ");
}

static void size_is(const char *path, off_t expected)
{
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_size, expected);
}

/* All lines of a run, before its checkpoint is there. */
static void on_the_disk_before_a_checkpoint(void **state)
{
    char words[1024], path[600];
    const char *text = scratch_text(state, "text", "a text of some letters, as many as a few windows of tokens take, and then some more");
    synced = synced_before = 0;
    snprintf(words, sizeof words,
             "model.layers=1 model.hidden=8 model.heads=2 model.vocab=256 data.seq=8 train.global_batch=2 train.steps=5 run.threads=1 "
             "data.path=%s run.dir=%s/run", text, (const char *)*state);
    snprintf(path, sizeof path, "%s/run/metrics.jsonl", (const char *)*state);
    qd_options *options = layout_options(words);
    ok(qd_train(options, NULL, NULL));
    qd_options_destroy(options);
    lines_are(path, "1 2 3 4 5 ");
    size_is(path, synced_before);
}

/* And at the end, where no checkpoint follows. A disk that does not keep them is reported, once. */
static void on_the_disk_at_the_end(void **state)
{
    const char *path = scratch_path(state, "metrics.jsonl"), *remark;
    qd_metrics *m;
    synced = 0;
    ok(qd_metrics_create(path, 0, &m));
    ok(qd_metrics_write(m, &(qd_train_step){.step = 1}, &remark));
    assert_null(qd_metrics_sync(m));
    size_is(path, synced);
    ok(qd_metrics_write(m, &(qd_train_step){.step = 2}, &remark));
    sync_error = EIO;
    remark = qd_metrics_sync(m);
    assert_non_null(remark);
    assert_non_null(strstr(remark, "metrics.jsonl: Input/output error: "));
    assert_null(qd_metrics_sync(m));
    sync_error = 0;
    qd_metrics_destroy(m);
    size_is(path, synced);
    assert_null(qd_metrics_sync(NULL));
}

static void pipe_in_its_place(void **state)
{
    const char *path = scratch_path(state, "metrics.jsonl");
    qd_metrics *m = NULL;
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(20);
    qd_status status = qd_metrics_create(path, 0, &m);
    alarm(0);
    assert_int_equal(status, QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "metrics.jsonl: is a named pipe; a file is needed"));
}

static void other_failures(void **state)
{
    const char *path = scratch_path(state, "metrics.jsonl"), *remark;
    qd_metrics *m;
    ok(qd_metrics_create(path, 0, &m));
    ok(qd_metrics_write(m, &(qd_train_step){.step = 1}, &remark));
    error = EINVAL;
    cut_short = true;
    assert_int_equal(qd_metrics_write(m, &(qd_train_step){.step = 2}, &remark), QD_IO);
    error = 0;
    assert_null(remark);
    assert_null(qd_metrics_lost(m));
    assert_null(qd_metrics_lost(NULL));
    qd_metrics_destroy(m);
    lines_are(path, "1 ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(full_disk, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(failing_disk, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(on_the_disk_before_a_checkpoint, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(on_the_disk_at_the_end, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(pipe_in_its_place, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(other_failures, scratch_setup, scratch_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
