/* Finds the user's cache folder. */
#include "train/run/cache_folder.h"

#include "data/files.h"

#include <stdio.h>
#include <stdlib.h>

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
