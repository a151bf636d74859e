/* Columns of numbers from a JSON lines file, read once or followed while a run appends to it. */
#ifndef QD_REPORT_TABLE_H
#define QD_REPORT_TABLE_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stdint.h>

/* The keys of metrics.jsonl and evaluations.jsonl that are drawn. */
typedef enum qd_column {
    QD_COLUMN_STEP,
    QD_COLUMN_LOSS,
    QD_COLUMN_GRAD_NORM,
    QD_COLUMN_LR,
    QD_COLUMN_TOKENS,
    QD_COLUMN_SECONDS,
    QD_COLUMN_SPEED,
    QD_COLUMN_MFU,
    QD_COLUMN_VALIDATION,
    QD_COLUMN_MEMORY,
    QD_COLUMN_MARGIN,
    QD_COLUMN_ACCURACY,
    QD_COLUMN_COUNT
} qd_column;

/* Starts as {0}. */
typedef struct qd_table {
    double *columns[QD_COLUMN_COUNT]; /* NaN: the line does not have the key */
    int64_t count, capacity;
    int64_t rewritten; /* how often rows that had been read were dropped: the file was truncated or replaced */
    int64_t skipped;   /* lines that cannot be read; only if `tolerant` */
    int64_t lines, offset; /* whole lines read, and their bytes */
    char last[64];     /* the bytes before `offset`: they tell whether the file is still the one that was read */
    int last_bytes;
} qd_table;

/* Reads the whole lines that an open file has gained; an incomplete last line is left for the next
 * call. If the file has become shorter or different, everything is read again. name: for messages.
 * tolerant: skips lines that cannot be read, and steps that repeat replace earlier ones; otherwise
 * both are QD_USAGE. */
qd_status qd_table_follow(qd_table *table, int fd, const char *name, bool tolerant);
void qd_table_free(qd_table *table);
#endif
