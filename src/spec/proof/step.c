/* Follows the actions of a program: each pass of each module runs once per micro-batch, on the
 * activations of that micro-batch, with parameters that are up to date. step_gradients.c follows
 * the gradients. */
#include "spec/proof/step_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

qd_status qd_proof_action_fail(const proof_run *r, int param, int fold, int digit, const char *format, ...)
{
    char text[320], axis[48] = "", name[32], what[200];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (digit >= 0) {
        qd_proof_digit_name(r->proof, fold, digit, name, sizeof name);
        snprintf(axis, sizeof axis, ", axis %s", name);
    }
    qd_action_describe(r->program, r->index < r->program->action_count ? r->index : r->program->action_count - 1, what, sizeof what);
    return QD_FAIL(QD_MISMATCH, "gradients: rank %d, action %d (%s)%s%s%s: %s", r->program->rank, r->index,
                   r->index < r->program->action_count ? what : "the end of the step", param >= 0 ? ", gradient of " : "",
                   param >= 0 ? r->ledger->params[param].name : "", axis, text);
}

const proof_class *qd_proof_class_of(const proof_run *r, int module)
{
    return &r->of->classes[r->ledger->modules[module].decl][qd_strategy_recompute(&r->program->strategy, r->ledger, module)];
}

/* Vector clocks: actions of one stream run in order; an action starts when those it waits for are
 * complete, and inherits their clocks. */
static qd_status tick(proof_run *r)
{
    const qd_action *a = r->action;
    if (a->stream >= QD_STREAM_COUNT)
        return qd_proof_action_fail(r, -1, 0, -1, "there is no such stream");
    proof_clock *now = &r->now[a->stream];
    for (int d = 0; d < a->dep_count; d++) {
        int on = r->program->deps[a->dep_first + d];
        if (on < 0 || on >= r->index)
            return qd_proof_action_fail(r, -1, 0, -1, "it waits for action %d, which does not come before it", on);
        for (int s = 0; s < QD_STREAM_COUNT; s++)
            now->at[s] = r->clocks[on].at[s] > now->at[s] ? r->clocks[on].at[s] : now->at[s];
    }
    now->at[a->stream] = r->index;
    r->clocks[r->index] = *now;
    return QD_OK;
}

qd_status qd_proof_waits(const proof_run *r, int param, const char *what, int by)
{
    if (by < 0 || r->clocks[r->index].at[r->program->actions[by].stream] >= by)
        return QD_OK;
    char text[200];
    qd_action_describe(r->program, by, text, sizeof text);
    return qd_proof_action_fail(r, param, 0, -1, "it does not wait for action %d (%s), which works on %s", by, text, what);
}

qd_status qd_proof_follows(const proof_run *r, const char *what, int *by)
{
    QD_TRY(qd_proof_waits(r, -1, what, *by));
    *by = r->index;
    return QD_OK;
}

static qd_buffer_kind kind_of(const proof_run *r, int buffer)
{
    return r->program->buffers[buffer].kind;
}

#define KIND(kind) (1u << QD_BUFFER_##kind)
static const unsigned holders[QD_USE_COUNT] = {
    [QD_USE_PARAM] = KIND(PARAM) | KIND(UNIT),
    [QD_USE_TIED_PARAM] = KIND(PARAM) | KIND(UNIT),
    [QD_USE_CAST] = KIND(CAST),
    [QD_USE_GRAD] = KIND(GRAD) | KIND(GRAD_BLOCK),
    [QD_USE_TIED_GRAD] = KIND(TIED_GRAD),
    [QD_USE_IN] = KIND(PORT),
    [QD_USE_OUT] = KIND(PORT),
    [QD_USE_GRAD_IN] = KIND(PORT_GRAD),
    [QD_USE_GRAD_OUT] = KIND(PORT_GRAD),
    [QD_USE_INPUT] = KIND(INPUT),
    [QD_USE_STASH_I] = KIND(STASH_I),
    [QD_USE_STASH_W] = KIND(STASH_W),
    [QD_USE_MID] = KIND(MID),
};
#undef KIND

/* Each use of an action must be a buffer of the right kind. */
static qd_status right_kinds(const proof_run *r)
{
    for (int use = 0; use < QD_USE_COUNT; use++) {
        int buffer = r->action->use[use];
        if (buffer >= r->program->buffer_count || (buffer >= 0 && !(holders[use] & 1u << kind_of(r, buffer))))
            return qd_proof_action_fail(r, -1, 0, -1, "buffer %d, which it uses, holds %s", buffer,
                                        buffer < r->program->buffer_count ? qd_buffer_kind_name(kind_of(r, buffer)) : "nothing");
    }
    return QD_OK;
}

/* Elements of a buffer have one type; false: not a buffer that the proof follows. */
static bool element_type(const proof_run *r, int buffer, qd_dtype *dtype)
{
    const qd_strategy *s = &r->program->strategy;
    switch (kind_of(r, buffer)) {
    case QD_BUFFER_GRAD:
    case QD_BUFFER_GRAD_BLOCK:
    case QD_BUFFER_TIED_GRAD:
    case QD_BUFFER_PART: *dtype = s->grad; return true;
    case QD_BUFFER_PARAM:
    case QD_BUFFER_UNIT: *dtype = s->param; return true;
    case QD_BUFFER_PORT:
    case QD_BUFFER_PORT_GRAD: *dtype = s->activation; return true;
    case QD_BUFFER_MAXIMA: *dtype = QD_F32; return true;
    case QD_BUFFER_LOSS:
    case QD_BUFFER_SUMS:
    case QD_BUFFER_SQUARES: *dtype = QD_F64; return true;
    default: return false;
    }
}

/* Sums and copies use the buffer's element type and stay inside it. */
static qd_status right_elements(const proof_run *r)
{
    const qd_action *a = r->action;
    bool range = a->kind == QD_ACTION_ZERO || a->kind == QD_ACTION_REDUCE || a->kind == QD_ACTION_MAXIMA ||
                 a->kind == QD_ACTION_ADD || qd_action_transfers(a);
    bool run = a->kind == QD_ACTION_REDUCE_SCATTER || a->kind == QD_ACTION_GATHER || a->kind == QD_ACTION_PACK ||
               a->kind == QD_ACTION_UNPACK;
    qd_dtype dtype;
    if ((!range && !run) || a->buffer < 0 || !element_type(r, a->buffer, &dtype))
        return QD_OK;
    const qd_buffer *b = &r->program->buffers[a->buffer];
    if (a->dtype != dtype)
        return qd_proof_action_fail(r, -1, 0, -1, "its element type is not that of the %s", qd_buffer_kind_name(b->kind));
    int64_t end = b->first + b->bytes / (int64_t)qd_dtype_size(dtype);
    if (range && (a->first < b->first || a->first + a->count > end))
        return qd_proof_action_fail(r, -1, 0, -1, "elements [%lld, %lld) are not all in its buffer, which ends at %lld",
                                    (long long)a->first, (long long)(a->first + a->count), (long long)end);
    return QD_OK;
}

static qd_status expect(const proof_run *r, qd_use use, int module, int microbatch)
{
    int buffer = r->action->use[use];
    if (buffer < 0)
        return QD_OK;
    proof_content c = r->contents[buffer];
    if (c.module == module && c.microbatch == microbatch)
        return qd_proof_waits(r, -1, "what it reads", c.by);
    const char *name = qd_buffer_kind_name(kind_of(r, buffer));
    if (c.microbatch < 0)
        return qd_proof_action_fail(r, -1, 0, -1, "it reads %s of %s for micro-batch %d, which nothing has written", name,
                                    module >= 0 ? r->ledger->modules[module].name : "the step", microbatch);
    return qd_proof_action_fail(r, -1, 0, -1, "it reads %s of %s for micro-batch %d where those of %s for micro-batch %d belong", name,
                                c.module >= 0 ? r->ledger->modules[c.module].name : "the step", c.microbatch,
                                module >= 0 ? r->ledger->modules[module].name : "the step", microbatch);
}

static void fill(proof_run *r, qd_use use, int module, int microbatch)
{
    if (r->action->use[use] >= 0)
        r->contents[r->action->use[use]] = (proof_content){module, microbatch, r->index};
}

/* The parameters that the action's ops read must be in its buffers, whole and up to date. */
static qd_status reads_fresh(const proof_run *r, const proof_class *c, unsigned phases)
{
    const qd_module *module = &r->ledger->modules[r->action->module];
    for (int s = 0; s < c->ops->slot_count; s++) {
        const qd_slot *slot = &c->ops->slots[s];
        if (slot->kind != QD_SLOT_PARAM || !(c->reads[s] & phases))
            continue;
        for (int i = module->param_begin + slot->param; i < module->param_begin + slot->param + slot->param_count; i++) {
            bool own = r->ledger->params[i].tied_to < 0;
            int values = own || i == r->program->storage.copied ? i : r->ledger->params[i].tied_to;
            int buffer = r->action->use[own ? QD_USE_PARAM : QD_USE_TIED_PARAM];
            if (r->program->storage.count[i] > 0 && (r->fresh[values] < 0 || r->fresh[values] != buffer))
                return qd_proof_action_fail(r, -1, 0, -1, "it reads %s, but not all of its rows are up to date in the buffer",
                                            r->ledger->params[i].name);
            if (r->program->storage.count[i] > 0)
                QD_TRY(qd_proof_waits(r, -1, "a parameter that it reads", r->fresh_by[values]));
        }
    }
    return QD_OK;
}

/* Scales and copies of weights for all micro-batches count as those of the first one. */
static qd_status cast_weights(proof_run *r, const proof_class *c)
{
    const qd_action *a = r->action;
    if (a->use[QD_USE_CAST] < 0 || r->contents[a->use[QD_USE_CAST]].microbatch >= 0)
        return qd_proof_action_fail(r, -1, 0, -1, "it has no buffer for weights in fp8, or one that has some");
    QD_TRY(reads_fresh(r, c, QD_PHASES_ONCE));
    fill(r, QD_USE_CAST, a->module, 0);
    return QD_OK;
}

static qd_status reads_casts(const proof_run *r, const proof_class *c, unsigned phases)
{
    bool reads = false;
    for (int s = 0; s < c->ops->slot_count; s++)
        reads = reads || (c->ops->slots[s].region == QD_REGION_WEIGHTS && (c->reads[s] & phases));
    if (reads && r->action->use[QD_USE_CAST] < 0)
        return qd_proof_action_fail(r, -1, 0, -1, "it reads weights in fp8 or their scales, but no buffer that it uses has them");
    return reads ? expect(r, QD_USE_CAST, r->action->module, 0) : QD_OK;
}

static qd_status module_action(proof_run *r)
{
    const qd_action *a = r->action;
    unsigned phases = qd_action_phases(a);
    bool once = phases == QD_PHASES_ONCE;
    int mb = once ? 0 : a->microbatch, batches = r->program->strategy.micro_batches;
    if (a->module < 0 || a->module >= r->ledger->module_count || mb < 0 || mb >= batches || !qd_proof_class_of(r, a->module)->ops)
        return qd_proof_action_fail(r, -1, 0, -1, "there is no such module or micro-batch on this rank");
    const proof_class *c = qd_proof_class_of(r, a->module);
    QD_TRY(right_kinds(r));
    if (once)
        return cast_weights(r, c);
    uint8_t *done = &r->done[(size_t)a->module * (size_t)batches + (size_t)mb];
    bool forward = a->kind == QD_ACTION_FORWARD, again = a->kind == QD_ACTION_RECOMPUTE;
    if (*done & phases)
        return qd_proof_action_fail(r, -1, 0, -1, "it has already run for this micro-batch: its gradients would count twice");
    if (!forward && !(*done & 1u << QD_PHASE_FORWARD))
        return qd_proof_action_fail(r, -1, 0, -1, "the forward pass of this micro-batch has not run");
    if (!forward && !again && c->ops->recompute == QD_RECOMPUTE_FULL && !(*done & QD_PHASES_AGAIN))
        return qd_proof_action_fail(r, -1, 0, -1, "what it needs of the forward pass has not been recomputed");
    if (a->kind == QD_ACTION_BACKWARD_WEIGHT && !(*done & 1u << QD_PHASE_INPUT))
        return qd_proof_action_fail(r, -1, 0, -1, "the gradients of this module's inputs have not been computed");
    *done |= (uint8_t)phases;
    QD_TRY(expect(r, QD_USE_INPUT, -1, mb));
    QD_TRY(expect(r, QD_USE_IN, a->module - 1, mb));
    if (forward || again) {
        fill(r, QD_USE_STASH_I, a->module, mb);
        fill(r, QD_USE_STASH_W, a->module, mb);
    } else {
        QD_TRY(expect(r, QD_USE_STASH_I, a->module, mb));
        QD_TRY(expect(r, QD_USE_STASH_W, a->module, mb));
        QD_TRY(expect(r, QD_USE_GRAD_OUT, a->module, mb));
    }
    if (forward)
        fill(r, QD_USE_OUT, a->module, mb);
    if (a->kind == QD_ACTION_BACKWARD_INPUT || a->kind == QD_ACTION_BACKWARD)
        fill(r, QD_USE_MID, a->module, mb);
    if (a->kind == QD_ACTION_BACKWARD_WEIGHT)
        QD_TRY(expect(r, QD_USE_MID, a->module, mb));
    if (phases & 1u << QD_PHASE_INPUT)
        fill(r, QD_USE_GRAD_IN, a->module - 1, mb);
    QD_TRY(reads_fresh(r, c, phases));
    QD_TRY(reads_casts(r, c, phases));
    return qd_proof_gradients_module(r);
}

/* This rank's position in a group that shards parameters must match the part in its storage. */
static qd_status cuts_alike(const proof_run *r, int parts, int part)
{
    const qd_action *a = r->action;
    if (a->group < 0 || a->group >= r->program->group_count)
        return qd_proof_action_fail(r, -1, 0, -1, "it communicates in a group that does not exist");
    qd_group group = r->program->groups[a->group];
    if (group.size != a->parts || (parts > 0 && (parts != a->parts || qd_group_coord(r->proof->mesh, group, r->program->rank) != part)))
        return qd_proof_action_fail(r, -1, 0, -1, "parameters are cut into %d parts, but the group has %d ranks",
                                    parts > 0 ? parts : a->parts, group.size);
    return QD_OK;
}

static bool of_gradients(qd_buffer_kind kind)
{
    return kind == QD_BUFFER_GRAD || kind == QD_BUFFER_GRAD_BLOCK;
}

/* GATHER, PACK and UNPACK of parameters. */
static qd_status move_params(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_program *p = r->program;
    int persistent = p->persistent[QD_BUFFER_PARAM];
    for (int i = a->param; i < a->param + a->params; i++) {
        qd_share share = qd_storage_share(&p->storage, i);
        if (!qd_storage_moves(r->ledger, &p->storage, i, kind_of(r, a->buffer) == QD_BUFFER_UNIT) || p->storage.count[i] == 0)
            continue;
        bool source = a->part == persistent || a->part < 0 || r->packed[a->part] == a->parts;
        if (a->kind == QD_ACTION_PACK) { /* own rows are always up to date, others if all are */
            if (a->parts != share.parts && r->fresh[i] != a->buffer)
                return qd_proof_action_fail(r, -1, 0, -1, "parts of %s are kept that are not up to date", r->ledger->params[i].name);
            r->packed[a->part] = a->parts;
            continue;
        }
        if (a->kind == QD_ACTION_GATHER)
            QD_TRY(cuts_alike(r, a->part == persistent ? share.parts : 0, share.part));
        if (!source || (a->kind == QD_ACTION_UNPACK && a->parts != 1))
            return qd_proof_action_fail(r, -1, 0, -1, "parts of %s come from memory that does not hold them", r->ledger->params[i].name);
        r->fresh[i] = a->buffer;
        r->fresh_by[i] = r->index;
    }
    return QD_OK;
}

static void free_params(proof_run *r, int buffer)
{
    int module = r->program->buffers[buffer].module;
    if (kind_of(r, buffer) != QD_BUFFER_UNIT || module < 0)
        return;
    const qd_module *m = &r->ledger->modules[module];
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++)
        r->fresh[i] = r->fresh[i] == buffer ? -1 : r->fresh[i];
}

/* Activations between stages: what is sent must be what the receiver expects. */
static qd_status transfer(proof_run *r)
{
    const qd_action *a = r->action;
    qd_buffer_kind kind = kind_of(r, a->buffer);
    if (kind == QD_BUFFER_TIED_GRAD)
        return qd_proof_gradients_action(r);
    if (kind == QD_BUFFER_PARAM) { /* of tied parameters, after the update */
        int tied = qd_ledger_tied(r->ledger);
        if (a->kind == QD_ACTION_SEND && tied >= 0 && r->updated[r->ledger->params[tied].tied_to] == 0)
            return qd_proof_action_fail(r, -1, 0, -1, "values of %s are sent before their update", r->ledger->params[tied].name);
        r->copy_fresh = r->copy_fresh || a->kind == QD_ACTION_RECV;
        return QD_OK;
    }
    if (kind != QD_BUFFER_PORT && kind != QD_BUFFER_PORT_GRAD)
        return qd_proof_action_fail(r, -1, 0, -1, "%s never pass between stages", qd_buffer_kind_name(kind));
    proof_content *c = &r->contents[a->buffer];
    if (a->kind == QD_ACTION_SEND && (c->module != a->module || c->microbatch != a->microbatch))
        return qd_proof_action_fail(r, -1, 0, -1, "what it sends is that of module %d, micro-batch %d", c->module, c->microbatch);
    if (a->kind == QD_ACTION_SEND)
        return qd_proof_waits(r, -1, "what it sends", c->by);
    *c = (proof_content){a->module, a->microbatch, r->index};
    return QD_OK;
}

static qd_status one_action(proof_run *r)
{
    const qd_action *a = r->action;
    const qd_program *p = r->program;
    if (qd_action_phases(a) != 0)
        return module_action(r);
    QD_TRY(right_elements(r));
    QD_TRY(qd_proof_chunk_action(r));
    switch ((qd_action_kind)a->kind) {
    case QD_ACTION_ALLOC:
        r->contents[a->buffer] = (proof_content){-1, -1, -1};
        r->packed[a->buffer] = 0;
        return qd_proof_gradients_alloc(r, a->buffer);
    case QD_ACTION_FREE:
        free_params(r, a->buffer);
        return QD_OK;
    case QD_ACTION_LOAD:
        if (a->microbatch < 0 || a->microbatch >= p->strategy.micro_batches || r->loaded[a->microbatch])
            return qd_proof_action_fail(r, -1, 0, -1, "micro-batch %d is loaded a second time, or does not exist", a->microbatch);
        r->loaded[a->microbatch] = true;
        r->contents[a->buffer] = (proof_content){-1, a->microbatch, r->index};
        return QD_OK;
    case QD_ACTION_ZERO:
        return a->buffer == p->persistent[QD_BUFFER_MAXIMA] ? qd_proof_clip_action(r) : qd_proof_gradients_action(r);
    case QD_ACTION_MAXIMA:
    case QD_ACTION_CLIP:
        return qd_proof_clip_action(r);
    case QD_ACTION_SEND:
    case QD_ACTION_RECV:
        return transfer(r);
    case QD_ACTION_GATHER:
    case QD_ACTION_PACK:
    case QD_ACTION_UNPACK:
        return a->params > 0 && !of_gradients(kind_of(r, a->buffer)) ? move_params(r) : qd_proof_gradients_action(r);
    default:
        return qd_proof_gradients_action(r);
    }
}

/* At the end every pass of every module must have run for every micro-batch. */
static qd_status all_passes(proof_run *r)
{
    int batches = r->program->strategy.micro_batches;
    int stage = qd_mesh_group_coord(r->proof->mesh, QD_AXIS_BIT(QD_AXIS_PP), r->program->rank);
    for (int m = 0; m < r->ledger->module_count; m++) {
        if (r->ledger->modules[m].stage_rank != stage)
            continue;
        unsigned wanted = qd_proof_class_of(r, m)->phases & ((1u << QD_PHASE_COUNT) - 1u);
        if (r->program->strategy.training) /* also of a frozen embedding: it takes the gradient that reaches it */
            wanted |= 1u << QD_PHASE_INPUT;
        for (int mb = 0; mb < batches; mb++)
            if ((r->done[(size_t)m * (size_t)batches + (size_t)mb] & wanted) != wanted)
                return qd_proof_action_fail(r, -1, 0, -1, "%s has not run all of its passes for micro-batch %d", r->ledger->modules[m].name,
                                            mb);
    }
    for (int mb = 0; mb < batches; mb++)
        if (!r->loaded[mb])
            return qd_proof_action_fail(r, -1, 0, -1, "micro-batch %d has not been loaded", mb);
    return QD_OK;
}

static qd_status begin(proof_run *r)
{
    const qd_program *p = r->program;
    size_t buffers = (size_t)p->buffer_count + 1, params = (size_t)r->ledger->param_count + 1, modules = (size_t)r->ledger->module_count;
    size_t batches = (size_t)p->strategy.micro_batches;
    r->contents = malloc(buffers * sizeof *r->contents);
    r->memory = calloc(buffers, sizeof *r->memory);
    r->packed = calloc(buffers, sizeof *r->packed);
    r->done = calloc(modules * batches, 1);
    r->loaded = calloc(batches, sizeof *r->loaded);
    r->fresh = malloc(params * sizeof *r->fresh);
    r->fresh_by = malloc(params * sizeof *r->fresh_by);
    r->clocks = malloc(((size_t)p->action_count + 1) * sizeof *r->clocks);
    r->updated = calloc(params, sizeof *r->updated);
    r->chunks = calloc(buffers, sizeof *r->chunks);
    r->directions = calloc(params, sizeof *r->directions);
    r->squared = calloc(modules, sizeof *r->squared);
    r->summed = calloc(params, sizeof *r->summed);
    r->clipped = calloc(params, sizeof *r->clipped);
    r->held = malloc(params * sizeof *r->held);
    if (!r->contents || !r->memory || !r->packed || !r->done || !r->loaded || !r->fresh || !r->fresh_by || !r->clocks || !r->updated ||
        !r->chunks || !r->directions || !r->squared || !r->summed || !r->clipped || !r->held)
        return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
    memset(r->contents, 0xff, buffers * sizeof *r->contents);
    memset(r->fresh_by, 0xff, params * sizeof *r->fresh_by);
    memset(r->now, 0xff, sizeof r->now);
    int param = p->persistent[QD_BUFFER_PARAM];
    for (int i = 0; i < r->ledger->param_count; i++) {
        bool whole = param >= 0 && !p->buffers[param].sharded &&
                     (qd_storage_share(&p->storage, i).parts == 1 || r->ledger->params[i].frozen);
        r->fresh[i] = whole ? param : -1; /* after a step only a rank's own rows are up to date, unless nothing changes them */
        if (p->storage.trained[i] > 0 && r->ledger->params[i].tied_to < 0)
            r->held[r->held_count++] = i;
    }
    for (int b = 0; b < p->buffer_count; b++)
        if (p->buffers[b].persistent)
            QD_TRY(qd_proof_gradients_alloc(r, b));
    return QD_OK;
}

static void end(proof_run *r)
{
    for (int b = 0; r->memory && b < r->program->buffer_count; b++)
        qd_proof_memory_clear(&r->memory[b]);
    free(r->contents);
    free(r->memory);
    free(r->packed);
    free(r->done);
    free(r->loaded);
    free(r->fresh);
    free(r->fresh_by);
    free(r->clocks);
    free(r->updated);
    free(r->chunks);
    free(r->directions);
    free(r->squared);
    free(r->summed);
    free(r->clipped);
    free(r->held);
}

qd_status qd_proof_step(qd_proof *proof, proof_program *of)
{
    proof_run r = {.proof = proof, .of = of, .program = of->program, .ledger = of->program->ledger, .loss_by = -1, .norm_by = -1,
                   .scores_by = -1};
    r.tied = -1;
    for (int i = 0; i < r.ledger->param_count; i++)
        r.tied = r.ledger->params[i].tied_to >= 0 && !r.ledger->params[i].frozen ? i : r.tied;
    qd_status status = begin(&r);
    for (; r.index < r.program->action_count && status == QD_OK; r.index++) {
        r.action = &r.program->actions[r.index];
        status = tick(&r);
        if (status == QD_OK)
            status = one_action(&r);
        if (status != QD_OK)
            break;
    }
    if (status == QD_OK && r.program->strategy.context == 0)
        status = all_passes(&r);
    if (status == QD_OK)
        status = qd_proof_gradients_end(&r);
    if (status == QD_OK)
        status = qd_proof_clip_end(&r);
    if (status == QD_OK)
        status = qd_proof_chunk_end(&r);
    end(&r);
    return status;
}
