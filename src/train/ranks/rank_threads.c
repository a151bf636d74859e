/* Threads that wait for the next call, make it, and say how it ended. See rank_threads.h. */
#include "base/thread.h"
#include "train/ranks/rank_threads.h"

#include "train/ranks/failure.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct member {
    qd_rank_threads *all;
    int rank;
    pthread_t thread;
    bool started;
    qd_comm *world;
} member;

struct qd_rank_threads {
    qd_local_world *world;
    member *members;
    int size;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t call;        /* number of the call that runs or ran last */
    int callers;         /* ranks below this one make it */
    int pending;         /* of these, how many have not ended it */
    qd_rank_function function;
    void *context;
    qd_failure failure;  /* of the call */
    bool stop;
};

static void end_call(qd_rank_threads *t, qd_status status)
{
    pthread_mutex_lock(&t->lock);
    qd_failure_add_own(&t->failure, status);
    if (--t->pending == 0)
        pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

static void *run_member(void *argument)
{
    member *m = argument;
    qd_rank_threads *t = m->all;
    end_call(t, qd_local_comm_attach(t->world, m->rank, &m->world));
    for (int64_t seen = 0;;) {
        pthread_mutex_lock(&t->lock);
        while (!t->stop && (t->call == seen || m->rank >= t->callers)) {
            seen = t->call;
            pthread_cond_wait(&t->changed, &t->lock);
        }
        bool stop = t->stop;
        seen = t->call;
        pthread_mutex_unlock(&t->lock);
        if (stop)
            break;
        qd_error_clear();
        end_call(t, t->function(t->context, m->world));
    }
    qd_comm_destroy(m->world);
    return NULL;
}

static qd_status collect(qd_rank_threads *t)
{
    pthread_mutex_lock(&t->lock);
    while (t->pending > 0)
        pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
    return qd_failure_raise(&t->failure);
}

static qd_status start_members(qd_rank_threads *t)
{
    t->pending = t->size;
    for (int i = 0; i < t->size; i++) {
        t->members[i] = (member){.all = t, .rank = i};
        int error = pthread_create(&t->members[i].thread, NULL, run_member, &t->members[i]);
        if (error != 0) {
            qd_status status = QD_FAIL(QD_SYSTEM, "rank %d: cannot start a thread: %s", i, qd_thread_why(error));
            qd_local_world_mark_dead(t->world, i, "its thread could not be started");
            for (int j = i; j < t->size; j++)
                end_call(t, status);
            return collect(t);
        }
        t->members[i].started = true;
    }
    return collect(t);
}

static qd_status build(qd_rank_threads *t, const qd_comm_config *config)
{
    t->members = calloc((size_t)t->size, sizeof *t->members);
    if (!t->members)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", t->size);
    QD_TRY(qd_local_world_create(t->size, config, &t->world));
    return start_members(t);
}

qd_status qd_rank_threads_create(int size, const qd_comm_config *config, qd_rank_threads **threads)
{
    qd_rank_threads *t = calloc(1, sizeof *t);
    if (!t)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", size);
    t->size = size;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    qd_status status = build(t, config);
    if (status != QD_OK) {
        qd_error_record why;
        qd_error_keep(&why);
        qd_rank_threads_destroy(t);
        qd_error_put_back(&why);
        return status;
    }
    *threads = t;
    return QD_OK;
}

void qd_rank_threads_destroy(qd_rank_threads *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; t->members && i < t->size; i++)
        if (t->members[i].started)
            pthread_join(t->members[i].thread, NULL);
    qd_local_world_destroy(t->world);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->members);
    free(t);
}

static qd_status call(qd_rank_threads *t, int callers, qd_rank_function function, void *context)
{
    pthread_mutex_lock(&t->lock);
    t->failure = (qd_failure){QD_OK, "", ""};
    t->function = function;
    t->context = context;
    t->callers = t->pending = callers;
    t->call++;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    return collect(t);
}

qd_status qd_rank_threads_call(qd_rank_threads *t, qd_rank_function function, void *context)
{
    return call(t, t->size, function, context);
}

qd_status qd_rank_threads_call_first(qd_rank_threads *t, qd_rank_function function, void *context)
{
    return call(t, 1, function, context);
}

int qd_rank_threads_size(const qd_rank_threads *t)
{
    return t->size;
}
