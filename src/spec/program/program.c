/* Builds the step program of a rank: the passes in the order of its schedule, with activations and
 * stashes allocated around them, then loss, norm and update. units.c adds the gathers of
 * parameters, gradients.c the reductions of gradients, transfers.c the messages between pipeline
 * stages, muon.c and offload.c their parts of the update. */
#include "spec/layout/experts.h"
#include "spec/layout/tensor.h"
#include "spec/program/program_impl.h"

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

const char *qd_action_row_name(qd_action_kind kind)
{
    switch (kind) {
    case QD_ACTION_NORM: return "gradient norm";
    case QD_ACTION_ADD: return "gradient add";
    case QD_ACTION_ZERO: return "gradient zero";
    case QD_ACTION_REDUCE_SCATTER: return "gradient reduce_scatter";
    default: return action_names[kind];
    }
}

const char *qd_buffer_kind_name(qd_buffer_kind kind)
{
    return buffer_names[kind];
}

qd_coll_kind qd_action_collective(qd_action_kind kind)
{
    switch (kind) {
    case QD_ACTION_MAXIMA:
    case QD_ACTION_REDUCE: return QD_COLL_ALL_REDUCE;
    case QD_ACTION_REDUCE_SCATTER: return QD_COLL_REDUCE_SCATTER;
    case QD_ACTION_GATHER: return QD_COLL_ALL_GATHER;
    case QD_ACTION_COLLECT:
    case QD_ACTION_HAND_BACK: return QD_COLL_ALL_TO_ALL;
    case QD_ACTION_SHARE: return QD_COLL_BROADCAST;
    case QD_ACTION_SEND: return QD_COLL_SEND;
    case QD_ACTION_RECV: return QD_COLL_RECV;
    default: return QD_COLL_KIND_COUNT;
    }
}

typedef qd_builder builder;

int64_t qd_build_port_bytes(const builder *b)
{
    int64_t first, rows;
    qd_ledger_port_rows(b->ledger, b->p->rank, qd_program_rows(b->p), &first, &rows);
    return rows * b->ledger->model.hidden * (int64_t)qd_dtype_size(b->strategy->activation);
}

static void set_uses(builder *b, qd_action *a, int module, int mb)
{
    const qd_flight *flight = qd_flight_of(b, module, mb), *before = module > 0 ? qd_flight_of(b, module - 1, mb) : NULL;
    a->bytes = qd_class_exchanged(qd_program_class(b->p, module), qd_action_phases(a));
    qd_units_uses(b, module, a->use);
    if (b->strategy->training) {
        qd_gradients_uses(b, module, mb, a->use);
        a->overwrite = qd_gradients_first(b, module, mb, qd_action_phases(a));
        if (a->kind == QD_ACTION_BACKWARD_WEIGHT)
            a->use[QD_USE_TIED_GRAD] = -1; /* complete since phase I, and possibly sent and freed */
    }
    a->use[QD_USE_IN] = before ? before->port : -1;
    a->use[QD_USE_OUT] = flight->port;
    a->use[QD_USE_GRAD_IN] = before ? before->port_grad : -1;
    a->use[QD_USE_GRAD_OUT] = flight->port_grad;
    a->use[QD_USE_INPUT] = qd_program_class(b->p, module)->uses_input ? b->flight.input[mb % b->flight.depth] : -1;
    a->use[QD_USE_STASH_I] = flight->stash_i;
    a->use[QD_USE_STASH_W] = flight->stash_w;
    a->use[QD_USE_MID] = flight->mid;
}

static void alloc_stash(builder *b, int module, int mb)
{
    const qd_module_class *c = qd_program_class(b->p, module);
    qd_flight *flight = qd_flight_of(b, module, mb);
    flight->stash_i = qd_build_alloc(b, QD_BUFFER_STASH_I, module, mb, c->region[QD_REGION_STASH_I]);
    flight->stash_w = qd_build_alloc(b, QD_BUFFER_STASH_W, module, mb, c->region[QD_REGION_STASH_W]);
}

static void forward(builder *b, int item)
{
    int module = b->order.items[item].module, mb = b->order.items[item].microbatch;
    const qd_module_class *c = qd_program_class(b->p, module);
    qd_flight *flight = qd_flight_of(b, module, mb);
    alloc_stash(b, module, mb);
    flight->port = module < b->modules - 1 ? qd_build_alloc(b, QD_BUFFER_PORT, module, mb, qd_build_port_bytes(b)) : -1;
    qd_action *a = qd_build_action(b, QD_ACTION_FORWARD, module, mb);
    set_uses(b, a, module, mb);
    a->flops = qd_class_flops(c, QD_PHASE_FORWARD);
    qd_units_wait(b, item);
    if (module > 0)
        qd_build_wait(b, &qd_flight_of(b, module - 1, mb)->arrives);
    if (c->recompute == QD_RECOMPUTE_FULL) {
        qd_build_free(b, &flight->stash_i);
        qd_build_free(b, &flight->stash_w);
    }
    if (!b->strategy->training && module > 0)
        qd_build_free(b, &qd_flight_of(b, module - 1, mb)->port);
}

/* Frees what is last used in a phase of the backward pass. */
static void free_after(builder *b, int module, int mb, qd_phase phase)
{
    const qd_module_class *c = qd_program_class(b->p, module);
    qd_flight *flight = qd_flight_of(b, module, mb);
    if (module > 0 && c->in_until <= phase)
        qd_build_free(b, &qd_flight_of(b, module - 1, mb)->port);
    if (c->grad_out_until <= phase)
        qd_build_free(b, &flight->port_grad);
    qd_build_free(b, &flight->stash_i);
    if (phase == QD_PHASE_WEIGHT) {
        qd_build_free(b, &flight->stash_w);
        qd_build_free(b, &flight->mid);
    }
}

static void backward_action(builder *b, qd_action_kind kind, int module, int mb, double flops)
{
    qd_action *a = qd_build_action(b, kind, module, mb);
    set_uses(b, a, module, mb);
    a->flops = flops;
    a->squares = mb == b->strategy->micro_batches - 1 && (qd_program_class(b->p, module)->square_phases & qd_action_phases(a));
    b->grad.last_action = b->p->action_count - 1;
}

/* Fills the stash again, from the port that enters the module. */
static void recompute(builder *b, int item)
{
    int module = b->order.items[item].module, mb = b->order.items[item].microbatch;
    alloc_stash(b, module, mb);
    qd_action *a = qd_build_action(b, QD_ACTION_RECOMPUTE, module, mb);
    set_uses(b, a, module, mb);
    a->flops = qd_class_recompute_flops(qd_program_class(b->p, module));
    qd_units_wait(b, item);
}

/* Whether the backward pass of an item is two actions: if the schedule separates the halves, or
 * parallel.split_backward is set. Otherwise a whole pass is one action, even if the class is built
 * for halves: only then do tp collectives overlap with GEMMs of the other half. */
static bool in_halves(const builder *b, int item)
{
    return b->strategy->split_backward && qd_program_class(b->p, b->order.items[item].module)->has_weight_phase &&
           (b->order.items[item].pass != QD_PASS_B || b->order.asked_split);
}

/* Passes B and I. */
static void backward(builder *b, int item)
{
    int module = b->order.items[item].module, mb = b->order.items[item].microbatch;
    const qd_module_class *c = qd_program_class(b->p, module);
    if (c->recompute == QD_RECOMPUTE_FULL)
        recompute(b, item);
    double input_flops = qd_class_flops(c, QD_PHASE_INPUT), weight_flops = qd_class_flops(c, QD_PHASE_WEIGHT);
    if (module > 0)
        qd_flight_of(b, module - 1, mb)->port_grad = qd_build_alloc(b, QD_BUFFER_PORT_GRAD, module - 1, mb, qd_build_port_bytes(b));
    bool halves = in_halves(b, item);
    if (b->strategy->split_backward && c->has_weight_phase)
        qd_flight_of(b, module, mb)->mid = qd_build_alloc(b, QD_BUFFER_MID, module, mb, c->region[QD_REGION_MID]);
    backward_action(b, halves ? QD_ACTION_BACKWARD_INPUT : QD_ACTION_BACKWARD, module, mb,
                    halves ? input_flops : input_flops + weight_flops);
    qd_units_wait(b, item);
    qd_build_wait(b, &qd_flight_of(b, module, mb)->grad_arrives);
    free_after(b, module, mb, halves ? QD_PHASE_INPUT : QD_PHASE_WEIGHT);
}

/* Pass W, and the second half of a split pass B. */
static void backward_weight(builder *b, int item)
{
    int module = b->order.items[item].module, mb = b->order.items[item].microbatch;
    if (!in_halves(b, item))
        return;
    backward_action(b, QD_ACTION_BACKWARD_WEIGHT, module, mb, qd_class_flops(qd_program_class(b->p, module), QD_PHASE_WEIGHT));
    qd_units_wait(b, item); /* blocks with experts read parameters here too */
    free_after(b, module, mb, QD_PHASE_WEIGHT);
}

/* Adds the modules of a stage in the order of the pass. Modules whose gradients are all computed by
 * I have no pass W. */
static void write_turn(builder *b, const qd_turn *turn)
{
    bool up = turn->pass == QD_PASS_F;
    for (int i = 0; i < b->modules; i++) {
        int module = up ? i : b->modules - 1 - i;
        if (b->ledger->modules[module].stage != turn->stage)
            continue;
        if (turn->pass != QD_PASS_W || qd_program_class(b->p, module)->has_weight_phase)
            b->order.items[b->order.item_count++] = (qd_step_item){turn->pass, module, turn->microbatch};
    }
}

/* Maximum distance between the first unfinished and the last started micro-batch. */
static int find_depth(const builder *b)
{
    int depth = 1, low = 0, highest = 0;
    for (int i = 0; i < b->order.item_count; i++) {
        while (low < b->strategy->micro_batches && b->flight.input_left[low] == 0)
            low++;
        highest = b->order.items[i].microbatch > highest ? b->order.items[i].microbatch : highest;
        depth = highest - low + 1 > depth ? highest - low + 1 : depth;
        b->flight.input_left[b->order.items[i].microbatch]--;
    }
    return depth;
}

/* Builds the list of items from the schedule. */
static qd_status write_items(builder *b, qd_arena *arena)
{
    const qd_strategy *s = b->strategy;
    const qd_schedule *schedule = b->order.schedule;
    const qd_turn *turns = &schedule->turns[schedule->begin[b->order.stage_rank]];
    b->order.turn_count = schedule->begin[b->order.stage_rank + 1] - schedule->begin[b->order.stage_rank];
    b->order.items = QD_ARENA_NEW(arena, qd_step_item, (size_t)s->micro_batches * (size_t)b->modules * (schedule->splits ? 3 : 2));
    b->order.turn_begin = QD_ARENA_NEW(arena, int, b->order.turn_count + 1);
    b->flight.input_left = QD_ARENA_NEW(arena, int, s->micro_batches);
    b->flight.input = QD_ARENA_NEW(arena, int, s->micro_batches);
    if (!b->order.items || !b->order.turn_begin || !b->flight.input_left || !b->flight.input)
        return QD_NO_MEMORY;
    for (int turn = 0; turn < b->order.turn_count; turn++) {
        b->order.turn_begin[turn] = b->order.item_count;
        write_turn(b, &turns[turn]);
    }
    b->order.turn_begin[b->order.turn_count] = b->order.item_count;
    for (int i = 0; i < b->order.item_count; i++)
        b->flight.input_left[b->order.items[i].microbatch]++;
    b->flight.depth = schedule->ranks > 1 ? s->micro_batches : find_depth(b); /* transfers start before and end after the passes */
    memset(b->flight.input, 0xff, (size_t)s->micro_batches * sizeof *b->flight.input);
    memset(b->flight.input_left, 0, (size_t)s->micro_batches * sizeof *b->flight.input_left);
    for (int i = 0; i < b->order.item_count; i++)
        b->flight.input_left[b->order.items[i].microbatch]++;
    size_t flights = (size_t)b->modules * (size_t)b->flight.depth;
    b->flight.modules = QD_ARENA_NEW(arena, qd_flight, flights);
    if (!b->flight.modules)
        return QD_NO_MEMORY;
    memset(b->flight.modules, 0xff, flights * sizeof *b->flight.modules);
    return QD_OK;
}

static void run_item(builder *b, int index)
{
    const qd_step_item *item = &b->order.items[index];
    int *input = &b->flight.input[item->microbatch % b->flight.depth];
    if (*input < 0) {
        *input = qd_build_alloc(b, QD_BUFFER_INPUT, -1, item->microbatch, qd_program_input(b->p) * (int64_t)sizeof(int32_t));
        qd_build_action(b, QD_ACTION_LOAD, -1, item->microbatch)->buffer = *input;
    }
    qd_units_before(b, index);
    qd_gradients_before(b, index);
    if (item->pass == QD_PASS_F)
        forward(b, index);
    if (item->pass == QD_PASS_B || item->pass == QD_PASS_I)
        backward(b, index);
    if (item->pass == QD_PASS_B || item->pass == QD_PASS_W)
        backward_weight(b, index);
    qd_units_after(b, index);
    qd_gradients_after(b, index);
    if (--b->flight.input_left[item->microbatch] == 0)
        qd_build_free(b, input);
}

/* Reduces the sum of losses and the number of tokens over the groups. */
static void reduce_loss(builder *b)
{
    const int groups[] = {b->group.data_axes, b->group.pipeline}; /* all stages but the last add zero */
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        if (groups[i] < 0)
            continue;
        qd_action *a = qd_build_collective(b, QD_ACTION_REDUCE, -1, groups[i], qd_program_losses(b->p), QD_F64, -1);
        a->buffer = b->p->persistent[QD_BUFFER_LOSS];
        a->stream = QD_STREAM_COMPUTE;
    }
}

static qd_status check_context(const qd_strategy *s, const qd_ledger *ledger)
{
    const qd_model *m = &ledger->model;
    int cp = ledger->mesh.degree[QD_AXIS_CP], tp = ledger->mesh.degree[QD_AXIS_TP];
    if (cp == 1)
        return QD_OK;
    if (s->context > 0)
        return QD_FAIL(QD_USAGE, "generation runs on one rank: set parallel.cp to 1");
    int kv_heads = m->kv_heads > tp ? m->kv_heads / tp : 1; /* on a rank of tp */
    if (s->cp_mode == QD_CP_ULYSSES && (m->heads % (cp * tp) != 0 || (kv_heads % cp != 0 && cp % kv_heads != 0)))
        return QD_FAIL(QD_USAGE,
                       "parallel.cp_mode ulysses gives each of the %d ranks of cp × tp heads of its own: the model's %d heads must be "
                       "a multiple of that, and its %d kv heads a multiple or a divisor; ring and gather take any",
                       cp * tp, m->heads, m->kv_heads);
    return qd_context_check(s->seq, cp);
}

static qd_status check_master(const qd_strategy *s)
{
    if (!s->split_master || !s->training)
        return QD_OK;
    if (s->param == QD_F32)
        return QD_FAIL(
            QD_USAGE,
            "train.master=split stores the low 16 bits of master weights, which train.precision=fp32 does not have: remove it, or set "
            "train.precision=bf16");
    if (s->offload)
        return QD_FAIL(
            QD_UNSUPPORTED,
            "train.master=split keeps the low 16 bits of master weights on the device, but train.offload=optimizer moves them to host "
            "memory: set train.master=fp32 or train.offload=none");
    if (s->optimizer == QD_OPTIM_MUON)
        return QD_FAIL(QD_UNSUPPORTED, "train.master=split is for train.optimizer adamw and sgd; with muon set train.master=fp32");
    return QD_OK;
}

/* Under sp every rank of tp processes rows of its own between the layers, so each needs at least
 * one. */
static qd_status check_rows(const qd_ledger *ledger, const qd_strategy *s)
{
    const qd_mesh *mesh = &ledger->mesh;
    int tp = mesh->degree[QD_AXIS_TP], cp = mesh->degree[QD_AXIS_CP];
    int64_t least = s->seq;
    for (int coord = 0; coord < cp && cp > 1; coord++) {
        int64_t rows = qd_context_rows(s->seq, cp, coord);
        least = rows < least ? rows : least;
    }
    if (!mesh->sp || s->micro_batch * least >= tp)
        return QD_OK;
    int64_t wanted = (tp + s->micro_batch - 1) / s->micro_batch; /* positions of each sequence */
    const char *without = ledger->model.moe.experts > 0 ? "lower parallel.tp" : "set parallel.sp=false";
    return QD_FAIL(QD_USAGE,
                   "parallel.sp gives each of the %d ranks of parallel.tp rows of its own, but a micro-batch has %lld "
                   "(train.micro_batch=%lld times %lld positions%s): %s, or make data.seq at least %lld",
                   tp, (long long)(s->micro_batch * least), (long long)s->micro_batch, (long long)least,
                   cp > 1 ? " of a rank of cp" : "", without,
                   (long long)(cp > 1 ? (wanted + 1) / 2 * 2 * cp : wanted)); /* a rank of cp has two of 2·cp chunks */
}

static qd_status check_strategy(const qd_ledger *ledger, const qd_strategy *s)
{
    if (s->context > 0 && (s->training || s->micro_batch != 1 || s->micro_batches != 1))
        return QD_FAIL(QD_USAGE, "generation runs one sequence forward at a time");
    QD_TRY(qd_moe_check(&ledger->model, s));
    QD_TRY(qd_offload_check(s));
    QD_TRY(check_master(s));
    QD_TRY(qd_clip_check(&ledger->model, s));
    if (s->training && s->swiglu != QD_SWIGLU_AUTO && !qd_activation_is_swiglu(ledger->model.activation))
        return QD_FAIL(QD_USAGE, "train.swiglu=%s: the model has no SwiGLU (model.activation); remove it",
                       s->swiglu == QD_SWIGLU_KEEP ? "keep" : "again");
    if (s->context > 0 && ledger->mesh.degree[QD_AXIS_CP] > 1)
        return QD_FAIL(QD_UNSUPPORTED, "generation does not shard sequences: set parallel.cp to 1");
    if (s->seq < 1 || s->micro_batch < 1 || s->micro_batches < 1)
        return QD_FAIL(QD_USAGE, "a step needs at least one micro-batch of one sequence of one token");
    return check_rows(ledger, s);
}

/* Gradients are reduced in runs, so all parameters of a module must be partial over the same data
 * axes. */
static qd_status check_gradient_axes(const qd_ledger *ledger, const qd_module *module)
{
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++)
        if ((qd_ledger_gradient_axes(ledger, i) & ~QD_AXIS_BIT(QD_AXIS_TP)) != QD_AXES_DATA)
            return QD_FAIL(QD_UNSUPPORTED, "the gradient of %s is not summed over the data axes alone", ledger->params[i].name);
    return QD_OK;
}

/* zero 3: the neighbours that keep parameters between the passes. They must hold all experts,
 * possibly several times. */
static qd_status choose_kept_groups(builder *b, int shard, bool apart)
{
    const qd_strategy *s = b->strategy;
    const qd_mesh *mesh = &b->ledger->mesh;
    int together = s->reshard * mesh->degree[QD_AXIS_TP], ranks = qd_expert_ranks(mesh);
    b->group.kept[0] = b->group.kept[1] = -1;
    if (s->zero < 3 || s->reshard <= QD_RESHARD_ALL)
        return QD_OK;
    if (shard % s->reshard != 0)
        return QD_FAIL(QD_USAGE, "parallel.reshard_after_forward is %d, which does not divide the %d ranks of a sharded copy", s->reshard,
                       shard);
    if (apart && together % ranks != 0)
        return QD_FAIL(QD_USAGE,
                       "parallel.reshard_after_forward is %d: the %d ranks of such a group cannot hold all experts, which are on %d "
                       "(parallel.ep × etp)",
                       s->reshard, together, ranks);
    if (!s->training)
        return QD_OK;
    b->group.kept[0] = qd_build_group(b, (qd_group){QD_AXES_DATA, s->reshard, 1});
    b->group.kept_parts[0] = s->reshard;
    if (apart) {
        qd_group experts = qd_ledger_data_group(b->ledger, 1);
        b->group.kept_parts[1] = experts.size = together / ranks;
        b->group.kept[1] = qd_build_group(b, experts);
    }
    return QD_OK;
}

/* Chooses the groups of the data axes: all of it, the ranks that share one sharded copy
 * (neighbours), the ranks at the same position of each copy, and those that keep gathered
 * parameters between the passes. Turns off what has no effect with one rank or one micro-batch. */
static qd_status choose_groups(builder *b, qd_strategy *s, qd_storage *storage, qd_arena *arena)
{
    const qd_mesh *mesh = &b->ledger->mesh;
    qd_group data = qd_group_whole(mesh, QD_AXES_DATA), shard = data;
    if (s->shard > 0 && data.size > 1)
        shard.size = s->shard * mesh->degree[QD_AXIS_CP];
    if (data.size % shard.size != 0)
        return QD_FAIL(QD_USAGE, "parallel.dp_shard is %d, which does not divide the data-parallel degree (%d)", s->shard,
                       mesh->degree[QD_AXIS_DP]);
    if (s->prefetch < 1)
        return QD_FAIL(QD_USAGE, "parallel.prefetch must be at least 1");
    bool apart = qd_experts_apart(&b->ledger->model, mesh);
    /* A copy must hold all experts, possibly several times: those are the replicas over which
     * experts are sharded. */
    int together = shard.size * mesh->degree[QD_AXIS_TP], ranks = qd_expert_ranks(mesh);
    if (apart && s->zero > 0 && shard.size > 1 && together % ranks != 0)
        return QD_FAIL(QD_USAGE,
                       "parallel.dp_shard is %d: the %d ranks of a copy cannot hold all experts, which are on %d (parallel.ep × etp)",
                       s->shard, together, ranks);
    s->zero = shard.size > 1 ? s->zero : 0;
    s->sync_each = s->sync_each && s->training && data.size > 1 && s->micro_batches > 1;
    if (s->zero == 0)
        shard.size = 1;
    b->group.data_axes = qd_build_group(b, data);
    for (int family = 0; family < QD_FAMILY_COUNT; family++)
        b->group.data[family] = family == 0 || apart ? qd_build_group(b, qd_ledger_data_group(b->ledger, family)) : -1;
    b->group.shard_axes = qd_build_group(b, shard);
    b->group.shard[0] = b->group.shard_axes;
    b->group.shard[1] = b->group.replica[0] = b->group.replica[1] = -1;
    if (s->zero > 0)
        b->group.replica[0] = qd_build_group(b, (qd_group){QD_AXES_DATA, data.size / shard.size, shard.size});
    if (s->zero > 0 && apart) {
        qd_group experts = qd_ledger_data_group(b->ledger, 1);
        b->group.replica[1] = qd_build_group(b, (qd_group){experts.axes, experts.size * ranks / together, together});
        experts.size = together / ranks;
        b->group.shard[1] = qd_build_group(b, experts);
    }
    b->group.pipeline = qd_build_group(b, qd_group_whole(mesh, QD_AXIS_BIT(QD_AXIS_PP)));
    QD_TRY(choose_kept_groups(b, shard.size, apart));
    qd_share shares[QD_FAMILY_COUNT] = {{shard.size, qd_group_coord(mesh, shard, b->p->rank)}, {1, 0}};
    if (b->group.shard[1] >= 0)
        shares[1] = (qd_share){b->p->groups[b->group.shard[1]].size, qd_group_coord(mesh, b->p->groups[b->group.shard[1]], b->p->rank)};
    return qd_storage_create_shares(b->ledger, b->p->rank, shares, arena, storage);
}

static void add_param_buffer(builder *b, qd_buffer_kind kind, size_t element, int64_t count, bool sharded)
{
    int buffer = qd_build_buffer(b, kind, -1, -1, count * (int64_t)element, true);
    if (!b->no_memory)
        b->p->buffers[buffer].sharded = sharded;
}

static void add_persistent(builder *b, int64_t moment2)
{
    qd_program *p = b->p;
    const qd_strategy *s = b->strategy;
    const qd_model *m = &b->ledger->model;
    bool sharded = s->zero > 0, grads_sharded;
    int64_t whole = p->storage.values, shard = p->storage.shard_values, state = sharded ? shard : whole;
    add_param_buffer(b, QD_BUFFER_PARAM, qd_dtype_size(s->param), s->zero == 3 ? p->storage.shard_params : p->storage.params, s->zero == 3);
    if (s->training) {
        int64_t grads = qd_gradients_storage(b, &grads_sharded);
        add_param_buffer(b, QD_BUFFER_GRAD, qd_dtype_size(s->grad), grads, grads_sharded);
        if (p->storage.tied > 0 && !b->grad.in_blocks)
            add_param_buffer(b, QD_BUFFER_TIED_GRAD, qd_dtype_size(s->grad), p->storage.tied, false);
        if (qd_master_bytes(s) > 0)
            add_param_buffer(b, QD_BUFFER_MASTER, (size_t)qd_master_bytes(s), state, sharded);
        if (s->optimizer != QD_OPTIM_SGD || s->momentum)
            add_param_buffer(b, QD_BUFFER_MOMENT1, sizeof(float), state, sharded);
        if (s->optimizer != QD_OPTIM_SGD)
            add_param_buffer(b, QD_BUFFER_MOMENT2, sizeof(float), p->moment2 ? moment2 : state, sharded);
        qd_build_buffer(b, QD_BUFFER_SQUARES, -1, -1, qd_program_square_rows(p) * 8, true);
        qd_build_buffer(b, QD_BUFFER_SUMS, -1, -1, b->ledger->param_count * (int64_t)sizeof(double), true);
    }
    if (m->position == QD_POSITION_ROPE)
        qd_build_buffer(b, QD_BUFFER_TABLE, -1, -1, qd_rope_tables(m) * qd_positions(s->seq, s->context) * qd_rope_dims(m) * 4, true);
    if (s->context > 0) {
        qd_build_buffer(b, QD_BUFFER_CACHE, -1, -1, qd_program_cache_offset(p, m->layers), true);
        qd_build_buffer(b, QD_BUFFER_LOGITS, -1, -1, m->vocab * 4, true); /* of this rank's tokens, from the first element on */
    }
    if (s->preference.kind)
        qd_build_buffer(b, QD_BUFFER_SCORES, -1, -1, s->micro_batches * qd_program_scores(p) * (int64_t)sizeof(double), true);
    qd_build_buffer(b, QD_BUFFER_LOSS, -1, -1, QD_LOSS_COUNT * (int64_t)sizeof(double), true);
    int64_t scratch = 0;
    for (int module = 0; module < b->modules; module++) { /* modules of other ranks have no class here */
        int64_t wanted = qd_program_class(p, module)->region[QD_REGION_SCRATCH];
        scratch = wanted > scratch ? wanted : scratch;
    }
    qd_build_buffer(b, QD_BUFFER_SCRATCH, -1, -1, scratch, true);
}

/* Sets the groups of the communicating ops of a class, and the bytes that all ranks send for
 * them. */
static void bind_exchanges(builder *b, qd_module_class *class_)
{
    for (int i = 0; i < class_->op_count; i++) {
        qd_op_exchange *e = &class_->ops[i].exchange;
        if (!qd_op_communicates(&class_->ops[i]))
            continue;
        e->index = qd_build_group(b, e->group);
        e->bytes = qd_coll_bytes(qd_op_collective(class_->ops[i].kind), e->count, e->dtype, e->group.size) *
                   (b->ledger->mesh.world / e->group.size);
    }
}

/* Sets the factors that ops multiply gradients by. Balance is computed over the tokens of a
 * sequence, or of all that is computed at the same time (a micro-batch of every rank of dp). */
static void bind_scales(const builder *b, qd_module_class *class_)
{
    const qd_strategy *s = b->strategy;
    const qd_model *m = &b->ledger->model;
    bool batch = m->moe.balance == QD_BALANCE_BATCH;
    for (int i = 0; i < class_->op_count; i++) {
        qd_op *op = &class_->ops[i];
        if (op->kind == QD_OP_HEAD_LOSS || op->kind == QD_OP_LOSS_GRAD || op->kind == QD_OP_ROUTE_GRAD)
            op->scale = (op->ahead > 0 ? m->mtp_weight / m->mtp_modules : 1.0) / (double)qd_program_tokens(b->p);
        if (op->kind == QD_OP_ROUTE_GRAD)
            op->load_tokens = (double)s->seq * (batch ? (double)s->micro_batch * b->ledger->mesh.degree[QD_AXIS_DP] : 1.0);
    }
}

/* Which ranks count each parameter in the norm. */
static qd_status choose_norm(builder *b, qd_arena *arena)
{
    const qd_ledger *l = b->ledger;
    int tp = l->mesh.degree[QD_AXIS_TP];
    b->p->norm = QD_ARENA_NEW(arena, qd_norm_rule, l->param_count);
    if (!b->p->norm)
        return QD_NO_MEMORY;
    for (int i = 0; i < l->param_count; i++) {
        const qd_param *p = &l->params[i];
        const qd_place *place = &p->value[QD_AXIS_TP];
        int copies = place->kind != QD_SHARD ? tp : place->repeat > 1 ? place->repeat : 1;
        if (!p->counts && !p->frozen && p->tied_to < 0)
            b->p->norm[i] = p->family == 1 ? (qd_norm_rule){qd_expert_ranks(&l->mesh), 1} : (qd_norm_rule){tp, copies};
    }
    return QD_OK;
}

/* Gives a finished array to the arena, without the space that it did not need. */
static void *settle(builder *b, qd_arena *arena, void *array, int count, size_t size)
{
    size_t bytes = (size_t)(count > 0 ? count : 1) * size;
    void *shrunk = realloc(array, bytes);
    void *kept = shrunk ? qd_arena_adopt(arena, shrunk, bytes) : NULL;
    if (!shrunk)
        free(array);
    b->no_memory = b->no_memory || !kept;
    return kept;
}

static qd_status choose_schedule(builder *b, qd_arena *arena)
{
    const qd_strategy *s = b->strategy;
    const qd_mesh *mesh = &b->ledger->mesh;
    qd_schedule *plain;
    b->order.stage_rank = qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_PP), b->p->rank);
    b->order.schedule = s->schedule;
    if (!b->order.schedule) {
        QD_TRY(qd_schedule_create(QD_SCHEDULE_1F1B, 1, 1, s->micro_batches, s->training, arena, &plain));
        b->order.schedule = plain;
    }
    if (b->order.schedule->ranks != mesh->degree[QD_AXIS_PP] || b->order.schedule->micro_batches != s->micro_batches ||
        b->order.schedule->training != s->training)
        return QD_FAIL(QD_USAGE, "the schedule is for %d pipeline ranks and %d micro-batches, but the step has %d and %d",
                       b->order.schedule->ranks, b->order.schedule->micro_batches, mesh->degree[QD_AXIS_PP], s->micro_batches);
    return QD_OK;
}

qd_status qd_program_create(const qd_ledger *ledger, const qd_strategy *strategy, int rank, qd_arena *arena,
                            qd_program **program)
{
    QD_TRY(check_strategy(ledger, strategy));
    QD_TRY(check_context(strategy, ledger));
    qd_program *p = QD_ARENA_NEW(arena, qd_program, 1);
    if (!p)
        return QD_NO_MEMORY;
    p->ledger = ledger;
    p->strategy = *strategy;
    p->rank = rank;
    memset(p->persistent, 0xff, sizeof p->persistent);
    builder b = {.p = p, .ledger = ledger, .strategy = &p->strategy, .modules = ledger->module_count,
                 .order.asked_split = strategy->split_backward};
    QD_TRY(choose_schedule(&b, arena));
    p->strategy.split_backward = strategy->split_backward || b.order.schedule->splits;
    QD_TRY(choose_groups(&b, &p->strategy, &p->storage, arena));
    qd_fp8_once weights_once;
    QD_TRY(qd_units_casts(&p->strategy, &weights_once));
    qd_class_config classes = {
        .rank = rank, .batch = strategy->micro_batch, .seq = strategy->seq,
        .activation = strategy->activation, .param = strategy->param,
        .grad = strategy->grad, .training = strategy->training,
        .context = strategy->context, .pairs = strategy->preference.kind != QD_PREFERENCE_NONE,
        .split = p->strategy.split_backward,
        .overlap = strategy->overlap,
        .tensor_pieces = strategy->tensor_pieces,
        .expert_rows = strategy->expert_rows,
        .swiglu = strategy->swiglu, .fp8 = strategy->fp8, .weights_once = weights_once,
        .cp_mode = strategy->cp_mode,
        .traits = strategy->traits,
    };
    for (int module = 0; module < ledger->module_count; module++) {
        int decl = ledger->modules[module].decl;
        if (ledger->modules[module].stage_rank != b.order.stage_rank)
            continue;
        QD_TRY(check_gradient_axes(ledger, &ledger->modules[module]));
        classes.recompute = qd_strategy_recompute(strategy, ledger, module);
        qd_module_class *class_ = &p->classes[decl][classes.recompute];
        if (class_->ops)
            continue;
        QD_TRY(qd_module_class_create(ledger, decl, &classes, arena, class_));
        bind_exchanges(&b, class_);
        bind_scales(&b, class_);
    }
    QD_TRY(write_items(&b, arena));
    QD_TRY(qd_transfers_create(&b, arena));
    QD_TRY(qd_units_create(&b, arena));
    QD_TRY(qd_gradients_create(&b, arena));
    if (strategy->training)
        QD_TRY(choose_norm(&b, arena));
    int64_t moment2 = 0;
    QD_TRY(qd_muon_create(&b, arena, &moment2));
    add_persistent(&b, moment2);
    qd_offload_create(&b, arena);
    qd_build_zero(&b, p->persistent[QD_BUFFER_LOSS], 0, qd_program_losses(p), QD_F64);
    qd_clip_begin(&b);
    qd_gradients_begin(&b);
    for (int turn = 0; turn < b.order.turn_count; turn++) {
        qd_transfers_before(&b, turn);
        for (int item = b.order.turn_begin[turn]; item < b.order.turn_begin[turn + 1]; item++)
            run_item(&b, item);
        qd_transfers_after(&b, turn);
    }
    qd_transfers_finish(&b);
    if (strategy->context == 0)
        reduce_loss(&b);
    if (strategy->training)
        qd_gradients_finish(&b);
    free(b.grad.pending);
    p->actions = settle(&b, arena, p->actions, p->action_count, sizeof *p->actions);
    p->buffers = settle(&b, arena, p->buffers, p->buffer_count, sizeof *p->buffers);
    p->deps = settle(&b, arena, p->deps, p->dep_count, sizeof *p->deps);
    if (b.no_memory)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the step program of rank %d", rank);
    QD_TRY(qd_memory_plan(p));
    *program = p;
    return QD_OK;
}

unsigned qd_action_phases(const qd_action *a)
{
    static const uint8_t phases[QD_ACTION_KIND_COUNT] = {
        [QD_ACTION_CAST_WEIGHTS] = QD_PHASES_ONCE, [QD_ACTION_FORWARD] = 1u << QD_PHASE_FORWARD, [QD_ACTION_RECOMPUTE] = QD_PHASES_AGAIN,
        [QD_ACTION_BACKWARD] = 1u << QD_PHASE_INPUT | 1u << QD_PHASE_WEIGHT, [QD_ACTION_BACKWARD_INPUT] = 1u << QD_PHASE_INPUT,
        [QD_ACTION_BACKWARD_WEIGHT] = 1u << QD_PHASE_WEIGHT};
    return phases[a->kind];
}

int64_t qd_program_square_base(const qd_program *p, int family, int part)
{
    int parts = p->storage.share[family].parts;
    int64_t rows = 0, first, length;
    for (int earlier = 0; earlier < family; earlier++)
        rows += p->storage.whole_rows[earlier];
    if (part == 0 || part == parts)
        return part == 0 ? rows : rows + p->storage.whole_rows[family];
    for (int i = 0; i < p->ledger->param_count; i++) {
        const qd_param *param = &p->ledger->params[i];
        if (p->storage.rows[i] == 0 || param->frozen || param->tied_to >= 0 || param->family != family)
            continue; /* most experts are on other ranks */
        qd_slice(p->storage.rows[i], parts, part, &first, &length); /* rows of the parts before it */
        rows += first;
    }
    return rows;
}

int64_t qd_program_cache_offset(const qd_program *p, int layer)
{
    const qd_model *m = &p->ledger->model;
    int64_t rows = 0, context = p->strategy.context;
    int stage = qd_mesh_group_coord(&p->ledger->mesh, QD_AXIS_BIT(QD_AXIS_PP), p->rank);
    for (int i = 0; i < layer; i++) { /* the first module is the embedding */
        const qd_module *module = &p->ledger->modules[i + 1];
        int64_t window = qd_layer_window(&p->ledger->decls[module->decl]);
        if (module->stage_rank == stage)
            rows += qd_cache_rows(qd_window_within(window, context), context);
    }
    int64_t cols = 2 * (int64_t)qd_tensor_kv_heads(m, &p->ledger->mesh) * m->head_dim;
    if (qd_model_is_latent(m)) /* shared by all heads */
        cols = m->kv_lora_rank + m->qk_rope_head_dim;
    return rows * cols * (int64_t)qd_dtype_size(p->strategy.activation);
}

int64_t qd_program_square_rows(const qd_program *p)
{
    return qd_program_square_base(p, QD_FAMILY_COUNT - 1, p->storage.share[QD_FAMILY_COUNT - 1].parts);
}

qd_share qd_program_share(const qd_program *p, qd_buffer_kind kind, int param)
{
    bool sharded = p->persistent[kind] >= 0 && p->buffers[p->persistent[kind]].sharded;
    return p->ledger->params[param].frozen && !sharded ? (qd_share){1, 0} : qd_storage_share(&p->storage, param);
}

qd_holding qd_program_holding(const qd_program *p, qd_buffer_kind kind, int param)
{
    const qd_storage *s = &p->storage;
    qd_share share = qd_program_share(p, kind, param);
    qd_extent own = qd_storage_part(s, param, share.parts, share.part);
    qd_holding h = {.box = qd_ledger_atom(p->ledger, param, p->rank), .count = own.count};
    h.box.begin[0] += own.first_row;
    h.box.length[0] = own.rows;
    bool sharded = p->persistent[kind] >= 0 && p->buffers[p->persistent[kind]].sharded;
    bool values = kind == QD_BUFFER_PARAM;
    h.offset = sharded ? (values ? s->shard_value : s->shard_offset)[param] : (values ? s->value : s->offset)[param] + own.first;
    if (kind == QD_BUFFER_MOMENT2 && p->moment2)
        h.offset = p->moment2[param];
    if (!qd_program_keeps(p, kind, param))
        h.count = h.box.length[0] = 0;
    return h;
}

bool qd_program_keeps(const qd_program *p, qd_buffer_kind kind, int param)
{
    if (p->ledger->params[param].frozen && kind != QD_BUFFER_PARAM)
        return false;
    return p->persistent[kind] >= 0 && !(kind == QD_BUFFER_MOMENT2 && p->moment2 && p->moment2[param] < 0);
}

int64_t qd_program_comm_bytes(const qd_program *program)
{
    int64_t bytes = 0;
    for (int i = 0; i < program->action_count; i++)
        bytes += program->actions[i].bytes;
    return bytes;
}

int64_t qd_program_uneven_bytes(const qd_program *p)
{
    int64_t bytes = 0;
    for (int i = 0; i < p->action_count; i++) {
        unsigned phases = qd_action_phases(&p->actions[i]);
        const qd_module_class *c = phases ? qd_program_class(p, p->actions[i].module) : NULL;
        for (int k = 0; c && k < c->op_count; k++)
            if (c->ops[k].exchange.uneven && qd_op_runs(&c->ops[k], phases))
                bytes += c->ops[k].exchange.bytes;
    }
    return bytes;
}

bool qd_master_is_split(const qd_strategy *s)
{
    return s->split_master && s->param != QD_F32;
}

int qd_master_bytes(const qd_strategy *s)
{
    return s->param == QD_F32 ? 0 : qd_master_is_split(s) ? 2 : 4;
}

double qd_update_bytes(const qd_strategy *s)
{
    int moments = s->optimizer != QD_OPTIM_SGD ? 2 : s->momentum;
    bool reads = s->param == QD_F32 || s->split_master; /* the update also reads the values; otherwise it only writes them */
    return 8.0 * moments + 2.0 * qd_master_bytes(s) + (double)qd_dtype_size(s->grad) +
           (double)qd_dtype_size(s->param) * (reads ? 2.0 : 1.0);
}

double qd_program_flops(const qd_program *program)
{
    double flops = 0.0;
    for (int i = 0; i < program->action_count; i++)
        if (program->actions[i].kind != QD_ACTION_RECOMPUTE && program->actions[i].kind != QD_ACTION_ORTHOGONALIZE)
            flops += program->actions[i].flops;
    return flops;
}

double qd_program_recompute_flops(const qd_program *program)
{
    double flops = 0.0;
    for (int i = 0; i < program->action_count; i++) {
        unsigned phases = qd_action_phases(&program->actions[i]);
        const qd_module_class *c = phases ? qd_program_class(program, program->actions[i].module) : NULL;
        bool selective = c && c->recompute == QD_RECOMPUTE_SELECTIVE && phases & 1u << QD_PHASE_INPUT; /* within the backward pass */
        flops += phases == QD_PHASES_AGAIN ? program->actions[i].flops : selective ? qd_class_recompute_flops(c) : 0.0;
    }
    return flops;
}
