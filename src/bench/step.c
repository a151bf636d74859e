/* Breaks down the time of a training step, and compares it with the machine's peak. */
#include <quadrille/bench.h>

#include "base/clock.h"
#include "base/sized.h"
#include "device/ceiling.h"
#include "bench/kernels.h"
#include "train/exec/team.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Interval in seconds between measurements of multiply-adds between the ops of a step; each takes
 * the better of two of a millisecond. */
static const double LOOK_EVERY = 0.03;

static void describe_device(const qd_device *device, char *text, size_t size)
{
    const qd_device_caps *caps = qd_device_get_caps(device);
    snprintf(text, size, "%s %s, %s, %d thread%s", caps->name, caps->isa, caps->blas, caps->threads, caps->threads == 1 ? "" : "s");
}

static qd_status measure_kernels(const qd_options *options, double seconds, qd_bench_table *table)
{
    qd_config c;
    QD_TRY(qd_config_resolve(options, 0, &c));
    qd_device_config config = qd_device_config_default();
    config.threads = c.threads > 0 ? c.threads : (int)sysconf(_SC_NPROCESSORS_ONLN);
    config.isa = c.kernels;
    qd_device *device = NULL;
    qd_kernel_bench bench;
    qd_kernel_bench_config kernels = qd_kernel_bench_config_default();
    if (qd_options_is_set(options, "model.preset") || qd_options_is_set(options, "model.hidden")) {
        kernels.channels = c.model.hidden;
        kernels.hidden = c.model.ffn;
        kernels.vocab = c.model.vocab;
        kernels.heads = c.model.heads;
        kernels.kv_heads = c.model.kv_heads;
    }
    if (qd_options_is_set(options, "data.seq"))
        kernels.seq = c.strategy.seq;
    if (c.strategy.micro_batch > 0)
        kernels.batch = c.strategy.micro_batch;
    kernels.dtype = c.strategy.activation;
    kernels.seconds = seconds;
    QD_TRY(qd_device_create(c.device, &config, &device));
    describe_device(device, table->device, sizeof table->device);
    qd_status status = qd_kernel_bench_run(device, &kernels, &bench);
    qd_device_destroy(device);
    if (status != QD_OK)
        return status;
    table->fma_flops = bench.ceiling.fma_flops;
    table->dot_flops = bench.ceiling.dot_flops;
    table->amx_flops = bench.ceiling.amx_flops;
    table->copy_bytes = bench.ceiling.copy_bytes;
    for (int i = 0; i < bench.count && i < QD_BENCH_ROWS; i++) {
        const qd_kernel_bench_row *from = &bench.rows[i];
        qd_bench_row *to = &table->rows[table->count++];
        *to = (qd_bench_row){.seconds = from->seconds, .flops = from->flops, .bytes = from->bytes,
                             .ceiling_share = from->share,
                             .quiet_share = from->quiet_share, .runs = from->runs, .quiet_runs = from->quiet_runs};
        snprintf(to->name, sizeof to->name, "%s", from->kernel);
        snprintf(to->shape, sizeof to->shape, "%s", from->shape);
    }
    return QD_OK;
}

static qd_status set_profile(qd_trainer *trainer, qd_comm *world, void *argument)
{
    if (qd_comm_rank(world) == 0)
        qd_trainer_set_profile(trainer, argument);
    return QD_OK;
}

/* Rank 0 measures while the threads of all ranks work: they share the machine, so the ceiling is
 * that of all together. */
static qd_status measure_ceiling(qd_trainer *trainer, qd_comm *world, void *argument)
{
    qd_ceiling mine, *sum = argument;
    QD_TRY(qd_comm_barrier(world, NULL));
    QD_TRY(qd_device_measure_ceiling(qd_trainer_device(trainer), 0.5, &mine));
    double all[4] = {mine.fma_flops, mine.dot_flops, mine.amx_flops, mine.copy_bytes};
    QD_TRY(qd_comm_all_reduce(world, all, all, 4, QD_F64, QD_SUM, NULL));
    if (qd_comm_rank(world) == 0)
        *sum = (qd_ceiling){.fma_flops = all[0], .dot_flops = all[1], .amx_flops = all[2], .copy_bytes = all[3]};
    return QD_OK;
}

/* The current multiply-add rate of all ranks' threads together: the mean over about ten
 * milliseconds. */
static qd_status measure_now(qd_trainer *trainer, qd_comm *world, void *argument)
{
    enum { RUNS = 20 };
    double sum = 0.0, *mean = argument;
    QD_TRY(qd_comm_barrier(world, NULL));
    for (int i = 0; i < RUNS; i++) {
        double flops;
        QD_TRY(qd_device_measure_fma(qd_trainer_device(trainer), 1, &flops));
        sum += flops / RUNS;
    }
    QD_TRY(qd_comm_all_reduce(world, &sum, &sum, 1, QD_F64, QD_SUM, NULL));
    if (qd_comm_rank(world) == 0)
        *mean = sum;
    return QD_OK;
}

/* mean: of the times of steps, because the rows are means too. rate: the ceiling of the row's
 * instructions, relative to multiply-adds. */
static void add_row(qd_bench_table *t, int ranks, double mean, const char *name, double seconds, double flops, double bytes,
                    double rate)
{
    if (seconds <= 0.0 || t->count == QD_BENCH_ROWS)
        return;
    qd_bench_row *row = &t->rows[t->count++];
    *row = (qd_bench_row){.seconds = seconds, .share = seconds / mean};
    snprintf(row->name, sizeof row->name, "%s", name);
    if (flops > 0.0) {
        row->flops = flops / seconds;
        row->ceiling_share = row->flops / (t->beside_flops / ranks * rate);
    } else if (bytes > 0.0) {
        row->bytes = bytes / seconds;
        row->ceiling_share = row->bytes / (t->copy_bytes / ranks);
    }
}

/* Attention is compared with multiply-adds: much of its time is in fp32, also where its GEMMs are
 * not. */
static bool is_attention(qd_op_kind kind)
{
    return kind == QD_OP_ATTENTION || kind == QD_OP_ATTENTION_CACHED || kind == QD_OP_ATTENTION_GRAD || kind == QD_OP_ATTENTION_PART ||
           kind == QD_OP_ATTENTION_PART_GRAD;
}

/* Rank 0's time: ops first, then the actions that are not modules, then the unexplained rest.
 * apart: copies from and to host memory have streams of their own. rate: of GEMMs, as for
 * add_row. */
static void fill_rows(qd_bench_table *t, int ranks, double mean, const qd_step_profile *p, int steps, bool apart, double rate)
{
    double explained = 0.0, per = 1.0 / steps;
    for (int kind = 0; kind < QD_OP_KIND_COUNT; kind++) {
        add_row(t, ranks, mean, qd_op_name((qd_op_kind)kind), p->ops.seconds[kind] * per, p->ops.flops[kind] * per,
                (double)p->ops.bytes[kind] * per, is_attention((qd_op_kind)kind) ? 1.0 : rate);
        explained += p->ops.seconds[kind] * per;
    }
    for (int kind = 0; kind < QD_ACTION_KIND_COUNT; kind++) {
        if (qd_action_phases(&(qd_action){.kind = (uint8_t)kind}) != 0)
            continue; /* shown by op */
        bool copies = apart && (kind == QD_ACTION_FETCH || kind == QD_ACTION_STORE);
        char name[40];
        snprintf(name, sizeof name, "%s%s", qd_action_row_name((qd_action_kind)kind), copies ? ", overlapped" : "");
        add_row(t, ranks, mean, name, p->action_seconds[kind] * per, 0.0, 0.0, 1.0);
        explained += copies ? 0.0 : p->action_seconds[kind] * per;
    }
    add_row(t, ranks, mean, "waiting for reductions", p->wait_seconds * per, 0.0, 0.0, 1.0);
    add_row(t, ranks, mean, "interpreter and the rest", mean - explained - p->wait_seconds * per, 0.0, 0.0, 1.0);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double take_median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

static qd_status run_steps(qd_team *team, int steps)
{
    qd_step_output out;
    for (int i = 0; i < steps; i++)
        QD_TRY(qd_team_step(team, &out));
    return QD_OK;
}

static qd_status count_dispatched(qd_trainer *trainer, qd_comm *world, void *argument)
{
    qd_dispatched sum;
    QD_TRY(qd_trainer_dispatched_all(trainer, world, &sum));
    if (qd_comm_rank(world) == 0)
        *(qd_dispatched *)argument = sum;
    return QD_OK;
}

static qd_status wait_for_device(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)world;
    (void)argument;
    return qd_stream_wait(qd_device_compute_stream(qd_trainer_device(trainer)));
}

/* Steps are timed with the algorithms that a long run ends up with. */
static qd_status tune_fully(qd_trainer *trainer, qd_comm *world, void *argument)
{
    (void)argument;
    for (int64_t left = 1; left > 0;) {
        int more = 0;
        QD_TRY(qd_trainer_tune_more(trainer, &more));
        left = more;
        QD_TRY(qd_comm_broadcast(world, &left, 1, QD_I64, 0, NULL));
    }
    return QD_OK;
}

/* A step from the moment the first rank begins, without the wake-up of its thread, until it has
 * ended on all ranks. */
typedef struct timed_step {
    pthread_mutex_t lock; /* guards begin */
    double begin, end;    /* end: set by rank 0 */
} timed_step;

static qd_status whole_step(qd_trainer *trainer, qd_comm *world, void *argument)
{
    timed_step *time = argument;
    qd_step_output out;
    double begin = qd_clock_now();
    QD_TRY(qd_trainer_step(trainer, &out));
    QD_TRY(wait_for_device(trainer, world, NULL)); /* the step returns before its last kernels have run */
    pthread_mutex_lock(&time->lock);
    time->begin = begin < time->begin ? begin : time->begin;
    pthread_mutex_unlock(&time->lock);
    QD_TRY(qd_comm_barrier(world, NULL));
    if (qd_comm_rank(world) == 0)
        time->end = qd_clock_now();
    return QD_OK;
}

static qd_status time_step(qd_team *team, double *seconds)
{
    timed_step time = {.lock = PTHREAD_MUTEX_INITIALIZER, .begin = INFINITY};
    qd_status status = qd_team_call(team, whole_step, &time);
    *seconds = time.end - time.begin;
    return status;
}

/* The peak of a shared machine changes while the ops run: measures its multiply-add rate between
 * them ("looks"). */
typedef struct looks {
    double at;             /* when the last one ended */
    double seconds, rates; /* their total time, and the sum of their results */
    int64_t count;
} looks;

static qd_status look_at_machine(void *context, qd_stream *stream)
{
    looks *l = context;
    double begin = qd_clock_now(), rate;
    if (begin - l->at < LOOK_EVERY)
        return QD_OK;
    QD_TRY(qd_device_measure_fma(qd_stream_device(stream), 2, &rate)); /* the better of two: the first may have to wake a thread */
    l->at = qd_clock_now();
    l->seconds += l->at - begin;
    l->rates += rate;
    l->count++;
    return QD_OK;
}

/* Measures the peak before and after each step, and with `within` inside it, because that of a
 * shared machine changes. The time of these looks is not part of the step. */
static qd_status time_steps(qd_team *team, int steps, double ceiling, looks *within, double *mean, qd_bench_step_result *r,
                            qd_bench_table *t)
{
    qd_status status;
    double *times = calloc((size_t)steps * 2, sizeof *times), *steps_per_flop = times + steps, before = ceiling, after = ceiling;
    if (!times)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d times", steps);
    /* An accelerator is not shared, and GEMMs between the steps would only heat it up. */
    bool look = qd_device_get_caps(qd_team_device(team))->host_memory;
    if (look)
        QD_TRY_DONE(qd_team_call(team, measure_now, &before));
    for (int i = 0; i < steps; i++, before = after) {
        within->count = 0;
        within->rates = within->seconds = 0.0;
        QD_TRY_DONE(time_step(team, &times[i]));
        times[i] -= within->seconds;
        *mean += times[i] / steps;
        if (look)
            QD_TRY_DONE(qd_team_call(team, measure_now, &after));
        double possible = (before + after + within->rates) / (double)(2 + within->count);
        steps_per_flop[i] = 1.0 / (times[i] * possible);
        t->beside_flops += possible / steps;
    }
    r->ceiling_share = take_median(steps_per_flop, steps); /* of the whole step, after multiplication by its FLOPs */
    r->step_seconds = take_median(times, steps);
done:
    free(times);
    return status;
}

/* Alternates steps of both: ours, the other's, the other's, ours. Periodic disturbances, such as
 * the scheduler's time slices for other programs, then hit both equally, and a ratio is of two
 * steps each. Nothing runs between the steps. */
static qd_status time_in_turn(qd_team *team, qd_team *other, int steps, double ceiling, double *mean, qd_bench_step_result *r,
                              qd_bench_table *t)
{
    qd_status status = QD_OK;
    double *times = calloc((size_t)steps * 3, sizeof *times), *others = times + steps, *ratios = others + steps;
    if (!times)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d times", steps);
    int pairs = 0;
    for (int i = 0; i < steps; i++) {
        bool first = i % 2 == 0;
        QD_TRY_DONE(time_step(first ? team : other, first ? &times[i] : &others[i]));
        QD_TRY_DONE(time_step(first ? other : team, first ? &others[i] : &times[i]));
        *mean += times[i] / steps;
        if (!first)
            ratios[pairs++] = (times[i - 1] + times[i]) / (others[i - 1] + others[i]);
        else if (i == steps - 1)
            ratios[pairs++] = times[i] / others[i];
    }
    r->over_other = take_median(ratios, pairs);
    r->other_seconds = take_median(others, steps);
    r->step_seconds = take_median(times, steps);
    t->beside_flops = ceiling;
    r->ceiling_share = 1.0 / (r->step_seconds * ceiling);
done:
    free(times);
    return status;
}

/* Rank 0. */
static qd_status read_host_bytes(qd_trainer *trainer, qd_comm *world, void *bytes)
{
    if (qd_comm_rank(world) == 0)
        *(int64_t *)bytes = qd_trainer_allocated_host(trainer);
    return QD_OK;
}

static qd_status fill_memory(qd_bench_step_result *r, qd_team *team, qd_device *device)
{
    qd_memory_report memory;
    qd_strbuf text = {0};
    int64_t left, total;
    QD_TRY(qd_memory_account(qd_team_program(team), &memory));
    r->planned_bytes = memory.total;
    r->allocated_bytes = qd_device_allocated(device);
    r->host_planned_bytes = memory.host_total;
    QD_TRY(qd_team_call(team, read_host_bytes, &r->host_allocated_bytes));
    r->workspace_bytes = qd_device_get_caps(device)->workspace_bytes;
    qd_device_describe_workspace(device, &text);
    snprintf(r->workspace, sizeof r->workspace, "%s", text.data ? text.data : "kernels");
    qd_strbuf_free(&text);
    if (qd_device_get_caps(device)->host_memory)
        return QD_OK;
    QD_TRY(qd_device_memory(device, &left, &total));
    r->device_bytes = total - left;
    return QD_OK;
}

static qd_status measure_step(const qd_options *options, const qd_options *in_turn, int warm_up, int steps, qd_bench_step_result *result,
                              qd_bench_table *table)
{
    qd_config config, other_config;
    qd_team *team = NULL, *other = NULL;
    qd_step_profile *profile = calloc(1, sizeof *profile);
    looks within = {0};
    qd_ceiling ceiling = {.fma_flops = 1.0, .copy_bytes = 1.0}; /* an accelerator's is measured at the end */
    qd_status status = profile ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for a profile");
    if (status != QD_OK)
        return status;
    QD_TRY_DONE(qd_config_resolve(options, 0, &config));
    qd_random_tokens random = {.seed = config.seed, .vocab = config.model.vocab};
    qd_batch_source source = qd_random_source(&random);
    qd_random_tokens other_random = random;
    qd_batch_source other_source = qd_random_source(&other_random);
    QD_TRY_DONE(qd_team_create(&config, &source, &team));
    if (in_turn) {
        QD_TRY_DONE(qd_config_resolve(in_turn, 0, &other_config));
        other_random = (qd_random_tokens){.seed = other_config.seed, .vocab = other_config.model.vocab};
        QD_TRY_DONE(qd_team_create(&other_config, &other_source, &other));
        QD_TRY_DONE(qd_team_call(other, tune_fully, NULL));
        QD_TRY_DONE(run_steps(other, warm_up));
    }
    qd_device *device = qd_team_device(team);
    const bool on_host = qd_device_get_caps(device)->host_memory;
    if (on_host)
        QD_TRY_DONE(qd_team_call(team, measure_ceiling, &ceiling));
    QD_TRY_DONE(qd_team_call(team, tune_fully, NULL));
    QD_TRY_DONE(run_steps(team, warm_up));
    QD_TRY_DONE(qd_team_call(team, wait_for_device, NULL));
    /* On a device that runs behind the host, the events of a profile take time of their own, so the
     * timed steps are not profiled there. */
    if (on_host)
        QD_TRY_DONE(qd_team_call(team, set_profile, profile));
    /* Only with one rank: several would have to synchronize, and not all do in the middle of a
     * step. */
    if (on_host && config.world == 1 && !other) {
        profile->ops.after_op = look_at_machine;
        profile->ops.context = &within;
    }
    qd_dispatched before, after;
    double mean = 0.0;
    QD_TRY_DONE(qd_team_call(team, count_dispatched, &before));
    QD_TRY_DONE(other ? time_in_turn(team, other, steps, ceiling.fma_flops, &mean, result, table)
                      : time_steps(team, steps, ceiling.fma_flops, &within, &mean, result, table));
    QD_TRY_DONE(qd_team_call(team, count_dispatched, &after));
    result->dispatch_bytes = (after.bytes - before.bytes) / steps;
    result->across_bytes = (after.crossed - before.crossed) / steps;
    result->across_flat_bytes = (after.flat - before.flat) / steps;
    if (!on_host) {
        QD_TRY_DONE(qd_team_call(team, set_profile, profile));
        QD_TRY_DONE(run_steps(team, steps));
        /* After the steps: GEMMs at the card's limit would heat it up. */
        QD_TRY_DONE(qd_team_call(team, measure_ceiling, &ceiling));
        table->beside_flops = ceiling.fma_flops;
        result->ceiling_share = 1.0 / (result->step_seconds * ceiling.fma_flops);
    }
    QD_TRY_DONE(fill_memory(result, team, device));
    const qd_program *program = qd_team_program(team);
    result->ranks = config.world;
    table->fma_flops = ceiling.fma_flops;
    table->dot_flops = ceiling.dot_flops;
    table->amx_flops = ceiling.amx_flops;
    table->copy_bytes = ceiling.copy_bytes;
    const bool bf16 = config.strategy.activation == QD_BF16;
    const double rate = qd_ceiling_of(&ceiling, config.strategy.activation) / ceiling.fma_flops;
    result->uses_amx = bf16 && ceiling.amx_flops > 0.0;
    result->uses_dots = bf16 && !result->uses_amx && ceiling.dot_flops > 0.0;
    result->threads = qd_device_get_caps(device)->threads;
    describe_device(device, table->device, sizeof table->device);
    result->tokens_per_second = (double)config.global_batch * (double)config.strategy.seq / result->step_seconds;
    result->flops = qd_program_flops(program) * config.world / result->step_seconds;
    result->ceiling_share *= qd_program_flops(program) * config.world / rate;
    result->model_flops = qd_model_flops_per_token(&config.model, config.strategy.seq);
    fill_rows(table, config.world, mean, profile, steps, !on_host && config.strategy.overlap, rate);
done:
    qd_team_destroy(other);
    qd_team_destroy(team);
    free(profile);
    return status;
}

/* ---- public ---- */

qd_status qd_bench_kernels(const qd_options *options, double seconds, qd_bench_table *table)
{
    qd_bench_table t = qd_bench_table_default();
    QD_TRY(QD_SIZED_CHECK(table, qd_bench_table));
    qd_status status = measure_kernels(options, seconds, &t);
    QD_SIZED_WRITE(table, &t);
    return status;
}

qd_status qd_bench_step(const qd_options *options, const qd_options *in_turn, int warm_up, int steps, qd_bench_step_result *result,
                        qd_bench_table *table)
{
    qd_bench_step_result r = qd_bench_step_result_default();
    qd_bench_table t = qd_bench_table_default();
    QD_TRY(QD_SIZED_CHECK(result, qd_bench_step_result));
    QD_TRY(QD_SIZED_CHECK(table, qd_bench_table));
    qd_status status = measure_step(options, in_turn, warm_up, steps, &r, &t);
    QD_SIZED_WRITE(result, &r);
    QD_SIZED_WRITE(table, &t);
    return status;
}
