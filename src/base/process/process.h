/* What another process of this machine is doing, from /proc. */
#ifndef QD_BASE_PROCESS_H
#define QD_BASE_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct qd_process_state {
    bool ended;        /* it is gone, or a zombie */
    int wait_status;   /* as of waitpid(), if it is a zombie that this user may look at; otherwise 0 */
    bool stopped;      /* by a signal (SIGSTOP, SIGTSTP) */
    bool traced;       /* a debugger is attached */
    uint64_t started;  /* clock ticks since boot: tells it from a later process with the same id */
} qd_process_state;

void qd_process_look(pid_t pid, qd_process_state *state);
#endif
