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
#include "comm/guard.h"
#include "train/launch/environment.h"
#include "train/launch/launch_told.h"
#include "train/ranks/common.h"
#include "train/ranks/long_work.h"
#include "train/elastic/handover.h"
#include "train/ranks/patience.h"
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

typedef enum role { ROLE_FIRST, ROLE_LOCAL_RANK, ROLE_MPI_RANK } role;

typedef struct place {
    role role;
    int rank; /* -1: unknown until MPI is initialized */
    int size; /* 0: unknown */
    const char *starter; /* of an MPI world: "mpirun", "srun" */
    bool told; /* the starter has set the variables by which MPI finds the other processes */
    bool joins; /* the ranks meet without MPI, as `world` says */
    qd_launch_world world;
    int world_fd, report_fd, config_fd;
    int order_fd, state_fd; /* -1: the run is not supervised; no state is handed over */
    pid_t launcher;
} place;

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

static void find_mpi_place(place *p)
{
    static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", NULL};
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", NULL};
    bool srun = under_srun();
    p->role = ROLE_MPI_RANK;
    p->starter = srun ? "srun" : "mpirun";
    p->rank = srun ? env_int("SLURM_PROCID", 0, -1) : env_first(ranks, 0, -1);
    p->size = srun ? env_int("SLURM_STEP_NUM_TASKS", 1, 0) : env_first(sizes, 1, 0);
    p->told = !srun || env_names_peers();
    if (!p->told && qd_ucx_built())
        p->joins = p->told = qd_launch_world_slurm(p->rank, p->size, &p->world);
}

/* What torchrun and Kubernetes operators set comes after mpirun's variables: mpirun passes the
 * others on. */
static bool find_named_place(place *p)
{
    if ((under_mpi() && (!under_srun() || env_names_peers())) || !qd_launch_world_named(&p->world))
        return false;
    p->role = ROLE_MPI_RANK;
    p->starter = p->world.starter;
    p->rank = p->world.rank;
    p->size = p->world.size;
    p->joins = p->told = true;
    return true;
}

static place find_place(void)
{
    place p = {.role = ROLE_FIRST, .rank = -1, .world_fd = -1, .report_fd = -1, .config_fd = -1, .order_fd = -1, .state_fd = -1};
    if (getenv(QD_ENV_RANK)) {
        p.role = ROLE_LOCAL_RANK;
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

static atomic_int stop_asked;
/* Once set, one MPI rank that fails reports for all; before that, rank 0 does. */
static atomic_int world_joined;
static atomic_int train_called;
static atomic_int failure_told; /* the observer has reported it */
static atomic_int speaks_for_lost; /* this rank reports the loss of another, which cannot */

static void on_stop_signal(int number)
{
    int asked = number == QD_SIGNAL_INTERRUPT ? SIGINT : number;
    /* SIGTERM after SIGUSR1 changes only the name; SIGINT after either would lose the
     * checkpoint. */
    if (atomic_load(&stop_asked) < asked)
        atomic_store(&stop_asked, asked);
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
    const place *p = context;
    qd_report_send(p->report_fd, &(qd_report){.kind = QD_REPORT_STEP, .rank = p->rank, .step = *step});
}

static void send_end(void *context, const qd_train_end *end)
{
    const place *p = context;
    qd_report_send(p->report_fd, &(qd_report){.kind = QD_REPORT_END, .rank = p->rank, .end = *end});
}

static void send_note(void *context, const char *text)
{
    const place *p = context;
    qd_report report = {.kind = QD_REPORT_NOTE, .rank = p->rank};
    snprintf(report.failure.message, sizeof report.failure.message, "%s", text);
    qd_report_send(p->report_fd, &report);
}

static void send_failure(const place *p, qd_status status)
{
    qd_report report = {.kind = QD_REPORT_FAILURE, .rank = p->rank};
    qd_failure_add_own(&report.failure, status);
    if (p->report_fd >= 0)
        qd_report_send(p->report_fd, &report);
}

/* A rank ends here: what the program does after qd_train() is done once, by the process that the
 * user started. Its exit handlers are not called, and what it has printed so far is not printed
 * again. */
static _Noreturn void end_local_rank(const place *p, qd_status status)
{
    if (status != QD_OK)
        send_failure(p, status);
#if defined(__SANITIZE_ADDRESS__)
    __lsan_do_leak_check(); /* _exit() leaves it out */
#endif
    _exit(status == QD_OK ? EXIT_SUCCESS : EXIT_FAILURE);
}

static void catch_stacks(const qd_config *config, int rank)
{
    char path[PATH_MAX], title[32];
    if (config->run_dir[0] == '\0' || snprintf(path, sizeof path, "%s/" QD_STACKS_FILE, config->run_dir) >= (int)sizeof path)
        return;
    snprintf(title, sizeof title, "rank %d", rank);
    qd_stacks_on_signal(path, title);
}

/* Rank 0, after each step. */
static bool asks_rest(void *context)
{
    const place *p = context;
    qd_order order;
    int fds[QD_ORDER_FDS];
    return qd_order_receive(p->order_fd, false, &order, fds) && order.kind == QD_ORDER_REST;
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
static bool take_orders(place *p, qd_kept *kept, qd_status status)
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

/* One rank in one world. *next: it is to continue in the next one. */
static qd_status run_in_world(place *p, qd_run *run, bool *next)
{
    qd_options *options = NULL;
    qd_comm *world = NULL;
    qd_kept *kept = NULL;
    qd_status status = QD_OK;
    *next = false;
    QD_TRY_DONE(qd_launch_config_read(p->config_fd, &options));
    QD_TRY_DONE(qd_local_comm_open(p->world_fd, p->rank, &world));
    run->options = options;
    QD_TRY_DONE(qd_config_resolve(run->options, qd_comm_size(world), &run->config));
    catch_stacks(&run->config, p->rank);
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

static qd_status run_local_rank(place *p, qd_run *run)
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

typedef struct readying {
    qd_run *run;
    const qd_train_observer *observer;
    qd_run_summary *summary;
} readying;

static qd_status make_ready(void *context)
{
    const readying *r = context;
    return qd_run_make_ready(&r->run->config, r->observer, r->run->stop, r->summary);
}

/* Processes that do not find each other would each train the whole run, in the same folder. */
static qd_status check_world(const place *p, bool mpi, const qd_options *options)
{
    const char *backend = qd_options_string(options, "run.backend");
    bool asks_ucx = p->role != ROLE_LOCAL_RANK && strcmp(backend, "ucx") == 0, asks_mpi = strcmp(backend, "mpi") == 0;
    const char *missing = p->role == ROLE_FIRST && !asks_mpi ? qd_launch_world_missing() : NULL;
    const char *supervisor = qd_options_int(options, "run.restarts") > 0 ? "run.restarts" : NULL;
    static const char *const supervisors[] = {"run.elastic", "run.available", "run.hosts", "run.host_check"};
    for (size_t i = 0; i < sizeof supervisors / sizeof *supervisors && !supervisor; i++)
        supervisor = qd_options_string(options, supervisors[i])[0] != '\0' ? supervisors[i] : NULL;
    if (p->role == ROLE_LOCAL_RANK && (p->rank < 0 || p->world_fd < 0 || p->report_fd < 0 || p->config_fd < 0 || p->launcher == 0))
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
    if (p->role != ROLE_MPI_RANK || p->size <= 1)
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
    if (supervisor && p->joins && strcmp(p->starter, "srun") != 0)
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

/* Rank 0, if there is one: notes that rank placement does not match parallel.nodes. Results are not
 * affected. */
static qd_status note_nodes(const qd_run *run, qd_comm *world)
{
    const qd_train_observer *o = run->observer;
    qd_comm_where where = qd_comm_locate(world);
    int nodes = run->config.nodes, per_node = qd_comm_size(world) / nodes;
    int32_t elsewhere = nodes > 1 && where.machine != qd_comm_rank(world) / per_node;
    char text[256];
    if (where.machines == 1 || nodes == 1) /* the same on all ranks */
        return QD_OK;
    QD_TRY(qd_comm_all_reduce(world, &elsewhere, &elsewhere, 1, QD_I32, QD_MAX, NULL));
    if (!elsewhere || qd_comm_rank(world) != 0 || !o || !o->on_note)
        return QD_OK;
    snprintf(
        text, sizeof text,
        "parallel.nodes is %d, but not each machine has %d ranks, one after another: what should stay inside a node crosses the network "
        "(mpirun --map-by slot and srun -m block deal ranks out in that order)",
        nodes, per_node);
    o->on_note(o->context, text);
    return QD_OK;
}

/* Rank 0, if there is an observer: reports the start. */
static void tell_start(const qd_comm *world, qd_run_summary *summary, const qd_train_observer *observer)
{
    if (qd_comm_rank(world) != 0 || !observer || !observer->on_start)
        return;
    summary->shown.backend = qd_comm_backend(world);
    summary->shown.ranks_as = "processes";
    summary->shown.machines = qd_comm_locate(world).machines;
    qd_common_hosts(world, summary->shown.hosts, sizeof summary->shown.hosts);
    observer->on_start(observer->context, &summary->shown);
}

/* Before this rank leaves the world: reports the failure to the observer, see on_failure. */
static void tell_failure(qd_status status, const qd_train_observer *observer)
{
    if (status == QD_OK || !observer || !observer->on_failure || !qd_train_report(status) || atomic_exchange(&failure_told, 1))
        return;
    observer->on_failure(observer->context, qd_error_message());
}

/* If this fails too, the earlier failure is the one to report. options: NULL if they cannot be
 * read. */
static qd_status join_world(const place *p, const qd_options *options, const qd_comm_config *config, qd_status early, qd_comm **world)
{
    qd_error_record record;
    qd_error_keep(&record);
    qd_status status = p->joins ? qd_launch_world_join(&p->world, options, &stop_asked, config, world) : qd_mpi_comm_create(config, world);
    if (status == QD_INTERRUPTED)
        status = qd_run_early_end(atomic_load(&stop_asked), "ranks were missing");
    if (early == QD_OK)
        return status;
    qd_error_put_back(&record);
    return status == QD_OK ? QD_OK : early;
}

/* Each rank checks its own machine; rank 0 checks the run folder. A rank that did not know the size
 * of the world in advance has no plan. */
static qd_status check_start(const qd_run *run, const qd_comm *world, qd_run_summary *summary)
{
    if (qd_comm_rank(world) == 0)
        QD_TRY(qd_run_resume_check(&run->config));
    if (summary->plan.world == 0)
        return QD_OK;
    return qd_run_machine_check(&run->config, &summary->plan, qd_comm_locate(world).local_ranks, summary->shown.warning);
}

/* Whether this rank reports the loss of another one (below 0: none is lost). Rank 0 does. If it is
 * lost itself, the other ranks of its machine may be as well, and the first one elsewhere does. */
static bool speaks_for(const qd_comm *world, int lost)
{
    const qd_comm_where where = qd_comm_locate(world);
    if (lost != 0)
        return lost > 0 && qd_comm_rank(world) == 0;
    return where.machines > 1 ? where.machine == 1 && where.local_rank == 0 : qd_comm_rank(world) == 1;
}

static qd_status run_mpi_rank(const place *p, qd_run *run, qd_run_summary *summary, const qd_train_observer *given)
{
    /* Most errors show before the world is joined; checks that need its size come later. An error
     * may concern one machine only, so the other ranks must be informed. */
    qd_status early = p->size > 0 ? qd_run_prepare(run->options, p->size, run->stop, &run->config, summary)
                                  : qd_config_resolve(run->options, 0, &run->config);
    qd_comm_config comm_config = qd_comm_config_default();
    if (early == QD_OK)
        comm_config.deadline_seconds = run->config.deadline;
    qd_comm *world = NULL;
    qd_told told;
    const qd_train_observer *observer = &told.observer;
    bool agreed = false; /* all ranks know of the failure: no abort is needed */
    qd_status status = QD_OK;
    QD_TRY(join_world(p, run->options, &comm_config, early, &world));
    qd_told_begin(&told, given, &failure_told);
    int size = qd_comm_size(world);
    if (p->size > 1 && size == 1)
        QD_TRY_DONE(QD_FAIL(QD_USAGE,
                            "%s started %d processes, but MPI sees one: start them with the mpirun of the MPI library that quadrille was "
                            "built with, or in a way that "
                            "this library understands (srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH)",
                            p->starter, p->size));
    atomic_store(&world_joined, 1);
    /* First, as ranks do that cannot read their configuration: qd_train_not_started(). */
    QD_TRY_DONE(qd_agree_alone(world, early, &agreed));
    QD_TRY_DONE(qd_comm_guard_start(world, qd_patience_stopped(&(qd_patience){0}, comm_config.deadline_seconds), qd_told_lost, &told));
    QD_TRY_DONE(qd_common_setup(world, run->options, &agreed));
    QD_TRY_DONE(qd_config_resolve(run->options, size, &run->config));
    catch_stacks(&run->config, qd_comm_rank(world));
    run->observer = observer;
    if (qd_comm_rank(world) == 0 && p->size != size)
        QD_TRY_DONE(qd_run_prepare(run->options, size, run->stop, &run->config, summary));
    if (run->config.run_dir[0] != '\0')
        QD_TRY_DONE(qd_common_folder(world, run->config.run_dir, &agreed));
    QD_TRY_DONE(qd_agree_alone(world, check_start(run, world, summary), &agreed));
    readying r = {run, observer, summary};
    QD_TRY_DONE(qd_agree(world, qd_long_work_run(world, make_ready, &r), &agreed));
    tell_start(world, summary, observer);
    QD_TRY_DONE(note_nodes(run, world));
    agreed = true; /* from here on qd_run_rank() aborts the others itself */
    status = qd_run_rank(run, world, NULL);
done:
    if (status != QD_OK && status != QD_REMOTE && !qd_ended_in_order(status) && qd_error_message()[0] != '\0' && !agreed)
        qd_comm_abort(world, qd_error_message());
    atomic_store(&speaks_for_lost, speaks_for(world, qd_comm_lost(world)));
    tell_failure(status, observer);
    qd_comm_destroy(world);
    qd_told_end(&told);
    return status;
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
    place p = find_place();
    qd_comm_config config = qd_comm_config_default();
    qd_comm *world = NULL;
    bool agreed;
    if (atomic_load(&train_called) || p.role != ROLE_MPI_RANK || p.size <= 1 || !p.told || (!p.joins && !qd_mpi_built()))
        return status;
    if (take_observer(observer, &own) != QD_OK)
        return QD_USAGE;
    if (join_world(&p, NULL, &config, status, &world) != QD_OK)
        return status;
    if (qd_comm_size(world) == 1) { /* the other ranks cannot be reached this way */
        qd_comm_destroy(world);
        return status;
    }
    atomic_store(&world_joined, 1);
    status = qd_agree_alone(world, status, &agreed);
    tell_failure(status, &own);
    qd_comm_destroy(world);
    return status;
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
    place p = find_place();
    const char *backend = qd_options_string(options, "run.backend");
    qd_run run = {.options = options, .stop = &stop_asked};
    qd_run_summary summary = {0};
    qd_train_observer own;
    qd_status status;
    QD_TRY(take_observer(observer, &own));
    bool mpi = p.role != ROLE_LOCAL_RANK && qd_options_string(options, "run.launcher")[0] == '\0' &&
               (strcmp(backend, "mpi") == 0 || strcmp(backend, "ucx") == 0 || (p.role == ROLE_MPI_RANK && strcmp(backend, "local") != 0));
    atomic_store(&train_called, 1);
    atomic_store(&failure_told, 0);
    atomic_store(&stop_asked, 0);
    catch_stop(p.role == ROLE_LOCAL_RANK, before);
    status = check_world(&p, mpi, options);
    if (status == QD_OK && p.role == ROLE_LOCAL_RANK)
        end_local_rank(&p, run_local_rank(&p, &run));
    if (status == QD_OK && mpi)
        status = run_mpi_rank(&p, &run, &summary, &own);
    else if (status == QD_OK)
        status = run_first(&run, argv, &summary, &own);
    restore_stop(before);
    return status;
}

qd_status qd_train_resume_options(qd_options *options)
{
    place p = find_place();
    if (p.role == ROLE_LOCAL_RANK) /* it gets what the launcher has made of them */
        return QD_OK;
    return qd_resume_options(options, p.role == ROLE_MPI_RANK ? p.size : 0);
}

bool qd_train_is_rank(void)
{
    return find_place().role == ROLE_LOCAL_RANK;
}

int qd_train_world(void)
{
    place p = find_place();
    return p.role == ROLE_MPI_RANK ? p.size : 0;
}

int qd_train_rank(void)
{
    return find_place().rank;
}

bool qd_train_report(qd_status status)
{
    place p = find_place();
    const char *message = qd_error_message();
    if (p.role == ROLE_LOCAL_RANK && p.report_fd >= 0) { /* it failed before it came to qd_train() */
        send_failure(&p, status);
        return false;
    }
    if (message[0] == '\0' || atomic_load(&failure_told))
        return false;
    if (p.role == ROLE_MPI_RANK)
        return !atomic_load(&world_joined) ? p.rank <= 0 || p.joins /* that a rank cannot join, it alone knows */
                                           : status != QD_REMOTE || atomic_load(&speaks_for_lost);
    return true;
}
