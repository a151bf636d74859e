/* Ranks as threads of this process. */
#include "train/launch/launch.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct rank_thread {
    struct crew *crew;
    int rank;
    pthread_t thread;
} rank_thread;

typedef struct crew {
    const qd_run *run;
    qd_local_world *world;
    pthread_mutex_t lock;
    qd_failure failure;
} crew;

static void record(crew *c, qd_status status)
{
    pthread_mutex_lock(&c->lock);
    qd_failure_add(&c->failure, status, qd_error_message());
    pthread_mutex_unlock(&c->lock);
}

static void run_rank(crew *c, int rank)
{
    qd_comm *world = NULL;
    qd_status status = qd_local_comm_attach(c->world, rank, &world);
    if (status == QD_OK)
        status = qd_run_rank(c->run, world);
    record(c, status);
    qd_comm_destroy(world);
}

static void *thread_main(void *argument)
{
    rank_thread *t = argument;
    run_rank(t->crew, t->rank);
    return NULL;
}

static void run_threads(crew *c, int size, rank_thread *threads)
{
    int started = 0;
    for (; started < size; started++) {
        threads[started] = (rank_thread){.crew = c, .rank = started};
        int error = pthread_create(&threads[started].thread, NULL, thread_main, &threads[started]);
        if (error != 0) {
            record(c, QD_FAIL(QD_SYSTEM, "rank %d: cannot start a thread: %s", started, strerror(error)));
            qd_local_world_mark_dead(c->world, started, "its thread could not be started");
            break;
        }
    }
    while (started-- > 0)
        pthread_join(threads[started].thread, NULL);
}

qd_status qd_launch_threads(const qd_run *run)
{
    int size = run->config.world;
    qd_comm_config comm_config = qd_comm_config_default();
    comm_config.deadline_seconds = run->config.deadline;
    crew c = {.run = run, .lock = PTHREAD_MUTEX_INITIALIZER};
    rank_thread *threads = calloc((size_t)size, sizeof *threads);
    if (!threads)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", size);
    qd_status status = qd_local_world_create(size, &comm_config, &c.world);
    if (status == QD_OK) {
        if (size == 1)
            run_rank(&c, 0);
        else
            run_threads(&c, size, threads);
        status = qd_failure_raise(&c.failure);
    }
    qd_local_world_destroy(c.world);
    pthread_mutex_destroy(&c.lock);
    free(threads);
    return status;
}
