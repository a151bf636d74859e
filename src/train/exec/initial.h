/* The values that parameters start with. */
#ifndef QD_TRAIN_EXEC_INITIAL_H
#define QD_TRAIN_EXEC_INITIAL_H

#include "spec/program/program.h"

/* Takes elements first .. first + count - 1 of this rank's part of a parameter. */
typedef qd_status (*qd_initial_sink)(void *context, int param, int64_t first, int64_t count, const float *values);

/* Draws them with `threads` threads, piece by piece: starting takes little more memory than
 * running. Values depend on (seed, name, element) alone. ahead: those that are drawn already are
 * taken from there; may be NULL. */
typedef struct qd_initial_ahead qd_initial_ahead;
qd_status qd_initial_values(const qd_program *program, uint64_t seed, int threads, qd_initial_ahead *ahead, qd_initial_sink sink,
                            void *context);

/* Begins to draw them in the background, into at most `bytes` of host memory, while a device is
 * prepared that they will go to. `program` must outlive it. NULL: it could not be begun, and
 * nothing is lost. */
qd_initial_ahead *qd_initial_begin(const qd_program *program, uint64_t seed, int threads, int64_t bytes);
void qd_initial_end(qd_initial_ahead *ahead);
#endif
