/* Text: the string buffer of the public header, number formatting and UTF-8. */
#ifndef QD_BASE_TEXT_STRBUF_H
#define QD_BASE_TEXT_STRBUF_H

#include "base/file.h"

#include <quadrille/strbuf.h>

/* Appends space for `length` bytes, which the caller fills before the next call. NULL: no
 * memory. */
char *qd_strbuf_extend(qd_strbuf *buffer, size_t length);

/* Shortest decimal text that reads back to the same double, or 17 significant digits; '.' in any
 * locale. `text` has QD_DOUBLE_TEXT bytes. */
enum { QD_DOUBLE_TEXT = 32 };
void qd_double_shortest(double value, char *text);
void qd_double_17(double value, char *text);

/* strtod() in the C locale. */
double qd_double_parse(const char *text, char **end);

/* Length of the longest prefix of `text` that is valid UTF-8 (== length: all of it is valid). */
size_t qd_utf8_valid(const char *text, size_t length);

#endif
