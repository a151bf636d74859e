/* A small plot of the losses of a run, for the end of `quadrille train`. */
#ifndef CLI_CURVE_H
#define CLI_CURVE_H

#include <stdint.h>
#include <stdio.h>

/* Draws values[0 .. count), evenly spread over the steps `first` to `last`. A column shows the mean
 * of its values. */
void curve_draw(FILE *out, const double *values, int64_t count, int64_t first, int64_t last, int columns, int rows);
#endif
