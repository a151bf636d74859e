#include "parallel/bind.h"

#include "comm/device.h"
#include "parallel/shard.h"

#include <stdlib.h>
#include <string.h>

/* Ranks walk the groups in the same order, so the collective splits match. */
static qd_status make_groups(qd_bound *b)
{
    const qd_program *p = b->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    int rank = qd_comm_rank(b->world);
    if (!qd_device_get_caps(b->device)->host_memory && qd_comm_size(b->world) > 1)
        QD_TRY(qd_comm_on_device(b->world, b->device, strcmp(qd_comm_backend(b->world), "mpi") == 0 ? "nccl" : "local",
                                 &b->device_world));
    qd_comm *parent = b->device_world ? b->device_world : b->world;
    for (int i = 0; i < p->group_count; i++) {
        char name[48];
        qd_group_name(mesh, p->groups[i], name, sizeof name);
        QD_TRY(qd_comm_split(parent, qd_group_colour(mesh, p->groups[i], rank), qd_group_coord(mesh, p->groups[i], rank), name,
                             &b->groups[i]));
    }
    return QD_OK;
}

static void *shared_buffer(const qd_bound *share, const qd_buffer *buffer)
{
    int other = share->program->persistent[buffer->kind];
    return other >= 0 && share->program->buffers[other].bytes == buffer->bytes ? share->persistent[other] : NULL;
}

static qd_status allocate(qd_bound *b, const qd_bound *share)
{
    const qd_program *p = b->program;
    b->persistent = calloc((size_t)p->buffer_count, sizeof *b->persistent);
    b->alive = calloc((size_t)p->buffer_count, sizeof *b->alive);
    b->borrowed = calloc((size_t)p->buffer_count, sizeof *b->borrowed);
    b->lists = calloc((size_t)p->ledger->param_count + 1, sizeof *b->lists);
    if (!b->persistent || !b->alive || !b->borrowed || !b->lists)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the table of %d buffers", p->buffer_count);
    for (int i = 0; i < p->buffer_count; i++) {
        if (!p->buffers[i].persistent)
            continue;
        b->alive[i] = true;
        b->persistent[i] = share ? shared_buffer(share, &p->buffers[i]) : NULL;
        b->borrowed[i] = b->persistent[i] != NULL;
        if (b->borrowed[i])
            continue;
        qd_status status = qd_device_alloc(b->device, p->buffers[i].bytes, &b->persistent[i]);
        if (status != QD_OK)
            return qd_error_prefix(status, "rank %d, %s: ", qd_comm_rank(b->world), qd_buffer_kind_name(p->buffers[i].kind));
    }
    void *dynamic;
    qd_status status = qd_device_alloc(b->device, p->dynamic_bytes, &dynamic);
    if (status != QD_OK)
        return qd_error_prefix(status, "rank %d, activations: ", qd_comm_rank(b->world));
    b->dynamic = dynamic;
    return QD_OK;
}

qd_status qd_bind(const qd_program *program, qd_device *device, qd_comm *world, const qd_bound *share, qd_bound **bound)
{
    qd_bound *b = calloc(1, sizeof *b);
    if (!b)
        return QD_FAIL(QD_NO_MEMORY, "no memory to bind the program");
    *b = (qd_bound){.program = program, .device = device, .world = world};
    qd_status status = make_groups(b);
    if (status == QD_OK)
        status = allocate(b, share);
    if (status != QD_OK) {
        qd_bound_destroy(b);
        return status;
    }
    *bound = b;
    return QD_OK;
}

void qd_bound_destroy(qd_bound *b)
{
    if (!b)
        return;
    const qd_program *p = b->program;
    for (int i = 0; b->persistent && i < p->buffer_count; i++)
        if (b->persistent[i] && !b->borrowed[i])
            qd_device_free(b->device, b->persistent[i], p->buffers[i].bytes);
    if (b->dynamic)
        qd_device_free(b->device, b->dynamic, p->dynamic_bytes);
    for (int i = 0; i < p->group_count; i++)
        qd_comm_destroy(b->groups[i]);
    qd_comm_destroy(b->device_world);
    for (int i = 0; b->lists && i <= p->ledger->param_count; i++)
        qd_shard_lists_destroy(b->lists[i]);
    free(b->lists);
    free(b->persistent);
    free(b->alive);
    free(b->borrowed);
    free(b);
}

qd_status qd_bound_buffer(const qd_bound *b, int buffer, void **address)
{
    const qd_program *p = b->program;
    if (buffer < 0 || buffer >= p->buffer_count || !b->alive[buffer])
        return QD_FAIL(QD_SYSTEM, "step program: buffer %d is used where it is not allocated", buffer);
    *address = b->persistent[buffer] ? b->persistent[buffer] : b->dynamic + p->buffers[buffer].offset;
    return QD_OK;
}

qd_status qd_bound_at(const qd_bound *b, int buffer, int64_t element, qd_dtype dtype, void **address)
{
    QD_TRY(qd_bound_buffer(b, buffer, address));
    *address = (char *)*address + (element - b->program->buffers[buffer].first) * (int64_t)qd_dtype_size(dtype);
    return QD_OK;
}

qd_comm *qd_bound_axes(const qd_bound *b, unsigned axes)
{
    const qd_program *p = b->program;
    for (int i = 0; i < p->group_count; i++)
        if (qd_group_equal(p->groups[i], qd_group_whole(&p->ledger->mesh, axes)))
            return b->groups[i];
    return NULL;
}

void *qd_bound_kind(const qd_bound *b, qd_buffer_kind kind)
{
    int buffer = b->program->persistent[kind];
    return buffer >= 0 ? b->persistent[buffer] : NULL;
}
