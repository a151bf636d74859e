/* Amounts and lines as people read them. */
#ifndef QUADRILLE_TEXT_H
#define QUADRILLE_TEXT_H

#include <quadrille/export.h>
#include <quadrille/strbuf.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* "0 B", "1.2 MiB", "3.50 GiB" */
QD_API void qd_text_bytes(int64_t bytes, char *text, size_t size);
/* "40 ms", "1.5 s", "12 s", "3 min 20 s", "2 h 05 min" */
QD_API void qd_text_seconds(double seconds, char *text, size_t size);
/* Four digits with their unit: "1.499 s", "77.40 ms", "80.88 kJ", "1.720 MW". Times from a second
 * on stay in seconds. */
QD_API void qd_text_unit(double value, const char *unit, char *text, size_t size);
/* "950", "12.3 k", "1.24 M", "70.6 B" */
QD_API void qd_text_count(double count, char *text, size_t size);

/* Columns of a UTF-8 text, one per character. */
QD_API int qd_text_columns(const char *text);
/* Appends `text` and the end of its line, broken at blanks before `width` columns; it begins in
 * column `indent`, and so does each further line. width 0: in one line. */
QD_API void qd_text_wrap(const char *text, int indent, int width, qd_strbuf *out);

#ifdef __cplusplus
}
#endif
#endif
