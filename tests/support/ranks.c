/* Starts ranks as threads, processes or MPI ranks, collects their results and enforces a time
 * limit. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create */
#endif
#include "support/ranks.h"

#include "base/clock.h"
#include "comm/device.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANK_FLAG "--qd-rank"
#define RESULT_MARK "@@quadrille-rank-result"
#define MOST_RANKS 64
#define SECRET "the secret of the tests"

#ifndef QD_TEST_MPIEXEC
#define QD_TEST_MPIEXEC "mpirun"
#endif

static const qd_ranks_entry *table;
static int table_count;

const char *qd_ranks_mode_name(qd_ranks_mode mode)
{
    static const char *const names[] = {"threads", "processes", "staged processes", "mpi", "ucx", "threads with devices"};
    return names[mode];
}

bool qd_ranks_mode_available(qd_ranks_mode mode)
{
#if defined(__SANITIZE_THREAD__)
    /* The thread sanitizer checks threads; it cannot check anything between processes and would
     * only be slow. */
    if (mode != QD_RANKS_THREADS && mode != QD_RANKS_DEVICE)
        return false;
#endif
    if (mode == QD_RANKS_UCX) return qd_ucx_built();
    if (mode != QD_RANKS_MPI) return true;
    return qd_mpi_built() && system("command -v " QD_TEST_MPIEXEC " >/dev/null 2>&1") == 0;
}

static qd_ranks_body find_body(const char *name)
{
    for (int i = 0; i < table_count; i++)
        if (strcmp(table[i].name, name) == 0) return table[i].body;
    fprintf(stderr, "there is no test body %s\n", name);
    return NULL;
}

static void pause_ms(int ms)
{
    struct timespec t = {.tv_nsec = ms * 1000000L};
    nanosleep(&t, NULL);
}

/* Runs the body on a joined world and fills the result. As in a real program, a rank that fails
 * aborts the world, and one that succeeds does not wait for the others. */
static void run_body(qd_ranks_body body, qd_comm *world, qd_ranks_call *call, double began, qd_ranks_result *result)
{
    result->status = body(world, call);
    if (result->status != QD_OK) {
        snprintf(result->message, sizeof result->message, "%s", qd_error_message());
        qd_comm_abort(world, qd_error_message());
    }
    result->value = call->value;
    result->seconds = qd_clock_now() - began;
    result->returned = true;
}

/* Threads. */

typedef struct thread_rank {
    pthread_t thread;
    qd_ranks_body body;
    qd_local_world *world;
    int rank;
    qd_ranks_call call;
    double began;
    qd_ranks_result *result;
} thread_rank;

static void *thread_main(void *context)
{
    thread_rank *self = context;
    qd_comm *comm = NULL;
    self->result->status = qd_local_comm_attach(self->world, self->rank, &comm);
    if (self->result->status != QD_OK) {
        snprintf(self->result->message, sizeof self->result->message, "%s", qd_error_message());
        return NULL;
    }
    qd_comm *on_device = NULL;
    qd_device *device = NULL;
    if (self->call.mode == QD_RANKS_DEVICE) {
        self->result->status = qd_device_create("cpu", NULL, &device);
        if (self->result->status == QD_OK) self->result->status = qd_comm_on_device(comm, device, "local", &on_device);
    }
    if (self->result->status == QD_OK)
        run_body(self->body, on_device ? on_device : comm, &self->call, self->began, self->result);
    else
        snprintf(self->result->message, sizeof self->result->message, "%s", qd_error_message());
    qd_comm_destroy(on_device);
    qd_device_destroy(device);
    qd_comm_destroy(comm);
    return NULL;
}

/* Threads cannot be killed: a test that hangs ends its process with a message. */
static void *watchdog_main(void *context)
{
    double limit = *(double *)context;
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    struct timespec t = {.tv_sec = (time_t)limit};
    nanosleep(&t, NULL);
    fprintf(stderr, "ranks as threads did not finish within %g s\n", limit);
    _exit(99);
}

static qd_status run_threads(const char *name, qd_ranks_mode mode, int size, const qd_ranks_options *options,
                             const qd_comm_config *config, double limit, qd_ranks_result *results)
{
    qd_local_world *world = NULL;
    QD_TRY(qd_local_world_create(size, config, &world));
    thread_rank ranks[MOST_RANKS];
    pthread_t watchdog;
    pthread_create(&watchdog, NULL, watchdog_main, &limit);
    double began = qd_clock_now();
    for (int r = 0; r < size; r++) {
        ranks[r] = (thread_rank){.body = find_body(name),
                                 .world = world,
                                 .rank = r,
                                 .call = {.text = options->text ? options->text : "", .mode = mode},
                                 .began = began,
                                 .result = &results[r]};
        pthread_create(&ranks[r].thread, NULL, thread_main, &ranks[r]);
    }
    for (int r = 0; r < size; r++) pthread_join(ranks[r].thread, NULL);
    pthread_cancel(watchdog);
    pthread_join(watchdog, NULL);
    qd_local_world_destroy(world);
    return QD_OK;
}

/* Processes. */

static pid_t spawn(char *const argv[], int output)
{
    pid_t parent = getpid(), pid = fork();
    if (pid != 0) return pid;
    /* Between fork and exec: system calls only. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(98);
    setpgid(0, 0);
    if (output >= 0) dup2(output, STDOUT_FILENO);
    execvp(argv[0], argv);
    _exit(98);
}

/* Waits for all processes; kills stopped ones when the others are done, and all at the limit. */
static qd_status wait_processes(pid_t *pids, int count, double limit, qd_local_world *world, bool tell)
{
    double began = qd_clock_now();
    bool stopped[MOST_RANKS] = {false}, over = false;
    int left = 0;
    for (int r = 0; r < count; r++) left += pids[r] > 0;
    while (left > 0) {
        int waiting = 0;
        for (int r = 0; r < count; r++) {
            int info = 0;
            if (pids[r] <= 0) continue;
            pid_t got = waitpid(pids[r], &info, WNOHANG | WUNTRACED | WCONTINUED);
            if (got == pids[r] && (WIFSTOPPED(info) || WIFCONTINUED(info))) {
                stopped[r] = WIFSTOPPED(info);
            } else if (got == pids[r]) {
                if (tell && world && WIFSIGNALED(info)) {
                    char how[64];
                    snprintf(how, sizeof how, "killed by signal %d", WTERMSIG(info));
                    qd_local_world_mark_dead(world, r, how);
                }
                pids[r] = 0;
                left--;
                continue;
            }
            if (!stopped[r]) waiting++;
        }
        if (!over && qd_clock_now() - began > limit) over = true;
        if (left > 0 && (waiting == 0 || over)) {
            for (int r = 0; r < count; r++)
                if (pids[r] > 0) kill(-pids[r], SIGKILL);
        }
        if (left > 0) pause_ms(2);
    }
    return over ? QD_FAIL(QD_TIMEOUT, "the ranks did not finish within %g s", limit) : QD_OK;
}

/* Appends to a sanitizer's options, for a child; returns the old value. */
static char *add_options(const char *name, const char *more)
{
    const char *before = getenv(name);
    char *old = before ? strdup(before) : NULL, all[1024];
    snprintf(all, sizeof all, "%s%s%s", old ? old : "", old ? ":" : "", more);
    setenv(name, all, 1);
    return old;
}

static void take_options_back(const char *name, char *old)
{
    if (old)
        setenv(name, old, 1);
    else
        unsetenv(name);
    free(old);
}

/* A port that is not in use now. */
static int free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool found = fd >= 0 && bind(fd, (struct sockaddr *)&address, length) == 0 &&
                 getsockname(fd, (struct sockaddr *)&address, &length) == 0;
    if (fd >= 0) close(fd);
    return found ? ntohs(address.sin_port) : 0;
}

static qd_status run_processes(const char *name, qd_ranks_mode mode, int size, const qd_ranks_options *options,
                               const qd_comm_config *config, double limit, qd_ranks_result *results)
{
    qd_local_world *world = NULL;
    char joined[64] = "";
    if (mode == QD_RANKS_UCX)
        snprintf(joined, sizeof joined, "ucx %d %d %.3f", size, free_port(), config->deadline_seconds);
    else
        QD_TRY(qd_local_world_create(size, config, &world));
    int results_fd = memfd_create("results", 0);
    size_t bytes = (size_t)size * sizeof *results;
    if (results_fd < 0 || ftruncate(results_fd, (off_t)bytes) != 0) {
        qd_local_world_destroy(world);
        return QD_FAIL(QD_SYSTEM, "no memory file for results: %s", strerror(errno));
    }
    int world_fd = world ? dup(qd_local_world_fd(world)) : -1; /* the duplicate survives exec */
    double began = qd_clock_now();
    pid_t pids[MOST_RANKS];
    char *asan = world ? NULL : add_options("ASAN_OPTIONS", "detect_leaks=0"); /* UCX leaks at exit */
    for (int r = 0; r < size; r++) {
        char rank[16], fd[16], out[16], start[32];
        snprintf(rank, sizeof rank, "%d", r);
        snprintf(fd, sizeof fd, "%d", world_fd);
        char *how = world ? fd : joined;
        snprintf(out, sizeof out, "%d", results_fd);
        snprintf(start, sizeof start, "%.6f", began);
        char *argv[] = {"/proc/self/exe", RANK_FLAG, (char *)name, rank, how, out, start,
                        (char *)(options->text ? options->text : ""), NULL};
        pids[r] = spawn(argv, -1);
    }
    if (!world) take_options_back("ASAN_OPTIONS", asan);
    qd_status status = wait_processes(pids, size, limit, world, options->tell_deaths);
    if (pread(results_fd, results, bytes, 0) != (ssize_t)bytes)
        status = QD_FAIL(QD_SYSTEM, "cannot read the results: %s", strerror(errno));
    close(results_fd);
    if (world_fd >= 0) close(world_fd);
    qd_local_world_destroy(world);
    return status;
}

static qd_status join_ucx(const char *how, int rank, qd_comm **comm)
{
    qd_comm_config config = qd_comm_config_default();
    qd_comm_join join = qd_comm_join_default();
    join.address = "127.0.0.1";
    join.rank = rank;
    join.secret = SECRET;
    join.secret_bytes = sizeof SECRET - 1;
    join.seconds = 30;
    if (sscanf(how, "ucx %d %d %lf", &join.ranks, &join.port, &config.deadline_seconds) != 3)
        return QD_FAIL(QD_USAGE, "'%s' does not say how to join", how);
    return qd_ucx_comm_create(&config, &join, comm);
}

/* argv: exe flag name rank world-fd (or "ucx size port deadline") results-fd began text */
static int process_main(char **argv)
{
    int rank = atoi(argv[3]);
    qd_ranks_body body = find_body(argv[2]);
    bool ucx = strncmp(argv[4], "ucx ", 4) == 0;
    qd_ranks_call call = {.text = argv[7], .mode = ucx ? QD_RANKS_UCX : QD_RANKS_PROCESSES};
    qd_ranks_result result = {0};
    qd_comm *comm = NULL;
    if (!body) return 1;
    result.status = ucx ? join_ucx(argv[4], rank, &comm) : qd_local_comm_open(atoi(argv[4]), rank, &comm);
    if (result.status == QD_OK)
        run_body(body, comm, &call, atof(argv[6]), &result);
    else
        snprintf(result.message, sizeof result.message, "%s", qd_error_message());
    ssize_t written = pwrite(atoi(argv[5]), &result, sizeof result, (off_t)((size_t)rank * sizeof result));
    qd_comm_destroy(comm);
    return written == (ssize_t)sizeof result ? 0 : 1;
}

/* MPI. */

/* mpirun starts processes that inherit no descriptors, so results are lines on standard output. */
static qd_status run_mpi(const char *name, int size, const qd_ranks_options *options, const qd_comm_config *config,
                         double limit, qd_ranks_result *results)
{
    if (!qd_ranks_mode_available(QD_RANKS_MPI)) return QD_FAIL(QD_UNSUPPORTED, "this build or machine has no MPI");
    int pipe_fds[2];
    if (pipe2(pipe_fds, O_CLOEXEC) != 0) return QD_FAIL(QD_SYSTEM, "no pipe: %s", strerror(errno));
    char ranks[16], deadline[32], start[32], exe[4096] = "";
    snprintf(ranks, sizeof ranks, "%d", size);
    snprintf(deadline, sizeof deadline, "%.3f", config->deadline_seconds);
    snprintf(start, sizeof start, "%.6f", qd_clock_now());
    if (readlink("/proc/self/exe", exe, sizeof exe - 1) < 0) return QD_FAIL(QD_SYSTEM, "cannot find the test program");
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    /* For the ranks: Open MPI leaks at exit and takes its own locks in inconsistent order. */
    char *asan = add_options("ASAN_OPTIONS", "detect_leaks=0"), *tsan = add_options("TSAN_OPTIONS", "detect_deadlocks=0");
    char *argv[] = {QD_TEST_MPIEXEC, "--oversubscribe", "-n", ranks, exe, RANK_FLAG, (char *)name, "mpi", deadline, start,
                    (char *)(options->text ? options->text : ""), NULL};
    pid_t pid = spawn(argv, pipe_fds[1]);
    take_options_back("ASAN_OPTIONS", asan);
    take_options_back("TSAN_OPTIONS", tsan);
    close(pipe_fds[1]);
    FILE *lines = fdopen(pipe_fds[0], "r");
    fcntl(pipe_fds[0], F_SETFL, O_NONBLOCK);
    char line[1024];
    size_t used = 0;
    double began = qd_clock_now();
    bool over = false;
    for (;;) {
        char c;
        ssize_t n = read(pipe_fds[0], &c, 1);
        if (n == 0) break;
        if (n < 0) {
            if (!over && qd_clock_now() - began > limit) {
                over = true;
                kill(-pid, SIGKILL);
            }
            pause_ms(2);
            continue;
        }
        if (c != '\n') {
            if (used + 1 < sizeof line) line[used++] = c;
            continue;
        }
        line[used] = '\0';
        used = 0;
        int rank, status, at = 0;
        unsigned long long value;
        double seconds;
        char *mark = strstr(line, RESULT_MARK);
        if (mark && sscanf(mark, RESULT_MARK " %d %d %llx %lf %n", &rank, &status, &value, &seconds, &at) >= 4 &&
            rank >= 0 && rank < size) {
            results[rank] = (qd_ranks_result){
                .returned = true, .status = (qd_status)status, .value = value, .seconds = seconds};
            snprintf(results[rank].message, sizeof results[rank].message, "%s", mark + at);
        }
    }
    fclose(lines);
    int ended = 0;
    waitpid(pid, &ended, 0);
    if (over) return QD_FAIL(QD_TIMEOUT, "the MPI ranks did not finish within %g s", limit);
    /* mpirun reports the first rank killed by a signal; a crash after the body has already left a
     * result. */
    int by_signal = WIFEXITED(ended) ? WEXITSTATUS(ended) - 128 : 0;
    if (by_signal == SIGSEGV || by_signal == SIGBUS || by_signal == SIGABRT || by_signal == SIGFPE || by_signal == SIGILL)
        return QD_FAIL(QD_SYSTEM, "an MPI rank crashed: %s", strsignal(by_signal));
    return QD_OK;
}

/* argv: exe flag name "mpi" deadline began text */
static int mpi_main(char **argv)
{
    qd_comm_config config = qd_comm_config_default();
    config.deadline_seconds = atof(argv[4]);
    qd_ranks_body body = find_body(argv[2]);
    qd_ranks_call call = {.text = argv[6], .mode = QD_RANKS_MPI};
    qd_ranks_result result = {0};
    qd_comm *comm = NULL;
    if (!body) return 1;
    result.status = qd_mpi_comm_create(&config, &comm);
    if (result.status != QD_OK) {
        fprintf(stderr, "%s\n", qd_error_message());
        return 1;
    }
    int rank = qd_comm_rank(comm);
    run_body(body, comm, &call, atof(argv[5]), &result);
    for (char *c = result.message; *c; c++)
        if (*c == '\n') *c = ' ';
    printf("\n" RESULT_MARK " %d %d %llx %.6f %s\n", rank, (int)result.status, (unsigned long long)result.value,
           result.seconds, result.message);
    fflush(stdout);
    qd_comm_destroy(comm);
    return 0;
}

void qd_ranks_main(int argc, char **argv, const qd_ranks_entry *bodies, int count)
{
    table = bodies;
    table_count = count;
    if (argc < 4 || strcmp(argv[1], RANK_FLAG) != 0) return;
    exit(strcmp(argv[3], "mpi") == 0 ? mpi_main(argv) : process_main(argv));
}

qd_status qd_ranks_run(const char *body, qd_ranks_mode mode, int size, const qd_ranks_options *options,
                       qd_ranks_result *results)
{
    qd_ranks_options none = {0};
    if (!options) options = &none;
    qd_comm_config config = qd_comm_config_default();
    config.deadline_seconds = options->deadline_seconds > 0 ? options->deadline_seconds : 20;
    config.staging_bytes = options->staging_bytes > 0 ? options->staging_bytes : 256 * 1024;
    config.no_remote_reads = mode == QD_RANKS_STAGED || options->no_remote_reads;
    config.ways = options->ways;
    double limit = options->limit_seconds > 0 ? options->limit_seconds : 60;
    memset(results, 0, (size_t)size * sizeof *results);
    if (size < 1 || size > MOST_RANKS || !find_body(body)) return QD_FAIL(QD_USAGE, "cannot run %s on %d ranks", body, size);
    switch (mode) {
    case QD_RANKS_THREADS:
    case QD_RANKS_DEVICE: return run_threads(body, mode, size, options, &config, limit, results);
    case QD_RANKS_PROCESSES:
    case QD_RANKS_STAGED:
    case QD_RANKS_UCX: return run_processes(body, mode, size, options, &config, limit, results);
    default: return run_mpi(body, size, options, &config, limit, results);
    }
}

qd_status qd_ranks_run_ok(const char *body, qd_ranks_mode mode, int size, const qd_ranks_options *options,
                          qd_ranks_result *results)
{
    QD_TRY(qd_ranks_run(body, mode, size, options, results));
    /* A rank's own error is more specific than "another rank failed" of the others. */
    for (int pass = 0; pass < 2; pass++)
        for (int r = 0; r < size; r++) {
            const qd_ranks_result *result = &results[r];
            if (result->returned && (result->status == QD_OK || (pass == 0 && result->status == QD_REMOTE))) continue;
            return QD_FAIL(result->status == QD_OK ? QD_REMOTE : result->status, "%s on %d %s: rank %d%s: %s", body, size,
                           qd_ranks_mode_name(mode), r, result->returned ? "" : " did not return", result->message);
        }
    return QD_OK;
}
