/* A growing string, initialized with {0}. A lack of memory sets `failed` and is reported once, by
 * qd_strbuf_take(), so that callers can append without checking each call. */
#ifndef QUADRILLE_STRBUF_H
#define QUADRILLE_STRBUF_H

#include <quadrille/export.h>
#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_strbuf {
    char *data; /* NULL or NUL-terminated */
    size_t length, capacity;
    bool failed;
} qd_strbuf;

/* Append to the buffer. */
QD_API void qd_strbuf_append(qd_strbuf *buffer, const char *text, size_t length);
/* Replaces each byte that is not part of a UTF-8 character by U+FFFD. */
QD_API void qd_strbuf_append_utf8(qd_strbuf *buffer, const char *bytes, size_t length);
QD_API void qd_strbuf_puts(qd_strbuf *buffer, const char *text);
QD_API void qd_strbuf_printf(qd_strbuf *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
QD_API void qd_strbuf_pad(qd_strbuf *buffer, char character, int count);
QD_API void qd_strbuf_clear(qd_strbuf *buffer); /* keeps the memory */
QD_API void qd_strbuf_free(qd_strbuf *buffer);

/* Moves the string to *text, which the caller frees with free(), and empties the buffer.
 * QD_NO_MEMORY if an append failed. */
QD_API qd_status qd_strbuf_take(qd_strbuf *buffer, char **text);

#ifdef __cplusplus
}
#endif
#endif
