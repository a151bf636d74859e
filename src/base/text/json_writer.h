/* The public JSON writer, under the name that internal code includes, and one function more. */
#ifndef QD_BASE_TEXT_JSON_WRITER_H
#define QD_BASE_TEXT_JSON_WRITER_H
#include <quadrille/json_writer.h>

/* A string of `length` characters that need no escapes, which the caller writes to the returned
 * address before the next call. NULL: no memory. */
char *qd_json_put_plain(qd_json_writer *writer, const char *key, size_t length);
#endif
