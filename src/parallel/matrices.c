/* Moves Muon's matrices: all-to-alls to their owners and back, and broadcasts of results. */
#include "parallel/matrices.h"

#include "spec/program/muon.h"

#include <stdlib.h>

static qd_status find_group(const qd_bound *b, const qd_action *a, int wanted, qd_comm **group)
{
    *group = a->group >= 0 && a->group < b->program->group_count ? b->groups[a->group] : NULL;
    if (!*group || a->group != wanted)
        return QD_FAIL(QD_SYSTEM, "step program: matrices are sent in a group that does not hold them");
    return QD_OK;
}

/* The address of a buffer; NULL if this rank has nothing to keep in it. */
static qd_status find_buffer(const qd_bound *b, int buffer, void **address)
{
    *address = NULL;
    return buffer >= 0 ? qd_bound_buffer(b, buffer, address) : QD_OK;
}

/* Exchanges with each rank of the group: sends this rank's box of the other rank's matrix, and
 * receives the other rank's box of its own. One of the ranks that hold the same box sends it; all
 * of them get it back. */
static qd_status exchange(qd_bound *b, const qd_action *a, bool collect, qd_work **work)
{
    const qd_program *p = b->program;
    qd_comm *group;
    void *whole, *part;
    QD_TRY(find_group(b, a, qd_muon_matrix_group(p, a->param), &group));
    QD_TRY(find_buffer(b, a->buffer, &whole));
    QD_TRY(find_buffer(b, a->part, &part));
    int n = qd_comm_size(group), rank = qd_comm_rank(b->world), own = qd_muon_own(p, a, rank);
    int64_t *table = calloc(4 * (size_t)n, sizeof *table);
    if (!table)
        return QD_FAIL(QD_NO_MEMORY, "no memory to exchange %d matrices", a->params);
    int64_t *part_counts = table, *part_offsets = table + n, *whole_counts = table + 2 * n, *whole_offsets = table + 3 * n;
    for (int i = a->param; i < a->param + a->params; i++) {
        if (!qd_muon_is_near(p, i, rank))
            continue;
        qd_muon_box box = qd_muon_box_of(p, i, rank);
        part_counts[p->matrices[i].owner] = box.speaks || !collect ? box.count : 0;
        part_offsets[p->matrices[i].owner] = p->matrices[i].part;
    }
    for (int r = 0; r < n && own >= 0; r++) {
        qd_muon_box box = qd_muon_box_of(p, own, qd_group_rank(&p->ledger->mesh, p->groups[a->group], rank, r));
        whole_counts[r] = box.speaks || !collect ? box.count : 0;
        whole_offsets[r] = box.at;
    }
    qd_status status =
        collect ? qd_comm_all_to_all_v(group, part, part_counts, part_offsets, whole, whole_counts, whole_offsets, a->dtype, work)
                : qd_comm_all_to_all_v(group, whole, whole_counts, whole_offsets, part, part_counts, part_offsets, a->dtype, work);
    free(table);
    return status;
}

qd_status qd_matrices_collect(qd_bound *b, const qd_action *a, qd_work **work)
{
    return exchange(b, a, true, work);
}

qd_status qd_matrices_hand_back(qd_bound *b, const qd_action *a, qd_work **work)
{
    return exchange(b, a, false, work);
}

qd_status qd_matrices_share(qd_bound *b, const qd_action *a, qd_work **work)
{
    qd_comm *group;
    void *data;
    QD_TRY(find_group(b, a, qd_muon_share_group(b->program, a->param), &group));
    QD_TRY(qd_matrices_result(b, a, a->param, &data));
    return qd_comm_broadcast(group, data, a->count, a->dtype, b->program->matrices[a->param].sharer, work);
}

qd_status qd_matrices_result(const qd_bound *b, const qd_action *a, int matrix, void **data)
{
    const qd_program *p = b->program;
    int rank = qd_comm_rank(b->world);
    bool has = qd_muon_share_group(p, matrix) < 0 || qd_muon_is_near(p, matrix, rank); /* before SHARE */
    QD_TRY(qd_bound_buffer(b, has && a->part >= 0 ? a->part : a->buffer, data));
    if (has && qd_muon_matrix_group(p, matrix) >= 0)
        *data = (float *)*data + p->matrices[matrix].part;
    return QD_OK;
}
