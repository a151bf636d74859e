/* Parameters that a rank has to gather before a module can read them.
 *
 * zero 3: the parameters of a module are in memory from their gather to the end of the last use
 * after which they are not needed soon. At any item of the step, the `prefetch` modules that are
 * needed next are gathered or in flight. zero 1 and 2: whole parameters stay in memory, and the
 * parts that other ranks have updated are gathered once, ahead of the first use.
 *
 * Scales and copies of weights in fp8 that all passes read are made before the first use and freed
 * after the last one. They never outlive a step, so whatever changes weights between steps cannot
 * leave old copies behind. */
#include "spec/program/program_impl.h"

#include <string.h>

/* The units whose parameters a pass of a module reads: its own, and that of a tied parameter. */
static qd_pass_units find_units(const qd_builder *b, int module_index, qd_pass pass)
{
    const qd_module *module = &b->ledger->modules[module_index];
    const qd_module_class *c = qd_program_class(b->p, module_index);
    bool own = false;
    int tied = -1;
    for (int i = 0; i < c->op_count; i++) {
        const qd_op *op = &c->ops[i];
        bool again = c->recompute == QD_RECOMPUTE_FULL && op->again && (pass == QD_PASS_B || pass == QD_PASS_I);
        if (!again && !(qd_pass_phases(pass) & 1u << op->phase))
            continue;
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            const qd_slot *slot = op->slot[j] >= 0 ? &c->slots[op->slot[j]] : NULL;
            if (!slot || slot->kind != QD_SLOT_PARAM)
                continue;
            int param = module->param_begin + slot->param;
            if (qd_storage_has(b->ledger, &b->p->storage, param))
                own = true;
            else
                tied = b->ledger->params[b->ledger->params[param].tied_to].module;
        }
    }
    qd_pass_units units = {.found = true};
    if (own)
        units.unit[units.count++] = module_index;
    if (tied >= 0)
        units.unit[units.count++] = tied;
    return units;
}

/* Gradients of weights need none. */
static bool reads_casts(const qd_step_item *item)
{
    return item->pass != QD_PASS_W;
}

/* The units of an item. The same pass of a module recurs with every micro-batch, so they are looked
 * up once. */
static const qd_pass_units *item_units(qd_builder *b, const qd_step_item *item)
{
    qd_pass_units *units = &b->gather.units[item->module].read[item->pass];
    if (!units->found)
        *units = find_units(b, item->module, (qd_pass)item->pass);
    return units;
}

/* With one micro-batch each form of a weight is cast once anyway, and one copy at a time is in
 * memory. zero 3 frees weights after each use in order to save memory, so it keeps no copies. The
 * scale of a tensor takes no memory; scales of rows and blocks are parts of copies. */
qd_status qd_units_casts(const qd_strategy *s, qd_fp8_once *once)
{
    const bool stays = s->zero < 3 || s->reshard == QD_RESHARD_NEVER, keep = s->fp8.weights == QD_FP8_WEIGHTS_STEP;
    const bool again = s->micro_batches > 1 || s->recompute == QD_RECOMPUTE_FULL;
    *once = QD_FP8_ONCE_NOTHING;
    if (!s->training || !s->fp8.on)
        return QD_OK;
    if (keep || (s->fp8.weights == QD_FP8_WEIGHTS_AUTO && s->micro_batches > 1 && stays))
        *once = QD_FP8_ONCE_COPIES;
    else if (again && s->fp8.recipe == QD_FP8_RECIPE_TENSOR)
        *once = QD_FP8_ONCE_SCALES;
    if (keep && !stays)
        return QD_FAIL(QD_USAGE, "fp8.weights=step keeps copies of all weights, which parallel.zero=3 frees after each use: set "
                                 "parallel.reshard_after_forward=false, or fp8.weights=auto");
    return QD_OK;
}

qd_status qd_units_create(qd_builder *b, qd_arena *arena)
{
    b->gather.units = QD_ARENA_NEW(arena, qd_unit, b->modules);
    b->gather.window = QD_ARENA_NEW(arena, int, b->modules);
    if (!b->gather.units || !b->gather.window)
        return QD_NO_MEMORY;
    b->gather.window_item = -1;
    for (int m = 0; m < b->modules; m++) {
        const qd_module *module = &b->ledger->modules[m];
        b->gather.units[m] = (qd_unit){.buffer = -1, .pending = {-1, -1}, .packed = {-1, -1}, .kept = {-1, -1},
                                       .cast = -1, .in_window = -1, .tied = -1};
        for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
            bool tied = b->ledger->params[i].tied_to >= 0;
            b->gather.units[m].tied = tied ? i : b->gather.units[m].tied;
            b->gather.units[m].untied |= !tied;
        }
    }
    for (int i = 0; i < b->order.item_count; i++) {
        const qd_pass_units *units = item_units(b, &b->order.items[i]);
        for (int u = 0; u < units->count; u++)
            b->gather.units[units->unit[u]].uses_left++;
        b->gather.units[b->order.items[i].module].casts_left += reads_casts(&b->order.items[i]);
    }
    return QD_OK;
}

/* Parameters of a module that belong to one family. */
typedef struct run {
    int param, params, family;
} run;

/* The runs of a module, at most one per family; returns their number. */
static int module_runs(const qd_builder *b, int module, run runs[QD_FAMILY_COUNT])
{
    const qd_module *m = &b->ledger->modules[module];
    int count = 0;
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++) {
        int family = b->ledger->params[i].family;
        if (count == 0 || runs[count - 1].family != family)
            runs[count++] = (run){i, 0, family};
        runs[count - 1].params++;
    }
    return count;
}

/* A buffer for this rank's parts of a run, cut into `parts`. */
static int alloc_parts(qd_builder *b, qd_buffer_kind kind, int module, run r, int parts, int part, int64_t first)
{
    int64_t count = qd_storage_run(b->ledger, &b->p->storage, r.param, r.params, parts, part, b->strategy->zero == 3);
    int buffer = qd_build_alloc(b, kind, module, -1, count * (int64_t)qd_dtype_size(b->strategy->param));
    if (buffer >= 0 && !b->no_memory) {
        b->p->buffers[buffer].sharded = true;
        b->p->buffers[buffer].first = first;
    }
    return buffer;
}

static void set_run(qd_action *a, run r, int buffer, int part, int parts)
{
    a->buffer = buffer;
    a->part = part;
    a->param = r.param;
    a->params = r.params;
    a->parts = parts;
}

static void pack(qd_builder *b, qd_action_kind kind, int module, run r, int whole, int part, int parts)
{
    qd_action *a = qd_build_action(b, kind, module, -1);
    set_run(a, r, whole, part, parts);
    a->dtype = b->strategy->param;
}

static void gather_run(qd_builder *b, int module, run r)
{
    const qd_strategy *s = b->strategy;
    const qd_storage *storage = &b->p->storage;
    qd_unit *unit = &b->gather.units[module];
    int64_t count = qd_storage_run(b->ledger, storage, r.param, r.params, 1, 0, s->zero == 3);
    int param = b->p->persistent[QD_BUFFER_PARAM], whole = s->zero < 3 ? param : unit->buffer, part = param;
    int parts = storage->share[r.family].parts, group = b->group.shard[r.family];
    if (count == 0)
        return; /* all of it is frozen and in place */
    if (group < 0 && r.family > 0) { /* experts that no other rank holds */
        if (s->zero == 3)
            pack(b, QD_ACTION_UNPACK, module, r, whole, part, parts);
        return;
    }
    if (s->zero < 3) {
        part = unit->packed[r.family] =
            alloc_parts(b, QD_BUFFER_PART, module, r, parts, storage->share[r.family].part, storage->shard_offset[r.param]);
        if (part >= 0) /* a rank may own no rows of a small module */
            pack(b, QD_ACTION_PACK, module, r, whole, part, parts);
    } else if (unit->is_kept) {
        part = unit->kept[r.family];
        parts = b->group.kept_parts[r.family];
        group = b->group.kept[r.family];
        if (group < 0) { /* the rank holds all of it */
            if (part >= 0)
                pack(b, QD_ACTION_UNPACK, module, r, whole, part, parts);
            return;
        }
    }
    /* The last compute action may have freed the memory that the gather writes; what it reads was
     * written before. */
    qd_action *a = qd_build_collective(b, QD_ACTION_GATHER, module, group, count, s->param, qd_build_last_compute(b));
    set_run(a, r, whole, part, parts);
    unit->pending[r.family] = b->p->action_count - 1;
}

static void gather(qd_builder *b, int module)
{
    qd_unit *unit = &b->gather.units[module];
    run runs[QD_FAMILY_COUNT];
    int count = module_runs(b, module, runs);
    if (b->strategy->zero == 3) {
        int64_t first = qd_build_module_values(b, module), end = qd_build_module_values(b, module + 1);
        unit->buffer = qd_build_alloc(b, QD_BUFFER_UNIT, module, -1, (end - first) * (int64_t)qd_dtype_size(b->strategy->param));
        if (!b->no_memory)
            b->p->buffers[unit->buffer].first = first;
    }
    for (int r = 0; r < count; r++)
        gather_run(b, module, runs[r]);
    unit->gathered = true;
}

static bool resident(const qd_builder *b, int module)
{
    return b->strategy->zero < 3 ? b->gather.units[module].gathered : b->gather.units[module].buffer >= 0;
}

/* The modules that items from `first` on read: all of the first item, and more up to the limit. */
static void find_window(qd_builder *b, int first)
{
    if (b->gather.window_item == first)
        return;
    b->gather.window_item = first;
    b->gather.window_count = 0;
    for (int i = first; i < b->order.item_count && (i == first || b->gather.window_count < b->strategy->prefetch); i++) {
        const qd_pass_units *units = item_units(b, &b->order.items[i]);
        for (int u = 0; u < units->count; u++) {
            int unit = units->unit[u];
            if (b->gather.units[unit].in_window == first || (i > first && b->gather.window_count >= b->strategy->prefetch))
                continue;
            b->gather.units[unit].in_window = first;
            b->gather.window[b->gather.window_count++] = unit;
        }
    }
}

/* Casts the weights of an item's module, unless an earlier item has. Memory for the copies of all
 * modules is taken first, in one piece: between activations, which come and go, they would leave
 * gaps. */
static void cast_weights(qd_builder *b, int item)
{
    const int module = b->order.items[item].module;
    qd_unit *unit = &b->gather.units[module];
    for (int m = 0; m < b->modules && item == 0; m++)
        if (b->gather.units[m].casts_left > 0) /* it is of this stage */
            b->gather.units[m].cast = qd_build_alloc(b, QD_BUFFER_CAST, m, -1, qd_program_class(b->p, m)->region[QD_REGION_WEIGHTS]);
    if (unit->cast < 0 || unit->is_cast || !reads_casts(&b->order.items[item]))
        return;
    unit->is_cast = true;
    qd_action *a = qd_build_action(b, QD_ACTION_CAST_WEIGHTS, module, -1);
    qd_units_uses(b, module, a->use);
    qd_units_wait(b, item);
}

void qd_units_before(qd_builder *b, int item)
{
    if (b->strategy->zero > 0)
        find_window(b, item);
    for (int w = 0; w < b->gather.window_count; w++)
        if (!resident(b, b->gather.window[w]))
            gather(b, b->gather.window[w]);
    cast_weights(b, item);
}

void qd_units_wait(qd_builder *b, int item)
{
    const qd_pass_units *units = item_units(b, &b->order.items[item]);
    for (int u = 0; u < units->count; u++) {
        qd_unit *unit = &b->gather.units[units->unit[u]];
        for (int family = 0; family < QD_FAMILY_COUNT; family++) {
            if (b->strategy->overlap)
                qd_build_dep(b, unit->pending[family]);
            unit->pending[family] = -1;
        }
    }
}

/* Frees the parameters; `keep`: what this rank keeps of them for the gather before the backward
 * pass stays. */
static void release(qd_builder *b, int module, bool keep)
{
    qd_unit *unit = &b->gather.units[module];
    if (keep && unit->buffer >= 0) {
        unit->is_kept = true;
        run runs[QD_FAMILY_COUNT];
        int count = module_runs(b, module, runs);
        for (int r = 0; r < count; r++) {
            int family = runs[r].family, group = b->group.kept[family], parts = b->group.kept_parts[family];
            if (b->group.shard[family] < 0)
                continue; /* always this rank's own */
            int part = group < 0 ? 0 : qd_group_coord(&b->ledger->mesh, b->p->groups[group], b->p->rank);
            unit->kept[family] = alloc_parts(b, QD_BUFFER_KEPT, module, runs[r], parts, part, 0);
            if (unit->kept[family] >= 0)
                pack(b, QD_ACTION_PACK, module, runs[r], unit->buffer, unit->kept[family], parts);
        }
    }
    qd_build_free(b, &unit->buffer);
}

void qd_units_after(qd_builder *b, int item)
{
    qd_unit *own = &b->gather.units[b->order.items[item].module];
    own->casts_left -= reads_casts(&b->order.items[item]);
    if (own->casts_left == 0)
        qd_build_free(b, &own->cast);
    if (b->strategy->zero == 0)
        return;
    const qd_pass_units *units = item_units(b, &b->order.items[item]);
    bool forward = b->order.items[item].pass == QD_PASS_F;
    if (item + 1 < b->order.item_count)
        find_window(b, item + 1);
    for (int u = 0; u < units->count; u++) {
        qd_unit *unit = &b->gather.units[units->unit[u]];
        unit->uses_left--;
        for (int family = 0; family < QD_FAMILY_COUNT; family++) {
            qd_build_free(b, &unit->packed[family]);
            qd_build_free(b, &unit->kept[family]);
        }
        unit->is_kept = false;
        bool soon = unit->in_window == item + 1, kept = b->strategy->reshard == QD_RESHARD_NEVER && unit->uses_left > 0;
        if (b->strategy->zero == 3 && !soon && !kept)
            release(b, units->unit[u], forward && unit->uses_left > 0 && b->group.kept_parts[0] > 0);
    }
}

void qd_units_uses(const qd_builder *b, int module, int32_t *use)
{
    const qd_unit *unit = &b->gather.units[module];
    bool sharded = b->strategy->zero == 3;
    int whole = b->p->persistent[QD_BUFFER_PARAM];
    if (unit->untied)
        use[QD_USE_PARAM] = sharded ? unit->buffer : whole;
    use[QD_USE_CAST] = unit->cast;
    if (unit->tied < 0)
        return;
    bool here = qd_storage_has(b->ledger, &b->p->storage, unit->tied);
    const qd_unit *owner = here ? unit : &b->gather.units[b->ledger->params[b->ledger->params[unit->tied].tied_to].module];
    use[QD_USE_TIED_PARAM] = sharded ? owner->buffer : whole;
}
