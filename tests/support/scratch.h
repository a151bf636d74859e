/* A temporary folder for the files of one test, removed recursively. */
#ifndef QD_TEST_SCRATCH_H
#define QD_TEST_SCRATCH_H

#include <stddef.h>

/* cmocka setup and teardown; *state is the folder's path. */
int scratch_setup(void **state);
int scratch_teardown(void **state);
/* The same path, for callbacks that do not get the state. */
const char *scratch_folder(void);

/* "folder/name", valid until the teardown. */
const char *scratch_path(void **state, const char *name);
/* Writes a file, creating its parent folders, and returns its path. */
const char *scratch_write(void **state, const char *name, const void *bytes, size_t length);
const char *scratch_text(void **state, const char *name, const char *text);
/* Reads a whole file; freed by the caller. */
unsigned char *scratch_read(const char *path, size_t *length);

#endif
