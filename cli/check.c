/* quadrille check: memory and communication of a run, before it starts. */
#include "plan.h"

#include <quadrille/train.h>
#include <string.h>

static qd_status print_report_json(const qd_check_report *r)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "model", r->model);
    qd_json_put_string(&w, "layout", r->layout);
    qd_json_put_int(&w, "ranks", r->world);
    qd_json_put_int(&w, "parameters", r->parameters);
    qd_json_put_int(&w, "tokens_per_step", r->tokens_per_step);
    qd_json_put_int(&w, "global_batch", r->global_batch);
    qd_json_put_int(&w, "micro_batch", r->micro_batch);
    qd_json_put_int(&w, "micro_batches", r->micro_batches);
    qd_json_put_int(&w, "seq", r->seq);
    qd_json_put_int(&w, "actions", r->action_count);
    qd_json_object_begin(&w, "gradients");
    qd_json_put_bool(&w, "proved", true);
    qd_json_put_int(&w, "values", r->proved_values);
    qd_json_put_int(&w, "ops", r->proved_ops);
    qd_json_end(&w);
    qd_json_put_double(&w, "flops_per_step", r->flops_per_step);
    qd_json_put_double(&w, "recompute_flops_per_step", r->recompute_flops_per_step);
    qd_json_put_int(&w, "communication_bytes_per_step", r->comm_bytes);
    qd_json_object_begin(&w, "communication");
    for (int i = 0; i < r->traffic_count; i++)
        qd_json_put_int(&w, r->traffic[i].name, r->traffic[i].bytes);
    qd_json_end(&w);
    qd_json_list_begin(&w, "formulas");
    for (int i = 0; i < r->formula_count; i++) {
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "text", r->formulas[i].text);
        qd_json_put_int(&w, "bytes", r->formulas[i].bytes);
        qd_json_put_int(&w, "planned_bytes", r->formulas[i].planned);
        qd_json_end(&w);
    }
    qd_json_end(&w);
    if (r->across_flat_bytes > 0) {
        qd_json_object_begin(&w, "experts_across_nodes");
        qd_json_put_int(&w, "nodes", r->nodes);
        qd_json_put_string(&w, "dispatch", r->by_node ? "node" : "flat");
        qd_json_put_int(&w, "flat_bytes", r->across_flat_bytes);
        qd_json_put_int(&w, "node_bytes", r->across_node_bytes);
        qd_json_put_double(&w, "nodes_per_row", r->row_nodes);
        qd_json_end(&w);
    }
    qd_json_object_begin(&w, "pipeline");
    qd_json_put_int(&w, "ranks", r->pipeline);
    if (r->pipeline > 1) {
        qd_json_put_string(&w, "schedule", r->schedule);
        qd_json_put_double(&w, "bubble", r->bubble);
        qd_json_put_double(&w, "bubble_theory", r->bubble_theory);
        qd_json_put_int(&w, "bytes", r->pipeline_bytes);
        qd_json_put_int(&w, "theory_bytes", r->pipeline_theory_bytes);
        qd_json_put_int(&w, "zero_extra_bytes", r->zero_extra_bytes);
        qd_json_list_begin(&w, "stages");
        for (int i = 0; i < r->stage_count; i++) {
            qd_json_object_begin(&w, NULL);
            qd_json_put_string(&w, "modules", r->stages[i].modules);
            qd_json_put_int(&w, "memory_bytes", r->stages[i].memory_bytes);
            qd_json_put_double(&w, "flops_per_step", r->stages[i].flops_per_step);
            qd_json_put_int(&w, "in_flight", r->stages[i].in_flight);
            qd_json_end(&w);
        }
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_put_string(&w, "theory", r->theory);
    qd_json_put_int(&w, "theory_bytes", r->theory_bytes);
    qd_json_put_int(&w, "theory_kept_bytes", r->kept_bytes);
    qd_json_put_int(&w, "theory_padding_bytes", r->padding_bytes);
    qd_json_put_int(&w, "state_bytes_per_rank", r->state_bytes);
    qd_json_put_int(&w, "memory_bytes_per_rank", r->memory_bytes);
    qd_json_put_int(&w, "host_memory_bytes_per_rank", r->host_bytes);
    qd_json_put_int(&w, "evaluation_bytes_per_rank", r->evaluation_bytes);
    qd_json_put_int(&w, "chunk_bytes_per_rank", r->chunk_bytes);
    qd_json_put_int(&w, "snapshot_bytes_per_rank", r->snapshot_bytes);
    qd_json_object_begin(&w, "memory");
    for (int i = 0; i < r->line_count; i++)
        qd_json_put_int(&w, r->lines[i].name, r->lines[i].bytes);
    qd_json_end(&w);
    qd_json_object_begin(&w, "host_memory");
    for (int i = 0; i < r->host_line_count; i++)
        qd_json_put_int(&w, r->host_lines[i].name, r->host_lines[i].bytes);
    qd_json_end(&w);
    qd_json_end(&w);
    return cli_print_json(&text);
}

/* Traffic between nodes to experts and back, with the configured dispatch and with the other. */
static void print_across(const qd_check_report *r)
{
    char flat[32], once[32];
    if (r->across_flat_bytes == 0)
        return;
    qd_text_bytes(r->across_flat_bytes, flat, sizeof flat);
    qd_text_bytes(r->across_node_bytes, once, sizeof once);
    printf("  between the %d nodes, to experts and back, at an even load: %s", r->nodes, r->by_node ? once : flat);
    if (r->across_node_bytes > 0)
        printf("; %s %s, %.2f times as much (a row's experts are on %.2f nodes)", r->by_node ? "flat dispatch" : "parallel.dispatch=node",
               r->by_node ? flat : once,
               r->by_node ? (double)r->across_flat_bytes / (double)r->across_node_bytes
                          : (double)r->across_node_bytes / (double)r->across_flat_bytes,
               r->row_nodes);
    putchar('\n');
}

static void print_traffic(const qd_check_report *r)
{
    char amount[32];
    qd_text_bytes(r->comm_bytes, amount, sizeof amount);
    printf("traffic  %s sent per step by all ranks together\n", amount);
    for (int i = 0; i < r->traffic_count; i++) {
        qd_text_bytes(r->traffic[i].bytes, amount, sizeof amount);
        printf("  %-46s %10s\n", r->traffic[i].name, amount);
    }
    for (int i = 0; i < r->formula_count; i++) {
        char planned[32];
        qd_text_bytes(r->formulas[i].bytes, amount, sizeof amount);
        qd_text_bytes(r->formulas[i].planned, planned, sizeof planned);
        cli_say("", 2, "%s; in all %s by the formula, %s in the program", r->formulas[i].text, amount, planned);
    }
    print_across(r);
    if (r->theory[0] == '\0')
        return;
    qd_text_bytes(r->theory_bytes, amount, sizeof amount);
    char kept[96] = "", padding[96] = "", more[32];
    qd_text_bytes(r->kept_bytes, more, sizeof more);
    if (r->kept_bytes > 0)
        snprintf(kept, sizeof kept, ", minus %s of modules that are not gathered a second time", more);
    qd_text_bytes(r->padding_bytes, more, sizeof more);
    if (r->padding_bytes > 0)
        snprintf(padding, sizeof padding, ", plus %s of padding and short sums", more);
    cli_say("", 2, "parameters and gradients by the textbook: %s = %s%s%s", r->theory, amount, kept, padding);
}

static void print_pipeline(const qd_check_report *r)
{
    char amount[32], theory[32];
    char textbook[32] = "";
    if (r->bubble_theory >= 0.0)
        snprintf(textbook, sizeof textbook, " (textbook %.1f %%)", 100.0 * r->bubble_theory);
    cli_say("pipeline", 9, "%d ranks, schedule %s: bubble %.1f %% with uniform stages%s", r->pipeline, r->schedule, 100.0 * r->bubble,
            textbook);
    for (int i = 0; i < r->stage_count; i++) {
        qd_text_bytes(r->stages[i].memory_bytes, amount, sizeof amount);
        printf("  pp %-3d %-24s %10s  %5.1f %% of the FLOPs, %d in flight\n", i, r->stages[i].modules, amount,
               100.0 * r->stages[i].flops_per_step / r->flops_per_step, r->stages[i].in_flight);
    }
    qd_text_bytes(r->pipeline_bytes, amount, sizeof amount);
    qd_text_bytes(r->pipeline_theory_bytes, theory, sizeof theory);
    cli_say("", 2, "between stages %s; 2·b·s·h for each boundary and micro-batch: %s", amount, theory);
    if (r->zero_extra_bytes > 0) {
        qd_text_bytes(r->zero_extra_bytes, amount, sizeof amount);
        cli_say("", 2, "%s more than with parallel.zero=1: every micro-batch gathers parameters or reduces gradients", amount);
    }
}

static void print_report(const qd_check_report *r)
{
    char state[32];
    plan_print_head(r);
    plan_print_memory(r);
    qd_text_bytes(r->state_bytes, state, sizeof state);
    cli_say("", 9, "of which %s are parameters, gradients and optimizer state that stay there between steps", state);
    plan_print_host(r);
    if (r->pipeline > 1)
        print_pipeline(r);
    if (r->world > 1)
        print_traffic(r);
    printf("gradients: proved (%lld values, %lld ops)\n", (long long)r->proved_values, (long long)r->proved_ops);
    printf("one step: %d actions per rank; all ranks together %.3g GFLOP\n", r->action_count, r->flops_per_step * 1e-9);
    if (r->recompute_flops_per_step > 0.0)
        printf("recompute adds %.3g GFLOP (%.1f %%)\n", r->recompute_flops_per_step * 1e-9,
               100.0 * r->recompute_flops_per_step / r->flops_per_step);
    printf("the communication of all %d rank%s matches\n", r->world, r->world == 1 ? "" : "s");
}

static qd_status run(cli_call *call)
{
    qd_check_report report = qd_check_report_default();
    int64_t rank = qd_options_int(call->options, "print");
    bool json = qd_options_bool(call->options, "json");
    if (json && rank >= 0)
        return QD_FAIL(QD_USAGE, "check: --print and --json do not go together");
    QD_TRY(qd_check(call->options, 0, &report));
    if (rank >= 0) {
        if (rank >= report.world)
            return QD_FAIL(QD_USAGE, "check: --print %lld: there are ranks 0 to %d", (long long)rank, report.world - 1);
        return qd_check_print(call->options, 0, (int)rank, stdout);
    }
    if (json)
        return print_report_json(&report);
    print_report(&report);
    return QD_OK;
}

static const qd_option own[] = {
    {"print", QD_OPTION_INT, "-1", -1, 65535, NULL, "prints the step program of this rank, one line per action", NULL},
    CLI_OPTION_JSON,
};

const cli_command cli_check = {
    .name = "check",
    .arguments = "[CONFIG] [key=value …] [--print RANK | --json]",
    .summary = "Shows memory and communication of a run, and proves that its ranks match",
    .details = "Builds the step program of every rank, checks that their communication matches, and adds up the memory. Starts no\n"
               "ranks and needs no data.",
    CLI_OPTIONS(own),
    .configuration = true,
    .run = run,
};
