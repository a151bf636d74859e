#include "parallel/matrices.h"

#include "spec/muon.h"

#include <stdlib.h>

static qd_status find_group(const qd_bound *b, const qd_action *a, qd_comm **group)
{
    *group = a->group >= 0 && a->group < b->program->group_count ? b->groups[a->group] : NULL;
    if (!*group || a->group != b->program->matrix_group)
        return QD_FAIL(QD_SYSTEM, "step program: matrices go to a group that does not share them");
    return QD_OK;
}

/* An address, NULL for a buffer that this rank has nothing to keep in. */
static qd_status find_buffer(const qd_bound *b, int buffer, void **address)
{
    *address = NULL;
    return buffer >= 0 ? qd_bound_buffer(b, buffer, address) : QD_OK;
}

/* Between this rank's rows of a round's matrices, one matrix after another, and the whole of the one that is its own: with each
 * rank of the group it exchanges its rows of that rank's matrix for that rank's rows of its own. */
static qd_status exchange(qd_bound *b, const qd_action *a, bool collect, qd_work **work)
{
    const qd_program *p = b->program;
    const qd_storage *s = &p->storage;
    qd_comm *group;
    void *whole, *part;
    QD_TRY(find_group(b, a, &group));
    QD_TRY(find_buffer(b, a->buffer, &whole));
    QD_TRY(find_buffer(b, a->part, &part));
    int n = qd_comm_size(group), place = qd_comm_rank(group), own = qd_muon_own(p, a, place);
    if (n != s->parts)
        return QD_FAIL(QD_SYSTEM, "step program: parts of %d ranks in a group of %d", s->parts, n);
    int64_t *table = calloc(4 * (size_t)n, sizeof *table);
    if (!table)
        return QD_FAIL(QD_NO_MEMORY, "no memory to exchange %d matrices", a->params);
    int64_t *part_counts = table, *part_offsets = table + n, *whole_counts = table + 2 * n, *whole_offsets = table + 3 * n, at = 0;
    for (int i = a->param; i < a->param + a->params; i++) {
        int64_t rows = qd_storage_part(s, p->matrices[i].param, n, place).count;
        part_counts[p->matrices[i].owner] = rows;
        part_offsets[p->matrices[i].owner] = at;
        at += rows;
    }
    for (int r = 0; r < n && own >= 0; r++) {
        qd_extent rows = qd_storage_part(s, p->matrices[own].param, n, r);
        whole_counts[r] = rows.count;
        whole_offsets[r] = rows.first;
    }
    qd_status status = collect ? qd_comm_all_to_all_v(group, part, part_counts, part_offsets, whole, whole_counts, whole_offsets, a->dtype, work)
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
    QD_TRY(find_group(b, a, &group));
    int owner = b->program->matrices[a->param].owner;
    QD_TRY(qd_bound_buffer(b, owner == qd_comm_rank(group) ? a->part : a->buffer, &data));
    return qd_comm_broadcast(group, data, a->count, a->dtype, owner, work);
}
