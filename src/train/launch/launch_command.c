/* The ranks of a supervised run, started by a command of the user (run.launcher): mpirun or srun on
 * several machines. The command starts this program again on every rank, with the same arguments.
 *
 * Rank 0 prints what the user sees; the supervisor knows an attempt by its exit status, by the last
 * message on standard error, which it passes on, and by metrics.jsonl. */
#define _GNU_SOURCE
#include "train/launch/launch.h"

#include "base/clock.h"
#include "base/error.h"
#include "train/record/lines.h"
#include "train/run/run_state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* Exit statuses of the program (docs/operations.md). */
enum { EXIT_USAGE = 2, EXIT_AGAIN = 75 };

/* The last message of a rank, from what passes by. */
typedef struct listener {
    char line[QD_ERROR_MESSAGE_BYTES], message[QD_ERROR_MESSAGE_BYTES];
    size_t length;
    bool lost; /* mpirun has said that it lost a rank */
    qd_command *command;
} listener;

/* Messages begin as those of every command do; what mpirun and srun print does not. */
static void take_line(listener *l)
{
    static const char begin[] = "quadrille: ";
    l->line[l->length] = '\0';
    const char *at = strstr(l->line, begin); /* srun -l and mpirun --tag-output put the rank before it */
    l->command->line(l->command->context, l->line);
    l->lost = l->lost || strstr(l->line, "mpirun noticed that process rank");
    if (at)
        snprintf(l->message, sizeof l->message, "%s", at + sizeof begin - 1);
    l->length = 0;
}

static void listen_to(listener *l, const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == '\n')
            take_line(l);
        else if (l->length + 1 < sizeof l->line)
            l->line[l->length++] = text[i];
    }
}

/* Keys of the layout that was chosen for the number of ranks. */
static const char *const layout_keys[] = {"parallel.ranks", "parallel.dp", "parallel.tp", "parallel.cp", "parallel.pp", "parallel.dp_shard",
                                          "parallel.ep", "parallel.etp", "parallel.nodes", "train.micro_batch"};
enum { LAYOUT_KEYS = sizeof layout_keys / sizeof *layout_keys, LAYOUT_TEXT = 64 };

typedef struct command_line {
    char program[PATH_MAX], layout[LAYOUT_KEYS][LAYOUT_TEXT];
    qd_strbuf script;
    char **list; /* NULL-terminated */
} command_line;

/* "exec COMMAND "$@"" with the program and its arguments; the last ones override what the user
 * gave. */
static qd_status make_arguments(const qd_run *run, char *const *argv, const qd_command *command, command_line *c)
{
    static char words[][32] = {"run.restarts=0", "run.launcher=", "run.elastic=", "run.available=", "run.hosts=", "run.host_check="},
                shell[] = "sh", option[] = "-c", name[] = "run.launcher", resume[] = "run.resume=true", no_resume[] = "run.resume=false",
                overwrite[] = "run.overwrite=true", no_overwrite[] = "run.overwrite=false";
    size_t count = 0, at = 0;
    while (argv[count])
        count++;
    ssize_t length = readlink("/proc/self/exe", c->program, sizeof c->program - 1);
    c->list = calloc(count + LAYOUT_KEYS + 16, sizeof *c->list);
    qd_strbuf_printf(&c->script, "exec %s \"$@\"", command->text);
    if (length <= 0 || !c->list || c->script.failed)
        return QD_FAIL(QD_SYSTEM, "run.launcher: cannot be started: no memory, or the program cannot be found");
    char *const first[] = {shell, option, c->script.data, name, c->program};
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        c->list[at++] = first[i];
    for (size_t i = 1; i < count; i++)
        c->list[at++] = argv[i];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        c->list[at++] = words[i];
    c->list[at++] = run->config.resume ? resume : no_resume;
    c->list[at++] = qd_options_bool(run->options, "run.overwrite") ? overwrite : no_overwrite;
    for (int i = 0; command->sized && i < LAYOUT_KEYS; i++)
        if (qd_options_is_set(run->options, layout_keys[i])) {
            snprintf(c->layout[i], LAYOUT_TEXT, "%s=%lld", layout_keys[i], (long long)qd_options_int(run->options, layout_keys[i]));
            c->list[at++] = c->layout[i];
        }
    return QD_OK;
}

/* Returns 0 or the error. */
static int start(char *const *arguments, const int errors[2], pid_t *child)
{
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int error = posix_spawn_file_actions_adddup2(&actions, errors[1], STDERR_FILENO);
    if (error == 0)
        error = posix_spawn(child, "/bin/sh", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    return error;
}

/* A command whose ranks have failed may wait for a machine that has vanished, for a quarter of an
 * hour: it is ended so many seconds after their message, and killed so many later. The same for
 * one that has waited for such a machine since its start, and for an mpirun that has lost a rank
 * which was connecting to it: Open MPI 4.1 may then lock itself up. */
#define SECONDS_TO_END 15.0
#define SECONDS_TO_KILL 5.0

/* Passes standard error on until it is closed. The first signal that asks the run to stop is passed
 * on as SIGUSR1, which mpirun and srun hand to the ranks: they write a checkpoint and end. */
static void follow(const qd_run *run, pid_t child, int errors, listener *l)
{
    double failed_at = 0.0;
    int ended = 0;
    char text[4096];
    for (bool told = false;;) {
        struct pollfd ready = {.fd = errors, .events = POLLIN};
        poll(&ready, 1, 1000); /* a signal ends it, unless it arrives just before */
        if (!told && atomic_load(run->stop) == 0 && !l->message[0] && l->command->resizes(l->command->context))
            l->command->resized = true;
        if (!told && (atomic_load(run->stop) != 0 || l->command->resized)) {
            told = true;
            kill(child, SIGUSR1);
        }
        if (failed_at == 0.0 && (l->message[0] || l->lost || l->command->futile) && atomic_load(run->stop) == 0)
            failed_at = qd_clock_now();
        if (failed_at > 0.0 && ended < 2 && qd_clock_now() > failed_at + SECONDS_TO_END + ended * SECONDS_TO_KILL)
            kill(child, ended++ == 0 ? SIGTERM : SIGKILL);
        if (ended == 2) /* what it has started may hold standard error open */
            return;
        if (ready.revents == 0)
            continue;
        ssize_t bytes = read(errors, text, sizeof text);
        if (bytes < 0 && errno == EINTR)
            continue;
        if (bytes <= 0)
            return;
        listen_to(l, text, (size_t)bytes);
        for (ssize_t done = 0, n; done < bytes && (n = write(STDERR_FILENO, text + done, (size_t)(bytes - done))) > 0;)
            done += n;
    }
}

static qd_status judge(const qd_run *run, int wait_status, const listener *l)
{
    const char *said = l->message[0] ? l->message : "no rank said why";
    const int code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
    if (code == 0)
        return QD_OK;
    if (code == 127 || code == 126)
        return QD_FAIL(QD_USAGE, "run.launcher: '%s' cannot be run", run->config.launcher);
    if (code == EXIT_USAGE)
        return QD_FAIL(QD_USAGE, "%s", said);
    if (code == EXIT_AGAIN)
        return QD_FAIL(QD_STOPPED, "%s", said);
    if (code < 0)
        return QD_FAIL(QD_SYSTEM, "'%s' was killed by signal %d (%s): %s", run->config.launcher, WTERMSIG(wait_status),
                       strsignal(WTERMSIG(wait_status)), said);
    return QD_FAIL(QD_SYSTEM, "%s", l->message[0] ? said : "ranks were lost, and none said why");
}

qd_status qd_launch_command(const qd_run *run, char *const *argv, qd_command *command, int *stopped)
{
    command_line line = {.list = NULL};
    int errors[2] = {-1, -1}, wait_status = 0, error = 0;
    listener l = {.command = command};
    pid_t child;
    *stopped = 0;
    qd_status status = make_arguments(run, argv, command, &line);
    if (status == QD_OK && pipe2(errors, O_CLOEXEC) != 0)
        status = QD_FAIL(QD_SYSTEM, "run.launcher: cannot be started: %s", strerror(errno));
    if (status == QD_OK) {
        error = start(line.list, errors, &child);
        close(errors[1]);
        if (error == 0) {
            follow(run, child, errors[0], &l);
            while (waitpid(child, &wait_status, 0) < 0 && errno == EINTR)
                continue;
        }
        close(errors[0]);
        *stopped = atomic_load(run->stop);
        status = error == 0 ? judge(run, wait_status, &l) : QD_FAIL(QD_SYSTEM, "run.launcher: cannot be started: %s", strerror(error));
    }
    qd_strbuf_free(&line.script);
    free(line.list);
    return status;
}

static void take_step(void *context, const char *line)
{
    double number;
    if (qd_line_number(line, "{\"step\":", &number))
        *(int64_t *)context = (int64_t)number;
}

int64_t qd_launch_last_step(const qd_config *config)
{
    qd_run_file path;
    int64_t step = -1;
    if (qd_run_path(config, "metrics.jsonl", path) != QD_OK || qd_lines_each(path, INT64_MAX, take_step, &step) != QD_OK)
        qd_error_clear();
    return step;
}
