/* Ranks as processes: starts them with exec, so that no thread, lock or library state is inherited,
 * and supervises them until all have ended. */
#define _GNU_SOURCE
#include "train/launch/launch_crew.h"

#include "base/clock.h"
#include "base/process/process.h"
#include "base/process/stacks.h"
#include "train/ranks/patience.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* After the first failure the other ranks have this long to return on their own, then to react to
 * SIGTERM. */
#define SECONDS_TO_RETURN 5.0
#define STEPS_TO_RETURN 2.5 /* of a supervised run, if that is longer */
#define SECONDS_TO_TERMINATE 2.0

#define SECONDS_BETWEEN_LOOKS 0.5 /* at the state of the ranks */

/* An action of a step that takes longer than run.deadline and so many steps never ends. Before the
 * first steps there is nothing to compare with. */
#define STEPS_OF_AN_ACTION 10.0
#define STEPS_BEFORE_WATCHING 3

enum { VARIABLES = 7, VARIABLE_BYTES = 48 };

/* The environment of a rank: ours plus a few variables. */
static qd_status make_environment(const crew *c, char text[VARIABLES][VARIABLE_BYTES], char ***environment)
{
    size_t count = 0;
    while (environ[count])
        count++;
    char **list = calloc(count + VARIABLES + 1, sizeof *list);
    if (!list)
        return QD_FAIL(QD_NO_MEMORY, "no memory to start %d ranks", c->size);
    for (size_t i = 0; i < VARIABLES; i++)
        list[i] = text[i];
    memcpy(list + VARIABLES, environ, count * sizeof *list);
    snprintf(text[1], VARIABLE_BYTES, QD_ENV_WORLD_FD "=%d", qd_local_world_fd(c->world));
    snprintf(text[2], VARIABLE_BYTES, QD_ENV_REPORT_FD "=%d", c->report[1]);
    snprintf(text[3], VARIABLE_BYTES, QD_ENV_LAUNCHER "=%ld", (long)getpid());
    snprintf(text[4], VARIABLE_BYTES, QD_ENV_CONFIG_FD "=%d", c->config);
    snprintf(text[6], VARIABLE_BYTES, QD_ENV_STATE_FD "=%d", c->state);
    *environment = list;
    return QD_OK;
}

/* Ranks inherit three to five descriptors. SIGINT stays blocked in them, because a terminal sends
 * it to all processes of the job and the launcher forwards it; the other signals are blocked until
 * the rank is ready for them. */
static int prepare_spawn(const crew *c, int orders, posix_spawn_file_actions_t *actions, posix_spawnattr_t *attributes)
{
    sigset_t mask = c->mask_before, defaults;
    int world = qd_local_world_fd(c->world), error;
    struct sigaction present;
    static const int late[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE, QD_SIGNAL_INTERRUPT};
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGCHLD);
    for (size_t i = 0; i < sizeof late / sizeof *late; i++) {
        sigaddset(&mask, late[i]);
        sigaction(late[i], NULL, &present);
        if (present.sa_handler != SIG_IGN || late[i] == QD_SIGNAL_INTERRUPT) /* nohup applies to the ranks too */
            sigaddset(&defaults, late[i]);
    }
    if ((error = posix_spawn_file_actions_adddup2(actions, world, world)) != 0 ||
        (error = posix_spawn_file_actions_adddup2(actions, c->report[1], c->report[1])) != 0 ||
        (error = posix_spawn_file_actions_adddup2(actions, c->config, c->config)) != 0 ||
        (c->state >= 0 && (error = posix_spawn_file_actions_adddup2(actions, c->state, c->state)) != 0) ||
        (orders >= 0 && (error = posix_spawn_file_actions_adddup2(actions, orders, orders)) != 0) ||
        (error = posix_spawn_file_actions_addopen(actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0)) != 0 ||
        (error = posix_spawnattr_setsigmask(attributes, &mask)) != 0 ||
        (error = posix_spawnattr_setsigdefault(attributes, &defaults)) != 0)
        return error;
    return posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

/* Returns 0 or the error. */
static int start_child(crew *c, int rank, char text[VARIABLES][VARIABLE_BYTES], char **environment)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    child *k = &c->children[rank];
    int orders[2] = {-1, -1};
    *k = (child){.orders = -1};
    if (c->keeper && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, orders) != 0)
        return errno;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    int error = prepare_spawn(c, orders[1], &actions, &attributes);
    snprintf(text[0], VARIABLE_BYTES, QD_ENV_RANK "=%d", rank);
    snprintf(text[5], VARIABLE_BYTES, QD_ENV_ORDER_FD "=%d", orders[1]);
    if (error == 0)
        error = posix_spawn(&k->pid, "/proc/self/exe", &actions, &attributes, c->argv, environment);
    if (error == 0)
        c->alive++;
    else
        k->pid = 0;
    k->orders = orders[0];
    if (orders[1] >= 0)
        close(orders[1]);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return error;
}

qd_status qd_crew_start(crew *c)
{
    char text[VARIABLES][VARIABLE_BYTES];
    char **environment = NULL;
    int error = 0, rank = 0;
    QD_TRY(make_environment(c, text, &environment));
    for (; rank < c->size && error == 0; rank++)
        if (c->children[rank].pid == 0)
            error = start_child(c, rank, text, environment);
    free(environment);
    return error == 0 ? QD_OK : QD_FAIL(QD_SYSTEM, "rank %d: cannot start a process: %s", rank - 1, strerror(error));
}

/* Signals are read from a signalfd. Children that end stay zombies until they are waited for. */
static qd_status watch_signals(crew *c)
{
    struct sigaction action = {.sa_handler = SIG_DFL}, present;
    sigemptyset(&action.sa_mask);
    sigaction(SIGCHLD, &action, &c->child_before);
    sigemptyset(&c->watched);
    sigaddset(&c->watched, SIGCHLD);
    /* Signals that the user's shell ignores (a background job) stay ignored. */
    static const int asking[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE};
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++) {
        int number = asking[i];
        sigaction(number, NULL, &present);
        if (present.sa_handler != SIG_IGN)
            sigaddset(&c->watched, number);
    }
    sigprocmask(SIG_BLOCK, &c->watched, &c->mask_before);
    c->signals = signalfd(-1, &c->watched, SFD_CLOEXEC | SFD_NONBLOCK);
    return c->signals >= 0 ? QD_OK : QD_FAIL(QD_SYSTEM, "cannot watch signals: %s", strerror(errno));
}

static void send_all(const crew *c, int number)
{
    for (int i = 0; i < c->count; i++)
        if (c->children[i].pid > 0)
            kill(c->children[i].pid, number);
}

/* Surviving ranks of a supervised run keep their state, which is worth waiting for. */
static double seconds_to_return(const crew *c)
{
    return c->keeper ? fmax(SECONDS_TO_RETURN, STEPS_TO_RETURN * qd_patience_step(&c->patience)) : SECONDS_TO_RETURN;
}

static void enter(crew *c, phase to)
{
    if (to <= c->phase)
        return;
    c->phase = to;
    for (int rank = 0; to == PHASE_RETURNING && rank < c->size; rank++)
        if (c->children[rank].pid > 0 && c->children[rank].stopped_at > 0.0) /* it cannot return */
            kill(c->children[rank].pid, SIGKILL);
    c->next = qd_clock_now() + (to == PHASE_RETURNING ? seconds_to_return(c) : SECONDS_TO_TERMINATE);
    if (to == PHASE_TERMINATING)
        send_all(c, SIGTERM);
    else if (to == PHASE_KILLING)
        send_all(c, SIGKILL);
}

/* What the ranks are doing, in a file of the run folder: the signal finds them wherever they
 * are. */
static void write_stacks(crew *c)
{
    const char *folder = c->run->config.run_dir;
    size_t length = strlen(c->failure.message);
    if (folder[0] == '\0')
        return;
    snprintf(c->failure.message + length, sizeof c->failure.message - length, "; stacks of the ranks: %s/" QD_STACKS_FILE, folder);
    send_all(c, QD_SIGNAL_STACKS);
}

/* Records that a rank hangs. */
static void add_hang(crew *c, const char *message, const char *trace)
{
    const bool first = c->failure.status == QD_OK || c->failure.status == QD_REMOTE;
    qd_failure_add(&c->failure, QD_TIMEOUT, message, trace);
    if (first)
        write_stacks(c);
}

static void take_reports(crew *c)
{
    const qd_train_observer *o = c->run->observer;
    qd_report report;
    while (qd_report_receive(c->report[0], &report)) {
        if (c->keeper)
            qd_crew_take_report(c, &report);
        if (report.kind == QD_REPORT_STEP) {
            qd_patience_add(&c->patience, report.step.step_seconds);
            if (o && o->on_step)
                o->on_step(o->context, &report.step);
        } else if (report.kind == QD_REPORT_END && o && o->on_end) {
            o->on_end(o->context, &report.end);
        } else if (report.kind == QD_REPORT_NOTE && o && o->on_note) {
            o->on_note(o->context, report.failure.message);
        } else if (report.kind == QD_REPORT_FAILURE) {
            if (report.failure.status == QD_TIMEOUT)
                add_hang(c, report.failure.message, report.failure.trace);
            else
                qd_failure_add(&c->failure, report.failure.status, report.failure.message, report.failure.trace);
            if (report.rank >= 0 && report.rank < c->size)
                c->children[report.rank].told = report.failure.status;
            /* An interrupted run ends in order and may still have to write files. */
            if (!qd_ended_in_order(report.failure.status))
                enter(c, PHASE_RETURNING);
        }
    }
}

/* Records a rank that failed. If it ended silently, its wait status is the message. */
static void note_death(crew *c, int rank, int wait_status)
{
    char how[160], last[256], message[sizeof how + sizeof last + 128];
    if (qd_ended_in_order(c->children[rank].told))
        return;
    int number = WIFSIGNALED(wait_status) ? WTERMSIG(wait_status) : 0;
    if (number != 0)
        snprintf(how, sizeof how, "was killed by signal %d (%s)", number, strsignal(number));
    else
        snprintf(how, sizeof how, "exited with status %d without saying why", WEXITSTATUS(wait_status));
    qd_local_world_mark_dead(c->world, rank, how);
    /* Ranks that we terminated ourselves are not reported. */
    if (c->children[rank].told == QD_OK && c->phase < PHASE_TERMINATING && c->stop_signal == 0) {
        qd_local_world_last(c->world, rank, last, sizeof last);
        snprintf(message, sizeof message, "rank %d %s%s%s%s", rank, how, last[0] ? " " : "", last,
                 number == SIGKILL ? "; if no process did that, the machine ran out of memory" : "");
        qd_failure_add(&c->failure, QD_SYSTEM, message, "");
    }
    enter(c, PHASE_RETURNING);
}

static void reap(crew *c)
{
    for (int rank = 0; rank < c->count; rank++) {
        int wait_status = 0;
        child *k = &c->children[rank];
        if (k->pid <= 0 || waitpid(k->pid, &wait_status, WNOHANG | WUNTRACED | WCONTINUED) != k->pid)
            continue;
        if (WIFSTOPPED(wait_status) || WIFCONTINUED(wait_status)) {
            k->stopped_at = WIFSTOPPED(wait_status) ? qd_clock_now() : 0.0;
            continue;
        }
        k->pid = 0;
        c->alive--;
        take_reports(c); /* its last report was sent before it ended */
        if (k->orders >= 0)
            close(k->orders);
        k->orders = -1;
        if (!k->leaves && (!WIFEXITED(wait_status) || WEXITSTATUS(wait_status) != 0))
            note_death(c, rank, wait_status);
    }
}

/* A rank that others wait for is found by them, after run.deadline. This is for ranks that all
 * hang, or that no other one waits for. */
static void watch_progress(crew *c, double passed)
{
    bool moved = false;
    int slow = 0;
    for (int rank = 0; rank < c->size; rank++) {
        char last[sizeof c->children[rank].last] = "";
        if (c->children[rank].pid > 0)
            qd_local_world_last(c->world, rank, last, sizeof last);
        moved = moved || strcmp(last, c->children[rank].last) != 0;
        memcpy(c->children[rank].last, last, sizeof last);
    }
    c->standing = moved ? 0.0 : c->standing + passed;
    const double step = qd_patience_step(&c->patience);
    if (c->patience.steps < STEPS_BEFORE_WATCHING || c->standing < fmax(c->run->config.deadline, STEPS_OF_AN_ACTION * step))
        return;
    while (slow + 1 < c->size && c->children[slow].pid <= 0)
        slow++;
    char message[512];
    snprintf(message, sizeof message, "no rank has advanced for %.0f s, although a step takes %.3g s; rank %d is %s", c->standing,
             step, slow, c->children[slow].last);
    add_hang(c, message, "");
    enter(c, PHASE_RETURNING);
    c->next = qd_clock_now() + 1.0; /* for the stacks; none of them will return */
}

/* A rank that stays stopped although this process runs will not come back by itself; in a suspended
 * job this process is suspended too. A debugger, in contrast, is used on purpose: while it holds a
 * rank, no deadline expires. */
static void look_at_ranks(crew *c)
{
    double now = qd_clock_now(), most = qd_patience_stopped(&c->patience, c->run->config.deadline);
    const double passed = now - c->looked_at;
    bool suspended = passed > 4 * SECONDS_BETWEEN_LOOKS, traced = false, stopped = false;
    c->looked_at = now;
    for (int rank = 0; rank < c->size && c->phase == PHASE_RUNNING; rank++) {
        child *k = &c->children[rank];
        qd_process_state state = {0};
        if (k->pid > 0)
            qd_process_look(k->pid, &state);
        bool held = state.traced;
        traced = traced || held;
        stopped = stopped || k->stopped_at > 0.0;
        if (k->pid <= 0 || k->stopped_at == 0.0)
            continue;
        if (held || suspended)
            k->stopped_at = now;
        if (now - k->stopped_at < most)
            continue;
        char last[256], message[512];
        qd_local_world_last(c->world, rank, last, sizeof last);
        snprintf(message, sizeof message, "rank %d has been stopped by a signal for %.1f s %s; kill -CONT %ld would have continued it",
                 rank, now - k->stopped_at, last, (long)k->pid);
        qd_failure_add(&c->failure, QD_TIMEOUT, message, "");
        qd_local_world_mark_dead(c->world, rank, "stopped by a signal");
        enter(c, PHASE_RETURNING);
    }
    if (c->phase == PHASE_RUNNING && !traced && !stopped)
        watch_progress(c, suspended ? SECONDS_BETWEEN_LOOKS : passed);
    if (traced != c->excused)
        qd_local_world_excuse(c->world, traced);
    c->excused = traced;
}

/* The first signal asks the ranks to stop after their step. A second SIGINT kills them, and so does
 * a second SIGTERM. A first SIGTERM after SIGUSR1 does not: schedulers send it while the checkpoint
 * is being written. SIGHUP and SIGPIPE do not count: a signal after them is the first. */
static void take_stop(crew *c, int number)
{
    if (c->stop_signal == 0) {
        c->stop_signal = number;
        send_all(c, number == SIGINT ? QD_SIGNAL_INTERRUPT : number);
    } else if (c->stop_signal == SIGHUP || c->stop_signal == SIGPIPE) {
        c->stop_signal = number;
    } else if (number == SIGINT || (number == SIGTERM && c->stop_signal == SIGTERM)) {
        enter(c, PHASE_KILLING);
    } else if (number == SIGTERM) {
        c->stop_signal = SIGTERM;
    }
}

static void take_signals(crew *c)
{
    struct signalfd_siginfo info;
    while (read(c->signals, &info, sizeof info) == (ssize_t)sizeof info)
        if (info.ssi_signo != SIGCHLD)
            take_stop(c, (int)info.ssi_signo);
}

static void supervise(crew *c)
{
    if (atomic_load(c->run->stop) != 0) /* arrived before signals were watched */
        take_stop(c, atomic_load(c->run->stop));
    c->looked_at = qd_clock_now();
    while (c->alive > 0) {
        struct pollfd files[] = {{.fd = c->signals, .events = POLLIN}, {.fd = c->report[0], .events = POLLIN}};
        double left = c->next - qd_clock_now();
        int wait = c->phase == PHASE_KILLING   ? -1
                   : c->phase == PHASE_RUNNING ? (int)(1000 * SECONDS_BETWEEN_LOOKS)
                   : left > 0                  ? (int)(left * 1000) + 1
                                               : 0;
        poll(files, 2, wait);
        take_signals(c);
        take_reports(c);
        reap(c);
        const bool looks = qd_clock_now() - c->looked_at >= SECONDS_BETWEEN_LOOKS;
        if (looks)
            look_at_ranks(c);
        if (looks && c->keeper)
            qd_crew_look(c);
        if (c->phase == PHASE_RETURNING && qd_clock_now() >= c->next && qd_crew_reforms(c))
            qd_crew_end_busy(c);
        else if (c->phase != PHASE_RUNNING && c->phase != PHASE_KILLING && qd_clock_now() >= c->next)
            enter(c, c->phase + 1);
        if (c->keeper)
            qd_crew_advance(c);
    }
}

qd_status qd_crew_world(crew *c, int size, qd_local_world **world)
{
    const qd_config *settings = &c->run->config;
    const bool copies = size > 1 && strcmp(settings->device, "cpu") == 0;
    qd_comm_config config = qd_comm_config_default();
    if (copies && !c->chosen) { /* later worlds do not measure again, while ranks wait for them */
        qd_collective_ways_find(settings->collectives, true, &c->ways);
        c->chosen = true;
    }
    config.deadline_seconds = settings->deadline;
    config.ways = c->ways.text;
    return qd_local_world_create(size, &config, world);
}

static qd_status open_crew(crew *c)
{
    c->children = calloc(QD_CREW_MOST, sizeof *c->children);
    for (int i = 0; c->children && i < QD_CREW_MOST; i++)
        c->children[i].orders = -1;
    if (!c->children)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", c->run->config.world);
    c->size = c->count = c->run->config.world;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, c->report) != 0)
        return QD_FAIL(QD_SYSTEM, "cannot make a socket for the ranks' reports: %s", strerror(errno));
    QD_TRY(qd_crew_world(c, c->size, &c->world));
    return watch_signals(c);
}

qd_status qd_launch_processes(const qd_run *run, char *const *argv, const qd_keeper *keeper, int *stopped)
{
    crew c = {.run = run, .argv = argv, .keeper = keeper, .report = {-1, -1}, .config = -1, .signals = -1, .state = -1,
              .state_step = -1, .below = INT64_MAX};
    sigaction(SIGCHLD, NULL, &c.child_before);
    sigprocmask(SIG_BLOCK, NULL, &c.mask_before);
    qd_status status = open_crew(&c);
    if (status == QD_OK)
        status = qd_launch_config_write(run->options, &c.config);
    if (status == QD_OK)
        status = qd_crew_start(&c);
    if (status != QD_OK) {
        qd_failure_add_own(&c.failure, status);
        enter(&c, PHASE_TERMINATING);
    }
    supervise(&c);
    *stopped = c.stop_signal;
    if (c.stop_signal != 0)
        qd_failure_add(&c.failure, QD_INTERRUPTED, "interrupted", "");
    if (c.signals >= 0)
        close(c.signals);
    if (c.config >= 0)
        close(c.config);
    sigprocmask(SIG_SETMASK, &c.mask_before, NULL);
    sigaction(SIGCHLD, &c.child_before, NULL);
    qd_local_world_destroy(c.world);
    for (int i = 0; i < 2; i++)
        if (c.report[i] >= 0)
            close(c.report[i]);
    for (int i = 0; c.children && i < c.count; i++)
        if (c.children[i].orders >= 0)
            close(c.children[i].orders);
    if (c.state >= 0)
        close(c.state);
    free(c.children);
    return qd_failure_raise(&c.failure);
}
