/* Replays the communication of all ranks against each other, with calls that block until all of the group are there. */
#include "spec/program.h"

#include <stdlib.h>
#include <string.h>

/* A place in a rank's step where it communicates: an action, or an op of a module action. */
typedef struct place {
    int action, op; /* op -1: the action itself */
} place;

static bool ended(const qd_program *p, place at)
{
    return at.action >= p->action_count;
}

static const qd_op *op_at(const qd_program *p, place at)
{
    return &qd_program_class(p, p->actions[at.action].module)->ops[at.op];
}

/* The next place after `at` (before the first: {0, -2}) where a rank communicates. */
static place next_comm(const qd_program *p, place at)
{
    for (; at.action < p->action_count; at = (place){at.action + 1, -2}) {
        const qd_action *a = &p->actions[at.action];
        if (at.op == -2 && qd_action_communicates(a))
            return (place){at.action, -1};
        unsigned phases = qd_action_phases(a);
        if (phases == 0)
            continue;
        const qd_module_class *c = qd_program_class(p, a->module);
        for (int op = at.op < 0 ? 0 : at.op + 1; op < c->op_count; op++)
            if (qd_op_runs(&c->ops[op], phases) && qd_op_communicates(&c->ops[op]))
                return (place){at.action, op};
    }
    return at;
}

static qd_group group_at(const qd_program *p, place at)
{
    return at.op < 0 ? p->groups[p->actions[at.action].group] : op_at(p, at)->exchange.group;
}

static bool same_op(const qd_op *a, const qd_op *b)
{
    const qd_op_exchange *x = &a->exchange, *y = &b->exchange;
    return a->kind == b->kind && x->reduce == y->reduce && x->count == y->count && x->dtype == y->dtype && x->piece == y->piece &&
           x->pieces == y->pieces;
}

static bool same_call(const qd_program *p, place at, const qd_program *q, place other)
{
    if (ended(q, other) || (at.op < 0) != (other.op < 0) || !qd_group_equal(group_at(p, at), group_at(q, other)))
        return false;
    if (at.op >= 0)
        return same_op(op_at(p, at), op_at(q, other));
    const qd_action *a = &p->actions[at.action], *b = &q->actions[other.action];
    return a->kind == b->kind && a->count == b->count && a->dtype == b->dtype && a->param == b->param && a->params == b->params &&
           a->parts == b->parts;
}

static void describe(const qd_program *p, place at, char *text, size_t size)
{
    qd_action_describe(p, at.action, text, size);
    size_t used = strlen(text);
    if (at.op >= 0)
        snprintf(text + used, size - used, ", op %d: %s of %lld elements", at.op, qd_op_name(op_at(p, at)->kind),
                 (long long)op_at(p, at)->exchange.count);
}

static qd_status disagree(const qd_program *const *programs, const place *at, int rank, int other)
{
    char mine[200], theirs[200];
    const qd_program *p = programs[rank], *q = programs[other];
    describe(p, at[rank], mine, sizeof mine);
    if (ended(q, at[other]))
        return QD_FAIL(QD_MISMATCH, "rank %d waits in action %d (%s) for rank %d, which has ended its step", rank, at[rank].action,
                       mine, other);
    describe(q, at[other], theirs, sizeof theirs);
    return QD_FAIL(QD_MISMATCH, "rank %d, action %d: %s; but rank %d, action %d: %s", rank, at[rank].action, mine, other,
                   at[other].action, theirs);
}

/* A group whose members are all at the same call moves on. Returns whether any did. */
static bool advance(const qd_mesh *mesh, const qd_program *const *programs, place *at)
{
    bool moved = false;
    for (int rank = 0; rank < mesh->world; rank++) {
        const qd_program *p = programs[rank];
        if (ended(p, at[rank]))
            continue;
        qd_group group = group_at(p, at[rank]);
        if (qd_group_coord(mesh, group, rank) != 0)
            continue; /* the group is looked at once, through its first member */
        bool all = true;
        for (int i = 1; i < group.size && all; i++) {
            int other = qd_group_rank(mesh, group, rank, i);
            all = same_call(p, at[rank], programs[other], at[other]);
        }
        if (!all)
            continue;
        for (int i = 0; i < group.size; i++) {
            int other = qd_group_rank(mesh, group, rank, i);
            at[other] = next_comm(programs[other], at[other]);
        }
        moved = true;
    }
    return moved;
}

qd_status qd_check_programs(const qd_mesh *mesh, const qd_program *const *programs)
{
    bool shared = true;
    for (int rank = 1; rank < mesh->world && shared; rank++)
        shared = programs[rank] == programs[0];
    if (shared) /* collectives of one list meet each other, in the order of the list, whatever their groups */
        return QD_OK;
    place *at = malloc((size_t)mesh->world * sizeof *at);
    if (!at)
        return QD_FAIL(QD_NO_MEMORY, "no memory to check %d ranks", mesh->world);
    for (int rank = 0; rank < mesh->world; rank++)
        at[rank] = next_comm(programs[rank], (place){0, -2});
    while (advance(mesh, programs, at))
        ;
    qd_status status = QD_OK;
    for (int rank = 0; rank < mesh->world && status == QD_OK; rank++) {
        if (ended(programs[rank], at[rank]))
            continue;
        qd_group group = group_at(programs[rank], at[rank]);
        for (int i = 0; i < group.size && status == QD_OK; i++) {
            int other = qd_group_rank(mesh, group, rank, i);
            if (!same_call(programs[rank], at[rank], programs[other], at[other]))
                status = disagree(programs, at, rank, other);
        }
    }
    free(at);
    return status;
}
