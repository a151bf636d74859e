/* A run folder as a report that can be followed while the run writes it. Files are only read.
 * Nothing here is thread-safe: the caller holds a lock around the calls for one run. */
#ifndef QD_REPORT_RUN_H
#define QD_REPORT_RUN_H

#include <quadrille/json_writer.h>
#include <quadrille/report.h>

typedef struct qd_run_report qd_run_report;

/* folder: an open folder, needed during this call only. path: its name, for messages and the title.
 * live: the run may be writing, and the folder is not trusted: symbolic links in place of files are
 * refused, and lines or a trace that cannot be read are skipped. QD_USAGE if it is not a run
 * folder. */
qd_status qd_run_report_open(int folder, const char *path, bool live, qd_run_report **run);
void qd_run_report_close(qd_run_report *run); /* NULL is legal */

/* Reads what the run has written since: appended lines and files that were replaced. After a
 * failure the run can only be closed. */
qd_status qd_run_report_refresh(qd_run_report *run, int folder);

/* Describes the run as of the last refresh; valid until the next. */
const qd_report *qd_run_report_view(const qd_run_report *run);
int64_t qd_run_report_rows(const qd_run_report *run); /* steps read */
/* Changes when rows that had been read were removed or replaced: a reader starts over. */
int64_t qd_run_report_rewritten(const qd_run_report *run);
/* Changes when the configuration, the measured memory or the trace was replaced. */
int64_t qd_run_report_version(const qd_run_report *run);

/* Writes members of an object: figures, notes and curves; of the curves by step the rows from
 * `row` on, with "from", others whole. */
qd_status qd_run_report_put_progress(const qd_run_report *run, int64_t row, qd_json_writer *writer);
#endif
