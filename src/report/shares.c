/* Where the time goes: sums over the events of a timeline. */
#include "base/intern.h"
#include "report/report_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Sums over events with a common key. A rank that represents several is weighted accordingly. */
typedef struct total {
    const char *name, *kind, *group;
    double count, seconds, exposed, hidden, bytes;
    double least, most; /* shortest and longest event */
} total;

typedef struct totals {
    qd_intern *keys;
    total *rows;
    int32_t capacity;
    int32_t *of; /* [distinct actions]: the row of an action + 1, 0: not known yet */
} totals;

static qd_status create_totals(totals *t, const qd_sorted *s)
{
    *t = (totals){.of = calloc((size_t)s->action_count + 1, sizeof *t->of)};
    return t->of ? qd_intern_create(&t->keys) : QD_FAIL(QD_NO_MEMORY, "no memory for %d actions", s->action_count);
}

static void add(total *row, const qd_sorted *s, const qd_sorted_event *e)
{
    const qd_action_key *action = s->actions[e->action];
    double seconds = e->end - e->begin, weight = qd_rank_weight(&s->timeline->ranks[e->rank]);
    row->least = row->count == 0.0 || seconds < row->least ? seconds : row->least;
    row->most = seconds > row->most ? seconds : row->most;
    row->count += weight;
    row->seconds += weight * seconds;
    if (action->group)
        row->bytes += weight * (double)action->bytes / (double)s->world;
}

/* Finds or adds the row of an action, by a pair of its texts; pointers to rows are valid until the
 * next call. */
static qd_status find_row(totals *t, int32_t action, const char *first, const char *second, int32_t *number)
{
    if (t->of[action] > 0) {
        *number = t->of[action] - 1;
        return QD_OK;
    }
    char key[256];
    int32_t before = qd_intern_count(t->keys);
    size_t a = strlen(first) + 1, b = strlen(second) + 1;
    if (a + b > sizeof key)
        return QD_FAIL(QD_USAGE, "the name '%.60s…' of an action is too long", a > b ? first : second);
    memcpy(key, first, a);
    memcpy(key + a, second, b);
    QD_TRY(qd_intern_add(t->keys, key, a + b, number));
    t->of[action] = *number + 1;
    if (*number < before)
        return QD_OK;
    if (*number >= t->capacity) {
        int32_t capacity = t->capacity ? t->capacity * 2 : 64;
        total *rows = realloc(t->rows, (size_t)capacity * sizeof *rows);
        if (!rows)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %d rows of a table", capacity);
        t->rows = rows;
        t->capacity = capacity;
    }
    t->rows[*number] = (total){0};
    return QD_OK;
}

static void put_row(qd_json_writer *w, const total *row)
{
    qd_json_object_begin(w, NULL);
    if (row->name)
        qd_json_put_string(w, "name", row->name);
    qd_json_put_string(w, "kind", row->kind);
    qd_json_put_string(w, "group", row->group);
    qd_json_put_double(w, "count", row->count);
    qd_json_put_double(w, "seconds", row->seconds);
    qd_json_put_double(w, "least", row->least);
    qd_json_put_double(w, "most", row->most);
    qd_json_put_double(w, "bytes", row->bytes);
    if (!row->name) {
        qd_json_put_double(w, "exposed", row->exposed);
        qd_json_put_double(w, "hidden", row->hidden);
    }
    qd_json_end(w);
}

static void free_totals(totals *t)
{
    qd_intern_destroy(t->keys);
    free(t->rows);
    free(t->of);
}

static qd_status put_names(qd_json_writer *w, const qd_sorted *s)
{
    totals t;
    qd_status status = QD_OK;
    QD_TRY_DONE(create_totals(&t, s));
    for (int64_t i = 0; i < s->count; i++) {
        const qd_action_key *a = s->actions[s->events[i].action];
        int32_t row;
        QD_TRY_DONE(find_row(&t, s->events[i].action, a->name, "", &row));
        t.rows[row].name = a->name;
        t.rows[row].kind = a->kind;
        t.rows[row].group = a->group;
        add(&t.rows[row], s, &s->events[i]);
    }
    qd_json_list_begin(w, "names");
    for (int32_t i = 0; i < qd_intern_count(t.keys); i++)
        put_row(w, &t.rows[i]);
    qd_json_end(w);
done:
    free_totals(&t);
    return status;
}

/* Buffers for one rank: its events, and space for as many spans. */
typedef struct rank_work {
    const qd_sorted *sorted;
    const qd_sorted_event *events;
    int64_t count;
    int32_t *rows; /* [count]: row in the traffic table, -1: computes */
    bool *messages; /* [distinct actions] */
    qd_span *compute, *communication, *some; /* [count] */
    int64_t computes, communicates;
} rank_work;

/* A rank waits for a message until another stage has caught up: if nothing else is running, that is
 * the pipeline bubble, and counts as idle time rather than communication. */
static bool is_message(const qd_action_key *a)
{
    return strcmp(a->kind, "send") == 0 || strcmp(a->kind, "recv") == 0;
}

static int64_t collect(const rank_work *r, int32_t row, qd_span *spans)
{
    int64_t n = 0;
    for (int64_t i = 0; i < r->count; i++)
        if (r->rows[i] == row)
            spans[n++] = (qd_span){r->events[i].begin, r->events[i].end};
    return qd_spans_join(spans, n);
}

static int64_t collect_communication(const rank_work *r, qd_span *spans)
{
    int64_t n = 0;
    for (int64_t i = 0; i < r->count; i++)
        if (r->rows[i] >= 0 && !r->messages[r->events[i].action])
            spans[n++] = (qd_span){r->events[i].begin, r->events[i].end};
    return qd_spans_join(spans, n);
}

/* When the rank computed: its actions minus the time they waited for exchanges inside them. */
static void collect_compute(rank_work *r)
{
    int64_t waits = 0;
    r->computes = collect(r, -1, r->communication);
    for (int64_t i = 0; i < r->count; i++) {
        const qd_sorted_event *e = &r->events[i];
        if (r->rows[i] >= 0 && e->waited > 0.0)
            r->some[waits++] = (qd_span){fmax(e->begin, e->end - e->waited), e->end};
    }
    waits = qd_spans_join(r->some, waits);
    r->computes = qd_spans_subtract(r->communication, r->computes, r->some, waits, r->compute);
}

static qd_status find_rows(rank_work *r, totals *t)
{
    for (int64_t i = 0; i < r->count; i++) {
        const qd_action_key *a = r->sorted->actions[r->events[i].action];
        r->rows[i] = -1;
        if (!a->group)
            continue;
        QD_TRY(find_row(t, r->events[i].action, a->group, a->kind, &r->rows[i]));
        total *row = &t->rows[r->rows[i]];
        row->group = a->group;
        row->kind = a->kind;
        add(row, r->sorted, &r->events[i]);
    }
    return QD_OK;
}

/* Exposed time is not overlapped by computation of the same rank. Concurrent operations count once,
 * so hidden and exposed time may add up to less than the sum of the durations. */
static void add_exposed(rank_work *r, totals *t, double weight)
{
    for (int32_t row = 0; row < qd_intern_count(t->keys); row++) {
        int64_t n = collect(r, row, r->some);
        double hidden = qd_spans_overlap(r->some, n, r->compute, r->computes);
        t->rows[row].hidden += weight * hidden;
        t->rows[row].exposed += weight * (qd_spans_length(r->some, n) - hidden);
    }
}

static void put_share(qd_json_writer *w, const rank_work *r, int32_t rank, double seconds)
{
    double compute = qd_spans_length(r->compute, r->computes);
    double communication = qd_spans_length(r->communication, r->communicates);
    double hidden = qd_spans_overlap(r->communication, r->communicates, r->compute, r->computes);
    qd_json_object_begin(w, NULL);
    qd_json_put_int(w, "rank", rank);
    qd_json_put_double(w, "seconds", seconds);
    qd_json_put_double(w, "compute", compute);
    qd_json_put_double(w, "communication", communication);
    qd_json_put_double(w, "exposed", communication - hidden);
    qd_json_put_double(w, "idle", fmax(0.0, seconds - compute - (communication - hidden)));
    qd_json_end(w);
}

/* Seconds during which any step was running. */
static qd_status covered(const qd_sorted *s, double *seconds)
{
    qd_span *spans = malloc((size_t)(s->step_count + 1) * sizeof *spans);
    if (!spans)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld steps", (long long)s->step_count);
    for (int64_t i = 0; i < s->step_count; i++)
        spans[i] = (qd_span){s->steps[i].begin, s->steps[i].end};
    *seconds = qd_spans_length(spans, qd_spans_join(spans, s->step_count));
    free(spans);
    return QD_OK;
}

static qd_status put_ranks(qd_json_writer *w, const qd_sorted *s, rank_work *r, totals *t)
{
    double seconds = 0.0;
    QD_TRY(covered(s, &seconds));
    qd_json_list_begin(w, "shares");
    int64_t from = 0;
    for (int32_t rank = 0; rank < s->timeline->rank_count; rank++) {
        int64_t end = from;
        while (end < s->count && s->events[end].rank == rank)
            end++;
        r->events = s->events + from;
        r->count = end - from;
        from = end;
        QD_TRY(find_rows(r, t));
        collect_compute(r);
        r->communicates = collect_communication(r, r->communication);
        add_exposed(r, t, qd_rank_weight(&s->timeline->ranks[rank]));
        put_share(w, r, rank, seconds);
    }
    qd_json_end(w);
    qd_json_list_begin(w, "traffic");
    for (int32_t i = 0; i < qd_intern_count(t->keys); i++)
        put_row(w, &t->rows[i]);
    qd_json_end(w);
    return QD_OK;
}

qd_status qd_report_put_shares(qd_json_writer *w, const qd_sorted *s)
{
    totals t;
    size_t room = (size_t)s->count + 1;
    rank_work r = {.sorted = s, .rows = malloc(room * sizeof *r.rows), .messages = calloc((size_t)s->action_count + 1, sizeof *r.messages)};
    qd_span *spans = malloc(3 * room * sizeof *spans);
    qd_status status = create_totals(&t, s);
    if (status == QD_OK && (!r.rows || !r.messages || !spans))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for %lld events", (long long)s->count);
    if (status == QD_OK) {
        for (int32_t i = 0; i < s->action_count; i++)
            r.messages[i] = is_message(s->actions[i]);
        r.compute = spans;
        r.communication = spans + room;
        r.some = spans + 2 * room;
        status = put_ranks(w, s, &r, &t);
    }
    if (status == QD_OK)
        status = put_names(w, s);
    free_totals(&t);
    free(r.rows);
    free(r.messages);
    free(spans);
    return status;
}
