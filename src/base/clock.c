/* Clocks over clock_gettime(). */
#include "base/clock.h"

#include <time.h>

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double qd_clock_now(void)
{
    return seconds(CLOCK_MONOTONIC);
}

double qd_clock_lost(double *seen, double now)
{
    const double gap = now - *seen;
    *seen = now;
    return gap > QD_CLOCK_GAP ? gap - QD_CLOCK_GAP : 0.0;
}

double qd_clock_thread_cpu(void)
{
    return seconds(CLOCK_THREAD_CPUTIME_ID);
}
