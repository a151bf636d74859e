/* Vectored collectives between whole and sharded buffers, and the local copies between them. */
#include "parallel/shard.h"

#include <stdlib.h>

/* Created on first use, then cached; depends only on the run, the number of parts and what is
 * transferred. */
struct qd_shard_lists {
    qd_shard_lists *next;
    int param, params, parts;
    qd_buffer_kind kind; /* of the buffer of whole tensors */
    qd_segment_list *ranks; /* per part */
    qd_segment *segments;
};

void qd_shard_lists_destroy(qd_shard_lists *lists)
{
    while (lists) {
        qd_shard_lists *next = lists->next;
        free(lists->ranks);
        free(lists->segments);
        free(lists);
        lists = next;
    }
}

/* The row sums of the norm of family `param`: parts are sorted by rank. */
static void fill_rows(const qd_program *p, qd_shard_lists *l)
{
    int64_t offset = 0;
    for (int r = 0; r < l->parts; r++) {
        int64_t rows = 0;
        for (int i = 0; i < p->ledger->param_count; i++)
            if (p->ledger->params[i].tied_to < 0 && !p->ledger->params[i].frozen && p->ledger->params[i].family == l->param)
                rows += qd_storage_part(&p->storage, i, l->parts, r).rows;
        l->segments[r] = (qd_segment){offset, rows};
        l->ranks[r] = (qd_segment_list){&l->segments[r], rows > 0 ? 1 : 0};
        offset += rows;
    }
}

/* Where parameters are in a whole buffer of this kind. */
static const int64_t *offsets(const qd_program *p, qd_buffer_kind kind)
{
    return kind == QD_BUFFER_PARAM || kind == QD_BUFFER_UNIT ? p->storage.value : p->storage.offset;
}

static void fill_run(const qd_program *p, qd_shard_lists *l)
{
    const qd_storage *s = &p->storage;
    const int64_t *offset = offsets(p, l->kind);
    qd_segment *next = l->segments;
    for (int r = 0; r < l->parts; r++) {
        l->ranks[r].segments = next;
        for (int i = l->param; i < l->param + l->params; i++) {
            if (!qd_storage_moves(p->ledger, s, i, l->kind == QD_BUFFER_UNIT))
                continue;
            qd_extent part = qd_storage_part(s, i, l->parts, r);
            if (part.count > 0)
                *next++ = (qd_segment){offset[i] - offset[l->param] + part.first, part.count};
        }
        l->ranks[r].count = (int)(next - l->ranks[r].segments);
    }
}

static qd_status find_lists(qd_bound *b, const qd_action *a, const qd_shard_lists **lists)
{
    const qd_program *p = b->program;
    qd_buffer_kind kind = p->buffers[a->buffer].kind;
    qd_shard_lists **chain = &b->lists[a->params > 0 ? a->param : p->ledger->param_count];
    for (qd_shard_lists *l = *chain; l; l = l->next) {
        if (l->param == a->param && l->params == a->params && l->parts == a->parts && l->kind == kind) {
            *lists = l;
            return QD_OK;
        }
    }
    qd_shard_lists *l = calloc(1, sizeof *l);
    if (!l)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the parts of %d parameters", a->params);
    *l = (qd_shard_lists){.next = *chain, .param = a->param, .params = a->params, .parts = a->parts, .kind = kind};
    *chain = l;
    size_t most = (size_t)a->parts * (size_t)(a->params > 0 ? a->params : 1);
    l->ranks = calloc((size_t)a->parts, sizeof *l->ranks);
    l->segments = calloc(most, sizeof *l->segments);
    if (!l->ranks || !l->segments) {
        *chain = l->next;
        l->next = NULL;
        qd_shard_lists_destroy(l);
        return QD_FAIL(QD_NO_MEMORY, "no memory for the parts of %d parameters", a->params);
    }
    if (a->params > 0)
        fill_run(p, l);
    else
        fill_rows(p, l);
    *lists = l;
    return QD_OK;
}

static int own_part(const qd_bound *b, const qd_action *a)
{
    const qd_program *p = b->program;
    int rank = qd_comm_rank(b->world);
    if (a->group >= 0)
        return qd_group_coord(&p->ledger->mesh, p->groups[a->group], rank);
    qd_group data = qd_ledger_data_group(p->ledger, p->ledger->params[a->param].family);
    return qd_group_coord(&p->ledger->mesh, data, rank) % a->parts; /* neighbours hold consecutive parts */
}

/* Addresses of the first element of the run in the whole buffer and in the buffer of this rank's
 * parts (NULL: it has none). */
static qd_status addresses(qd_bound *b, const qd_action *a, const qd_shard_lists *l, char **whole, char **part)
{
    const qd_program *p = b->program;
    void *address = NULL;
    if (a->params == 0) { /* in place */
        int64_t first = l->segments[own_part(b, a)].offset;
        QD_TRY(qd_bound_at(b, a->buffer, qd_program_square_base(p, a->param, 0), a->dtype, &address));
        *whole = address;
        *part = *whole + first * (int64_t)qd_dtype_size(a->dtype);
        return QD_OK;
    }
    const qd_storage *s = &p->storage;
    QD_TRY(qd_bound_at(b, a->buffer, offsets(p, p->buffers[a->buffer].kind)[a->param], a->dtype, &address));
    *whole = address;
    *part = NULL;
    if (a->part < 0)
        return QD_OK;
    const qd_buffer *buffer = &p->buffers[a->part];
    const int64_t *shards = buffer->kind == QD_BUFFER_PARAM ? s->shard_value : s->shard_offset;
    QD_TRY(qd_bound_at(b, a->part, buffer->persistent ? shards[a->param] : buffer->first, a->dtype, &address));
    *part = address;
    return QD_OK;
}

static qd_status find_group(qd_bound *b, const qd_action *a, qd_comm **group)
{
    *group = a->group >= 0 && a->group < b->program->group_count ? b->groups[a->group] : NULL;
    if (!*group || qd_comm_size(*group) != a->parts)
        return QD_FAIL(QD_SYSTEM, "step program: parts of %d ranks in a group of %d", a->parts, *group ? qd_comm_size(*group) : 1);
    return QD_OK;
}

qd_status qd_shard_gather(qd_bound *b, const qd_action *a, qd_work **work)
{
    const qd_shard_lists *lists;
    qd_comm *group;
    char *whole, *part;
    QD_TRY(find_group(b, a, &group));
    QD_TRY(find_lists(b, a, &lists));
    QD_TRY(addresses(b, a, lists, &whole, &part));
    return qd_comm_all_gather_v(group, part, whole, lists->ranks, a->dtype, work);
}

qd_status qd_shard_reduce_scatter(qd_bound *b, const qd_action *a, qd_work **work)
{
    const qd_shard_lists *lists;
    qd_comm *group;
    char *whole, *part;
    QD_TRY(find_group(b, a, &group));
    QD_TRY(find_lists(b, a, &lists));
    QD_TRY(addresses(b, a, lists, &whole, &part));
    return qd_comm_reduce_scatter_v(group, whole, part, lists->ranks, a->dtype, QD_SUM, work);
}

static qd_status copy(qd_bound *b, const qd_action *a, qd_stream *stream, bool pack)
{
    const qd_shard_lists *lists;
    char *whole, *part;
    QD_TRY(find_lists(b, a, &lists));
    QD_TRY(addresses(b, a, lists, &whole, &part));
    int64_t size = (int64_t)qd_dtype_size(a->dtype);
    const qd_segment_list *own = &lists->ranks[own_part(b, a)];
    for (int i = 0; i < own->count; i++) {
        char *in_whole = whole + own->segments[i].offset * size;
        int64_t bytes = own->segments[i].count * size;
        QD_TRY(pack ? qd_copy(stream, part, in_whole, bytes) : qd_copy(stream, in_whole, part, bytes));
        part += bytes;
    }
    return QD_OK;
}

qd_status qd_shard_pack(qd_bound *b, const qd_action *a, qd_stream *stream)
{
    return copy(b, a, stream, true);
}

qd_status qd_shard_unpack(qd_bound *b, const qd_action *a, qd_stream *stream)
{
    return copy(b, a, stream, false);
}
