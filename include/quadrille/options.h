/* Options: one descriptor table gives parser, validation, help and documentation.
 *
 * A key with a dot ("parallel.tp") belongs to the run's configuration: it may stand in the YAML
 * file (nested mappings become dotted keys), on the command line as `parallel.tp=2`, `--parallel.tp
 * 2` or by its short form `--tp 2`, and is saved with the run. A key without a dot ("json") belongs
 * to the command: it is given as `--json` only and not saved.
 *
 * The command line wins over the file, the file over the default, in whatever order they are read.
 * Every bad input is QD_USAGE with one line that names the place and says what would be right.
 * Nothing here is collective. An object may be read by several threads once it is filled. */
#ifndef QUADRILLE_OPTIONS_H
#define QUADRILLE_OPTIONS_H

#include <quadrille/export.h>
#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qd_option_type {
    QD_OPTION_INT,     /* 12, -1, 1_000, 4k, 1.5M, 2G, 1e6: k, M and G are decimal */
    QD_OPTION_FLOAT,   /* finite: 3e-3, 0.1, 1_000.5 */
    QD_OPTION_BOOL,    /* true false yes no on off 1 0; `--flag` alone is true */
    QD_OPTION_STRING,  /* any text without control characters other than tab and newline */
    QD_OPTION_ENUM,    /* one of choices */
    QD_OPTION_INT_LIST /* YAML [1, 2, 3] or 1,2,3; may be empty */
} qd_option_type;

typedef struct qd_option {
    const char *key;
    qd_option_type type;
    const char *fallback; /* the default, as the user would write it; NULL is "" (string, list) */
    double least, most;   /* inclusive, for int, float and the items of a list; least == most: anything */
    const char *choices;  /* enum: "none|selective|full" */
    const char *help;     /* one sentence without a full stop */
    const char *flag;     /* short form without dashes ("tp"); NULL: none. One of a single letter takes one dash too: -o FILE */
} qd_option;

/* Several tables may be joined: those of the configuration and those of a command. They must
 * outlive the object. */
typedef struct qd_option_table {
    const qd_option *options;
    int count;
} qd_option_table;
#define QD_OPTION_TABLE(array) ((qd_option_table){(array), (int)(sizeof(array) / sizeof((array)[0]))})

typedef struct qd_options qd_options;

/* Checks the tables (keys unique, defaults valid and in range). */
QD_API qd_status qd_options_create(const qd_option_table *tables, int count, qd_options **options);
/* A second object with the same tables, values and origins. */
QD_API qd_status qd_options_copy(const qd_options *from, qd_options **options);
QD_API void qd_options_destroy(qd_options *options); /* NULL is legal */

/* ---- filling ---- */

/* Reads a YAML file. Refused: unknown and repeated keys, anchors and aliases, tags, several
 * documents, more than 1 MiB, nesting deeper than 16, anything that is not UTF-8 text. Messages
 * start with "file:line:column: ". When it fails the object is as before the call. */
QD_API qd_status qd_options_load(qd_options *options, const char *path);
/* The same from memory; `name` stands for the file in messages. */
QD_API qd_status qd_options_load_text(qd_options *options, const char *name, const char *text, size_t length);

/* "parallel.tp=2" or, with the short form, "tp=2". Configuration keys only. */
QD_API qd_status qd_options_assign(qd_options *options, const char *assignment);
/* Counts as given on the command line; `key` is a key or a short form. */
QD_API qd_status qd_options_set(qd_options *options, const char *key, const char *value);

/* Reads command-line words (without the program and command names): `key=value`, `--flag value`,
 * `--flag=value`, `--bool`. Other words are put into words[0 .. *word_count), which must have room
 * for argc; after `--` all are. A single dash is a word. */
QD_API qd_status qd_options_parse(qd_options *options, int argc, char *const *argv, const char **words, int *word_count);

/* Replaces a value by what the program made of it (dp: -1 became 4). Checked like a user's value;
 * qd_options_is_set and qd_options_origin do not change. */
QD_API qd_status qd_options_resolve(qd_options *options, const char *key, const char *value);

/* Takes back what a file set: the default counts again, as if the file did not have the key. What
 * the command line gave stays. */
QD_API qd_status qd_options_forget(qd_options *options, const char *key);

/* ---- reading ----
 * The key must be in the table and have the type: anything else is a broken invariant
 * (assertion). */

QD_API int64_t qd_options_int(const qd_options *options, const char *key);
QD_API double qd_options_float(const qd_options *options, const char *key);
QD_API bool qd_options_bool(const qd_options *options, const char *key);
/* String and enum. Never NULL; belongs to `options`, valid until the value changes. */
QD_API const char *qd_options_string(const qd_options *options, const char *key);
/* Enum: the index in choices. */
QD_API int qd_options_enum(const qd_options *options, const char *key);
/* Returns the number of items; *values belongs to `options`. */
QD_API int qd_options_int_list(const qd_options *options, const char *key, const int64_t **values);

/* True when the user set it, in a file or on the command line. */
QD_API bool qd_options_is_set(const qd_options *options, const char *key);
/* Where the value comes from, for messages: "run.yaml:3:9", "command line" or "default". */
QD_API const char *qd_options_origin(const qd_options *options, const char *key);
/* The descriptor of a key; NULL when there is none (this one may be asked with any key). */
QD_API const qd_option *qd_options_find(const qd_options *options, const char *key);

/* ---- writing; *text must be freed with free() ---- */

/* All configuration keys with their present values, as YAML that qd_options_load reads back to the
 * same values. */
QD_API qd_status qd_options_to_yaml(const qd_options *options, char **text);
/* One value as it stands there. */
QD_API qd_status qd_options_value_text(const qd_options *options, const char *key, char **text);
/* A key that is not written by the above: left open, to be decided anew by who reads the text. */
QD_API void qd_options_leave_out(qd_options *options, const char *key);
/* Writes that to a file: beside it first, then renamed, so that the file is old or new and never
 * half. */
QD_API qd_status qd_options_save(const qd_options *options, const char *path);
/* For a terminal of `width` columns (0: 100). section: NULL for all, "parallel" for the keys below
 * it, "" for the keys without a dot. */
QD_API qd_status qd_options_help(const qd_option_table *tables, int count, const char *section, int width, char **text);
/* Markdown: one table per section. */
QD_API qd_status qd_options_to_markdown(const qd_option_table *tables, int count, char **text);

#ifdef __cplusplus
}
#endif
#endif
