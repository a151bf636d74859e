/* Sums of squares of rows of gradients become one number per parameter. */
#ifndef QD_TRAIN_ROW_SUMS_H
#define QD_TRAIN_ROW_SUMS_H

#include "spec/program.h"

/* squares: as the buffer SQUARES has them, of all parts. sums (parameters): rows in order, whoever has them; 0 for what does not
 * count in the norm of this rank. cursor: room for one number per part of each family. */
void qd_row_sums(const qd_program *program, const double *squares, int64_t *cursor, double *sums);
#endif
