/* What each action of a step costs its rank's thread. */
#include <quadrille/bench.h>

#include "train/team.h"

#include <stdlib.h>
#include <string.h>

typedef struct measurement {
    qd_bench_actions *actions;
    double **samples; /* per rank: steps × actions */
    double **now;     /* per rank: of the step that runs */
    int step, steps;
} measurement;

static qd_status begin(qd_trainer *trainer, qd_comm *world, void *argument)
{
    measurement *m = argument;
    int rank = qd_comm_rank(world), count = qd_trainer_program(trainer)->action_count;
    m->actions->counts[rank] = count;
    m->actions->seconds[rank] = calloc((size_t)count + 1, sizeof(double));
    m->samples[rank] = calloc((size_t)count * (size_t)m->steps + 1, sizeof(double));
    m->now[rank] = calloc((size_t)count + 1, sizeof(double));
    if (!m->actions->seconds[rank] || !m->samples[rank] || !m->now[rank])
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of %d actions", count);
    qd_trainer_set_cpu_seconds(trainer, m->now[rank]);
    return QD_OK;
}

static qd_status keep(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const measurement *m = argument;
    int rank = qd_comm_rank(world), count = m->actions->counts[rank];
    (void)trainer;
    memcpy(m->samples[rank] + (size_t)m->step * (size_t)count, m->now[rank], (size_t)count * sizeof(double));
    return QD_OK;
}

/* The least over steps: what others do on the machine's cores and caches only adds to it. */
static void take_least(const measurement *m)
{
    for (int rank = 0; rank < m->actions->ranks; rank++) {
        size_t count = (size_t)m->actions->counts[rank];
        double *least = m->actions->seconds[rank];
        memcpy(least, m->samples[rank], count * sizeof *least);
        for (size_t i = count; i < count * (size_t)m->steps; i++)
            least[i % count] = m->samples[rank][i] < least[i % count] ? m->samples[rank][i] : least[i % count];
    }
}

qd_status qd_bench_measure_actions(const qd_options *options, int warm_up, int steps, qd_bench_actions *actions)
{
    memset(actions, 0, sizeof *actions);
    qd_config config;
    QD_TRY(qd_config_resolve(options, 0, &config));
    config.threads = 1; /* the rank's own thread does all its work */
    measurement m = {.actions = actions, .steps = steps};
    qd_team *team = NULL;
    qd_step_output out;
    qd_random_tokens random = {.seed = config.seed, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_status status = QD_OK;
    size_t ranks = (size_t)config.world;
    actions->counts = calloc(ranks, sizeof *actions->counts);
    actions->seconds = calloc(ranks, sizeof *actions->seconds);
    m.samples = calloc(2 * ranks, sizeof *m.samples);
    if (!actions->counts || !actions->seconds || !m.samples) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the times of %d ranks", config.world);
        goto done;
    }
    m.now = m.samples + ranks;
    actions->ranks = config.world;
    QD_TRY_DONE(qd_team_create(&config, &source, &team));
    for (int i = 0; i < warm_up; i++)
        QD_TRY_DONE(qd_team_step(team, &out));
    QD_TRY_DONE(qd_team_call(team, begin, &m));
    for (m.step = 0; m.step < steps; m.step++) {
        QD_TRY_DONE(qd_team_step(team, &out));
        QD_TRY_DONE(qd_team_call(team, keep, &m));
    }
    take_least(&m);
done:
    qd_team_destroy(team);
    for (size_t r = 0; m.samples && r < 2 * ranks; r++)
        free(m.samples[r]);
    free(m.samples);
    if (status != QD_OK)
        qd_bench_actions_free(actions);
    return status;
}

void qd_bench_actions_free(qd_bench_actions *actions)
{
    for (int r = 0; actions->seconds && r < actions->ranks; r++)
        free(actions->seconds[r]);
    free(actions->seconds);
    free(actions->counts);
    memset(actions, 0, sizeof *actions);
}
