/* Runs of rows of a sequence shard that are contiguous in the sequence. */
#ifndef QD_BASE_RUNS_H
#define QD_BASE_RUNS_H

#include <stdint.h>

/* Rows `row` .. row + count - 1 of the shard are at positions `position` .. position + count - 1 of
 * the sequence. */
typedef struct qd_row_run {
    int64_t row, position, count;
} qd_row_run;
#endif
