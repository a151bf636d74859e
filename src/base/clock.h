#ifndef QD_BASE_CLOCK_H
#define QD_BASE_CLOCK_H

/* Seconds on a clock that never goes back; the same origin in all processes of a machine. */
double qd_clock_now(void);
/* CPU seconds of the calling thread. */
double qd_clock_thread_cpu(void);

#endif
