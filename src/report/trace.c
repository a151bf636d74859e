/* Reads trace.json. The file may be large, so events are parsed one at a time. */
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "base/intern.h"
#include "report/report_impl.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAMS = 64 };

struct qd_report_trace {
    qd_report_timeline timeline;
    qd_report_event *events;
    int64_t capacity;
    qd_report_rank *ranks;
    int rank_capacity;
    const char *streams[STREAMS];
    qd_intern *texts, *numbers; /* of ranks, in rank order */
};

typedef struct scan {
    const char *name, *text, *at;
} scan;

static qd_status wrong(const scan *s, const char *what)
{
    return QD_FAIL(QD_USAGE, "%s: byte %zu: %s", s->name, (size_t)(s->at - s->text), what);
}

static void skip_space(scan *s)
{
    while (*s->at && isspace((unsigned char)*s->at))
        s->at++;
}

static bool skip_char(scan *s, char c)
{
    skip_space(s);
    if (*s->at != c)
        return false;
    s->at++;
    return true;
}

static qd_status skip_string(scan *s)
{
    if (!skip_char(s, '"'))
        return wrong(s, "not valid JSON: expected a string");
    for (; *s->at != '"'; s->at++) {
        if (*s->at == '\\' && s->at[1] != '\0')
            s->at++;
        else if (*s->at == '\0')
            return wrong(s, "not valid JSON: the file ends inside a string");
    }
    s->at++;
    return QD_OK;
}

/* Skips a whole value; its contents are validated by the parser where the value is used. */
static qd_status skip_value(scan *s)
{
    int depth = 0;
    skip_space(s);
    do {
        skip_space(s);
        if (*s->at == '\0')
            return wrong(s, "not valid JSON: the file ends inside a value");
        if (*s->at == '"') {
            QD_TRY(skip_string(s));
            continue;
        }
        depth += *s->at == '{' || *s->at == '[' ? 1 : *s->at == '}' || *s->at == ']' ? -1 : 0;
        if (depth == 0 && strchr("}]", *s->at) == NULL) { /* a number or a literal */
            const char *from = s->at;
            while (*s->at && !isspace((unsigned char)*s->at) && strchr(",}]", *s->at) == NULL)
                s->at++;
            if (s->at == from)
                return wrong(s, "not valid JSON: expected a value");
            return QD_OK;
        }
        s->at++;
    } while (depth > 0);
    return QD_OK;
}

/* Advances to the first event: of a list, or of the list "traceEvents" of an object. */
static qd_status find_list(scan *s)
{
    static const char key[] = "\"traceEvents\"";
    if (skip_char(s, '['))
        return QD_OK;
    if (!skip_char(s, '{'))
        return wrong(s, "this is not a trace: it must start with {\"traceEvents\":[");
    for (bool more = !skip_char(s, '}'); more; more = skip_char(s, ',')) {
        skip_space(s);
        bool found = strncmp(s->at, key, sizeof key - 1) == 0;
        QD_TRY(skip_string(s));
        if (!skip_char(s, ':'))
            return wrong(s, "not valid JSON: expected ':'");
        if (found)
            return skip_char(s, '[') ? QD_OK : wrong(s, "\"traceEvents\" must be a list");
        QD_TRY(skip_value(s));
    }
    return wrong(s, "this is not a trace: it has no \"traceEvents\"");
}

static int64_t int_or(const qd_json_node *object, const char *key, int64_t otherwise)
{
    int64_t value;
    return qd_json_as_int(qd_json_member(object, key), &value) ? value : otherwise;
}

static qd_status find_rank(const scan *s, qd_report_trace *t, const qd_json_node *e, qd_report_rank **rank)
{
    int64_t number = int_or(e, "pid", 0);
    qd_report_timeline *line = &t->timeline;
    int32_t at;
    if (number < 0 || number > INT32_MAX)
        return QD_FAIL(QD_USAGE, "%s: pid %lld is not a rank", s->name, (long long)number);
    QD_TRY(qd_intern_add(t->numbers, &number, sizeof number, &at));
    if (at < line->rank_count) {
        *rank = &t->ranks[at];
        return QD_OK;
    }
    if (line->rank_count == t->rank_capacity) {
        int capacity = t->rank_capacity ? t->rank_capacity * 2 : 16;
        qd_report_rank *ranks = realloc(t->ranks, (size_t)capacity * sizeof *ranks);
        if (!ranks)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %d ranks", capacity);
        t->ranks = ranks;
        t->rank_capacity = capacity;
    }
    *rank = &t->ranks[line->rank_count++];
    **rank = (qd_report_rank){.rank = (int32_t)number, .stands_for = 1};
    return QD_OK;
}

static qd_status read_stream(const scan *s, const qd_json_node *e, int32_t *stream, qd_report_trace *t)
{
    int64_t tid = int_or(e, "tid", 0);
    if (tid < 0 || tid >= STREAMS)
        return QD_FAIL(QD_USAGE, "%s: tid %lld: streams are numbered from 0 to %d", s->name, (long long)tid, STREAMS - 1);
    *stream = (int32_t)tid;
    if (tid >= t->timeline.stream_count)
        t->timeline.stream_count = (int)tid + 1;
    return QD_OK;
}

/* Names of ranks and streams. */
static qd_status read_name(const scan *s, const qd_json_node *e, qd_report_trace *t)
{
    const char *what = qd_json_as_string(qd_json_member(e, "name"));
    const qd_json_node *args = qd_json_member(e, "args");
    const char *text = qd_json_as_string(qd_json_member(args, "name"));
    qd_report_rank *rank;
    QD_TRY(find_rank(s, t, e, &rank));
    if (what && strcmp(what, "process_name") == 0)
        QD_TRY(qd_intern_text(t->texts, text, &rank->label));
    if (what && strcmp(what, "process_labels") == 0) {
        QD_TRY(qd_intern_text(t->texts, qd_json_as_string(qd_json_member(args, "labels")), &rank->place));
        rank->stands_for = int_or(args, "stands_for", rank->stands_for);
    }
    if (what && strcmp(what, "thread_name") == 0 && text) {
        int32_t stream;
        QD_TRY(read_stream(s, e, &stream, t));
        QD_TRY(qd_intern_text(t->texts, text, &t->streams[stream]));
    }
    return QD_OK;
}

static qd_status read_span(const scan *s, const qd_json *document, const qd_json_node *e, qd_report_trace *t)
{
    const qd_json_node *args = qd_json_member(e, "args");
    double begin, duration;
    const char *name;
    qd_report_rank *rank;
    if (t->timeline.event_count == t->capacity) {
        int64_t capacity = t->capacity ? t->capacity * 2 : 1024;
        qd_report_event *events = realloc(t->events, (size_t)capacity * sizeof *events);
        if (!events)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for %lld events", s->name, (long long)capacity);
        t->events = events;
        t->capacity = capacity;
    }
    QD_TRY(qd_json_get_double(document, e, "ts", &begin));
    QD_TRY(qd_json_get_double(document, e, "dur", &duration));
    QD_TRY(qd_json_get_string(document, e, "name", &name));
    QD_TRY(find_rank(s, t, e, &rank));
    qd_report_event *event = &t->events[t->timeline.event_count];
    *event = (qd_report_event){
        .rank = rank->rank,
        .step = int_or(args, "step", 0),
        .microbatch = (int32_t)int_or(args, "microbatch", -1),
        .bytes = int_or(args, "bytes", 0),
        .begin = begin * 1e-6,
        .end = (begin + duration) * 1e-6,
    };
    qd_json_as_double(qd_json_member(args, "flops"), &event->flops);
    if (qd_json_as_double(qd_json_member(args, "waited"), &event->waited))
        event->waited *= 1e-6;
    const char *kind = qd_json_as_string(qd_json_member(e, "cat"));
    QD_TRY(read_stream(s, e, &event->stream, t));
    QD_TRY(qd_intern_text(t->texts, name, &event->name));
    QD_TRY(qd_intern_text(t->texts, kind ? kind : name, &event->kind));
    QD_TRY(qd_intern_text(t->texts, qd_json_as_string(qd_json_member(args, "module")), &event->module));
    QD_TRY(qd_intern_text(t->texts, qd_json_as_string(qd_json_member(args, "axes")), &event->group));
    t->timeline.event_count++;
    return QD_OK;
}

static qd_status read_event(const scan *s, const char *text, size_t length, qd_report_trace *t)
{
    qd_json *document = NULL;
    qd_status status = qd_json_load_text(s->name, text, length, &document);
    if (status != QD_OK)
        return qd_error_prefix(status, "event at byte %zu: ", (size_t)(text - s->text));
    const qd_json_node *e = qd_json_root(document);
    const char *phase = qd_json_as_string(qd_json_member(e, "ph"));
    if (phase && strcmp(phase, "M") == 0)
        status = read_name(s, e, t);
    else if (phase && strcmp(phase, "X") == 0)
        status = read_span(s, document, e, t);
    qd_json_destroy(document);
    return status;
}

static qd_status read_events(scan *s, qd_report_trace *t)
{
    QD_TRY(find_list(s));
    if (skip_char(s, ']'))
        return QD_OK;
    do {
        skip_space(s);
        const char *from = s->at;
        QD_TRY(skip_value(s));
        QD_TRY(read_event(s, from, (size_t)(s->at - from), t));
    } while (skip_char(s, ','));
    return skip_char(s, ']') ? QD_OK : wrong(s, "not valid JSON: expected ',' or ']'");
}

static int by_rank(const void *a, const void *b)
{
    int32_t x = ((const qd_report_rank *)a)->rank, y = ((const qd_report_rank *)b)->rank;
    return (x > y) - (x < y);
}

qd_status qd_report_trace_load_text(const char *file, const char *text, const char *name, qd_report_trace **trace)
{
    qd_status status = QD_OK;
    qd_report_trace *t = calloc(1, sizeof *t);
    if (!t)
        return QD_FAIL(QD_NO_MEMORY, "no memory to read %s", file);
    t->timeline = qd_report_timeline_default();
    scan s = {.name = file, .text = text, .at = text};
    QD_TRY_DONE(qd_intern_create(&t->texts));
    QD_TRY_DONE(qd_intern_create(&t->numbers));
    QD_TRY_DONE(read_events(&s, t));
    QD_TRY_DONE(qd_intern_text(t->texts, name, &t->timeline.name));
    for (int i = 0; i < t->timeline.stream_count; i++)
        if (!t->streams[i])
            QD_TRY_DONE(qd_intern_text(t->texts, "", &t->streams[i]));
    if (t->timeline.rank_count > 0)
        qsort(t->ranks, (size_t)t->timeline.rank_count, sizeof *t->ranks, by_rank);
    t->timeline.ranks = t->ranks;
    t->timeline.streams = t->streams;
    t->timeline.events = t->events;
done:
    if (status != QD_OK) {
        qd_report_trace_destroy(t);
        return status;
    }
    *trace = t;
    return QD_OK;
}

qd_status qd_report_trace_load(const char *path, const char *name, qd_report_trace **trace)
{
    char *text = NULL;
    size_t length;
    QD_TRY(qd_file_read(path, SIZE_MAX / 2, &text, &length));
    qd_status status = qd_report_trace_load_text(path, text, name, trace);
    free(text);
    return status;
}

const qd_report_timeline *qd_report_trace_timeline(const qd_report_trace *t)
{
    return &t->timeline;
}

void qd_report_trace_destroy(qd_report_trace *t)
{
    if (!t)
        return;
    qd_intern_destroy(t->texts);
    qd_intern_destroy(t->numbers);
    free(t->events);
    free(t->ranks);
    free(t);
}
