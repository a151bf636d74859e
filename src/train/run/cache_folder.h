/* The user's cache folder: files that save work in later runs and may be deleted at any time. */
#ifndef QD_TRAIN_RUN_CACHE_FOLDER_H
#define QD_TRAIN_RUN_CACHE_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

/* The path of a cache file: `given` if it is not empty, else `name` in the user's cache folder
 * ($XDG_CACHE_HOME or $HOME/.cache), which is created. Empty where there is no such folder. */
void qd_cache_file(const char *given, const char *name, char *path, size_t size);

/* Whether a cache file may be written there: there is none, or what is there begins with `magic`,
 * or ends before that. A path that was given may by mistake be that of another file, which must not
 * be lost. */
bool qd_cache_may_replace(const char *path, const char *magic);
#endif
