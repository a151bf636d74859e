/* Measures the CPU time of each action of a step on its rank's thread. */
#include <quadrille/bench.h>

#include "base/thread.h"
#include "base/sized.h"
#include "train/exec/team.h"

#include <stdlib.h>
#include <string.h>

/* One call: its steps are added to the samples of earlier calls. */
typedef struct measurement {
    qd_bench_actions *actions;
    double **now; /* per rank: times of the current step */
    int steps;    /* of this call */
} measurement;

static qd_status begin(qd_trainer *trainer, qd_comm *world, void *argument)
{
    measurement *m = argument;
    qd_bench_actions *all = m->actions;
    int rank = qd_comm_rank(world), count = qd_trainer_program(trainer)->action_count;
    size_t size = (size_t)count + 1;
    if (all->steps == 0) {
        all->counts[rank] = count;
        all->single[rank] = calloc(size, sizeof(double));
        all->pass[rank] = calloc(size, sizeof(double));
    }
    double *more = realloc(all->samples[rank], size * (size_t)(all->steps + m->steps) * sizeof *more);
    all->samples[rank] = more ? more : all->samples[rank];
    m->now[rank] = calloc(size, sizeof(double));
    if (!all->single[rank] || !all->pass[rank] || !more || !m->now[rank])
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of %d actions", count);
    if (all->counts[rank] != count)
        return QD_FAIL(QD_USAGE, "times of %d actions cannot be added to those of another program with %d", count, all->counts[rank]);
    qd_trainer_set_cpu_seconds(trainer, m->now[rank]);
    return QD_OK;
}

/* Cores differ when other programs or other guests of the machine use them, and a rank tends to
 * stay on one core: move each rank over all of them. */
static qd_status move_on(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)trainer;
    return qd_thread_move(qd_comm_rank(world) + ((const measurement *)argument)->actions->steps);
}

static qd_status keep(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const measurement *m = argument;
    int rank = qd_comm_rank(world);
    size_t count = (size_t)m->actions->counts[rank];
    (void)trainer;
    memcpy(m->actions->samples[rank] + (size_t)m->actions->steps * count, m->now[rank], count * sizeof(double));
    return QD_OK;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The 10th percentile of `count` values, which are sorted. Other work on the machine's cores and
 * caches only adds to a time, often for longer than a step; the minimum could be a single lucky
 * sample. */
static double lower_tenth(double *values, size_t count)
{
    qsort(values, count, sizeof *values, by_value);
    return values[count / 10];
}

static bool same_pass(const qd_action *a, const qd_action *b)
{
    return a->kind == b->kind && a->module == b->module;
}

static qd_status summarize(qd_bench_actions *actions, const qd_program *p, int rank)
{
    const double *samples = actions->samples[rank];
    size_t count = (size_t)p->action_count, steps = (size_t)actions->steps;
    double *values = malloc((count * steps + 1) * sizeof *values), *pass = actions->pass[rank];
    if (!values)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of %d actions", p->action_count);
    memset(pass, 0, count * sizeof *pass);
    for (size_t i = 0; i < count; i++) {
        if (qd_action_phases(&p->actions[i]) == 0)
            continue;
        for (size_t s = 0; s < steps; s++)
            values[s] = samples[s * count + i];
        qsort(values, steps, sizeof *values, by_value);
        actions->single[rank][i] = values[steps / 2];
        if (pass[i] > 0.0) /* set for all by the first micro-batch */
            continue;
        size_t found = 0;
        for (size_t k = i; k < count; k++)
            for (size_t s = 0; s < steps && same_pass(&p->actions[i], &p->actions[k]); s++)
                values[found++] = samples[s * count + k];
        double seconds = lower_tenth(values, found);
        for (size_t k = i; k < count; k++)
            pass[k] = same_pass(&p->actions[i], &p->actions[k]) ? seconds : pass[k];
    }
    free(values);
    return QD_OK;
}

static qd_status finish(qd_trainer *trainer, qd_comm *world, void *argument)
{
    return summarize(argument, qd_trainer_program(trainer), qd_comm_rank(world));
}

static qd_status make_room(qd_bench_actions *actions, int world)
{
    size_t ranks = (size_t)world;
    if (actions->ranks > 0)
        return actions->ranks == world ? QD_OK
                                       : QD_FAIL(QD_USAGE, "times of %d ranks cannot be added to those of %d", world, actions->ranks);
    actions->counts = calloc(ranks, sizeof *actions->counts);
    actions->single = calloc(ranks, sizeof *actions->single);
    actions->pass = calloc(ranks, sizeof *actions->pass);
    actions->samples = calloc(ranks, sizeof *actions->samples);
    if (!actions->counts || !actions->single || !actions->pass || !actions->samples)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of %d ranks", world);
    actions->ranks = world;
    return QD_OK;
}

static qd_status measure_actions(const qd_options *options, int warm_up, int steps, qd_bench_actions *actions)
{
    qd_config config;
    QD_TRY(qd_config_resolve(options, 0, &config));
    config.threads = 1; /* the rank's own thread does all of its work */
    QD_TRY(make_room(actions, config.world));
    measurement m = {.actions = actions, .steps = steps};
    qd_team *team = NULL;
    qd_step_output out;
    qd_random_tokens random = {.seed = config.seed, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_status status = QD_OK;
    m.now = calloc((size_t)config.world, sizeof *m.now);
    if (!m.now)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of %d ranks", config.world);
    QD_TRY_DONE(qd_team_create(&config, &source, &team));
    for (int i = 0; i < warm_up; i++)
        QD_TRY_DONE(qd_team_step(team, &out));
    QD_TRY_DONE(qd_team_call(team, begin, &m));
    for (int i = 0; i < steps; i++, actions->steps++) {
        QD_TRY_DONE(qd_team_call(team, move_on, &m));
        QD_TRY_DONE(qd_team_step(team, &out));
        QD_TRY_DONE(qd_team_call(team, keep, &m));
    }
    QD_TRY_DONE(qd_team_call(team, finish, actions));
done:
    qd_team_destroy(team);
    for (int r = 0; r < config.world; r++)
        free(m.now[r]);
    free(m.now);
    return status;
}

qd_status qd_bench_measure_actions(const qd_options *options, int warm_up, int steps, qd_bench_actions *actions)
{
    qd_bench_actions a = qd_bench_actions_default();
    QD_TRY(QD_SIZED_READ(actions, qd_bench_actions, &a)); /* what was measured before */
    qd_status status = measure_actions(options, warm_up, steps, &a);
    QD_SIZED_WRITE(actions, &a);
    return status;
}

void qd_bench_actions_free(qd_bench_actions *actions)
{
    for (int r = 0; r < actions->ranks; r++) {
        free(actions->single[r]);
        free(actions->pass[r]);
        free(actions->samples[r]);
    }
    free(actions->single);
    free(actions->pass);
    free(actions->samples);
    free(actions->counts);
    QD_SIZED_WRITE(actions, &(qd_bench_actions){0});
}
