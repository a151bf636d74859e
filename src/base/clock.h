/* Clocks: wall time shared by the processes of a machine, time lost to suspension, CPU time. */
#ifndef QD_BASE_CLOCK_H
#define QD_BASE_CLOCK_H

/* Seconds of a monotonic clock; all processes of a machine share its origin. */
double qd_clock_now(void);

/* For deadlines of a thread that polls the clock many times per second. Returns the seconds between
 * *seen (its last poll) and `now` in which the process did not run, because it was suspended
 * (Ctrl-Z, a scheduler, SIGSTOP) or starved; the caller extends its deadline by as much. The first
 * QD_CLOCK_GAP seconds of a gap always count as waiting, so that deadlines expire on a slow machine
 * too. Sets *seen to `now`. */
#define QD_CLOCK_GAP 0.25
double qd_clock_lost(double *seen, double now);
/* CPU seconds of the calling thread. */
double qd_clock_thread_cpu(void);

#endif
