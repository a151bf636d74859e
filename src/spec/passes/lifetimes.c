/* Last pass: assigns memory to local values, and finds the op that is the first to write each
 * parameter gradient. Both are derived from the finished list. */
#include "spec/passes/passes.h"

static int64_t align64(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Phase for lifetimes: I and W are one unless they are split. */
static qd_phase life_phase(const qd_class_writer *w, const qd_op *op)
{
    return op->phase == QD_PHASE_WEIGHT && !w->config->split ? QD_PHASE_INPUT : op->phase;
}

typedef struct span {
    int first, last; /* op indices */
    qd_phase first_phase, last_phase;
    bool used, once, each; /* by any op; by those that run once per step; by others */
    double key;      /* of scratch values: the order in which they are placed */
} span;

/* The last op during which op `index` is in flight. An exchange that no op waits for runs to the
 * end of the list. */
static int last_at_work(const qd_class_writer *w, const qd_op *op, int index)
{
    if (!op->exchange.async)
        return index;
    return op->exchange.until < w->op_count ? op->exchange.until : w->op_count - 1;
}

/* First and last op that use each slot, and their phases. */
static void find_spans(const qd_class_writer *w, span *spans)
{
    for (int i = 0; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            const qd_op *op = &w->ops[i];
            if (op->slot[j] < 0)
                continue;
            span *s = &spans[op->slot[j]];
            qd_phase phase = life_phase(w, op);
            int last = last_at_work(w, op, i);
            if (!s->used)
                *s = (span){i, last, phase, phase, .used = true};
            s->once |= op->once;
            s->each |= !op->once;
            s->last = last > s->last ? last : s->last;
            s->last_phase = phase > s->last_phase ? phase : s->last_phase;
        }
}

static qd_region region_of(const span *s)
{
    if (s->once && s->each)
        return QD_REGION_WEIGHTS;
    if (s->first_phase == s->last_phase)
        return QD_REGION_SCRATCH;
    if (s->first_phase == QD_PHASE_FORWARD)
        return s->last_phase == QD_PHASE_INPUT ? QD_REGION_STASH_I : QD_REGION_STASH_W;
    return QD_REGION_MID;
}

/* Lowest offset at which a scratch value does not overlap with already placed ones that are live at
 * the same time. In split mode I and W run separately; comparing spans over the whole list is
 * conservative there. */
static int64_t scratch_offset(const qd_class_writer *w, const span *spans, const int *placed, int count, int slot)
{
    int64_t offset = 0, bytes = align64(qd_slot_bytes(&w->slots[slot]));
    for (int i = 0; i < count; i++) {
        const qd_slot *other = &w->slots[placed[i]];
        const span *a = &spans[placed[i]], *b = &spans[slot];
        int64_t end = other->offset + align64(qd_slot_bytes(other));
        if (a->first <= b->last && b->first <= a->last && offset < end && other->offset < offset + bytes) {
            offset = end;
            i = -1; /* compares the new place with all of them */
        }
    }
    return offset;
}

/* Orders in which scratch values are placed; none is best for all lists. */
typedef enum scratch_order { BY_FIRST_USE, BY_LAST_USE, BY_SIZE, BY_SIZE_AND_TIME, SCRATCH_ORDERS } scratch_order;

static double scratch_key(const qd_class_writer *w, const span *spans, int slot, scratch_order by)
{
    double bytes = (double)qd_slot_bytes(&w->slots[slot]), time = spans[slot].last - spans[slot].first + 1;
    return by == BY_FIRST_USE ? -spans[slot].first : by == BY_LAST_USE ? spans[slot].last : by == BY_SIZE ? bytes : bytes * time;
}

/* Places the values in descending order of their keys; returns the total size in bytes. */
static int64_t try_scratch(qd_class_writer *w, span *spans, int *list, int count, scratch_order by)
{
    int64_t bytes = 0;
    for (int i = 0; i < count; i++) { /* inserts value i among those before it */
        int value = list[i], k = i;
        spans[value].key = scratch_key(w, spans, value, by);
        for (; k > 0 && spans[value].key > spans[list[k - 1]].key; k--)
            list[k] = list[k - 1];
        list[k] = value;
    }
    for (int i = 0; i < count; i++) {
        qd_slot *slot = &w->slots[list[i]];
        slot->offset = scratch_offset(w, spans, list, i, list[i]);
        int64_t end = slot->offset + align64(qd_slot_bytes(slot));
        bytes = end > bytes ? end : bytes;
    }
    return bytes;
}

/* Scratch values share memory over time. Tries all orders and keeps the smallest result. */
static int64_t place_scratch(qd_class_writer *w, span *spans, int *list, int count)
{
    int64_t least = 0;
    scratch_order best = 0;
    for (scratch_order by = 0; by < SCRATCH_ORDERS; by++) {
        int64_t bytes = try_scratch(w, spans, list, count, by);
        best = by == 0 || bytes < least ? by : best;
        least = by == 0 || bytes < least ? bytes : least;
    }
    return try_scratch(w, spans, list, count, best);
}

static void place_locals(qd_class_writer *w)
{
    qd_module_class *c = w->out;
    span *spans = QD_CLASS_NEW(w, span, w->slot_count);
    int *scratch = QD_CLASS_NEW(w, int, w->slot_count), scratch_count = 0;
    if (w->wrong)
        return;
    find_spans(w, spans);
    for (int s = 0; s < w->slot_count; s++) {
        qd_slot *slot = &w->slots[s];
        if (!spans[s].used)
            continue;
        qd_phase last = spans[s].last_phase;
        c->in_until = slot->kind == QD_SLOT_IN ? last : c->in_until;
        c->grad_out_until = slot->kind == QD_SLOT_GRAD_OUT ? last : c->grad_out_until;
        c->uses_input = c->uses_input || slot->kind == QD_SLOT_INPUT;
        if (slot->kind != QD_SLOT_LOCAL)
            continue;
        slot->region = region_of(&spans[s]);
        if (slot->region == QD_REGION_SCRATCH) {
            scratch[scratch_count++] = s;
            continue;
        }
        slot->offset = c->region[slot->region];
        c->region[slot->region] += align64(qd_slot_bytes(slot));
    }
    c->region[QD_REGION_SCRATCH] = place_scratch(w, spans, scratch, scratch_count);
    for (int i = 0; i < w->op_count; i++)
        c->has_weight_phase = c->has_weight_phase || w->ops[i].phase == QD_PHASE_WEIGHT;
}

/* An op may overwrite its gradients if its kind can, and if it is the first of the list to write
 * any of them. When phases run separately, the schedule decides which one comes first; then all ops
 * that write a gradient must be in the same phase. */
static void find_overwriting(qd_class_writer *w)
{
    qd_module_class *c = w->out;
    int *first = QD_CLASS_NEW(w, int, w->decl->param_count + 1); /* per parameter: 1 + the first writer of its gradient */
    for (int i = 0; i < w->op_count && first; i++) {
        qd_op *op = &w->ops[i];
        bool any = false, can = true;
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            const qd_slot *slot = op->slot[j] < 0 ? NULL : &w->slots[op->slot[j]];
            if (!slot || slot->kind != QD_SLOT_GRAD)
                continue;
            any = true;
            can = can && qd_op_roles(op->kind)[j] == 'g';
            for (int k = slot->param; k < slot->param + slot->param_count; k++) {
                first[k] = first[k] ? first[k] : i + 1;
                qd_op *earlier = &w->ops[first[k] - 1];
                can = can && earlier == op;
                earlier->overwrites = earlier->overwrites && life_phase(w, earlier) == life_phase(w, op);
            }
        }
        op->overwrites = any && can;
        c->grad_phases |= any ? 1u << op->phase : 0;
        c->square_phases |= any && op->squares ? 1u << op->phase : 0;
    }
    for (int i = 0; i < w->op_count; i++)
        c->overwrite_phases |= w->ops[i].overwrites ? 1u << w->ops[i].phase : 0;
}

void qd_pass_lifetimes(qd_class_writer *w)
{
    place_locals(w);
    find_overwriting(w);
}
