/* The events of a simulated step, and the timeline of a report made of them. Layouts of a thousand
 * ranks have a hundred thousand events, and the planner's page asks for them while a slider moves:
 * what repeats between events is computed once. */
#include "sim/simulate_impl.h"

#include "base/arena.h"
#include "base/intern.h"

#include <quadrille/report.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The exchanges of one key of actions: a run of `all`. */
typedef struct exchange_list {
    bool known;
    int first, count;
} exchange_list;

/* The exchanges inside the actions of one stage. */
typedef struct drawing {
    const qd_step *step;
    const qd_step_stage *stage;
    qd_span spans[QD_GROUP_LIMIT];
    exchange_list lists[QD_STEP_KEYS];
    qd_cost_exchange *all;
    int used, capacity;
} drawing;

static qd_status find_exchanges(drawing *d, const qd_action *a, const exchange_list **list)
{
    static const exchange_list none;
    int key = qd_step_key(d->stage->program, a);
    *list = &none;
    if (key < 0)
        return QD_OK;
    exchange_list *l = &d->lists[key];
    *list = l;
    if (l->known)
        return QD_OK;
    int most = d->used + qd_program_class(d->stage->program, a->module)->op_count;
    if (most > d->capacity) {
        qd_cost_exchange *all = realloc(d->all, 2 * (size_t)most * sizeof *all);
        if (!all)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the exchanges inside modules");
        d->all = all;
        d->capacity = 2 * most;
    }
    int count = qd_cost_exchanges(d->step->cluster, d->stage->program, d->spans, a, d->all + d->used);
    *l = (exchange_list){.known = true, .first = d->used, .count = count};
    d->used += count;
    return QD_OK;
}

/* An action and the exchanges inside it, stretched by the slowdown from concurrent work. */
static qd_status visit_item(drawing *d, int stage, int item, const qd_sim_times *t, qd_status (*each)(void *, const qd_sim_event *),
                            void *context)
{
    const exchange_list *list;
    int action = d->stage->action[item];
    double alone = d->stage->items[item].seconds, stretch = alone > 0.0 ? (t->end - t->begin) / alone : 1.0;
    qd_sim_event e = {.stage = stage, .action = action, .op = -1, .begin = t->begin, .end = t->end, .waited = t->end};
    QD_TRY(each(context, &e));
    QD_TRY(find_exchanges(d, &d->stage->program->actions[action], &list));
    for (int i = list->first; i < list->first + list->count; i++) {
        const qd_cost_exchange *x = &d->all[i];
        e.op = x->op;
        e.begin = t->begin + stretch * x->begin;
        e.end = t->begin + stretch * x->end;
        e.waited = t->begin + stretch * x->waited;
        QD_TRY(each(context, &e));
    }
    return QD_OK;
}

qd_status qd_simulation_events(const qd_simulation *s, qd_status (*each)(void *context, const qd_sim_event *event), void *context)
{
    drawing *d = calloc(1, sizeof *d);
    qd_status status = d ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for the events of a step");
    for (int i = 0; i < s->step.stage_count && status == QD_OK; i++) {
        const qd_step_stage *stage = &s->step.stages[i];
        const qd_sim_times *times = qd_sim_times_of(&s->step.result, i);
        d->step = &s->step;
        d->stage = stage;
        d->used = 0;
        memset(d->lists, 0, sizeof d->lists);
        qd_step_spans(&s->step, stage, d->spans);
        /* Memory that waits for the other stream before it is released is an item of the
         * simulation, but not an event. */
        for (int k = 0; k < stage->item_count && status == QD_OK; k++)
            if (qd_step_takes_time(&stage->program->actions[stage->action[k]]))
                status = visit_item(d, i, k, &times[k], each, context);
    }
    if (d)
        free(d->all);
    free(d);
    return status;
}

/* The timeline being filled. Names and groups are few: `names` numbers pairs of addresses, `groups`
 * the groups; the texts are in arrays by number. */
typedef struct filling {
    const qd_simulation *simulation;
    qd_arena *arena;
    qd_report_event *events; /* NULL: they are only counted */
    int64_t count;
    qd_intern *names, *groups;
    const char **name_texts, **group_texts;
    int32_t name_capacity, group_capacity;
} filling;

/* Space for one more text. */
static qd_status grow_texts(const char ***texts, int32_t *capacity, int32_t number)
{
    if (number < *capacity)
        return QD_OK;
    int32_t more = *capacity ? 2 * *capacity : 64;
    const char **grown = realloc(*texts, (size_t)more * sizeof *grown);
    if (!grown)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d names of events", more);
    *texts = grown;
    *capacity = more;
    return QD_OK;
}

static qd_status name_of(filling *f, const qd_trace_event *e, const char **text)
{
    const char *const key[2] = {e->what, e->of};
    int32_t known = qd_intern_count(f->names), number;
    QD_TRY(qd_intern_add(f->names, key, sizeof key, &number));
    if (number == known) {
        QD_TRY(grow_texts(&f->name_texts, &f->name_capacity, number));
        f->name_texts[number] = qd_arena_printf(f->arena, "%s%s%s", e->what, e->of[0] ? " " : "", e->of);
    }
    *text = f->name_texts[number];
    return *text ? QD_OK : QD_NO_MEMORY;
}

static qd_status group_of(filling *f, const qd_program *p, const qd_group *group, const char **text)
{
    int32_t known = qd_intern_count(f->groups), number;
    *text = NULL;
    if (!group)
        return QD_OK;
    QD_TRY(qd_intern_add(f->groups, group, sizeof *group, &number));
    if (number == known) {
        char name[48];
        QD_TRY(grow_texts(&f->group_texts, &f->group_capacity, number));
        qd_group_name(&p->ledger->mesh, *group, name, sizeof name);
        f->group_texts[number] = qd_arena_strdup(f->arena, name);
    }
    *text = f->group_texts[number];
    return *text ? QD_OK : QD_NO_MEMORY;
}

static qd_status count_event(void *context, const qd_sim_event *e)
{
    (void)e;
    ((filling *)context)->count++;
    return QD_OK;
}

static qd_status add_event(void *context, const qd_sim_event *e)
{
    filling *f = context;
    const qd_step_stage *stage = &f->simulation->step.stages[e->stage];
    qd_trace_event shown = qd_trace_describe(stage->program, e->action, e->op);
    qd_report_event *out = &f->events[f->count++];
    *out = (qd_report_event){.rank = stage->rank, .stream = shown.track, .kind = shown.what, .module = shown.module, .step = 1,
                             .microbatch = shown.microbatch, .bytes = shown.bytes, .flops = shown.flops, .begin = e->begin, .end = e->end};
    if (e->op >= 0)
        out->waited = qd_trace_waited(e->begin, e->end, e->waited);
    QD_TRY(name_of(f, &shown, &out->name));
    return group_of(f, stage->program, shown.group, &out->group);
}

static qd_status fill_ranks(const qd_simulation *s, qd_arena *arena, qd_report_timeline *t)
{
    qd_report_rank *ranks = QD_ARENA_NEW(arena, qd_report_rank, s->step.stage_count);
    if (!ranks)
        return QD_NO_MEMORY;
    for (int i = 0; i < s->step.stage_count; i++) {
        const qd_step_stage *stage = &s->step.stages[i];
        ranks[i] = (qd_report_rank){.rank = stage->rank, .label = qd_arena_printf(arena, "rank %d", stage->rank),
                                    .place = s->step.stage_count > 1 ? qd_arena_printf(arena, "pp %d", i) : "",
                                    .stands_for = s->config.world / s->step.stage_count};
        if (!ranks[i].label || !ranks[i].place)
            return QD_NO_MEMORY;
    }
    t->ranks = ranks;
    t->rank_count = s->step.stage_count;
    t->stream_count = qd_trace_tracks(s->step.stages[0].program, &t->streams);
    return QD_OK;
}

qd_status qd_simulation_timeline(const qd_simulation *s, qd_arena *arena, qd_report_timeline *t)
{
    filling f = {.simulation = s, .arena = arena};
    qd_status status = QD_OK;
    *t = qd_report_timeline_default();
    t->name = "simulated";
    QD_TRY_DONE(qd_intern_create(&f.names));
    QD_TRY_DONE(qd_intern_create(&f.groups));
    QD_TRY_DONE(fill_ranks(s, arena, t));
    QD_TRY_DONE(qd_simulation_events(s, count_event, &f));
    f.events = QD_ARENA_NEW(arena, qd_report_event, f.count);
    if (!f.events)
        QD_TRY_DONE(QD_NO_MEMORY);
    t->events = f.events;
    t->event_count = f.count;
    f.count = 0;
    QD_TRY_DONE(qd_simulation_events(s, add_event, &f));
done:
    qd_intern_destroy(f.names);
    qd_intern_destroy(f.groups);
    free(f.name_texts);
    free(f.group_texts);
    return status;
}
