/* quadrille bench kernels and bench step: profiles, compared with measured ceilings. */
#include "bench/bench.h"
#include "progress.h"

#include <quadrille/bench.h>
#include <quadrille/config.h>
#include <string.h>

static void put_rows(qd_json_writer *w, const qd_bench_table *t)
{
    qd_json_put_string(w, "device", t->device);
    qd_json_put_double(w, "fma_flops", t->fma_flops);
    qd_json_put_double(w, "dot_flops", t->dot_flops);
    qd_json_put_double(w, "amx_flops", t->amx_flops);
    qd_json_put_double(w, "copy_bytes_per_second", t->copy_bytes);
    if (t->beside_flops > 0.0)
        qd_json_put_double(w, "fma_flops_beside_steps", t->beside_flops);
    qd_json_list_begin(w, "rows");
    for (int i = 0; i < t->count; i++) {
        const qd_bench_row *r = &t->rows[i];
        qd_json_object_begin(w, NULL);
        qd_json_put_string(w, "name", r->name);
        qd_json_put_string(w, "shape", r->shape);
        qd_json_put_double(w, "seconds", r->seconds);
        qd_json_put_double(w, "share", r->share);
        qd_json_put_double(w, "flops", r->flops);
        qd_json_put_double(w, "bytes_per_second", r->bytes);
        qd_json_put_double(w, "ceiling_share", r->ceiling_share);
        if (r->runs > 0) {
            qd_json_put_double(w, "quiet_share", r->quiet_share);
            qd_json_put_int(w, "runs", r->runs);
            qd_json_put_int(w, "quiet_runs", r->quiet_runs);
        }
        qd_json_end(w);
    }
    qd_json_end(w);
}

/* step: of bench step; NULL: bench kernels. */
static void print_rows(const qd_bench_table *t, const qd_bench_step_result *step)
{
    const bool shares = step != NULL;
    printf("%s; measured ceilings: %.1f GFLOP/s of multiply-adds, ", t->device, t->fma_flops * 1e-9);
    if (t->dot_flops > 0.0)
        printf("%.1f GFLOP/s of bf16 dot products, ", t->dot_flops * 1e-9);
    if (t->amx_flops > 0.0)
        printf("%.1f GFLOP/s of AMX tiles, ", t->amx_flops * 1e-9);
    printf("%.1f GB/s of copying\n", t->copy_bytes * 1e-9);
    if (shares)
        printf("next to the steps: %.1f GFLOP/s of multiply-adds, the ceiling of GEMMs%s; the ceiling of other rows is copying\n\n",
               t->beside_flops * 1e-9,
               step->uses_amx    ? " (bf16 GEMMs: AMX tiles, faster by the ratio above) and of attention"
               : step->uses_dots ? " (bf16 GEMMs: dot products, faster by the ratio above) and of attention"
                                 : " and of attention");
    else
        cli_explain(
            "time, rate: the best run. ceiling: each GEMM run is compared with multiply-adds of the same threads right before and after "
            "it, for about as long as the run; the median of these ratios. GEMMs that use AMX tiles or bf16 dot products: with that rate "
            "times the ratio of the ceilings; attention always with multiply-adds. Other rows: the best run compared with copying; data "
            "that stays in the caches exceeds it. quiet: the median over runs during which no other program used our cores: multiply-adds "
            "and integer additions reached 85 %% of their best (at least 5 runs). runs: quiet ones / all. Runs of the GEMMs alternate");
    if (shares)
        printf("%-26s %11s %7s %14s %9s\n", "", "time", "share", "rate", "ceiling");
    else
        printf("\n%-23s %-32s %11s %14s %7s %7s %7s\n", "", "shape", "time", "rate", "ceiling", "quiet", "runs");
    for (int i = 0; i < t->count; i++) {
        const qd_bench_row *r = &t->rows[i];
        char share[16] = "", rate[32] = "", ceiling[16] = "", quiet[16] = "", runs[32] = "";
        if (shares)
            snprintf(share, sizeof share, "%.1f %%", 100.0 * r->share);
        if (r->flops > 0.0)
            snprintf(rate, sizeof rate, "%.1f GFLOP/s", r->flops * 1e-9);
        else if (r->bytes > 0.0)
            snprintf(rate, sizeof rate, "%.1f GB/s", r->bytes * 1e-9);
        if (r->ceiling_share > 0.0)
            snprintf(ceiling, sizeof ceiling, "%.0f %%", 100.0 * r->ceiling_share);
        if (r->quiet_share > 0.0)
            snprintf(quiet, sizeof quiet, "%.0f %%", 100.0 * r->quiet_share);
        if (r->runs > 0 && r->flops > 0.0)
            snprintf(runs, sizeof runs, "%d/%d", r->quiet_runs, r->runs);
        if (shares)
            printf("%-26s %8.3f ms %7s %14s %9s\n", r->name, r->seconds * 1e3, share, rate, ceiling);
        else
            printf("%-23s %-32s %8.3f ms %14s %7s %7s %7s\n", r->name, r->shape, r->seconds * 1e3, rate, ceiling, quiet, runs);
    }
}

static qd_status run_kernels(cli_call *call)
{
    qd_bench_table table = qd_bench_table_default();
    progress_watch("measuring kernels");
    QD_TRY(qd_bench_kernels(call->options, qd_options_float(call->options, "seconds"), &table));
    progress_watch_end();
    if (!qd_options_bool(call->options, "json")) {
        print_rows(&table, NULL);
        return QD_OK;
    }
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    put_rows(&w, &table);
    qd_json_end(&w);
    return cli_print_json(&text);
}

static qd_status print_step_json(const qd_bench_step_result *r, const qd_bench_table *table)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_int(&w, "ranks", r->ranks);
    qd_json_put_int(&w, "threads", r->threads);
    qd_json_put_double(&w, "step_seconds", r->step_seconds);
    qd_json_put_double(&w, "tokens_per_second", r->tokens_per_second);
    qd_json_put_double(&w, "flops", r->flops);
    qd_json_put_double(&w, "ceiling_share", r->ceiling_share);
    qd_json_put_double(&w, "model_flops_per_token", r->model_flops);
    qd_json_put_int(&w, "planned_bytes", r->planned_bytes);
    qd_json_put_int(&w, "allocated_bytes", r->allocated_bytes);
    qd_json_put_int(&w, "host_planned_bytes", r->host_planned_bytes);
    qd_json_put_int(&w, "host_allocated_bytes", r->host_allocated_bytes);
    qd_json_put_int(&w, "workspace_bytes", r->workspace_bytes);
    qd_json_put_string(&w, "workspace", r->workspace);
    qd_json_put_int(&w, "device_bytes", r->device_bytes);
    qd_json_put_int(&w, "dispatch_bytes", r->dispatch_bytes);
    qd_json_put_int(&w, "dispatch_across_nodes_bytes", r->across_bytes);
    qd_json_put_int(&w, "dispatch_across_nodes_flat_bytes", r->across_flat_bytes);
    if (r->over_other > 0.0) {
        qd_json_put_double(&w, "other_seconds", r->other_seconds);
        qd_json_put_double(&w, "over_other", r->over_other);
    }
    put_rows(&w, table);
    qd_json_end(&w);
    return cli_print_json(&text);
}

/* Reads the configuration of --in-turn; *other stays NULL without it. */
static qd_status read_other(cli_call *call, qd_options **other)
{
    const char *path = qd_options_string(call->options, "in-turn");
    if (!path[0])
        return QD_OK;
    qd_option_table table = qd_config_table();
    QD_TRY(qd_options_create(&table, 1, other));
    return qd_options_load(*other, path);
}

static qd_status run_step(cli_call *call)
{
    qd_bench_step_result r = qd_bench_step_result_default();
    qd_bench_table table = qd_bench_table_default();
    qd_options *other = NULL;
    qd_status status = read_other(call, &other);
    progress_watch("measuring steps");
    if (status == QD_OK)
        status = qd_bench_step(call->options, other, (int)qd_options_int(call->options, "warm-up"),
                               (int)qd_options_int(call->options, "repeat"), &r, &table);
    progress_watch_end();
    qd_options_destroy(other);
    QD_TRY(status);
    if (qd_options_bool(call->options, "json"))
        return print_step_json(&r, &table);
    print_rows(&table, &r);
    printf("\n%d rank%s x %d thread%s: step %.3f s, %.0f tokens/s, %.1f GFLOP/s, %.1f %% of the %s ceiling\n", r.ranks,
           r.ranks == 1 ? "" : "s", r.threads, r.threads == 1 ? "" : "s", r.step_seconds, r.tokens_per_second, r.flops * 1e-9,
           100.0 * r.ceiling_share, r.uses_amx ? "AMX" : r.uses_dots ? "bf16 dot product" : "FMA");
    if (r.over_other > 0.0)
        printf("a step of the other configuration: %.3f s; ours takes %.3f times the steps it alternates with\n", r.other_seconds,
               r.over_other);
    printf("memory of rank 0: %.3f GiB planned, %.3f GiB allocated; workspace %.1f MiB (%s)", (double)r.planned_bytes * 0x1p-30,
           (double)r.allocated_bytes * 0x1p-30, (double)r.workspace_bytes * 0x1p-20, r.workspace);
    if (r.device_bytes > 0)
        printf("; %.3f GiB of the device in use", (double)r.device_bytes * 0x1p-30);
    printf("\n");
    if (r.dispatch_bytes > 0)
        printf("experts: %.3f MiB per step sent to other ranks and back", (double)r.dispatch_bytes * 0x1p-20);
    if (r.across_flat_bytes > 0)
        printf(", %.3f MiB between nodes (flat dispatch: %.3f MiB, %.2f times as much)", (double)r.across_bytes * 0x1p-20,
               (double)r.across_flat_bytes * 0x1p-20, (double)r.across_flat_bytes / (double)r.across_bytes);
    if (r.dispatch_bytes > 0)
        printf("\n");
    if (r.host_planned_bytes > 0)
        printf("host memory of rank 0: %.3f GiB planned, %.3f GiB allocated for optimizer state\n", (double)r.host_planned_bytes * 0x1p-30,
               (double)r.host_allocated_bytes * 0x1p-30);
    return QD_OK;
}

const bench_part bench_kernels = {.name = "kernels", .options = " seconds json ", .run = run_kernels};
const bench_part bench_step = {.name = "step", .options = " warm-up repeat in-turn json ", .run = run_step};
