/* A small plot of the losses of a run, for the end of `quadrille train`. */
#ifndef CLI_CURVE_H
#define CLI_CURVE_H

#include <stdint.h>
#include <stdio.h>

/* Draws values[0 .. count), one per step from step `first` on. A column shows the mean of its
 * steps. */
void curve_draw(FILE *out, const double *values, int64_t count, int64_t first, int columns, int rows);
#endif
