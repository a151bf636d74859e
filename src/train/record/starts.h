/* starts.jsonl of a run folder: each start of the run, after which step and on which layout. The
 * report marks them in its curves. */
#ifndef QD_TRAIN_RECORD_STARTS_H
#define QD_TRAIN_RECORD_STARTS_H

#include "spec/program/program.h"

/* Adds a line for a start after `step` steps, and drops those of later steps; step 0 starts a new
 * file. */
qd_status qd_starts_note(const char *path, int64_t step, const qd_program *program);
#endif
