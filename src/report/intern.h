/* Different things, each kept once and numbered in the order in which they came. */
#ifndef QD_REPORT_INTERN_H
#define QD_REPORT_INTERN_H

#include <quadrille/status.h>
#include <stdint.h>

typedef struct qd_intern qd_intern;

qd_status qd_intern_create(qd_intern **table);
void qd_intern_destroy(qd_intern *table); /* NULL is legal */

/* The number of these bytes, which are copied when they are new. */
qd_status qd_intern_add(qd_intern *table, const void *key, size_t length, int32_t *number);
/* As a text that lives as long as the table; NULL stays NULL. */
qd_status qd_intern_text(qd_intern *table, const char *text, const char **kept);

int32_t qd_intern_count(const qd_intern *table);
const void *qd_intern_key(const qd_intern *table, int32_t number); /* aligned to 16 bytes */
#endif
