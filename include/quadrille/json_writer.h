/* Writes JSON incrementally into a string buffer, which may be drained and cleared at any time.
 * Doubles have 17 significant digits, so that they round-trip; NaN and infinity become null.
 * Strings are escaped, and bytes that are not UTF-8 become U+FFFD. No call fails: qd_strbuf_take()
 * reports a lack of memory.
 *
 *   qd_json_writer writer = qd_json_writer_on(&buffer);
 *   qd_json_object_begin(&writer, NULL);
 *   qd_json_put_int(&writer, "step", 1);        // key NULL inside a list
 *   qd_json_list_begin(&writer, "losses");
 *   qd_json_put_double(&writer, NULL, 0.5);
 *   qd_json_end(&writer);
 *   qd_json_end(&writer);
 */
#ifndef QUADRILLE_JSON_WRITER_H
#define QUADRILLE_JSON_WRITER_H

#include <quadrille/export.h>
#include <quadrille/strbuf.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QD_JSON_MOST_DEPTH = 32 };

typedef struct qd_json_writer {
    qd_strbuf *out;
    int depth;
    bool started[QD_JSON_MOST_DEPTH + 1]; /* a value was written at this depth: the next one needs a comma */
    char closing[QD_JSON_MOST_DEPTH + 1];
} qd_json_writer;

/* A writer that appends to `out`, which it borrows. */
QD_API qd_json_writer qd_json_writer_on(qd_strbuf *out);

/* Begin, end and put values. key: NULL at the top level and inside lists, required inside
 * objects. */
QD_API void qd_json_object_begin(qd_json_writer *writer, const char *key);
QD_API void qd_json_list_begin(qd_json_writer *writer, const char *key);
QD_API void qd_json_end(qd_json_writer *writer); /* of the innermost object or list */

QD_API void qd_json_put_string(qd_json_writer *writer, const char *key, const char *value); /* NULL: null */
/* A string that may hold NUL bytes (\u0000); `bytes` may be NULL when there are none. */
QD_API void qd_json_put_bytes(qd_json_writer *writer, const char *key, const char *bytes, size_t length);
QD_API void qd_json_put_int(qd_json_writer *writer, const char *key, int64_t value);
QD_API void qd_json_put_double(qd_json_writer *writer, const char *key, double value);
/* The same, always with a decimal point or an exponent ("0.0"), for readers that tell integers from
 * floats. */
QD_API void qd_json_put_real(qd_json_writer *writer, const char *key, double value);
QD_API void qd_json_put_bool(qd_json_writer *writer, const char *key, bool value);
QD_API void qd_json_put_null(qd_json_writer *writer, const char *key);

/* Ends a line of JSON Lines: the next value starts a new document. */
QD_API void qd_json_newline(qd_json_writer *writer);

#ifdef __cplusplus
}
#endif
#endif
