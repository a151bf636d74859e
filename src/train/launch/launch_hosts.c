/* Chooses among the hosts of run.hosts: those that answer and have not failed again and again. See
 * launch_hosts.h. */
#define _GNU_SOURCE
#include "train/launch/launch_hosts.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

#define SECONDS_TO_ANSWER 10.0

void qd_hosts_begin(qd_hosts *h, const qd_config *c)
{
    *h = (qd_hosts){.path = c->hosts, .check = c->host_check, .most_failures = c->host_failures, .blamed = -1};
}

void qd_hosts_end(qd_hosts *h)
{
    free(h->list);
    h->list = NULL;
    h->count = 0;
}

/* "alpha slots=8", as in hostfiles of Open MPI; without slots it takes one rank. Names reach a
 * shell, so they have letters, digits, dots, dashes and underscores only. */
static qd_status read_line(qd_hosts *h, char *line, int number)
{
    char *save = NULL, *name = strtok_r(line, " \t\r", &save), *word;
    int slots = 1, used = 0;
    if (!name || name[0] == '#')
        return QD_OK;
    if (strlen(name) >= sizeof h->list->name || name[0] == '-' ||
        name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_")] != '\0')
        return QD_FAIL(QD_USAGE, "run.hosts: %s, line %d: '%.60s' is not the name of a host", h->path, number, name);
    while ((word = strtok_r(NULL, " \t\r", &save)) && word[0] != '#')
        if (sscanf(word, "slots=%9d%n", &slots, &used) != 1 || word[used] != '\0' || slots < 1)
            return QD_FAIL(QD_USAGE, "run.hosts: %s, line %d: '%.60s' must be slots=N, how many ranks the host takes", h->path,
                           number, word);
    qd_host *larger = realloc(h->list, ((size_t)h->count + 1) * sizeof *larger);
    if (!larger)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d hosts", h->count + 1);
    h->list = larger;
    h->list[h->count] = (qd_host){.slots = slots};
    snprintf(h->list[h->count++].name, sizeof larger->name, "%s", name);
    return QD_OK;
}

static uint64_t hash(const char *text, size_t length)
{
    uint64_t value = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        value = (value ^ (unsigned char)text[i]) * 0x100000001b3u;
    return value;
}

qd_status qd_hosts_read(qd_hosts *h)
{
    char *text = NULL, *rest = NULL;
    size_t length = 0;
    int number = 0;
    if (h->path[0] == '\0')
        return QD_OK;
    qd_status status = qd_file_read(h->path, (size_t)16 << 20, &text, &length);
    if (status != QD_OK)
        return qd_error_prefix(status, "run.hosts: ");
    qd_hosts next = {.path = h->path, .check = h->check, .most_failures = h->most_failures, .text = hash(text, length), .blamed = -1};
    const bool changed = !h->list || next.text != h->text;
    for (char *line = text; line && changed && status == QD_OK; line = rest) {
        rest = strchr(line, '\n');
        if (rest)
            *rest++ = '\0';
        status = read_line(&next, line, ++number);
    }
    free(text);
    if (changed && status == QD_OK && next.count == 0)
        status = QD_FAIL(QD_USAGE, "run.hosts: %s names no host", h->path);
    if (!changed || status != QD_OK) {
        qd_hosts_end(&next);
        return status;
    }
    qd_hosts_end(h);
    *h = next;
    return QD_OK;
}

/* A copy of the text with each {name} replaced by its value. */
static qd_status fill(const char *text, const char *const (*values)[2], int count, qd_strbuf *out)
{
    while (*text) {
        int found = -1;
        for (int i = 0; i < count && found < 0; i++)
            if (strncmp(text, values[i][0], strlen(values[i][0])) == 0)
                found = i;
        if (found >= 0)
            qd_strbuf_puts(out, values[found][1]);
        else
            qd_strbuf_append(out, text, 1);
        text += found >= 0 ? strlen(values[found][0]) : 1;
    }
    return out->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the command of run.launcher") : QD_OK;
}

/* Starts run.host_check for one host; 0: it could not be started. */
static pid_t ask(const qd_hosts *h, const qd_host *host)
{
    static char shell[] = "sh", option[] = "-c";
    const char *const values[][2] = {{"{host}", host->name}};
    qd_strbuf text = {0};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    pid_t pid = 0;
    if (fill(h->check, values, 1, &text) == QD_OK) {
        char *const arguments[] = {shell, option, text.data, NULL};
        posix_spawn_file_actions_init(&actions);
        posix_spawnattr_init(&attributes);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP); /* it is ended with what it has started */
        posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
        posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
        posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
        if (posix_spawn(&pid, "/bin/sh", &actions, &attributes, arguments, environ) != 0)
            pid = 0;
        posix_spawnattr_destroy(&attributes);
        posix_spawn_file_actions_destroy(&actions);
    }
    qd_strbuf_free(&text);
    return pid;
}

void qd_hosts_ask(qd_hosts *h)
{
    const double until = qd_clock_now() + SECONDS_TO_ANSWER;
    pid_t *pids = h->check[0] && h->count > 0 ? calloc((size_t)h->count, sizeof *pids) : NULL;
    int waiting = 0;
    for (int i = 0; pids && i < h->count; i++) {
        h->list[i].absent = true;
        pids[i] = ask(h, &h->list[i]);
        waiting += pids[i] > 0;
    }
    while (waiting > 0) {
        const bool late = qd_clock_now() >= until;
        for (int i = 0; i < h->count; i++) {
            int status = 0;
            if (pids[i] <= 0)
                continue;
            if (late)
                kill(-pids[i], SIGKILL);
            if (waitpid(pids[i], &status, late ? 0 : WNOHANG) == 0)
                continue;
            h->list[i].absent = late || !WIFEXITED(status) || WEXITSTATUS(status) != 0;
            pids[i] = 0;
            waiting--;
        }
        if (waiting > 0)
            usleep(20000);
    }
    free(pids);
}

static bool usable(const qd_host *host)
{
    return !host->excluded && !host->absent;
}

int qd_hosts_slots(const qd_hosts *h)
{
    int slots = 0;
    for (int i = 0; i < h->count; i++)
        slots += usable(&h->list[i]) ? h->list[i].slots : 0;
    return slots;
}

/* Where the name is, as a word of its own; NULL: nowhere. */
static const char *find_name(const char *line, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = line; (at = strstr(at, name)); at++) {
        const char before = at > line ? at[-1] : ' ', after = at[length];
        if (!isalnum((unsigned char)before) && !strchr("-_.", before) && !isalnum((unsigned char)after) && after != '-' && after != '_')
            return at;
    }
    return NULL;
}

/* mpirun: "process rank 1 with PID 0 on node beta exited on signal 9", "Remote daemon: … on node
 * beta"; srun: "srun: error: beta: task 2: Killed", "Node failure on beta"; our own name the rank
 * and its host. When one rank fails, the others are ended, so the first line counts; in it, the
 * rank that has failed comes before those that noticed. */
void qd_hosts_listen(qd_hosts *h, const char *line)
{
    static const char *const signs[] = {"exited on signal", "exited with", "Remote daemon", "srun: error: ", "Node failure", "quadrille: "};
    const char *first = NULL;
    bool sign = false;
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        sign = sign || strstr(line, signs[i]);
    if (!sign || h->blamed >= 0)
        return;
    for (int i = 0; i < h->count; i++) {
        const char *at = find_name(line, h->list[i].name);
        if (at && (!first || at < first)) {
            first = at;
            h->blamed = i;
        }
    }
}

void qd_hosts_attempt(qd_hosts *h)
{
    h->blamed = -1;
}

const qd_host *qd_hosts_blame(qd_hosts *h)
{
    qd_host *host = h->blamed >= 0 && h->blamed < h->count ? &h->list[h->blamed] : NULL;
    for (int i = 0; host && i < h->count; i++)
        h->list[i].failures = &h->list[i] == host ? h->list[i].failures + 1 : 0;
    if (!host || host->excluded || host->failures < h->most_failures)
        return NULL;
    host->excluded = true;
    return host;
}

qd_status qd_hosts_command(const qd_hosts *h, const char *launcher, int ranks, qd_strbuf *text)
{
    qd_strbuf hosts = {0}, nodes = {0};
    char number[24], count[24];
    int left = ranks, used = 0;
    for (int i = 0; i < h->count && left > 0; i++) {
        if (!usable(&h->list[i]))
            continue;
        const int slots = h->list[i].slots < left ? h->list[i].slots : left;
        qd_strbuf_printf(&hosts, "%s%s:%d", used ? "," : "", h->list[i].name, slots);
        qd_strbuf_printf(&nodes, "%s%s", used ? "," : "", h->list[i].name);
        left -= slots;
        used++;
    }
    snprintf(number, sizeof number, "%d", ranks);
    snprintf(count, sizeof count, "%d", used);
    const char *const values[][2] = {
        {"{ranks}", number}, {"{hosts}", hosts.data ? hosts.data : ""}, {"{names}", nodes.data ? nodes.data : ""}, {"{nodes}", count}};
    qd_status status = hosts.failed || nodes.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the command of run.launcher")
                                                    : fill(launcher, values, 4, text);
    qd_strbuf_free(&hosts);
    qd_strbuf_free(&nodes);
    return status;
}
