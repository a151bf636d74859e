/* quadrille plan: searches for the fastest layout and explains it. */
#include "plan.h"
#include "progress.h"
#include "simulate.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

void plan_keep_memory(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}

static qd_status print_json(const qd_plan_report *r)
{
    qd_strbuf text = {0};
    qd_plan_report_json(r, &text);
    return cli_print_json(&text);
}

void plan_print_against(const qd_plan_report *r)
{
    const qd_plan_against *a = r->against;
    if (!a->possible) {
        cli_say("against", 9, "cannot be built: %s", a->refusal);
        return;
    }
    char step[32];
    qd_text_unit(a->choice->step_seconds, "s", step, sizeof step);
    cli_say("against", 9, "%s: %s, MFU %.1f %%, %.1f %% %s the first choice", a->choice->layout, step, 100.0 * a->choice->mfu,
            100.0 * (a->behind < 0.0 ? -a->behind : a->behind), a->behind < 0.0 ? "faster than" : "behind");
    for (int i = 0; i < a->why_count; i++)
        cli_say("", 9, "%s", a->why[i]);
}

enum { SHOWN = 10 };

/* A table if the terminal is wide enough; otherwise a paragraph per layout. */
static void print_choices(const qd_plan_report *r)
{
    enum { FIGURES = 34 }; /* columns of number, step, MFU and memory */
    int widest = 6, reason = 19, columns = cli_columns(stdout), count = r->count < SHOWN ? r->count : SHOWN;
    for (int i = 0; i < count; i++) {
        int layout = qd_text_columns(r->choices[i]->layout), loses = qd_text_columns(r->choices[i]->loses);
        widest = layout > widest ? layout : widest;
        reason = loses > reason ? loses : reason;
    }
    bool table = columns == 0 || widest + FIGURES + 2 + reason <= columns;
    if (table)
        printf("     %-*s %10s %7s %10s%s\n", widest, "layout", "step", "MFU", "memory",
               count > 1 ? "  compared with the first it" : "");
    for (int i = 0; i < count; i++) {
        const qd_plan_choice *c = r->choices[i];
        char step[32], memory[32], number[16];
        const char *loses = c->loses;
        qd_text_unit(c->step_seconds, "s", step, sizeof step);
        qd_text_bytes(c->memory_bytes, memory, sizeof memory);
        snprintf(number, sizeof number, "%3d", i + 1);
        if (table) {
            printf("%s  %-*s %10s %5.1f %% %10s%s%s\n", number, widest, c->layout, step, 100.0 * c->mfu, memory,
                   loses[0] ? "  " : "", loses);
        } else {
            cli_say(number, 5, "%s", c->layout);
            cli_say("", 5, "%s in %s, MFU %.1f %%%s%s", step, memory, 100.0 * c->mfu,
                    loses[0] ? "; compared with the first it " : "", loses);
        }
    }
}

/* Prints what the first choice changes in the given configuration, as command-line arguments. */
static qd_status print_keys(const qd_options *before, const qd_options *planned, const qd_plan_choice *choice)
{
    char *was = NULL, *is = NULL, section[64] = "";
    qd_options *after = NULL;
    qd_strbuf keys = {0};
    qd_status status = qd_options_copy(planned, &after);
    if (status == QD_OK)
        status = qd_plan_apply(choice, after);
    if (status == QD_OK)
        status = qd_options_to_yaml(before, &was);
    if (status == QD_OK)
        status = qd_options_to_yaml(after, &is);
    /* Both have the same lines: "section:" and "  key: value". */
    for (char *old = was, *line = is; status == QD_OK && *line;
         old += strcspn(old, "\n") + 1, line += strcspn(line, "\n") + 1) {
        size_t length = strcspn(line, "\n"), name = strcspn(line, ":");
        if (line[0] != ' ')
            snprintf(section, sizeof section, "%.*s", (int)name, line);
        else if (strcspn(old, "\n") != length || memcmp(old, line, length) != 0)
            qd_strbuf_printf(&keys, "%s%s.%.*s=%.*s", keys.length ? " " : "", section, (int)name - 2, line + 2,
                             (int)(length - name) - 2, line + name + 2);
    }
    if (status == QD_OK && keys.length > 0 && !keys.failed)
        cli_say("keys", 5, "%s", keys.data);
    qd_strbuf_free(&keys);
    qd_options_destroy(after);
    free(was);
    free(is);
    return status;
}

static qd_status print_plan(const qd_options *given, const qd_options *planned, const qd_plan_report *r)
{
    char parameters[32];
    qd_text_count((double)r->best->parameters, parameters, sizeof parameters);
    cli_say("", 0, "%s, %s parameters, on %d x %s: %d layout%s fit%s, %d do not, %d cannot be built (%.1f s)", r->best->model, parameters,
            r->best->gpus, r->best->cluster, r->tried, r->tried == 1 ? "" : "s", r->tried == 1 ? "s" : "", r->too_large, r->refused,
            r->wall_seconds);
    print_choices(r);
    if (r->late)
        cli_say("", 0, "warning: the search reached its time limit after %.0f s, before its work budget was spent: this result depends on "
                       "the machine's speed; set some of the axes",
                r->wall_seconds);
    else if (r->stopped)
        cli_say("", 0,
                "not all layouts were considered: the search ends after a fixed amount of work; set some of the axes to search further");
    for (int i = 0; i < r->reason_count; i++)
        cli_say(i == 0 ? "why" : "", 5, "%s", r->reasons[i]);
    cli_say("next", 5, "%s", r->next);
    QD_TRY(print_keys(given, planned, r->choices[0]));
    if (r->against)
        plan_print_against(r);
    return QD_OK;
}

static qd_status answer(cli_call *call, qd_plan_report **r)
{
    qd_options *o = call->options;
    double tokens = qd_options_float(o, "tokens"), days = qd_options_float(o, "days");
    bool json = qd_options_bool(o, "json");
    if ((tokens > 0.0) != (days > 0.0))
        return QD_FAIL(QD_USAGE,
                       "plan: --tokens and --days need each other: how many GPUs train this many tokens in this many days?");
    QD_TRY(cli_needs(call, "most", "tokens"));
    QD_TRY(cli_apart(call, "tokens", "gpus")); /* --tokens searches for it */
    if (tokens > 0.0 && strcmp(qd_options_origin(o, "parallel.ranks"), "command line") == 0)
        return QD_FAIL(QD_USAGE, "plan: --tokens searches for the number of GPUs: leave parallel.ranks out");
    QD_TRY(cli_apart(call, "tokens", "largest"));
    QD_TRY(cli_apart(call, "tokens", "against"));
    QD_TRY(cli_apart(call, "largest", "against"));
    if (qd_options_bool(o, "largest")) {
        const char *name;
        QD_TRY(qd_plan_largest(o, &name, r));
        progress_watch_end();
        if (!json)
            printf("the largest preset that fits: %s\n", name);
        return qd_options_set(o, "model.preset", name);
    }
    if (tokens > 0.0) {
        int gpus;
        double taken;
        char number[32];
        QD_TRY(qd_plan_gpus(o, tokens, days, (int)qd_options_int(o, "most"), &gpus, &taken, r));
        progress_watch_end();
        if (!json)
            printf("%d GPUs train %.3g tokens in %.1f days\n", gpus, tokens, taken);
        snprintf(number, sizeof number, "%d", gpus);
        return qd_options_set(o, "parallel.ranks", number);
    }
    const char *words = qd_options_string(o, "against");
    if (words[0] == '\0')
        return qd_plan(o, r);
    qd_options *layout = NULL;
    QD_TRY(qd_options_copy(o, &layout));
    qd_status status = cli_assign_words(layout, words);
    if (status == QD_OK)
        status = qd_plan_beside(o, layout, r);
    qd_options_destroy(layout);
    return status;
}

static qd_status run(cli_call *call)
{
    qd_plan_report *report = NULL;
    qd_options *o = call->options;
    const char *path = qd_options_string(o, "write");
    int64_t gpus = qd_options_int(o, "gpus");
    char number[32];
    QD_TRY(simulate_nearest(call));
    QD_TRY(qd_cluster_load(o, qd_options_string(o, "cluster")));
    qd_options *given = NULL;
    qd_status status = QD_OK;
    QD_TRY(qd_options_copy(o, &given));
    if (gpus > 0) {
        int64_t ranks = qd_options_int(o, "parallel.ranks");
        if (ranks != gpus && strcmp(qd_options_origin(o, "parallel.ranks"), "command line") == 0)
            QD_TRY_DONE(QD_FAIL(QD_USAGE, "plan: --gpus is %lld and parallel.ranks %lld: give one of them", (long long)gpus,
                                (long long)ranks));
        snprintf(number, sizeof number, "%lld", (long long)gpus);
        QD_TRY_DONE(qd_options_set(o, "parallel.ranks", number));
    }
    plan_keep_memory();
    progress_watch("searching layouts of %s", qd_options_bool(o, "largest") ? "all presets" : "the model");
    QD_TRY_DONE(answer(call, &report));
    progress_watch_end();
    QD_TRY_DONE(qd_options_bool(o, "json") ? print_json(report) : print_plan(given, o, report));
    if (path[0] != '\0') {
        QD_TRY_DONE(qd_plan_apply(report->choices[0], o));
        QD_TRY_DONE(qd_plan_write(o, path));
    }
done:
    progress_watch_end();
    qd_plan_report_destroy(report);
    qd_options_destroy(given);
    return status;
}

static const qd_option own[] = {
    CLI_OPTION_CLUSTER,
    {"gpus", QD_OPTION_INT, "0", 0, 65536, NULL, "number of accelerators; 0: parallel.ranks of CONFIG", NULL},
    {"against", QD_OPTION_STRING, "", 0, 0, NULL,
     "a layout to compare with the first choice, for example \"tp=8 pp=16 zero=1\": how much slower it is, and why", NULL},
    {"write", QD_OPTION_STRING, "", 0, 0, NULL, "writes the configuration with the first choice to this file", NULL},
    {"tokens", QD_OPTION_FLOAT, "0", 0, 1e18, NULL, "finds how many GPUs train this many tokens in --days", NULL},
    {"days", QD_OPTION_FLOAT, "0", 0, 1e6, NULL, "see --tokens", NULL},
    {"most", QD_OPTION_INT, "16384", 1, 65536, NULL, "--tokens: the most GPUs to consider", NULL},
    {"largest", QD_OPTION_BOOL, "false", 0, 0, NULL,
     "finds the largest preset that fits, instead of model.preset", NULL},
    CLI_OPTION_JSON,
};

const cli_command cli_plan = {
    .name = "plan",
    .arguments = "[CONFIG] --cluster NAME|FILE --gpus N [key=value …] [--write FILE]",
    .summary = "Searches for the fastest layout of a model on a cluster, and explains it",
    .details =
        "  quadrille plan --model llama3.1-8b --cluster h100 --gpus 64 --seq 8192 train.global_batch=128 "
        "train.precision=bf16\n\n"
        "Axes, ZeRO stage, micro-batch and recompute that are set stay fixed; the rest is searched for. In the table, MFU is the model's\n"
        "FLOP/s over the accelerators' peak, vpp is parallel.virtual_stages, and tp in n pieces is parallel.tp_overlap. keys: what the\n"
        "first choice changes in the configuration; --write saves all of it as a file. A layout fits if it leaves accelerator.reserve\n"
        "(4 %) of the memory free; if none does, plan searches with train.offload=optimizer.",
    CLI_OPTIONS(own),
    .configuration = true,
    .more = qd_cluster_table,
    .run = run,
};
