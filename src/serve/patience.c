/* A table of connections and a thread that ends those that take too long. */
#include "serve/patience.h"

#include "base/clock.h"
#include "base/thread.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

typedef struct watched {
    int fd; /* -1: the place is free */
    bool busy;
    double since;
} watched;

struct qd_patience {
    pthread_mutex_t mutex;
    pthread_cond_t ended;
    pthread_t thread;
    bool end;
    double quiet, busy;
    int capacity;
    watched list[];
};

static void end_slow(qd_patience *w)
{
    double now = qd_clock_now();
    for (int i = 0; i < w->capacity; i++)
        if (w->list[i].fd >= 0 && now - w->list[i].since > (w->list[i].busy ? w->busy : w->quiet))
            shutdown(w->list[i].fd, SHUT_RDWR); /* libmicrohttpd closes it */
}

static void *run(void *context)
{
    qd_patience *w = context;
    pthread_mutex_lock(&w->mutex);
    while (!w->end) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&w->ended, &w->mutex, &until);
        end_slow(w);
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

qd_status qd_patience_create(int capacity, double quiet, double busy, qd_patience **watch)
{
    qd_patience *w = calloc(1, sizeof *w + (size_t)capacity * sizeof w->list[0]);
    if (!w)
        return QD_FAIL(QD_NO_MEMORY, "serve: no memory for %d connections", capacity);
    w->capacity = capacity;
    w->quiet = quiet;
    w->busy = busy;
    for (int i = 0; i < capacity; i++)
        w->list[i].fd = -1;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->ended, NULL);
    int error = pthread_create(&w->thread, NULL, run, w);
    if (error != 0) {
        pthread_cond_destroy(&w->ended);
        pthread_mutex_destroy(&w->mutex);
        free(w);
        return QD_FAIL(QD_SYSTEM, "serve: cannot start a thread: %s", qd_thread_why(error));
    }
    *watch = w;
    return QD_OK;
}

void qd_patience_destroy(qd_patience *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->mutex);
    w->end = true;
    pthread_cond_signal(&w->ended);
    pthread_mutex_unlock(&w->mutex);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->ended);
    pthread_mutex_destroy(&w->mutex);
    free(w);
}

int qd_patience_add(qd_patience *w, int fd)
{
    int number = -1;
    pthread_mutex_lock(&w->mutex);
    for (int i = 0; i < w->capacity && number < 0; i++)
        if (w->list[i].fd < 0)
            number = i;
    if (number >= 0)
        w->list[number] = (watched){.fd = fd, .since = qd_clock_now()};
    pthread_mutex_unlock(&w->mutex);
    return number;
}

void qd_patience_remove(qd_patience *w, int number)
{
    if (number < 0)
        return;
    pthread_mutex_lock(&w->mutex);
    w->list[number].fd = -1;
    pthread_mutex_unlock(&w->mutex);
}

static void set(qd_patience *w, int number, bool busy)
{
    if (number < 0)
        return;
    pthread_mutex_lock(&w->mutex);
    w->list[number].busy = busy;
    w->list[number].since = qd_clock_now();
    pthread_mutex_unlock(&w->mutex);
}

void qd_patience_busy(qd_patience *w, int number)
{
    set(w, number, true);
}

void qd_patience_quiet(qd_patience *w, int number)
{
    set(w, number, false);
}
