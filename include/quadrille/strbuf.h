/* A growing text. A failure to grow is remembered and reported once, by qd_strbuf_take, so that
 * callers can append without checking each time. */
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
    char *data; /* NULL or ended by '\0' */
    size_t length, capacity;
    bool failed;
} qd_strbuf;

QD_API void qd_strbuf_append(qd_strbuf *buffer, const char *text, size_t length);
/* Bytes that belong to no UTF-8 character become U+FFFD, each for itself. */
QD_API void qd_strbuf_append_utf8(qd_strbuf *buffer, const char *bytes, size_t length);
QD_API void qd_strbuf_puts(qd_strbuf *buffer, const char *text);
QD_API void qd_strbuf_printf(qd_strbuf *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
QD_API void qd_strbuf_pad(qd_strbuf *buffer, char character, int count);
QD_API void qd_strbuf_clear(qd_strbuf *buffer); /* keeps the memory */
QD_API void qd_strbuf_free(qd_strbuf *buffer);

/* Hands the text over to the caller, who frees it with free(). The buffer is empty afterwards. */
QD_API qd_status qd_strbuf_take(qd_strbuf *buffer, char **text);

#ifdef __cplusplus
}
#endif
#endif
