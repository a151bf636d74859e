/* Exchanges of rows between the ranks of cp. */
#ifndef QD_PARALLEL_CONTEXT_H
#define QD_PARALLEL_CONTEXT_H

#include "parallel/bind.h"

/* Number of segments that a rank of cp holds in whole sequences. */
#define QD_CONTEXT_SEGMENTS(program) (QD_CONTEXT_RUNS * (program)->strategy.micro_batch)

/* The elements of whole sequences, (batch, seq, cols) in order of positions, that rank `coord` of
 * cp holds. `segments` has space for QD_CONTEXT_SEGMENTS. */
qd_segment_list qd_context_segments(const qd_program *program, int coord, int64_t cols, qd_segment *segments);

/* Sends rows to the next rank of cp, and receives those of the previous one. Asynchronous: wait for
 * both works. */
qd_status qd_context_shift(qd_bound *bound, const qd_op *op, void *const *at, qd_work *works[2]);

/* All-to-all: sends blocks sorted by destination rank, receives blocks sorted by source rank. */
qd_status qd_context_swap(qd_bound *bound, const qd_op *op, void *const *at, qd_work **work);
#endif
