/* Records begin and end of pieces of a stream's work, with device events or with the clock. */
#include "device/timeline.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct piece {
    int id;
    double begin, end;        /* seconds of qd_clock_now */
    qd_event *started, *done; /* NULL where the clock is used */
} piece;

struct qd_timeline {
    qd_stream *stream;
    bool events;
    qd_event *origin; /* recorded by start, at origin_seconds of the clock */
    double origin_seconds;
    pthread_mutex_t lock; /* guards the next three */
    piece *pieces;
    int count, capacity;
};

qd_status qd_timeline_create(qd_stream *stream, qd_timeline **timeline)
{
    qd_timeline *t = calloc(1, sizeof *t);
    if (!t)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a timeline");
    t->stream = stream;
    t->events = !qd_device_get_caps(qd_stream_device(stream))->host_memory;
    qd_status status = t->events ? qd_event_create(qd_stream_device(stream), &t->origin) : QD_OK;
    if (status != QD_OK) {
        free(t);
        return status;
    }
    pthread_mutex_init(&t->lock, NULL);
    *timeline = t;
    return QD_OK;
}

void qd_timeline_destroy(qd_timeline *t)
{
    if (!t)
        return;
    for (int i = 0; i < t->capacity; i++) {
        qd_event_destroy(t->pieces[i].started);
        qd_event_destroy(t->pieces[i].done);
    }
    qd_event_destroy(t->origin);
    pthread_mutex_destroy(&t->lock);
    free(t->pieces);
    free(t);
}

static qd_status grow(qd_timeline *t)
{
    int capacity = t->capacity ? 2 * t->capacity : 256;
    piece *pieces = realloc(t->pieces, (size_t)capacity * sizeof *pieces);
    if (!pieces)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a timeline of %d pieces", capacity);
    t->pieces = pieces;
    while (t->capacity < capacity) {
        piece *p = &t->pieces[t->capacity];
        *p = (piece){0};
        t->capacity++; /* counted before it is filled, so that destroy frees its events */
        if (t->events) {
            QD_TRY(qd_event_create(qd_stream_device(t->stream), &p->started));
            QD_TRY(qd_event_create(qd_stream_device(t->stream), &p->done));
        }
    }
    return QD_OK;
}

/* The stream is idle and the host waits for the origin event, so the clock's time is close to that
 * of the event. */
qd_status qd_timeline_start(qd_timeline *t, const qd_timeline *reference)
{
    if (!t->events)
        return QD_OK;
    QD_TRY(qd_stream_wait(t->stream));
    QD_TRY(qd_event_record(t->origin, t->stream));
    QD_TRY(qd_event_wait(t->origin));
    t->origin_seconds = qd_clock_now();
    if (!reference)
        return QD_OK;
    double since;
    QD_TRY(qd_event_seconds(reference->origin, t->origin, &since));
    t->origin_seconds = reference->origin_seconds + since;
    return QD_OK;
}

static qd_status begin(qd_timeline *t, int id, int *index)
{
    if (t->count == t->capacity)
        QD_TRY(grow(t));
    piece *p = &t->pieces[t->count];
    p->id = id;
    *index = t->count++;
    if (t->events)
        return qd_event_record(p->started, t->stream);
    p->begin = qd_clock_now();
    return QD_OK;
}

qd_status qd_timeline_begin(qd_timeline *t, int id, int *index)
{
    pthread_mutex_lock(&t->lock);
    qd_status status = begin(t, id, index);
    pthread_mutex_unlock(&t->lock);
    return status;
}

qd_status qd_timeline_end(qd_timeline *t, int index)
{
    qd_status status = QD_OK;
    pthread_mutex_lock(&t->lock);
    piece *p = &t->pieces[index];
    if (t->events)
        status = qd_event_record(p->done, t->stream);
    else
        p->end = qd_clock_now();
    pthread_mutex_unlock(&t->lock);
    return status;
}

qd_status qd_timeline_collect(qd_timeline *t, qd_timeline_visitor visit, void *context)
{
    QD_TRY(qd_stream_wait(t->stream));
    for (int i = 0; i < t->count; i++) {
        piece *p = &t->pieces[i];
        if (t->events) {
            QD_TRY(qd_event_seconds(t->origin, p->started, &p->begin));
            QD_TRY(qd_event_seconds(t->origin, p->done, &p->end));
            p->begin += t->origin_seconds;
            p->end += t->origin_seconds;
        }
        visit(context, p->id, p->begin, p->end);
    }
    t->count = 0;
    return QD_OK;
}
