/* quadrille bench machine: this machine as a cluster file for simulate and plan. */
#include "bench.h"

#include <quadrille/bench.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Seconds and work of the ops of a step whose names begin so. */
typedef struct sums {
    double seconds, work;
} sums;

static sums add_rows(const qd_bench_table *t, const char *begin, bool flops)
{
    sums s = {0};
    for (int i = 0; i < t->count; i++) {
        double rate = flops ? t->rows[i].flops : t->rows[i].bytes;
        if (strncmp(t->rows[i].name, begin, strlen(begin)) != 0 || rate <= 0.0 || (!flops && t->rows[i].flops > 0.0))
            continue;
        s.seconds += t->rows[i].seconds;
        s.work += t->rows[i].seconds * rate;
    }
    return s;
}

static double rate_of(sums s)
{
    return s.seconds > 0.0 ? s.work / s.seconds : 0.0;
}

/* Bandwidth of the collectives that training uses, at sizes of gradient buckets, and the time of the smallest message. */
static qd_status measure_links(double seconds, double *bandwidth, double *latency)
{
    const char *program;
    qd_bench_collectives_result result;
    QD_TRY(bench_program(&program));
    const char *const command[] = {program, "bench", bench_collectives_rank.name, "--", NULL};
    qd_bench_collectives_config config = qd_bench_collectives_config_default();
    config.rank_command = command;
    config.seconds = seconds;
    config.smallest_bytes = 1024;
    config.largest_bytes = 4 * 1024 * 1024;
    QD_TRY(qd_bench_collectives(&config, &result));
    double best = 0.0, least = 1.0;
    for (int i = 0; i < result.count; i++) {
        const qd_bench_collectives_row *row = &result.rows[i];
        if (row->kind == QD_COLL_ALL_REDUCE && row->bytes >= 1024 * 1024 && row->local_bandwidth > best)
            best = row->local_bandwidth;
        if (row->kind == QD_COLL_ALL_REDUCE && row->local_seconds > 0.0 && row->local_seconds < least)
            least = row->local_seconds;
    }
    qd_bench_collectives_free(&result);
    *bandwidth = best;
    *latency = least;
    return QD_OK;
}

static void describe(const qd_bench_step_result *r, double bandwidth, double latency, qd_strbuf *out)
{
    double product = rate_of(add_rows(&r->table, "linear", true)), attention = rate_of(add_rows(&r->table, "attention", true));
    double stream = rate_of(add_rows(&r->table, "", false));
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    qd_strbuf_printf(out, "# This machine, measured by: quadrille bench machine\n# %s; rates inside a training step of %.4g s.\n", r->table.device, r->step_seconds);
    qd_strbuf_printf(out, "accelerator:\n  name: this machine\n  shared: true\n  measured: true\n  peak_tflops: %.6g\n  product_tflops: %.6g\n", r->table.fma_flops * 1e-12,
                     product * 1e-12);
    qd_strbuf_printf(out, "  attention_tuned: %.4g\n  bandwidth_gbs: %.6g\n  memory_gib: %.6g\n", attention < product ? attention / product : 1.0, stream * 1e-9,
                     memory / 1073741824.0);
    qd_strbuf_printf(out, "node:\n  size: 4096\n  bandwidth_gbs: %.6g\n  efficiency: 1\n  latency_us: %.6g\n", bandwidth * 1e-9, latency * 1e6);
}

static qd_status run(cli_call *call)
{
    const char *path = qd_options_string(call->options, "write");
    qd_bench_step_result result;
    qd_strbuf text = {0};
    char *taken;
    double bandwidth, latency;
    QD_TRY(bench_read_config(call));
    QD_TRY(qd_options_set(call->options, "parallel.ranks", "1"));
    QD_TRY(qd_options_set(call->options, "parallel.dp", "-1"));
    QD_TRY(qd_bench_step(call->options, (int)qd_options_int(call->options, "warm-up"), (int)qd_options_int(call->options, "repeat"), &result));
    QD_TRY(measure_links(qd_options_float(call->options, "seconds"), &bandwidth, &latency));
    describe(&result, bandwidth, latency, &text);
    QD_TRY(qd_strbuf_take(&text, &taken));
    FILE *file = path[0] ? fopen(path, "w") : stdout;
    qd_status status = file && fputs(taken, file) >= 0 ? QD_OK : QD_FAIL(QD_IO, "%s cannot be written", path);
    if (file && file != stdout && fclose(file) != 0 && status == QD_OK)
        status = QD_FAIL(QD_IO, "%s cannot be written", path);
    free(taken);
    return status;
}

const bench_part bench_machine = {.name = "machine", .shown = true, .run = run};
