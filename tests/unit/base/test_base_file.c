/* Writing files where the system gets in the way: a write that takes nothing ends, and a file that
 * another machine removes from next to its place is written again.
 * ctest: wrap write rename */
#include "base/file.h"
#include "data/shard.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#include "support/ok.h"

static int takes = -1; /* bytes that a write takes at most; below 0: all */
static int stolen;     /* so many times the new file is removed before it is renamed */

ssize_t __real_write(int fd, const void *data, size_t count);
ssize_t __wrap_write(int fd, const void *data, size_t count);

ssize_t __wrap_write(int fd, const void *data, size_t count)
{
    return takes < 0 || fd <= STDERR_FILENO ? __real_write(fd, data, count)
           : takes == 0                     ? 0
                                            : __real_write(fd, data, count < (size_t)takes ? count : (size_t)takes);
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);

int __wrap_rename(const char *from, const char *to)
{
    if (stolen > 0) {
        stolen--;
        assert_int_equal(unlink(from), 0);
    }
    return __real_rename(from, to);
}

static void holds(const char *path, const char *expected)
{
    char *text;
    size_t length;
    ok(qd_file_read(path, 1000, &text, &length));
    assert_string_equal(text, expected);
    free(text);
}

static void fails(qd_status status, const char *part)
{
    takes = -1;
    assert_int_equal(status, QD_IO);
    if (!strstr(qd_error_message(), part))
        fail_msg("'%s' is not in: %s", part, qd_error_message());
}

static void writes_that_take_little(void **state)
{
    const char *path = scratch_text(state, "a.txt", "old");
    takes = 2;
    ok(qd_file_replace(path, "seven b", 7));
    holds(path, "seven b");
    takes = 0;
    alarm(20);
    fails(qd_file_replace(path, "new", 3), "a.txt: cannot be written: No space left on device");
    holds(path, "seven b");
    qd_shard_writer *writer = NULL;
    takes = 0;
    qd_status status = qd_shard_writer_create(scratch_path(state, "a.qds"), 16, 0, &writer);
    fails(status, "No space left on device");
    alarm(0);
}

/* Processes of another machine, or container, cannot be asked whether they live: their files may be
 * taken for leftovers. */
static void removed_by_another_machine(void **state)
{
    const char *path = scratch_text(state, "a.txt", "old");
    stolen = 2;
    ok(qd_file_replace(path, "new", 3));
    holds(path, "new");
    stolen = 100;
    fails(qd_file_replace(path, "third", 5), "a.txt: cannot be put in place");
    assert_true(stolen > 50);
    stolen = 0;
    holds(path, "new");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(writes_that_take_little, scratch_setup, scratch_teardown),
                                       cmocka_unit_test_setup_teardown(removed_by_another_machine, scratch_setup, scratch_teardown)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
