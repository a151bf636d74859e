/* The files of a run folder that reports read: configuration and metrics. */
#ifndef QD_REPORT_RUN_FILES_H
#define QD_REPORT_RUN_FILES_H

#include "base/arena.h"
#include "report/table.h"
#include "spec/config/config.h"

#include <limits.h>

typedef char qd_run_files_name[PATH_MAX];

qd_status qd_run_files_path(const char *folder, const char *name, qd_run_files_name path);
/* The last component of the folder's name; NULL when out of memory. */
char *qd_run_files_title(qd_arena *arena, const char *folder);
/* The configuration as it was given (free *text), and as it was resolved: `config` refers to
 * *options. QD_USAGE if it is not a run folder. */
qd_status qd_run_files_config(const char *folder, char **text, qd_options **options, qd_config *config);
/* Reads the lines of a file. */
qd_status qd_run_files_lines(qd_table *table, const char *path);

/* The median of the finite values of a column; NaN: there are none. */
double qd_run_files_median(const qd_table *table, int column);
/* The final loss: the mean over the last *count steps. */
double qd_run_files_loss(const qd_table *table, int64_t *count);
/* The line with the lowest validation loss; -1: none. */
int64_t qd_run_files_best(const qd_table *table);
#endif
