/* Files and folders: which files a path names, and durable writes. */
#ifndef QD_DATA_FILES_H
#define QD_DATA_FILES_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum qd_file_kind { QD_FILE_TEXT, QD_FILE_LINES, QD_FILE_SHARD } qd_file_kind; /* LINES: .jsonl */

typedef struct qd_file {
    char *path;
    int64_t bytes;
    qd_file_kind kind;
} qd_file;

typedef struct qd_file_list {
    qd_file *items;
    int64_t count, capacity;
    int64_t bytes;   /* total size */
    int64_t skipped; /* regular files in folders that were skipped */
} qd_file_list;

/* Adds the files that `path` names. A file is added as it is. A folder adds its regular files,
 * recursively, sorted by path: its shards if it has any, otherwise its text (names with a text
 * extension, or contents that are UTF-8 without NUL). Hidden names, empty files and symlinks to
 * folders are skipped. QD_USAGE: it does not exist, is empty, or is a folder without text. */
qd_status qd_file_list_add(qd_file_list *list, const char *path);
void qd_file_list_free(qd_file_list *list);
/* QD_USAGE names a file that is not text: compressed, an archive, with NUL bytes, or mostly not
 * UTF-8 in its first 64 KiB. */
qd_status qd_file_list_check_text(const qd_file_list *list);

/* The first 64 KiB of a file, freed by the caller. *whole: the file has no more than that. */
qd_status qd_file_head(const char *path, char **bytes, size_t *length, bool *whole);

/* XXH3 of all bytes of a file. */
qd_status qd_file_hash(const char *path, uint64_t seed, uint64_t *hash);

/* Length of the UTF-8 byte order mark that some editors write: 3, or 0 if `text`, the start of a
 * file, has none. */
size_t qd_byte_order_mark(const void *text, size_t length);
/* Length of the line at `text` with its line end; *inner without it and a preceding carriage
 * return. */
size_t qd_line_length(const char *text, size_t length, size_t *inner);

/* path + suffix; NULL when out of memory. */
char *qd_path_with(const char *path, const char *suffix);
/* folder/name; NULL when out of memory. */
char *qd_path_join(const char *folder, const char *name);

/* Creates a folder and its missing parents. */
qd_status qd_folder_make(const char *path);
/* Removes the files of a folder as far as possible; not its sub-folders. */
void qd_folder_empty(const char *path);

#endif
