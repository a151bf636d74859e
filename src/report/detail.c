/* The events of a timeline as they are drawn: distributed over rows, and merged where a drawing
 * could not show them apart, so that a page receives about as many as it has pixels. */
#include "report/report_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* LANES: most rows of a rank's stream. KINDS: kinds that are distinguished in merged
 * events. */
enum { LANES = 6, KINDS = 8 };
/* Runs of events that are narrower than this, in pixels, are merged; page/timeline.js draws
 * narrower ones as blocks. */
static const double MERGED_PIXELS = 1.4;

/* One value per event that is drawn, row by row. */
typedef struct columns {
    void *space;
    double *begin;
    float *seconds, *waited, *share;
    uint32_t *action, *step, *merged;
    int32_t *microbatch;
    int64_t count;
    bool waits, batches, merges;
} columns;

/* Neighbours of one row that are drawn as one event. */
typedef struct run {
    double begin, end, busy, waited, limit;
    int64_t count;
    const qd_sorted_event *first;
    int32_t microbatch; /* -1: they differ */
    struct {
        const char *kind;
        double seconds;
        int32_t action; /* the first of this kind */
    } kinds[KINDS];
    int kind_count;
} run;

typedef struct drawing {
    const qd_sorted *sorted;
    double from, to, inside, outside; /* runs shorter than `inside` are merged between `from` and `to` */
    columns c;
    run run;
    qd_sorted_event *space; /* of one track */
    uint8_t *lane;
} drawing;

static qd_status create_columns(columns *c, int64_t count)
{
    size_t n = (size_t)count;
    c->space = malloc((n + 1) * (sizeof(double) + 3 * sizeof(float) + 4 * sizeof(uint32_t)));
    if (!c->space)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %zu events", n);
    c->begin = c->space;
    c->seconds = (float *)(c->begin + n);
    c->waited = c->seconds + n;
    c->share = c->waited + n;
    c->action = (uint32_t *)(void *)(c->share + n);
    c->step = c->action + n;
    c->merged = c->step + n;
    c->microbatch = (int32_t *)(void *)(c->merged + n);
    return QD_OK;
}

/* The index of an event's step. */
static uint32_t step_index(const qd_sorted *s, int64_t step)
{
    int64_t at = 0, end = s->step_count; /* finds the last step that does not exceed the event's */
    while (end - at > 1) {
        int64_t middle = (at + end) / 2;
        if (s->steps[middle].step <= step)
            at = middle;
        else
            end = middle;
    }
    return (uint32_t)at;
}

static void end_run(drawing *d)
{
    run *r = &d->run;
    columns *c = &d->c;
    int most = 0;
    if (r->count == 0)
        return;
    for (int k = 1; k < r->kind_count; k++)
        if (r->kinds[k].seconds > r->kinds[most].seconds)
            most = k;
    int64_t i = c->count++;
    double length = r->end - r->begin;
    c->begin[i] = r->begin - d->sorted->origin;
    c->seconds[i] = (float)length;
    c->waited[i] = (float)fmin(r->waited, length);
    c->share[i] = (float)(length > 0.0 ? fmin(1.0, r->busy / length) : 1.0);
    c->action[i] = (uint32_t)r->kinds[most].action;
    c->step[i] = step_index(d->sorted, r->first->event->step);
    c->merged[i] = (uint32_t)r->count;
    c->microbatch[i] = r->microbatch;
    c->waits = c->waits || r->waited > 0.0;
    c->batches = c->batches || r->microbatch >= 0;
    c->merges = c->merges || r->count > 1;
    r->count = 0;
}

static void add_to_run(run *r, const qd_sorted_event *e, const char *kind, double limit)
{
    int32_t microbatch = e->event->microbatch < 0 ? -1 : e->event->microbatch;
    int k = 0;
    if (r->count == 0) {
        r->begin = r->end = e->begin;
        r->busy = r->waited = 0.0;
        r->limit = limit;
        r->first = e;
        r->microbatch = microbatch;
        r->kind_count = 0;
    }
    while (k < r->kind_count && r->kinds[k].kind != kind)
        k++;
    if (k == r->kind_count && k < KINDS) {
        r->kinds[k].kind = kind;
        r->kinds[k].seconds = 0.0;
        r->kinds[k].action = e->action;
        r->kind_count++;
    }
    if (k < KINDS)
        r->kinds[k].seconds += e->end - e->begin;
    r->end = e->end > r->end ? e->end : r->end;
    r->busy += e->end - e->begin;
    r->waited += e->waited;
    r->limit = limit < r->limit ? limit : r->limit;
    r->microbatch = r->microbatch == microbatch ? microbatch : -1;
    r->count++;
}

/* The events of one row, in order. */
static void draw_row(drawing *d, const qd_sorted_event *events, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const qd_sorted_event *e = &events[i];
        double begin = e->begin - d->sorted->origin, end = e->end - d->sorted->origin;
        double limit = end >= d->from && begin <= d->to ? d->inside : d->outside;
        if (d->run.count > 0 && e->end - d->run.begin >= (limit < d->run.limit ? limit : d->run.limit))
            end_run(d);
        add_to_run(&d->run, e, d->sorted->actions[e->action]->kind, limit);
    }
    end_run(d);
}

/* Distributes a track's events, in the order of begin, over as few rows as needed to keep them from
 * overlapping. Returns how many there are. */
static int choose_lanes(const drawing *d, const qd_sorted_event *events, int64_t count, int64_t *used)
{
    double ends[LANES];
    int lanes = 0;
    for (int64_t i = 0; i < count; i++) {
        double begin = events[i].begin - d->sorted->origin, end = events[i].end - d->sorted->origin;
        double free = begin + 1e-9 + fabs(begin) * 1e-7;
        int chosen = 0;
        while (chosen < lanes && ends[chosen] > free)
            chosen++;
        if (chosen == LANES) {
            chosen = 0;
            for (int k = 1; k < LANES; k++)
                chosen = ends[k] < ends[chosen] ? k : chosen;
        } else if (chosen == lanes) {
            ends[lanes] = end;
            used[lanes++] = 0;
        }
        ends[chosen] = fmax(ends[chosen], end);
        used[chosen]++;
        d->lane[i] = (uint8_t)chosen;
    }
    return lanes;
}

static void draw_track(drawing *d, qd_json_writer *w, const qd_sorted_event *events, int64_t count)
{
    int64_t used[LANES], at[LANES] = {0};
    int lanes = choose_lanes(d, events, count, used);
    for (int k = 1; k < lanes; k++)
        at[k] = at[k - 1] + used[k - 1];
    const qd_sorted_event *ordered = lanes > 1 ? d->space : events;
    for (int64_t i = 0; i < count && lanes > 1; i++)
        d->space[at[d->lane[i]]++] = events[i];
    for (int k = 0; k < lanes; k++) {
        int64_t first = d->c.count;
        draw_row(d, ordered, used[k]);
        ordered += used[k];
        qd_json_object_begin(w, NULL);
        qd_json_put_int(w, "rank", events->rank);
        qd_json_put_int(w, "stream", events->event->stream);
        qd_json_put_int(w, "lane", k);
        qd_json_put_int(w, "first", first);
        qd_json_put_int(w, "count", d->c.count - first);
        qd_json_end(w);
    }
}

static void put_tracks(drawing *d, qd_json_writer *w)
{
    const qd_sorted *s = d->sorted;
    qd_json_list_begin(w, "tracks");
    for (int64_t i = 0, end; i < s->count; i = end) {
        int32_t rank = s->events[i].rank, stream = s->events[i].event->stream;
        for (end = i; end < s->count && s->events[end].rank == rank && s->events[end].event->stream == stream;)
            end++;
        draw_track(d, w, s->events + i, end - i);
    }
    qd_json_end(w);
}

/* Columns in which all values are alike are left out: waits of 0, no micro-batch, the first step,
 * single events. */
static qd_status put_columns(qd_json_writer *w, const columns *c, bool steps)
{
    size_t n = (size_t)c->count;
    QD_TRY(qd_report_put_column(w, "begin", c->begin, n * sizeof *c->begin));
    QD_TRY(qd_report_put_column(w, "seconds", c->seconds, n * sizeof *c->seconds));
    if (c->waits)
        QD_TRY(qd_report_put_column(w, "waited", c->waited, n * sizeof *c->waited));
    QD_TRY(qd_report_put_column(w, "action", c->action, n * sizeof *c->action));
    if (c->batches)
        QD_TRY(qd_report_put_column(w, "microbatch", c->microbatch, n * sizeof *c->microbatch));
    if (steps)
        QD_TRY(qd_report_put_column(w, "step", c->step, n * sizeof *c->step));
    if (c->merges) {
        QD_TRY(qd_report_put_column(w, "merged", c->merged, n * sizeof *c->merged));
        QD_TRY(qd_report_put_column(w, "share", c->share, n * sizeof *c->share));
    }
    return QD_OK;
}

/* What is too short to be seen, from the width of the drawing. */
static void set_detail(drawing *d)
{
    const qd_report_timeline *t = d->sorted->timeline;
    double end = 0.0;
    for (int64_t i = 0; i < d->sorted->step_count; i++)
        end = fmax(end, d->sorted->steps[i].end);
    if (t->pixels <= 0)
        return;
    d->outside = MERGED_PIXELS * end / t->pixels;
    d->from = t->window_end > t->window_begin ? t->window_begin : 0.0;
    d->to = t->window_end > t->window_begin ? t->window_end : end;
    d->inside = fmin(d->outside, MERGED_PIXELS * (d->to - d->from) / t->pixels);
}

static void put_detail(const drawing *d, qd_json_writer *w)
{
    qd_json_object_begin(w, "detail");
    qd_json_put_double(w, "from", d->from);
    qd_json_put_double(w, "to", d->to);
    qd_json_put_double(w, "inside", d->inside);
    qd_json_put_double(w, "outside", d->outside);
    qd_json_end(w);
}

qd_status qd_report_put_events(qd_json_writer *w, const qd_sorted *s)
{
    drawing d = {.sorted = s};
    qd_status status = create_columns(&d.c, s->count);
    d.space = malloc(((size_t)s->count + 1) * sizeof *d.space);
    d.lane = malloc((size_t)s->count + 1);
    if (status == QD_OK && (!d.space || !d.lane))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for %lld events", (long long)s->count);
    if (status == QD_OK) {
        set_detail(&d);
        put_tracks(&d, w);
        qd_json_put_int(w, "events", s->count);
        if (d.c.merges)
            put_detail(&d, w);
        status = put_columns(w, &d.c, s->step_count > 1);
    }
    free(d.c.space);
    free(d.space);
    free(d.lane);
    return status;
}
