/* Human-readable amounts and wrapped text. The functions that take `size` write at most that many
 * bytes to `text`. */
#ifndef QUADRILLE_TEXT_H
#define QUADRILLE_TEXT_H

#include <quadrille/export.h>
#include <quadrille/strbuf.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes: "0 B", "1.2 MiB", "3.50 GiB". */
QD_API void qd_text_bytes(int64_t bytes, char *text, size_t size);
/* A duration: "40 ms", "1.5 s", "12 s", "3 min 20 s", "2 h 05 min". */
QD_API void qd_text_seconds(double seconds, char *text, size_t size);
/* Four digits with a prefixed unit: "1.499 s", "77.40 ms", "80.88 kJ", "1.720 MW". Times of a
 * second and more stay in seconds. */
QD_API void qd_text_unit(double value, const char *unit, char *text, size_t size);
/* A count: "950", "12.3 k", "1.24 M", "70.6 B". */
QD_API void qd_text_count(double count, char *text, size_t size);

/* Width of UTF-8 text in columns, one per character. */
QD_API int qd_text_columns(const char *text);
/* Appends `text` and a newline, wrapped at blanks to `width` columns (0: one line). The first line
 * continues at column `indent`; further lines are indented to it. */
QD_API void qd_text_wrap(const char *text, int indent, int width, qd_strbuf *out);

/* Appends text for a manual page: roff reads '-' as a hyphen, a backslash as an escape, and a dot
 * at the beginning of a line as a request. "…" and "×" become ASCII. */
QD_API void qd_text_roff(const char *text, size_t length, qd_strbuf *out);

/* Whether `word` is one of the words of `words`, which are separated by single blanks. */
QD_API bool qd_text_has_word(const char *words, const char *word);
/* The name whose spelling is closest to what a user wrote, for "did you mean"; NULL: none is
 * close. */
QD_API const char *qd_text_nearest(const char *written, const char *const *names, int count);

#ifdef __cplusplus
}
#endif
#endif
