/* The event engine: dependencies as edges, running activities in a heap by end time, rates that
 * change with what runs concurrently. */
#include "sim/engine.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A running activity, and when it ends at its present rate. */
typedef struct running {
    double end;
    int32_t leader;
} running;

/* Items are numbered across all participants. Dependencies, stream order and messages all become
 * edges to successors. What runs is an *activity*: a single item, or a meeting, identified by its
 * last arrival (the leader); its members form a list. */
typedef struct engine {
    const qd_sim_problem *problem;
    qd_sim_result *result;
    int64_t items;
    int32_t *owner;      /* participant of an item */
    int32_t *missing;    /* number of unfinished predecessors */
    int64_t *edge_first; /* (items + 1) */
    int32_t *edges;      /* successors */
    int32_t *sender;     /* sending item of a message, -1: none */
    int32_t *met, *expected, *last_met; /* of a meeting: arrivals so far, expected, the latest */
    int32_t *member;     /* the previous arrival at the same meeting, -1: none */
    int32_t *leader;     /* of a running item: the leader of its activity */
    double *remaining, *rate, *updated; /* of activities, at their leader */
    int32_t *active;     /* (count, QD_SIM_STREAMS): the running item, -1: none */
    int32_t (*link_load)[QD_SIM_LINKS + 1];
    double *load;        /* of a participant: sum over its running items */
    double cores;        /* demanded by all running items */
    running *heap;       /* activities by end time */
    int32_t *place;      /* position in the heap, -1: not in it */
    int heap_count;
    int64_t done;
    double now;
} engine;

static const qd_sim_item *item_of(const engine *e, int32_t item)
{
    int p = e->owner[item];
    return &e->problem->participants[p].items[item - e->result->first[p]];
}

static double end_of(const engine *e, int32_t item)
{
    return e->updated[item] + (e->remaining[item] > 0.0 ? e->remaining[item] / e->rate[item] : 0.0);
}

static bool earlier(running a, running b)
{
    return a.end < b.end || (a.end == b.end && a.leader < b.leader);
}

static void heap_put(engine *e, int at, running what)
{
    e->heap[at] = what;
    e->place[what.leader] = at;
}

/* Moves an activity from `at` to its position. */
static void heap_settle(engine *e, int at, running what)
{
    while (at > 0 && earlier(what, e->heap[(at - 1) / 2])) {
        heap_put(e, at, e->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        int child = 2 * at + 1;
        if (child + 1 < e->heap_count && earlier(e->heap[child + 1], e->heap[child]))
            child++;
        if (child >= e->heap_count || !earlier(e->heap[child], what))
            break;
        heap_put(e, at, e->heap[child]);
        at = child;
    }
    heap_put(e, at, what);
}

static int32_t heap_take(engine *e)
{
    int32_t first = e->heap[0].leader;
    running last = e->heap[--e->heap_count];
    e->place[first] = -1;
    if (e->heap_count > 0)
        heap_settle(e, 0, last);
    return first;
}

/* The share of its demanded cores that an item gets. */
static double core_share(const engine *e, const qd_sim_item *i)
{
    return i->cores > 0.0f && e->problem->cores > 0.0 && e->cores > e->problem->cores ? e->problem->cores / e->cores : 1.0;
}

static double item_rate(const engine *e, int32_t item)
{
    const qd_sim_item *i = item_of(e, item);
    int p = e->owner[item];
    if (i->link > 0)
        return core_share(e, i) / e->link_load[p][i->link];
    double left = 1.0 - e->load[p];
    return core_share(e, i) * (left < 0.05 ? 0.05 : left);
}

static void update_rate(engine *e, int32_t leader)
{
    double rate = INFINITY;
    for (int32_t m = leader; m >= 0; m = e->member[m])
        rate = fmin(rate, item_rate(e, m));
    if (rate == e->rate[leader])
        return;
    e->remaining[leader] = fmax(0.0, e->remaining[leader] - (e->now - e->updated[leader]) * e->rate[leader]);
    e->updated[leader] = e->now;
    e->rate[leader] = rate;
    heap_settle(e, e->place[leader], (running){end_of(e, leader), leader});
}

/* Updates the rates of a participant after its set of running items has changed. */
static void update_participant(engine *e, int p)
{
    for (int s = 0; s < QD_SIM_STREAMS; s++) {
        int32_t item = e->active[p * QD_SIM_STREAMS + s];
        if (item >= 0 && e->place[e->leader[item]] >= 0)
            update_rate(e, e->leader[item]);
    }
}

static bool disturbs(const qd_sim_item *i)
{
    return i->link > 0 || i->load > 0.0f;
}

/* An activity has begun or ended: updates what runs concurrently at its members, and on the shared
 * cores. */
static void update_others(engine *e, int32_t leader)
{
    bool shared = false;
    for (int32_t m = leader; m >= 0; m = e->member[m]) {
        shared = shared || (item_of(e, m)->cores > 0.0f && e->problem->cores > 0.0);
        if (disturbs(item_of(e, m)))
            update_participant(e, e->owner[m]);
    }
    for (int p = 0; shared && p < e->problem->count; p++)
        update_participant(e, p);
}

static void begin_activity(engine *e, int32_t leader)
{
    double seconds = 0.0;
    for (int32_t m = leader; m >= 0; m = e->member[m]) {
        const qd_sim_item *i = item_of(e, m);
        int p = e->owner[m];
        e->leader[m] = leader;
        e->active[p * QD_SIM_STREAMS + i->stream] = m;
        e->link_load[p][i->link]++;
        e->load[p] += i->load;
        e->cores += i->cores;
        e->result->times[m].begin = e->now;
        seconds = fmax(seconds, i->seconds);
    }
    e->remaining[leader] = seconds;
    e->updated[leader] = e->now;
    e->rate[leader] = 1.0;
    e->heap_count++;
    heap_settle(e, e->heap_count - 1, (running){end_of(e, leader), leader});
    update_rate(e, leader);
    update_others(e, leader);
}

static void item_ready(engine *e, int32_t item)
{
    const qd_sim_item *i = item_of(e, item);
    if (i->meets < 0) {
        begin_activity(e, item);
        return;
    }
    e->member[item] = e->last_met[i->meets];
    e->last_met[i->meets] = item;
    if (++e->met[i->meets] == e->expected[i->meets])
        begin_activity(e, item);
}

static void end_activity(engine *e, int32_t leader)
{
    for (int32_t m = leader; m >= 0; m = e->member[m]) {
        const qd_sim_item *i = item_of(e, m);
        int p = e->owner[m];
        e->active[p * QD_SIM_STREAMS + i->stream] = -1;
        e->link_load[p][i->link]--;
        e->load[p] -= i->load;
        e->cores -= i->cores;
        e->result->times[m].end = e->now;
        e->result->busy[p * QD_SIM_STREAMS + i->stream] += e->now - e->result->times[m].begin;
        e->done++;
    }
    update_others(e, leader);
    for (int32_t m = leader; m >= 0; m = e->member[m])
        for (int64_t k = e->edge_first[m]; k < e->edge_first[m + 1]; k++)
            if (--e->missing[e->edges[k]] == 0)
                item_ready(e, e->edges[k]);
}

static qd_status check_item(const qd_sim_problem *p, int who, int index)
{
    const qd_sim_item *i = &p->participants[who].items[index];
    bool good = i->seconds >= 0.0 && isfinite(i->seconds) && i->stream >= 0 && i->stream < QD_SIM_STREAMS && i->link >= 0 &&
                i->link <= QD_SIM_LINKS && i->load >= 0.0f && i->cores >= 0.0f && i->awaits < p->messages && i->sends < p->messages &&
                i->meets < p->meetings;
    for (int d = 0; d < i->dep_count && good; d++) {
        int32_t dep = p->participants[who].deps[i->dep_first + d];
        good = dep >= 0 && dep < p->participants[who].count;
    }
    return good ? QD_OK : QD_FAIL(QD_USAGE, "simulation: item %d of participant %d has a number out of range", index, who);
}

/* Counts the successors of each item at [item + 2]. After the prefix sum, [item + 1] is where its
 * list begins; it advances to the end while the lists are written. */
static void visit_edges(engine *e, bool write)
{
    const qd_sim_problem *problem = e->problem;
    for (int p = 0; p < problem->count; p++) {
        const qd_sim_participant *who = &problem->participants[p];
        int64_t base = e->result->first[p];
        int64_t before[QD_SIM_STREAMS];
        for (int s = 0; s < QD_SIM_STREAMS; s++)
            before[s] = -1;
        for (int k = 0; k < who->count; k++) {
            const qd_sim_item *i = &who->items[k];
            for (int d = -2; d < i->dep_count; d++) {
                int64_t from = d == -2 ? before[i->stream]
                               : d == -1 ? (i->awaits >= 0 ? e->sender[i->awaits] : -1)
                                         : base + who->deps[i->dep_first + d];
                if (from < 0)
                    continue;
                if (write) {
                    e->edges[e->edge_first[from + 1]++] = (int32_t)(base + k);
                    e->missing[base + k]++;
                } else {
                    e->edge_first[from + 2]++;
                }
            }
            before[i->stream] = base + k;
        }
    }
}

static qd_status check_and_number(engine *e)
{
    const qd_sim_problem *problem = e->problem;
    for (int m = 0; m < problem->messages; m++)
        e->sender[m] = -1;
    for (int p = 0; p < problem->count; p++)
        for (int k = 0; k < problem->participants[p].count; k++) {
            QD_TRY(check_item(problem, p, k));
            const qd_sim_item *i = &problem->participants[p].items[k];
            int64_t number = e->result->first[p] + k;
            e->owner[number] = p;
            if (i->sends >= 0 && e->sender[i->sends] >= 0)
                return QD_FAIL(QD_USAGE, "simulation: message %d is sent twice", i->sends);
            if (i->sends >= 0)
                e->sender[i->sends] = (int32_t)number;
            if (i->meets >= 0)
                e->expected[i->meets]++;
        }
    for (int p = 0; p < problem->count; p++)
        for (int k = 0; k < problem->participants[p].count; k++) {
            const qd_sim_item *i = &problem->participants[p].items[k];
            if (i->awaits >= 0 && e->sender[i->awaits] < 0)
                return QD_FAIL(QD_MISMATCH, "simulation: item %d of participant %d waits for message %d, which no item sends", k, p,
                               i->awaits);
        }
    return QD_OK;
}

static qd_status set_up(engine *e)
{
    const qd_sim_problem *problem = e->problem;
    qd_sim_result *r = e->result;
    size_t n = (size_t)e->items, count = (size_t)problem->count, cells = count * QD_SIM_STREAMS;
    e->owner = calloc(n + 1, sizeof *e->owner);
    e->missing = calloc(n + 1, sizeof *e->missing);
    e->edge_first = calloc(n + 2, sizeof *e->edge_first);
    e->sender = calloc((size_t)problem->messages + 1, sizeof *e->sender);
    e->met = calloc((size_t)problem->meetings + 1, sizeof *e->met);
    e->expected = calloc((size_t)problem->meetings + 1, sizeof *e->expected);
    e->last_met = calloc((size_t)problem->meetings + 1, sizeof *e->last_met);
    e->member = malloc((n + 1) * sizeof *e->member);
    e->leader = malloc((n + 1) * sizeof *e->leader);
    e->remaining = calloc(n + 1, sizeof *e->remaining);
    e->rate = calloc(n + 1, sizeof *e->rate);
    e->updated = calloc(n + 1, sizeof *e->updated);
    e->active = malloc((cells + 1) * sizeof *e->active);
    e->link_load = calloc(count + 1, sizeof *e->link_load);
    e->load = calloc(count + 1, sizeof *e->load);
    e->heap = malloc((cells + 1) * sizeof *e->heap);
    e->place = malloc((n + 1) * sizeof *e->place);
    r->times = calloc(n + 1, sizeof *r->times);
    r->busy = calloc(cells + 1, sizeof *r->busy);
    if (!e->owner || !e->missing || !e->edge_first || !e->sender || !e->met || !e->expected || !e->last_met || !e->member || !e->leader ||
        !e->remaining || !e->rate || !e->updated || !e->active || !e->link_load || !e->load || !e->heap || !e->place || !r->times ||
        !r->busy)
        return QD_FAIL(QD_NO_MEMORY, "no memory to simulate %lld items", (long long)e->items);
    memset(e->member, 0xff, (n + 1) * sizeof *e->member);
    memset(e->leader, 0xff, (n + 1) * sizeof *e->leader);
    memset(e->place, 0xff, (n + 1) * sizeof *e->place);
    memset(e->active, 0xff, (cells + 1) * sizeof *e->active);
    memset(e->last_met, 0xff, ((size_t)problem->meetings + 1) * sizeof *e->last_met);
    QD_TRY(check_and_number(e));
    visit_edges(e, false);
    for (size_t i = 2; i <= n + 1; i++)
        e->edge_first[i] += e->edge_first[i - 1];
    e->edges = malloc(((size_t)e->edge_first[n + 1] + 1) * sizeof *e->edges);
    if (!e->edges)
        return QD_FAIL(QD_NO_MEMORY, "no memory to simulate %lld items", (long long)e->items);
    visit_edges(e, true);
    return QD_OK;
}

static void name_item(const engine *e, int32_t item, char *text, size_t size)
{
    int p = e->owner[item], k = (int)(item - e->result->first[p]);
    char words[160] = "";
    if (e->problem->describe)
        e->problem->describe(e->problem->context, p, k, words, sizeof words);
    snprintf(text, size, "item %d of participant %d%s%s%s", k, p, words[0] ? " (" : "", words, words[0] ? ")" : "");
}

static bool ended(const engine *e, int64_t item)
{
    return e->result->times[item].end >= 0.0;
}

/* One obstacle that keeps a waiting item from starting, with the reason; -1: none. */
static int64_t obstacle(const engine *e, int32_t item, const char **why)
{
    const qd_sim_item *i = item_of(e, item);
    int p = e->owner[item];
    const qd_sim_participant *who = &e->problem->participants[p];
    int64_t base = e->result->first[p];
    for (int64_t k = item - 1; k >= base; k--)
        if (who->items[k - base].stream == i->stream) {
            *why = "comes after";
            if (!ended(e, k))
                return k;
            break;
        }
    for (int d = 0; d < i->dep_count; d++) {
        *why = "depends on";
        if (!ended(e, base + who->deps[i->dep_first + d]))
            return base + who->deps[i->dep_first + d];
    }
    *why = "waits for the message of";
    if (i->awaits >= 0 && !ended(e, e->sender[i->awaits]))
        return e->sender[i->awaits];
    *why = "meets";
    for (int64_t k = 0; i->meets >= 0 && k < e->items; k++)
        if (item_of(e, (int32_t)k)->meets == i->meets && e->missing[k] > 0 && !ended(e, k))
            return k;
    return -1;
}

/* Follows obstacles from the first item that has not run until one repeats. */
static qd_status standstill(engine *e)
{
    char text[900] = "", name[224];
    int64_t at = 0;
    while (ended(e, at))
        at++;
    const char *why = "";
    enum { SEEN = -2 }; /* stored in `leader`, which an item that has not started does not use */
    while (e->leader[at] != SEEN) {
        e->leader[at] = SEEN;
        at = obstacle(e, (int32_t)at, &why);
    }
    int64_t start = at;
    size_t used = 0;
    name_item(e, (int32_t)at, name, sizeof name);
    used += (size_t)snprintf(text, sizeof text, "%s", name);
    for (int moves = 0; moves < 6 && used < sizeof text; moves++) {
        at = obstacle(e, (int32_t)at, &why);
        name_item(e, (int32_t)at, name, sizeof name);
        used += (size_t)snprintf(text + used, sizeof text - used, " %s %s%s", why, name, at == start ? "" : moves == 5 ? " …" : ", which");
        if (at == start)
            break;
    }
    return QD_FAIL(QD_MISMATCH, "simulation: deadlock after %.6g s with %lld of %lld items done: %s", e->now, (long long)e->done,
                   (long long)e->items, text);
}

static void tear_down(engine *e)
{
    void *all[] = {e->owner, e->missing, e->edge_first, e->edges, e->sender, e->met, e->expected, e->last_met, e->member, e->leader,
                   e->remaining, e->rate, e->updated, e->active, e->link_load, e->load, e->heap, e->place};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static qd_status run(engine *e)
{
    QD_TRY(set_up(e));
    for (int64_t i = 0; i < e->items; i++)
        e->result->times[i] = (qd_sim_times){-1.0, -1.0};
    for (int64_t i = 0; i < e->items; i++)
        if (e->missing[i] == 0)
            item_ready(e, (int32_t)i);
    while (e->heap_count > 0) {
        e->now = fmax(e->now, e->heap[0].end);
        end_activity(e, heap_take(e));
    }
    e->result->seconds = e->now;
    return e->done == e->items ? QD_OK : standstill(e);
}

qd_status qd_sim_run(const qd_sim_problem *problem, qd_sim_result *result)
{
    memset(result, 0, sizeof *result);
    engine e = {.problem = problem, .result = result};
    result->first = calloc((size_t)problem->count + 1, sizeof *result->first);
    if (!result->first)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d participants", problem->count);
    for (int p = 0; p < problem->count; p++)
        result->first[p + 1] = result->first[p] + problem->participants[p].count;
    e.items = result->items = result->first[problem->count];
    if (e.items >= INT32_MAX)
        return QD_FAIL(QD_USAGE, "simulation: %lld items are too many", (long long)e.items);
    qd_status status = run(&e);
    tear_down(&e);
    return status;
}

void qd_sim_result_free(qd_sim_result *result)
{
    free(result->times);
    free(result->first);
    free(result->busy);
    memset(result, 0, sizeof *result);
}
