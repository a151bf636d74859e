#define _GNU_SOURCE
#include "data/tokenizer/corpus.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_DEPTH = 64, LOOK = 4096 };

void qd_corpus_close(qd_corpus *corpus)
{
    for (size_t i = 0; i < corpus->count; i++)
        free(corpus->files[i].path);
    free(corpus->files);
    *corpus = (qd_corpus){0};
}

static qd_status add_file(qd_corpus *corpus, const char *path, int64_t size)
{
    if (corpus->count == corpus->capacity) {
        size_t capacity = corpus->capacity ? corpus->capacity * 2 : 64;
        void *larger = realloc(corpus->files, capacity * sizeof *corpus->files);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory for a list of %zu files", capacity);
        corpus->files = larger;
        corpus->capacity = capacity;
    }
    char *copy = strdup(path);
    if (!copy)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a list of files");
    corpus->files[corpus->count++] = (struct qd_corpus_file){copy, size};
    corpus->size += size;
    return QD_OK;
}

static bool holds_text(const char *path)
{
    char start[LOOK];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t got = read(fd, start, sizeof start);
    close(fd);
    return got > 0 && !memchr(start, 0, (size_t)got);
}

static qd_status walk(qd_corpus *corpus, const char *folder, int depth)
{
    struct dirent **entries;
    if (depth == MOST_DEPTH)
        return QD_FAIL(QD_USAGE, "%s: folders are nested deeper than %d", folder, MOST_DEPTH);
    int count = scandir(folder, &entries, NULL, alphasort);
    if (count < 0)
        return QD_FAIL(QD_USAGE, "cannot read the folder %s: %s", folder, strerror(errno));
    qd_status status = QD_OK;
    for (int i = 0; i < count; i++) {
        char *path = NULL;
        struct stat info;
        if (status == QD_OK && entries[i]->d_name[0] != '.') {
            if (asprintf(&path, "%s/%s", folder, entries[i]->d_name) < 0) {
                path = NULL;
                status = QD_FAIL(QD_NO_MEMORY, "no memory for a list of files");
            } else if (lstat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
                status = walk(corpus, path, depth + 1);
            } else if (stat(path, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0 && holds_text(path)) {
                status = add_file(corpus, path, info.st_size);
            }
        }
        free(path);
        free(entries[i]);
    }
    free(entries);
    return status;
}

static qd_status add_path(qd_corpus *corpus, const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0)
        return QD_FAIL(QD_USAGE, "cannot open %s: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) {
        size_t before = corpus->count;
        QD_TRY(walk(corpus, path, 0));
        return corpus->count > before ? QD_OK : QD_FAIL(QD_USAGE, "the folder %s holds no text files", path);
    }
    if (!S_ISREG(info.st_mode))
        return QD_FAIL(QD_USAGE, "%s is neither a file nor a folder", path);
    if (info.st_size == 0)
        return QD_FAIL(QD_USAGE, "the file %s is empty", path);
    return add_file(corpus, path, info.st_size);
}

qd_status qd_corpus_open(const char *const *paths, size_t count, qd_corpus *corpus)
{
    *corpus = (qd_corpus){0};
    qd_status status = count ? QD_OK : QD_FAIL(QD_USAGE, "no text was named");
    for (size_t i = 0; status == QD_OK && i < count; i++)
        status = add_path(corpus, paths[i]);
    if (status != QD_OK)
        qd_corpus_close(corpus);
    return status;
}
