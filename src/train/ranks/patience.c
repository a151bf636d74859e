/* The median of the last steps. See patience.h. */
#include "train/ranks/patience.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SECONDS_STOPPED 4.0
#define STEPS_STOPPED 2.5

static int compare_seconds(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double qd_patience_step(const qd_patience *patience)
{
    double recent[QD_PATIENCE_STEPS];
    int count = patience->steps < QD_PATIENCE_STEPS ? (int)patience->steps : QD_PATIENCE_STEPS;
    memcpy(recent, patience->seconds, sizeof recent);
    qsort(recent, (size_t)count, sizeof recent[0], compare_seconds);
    return count > 0 ? recent[count / 2] : 0.0;
}

double qd_patience_stopped(const qd_patience *patience, double deadline)
{
    return fmin(fmax(STEPS_STOPPED * qd_patience_step(patience), SECONDS_STOPPED), deadline);
}
