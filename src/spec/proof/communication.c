/* Proves that the communication of all ranks matches and cannot deadlock, or finds a
 * counterexample.
 *
 * The model. A rank executes its list. An operation on the communication stream, or an asynchronous
 * op of a module, is *posted*; others are posted and waited for. Operations of one queue (the
 * collectives of a group; the messages to, or from, one peer) run in the order in which they are
 * posted. The n-th operation of a group's queue matches the n-th of every other member, the n-th
 * send to a peer its n-th receive. Operations complete when all matching ones are at the heads of
 * their queues, so a send blocks until it is received. Nothing else completes an operation, and
 * completing one never prevents another from completing. Therefore the order in which ranks are
 * examined does not matter: every execution of the step completes the same operations, and
 * following one of them proves it for all.
 *
 * Folding. If all ranks that differ along an axis share their program, shifting every rank along
 * that axis does not change the step. Nor does it change the unique outcome, so such ranks are
 * always at the same position. One of them represents all, and group members that it represents are
 * at an operation whenever it is. So 16,384 ranks are checked as a few: one for each program. */
#include "spec/layout/experts.h"
#include "spec/program/program.h"

#include <stdlib.h>
#include <string.h>

/* A position in a program where it communicates: an action, or an op of a module action (op -1: the
 * action itself). */
typedef struct place {
    int32_t action, op;
    int32_t queue, number; /* index within its queue */
} place;

/* A step of a rank: posts operation `index`, or waits for it. */
typedef struct event {
    bool waits;
    int32_t index;
} event;

/* The communication of a program. Queues: one per group, then one per peer for sends, one per peer
 * for receives. */
typedef struct flat {
    const qd_program *program;
    place *places;
    int count, capacity;
    event *events;
    int event_count, event_capacity;
    int *begin; /* per queue: its operations are of_queue[begin[q]] .. */
    int *of_queue;
    int queues;
} flat;

typedef struct follower {
    int rank;
    const flat *flat;
    int at;                 /* next event */
    int *posted, *ended;    /* per queue */
    int *members[QD_GROUP_LIMIT]; /* followers that represent the members of its group, itself included; terminated by -1 */
    bool borrowed[QD_GROUP_LIMIT]; /* the list belongs to the first member of the group */
    bool known[QD_GROUP_LIMIT];    /* the programs of all members have the group */
} follower;

typedef struct checker {
    const qd_mesh *mesh;
    flat *flats;
    int flat_count;
    follower *followers;
    int count;
    int *stands; /* per rank: its follower; -1: not assigned yet */
    int *listed, lists; /* per follower: the last member list that contains it; number of lists */
    int ranks;   /* pipeline ranks */
    int *todo;   /* followers that may be able to advance */
    int todo_count;
    bool *queued;
} checker;

static const qd_op *op_at(const qd_program *p, const place *at)
{
    return &qd_program_class(p, p->actions[at->action].module)->ops[at->op];
}

static bool grow(void **array, int count, int *capacity, size_t size)
{
    if (count < *capacity)
        return true;
    int wanted = *capacity ? 2 * *capacity : 256;
    void *larger = realloc(*array, (size_t)wanted * size);
    if (!larger)
        return false;
    *array = larger;
    *capacity = wanted;
    return true;
}

static qd_status no_memory(void)
{
    return QD_FAIL(QD_NO_MEMORY, "no memory to check the programs");
}

static qd_status add_event(flat *f, bool waits, int index)
{
    if (!grow((void **)&f->events, f->event_count, &f->event_capacity, sizeof *f->events))
        return no_memory();
    f->events[f->event_count++] = (event){waits, index};
    return QD_OK;
}

static qd_status add_place(flat *f, int action, int op, int queue)
{
    if (queue < 0 || queue >= f->queues)
        return QD_FAIL(QD_MISMATCH, "rank %d, action %d: communicates in a group or with a rank that does not exist", f->program->rank,
                       action);
    if (!grow((void **)&f->places, f->count, &f->capacity, sizeof *f->places))
        return no_memory();
    f->places[f->count] = (place){action, op, queue, f->begin[queue + 1]++};
    return add_event(f, false, f->count++);
}

static int action_queue(const flat *f, const qd_action *a, int ranks)
{
    int groups = f->program->group_count;
    if (!qd_action_transfers(a))
        return a->group < groups ? a->group : -1;
    if (a->peer <= 0 || a->peer >= ranks)
        return -1;
    return groups + (a->kind == QD_ACTION_SEND ? 0 : ranks) + a->peer;
}

/* Adds the ops of a module action; asynchronous ones are waited for where the list says. */
static qd_status add_ops(flat *f, int action)
{
    const qd_program *p = f->program;
    const qd_action *a = &p->actions[action];
    const qd_module_class *c = qd_program_class(p, a->module);
    unsigned phases = qd_action_phases(a);
    int first = f->count, waited = first;
    for (int i = 0; i <= c->op_count; i++) {
        for (; waited < f->count; waited++) { /* they complete in the order in which they start */
            const qd_op *op = op_at(p, &f->places[waited]);
            if (op->exchange.async && i < c->op_count && op->exchange.until > i)
                break;
            QD_TRY(add_event(f, true, waited));
        }
        if (i < c->op_count && qd_op_runs(&c->ops[i], phases) && qd_op_communicates(&c->ops[i])) {
            QD_TRY(add_place(f, action, i, c->ops[i].exchange.index));
            if (!c->ops[i].exchange.async)
                QD_TRY(add_event(f, true, f->count - 1));
        }
    }
    return QD_OK;
}

static qd_status flatten(const qd_program *p, int ranks, flat *f)
{
    *f = (flat){.program = p, .queues = p->group_count + 2 * ranks};
    f->begin = calloc((size_t)f->queues + 2, sizeof *f->begin);
    int *place_of = malloc(((size_t)p->action_count + 1) * sizeof *place_of);
    qd_status status = f->begin && place_of ? QD_OK : no_memory();
    for (int i = 0; i < p->action_count && status == QD_OK; i++) {
        const qd_action *a = &p->actions[i];
        place_of[i] = -1;
        for (int d = 0; d < a->dep_count && status == QD_OK; d++) {
            int on = p->deps[a->dep_first + d];
            if (on >= i)
                status = QD_FAIL(QD_MISMATCH, "rank %d, action %d waits for action %d, which comes later", p->rank, i, on);
            else if (place_of[on] >= 0)
                status = add_event(f, true, place_of[on]);
        }
        if (status == QD_OK && qd_action_communicates(a)) {
            status = add_place(f, i, -1, action_queue(f, a, ranks));
            place_of[i] = f->count - 1;
            if (status == QD_OK && a->stream != QD_STREAM_COMM)
                status = add_event(f, true, f->count - 1);
        } else if (status == QD_OK && qd_action_phases(a) != 0) {
            status = add_ops(f, i);
        }
    }
    for (int i = 0; i < f->count && status == QD_OK; i++) /* the step ends when all operations are complete */
        status = add_event(f, true, i);
    free(place_of);
    f->of_queue = malloc(((size_t)f->count + 1) * sizeof *f->of_queue);
    if (status != QD_OK || !f->of_queue)
        return status != QD_OK ? status : no_memory();
    for (int q = 0; q < f->queues; q++)
        f->begin[q + 1] += f->begin[q];
    for (int i = 0; i < f->count; i++)
        f->of_queue[f->begin[f->places[i].queue] + f->places[i].number] = i;
    return QD_OK;
}

static bool same_along(const qd_mesh *mesh, const qd_program *const *programs, int axis)
{
    for (int rank = 0; rank < mesh->world; rank++) {
        int coords[QD_AXIS_COUNT];
        qd_mesh_coords(mesh, rank, coords);
        if (coords[axis] == 0)
            continue;
        coords[axis] = 0;
        if (programs[rank] != programs[qd_mesh_rank(mesh, coords)])
            return false;
    }
    return true;
}

static int stand_in(const qd_mesh *mesh, const bool *folded, int rank)
{
    int coords[QD_AXIS_COUNT];
    qd_mesh_coords(mesh, rank, coords);
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        coords[axis] = folded[axis] ? 0 : coords[axis];
    return qd_mesh_rank(mesh, coords);
}

static qd_status find_flat(checker *c, const qd_program *program, int *index)
{
    for (*index = 0; *index < c->flat_count; ++*index)
        if (c->flats[*index].program == program)
            return QD_OK;
    return flatten(program, c->ranks, &c->flats[c->flat_count++]);
}

/* Index of a group in a program; pipeline stages may number their groups differently. -1: the
 * program does not have it. */
static int find_group(const qd_program *p, qd_group wanted)
{
    for (int i = 0; i < p->group_count; i++)
        if (qd_group_equal(p->groups[i], wanted))
            return i;
    return -1;
}

/* Lists the followers that represent the members of a group, each once. All members share the list
 * of the first one, which has the lowest rank. */
static qd_status list_members(checker *c, follower *f, int group)
{
    qd_group g = f->flat->program->groups[group];
    int first = qd_group_rank(c->mesh, g, f->rank, 0), count = 0;
    follower *owner = &c->followers[c->stands[first]];
    int theirs = owner != f && owner->rank == first ? find_group(owner->flat->program, g) : -1;
    if (theirs >= 0 && owner->members[theirs]) {
        f->members[group] = owner->members[theirs];
        f->known[group] = owner->known[theirs];
        f->borrowed[group] = true;
        return QD_OK;
    }
    int *list = malloc(((size_t)g.size + 1) * sizeof *list);
    if (!list)
        return no_memory();
    f->members[group] = list;
    f->known[group] = true;
    c->lists++;
    for (int i = 0; i < g.size; i++) {
        int other = c->stands[qd_group_rank(c->mesh, g, f->rank, i)];
        if (c->listed[other] == c->lists)
            continue;
        c->listed[other] = c->lists;
        list[count++] = other;
        f->known[group] = f->known[group] && find_group(c->followers[other].flat->program, g) >= 0;
    }
    list[count] = -1;
    return QD_OK;
}

/* Other members may lack a group that is never used. */
static qd_status find_members(checker *c, follower *f, int group)
{
    QD_TRY(list_members(c, f, group));
    if (f->known[group] || f->flat->begin[group] == f->flat->begin[group + 1])
        return QD_OK;
    char name[48];
    qd_group g = f->flat->program->groups[group];
    const int *other = f->members[group];
    while (find_group(c->followers[*other].flat->program, g) >= 0)
        other++;
    qd_group_name(c->mesh, g, name, sizeof name);
    return QD_FAIL(QD_MISMATCH, "rank %d communicates in the group %s, which rank %d does not have", f->rank, name,
                   c->followers[*other].rank);
}

static qd_status set_up(checker *c, const qd_program *const *programs)
{
    const qd_mesh *mesh = c->mesh;
    bool folded[QD_AXIS_COUNT];
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        folded[axis] = same_along(mesh, programs, axis);
    c->ranks = mesh->degree[QD_AXIS_PP];
    c->stands = malloc((size_t)mesh->world * sizeof *c->stands);
    c->followers = calloc((size_t)mesh->world, sizeof *c->followers);
    c->flats = calloc((size_t)mesh->world, sizeof *c->flats);
    c->todo = malloc((size_t)mesh->world * sizeof *c->todo);
    c->listed = calloc((size_t)mesh->world, sizeof *c->listed);
    c->queued = calloc((size_t)mesh->world, sizeof *c->queued);
    if (!c->stands || !c->followers || !c->flats || !c->todo || !c->queued || !c->listed)
        return no_memory();
    for (int rank = 0; rank < mesh->world; rank++) { /* representatives have lower ranks than those they represent */
        int by = stand_in(mesh, folded, rank), index;
        c->stands[rank] = by == rank ? c->count : c->stands[by];
        if (by != rank)
            continue;
        follower *f = &c->followers[c->count++];
        f->rank = rank;
        QD_TRY(find_flat(c, programs[rank], &index));
        f->flat = &c->flats[index];
        f->posted = calloc(2 * (size_t)f->flat->queues, sizeof *f->posted);
        if (!f->posted)
            return no_memory();
        f->ended = f->posted + f->flat->queues;
    }
    for (int i = 0; i < c->count; i++)
        for (int g = 0; g < c->followers[i].flat->program->group_count; g++)
            QD_TRY(find_members(c, &c->followers[i], g));
    return QD_OK;
}

static void tear_down(checker *c)
{
    for (int i = 0; i < c->count; i++) {
        free(c->followers[i].posted);
        for (int g = 0; g < QD_GROUP_LIMIT; g++)
            if (!c->followers[i].borrowed[g])
                free(c->followers[i].members[g]);
    }
    for (int i = 0; i < c->flat_count; i++) {
        free(c->flats[i].places);
        free(c->flats[i].events);
        free(c->flats[i].begin);
        free(c->flats[i].of_queue);
    }
    free(c->stands);
    free(c->listed);
    free(c->followers);
    free(c->flats);
    free(c->todo);
    free(c->queued);
}

/* The follower at the other end of a message queue, and its queue. */
static int peer_of(const checker *c, const follower *f, int queue, int *other_queue)
{
    int groups = f->flat->program->group_count, way = (queue - groups) / c->ranks, offset = (queue - groups) % c->ranks;
    int coords[QD_AXIS_COUNT];
    qd_mesh_coords(c->mesh, f->rank, coords);
    coords[QD_AXIS_PP] = (coords[QD_AXIS_PP] + offset) % c->ranks;
    int peer = c->stands[qd_mesh_rank(c->mesh, coords)];
    *other_queue = c->followers[peer].flat->program->group_count + (1 - way) * c->ranks + (c->ranks - offset) % c->ranks;
    return peer;
}

static const place *nth(const flat *f, int queue, int number)
{
    return number < f->begin[queue + 1] - f->begin[queue] ? &f->places[f->of_queue[f->begin[queue] + number]] : NULL;
}

static void describe(const flat *f, const place *at, char *text, size_t size)
{
    qd_action_describe(f->program, at->action, text, size);
    size_t used = strlen(text);
    if (at->op >= 0)
        snprintf(text + used, size - used, ", op %d: %s of %lld elements", at->op, qd_op_name(op_at(f->program, at)->kind),
                 (long long)op_at(f->program, at)->exchange.count);
}

static int next_held(const qd_program *p, int param, int end)
{
    while (param < end && (p->storage.count[param] == 0 || p->ledger->params[param].tied_to >= 0))
        param++;
    return param;
}

/* Whether two actions work on the same run of parameters. Experts are alike, and a program may
 * represent ranks that hold different experts than the one it was built for, so each expert counts
 * by its position among those of a rank. */
static bool same_run(const qd_program *p, const qd_action *x, const qd_program *q, const qd_action *y)
{
    if (x->param == y->param && x->params == y->params)
        return true;
    if ((x->kind != QD_ACTION_GATHER && x->kind != QD_ACTION_REDUCE_SCATTER) || x->params == 0 || y->params == 0)
        return false;
    int x_end = x->param + x->params, y_end = y->param + y->params, x_first, y_first;
    qd_experts_of(&p->ledger->model, &p->ledger->mesh, p->rank, &x_first);
    qd_experts_of(&q->ledger->model, &q->ledger->mesh, q->rank, &y_first);
    for (int i = x->param, j = y->param;; i++, j++) {
        i = next_held(p, i, x_end);
        j = next_held(q, j, y_end);
        if (i == x_end || j == y_end)
            return i == x_end && j == y_end;
        const qd_param *a = &p->ledger->params[i], *b = &q->ledger->params[j];
        if (a->expert < 0 || b->expert < 0 || a->expert - x_first != b->expert - y_first || a->module != b->module || a->fuse != b->fuse ||
            p->storage.rows[i] != q->storage.rows[j] || p->storage.count[i] != q->storage.count[j])
            return false;
    }
}

static bool same_operation(const flat *f, const place *a, const flat *g, const place *b)
{
    if ((a->op < 0) != (b->op < 0))
        return false;
    if (a->op >= 0) {
        const qd_op *x = op_at(f->program, a), *y = op_at(g->program, b);
        return x->kind == y->kind && x->hop == y->hop && x->exchange.reduce == y->exchange.reduce &&
               x->exchange.count == y->exchange.count && x->exchange.dtype == y->exchange.dtype &&
               x->exchange.piece == y->exchange.piece && x->exchange.pieces == y->exchange.pieces;
    }
    const qd_action *x = &f->program->actions[a->action], *y = &g->program->actions[b->action];
    if (qd_action_transfers(x)) /* kinds differ, and so do the buffers they fill */
        return x->kind != y->kind && x->count == y->count && x->dtype == y->dtype && x->microbatch == y->microbatch;
    return x->kind == y->kind && x->count == y->count && x->dtype == y->dtype && x->parts == y->parts &&
           same_run(f->program, x, g->program, y);
}

static qd_status disagree(const follower *f, const place *a, const follower *g, const place *b)
{
    char mine[200], theirs[200];
    describe(f->flat, a, mine, sizeof mine);
    describe(g->flat, b, theirs, sizeof theirs);
    return QD_FAIL(QD_MISMATCH, "rank %d, action %d: %s; but rank %d, action %d: %s", f->rank, a->action, mine, g->rank, b->action, theirs);
}

/* The operation of another follower that matches the head of a queue. */
typedef struct counterpart {
    int follower, queue;
} counterpart;

static int counterparts(const checker *c, const follower *f, int queue, int i, counterpart *out)
{
    if (queue < f->flat->program->group_count) {
        out->follower = f->members[queue][i];
        out->queue = out->follower >= 0 ? find_group(c->followers[out->follower].flat->program, f->flat->program->groups[queue]) : -1;
        return out->follower >= 0;
    }
    out->follower = peer_of(c, f, queue, &out->queue);
    return i == 0;
}

static void wake(checker *c, int index)
{
    if (c->queued[index])
        return;
    c->queued[index] = true;
    c->todo[c->todo_count++] = index;
}

/* Completes the head of the queue if all counterparts have posted theirs. */
static qd_status try_end(checker *c, follower *f, int queue, bool *ended)
{
    int number = f->ended[queue];
    const place *own = nth(f->flat, queue, number);
    counterpart other;
    *ended = false;
    if (number >= f->posted[queue])
        return QD_OK;
    for (int i = 0; counterparts(c, f, queue, i, &other); i++)
        if (c->followers[other.follower].posted[other.queue] <= number)
            return QD_OK;
    for (int i = 0; counterparts(c, f, queue, i, &other); i++) {
        follower *g = &c->followers[other.follower];
        const place *theirs = nth(g->flat, other.queue, number);
        if (g != f && !same_operation(f->flat, own, g->flat, theirs))
            return disagree(f, own, g, theirs);
        g->ended[other.queue] = number + 1;
        wake(c, other.follower);
    }
    f->ended[queue] = number + 1;
    *ended = true;
    return QD_OK;
}

/* Advances the follower as far as possible. */
static qd_status go_on(checker *c, follower *f)
{
    for (; f->at < f->flat->event_count; f->at++) {
        const event *e = &f->flat->events[f->at];
        const place *at = &f->flat->places[e->index];
        if (e->waits && f->ended[at->queue] <= at->number)
            return QD_OK;
        if (e->waits)
            continue;
        f->posted[at->queue]++;
        for (bool ended = true; ended;)
            QD_TRY(try_end(c, f, at->queue, &ended));
    }
    return QD_OK;
}

/* The i-th follower that a blocked follower waits for: one that has not posted the operation
 * matching the head of the queue. -1: no more. */
static int waits_for(const checker *c, const follower *f, int i)
{
    if (f->at >= f->flat->event_count)
        return -1;
    int queue = f->flat->places[f->flat->events[f->at].index].queue, number = f->ended[queue], found = 0;
    counterpart other;
    for (int k = 0; counterparts(c, f, queue, k, &other); k++)
        if (c->followers[other.follower].posted[other.queue] <= number && found++ == i)
            return other.follower;
    return -1;
}

static const place *head_of(const follower *f)
{
    int queue = f->flat->places[f->flat->events[f->at].index].queue;
    return nth(f->flat, queue, f->ended[queue]);
}

/* A shortest cycle from a follower back to itself, by breadth-first search. Returns its length,
 * with the followers on it in `circle`. */
static int shortest_circle(const checker *c, int start, int *from, int *line, int *circle)
{
    int head = 0, tail = 0;
    for (int i = 0; i < c->count; i++)
        from[i] = -1;
    line[tail++] = start;
    while (head < tail) {
        int at = line[head++];
        for (int i = 0, next; (next = waits_for(c, &c->followers[at], i)) >= 0; i++) {
            if (next == start) {
                int length = 0;
                for (int k = at; k != start; k = from[k])
                    circle[length++] = k;
                circle[length++] = start;
                return length; /* last to first */
            }
            if (from[next] < 0 && next != start) {
                from[next] = at;
                line[tail++] = next;
            }
        }
    }
    return 0;
}

static qd_status describe_circle(const checker *c, const int *circle, int length)
{
    char text[900];
    size_t used = 0;
    for (int i = length - 1; i >= 0 && used < sizeof text; i--) {
        const follower *f = &c->followers[circle[i]];
        const place *at = head_of(f);
        char what[200];
        describe(f->flat, at, what, sizeof what);
        int n = snprintf(text + used, sizeof text - used, "%srank %d waits in action %d (%s) for rank %d",
                         i == length - 1 ? "" : ", which waits: ", f->rank, at->action, what,
                         c->followers[circle[i > 0 ? i - 1 : length - 1]].rank);
        used += n > 0 ? (size_t)n : 0;
    }
    return QD_FAIL(QD_MISMATCH, "deadlock: %s", text);
}

static qd_status explain(const checker *c)
{
    int *work = malloc(4 * (size_t)c->count * sizeof *work), best = 0;
    if (!work)
        return no_memory();
    int *from = work, *line = work + c->count, *circle = work + 2 * c->count, *shortest = work + 3 * c->count;
    qd_status status = QD_OK;
    for (int i = 0; i < c->count && status == QD_OK; i++) {
        const follower *f = &c->followers[i];
        for (int k = 0, other; (other = waits_for(c, f, k)) >= 0 && status == QD_OK; k++) {
            const follower *g = &c->followers[other];
            char what[200];
            if (g->at < g->flat->event_count)
                continue;
            describe(f->flat, head_of(f), what, sizeof what);
            status = QD_FAIL(QD_MISMATCH, "rank %d waits in action %d (%s) for rank %d, which has ended its step", f->rank,
                             head_of(f)->action, what, g->rank);
        }
    }
    for (int i = 0; i < c->count && status == QD_OK && best != 1; i++) {
        int length = shortest_circle(c, i, from, line, circle);
        if (length > 0 && (best == 0 || length < best)) {
            best = length;
            memcpy(shortest, circle, (size_t)length * sizeof *circle);
        }
    }
    if (status == QD_OK && best > 0)
        status = describe_circle(c, shortest, best);
    free(work);
    return status;
}

qd_status qd_check_programs(const qd_mesh *mesh, const qd_program *const *programs)
{
    checker c = {.mesh = mesh};
    qd_status status = set_up(&c, programs);
    for (int i = 0; i < c.count && status == QD_OK; i++)
        wake(&c, i);
    while (c.todo_count > 0 && status == QD_OK) {
        int next = c.todo[--c.todo_count];
        c.queued[next] = false;
        status = go_on(&c, &c.followers[next]);
    }
    if (status == QD_OK)
        status = explain(&c);
    tear_down(&c);
    return status;
}
