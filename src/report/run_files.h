/* The files of a run folder that reports read: configuration and metrics. */
#ifndef QD_REPORT_RUN_FILES_H
#define QD_REPORT_RUN_FILES_H

#include "base/arena.h"
#include "spec/config/config.h"

#include <limits.h>

typedef char qd_run_files_name[PATH_MAX];

/* Columns of metrics.jsonl and evaluations.jsonl. */
enum {
    QD_RUN_STEP,
    QD_RUN_LOSS,
    QD_RUN_GRAD_NORM,
    QD_RUN_LR,
    QD_RUN_TOKENS,
    QD_RUN_SECONDS,
    QD_RUN_SPEED,
    QD_RUN_MFU,
    QD_RUN_VALIDATION,
    QD_RUN_COLUMNS
};

/* Columns of numbers from a JSON lines file; NaN: the line has no such number. */
typedef struct qd_run_table {
    double *columns[QD_RUN_COLUMNS];
    int64_t count, capacity;
} qd_run_table;

qd_status qd_run_files_path(const char *folder, const char *name, qd_run_files_name path);
/* The last component of the folder's name; NULL when out of memory. */
char *qd_run_files_title(qd_arena *arena, const char *folder);
/* The configuration as it was given (free *text), and as it was resolved: `config` refers to
 * *options. QD_USAGE if it is not a run folder. */
qd_status qd_run_files_config(const char *folder, char **text, qd_options **options, qd_config *config);
/* Adds the lines of a file. */
qd_status qd_run_files_lines(qd_run_table *table, const char *path);
void qd_run_files_free(qd_run_table *table);

/* The median of the finite values of a column; NaN: there are none. */
double qd_run_files_median(const qd_run_table *table, int column);
/* The final loss: the mean over the last *count steps. */
double qd_run_files_loss(const qd_run_table *table, int64_t *count);
/* The line with the lowest validation loss; -1: none. */
int64_t qd_run_files_best(const qd_run_table *table);
#endif
