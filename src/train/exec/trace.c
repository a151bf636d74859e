/* Records events, aligns the clocks of machines, and writes the trace file. */
#include "train/exec/trace.h"

#include "base/clock.h"
#include "base/text/json_writer.h"
#include "base/text/strbuf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct event {
    int64_t step;
    double begin, end; /* qd_clock_now() */
    double waited;
    int action, op; /* -1: the action itself */
} event;

struct qd_trace {
    event *events;
    size_t count, capacity;
    int64_t dropped;
    double ahead; /* of this rank's clock, compared with rank 0's */
};

enum { CLOCK_QUESTIONS = 8 };

/* Rank 0 asks `rank` for its time and sends it the offset computed from the quickest answer. */
static qd_status ask_clock(qd_comm *world, int rank)
{
    double quickest = INFINITY, ahead = 0.0;
    for (int i = 0; i < CLOCK_QUESTIONS; i++) {
        double there, begin = qd_clock_now();
        QD_TRY(qd_comm_send(world, &begin, sizeof begin, QD_U8, rank, NULL));
        QD_TRY(qd_comm_recv(world, &there, sizeof there, QD_U8, rank, NULL));
        double end = qd_clock_now();
        if (end - begin >= quickest)
            continue;
        quickest = end - begin;
        ahead = there - 0.5 * (begin + end);
    }
    return qd_comm_send(world, &ahead, sizeof ahead, QD_U8, rank, NULL);
}

static qd_status answer_clock(qd_comm *world, double *ahead)
{
    for (int i = 0; i < CLOCK_QUESTIONS; i++) {
        double question;
        QD_TRY(qd_comm_recv(world, &question, sizeof question, QD_U8, 0, NULL));
        double now = qd_clock_now();
        QD_TRY(qd_comm_send(world, &now, sizeof now, QD_U8, 0, NULL));
    }
    return qd_comm_recv(world, ahead, sizeof *ahead, QD_U8, 0, NULL);
}

static qd_status compare_clocks(qd_comm *world, double *ahead)
{
    if (qd_comm_rank(world) > 0)
        return answer_clock(world, ahead);
    for (int rank = 1; rank < qd_comm_size(world); rank++)
        QD_TRY(ask_clock(world, rank));
    return QD_OK;
}

qd_status qd_trace_create(qd_comm *world, qd_trace **trace)
{
    double ahead = 0.0;
    if (qd_comm_locate(world).machines > 1)
        QD_TRY(compare_clocks(world, &ahead));
    *trace = calloc(1, sizeof **trace);
    if (!*trace)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the trace");
    (*trace)->ahead = ahead;
    return QD_OK;
}

void qd_trace_destroy(qd_trace *trace)
{
    if (!trace)
        return;
    free(trace->events);
    free(trace);
}

static void add(qd_trace *t, event e)
{
    if (!t)
        return;
    if (t->count == t->capacity) {
        size_t capacity = t->capacity ? t->capacity * 2 : 1024;
        event *grown = realloc(t->events, capacity * sizeof *grown);
        if (!grown) {
            t->dropped++;
            return;
        }
        t->events = grown;
        t->capacity = capacity;
    }
    t->events[t->count++] = e;
}

void qd_trace_add(qd_trace *t, int64_t step, int action, double begin, double end)
{
    add(t, (event){.step = step, .begin = begin, .end = end, .action = action, .op = -1});
}

void qd_trace_add_exchange(qd_trace *t, int64_t step, int action, int op, double begin, double end, double waited)
{
    add(t, (event){.step = step, .begin = begin, .end = end, .waited = waited, .action = action, .op = op});
}

/* This rank's events as a JSON list. origin: on its own clock. */
static qd_status format_events(const qd_trace *t, const qd_program *p, int rank, double origin, qd_strbuf *out)
{
    char name[32];
    qd_json_writer w = qd_json_writer_on(out);
    qd_json_list_begin(&w, NULL);
    snprintf(name, sizeof name, "rank %d", rank);
    qd_trace_put_name(&w, "process_name", rank, 0, name);
    qd_trace_put_tracks(&w, p, rank);
    for (size_t i = 0; i < t->count; i++) {
        const event *e = &t->events[i];
        qd_trace_put_event(&w, p, rank, e->action, e->op, e->step, e->begin - origin, e->end - origin, e->waited - origin);
    }
    if (t->dropped > 0) {
        snprintf(name, sizeof name, "%lld dropped", (long long)t->dropped);
        qd_trace_put_name(&w, "process_labels", rank, 0, name);
    }
    qd_json_end(&w);
    return out->failed ? QD_FAIL(QD_NO_MEMORY, "no memory to write the trace of %zu events", t->count) : QD_OK;
}

/* The earliest event of all ranks, on rank 0's clock. */
static qd_status find_origin(const qd_trace *t, qd_comm *world, double *origin)
{
    int64_t earliest = INT64_MIN; /* negated nanoseconds: the largest is the earliest */
    for (size_t i = 0; i < t->count; i++) {
        int64_t begin = -(int64_t)((t->events[i].begin - t->ahead) * 1e9);
        earliest = begin > earliest ? begin : earliest;
    }
    QD_TRY(qd_comm_all_reduce(world, &earliest, &earliest, 1, QD_I64, QD_MAX, NULL));
    *origin = earliest == INT64_MIN ? 0.0 : (double)-earliest * 1e-9;
    return QD_OK;
}

static void append_items(qd_strbuf *file, const char *list, size_t length)
{
    if (file->length > 0 && file->data[file->length - 1] == '}')
        qd_strbuf_puts(file, ",\n");
    qd_strbuf_append(file, list + 1, length - 2); /* without the brackets */
}

/* Rank 0: appends the lists of the other ranks. */
static qd_status receive_lists(qd_comm *world, qd_strbuf *file)
{
    for (int rank = 1; rank < qd_comm_size(world); rank++) {
        int64_t length;
        QD_TRY(qd_comm_recv(world, &length, 1, QD_I64, rank, NULL));
        char *list = malloc((size_t)length);
        if (!list)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the trace of rank %d (%lld bytes)", rank, (long long)length);
        qd_status status = qd_comm_recv(world, list, length, QD_U8, rank, NULL);
        if (status == QD_OK)
            append_items(file, list, (size_t)length);
        free(list);
        QD_TRY(status);
    }
    return QD_OK;
}

static qd_status write_file(qd_comm *world, const qd_strbuf *own, const char *path)
{
    qd_strbuf file = {0};
    qd_strbuf_puts(&file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    append_items(&file, own->data, own->length);
    qd_status status = receive_lists(world, &file);
    qd_strbuf_puts(&file, "\n]}\n");
    if (status == QD_OK && file.failed)
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", path);
    if (status == QD_OK)
        status = qd_file_replace(path, file.data, file.length);
    qd_strbuf_free(&file);
    return status;
}

qd_status qd_trace_write(const qd_trace *t, const qd_program *program, qd_comm *world, const char *path)
{
    int rank = qd_comm_rank(world);
    qd_strbuf own = {0};
    double origin;
    qd_status status = QD_OK;
    QD_TRY_DONE(find_origin(t, world, &origin));
    QD_TRY_DONE(format_events(t, program, rank, origin + t->ahead, &own));
    if (rank == 0) {
        QD_TRY_DONE(write_file(world, &own, path));
    } else {
        int64_t length = (int64_t)own.length;
        QD_TRY_DONE(qd_comm_send(world, &length, 1, QD_I64, 0, NULL));
        QD_TRY_DONE(qd_comm_send(world, own.data, length, QD_U8, 0, NULL));
    }
done:
    qd_strbuf_free(&own);
    return status;
}
