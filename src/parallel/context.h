/* Exchanges of rows between the ranks of cp. */
#ifndef QD_PARALLEL_CONTEXT_H
#define QD_PARALLEL_CONTEXT_H

#include "parallel/bind.h"

/* Segments that a rank of cp has in whole sequences. */
#define QD_CONTEXT_SEGMENTS(program) (QD_CONTEXT_RUNS * (program)->strategy.micro_batch)

/* Which elements of whole sequences, (batch, seq, cols) in the order of positions, rank `coord` of
 * cp holds. segments: room for QD_CONTEXT_SEGMENTS. */
qd_segment_list qd_context_segments(const qd_program *program, int coord, int64_t cols, qd_segment *segments);

/* Passes rows on to the next rank of cp, and takes those of the rank before. Asynchronous: both
 * works are to be waited for. */
qd_status qd_context_shift(qd_bound *bound, const qd_op *op, void *const *at, qd_work *works[2]);

/* Blocks by the rank that gets them, against blocks by the rank they come from. */
qd_status qd_context_swap(qd_bound *bound, const qd_op *op, void *const *at, qd_work **work);
#endif
