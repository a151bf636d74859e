/* Context parallelism: the positions of a sequence are shared out over the ranks of cp. This is the one place that says which
 * rank holds which; loading, rotary and learned positions, dropout, attention and communication go by it. */
#ifndef QD_SPEC_CONTEXT_H
#define QD_SPEC_CONTEXT_H

#include "base/runs.h"

#include <quadrille/status.h>

/* A sequence is cut into 2·cp chunks (qd_slice: uneven where they do not divide it). Rank r holds chunks r and 2·cp - 1 - r,
 * an early and a late one, so that all see about the same number of earlier positions (zigzag). */
#define QD_CONTEXT_RUNS 2

/* The positions of rank `coord`, in ascending order: fills runs and returns how many there are (chunks that touch are one). */
int qd_context_runs(int64_t seq, int cp, int coord, qd_row_run runs[QD_CONTEXT_RUNS]);

/* Rows of one sequence on rank `coord`. */
int64_t qd_context_rows(int64_t seq, int cp, int coord);

/* QD_USAGE when a sequence is too short to be shared out. */
qd_status qd_context_check(int64_t seq, int cp);
#endif
