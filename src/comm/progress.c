/* The progress thread of a rank polls the heads of all non-empty queues, so that a waiting receive
 * never delays a gather. It sleeps when nothing moves. It waits on a condition variable when every
 * queue is empty or is polled by the thread that waits for its work. */
#include "base/thread.h"
#include "comm/work.h"

#include <stdlib.h>

#define PROGRESS_YIELDS 20 /* no spinning: the compute threads need the cores */

struct qd_progress {
    qd_world *world;
    pthread_t thread;
    pthread_mutex_t lock; /* guards everything below, and `listed` and `next` of the queues */
    pthread_cond_t change;
    qd_queue *queues;
    bool stop;
    qd_queue *polling; /* being polled; must not be freed */
};

/* True if some listed queue has work that no other thread polls. Removes empty queues from the
 * list. */
static bool any_active(qd_progress *progress)
{
    bool active = false;
    for (qd_queue **link = &progress->queues; *link;) {
        qd_queue *queue = *link;
        if (atomic_load_explicit(&queue->length, memory_order_acquire) == 0) {
            *link = queue->next;
            queue->listed = false;
            continue;
        }
        if (!atomic_load_explicit(&queue->turn, memory_order_acquire)) active = true;
        link = &queue->next;
    }
    return active;
}

static bool poll_all(void *context)
{
    qd_progress *progress = context;
    bool moved = false;
    pthread_mutex_lock(&progress->lock);
    for (qd_queue *queue = progress->queues; queue; queue = queue->next) {
        progress->polling = queue;
        pthread_mutex_unlock(&progress->lock);
        qd_queue_poll(queue, &moved);
        pthread_mutex_lock(&progress->lock);
        progress->polling = NULL;
        pthread_cond_broadcast(&progress->change);
    }
    pthread_mutex_unlock(&progress->lock);
    return moved;
}

static void *progress_main(void *context)
{
    qd_progress *progress = context;
    qd_world *world = progress->world;
    qd_idle idle = {.yields = PROGRESS_YIELDS};
    for (;;) {
        pthread_mutex_lock(&progress->lock);
        while (!progress->stop && !any_active(progress)) {
            pthread_cond_wait(&progress->change, &progress->lock);
            idle.step = 0;
        }
        bool stop = progress->stop;
        pthread_mutex_unlock(&progress->lock);
        if (stop) return NULL;
        if (poll_all(progress))
            idle.step = 0;
        else
            qd_world_idle(world, &idle, poll_all, progress);
    }
}

static qd_status progress_create(qd_world *world)
{
    qd_progress *progress = calloc(1, sizeof *progress);
    if (!progress) return QD_FAIL(QD_NO_MEMORY, "no memory for the progress thread");
    progress->world = world;
    pthread_mutex_init(&progress->lock, NULL);
    pthread_cond_init(&progress->change, NULL);
    int error = pthread_create(&progress->thread, NULL, progress_main, progress);
    if (error) {
        pthread_cond_destroy(&progress->change);
        pthread_mutex_destroy(&progress->lock);
        free(progress);
        return QD_FAIL(QD_SYSTEM, "cannot start the progress thread: %s", qd_thread_why(error));
    }
    world->progress = progress;
    return QD_OK;
}

qd_status qd_progress_add(qd_world *world, qd_queue *queue)
{
    pthread_mutex_lock(&world->lock);
    qd_status status = world->progress ? QD_OK : progress_create(world);
    qd_progress *progress = world->progress;
    pthread_mutex_unlock(&world->lock);
    QD_TRY(status);
    pthread_mutex_lock(&progress->lock);
    if (!queue->listed) {
        queue->listed = true;
        queue->next = progress->queues;
        progress->queues = queue;
    }
    pthread_cond_broadcast(&progress->change);
    pthread_mutex_unlock(&progress->lock);
    qd_world_wake(world);
    return QD_OK;
}

void qd_progress_nudge(qd_world *world)
{
    pthread_mutex_lock(&world->lock);
    qd_progress *progress = world->progress;
    pthread_mutex_unlock(&world->lock);
    if (!progress) return;
    pthread_mutex_lock(&progress->lock);
    pthread_cond_broadcast(&progress->change);
    pthread_mutex_unlock(&progress->lock);
}

void qd_progress_remove(qd_world *world, qd_queue *queue)
{
    pthread_mutex_lock(&world->lock);
    qd_progress *progress = world->progress;
    pthread_mutex_unlock(&world->lock);
    if (!progress) return;
    pthread_mutex_lock(&progress->lock);
    while (progress->polling == queue) pthread_cond_wait(&progress->change, &progress->lock);
    for (qd_queue **link = &progress->queues; *link; link = &(*link)->next)
        if (*link == queue) {
            *link = queue->next;
            queue->listed = false;
            break;
        }
    pthread_mutex_unlock(&progress->lock);
}

void qd_progress_destroy(qd_world *world)
{
    qd_progress *progress = world->progress;
    if (!progress) return;
    pthread_mutex_lock(&progress->lock);
    progress->stop = true;
    pthread_cond_broadcast(&progress->change);
    pthread_mutex_unlock(&progress->lock);
    qd_world_wake(world);
    pthread_join(progress->thread, NULL);
    pthread_cond_destroy(&progress->change);
    pthread_mutex_destroy(&progress->lock);
    free(progress);
    world->progress = NULL;
}
