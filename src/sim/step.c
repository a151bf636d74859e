/* Builds the programs of representative ranks, prices their actions, and turns them into items for
 * the event engine. */
#include "sim/step.h"

#include "base/thread.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LINK_NODE = 1, LINK_NETWORK = 2 };
static qd_coll_kind collective_of(const qd_action *a)
{
    return qd_action_collective((qd_action_kind)a->kind);
}

/* Costs of a program's actions; those of modules by qd_step_key(). */
typedef struct pricer {
    const qd_cluster *cluster;
    const qd_program *program;
    qd_span spans[QD_GROUP_LIMIT];
    qd_cost module[QD_STEP_KEYS];
    bool known[QD_STEP_KEYS];
} pricer;

/* All modules of a class that overwrite gradients share it, and all that do not. */
int qd_step_key(const qd_program *p, const qd_action *a)
{
    if (qd_action_phases(a) == 0)
        return -1;
    int decl = p->ledger->modules[a->module].decl, recompute = qd_strategy_recompute(&p->strategy, p->ledger, a->module);
    return ((a->kind * QD_DECLARATIONS_MOST + decl) * QD_RECOMPUTE_COUNT + recompute) * 2 + a->overwrite;
}

static qd_cost price(pricer *p, const qd_action *a)
{
    int key = qd_step_key(p->program, a);
    if (key < 0) {
        qd_cost cost = qd_cost_action(p->cluster, p->program, p->spans, a);
        const qd_processor *own = &p->cluster->processor;
        if (own->cores > 0 && (a->kind == QD_ACTION_UPDATE || a->kind == QD_ACTION_SQUARES))
            cost.optimizer *= own->stream / own->update;
        return cost;
    }
    if (!p->known[key])
        p->module[key] = qd_cost_action(p->cluster, p->program, p->spans, a);
    p->known[key] = true;
    return p->module[key];
}

/* The row sums of the norm are one number per rank in some software. */
static double collective_bytes(const pricer *p, const qd_action *a)
{
    bool squares = a->buffer >= 0 && p->program->buffers[a->buffer].kind == QD_BUFFER_SQUARES;
    int size = p->spans[a->group].size;
    double elements = squares && p->cluster->profile->scalar_norm ? size : (double)a->count;
    return qd_network_message(collective_of(a), elements, a->dtype, size);
}

static void price_collective(const pricer *p, const qd_action *a, qd_sim_item *item)
{
    const qd_span *span = &p->spans[a->group];
    item->seconds =
        qd_network_seconds(p->cluster, collective_of(a), collective_bytes(p, a), span) + qd_processor_meeting(&p->cluster->processor);
    item->link = qd_span_is_remote(span) ? LINK_NETWORK : LINK_NODE;
    if (a->stream == QD_STREAM_COMM)
        item->load = (float)qd_cost_collective_load(p->cluster);
}

bool qd_step_takes_time(const qd_action *a)
{
    return a->kind != QD_ACTION_ALLOC && a->kind != QD_ACTION_FREE;
}

static double exchanged(const qd_cost *cost)
{
    double sum = 0.0;
    for (int axis = 0; axis < QD_COST_AXES; axis++)
        sum += cost->exchange[axis];
    return sum;
}

/* Chunks of optimizer state copied between host memory and the accelerator. On a CPU machine the
 * CPU copies them itself. */
static void price_copy(const pricer *p, const qd_action *a, qd_sim_item *item)
{
    bool processor = p->cluster->processor.cores > 0;
    double bytes = 4.0 * (double)a->count * __builtin_popcount(a->states);
    item->seconds = processor ? qd_cost_stream(p->cluster, 2.0 * bytes) : bytes / p->cluster->accelerator.host;
    if (processor)
        item->stream = QD_STREAM_COMPUTE;
}

/* Messages between stages overlap with everything else and are sequential per peer. The sender's
 * item takes the time, the receiver's waits for it. Message numbers are assigned once all stages
 * are known. */
static void price_transfer(const qd_step *step, const qd_step_stage *stage, const qd_action *a, qd_sim_item *item)
{
    enum { FIRST = QD_STREAM_COUNT, WAYS = 2 };
    bool sends = a->kind == QD_ACTION_SEND, up = a->peer * 2 <= step->stage_count;
    if (a->stream == QD_STREAM_COMM)
        item->stream = (int8_t)(FIRST + (sends ? 0 : WAYS) + up);
    if (!sends)
        return;
    const qd_mesh *mesh = &stage->program->ledger->mesh;
    int peer = qd_group_rank(mesh, stage->program->groups[a->group], stage->rank,
                             (qd_group_coord(mesh, stage->program->groups[a->group], stage->rank) + a->peer) % step->stage_count);
    qd_span span = qd_span_of_pair(step->cluster, stage->rank, peer);
    item->seconds = qd_network_seconds(step->cluster, QD_COLL_SEND, (double)a->count * (double)qd_dtype_size(a->dtype), &span);
    item->link = qd_span_is_remote(&span) ? LINK_NETWORK : LINK_NODE;
}

/* The n-th message to a stage is the n-th that it receives from there. */
static qd_status number_messages(qd_step *step)
{
    size_t stages = (size_t)step->stage_count;
    int *first = calloc(3 * stages * stages + 1, sizeof *first), *sent = first + stages * stages, *got = sent + stages * stages;
    if (!first)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the messages of %d stages", step->stage_count);
    for (int pass = 0; pass < 2; pass++) {
        for (size_t s = 0; s < stages; s++) {
            for (int i = 0; i < step->stages[s].item_count; i++) {
                const qd_action *a = &step->stages[s].program->actions[step->stages[s].action[i]];
                size_t peer = qd_action_transfers(a) ? (s + (size_t)a->peer) % stages : 0;
                if (a->kind == QD_ACTION_SEND && pass == 0)
                    first[s * stages + peer]++;
                else if (a->kind == QD_ACTION_SEND)
                    step->stages[s].items[i].sends = first[s * stages + peer] + sent[s * stages + peer]++;
                else if (a->kind == QD_ACTION_RECV && pass == 1)
                    step->stages[s].items[i].awaits = first[peer * stages + s] + got[peer * stages + s]++;
            }
        }
        for (size_t i = 0; i < stages * stages && pass == 0; i++) {
            int count = first[i];
            first[i] = step->messages;
            step->messages += count;
        }
    }
    free(first);
    return QD_OK;
}

/* Software that reduces gradients after the step: only the optimizer waits for the sums. */
static bool is_late(const qd_step *step, const qd_program *p, const qd_action *a)
{
    bool sums = a->kind == QD_ACTION_REDUCE || a->kind == QD_ACTION_REDUCE_SCATTER;
    return !step->cluster->profile->overlap && sums && a->stream == QD_STREAM_COMM && p->strategy.zero <= 1 && !p->strategy.sync_each;
}

/* Such reductions depend on the last pass of a module, which comes later in the list. What our
 * program does with a sum between passes (unpacking it) costs its time there and does not wait. */
static void delay_sums(const qd_step *step, qd_step_stage *stage, int deps)
{
    const qd_program *p = stage->program;
    if (step->cluster->profile->overlap)
        return;
    int last = stage->item_count - 1;
    while (last > 0 && qd_action_phases(&p->actions[stage->action[last]]) == 0)
        last--;
    for (int i = 0; i < last; i++) {
        qd_sim_item *item = &stage->items[i];
        int kept = 0;
        for (int d = 0; d < item->dep_count && item->stream == QD_STREAM_COMPUTE; d++) {
            int32_t on = stage->deps[item->dep_first + d];
            if (!is_late(step, p, &p->actions[stage->action[on]]))
                stage->deps[item->dep_first + kept++] = on;
        }
        if (item->stream == QD_STREAM_COMPUTE)
            item->dep_count = kept;
        if (!is_late(step, p, &p->actions[stage->action[i]]))
            continue;
        stage->deps[deps] = last;
        stage->items[i].dep_first = deps++; /* replaces its own dependencies, which end before that pass */
        stage->items[i].dep_count = 1;
    }
}

void qd_step_spans(const qd_step *step, const qd_step_stage *stage, qd_span *spans)
{
    const qd_program *p = stage->program;
    for (int g = 0; g < p->group_count; g++)
        spans[g] = qd_span_of_group(step->cluster, &p->ledger->mesh, p->groups[g], stage->rank);
}

/* All ranks of a stage do the same at the same time; one thread of each communicates, all
 * compute. */
static float cores_of(const qd_step *step, const qd_action *a)
{
    const qd_processor *p = &step->cluster->processor;
    bool communicates = qd_action_transfers(a) || qd_action_communicates(a);
    return p->cores == 0 ? 0.0f : (float)(communicates ? 1 : p->threads) * (float)step->config->world / (float)step->stage_count;
}

/* Collectives that span stages are meetings of the stages; the n-th of a group on one stage meets
 * the n-th on the others. */
static qd_status fill_items(const qd_step *step, qd_step_stage *stage)
{
    const qd_program *p = stage->program;
    pricer prices = {.cluster = step->cluster, .program = p};
    qd_step_spans(step, stage, prices.spans);
    int32_t last[QD_STREAM_COUNT] = {-1, -1, -1, -1};
    int32_t *item_of = malloc(((size_t)p->action_count + 1) * sizeof *item_of);
    stage->items = calloc((size_t)p->action_count + 1, sizeof *stage->items);
    stage->action = calloc((size_t)p->action_count + 1, sizeof *stage->action);
    stage->deps = calloc((size_t)p->dep_count + (size_t)p->action_count + 1, sizeof *stage->deps);
    stage->exchange = calloc((size_t)p->action_count + 1, sizeof *stage->exchange);
    if (!item_of || !stage->items || !stage->action || !stage->deps || !stage->exchange) {
        free(item_of);
        return QD_FAIL(QD_NO_MEMORY, "no memory to simulate %d actions", p->action_count);
    }
    int deps = 0;
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        item_of[i] = last[a->stream]; /* dependency of an action that takes no time */
        if (!qd_step_takes_time(a) && a->dep_count == 0)
            continue;
        qd_sim_item *item = &stage->items[stage->item_count];
        *item = (qd_sim_item){.stream = (int8_t)a->stream, .awaits = -1, .sends = -1, .meets = -1};
        item->dep_first = deps;
        for (int d = 0; d < a->dep_count; d++) {
            int32_t on = item_of[p->deps[a->dep_first + d]];
            if (on >= 0)
                stage->deps[deps++] = on;
        }
        item->dep_count = deps - item->dep_first;
        if (qd_action_transfers(a)) {
            price_transfer(step, stage, a, item);
        } else if (qd_action_communicates(a)) {
            price_collective(&prices, a, item);
            if (step->stage_count > 1 && (p->groups[a->group].axes & QD_AXIS_BIT(QD_AXIS_PP)))
                item->meets = stage->meetings++;
        } else if (qd_action_copies(a)) {
            price_copy(&prices, a, item);
        } else {
            qd_cost cost = price(&prices, a);
            item->seconds = qd_cost_total(&cost);
            qd_cost_add(&stage->cost, &cost);
            stage->exchange[stage->item_count] = (float)(item->seconds > 0.0 ? exchanged(&cost) / item->seconds : 0.0);
        }
        item->cores = cores_of(step, a);
        item_of[i] = last[a->stream] = stage->item_count;
        if (qd_action_copies(a) && item->stream == QD_STREAM_COMPUTE)
            last[QD_STREAM_COMPUTE] = stage->item_count;
        stage->action[stage->item_count++] = i;
    }
    delay_sums(step, stage, deps);
    free(item_of);
    return QD_OK;
}

/* The pipeline stages: ranks that differ only in their stage. */
static qd_status find_stages(qd_step *step)
{
    const qd_config *c = step->config;
    qd_mesh mesh;
    QD_TRY(qd_mesh_create(c->world, c->degrees, &mesh));
    step->stage_count = mesh.degree[QD_AXIS_PP];
    step->stages = calloc((size_t)step->stage_count, sizeof *step->stages);
    if (!step->stages)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d stages", step->stage_count);
    for (int s = 0; s < step->stage_count; s++) {
        int coords[QD_AXIS_COUNT] = {0};
        coords[QD_AXIS_PP] = s;
        step->stages[s].rank = qd_mesh_rank(&mesh, coords);
    }
    return QD_OK;
}

/* Independent work on the stages, sequentially or by several threads. */

typedef struct stage_work {
    qd_step *step;
    const qd_ledger *ledger;
    const qd_strategy *strategy;
    qd_status (*body)(const struct stage_work *work, qd_step_stage *stage);
    qd_status *status; /* per stage */
} stage_work;

static void run_body(void *context, int64_t begin, int64_t end, int thread)
{
    const stage_work *work = context;
    (void)thread;
    for (int64_t s = begin; s < end; s++) {
        work->status[s] = work->body(work, &work->step->stages[s]);
        if (work->status[s] != QD_OK)
            qd_error_clear(); /* the record is thread-local */
    }
}

/* Work that fails is repeated in the calling thread, where its message can be read. */
static qd_status for_stages(const stage_work *given)
{
    stage_work work = *given;
    int count = work.step->stage_count, threads = qd_cores_allowed() < count ? qd_cores_allowed() : count;
    qd_pool *pool = NULL;
    qd_status status = QD_OK;
    work.status = calloc((size_t)count, sizeof *work.status);
    if (!work.status)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d stages", count);
    if (threads > 1 && qd_pool_create(threads, -1, &pool) == QD_OK) {
        qd_pool_for(pool, count, 1, run_body, &work);
        qd_pool_destroy(pool);
    } else { /* also if no thread could be started */
        qd_error_clear();
        run_body(&work, 0, count, 0);
    }
    for (int s = 0; s < count && status == QD_OK; s++)
        if (work.status[s] != QD_OK)
            status = work.body(&work, &work.step->stages[s]);
    free(work.status);
    return status;
}

static void free_items(qd_step_stage *stage)
{
    free(stage->items);
    free(stage->action);
    free(stage->deps);
    free(stage->exchange);
}

static qd_status build_stage(const stage_work *work, qd_step_stage *stage)
{
    qd_program *program;
    qd_arena_destroy(stage->arena); /* of a failed attempt */
    stage->arena = NULL;
    QD_TRY(qd_arena_create(&stage->arena));
    QD_TRY(qd_program_create(work->ledger, work->strategy, stage->rank, stage->arena, &program));
    stage->program = program;
    stage->flops = qd_program_flops(program);
    stage->recompute_flops = qd_program_recompute_flops(program);
    return qd_memory_account(program, &stage->memory);
}

static void describe(const void *context, int participant, int index, char *text, size_t size)
{
    const qd_step *step = context;
    const qd_step_stage *stage = &step->stages[participant];
    qd_action_describe(stage->program, stage->action[index], text, size);
}

static qd_status run(qd_step *step)
{
    qd_sim_participant *who = calloc((size_t)step->stage_count, sizeof *who);
    if (!who)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d stages", step->stage_count);
    for (int s = 0; s < step->stage_count; s++)
        who[s] = (qd_sim_participant){step->stages[s].items, step->stages[s].item_count, step->stages[s].deps};
    qd_sim_problem problem = {.participants = who, .count = step->stage_count, .messages = step->messages, .meetings = step->meetings,
                              .cores = step->cluster->processor.cores, .describe = describe, .context = step};
    qd_status status = qd_sim_run(&problem, &step->result);
    free(who);
    return status;
}

qd_status qd_cluster_config(const qd_options *options, const qd_cluster *cluster, qd_config *config)
{
    QD_TRY(qd_config_resolve(options, 0, config));
    config->strategy.traits = &cluster->traits;
    if (config->strategy.fp8.on && cluster->processor.cores == 0 && cluster->accelerator.fp8_peak == 0.0)
        return QD_FAIL(QD_UNSUPPORTED, "train.precision=fp8: accelerator %s has no fp8 (accelerator.fp8_tflops): use train.precision=bf16",
                       cluster->accelerator.name);
    if (cluster->gemms != QD_GEMMS_PROGRAM && (config->strategy.fp8.on || config->strategy.param != QD_BF16))
        return QD_FAIL(QD_USAGE, "software.gemms: its formats are priced for a program in bf16: set train.precision=bf16");
    /* Ranks fill the cluster's nodes, unless the user sets the number of nodes. */
    if (qd_options_is_set(options, "parallel.nodes") || cluster->node_size == 0)
        return QD_OK;
    if (config->world % cluster->node_size == 0)
        config->nodes = config->world / cluster->node_size;
    else if (config->by_node && config->world > cluster->node_size)
        return QD_FAIL(QD_USAGE,
                       "parallel.dispatch=node: %d ranks do not fill nodes of %d (node.size): use a multiple, or set parallel.nodes to "
                       "the number of nodes",
                       config->world, cluster->node_size);
    return QD_OK;
}

/* Ranks on the same machine share its memory and cores: see qd_processor. */
static void share_out(const qd_config *config, const qd_cluster *cluster, qd_cluster *own)
{
    *own = *cluster;
    own->recipe = config->strategy.fp8.recipe;
    if (cluster->processor.cores == 0)
        return;
    qd_processor_set(&own->processor, config->world, config->threads);
    own->accelerator.peak /= config->world;
    own->accelerator.memory /= config->world;
}

qd_status qd_step_create(const qd_config *config, const qd_cluster *cluster, qd_step *step)
{
    memset(step, 0, sizeof *step);
    step->config = config;
    share_out(config, cluster, &step->own);
    step->cluster = &step->own;
    QD_TRY(qd_arena_create(&step->arena));
    qd_ledger *ledger;
    qd_strategy strategy;
    QD_TRY(find_stages(step));
    QD_TRY(qd_config_place(config, step->arena, &ledger, &strategy));
    return for_stages(&(stage_work){.step = step, .ledger = ledger, .strategy = &strategy, .body = build_stage});
}

static qd_status price_stage(const stage_work *work, qd_step_stage *stage)
{
    free_items(stage); /* of a failed attempt */
    stage->item_count = stage->meetings = 0;
    stage->cost = (qd_cost){0};
    return fill_items(work->step, stage);
}

qd_status qd_step_run(qd_step *step)
{
    QD_TRY(for_stages(&(stage_work){.step = step, .body = price_stage}));
    for (int s = 0; s < step->stage_count; s++)
        step->meetings = step->stages[s].meetings > step->meetings ? step->stages[s].meetings : step->meetings;
    QD_TRY(number_messages(step));
    return run(step);
}

void qd_step_free(qd_step *step)
{
    for (int s = 0; s < step->stage_count && step->stages; s++) {
        free_items(&step->stages[s]);
        qd_arena_destroy(step->stages[s].arena);
    }
    free(step->stages);
    qd_sim_result_free(&step->result);
    qd_arena_destroy(step->arena);
    memset(step, 0, sizeof *step);
}
