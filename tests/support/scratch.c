/* A temporary folder per test, with helpers to read and write its files. */
#define _GNU_SOURCE
#include "support/scratch.h"

#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST_PATHS = 2048 };
static char *paths[MOST_PATHS];
static int path_count;
static const char *folder;

int scratch_setup(void **state)
{
    char name[] = "/tmp/quadrille-test-XXXXXX";
    char *made = mkdtemp(name);
    *state = made ? strdup(made) : NULL;
    folder = *state;
    return *state ? 0 : -1;
}

const char *scratch_folder(void)
{
    return folder;
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *at)
{
    (void)info;
    (void)kind;
    (void)at;
    return remove(path);
}

int scratch_teardown(void **state)
{
    int result = nftw(*state, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    while (path_count > 0)
        free(paths[--path_count]);
    free(*state);
    return result;
}

const char *scratch_path(void **state, const char *name)
{
    char *path = NULL;
    assert_true(path_count < MOST_PATHS && asprintf(&path, "%s/%s", (const char *)*state, name) > 0);
    return paths[path_count++] = path;
}

const char *scratch_write(void **state, const char *name, const void *bytes, size_t length)
{
    const char *path = scratch_path(state, name);
    for (char *slash = strchr(path + strlen(*state) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0755);
        *slash = '/';
    }
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, length, file), length);
    assert_int_equal(fclose(file), 0);
    return path;
}

const char *scratch_text(void **state, const char *name, const char *text)
{
    return scratch_write(state, name, text, strlen(text));
}

unsigned char *scratch_read(const char *path, size_t *length)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *length = (size_t)ftell(file);
    rewind(file);
    unsigned char *bytes = malloc(*length + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *length, file), *length);
    fclose(file);
    return bytes;
}
