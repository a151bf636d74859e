/* The growing lists of a program under construction: buffers, actions, dependencies, groups. They
 * are copied to its arena at the end. */
#include "spec/program/program_impl.h"

#include <assert.h>
#include <stdlib.h>

void *qd_build_grow(qd_builder *b, void *array, int count, int *capacity, size_t size)
{
    if (count < *capacity)
        return array;
    int wanted = *capacity ? *capacity * 2 : 256;
    void *larger = realloc(array, (size_t)wanted * size);
    if (!larger) {
        b->no_memory = true;
        return array;
    }
    *capacity = wanted;
    return larger;
}

int qd_build_buffer(qd_builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes, bool persistent)
{
    qd_program *p = b->p;
    p->buffers = qd_build_grow(b, p->buffers, p->buffer_count, &b->capacity.buffers, sizeof *p->buffers);
    if (b->no_memory)
        return 0;
    p->buffers[p->buffer_count] =
        (qd_buffer){.kind = kind, .module = module, .microbatch = microbatch, .bytes = bytes, .persistent = persistent};
    if (persistent)
        p->persistent[kind] = p->buffer_count;
    return p->buffer_count++;
}

qd_action *qd_build_action(qd_builder *b, qd_action_kind kind, int module, int microbatch)
{
    static _Thread_local qd_action lost; /* written to when out of memory; the build then fails as a whole */
    qd_program *p = b->p;
    p->actions = qd_build_grow(b, p->actions, p->action_count, &b->capacity.actions, sizeof *p->actions);
    qd_action *a = b->no_memory ? &lost : &p->actions[p->action_count++];
    *a = (qd_action){.kind = (uint8_t)kind, .module = module, .microbatch = microbatch, .buffer = -1, .part = -1, .chunk = -1, .group = -1,
                     .dep_first = p->dep_count};
    for (int i = 0; i < QD_USE_COUNT; i++)
        a->use[i] = -1;
    return a;
}

void qd_build_dep(qd_builder *b, int on)
{
    qd_program *p = b->p;
    if (on < 0)
        return;
    p->deps = qd_build_grow(b, p->deps, p->dep_count, &b->capacity.deps, sizeof *p->deps);
    if (b->no_memory)
        return;
    p->deps[p->dep_count++] = on;
    p->actions[p->action_count - 1].dep_count++;
}

void qd_build_wait(qd_builder *b, int *on)
{
    qd_build_dep(b, *on);
    *on = -1;
}

int qd_build_alloc(qd_builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes)
{
    if (bytes == 0)
        return -1;
    int buffer = qd_build_buffer(b, kind, module, microbatch, bytes, false);
    qd_build_action(b, QD_ACTION_ALLOC, module, microbatch)->buffer = buffer;
    return buffer;
}

void qd_build_free(qd_builder *b, int *buffer)
{
    if (*buffer < 0 || b->no_memory)
        return;
    const qd_buffer *freed = &b->p->buffers[*buffer];
    qd_build_action(b, QD_ACTION_FREE, freed->module, freed->microbatch)->buffer = *buffer;
    *buffer = -1;
}

void qd_build_zero(qd_builder *b, int buffer, int64_t first, int64_t count, qd_dtype dtype)
{
    if (b->no_memory)
        return;
    qd_action *a = qd_build_action(b, QD_ACTION_ZERO, -1, -1);
    a->module = b->p->buffers[buffer].module;
    a->buffer = buffer;
    a->first = first;
    a->count = count;
    a->dtype = dtype;
}

int qd_build_group(qd_builder *b, qd_group group)
{
    qd_program *p = b->p;
    if (group.size == 1)
        return -1;
    for (int i = 0; i < p->group_count; i++)
        if (qd_group_equal(p->groups[i], group))
            return i;
    assert(p->group_count < QD_GROUP_LIMIT);
    p->groups[p->group_count] = group;
    return p->group_count++;
}

int qd_build_last_compute(const qd_builder *b)
{
    for (int i = b->p->action_count - 1; i >= 0; i--) {
        const qd_action *a = &b->p->actions[i];
        if (a->stream == QD_STREAM_COMPUTE && a->kind != QD_ACTION_ALLOC && a->kind != QD_ACTION_FREE)
            return i;
    }
    return -1;
}

qd_action *qd_build_collective(qd_builder *b, qd_action_kind kind, int module, int group, int64_t count, qd_dtype dtype, int after)
{
    int size = b->p->groups[group].size;
    qd_action *a = qd_build_action(b, kind, module, -1);
    a->stream = b->strategy->overlap ? QD_STREAM_COMM : QD_STREAM_COMPUTE;
    a->group = group;
    a->count = count;
    a->dtype = dtype;
    a->bytes = qd_coll_bytes(qd_action_collective(kind), count, dtype, size) * (b->ledger->mesh.world / size);
    if (b->strategy->overlap)
        qd_build_dep(b, after);
    return a;
}

int64_t qd_build_module_first(const qd_builder *b, int module)
{
    for (int i = b->ledger->modules[module].param_begin; i < b->ledger->param_count; i++)
        if (b->ledger->params[i].tied_to < 0)
            return b->p->storage.offset[i];
    return b->p->storage.values;
}

int64_t qd_build_module_values(const qd_builder *b, int module)
{
    for (int i = module < b->modules ? b->ledger->modules[module].param_begin : b->ledger->param_count; i < b->ledger->param_count; i++)
        if (b->ledger->params[i].tied_to < 0)
            return b->p->storage.value[i];
    return module < b->modules ? b->p->storage.stored : b->p->storage.params;
}
