/* Writes the op list of a module and gives its local values their places. The lists themselves are in block_ops.c and
 * head_ops.c. */
#include "spec/ops_impl.h"

#include <string.h>

/* ---- where local values live ---- */

static int64_t align64(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Phase for lifetimes: without the split, I and W are one. */
static qd_phase life_phase(const qd_class_writer *w, const qd_op *op)
{
    return op->phase == QD_PHASE_WEIGHT && !w->config->split ? QD_PHASE_INPUT : op->phase;
}

typedef struct span {
    int first, last; /* op indices */
    bool used;
} span;

/* The last op during which `op` (number `index`) works. An exchange that nobody awaits runs to the end of the list. */
static int last_at_work(const qd_class_writer *w, const qd_op *op, int index)
{
    if (!op->exchange.async)
        return index;
    return op->exchange.until < w->op_count ? op->exchange.until : w->op_count - 1;
}

static void find_spans(const qd_class_writer *w, span *spans)
{
    for (int i = 0; i < w->op_count; i++) {
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            int s = w->ops[i].slot[j];
            if (s < 0)
                continue;
            if (!spans[s].used)
                spans[s].first = i;
            int last = last_at_work(w, &w->ops[i], i);
            spans[s].last = last > spans[s].last || !spans[s].used ? last : spans[s].last;
            spans[s].used = true;
        }
    }
}

static qd_region region_of(qd_phase first, qd_phase last)
{
    if (first == last)
        return QD_REGION_SCRATCH;
    if (first == QD_PHASE_FORWARD)
        return last == QD_PHASE_INPUT ? QD_REGION_STASH_I : QD_REGION_STASH_W;
    return QD_REGION_MID;
}

/* Lowest offset at which `bytes` do not overlap a scratch value that is alive at the same time. */
static int64_t scratch_offset(const qd_class_writer *w, const span *spans, int slot)
{
    int64_t offset = 0, bytes = align64(qd_slot_bytes(&w->slots[slot]));
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < slot; s++) {
            const qd_slot *other = &w->slots[s];
            if (other->kind != QD_SLOT_LOCAL || other->region != QD_REGION_SCRATCH || !spans[s].used)
                continue;
            int64_t end = other->offset + align64(qd_slot_bytes(other));
            bool alive_together = spans[s].first <= spans[slot].last && spans[slot].first <= spans[s].last;
            if (alive_together && offset < end && other->offset < offset + bytes) {
                offset = end;
                moved = true;
            }
        }
    }
    return offset;
}

/* In split mode I and W run apart, so op order within the whole list does not say who is alive with whom: a scratch value
 * of phase I must not share memory with one of phase W only if both could be alive, which they never are (each phase runs
 * to its end before the other starts). Values of different phases may overlap; scratch_offset compares op spans, which
 * for interleaved I and W ops is the careful side. */
static qd_status place_locals(qd_class_writer *w, qd_module_class *c)
{
    span *spans = QD_ARENA_NEW(w->arena, span, w->slot_count);
    if (!spans)
        return QD_NO_MEMORY;
    find_spans(w, spans);
    for (int s = 0; s < w->slot_count; s++) {
        qd_slot *slot = &w->slots[s];
        if (!spans[s].used)
            continue;
        qd_phase first = life_phase(w, &w->ops[spans[s].first]), last = first;
        for (int i = spans[s].first; i <= spans[s].last; i++)
            for (int j = 0; j < QD_OP_SLOTS; j++)
                if (w->ops[i].slot[j] == s && life_phase(w, &w->ops[i]) > last)
                    last = life_phase(w, &w->ops[i]);
        switch (slot->kind) {
        case QD_SLOT_IN: c->in_until = last; break;
        case QD_SLOT_GRAD_OUT: c->grad_out_until = last; break;
        case QD_SLOT_INPUT:
            c->uses_input = true;
            break;
        case QD_SLOT_LOCAL:
            slot->region = region_of(first, last);
            if (slot->region == QD_REGION_SCRATCH) {
                slot->offset = scratch_offset(w, spans, s);
                int64_t end = slot->offset + align64(qd_slot_bytes(slot));
                if (end > c->region[QD_REGION_SCRATCH])
                    c->region[QD_REGION_SCRATCH] = end;
            } else {
                slot->offset = c->region[slot->region];
                c->region[slot->region] += align64(qd_slot_bytes(slot));
            }
            break;
        default: break;
        }
    }
    for (int i = 0; i < w->op_count; i++)
        c->has_weight_phase = c->has_weight_phase || w->ops[i].phase == QD_PHASE_WEIGHT;
    return QD_OK;
}

/* ---- gradients of parameters ---- */

static bool is_grad(const qd_class_writer *w, int slot)
{
    return slot >= 0 && w->slots[slot].kind == QD_SLOT_GRAD;
}

/* Whether two ops write gradients of the same parameter. */
static bool share_grads(const qd_class_writer *w, const qd_op *a, const qd_op *b)
{
    for (int i = 0; i < QD_OP_SLOTS; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            if (!is_grad(w, a->slot[i]) || !is_grad(w, b->slot[j]))
                continue;
            const qd_slot *x = &w->slots[a->slot[i]], *y = &w->slots[b->slot[j]];
            if (x->param < y->param + y->param_count && y->param < x->param + x->param_count)
                return true;
        }
    return false;
}

/* An op may overwrite its gradients if its kind can, and if it is the first of the list to write any of them. Of phases that run
 * apart, which come first is the schedule's affair: there all that write a gradient must be of one phase. */
static void find_overwriting(qd_class_writer *w, qd_module_class *c)
{
    for (int i = 0; i < w->op_count; i++) {
        qd_op *op = &w->ops[i];
        bool any = false, can = true;
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            any = any || is_grad(w, op->slot[j]);
            can = can && (!is_grad(w, op->slot[j]) || qd_op_roles(op->kind)[j] == 'g');
        }
        if (!any)
            continue;
        c->grad_phases |= 1u << op->phase;
        for (int k = 0; k < w->op_count && can; k++)
            if (k != i && share_grads(w, op, &w->ops[k]))
                can = k > i && life_phase(w, &w->ops[k]) == life_phase(w, op);
        op->overwrites = can;
        c->square_phases |= op->squares ? 1u << op->phase : 0;
        c->overwrite_phases |= can ? 1u << op->phase : 0;
    }
}

qd_status qd_module_class_create(const qd_ledger *ledger, qd_module_kind kind, const qd_class_config *config,
                                 qd_arena *arena, qd_module_class *out)
{
    qd_class_writer w = {.ledger = ledger,
                         .model = &ledger->model,
                         .config = config,
                         .arena = arena,
                         .tensor = qd_group_whole(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_TP)),
                         .tensor_coord = qd_mesh_group_coord(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_TP), config->rank)};
    w.seq = qd_ledger_rows(ledger, config->rank, config->seq);
    w.rows = config->batch * w.seq;
    qd_ledger_port_rows(ledger, config->rank, w.rows, &w.port_first, &w.port_rows);
    for (int i = 0; i < ledger->module_count && !w.module; i++)
        if (ledger->modules[i].kind == kind &&
            ledger->modules[i].stage_rank == qd_mesh_group_coord(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_PP), config->rank))
            w.module = &ledger->modules[i];
    memset(out, 0, sizeof *out);
    out->kind = kind;
    switch (kind) {
    case QD_MODULE_EMBED: qd_write_embed(&w); break;
    case QD_MODULE_BLOCK:
    case QD_MODULE_MOE: qd_write_block(&w); break;
    case QD_MODULE_HEAD: qd_write_head(&w); break;
    }
    if (w.no_memory)
        return QD_NO_MEMORY;
    if (w.wrong)
        return QD_FAIL(QD_SYSTEM, "an op of a module has another number of slots than its kind");
    if ((kind == QD_MODULE_BLOCK || kind == QD_MODULE_MOE) && config->training)
        out->recompute = config->recompute;
    QD_TRY(qd_recompute_apply(&w, out->recompute));
    QD_TRY(qd_class_cut(&w, config->tensor_pieces));
    QD_TRY(qd_class_settle(&w));
    QD_TRY(place_locals(&w, out));
    find_overwriting(&w, out);
    out->slot_count = w.slot_count;
    out->op_count = w.op_count;
    out->slots = w.slots;
    out->ops = w.ops;
    return QD_OK;
}
