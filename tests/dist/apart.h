/* A process that lives apart: with an IPC namespace of its own it shares no memory with others. So
 * it is on a machine of its own for the backend ucx, which reaches it over TCP. Needs root or a
 * system where users may create namespaces. Define _GNU_SOURCE first. */
#ifndef QD_TESTS_DIST_APART_H
#define QD_TESTS_DIST_APART_H

#include <sched.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

static inline bool live_apart(void)
{
    return unshare(CLONE_NEWIPC) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWIPC) == 0;
}

static inline bool may_live_apart(void)
{
    int status = 1;
    pid_t child = fork();
    if (child == 0) _exit(live_apart() ? 0 : 1);
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

#endif
