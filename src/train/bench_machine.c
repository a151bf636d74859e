/* This machine in figures that a simulation of its ranks needs: two training steps taken apart, and products and exchanges alone. */
#include <quadrille/bench.h>

#include "base/clock.h"
#include "base/thread.h"
#include "device/ceiling.h"
#include "train/bench_rates.h"
#include "train/team.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Steps of one layout: what their ops took, all ranks together. */
typedef struct run {
    qd_step_profile *profiles; /* per rank: of the step that runs */
    qd_step_profile sum;
    double busy, seconds, peak; /* busy: computing, mean over ranks; of a step, mean over steps */
    int ranks, steps;
} run;

static qd_status begin(qd_trainer *trainer, qd_comm *world, void *argument)
{
    qd_trainer_set_profile(trainer, &((run *)argument)->profiles[qd_comm_rank(world)]);
    return QD_OK;
}

static qd_status measure_peak(qd_trainer *trainer, qd_comm *world, void *argument)
{
    double mine;
    QD_TRY(qd_comm_barrier(world, NULL));
    QD_TRY(qd_device_measure_fma(qd_trainer_device(trainer), 20, &mine));
    QD_TRY(qd_comm_all_reduce(world, &mine, &mine, 1, QD_F64, QD_SUM, NULL));
    if (qd_comm_rank(world) == 0)
        ((run *)argument)->peak = mine;
    return QD_OK;
}

/* Seconds in which a rank computed: not those in which it waits for others or exchanges. */
static double busy(const qd_step_profile *p)
{
    double sum = p->action_seconds[QD_ACTION_UPDATE] + p->action_seconds[QD_ACTION_SQUARES] + p->action_seconds[QD_ACTION_ZERO];
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
        sum += p->ops.seconds[kind];
    return sum;
}

static void add_step(run *r)
{
    for (int rank = 0; rank < r->ranks; rank++) {
        qd_step_profile *p = &r->profiles[rank];
        r->busy += busy(p) / (r->ranks * r->steps);
        for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++) {
            r->sum.ops.seconds[kind] += p->ops.seconds[kind];
            r->sum.ops.flops[kind] += p->ops.flops[kind];
            r->sum.ops.bytes[kind] += p->ops.bytes[kind];
        }
        for (int kind = 0; kind < QD_ACTION_KIND_COUNT; kind++)
            r->sum.action_seconds[kind] += p->action_seconds[kind];
        memset(p, 0, sizeof *p);
    }
}

static qd_status take_steps(qd_team *team, int warm_up, run *r)
{
    qd_step_output out;
    r->profiles = calloc((size_t)r->ranks, sizeof *r->profiles);
    if (!r->profiles)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the profiles of %d ranks", r->ranks);
    for (int i = 0; i < warm_up; i++)
        QD_TRY(qd_team_step(team, &out));
    QD_TRY(qd_team_call(team, begin, r));
    for (int i = 0; i < r->steps; i++) {
        double from = qd_clock_now();
        QD_TRY(qd_team_step(team, &out));
        r->seconds += (qd_clock_now() - from) / r->steps;
        add_step(r);
    }
    return qd_team_call(team, measure_peak, r);
}

/* Seconds that the products of a kind take in a step by the fit, per run of the program's list. */
static double fitted(const qd_program *p, const qd_bench_product *product, qd_op_kind kind)
{
    double sum = 0.0;
    for (int i = 0; i < p->action_count; i++) {
        unsigned phases = qd_action_phases(&p->actions[i]);
        const qd_module_class *class_ = phases ? qd_program_class(p, p->actions[i].module) : NULL;
        for (int k = 0; class_ && k < class_->op_count; k++) {
            const qd_op *op = &class_->ops[k];
            double m = (double)op->m, n = (double)op->n, terms = (double)op->k;
            if (op->kind == kind && qd_op_runs(op, phases))
                sum += 2.0 * m * n * terms * (1.0 + product->half_m / m + product->half_n / n + product->half_k / terms) / product->flops;
        }
    }
    return sum;
}

static const qd_op_kind of_product[] = {QD_OP_LINEAR, QD_OP_LINEAR_DX, QD_OP_LINEAR_DW};

/* Bytes per second, or FLOPs per second, of ops: those named, or without names all that only move bytes. */
static double rate_of(const run *r, const qd_op_kind *kinds, int count)
{
    double work = 0.0, seconds = 0.0;
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++) {
        bool named = false;
        for (int i = 0; i < count; i++)
            named = named || kinds[i] == (qd_op_kind)kind;
        if (count > 0 ? !named : r->sum.ops.flops[kind] > 0.0)
            continue;
        double amount = count > 0 ? r->sum.ops.flops[kind] : (double)r->sum.ops.bytes[kind];
        if (amount <= 0.0)
            continue;
        work += amount;
        seconds += r->sum.ops.seconds[kind];
    }
    return seconds > 0.0 ? work / seconds : 0.0;
}

static double gain(double together, double apart, int cores)
{
    return apart > 0.0 ? together / (apart * cores) : 1.0;
}

/* Ranks of one thread on all cores: rates of a core. */
static qd_status measure_apart(const qd_config *config, int warm_up, run *r, qd_bench_machine *m, double *work)
{
    qd_random_tokens random = {.seed = config->seed, .vocab = config->model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team = NULL;
    qd_status status;
    qd_rates rates = {.hidden = config->model.hidden, .ffn = config->model.ffn, .ranks = config->world};
    rates.seconds = calloc((size_t)config->world * QD_RATE_RUNS * QD_RATE_KINDS * QD_RATE_SHAPES, sizeof(double));
    if (!rates.seconds)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of products");
    QD_TRY_DONE(qd_team_create(config, &source, &team));
    const qd_program *program = qd_team_program(team);
    rates.rows = program->strategy.micro_batch * program->strategy.seq;
    QD_TRY_DONE(take_steps(team, warm_up, r));
    QD_TRY_DONE(qd_team_call(team, r->ranks > 1 ? qd_rates_measure : qd_rates_products, &rates));
    /* The rate is that of the step, which has more to do between products; the fit says how it depends on shapes. */
    for (int kind = 0; kind < QD_RATE_KINDS; kind++) {
        double seconds = r->sum.ops.seconds[of_product[kind]] / (r->ranks * r->steps);
        m->product[kind] = rates.product[kind];
        m->product[kind].flops *= seconds > 0.0 ? fitted(program, &rates.product[kind], of_product[kind]) / seconds : 1.0;
    }
    memcpy(m->exchange, rates.exchange, sizeof m->exchange);
    m->meeting = qd_rates_meeting(&rates, rates.work);
    *work = rates.work;
    m->peak = r->peak;
    /* Gradients are read for the norm; the rest is the optimizer's. */
    double elements = (double)qd_model_parameters(&config->model), bytes = qd_update_bytes(&program->strategy) + (double)qd_dtype_size(program->strategy.grad);
    m->update = elements * bytes * r->ranks * r->steps / (r->sum.action_seconds[QD_ACTION_UPDATE] + r->sum.action_seconds[QD_ACTION_SQUARES]);
done:
    qd_team_destroy(team);
    free(rates.seconds);
    return status;
}

/* Two ranks to a core, which take turns. work: of the products on one rank with a core of its own. Where there is one core, no others
 * have exchanged. */
static qd_status measure_crowd(const qd_config *config, double work, qd_bench_machine *m)
{
    qd_random_tokens random = {.seed = config->seed, .vocab = config->model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team = NULL;
    qd_status status;
    qd_rates rates = {.hidden = config->model.hidden, .ffn = config->model.ffn, .ranks = config->world};
    rates.seconds = calloc((size_t)config->world * QD_RATE_RUNS * QD_RATE_KINDS * QD_RATE_SHAPES, sizeof(double));
    if (!rates.seconds)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the times of products");
    QD_TRY_DONE(qd_team_create(config, &source, &team));
    rates.rows = qd_team_program(team)->strategy.micro_batch * qd_team_program(team)->strategy.seq;
    QD_TRY_DONE(qd_team_call(team, m->cores > 1 ? qd_rates_products : qd_rates_measure, &rates));
    /* The ranks of a core share the loss as they share the core, and so the time of an exchange. */
    double share = (double)m->cores / config->world;
    m->meeting_crowd = qd_rates_meeting(&rates, work / share) * share;
    for (int kind = 0; kind < QD_RATE_EXCHANGES && m->cores == 1; kind++)
        m->exchange[kind] = (qd_bench_exchange){rates.exchange[kind].latency * share, rates.exchange[kind].bandwidth / share};
done:
    qd_team_destroy(team);
    free(rates.seconds);
    return status;
}

/* One rank with a thread per core. */
static qd_status measure_together(const qd_config *config, int warm_up, run *r)
{
    qd_random_tokens random = {.seed = config->seed, .vocab = config->model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_team *team = NULL;
    qd_status status = qd_team_create(config, &source, &team);
    if (status == QD_OK)
        status = take_steps(team, warm_up, r);
    qd_team_destroy(team);
    return status;
}

/* The configured model without any of its parallelism, on a batch that its ranks can share. The configuration points into *own, which is
 * freed by the caller. */
static qd_status resolve(const qd_options *options, int ranks, int threads, int64_t batch, qd_options **own, qd_config *config)
{
    static const char *const alone[][2] = {
        {"parallel.dp", "-1"}, {"parallel.zero", "0"}, {"parallel.dp_shard", "-1"}, {"parallel.reshard_after_forward", "true"},
        {"parallel.tp", "1"}, {"parallel.tp_overlap", "1"},
        {"parallel.cp", "1"}, {"parallel.cp_mode", "ring"},
        {"parallel.pp", "1"}, {"parallel.layers", ""}, {"parallel.virtual_stages", "0"}, {"parallel.schedule", "1f1b"}, {"parallel.schedule_file", ""},
        {"parallel.ep", "1"}, {"parallel.etp", "1"}, {"parallel.nodes", "1"}, {"parallel.dispatch", "flat"},
    };
    char text[24];
    QD_TRY(qd_options_copy(options, own));
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++)
        QD_TRY(qd_options_set(*own, alone[i][0], alone[i][1]));
    snprintf(text, sizeof text, "%d", ranks);
    QD_TRY(qd_options_set(*own, "parallel.ranks", text));
    snprintf(text, sizeof text, "%lld", (long long)batch);
    QD_TRY(qd_options_set(*own, "train.global_batch", text));
    QD_TRY(qd_config_resolve(*own, 0, config));
    config->threads = threads;
    return QD_OK;
}

qd_status qd_bench_measure_machine(const qd_options *options, int warm_up, int steps, qd_bench_machine *m)
{
    static const qd_op_kind attention[2] = {QD_OP_ATTENTION, QD_OP_ATTENTION_GRAD};
    int cores = qd_cores_allowed();
    qd_config apart_config, together_config, crowd_config;
    double work = 0.0;
    memset(m, 0, sizeof *m);
    m->cores = cores;
    if (strcmp(qd_options_string(options, "run.device"), "cpu") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "run.device is %s: the figures are those of processors; measure them with run.device=cpu, and take a built-in cluster for accelerators",
                       qd_options_string(options, "run.device"));
    qd_options *own[3] = {NULL, NULL, NULL};
    run apart = {.ranks = cores, .steps = steps}, together = {.ranks = 1, .steps = steps};
    /* Every rank takes as many micro-batches; where none is named, its whole share is one, of as many sequences in both crowds. */
    int64_t micro = qd_options_int(options, "train.micro_batch"), each = (micro > 0 ? micro : 1) * cores;
    int64_t batch = (qd_options_int(options, "train.global_batch") + each - 1) / each * each;
    qd_status status;
    QD_TRY_DONE(resolve(options, apart.ranks, 1, batch, &own[0], &apart_config));
    QD_TRY_DONE(resolve(options, 1, cores, batch, &own[1], &together_config));
    QD_TRY_DONE(resolve(options, 2 * cores, 1, 2 * cores * (micro > 0 ? micro : batch / cores), &own[2], &crowd_config));
    QD_TRY_DONE(measure_apart(&apart_config, warm_up, &apart, m, &work));
    QD_TRY_DONE(measure_crowd(&crowd_config, work, m));
    QD_TRY_DONE(measure_together(&together_config, warm_up, &together));
    m->attention[0] = rate_of(&apart, &attention[0], 1);
    m->attention[1] = rate_of(&apart, &attention[1], 1);
    m->stream = rate_of(&apart, NULL, 0);
    m->together[0] = gain(rate_of(&together, of_product, QD_RATE_KINDS), rate_of(&apart, of_product, QD_RATE_KINDS), cores);
    m->together[1] = gain(rate_of(&together, attention, 2), rate_of(&apart, attention, 2), cores);
    m->together[2] = gain(rate_of(&together, NULL, 0), rate_of(&apart, NULL, 0), cores);
    m->step_seconds = apart.seconds;
    /* Gradients are summed once per step; what else is not computing is waiting for the last rank, and the interpreter. */
    double sums = 2.0 * (apart.ranks - 1.0) / apart.ranks * (double)qd_model_parameters(&apart_config.model) *
                  (double)qd_dtype_size(apart_config.strategy.grad) / m->exchange[QD_RATE_SUM].bandwidth;
    m->late[0] = fmax(0.0, together.seconds / together.busy - 1.0);
    m->late[1] = fmax(0.0, (apart.seconds - sums) / apart.busy - 1.0);
done:
    free(apart.profiles);
    free(together.profiles);
    for (int i = 0; i < 3; i++)
        qd_options_destroy(own[i]);
    return status;
}
