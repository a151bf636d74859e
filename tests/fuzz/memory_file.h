/* A file in memory, for targets of readers that take a path: bytes need not go to a disk a million
 * times. Include it first: it needs _GNU_SOURCE. */
#ifndef QD_TESTS_FUZZ_MEMORY_FILE_H
#define QD_TESTS_FUZZ_MEMORY_FILE_H

#define _GNU_SOURCE
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

/* The path of the file, which holds these bytes until the next call; NULL if they cannot be
 * written. */
static inline char *memory_file(const uint8_t *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        assert(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    return ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size ? path : NULL;
}
#endif
