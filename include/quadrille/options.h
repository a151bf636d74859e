/* Options: parser, validation, help and documentation, all from one descriptor table.
 *
 * A key with a dot ("parallel.tp") belongs to the run's configuration. It may be set in the YAML
 * file (nested mappings become dotted keys) or on the command line, as `parallel.tp=2`,
 * `--parallel.tp 2` or by its short form `--tp 2`, and is saved with the run. A key without a dot
 * ("json") belongs to the command: it is set with `--json` only and not saved.
 *
 * The command line overrides the file, and the file the default, in whatever order they are read.
 * All bad input is QD_USAGE, with one line that names the place and the remedy. Nothing here is
 * collective. Several threads may read an object once it is filled. */
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
    QD_OPTION_INT_LIST, /* YAML [1, 2, 3] or 1,2,3; may be empty */
    QD_OPTION_FLOAT_LIST /* the same of numbers: [1, 1.5] or 1,1.5 */
} qd_option_type;

typedef struct qd_option {
    const char *key;
    qd_option_type type;
    const char *fallback; /* the default, as the user would write it; NULL is "" (string, list) */
    double least, most;   /* inclusive, for int, float and the items of a list; least == most: anything */
    const char *choices;  /* enum: "none|selective|full" */
    const char *help;     /* one sentence without a full stop */
    const char *flag;     /* short form without dashes ("tp"); NULL: none. A single letter also works with one dash: -o FILE */
} qd_option;

/* A table of options. An object joins several: those of the configuration and of a command. */
typedef struct qd_option_table {
    const qd_option *options;
    int count;
} qd_option_table;
#define QD_OPTION_TABLE(array) ((qd_option_table){(array), (int)(sizeof(array) / sizeof((array)[0]))})

typedef struct qd_options qd_options;

/* Makes an object with the default values, owned by the caller. The tables must outlive it.
 * QD_USAGE for a bad table (keys not unique, defaults invalid or out of range). */
QD_API qd_status qd_options_create(const qd_option_table *tables, int count, qd_options **options);
/* Makes a copy with the same tables, values and origins, owned by the caller. */
QD_API qd_status qd_options_copy(const qd_options *from, qd_options **options);
QD_API void qd_options_destroy(qd_options *options); /* NULL is legal */

/* Reads a YAML file. Rejects unknown and repeated keys, anchors and aliases, tags, several
 * documents, more than 1 MiB, nesting deeper than 16, and anything that is not UTF-8 text. Messages
 * start with "file:line:column: ". After a failure the object is unchanged. */
QD_API qd_status qd_options_load(qd_options *options, const char *path);
/* The same from memory; messages use `name` as the file name. */
QD_API qd_status qd_options_load_text(qd_options *options, const char *name, const char *text, size_t length);

/* Sets a configuration key, as on the command line: "parallel.tp=2" or, with the short form,
 * "tp=2". */
QD_API qd_status qd_options_assign(qd_options *options, const char *assignment);
/* Sets any key, as on the command line; `key` is a key or a short form. */
QD_API qd_status qd_options_set(qd_options *options, const char *key, const char *value);

/* Parses command-line arguments (without the program and command names): `key=value`,
 * `--flag value`, `--flag=value`, `--bool`. Other arguments, a single dash, and all after `--` are
 * stored in words[0 .. *word_count), which must have capacity for argc; they point into argv. */
QD_API qd_status qd_options_parse(qd_options *options, int argc, char *const *argv, const char **words, int *word_count);

/* Replaces a value by its resolved form (dp: -1 became 4). Checked like a user's value;
 * qd_options_is_set() and qd_options_origin() do not change. The key must be in the table. */
QD_API qd_status qd_options_resolve(qd_options *options, const char *key, const char *value);

/* Resets a key that a file has set to its default, as if the file did not have the key. A value
 * from the command line stays. The key must be in the table. */
QD_API qd_status qd_options_forget(qd_options *options, const char *key);

/* Read values. The key must be in the table and have the type; anything else is a bug in the caller
 * (assertion). */

QD_API int64_t qd_options_int(const qd_options *options, const char *key);
QD_API double qd_options_float(const qd_options *options, const char *key);
QD_API bool qd_options_bool(const qd_options *options, const char *key);
/* String and enum. Never NULL; owned by `options` and valid until the value changes. */
QD_API const char *qd_options_string(const qd_options *options, const char *key);
/* Enum: the index in `choices`. */
QD_API int qd_options_enum(const qd_options *options, const char *key);
/* Returns the number of items; *values is owned by `options`. */
QD_API int qd_options_int_list(const qd_options *options, const char *key, const int64_t **values);
QD_API int qd_options_float_list(const qd_options *options, const char *key, const double **values);

/* Whether the user set the key, in a file or on the command line. */
QD_API bool qd_options_is_set(const qd_options *options, const char *key);
/* Where the value comes from, for messages: "run.yaml:3:9", "command line" or "default". */
QD_API const char *qd_options_origin(const qd_options *options, const char *key);
/* The descriptor of a key; NULL if there is none (any key may be passed). */
QD_API const qd_option *qd_options_find(const qd_options *options, const char *key);

/* Write values and documentation. The caller frees *text with free(). */

/* All configuration keys with their current values, as YAML that qd_options_load() reads back to
 * the same values. */
QD_API qd_status qd_options_to_yaml(const qd_options *options, char **text);
/* One value in the notation of qd_options_to_yaml(). */
QD_API qd_status qd_options_value_text(const qd_options *options, const char *key, char **text);
/* Excludes a key from qd_options_to_yaml(), so that the reader of the YAML decides its value. */
QD_API void qd_options_leave_out(qd_options *options, const char *key);
/* Writes the YAML to a file atomically: a temporary file that is renamed. QD_IO if that fails. */
QD_API qd_status qd_options_save(const qd_options *options, const char *path);
/* Help text for a terminal of `width` columns (0: 100). section: NULL for all keys, "parallel" for
 * those below it, "" for those without a dot. */
QD_API qd_status qd_options_help(const qd_option_table *tables, int count, const char *section, int width, char **text);
/* Explains one key, named by itself or by its short form: meaning, type, default and how to set it.
 * *text is NULL if no table has it. */
QD_API qd_status qd_options_describe(const qd_option_table *tables, int count, const char *key, int width, char **text);
/* The same entries in roff, for manual pages: a paragraph (.TP) per key, a heading (.SS) per
 * section. */
QD_API qd_status qd_options_to_man(const qd_option_table *tables, int count, char **text);
/* Reference in Markdown, one table per section. */
QD_API qd_status qd_options_to_markdown(const qd_option_table *tables, int count, char **text);

#ifdef __cplusplus
}
#endif
#endif
