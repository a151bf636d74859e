/* Rows of a part of a sequence that stand at neighbouring positions of it. */
#ifndef QD_BASE_RUNS_H
#define QD_BASE_RUNS_H

#include <stdint.h>

/* Rows `row` .. row + count - 1 of the part stand at positions `position` .. position + count -
 * 1. */
typedef struct qd_row_run {
    int64_t row, position, count;
} qd_row_run;
#endif
