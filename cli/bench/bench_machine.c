/* quadrille bench machine: this machine as a cluster file for simulate and plan. */
#include "bench/bench.h"
#include "progress.h"

#include <quadrille/bench.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put_product(qd_strbuf *out, const char *key, const qd_bench_product *p)
{
    qd_strbuf_printf(out, "  %s: %.5g %.4g %.4g %.4g\n", key, p->flops * 1e-9, p->half_m, p->half_n, p->half_k);
}

static void put_exchange(qd_strbuf *out, const char *key, const qd_bench_exchange *e)
{
    qd_strbuf_printf(out, "  %s: %.4g %.4g\n", key, e->latency * 1e6, e->bandwidth * 1e-9);
}

static void describe(const qd_bench_machine *m, qd_strbuf *out)
{
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    qd_strbuf_printf(
        out, "# This machine, measured by: quadrille bench machine\n# Rates inside a training step of %.4g s with a rank on each core.\n",
        m->step_seconds);
    qd_strbuf_printf(
        out, "accelerator:\n  name: this machine\n  peak_tflops: %.6g\n  product_tflops: %.6g\n  bandwidth_gbs: %.6g\n  memory_gib: %.6g\n",
        m->peak * 1e-12, m->product[0].flops * m->cores * 1e-12, m->stream * m->cores * 1e-9, memory / 1073741824.0);
    qd_strbuf_printf(out, "processor:\n  cores: %d\n", m->cores);
    put_product(out, "forward", &m->product[0]);
    put_product(out, "inputs", &m->product[1]);
    put_product(out, "weights", &m->product[2]);
    qd_strbuf_printf(out, "  attention: %.5g %.5g\n  parts: %.4g %.4g\n  bytes: %.5g %.5g\n", m->attention[0] * 1e-9,
                     m->attention[1] * 1e-9, m->part[0], m->part[1], m->stream * 1e-9, m->update * 1e-9);
    qd_strbuf_printf(out, "  together: %.4g %.4g %.4g\n", m->together[0], m->together[1], m->together[2]);
    put_exchange(out, "sum", &m->exchange[0]);
    put_exchange(out, "gather", &m->exchange[1]);
    put_exchange(out, "scatter", &m->exchange[2]);
    put_exchange(out, "send", &m->exchange[3]);
    qd_strbuf_printf(out, "  meeting: %.4g %.4g\n  late: %.4g %.4g %.4g\n", m->meeting * 1e6, m->meeting_crowd * 1e6, m->late[0],
                     m->late[1], m->late[2]);
    qd_strbuf_printf(out, "node:\n  size: 4096\n  efficiency: 1\n  bandwidth_gbs: %.4g\n  latency_us: %.4g\n",
                     m->exchange[3].bandwidth * 1e-9, m->exchange[3].latency * 1e6);
}

static qd_status run(cli_call *call)
{
    const char *path = qd_options_string(call->options, "write");
    qd_bench_machine machine = qd_bench_machine_default();
    qd_strbuf text = {0};
    char *taken;
    progress_watch("measuring this machine");
    QD_TRY(qd_bench_measure_machine(call->options, (int)qd_options_int(call->options, "warm-up"),
                                    (int)qd_options_int(call->options, "repeat"), &machine));
    progress_watch_end();
    describe(&machine, &text);
    QD_TRY(qd_strbuf_take(&text, &taken));
    qd_status status = cli_write(path, taken, strlen(taken));
    free(taken);
    return status;
}

const bench_part bench_machine = {.name = "machine", .options = " write warm-up repeat ", .run = run};
