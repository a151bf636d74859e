/* Builds the data-parallel step: micro-batches one after another, gradients reduced in buckets while the last backward
 * pass still runs, then norm and update. */
#include "spec/program.h"

#include <stdlib.h>
#include <string.h>

static const char *const action_names[QD_ACTION_KIND_COUNT] = {
#define QD_ACTION_NAME(kind, name) [QD_ACTION_##kind] = name,
    QD_ACTION_TABLE(QD_ACTION_NAME)
#undef QD_ACTION_NAME
};

static const char *const buffer_names[QD_BUFFER_KIND_COUNT] = {
#define QD_BUFFER_NAME(kind, name) [QD_BUFFER_##kind] = name,
    QD_BUFFER_TABLE(QD_BUFFER_NAME)
#undef QD_BUFFER_NAME
};

const char *qd_action_name(qd_action_kind kind)
{
    return action_names[kind];
}

const char *qd_buffer_kind_name(qd_buffer_kind kind)
{
    return buffer_names[kind];
}

/* Growing arrays while the program is written; copied into the arena at the end. */
typedef struct builder {
    qd_program *p;
    const qd_ledger *ledger;
    const qd_strategy *strategy;
    int modules, action_capacity, buffer_capacity, dep_capacity;
    int *port, *port_grad, *stash_i, *stash_w, *mid; /* buffer of each module (port: behind it) in this micro-batch */
    int input;
    int64_t reduced_from;  /* gradients at and above this element have been handed to a reduction */
    unsigned gradient_axes; /* over which gradients are summed */
    int last_compute;      /* last action on the compute stream that wrote gradients */
    bool no_memory;
} builder;

static void *grow(builder *b, void *array, int count, int *capacity, size_t size)
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

static int add_buffer(builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes, bool persistent)
{
    qd_program *p = b->p;
    p->buffers = grow(b, p->buffers, p->buffer_count, &b->buffer_capacity, sizeof *p->buffers);
    if (b->no_memory)
        return 0;
    p->buffers[p->buffer_count] =
        (qd_buffer){.kind = kind, .module = module, .microbatch = microbatch, .bytes = bytes, .persistent = persistent};
    if (persistent)
        p->persistent[kind] = p->buffer_count;
    return p->buffer_count++;
}

static qd_action *add_action(builder *b, qd_action_kind kind, int module, int microbatch)
{
    static _Thread_local qd_action lost; /* written to when memory is out; the build then fails as a whole */
    qd_program *p = b->p;
    p->actions = grow(b, p->actions, p->action_count, &b->action_capacity, sizeof *p->actions);
    qd_action *a = b->no_memory ? &lost : &p->actions[p->action_count++];
    *a = (qd_action){.kind = (uint8_t)kind, .module = module, .microbatch = microbatch, .buffer = -1,
                     .dep_first = p->dep_count};
    for (int i = 0; i < QD_USE_COUNT; i++)
        a->use[i] = -1;
    return a;
}

/* The newest action waits for `on`. */
static void add_dep(builder *b, int on)
{
    qd_program *p = b->p;
    p->deps = grow(b, p->deps, p->dep_count, &b->dep_capacity, sizeof *p->deps);
    if (b->no_memory)
        return;
    p->deps[p->dep_count++] = on;
    p->actions[p->action_count - 1].dep_count++;
}

static int alloc(builder *b, qd_buffer_kind kind, int module, int microbatch, int64_t bytes)
{
    if (bytes == 0)
        return -1;
    int buffer = add_buffer(b, kind, module, microbatch, bytes, false);
    add_action(b, QD_ACTION_ALLOC, module, microbatch)->buffer = buffer;
    return buffer;
}

/* Frees *buffer if there is one; a second call does nothing. */
static void free_once(builder *b, int *buffer)
{
    if (*buffer < 0)
        return;
    const qd_buffer *freed = &b->p->buffers[*buffer];
    add_action(b, QD_ACTION_FREE, freed->module, freed->microbatch)->buffer = *buffer;
    *buffer = -1;
}

static int64_t port_bytes(const builder *b)
{
    return b->strategy->micro_batch * b->strategy->seq * b->ledger->model.hidden *
           (int64_t)qd_dtype_size(b->strategy->activation);
}

static void set_uses(builder *b, qd_action *a, int module)
{
    a->use[QD_USE_IN] = module > 0 ? b->port[module - 1] : -1;
    a->use[QD_USE_OUT] = b->port[module];
    a->use[QD_USE_GRAD_IN] = module > 0 ? b->port_grad[module - 1] : -1;
    a->use[QD_USE_GRAD_OUT] = b->port_grad[module];
    a->use[QD_USE_INPUT] = qd_program_class(b->p, module)->uses_input ? b->input : -1;
    a->use[QD_USE_STASH_I] = b->stash_i[module];
    a->use[QD_USE_STASH_W] = b->stash_w[module];
    a->use[QD_USE_MID] = b->mid[module];
}

static void alloc_stash(builder *b, int module, int mb)
{
    const qd_module_class *c = qd_program_class(b->p, module);
    b->stash_i[module] = alloc(b, QD_BUFFER_STASH_I, module, mb, c->region[QD_REGION_STASH_I]);
    b->stash_w[module] = alloc(b, QD_BUFFER_STASH_W, module, mb, c->region[QD_REGION_STASH_W]);
}

static void forward(builder *b, int module, int mb)
{
    const qd_module_class *c = qd_program_class(b->p, module);
    alloc_stash(b, module, mb);
    b->port[module] = module < b->modules - 1 ? alloc(b, QD_BUFFER_PORT, module, mb, port_bytes(b)) : -1;
    qd_action *a = add_action(b, QD_ACTION_FORWARD, module, mb);
    set_uses(b, a, module);
    a->flops = qd_class_flops(c, QD_PHASE_FORWARD);
    if (c->recompute == QD_RECOMPUTE_FULL) {
        free_once(b, &b->stash_i[module]);
        free_once(b, &b->stash_w[module]);
    }
    if (!b->strategy->training && module > 0)
        free_once(b, &b->port[module - 1]);
}

/* What dies after a phase of the backward pass. */
static void free_after(builder *b, int module, qd_phase phase)
{
    const qd_module_class *c = qd_program_class(b->p, module);
    if (module > 0 && c->in_until <= phase)
        free_once(b, &b->port[module - 1]);
    if (c->grad_out_until <= phase)
        free_once(b, &b->port_grad[module]);
    free_once(b, &b->stash_i[module]);
    if (phase == QD_PHASE_WEIGHT) {
        free_once(b, &b->stash_w[module]);
        free_once(b, &b->mid[module]);
    }
}

static void backward_action(builder *b, qd_action_kind kind, int module, int mb, double flops)
{
    qd_action *a = add_action(b, kind, module, mb);
    set_uses(b, a, module);
    a->flops = flops;
    b->last_compute = b->p->action_count - 1;
}

/* Fills the stash a second time, from the port that enters the module. */
static void recompute(builder *b, int module, int mb)
{
    alloc_stash(b, module, mb);
    qd_action *a = add_action(b, QD_ACTION_RECOMPUTE, module, mb);
    set_uses(b, a, module);
    a->flops = qd_class_recompute_flops(qd_program_class(b->p, module));
}

static void backward(builder *b, int module, int mb)
{
    const qd_module_class *c = qd_program_class(b->p, module);
    if (c->recompute == QD_RECOMPUTE_FULL)
        recompute(b, module, mb);
    double input_flops = qd_class_flops(c, QD_PHASE_INPUT), weight_flops = qd_class_flops(c, QD_PHASE_WEIGHT);
    if (module > 0)
        b->port_grad[module - 1] = alloc(b, QD_BUFFER_PORT_GRAD, module - 1, mb, port_bytes(b));
    if (b->strategy->split_backward && c->has_weight_phase) {
        b->mid[module] = alloc(b, QD_BUFFER_MID, module, mb, c->region[QD_REGION_MID]);
        backward_action(b, QD_ACTION_BACKWARD_INPUT, module, mb, input_flops);
        free_after(b, module, QD_PHASE_INPUT);
        backward_action(b, QD_ACTION_BACKWARD_WEIGHT, module, mb, weight_flops);
    } else {
        backward_action(b, QD_ACTION_BACKWARD, module, mb, input_flops + weight_flops);
    }
    free_after(b, module, QD_PHASE_WEIGHT);
}

/* Sums gradients [first, last) over the axes on which the ledger calls them partial, cut into pieces of at most a bucket. */
static void reduce_range(builder *b, int64_t first, int64_t last, unsigned axes)
{
    const qd_strategy *s = b->strategy;
    int group = qd_mesh_group_size(&b->ledger->mesh, axes);
    int64_t most = s->bucket_bytes / (int64_t)qd_dtype_size(s->grad);
    if (most < 1)
        most = 1;
    if (group == 1)
        return;
    while (last > first) {
        int64_t from = last - first > most + most / 2 ? last - most : first; /* no tiny remainder */
        qd_action *a = add_action(b, QD_ACTION_REDUCE, -1, -1);
        a->stream = s->overlap ? QD_STREAM_COMM : QD_STREAM_COMPUTE;
        a->buffer = b->p->persistent[QD_BUFFER_GRAD];
        a->first = from;
        a->count = last - from;
        a->dtype = s->grad;
        a->axes = axes;
        a->bytes = qd_coll_bytes(QD_COLL_ALL_REDUCE, a->count, s->grad, group);
        if (s->overlap)
            add_dep(b, b->last_compute);
        last = from;
    }
}

/* Called when the gradients of `module` and all behind it are complete. */
static void gradients_ready(builder *b, int module)
{
    const qd_module *m = &b->ledger->modules[module];
    int64_t from = module == 0 ? 0 : b->p->storage.offset[m->param_begin];
    int64_t size = (int64_t)qd_dtype_size(b->strategy->grad);
    if (module > 0 && (b->reduced_from - from) * size < b->strategy->bucket_bytes)
        return;
    reduce_range(b, from, b->reduced_from, b->gradient_axes);
    b->reduced_from = from;
}

static void add_tied(builder *b)
{
    if (!b->ledger->model.tied)
        return;
    add_action(b, QD_ACTION_ADD_TIED, b->modules - 1, -1);
    b->last_compute = b->p->action_count - 1;
}

static void zero(builder *b, qd_buffer_kind kind, qd_dtype dtype)
{
    int buffer = b->p->persistent[kind];
    if (buffer < 0)
        return;
    qd_action *a = add_action(b, QD_ACTION_ZERO, -1, -1);
    a->buffer = buffer;
    a->count = b->p->buffers[buffer].bytes / (int64_t)qd_dtype_size(dtype);
    a->dtype = dtype;
}

static void micro_batch(builder *b, int mb, bool reduce)
{
    const qd_strategy *s = b->strategy;
    b->input = alloc(b, QD_BUFFER_INPUT, -1, mb, 3 * s->micro_batch * s->seq * (int64_t)sizeof(int32_t));
    add_action(b, QD_ACTION_LOAD, -1, mb)->buffer = b->input;
    for (int module = 0; module < b->modules; module++)
        forward(b, module, mb);
    if (s->training) {
        for (int module = b->modules - 1; module >= 0; module--) {
            backward(b, module, mb);
            if (!reduce)
                continue;
            if (module == 0)
                add_tied(b);
            if (s->overlap)
                gradients_ready(b, module);
        }
        if (reduce && !s->overlap)
            gradients_ready(b, 0);
    }
    free_once(b, &b->input);
}

/* The sum over the group of the losses and of the tokens counted: two doubles. */
static void reduce_loss(builder *b)
{
    int group = qd_mesh_group_size(&b->ledger->mesh, QD_AXES_DATA);
    if (group == 1)
        return;
    qd_action *a = add_action(b, QD_ACTION_REDUCE, -1, -1);
    a->buffer = b->p->persistent[QD_BUFFER_LOSS];
    a->count = 2;
    a->dtype = QD_F64;
    a->axes = QD_AXES_DATA;
    a->bytes = qd_coll_bytes(QD_COLL_ALL_REDUCE, 2, QD_F64, group);
    a->stream = QD_STREAM_COMPUTE;
}

/* Reductions end in the order in which they started, from the last module to the first; so do the norms, each waiting
 * only for the reductions that cover its module. */
static void finish_step(builder *b)
{
    qd_program *p = b->p;
    int reduce = 0, end = p->action_count;
    for (int module = b->modules - 1; module >= 0; module--) {
        int64_t from = module == 0 ? 0 : p->storage.offset[b->ledger->modules[module].param_begin];
        add_action(b, QD_ACTION_SQUARES, module, -1);
        for (; reduce < end && !b->no_memory; reduce++) {
            const qd_action *a = &p->actions[reduce];
            if (a->kind != QD_ACTION_REDUCE || a->stream != QD_STREAM_COMM)
                continue;
            if (a->first + a->count <= from)
                break;
            add_dep(b, reduce);
        }
    }
    add_action(b, QD_ACTION_NORM, -1, -1);
    for (int module = 0; module < b->modules; module++)
        add_action(b, QD_ACTION_UPDATE, module, -1);
}

static qd_status check_strategy(const qd_strategy *s)
{
    if (s->context > 0 && (s->training || s->micro_batch != 1 || s->micro_batches != 1))
        return QD_FAIL(QD_USAGE, "generation runs one sequence forward at a time");
    if (s->seq < 1 || s->micro_batch < 1 || s->micro_batches < 1)
        return QD_FAIL(QD_USAGE, "a step needs at least one micro-batch of one sequence of one token");
    return QD_OK;
}

/* One buffer of gradients is reduced in ranges, so all in it must be partial over the same axes. */
static qd_status find_gradient_axes(const qd_ledger *ledger, unsigned *axes)
{
    *axes = qd_ledger_gradient_axes(ledger, 0);
    for (int i = 1; i < ledger->param_count; i++)
        if (qd_ledger_gradient_axes(ledger, i) != *axes)
            return QD_FAIL(QD_UNSUPPORTED, "the gradient of %s is summed over other ranks than that of %s", ledger->params[i].name,
                           ledger->params[0].name);
    return QD_OK;
}

static void add_persistent(builder *b)
{
    qd_program *p = b->p;
    const qd_strategy *s = b->strategy;
    const qd_model *m = &b->ledger->model;
    int64_t n = p->storage.values;
    add_buffer(b, QD_BUFFER_PARAM, -1, -1, n * (int64_t)qd_dtype_size(s->param), true);
    if (s->training) {
        add_buffer(b, QD_BUFFER_GRAD, -1, -1, n * (int64_t)qd_dtype_size(s->grad), true);
        if (m->tied)
            add_buffer(b, QD_BUFFER_TIED_GRAD, -1, -1, p->storage.tied * (int64_t)qd_dtype_size(s->grad), true);
        if (s->param != QD_F32)
            add_buffer(b, QD_BUFFER_MASTER, -1, -1, n * 4, true);
        if (s->optimizer == QD_OPTIM_ADAMW || s->momentum)
            add_buffer(b, QD_BUFFER_MOMENT1, -1, -1, n * 4, true);
        if (s->optimizer == QD_OPTIM_ADAMW)
            add_buffer(b, QD_BUFFER_MOMENT2, -1, -1, n * 4, true);
        int64_t rows = 0;
        for (int i = 0; i < b->ledger->param_count; i++) {
            p->square_row[i] = rows;
            if (b->ledger->params[i].tied_to < 0)
                rows += qd_ledger_atom(b->ledger, i, p->rank).length[0];
        }
        add_buffer(b, QD_BUFFER_SQUARES, -1, -1, rows * 8, true);
    }
    if (m->position == QD_POSITION_ROPE)
        add_buffer(b, QD_BUFFER_TABLE, -1, -1, qd_positions(s->seq, s->context) * m->head_dim * 4, true);
    if (s->context > 0) {
        int64_t kv = (int64_t)m->kv_heads * m->head_dim;
        add_buffer(b, QD_BUFFER_CACHE, -1, -1, m->layers * 2 * s->context * kv * (int64_t)qd_dtype_size(s->activation), true);
        add_buffer(b, QD_BUFFER_LOGITS, -1, -1, m->vocab * 4, true);
    }
    add_buffer(b, QD_BUFFER_LOSS, -1, -1, 2 * 8, true);
    int64_t scratch = 0;
    for (int module = 0; module < b->modules; module++) {
        int64_t wanted = qd_program_class(p, module)->region[QD_REGION_SCRATCH];
        scratch = wanted > scratch ? wanted : scratch;
    }
    add_buffer(b, QD_BUFFER_SCRATCH, -1, -1, scratch, true);
}

/* Moves a finished array from the heap into the arena. */
static void *settle(builder *b, qd_arena *arena, void *array, int count, size_t size)
{
    void *kept = qd_arena_array(arena, (size_t)(count > 0 ? count : 1), size);
    if (!kept)
        b->no_memory = true;
    else if (count > 0)
        memcpy(kept, array, (size_t)count * size);
    free(array);
    return kept;
}

qd_status qd_program_create(const qd_ledger *ledger, const qd_strategy *strategy, int rank, qd_arena *arena,
                            qd_program **program)
{
    QD_TRY(check_strategy(strategy));
    if ((double)strategy->micro_batches * ledger->module_count > 1e7)
        return QD_FAIL(QD_USAGE, "a step of %d micro-batches of %d modules is too long a program: raise train.micro_batch or lower "
                                 "train.global_batch", strategy->micro_batches, ledger->module_count);
    qd_program *p = QD_ARENA_NEW(arena, qd_program, 1);
    if (!p)
        return QD_NO_MEMORY;
    p->ledger = ledger;
    p->strategy = *strategy;
    p->rank = rank;
    QD_TRY(qd_ledger_storage(ledger, rank, arena, &p->storage));
    qd_class_config classes = {
        .rank = rank,
        .batch = strategy->micro_batch,
        .seq = strategy->seq,
        .activation = strategy->activation,
        .param = strategy->param,
        .grad = strategy->grad,
        .training = strategy->training,
        .context = strategy->context,
        .split = strategy->split_backward,
        .traits = strategy->traits,
    };
    for (int module = 0; module < ledger->module_count; module++) {
        qd_module_kind kind = ledger->modules[module].kind;
        classes.recompute = qd_strategy_recompute(strategy, ledger, module);
        qd_module_class *class_ = &p->classes[kind][classes.recompute];
        if (!class_->ops)
            QD_TRY(qd_module_class_create(ledger, kind, &classes, arena, class_));
    }
    p->square_row = QD_ARENA_NEW(arena, int64_t, ledger->param_count);
    int modules = ledger->module_count;
    int *slots = QD_ARENA_NEW(arena, int, 5 * modules);
    if (!p->square_row || !slots)
        return QD_NO_MEMORY;
    memset(slots, 0xff, (size_t)(5 * modules) * sizeof *slots);
    memset(p->persistent, 0xff, sizeof p->persistent);
    builder b = {.p = p, .ledger = ledger, .strategy = strategy, .modules = modules, .port = slots,
                 .port_grad = slots + modules, .stash_i = slots + 2 * modules, .stash_w = slots + 3 * modules,
                 .mid = slots + 4 * modules, .input = -1, .reduced_from = p->storage.values};
    QD_TRY(find_gradient_axes(ledger, &b.gradient_axes));
    add_persistent(&b);
    zero(&b, QD_BUFFER_LOSS, QD_F64);
    zero(&b, QD_BUFFER_GRAD, strategy->grad);
    zero(&b, QD_BUFFER_TIED_GRAD, strategy->grad);
    for (int mb = 0; mb < strategy->micro_batches; mb++)
        micro_batch(&b, mb, mb == strategy->micro_batches - 1);
    if (strategy->context == 0)
        reduce_loss(&b);
    if (strategy->training)
        finish_step(&b);
    p->actions = settle(&b, arena, p->actions, p->action_count, sizeof *p->actions);
    p->buffers = settle(&b, arena, p->buffers, p->buffer_count, sizeof *p->buffers);
    p->deps = settle(&b, arena, p->deps, p->dep_count, sizeof *p->deps);
    if (b.no_memory)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the step program of rank %d", rank);
    QD_TRY(qd_memory_plan(p));
    *program = p;
    return QD_OK;
}

int64_t qd_program_comm_bytes(const qd_program *program)
{
    int64_t bytes = 0;
    for (int i = 0; i < program->action_count; i++)
        bytes += program->actions[i].bytes;
    return bytes;
}

double qd_program_flops(const qd_program *program)
{
    double flops = 0.0;
    for (int i = 0; i < program->action_count; i++)
        if (program->actions[i].kind != QD_ACTION_RECOMPUTE)
            flops += program->actions[i].flops;
    return flops;
}

double qd_program_recompute_flops(const qd_program *program)
{
    double flops = 0.0;
    for (int i = 0; i < program->action_count; i++)
        if (program->actions[i].kind == QD_ACTION_RECOMPUTE)
            flops += program->actions[i].flops;
    return flops;
}
