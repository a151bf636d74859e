/* Replays measured times of actions through the dependencies of the programs: how long a pipeline
 * would take on ranks that do not share cores. */
#include <quadrille/sim.h>

#include "sim/step.h"
#include "base/sized.h"

#include <stdlib.h>
#include <string.h>

/* One rank of the pipeline: its passes and messages, without the rest of the step. */
typedef struct stage {
    const qd_program *program;
    qd_sim_item *items;
    int32_t *deps;
    int count, dep_count;
    double busy;
} stage;

enum { STREAM_SENDS = 2, STREAM_RECEIVES = 4 };

static qd_status fill(stage *s, const double *seconds, int ranks)
{
    const qd_program *p = s->program;
    int32_t *item_of = malloc(((size_t)p->action_count + 1) * sizeof *item_of), last[QD_STREAM_COUNT] = {-1, -1, -1, -1};
    s->items = calloc((size_t)p->action_count + 1, sizeof *s->items);
    s->deps = calloc((size_t)p->dep_count + 1, sizeof *s->deps);
    if (!item_of || !s->items || !s->deps) {
        free(item_of);
        return QD_FAIL(QD_NO_MEMORY, "no memory to replay %d actions", p->action_count);
    }
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        bool computes = qd_action_phases(a) != 0;
        item_of[i] = last[a->stream];
        if ((!computes && !qd_action_transfers(a)) || (qd_action_transfers(a) && a->stream != QD_STREAM_COMM))
            continue;
        qd_sim_item *item = &s->items[s->count];
        *item = (qd_sim_item){
            .seconds = computes ? seconds[i] : 0.0, .awaits = -1, .sends = -1, .meets = -1};
        item->dep_first = s->dep_count;
        if (!computes)
            item->stream = (int8_t)((a->kind == QD_ACTION_SEND ? STREAM_SENDS : STREAM_RECEIVES) + (a->peer * 2 <= ranks));
        for (int d = 0; d < a->dep_count; d++)
            if (item_of[p->deps[a->dep_first + d]] >= 0)
                s->deps[s->dep_count++] = item_of[p->deps[a->dep_first + d]];
        item->dep_count = s->dep_count - item->dep_first;
        s->busy += item->seconds;
        item_of[i] = last[a->stream] = s->count++;
    }
    free(item_of);
    return QD_OK;
}

/* The n-th message to a rank is the n-th that it receives from there. Items and actions that
 * transfer have the same order. */
static int number_messages(stage *stages, int ranks)
{
    int count = 0;
    for (int from = 0; from < ranks; from++) {
        for (int to = 0; to < ranks; to++) {
            int numbers[2] = {count, count};
            for (int side = 0; side < 2; side++) {
                stage *s = &stages[side ? to : from];
                int item = 0, wanted = side ? QD_ACTION_RECV : QD_ACTION_SEND;
                for (int i = 0; i < s->program->action_count; i++) {
                    const qd_action *a = &s->program->actions[i];
                    bool moves = qd_action_transfers(a) && a->stream == QD_STREAM_COMM;
                    if (moves && a->kind == wanted && ((side ? to : from) + a->peer) % ranks == (side ? from : to))
                        *(side ? &s->items[item].awaits : &s->items[item].sends) = numbers[side]++;
                    item += moves || qd_action_phases(a) != 0;
                }
            }
            count = numbers[0] > numbers[1] ? numbers[0] : numbers[1];
        }
    }
    return count;
}

static int inputs_in_flight(const qd_program *p)
{
    int now = 0, most = 0;
    for (int i = 0; i < p->action_count; i++) {
        const qd_action *a = &p->actions[i];
        if ((a->kind == QD_ACTION_ALLOC || a->kind == QD_ACTION_FREE) && p->buffers[a->buffer].kind == QD_BUFFER_INPUT)
            now += a->kind == QD_ACTION_ALLOC ? 1 : -1;
        most = now > most ? now : most;
    }
    return most;
}

static qd_status replay(stage *stages, int ranks, qd_replay_report *r)
{
    qd_sim_participant *who = calloc((size_t)ranks, sizeof *who);
    qd_sim_result result = {0};
    double busy = 0.0, most = 0.0;
    if (!who)
        return QD_FAIL(QD_NO_MEMORY, "no memory to replay %d ranks", ranks);
    int messages = number_messages(stages, ranks);
    for (int i = 0; i < ranks; i++) {
        who[i] = (qd_sim_participant){stages[i].items, stages[i].count, stages[i].deps};
        busy += stages[i].busy;
        most = stages[i].busy > most ? stages[i].busy : most;
        if (i < (int)(sizeof r->in_flight / sizeof *r->in_flight))
            r->in_flight[i] = inputs_in_flight(stages[i].program);
    }
    qd_sim_problem problem = {.participants = who, .count = ranks, .messages = messages};
    qd_status status = qd_sim_run(&problem, &result);
    r->seconds = result.seconds;
    r->bubble = result.seconds > 0.0 ? 1.0 - busy / (ranks * result.seconds) : 0.0;
    r->uneven = busy > 0.0 ? most * ranks / busy - 1.0 : 0.0;
    qd_sim_result_free(&result);
    free(who);
    return status;
}

static qd_status replay_pipeline(const qd_options *options, const double *const *seconds, qd_replay_report *report)
{
    qd_config config;
    qd_arena *arena = NULL;
    qd_mesh mesh;
    QD_TRY(qd_config_resolve(options, 0, &config));
    QD_TRY(qd_mesh_create(config.world, config.degrees, &mesh));
    int ranks = mesh.degree[QD_AXIS_PP];
    stage *stages = calloc((size_t)ranks, sizeof *stages);
    qd_status status = stages ? qd_arena_create(&arena) : QD_FAIL(QD_NO_MEMORY, "no memory to replay %d ranks", ranks);
    for (int i = 0; i < ranks && status == QD_OK; i++) {
        int coords[QD_AXIS_COUNT] = {0};
        qd_program *program;
        coords[QD_AXIS_PP] = i;
        status = qd_config_build(&config, qd_mesh_rank(&mesh, coords), arena, &program);
        stages[i].program = program;
        if (status == QD_OK)
            status = fill(&stages[i], seconds[qd_mesh_rank(&mesh, coords)], ranks);
    }
    if (status == QD_OK) {
        const qd_schedule *s = stages[0].program->strategy.schedule;
        snprintf(report->schedule, sizeof report->schedule, "%s", qd_schedule_name(s->kind));
        report->ranks = ranks;
        report->stages = s->stages;
        report->micro_batches = s->micro_batches;
        report->theory = qd_schedule_theory(s);
        status = replay(stages, ranks, report);
    }
    for (int i = 0; i < ranks && stages; i++) {
        free(stages[i].items);
        free(stages[i].deps);
    }
    free(stages);
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_replay_pipeline(const qd_options *options, const double *const *seconds, qd_replay_report *report)
{
    qd_replay_report r = qd_replay_report_default();
    QD_TRY(QD_SIZED_CHECK(report, qd_replay_report));
    qd_status status = replay_pipeline(options, seconds, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}
