/* One thread per rank waits for the end of the next rank's process (a pidfd) and looks twice per
 * second whether it is stopped. Ranks of a machine share a memfd with their boards, which can be
 * read when their processes are gone. */
#define _GNU_SOURCE /* memfd_create */
#include "comm/guard.h"

#include "base/clock.h"
#include "base/process/process.h"
#include "comm/work.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECONDS_BETWEEN_LOOKS 0.5

/* What a rank shows to the others of its machine. */
typedef struct guard_line {
    _Alignas(128) qd_wait_board board;
    _Atomic int left; /* it ends in order, or reports its failure itself */
    _Atomic int held; /* written by its watcher: a debugger holds it */
} guard_line;

/* Exchanged at the start. */
typedef struct guard_rank {
    int64_t machine, pids, pid, started, fd; /* pids: identifies the name space of process ids */
} guard_rank;
enum { RANK_WORDS = sizeof(guard_rank) / 8 };

struct qd_guard {
    qd_world *world;
    guard_line *lines; /* (count), of the ranks of this machine */
    int count, own, next; /* indices of lines */
    int next_rank; /* world rank of `next` */
    guard_rank watched;
    int pidfd, stop;
    pthread_t thread;
    bool running;
    _Atomic double patience;
    atomic_bool found; /* the watched rank is lost, and the world failed for that */
    double looked_at, stopped_at;
    qd_guard_tell tell;
    void *context;
};

qd_wait_board *qd_guard_board(const qd_guard *guard)
{
    return &guard->lines[guard->own].board;
}

bool qd_guard_excused(const qd_guard *guard)
{
    for (int i = 0; guard && i < guard->count; i++)
        if (atomic_load_explicit(&guard->lines[i].held, memory_order_relaxed)) return true;
    return false;
}

/* Records the failure of the watched rank, after which all ranks end. */
static void condemn(qd_guard *guard, qd_status status, const char *what, const char *advice)
{
    char last[256];
    qd_last_call_text(&guard->lines[guard->next].board, last, sizeof last);
    QD_FAIL(status, "rank %d %s%s%s%s", guard->next_rank, what, last[0] ? " " : "", last, advice);
    qd_world_fail(guard->world, status);
    /* Unless this rank fails for another reason. */
    const bool ours = strncmp(guard->world->failure, qd_error_message(), sizeof guard->world->failure - 1) == 0;
    if (ours) atomic_store(&guard->found, true);
    if (guard->tell && ours) guard->tell(guard->context, qd_error_message());
}

static void condemn_ended(qd_guard *guard, const qd_process_state *state)
{
    char what[128] = "was killed or crashed";
    int number = WIFSIGNALED(state->wait_status) ? WTERMSIG(state->wait_status) : 0;
    if (number != 0)
        snprintf(what, sizeof what, "was killed by signal %d (%s)", number, strsignal(number));
    else if (state->wait_status != 0)
        snprintf(what, sizeof what, "exited with status %d without saying why", WEXITSTATUS(state->wait_status));
    condemn(guard, QD_SYSTEM, what, number == SIGKILL || number == 0 ? "; if no process did that, the machine ran out of memory" : "");
}

/* Returns false when there is nothing to watch any more. */
static bool look(qd_guard *guard)
{
    qd_process_state state;
    guard_line *line = &guard->lines[guard->next];
    qd_process_look((pid_t)guard->watched.pid, &state);
    if (!state.ended && (int64_t)state.started != guard->watched.started) state.ended = true;
    if (atomic_load(&line->left)) return false;
    if (state.ended) {
        condemn_ended(guard, &state);
        return false;
    }
    /* This process was suspended as well, or starved. */
    double now = qd_clock_now();
    bool suspended = now - guard->looked_at > 4 * SECONDS_BETWEEN_LOOKS;
    guard->looked_at = now;
    atomic_store_explicit(&line->held, state.traced, memory_order_relaxed);
    if (!state.stopped || state.traced)
        guard->stopped_at = 0;
    else if (guard->stopped_at == 0 || suspended)
        guard->stopped_at = now;
    else if (now - guard->stopped_at >= atomic_load(&guard->patience)) {
        char what[96], advice[96];
        snprintf(what, sizeof what, "has been stopped by a signal for %.1f s", now - guard->stopped_at);
        snprintf(advice, sizeof advice, "; kill -CONT %lld would have continued it", (long long)guard->watched.pid);
        condemn(guard, QD_TIMEOUT, what, advice);
        return false;
    }
    return true;
}

static void *guard_main(void *context)
{
    qd_guard *guard = context;
    struct pollfd files[] = {{.fd = guard->stop, .events = POLLIN}, {.fd = guard->pidfd, .events = POLLIN}};
    guard->looked_at = qd_clock_now();
    while (poll(files, 2, (int)(1000 * SECONDS_BETWEEN_LOOKS)) >= 0 && !(files[0].revents & POLLIN) &&
           atomic_load(&guard->world->failed) == QD_OK && look(guard))
        continue;
    return NULL;
}

/* Signals go to the other threads. */
static bool run(qd_guard *guard)
{
    sigset_t all, before;
    guard->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)guard->watched.pid, 0); /* -1 (old kernels): only looks */
    guard->stop = eventfd(0, EFD_CLOEXEC);
    if (guard->stop < 0) return false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    guard->running = pthread_create(&guard->thread, NULL, guard_main, guard) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return guard->running;
}

/* The ranks that can watch each other: same machine, same ids of processes. Fills `count`, `own`,
 * `next` and `watched`; returns the first one's index in `ranks`. */
static int find_neighbours(qd_guard *guard, const guard_rank *ranks, int size, int rank)
{
    int first = -1, before = -1;
    for (int r = 0; r < size; r++) {
        if (ranks[r].machine != ranks[rank].machine || ranks[r].pids != ranks[rank].pids || ranks[r].pid == 0) continue;
        if (first < 0) first = r;
        if (r == rank) guard->own = guard->count;
        if (before == rank) guard->next_rank = r, guard->next = guard->count;
        before = r;
        guard->count++;
    }
    if (before == rank) guard->next_rank = first; /* index 0 */
    guard->watched = ranks[guard->next_rank];
    return first;
}

static guard_rank describe(const qd_comm *comm)
{
    struct stat space;
    qd_process_state state;
    qd_process_look(getpid(), &state);
    guard_rank own = {.machine = qd_comm_locate(comm).machine, .pid = getpid(), .started = (int64_t)state.started, .fd = -1};
    if (stat("/proc/self/ns/pid", &space) == 0) own.pids = (int64_t)space.st_ino;
    if (state.ended) own.pid = 0; /* /proc does not show it */
    return own;
}

/* Maps the memory of `count` lines, which the first rank has created. */
static guard_line *map_lines(const guard_rank *first, int fd, int count)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)first->pid, (long long)first->fd);
    int opened = fd >= 0 ? fd : first->fd >= 0 ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *memory = opened < 0 ? MAP_FAILED
                              : mmap(NULL, (size_t)count * sizeof(guard_line), PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    if (opened >= 0 && opened != fd) close(opened);
    return memory == MAP_FAILED ? NULL : memory;
}

static qd_status open_guard(qd_guard *guard, qd_comm *comm, guard_rank *ranks)
{
    int rank = qd_comm_rank(comm), size = qd_comm_size(comm), fd = -1;
    ranks[rank] = describe(comm);
    QD_TRY(qd_comm_all_gather(comm, &ranks[rank], ranks, (int64_t)size * RANK_WORDS, QD_I64, NULL));
    int first = ranks[rank].pid != 0 ? find_neighbours(guard, ranks, size, rank) : -1;
    if (first == rank && guard->count > 1) {
        fd = memfd_create("quadrille-ranks", MFD_CLOEXEC);
        if (fd >= 0 && ftruncate(fd, (off_t)((size_t)guard->count * sizeof(guard_line))) == 0) ranks[rank].fd = fd;
    }
    qd_status status = qd_comm_all_gather(comm, &ranks[rank], ranks, (int64_t)size * RANK_WORDS, QD_I64, NULL);
    if (status == QD_OK && guard->count > 1) guard->lines = map_lines(&ranks[first], fd, guard->count);
    ranks[rank].fd = guard->lines ? 0 : -1;
    if (status == QD_OK) status = qd_comm_all_gather(comm, &ranks[rank], ranks, (int64_t)size * RANK_WORDS, QD_I64, NULL);
    if (fd >= 0) close(fd);
    QD_TRY(status);
    for (int r = 0; r < size && guard->lines; r++) /* all of the machine or none */
        if (ranks[r].machine == ranks[rank].machine && ranks[r].pids == ranks[rank].pids && ranks[r].fd < 0) return QD_OK;
    if (!guard->lines || !run(guard)) return QD_OK;
    comm->world->guard = guard;
    return QD_OK;
}

void qd_guard_destroy(qd_guard *guard)
{
    if (!guard) return;
    if (guard->lines) atomic_store(&guard->lines[guard->own].left, 1);
    if (guard->running) {
        uint64_t one = 1;
        while (write(guard->stop, &one, sizeof one) < 0) continue;
        pthread_join(guard->thread, NULL);
    }
    if (guard->pidfd >= 0) close(guard->pidfd);
    if (guard->stop >= 0) close(guard->stop);
    if (guard->lines) munmap(guard->lines, (size_t)guard->count * sizeof *guard->lines);
    free(guard);
}

qd_status qd_comm_guard_start(qd_comm *comm, double patience, qd_guard_tell tell, void *context)
{
    qd_guard *guard = calloc(1, sizeof *guard);
    guard_rank *ranks = calloc((size_t)qd_comm_size(comm), sizeof *ranks);
    qd_status status = QD_OK;
    if (guard) *guard = (qd_guard){.world = comm->world, .pidfd = -1, .stop = -1, .patience = patience, .tell = tell, .context = context};
    if (!guard || !ranks) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory to watch the ranks of this machine");
        qd_world_fail(comm->world, status); /* the others wait for it */
    } else {
        status = open_guard(guard, comm, ranks);
    }
    if (comm->world->guard != guard) qd_guard_destroy(guard);
    free(ranks);
    return status;
}

void qd_comm_forsake(qd_comm *comm)
{
    atomic_store(&comm->world->forsaken, 1);
}

bool qd_comm_guard_found(const qd_comm *comm)
{
    const qd_guard *guard = comm->world->guard;
    return guard && atomic_load(&guard->found);
}

const char *qd_comm_failure(const qd_comm *comm)
{
    return atomic_load(&comm->world->failed) != QD_OK ? comm->world->failure : "";
}

void qd_comm_guard_patience(qd_comm *comm, double seconds)
{
    if (comm->world->guard) atomic_store(&comm->world->guard->patience, seconds);
}
