/* Lays out a rank's parameters in whole and sharded buffers. */
#include "spec/layout/storage.h"

#include <string.h>

static int64_t align(int64_t elements)
{
    return (elements + QD_STORAGE_ALIGN - 1) / QD_STORAGE_ALIGN * QD_STORAGE_ALIGN;
}

qd_status qd_storage_create(const qd_ledger *ledger, int rank, int parts, int part, qd_arena *arena, qd_storage *s)
{
    return qd_storage_create_shares(ledger, rank, (qd_share[QD_FAMILY_COUNT]){{parts, part}, {parts, part}}, arena, s);
}

qd_status qd_storage_create_shares(const qd_ledger *ledger, int rank, const qd_share shares[QD_FAMILY_COUNT], qd_arena *arena,
                                   qd_storage *s)
{
    memset(s, 0, sizeof *s);
    memcpy(s->share, shares, sizeof s->share);
    s->parts = shares[0].parts;
    s->part = shares[0].part;
    s->family = QD_ARENA_NEW(arena, uint8_t, ledger->param_count);
    if (!s->family)
        return QD_NO_MEMORY;
    int64_t **const tables[] = {&s->offset, &s->count, &s->rows, &s->trained, &s->value, &s->shard_offset, &s->shard_count, &s->shard_value,
                                &s->shard_row};
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++) {
        *tables[t] = QD_ARENA_NEW(arena, int64_t, ledger->param_count);
        if (!*tables[t])
            return QD_NO_MEMORY;
    }
    int fuse = -1, stage = qd_mesh_group_coord(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_PP), rank);
    s->copied = -1;
    for (int i = 0; i < ledger->param_count; i++) {
        const qd_param *p = &ledger->params[i];
        qd_atom atom = {{0, 0}, {0, 0}};
        if (ledger->modules[p->module].stage_rank == stage) /* in a long pipeline a rank holds few of the parameters */
            atom = qd_ledger_atom(ledger, i, rank);
        int64_t *end = p->tied_to >= 0 ? &s->tied : &s->values;
        if (p->fuse != fuse) {
            *end = align(*end);
            s->stored = align(s->stored);
        }
        fuse = p->fuse;
        s->offset[i] = *end;
        s->count[i] = qd_atom_count(&atom, p->ndim);
        s->rows[i] = atom.length[0];
        s->trained[i] = p->frozen ? 0 : s->count[i];
        *end += s->trained[i];
        s->shard_offset[i] = s->shard_values;
        s->shard_value[i] = s->shard_params;
        s->family[i] = p->family;
        s->shard_row[i] = s->shard_rows[p->family];
        s->value[i] = p->tied_to >= 0 ? s->value[p->tied_to] : s->stored;
        if (p->tied_to >= 0) {
            s->copied = s->count[i] > 0 && s->count[p->tied_to] == 0 ? i : s->copied;
            continue;
        }
        s->stored += s->count[i];
        s->held += s->count[i];
        qd_extent own = qd_storage_part(s, i, shares[p->family].parts, shares[p->family].part);
        s->shard_params += own.count;
        if (p->frozen)
            continue;
        s->whole_rows[p->family] += s->rows[i];
        s->shard_count[i] = own.count;
        s->shard_values += own.count;
        s->shard_rows[p->family] += own.rows;
    }
    s->values = align(s->values);
    s->stored = s->params = align(s->stored);
    s->tied = align(s->tied);
    if (s->copied < 0)
        return QD_OK;
    s->value[s->copied] = s->stored;
    s->params = align(s->stored + s->count[s->copied]);
    s->shard_offset[s->copied] = s->shard_values;
    s->shard_value[s->copied] = s->shard_params;
    s->shard_count[s->copied] = qd_storage_part(s, s->copied, s->parts, s->part).count; /* never belongs to an expert */
    s->shard_params += s->shard_count[s->copied];
    return QD_OK;
}

qd_extent qd_storage_part(const qd_storage *s, int param, int parts, int part)
{
    qd_extent e = {0};
    if (s->rows[param] == 0)
        return e; /* the common case for experts */
    int64_t cols = s->count[param] / s->rows[param];
    qd_slice(s->rows[param], parts, part, &e.first_row, &e.rows);
    e.first = e.first_row * cols;
    e.count = e.rows * cols;
    return e;
}

int64_t qd_storage_run(const qd_ledger *ledger, const qd_storage *s, int param, int params, int parts, int part, bool all)
{
    int64_t count = 0;
    for (int i = param; i < param + params; i++)
        if (qd_storage_moves(ledger, s, i, all))
            count += qd_storage_part(s, i, parts, part).count;
    return count;
}
