/* Runs work in a thread while the ranks keep communicating. */
#include "train/ranks/long_work.h"

#include "base/thread.h"

#include <stdio.h>

typedef struct job {
    qd_long_work work;
    void *context;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
    qd_status status;
    char message[1024];
} job;

static void *run(void *argument)
{
    job *j = argument;
    qd_status status = j->work(j->context);
    pthread_mutex_lock(&j->lock);
    j->status = status;
    if (status != QD_OK)
        snprintf(j->message, sizeof j->message, "%s", qd_error_message());
    j->done = true;
    pthread_cond_signal(&j->ended);
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

/* Waits at most a quarter of a second. */
static bool wait_a_little(job *j)
{
    const struct timespec until = qd_cond_until(0.25);
    pthread_mutex_lock(&j->lock);
    while (!j->done && pthread_cond_timedwait(&j->ended, &j->lock, &until) == 0)
        continue;
    bool done = j->done;
    pthread_mutex_unlock(&j->lock);
    return done;
}

/* All ranks: communicates until no rank is working. */
static qd_status keep_in_touch(qd_comm *comm, job *j)
{
    for (int32_t busy = 1; busy;) {
        int32_t mine = j && !wait_a_little(j);
        QD_TRY(qd_comm_all_reduce(comm, &mine, &busy, 1, QD_I32, QD_MAX, NULL));
    }
    return QD_OK;
}

static qd_status work_in_thread(qd_comm *comm, qd_long_work work, void *context)
{
    job j = {.work = work, .context = context, .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t thread;
    qd_cond_init(&j.ended);
    int error = pthread_create(&thread, NULL, run, &j);
    if (error != 0) { /* neither this rank nor the others may wait for each other */
        QD_TRY(keep_in_touch(comm, NULL));
        return QD_FAIL(QD_SYSTEM, "cannot start a thread: %s", qd_thread_why(error));
    }
    qd_status touch = keep_in_touch(comm, &j);
    pthread_join(thread, NULL);
    pthread_cond_destroy(&j.ended);
    pthread_mutex_destroy(&j.lock);
    if (touch != QD_OK)
        return touch;
    return j.status == QD_OK ? QD_OK : QD_FAIL(j.status, "%s", j.message);
}

qd_status qd_long_work_run(qd_comm *comm, qd_long_work work, void *context)
{
    if (qd_comm_size(comm) == 1)
        return work(context);
    return qd_comm_rank(comm) == 0 ? work_in_thread(comm, work, context) : keep_in_touch(comm, NULL);
}

qd_status qd_long_work_run_all(qd_comm *comm, qd_long_work work, void *context)
{
    return qd_comm_size(comm) == 1 ? work(context) : work_in_thread(comm, work, context);
}
