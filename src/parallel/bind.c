/* Binds a program: creates the communicators of its groups, finds the buffers that other ranks
 * access, and allocates memory. */
#include "parallel/bind.h"

#include "parallel/shard.h"

#include <stdlib.h>
#include <string.h>

static int find_group(const qd_group *groups, int count, qd_group wanted)
{
    for (int i = 0; i < count; i++)
        if (qd_group_equal(groups[i], wanted))
            return i;
    return -1;
}

/* The groups of the programs of all ranks that `share` (NULL: none) does not have, in the order of
 * ranks; pipeline stages may have different ones. Free *out. */
static qd_status all_groups(const qd_bound *b, const qd_bound *share, qd_group **out, int *count)
{
    const qd_program *p = b->program;
    enum { NUMBERS = 3 * QD_GROUP_LIMIT };
    int size = qd_comm_size(b->world);
    int64_t own[NUMBERS] = {0}, *all = malloc((size_t)size * sizeof own);
    qd_group *groups = malloc((size_t)size * QD_GROUP_LIMIT * sizeof *groups);
    for (int i = 0; i < p->group_count; i++) {
        if (share && find_group(share->program->groups, share->program->group_count, p->groups[i]) >= 0)
            continue;
        own[3 * i] = p->groups[i].axes;
        own[3 * i + 1] = p->groups[i].size;
        own[3 * i + 2] = p->groups[i].stride;
    }
    qd_status status = all && groups ? qd_comm_all_gather(b->world, own, all, (int64_t)size * NUMBERS, QD_I64, NULL)
                                     : QD_FAIL(QD_NO_MEMORY, "no memory for the groups of %d ranks", size);
    *count = 0;
    for (int i = 0; status == QD_OK && i < size * QD_GROUP_LIMIT; i++) {
        qd_group group = {(unsigned)all[3 * i], (int)all[3 * i + 1], (int)all[3 * i + 2]};
        if (group.size > 0 && find_group(groups, *count, group) < 0)
            groups[(*count)++] = group;
    }
    free(all);
    *out = groups;
    return status;
}

/* Splits are collective: every rank goes through all groups in the same order, and does not join
 * those that it does not need. A group that one rank has to create is created by all. */
static qd_status make_groups(qd_bound *b, const qd_bound *share, qd_comm *data)
{
    const qd_program *p = b->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    int rank = qd_comm_rank(b->world), count = 0;
    qd_group *groups = NULL;
    qd_status status = all_groups(b, share, &groups, &count);
    for (int i = 0; i < count && status == QD_OK; i++) {
        char name[48];
        qd_comm *unused;
        int own = find_group(p->groups, p->group_count, groups[i]);
        qd_group_name(mesh, groups[i], name, sizeof name);
        status = qd_comm_split(data, own >= 0 ? qd_group_colour(mesh, groups[i], rank) : -1, qd_group_coord(mesh, groups[i], rank), name,
                               own >= 0 ? &b->groups[own] : &unused);
    }
    for (int i = 0; i < p->group_count && status == QD_OK; i++) {
        b->group_borrowed[i] = !b->groups[i];
        if (b->group_borrowed[i])
            b->groups[i] = share->groups[find_group(share->program->groups, share->program->group_count, p->groups[i])];
    }
    free(groups);
    return status;
}

static void *shared_buffer(const qd_bound *share, const qd_program *program, const qd_buffer *buffer)
{
    int other = qd_memory_shared(share->program, program, buffer);
    return other >= 0 ? share->persistent[other] : NULL;
}

/* Smaller buffers are copied through the lanes of a communicator anyway, and a block that others
 * access takes whole pages. */
#define REACHED_LEAST (16 << 10)

static void reach(qd_bound *b, int buffer)
{
    const qd_program *p = b->program;
    if (buffer >= 0 && p->buffers[buffer].bytes >= REACHED_LEAST && !p->buffers[buffer].host)
        *(p->buffers[buffer].persistent ? &b->reached[buffer] : &b->dynamic_reached) = true;
}

/* Finds the buffers that other ranks copy from or to. Dynamic buffers share one area. */
static void find_reached(qd_bound *b)
{
    const qd_program *p = b->program;
    if (!qd_device_get_caps(b->device)->host_memory || qd_comm_size(b->world) == 1)
        return;
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        if (qd_action_communicates(a)) {
            reach(b, a->buffer);
            reach(b, a->part);
        } else if (qd_action_phases(a) && a->bytes > 0) { /* ops exchange ports and local values, never parameters */
            for (int u = QD_USE_IN; u < QD_USE_COUNT; u++)
                reach(b, a->use[u]);
            reach(b, p->persistent[QD_BUFFER_SCRATCH]);
        }
    }
}

/* Allocates zeroed device memory; `reached`: where other ranks can access it without system
 * calls. */
static qd_status take_memory(qd_bound *b, int64_t bytes, bool reached, void **address)
{
    if (!reached)
        return qd_device_alloc(b->device, bytes, address);
    QD_TRY(qd_comm_alloc(b->world, bytes, address));
    qd_device_adopt(b->device, bytes);
    b->reached_bytes += bytes;
    return QD_OK;
}

static void give_memory(qd_bound *b, void *address, int64_t bytes, bool reached)
{
    if (!reached) {
        qd_device_free(b->device, address, bytes);
    } else if (address) {
        qd_comm_free(b->world, address);
        qd_device_adopt(b->device, -bytes);
    }
}

/* Allocates a zeroed buffer in device or host memory. */
static qd_status take_buffer(qd_bound *b, int index, void **address)
{
    const qd_buffer *buffer = &b->program->buffers[index];
    if (!buffer->host)
        return take_memory(b, buffer->bytes, b->reached[index], address);
    QD_TRY(qd_host_alloc(b->device, buffer->bytes, address));
    b->host_bytes += buffer->bytes;
    memset(*address, 0, (size_t)buffer->bytes);
    return QD_OK;
}

static qd_status allocate(qd_bound *b, const qd_bound *share)
{
    const qd_program *p = b->program;
    b->persistent = calloc((size_t)p->buffer_count, sizeof *b->persistent);
    b->alive = calloc((size_t)p->buffer_count, sizeof *b->alive);
    b->borrowed = calloc((size_t)p->buffer_count, sizeof *b->borrowed);
    b->reached = calloc((size_t)p->buffer_count, sizeof *b->reached);
    b->lists = calloc((size_t)p->ledger->param_count + 1, sizeof *b->lists);
    if (!b->persistent || !b->alive || !b->borrowed || !b->reached || !b->lists)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the table of %d buffers", p->buffer_count);
    find_reached(b);
    for (int i = 0; i < p->buffer_count; i++) {
        if (!p->buffers[i].persistent)
            continue;
        b->alive[i] = true;
        b->persistent[i] = share ? shared_buffer(share, p, &p->buffers[i]) : NULL;
        b->borrowed[i] = b->persistent[i] != NULL;
        if (b->borrowed[i])
            continue;
        qd_status status = take_buffer(b, i, &b->persistent[i]);
        if (status != QD_OK)
            return qd_error_prefix(status, "rank %d, %s: ", qd_comm_rank(b->world), qd_buffer_kind_name(p->buffers[i].kind));
    }
    b->dynamic_borrowed = share && share->program->dynamic_bytes >= p->dynamic_bytes;
    if (b->dynamic_borrowed) {
        b->dynamic = share->dynamic;
        return QD_OK;
    }
    void *dynamic;
    qd_status status = take_memory(b, p->dynamic_bytes, b->dynamic_reached, &dynamic);
    if (status != QD_OK)
        return qd_error_prefix(status, "rank %d, activations: ", qd_comm_rank(b->world));
    b->dynamic = dynamic;
    return QD_OK;
}

qd_status qd_bind(const qd_program *program, qd_device *device, qd_comm *world, qd_comm *data, const qd_bound *share, qd_bound **bound)
{
    qd_bound *b = calloc(1, sizeof *b);
    if (!b)
        return QD_FAIL(QD_NO_MEMORY, "no memory to bind the program");
    *b = (qd_bound){.program = program, .device = device, .world = world};
    qd_status status = make_groups(b, share, data ? data : world);
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
        if (b->persistent[i] && !b->borrowed[i]) {
            if (p->buffers[i].host)
                qd_host_free(b->device, b->persistent[i]);
            else
                give_memory(b, b->persistent[i], p->buffers[i].bytes, b->reached[i]);
        }
    if (b->dynamic && !b->dynamic_borrowed)
        give_memory(b, b->dynamic, p->dynamic_bytes, b->dynamic_reached);
    for (int i = 0; i < p->group_count; i++)
        if (!b->group_borrowed[i])
            qd_comm_destroy(b->groups[i]);
    for (int i = 0; b->lists && i <= p->ledger->param_count; i++)
        qd_shard_lists_destroy(b->lists[i]);
    free(b->lists);
    free(b->persistent);
    free(b->alive);
    free(b->borrowed);
    free(b->reached);
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
