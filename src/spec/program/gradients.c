/* Gradients in the step: where they are collected, how they are reduced over ranks, and where the
 * sums end up.
 *
 * They are collected in GRAD itself, or (zero 2 and 3, or a reduction after each micro-batch) in a
 * separate buffer for a block of modules that lives until it is reduced. They are all-reduced (zero
 * 0), or reduce-scattered over the ranks that share a copy and then all-reduced over the replicas.
 * The sums end up in GRAD: reduced in place, unpacked into it, received by it, or added to it.
 *
 * The reduction of a block overlaps with the computation of the next one. The actions that follow a
 * reduction are therefore emitted one block later. */
#include "spec/layout/experts.h"
#include "spec/program/program_impl.h"

#include <string.h>

static int slot_of(const qd_builder *b, int block, int microbatch)
{
    return block * b->grad.depth + microbatch % b->grad.depth;
}

static qd_grad_slot *slot_at(const qd_builder *b, int module, int microbatch)
{
    return &b->grad.slots[slot_of(b, b->grad.block_of[module], microbatch)];
}

static int64_t module_end(const qd_builder *b, int module)
{
    return module + 1 < b->modules ? qd_build_module_first(b, module + 1) : b->p->storage.values;
}

static int64_t grad_size(const qd_builder *b)
{
    return (int64_t)qd_dtype_size(b->strategy->grad);
}

static bool overwrites(const qd_op *op)
{
    return op->overwrites;
}

static bool sums_squares(const qd_op *op)
{
    return op->squares;
}

/* Marks the parameters of a module whose gradients are written by ops that `picks` accepts. */
static void mark_gradients(const qd_builder *b, int module, bool (*picks)(const qd_op *), bool *marks)
{
    const qd_module_class *c = qd_program_class(b->p, module);
    for (int i = 0; i < c->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS && picks(&c->ops[i]); j++) {
            const qd_slot *slot = c->ops[i].slot[j] >= 0 ? &c->slots[c->ops[i].slot[j]] : NULL;
            if (slot && slot->kind == QD_SLOT_GRAD)
                memset(marks + b->ledger->modules[module].param_begin + slot->param, true, (size_t)slot->param_count);
        }
}

static qd_status find_written(qd_builder *b, qd_arena *arena)
{
    b->grad.overwritten = QD_ARENA_NEW(arena, bool, b->ledger->param_count);
    b->grad.phases = QD_ARENA_NEW(arena, uint8_t, (size_t)b->modules * (size_t)b->grad.depth);
    if (!b->grad.overwritten || !b->grad.phases)
        return QD_NO_MEMORY;
    for (int module = 0; module < b->modules; module++) {
        if (!qd_build_holds(b, module))
            continue;
        mark_gradients(b, module, overwrites, b->grad.overwritten);
        if (!qd_program_class(b->p, module)->square_phases)
            continue;
        b->p->squared = b->p->squared ? b->p->squared : QD_ARENA_NEW(arena, bool, b->ledger->param_count);
        if (!b->p->squared)
            return QD_NO_MEMORY;
        mark_gradients(b, module, sums_squares, b->p->squared);
    }
    return QD_OK;
}

/* Zeroes the gradients of modules low .. high that no op overwrites: of tied parameters, or of the
 * others. */
static void zero_gradients(qd_builder *b, int buffer, int low, int high, bool tied)
{
    const qd_module *last = &b->ledger->modules[high];
    const qd_storage *s = &b->p->storage;
    int64_t first = 0, count = 0;
    for (int i = b->ledger->modules[low].param_begin; i <= last->param_begin + last->param_count; i++) {
        bool ends = i == last->param_begin + last->param_count;
        if (!ends && (s->trained[i] == 0 || (b->ledger->params[i].tied_to >= 0) != tied))
            continue;
        if (!ends && !b->grad.overwritten[i]) { /* merge neighbours, including the padding between them */
            first = count > 0 ? first : s->offset[i];
            count = s->offset[i] + s->trained[i] - first;
        } else if (count > 0) {
            qd_build_zero(b, buffer, first, count, b->strategy->grad);
            count = 0;
        }
    }
}

qd_status qd_gradients_create(qd_builder *b, qd_arena *arena)
{
    b->grad.block_of = QD_ARENA_NEW(arena, int, b->modules);
    b->grad.blocks = QD_ARENA_NEW(arena, qd_grad_block, b->modules);
    if (!b->grad.block_of || !b->grad.blocks)
        return QD_NO_MEMORY;
    b->grad.in_blocks = b->strategy->zero >= 2 || b->strategy->sync_each;
    b->grad.depth = b->strategy->sync_each ? b->flight.depth : 1;
    b->grad.last_action = -1;
    QD_TRY(find_written(b, arena));
    for (int module = b->modules - 1, high = module; module >= 0; module--) {
        b->grad.block_of[module] = b->grad.block_count;
        int64_t bytes = (module_end(b, high) - qd_build_module_first(b, module)) * grad_size(b);
        if (!qd_build_holds(b, module)) {
            high = module - 1;
            continue;
        }
        bool ends = module == 0 || b->ledger->modules[module - 1].stage != b->ledger->modules[module].stage;
        if (!ends && bytes < b->strategy->bucket_bytes)
            continue;
        b->grad.blocks[b->grad.block_count++] = (qd_grad_block){.low = module, .high = high};
        high = module - 1;
    }
    int slots = b->grad.block_count * b->grad.depth;
    b->grad.slots = QD_ARENA_NEW(arena, qd_grad_slot, slots);
    b->grad.tied = QD_ARENA_NEW(arena, int, 2 * b->grad.depth);
    if (!b->grad.slots || !b->grad.tied)
        return QD_NO_MEMORY;
    b->grad.tied_arrives = b->grad.tied + b->grad.depth;
    memset(b->grad.tied, 0xff, (size_t)(2 * b->grad.depth) * sizeof *b->grad.tied);
    for (int i = 0; i < slots; i++)
        b->grad.slots[i].buffer = -1;
    return QD_OK;
}

int64_t qd_gradients_storage(const qd_builder *b, bool *sharded)
{
    const qd_strategy *s = b->strategy;
    *sharded = s->zero >= 2 || (s->zero == 1 && s->sync_each);
    return *sharded ? b->p->storage.shard_values : b->p->storage.values;
}

static bool has_tied(const qd_builder *b, int module)
{
    int tied = b->gather.units[module].tied;
    return tied >= 0 && !b->ledger->params[tied].frozen;
}

void qd_gradients_begin(qd_builder *b)
{
    if (!b->strategy->training || b->grad.in_blocks)
        return;
    zero_gradients(b, b->p->persistent[QD_BUFFER_GRAD], 0, b->modules - 1, false);
    zero_gradients(b, b->p->persistent[QD_BUFFER_TIED_GRAD], 0, b->modules - 1, true);
}

static void finish_until(qd_builder *b, int until);

bool qd_gradients_first(qd_builder *b, int module, int microbatch, unsigned phases)
{
    uint8_t *written = &b->grad.phases[module * b->grad.depth + microbatch % b->grad.depth];
    bool first = qd_program_class(b->p, module)->overwrite_phases & phases && !(*written & phases);
    *written |= (uint8_t)phases;
    return first;
}

void qd_gradients_before(qd_builder *b, int item)
{
    int module = b->order.items[item].module, mb = b->order.items[item].microbatch;
    if (!b->strategy->training || !b->grad.in_blocks ||
        !(qd_program_class(b->p, module)->grad_phases & qd_pass_phases((qd_pass)b->order.items[item].pass)))
        return;
    const qd_grad_block *block = &b->grad.blocks[b->grad.block_of[module]];
    qd_grad_slot *slot = slot_at(b, module, mb);
    if (slot->reducing)
        finish_until(b, slot->pending + slot->pending_count);
    if (slot->buffer < 0) {
        int64_t first = qd_build_module_first(b, block->low);
        slot->buffer = qd_build_alloc(b, QD_BUFFER_GRAD_BLOCK, block->high, b->grad.depth > 1 ? mb : -1,
                                      (module_end(b, block->high) - first) * grad_size(b));
        if (b->no_memory)
            return;
        if (slot->buffer >= 0) { /* else: tied parameters only */
            b->p->buffers[slot->buffer].first = first;
            zero_gradients(b, slot->buffer, block->low, block->high, false);
        }
    }
    int *tied = &b->grad.tied[mb % b->grad.depth];
    if (*tied < 0 && has_tied(b, module) && b->order.items[item].pass != QD_PASS_W) { /* complete after phase I */
        *tied = qd_build_alloc(b, QD_BUFFER_TIED_GRAD, module, -1, b->p->storage.tied * grad_size(b));
        zero_gradients(b, *tied, module, module, true);
    }
}

static int tied_buffer(const qd_builder *b, int microbatch)
{
    int persistent = b->p->persistent[QD_BUFFER_TIED_GRAD];
    return persistent >= 0 ? persistent : b->grad.tied[microbatch % b->grad.depth];
}

void qd_gradients_uses(const qd_builder *b, int module, int microbatch, int32_t *use)
{
    use[QD_USE_GRAD] = b->grad.in_blocks ? slot_at(b, module, microbatch)->buffer : b->p->persistent[QD_BUFFER_GRAD];
    if (has_tied(b, module))
        use[QD_USE_TIED_GRAD] = tied_buffer(b, microbatch);
}

/* The start of a reduction. */

static qd_pending *add_pending(qd_builder *b, int low)
{
    static _Thread_local qd_pending lost;
    b->grad.pending = qd_build_grow(b, b->grad.pending, b->grad.pending_count, &b->grad.pending_capacity, sizeof *b->grad.pending);
    qd_pending *pending = b->no_memory ? &lost : &b->grad.pending[b->grad.pending_count++];
    *pending = (qd_pending){.low = low, .part = -1, .slot = -1};
    return pending;
}

/* Reduces elements [first, last) over a group, in pieces of at most a bucket. */
static void reduce_range(qd_builder *b, const qd_grad_block *block, int buffer, int group, int64_t first, int64_t last)
{
    int64_t most = b->strategy->bucket_bytes / grad_size(b);
    most = most < 1 ? 1 : most;
    while (last > first) {
        int64_t from = last - first > most + most / 2 ? last - most : first; /* avoid a tiny remainder */
        qd_action *a = qd_build_collective(b, QD_ACTION_REDUCE, -1, group, last - from, b->strategy->grad, b->grad.last_action);
        a->buffer = buffer;
        a->first = from;
        qd_pending *pending = add_pending(b, block->low);
        pending->action = b->p->action_count - 1;
        pending->first = from;
        pending->count = last - from;
        pending->part = -1;
        pending->from = buffer;
        last = from;
    }
}

/* The first parameter of the run before `end` that belongs to one family; families are
 * contiguous. */
static int family_begin(const qd_builder *b, int begin, int end)
{
    int family = b->ledger->params[end - 1].family;
    while (end > begin && b->ledger->params[end - 1].family == family)
        end--;
    return end;
}

static void reduce_whole(qd_builder *b, const qd_grad_block *block, int buffer)
{
    const qd_module *low = &b->ledger->modules[block->low], *high = &b->ledger->modules[block->high];
    int begin = low->param_begin, end = high->param_begin + high->param_count;
    int64_t last = module_end(b, block->high);
    while (end > begin) {
        int family = b->ledger->params[end - 1].family, group = b->group.data[family];
        end = family_begin(b, begin, end);
        int64_t first = end > begin ? b->p->storage.offset[end] : qd_build_module_first(b, block->low);
        if (group >= 0)
            reduce_range(b, block, buffer, group, first, last);
        else if (b->grad.in_blocks && last > first) /* no other rank to reduce with, but they are added to GRAD like the others */
            *add_pending(b, block->low) = (qd_pending){.action = -1, .low = block->low, .first = first, .count = last - first, .part = -1,
                                                      .from = buffer, .slot = -1};
        last = first;
    }
}

/* The run of whole parameters that ends before `end` and has about the size of a bucket; *param:
 * its first parameter. */
static int64_t choose_run(const qd_builder *b, int begin, int end, int *param)
{
    int64_t count = 0;
    *param = end;
    while (*param > begin && (count == 0 || (count + b->p->storage.trained[*param - 1]) * grad_size(b) <= b->strategy->bucket_bytes)) {
        --*param;
        count += b->ledger->params[*param].tied_to < 0 ? b->p->storage.trained[*param] : 0;
    }
    return count;
}

static void reduce_parts(qd_builder *b, const qd_grad_block *block, int buffer)
{
    const qd_storage *storage = &b->p->storage;
    const qd_module *low = &b->ledger->modules[block->low], *high = &b->ledger->modules[block->high];
    int begin = low->param_begin, end = high->param_begin + high->param_count;
    end -= end - 1 == storage->copied; /* its gradient is sent to another stage */
    while (end > begin) {
        int param;
        int family = b->ledger->params[end - 1].family;
        qd_share share = storage->share[family];
        int64_t count = choose_run(b, family_begin(b, begin, end), end, &param);
        int64_t own = qd_storage_run(b->ledger, storage, param, end - param, share.parts, share.part, false);
        bool alone = b->group.shard[family] < 0, replicas = b->group.replica[family] >= 0;
        if (alone && !replicas && b->strategy->zero == 1 && !b->strategy->sync_each) { /* whole and already in place */
            end = param;
            continue;
        }
        int part = b->p->persistent[QD_BUFFER_GRAD];
        bool direct = b->strategy->zero >= 2 && !b->strategy->sync_each;
        if (!direct) {
            part = qd_build_alloc(b, QD_BUFFER_PART, b->ledger->params[param].module, -1, own * grad_size(b));
            if (part >= 0 && !b->no_memory) {
                b->p->buffers[part].sharded = true;
                b->p->buffers[part].first = storage->shard_offset[param];
            }
        }
        if (count > 0) {
            qd_action *a = alone ? qd_build_action(b, QD_ACTION_PACK, -1, -1)
                                 : qd_build_collective(b, QD_ACTION_REDUCE_SCATTER, -1, b->group.shard[family], count, b->strategy->grad,
                                                       b->grad.last_action);
            a->dtype = b->strategy->grad;
            a->buffer = buffer;
            a->part = part;
            a->param = param;
            a->params = end - param;
            a->parts = share.parts;
            qd_pending *pending = add_pending(b, block->low);
            *pending = (qd_pending){.action = alone && !replicas ? -1 : b->p->action_count - 1,
                                    .low = block->low,
                                    .param = param,
                                    .params = end - param,
                                    .first = storage->shard_offset[param],
                                    .count = own,
                                    .part = direct ? -1 : part,
                                    .replicas = replicas,
                                    .slot = -1};
        }
        end = param;
    }
}

/* The end of a reduction. */

/* Reduces this rank's part over the replicas. Ranks at the same position of each copy hold the same
 * parts. */
static void reduce_replicas(qd_builder *b, qd_pending *pending)
{
    if (!pending->replicas || b->no_memory)
        return;
    pending->replicas = false;
    if (pending->count == 0)
        return; /* the same on all ranks of the group */
    const qd_storage *s = &b->p->storage;
    int family = s->family[pending->param], parts = s->share[family].parts, copies = b->p->groups[b->group.replica[family]].size;
    qd_action *a =
        qd_build_collective(b, QD_ACTION_REDUCE, -1, b->group.replica[family], pending->count, b->strategy->grad, pending->action);
    a->buffer = pending->part >= 0 ? pending->part : b->p->persistent[QD_BUFFER_GRAD];
    a->first = pending->first;
    a->bytes = 0; /* groups at other positions of the copies have different parts */
    for (int part = 0; part < parts; part++)
        a->bytes += qd_coll_bytes(QD_COLL_ALL_REDUCE, qd_storage_run(b->ledger, s, pending->param, pending->params, parts, part, false),
                                  b->strategy->grad, copies) * (b->ledger->mesh.world / (parts * copies));
    pending->action = b->p->action_count - 1;
}

static void wait_pending(qd_builder *b, const qd_pending *pending)
{
    if (b->strategy->overlap)
        qd_build_dep(b, pending->action);
}

static void finish_pending(qd_builder *b, qd_pending *pending)
{
    const qd_strategy *s = b->strategy;
    int grad = b->p->persistent[QD_BUFFER_GRAD];
    reduce_replicas(b, pending);
    if (s->sync_each && (s->zero == 0 || pending->part >= 0)) {
        qd_action *a = qd_build_action(b, QD_ACTION_ADD, -1, -1);
        a->buffer = grad;
        a->part = s->zero == 0 ? pending->from : pending->part;
        a->first = pending->first;
        a->count = pending->count;
        a->dtype = s->grad;
        a->overwrite = pending->overwrite;
        wait_pending(b, pending);
    } else if (s->zero == 1 && pending->part >= 0) {
        qd_action *a = qd_build_action(b, QD_ACTION_UNPACK, -1, -1);
        a->buffer = grad;
        a->part = pending->part;
        a->param = pending->param;
        a->params = pending->params;
        a->parts = qd_storage_share(&b->p->storage, pending->param).parts;
        a->dtype = s->grad;
        wait_pending(b, pending);
    }
    qd_build_free(b, &pending->part);
    if (pending->slot >= 0 && b->grad.in_blocks) {
        const qd_grad_slot *slot = &b->grad.slots[pending->slot];
        qd_build_free(b, &b->grad.slots[pending->slot].buffer);
        for (int k = slot->pending; k < slot->pending + slot->pending_count; k++)
            wait_pending(b, &b->grad.pending[k]);
        b->grad.slots[pending->slot].reducing = false;
    }
}

/* Emits what follows the reductions before number `until`. */
static void finish_until(qd_builder *b, int until)
{
    for (; b->grad.pending_done < until && !b->no_memory; b->grad.pending_done++)
        finish_pending(b, &b->grad.pending[b->grad.pending_done]);
}

/* Gradients that are partial sums over tp (norms under sp, kv heads that neighbours share) are
 * reduced over tp first: small reductions, one for each run of such parameters, that do not overlap
 * with anything. */
static void reduce_tensor(qd_builder *b, const qd_grad_block *block, int buffer)
{
    const qd_module *low = &b->ledger->modules[block->low], *high = &b->ledger->modules[block->high];
    const qd_storage *s = &b->p->storage;
    int end = high->param_begin + high->param_count;
    for (int i = low->param_begin, last; i < end; i = last + 1) {
        qd_group group = qd_ledger_tensor_group(b->ledger, i);
        last = i;
        if (group.size == 1 || s->trained[i] == 0 || b->ledger->params[i].tied_to >= 0)
            continue;
        while (last + 1 < end && qd_group_equal(qd_ledger_tensor_group(b->ledger, last + 1), group) &&
               s->offset[last + 1] == s->offset[last] + s->trained[last])
            last++;
        qd_action *a = qd_build_collective(b, QD_ACTION_REDUCE, -1, qd_build_group(b, group),
                                           s->offset[last] + s->trained[last] - s->offset[i], b->strategy->grad, -1);
        a->stream = QD_STREAM_COMPUTE;
        a->buffer = buffer;
        a->first = s->offset[i];
        b->grad.last_action = b->p->action_count - 1;
    }
}

/* Called when the gradients of a block are complete. */
static void reduce_block(qd_builder *b, int index, int microbatch)
{
    int begin = b->grad.pending_count, number = slot_of(b, index, microbatch);
    qd_grad_slot *slot = &b->grad.slots[number];
    int buffer = b->grad.in_blocks ? slot->buffer : b->p->persistent[QD_BUFFER_GRAD];
    reduce_tensor(b, &b->grad.blocks[index], buffer);
    if (b->group.data[0] < 0 && b->group.data[1] < 0)
        return;
    if (b->strategy->zero == 0)
        reduce_whole(b, &b->grad.blocks[index], buffer);
    else
        reduce_parts(b, &b->grad.blocks[index], buffer);
    if (b->no_memory || b->grad.pending_count == begin)
        return;
    b->grad.pending[b->grad.pending_count - 1].slot = number;
    for (int k = begin; k < b->grad.pending_count; k++)
        b->grad.pending[k].overwrite = !b->grad.blocks[index].reduced;
    b->grad.blocks[index].reduced = true;
    slot->pending = begin;
    slot->pending_count = b->grad.pending_count - begin;
    slot->reducing = b->grad.in_blocks;
    /* The sums of the previous block continue over the replicas; those of earlier blocks, or
     * without replicas of this one, are complete. */
    int keep = begin;
    for (int k = b->grad.pending_done; k < begin; k++) {
        if (b->grad.pending[k].replicas && keep == begin)
            keep = k;
        reduce_replicas(b, &b->grad.pending[k]);
    }
    if (b->grad.in_blocks || b->strategy->zero > 0)
        finish_until(b, keep);
}

static void add_tied(qd_builder *b, int microbatch)
{
    for (int module = 0; module < b->modules; module++) {
        if (!has_tied(b, module))
            continue;
        qd_action *a = qd_build_action(b, QD_ACTION_ADD_TIED, module, -1);
        qd_gradients_uses(b, 0, microbatch, a->use);
        a->use[QD_USE_TIED_GRAD] = tied_buffer(b, microbatch);
        qd_build_wait(b, &b->grad.tied_arrives[microbatch % b->grad.depth]);
        b->grad.last_action = b->p->action_count - 1;
        qd_build_free(b, &b->grad.tied[microbatch % b->grad.depth]);
    }
}

/* Whether an item is the last of its module and micro-batch to write gradients. */
static bool completes(const qd_builder *b, const qd_step_item *item)
{
    bool weights = qd_program_class(b->p, item->module)->has_weight_phase;
    return item->pass == QD_PASS_B || item->pass == QD_PASS_W || (item->pass == QD_PASS_I && !weights);
}

void qd_gradients_after(qd_builder *b, int item)
{
    const qd_step_item *it = &b->order.items[item];
    if (!completes(b, it) || (!b->strategy->sync_each && it->microbatch < b->strategy->micro_batches - 1))
        return;
    b->grad.phases[it->module * b->grad.depth + it->microbatch % b->grad.depth] = 0;
    if (it->module == 0)
        add_tied(b, it->microbatch); /* the owner of tied values is in the first module */
    int block = b->grad.block_of[it->module];
    qd_grad_slot *slot = &b->grad.slots[slot_of(b, block, it->microbatch)];
    if (++slot->done < b->grad.blocks[block].high - b->grad.blocks[block].low + 1)
        return;
    slot->done = 0;
    reduce_block(b, block, it->microbatch);
}

/* Norm and update. */

bool qd_gradients_sums(const qd_builder *b)
{
    return qd_norm_group(&b->ledger->model, &b->ledger->mesh).size > 1 || b->ledger->mesh.degree[QD_AXIS_PP] > 1;
}

/* One number for each parameter, then its sum over tp (with experts, over the ranks that hold all
 * of them) and over pp: bit-identical regardless of the assignment to stages. */
static void reduce_sums(qd_builder *b)
{
    const qd_group groups[] = {qd_norm_group(&b->ledger->model, &b->ledger->mesh),
                               qd_group_whole(&b->ledger->mesh, QD_AXIS_BIT(QD_AXIS_PP))};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        int group = qd_build_group(b, groups[i]);
        if (group < 0)
            continue;
        qd_action *a = qd_build_collective(b, QD_ACTION_REDUCE, -1, group, b->ledger->param_count, QD_F64, -1);
        a->stream = QD_STREAM_COMPUTE;
        a->buffer = b->p->persistent[QD_BUFFER_SUMS];
    }
}

static bool has_trained(const qd_builder *b, int module)
{
    const qd_module *m = &b->ledger->modules[module];
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++)
        if (!b->ledger->params[i].frozen)
            return true;
    return false;
}

/* Reductions complete in the order in which they start, from the last module to the first. So do
 * the norms, each waiting only for the reductions that cover its module. */
void qd_gradients_finish(qd_builder *b)
{
    qd_program *p = b->p;
    qd_offload_begin(b);
    for (int module = b->modules - 1; module >= 0; module--) {
        if (!qd_build_holds(b, module))
            continue;
        const qd_grad_slot *slot = slot_at(b, module, b->strategy->micro_batches - 1);
        int end = slot->pending + slot->pending_count;
        finish_until(b, end);
        qd_build_action(b, QD_ACTION_SQUARES, module, -1);
        for (int k = slot->pending; k < end && module == b->grad.blocks[b->grad.block_of[module]].high && !b->no_memory; k++)
            wait_pending(b, &b->grad.pending[k]);
    }
    for (int family = 0; family < QD_FAMILY_COUNT && b->strategy->zero > 0; family++) {
        int parts = p->storage.share[family].parts;
        int64_t rows = qd_program_square_base(p, family, parts) - qd_program_square_base(p, family, 0);
        if (b->group.shard[family] < 0 || rows == 0) /* a stage may have no experts */
            continue;
        qd_action *a = qd_build_collective(b, QD_ACTION_GATHER, -1, b->group.shard[family], rows, QD_F64, -1);
        a->stream = QD_STREAM_COMPUTE;
        a->buffer = a->part = p->persistent[QD_BUFFER_SQUARES];
        a->param = family;
        a->parts = parts;
    }
    qd_build_action(b, QD_ACTION_SUMS, -1, -1);
    if (qd_gradients_sums(b))
        reduce_sums(b);
    qd_clip_exchange(b);
    qd_build_action(b, QD_ACTION_NORM, -1, -1)->count = qd_program_tokens(p);
    qd_muon_begin(b);
    bool chunks = qd_offload_updates(b);
    for (int module = 0; module < b->modules && !chunks; module++)
        if (qd_build_holds(b, module) && has_trained(b, module))
            qd_build_action(b, QD_ACTION_UPDATE, module, -1);
    qd_muon_finish(b);
    qd_offload_finish(b);
    qd_clip_finish(b);
    qd_transfers_values(b);
}
