/* A pull parser for JSON in memory that builds no tree: a vocabulary of millions of entries needs
 * no more memory than its text. Errors are QD_USAGE and start with "file:line:column: ". */
#ifndef QD_DATA_TOKENIZER_FILES_JSON_READER_H
#define QD_DATA_TOKENIZER_FILES_JSON_READER_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_json_reader {
    const char *name;
    const char *start, *at, *end; /* valid UTF-8 */
    char *scratch;                /* decoded strings; as long as the text */
} qd_json_reader;

typedef struct qd_json_text {
    const char *data; /* points into the file or the scratch buffer: valid until the next string is read */
    size_t length;
} qd_json_text;

qd_status qd_json_reader_open(const char *name, const char *text, size_t length, qd_json_reader *reader);
void qd_json_reader_close(qd_json_reader *reader);

qd_status qd_json_reader_fail(const qd_json_reader *reader, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* First byte of the next value: '{' '[' '"' '0' (a number) 't' 'f' 'n'; 0 at the end of the
 * text. */
char qd_json_reader_kind(qd_json_reader *reader);

/* Enters an object or a list; `what` names it in messages. Then qd_json_reader_next() advances to
 * each member or item. */
qd_status qd_json_reader_enter(qd_json_reader *reader, char open, const char *what);
/* *more is false after the last one, and the object or list has been left. `first` must be true for
 * the first call and is cleared. key: NULL in a list. The key is valid until the next string is
 * read. */
qd_status qd_json_reader_next(qd_json_reader *reader, bool *first, qd_json_text *key, bool *more);

qd_status qd_json_reader_string(qd_json_reader *reader, const char *what, qd_json_text *text);
qd_status qd_json_reader_integer(qd_json_reader *reader, const char *what, int64_t least, int64_t most, int64_t *value);
qd_status qd_json_reader_number(qd_json_reader *reader, const char *what, double *value);
qd_status qd_json_reader_boolean(qd_json_reader *reader, const char *what, bool *value);
qd_status qd_json_reader_skip(qd_json_reader *reader); /* any value */
qd_status qd_json_reader_finish(qd_json_reader *reader); /* only white space may be left */

/* Finds members of the object that follows, and skips it. places[i].at: start of the value of
 * places[i].key, NULL if it is missing. A key that appears twice is an error. */
typedef struct qd_json_place {
    const char *key;
    const char *at;
} qd_json_place;
qd_status qd_json_reader_members(qd_json_reader *reader, const char *what, qd_json_place *places, size_t count);

bool qd_json_text_is(qd_json_text text, const char *expected);

#endif
