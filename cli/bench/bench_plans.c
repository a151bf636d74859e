/* quadrille bench plans: published layouts, compared with the planner's first choices. */
#include "bench/bench.h"
#include "plan.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

static void put_row(qd_json_writer *w, const qd_plan_row *row, const qd_plan_report *r)
{
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "name", row->name);
    qd_json_put_string(w, "source", row->source);
    qd_json_put_string(w, "first_choice", r->choices[0]->layout);
    qd_json_put_double(w, "step_seconds", r->choices[0]->step_seconds);
    qd_json_put_double(w, "mfu", r->choices[0]->mfu);
    qd_json_put_double(w, "wall_seconds", r->wall_seconds);
    qd_json_put_bool(w, "stopped", r->stopped);
    qd_json_put_string(w, "nearest", r->nearest);
    qd_plan_put_against(w, r->against);
    qd_json_end(w);
}

static void print_row(const qd_plan_row *row, const qd_plan_report *r)
{
    const qd_plan_choice *first = r->choices[0];
    printf("%s (%.0f s%s)\n", row->name, r->wall_seconds,
           r->late      ? "; the search reached its time limit"
           : r->stopped ? "; not all layouts were considered"
                        : "");
    if (r->nearest[0] != '\0')
        printf("model    %s\n", r->nearest);
    printf("first    %s: %.4g s, MFU %.1f %%\n", first->layout, first->step_seconds, 100.0 * first->mfu);
    plan_print_against(r);
    fflush(stdout);
}

static qd_status run_rows(const qd_plan_row *rows, int count, qd_json_writer *w)
{
    for (int i = 0; i < count; i++) {
        progress_watch("planning %d of %d: %s", i + 1, count, rows[i].name);
        qd_plan_report *report;
        QD_TRY(qd_plan_row_run(&rows[i], &report));
        progress_watch_end();
        if (w)
            put_row(w, &rows[i], report);
        else
            print_row(&rows[i], report);
        qd_plan_report_destroy(report);
    }
    return QD_OK;
}

static qd_status run(cli_call *call)
{
    const char *path = qd_options_string(call->options, "against");
    if (strcmp(path, "none") == 0)
        return QD_FAIL(QD_USAGE, "bench plans: set what to compare with: --against FILE, for example data/published/layouts.json");
    bool json = qd_options_bool(call->options, "json");
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_plan_row *rows;
    int count;
    qd_status status = qd_plan_rows(path, &rows, &count);
    qd_json_list_begin(&w, NULL);
    plan_keep_memory();
    if (status == QD_OK)
        status = run_rows(rows, count, json ? &w : NULL);
    qd_json_end(&w);
    free(rows);
    if (status == QD_OK && json)
        status = cli_print_json(&text);
    qd_strbuf_free(&text);
    return status;
}

const bench_part bench_plans = {.name = "plans", .options = " against json ", .keys = "", .run = run};
