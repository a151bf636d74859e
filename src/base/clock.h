#ifndef QD_BASE_CLOCK_H
#define QD_BASE_CLOCK_H

/* Seconds on a clock that never goes back; the same origin in all processes of a machine. */
double qd_clock_now(void);

/* For deadlines of a thread that looks at the clock many times per second: seconds between *seen,
 * its last look, and now that it cannot have waited for anybody, because its process did not run:
 * it was suspended (Ctrl-Z, a scheduler, SIGSTOP), or starved. A deadline is moved by so much. A
 * gap always counts for QD_CLOCK_GAP, so that deadlines pass on a machine that is slow, too. *seen
 * becomes `now`. */
#define QD_CLOCK_GAP 0.25
double qd_clock_lost(double *seen, double now);
/* CPU seconds of the calling thread. */
double qd_clock_thread_cpu(void);

#endif
