/* Finds the role of this process in a run (first process, local rank or MPI rank) and runs it. Only
 * this file reads from the environment how a run was started; cache_folder.c reads where the user
 * keeps caches. */
#define _GNU_SOURCE
#include "train/launch/launch.h"
#include "train/launch/launch_elastic.h"

#include "base/error.h"
#include "base/sized.h"
#include "base/thread.h"
#include "base/process/stacks.h"
#include "train/launch/launch_world.h"
#include "train/elastic/handover.h"
#include "train/run/resume_options.h"
#include "train/run/run_machine.h"

#include <errno.h>
#include <limits.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* The variable as an integer of at least `least`; `otherwise` if it is not set or not such a
 * number. */
static int env_int(const char *name, int least, int otherwise)
{
    const char *text = getenv(name);
    char *end;
    errno = 0;
    long value = text ? strtol(text, &end, 10) : 0;
    if (!text || end == text || *end != '\0' || errno != 0 || value < least || value > INT_MAX)
        return otherwise;
    return (int)value;
}

/* The first of several names that is set. */
static int env_first(const char *const *names, int least, int otherwise)
{
    for (; *names; names++)
        if (getenv(*names))
            return env_int(*names, least, otherwise);
    return otherwise;
}

/* Whether a variable is set by which MPI libraries ask a launcher for their peers: PMI, PMI2, PMIx,
 * Cray's PALS. */
static bool env_names_peers(void)
{
    for (char **variable = environ; *variable; variable++)
        if (strncmp(*variable, "PMI", 3) == 0 || strncmp(*variable, "PALS_", 5) == 0)
            return true;
    return false;
}

/* A task of a Slurm step, not a process started by an mpirun inside a job. */
static bool under_srun(void)
{
    bool mpirun = getenv("OMPI_COMM_WORLD_SIZE") || getenv("HYDI_CONTROL_FD") || getenv("MPI_LOCALNRANKS");
    return !mpirun && getenv("SLURM_STEP_ID") && getenv("SLURM_STEP_NUM_TASKS");
}

/* Started by mpirun (Open MPI, MPICH, Intel MPI) or srun. A Slurm step of one task is not a world:
 * it may be an interactive shell, in which a run starts its own ranks. A batch script has no
 * tasks. */
static bool under_mpi(void)
{
    if (under_srun())
        return env_int("SLURM_STEP_NUM_TASKS", 1, 1) > 1;
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK");
}

static void find_mpi_place(qd_launch_place *p)
{
    static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", NULL};
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", NULL};
    bool srun = under_srun();
    p->role = QD_ROLE_MPI_RANK;
    p->starter = srun ? "srun" : "mpirun";
    p->rank = srun ? env_int("SLURM_PROCID", 0, -1) : env_first(ranks, 0, -1);
    p->size = srun ? env_int("SLURM_STEP_NUM_TASKS", 1, 0) : env_first(sizes, 1, 0);
    p->told = !srun || env_names_peers();
    if (!p->told && qd_ucx_built())
        p->joins = p->told = qd_launch_world_slurm(p->rank, p->size, &p->world);
}

/* What torchrun and Kubernetes operators set comes after mpirun's variables: mpirun passes the
 * others on. */
static bool find_named_place(qd_launch_place *p)
{
    if ((under_mpi() && (!under_srun() || env_names_peers())) || !qd_launch_world_named(&p->world))
        return false;
    p->role = QD_ROLE_MPI_RANK;
    p->starter = p->world.starter;
    p->rank = p->world.rank;
    p->size = p->world.size;
    p->joins = p->told = true;
    return true;
}

static qd_launch_place find_place(void)
{
    qd_launch_place p = {.role = QD_ROLE_FIRST, .rank = -1, .world_fd = -1, .report_fd = -1, .config_fd = -1, .order_fd = -1,
                         .state_fd = -1};
    if (getenv(QD_ENV_RANK)) {
        p.role = QD_ROLE_LOCAL_RANK;
        p.rank = env_int(QD_ENV_RANK, 0, -1);
        p.world_fd = env_int(QD_ENV_WORLD_FD, 0, -1);
        p.report_fd = env_int(QD_ENV_REPORT_FD, 0, -1);
        p.config_fd = env_int(QD_ENV_CONFIG_FD, 0, -1);
        p.order_fd = env_int(QD_ENV_ORDER_FD, 0, -1);
        p.state_fd = env_int(QD_ENV_STATE_FD, 0, -1);
        p.launcher = (pid_t)env_int(QD_ENV_LAUNCHER, 1, 0);
    } else if (!find_named_place(&p) && under_mpi()) {
        find_mpi_place(&p);
    }
    return p;
}

static qd_launch_marks marks;
static atomic_int train_called;

static void on_stop_signal(int number)
{
    int asked = number == QD_SIGNAL_INTERRUPT ? SIGINT : number;
    /* SIGTERM after SIGUSR1 changes only the name; SIGINT after either would lose the
     * checkpoint. */
    if (atomic_load(&marks.stop) < asked)
        atomic_store(&marks.stop, asked);
}

/* SIGHUP: the terminal was closed. SIGPIPE: standard output was closed (`| head`). By default both
 * would kill the process at once. */
static const int stop_signals[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE, QD_SIGNAL_INTERRUPT};
enum { STOP_SIGNALS = 6 };

/* In the process that the user started, a second SIGINT or SIGTERM has the default action and kills
 * it; the other signals may be repeated (SIGPIPE at every line). Local ranks may get one signal
 * from the launcher and one from a scheduler that signals all processes of a job; the launcher
 * kills them by other means. Ignored signals stay ignored. */
static void catch_stop(bool local_rank, struct sigaction before[STOP_SIGNALS])
{
    sigset_t own;
    sigemptyset(&own);
    for (int i = 0; i < STOP_SIGNALS; i++) {
        int number = stop_signals[i];
        bool once = !local_rank && (number == SIGINT || number == SIGTERM);
        struct sigaction action = {.sa_handler = on_stop_signal, .sa_flags = SA_RESTART | (once ? SA_RESETHAND : 0)};
        sigemptyset(&action.sa_mask);
        sigaction(number, NULL, &before[i]);
        if (number == QD_SIGNAL_INTERRUPT && !local_rank)
            continue;
        if (before[i].sa_handler != SIG_IGN)
            sigaction(number, &action, NULL);
        if (number != SIGINT)
            sigaddset(&own, number);
    }
    if (local_rank) /* the launcher blocked them until now, so that none arrived too early */
        sigprocmask(SIG_UNBLOCK, &own, NULL);
}

static void restore_stop(const struct sigaction before[STOP_SIGNALS])
{
    for (int i = 0; i < STOP_SIGNALS; i++)
        sigaction(stop_signals[i], &before[i], NULL);
}

static void send_step(void *context, const qd_train_step *step)
{
    const qd_launch_place *p = context;
    qd_report_send(p->report_fd, &(qd_report){.kind = QD_REPORT_STEP, .rank = p->rank, .step = *step});
}

static void send_end(void *context, const qd_train_end *end)
{
    const qd_launch_place *p = context;
    qd_report_send(p->report_fd, &(qd_report){.kind = QD_REPORT_END, .rank = p->rank, .end = *end});
}

static void send_note(void *context, const char *text)
{
    const qd_launch_place *p = context;
    qd_report report = {.kind = QD_REPORT_NOTE, .rank = p->rank};
    snprintf(report.failure.message, sizeof report.failure.message, "%s", text);
    qd_report_send(p->report_fd, &report);
}

static void send_failure(const qd_launch_place *p, qd_status status)
{
    qd_report report = {.kind = QD_REPORT_FAILURE, .rank = p->rank};
    qd_failure_add_own(&report.failure, status);
    if (p->report_fd >= 0)
        qd_report_send(p->report_fd, &report);
}

/* A rank ends here: what the program does after qd_train() is done once, by the process that the
 * user started. Its exit handlers are not called, and what it has printed so far is not printed
 * again. */
static _Noreturn void end_local_rank(const qd_launch_place *p, qd_status status)
{
    if (status != QD_OK)
        send_failure(p, status);
#if defined(__SANITIZE_ADDRESS__)
    __lsan_do_leak_check(); /* _exit() leaves it out */
#endif
    _exit(status == QD_OK ? EXIT_SUCCESS : EXIT_FAILURE);
}

/* Rank 0, after each step. */
static qd_rest asks_rest(void *context)
{
    const qd_launch_place *p = context;
    qd_order order;
    int fds[QD_ORDER_FDS];
    return qd_order_receive(p->order_fd, false, &order, fds) && order.kind == QD_ORDER_REST ? QD_REST : QD_REST_NOT;
}

static void close_all(int *const *fds, int count)
{
    for (int i = 0; i < count; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

/* This rank has left its world: it does what the launcher orders until it joins the next one.
 * False: the launcher lets it go. */
static bool take_orders(qd_launch_place *p, qd_kept *kept, qd_status status)
{
    qd_order order;
    int fds[QD_ORDER_FDS];
    if (status == QD_TIMEOUT) /* it has the message that names the missing rank */
        send_failure(p, status);
    qd_report_send(p->report_fd, &(qd_report){.kind = QD_REPORT_RESTS, .rank = p->rank, .rests = qd_kept_step(kept)});
    while (qd_order_receive(p->order_fd, true, &order, fds)) {
        if (order.kind == QD_ORDER_JOIN) {
            close_all((int *const[]){&p->world_fd, &p->config_fd, &p->state_fd}, 3);
            p->rank = order.rank;
            p->world_fd = fds[0];
            p->config_fd = fds[1];
            p->state_fd = fds[2];
            return true;
        }
        if (order.kind == QD_ORDER_WRITE) {
            qd_report written = {.kind = QD_REPORT_WRITTEN, .rank = p->rank};
            if (qd_kept_write(kept, fds[0], order.left, &written.complete) != QD_OK)
                written.complete = false;
            qd_report_send(p->report_fd, &written);
        }
        close_all((int *const[]){&fds[0], &fds[1], &fds[2]}, QD_ORDER_FDS);
    }
    return false;
}

typedef struct state_held {
    qd_launch_place *place;
    qd_run *run;
} state_held;

/* The launcher keeps the state until it knows of the step. */
static void drop_state(void *context)
{
    const state_held *held = context;
    qd_handover_close(held->run->handover);
    held->run->handover = NULL;
    close_all((int *const[]){&held->place->state_fd}, 1);
}

/* One rank in one world. *next: it is to continue in the next one. */
static qd_status run_in_world(qd_launch_place *p, qd_run *run, bool *next)
{
    qd_options *options = NULL;
    qd_comm *world = NULL;
    qd_kept *kept = NULL;
    qd_status status = QD_OK;
    state_held held = {p, run};
    *next = false;
    QD_TRY_DONE(qd_launch_config_read(p->config_fd, &options));
    QD_TRY_DONE(qd_local_comm_open(p->world_fd, p->rank, &world));
    run->options = options;
    run->on_first_step = drop_state;
    run->first_step_context = &held;
    QD_TRY_DONE(qd_config_resolve(run->options, qd_comm_size(world), &run->config));
    qd_launch_catch_stacks(&run->config, p->rank);
    if (p->state_fd >= 0)
        QD_TRY_DONE(qd_handover_open(p->state_fd, &run->handover));
    status = qd_run_rank(run, world, p->order_fd >= 0 ? &kept : NULL);
    qd_handover_close(run->handover);
    run->handover = NULL;
    *next = kept && take_orders(p, kept, status);
    if (kept && !*next) /* the launcher knows */
        _exit(EXIT_SUCCESS);
done:
    qd_kept_destroy(kept);
    qd_comm_destroy(world);
    qd_options_destroy(options);
    return status;
}

static qd_status run_local_rank(qd_launch_place *p, qd_run *run)
{
    bool next;
    qd_status status;
    qd_cores_set cores; /* of this process: a trainer may restrict it to some of them */
    const bool bound = qd_thread_cores(&cores) == QD_OK;
    /* This rank is killed with its launcher, however that ends. The launcher may have ended before
     * the line below. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != p->launcher)
        return QD_FAIL(QD_INTERRUPTED, "the launcher has ended");
    qd_train_observer observer = {.size = sizeof observer, .context = p, .on_step = send_step, .on_end = send_end, .on_note = send_note};
    run->observer = &observer;
    run->asks_rest = p->order_fd >= 0 ? asks_rest : NULL;
    run->rest_context = p;
    do {
        status = run_in_world(p, run, &next);
        if (next && bound)
            (void)qd_thread_bind(&cores);
        if (next)
            qd_error_clear();
    } while (next);
    return status;
}

/* Processes that do not find each other would each train the whole run, in the same folder. */
static qd_status check_world(const qd_launch_place *p, bool mpi, const qd_options *options)
{
    const char *backend = qd_options_string(options, "run.backend");
    bool asks_ucx = p->role != QD_ROLE_LOCAL_RANK && strcmp(backend, "ucx") == 0, asks_mpi = strcmp(backend, "mpi") == 0;
    const char *missing = p->role == QD_ROLE_FIRST && !asks_mpi ? qd_launch_world_missing() : NULL;
    const bool returns = p->joins && strcmp(p->starter, "srun") != 0; /* a lost rank may be started again, and meet the others */
    const char *supervisor = qd_options_int(options, "run.restarts") > 0 && !returns ? "run.restarts" : NULL;
    static const char *const supervisors[] = {"run.elastic", "run.available", "run.hosts", "run.host_check"};
    const bool shrinks = returns && strcmp(p->starter, "torchrun") != 0; /* which ends all ranks when one ends */
    for (size_t i = shrinks; i < sizeof supervisors / sizeof *supervisors && !supervisor; i++) /* the first is run.elastic */
        supervisor = qd_options_string(options, supervisors[i])[0] != '\0' ? supervisors[i] : NULL;
    if (p->role == QD_ROLE_LOCAL_RANK && (p->rank < 0 || p->world_fd < 0 || p->report_fd < 0 || p->config_fd < 0 || p->launcher == 0))
        return QD_FAIL(QD_USAGE, QD_ENV_RANK " is set in the environment: it is for local ranks, unset it");
    if (missing && qd_options_string(options, "run.launcher")[0] == '\0')
        return QD_FAIL(QD_USAGE,
                       "the environment says that this is one of several processes, but %s is missing or no such number: set RANK, "
                       "WORLD_SIZE, MASTER_ADDR and MASTER_PORT (docs/clusters.md), or unset them, and the ranks are started here",
                       missing);
    if (asks_ucx && !p->joins)
        return QD_FAIL(QD_USAGE,
                       "run.backend=ucx is for ranks that are started without MPI, and the environment does not name their world: set "
                       "MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE for each (docs/clusters.md)");
    if (p->role != QD_ROLE_MPI_RANK || p->size <= 1)
        return QD_OK;
    if (asks_mpi && p->joins)
        return QD_FAIL(QD_USAGE, "run.backend=mpi, but %s started %d processes without MPI: leave run.backend out, or use mpirun",
                       p->starter, p->size);
    if (!mpi)
        return QD_FAIL(QD_USAGE,
                       "run.backend=local, but %s started %d processes, and each would train the whole run: leave run.backend out, or "
                       "start one process, which starts "
                       "its ranks by itself (--ranks %d)",
                       p->starter, p->size, p->size);
    if (supervisor && returns)
        return QD_FAIL(QD_USAGE,
                       "%s is for the process that starts the ranks, and %s started these: leave it out; what started the ranks starts "
                       "them again, with --resume (docs/clusters.md)",
                       supervisor, p->starter);
    if (supervisor)
        return QD_FAIL(QD_USAGE,
                       "%s is for the process that starts the ranks, and %s started these: call quadrille train once, with "
                       "run.launcher='%s ...' (docs/operations.md)",
                       supervisor, p->starter, p->starter);
    if (p->joins)
        return QD_OK;
    if (!qd_mpi_built())
        return QD_FAIL(QD_UNSUPPORTED,
                       "%s started %d processes, but this build has no MPI by which they could find each other: install an MPI library "
                       "(Debian: libopenmpi-dev and "
                       "openmpi-bin) and build again, or start one process, which starts its ranks by itself (--ranks %d)",
                       p->starter, p->size, p->size);
    if (!p->told)
        return QD_FAIL(QD_USAGE,
                       "srun started %d tasks, but not in a way in which MPI finds the others: use srun --mpi=pmix (Open MPI) or "
                       "--mpi=pmi2 (MPICH); srun --mpi=list "
                       "shows what this cluster has, and mpirun inside the job does as well",
                       p->size);
    return QD_OK;
}

/* A program may have been compiled when observers had fewer members. */
static qd_status take_observer(const qd_train_observer *given, qd_train_observer *own)
{
    *own = qd_train_observer_default();
    return given ? QD_SIZED_READ(given, qd_train_observer, own) : QD_OK;
}

qd_status qd_train_not_started(qd_status status, const qd_train_observer *observer)
{
    qd_train_observer own;
    qd_launch_place p = find_place();
    if (atomic_load(&train_called) || p.role != QD_ROLE_MPI_RANK || p.size <= 1 || !p.told || (!p.joins && !qd_mpi_built()))
        return status;
    return take_observer(observer, &own) == QD_OK ? qd_launch_not_started(&p, status, &own, &marks) : QD_USAGE;
}

static qd_status run_first(qd_run *run, char *const *argv, qd_run_summary *summary, const qd_train_observer *observer)
{
    QD_TRY(qd_config_resolve(run->options, 0, &run->config));
    if (qd_options_string(run->options, "run.launcher")[0] != '\0') {
        QD_TRY(qd_run_prepare(run->options, 0, run->stop, &run->config, summary));
        QD_TRY(qd_run_resume_check(&run->config));
        return qd_launch_restarting(run, argv, observer); /* rank 0 shows the run */
    }
    QD_TRY(qd_elastic_check(&run->config));
    QD_TRY(qd_run_prepare_local(run, observer, summary));
    const qd_config *c = &run->config;
    bool one = c->world == 1, supervised = c->restarts > 0;
    int stopped;
    run->observer = observer;
    bool threads = c->ranks_as_threads || c->strategy.traits->ranks_as_threads;
    if (supervised && threads && !one)
        return QD_FAIL(QD_USAGE, "run.restarts starts ranks again that are processes, and the ranks of this run are threads: %s",
                       c->ranks_as_threads ? "leave run.ranks_as out" : "use one rank, or leave run.restarts out");
    summary->shown.ranks_as = supervised ? "processes" : one ? "this process" : threads ? "threads" : "processes";
    if (observer && observer->on_start)
        observer->on_start(observer->context, &summary->shown);
    if (supervised)
        return qd_launch_restarting(run, argv, observer);
    return one || threads ? qd_launch_threads(run) : qd_launch_processes(run, argv, NULL, &stopped);
}

qd_status qd_train(const qd_options *options, char *const *argv, const qd_train_observer *observer)
{
    struct sigaction before[STOP_SIGNALS];
    qd_launch_place p = find_place();
    const char *backend = qd_options_string(options, "run.backend");
    qd_run run = {.options = options, .stop = &marks.stop};
    qd_run_summary summary = {0};
    qd_train_observer own;
    qd_status status;
    QD_TRY(take_observer(observer, &own));
    bool mpi = p.role != QD_ROLE_LOCAL_RANK && qd_options_string(options, "run.launcher")[0] == '\0' &&
               (strcmp(backend, "mpi") == 0 || strcmp(backend, "ucx") == 0 ||
                (p.role == QD_ROLE_MPI_RANK && strcmp(backend, "local") != 0));
    atomic_store(&train_called, 1);
    atomic_store(&marks.told, 0);
    atomic_store(&marks.stop, 0);
    catch_stop(p.role == QD_ROLE_LOCAL_RANK, before);
    status = check_world(&p, mpi, options);
    if (status == QD_OK && p.role == QD_ROLE_LOCAL_RANK)
        end_local_rank(&p, run_local_rank(&p, &run));
    if (status == QD_OK && mpi)
        status = qd_launch_member(&p, &run, &summary, &own, &marks);
    else if (status == QD_OK)
        status = run_first(&run, argv, &summary, &own);
    restore_stop(before);
    return status;
}

qd_status qd_train_resume_options(qd_options *options)
{
    qd_launch_place p = find_place();
    if (p.role == QD_ROLE_LOCAL_RANK) /* it gets what the launcher has made of them */
        return QD_OK;
    return qd_resume_options(options, p.role == QD_ROLE_MPI_RANK ? p.size : 0);
}

bool qd_train_is_rank(void)
{
    return find_place().role == QD_ROLE_LOCAL_RANK;
}

int qd_train_world(void)
{
    qd_launch_place p = find_place();
    return p.role == QD_ROLE_MPI_RANK ? p.size : 0;
}

int qd_train_rank(void)
{
    return find_place().rank;
}

bool qd_train_report(qd_status status)
{
    qd_launch_place p = find_place();
    const char *message = qd_error_message();
    if (p.role == QD_ROLE_LOCAL_RANK && p.report_fd >= 0) { /* it failed before it came to qd_train() */
        send_failure(&p, status);
        return false;
    }
    if (message[0] == '\0' || atomic_load(&marks.told))
        return false;
    if (p.role == QD_ROLE_MPI_RANK)
        return !atomic_load(&marks.joined) ? p.rank <= 0 || p.joins /* that a rank cannot join, it alone knows */
                                           : status != QD_REMOTE || atomic_load(&marks.speaks_for_lost);
    return true;
}
