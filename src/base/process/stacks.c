/* The first thread that gets the signal passes it on to all others; each writes its own stack, one
 * after another. Only system calls and backtrace() are used: the process may hang anywhere, with
 * any lock held. */
#define _GNU_SOURCE
#include "base/process/stacks.h"

#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_FRAMES = 64, TURNS = 20000 };

static char file[PATH_MAX], title_of_process[128];
static atomic_int passed_on, writing;

/* As the kernel writes it for SYS_getdents64. */
struct entry {
    uint64_t inode, offset;
    uint16_t length;
    uint8_t type;
    char name[];
};

static void pass_on(int number, long self)
{
    _Alignas(struct entry) char room[4096];
    int folder = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (long bytes; folder >= 0 && (bytes = syscall(SYS_getdents64, folder, room, sizeof room)) > 0;)
        for (long at = 0; at < bytes;) {
            const struct entry *e = (const struct entry *)(room + at);
            long thread = 0;
            for (const char *c = e->name; *c >= '0' && *c <= '9'; c++)
                thread = 10 * thread + (*c - '0');
            if (thread > 0 && thread != self)
                syscall(SYS_tgkill, getpid(), thread, number);
            at += e->length;
        }
    if (folder >= 0)
        close(folder);
}

static size_t put(char *text, size_t at, size_t most, const char *what)
{
    while (*what && at + 1 < most)
        text[at++] = *what++;
    return at;
}

/* "title, thread 123 (name)\n" */
static size_t head(char *text, size_t most, long self)
{
    char digits[24], name[17] = "";
    size_t d = sizeof digits;
    digits[--d] = '\0';
    for (long n = self; n > 0; n /= 10)
        digits[--d] = (char)('0' + n % 10);
    prctl(PR_GET_NAME, name);
    size_t at = put(text, 0, most, title_of_process);
    at = put(text, at, most, ", thread ");
    at = put(text, at, most, digits + d);
    at = put(text, at, most, " (");
    at = put(text, at, most, name);
    return put(text, at, most, ")\n");
}

static void on_signal(int number)
{
    const int error = errno;
    const long self = syscall(SYS_gettid);
    void *frames[MOST_FRAMES];
    char text[256];
    if (atomic_exchange(&passed_on, 1) == 0)
        pass_on(number, self);
    int count = backtrace(frames, MOST_FRAMES), turns = 0;
    while (atomic_exchange(&writing, 1) != 0 && turns++ < TURNS) /* one that died while writing must not stop the others */
        sched_yield();
    int fd = open(file, O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd >= 0) {
        size_t length = head(text, sizeof text, self);
        if (write(fd, text, length) == (ssize_t)length)
            backtrace_symbols_fd(frames, count, fd);
        close(fd);
    }
    atomic_store(&writing, 0);
    errno = error;
}

void qd_stacks_on_signal(const char *path, const char *title)
{
    void *frame;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigset_t own;
    snprintf(file, sizeof file, "%s", path);
    snprintf(title_of_process, sizeof title_of_process, "%s", title);
    atomic_store(&passed_on, 0);
    (void)backtrace(&frame, 1); /* loads what it needs now, not in the handler */
    sigemptyset(&action.sa_mask);
    sigaction(QD_SIGNAL_STACKS, &action, NULL);
    sigemptyset(&own);
    sigaddset(&own, QD_SIGNAL_STACKS);
    sigprocmask(SIG_UNBLOCK, &own, NULL);
}

void qd_stacks_write(void)
{
    const struct timespec moment = {.tv_nsec = 200000000}; /* for the other threads */
    if (file[0] == '\0' || atomic_load(&passed_on) != 0)
        return;
    raise(QD_SIGNAL_STACKS);
    nanosleep(&moment, NULL);
}
