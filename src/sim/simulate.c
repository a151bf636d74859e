/* Turns the times of a step into a report: utilization, cost of communication, memory, the largest
 * losses. */
#include "sim/simulate_impl.h"

#include "base/clock.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* Relative deviation of a rank's step time: a published run on 2048 GPUs is two to four percent
 * slower than the same on 16. */
static const double RANK_JITTER = 0.005;

static void add_line(qd_sim_line *lines, int *count, int capacity, const char *name, double value)
{
    int i = 0;
    while (i < *count && lines[i].name != name && strcmp(lines[i].name, name) != 0)
        i++;
    if (i == *count) {
        if (*count == capacity)
            return;
        lines[(*count)++] = (qd_sim_line){name, 0.0};
    }
    lines[i].value += value;
}

static const char *axes_name(unsigned axes)
{
    static const char *const names[1 << QD_AXIS_COUNT] = {[QD_AXIS_BIT(QD_AXIS_TP)] = "tp",
                                                          [QD_AXIS_BIT(QD_AXIS_CP)] = "cp",
                                                          [QD_AXIS_BIT(QD_AXIS_DP)] = "dp",
                                                          [QD_AXIS_BIT(QD_AXIS_PP)] = "pp"};
    if ((axes & QD_AXES_DATA) && !(axes & ~QD_AXES_DATA))
        return axes & QD_AXIS_BIT(QD_AXIS_DP) ? "dp" : "cp";
    return axes < (1u << QD_AXIS_COUNT) && names[axes] ? names[axes] : "several axes";
}

/* Name of the axis or link that an action communicates over; `groups` has those of groups. */
static const char *way_of(const char *const *groups, const qd_action *a)
{
    return qd_action_copies(a) ? "the host link" : groups[a->group];
}

enum { EXPOSED_LINES = sizeof((qd_sim_report *)0)->exposed / sizeof(qd_sim_line) };

typedef struct account {
    qd_sim_report *r;
    double share; /* weight of a stage in the mean */
} account;

static void expose(account *a, qd_sim_stage *stage, const char *name, double seconds)
{
    stage->exposed_seconds += seconds;
    add_line(a->r->exposed, &a->r->exposed_count, EXPOSED_LINES, name, seconds * a->share);
}

/* The dependency that ended last is what an item waited for. */
static int last_dependency(const qd_step_stage *stage, const qd_sim_times *times, const qd_sim_item *item)
{
    int last = -1;
    for (int d = 0; d < item->dep_count; d++) {
        int on = stage->deps[item->dep_first + d];
        if (last < 0 || times[on].end > times[last].end)
            last = on;
    }
    return last;
}

/* Adds an action's time, without its waiting for collectives inside it. */
static void busy(qd_sim_stage *out, double seconds, double waits)
{
    out->busy_seconds += seconds * (1.0 - waits);
    out->exposed_seconds += seconds * waits;
}

static void account_stage(account *a, const qd_step *step, int s, qd_sim_stage *out)
{
    const qd_step_stage *stage = &step->stages[s];
    const qd_sim_times *times = qd_sim_times_of(&step->result, s);
    const char *groups[QD_GROUP_LIMIT];
    double end = 0.0;
    for (int g = 0; g < stage->program->group_count; g++)
        groups[g] = axes_name(qd_mesh_spread(&stage->program->ledger->mesh, stage->program->groups[g].axes));
    for (int i = 0; i < stage->item_count; i++) {
        const qd_sim_item *item = &stage->items[i];
        const qd_action *action = &stage->program->actions[stage->action[i]];
        bool moves = qd_action_communicates(action) || qd_action_copies(action);
        if (item->stream != QD_STREAM_COMPUTE) {
            if (moves)
                add_line(a->r->hidden, &a->r->hidden_count, EXPOSED_LINES, way_of(groups, action),
                         (times[i].end - times[i].begin) * a->share);
            continue;
        }
        double gap = times[i].begin - end;
        int on = gap > 0.0 ? last_dependency(stage, times, item) : -1;
        /* Waiting for a message is waiting for the stage that sends it. */
        const qd_action *awaited = on >= 0 && times[on].end >= times[i].begin - 1e-12 ? &stage->program->actions[stage->action[on]] : NULL;
        if (awaited && ((qd_action_communicates(awaited) && !qd_action_transfers(awaited)) || qd_action_copies(awaited)))
            expose(a, out, way_of(groups, awaited), gap);
        else if (gap > 0.0)
            out->bubble_seconds += gap;
        if (moves)
            expose(a, out, way_of(groups, action), times[i].end - times[i].begin);
        else
            busy(out, times[i].end - times[i].begin, stage->exchange[i]);
        end = times[i].end;
    }
    out->bubble_seconds += step->result.seconds - end;
    a->r->bubble_seconds += out->bubble_seconds * a->share;
}

/* Subtracts exposed communication from the hidden. */
static void subtract_exposed(qd_sim_report *r)
{
    for (int i = 0; i < r->hidden_count; i++)
        for (int j = 0; j < r->exposed_count; j++)
            if (strcmp(r->hidden[i].name, r->exposed[j].name) == 0)
                r->hidden[i].value = fmax(0.0, r->hidden[i].value - r->exposed[j].value);
}

/* Logits of a whole micro-batch on the stage of the head: in 16 bits, in fp32, and their gradients
 * in fp32. */
static double whole_logits(const qd_step *step, int stage)
{
    const qd_program *p = step->stages[stage].program;
    const qd_mesh *mesh = &p->ledger->mesh;
    if (stage != step->stage_count - 1)
        return 0.0;
    return step->cluster->profile->logit_bytes * (double)p->strategy.micro_batch * (double)p->strategy.seq / mesh->degree[QD_AXIS_CP] *
           (double)p->ledger->model.vocab / mesh->degree[QD_AXIS_TP];
}

/* The op lists of a layer of this stage that keeps its activations; NULL: there is none. */
static const qd_module_class *layer_kept(const qd_program *p)
{
    for (int i = 0; i < p->ledger->module_count; i++) {
        const qd_module_class *class_ = qd_program_class(p, i);
        if (p->ledger->modules[i].layer >= 0 && class_->ops && class_->recompute == QD_RECOMPUTE_NONE)
            return class_;
    }
    return NULL;
}

/* Activations that the software keeps in addition to our op lists: its copies and, without
 * FlashAttention, the scores, 5 bytes each with softmax, mask and dropout (Korthikanti et al.), in
 * every block in flight. */
static double kept_more(const qd_step *step, int stage)
{
    const qd_profile *profile = step->cluster->profile;
    const qd_program *p = step->stages[stage].program;
    const qd_memory_report *m = &step->stages[stage].memory;
    const qd_module_class *block = layer_kept(p);
    double stash = (double)(m->at_peak[QD_BUFFER_STASH_I] + m->at_peak[QD_BUFFER_STASH_W]);
    double each = block ? (double)(block->region[QD_REGION_STASH_I] + block->region[QD_REGION_STASH_W]) : 0.0;
    double more = (profile->kept - 1.0) * stash;
    if (step->cluster->attention != QD_ATTENTION_PLAIN || each <= 0.0)
        return more;
    const qd_model *model = &p->ledger->model;
    double scores = 5.0 * (double)p->strategy.micro_batch * (double)p->strategy.seq * (double)p->strategy.seq * model->heads /
                    p->ledger->mesh.degree[QD_AXIS_TP];
    return more + stash / each * scores;
}

static void fill_memory(const qd_step *step, qd_sim_stage *stages, qd_sim_report *r)
{
    const qd_profile *profile = step->cluster->profile;
    for (int s = 0; s < step->stage_count; s++) {
        stages[s].memory_bytes =
            step->stages[s].memory.total + (int64_t)(step->cluster->processor.cores > 0 ? 0.0 : whole_logits(step, s) + kept_more(step, s));
        if (stages[s].memory_bytes > stages[r->fullest_stage].memory_bytes)
            r->fullest_stage = s;
    }
    const qd_memory_report *m = &step->stages[r->fullest_stage].memory;
    for (int kind = 0; kind < QD_BUFFER_KIND_COUNT && r->memory_count < QD_SIM_LINES - 3; kind++)
        if (m->at_peak[kind] > 0)
            r->memory[r->memory_count++] = (qd_sim_line){qd_buffer_kind_name((qd_buffer_kind)kind), (double)m->at_peak[kind]};
    if (m->total > m->live_peak)
        r->memory[r->memory_count++] = (qd_sim_line){"lost to packing", (double)(m->total - m->live_peak)};
    if (step->cluster->processor.cores == 0)
        r->overhead_bytes = (int64_t)(profile->overhead_bytes + profile->fragments * (double)m->total);
    double more = (double)(stages[r->fullest_stage].memory_bytes - m->total);
    if (more > 0.0)
        r->memory[r->memory_count++] = (qd_sim_line){"kept by this software beyond the program", more};
    if (r->overhead_bytes > 0)
        r->memory[r->memory_count++] = (qd_sim_line){"driver, libraries, fragmentation", (double)r->overhead_bytes};
    r->memory_bytes = stages[r->fullest_stage].memory_bytes + r->overhead_bytes;
    r->memory_limit = step->cluster->accelerator.memory;
    r->host_bytes = m->host_total;
    r->fits = r->memory_bytes <= r->memory_limit;
}

typedef struct loss {
    double seconds;
    char text[160];
} loss;

static int larger(const void *a, const void *b)
{
    double x = ((const loss *)a)->seconds, y = ((const loss *)b)->seconds;
    return x < y ? 1 : x > y ? -1 : 0;
}

static void put_loss(loss *losses, int *count, double seconds, double step, const char *format, ...) __attribute__((format(printf, 5, 6)));
static void put_loss(loss *losses, int *count, double seconds, double step, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    loss *l = &losses[(*count)++];
    l->seconds = seconds;
    int used = snprintf(l->text, sizeof l->text, "%.1f %%: ", 100.0 * seconds / step);
    vsnprintf(l->text + used, sizeof l->text - (size_t)used, format, args);
    va_end(args);
}

/* The time the step would take if every accelerator computed the model's FLOPs at its peak is not a
 * loss; everything else is. */
static void fill_losses(const qd_step *step, const qd_step_stage *busiest, qd_sim_report *r)
{
    loss losses[24];
    int count = 0;
    double t = r->step_seconds, peak = step->cluster->accelerator.peak;
    double again = busiest->flops > 0.0 ? busiest->recompute_flops / (busiest->flops + busiest->recompute_flops) : 0.0;
    double ideal = (busiest->flops + busiest->recompute_flops) / peak;
    double slow = r->product_seconds + r->attention_seconds - ideal;
    put_loss(losses, &count, fmax(0.0, slow), t, "GEMMs and attention below the peak of %.0f TFLOP/s (tiles, short sums, power)",
             peak * 1e-12);
    put_loss(losses, &count, r->memory_seconds, t, "memory-bound kernels (norms, activation functions, residuals)");
    put_loss(losses, &count, r->optimizer_seconds, t, "optimizer updates");
    put_loss(losses, &count, r->launch_seconds, t, "gaps between kernels");
    put_loss(losses, &count, r->bubble_seconds, t, "waiting for other stages of the pipeline (%lld micro-batches, %d stages)",
             (long long)r->micro_batches, r->stages);
    put_loss(losses, &count, r->late_seconds, t, "waiting for the slowest rank, and host work between steps");
    if (again > 0.0)
        put_loss(losses, &count, again * (r->product_seconds + r->attention_seconds), t, "recomputing activations");
    for (int i = 0; i < r->exposed_count; i++)
        put_loss(losses, &count, r->exposed[i].value, t, "exposed communication over %s", r->exposed[i].name);
    qsort(losses, (size_t)count, sizeof *losses, larger);
    for (int i = 0; i < count && r->loss_count < QD_SIM_LOSSES && losses[i].seconds > 0.001 * t; i++)
        memcpy(r->loss[r->loss_count++], losses[i].text, sizeof losses[i].text);
}

static void fill_layout(const qd_program *p, int gpus, char *text, size_t size)
{
    const qd_mesh *mesh = &p->ledger->mesh;
    int used = 0;
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--)
        if (mesh->degree[axis] > 1 || (axis == QD_AXIS_DP && gpus == 1))
            used +=
                snprintf(text + used, size - (size_t)used, "%s%s %d", used ? " × " : "", qd_axis_name((qd_axis)axis), mesh->degree[axis]);
    if (p->strategy.zero > 0)
        snprintf(text + used, size - (size_t)used, ", zero %d over %d", p->strategy.zero, p->storage.parts);
}

static void fill_rates(const qd_step *step, qd_sim_report *r)
{
    const qd_model *m = &step->config->model;
    const qd_cluster *c = step->cluster;
    double tokens = (double)r->tokens_per_step, full = qd_model_flops_per_token(m, r->seq);
    double causal = full - qd_model_attention_flops(m, r->seq) / 2.0, peak = c->accelerator.peak * r->gpus, all = 0.0;
    for (int s = 0; s < step->stage_count; s++)
        all += (step->stages[s].flops + step->stages[s].recompute_flops) * r->gpus / step->stage_count;
    r->tokens_per_second = tokens / r->step_seconds;
    r->tokens_per_gpu_second = r->tokens_per_second / r->gpus;
    r->flops_per_step = causal * tokens;
    r->mfu = full * tokens / (r->step_seconds * peak);
    r->mfu_causal = causal * tokens / (r->step_seconds * peak);
    r->hfu = all / (r->step_seconds * peak);
    r->watts = c->accelerator.watts * r->gpus * c->power_overhead;
    r->joules_per_step = r->watts * r->step_seconds;
    r->cost_per_step = c->price_hour * r->gpus * r->step_seconds / 3600.0;
}

/* Overhead of a step on CPUs in addition to its actions: cores are not equally fast for long, and
 * all ranks wait for the slowest, once per step or in every block; time-sliced ranks find their
 * caches cold. Stages of a pipeline with a core each wait for each other in the simulation. */
static double late(const qd_step *step)
{
    const qd_processor *p = &step->cluster->processor;
    if (step->config->world * p->threads > p->cores)
        return p->late[2];
    return step->config->world == 1 ? p->late[0] : step->stage_count == 1 ? p->late[1] : 0.0;
}

void qd_simulation_fill(const qd_step *step, qd_sim_stage *stages, qd_sim_report *r)
{
    const qd_config *config = step->config;
    const qd_program *p = step->stages[0].program;
    snprintf(r->model, sizeof r->model, "%s", config->model.name);
    snprintf(r->cluster, sizeof r->cluster, "%s", step->cluster->name);
    snprintf(r->profile, sizeof r->profile, "%s", step->cluster->profile->name);
    r->gpus = config->world;
    r->stages = step->stage_count;
    fill_layout(p, r->gpus, r->layout, sizeof r->layout);
    r->parameters = qd_ledger_parameters(p->ledger);
    r->seq = p->strategy.seq;
    r->global_batch = config->global_batch;
    r->micro_batch = p->strategy.micro_batch;
    r->micro_batches = p->strategy.micro_batches;
    r->tokens_per_step = r->global_batch * r->seq;
    for (int s = 0; s < step->stage_count; s++)
        r->built += step->stages[s].program->action_count;
    fill_memory(step, stages, r);
    if (!step->result.times)
        return;
    account a = {.r = r, .share = 1.0 / step->stage_count};
    int busiest = 0;
    for (int s = 0; s < step->stage_count; s++) {
        account_stage(&a, step, s, &stages[s]);
        r->actions += step->stages[s].item_count;
        if (stages[s].busy_seconds > stages[busiest].busy_seconds)
            busiest = s;
    }
    subtract_exposed(r);
    for (int s = 0; s < step->stage_count; s++)
        for (int axis = 0; axis < QD_COST_AXES; axis++) {
            const char *name = axis == QD_COST_EXPERTS ? "ep" : axes_name(1u << axis);
            const qd_cost *inside = &step->stages[s].cost;
            if (inside->exchange[axis] > 0.0)
                add_line(r->exposed, &r->exposed_count, EXPOSED_LINES, name, inside->exchange[axis] * a.share);
            if (inside->hidden[axis] > 0.0)
                add_line(r->hidden, &r->hidden_count, EXPOSED_LINES, name, inside->hidden[axis] * a.share);
        }
    const qd_cost *cost = &step->stages[busiest].cost;
    /* All wait for the slowest rank: the expected maximum of n draws of a normal distribution. */
    double slowest = r->gpus > 1 ? RANK_JITTER * sqrt(2.0 * log(r->gpus)) : 0.0;
    bool measured = step->cluster->processor.cores > 0; /* measured rates include this overhead, and processor.late the slowest rank */
    r->step_seconds = measured ? step->result.seconds * (1.0 + late(step))
                               : step->result.seconds * (1.0 + slowest) + step->cluster->profile->step_overhead;
    r->late_seconds = r->step_seconds - step->result.seconds;
    r->compute_seconds = stages[busiest].busy_seconds;
    r->product_seconds = cost->product;
    r->attention_seconds = cost->attention;
    r->memory_seconds = cost->memory;
    r->optimizer_seconds = cost->optimizer;
    r->launch_seconds = cost->launch;
    fill_rates(step, r);
    fill_losses(step, &step->stages[busiest], r);
}

qd_status qd_simulate_nearest(qd_options *options, char *note, size_t size)
{
    return qd_preset_nearest(options, note, size);
}

/* The report of what has been computed so far. */
static qd_status sum_up(const qd_step *step, qd_sim_report *report)
{
    qd_sim_stage *stages = calloc((size_t)step->stage_count, sizeof *stages);
    if (!stages)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d stages", step->stage_count);
    memset(report, 0, sizeof *report);
    qd_simulation_fill(step, stages, report);
    free(stages);
    return QD_OK;
}

qd_status qd_step_report(const qd_config *config, const qd_cluster *cluster, qd_step_extent extent, qd_sim_report *report)
{
    qd_step step = {0};
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_step_create(config, cluster, &step));
    QD_TRY_DONE(sum_up(&step, report));
    if (extent == QD_STEP_TIMES || (extent == QD_STEP_TIMES_IF_FITS && report->fits)) {
        QD_TRY_DONE(qd_step_run(&step));
        QD_TRY_DONE(sum_up(&step, report));
    }
done:
    qd_step_free(&step);
    return status;
}

qd_status qd_simulate(const qd_options *options, qd_simulation **simulation)
{
    double begin = qd_clock_now();
    qd_simulation *s = calloc(1, sizeof *s);
    if (!s)
        return QD_FAIL(QD_NO_MEMORY, "no memory to simulate");
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_cluster_resolve(options, &s->cluster));
    QD_TRY_DONE(qd_cluster_config(options, &s->cluster, &s->config));
    QD_TRY_DONE(qd_step_create(&s->config, &s->cluster, &s->step));
    QD_TRY_DONE(qd_step_run(&s->step));
    s->stages = calloc((size_t)s->step.stage_count, sizeof *s->stages);
    if (!s->stages) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory for %d stages", s->step.stage_count);
        goto done;
    }
    qd_simulation_fill(&s->step, s->stages, &s->report);
    s->report.wall_seconds = qd_clock_now() - begin;
    *simulation = s;
    return QD_OK;
done:
    qd_simulation_destroy(s);
    return status;
}

void qd_simulation_destroy(qd_simulation *s)
{
    if (!s)
        return;
    qd_step_free(&s->step);
    free(s->stages);
    free(s);
}

const qd_sim_report *qd_simulation_report(const qd_simulation *s)
{
    return &s->report;
}

const qd_sim_stage *qd_simulation_stage(const qd_simulation *s, int stage)
{
    return &s->stages[stage];
}
