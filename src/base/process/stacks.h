/* Stacks of all threads of this process, written on a signal: what a process that hangs is
 * doing. */
#ifndef QD_BASE_STACKS_H
#define QD_BASE_STACKS_H

#include <signal.h>

/* No other part of the program, and no library that it uses, sends this signal. */
#define QD_SIGNAL_STACKS (SIGRTMIN + 5)

/* From now on QD_SIGNAL_STACKS appends the stacks of all threads to the file `path`, under a line
 * that begins with `title`; the process then continues. Both are copied; long ones are cut. */
void qd_stacks_on_signal(const char *path, const char *title);
/* Writes them now, as for the signal; nothing if no file was named, or if they were written. */
void qd_stacks_write(void);
#endif
