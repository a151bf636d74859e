/* A timeline as the page reads it: a table of distinct actions, and columns with the times of each
 * event. */
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
    const qd_report_event *x = ((const qd_sorted_event *)a)->event, *y = ((const qd_sorted_event *)b)->event;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x > y) - (x < y);
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

static qd_status place_events(const qd_report_timeline *t, const rank_index *ranks, qd_sorted *s)
{
    s->origin = t->event_count > 0 ? t->events[0].begin : 0.0;
    for (int64_t i = 0; i < t->event_count; i++) {
        const qd_report_event *e = &t->events[i];
        QD_TRY(check_event(t, e));
        const rank_index *found =
            t->rank_count > 0 ? bsearch(&(rank_index){.rank = e->rank}, ranks, (size_t)t->rank_count, sizeof *ranks, by_rank) : NULL;
        if (!found)
            return QD_FAIL(QD_USAGE, "%s: '%s' belongs to rank %d, which is not in the list of ranks",
                           t->name ? t->name : "timeline", e->name, e->rank);
        s->events[i] = (qd_sorted_event){.event = e, .rank = found->index};
        s->origin = e->begin < s->origin ? e->begin : s->origin;
    }
    return QD_OK;
}

/* Puts events in the order of rank, stream and begin. Most come in the order of begin, so that
 * tracks rarely have to be sorted. */
static qd_status order_events(const qd_report_timeline *t, qd_sorted *s)
{
    size_t tracks = (size_t)t->rank_count * (size_t)t->stream_count, n = (size_t)s->count;
    int64_t *first = calloc(tracks + 2, sizeof *first);
    qd_sorted_event *placed = malloc((n + 1) * sizeof *placed);
    if (!first || !placed) {
        free(first);
        free(placed);
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld events", (long long)s->count);
    }
    for (size_t i = 0; i < n; i++)
        first[s->events[i].rank * t->stream_count + s->events[i].event->stream + 2]++;
    for (size_t k = 2; k <= tracks + 1; k++)
        first[k] += first[k - 1];
    for (size_t i = 0; i < n; i++)
        placed[first[s->events[i].rank * t->stream_count + s->events[i].event->stream + 1]++] = s->events[i];
    for (size_t k = 0; k < tracks; k++) {
        int64_t begin = first[k], end = first[k + 1];
        bool sorted = true;
        for (int64_t i = begin + 1; i < end && sorted; i++)
            sorted = by_begin(&placed[i - 1], &placed[i]) <= 0;
        if (!sorted)
            qsort(placed + begin, (size_t)(end - begin), sizeof *placed, by_begin);
    }
    free(first);
    free(s->events);
    s->events = placed;
    return QD_OK;
}

static int by_step(const void *a, const void *b)
{
    int64_t x = ((const struct qd_step_span *)a)->step, y = ((const struct qd_step_span *)b)->step;
    return (x > y) - (x < y);
}

/* First and last time of each step, over all ranks. */
static qd_status find_steps(qd_sorted *s)
{
    qd_intern *numbers = NULL;
    int64_t capacity = 0;
    qd_status status = QD_OK;
    QD_TRY(qd_intern_create(&numbers));
    int32_t at = -1;
    for (int64_t i = 0; i < s->count; i++) {
        const qd_report_event *e = s->events[i].event;
        if (at < 0 || s->steps[at].step != e->step)
            QD_TRY_DONE(qd_intern_add(numbers, &e->step, sizeof e->step, &at));
        double begin = e->begin - s->origin, end = e->end - s->origin;
        if (at == s->step_count) {
            if (s->step_count == capacity) {
                capacity = capacity ? capacity * 2 : 16;
                struct qd_step_span *steps = realloc(s->steps, (size_t)capacity * sizeof *steps);
                if (!steps)
                    QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for %lld steps", (long long)capacity));
                s->steps = steps;
            }
            s->steps[s->step_count++] = (struct qd_step_span){.step = e->step, .begin = begin, .end = end};
        }
        struct qd_step_span *step = &s->steps[at];
        step->begin = begin < step->begin ? begin : step->begin;
        step->end = end > step->end ? end : step->end;
    }
    if (s->step_count > 0)
        qsort(s->steps, (size_t)s->step_count, sizeof *s->steps, by_step);
done:
    qd_intern_destroy(numbers);
    return status;
}

static void free_sorted(qd_sorted *s)
{
    free(s->events);
    free(s->steps);
}

static qd_status sort_timeline(const qd_report_timeline *t, qd_sorted *s)
{
    *s = (qd_sorted){.timeline = t, .count = t->event_count};
    for (int i = 0; i < t->rank_count; i++)
        s->weight += qd_rank_weight(&t->ranks[i]);
    s->world = t->world > 0 ? t->world : s->weight >= 1.0 ? (int64_t)s->weight : 1;
    rank_index *ranks = malloc(((size_t)t->rank_count + 1) * sizeof *ranks);
    s->events = malloc(((size_t)t->event_count + 1) * sizeof *s->events);
    qd_status status = ranks && s->events ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for %lld events", (long long)t->event_count);
    if (status == QD_OK) {
        for (int i = 0; i < t->rank_count; i++)
            ranks[i] = (rank_index){.rank = t->ranks[i].rank, .index = i};
        qsort(ranks, (size_t)t->rank_count, sizeof *ranks, by_rank);
        for (int i = 1; i < t->rank_count && status == QD_OK; i++)
            if (ranks[i].rank == ranks[i - 1].rank)
                status = QD_FAIL(QD_USAGE, "%s: rank %d appears twice", t->name ? t->name : "timeline", ranks[i].rank);
    }
    if (status == QD_OK)
        status = place_events(t, ranks, s);
    if (status == QD_OK) {
        status = order_events(t, s);
    }
    if (status == QD_OK) {
        status = find_steps(s);
    }
    free(ranks);
    if (status != QD_OK)
        free_sorted(s);
    return status;
}

/* What events of one action have in common; compared bytewise, so it is zeroed first. */
typedef struct action_key {
    const char *name, *kind, *module, *group;
    int64_t bytes;
    double flops;
} action_key;

/* Two tables: by the addresses of texts, which is quick, and by the texts, because equal texts may
 * have several addresses. `actions` has the keys of the second. */
static qd_status number_actions(qd_sorted *s, qd_intern *texts, qd_intern *actions)
{
    qd_intern *addresses = NULL;
    int32_t *numbers = NULL, capacity = 0; /* by number in `addresses` */
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_intern_create(&addresses));
    for (int64_t i = 0; i < s->count; i++) {
        const qd_report_event *e = s->events[i].event;
        int32_t known = qd_intern_count(addresses), at;
        action_key key;
        memset(&key, 0, sizeof key);
        key.name = e->name;
        key.kind = e->kind;
        key.module = e->module;
        key.group = e->group;
        key.bytes = e->bytes;
        key.flops = e->flops;
        QD_TRY_DONE(qd_intern_add(addresses, &key, sizeof key, &at));
        if (at == known) {
            if (at == capacity) {
                capacity = capacity ? 2 * capacity : 256;
                int32_t *grown = realloc(numbers, (size_t)capacity * sizeof *grown);
                if (!grown)
                    QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for %d actions", capacity));
                numbers = grown;
            }
            QD_TRY_DONE(qd_intern_text(texts, e->name, &key.name));
            QD_TRY_DONE(qd_intern_text(texts, e->kind, &key.kind));
            QD_TRY_DONE(qd_intern_text(texts, e->module, &key.module));
            QD_TRY_DONE(qd_intern_text(texts, e->group, &key.group));
            QD_TRY_DONE(qd_intern_add(actions, &key, sizeof key, &numbers[at]));
        }
        s->events[i].action = numbers[at];
    }
    s->action_count = qd_intern_count(actions);
done:
    qd_intern_destroy(addresses);
    free(numbers);
    return status;
}

static void put_actions(qd_json_writer *w, const qd_intern *actions)
{
    qd_json_list_begin(w, "actions");
    for (int32_t i = 0; i < qd_intern_count(actions); i++) {
        const action_key *a = qd_intern_key(actions, i);
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

/* One value per event, in track order. Columns in which all values are alike are left out: waits of
 * 0, no micro-batch, the first step. */
static qd_status put_columns(qd_json_writer *w, const qd_sorted *s)
{
    size_t n = (size_t)s->count;
    char *space = malloc((n + 1) * (sizeof(double) + 2 * sizeof(float) + 3 * sizeof(uint32_t)));
    if (!space)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %zu events", n);
    double *begin = (double *)(void *)space;
    float *seconds = (float *)(begin + n), *waited = seconds + n;
    uint32_t *action = (uint32_t *)(void *)(waited + n), *step = action + n;
    int32_t *microbatch = (int32_t *)(step + n);
    bool waits = false, batches = false;
    qd_status status = QD_OK;
    for (size_t i = 0; i < n; i++) {
        const qd_report_event *e = s->events[i].event;
        begin[i] = e->begin - s->origin;
        seconds[i] = (float)(e->end - e->begin);
        waited[i] = (float)e->waited;
        waits = waits || e->waited > 0.0;
        action[i] = (uint32_t)s->events[i].action;
        step[i] = step_index(s, e->step);
        microbatch[i] = e->microbatch < 0 ? -1 : e->microbatch;
        batches = batches || e->microbatch >= 0;
    }
    QD_TRY_DONE(qd_report_put_column(w, "begin", begin, n * sizeof *begin));
    QD_TRY_DONE(qd_report_put_column(w, "seconds", seconds, n * sizeof *seconds));
    if (waits)
        QD_TRY_DONE(qd_report_put_column(w, "waited", waited, n * sizeof *waited));
    QD_TRY_DONE(qd_report_put_column(w, "action", action, n * sizeof *action));
    if (batches)
        QD_TRY_DONE(qd_report_put_column(w, "microbatch", microbatch, n * sizeof *microbatch));
    if (s->step_count > 1)
        QD_TRY_DONE(qd_report_put_column(w, "step", step, n * sizeof *step));
done:
    free(space);
    return status;
}

static void put_tracks(qd_json_writer *w, const qd_sorted *s)
{
    qd_json_list_begin(w, "tracks");
    for (int64_t i = 0, end; i < s->count; i = end) {
        int32_t rank = s->events[i].rank, stream = s->events[i].event->stream;
        for (end = i; end < s->count && s->events[end].rank == rank && s->events[end].event->stream == stream;)
            end++;
        qd_json_object_begin(w, NULL);
        qd_json_put_int(w, "rank", rank);
        qd_json_put_int(w, "stream", stream);
        qd_json_put_int(w, "first", i);
        qd_json_put_int(w, "count", end - i);
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
    qd_sorted sorted;
    qd_intern *texts = NULL, *actions = NULL;
    QD_TRY(sort_timeline(t, &sorted));
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_intern_create(&texts));
    QD_TRY_DONE(qd_intern_create(&actions));
    QD_TRY_DONE(number_actions(&sorted, texts, actions));
    qd_json_object_begin(w, key);
    qd_json_put_string(w, "name", t->name ? t->name : key);
    qd_json_put_int(w, "world", sorted.world);
    qd_json_put_double(w, "weight", sorted.weight);
    put_ranks(w, t);
    put_steps(w, &sorted);
    put_actions(w, actions);
    put_tracks(w, &sorted);
    QD_TRY_DONE(put_columns(w, &sorted));
    QD_TRY_DONE(qd_report_put_shares(w, &sorted));
    qd_json_end(w);
done:
    qd_intern_destroy(texts);
    qd_intern_destroy(actions);
    free_sorted(&sorted);
    return status;
}
