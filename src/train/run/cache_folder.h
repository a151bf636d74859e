/* The user's cache folder: files that save work in later runs and may be deleted at any time. */
#ifndef QD_TRAIN_RUN_CACHE_FOLDER_H
#define QD_TRAIN_RUN_CACHE_FOLDER_H

#include <stddef.h>

/* The path of a cache file: `given` if it is not empty, else `name` in the user's cache folder
 * ($XDG_CACHE_HOME or $HOME/.cache), which is created. Empty where there is no such folder. */
void qd_cache_file(const char *given, const char *name, char *path, size_t size);
#endif
