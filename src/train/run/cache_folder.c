/* Finds the user's cache folder. */
#include "train/run/cache_folder.h"

#include "data/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void qd_cache_file(const char *given, const char *name, char *path, size_t size)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = 0;
    path[0] = '\0';
    if (given[0] != '\0') {
        n = snprintf(path, size, "%s", given);
    } else if (cache && cache[0] == '/') {
        n = snprintf(path, size, "%s/quadrille", cache);
    } else if (home && home[0] == '/') {
        n = snprintf(path, size, "%s/.cache/quadrille", home);
    }
    if (given[0] == '\0' && path[0] != '\0' && n > 0 && (size_t)n < size) {
        if (qd_folder_make(path) != QD_OK) {
            qd_error_clear();
            n = -1;
        } else {
            int more = snprintf(path + n, size - (size_t)n, "/%s", name);
            n = more > 0 ? n + more : -1;
        }
    }
    if (n < 0 || (size_t)n >= size)
        path[0] = '\0';
}

bool qd_cache_may_replace(const char *path, const char *magic)
{
    char start[64] = "";
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO has no writer */
    if (fd < 0)
        return errno == ENOENT;
    ssize_t length = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) ? read(fd, start, strlen(magic)) : -1;
    close(fd);
    return length >= 0 && memcmp(start, magic, (size_t)length) == 0;
}
