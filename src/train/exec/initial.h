/* Initial values of parameters, drawn from counter-based random numbers. */
#ifndef QD_TRAIN_EXEC_INITIAL_H
#define QD_TRAIN_EXEC_INITIAL_H

#include "spec/program/program.h"

/* Receives elements first .. first + count - 1 of this rank's shard of a parameter. */
typedef qd_status (*qd_initial_sink)(void *context, int param, int64_t first, int64_t count, const float *values);

/* Draws the values with `threads` threads, piece by piece, so that startup needs little more memory
 * than training. Values depend only on (seed, name, element). Values that `ahead` (may be NULL) has
 * already drawn are taken from it. */
typedef struct qd_initial_ahead qd_initial_ahead;
qd_status qd_initial_values(const qd_program *program, uint64_t seed, int threads, qd_initial_ahead *ahead, qd_initial_sink sink,
                            void *context);

/* Only those of adapters, for a run whose other values are loaded. */
qd_status qd_initial_adapters(const qd_program *program, uint64_t seed, qd_initial_sink sink, void *context);
/* Starts drawing in the background, into at most `bytes` of host memory, while the device that will
 * store the values is being prepared. `program` must outlive it. NULL: it could not be started,
 * which only costs time. */
qd_initial_ahead *qd_initial_begin(const qd_program *program, uint64_t seed, int threads, int64_t bytes);
void qd_initial_end(qd_initial_ahead *ahead);
#endif
