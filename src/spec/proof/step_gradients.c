/* Follows the gradients through a step: where ops add them, how they are reduced over ranks, and
 * that update and norm read complete sums: every micro-batch once, every axis on which the
 * parameter is replicated once. */
#include "spec/program/muon.h"
#include "spec/program/offload.h"
#include "spec/proof/step_impl.h"

#include <stdlib.h>
#include <string.h>

static int64_t element_count(const proof_run *r, int buffer)
{
    return r->program->buffers[buffer].bytes / (int64_t)qd_dtype_size(r->program->strategy.grad);
}

/* The first held parameter that ends after an element of a whole, or sharded, buffer. */
static int first_held(const proof_run *r, int64_t element, bool sharded)
{
    const qd_storage *s = &r->program->storage;
    int low = 0, high = r->held_count;
    while (low < high) {
        int middle = low + (high - low) / 2, i = r->held[middle];
        int64_t end = sharded ? s->shard_offset[i] + s->shard_count[i] : s->offset[i] + s->count[i];
        if (end <= element)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

qd_status qd_proof_gradients_alloc(proof_run *r, int buffer)
{
    const qd_buffer *b = &r->program->buffers[buffer];
    const qd_storage *s = &r->program->storage;
    proof_memory *m = &r->memory[buffer];
    bool parts = b->kind == QD_BUFFER_PART && b->sharded;
    m->count = 0;
    if (b->kind == QD_BUFFER_TIED_GRAD) {
        int tied = r->tied;
        if (tied < 0)
            return QD_OK;
        int64_t count = s->count[tied] > 0 ? s->count[tied] : element_count(r, buffer);
        return qd_proof_memory_add(m, s->count[tied] > 0 ? s->offset[tied] : 0, (s->count[tied] > 0 ? s->offset[tied] : 0) + count, tied);
    }
    if (b->kind != QD_BUFFER_GRAD && b->kind != QD_BUFFER_GRAD_BLOCK && !parts)
        return QD_OK;
    int64_t begin = b->first, last = begin + element_count(r, buffer);
    for (int k = first_held(r, begin, b->sharded); k < r->held_count; k++) {
        int i = r->held[k];
        int64_t first = b->sharded ? s->shard_offset[i] : s->offset[i], end = first + (b->sharded ? s->shard_count[i] : s->count[i]);
        if (first >= last)
            break;
        if (end > first)
            QD_TRY(qd_proof_memory_add(m, first, end < last ? end : last, i));
    }
    return QD_OK;
}

static qd_status add_to(const proof_run *r, int param, proof_gradient *to, const proof_gradient *from, bool overwrite)
{
    if (overwrite && to->kind == KNOWN)
        return qd_proof_action_fail(r, param, 0, -1, "%s overwrites it, but %d terms of the step are in it already",
                                    qd_op_name((qd_op_kind)from->op), to->count);
    if (!overwrite && to->kind == UNWRITTEN)
        return qd_proof_action_fail(r, param, 0, -1, "%s adds to it, but nothing has set it to 0 or overwritten it in this step",
                                    qd_op_name((qd_op_kind)from->op));
    if (to->kind != KNOWN) {
        *to = *from;
        return QD_OK;
    }
    proof_place place = from->place;
    if (!qd_proof_place_convert(r->proof, &place, to->place.fold))
        return qd_proof_action_fail(r, param, 0, -1, "terms that are placed differently are added to it");
    for (int d = 0; d < r->proof->frames[place.fold].count; d++)
        if (place.code[d] != to->place.code[d])
            return qd_proof_action_fail(r, param, place.fold, d, "%s adds a term that is %s, but the sum so far is %s",
                                        qd_op_name((qd_op_kind)from->op), qd_proof_code_text((proof_code)place.code[d]),
                                        qd_proof_code_text((proof_code)to->place.code[d]));
    to->count += from->count;
    to->op = from->op;
    return QD_OK;
}

static qd_status no_memory(void)
{
    return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
}

/* The action accesses these pieces: it must run after all that accessed them before. */
static qd_status touch(const proof_run *r, int buffer, int at, int count)
{
    for (int k = at; k < at + count; k++) {
        proof_piece *piece = &r->memory[buffer].pieces[k];
        QD_TRY(qd_proof_waits(r, piece->param, "it", piece->by));
        piece->by = r->index;
    }
    return QD_OK;
}

/* Adds one term to elements [first, end) of a buffer, which must contain all of them. */
static qd_status add_range(const proof_run *r, int buffer, int param, int64_t first, int64_t end, const proof_gradient *from,
                           bool overwrite)
{
    int count, at = buffer < 0 ? 0 : qd_proof_memory_range(&r->memory[buffer], first, end, &count);
    int64_t there = 0;
    if (at < 0)
        return no_memory();
    if (buffer >= 0)
        QD_TRY(touch(r, buffer, at, count));
    for (int k = 0; buffer >= 0 && k < count; k++) {
        proof_piece *piece = &r->memory[buffer].pieces[at + k];
        there += piece->end - piece->first;
        QD_TRY(add_to(r, param, &piece->gradient, from, overwrite));
    }
    if (there != end - first)
        return qd_proof_action_fail(r, param, 0, -1, "it is written to a buffer that does not contain it");
    return QD_OK;
}

static bool complete(const proof_run *r, int param, const proof_gradient *g);
static qd_status check_final(const proof_run *r, int param, const proof_gradient *g);

qd_status qd_proof_gradients_module(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_storage *s = &r->program->storage;
    const proof_class *c = qd_proof_class_of(r, a->module);
    unsigned phases = qd_action_phases(a);
    int begin = r->ledger->modules[a->module].param_begin;
    if (phases == QD_PHASES_AGAIN)
        return QD_OK;
    if (c->losses > 0 && phases & 1u << QD_PHASE_FORWARD) {
        const proof_gradient term = {.kind = KNOWN, .op = QD_OP_LOSS_SUM, .count = 1, .place = c->loss};
        QD_TRY(qd_proof_follows(r, "the loss", &r->loss_by));
        QD_TRY(add_to(r, -1, &r->loss, &term, false));
    }
    for (int k = 0; k < c->write_count; k++) {
        const proof_write *w = &c->writes[k];
        if (!(phases & 1u << w->phase))
            continue;
        for (int i = 0; i < w->params; i++) {
            int param = begin + w->param + i;
            if (s->count[param] == 0)
                continue;
            if (r->ledger->params[param].frozen)
                return qd_proof_action_fail(r, param, 0, -1, "%s writes it, but the parameter is frozen",
                                            qd_op_name(c->ops->ops[w->op].kind));
            int buffer = a->use[r->ledger->params[param].tied_to >= 0 ? QD_USE_TIED_GRAD : QD_USE_GRAD];
            const proof_gradient term = {.kind = KNOWN, .op = (int16_t)c->ops->ops[w->op].kind, .count = 1, .place = w->place[i > 0]};
            QD_TRY(add_range(r, buffer, param, s->offset[param], s->offset[param] + s->count[param], &term, w->overwrites && a->overwrite));
            if (!w->squares || !a->squares || !qd_program_squared(r->program, param))
                continue;
            int count, at = qd_proof_memory_range(&r->memory[buffer], s->offset[param], s->offset[param] + s->count[param], &count);
            for (int j = 0; j < count; j++)
                QD_TRY(check_final(r, param, &r->memory[buffer].pieces[at + j].gradient));
            r->summed[param] = true;
        }
    }
    return QD_OK;
}

static qd_status sum_over(const proof_run *r, int param, proof_gradient *g, qd_group group, proof_code to)
{
    char name[48];
    if (g->kind == ZEROES)
        return QD_OK;
    qd_group_name(r->proof->mesh, group, name, sizeof name);
    if (g->kind == UNWRITTEN)
        return qd_proof_action_fail(r, param, 0, -1, "it is summed over %s before anything has written it", name);
    int digit = qd_proof_place_exchange(r->proof, &g->place, group, CODE_SUM, to);
    if (digit == -2)
        return qd_proof_action_fail(r, param, 0, -1, "it (of %s) is summed over %s, along which it is not placed in one way",
                                    qd_op_name((qd_op_kind)g->op), name);
    if (digit >= 0 && g->place.code[digit] == CODE_SAME)
        return qd_proof_action_fail(r, param, g->place.fold, digit,
                                    "it (of %s) is replicated or has been summed: summing it over %s multiplies it by %d",
                                    qd_op_name((qd_op_kind)g->op), name, qd_proof_digit_size(r->proof, g->place.fold, digit));
    if (digit >= 0)
        return qd_proof_action_fail(r, param, g->place.fold, digit, "it (of %s) is summed over %s, but is %s",
                                    qd_op_name((qd_op_kind)g->op), name, qd_proof_code_text((proof_code)g->place.code[digit]));
    return QD_OK;
}

/* Ranks that reduce together must start with the same element: the same parameter, counted among
 * those that a rank holds of a module, and the same offset. The checker of communication compares
 * the number of elements. */
static void note_reduced(proof_run *r, int group, const proof_piece *first)
{
    if (!first)
        return;
    const qd_storage *s = &r->program->storage;
    bool sharded = r->program->buffers[r->action->buffer].sharded;
    int module = r->ledger->params[first->param].module, held = first_held(r, s->offset[first->param], false);
    while (held > 0 && r->ledger->params[r->held[held - 1]].module == module)
        held--;
    int place = first_held(r, s->offset[first->param], false) - held;
    int64_t inside = first->first - (sharded ? s->shard_offset[first->param] : s->offset[first->param]);
    const uint64_t key[] = {(uint64_t)module, (uint64_t)place, (uint64_t)inside};
    for (size_t i = 0; i < sizeof key / sizeof *key; i++)
        r->of->reduced[group] = (r->of->reduced[group] ^ key[i]) * 1099511628211u + 1;
}

static qd_status reduce(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_program *p = r->program;
    if (a->group < 0 || a->group >= p->group_count)
        return qd_proof_action_fail(r, -1, 0, -1, "it communicates in a group that does not exist");
    qd_group group = p->groups[a->group];
    if (a->buffer == p->persistent[QD_BUFFER_LOSS]) {
        if (a->first != 0 || a->count != qd_program_losses(p))
            return qd_proof_action_fail(r, -1, 0, -1, "the sum of losses and the count of tokens are not summed together");
        QD_TRY(qd_proof_follows(r, "the loss", &r->loss_by));
        if (group.axes != QD_AXIS_BIT(QD_AXIS_PP))
            return sum_over(r, -1, &r->loss, group, CODE_SAME);
        r->loss_stages++;
        return QD_OK;
    }
    if (a->buffer == p->persistent[QD_BUFFER_SUMS]) {
        if (!r->sums_known || r->norm_known || a->count != r->ledger->param_count || r->sum_count == 4)
            return qd_proof_action_fail(r, -1, 0, -1, "squares of gradients are summed over ranks before they are computed");
        r->sums[r->sum_count++] = group;
        return qd_proof_follows(r, "sums for the norm", &r->norm_by);
    }
    int count, at = qd_proof_memory_range(&r->memory[a->buffer], a->first, a->first + a->count, &count);
    if (at < 0)
        return no_memory();
    QD_TRY(touch(r, a->buffer, at, count));
    note_reduced(r, a->group, count > 0 ? &r->memory[a->buffer].pieces[at] : NULL);
    for (int k = 0; k < count; k++) {
        proof_piece *piece = &r->memory[a->buffer].pieces[at + k];
        QD_TRY(sum_over(r, piece->param, &piece->gradient, group, CODE_SAME));
    }
    return QD_OK;
}

/* REDUCE_SCATTER, PACK and UNPACK of gradients: between whole tensors and this rank's parts. */
static qd_status move_parts(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_program *p = r->program;
    const qd_storage *s = &p->storage;
    bool scatter = a->kind == QD_ACTION_REDUCE_SCATTER, back = a->kind == QD_ACTION_UNPACK;
    for (int i = a->param; i < a->param + a->params; i++) {
        if (r->ledger->params[i].tied_to >= 0 || s->trained[i] == 0)
            continue;
        qd_share share = qd_storage_share(s, i);
        qd_extent own = qd_storage_part(s, i, share.parts, share.part);
        if (a->parts != share.parts || (scatter && (p->groups[a->group].size != a->parts ||
                                                    qd_group_coord(r->proof->mesh, p->groups[a->group], p->rank) != share.part)))
            return qd_proof_action_fail(r, i, 0, -1, "it is cut into %d parts, but its sum into %d", share.parts, a->parts);
        int64_t whole = s->offset[i] + (scatter ? 0 : own.first), length = scatter ? s->count[i] : own.count;
        int count, at = qd_proof_memory_range(&r->memory[a->buffer], whole, whole + length, &count);
        if (at < 0)
            return no_memory();
        QD_TRY(touch(r, a->buffer, at, count));
        proof_gradient g = {.kind = UNWRITTEN};
        if (!back) {
            for (int k = 0; k < count; k++) {
                const proof_piece *pieces = &r->memory[a->buffer].pieces[at];
                const proof_gradient *piece = &pieces[k].gradient, *first = &pieces->gradient;
                if (piece->kind != first->kind || piece->count != first->count)
                    return qd_proof_action_fail(r, i, 0, -1, "some of its elements have %d terms, others %d", first->count, piece->count);
                g = *piece;
                if (scatter)
                    QD_TRY(sum_over(r, i, &g, p->groups[a->group], CODE_PART));
            }
            if (own.count == 0)
                continue;
            if (a->part < 0)
                return qd_proof_action_fail(r, i, 0, -1, "there is no memory for its part");
        }
        if (own.count == 0)
            continue;
        int parts, first = qd_proof_memory_range(&r->memory[a->part], s->shard_offset[i], s->shard_offset[i] + own.count, &parts);
        if (first < 0)
            return no_memory();
        QD_TRY(touch(r, a->part, first, parts));
        if (parts == 0 || count == 0)
            return qd_proof_action_fail(r, i, 0, -1, "the buffer does not contain its part");
        for (int k = 0; k < (back ? count : parts); k++) {
            proof_gradient *to = back ? &r->memory[a->buffer].pieces[at + k].gradient : &r->memory[a->part].pieces[first + k].gradient;
            if (!back && to->kind == KNOWN)
                return qd_proof_action_fail(r, i, 0, -1, "its part is overwritten, but %d terms of the step are in it", to->count);
            *to = back ? r->memory[a->part].pieces[first].gradient : g;
        }
    }
    return QD_OK;
}

/* ADD: the sums of a block are added to those of earlier micro-batches. */
static qd_status add_block(proof_run *r)
{
    const qd_action *a = r->action;
    proof_memory *from = a->part >= 0 ? &r->memory[a->part] : NULL;
    int count, at = from ? qd_proof_memory_range(from, a->first, a->first + a->count, &count) : 0;
    if (at < 0)
        return no_memory();
    if (from)
        QD_TRY(touch(r, a->part, at, count));
    for (int k = 0; from && k < count; k++) {
        const proof_piece *piece = &from->pieces[at + k];
        if (piece->gradient.kind == UNWRITTEN)
            return qd_proof_action_fail(r, piece->param, 0, -1, "it is added before anything has written it");
        QD_TRY(add_range(r, a->buffer, piece->param, piece->first, piece->end, &piece->gradient, a->overwrite));
    }
    return QD_OK;
}

static qd_status add_tied(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_storage *s = &r->program->storage;
    int tied = r->tied, from = a->use[QD_USE_TIED_GRAD];
    if (tied < 0 || from < 0 || r->memory[from].count == 0)
        return qd_proof_action_fail(r, tied, 0, -1, "there is no second gradient of a tied parameter");
    const proof_gradient *g = &r->memory[from].pieces[0].gradient;
    int owner = r->ledger->params[tied].tied_to;
    if (g->kind != KNOWN)
        return qd_proof_action_fail(r, owner, 0, -1, "the second gradient of a tied parameter is added before it is complete");
    QD_TRY(touch(r, from, 0, r->memory[from].count));
    return add_range(r, a->use[QD_USE_GRAD], owner, s->offset[owner], s->offset[owner] + s->count[owner], g, false);
}

/* The gradient of a tied parameter is sent from the last stage to the stage of its owner. */
static qd_status transfer_tied(proof_run *r)
{
    const qd_action *a = r->action;
    proof_memory *m = &r->memory[a->buffer];
    int count, at = qd_proof_memory_range(m, a->first, a->first + a->count, &count), tied = r->tied;
    if (at < 0)
        return no_memory();
    QD_TRY(touch(r, a->buffer, at, count));
    if (a->kind == QD_ACTION_SEND) {
        if (count != 1 || m->count != 1 || m->pieces[at].gradient.kind != KNOWN)
            return qd_proof_action_fail(r, tied, 0, -1, "it is sent to the stage of the table before it is complete");
        proof_program *of = r->of;
        if (of->sent_count == of->sent_capacity) {
            int wanted = of->sent_capacity ? 2 * of->sent_capacity : 8;
            proof_gradient *larger = realloc(of->sent, (size_t)wanted * sizeof *larger);
            if (!larger)
                return no_memory();
            of->sent = larger;
            of->sent_capacity = wanted;
        }
        of->sent[of->sent_count++] = m->pieces[at].gradient;
        return QD_OK;
    }
    int coords[QD_AXIS_COUNT], stages = r->proof->mesh->degree[QD_AXIS_PP];
    qd_mesh_coords(r->proof->mesh, r->program->rank, coords);
    coords[QD_AXIS_PP] = (coords[QD_AXIS_PP] + a->peer) % stages;
    const proof_program *peer = &r->proof->list[r->proof->index[qd_mesh_rank(r->proof->mesh, coords)]];
    if (r->received >= peer->sent_count || count == 0)
        return qd_proof_action_fail(r, tied, 0, -1, "it is received, but no stage sends it");
    for (int k = 0; k < count; k++)
        m->pieces[at + k].gradient = peer->sent[r->received];
    r->received++;
    return QD_OK;
}

/* Number of terms in a complete gradient: one per micro-batch and write, for both uses of a tied
 * parameter. */
static int terms(const proof_run *r, int param)
{
    int writers = r->proof->writers[param], tied = r->tied;
    if (tied >= 0 && r->ledger->params[tied].tied_to == param)
        writers += r->proof->writers[tied];
    return writers * r->program->strategy.micro_batches;
}

static bool complete(const proof_run *r, int param, const proof_gradient *g)
{
    int wanted = terms(r, param);
    return g->kind == KNOWN ? g->count == wanted : g->kind == ZEROES && wanted == 0;
}

static qd_status check_final(const proof_run *r, int param, const proof_gradient *g)
{
    if (!complete(r, param, g))
        return qd_proof_action_fail(r, param, 0, -1, "%d of its %d terms (ops of all micro-batches) are in it",
                                    g->kind == KNOWN ? g->count : 0, terms(r, param));
    if (g->kind != KNOWN)
        return QD_OK;
    proof_place param_place = qd_proof_param_place(r->proof, r->ledger, param), place = g->place;
    if (!qd_proof_place_convert(r->proof, &param_place, place.fold))
        return qd_proof_action_fail(r, param, 0, -1, "it is not placed as the parameter is");
    int parts = 1;
    for (int d = 0; d < r->proof->frames[place.fold].count; d++) {
        if (place.code[d] == CODE_PART)
            parts *= qd_proof_digit_size(r->proof, place.fold, d);
        if (place.code[d] == CODE_SUM)
            return qd_proof_action_fail(r, param, place.fold, d, "it (of %s) is a partial sum there and is never summed over that axis",
                                        qd_op_name((qd_op_kind)g->op));
        if (place.code[d] != param_place.code[d] && place.code[d] != CODE_PART)
            return qd_proof_action_fail(r, param, place.fold, d, "it is %s, but the parameter is %s",
                                        qd_proof_code_text((proof_code)place.code[d]), qd_proof_code_text((proof_code)param_place.code[d]));
    }
    if (parts != qd_storage_share(&r->program->storage, param).parts)
        return qd_proof_action_fail(r, param, 0, -1, "its sum has been cut into %d parts, but its state into %d", parts,
                                    qd_storage_share(&r->program->storage, param).parts);
    return QD_OK;
}

/* The part of a gradient that this rank owns must be complete. */
static qd_status reads_final(const proof_run *r, int param)
{
    const qd_program *p = r->program;
    int buffer = p->persistent[QD_BUFFER_GRAD], count;
    qd_holding own = qd_program_holding(p, QD_BUFFER_GRAD, param);
    if (r->ledger->params[param].tied_to >= 0 || own.count == 0)
        return QD_OK;
    int at = qd_proof_memory_range(&r->memory[buffer], own.offset, own.offset + own.count, &count);
    if (at < 0)
        return no_memory();
    QD_TRY(touch(r, buffer, at, count));
    int64_t there = 0;
    for (int k = 0; k < count; k++) {
        const proof_piece *piece = &r->memory[buffer].pieces[at + k];
        QD_TRY(check_final(r, param, &piece->gradient));
        there += piece->end - piece->first;
    }
    return there == own.count ? QD_OK : qd_proof_action_fail(r, param, 0, -1, "the buffer does not contain all of it");
}

static qd_status squares(proof_run *r)
{
    const qd_module *m = &r->ledger->modules[r->action->module];
    if (r->squared[r->action->module])
        return qd_proof_action_fail(r, -1, 0, -1, "its squares are summed a second time");
    r->squared[r->action->module] = true;
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++) {
        if (qd_program_squared(r->program, i) && r->program->storage.count[i] > 0 && !r->summed[i])
            return qd_proof_action_fail(r, i, 0, -1, "no op has summed its squares");
        QD_TRY(reads_final(r, i));
    }
    return qd_proof_follows(r, "sums for the norm", &r->norm_by);
}

static qd_status sums(proof_run *r)
{
    const qd_program *p = r->program;
    int stage = qd_mesh_group_coord(r->proof->mesh, QD_AXIS_BIT(QD_AXIS_PP), p->rank);
    for (int m = 0; m < r->ledger->module_count; m++)
        if (r->ledger->modules[m].stage_rank == stage && !r->squared[m])
            return qd_proof_action_fail(r, -1, 0, -1, "the gradients of %s are missing from the norm", r->ledger->modules[m].name);
    for (int family = 0; family < QD_FAMILY_COUNT; family++)
        if (r->gathered[family] != (p->storage.share[family].parts > 1 && p->storage.whole_rows[family] > 0) &&
            (r->gathered[family] > 1 || p->storage.share[family].parts > 1))
            return qd_proof_action_fail(r, -1, 0, -1, "the squares of parts that other ranks have are gathered %d times",
                                        r->gathered[family]);
    r->sums_known = true;
    return qd_proof_follows(r, "sums for the norm", &r->norm_by);
}

static qd_status gather_squares(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_program *p = r->program;
    if (a->buffer != p->persistent[QD_BUFFER_SQUARES] || a->param < 0 || a->param >= QD_FAMILY_COUNT || a->group < 0)
        return qd_proof_action_fail(r, -1, 0, -1, "it gathers what no rank has");
    qd_share share = p->storage.share[a->param];
    if (p->groups[a->group].size != share.parts || qd_group_coord(r->proof->mesh, p->groups[a->group], p->rank) != share.part)
        return qd_proof_action_fail(r, -1, 0, -1, "squares are gathered from ranks that do not have the other parts");
    r->gathered[a->param]++;
    return qd_proof_follows(r, "sums for the norm", &r->norm_by);
}

/* The loss must be summed once over all ranks with different tokens, and over the stages. */
static qd_status check_loss(const proof_run *r)
{
    const proof_gradient *g = &r->loss;
    if (g->kind == UNWRITTEN)
        return qd_proof_action_fail(r, -1, 0, -1, "the loss is summed before it is set to 0");
    for (int d = 0; g->kind == KNOWN && d < r->proof->frames[g->place.fold].count; d++)
        if (g->place.code[d] == CODE_SUM)
            return qd_proof_action_fail(r, -1, g->place.fold, d, "the loss is not summed over that axis");
    if (r->loss_stages != (r->proof->mesh->degree[QD_AXIS_PP] > 1))
        return qd_proof_action_fail(r, -1, 0, -1, "the loss is summed over pp %d times", r->loss_stages);
    if (g->kind == KNOWN && g->count != r->program->strategy.micro_batches)
        return qd_proof_action_fail(r, -1, 0, -1, "the loss has the terms of %d micro-batches", g->count);
    return QD_OK;
}

static qd_status norm(proof_run *r)
{
    const qd_strategy *s = &r->program->strategy;
    int64_t tokens = s->micro_batch * s->micro_batches * s->seq * r->proof->mesh->degree[QD_AXIS_DP];
    QD_TRY(check_loss(r));
    if (!r->sums_known || r->norm_known)
        return qd_proof_action_fail(r, -1, 0, -1, "the squares of gradients are missing, or are used twice");
    if (r->action->count != tokens)
        return qd_proof_action_fail(r, -1, 0, -1, "gradients are averaged over %lld tokens, but the global batch has %lld",
                                    (long long)r->action->count, (long long)tokens);
    r->norm_known = true;
    QD_TRY(qd_proof_waits(r, -1, "the loss", r->loss_by));
    QD_TRY(qd_proof_follows(r, "sums for the norm", &r->norm_by));
    return qd_proof_norm(r->proof, r->program, r->index, r->sums, r->sum_count);
}

int64_t qd_proof_covered(const proof_run *r, int param, int64_t *from)
{
    const qd_program *p = r->program;
    const qd_action *a = r->action;
    qd_holding value = qd_program_holding(p, QD_BUFFER_PARAM, param);
    *from = 0;
    if (a->chunk < 0)
        return value.count;
    bool wide = p->strategy.param == QD_F32;
    qd_buffer_kind kind = !wide ? QD_BUFFER_MASTER : p->persistent[QD_BUFFER_MOMENT1] >= 0 ? QD_BUFFER_MOMENT1 : QD_BUFFER_PARAM;
    int64_t at = qd_program_holding(p, kind, param).offset, end = at + value.count;
    int64_t first = at > a->first ? at : a->first, last = end < a->first + a->count ? end : a->first + a->count;
    *from = first - at;
    return last > first ? last - first : 0;
}

static qd_status update_param(proof_run *r, int param, int64_t count)
{
    if (count == 0)
        return QD_OK;
    if (!r->norm_known)
        return qd_proof_action_fail(r, param, 0, -1, "the update runs before the norm that clips it is known");
    QD_TRY(qd_proof_waits(r, param, "the norm that clips it", r->norm_by));
    QD_TRY(reads_final(r, param));
    r->updated[param] += count;
    return QD_OK;
}

/* Muon: each matrix has its momentum, then its owner orthogonalizes it, and then all update it. */
static qd_status momentum(proof_run *r, int param, int64_t count)
{
    if (r->directions[param] != NO_DIRECTION)
        return qd_proof_action_fail(r, param, 0, -1, "its momentum is updated a second time");
    r->directions[param] = MOMENTUM_DIRECTION;
    return count > 0 ? reads_final(r, param) : QD_OK;
}

static qd_status orthogonalize(proof_run *r)
{
    int own = qd_muon_own(r->program, r->action, r->program->rank);
    if (own < 0)
        return QD_OK;
    int param = r->program->matrices[own].param;
    if (r->directions[param] != MOMENTUM_DIRECTION)
        return qd_proof_action_fail(r, param, 0, -1, "it is orthogonalized before its momentum is known, or twice");
    r->directions[param] = ORTHOGONAL_DIRECTION;
    return QD_OK;
}

static qd_status update_matrix(proof_run *r, int matrix, int param, int64_t count)
{
    bool own = qd_muon_own(r->program, r->action, r->program->rank) == matrix;
    if (r->directions[param] < (own ? ORTHOGONAL_DIRECTION : MOMENTUM_DIRECTION))
        return qd_proof_action_fail(r, param, 0, -1, "it is updated before its direction is known");
    return update_param(r, param, count);
}

static qd_status update(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_module *m = &r->ledger->modules[a->module];
    if (a->kind == QD_ACTION_MOMENTUM || a->kind == QD_ACTION_UPDATE_MATRICES) {
        for (int i = a->param; i < a->param + a->params; i++) {
            int param = r->program->matrices[i].param;
            int64_t count = qd_program_holding(r->program, QD_BUFFER_PARAM, param).count;
            QD_TRY(a->kind == QD_ACTION_MOMENTUM ? momentum(r, param, count) : update_matrix(r, i, param, count));
        }
        return QD_OK;
    }
    int64_t from;
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++)
        if (r->ledger->params[i].tied_to < 0 && !r->ledger->params[i].frozen && !(r->program->matrices && qd_muon_takes(r->ledger, i)))
            QD_TRY(update_param(r, i, qd_proof_covered(r, i, &from)));
    return QD_OK;
}

static qd_status zero(proof_run *r)
{
    const qd_action *a = r->action;
    if (a->buffer == r->program->persistent[QD_BUFFER_LOSS]) {
        if (r->loss.kind == KNOWN || a->first != 0 || a->count != qd_program_losses(r->program))
            return qd_proof_action_fail(r, -1, 0, -1, "losses are set to 0 after they were summed");
        r->loss.kind = ZEROES;
        return qd_proof_follows(r, "the loss", &r->loss_by);
    }
    int count, at = qd_proof_memory_range(&r->memory[a->buffer], a->first, a->first + a->count, &count);
    if (at < 0)
        return no_memory();
    QD_TRY(touch(r, a->buffer, at, count));
    for (int k = 0; k < count; k++) {
        proof_piece *piece = &r->memory[a->buffer].pieces[at + k];
        if (piece->gradient.kind == KNOWN)
            return qd_proof_action_fail(r, piece->param, 0, -1, "it is set to 0, but %d terms of the step are in it",
                                        piece->gradient.count);
        piece->gradient.kind = ZEROES;
    }
    return QD_OK;
}

qd_status qd_proof_gradients_action(proof_run *r)
{
    switch ((qd_action_kind)r->action->kind) {
    case QD_ACTION_ZERO:
        return zero(r);
    case QD_ACTION_ADD_TIED:
        return add_tied(r);
    case QD_ACTION_REDUCE:
        return reduce(r);
    case QD_ACTION_REDUCE_SCATTER:
    case QD_ACTION_PACK:
    case QD_ACTION_UNPACK:
        return move_parts(r);
    case QD_ACTION_GATHER:
        return gather_squares(r);
    case QD_ACTION_SEND:
    case QD_ACTION_RECV:
        return transfer_tied(r);
    case QD_ACTION_ADD:
        return add_block(r);
    case QD_ACTION_SQUARES:
        return squares(r);
    case QD_ACTION_SUMS:
        return sums(r);
    case QD_ACTION_NORM:
        return norm(r);
    case QD_ACTION_UPDATE:
    case QD_ACTION_MOMENTUM:
    case QD_ACTION_UPDATE_MATRICES:
        return update(r);
    case QD_ACTION_FETCH: /* optimizer state, and matrices that Muon exchanges: no gradients */
    case QD_ACTION_STORE:
    case QD_ACTION_COLLECT:
    case QD_ACTION_HAND_BACK:
    case QD_ACTION_SHARE:
        return QD_OK;
    case QD_ACTION_ORTHOGONALIZE:
        return orthogonalize(r);
    case QD_ACTION_ALLOC: /* handled by step.c */
    case QD_ACTION_MAXIMA:
    case QD_ACTION_CLIP:
    case QD_ACTION_FREE:
    case QD_ACTION_LOAD:
    case QD_ACTION_CAST_WEIGHTS:
    case QD_ACTION_FORWARD:
    case QD_ACTION_RECOMPUTE:
    case QD_ACTION_BACKWARD:
    case QD_ACTION_BACKWARD_INPUT:
    case QD_ACTION_BACKWARD_WEIGHT:
    case QD_ACTION_KIND_COUNT:
        break;
    }
    return qd_proof_action_fail(r, -1, 0, -1, "the proof has no rule for it");
}

qd_status qd_proof_gradients_end(proof_run *r)
{
    const qd_program *p = r->program;
    if (p->strategy.context > 0)
        return QD_OK;
    if (!p->strategy.training)
        return check_loss(r);
    int copied = p->storage.copied;
    if (copied >= 0 && !r->ledger->params[copied].frozen && qd_program_holding(p, QD_BUFFER_PARAM, copied).count > 0 && !r->copy_fresh)
        return qd_proof_action_fail(r, -1, 0, -1, "this rank's copy of %s is not brought up to date after the update",
                                    r->ledger->params[copied].name);
    if (!r->norm_known)
        return qd_proof_action_fail(r, -1, 0, -1, "the step ends without a norm of the gradients");
    for (int k = 0; k < r->held_count; k++) {
        int64_t count = qd_program_holding(p, QD_BUFFER_PARAM, r->held[k]).count;
        if (r->updated[r->held[k]] != count)
            return qd_proof_action_fail(r, r->held[k], 0, -1, "%lld of its %lld elements are applied", (long long)r->updated[r->held[k]],
                                        (long long)count);
    }
    return QD_OK;
}
