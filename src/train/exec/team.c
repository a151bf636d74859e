/* The trainers of all ranks, called together. See team.h. */
#include "train/exec/team.h"

#include "base/error.h"
#include "train/ranks/rank_threads.h"

#include <stdlib.h>

struct qd_team {
    qd_config config;
    qd_batch_source source;
    qd_rank_threads *threads;
    qd_trainer **trainers; /* per rank */
};

typedef struct team_call {
    qd_team *team;
    qd_team_function function;
    void *argument;
} team_call;

/* A rank that failed by itself alerts the others, which would wait for it. */
static qd_status alert(qd_comm *world, qd_status status)
{
    if (status != QD_OK && status != QD_REMOTE)
        qd_comm_abort(world, qd_error_message());
    return status;
}

static qd_status start_rank(void *context, qd_comm *world)
{
    qd_team *t = context;
    return alert(world, qd_trainer_create(&t->config, world, &t->source, &t->trainers[qd_comm_rank(world)]));
}

static qd_status end_rank(void *context, qd_comm *world)
{
    qd_team *t = context;
    qd_trainer_destroy(t->trainers[qd_comm_rank(world)]);
    return QD_OK;
}

static qd_status build(qd_team *t)
{
    qd_comm_config comm = qd_comm_config_default();
    comm.deadline_seconds = t->config.deadline;
    t->trainers = calloc((size_t)t->config.world, sizeof *t->trainers);
    if (!t->trainers)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a team of ranks");
    QD_TRY(qd_rank_threads_create(t->config.world, &comm, &t->threads));
    return qd_rank_threads_call(t->threads, start_rank, t);
}

qd_status qd_team_create(const qd_config *config, const qd_batch_source *source, qd_team **team)
{
    qd_team *t = calloc(1, sizeof *t);
    if (!t)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a team of ranks");
    t->config = *config;
    t->source = *source;
    qd_status status = build(t);
    if (status != QD_OK) {
        qd_error_record why;
        qd_error_keep(&why);
        qd_team_destroy(t);
        qd_error_put_back(&why);
        return status;
    }
    *team = t;
    return QD_OK;
}

void qd_team_destroy(qd_team *t)
{
    if (!t)
        return;
    if (t->threads)
        (void)qd_rank_threads_call(t->threads, end_rank, t);
    qd_rank_threads_destroy(t->threads);
    free(t->trainers);
    free(t);
}

static qd_status call_rank(void *context, qd_comm *world)
{
    const team_call *c = context;
    return alert(world, c->function(c->team->trainers[qd_comm_rank(world)], world, c->argument));
}

qd_status qd_team_call(qd_team *t, qd_team_function function, void *argument)
{
    return qd_rank_threads_call(t->threads, call_rank, &(team_call){t, function, argument});
}

static qd_status step(qd_trainer *trainer, qd_comm *world, void *argument)
{
    qd_step_output output;
    QD_TRY(qd_trainer_step(trainer, &output));
    if (qd_comm_rank(world) == 0)
        *(qd_step_output *)argument = output;
    return QD_OK;
}

qd_status qd_team_step(qd_team *team, qd_step_output *output)
{
    return qd_team_call(team, step, output);
}

typedef struct tensor_request {
    const char *name;
    qd_tensor_kind kind;
    float *out;
    const float *values;
    int64_t count;
} tensor_request;

/* Reading is collective, but only rank 0's copy is used. */
static qd_status read_tensor(qd_trainer *trainer, qd_comm *world, void *argument)
{
    const tensor_request *r = argument;
    if (qd_comm_rank(world) == 0)
        return qd_trainer_read(trainer, r->name, r->kind, r->out, r->count);
    float *other = malloc((size_t)r->count * sizeof *other);
    if (!other)
        return QD_FAIL(QD_NO_MEMORY, "no memory to read %s", r->name);
    qd_status status = qd_trainer_read(trainer, r->name, r->kind, other, r->count);
    free(other);
    return status;
}

qd_status qd_team_read(qd_team *team, const char *name, qd_tensor_kind kind, float *out, int64_t count)
{
    tensor_request request = {.name = name, .kind = kind, .out = out, .count = count};
    return qd_team_call(team, read_tensor, &request);
}

static qd_status write_tensor(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    const tensor_request *r = argument;
    return qd_trainer_write(trainer, r->name, QD_TENSOR_VALUE, r->values, r->count);
}

qd_status qd_team_write(qd_team *team, const char *name, const float *values, int64_t count)
{
    tensor_request request = {.name = name, .values = values, .count = count};
    return qd_team_call(team, write_tensor, &request);
}

const qd_program *qd_team_program(const qd_team *team)
{
    return qd_trainer_program(team->trainers[0]);
}

qd_device *qd_team_device(const qd_team *team)
{
    return qd_trainer_device(team->trainers[0]);
}

int qd_team_size(const qd_team *team)
{
    return team->config.world;
}
