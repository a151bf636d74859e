/* Threads that run the ranks of a team; each waits for the next call and executes it. */
#include "train/exec/team.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct member {
    qd_team *team;
    int rank;
    pthread_t thread;
    bool started;
    qd_comm *world;
    qd_trainer *trainer;
    qd_status status;
    char message[1024];
} member;

struct qd_team {
    qd_config config;
    qd_batch_source source;
    qd_local_world *world;
    member *members;
    int size;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t call; /* number of the current or last call */
    int pending;  /* members that have not finished it */
    qd_team_function function;
    void *argument;
    bool stop;
};

/* A rank that fails on its own aborts the others, which would otherwise wait for it. */
static void record(member *m, qd_status status)
{
    m->status = status;
    if (status == QD_OK)
        return;
    snprintf(m->message, sizeof m->message, "%s", qd_error_message());
    if (status != QD_REMOTE && m->world)
        qd_comm_abort(m->world, m->message);
}

static qd_status start_rank(member *m)
{
    QD_TRY(qd_local_comm_attach(m->team->world, m->rank, &m->world));
    return qd_trainer_create(&m->team->config, m->world, &m->team->source, &m->trainer);
}

static void end_call(qd_team *t)
{
    pthread_mutex_lock(&t->lock);
    if (--t->pending == 0)
        pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

static void *run_member(void *argument)
{
    member *m = argument;
    qd_team *t = m->team;
    record(m, start_rank(m));
    end_call(t);
    for (int64_t seen = 0;;) {
        pthread_mutex_lock(&t->lock);
        while (t->call == seen && !t->stop)
            pthread_cond_wait(&t->changed, &t->lock);
        bool stop = t->stop;
        seen = t->call;
        pthread_mutex_unlock(&t->lock);
        if (stop)
            break;
        record(m, t->function(m->trainer, m->world, t->argument));
        end_call(t);
    }
    qd_trainer_destroy(m->trainer);
    qd_comm_destroy(m->world);
    return NULL;
}

/* Waits for all members. Returns the original failure, not one that another rank's failure
 * caused. */
static qd_status collect(qd_team *t)
{
    pthread_mutex_lock(&t->lock);
    while (t->pending > 0)
        pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
    const member *worst = NULL;
    for (int i = 0; i < t->size; i++) {
        const member *m = &t->members[i];
        if (m->status != QD_OK && (!worst || worst->status == QD_REMOTE))
            worst = m;
    }
    return worst ? QD_FAIL(worst->status, "%s", worst->message) : QD_OK;
}

static qd_status start_members(qd_team *t)
{
    t->pending = t->size;
    for (int i = 0; i < t->size; i++) {
        t->members[i] = (member){.team = t, .rank = i};
        int error = pthread_create(&t->members[i].thread, NULL, run_member, &t->members[i]);
        if (error != 0) {
            for (int j = i; j < t->size; j++)
                end_call(t);
            qd_local_world_mark_dead(t->world, i, "its thread could not be started");
            collect(t);
            return QD_FAIL(QD_SYSTEM, "rank %d: cannot start a thread: %s", i, strerror(error));
        }
        t->members[i].started = true;
    }
    return collect(t);
}

qd_status qd_team_create(const qd_config *config, const qd_batch_source *source, qd_team **team)
{
    qd_comm_config comm = qd_comm_config_default();
    comm.deadline_seconds = config->deadline;
    qd_team *t = calloc(1, sizeof *t);
    if (!t)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a team of ranks");
    t->config = *config;
    t->source = *source;
    t->size = config->world;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    t->members = calloc((size_t)t->size, sizeof *t->members);
    qd_status status =
        t->members ? qd_local_world_create(t->size, &comm, &t->world) : QD_FAIL(QD_NO_MEMORY, "no memory for a team of ranks");
    if (status == QD_OK)
        status = start_members(t);
    if (status != QD_OK) {
        qd_team_destroy(t);
        return status;
    }
    *team = t;
    return QD_OK;
}

void qd_team_destroy(qd_team *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; t->members && i < t->size; i++)
        if (t->members[i].started)
            pthread_join(t->members[i].thread, NULL);
    qd_local_world_destroy(t->world);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->members);
    free(t);
}

qd_status qd_team_call(qd_team *t, qd_team_function function, void *argument)
{
    pthread_mutex_lock(&t->lock);
    t->function = function;
    t->argument = argument;
    t->pending = t->size;
    t->call++;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    return collect(t);
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
    return qd_trainer_program(team->members[0].trainer);
}

qd_device *qd_team_device(const qd_team *team)
{
    return qd_trainer_device(team->members[0].trainer);
}

int qd_team_size(const qd_team *team)
{
    return team->size;
}
