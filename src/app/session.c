/* A run whose steps the caller asks for: the ranks of run.c as threads that wait for the next
 * call. See <quadrille/session.h>. */
#include "app/evaluate.h"
#include "app/generate.h"
#include "base/clock.h"
#include "base/sized.h"
#include "train/ranks/failure.h"
#include "train/ranks/rank_threads.h"
#include "train/launch/collective_ways.h"
#include "train/run/resume_options.h"
#include "train/run/run_state.h"

#include <pthread.h>
#include <quadrille/session.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct qd_session {
    qd_options *options;
    qd_run run;
    qd_train_observer observer;
    qd_run_summary summary;
    atomic_int stop; /* stays 0: the caller stops by not asking for a step */
    qd_rank_threads *threads;
    qd_rank_run *ranks;
    pthread_mutex_t busy;
    atomic_llong done;  /* steps */
    qd_failure failure; /* that ended the session */
    bool finished;
};

/* ---- on the threads of the ranks ---- */

typedef struct session_call {
    qd_session *session;
    qd_status (*work)(qd_rank_run *rank, void *argument);
    void *argument;
} session_call;

static qd_status call_rank(void *context, qd_comm *world)
{
    const session_call *c = context;
    qd_rank_run *rank = &c->session->ranks[qd_comm_rank(world)];
    rank->agreed = false;
    qd_status status = c->work(rank, c->argument);
    qd_rank_run_alert(rank, status);
    return status;
}

static qd_status call_ranks(qd_session *s, qd_status (*work)(qd_rank_run *rank, void *argument), void *argument)
{
    return qd_rank_threads_call(s->threads, call_rank, &(session_call){s, work, argument});
}

static qd_status start_rank(void *context, qd_comm *world)
{
    qd_session *s = context;
    qd_rank_run *rank = &s->ranks[qd_comm_rank(world)];
    *rank = qd_rank_run_of(&s->run, world);
    qd_status status = qd_rank_run_start(rank);
    qd_rank_run_alert(rank, status);
    return status;
}

static qd_status close_rank(void *context, qd_comm *world)
{
    qd_session *s = context;
    qd_rank_run_close(&s->ranks[qd_comm_rank(world)]);
    return QD_OK;
}

static qd_status step_rank(qd_rank_run *rank, void *argument)
{
    double begin = qd_clock_now();
    (void)argument;
    QD_TRY(qd_rank_run_step(rank));
    rank->end.seconds += qd_clock_now() - begin;
    return QD_OK;
}

static qd_status save_rank(qd_rank_run *rank, void *argument)
{
    (void)argument;
    return qd_rank_run_save(rank);
}

static qd_status settle_rank(qd_rank_run *rank, void *argument)
{
    (void)argument;
    return qd_rank_run_settle(rank);
}

static qd_status finish_rank(qd_rank_run *rank, void *argument)
{
    (void)argument;
    QD_TRY(qd_rank_run_settle(rank));
    return qd_rank_run_finish(rank);
}

typedef struct loading {
    const char *path;
    atomic_bool begun; /* on any rank */
} loading;

static qd_status load_rank(qd_rank_run *rank, void *argument)
{
    loading *l = argument;
    bool begun;
    qd_status status = qd_run_load(rank, l->path, &begun);
    if (begun)
        atomic_store(&l->begun, true);
    return status;
}

static qd_status copy_rank(qd_rank_run *rank, void *argument)
{
    return qd_weights_copy_add(argument, rank->trainer);
}

/* ---- life ---- */

/* The caller's handlers run on the caller's threads. What a thread raises itself, and profilers
 * send, stays. */
static void block_signals(sigset_t *before)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF};
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_BLOCK, &all, before);
}

static qd_status start(qd_session *s)
{
    qd_comm_config comm = qd_comm_config_default();
    sigset_t before;
    s->run.stop = &s->stop;
    s->run.options = s->options;
    s->run.observer = &s->observer;
    const char *backend = qd_options_string(s->options, "run.backend");
    if (strcmp(backend, "mpi") == 0 || strcmp(backend, "ucx") == 0)
        return QD_FAIL(QD_USAGE, "run.backend=mpi: the ranks of a session are threads of one process; leave run.backend out, or use "
                                 "qd_train()");
    if (qd_options_int(s->options, "run.restarts") > 0)
        return QD_FAIL(QD_USAGE, "run.restarts starts ranks again that are processes, and those of a session are threads: leave it out, or "
                                 "use qd_train()");
    QD_TRY(qd_run_prepare_local(&s->run, &s->observer, &s->summary));
    s->summary.shown.ranks_as = "threads";
    if (s->run.config.tuning[0] == '\0') /* the place of caches is found in the environment */
        s->run.config.tuning = "none";
    s->ranks = calloc((size_t)s->run.config.world, sizeof *s->ranks);
    if (!s->ranks)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", s->run.config.world);
    if (s->observer.on_start)
        s->observer.on_start(s->observer.context, &s->summary.shown);
    qd_collective_ways ways;
    comm.deadline_seconds = s->run.config.deadline;
    qd_collective_ways_find(s->run.config.collectives[0] != '\0' ? s->run.config.collectives : "none", false, &ways);
    comm.ways = ways.text;
    block_signals(&before);
    qd_status status = qd_rank_threads_create(s->run.config.world, &comm, &s->threads);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    QD_TRY(status);
    QD_TRY(qd_rank_threads_call(s->threads, start_rank, s));
    atomic_store(&s->done, qd_trainer_position(s->ranks[0].trainer).step);
    return QD_OK;
}

/* Takes the options, also where it fails. */
static qd_status create(qd_options *options, const qd_train_observer *observer, qd_session **session)
{
    qd_session *s = calloc(1, sizeof *s);
    if (!s) {
        qd_options_destroy(options);
        return QD_FAIL(QD_NO_MEMORY, "no memory for a session");
    }
    s->options = options;
    s->observer = qd_train_observer_default();
    pthread_mutex_init(&s->busy, NULL);
    qd_status status = observer ? QD_SIZED_READ(observer, qd_train_observer, &s->observer) : QD_OK;
    if (status == QD_OK)
        status = start(s);
    if (status != QD_OK) {
        qd_error_record why;
        qd_error_keep(&why);
        qd_failure_add_own(&s->failure, status);
        qd_session_destroy(s);
        qd_error_put_back(&why);
        return status;
    }
    *session = s;
    return QD_OK;
}

/* Options without the keys of a run would be an assertion further down. */
static qd_status check_options(const char *call, const qd_options *options)
{
    if (options && qd_options_find(options, "run.dir") && qd_options_find(options, "parallel.ranks"))
        return QD_OK;
    return QD_FAIL(QD_USAGE, "%s: %s", call, options ? "the options lack keys of a run: create them from qd_config_table()"
                                                     : "there are no options (NULL)");
}

qd_status qd_session_create(const qd_options *options, const qd_train_observer *observer, qd_session **session)
{
    qd_options *copy;
    *session = NULL;
    QD_TRY(check_options("qd_session_create", options));
    QD_TRY(qd_options_copy(options, &copy));
    return create(copy, observer, session);
}

static qd_status resumed_options(const char *folder, const qd_options *changes, qd_options **options)
{
    qd_option_table table = qd_config_table();
    QD_TRY(changes ? qd_options_copy(changes, options) : qd_options_create(&table, 1, options));
    QD_TRY(qd_options_set(*options, "run.dir", folder));
    QD_TRY(qd_options_set(*options, "run.resume", "true"));
    QD_TRY(qd_options_set(*options, "run.restarts", "0")); /* the saved run may have been supervised */
    return qd_resume_options(*options, 0);
}

qd_status qd_session_resume(const char *folder, const qd_options *changes, const qd_train_observer *observer, qd_session **session)
{
    qd_options *options = NULL;
    *session = NULL;
    if (!folder)
        return QD_FAIL(QD_USAGE, "qd_session_resume: no run folder is named (NULL)");
    if (changes)
        QD_TRY(check_options("qd_session_resume", changes));
    qd_status status = resumed_options(folder, changes, &options);
    if (status == QD_OK)
        return create(options, observer, session);
    qd_options_destroy(options);
    return status;
}

void qd_session_destroy(qd_session *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->busy); /* a call that is under way ends first */
    if (s->threads && s->ranks && s->failure.status == QD_OK)
        (void)call_ranks(s, settle_rank, NULL);
    if (s->threads && s->ranks)
        (void)qd_rank_threads_call(s->threads, close_rank, s);
    qd_rank_threads_destroy(s->threads);
    pthread_mutex_unlock(&s->busy);
    pthread_mutex_destroy(&s->busy);
    free(s->ranks);
    qd_options_destroy(s->options);
    free(s);
}

const qd_train_summary *qd_session_summary(const qd_session *s)
{
    return &s->summary.shown;
}

int64_t qd_session_steps_done(const qd_session *s)
{
    return atomic_load(&((qd_session *)(uintptr_t)s)->done);
}

/* ---- calls ---- */

/* Refuses what cannot be done now; otherwise the session is the caller's until leave(). */
static qd_status enter(qd_session *s, const char *call, bool trains)
{
    if (!s)
        return QD_FAIL(QD_USAGE, "%s: there is no session (NULL)", call);
    if (pthread_mutex_trylock(&s->busy) != 0)
        return QD_FAIL(QD_USAGE, "%s: another call of this session has not returned yet", call);
    qd_status status = QD_OK;
    if (s->failure.status != QD_OK)
        status = QD_FAIL(s->failure.status, "%s: the session has failed and can only be destroyed: %s", call, s->failure.message);
    else if (trains && s->finished)
        status = QD_FAIL(QD_USAGE, "%s: the session is finished; qd_session_resume() starts another one from its checkpoint", call);
    if (status != QD_OK)
        pthread_mutex_unlock(&s->busy);
    return status;
}

/* lost: a failure has ended the session. */
static qd_status leave(qd_session *s, qd_status status, bool lost)
{
    if (status != QD_OK && lost)
        qd_failure_add_own(&s->failure, status);
    if (s->failure.status == QD_OK)
        atomic_store(&s->done, qd_trainer_position(s->ranks[0].trainer).step);
    pthread_mutex_unlock(&s->busy);
    return status;
}

/* Whether the ranks ended a call that failed by agreement, and can be called again. */
static bool agreed(const qd_session *s)
{
    for (int i = 0; i < s->run.config.world; i++)
        if (!s->ranks[i].agreed)
            return false;
    return true;
}

qd_status qd_session_step(qd_session *s, qd_train_step *metrics)
{
    if (metrics)
        QD_TRY(QD_SIZED_CHECK(metrics, qd_train_step));
    QD_TRY(enter(s, "qd_session_step", true));
    int64_t steps = s->run.config.steps;
    if (qd_session_steps_done(s) >= steps)
        return leave(s, QD_FAIL(QD_USAGE, "qd_session_step: all %lld steps are done: raise train.steps", (long long)steps), false);
    qd_status status = call_ranks(s, step_rank, NULL);
    if (status == QD_OK)
        QD_SIZED_WRITE(metrics, &s->ranks[0].line);
    return leave(s, status, true);
}

qd_status qd_session_save(qd_session *s)
{
    QD_TRY(enter(s, "qd_session_save", true));
    const qd_config *c = &s->run.config;
    qd_status refused = QD_OK;
    if (!s->ranks[0].saver)
        refused = QD_FAIL(QD_USAGE, "qd_session_save: %s", c->run_dir[0] == '\0' ? "there is no run.dir: set it to keep checkpoints"
                                                                                  : "run.save is false: leave it out to keep checkpoints");
    else if (qd_session_steps_done(s) == 0)
        refused = QD_FAIL(QD_USAGE, "qd_session_save: no step is done yet: there is nothing to save");
    if (refused != QD_OK)
        return leave(s, refused, false);
    qd_status status = call_ranks(s, save_rank, NULL);
    return leave(s, status, !agreed(s));
}

qd_status qd_session_load(qd_session *s, const char *path)
{
    loading l = {.path = path};
    QD_TRY(enter(s, "qd_session_load", true));
    if (!path)
        return leave(s, QD_FAIL(QD_USAGE, "qd_session_load: no checkpoint is named (NULL)"), false);
    qd_status status = call_ranks(s, load_rank, &l);
    return leave(s, status, atomic_load(&l.begun) || !agreed(s));
}

qd_status qd_session_finish(qd_session *s, qd_train_end *end)
{
    if (end)
        QD_TRY(QD_SIZED_CHECK(end, qd_train_end));
    QD_TRY(enter(s, "qd_session_finish", true));
    qd_status status = call_ranks(s, finish_rank, NULL);
    if (status == QD_OK)
        s->finished = true;
    if (status == QD_OK)
        QD_SIZED_WRITE(end, &s->ranks[0].end);
    return leave(s, status, true);
}

/* ---- a model of one rank, made of the present weights ---- */

typedef struct model_call {
    qd_session *session;
    qd_model_source source;
    const qd_evaluate_options *evaluate; /* one of the two */
    qd_evaluate_report *evaluation;
    const qd_generate_options *generate;
    qd_generate_report *generation;
} model_call;

/* On the thread of rank 0: the caller's thread keeps its cores and its failures. */
static qd_status use_model(void *context, qd_comm *world)
{
    const model_call *m = context;
    (void)world;
    return m->evaluate ? qd_evaluate_from(&m->source, m->evaluate, m->evaluation)
                       : qd_generate_from(&m->source, m->generate, m->generation);
}

/* Only what goes wrong between the ranks ends the session. */
static qd_status with_model(model_call *m)
{
    qd_session *s = m->session;
    qd_weights_copy *weights = NULL;
    qd_status status = qd_weights_copy_create(qd_trainer_program(s->ranks[0].trainer)->ledger, &weights);
    if (status != QD_OK)
        return leave(s, status, false);
    status = call_ranks(s, copy_rank, weights);
    bool lost = status != QD_OK;
    m->source = (qd_model_source){.options = s->options, .config = &s->run.config, .weights = weights, .step = qd_session_steps_done(s)};
    if (status == QD_OK)
        status = qd_rank_threads_call_first(s->threads, use_model, m);
    qd_weights_copy_destroy(weights);
    return leave(s, status, lost);
}

qd_status qd_session_evaluate(qd_session *s, const qd_evaluate_options *options, qd_evaluate_report *report)
{
    qd_evaluate_options o = qd_evaluate_options_default();
    qd_evaluate_report r;
    QD_TRY(QD_SIZED_CHECK(report, qd_evaluate_report));
    if (options)
        QD_TRY(QD_SIZED_READ(options, qd_evaluate_options, &o));
    if (o.model)
        return QD_FAIL(QD_USAGE, "qd_session_evaluate: model is set: a session evaluates its own");
    QD_TRY(enter(s, "qd_session_evaluate", false));
    o.device = o.device ? o.device : s->run.config.device;
    qd_status status = with_model(&(model_call){.session = s, .evaluate = &o, .evaluation = &r});
    if (status == QD_OK)
        QD_SIZED_WRITE(report, &r);
    return status;
}

qd_status qd_session_generate(qd_session *s, const qd_generate_options *options, qd_generate_report *report)
{
    qd_generate_options o = qd_generate_options_default();
    qd_generate_report r;
    QD_TRY(QD_SIZED_CHECK(report, qd_generate_report));
    if (options)
        QD_TRY(QD_SIZED_READ(options, qd_generate_options, &o));
    if (o.model)
        return QD_FAIL(QD_USAGE, "qd_session_generate: model is set: a session generates with its own");
    QD_TRY(enter(s, "qd_session_generate", false));
    o.device = o.device ? o.device : s->run.config.device;
    qd_status status = with_model(&(model_call){.session = s, .generate = &o, .generation = &r});
    if (status == QD_OK)
        QD_SIZED_WRITE(report, &r);
    return status;
}
