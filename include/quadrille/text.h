/* Amounts as people read them. */
#ifndef QUADRILLE_TEXT_H
#define QUADRILLE_TEXT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* "0 B", "1.2 MiB", "3.50 GiB" */
void qd_text_bytes(int64_t bytes, char *text, size_t size);
/* "40 ms", "1.5 s", "12 s", "3 min 20 s", "2 h 05 min" */
void qd_text_seconds(double seconds, char *text, size_t size);
/* "950", "12.3 k", "1.24 M", "70.6 B" */
void qd_text_count(double count, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
