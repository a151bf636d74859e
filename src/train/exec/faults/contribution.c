/* Searches contributions for non-finite numbers, and hashes them. See contribution.h. */
#include "train/exec/faults/contribution.h"

#include "base/half.h"

#include <math.h>
#include <stdlib.h>
#include <xxhash.h>

/* What is being summed over ranks. */
typedef enum look_kind { LOOK_GRADIENT, LOOK_LOSS, LOOK_SUMS } look_kind;

/* Checks `count` elements of a summand, copied to host memory; the first one has index `first`. */
static void look_at_piece(const qd_bound *b, const qd_step_input *in, const void *piece, int64_t first, int64_t count,
                          qd_dtype dtype, look_kind what)
{
    const qd_program *p = b->program;
    qd_nonfinite_finding *look = in->look;
    for (int64_t i = 0; i < count; i++) {
        double value = dtype == QD_F64   ? ((const double *)piece)[i]
                       : dtype == QD_F32 ? ((const float *)piece)[i]
                                         : qd_bf16_to_f32(((const uint16_t *)piece)[i]);
        int64_t at = first + i;
        if (isfinite(value))
            continue;
        look->loss = look->loss || what == LOOK_LOSS;
        if (what == LOOK_SUMS && look->gradient < 0)
            look->gradient = (int)at;
        for (int k = 0; what == LOOK_GRADIENT && look->gradient < 0 && k < p->ledger->param_count; k++)
            if (p->ledger->params[k].tied_to < 0 && at >= p->storage.offset[k] && at < p->storage.offset[k] + p->storage.trained[k])
                look->gradient = k;
    }
}

/* Checks this rank's contribution to a sum over ranks, in pieces: elements [first, first + length)
 * of the loss, of the gradients, or of the norm's sums per parameter. Pieces are large because the
 * host, and with it the other ranks, wait for each one. */
static qd_status look_at(const qd_bound *b, const qd_step_input *in, const void *data, int64_t first, int64_t length,
                         qd_dtype dtype, look_kind what)
{
    enum { PIECE = 1 << 18 };
    int64_t size = (int64_t)qd_dtype_size(dtype), most = length < PIECE ? length : PIECE;
    void *piece = malloc((size_t)(most * size) + 1);
    qd_status status = piece ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to search for non-finite numbers");
    for (int64_t done = 0; done < length && status == QD_OK; done += PIECE) {
        int64_t count = length - done < PIECE ? length - done : PIECE;
        status = qd_copy(qd_device_compute_stream(b->device), piece, (const char *)data + done * size, count * size);
        if (status == QD_OK)
            status = qd_stream_wait(qd_device_compute_stream(b->device));
        if (status == QD_OK)
            look_at_piece(b, in, piece, first + done, count, dtype, what);
    }
    free(piece);
    return status;
}

/* Sums per parameter identify a rank only where gradients were not summed over other ranks
 * before. */
static qd_status look_before(const qd_bound *b, const qd_step_input *in, const qd_action *a, const void *data)
{
    const qd_program *p = b->program;
    if (a->buffer == p->persistent[QD_BUFFER_LOSS])
        return look_at(b, in, data, a->first, a->count, a->dtype, LOOK_LOSS);
    if (a->buffer != p->persistent[QD_BUFFER_SUMS])
        return look_at(b, in, data, a->first, a->count, a->dtype, LOOK_GRADIENT);
    return qd_mesh_group_size(&p->ledger->mesh, QD_AXES_DATA) > 1 ? QD_OK : look_at(b, in, data, a->first, a->count, a->dtype, LOOK_SUMS);
}

/* Adds bytes to the hash of an action. */
static void add_hash(uint64_t *hash, const void *data, int64_t bytes)
{
    *hash = XXH3_64bits_withSeed(data, (size_t)bytes, *hash);
}

/* The first time hashes are kept; the second time they are compared. */
static void take_hash(qd_gradient_check *check, int index, uint64_t hash)
{
    if (check->second && check->first < 0 && check->hashes[index] != hash)
        check->first = index;
    check->hashes[index] = hash;
}

/* The gradients that an action reduces, at `data`, without the padding between them, which may hold
 * anything. */
static uint64_t hash_gradients(const qd_program *p, const qd_action *a, const void *data)
{
    const int64_t size = (int64_t)qd_dtype_size(a->dtype), end = a->first + a->count;
    const qd_storage *s = &p->storage;
    const bool sharded = p->buffers[a->buffer].sharded;
    uint64_t hash = 0;
    for (int i = 0; i < p->ledger->param_count; i++) {
        int64_t from = (sharded ? s->shard_offset : s->offset)[i], until = from + (sharded ? s->shard_count : s->trained)[i];
        from = from > a->first ? from : a->first;
        until = until < end ? until : end;
        if (p->ledger->params[i].tied_to < 0 && from < until)
            add_hash(&hash, (const char *)data + (from - a->first) * size, (until - from) * size);
    }
    return hash;
}

qd_status qd_contribution_reduced(const qd_bound *b, const qd_step_input *in, const qd_action *a, int index, const void *data)
{
    /* What is summed later, the loss and the norm, differs on all ranks. */
    if (in->check && a->buffer != b->program->persistent[QD_BUFFER_LOSS] && a->buffer != b->program->persistent[QD_BUFFER_SUMS])
        take_hash(in->check, index, hash_gradients(b->program, a, data));
    if (!in->look || b->program->buffers[a->buffer].sharded) /* shards were checked before their reduce_scatter */
        return QD_OK;
    return look_before(b, in, a, data);
}

qd_status qd_contribution_scattered(const qd_bound *b, const qd_step_input *in, const qd_action *a, int index)
{
    const qd_storage *s = &b->program->storage;
    uint64_t hash = 0;
    for (int i = a->param; i < a->param + a->params && (in->look || in->check); i++) {
        void *data;
        if (b->program->ledger->params[i].tied_to >= 0 || s->trained[i] == 0)
            continue;
        QD_TRY(qd_bound_at(b, a->buffer, s->offset[i], a->dtype, &data));
        if (in->check)
            add_hash(&hash, data, s->count[i] * (int64_t)qd_dtype_size(a->dtype));
        if (in->look)
            QD_TRY(look_at(b, in, data, s->offset[i], s->count[i], a->dtype, LOOK_GRADIENT));
    }
    if (in->check)
        take_hash(in->check, index, hash);
    return QD_OK;
}

void qd_contribution_kept(const qd_bound *b, const qd_step_input *in, const qd_action *a, int index)
{
    const qd_program *p = b->program;
    const qd_module *module = &p->ledger->modules[a->module];
    const int64_t size = (int64_t)qd_dtype_size(p->strategy.grad);
    uint64_t hash = 0;
    if (!in->check || qd_mesh_group_size(&p->ledger->mesh, QD_AXES_DATA) > 1)
        return;
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
        qd_holding own = qd_program_holding(p, QD_BUFFER_GRAD, i);
        if (p->ledger->params[i].tied_to < 0 && own.count > 0)
            add_hash(&hash, (const char *)qd_bound_kind(b, QD_BUFFER_GRAD) + own.offset * size, own.count * size);
    }
    take_hash(in->check, index, hash);
}
