/* A growing text. A failure to grow is remembered and reported once, by qd_strbuf_take, so that callers can append
 * without checking each time. */
#ifndef QD_BASE_STRBUF_H
#define QD_BASE_STRBUF_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct qd_strbuf {
    char *data; /* NULL or ended by '\0' */
    size_t length, capacity;
    bool failed;
} qd_strbuf;

void qd_strbuf_append(qd_strbuf *buffer, const char *text, size_t length);
void qd_strbuf_puts(qd_strbuf *buffer, const char *text);
void qd_strbuf_printf(qd_strbuf *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
void qd_strbuf_pad(qd_strbuf *buffer, char character, int count);
void qd_strbuf_clear(qd_strbuf *buffer); /* keeps the memory */
void qd_strbuf_free(qd_strbuf *buffer);

/* Hands the text over to the caller, who frees it with free(). The buffer is empty afterwards. */
qd_status qd_strbuf_take(qd_strbuf *buffer, char **text);

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
