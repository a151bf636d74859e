/* Replays the communication of all ranks against each other, with calls that block until all of the group are there. */
#include "spec/program.h"

#include <stdlib.h>
#include <string.h>

/* The next communication action of a rank at or after `from`; action_count if there is none. */
static int next_comm(const qd_program *p, int from)
{
    while (from < p->action_count && !qd_action_communicates(&p->actions[from]))
        from++;
    return from;
}

static bool same_call(const qd_program *p, const qd_action *a, const qd_program *q, const qd_action *b)
{
    return a->kind == b->kind && qd_group_equal(p->groups[a->group], q->groups[b->group]) && a->count == b->count &&
           a->dtype == b->dtype && a->param == b->param && a->params == b->params && a->parts == b->parts;
}

static qd_status disagree(const qd_program *const *programs, const int *at, int rank, int other)
{
    char mine[160], theirs[160];
    const qd_program *p = programs[rank], *q = programs[other];
    qd_action_describe(p, at[rank], mine, sizeof mine);
    if (at[other] >= q->action_count)
        return QD_FAIL(QD_MISMATCH, "rank %d waits in action %d (%s) for rank %d, which has ended its step", rank, at[rank],
                       mine, other);
    qd_action_describe(q, at[other], theirs, sizeof theirs);
    return QD_FAIL(QD_MISMATCH, "rank %d, action %d: %s; but rank %d, action %d: %s", rank, at[rank], mine, other, at[other],
                   theirs);
}

/* A group whose members are all at the same call moves on. Returns whether any did. */
static bool advance(const qd_mesh *mesh, const qd_program *const *programs, int *at)
{
    bool moved = false;
    for (int rank = 0; rank < mesh->world; rank++) {
        const qd_program *p = programs[rank];
        if (at[rank] >= p->action_count)
            continue;
        const qd_action *a = &p->actions[at[rank]];
        qd_group group = p->groups[a->group];
        if (qd_group_coord(mesh, group, rank) != 0)
            continue; /* the group is looked at once, through its first member */
        bool all = true;
        for (int i = 1; i < group.size && all; i++) {
            int other = qd_group_rank(mesh, group, rank, i);
            all = at[other] < programs[other]->action_count && same_call(p, a, programs[other], &programs[other]->actions[at[other]]);
        }
        if (!all)
            continue;
        for (int i = 0; i < group.size; i++) {
            int other = qd_group_rank(mesh, group, rank, i);
            at[other] = next_comm(programs[other], at[other] + 1);
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
    int *at = malloc((size_t)mesh->world * sizeof *at);
    if (!at)
        return QD_FAIL(QD_NO_MEMORY, "no memory to check %d ranks", mesh->world);
    for (int rank = 0; rank < mesh->world; rank++)
        at[rank] = next_comm(programs[rank], 0);
    while (advance(mesh, programs, at))
        ;
    qd_status status = QD_OK;
    for (int rank = 0; rank < mesh->world && status == QD_OK; rank++) {
        if (at[rank] >= programs[rank]->action_count)
            continue;
        const qd_action *a = &programs[rank]->actions[at[rank]];
        qd_group group = programs[rank]->groups[a->group];
        for (int i = 0; i < group.size && status == QD_OK; i++) {
            int other = qd_group_rank(mesh, group, rank, i);
            if (at[other] >= programs[other]->action_count ||
                !same_call(programs[rank], a, programs[other], &programs[other]->actions[at[other]]))
                status = disagree(programs, at, rank, other);
        }
    }
    free(at);
    return status;
}
