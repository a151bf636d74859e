/* Reads JSON value by value from memory, without building anything: a vocabulary of millions of
 * entries takes no more than its text. Failures are QD_USAGE and start with "file:line:column:
 * ". */
#ifndef QD_DATA_TOKENIZER_JSON_READER_H
#define QD_DATA_TOKENIZER_JSON_READER_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_json_reader {
    const char *name;
    const char *start, *at, *end; /* valid UTF-8 */
    char *scratch;                /* strings without escapes; as long as the text */
} qd_json_reader;

typedef struct qd_json_text {
    const char *data; /* inside the file or the reader's scratch: holds until the next string is read */
    size_t length;
} qd_json_text;

qd_status qd_json_reader_open(const char *name, const char *text, size_t length, qd_json_reader *reader);
void qd_json_reader_close(qd_json_reader *reader);

qd_status qd_json_reader_fail(const qd_json_reader *reader, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* First byte of the next value: '{' '[' '"' '0' (a number) 't' 'f' 'n'; 0 at the end of the
 * text. */
char qd_json_reader_kind(qd_json_reader *reader);

/* Enters an object or a list; `what` names it in messages. Then each call of next goes to the next
 * member or item. */
qd_status qd_json_reader_enter(qd_json_reader *reader, char open, const char *what);
/* *more is false behind the last, which is left then. `first` must be true for the first call and
 * is cleared. key: NULL in a list. The key holds until the next string is read. */
qd_status qd_json_reader_next(qd_json_reader *reader, bool *first, qd_json_text *key, bool *more);

qd_status qd_json_reader_string(qd_json_reader *reader, const char *what, qd_json_text *text);
qd_status qd_json_reader_integer(qd_json_reader *reader, const char *what, int64_t least, int64_t most, int64_t *value);
qd_status qd_json_reader_boolean(qd_json_reader *reader, const char *what, bool *value);
qd_status qd_json_reader_skip(qd_json_reader *reader); /* any value */
qd_status qd_json_reader_finish(qd_json_reader *reader); /* nothing but space is left */

/* Finds members of the object that comes next, and skips it. places[i].at: where the value of
 * keys[i] starts, NULL when it is not there. A key that stands twice is refused. */
typedef struct qd_json_place {
    const char *key;
    const char *at;
} qd_json_place;
qd_status qd_json_reader_members(qd_json_reader *reader, const char *what, qd_json_place *places, size_t count);

bool qd_json_text_is(qd_json_text text, const char *expected);

#endif
