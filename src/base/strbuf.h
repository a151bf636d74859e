/* Text: the growing buffer of the public header, numbers, UTF-8 and whole files. */
#ifndef QD_BASE_STRBUF_H
#define QD_BASE_STRBUF_H

#include <quadrille/strbuf.h>

/* Shortest decimal text that reads back to the same double, or 17 significant digits; '.' in any locale. `text` needs
 * QD_DOUBLE_TEXT bytes. */
enum { QD_DOUBLE_TEXT = 32 };
void qd_double_shortest(double value, char *text);
void qd_double_17(double value, char *text);

/* strtod in the C locale. */
double qd_double_parse(const char *text, char **end);

/* Bytes of `text` that are whole UTF-8 characters from the start (== length: all of it is valid). */
size_t qd_utf8_valid(const char *text, size_t length);

/* Reads a whole file of at most `most` bytes. *text is ended by '\0' (not counted) and freed with free(). A missing or
 * unreadable file is QD_USAGE: the user named it. */
qd_status qd_file_read(const char *path, size_t most, char **text, size_t *length);

/* Writes a file beside its place, flushes it to the disk and renames it: the file is old or new, never half. */
qd_status qd_file_replace(const char *path, const char *text, size_t length);

#endif
