/* Measures this machine for the simulator: training steps split into ops, and GEMMs, attention and
 * exchanges alone. */
#include <quadrille/bench.h>

#include "base/clock.h"
#include "base/sized.h"
#include "base/thread.h"
#include "device/ceiling.h"
#include "bench/rates.h"
#include "train/exec/team.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Times of one step, the mean over the ranks. */
typedef struct step_times {
    double op[QD_OP_KIND_COUNT], action[QD_ACTION_KIND_COUNT];
    double seconds, peak;
} step_times;

/* Ranks that train the model without parallelism, and their measurements. */
typedef struct crew {
    qd_options *options;
    qd_config config;
    qd_random_tokens random;
    qd_batch_source source;
    qd_team *team;
    qd_step_profile *profiles; /* per rank: of the current step */
    step_times *times;         /* per step */
    double flops[QD_OP_KIND_COUNT], bytes[QD_OP_KIND_COUNT]; /* of a step and rank */
    int ranks, steps;
} crew;

static qd_status begin(qd_trainer *trainer, qd_comm *world, void *argument)
{
    qd_trainer_set_profile(trainer, &((crew *)argument)->profiles[qd_comm_rank(world)]);
    return QD_OK;
}

static qd_status measure_peak(qd_trainer *trainer, qd_comm *world, void *argument)
{
    double mine;
    QD_TRY(qd_comm_barrier(world, NULL));
    QD_TRY(qd_device_measure_fma(qd_trainer_device(trainer), 5, &mine));
    QD_TRY(qd_comm_all_reduce(world, &mine, &mine, 1, QD_F64, QD_SUM, NULL));
    if (qd_comm_rank(world) == 0)
        *(double *)argument = mine;
    return QD_OK;
}

static void read_profiles(crew *c, step_times *t)
{
    for (int rank = 0; rank < c->ranks; rank++) {
        qd_step_profile *p = &c->profiles[rank];
        for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++) {
            t->op[kind] += p->ops.seconds[kind] / c->ranks;
            c->flops[kind] = p->ops.flops[kind];
            c->bytes[kind] = (double)p->ops.bytes[kind];
        }
        for (int kind = 0; kind < QD_ACTION_KIND_COUNT; kind++)
            t->action[kind] += p->action_seconds[kind] / c->ranks;
        memset(p, 0, sizeof *p);
    }
}

static qd_status take_step(crew *c, bool timed)
{
    qd_step_output out;
    double from = qd_clock_now();
    QD_TRY(qd_team_step(c->team, &out));
    if (!timed) {
        memset(c->profiles, 0, (size_t)c->ranks * sizeof *c->profiles);
        return QD_OK;
    }
    step_times *t = &c->times[c->steps++];
    t->seconds = qd_clock_now() - from;
    read_profiles(c, t);
    return qd_team_call(c->team, measure_peak, &t->peak);
}

/* The median over steps of one figure of step_times. */
static double median_of(const crew *c, size_t offset)
{
    double values[QD_BENCH_MACHINE_STEPS];
    for (int i = 0; i < c->steps; i++)
        values[i] = *(const double *)((const char *)&c->times[i] + offset);
    return qd_rates_median(values, c->steps);
}

/* Seconds that the GEMMs of a kind take in a step according to the fit, per run of the program's
 * list. */
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

/* FLOPs or bytes per second of ops: of the given kinds or, without kinds, of all memory-bound
 * ops. */
static double rate_of(const crew *c, const qd_op_kind *kinds, int count)
{
    double work = 0.0, seconds = 0.0;
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++) {
        bool named = false;
        for (int i = 0; i < count; i++)
            named = named || kinds[i] == (qd_op_kind)kind;
        double amount = count > 0 ? c->flops[kind] : c->bytes[kind];
        if ((count > 0 ? !named : c->flops[kind] > 0.0) || amount <= 0.0)
            continue;
        work += amount;
        seconds += median_of(c, offsetof(step_times, op) + (size_t)kind * sizeof(double));
    }
    return seconds > 0.0 ? work / seconds : 0.0;
}

/* The rate of the cores together, relative to the sum of their separate rates. */
static double gain(const crew *together, const crew *apart, const qd_op_kind *kinds, int count)
{
    double alone = rate_of(apart, kinds, count);
    return alone > 0.0 ? rate_of(together, kinds, count) / (alone * apart->ranks) : 1.0;
}

/* Seconds of a rank's share of summing the gradients of a step. */
static double sums(const crew *c, const qd_bench_exchange *sum)
{
    return 2.0 * (c->ranks - 1.0) / c->ranks * (double)qd_model_parameters(&c->config.model) *
           (double)qd_dtype_size(c->config.strategy.grad) / sum->bandwidth;
}

/* How much longer a step takes than its computation and its sums, by the medians that the rates are
 * taken from: waiting for the last rank, and the interpreter. */
static double late(const crew *c, const qd_bench_exchange *sum)
{
    static const qd_action_kind actions[] = {QD_ACTION_UPDATE, QD_ACTION_SQUARES, QD_ACTION_ZERO};
    double computing = 0.0;
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++)
        computing += median_of(c, offsetof(step_times, op) + (size_t)kind * sizeof(double));
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        computing += median_of(c, offsetof(step_times, action) + actions[i] * sizeof(double));
    return fmax(0.0, (median_of(c, offsetof(step_times, seconds)) - sums(c, sum)) / computing - 1.0);
}

/* The configured model without parallelism, on a batch that its ranks can share. The configuration
 * points into *own, which the caller frees. */
static qd_status resolve(const qd_options *options, int ranks, int threads, const char *zero, int64_t batch, qd_options **own,
                         qd_config *config)
{
    static const char *const alone[][2] = {
        {"parallel.dp", "-1"},
        {"parallel.dp_shard", "-1"},
        {"parallel.reshard_after_forward", "true"},
        {"parallel.tp", "1"},
        {"parallel.tp_overlap", "1"},
        {"parallel.cp", "1"},
        {"parallel.cp_mode", "ring"},
        {"parallel.pp", "1"},
        {"parallel.layers", ""},
        {"parallel.virtual_stages", "0"},
        {"parallel.schedule", "1f1b"},
        {"parallel.schedule_file", ""},
        {"parallel.ep", "1"},
        {"parallel.etp", "1"},
        {"parallel.nodes", "1"},
        {"parallel.dispatch", "flat"},
    };
    char text[24];
    QD_TRY(qd_options_copy(options, own));
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++)
        QD_TRY(qd_options_set(*own, alone[i][0], alone[i][1]));
    QD_TRY(qd_options_set(*own, "parallel.zero", zero));
    snprintf(text, sizeof text, "%d", ranks);
    QD_TRY(qd_options_set(*own, "parallel.ranks", text));
    snprintf(text, sizeof text, "%lld", (long long)batch);
    QD_TRY(qd_options_set(*own, "train.global_batch", text));
    QD_TRY(qd_config_resolve(*own, 0, config));
    config->threads = threads;
    return QD_OK;
}

static qd_status open_crew(const qd_options *options, int ranks, int threads, const char *zero, int64_t batch, int steps, crew *c)
{
    QD_TRY(resolve(options, ranks, threads, zero, batch, &c->options, &c->config));
    c->ranks = ranks;
    c->random = (qd_random_tokens){.seed = c->config.seed, .vocab = c->config.model.vocab};
    c->source = qd_random_source(&c->random);
    c->profiles = calloc((size_t)ranks, sizeof *c->profiles);
    c->times = calloc((size_t)steps, sizeof *c->times);
    if (!c->profiles || !c->times)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the profiles of %d ranks", ranks);
    QD_TRY(qd_team_create(&c->config, &c->source, &c->team));
    return qd_team_call(c->team, begin, c);
}

static void close_crew(crew *c)
{
    qd_team_destroy(c->team);
    qd_options_destroy(c->options);
    free(c->profiles);
    free(c->times);
}

/* Rates of a core, from single-threaded ranks on all cores. The rate of a GEMM is that of the step,
 * which does more between GEMMs; the fit describes how it depends on shapes. */
static void fill_rates(const crew *apart, const qd_rates *rates, qd_bench_machine *m)
{
    static const qd_op_kind attention[2] = {QD_OP_ATTENTION, QD_OP_ATTENTION_GRAD};
    const qd_program *program = qd_team_program(apart->team);
    for (int kind = 0; kind < QD_RATE_KINDS; kind++) {
        double seconds = median_of(apart, offsetof(step_times, op) + of_product[kind] * sizeof(double));
        qd_rates_product(rates, kind, &m->product[kind]);
        m->product[kind].flops *= seconds > 0.0 ? fitted(program, &m->product[kind], of_product[kind]) / seconds : 1.0;
    }
    for (int i = 0; i < 2; i++) {
        m->attention[i] = rate_of(apart, &attention[i], 1);
        m->part[i] = qd_rates_part(rates, i == 1);
    }
    m->stream = rate_of(apart, NULL, 0);
    /* Gradients are read for the norm; all other bytes are the optimizer's. */
    double elements = (double)qd_model_parameters(&apart->config.model),
           bytes = qd_update_bytes(&program->strategy) + (double)qd_dtype_size(program->strategy.grad);
    m->update = elements * bytes / (median_of(apart, offsetof(step_times, action) + QD_ACTION_UPDATE * sizeof(double)) +
                                    median_of(apart, offsetof(step_times, action) + QD_ACTION_SQUARES * sizeof(double)));
    m->step_seconds = median_of(apart, offsetof(step_times, seconds));
    m->peak = median_of(apart, offsetof(step_times, peak));
}

static void fill_gains(const crew *together, const crew *apart, qd_bench_machine *m)
{
    static const qd_op_kind attention[2] = {QD_OP_ATTENTION, QD_OP_ATTENTION_GRAD};
    m->together[0] = gain(together, apart, of_product, QD_RATE_KINDS);
    m->together[1] = gain(together, apart, attention, 2);
    m->together[2] = gain(together, apart, NULL, 0);
}

enum { APART, TOGETHER, CROWD, CREWS }; /* the crowd takes no steps: its state is sharded to save memory */

/* Interleaves all measurements, step by step: a shared machine becomes faster and slower within
 * seconds. The order and the number of runs vary, so that periodic disturbances do not always hit
 * the same measurement. */
enum { MOST_RUNS = 3 }; /* after a step */
static qd_status measure(crew crews[CREWS], qd_rates *apart, qd_rates *crowd, int warm_up, int steps)
{
    for (int i = -warm_up; i < steps; i++) {
        for (int c = 0; c < CROWD; c++)
            QD_TRY(take_step(&crews[i % 2 == 0 ? c : CROWD - 1 - c], i >= 0));
        for (int run = 0; run <= i % MOST_RUNS && i >= 0; run++) {
            QD_TRY(qd_rates_run(apart));
            QD_TRY(qd_rates_run(crowd));
        }
    }
    return QD_OK;
}

static qd_status measure_machine(const qd_options *options, int warm_up, int steps, qd_bench_machine *m)
{
    int cores = qd_cores_allowed(), met = cores > 1 ? cores : 2;
    crew crews[CREWS] = {{0}};
    qd_rates *apart = NULL, *crowd = NULL;
    m->cores = cores;
    if (strcmp(qd_options_string(options, "run.device"), "cpu") != 0)
        return QD_FAIL(QD_UNSUPPORTED,
                       "run.device is %s: only processors can be measured; measure with run.device=cpu, and use a built-in "
                       "cluster for accelerators",
                       qd_options_string(options, "run.device"));
    if (steps > QD_BENCH_MACHINE_STEPS)
        return QD_FAIL(QD_USAGE, "bench machine: %d steps are too many for its median: at most %d", steps, QD_BENCH_MACHINE_STEPS);
    /* Every rank runs the same number of micro-batches; if no size is set, its whole share is one,
     * with as many sequences in both crews. */
    int64_t micro = qd_options_int(options, "train.micro_batch"), each = (micro > 0 ? micro : 1) * cores;
    int64_t batch = (qd_options_int(options, "train.global_batch") + each - 1) / each * each;
    qd_status status;
    QD_TRY_DONE(open_crew(options, cores, 1, "0", batch, steps, &crews[APART]));
    QD_TRY_DONE(open_crew(options, 1, cores, "0", batch, steps, &crews[TOGETHER]));
    QD_TRY_DONE(open_crew(options, 2 * cores, 1, "3", micro > 0 ? 2 * each : 2 * batch, steps, &crews[CROWD]));
    QD_TRY_DONE(qd_rates_create(crews[APART].team, &crews[APART].config, met, false, MOST_RUNS * steps, &apart));
    QD_TRY_DONE(qd_rates_create(crews[CROWD].team, &crews[CROWD].config, met, cores > 1, MOST_RUNS * steps, &crowd));
    QD_TRY_DONE(measure(crews, apart, crowd, warm_up, steps));
    fill_rates(&crews[APART], apart, m);
    fill_gains(&crews[TOGETHER], &crews[APART], m);
    /* Ranks that share a core share the cost of synchronizing, and with it the time of an exchange;
     * on one core only the crowd exchanges. */
    double share = cores > 1 ? 1.0 : 0.5;
    for (int kind = 0; kind < QD_RATE_EXCHANGES; kind++) {
        qd_rates_exchange(cores > 1 ? apart : crowd, kind, &m->exchange[kind]);
        m->exchange[kind].latency *= share;
        m->exchange[kind].bandwidth /= share;
    }
    m->meeting = qd_rates_meeting(apart);
    m->meeting_crowd = 0.5 * qd_rates_meeting(crowd);
    m->late[0] = late(&crews[TOGETHER], &m->exchange[QD_RATE_SUM]);
    m->late[1] = late(&crews[APART], &m->exchange[QD_RATE_SUM]);
    m->late[2] = qd_rates_turns(crowd, apart);
done:
    qd_rates_destroy(apart);
    qd_rates_destroy(crowd);
    for (int c = 0; c < CREWS; c++)
        close_crew(&crews[c]);
    return status;
}

qd_status qd_bench_measure_machine(const qd_options *options, int warm_up, int steps, qd_bench_machine *machine)
{
    qd_bench_machine m = qd_bench_machine_default();
    QD_TRY(QD_SIZED_CHECK(machine, qd_bench_machine));
    qd_status status = measure_machine(options, warm_up, steps, &m);
    QD_SIZED_WRITE(machine, &m);
    return status;
}
