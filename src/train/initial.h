/* The values that parameters start with. */
#ifndef QD_TRAIN_INITIAL_H
#define QD_TRAIN_INITIAL_H

#include "spec/program.h"

/* Takes elements first .. first + count - 1 of this rank's part of a parameter. */
typedef qd_status (*qd_initial_sink)(void *context, int param, int64_t first, int64_t count, const float *values);

/* Draws them with `threads` threads, piece by piece: starting takes little more memory than running. Values depend on (seed,
 * name, element) alone. */
qd_status qd_initial_values(const qd_program *program, uint64_t seed, int threads, qd_initial_sink sink, void *context);
#endif
