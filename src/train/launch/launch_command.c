/* The ranks of a supervised run, started by a command of the user (run.launcher): mpirun or srun on
 * several machines. The command starts this program again on every rank, with the same arguments.
 *
 * Rank 0 prints what the user sees; the supervisor knows an attempt by its exit status, by the last
 * message on standard error, which it passes on, and by metrics.jsonl. */
#define _GNU_SOURCE
#include "train/launch/launch.h"

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
} listener;

/* Messages begin as those of every command do; what mpirun and srun print does not. */
static void take_line(listener *l)
{
    static const char begin[] = "quadrille: ";
    l->line[l->length] = '\0';
    const char *at = strstr(l->line, begin); /* srun -l and mpirun --tag-output put the rank before it */
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

/* "exec COMMAND "$@"" with the program and its arguments; the last ones override what the user
 * gave. NULL-terminated; the caller frees it. */
static char **make_arguments(const qd_run *run, char *const *argv, char *program, char *script, size_t size)
{
    static char shell[] = "sh", option[] = "-c", name[] = "run.launcher", no_restarts[] = "run.restarts=0", no_launcher[] = "run.launcher=",
                resume[] = "run.resume=true", no_resume[] = "run.resume=false", overwrite[] = "run.overwrite=true",
                no_overwrite[] = "run.overwrite=false";
    size_t count = 0, at = 0;
    while (argv[count])
        count++;
    char **list = calloc(count + 10, sizeof *list);
    if (!list)
        return NULL;
    snprintf(script, size, "exec %s \"$@\"", run->config.launcher);
    list[at++] = shell;
    list[at++] = option;
    list[at++] = script;
    list[at++] = name;
    list[at++] = program;
    for (size_t i = 1; i < count; i++)
        list[at++] = argv[i];
    list[at++] = no_restarts;
    list[at++] = no_launcher;
    list[at++] = run->config.resume ? resume : no_resume;
    list[at++] = qd_options_bool(run->options, "run.overwrite") ? overwrite : no_overwrite;
    return list;
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

/* Passes standard error on until it is closed. The first signal that asks the run to stop is passed
 * on as SIGUSR1, which mpirun and srun hand to the ranks: they write a checkpoint and end. */
static void follow(const qd_run *run, pid_t child, int errors, listener *l)
{
    char text[4096];
    for (bool told = false;;) {
        struct pollfd ready = {.fd = errors, .events = POLLIN};
        poll(&ready, 1, 1000); /* a signal ends it, unless it arrives just before */
        if (!told && atomic_load(run->stop) != 0) {
            told = true;
            kill(child, SIGUSR1);
        }
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

qd_status qd_launch_command(const qd_run *run, char *const *argv, int *stopped)
{
    char program[PATH_MAX], script[PATH_MAX];
    int errors[2];
    listener l = {.length = 0};
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0 || strlen(run->config.launcher) + 16 > sizeof script)
        return QD_FAIL(QD_USAGE, "run.launcher is too long, or the program cannot be found");
    program[length] = '\0';
    char **arguments = make_arguments(run, argv, program, script, sizeof script);
    if (!arguments || pipe2(errors, O_CLOEXEC) != 0) {
        free(arguments);
        return QD_FAIL(QD_SYSTEM, "run.launcher: cannot be started: %s", strerror(errno));
    }
    pid_t child;
    int wait_status = 0, error = start(arguments, errors, &child);
    close(errors[1]);
    free(arguments);
    if (error == 0) {
        follow(run, child, errors[0], &l);
        while (waitpid(child, &wait_status, 0) < 0 && errno == EINTR)
            continue;
    }
    close(errors[0]);
    *stopped = atomic_load(run->stop);
    return error == 0 ? judge(run, wait_status, &l) : QD_FAIL(QD_SYSTEM, "run.launcher: cannot be started: %s", strerror(error));
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
