/* The text files behind a list of paths. */
#ifndef QD_DATA_TOKENIZER_CORPUS_H
#define QD_DATA_TOKENIZER_CORPUS_H

#include <quadrille/status.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_corpus {
    struct qd_corpus_file {
        char *path;
        int64_t size;
    } *files;
    size_t count, capacity;
    int64_t size; /* bytes of all */
} qd_corpus;

/* Folders are walked in the order of names. In a folder, hidden files, empty ones and those that hold a NUL byte near their
 * start are passed over. QD_USAGE for a path that does not exist, an empty file, and a folder without text. */
qd_status qd_corpus_open(const char *const *paths, size_t count, qd_corpus *corpus);
void qd_corpus_close(qd_corpus *corpus);

#endif
