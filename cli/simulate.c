/* quadrille simulate: how long a step will take on a cluster, and why. */
#include "plan.h"
#include "simulate.h"

#include <stdlib.h>
#include <string.h>

static void print_time(const qd_sim_report *r)
{
    enum { WIDTH = 24 };
    char bar[4 * WIDTH + 1], rate[32], each[32];
    const struct {
        const char *name;
        double seconds;
    } parts[] = {
        {"products", r->product_seconds},           {"attention", r->attention_seconds},
        {"kernels that move bytes", r->memory_seconds}, {"optimizer", r->optimizer_seconds},
        {"gaps between kernels", r->launch_seconds}, {"waiting for other stages", r->bubble_seconds},
    };
    qd_text_count(r->tokens_per_second, rate, sizeof rate);
    qd_text_count(r->tokens_per_gpu_second, each, sizeof each);
    printf("step     %.4g s: %s tokens/s, %s per GPU; MFU %.1f %% (%.1f %% with causal attention), hardware %.1f %%\n", r->step_seconds,
           rate, each, 100.0 * r->mfu, 100.0 * r->mfu_causal, 100.0 * r->hfu);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i].seconds <= 0.0)
            continue;
        plan_bar(parts[i].seconds / r->step_seconds, WIDTH, bar);
        printf("  %-38s %8.4g s  %s %5.1f %%\n", parts[i].name, parts[i].seconds, bar, 100.0 * parts[i].seconds / r->step_seconds);
    }
    for (int i = 0; i < r->exposed_count; i++) {
        plan_bar(r->exposed[i].value / r->step_seconds, WIDTH, bar);
        printf("  communication over %-19s %8.4g s  %s %5.1f %%\n", r->exposed[i].name, r->exposed[i].value, bar,
               100.0 * r->exposed[i].value / r->step_seconds);
    }
    for (int i = 0; i < r->hidden_count; i++)
        printf("  beside computation, over %-13s %8.4g s\n", r->hidden[i].name, r->hidden[i].value);
}

static void print_memory(const qd_sim_report *r)
{
    char amount[32], limit[32];
    qd_text_bytes(r->memory_bytes, amount, sizeof amount);
    qd_text_bytes(r->memory_limit, limit, sizeof limit);
    printf("memory   %s of %s%s\n", amount, limit, r->fits ? "" : ": does not fit");
    for (int i = 0; i < r->memory_count; i++) {
        qd_text_bytes((int64_t)r->memory[i].value, amount, sizeof amount);
        printf("  %-38s %10s\n", r->memory[i].name, amount);
    }
    qd_text_bytes(r->host_bytes, amount, sizeof amount);
    if (r->host_bytes > 0)
        printf("host     %s of host memory per rank beside that: optimizer state\n", amount);
}

static void print_report(const qd_sim_report *r)
{
    char parameters[32];
    qd_text_count((double)r->parameters, parameters, sizeof parameters);
    printf("model    %s, %s parameters\n", r->model, parameters);
    printf("layout   %s on %d x %s, software %s\n", r->layout[0] ? r->layout : "one rank", r->gpus, r->cluster, r->profile);
    printf("batch    %lld x %lld tokens, micro-batches of %lld, %lld per rank\n", (long long)r->global_batch, (long long)r->seq,
           (long long)r->micro_batch, (long long)r->micro_batches);
    print_time(r);
    print_memory(r);
    for (int i = 0; i < r->loss_count; i++)
        printf("%s %s\n", i == 0 ? "losses  " : "        ", r->loss[i]);
    if (r->watts > 0.0)
        printf("energy   %.4g kJ per step (%.4g kW)\n", r->joules_per_step * 1e-3, r->watts * 1e-3);
    if (r->cost_per_step > 0.0)
        printf("cost     %.4g per step\n", r->cost_per_step);
}

/* ---- the scaling curve ---- */

enum { MOST_POINTS = 24 };

static qd_status print_scaling(cli_call *call, bool json)
{
    qd_scaling_point points[MOST_POINTS];
    int count;
    bool strong = qd_options_bool(call->options, "strong");
    QD_TRY(qd_simulate_scaling(call->options, (int)qd_options_int(call->options, "scaling"), strong, points, MOST_POINTS, &count));
    if (json) {
        qd_strbuf text = {0};
        qd_json_writer w = qd_json_writer_on(&text);
        qd_json_list_begin(&w, NULL);
        for (int i = 0; i < count; i++) {
            qd_json_object_begin(&w, NULL);
            qd_json_put_int(&w, "gpus", points[i].gpus);
            qd_json_put_bool(&w, "possible", points[i].possible);
            qd_json_put_bool(&w, "fits", points[i].fits);
            qd_json_put_double(&w, "step_seconds", points[i].step_seconds);
            qd_json_put_double(&w, "tokens_per_second", points[i].tokens_per_second);
            qd_json_put_double(&w, "compute_seconds", points[i].compute_seconds);
            qd_json_put_double(&w, "communication_seconds", points[i].communication_seconds);
            qd_json_end(&w);
        }
        qd_json_end(&w);
        return cli_print_json(&text);
    }
    printf("%8s %12s %14s %12s %16s %12s\n", "GPUs", "step", "tokens/s", "computing", "communicating", "per GPU");
    double first = 0.0;
    for (int i = 0; i < count; i++) {
        const qd_scaling_point *p = &points[i];
        if (!p->possible)
            continue;
        double each = p->tokens_per_second / p->gpus;
        char rate[32];
        first = first > 0.0 ? first : each;
        qd_text_count(p->tokens_per_second, rate, sizeof rate);
        printf("%8d %10.4g s %14s %10.4g s %14.4g s %10.1f %%%s%s\n", p->gpus, p->step_seconds, rate, p->compute_seconds,
               p->communication_seconds, 100.0 * each / first, p->fits ? "" : "  does not fit",
               p->communication_seconds > p->compute_seconds ? "  communication outweighs computing" : "");
    }
    return QD_OK;
}

static qd_status show(cli_call *call, qd_simulation *simulation)
{
    const char *trace = qd_options_string(call->options, "timeline");
    if (trace[0] != '\0')
        QD_TRY(qd_simulation_trace(simulation, trace));
    if (qd_options_string(call->options, "report")[0] != '\0')
        QD_TRY(simulate_write_report(simulation, qd_options_string(call->options, "report")));
    qd_strbuf text = {0};
    if (qd_options_bool(call->options, "json")) {
        qd_simulation_json(simulation, &text);
        return cli_print_json(&text);
    }
    print_report(qd_simulation_report(simulation));
    if (qd_options_bool(call->options, "draw")) {
        int columns = cli_columns(stdout);
        qd_simulation_draw(simulation, columns > 0 ? columns : 100, &text);
        char *drawn;
        QD_TRY(qd_strbuf_take(&text, &drawn));
        fputs(drawn, stdout);
        free(drawn);
    }
    return QD_OK;
}

qd_status simulate_nearest(cli_call *call)
{
    char note[256];
    QD_TRY(qd_simulate_nearest(call->options, note, sizeof note));
    if (note[0] && !qd_options_bool(call->options, "json"))
        printf("note     %s\n", note);
    return QD_OK;
}

static qd_status run(cli_call *call)
{
    qd_simulation *simulation = NULL;
    QD_TRY(simulate_nearest(call));
    QD_TRY(qd_cluster_load(call->options, qd_options_string(call->options, "cluster")));
    if (qd_options_int(call->options, "scaling") > 0)
        return print_scaling(call, qd_options_bool(call->options, "json"));
    QD_TRY(qd_simulate(call->options, &simulation));
    qd_status status = show(call, simulation);
    qd_simulation_destroy(simulation);
    return status;
}

static const qd_option own[] = {
    CLI_OPTION_CLUSTER,
    CLI_OPTION_JSON,
    {"timeline", QD_OPTION_STRING, "", 0, 0, NULL, "writes the step to this file in Perfetto's format, with the names of the trainer's trace", NULL},
    {"report", QD_OPTION_STRING, "", 0, 0, NULL, "writes the step to this file as one HTML page", NULL},
    {"draw", QD_OPTION_BOOL, "false", 0, 0, NULL, "draws the step, a line per stage", NULL},
    {"scaling", QD_OPTION_INT, "0", 0, 1e6, NULL, "shows the layout on more and more GPUs, up to this number", NULL},
    {"strong", QD_OPTION_BOOL, "false", 0, 0, NULL, "scaling: the global batch stays the same instead of growing with the GPUs", NULL},
};

const cli_command cli_simulate = {
    .name = "simulate",
    .arguments = "[CONFIG] --cluster NAME|FILE [key=value …] [--json]",
    .summary = "Predicts the step time, memory and communication of a run on a cluster",
    .details = "  quadrille simulate --cluster h100 --model llama3-8b --ranks 64 --zero 1 --seq 8192 train.precision=bf16\n\n"
               "Reads the step program that train interprets; needs no GPU.",
    CLI_OPTIONS(own),
    .configuration = true,
    .more = qd_cluster_table,
    .run = run,
};
