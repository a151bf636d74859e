/* The run folders below the folders that the user named, and their data as JSON. Thread-safe.
 *
 * A request names a run by its number; folders and files are found by scanning, never by a name
 * from a request. Symbolic links below the given folders are not followed. */
#ifndef QD_SERVE_RUNS_H
#define QD_SERVE_RUNS_H

#include <quadrille/strbuf.h>
#include <stdint.h>

typedef struct qd_runs qd_runs;

qd_status qd_runs_create(const char *const *folders, int count, qd_runs **runs);
void qd_runs_destroy(qd_runs *runs); /* NULL is legal */

/* Appends the list of runs: number, name, model, last step and when it was written. */
qd_status qd_runs_list(qd_runs *runs, qd_strbuf *json);

/* Appends what a run has written since the caller's last request. run: its number. epoch and row:
 * as in the answer to that request; an epoch that no longer holds, or "", gives all rows. QD_USAGE:
 * there is no such run (any more), or its folder cannot be read. */
qd_status qd_runs_progress(qd_runs *runs, int64_t run, const char *epoch, int64_t row, qd_strbuf *json);
/* Appends the data of a run's report. */
qd_status qd_runs_report(qd_runs *runs, int64_t run, qd_strbuf *json);
#endif
