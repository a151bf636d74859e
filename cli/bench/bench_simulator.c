/* quadrille bench simulator: predictions compared with published runs. */
#include "bench/bench.h"
#include "progress.h"

#include <quadrille/sim.h>
#include <math.h>
#include <string.h>

static qd_status print_json(const qd_sim_scores *s)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_double(&w, "median_abs_error", s->median);
    qd_json_put_double(&w, "p90_abs_error", s->p90);
    qd_json_put_double(&w, "median_abs_error_calibrated", s->median_seen);
    qd_json_put_double(&w, "p90_abs_error_calibrated", s->p90_seen);
    qd_json_put_double(&w, "median_abs_error_held_out", s->median_held_out);
    qd_json_put_double(&w, "p90_abs_error_held_out", s->p90_held_out);
    qd_json_put_double(&w, "memory_median_abs_error", s->memory_median);
    qd_json_put_int(&w, "memory_rows", s->memory_count);
    qd_json_put_double(&w, "oom_accuracy", s->oom_accuracy);
    qd_json_put_int(&w, "oom_rows", s->oom_count);
    qd_json_put_int(&w, "rows_scored", s->scored);
    qd_json_put_int(&w, "rows_skipped", s->skipped);
    qd_json_list_begin(&w, "rows");
    for (int i = 0; i < s->count; i++) {
        const qd_sim_score *r = &s->rows[i];
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "id", r->id);
        qd_json_put_string(&w, "source", r->source);
        qd_json_put_bool(&w, "core", r->core);
        qd_json_put_bool(&w, "held_out", r->held_out);
        if (r->reason[0]) {
            qd_json_put_string(&w, "reason", r->reason);
        } else {
            qd_json_put_double(&w, "predicted", r->predicted);
            qd_json_put_double(&w, "published", r->published > 0 ? r->published : NAN);
            qd_json_put_double(&w, "error", r->published > 0 ? r->error : NAN);
            qd_json_put_double(&w, "predicted_memory_bytes", r->predicted_memory);
            qd_json_put_double(&w, "published_memory_bytes", r->published_memory > 0 ? r->published_memory : NAN);
            qd_json_put_bool(&w, "predicted_out_of_memory", r->predicted_oom);
            qd_json_put_bool(&w, "published_out_of_memory", r->outcome == 1);
        }
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_end(&w);
    return cli_print_json(&text);
}

static void print_table(const qd_sim_scores *s)
{
    int widest = 50;
    for (int i = 0; i < s->count; i++)
        widest = (int)strlen(s->rows[i].id) > widest ? (int)strlen(s->rows[i].id) : widest;
    printf("%-*s %12s %12s %8s\n", widest + 2, "tokens/s per GPU", "predicted", "published", "error");
    for (int i = 0; i < s->count; i++) {
        const qd_sim_score *r = &s->rows[i];
        if (i == 0 || strcmp(r->source, s->rows[i - 1].source) != 0)
            printf("%s\n", r->source);
        if (r->reason[0])
            printf("  %-*s skipped: %s\n", widest, r->id, r->reason);
        else if (r->published > 0)
            printf("  %-*s %12.5g %12.5g %+7.1f %%%s\n", widest, r->id, r->predicted, r->published, 100.0 * r->error,
                   r->held_out ? "  held out" : "");
        else
            printf("  %-*s %12.5g %12s\n", widest, r->id, r->predicted, "-");
    }
    printf("\ncore rows: median error %.1f %%, 90th percentile %.1f %%; held out %.1f %% and %.1f %%, the rest %.1f %% and %.1f %%\n",
           100.0 * s->median, 100.0 * s->p90, 100.0 * s->median_held_out, 100.0 * s->p90_held_out, 100.0 * s->median_seen,
           100.0 * s->p90_seen);
    printf("memory: median error %.1f %% of %d rows; out of memory or not: right in %.1f %% of %d\n", 100.0 * s->memory_median,
           s->memory_count, 100.0 * s->oom_accuracy, s->oom_count);
    printf("%d rows scored, %d skipped\n", s->scored, s->skipped);
}

static qd_status run(cli_call *call)
{
    const char *path = qd_options_string(call->options, "against");
    if (strcmp(path, "none") == 0)
        return QD_FAIL(QD_USAGE, "bench simulator: set what to compare with: --against FILE, for example data/published/runs.json");
    qd_sim_scores scores = qd_sim_scores_default();
    progress_watch("simulating the runs of %s", path);
    qd_status status = qd_simulate_published(path, qd_options_bool(call->options, "core"), &scores);
    progress_watch_end();
    if (status == QD_OK && qd_options_bool(call->options, "json"))
        status = print_json(&scores);
    else if (status == QD_OK)
        print_table(&scores);
    qd_sim_scores_free(&scores);
    return status;
}

const bench_part bench_simulator = {.name = "simulator", .options = " against core json ", .keys = "", .run = run};
