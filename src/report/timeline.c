/* A timeline as the page reads it: its events in order and a table of distinct actions. detail.c
 * writes the events, shares.c the sums over them. */
#include "base/intern.h"
#include "report/report_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct rank_index {
    int32_t rank, index;
} rank_index;

static int by_rank(const void *a, const void *b)
{
    int32_t x = ((const rank_index *)a)->rank, y = ((const rank_index *)b)->rank;
    return (x > y) - (x < y);
}

/* Of one rank and stream. */
static int by_begin(const void *a, const void *b)
{
    const qd_sorted_event *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->event > y->event) - (x->event < y->event);
}

static qd_status check_event(const qd_report_timeline *t, const qd_report_event *e)
{
    const char *name = t->name ? t->name : "timeline";
    if (!e->name || !e->kind)
        return QD_FAIL(QD_USAGE, "%s: an event of rank %d has no name or no kind", name, e->rank);
    if (e->stream < 0 || e->stream >= t->stream_count)
        return QD_FAIL(QD_USAGE, "%s: '%s' of rank %d is on stream %d; there are %d", name, e->name, e->rank, e->stream, t->stream_count);
    if (!isfinite(e->begin) || !isfinite(e->end) || e->end < e->begin || !isfinite(e->waited) || e->waited < 0.0)
        return QD_FAIL(QD_USAGE, "%s: '%s' of rank %d begins at %g s and ends at %g s", name, e->name, e->rank, e->begin, e->end);
    return QD_OK;
}

/* A timeline while its events are read, once and in the order in which they are given. */
typedef struct reading {
    qd_sorted *s;
    rank_index *ranks;       /* by rank */
    const rank_index *found; /* of the previous event */
    int64_t *per_track;      /* events by rank and stream */
    qd_intern *steps;        /* numbers */
    int64_t step_capacity;
    int32_t step; /* of the previous event, -1: none */
    /* Actions by the addresses of their texts, which is quick, and by the texts, because equal
     * texts may have several addresses. */
    qd_intern *addresses, *texts, *actions;
    int32_t *action_of, action_capacity; /* by number in `addresses` */
} reading;

static qd_status find_rank(reading *r, const qd_report_event *e)
{
    const qd_report_timeline *t = r->s->timeline;
    if (r->found && r->found->rank == e->rank)
        return QD_OK;
    const rank_index wanted = {.rank = e->rank};
    r->found = t->rank_count > 0 ? bsearch(&wanted, r->ranks, (size_t)t->rank_count, sizeof *r->ranks, by_rank) : NULL;
    return r->found ? QD_OK
                    : QD_FAIL(QD_USAGE, "%s: '%s' belongs to rank %d, which is not in the list of ranks", t->name ? t->name : "timeline",
                              e->name, e->rank);
}

/* First and last time of each step, over all ranks. */
static qd_status add_to_step(reading *r, const qd_report_event *e)
{
    qd_sorted *s = r->s;
    if (r->step < 0 || s->steps[r->step].step != e->step)
        QD_TRY(qd_intern_add(r->steps, &e->step, sizeof e->step, &r->step));
    if (r->step == s->step_count) {
        if (s->step_count == r->step_capacity) {
            int64_t capacity = r->step_capacity ? 2 * r->step_capacity : 16;
            struct qd_step_span *steps = realloc(s->steps, (size_t)capacity * sizeof *steps);
            if (!steps)
                return QD_FAIL(QD_NO_MEMORY, "no memory for %lld steps", (long long)capacity);
            s->steps = steps;
            r->step_capacity = capacity;
        }
        s->steps[s->step_count++] = (struct qd_step_span){.step = e->step, .begin = e->begin, .end = e->end};
    }
    struct qd_step_span *step = &s->steps[r->step];
    step->begin = e->begin < step->begin ? e->begin : step->begin;
    step->end = e->end > step->end ? e->end : step->end;
    return QD_OK;
}

/* Keys are compared bytewise: they are zeroed first. */
static qd_status find_action(reading *r, const qd_report_event *e, int32_t *number)
{
    int32_t known = qd_intern_count(r->addresses), at;
    qd_action_key key;
    memset(&key, 0, sizeof key);
    key.name = e->name;
    key.kind = e->kind;
    key.module = e->module;
    key.group = e->group;
    key.bytes = e->bytes;
    key.flops = e->flops;
    QD_TRY(qd_intern_add(r->addresses, &key, sizeof key, &at));
    if (at == known) {
        if (at == r->action_capacity) {
            int32_t capacity = r->action_capacity ? 2 * r->action_capacity : 256;
            int32_t *grown = realloc(r->action_of, (size_t)capacity * sizeof *grown);
            if (!grown)
                return QD_FAIL(QD_NO_MEMORY, "no memory for %d actions", capacity);
            r->action_of = grown;
            r->action_capacity = capacity;
        }
        QD_TRY(qd_intern_text(r->texts, e->name, &key.name));
        QD_TRY(qd_intern_text(r->texts, e->kind, &key.kind));
        QD_TRY(qd_intern_text(r->texts, e->module, &key.module));
        QD_TRY(qd_intern_text(r->texts, e->group, &key.group));
        QD_TRY(qd_intern_add(r->actions, &key, sizeof key, &r->action_of[at]));
    }
    *number = r->action_of[at];
    return QD_OK;
}

static qd_status read_events(reading *r)
{
    qd_sorted *s = r->s;
    const qd_report_timeline *t = s->timeline;
    s->origin = t->event_count > 0 ? t->events[0].begin : 0.0;
    for (int64_t i = 0; i < t->event_count; i++) {
        const qd_report_event *e = &t->events[i];
        qd_sorted_event *to = &s->events[i];
        QD_TRY(check_event(t, e));
        QD_TRY(find_rank(r, e));
        *to = (qd_sorted_event){.event = e, .begin = e->begin, .end = e->end, .waited = e->waited, .rank = r->found->index};
        QD_TRY(find_action(r, e, &to->action));
        QD_TRY(add_to_step(r, e));
        r->per_track[(size_t)to->rank * (size_t)t->stream_count + (size_t)e->stream + 2]++;
        s->origin = e->begin < s->origin ? e->begin : s->origin;
    }
    return QD_OK;
}

/* Puts events in the order of rank, stream and begin. Most come in the order of begin, so that
 * tracks rarely have to be sorted. per_track: how many events each has, from [2] on. */
static qd_status order_events(qd_sorted *s, int64_t *per_track)
{
    const qd_report_timeline *t = s->timeline;
    size_t tracks = (size_t)t->rank_count * (size_t)t->stream_count, n = (size_t)s->count;
    qd_sorted_event *placed = malloc((n + 1) * sizeof *placed);
    if (!placed)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld events", (long long)s->count);
    for (size_t k = 2; k <= tracks + 1; k++)
        per_track[k] += per_track[k - 1];
    for (size_t i = 0; i < n; i++)
        placed[per_track[(size_t)s->events[i].rank * (size_t)t->stream_count + (size_t)s->events[i].event->stream + 1]++] = s->events[i];
    for (size_t k = 0; k < tracks; k++) {
        int64_t begin = per_track[k], end = per_track[k + 1];
        bool sorted = true;
        for (int64_t i = begin + 1; i < end && sorted; i++)
            sorted = placed[i - 1].begin <= placed[i].begin;
        if (!sorted)
            qsort(placed + begin, (size_t)(end - begin), sizeof *placed, by_begin);
    }
    free(s->events);
    s->events = placed;
    return QD_OK;
}

static int by_step(const void *a, const void *b)
{
    int64_t x = ((const struct qd_step_span *)a)->step, y = ((const struct qd_step_span *)b)->step;
    return (x > y) - (x < y);
}

static void order_steps(qd_sorted *s)
{
    for (int64_t i = 0; i < s->step_count; i++) {
        s->steps[i].begin -= s->origin;
        s->steps[i].end -= s->origin;
    }
    if (s->step_count > 0)
        qsort(s->steps, (size_t)s->step_count, sizeof *s->steps, by_step);
}

static qd_status list_actions(qd_sorted *s, const qd_intern *actions)
{
    s->action_count = qd_intern_count(actions);
    s->actions = malloc(((size_t)s->action_count + 1) * sizeof *s->actions);
    if (!s->actions)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d actions", s->action_count);
    for (int32_t i = 0; i < s->action_count; i++)
        s->actions[i] = qd_intern_key(actions, i);
    return QD_OK;
}

static void free_sorted(qd_sorted *s)
{
    free(s->events);
    free(s->steps);
    free(s->actions);
}

static qd_status list_ranks(const qd_report_timeline *t, rank_index *ranks)
{
    for (int i = 0; i < t->rank_count; i++)
        ranks[i] = (rank_index){.rank = t->ranks[i].rank, .index = i};
    qsort(ranks, (size_t)t->rank_count, sizeof *ranks, by_rank);
    for (int i = 1; i < t->rank_count; i++)
        if (ranks[i].rank == ranks[i - 1].rank)
            return QD_FAIL(QD_USAGE, "%s: rank %d appears twice", t->name ? t->name : "timeline", ranks[i].rank);
    return QD_OK;
}

/* texts, actions: empty tables, which own what the result points to. */
static qd_status sort_timeline(const qd_report_timeline *t, qd_intern *texts, qd_intern *actions, qd_sorted *s)
{
    reading r = {.s = s, .texts = texts, .actions = actions, .step = -1};
    qd_status status = QD_OK;
    *s = (qd_sorted){.timeline = t, .count = t->event_count};
    for (int i = 0; i < t->rank_count; i++)
        s->weight += qd_rank_weight(&t->ranks[i]);
    s->world = t->world > 0 ? t->world : s->weight >= 1.0 ? (int64_t)s->weight : 1;
    s->events = malloc(((size_t)t->event_count + 1) * sizeof *s->events);
    r.ranks = malloc(((size_t)t->rank_count + 1) * sizeof *r.ranks);
    r.per_track = calloc((size_t)t->rank_count * (size_t)t->stream_count + 2, sizeof *r.per_track);
    if (!s->events || !r.ranks || !r.per_track)
        QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for %lld events", (long long)t->event_count));
    QD_TRY_DONE(qd_intern_create(&r.steps));
    QD_TRY_DONE(qd_intern_create(&r.addresses));
    QD_TRY_DONE(list_ranks(t, r.ranks));
    QD_TRY_DONE(read_events(&r));
    QD_TRY_DONE(order_events(s, r.per_track));
    order_steps(s);
    QD_TRY_DONE(list_actions(s, actions));
done:
    free(r.ranks);
    free(r.per_track);
    free(r.action_of);
    qd_intern_destroy(r.steps);
    qd_intern_destroy(r.addresses);
    if (status != QD_OK)
        free_sorted(s);
    return status;
}

static void put_actions(qd_json_writer *w, const qd_sorted *s)
{
    qd_json_list_begin(w, "actions");
    for (int32_t i = 0; i < s->action_count; i++) {
        const qd_action_key *a = s->actions[i];
        qd_json_object_begin(w, NULL);
        qd_json_put_string(w, "name", a->name);
        qd_json_put_string(w, "kind", a->kind);
        if (a->module)
            qd_json_put_string(w, "module", a->module);
        if (a->group)
            qd_json_put_string(w, "group", a->group);
        if (a->bytes > 0)
            qd_json_put_int(w, "bytes", a->bytes);
        if (a->flops > 0)
            qd_json_put_double(w, "flops", a->flops);
        qd_json_end(w);
    }
    qd_json_end(w);
}

static void put_ranks(qd_json_writer *w, const qd_report_timeline *t)
{
    qd_json_list_begin(w, "ranks");
    for (int i = 0; i < t->rank_count; i++) {
        const qd_report_rank *r = &t->ranks[i];
        qd_json_object_begin(w, NULL);
        qd_json_put_int(w, "rank", r->rank);
        qd_json_put_string(w, "label", r->label);
        qd_json_put_string(w, "place", r->place);
        qd_json_put_int(w, "stands_for", (int64_t)qd_rank_weight(r));
        qd_json_end(w);
    }
    qd_json_end(w);
    qd_json_list_begin(w, "streams");
    for (int i = 0; i < t->stream_count; i++)
        qd_json_put_string(w, NULL, t->streams[i]);
    qd_json_end(w);
}

static void put_steps(qd_json_writer *w, const qd_sorted *s)
{
    qd_json_list_begin(w, "steps");
    for (int64_t i = 0; i < s->step_count; i++) {
        qd_json_object_begin(w, NULL);
        qd_json_put_int(w, "step", s->steps[i].step);
        qd_json_put_double(w, "begin", s->steps[i].begin);
        qd_json_put_double(w, "end", s->steps[i].end);
        qd_json_end(w);
    }
    qd_json_end(w);
}

qd_status qd_report_put_timeline(qd_json_writer *w, const char *key, const qd_report_timeline *t)
{
    qd_sorted sorted = {0};
    qd_intern *texts = NULL, *actions = NULL;
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_intern_create(&texts));
    QD_TRY_DONE(qd_intern_create(&actions));
    QD_TRY_DONE(sort_timeline(t, texts, actions, &sorted));
    qd_json_object_begin(w, key);
    qd_json_put_string(w, "name", t->name ? t->name : key);
    qd_json_put_int(w, "world", sorted.world);
    qd_json_put_double(w, "weight", sorted.weight);
    put_ranks(w, t);
    put_steps(w, &sorted);
    put_actions(w, &sorted);
    status = qd_report_put_events(w, &sorted);
    if (status == QD_OK)
        status = qd_report_put_shares(w, &sorted);
    qd_json_end(w);
    free_sorted(&sorted);
done:
    qd_intern_destroy(texts);
    qd_intern_destroy(actions);
    return status;
}
