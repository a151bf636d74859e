/* The parent of `bench collectives`: starts the ranks, waits for them and reads the board. */
#define _GNU_SOURCE /* memfd_create */
#include "bench/collectives.h"
#include "base/sized.h"

#include "comm/mpi/native.h"
#include "train/launch/collective_ways.h"

#include <errno.h>
#include <fcntl.h>
#include <quadrille/comm.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

/* As root, Open MPI requires both variables; they are set for the child only. */
static const char *const open_mpi_as_root[] = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
enum { AS_ROOT = 2, LAUNCHER_WORDS = 8, NUMBER_BYTES = 64 };

typedef struct launch {
    qd_local_world *world;
    int board_fd;
    qd_bench_board *board;
    const char **words;    /* command line, NULL-terminated */
    const char **extended; /* environment, NULL-terminated */
    char numbers[QD_BENCH_RANK_ARGUMENTS][NUMBER_BYTES];
    char launcher_ranks[NUMBER_BYTES];
    pid_t *children;
    int started;
} launch;

void qd_bench_collectives_config_init(qd_bench_collectives_config *config, size_t size)
{
    const qd_bench_collectives_config own = {
        .ranks = 2, .smallest_bytes = 4, .largest_bytes = (int64_t)64 << 20, .seconds = 0.5, .operation = -1};
    qd_sized_init(config, size, &own, sizeof own);
}

static qd_status check_config(const qd_bench_collectives_config *config)
{
    if (config->ranks < 1 || config->ranks > QD_BENCH_RANKS_MOST)
        return QD_FAIL(QD_USAGE, "bench collectives: ranks is %d, it must be 1 to %d", config->ranks, QD_BENCH_RANKS_MOST);
    if (config->smallest_bytes < 4 || config->largest_bytes < config->smallest_bytes)
        return QD_FAIL(QD_USAGE, "bench collectives: sizes are %lld to %lld B; they must be at least 4 B and ascending",
                       (long long)config->smallest_bytes, (long long)config->largest_bytes);
    if (!(config->seconds > 0))
        return QD_FAIL(QD_USAGE, "bench collectives: seconds must be above 0");
    if (config->operation < -1 || config->operation >= QD_COLL_KIND_COUNT || config->operation == QD_COLL_RECV)
        return QD_FAIL(QD_USAGE, "bench collectives: there is no operation %d to measure", config->operation);
    if (!config->rank_command || !config->rank_command[0])
        return QD_FAIL(QD_USAGE, "bench collectives: no command for the ranks");
    if (config->against_mpi && !qd_mpi_built())
        return QD_FAIL(QD_UNSUPPORTED, "this build has no MPI to compare with; install an MPI library (Debian: "
                                       "libopenmpi-dev and openmpi-bin) and build again");
    return QD_OK;
}

static qd_status make_board(launch *l)
{
    l->board_fd = memfd_create("quadrille-bench", MFD_CLOEXEC);
    if (l->board_fd < 0 || ftruncate(l->board_fd, sizeof *l->board) != 0)
        return QD_FAIL(QD_SYSTEM, "cannot create %zu bytes of shared memory: %s", sizeof *l->board, strerror(errno));
    void *at = mmap(NULL, sizeof *l->board, PROT_READ | PROT_WRITE, MAP_SHARED, l->board_fd, 0);
    if (at == MAP_FAILED)
        return QD_FAIL(QD_SYSTEM, "cannot map shared memory: %s", strerror(errno));
    l->board = at;
    return QD_OK;
}

/* Command line: [mpirun …] rank_command arguments. Environment: ours, and what mpirun needs. */
static qd_status make_words(launch *l, const qd_bench_collectives_config *config, bool open_mpi)
{
    int command = 0, variables = 0, w = 0;
    while (config->rank_command[command])
        command++;
    while (environ[variables])
        variables++;
    l->words = calloc((size_t)(LAUNCHER_WORDS + command + QD_BENCH_RANK_ARGUMENTS + 1), sizeof *l->words);
    l->extended = calloc((size_t)(variables + AS_ROOT + 1), sizeof *l->extended);
    l->children = calloc((size_t)config->ranks, sizeof *l->children);
    if (!l->words || !l->extended || !l->children)
        return QD_FAIL(QD_NO_MEMORY, "no memory to start %d ranks", config->ranks);
    if (config->against_mpi) {
        snprintf(l->launcher_ranks, NUMBER_BYTES, "%d", config->ranks);
        l->words[w++] = "mpirun";
        if (open_mpi)
            l->words[w++] = "--oversubscribe";
        l->words[w++] = "-n";
        l->words[w++] = l->launcher_ranks;
    }
    for (int i = 0; i < command; i++)
        l->words[w++] = config->rank_command[i];
    int pid = (int)getpid();
    snprintf(l->numbers[0], NUMBER_BYTES, "%d", -1);
    snprintf(l->numbers[1], NUMBER_BYTES, "%d", config->ranks);
    snprintf(l->numbers[2], NUMBER_BYTES, "%lld", (long long)config->smallest_bytes);
    snprintf(l->numbers[3], NUMBER_BYTES, "%lld", (long long)config->largest_bytes);
    snprintf(l->numbers[4], NUMBER_BYTES, "%.17g", config->seconds);
    snprintf(l->numbers[5], NUMBER_BYTES, "%d", config->operation);
    snprintf(l->numbers[6], NUMBER_BYTES, "/proc/%d/fd/%d", pid, qd_local_world_fd(l->world));
    snprintf(l->numbers[7], NUMBER_BYTES, "/proc/%d/fd/%d", pid, l->board_fd);
    for (int i = 0; i < QD_BENCH_RANK_ARGUMENTS; i++)
        l->words[w++] = l->numbers[i];
    int e = 0;
    for (int i = 0; i < variables; i++)
        l->extended[e++] = environ[i];
    for (int i = 0; open_mpi && i < AS_ROOT; i++)
        l->extended[e++] = open_mpi_as_root[i];
    return QD_OK;
}

/* Starts mpirun, or each rank. */
static qd_status start(launch *l, const qd_bench_collectives_config *config)
{
    posix_spawn_file_actions_t actions;
    if (posix_spawn_file_actions_init(&actions) != 0)
        return QD_FAIL(QD_NO_MEMORY, "no memory to start processes");
    int error = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    int processes = config->against_mpi ? 1 : config->ranks;
    for (int i = 0; !error && i < processes; i++) {
        if (!config->against_mpi)
            snprintf(l->numbers[0], NUMBER_BYTES, "%d", i);
        error = posix_spawnp(&l->children[i], l->words[0], &actions, NULL, (char *const *)(uintptr_t)l->words,
                             (char *const *)(uintptr_t)l->extended);
        if (!error)
            l->started++;
    }
    posix_spawn_file_actions_destroy(&actions);
    if (error == ENOENT && config->against_mpi)
        return QD_FAIL(QD_SYSTEM, "there is no %s in the PATH; it comes with an MPI library, and only --against mpi needs one",
                       l->words[0]);
    return error ? QD_FAIL(QD_SYSTEM, "cannot start '%s': %s", l->words[0], strerror(error)) : QD_OK;
}

/* Waits for all children, and for no other child of this process. Reports the rank of a child that
 * dies to the others, so that none waits for it. */
static bool wait_all(launch *l, bool under_mpi)
{
    bool good = true;
    for (int left = l->started; left > 0;) {
        for (int i = 0; i < l->started; i++) {
            int status = 0;
            if (l->children[i] == 0)
                continue;
            pid_t pid = waitpid(l->children[i], &status, WNOHANG);
            if (pid == 0 || (pid < 0 && errno == EINTR))
                continue;
            bool died = pid < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0;
            if (died && !under_mpi)
                qd_local_world_mark_dead(l->world, i, "its process ended before the measurement");
            good = good && !died;
            l->children[i] = 0;
            left--;
        }
        if (left > 0)
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return good;
}

static qd_status collect(const launch *l, bool good, qd_bench_collectives_result *result)
{
    const qd_bench_board *board = l->board;
    if (atomic_load(&l->board->failed))
        return QD_FAIL((qd_status)board->status, "%s", board->message);
    if (!good)
        return QD_FAIL(QD_REMOTE, "a process of the measurement ('%s') failed", l->words[0]);
    result->rows = calloc((size_t)board->count + 1, sizeof *result->rows);
    if (!result->rows)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d rows", board->count);
    memcpy(result->rows, board->rows, (size_t)board->count * sizeof *result->rows);
    result->count = board->count;
    return QD_OK;
}

static qd_status measure(const qd_bench_collectives_config *config, qd_bench_collectives_result *result)
{
    QD_TRY(check_config(config));
    launch l = {.board_fd = -1};
    qd_status status = QD_OK;
    bool open_mpi = false, good;
    if (config->against_mpi) {
        qd_mpi_native_version(result->mpi_version, sizeof result->mpi_version);
        open_mpi = strstr(result->mpi_version, "Open MPI") != NULL;
    }
    qd_comm_config comm_config = qd_comm_config_default();
    qd_collective_ways ways;
    qd_collective_ways_find(config->ways ? config->ways : "", true, &ways);
    snprintf(result->ways, sizeof result->ways, "%s", ways.text);
    result->ways_seconds = ways.seconds;
    comm_config.ways = ways.text;
    QD_TRY_DONE(qd_local_world_create(config->ranks, &comm_config, &l.world));
    QD_TRY_DONE(make_board(&l));
    QD_TRY_DONE(make_words(&l, config, open_mpi));
    status = start(&l, config);
    if (status != QD_OK && l.started > 0)
        for (int rank = l.started; rank < config->ranks; rank++)
            qd_local_world_mark_dead(l.world, rank, "it could not be started");
    good = wait_all(&l, config->against_mpi);
    if (status == QD_OK)
        status = collect(&l, good, result);

done:
    if (l.board)
        munmap(l.board, sizeof *l.board);
    if (l.board_fd >= 0)
        close(l.board_fd);
    qd_local_world_destroy(l.world);
    free(l.words);
    free(l.extended);
    free(l.children);
    return status;
}

qd_status qd_bench_collectives(const qd_bench_collectives_config *config, qd_bench_collectives_result *result)
{
    qd_bench_collectives_config c = qd_bench_collectives_config_default();
    qd_bench_collectives_result r = qd_bench_collectives_result_default();
    QD_TRY(QD_SIZED_CHECK(result, qd_bench_collectives_result));
    QD_SIZED_WRITE(result, &r);
    QD_TRY(QD_SIZED_READ(config, qd_bench_collectives_config, &c));
    qd_status status = measure(&c, &r);
    QD_SIZED_WRITE(result, &r);
    return status;
}

void qd_bench_collectives_free(qd_bench_collectives_result *result)
{
    free(result->rows);
    QD_SIZED_WRITE(result, &(qd_bench_collectives_result){0});
}
