/* quadrille simulate: predicts step time, memory and communication on a cluster. */
#include "plan.h"
#include "progress.h"
#include "simulate.h"

#include <stdlib.h>
#include <string.h>

static void print_time(const qd_sim_report *r)
{
    int width = plan_bar_width(2 + 38 + 1 + 9 + 3 + 2 + 1 + 7);
    char bar[4 * PLAN_BAR + 1], rate[32], each[32];
    double slowed = r->compute_seconds - r->product_seconds - r->attention_seconds - r->memory_seconds -
                    r->optimizer_seconds - r->launch_seconds;
    const struct {
        const char *name;
        double seconds;
    } parts[] = {
        {"GEMMs", r->product_seconds},
        {"attention", r->attention_seconds},
        {"memory-bound kernels", r->memory_seconds},
        {"optimizer", r->optimizer_seconds},
        {"gaps between kernels", r->launch_seconds},
        {"slowed by overlapped work", slowed},
        {"waiting for other stages", r->bubble_seconds},
        {"between steps, for the slowest rank", r->late_seconds},
    };
    /* One unit for the whole list. */
    bool long_step = r->step_seconds >= 1.0;
    const double scale = long_step ? 1.0 : 1e3;
    const char *unit = long_step ? "s" : "ms";
    char step[32];
    qd_text_unit(r->step_seconds, "s", step, sizeof step);
    qd_text_count(r->tokens_per_second, rate, sizeof rate);
    qd_text_count(r->tokens_per_gpu_second, each, sizeof each);
    cli_say("step", 9, "%s: %s tokens/s, %s per GPU; MFU %.1f %% (%.1f %% with causal attention), hardware %.1f %%", step, rate,
            each, 100.0 * r->mfu, 100.0 * r->mfu_causal, 100.0 * r->hfu);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i].seconds <= 0.0005 * r->step_seconds)
            continue;
        plan_bar(parts[i].seconds / r->step_seconds, width, bar);
        printf("  %-38s %9.3f %s  %s %5.1f %%\n", parts[i].name, scale * parts[i].seconds, unit, bar,
               100.0 * parts[i].seconds / r->step_seconds);
    }
    for (int i = 0; i < r->exposed_count; i++) {
        plan_bar(r->exposed[i].value / r->step_seconds, width, bar);
        printf("  communication over %-19s %9.3f %s  %s %5.1f %%\n", r->exposed[i].name, scale * r->exposed[i].value,
               unit, bar, 100.0 * r->exposed[i].value / r->step_seconds);
    }
    for (int i = 0; i < r->hidden_count; i++)
        printf("  overlapped, over %-21s %9.3f %s\n", r->hidden[i].name, scale * r->hidden[i].value, unit);
}

/* Says why a step does not fit: what activations and model state take, and what changes it. */
static void print_why(const qd_sim_report *r, const char *precision)
{
    static const char *const state[] = {"parameters", "gradients", "tied gradients", "master weights", "first moment", "second moment"};
    double activations = 0.0, held = 0.0, limit = (double)r->memory_limit;
    char each[2][32];
    for (int i = 0; i < r->memory_count; i++) {
        activations += strncmp(r->memory[i].name, "activations ", 12) == 0 ? r->memory[i].value : 0.0;
        for (size_t k = 0; k < sizeof state / sizeof *state; k++)
            held += strcmp(r->memory[i].name, state[k]) == 0 ? r->memory[i].value : 0.0;
    }
    qd_text_bytes((int64_t)activations, each[0], sizeof each[0]);
    qd_text_bytes((int64_t)held, each[1], sizeof each[1]);
    bool more = activations > held;
    cli_say("", 9, "activations in %s take %s, parameters, gradients and optimizer state %s; %s: %s", precision, each[0], each[1],
            (more ? activations : held) <= limit ? more ? "activations take the most" : "the state takes the most"
            : more                               ? "activations alone exceed the device"
                                                 : "the state alone exceeds the device",
            more ? "train.recompute keeps fewer, parallel.tp and parallel.cp divide them, and so do smaller micro-batches"
                 : "parallel.zero, parallel.pp and, for experts, parallel.ep divide it");
}

static void print_memory(const qd_sim_report *r, const char *precision)
{
    char amount[32], limit[32];
    qd_text_bytes(r->memory_bytes, amount, sizeof amount);
    qd_text_bytes(r->memory_limit, limit, sizeof limit);
    printf("memory   %s of %s%s\n", amount, limit, r->fits ? "" : ": does not fit");
    for (int i = 0; i < r->memory_count; i++) {
        qd_text_bytes((int64_t)r->memory[i].value, amount, sizeof amount);
        printf("  %-38s %10s\n", r->memory[i].name, amount);
    }
    if (!r->fits)
        print_why(r, precision);
    qd_text_bytes(r->host_bytes, amount, sizeof amount);
    if (r->host_bytes > 0)
        printf("host     %s of host memory per rank in addition: optimizer state\n", amount);
}

static void print_report(const qd_sim_report *r, const char *precision)
{
    char parameters[32], joules[32], watts[32];
    qd_text_count((double)r->parameters, parameters, sizeof parameters);
    qd_text_unit(r->joules_per_step, "J", joules, sizeof joules);
    qd_text_unit(r->watts, "W", watts, sizeof watts);
    printf("model    %s, %s parameters\n", r->model, parameters);
    cli_say("layout", 9, "%s on %d x %s, software %s", r->layout[0] ? r->layout : "one rank", r->gpus, r->cluster,
            r->profile);
    cli_say("batch", 9, "%lld x %lld tokens per step, micro-batches of %lld, %lld per rank",
            (long long)r->global_batch, (long long)r->seq, (long long)r->micro_batch, (long long)r->micro_batches);
    print_time(r);
    print_memory(r, precision);
    for (int i = 0; i < r->loss_count; i++)
        cli_say(i == 0 ? "losses" : "", 9, "%s", r->loss[i]);
    if (r->watts > 0.0)
        printf("energy   %s per step (%s)\n", joules, watts);
    if (r->cost_per_step > 0.0)
        printf("cost     %.4g per step\n", r->cost_per_step);
}

enum { MOST_POINTS = 24 };

static qd_status print_scaling(cli_call *call, bool json)
{
    qd_scaling_point points[MOST_POINTS];
    int count;
    bool strong = qd_options_bool(call->options, "strong");
    QD_TRY(qd_simulate_scaling(call->options, (int)qd_options_int(call->options, "scaling"), strong, points, MOST_POINTS, &count));
    progress_watch_end();
    if (json) {
        qd_strbuf text = {0};
        qd_json_writer w = qd_json_writer_on(&text);
        qd_json_list_begin(&w, NULL);
        for (int i = 0; i < count; i++) {
            qd_json_object_begin(&w, NULL);
            qd_json_put_int(&w, "gpus", points[i].gpus);
            qd_json_put_bool(&w, "possible", points[i].possible);
            if (!points[i].possible)
                qd_json_put_string(&w, "refusal", points[i].refusal);
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
    puts("communicating: not overlapped. efficiency: tokens/s per GPU, relative to the first line");
    printf("%8s %10s %10s %10s %13s %11s\n", "GPUs", "step", "tokens/s", "computing", "communicating", "efficiency");
    double first = 0.0;
    for (int i = 0; i < count; i++) {
        const qd_scaling_point *p = &points[i];
        char step[32], rate[32], computing[32], communicating[32], number[16];
        if (!p->possible) {
            snprintf(number, sizeof number, "%8d", p->gpus);
            cli_say(number, 10, "%s", p->refusal);
            continue;
        }
        double each = p->tokens_per_second / p->gpus;
        first = first > 0.0 ? first : each;
        qd_text_unit(p->step_seconds, "s", step, sizeof step);
        qd_text_count(p->tokens_per_second, rate, sizeof rate);
        qd_text_unit(p->compute_seconds, "s", computing, sizeof computing);
        qd_text_unit(p->communication_seconds, "s", communicating, sizeof communicating);
        printf("%8d %10s %10s %10s %13s %9.1f %%%s%s\n", p->gpus, step, rate, computing, communicating,
               100.0 * each / first, p->fits ? "" : "  does not fit",
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
    print_report(qd_simulation_report(simulation), qd_options_string(call->options, "train.precision"));
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
        cli_say("note", 9, "%s", note);
    return QD_OK;
}

static qd_status run(cli_call *call)
{
    qd_simulation *simulation = NULL;
    static const char *const of_one_step[] = {"draw", "timeline", "report"};
    for (size_t i = 0; i < sizeof of_one_step / sizeof *of_one_step; i++)
        QD_TRY(cli_apart(call, "scaling", of_one_step[i]));
    QD_TRY(cli_needs(call, "strong", "scaling"));
    QD_TRY(cli_apart(call, "draw", "json"));
    QD_TRY(simulate_nearest(call));
    QD_TRY(qd_cluster_load(call->options, qd_options_string(call->options, "cluster")));
    progress_watch("simulating");
    if (qd_options_int(call->options, "scaling") > 0)
        return print_scaling(call, qd_options_bool(call->options, "json"));
    QD_TRY(qd_simulate(call->options, &simulation));
    progress_watch_end();
    qd_status status = show(call, simulation);
    qd_simulation_destroy(simulation);
    return status;
}

static const qd_option own[] = {
    CLI_OPTION_CLUSTER,
    CLI_OPTION_JSON,
    {"timeline", QD_OPTION_STRING, "", 0, 0, NULL,
     "writes the step to this file as a Perfetto trace, with the names of the trainer's trace", NULL},
    {"report", QD_OPTION_STRING, "", 0, 0, NULL, "writes the step to this file as one HTML page", NULL},
    {"draw", QD_OPTION_BOOL, "false", 0, 0, NULL, "draws the step, one line per stage", NULL},
    {"scaling", QD_OPTION_INT, "0", 0, 65536, NULL, "simulates the layout on increasing numbers of GPUs, up to this one", NULL},
    {"strong", QD_OPTION_BOOL, "false", 0, 0, NULL, "--scaling: the global batch stays the same instead of growing with the GPUs", NULL},
};

const cli_command cli_simulate = {
    .name = "simulate",
    .arguments = "[CONFIG] --cluster NAME|FILE [key=value …] [--json]",
    .summary = "Predicts the step time, memory and communication of a run on a cluster",
    .details = "  quadrille simulate --cluster h100 --model llama3-8b --ranks 64 --zero 1 --seq 8192 train.precision=bf16\n\n"
               "Simulates the step program that train executes; needs no GPU.",
    CLI_OPTIONS(own),
    .configuration = true,
    .more = qd_cluster_table,
    .run = run,
};
