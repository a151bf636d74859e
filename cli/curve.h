/* A small drawing of a run's losses. */
#ifndef CLI_CURVE_H
#define CLI_CURVE_H

#include <stdint.h>
#include <stdio.h>

/* values[0 .. count): one per step, the first of step `first`. A column shows the mean of its
 * steps. */
void curve_draw(FILE *out, const double *values, int64_t count, int64_t first, int columns, int rows);
#endif
