/* What is known of the slots of a list while it is followed, for all rows, or for ranges of rows
 * where ops work on windows. */
#include "spec/proof/proof_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

qd_status qd_proof_fail(const proof_walk *w, proof_operand operand, int fold, int digit, const char *format, ...)
{
    char text[320], value[96] = "", axis[48] = "", name[32];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    int slot = operand == NO_OPERAND ? -1 : qd_proof_slot_of(w->op, operand);
    if (slot >= 0)
        snprintf(value, sizeof value, ", value '%s'", w->ops->slots[slot].name);
    if (digit >= 0) {
        qd_proof_digit_name(w->proof, fold, digit, name, sizeof name);
        snprintf(axis, sizeof axis, ", axis %s", name);
    }
    return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s, op %d (%s)%s%s: %s", w->program->rank, w->ledger->modules[w->class_->module].name,
                   w->index, qd_op_name(w->op->kind), value, axis, text);
}

qd_status qd_proof_fail_slot(const proof_walk *w, int slot, const char *text)
{
    return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s, op %d (%s), value '%s': %s", w->program->rank,
                   w->ledger->modules[w->class_->module].name, w->index, qd_op_name(w->op->kind), w->ops->slots[slot].name, text);
}

static int64_t row_count(const proof_walk *w, int slot)
{
    int64_t rows = w->ops->slots[slot].rows;
    return rows > 0 ? rows : 1; /* a rank without rows is followed like the others */
}

static bool same_value(const qd_proof *proof, const proof_value *a, const proof_value *b)
{
    if (a->kind != b->kind || a->parts != b->parts || a->missing != b->missing || a->gradient != b->gradient ||
        a->weighted != b->weighted || a->rotated != b->rotated || a->overflow != b->overflow || a->stage != b->stage ||
        a->copies != b->copies || a->shift != b->shift || a->seen != b->seen)
        return false;
    for (int part = 0; part < a->parts; part++)
        if (!qd_proof_place_equal(proof, &a->place[part], &b->place[part]))
            return false;
    return true;
}

/* The segment that holds the row, which is one of the slot's. Heads of long sequences write and
 * read tens of thousands of segments, so they are not searched one by one. */
static int segment_at(const proof_slot *s, int64_t row)
{
    int low = 0, high = s->count - 1;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (s->segments[middle].end <= row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static qd_status read_rows(proof_walk *w, proof_operand operand, int64_t first, int64_t rows, proof_value *value)
{
    int slot = qd_proof_slot_of(w->op, operand);
    *value = (proof_value){.kind = UNWRITTEN};
    if (slot < 0)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "an operand is missing");
    const proof_slot *s = &w->slots[slot];
    first = rows > 0 ? first : 0; /* no rows: treated like the others */
    int64_t end = first + (rows > 0 ? rows : 1);
    if (first < 0 || end > row_count(w, slot))
        return qd_proof_fail(w, operand, 0, -1, "rows [%lld, %lld) of %lld are read", (long long)first, (long long)end,
                             (long long)row_count(w, slot));
    bool any = false;
    for (int i = s->count > 0 ? segment_at(s, first) : 0; i < s->count && s->segments[i].begin < end; i++) {
        const proof_segment *g = &s->segments[i];
        const proof_value *v = &g->value;
        if (v->kind == UNWRITTEN)
            return qd_proof_fail(w, operand, 0, -1, "rows [%lld, %lld) are read, but no op has written them", (long long)g->begin,
                                 (long long)g->end);
        if (any && !same_value(w->proof, value, v)) {
            int digit = 0;
            while (digit < w->proof->frames[v->place[0].fold].count && v->place[0].fold == value->place[0].fold &&
                   v->place[0].code[digit] == value->place[0].code[digit])
                digit++;
            bool found = v->place[0].fold == value->place[0].fold && digit < w->proof->frames[v->place[0].fold].count;
            return qd_proof_fail(w, operand, v->place[0].fold, found ? digit : -1, "some of its rows are %s, others are %s",
                                 found ? qd_proof_code_text((proof_code)value->place[0].code[digit]) : "of one kind",
                                 found ? qd_proof_code_text((proof_code)v->place[0].code[digit]) : "of another");
        }
        if (v->by >= 0 && v->by < w->index && w->index < v->until) {
            qd_phase by = w->ops->ops[v->by].phase, now = w->op->phase;
            if (by == now || (by != QD_PHASE_FORWARD && !w->apart))
                return qd_proof_fail(w, operand, 0, -1, "it is read while op %d (%s) may still write it", v->by,
                                     qd_op_name(w->ops->ops[v->by].kind));
        }
        *value = *v;
        any = true;
    }
    return any ? QD_OK : qd_proof_fail(w, operand, 0, -1, "it is read, but no op has written it");
}

qd_status qd_proof_read_any(proof_walk *w, proof_operand operand, proof_value *value)
{
    int slot = qd_proof_slot_of(w->op, operand);
    return read_rows(w, operand, 0, slot < 0 ? 0 : w->ops->slots[slot].rows, value);
}

qd_status qd_proof_read_rows(proof_walk *w, proof_operand operand, int64_t first, int64_t rows, proof_value *v)
{
    QD_TRY(read_rows(w, operand, first, rows, v));
    if (v->kind == ZEROES)
        return qd_proof_fail(w, operand, 0, -1, "it is read, but only zeroes have been written to it");
    if (v->missing)
        return qd_proof_fail(w, operand, 0, -1, "nothing has written its columns of %s", v->missing & 1 ? "queries" : "keys and values");
    const int all = v->seen > 0 || v->shift > 0 ? qd_proof_rounds(w, w->proof->mesh->degree[QD_AXIS_CP]) : 0;
    if (all > 0)
        for (int i = 0; i < w->proof->frames[FOLD_DENSE].count; i++)
            if (qd_proof_digit_axis(w->proof, i) == QD_AXIS_CP)
                return qd_proof_fail(
                    w, operand, FOLD_DENSE, i, "it has the terms of %d of %d ranks and is %d ranks away from its owner: it is incomplete",
                    v->seen > 0 ? v->seen : all, all, v->shift);
    return QD_OK;
}

qd_status qd_proof_read(proof_walk *w, proof_operand operand, proof_value *value)
{
    int slot = qd_proof_slot_of(w->op, operand);
    return qd_proof_read_rows(w, operand, 0, slot < 0 ? 0 : w->ops->slots[slot].rows, value);
}

bool qd_proof_has(const proof_walk *w, proof_operand operand)
{
    return qd_proof_slot_of(w->op, operand) >= 0;
}

static bool reserve(proof_slot *s, int more)
{
    if (s->count + more <= s->capacity)
        return true;
    int wanted = 2 * (s->count + more);
    proof_segment *larger = realloc(s->segments, (size_t)wanted * sizeof *larger);
    if (!larger)
        return false;
    s->segments = larger;
    s->capacity = wanted;
    return true;
}

qd_status qd_proof_write_rows(proof_walk *w, proof_operand operand, int64_t first, int64_t rows, const proof_value *value)
{
    int slot = qd_proof_slot_of(w->op, operand);
    if (slot < 0)
        return QD_OK;
    qd_slot_kind kind = w->ops->slots[slot].kind;
    if (kind == QD_SLOT_PARAM || kind == QD_SLOT_IN || kind == QD_SLOT_GRAD_OUT || kind == QD_SLOT_INPUT || kind == QD_SLOT_ROPE)
        return qd_proof_fail(w, operand, 0, -1, "the op must not write it");
    proof_slot *s = &w->slots[slot];
    if (rows <= 0 && w->ops->slots[slot].rows > 0)
        return QD_OK;
    int64_t end = first + (rows > 0 ? rows : 1), all = row_count(w, slot);
    if (first < 0 || end > all)
        return qd_proof_fail(w, operand, 0, -1, "rows [%lld, %lld) of %lld are written", (long long)first, (long long)end, (long long)all);
    if (!reserve(s, 3))
        return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    if (s->count == 0)
        s->segments[s->count++] = (proof_segment){.begin = 0, .end = all};
    /* Split at both ends, then merge what is between them into one segment. */
    for (int k = 0; k < 2; k++) {
        const int64_t at = k == 0 ? first : end;
        const int i = at < all ? segment_at(s, at) : 0;
        proof_segment *g = &s->segments[i];
        if (at >= all || at == g->begin)
            continue;
        memmove(g + 1, g, (size_t)(s->count++ - i) * sizeof *g);
        g[0].end = g[1].begin = at;
    }
    const int from = segment_at(s, first), to = end < all ? segment_at(s, end) : s->count;
    proof_segment *g = &s->segments[from];
    g->end = end;
    g->value = *value;
    g->value.by = w->index;
    if (value->parts == 1)
        g->value.place[1] = value->place[0];
    g->value.until = w->op->exchange.async ? w->op->exchange.until : w->index;
    memmove(g + 1, &s->segments[to], (size_t)(s->count - to) * sizeof *g);
    s->count -= to - from - 1;
    w->proof->report.values++;
    return QD_OK;
}

qd_status qd_proof_write(proof_walk *w, proof_operand operand, const proof_value *value)
{
    int slot = qd_proof_slot_of(w->op, operand);
    return qd_proof_write_rows(w, operand, 0, slot < 0 ? 0 : w->ops->slots[slot].rows, value);
}

void qd_proof_slots_destroy(proof_slot *slots, int count)
{
    for (int i = 0; slots && i < count; i++)
        free(slots[i].segments);
    free(slots);
}

proof_value qd_proof_value_of(const proof_walk *w, const proof_place *place, bool gradient)
{
    (void)w;
    return (proof_value){.kind = KNOWN, .parts = 1, .gradient = gradient, .copies = 1, .weight = -1, .by = -1, .place = {*place, *place}};
}

qd_status qd_proof_param(proof_walk *w, proof_operand operand, proof_value *value)
{
    int index = qd_proof_source(w->ops, qd_proof_slot_of(w->op, operand));
    if (index < 0)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "a parameter is missing");
    const qd_slot *slot = &w->ops->slots[index];
    if (slot->kind != QD_SLOT_PARAM)
        return qd_proof_fail(w, operand, 0, -1, "it is used as a parameter");
    int first = w->ledger->modules[w->class_->module].param_begin + slot->param;
    proof_place place = qd_proof_param_place(w->proof, w->ledger, first);
    *value = qd_proof_value_of(w, &place, false);
    for (int i = 1; i < slot->param_count; i++) {
        proof_place other = qd_proof_param_place(w->proof, w->ledger, first + i);
        if (w->ledger->params[first].expert < 0 && i > 1 && !qd_proof_place_equal(w->proof, &value->place[1], &other))
            return qd_proof_fail(w, operand, 0, -1, "its parameters are placed in more than two ways");
        value->place[1] = other;
        value->parts = qd_proof_place_equal(w->proof, &place, &other) ? value->parts : 2;
    }
    value->split = w->program->storage.rows[first];
    return QD_OK;
}

qd_status qd_proof_write_param_grad(proof_walk *w, proof_operand operand, const proof_place place[2])
{
    int index = qd_proof_slot_of(w->op, operand);
    if (index < 0)
        return QD_OK;
    const qd_slot *slot = &w->ops->slots[index];
    if (slot->kind != QD_SLOT_GRAD)
        return qd_proof_fail(w, operand, 0, -1, "it is used as the gradient of a parameter");
    int first = w->ledger->modules[w->class_->module].param_begin + slot->param;
    for (int i = 0; i < slot->param_count && i < 2; i++) {
        proof_place param = qd_proof_param_place(w->proof, w->ledger, first + i), own = place[i];
        if (!qd_proof_place_convert(w->proof, &own, param.fold))
            return qd_proof_fail(w, operand, 0, -1, "its gradient is not placed as the parameter is");
        for (int d = 0; d < w->proof->frames[own.fold].count; d++)
            if (own.code[d] != param.code[d] && !(param.code[d] == CODE_SAME && own.code[d] == CODE_SUM))
                return qd_proof_fail(w, operand, own.fold, d, "the gradient is %s, but the parameter is %s",
                                     qd_proof_code_text((proof_code)own.code[d]), qd_proof_code_text((proof_code)param.code[d]));
    }
    proof_class *c = w->class_;
    if (c->write_count == c->write_capacity) {
        int wanted = c->write_capacity ? 2 * c->write_capacity : 32;
        proof_write *larger = realloc(c->writes, (size_t)wanted * sizeof *larger);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
        c->writes = larger;
        c->write_capacity = wanted;
    }
    int j = 0;
    while (w->op->slot[j] != index)
        j++;
    c->writes[c->write_count++] = (proof_write){.op = w->index,
                                                .param = slot->param,
                                                .params = slot->param_count,
                                                .phase = w->op->phase,
                                                .overwrites = w->op->overwrites && qd_op_roles(w->op->kind)[j] == 'g',
                                                .squares = w->op->squares,
                                                .place = {place[0], place[1]}};
    w->proof->report.values++;
    return QD_OK;
}

void qd_proof_note_overflow(proof_walk *w)
{
    w->class_->writes[w->class_->write_count - 1].overflow = true;
}

qd_status qd_proof_no_sum(const proof_walk *w, proof_operand operand, const proof_value *v)
{
    for (int part = 0; part < v->parts; part++)
        for (int d = 0; d < w->proof->frames[v->place[part].fold].count; d++) {
            int code = v->place[part].code[d];
            if (code == CODE_SUM || code == CODE_MAX)
                return qd_proof_fail(w, operand, v->place[part].fold, d, "it is %s that %s reads before it has been reduced",
                                     qd_proof_code_text((proof_code)code), qd_op_name(w->op->kind));
        }
    if (v->copies > 1)
        return qd_proof_fail(w, operand, 0, -1, "it is %d terms that have not been added", v->copies);
    return QD_OK;
}

qd_status qd_proof_same_place(const proof_walk *w, proof_operand operand, const proof_value *value, proof_operand other,
                              const proof_value *than)
{
    (void)other;
    for (int part = 0; part < 2 && (part < value->parts || part < than->parts); part++) {
        const proof_place *a = &value->place[part < value->parts ? part : 0];
        proof_place b = than->place[part < than->parts ? part : 0];
        if (!qd_proof_place_convert(w->proof, &b, a->fold))
            return qd_proof_fail(w, operand, 0, -1, "it is not placed as what it is used with");
        for (int d = 0; d < w->proof->frames[a->fold].count; d++)
            if (a->code[d] != b.code[d])
                return qd_proof_fail(w, operand, a->fold, d, "it is %s, but what it is used with is %s",
                                     qd_proof_code_text((proof_code)a->code[d]), qd_proof_code_text((proof_code)b.code[d]));
    }
    return QD_OK;
}

qd_status qd_proof_is_gradient(const proof_walk *w, proof_operand operand, const proof_value *value, bool gradient)
{
    if (value->stage >= HEADS_CUT)
        return qd_proof_fail(w, operand, 0, -1, "its rows and heads are in flight to other ranks of cp");
    if (value->gradient == gradient)
        return QD_OK;
    return qd_proof_fail(w, operand, 0, -1,
                         gradient ? "a value of the forward pass is used as a gradient"
                                  : "a gradient is used as a value of the forward pass");
}

qd_status qd_proof_in_fold(const proof_walk *w, proof_operand operand, proof_value *value, int fold)
{
    for (int part = 0; part < 2; part++)
        if (!qd_proof_place_convert(w->proof, &value->place[part], fold))
            return qd_proof_fail(w, operand, 0, -1, "it is not placed as rows of %s are", fold == FOLD_EXPERTS ? "experts" : "tokens");
    return QD_OK;
}

int qd_proof_present(const proof_walk *w, const proof_place *place, proof_operand operand, int *ranks)
{
    const proof_frame *f = &w->proof->frames[FOLD_DENSE];
    int first = w->program->rank, present = 0, varies[PROOF_DIGITS], count = 0;
    bool sums = false;
    for (int d = 0; d < f->count; d++)
        sums = sums || place->code[d] == CODE_SUM;
    *ranks = 1;
    for (int d = 0; d < f->count; d++) { /* the rank with 0 in all digits that vary, and the number of such ranks */
        int size = f->cut[d + 1] / f->cut[d];
        if (!(sums ? place->code[d] == CODE_SUM : qd_proof_digit_axis(w->proof, d) == QD_AXIS_TP))
            continue;
        varies[count++] = d;
        first -= w->program->rank / f->cut[d] % size * f->cut[d];
        *ranks *= size;
    }
    for (int i = 0; i < *ranks; i++) {
        int rank = first, rest = i;
        for (int k = 0; k < count; k++) {
            int size = f->cut[varies[k] + 1] / f->cut[varies[k]];
            rank += rest % size * f->cut[varies[k]];
            rest /= size;
        }
        const qd_module_class *other = qd_program_class(w->proof->programs[rank], w->class_->module);
        if (w->index >= other->op_count || other->ops[w->index].kind != w->op->kind)
            return -1;
        const qd_op *op = &other->ops[w->index];
        present += operand == NO_OPERAND ? op->k > 0 : qd_proof_slot_of(op, operand) >= 0;
    }
    return present;
}
