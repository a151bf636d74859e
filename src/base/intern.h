/* Interning: keeps each distinct key once, numbered in the order of first occurrence. */
#ifndef QD_BASE_INTERN_H
#define QD_BASE_INTERN_H

#include <quadrille/status.h>
#include <stdint.h>

typedef struct qd_intern qd_intern;

qd_status qd_intern_create(qd_intern **table);
void qd_intern_destroy(qd_intern *table); /* NULL is legal */

/* The number of these bytes; new ones are copied. */
qd_status qd_intern_add(qd_intern *table, const void *key, size_t length, int32_t *number);
/* A copy of the text with the lifetime of the table; NULL stays NULL. */
qd_status qd_intern_text(qd_intern *table, const char *text, const char **kept);

int32_t qd_intern_count(const qd_intern *table);
const void *qd_intern_key(const qd_intern *table, int32_t number); /* aligned to 16 bytes */
#endif
