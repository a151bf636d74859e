/* Files and folders: what a path holds, and how files are written so that they are whole. */
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
    int64_t bytes;   /* of all */
    int64_t skipped; /* regular files of folders that were not taken */
} qd_file_list;

/* Adds what `path` names. A file is taken as it is. A folder gives its regular files, those of its
 * folders too, sorted by path: its shards if it has any, else its text: names with an extension of
 * text, or contents that are UTF-8 without NUL. Hidden names, empty files and links to folders are
 * left out. QD_USAGE: it does not exist, is empty, or is a folder without text. */
qd_status qd_file_list_add(qd_file_list *list, const char *path);
void qd_file_list_free(qd_file_list *list);
/* QD_USAGE names a file of text that is none: compressed, an archive, with NUL bytes, or mostly not
 * UTF-8 in its first 64 KiB. */
qd_status qd_file_list_check_text(const qd_file_list *list);

/* The first 64 KiB of a file, freed by the caller. *whole: that is all of it. */
qd_status qd_file_head(const char *path, char **bytes, size_t *length, bool *whole);

/* XXH3 of all bytes of a file. */
qd_status qd_file_hash(const char *path, uint64_t seed, uint64_t *hash);

/* Bytes of the mark that some editors put before UTF-8 text: 3, or 0 when `text`, the start of a
 * file, has none. */
size_t qd_byte_order_mark(const void *text, size_t length);
/* Length of the line at `text` with its end, and without it and a carriage return before it. */
size_t qd_line_length(const char *text, size_t length, size_t *inner);

/* path + suffix; NULL when memory is out. */
char *qd_path_with(const char *path, const char *suffix);
/* folder/name; NULL when memory is out. */
char *qd_path_join(const char *folder, const char *name);

/* Flushes the folder that holds `path`, so that a rename inside it survives a power failure. */
qd_status qd_folder_sync_of(const char *path);
/* Makes a folder and those above it that are missing. */
qd_status qd_folder_make(const char *path);
/* Removes the files in a folder, as far as that works; not the folders in it. */
void qd_folder_empty(const char *path);

#endif
