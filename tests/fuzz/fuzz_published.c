/* libFuzzer target of files of published layouts (plan --published): rows or one clear error. */
#define _GNU_SOURCE
#include <assert.h>
#include <quadrille/plan.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    qd_plan_row *rows = NULL;
    int count = 0;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        assert(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size)
        return 0;
    qd_status status = qd_plan_rows(path, &rows, &count);
    assert(status == QD_OK || status == QD_USAGE || status == QD_CORRUPT);
    if (status == QD_OK)
        free(rows);
    return 0;
}
