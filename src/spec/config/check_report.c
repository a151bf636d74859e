/* `quadrille check`: builds the programs of all ranks, verifies them, and collects memory, traffic
 * and schedule figures for the report. */
#include <quadrille/check.h>

#include "base/sized.h"
#include "base/text/strbuf.h"
#include "spec/config/config.h"
#include "spec/layout/nodes.h"
#include "spec/config/formulas.h"
#include "spec/layout/pieces.h"
#include "spec/layout/tensor.h"
#include "spec/proof/proof.h"

#include <stdlib.h>
#include <string.h>

/* The local shape of a parameter on a rank, and its part of the rows, which may differ by one
 * between the ranks that share them. All experts are alike: the first represents all, held or not.
 * False: another expert represents this one. */
static bool local_shape(const qd_ledger *l, const qd_storage *s, int param, int rank, int64_t shape[3])
{
    const qd_param *p = &l->params[param];
    if (p->expert > 0)
        return false;
    qd_atom atom = qd_ledger_atom(l, param, rank);
    if (p->expert == 0) {
        int coords[QD_AXIS_COUNT], first;
        qd_mesh_coords(&l->mesh, rank, coords);
        qd_experts_of(&l->model, &l->mesh, rank, &first);
        qd_param held = *p;
        held.expert = first;
        if (l->modules[p->module].stage_rank == coords[QD_AXIS_PP])
            atom = qd_expert_atom(l, &held, rank);
    }
    int parts = s->share[p->family].parts, place = qd_group_coord(&l->mesh, qd_ledger_data_group(l, p->family), rank) % parts;
    int64_t at;
    shape[0] = atom.length[0];
    shape[1] = atom.length[1];
    qd_slice(atom.length[0], parts, place, &at, &shape[2]);
    return true;
}

/* What one of several ranks with the same shapes does. Bit 0: the first rank of tp adds positions
 * and the biases of partial sums; bit 1: one of those with the same keys counts them in norms. */
static unsigned special_work(const qd_ledger *l, int rank)
{
    const qd_model *m = &l->model;
    bool any = m->out_bias || m->mlp_bias || m->position == QD_POSITION_LEARNED, wide = m->qk_norm && m->qk_over == QD_QK_WIDTH;
    bool first = any && qd_mesh_group_coord(&l->mesh, QD_AXIS_BIT(QD_AXIS_TP), rank) == 0;
    return (first ? 1u : 0u) | (wide && qd_tensor_counts_keys(m, &l->mesh, rank) ? 2u : 0u);
}

/* Ranks with the same local shapes do the same and share a program. */
static bool same_shapes(const qd_program *program, int a, int b)
{
    const qd_ledger *ledger = program->ledger;
    int64_t first, x_rows, y_rows, batch = program->strategy.micro_batch, seq = program->strategy.seq;
    qd_ledger_port_rows(ledger, a, batch * qd_ledger_rows(ledger, a, seq), &first, &x_rows);
    qd_ledger_port_rows(ledger, b, batch * qd_ledger_rows(ledger, b, seq), &first, &y_rows);
    if (special_work(ledger, a) != special_work(ledger, b))
        return false;
    if (x_rows != y_rows || qd_ledger_rows(ledger, a, seq) != qd_ledger_rows(ledger, b, seq))
        return false;
    for (int i = 0; i < ledger->param_count; i++) {
        int64_t x[3], y[3];
        if (local_shape(ledger, &program->storage, i, a, x) && local_shape(ledger, &program->storage, i, b, y) &&
            memcmp(x, y, sizeof x) != 0)
            return false;
    }
    return true;
}

/* Equal for ranks that do the same, different for most others. */
static uint64_t shape_hash(const qd_program *program, int rank)
{
    uint64_t hash = 1469598103934665603u + special_work(program->ledger, rank);
    for (int i = 0; i < program->ledger->param_count; i++) {
        int64_t shape[3];
        bool counts = local_shape(program->ledger, &program->storage, i, rank, shape);
        for (int k = 0; counts && k < 3; k++)
            hash = (hash ^ (uint64_t)shape[k]) * 1099511628211u;
    }
    return hash;
}

qd_status qd_config_build_all(const qd_config *config, qd_arena *arena, const qd_program ***programs)
{
    const qd_program **list = QD_ARENA_NEW(arena, const qd_program *, config->world),
                     **classes = QD_ARENA_NEW(arena, const qd_program *, config->world);
    uint64_t *hashes = QD_ARENA_NEW(arena, uint64_t, config->world);
    int count = 0;
    if (!list || !classes || !hashes)
        return QD_NO_MEMORY;
    for (int rank = 0; rank < config->world; rank++) {
        uint64_t hash = count > 0 ? shape_hash(classes[0], rank) : 0;
        int k = 0;
        while (k < count && (hashes[k] != hash || !same_shapes(classes[k], classes[k]->rank, rank)))
            k++;
        if (k == count) {
            qd_program *program;
            QD_TRY(qd_config_build(config, rank, arena, &program));
            hashes[count] = shape_hash(program, rank);
            classes[count++] = program;
        }
        list[rank] = classes[k];
    }
    *programs = list;
    return QD_OK;
}

/* The program that represents a stage: that of the rank whose other coordinates are 0. */
static const qd_program *stage_program(const qd_program *const *programs, int stage)
{
    int coords[QD_AXIS_COUNT] = {0};
    coords[QD_AXIS_PP] = stage;
    return programs[qd_mesh_rank(&programs[0]->ledger->mesh, coords)];
}

void qd_config_layout_text(const qd_program *p, char *text, size_t size)
{
    const qd_mesh *mesh = &p->ledger->mesh;
    qd_strbuf out = {0};
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--)
        if (mesh->degree[axis] > 1 || (axis == QD_AXIS_DP && mesh->world == 1))
            qd_strbuf_printf(&out, "%s%s %d", out.length ? " × " : "", qd_axis_name((qd_axis)axis), mesh->degree[axis]);
    if (qd_expert_ranks(mesh) > 1)
        qd_strbuf_printf(&out, ", experts over ep %d × etp %d%s", mesh->ep, mesh->etp, qd_nodes_spanned(mesh) > 1 ? ", once per node" : "");
    if (p->strategy.zero > 0)
        qd_strbuf_printf(&out, ", zero %d over %d", p->strategy.zero, p->storage.parts);
    snprintf(text, size, "%s", out.failed || !out.data ? "" : out.data);
    qd_strbuf_free(&out);
}

/* The report line that a collective is added to. */
static const char *purpose(const qd_program *p, const qd_action *a)
{
    if (a->kind == QD_ACTION_COLLECT || a->kind == QD_ACTION_HAND_BACK)
        return "Muon, rows to owners and back";
    if (a->kind == QD_ACTION_SHARE)
        return "Muon, results to all ranks";
    qd_buffer_kind kind = p->buffers[a->buffer].kind;
    if (qd_action_transfers(a))
        return kind == QD_BUFFER_PORT        ? "activations, to the next stage"
               : kind == QD_BUFFER_PORT_GRAD ? "gradients of activations, to the previous stage"
               : kind == QD_BUFFER_TIED_GRAD ? "tied gradient, to the first stage"
                                             : "tied values, to the last stage";
    switch (kind) {
    case QD_BUFFER_LOSS: return "loss, all-reduce";
    case QD_BUFFER_MAXIMA: return "largest scores of heads, all-reduce";
    case QD_BUFFER_SQUARES: return "gradient norm, all-gather";
    case QD_BUFFER_SUMS: return "gradient norm, all-reduce";
    case QD_BUFFER_PARAM:
    case QD_BUFFER_UNIT: return "parameters, all-gather";
    default: break;
    }
    if (p->groups[a->group].axes == QD_AXIS_BIT(QD_AXIS_TP))
        return "tp: parts of gradients, all-reduce";
    if (a->kind == QD_ACTION_REDUCE_SCATTER)
        return "gradients, reduce-scatter";
    return p->groups[a->group].stride > 1 ? "gradients, all-reduce of replicas" : "gradients, all-reduce";
}

static void add_traffic(qd_check_report *r, const char *name, int64_t bytes)
{
    int i = 0;
    while (i < r->traffic_count && strcmp(r->traffic[i].name, name) != 0)
        i++;
    if (i == r->traffic_count)
        r->traffic[r->traffic_count++] = (qd_check_line){name, 0};
    r->traffic[i].bytes += bytes;
}

/* Traffic of the ops of a module action, by kind. */
static void add_op_traffic(const qd_program *p, const qd_action *a, qd_check_report *r)
{
    const qd_module_class *c = qd_program_class(p, a->module);
    for (int i = 0; i < c->op_count; i++) {
        const qd_op *op = &c->ops[i];
        if (!qd_op_communicates(op) || !qd_op_runs(op, qd_action_phases(a)))
            continue;
        add_traffic(r,
                    op->kind == QD_OP_CONTEXT_SHIFT                                    ? "cp: keys and values, send and receive"
                    : op->kind == QD_OP_CONTEXT_GATHER                                 ? "cp: keys and values, all-gather"
                    : op->kind == QD_OP_CONTEXT_SCATTER                                ? "cp: gradients of keys and values, reduce-scatter"
                    : op->kind == QD_OP_CONTEXT_SWAP                                   ? "cp: heads for positions, all-to-all"
                    : op->kind == QD_OP_NODE_DISPATCH || op->kind == QD_OP_NODE_RETURN ? "experts, once per node, at an even load"
                    : op->exchange.uneven                                              ? "experts at an even load, all-to-all"
                    : op->kind == QD_OP_ALL_GATHER                                     ? "activations, all-gather"
                    : op->kind == QD_OP_REDUCE_SCATTER                                 ? "activations, reduce-scatter"
                                                                                       : "activations, all-reduce",
                    op->exchange.bytes / p->ledger->mesh.degree[QD_AXIS_PP]);
    }
}

/* Traffic of gradients and parameters of a stage by the textbook formula: each element is sent n -
 * 1 times by the ranks that share a copy, twice that for an all-reduce. */
static int64_t data_theory(const qd_program *p, int zero, bool each, int64_t *gathered)
{
    const qd_strategy *s = &p->strategy;
    int64_t n = p->storage.parts, all = qd_mesh_group_size(&p->ledger->mesh, QD_AXES_DATA), copies = all / n;
    int64_t same = p->ledger->mesh.world / all / p->ledger->mesh.degree[QD_AXIS_PP]; /* groups of this stage */
    int64_t grads = p->storage.held * (int64_t)qd_dtype_size(s->grad), params = p->storage.held * (int64_t)qd_dtype_size(s->param);
    int64_t syncs = each ? s->micro_batches : 1, gathers = zero == 3 ? 2 * s->micro_batches : zero > 0;
    int64_t sums = zero == 0 ? 2 * (all - 1) * grads : (n - 1) * copies * grads + 2 * (copies - 1) * grads;
    *gathered = gathers * (n - 1) * copies * params * same;
    return syncs * sums * same + *gathered;
}

static void fill_theory(const qd_program *const *programs, qd_check_report *r)
{
    const qd_program *p = programs[0];
    const qd_strategy *s = &p->strategy;
    int64_t n = p->storage.parts, all = qd_mesh_group_size(&p->ledger->mesh, QD_AXES_DATA), copies = all / n, actual = 0, plain = 0;
    int64_t syncs = s->sync_each ? s->micro_batches : 1, gathers = s->zero == 3 ? 2 * s->micro_batches : s->zero > 0;
    if (all == 1 || qd_experts_apart(&p->ledger->model, &p->ledger->mesh)) /* the formula has a single n, experts have their own */
        return;
    for (int stage = 0; stage < r->pipeline; stage++) {
        const qd_program *q = stage_program(programs, stage);
        int64_t gathered, ignored, planned = 0;
        for (int i = 0; i < q->action_count; i++)
            if (q->actions[i].kind == QD_ACTION_GATHER && q->actions[i].params > 0)
                planned += q->actions[i].bytes / r->pipeline;
        r->theory_bytes += data_theory(q, s->zero, s->sync_each, &gathered);
        r->kept_bytes += gathered - planned;
        plain += data_theory(q, 1, false, &ignored);
    }
    if (s->zero == 0)
        snprintf(r->theory, sizeof r->theory, "%lldΨ(n-1)", (long long)(2 * syncs));
    else if (copies == 1)
        snprintf(r->theory, sizeof r->theory, "%lldΨ(n-1)", (long long)(syncs + gathers));
    else
        snprintf(r->theory, sizeof r->theory, "%lldΨ(s-1)n/s + %lldΨ(n/s-1)", (long long)(syncs + gathers), (long long)(2 * syncs));
    for (int i = 0; i < r->traffic_count; i++)
        if (strncmp(r->traffic[i].name, "parameters", 10) == 0 || strncmp(r->traffic[i].name, "gradients, ", 11) == 0)
            actual += r->traffic[i].bytes;
    r->padding_bytes = actual - r->theory_bytes + r->kept_bytes;
    r->zero_extra_bytes = r->pipeline > 1 && s->zero >= 2 ? actual - plain : 0;
}

static void name_modules(const qd_ledger *l, int rank, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < l->module_count && used < size; i++) {
        if (l->modules[i].stage_rank != rank || (i > 0 && l->modules[i - 1].stage_rank == rank))
            continue;
        int last = i;
        while (last + 1 < l->module_count && l->modules[last + 1].stage_rank == rank)
            last++;
        int n = snprintf(text + used, size - used, "%s%s%s%s", used ? ", " : "", l->modules[i].name, last > i ? " .. " : "",
                         last > i ? l->modules[last].name : "");
        used += n > 0 ? (size_t)n : 0;
    }
}

/* Traffic between stages: the rows of a micro-batch for each boundary between ranks, forward and
 * backward. */
static qd_status fill_pipeline(const qd_program *p, qd_check_report *r)
{
    const qd_schedule *s = p->strategy.schedule;
    const qd_mesh *mesh = &p->ledger->mesh;
    int boundaries = 0;
    qd_arena *arena;
    qd_schedule_times times;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_schedule_replay(s, (const double[]){1.0, 2.0, 1.0, 1.0}, 0.0, arena, &times);
    qd_arena_destroy(arena);
    snprintf(r->schedule, sizeof r->schedule, "%s", qd_schedule_name(s->kind));
    r->bubble = times.bubble;
    r->bubble_theory = qd_schedule_theory(s);
    for (int stage = 0; stage + 1 < s->stages; stage++)
        boundaries += s->rank_of[stage] != s->rank_of[stage + 1];
    r->pipeline_theory_bytes = (int64_t)boundaries * (s->training ? 2 : 1) * s->micro_batches * p->strategy.micro_batch * p->strategy.seq *
                               p->ledger->model.hidden * (int64_t)qd_dtype_size(p->strategy.activation) * mesh->degree[QD_AXIS_DP] *
                               (mesh->sp ? 1 : mesh->degree[QD_AXIS_TP]);
    for (int i = 0; i < r->traffic_count; i++)
        if (strncmp(r->traffic[i].name, "activations, to", 15) == 0 || strncmp(r->traffic[i].name, "gradients of activations, to", 28) == 0)
            r->pipeline_bytes += r->traffic[i].bytes;
    return status;
}

/* The program that needs the most memory. */
typedef struct fullest_program {
    const qd_program *program;
    qd_memory_report memory;
} fullest_program;

/* Ranks of a stage may differ: in rows of a sequence, of a parameter or of a shard. Each program is
 * counted once, at the first rank that runs it. */
static qd_status add_ranks(const qd_program *const *programs, int stage, qd_check_report *r, fullest_program *fullest, double *flops)
{
    int ranks = r->world / r->pipeline, begin = stage * ranks, end = begin + ranks; /* pp is the slowest axis */
    *flops = 0.0;
    for (int rank = begin; rank < end; rank++) {
        const qd_program *p = programs[rank];
        qd_memory_report memory;
        int alike = 0;
        if (p->rank != rank)
            continue;
        for (int other = rank; other < end; other++)
            alike += programs[other] == p;
        *flops += qd_program_flops(p) * alike;
        r->recompute_flops_per_step += qd_program_recompute_flops(p) * alike;
        QD_TRY(qd_memory_account(p, &memory));
        if (!fullest->program || memory.total > fullest->memory.total)
            *fullest = (fullest_program){p, memory};
    }
    return QD_OK;
}

static qd_status fill_stages(const qd_program *const *programs, qd_check_report *r, fullest_program *fullest)
{
    for (int stage = 0; stage < r->pipeline; stage++) {
        const qd_program *p = stage_program(programs, stage);
        fullest_program here = {.program = NULL};
        double flops;
        QD_TRY(add_ranks(programs, stage, r, &here, &flops));
        if (!fullest->program || here.memory.total > fullest->memory.total) {
            *fullest = here;
            r->memory_stage = stage;
        }
        r->flops_per_step += flops;
        r->comm_bytes += qd_program_comm_bytes(p) / r->pipeline;
        for (int i = 0; i < p->action_count; i++) {
            if (qd_action_communicates(&p->actions[i]) && p->actions[i].kind != QD_ACTION_RECV)
                add_traffic(r, purpose(p, &p->actions[i]), p->actions[i].bytes / r->pipeline);
            else if (p->actions[i].bytes > 0)
                add_op_traffic(p, &p->actions[i], r);
        }
        if (stage >= QD_CHECK_STAGES || r->pipeline == 1)
            continue;
        qd_check_stage *out = &r->stages[r->stage_count++];
        name_modules(p->ledger, stage, out->modules, sizeof out->modules);
        out->memory_bytes = here.memory.total;
        out->flops_per_step = flops;
        out->in_flight = qd_schedule_in_flight(p->strategy.schedule, stage);
    }
    return QD_OK;
}

/* Closed formulas for tensor and context parallelism, summed over the stages. */
static void fill_formulas(const qd_program *const *programs, qd_check_report *r)
{
    static bool (*const formulas[])(const qd_program *, qd_check_formula *) = {qd_formula_tensor, qd_formula_context};
    for (size_t i = 0; i < sizeof formulas / sizeof *formulas; i++) {
        qd_check_formula sum = {.bytes = 0}, f;
        bool there = true;
        for (int stage = 0; stage < r->pipeline && there; stage++) {
            there = formulas[i](stage_program(programs, stage), &f);
            if (sum.text[0] == '\0')
                memcpy(sum.text, f.text, sizeof sum.text);
            sum.bytes += f.bytes;
            sum.planned += f.planned;
        }
        if (there)
            r->formulas[r->formula_count++] = sum;
    }
}

/* Expert traffic between nodes. */
static void fill_across(const qd_program *const *programs, qd_check_report *r)
{
    const qd_mesh *mesh = &programs[0]->ledger->mesh;
    r->nodes = mesh->nodes;
    r->by_node = qd_nodes_spanned(mesh) > 1;
    for (int stage = 0; stage < r->pipeline; stage++) {
        qd_across across = qd_nodes_across(stage_program(programs, stage));
        r->across_flat_bytes += across.flat;
        r->across_node_bytes += across.by_node;
        if (across.by_node > 0)
            r->row_nodes = qd_nodes_expected(&programs[0]->ledger->model.moe, across.nodes);
    }
}

static qd_status fill_report(const qd_config *config, const qd_program *const *programs, qd_check_report *r)
{
    fullest_program fullest = {.program = NULL};
    const qd_program *p = programs[0];
    snprintf(r->model, sizeof r->model, "%s", config->model.name);
    qd_config_layout_text(p, r->layout, sizeof r->layout);
    r->world = config->world;
    r->pipeline = p->ledger->mesh.degree[QD_AXIS_PP];
    r->parameters = qd_ledger_parameters(p->ledger);
    r->micro_batch = p->strategy.micro_batch;
    r->micro_batches = p->strategy.micro_batches;
    r->seq = p->strategy.seq;
    r->global_batch = config->global_batch;
    r->tokens_per_step = config->global_batch * p->strategy.seq;
    QD_TRY(fill_stages(programs, r, &fullest));
    const qd_memory_report *memory = &fullest.memory;
    r->memory_bytes = memory->total;
    if (r->pipeline > 1)
        QD_TRY(fill_pipeline(p, r));
    fill_theory(programs, r);
    fill_formulas(programs, r);
    fill_across(programs, r);
    p = fullest.program;
    static const qd_buffer_kind states[] = {QD_BUFFER_PARAM, QD_BUFFER_GRAD, QD_BUFFER_MASTER, QD_BUFFER_MOMENT1, QD_BUFFER_MOMENT2};
    for (size_t i = 0; i < sizeof states / sizeof *states; i++)
        if (p->persistent[states[i]] >= 0 && !p->buffers[p->persistent[states[i]]].host)
            r->state_bytes += p->buffers[p->persistent[states[i]]].bytes;
    for (int kind = QD_BUFFER_MASTER; kind <= QD_BUFFER_MOMENT2; kind++)
        if (memory->host[kind] > 0)
            r->host_lines[r->host_line_count++] = (qd_check_line){qd_buffer_kind_name((qd_buffer_kind)kind), memory->host[kind]};
    r->host_bytes = memory->host_total;
    r->chunk_bytes = memory->chunks;
    r->snapshot_bytes = qd_config_snapshot(config) ? qd_pieces_bytes(p) : 0;
    r->action_count = p->action_count;
    for (int kind = 0; kind < QD_BUFFER_KIND_COUNT; kind++)
        if (memory->at_peak[kind] > 0)
            r->lines[r->line_count++] = (qd_check_line){qd_buffer_kind_name((qd_buffer_kind)kind), memory->at_peak[kind]};
    if (memory->total > memory->live_peak)
        r->lines[r->line_count++] = (qd_check_line){"lost to packing", memory->total - memory->live_peak};
    return QD_OK;
}

/* The programs of evaluations communicate by themselves. */
static qd_status check_evaluation(const qd_config *config, const qd_program *const *programs, qd_arena *arena, qd_check_report *r)
{
    const qd_program **list = QD_ARENA_NEW(arena, const qd_program *, config->world);
    if (!list)
        return QD_NO_MEMORY;
    for (int rank = 0; rank < config->world; rank++) {
        list[rank] = programs[rank]->evaluation;
        const qd_program *e = list[rank];
        int64_t bytes = e->dynamic_bytes + e->buffers[e->persistent[QD_BUFFER_SCRATCH]].bytes;
        r->evaluation_bytes = bytes > r->evaluation_bytes ? bytes : r->evaluation_bytes;
    }
    return qd_check_programs(&list[0]->ledger->mesh, list);
}

static qd_status check(const qd_options *options, int world, qd_check_report *report)
{
    qd_config config;
    qd_arena *arena = NULL;
    const qd_program **programs = NULL;
    QD_TRY(qd_config_resolve(options, world, &config));
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_config_build_all(&config, arena, &programs);
    if (status == QD_OK)
        status = qd_check_programs(&programs[0]->ledger->mesh, programs);
    qd_proof_report proof = {0};
    if (status == QD_OK)
        status = qd_prove_programs(&programs[0]->ledger->mesh, programs, &proof);
    report->proved_values = proof.values;
    report->proved_ops = proof.ops;
    if (status == QD_OK)
        status = fill_report(&config, programs, report);
    if (status == QD_OK && programs[0]->evaluation)
        status = check_evaluation(&config, programs, arena, report);
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_check(const qd_options *options, int world, qd_check_report *report)
{
    qd_check_report r = qd_check_report_default();
    QD_TRY(QD_SIZED_CHECK(report, qd_check_report));
    qd_status status = check(options, world, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}

static qd_status describe_schedule(const qd_program *p, FILE *out)
{
    const qd_schedule *s = p->strategy.schedule;
    qd_arena *arena;
    qd_schedule_times times;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_schedule_replay(s, (const double[]){1.0, 2.0, 1.0, 1.0}, 0.0, arena, &times);
    double theory = qd_schedule_theory(s);
    if (status == QD_OK) {
        fprintf(out, "%s: %d pipeline rank%s, %d stage%s, %d micro-batch%s\n", qd_schedule_name(s->kind), s->ranks,
                s->ranks == 1 ? "" : "s", s->stages, s->stages == 1 ? "" : "s", s->micro_batches, s->micro_batches == 1 ? "" : "es");
        fprintf(out, "F is a forward pass and takes 1, B a backward pass and takes 2; its halves I, of\n"
                     "inputs, and W, of weights, take 1 each. The number is the micro-batch%s\n",
                s->stages > s->ranks ? "; small\nletters are the other stages of a rank" : "");
        fprintf(out, "time %.0f, bubble %.2f %%", times.makespan, 100.0 * times.bubble);
        if (theory >= 0.0)
            fprintf(out, " (textbook %.2f %%)", 100.0 * theory);
        fputc('\n', out);
        for (int rank = 0; rank < s->ranks; rank++) {
            char modules[160];
            name_modules(p->ledger, rank, modules, sizeof modules);
            fprintf(out, "  rank %-3d %3d in flight  %s\n", rank, qd_schedule_in_flight(s, rank), modules);
        }
        status = qd_schedule_draw_text(s, out);
    }
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_check_schedule(const qd_options *options, int world, qd_drawing drawing, FILE *out)
{
    qd_config config;
    qd_arena *arena = NULL;
    qd_program *program = NULL;
    QD_TRY(qd_config_resolve(options, world, &config));
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_config_build(&config, 0, arena, &program);
    if (status == QD_OK)
        status = drawing == QD_DRAWING_CSV   ? qd_schedule_write_csv(program->strategy.schedule, out)
                 : drawing == QD_DRAWING_SVG ? qd_schedule_draw_svg(program->strategy.schedule, out)
                                             : describe_schedule(program, out);
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_check_print(const qd_options *options, int world, int rank, FILE *out)
{
    qd_config config;
    qd_arena *arena = NULL;
    qd_program *program = NULL;
    QD_TRY(qd_config_resolve(options, world, &config));
    if (rank < 0 || rank >= config.world)
        return QD_FAIL(QD_USAGE, "there is no rank %d: the layout has ranks 0 to %d", rank, config.world - 1);
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_config_build(&config, rank, arena, &program);
    if (status == QD_OK)
        qd_program_print(program, out);
    qd_arena_destroy(arena);
    return status;
}
