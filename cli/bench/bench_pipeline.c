/* quadrille bench pipeline: the bubble of each schedule, replayed with measured times. */
#include "bench/bench.h"
#include "progress.h"

#include <quadrille/bench.h>
#include <quadrille/sim.h>

#include <string.h>

static const char *const schedules[] = {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"};
enum { SCHEDULES = sizeof schedules / sizeof *schedules };

/* Defaults: four uniform stages. Head and embedding of 16 tokens are negligible compared with the
 * blocks. */
static qd_status set_defaults(qd_options *o)
{
    static const char *const defaults[][2] = {{"model.layers", "16"},    {"model.hidden", "256"},       {"model.heads", "4"},
                                              {"model.vocab", "16"},     {"data.seq", "64"},            {"train.global_batch", "16"},
                                              {"train.micro_batch", "1"}, {"parallel.pp", "4"},          {"parallel.ranks", "4"}};
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        if (!qd_options_is_set(o, defaults[i][0]))
            QD_TRY(qd_options_set(o, defaults[i][0], defaults[i][1]));
    return QD_OK;
}

/* A schedule replayed with undisturbed times of the passes, and its bubble with each action's own
 * time. */
typedef struct measured {
    qd_bench_actions actions;
    qd_replay_report report;
    double single;
} measured;

/* Disturbances often last for seconds, so the steps of a schedule are timed in several rounds. */
enum { ROUNDS = 3 };

static qd_status measure(cli_call *call, bool one, measured *rows)
{
    int steps = ((int)qd_options_int(call->options, "repeat") + ROUNDS - 1) / ROUNDS, count = one ? 1 : SCHEDULES;
    for (int i = 0; i < ROUNDS * count; i++) {
        measured *m = &rows[i % count];
        qd_replay_report single = qd_replay_report_default();
        if (!one)
            QD_TRY(qd_options_set(call->options, "parallel.schedule", schedules[i % count]));
        progress_watch("measuring pipelines, %d of %d: %s", i + 1, ROUNDS * count, qd_options_string(call->options, "parallel.schedule"));
        QD_TRY(qd_bench_measure_actions(call->options, (int)qd_options_int(call->options, "warm-up"), steps, &m->actions));
        QD_TRY(qd_replay_pipeline(call->options, (const double *const *)m->actions.pass, &m->report));
        QD_TRY(qd_replay_pipeline(call->options, (const double *const *)m->actions.single, &single));
        m->single = single.bubble;
    }
    return QD_OK;
}

static void print_row(const measured *m)
{
    const qd_replay_report *r = &m->report;
    char theory[16] = "-";
    if (r->theory >= 0.0)
        snprintf(theory, sizeof theory, "%.2f %%", 100.0 * r->theory);
    printf("%-12s %6d %8d  %8.2f ms %8.2f %% %9s %8.1f %% %8.2f %%   ", r->schedule, r->stages, r->micro_batches, 1e3 * r->seconds,
           100.0 * r->bubble, theory, 100.0 * r->uneven, 100.0 * m->single);
    for (int i = 0; i < r->ranks && i < 16; i++)
        printf("%s%d", i ? " " : "", r->in_flight[i]);
    putchar('\n');
}

static void print_rows(const measured *rows, int count)
{
    cli_explain(
        "time: of a step with the undisturbed times of its actions. bubble: the fraction of it that ranks wait; textbook: with uniform "
        "stages. uneven: how much longer the busiest rank computes than the mean. singly: the bubble with each action's own time. in "
        "flight: micro-batches whose activations a rank holds");
    printf("%-12s %6s %8s  %11s %10s %9s %10s %10s   %s\n", "schedule", "stages", "micro-b.", "time", "bubble", "textbook", "uneven",
           "singly", "in flight, by rank");
    for (int i = 0; i < count; i++)
        print_row(&rows[i]);
}

static qd_status print_json(const measured *rows, int count)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_list_begin(&w, "schedules");
    for (int i = 0; i < count; i++) {
        const qd_replay_report *r = &rows[i].report;
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "schedule", r->schedule);
        qd_json_put_int(&w, "ranks", r->ranks);
        qd_json_put_int(&w, "stages", r->stages);
        qd_json_put_int(&w, "micro_batches", r->micro_batches);
        qd_json_put_double(&w, "seconds", r->seconds);
        qd_json_put_double(&w, "bubble", r->bubble);
        qd_json_put_double(&w, "theory", r->theory);
        qd_json_put_double(&w, "uneven", r->uneven);
        qd_json_put_double(&w, "single", rows[i].single);
        qd_json_list_begin(&w, "in_flight");
        for (int k = 0; k < r->ranks && k < 64; k++)
            qd_json_put_int(&w, NULL, r->in_flight[k]);
        qd_json_end(&w);
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_end(&w);
    return cli_print_json(&text);
}

static qd_status run(cli_call *call)
{
    measured rows[SCHEDULES] = {0};
    for (int i = 0; i < SCHEDULES; i++)
        rows[i] = (measured){.actions = qd_bench_actions_default(), .report = qd_replay_report_default()};
    bool json = qd_options_bool(call->options, "json");
    bool one = qd_options_is_set(call->options, "parallel.schedule") || qd_options_is_set(call->options, "parallel.schedule_file");
    int count = one ? 1 : SCHEDULES;
    QD_TRY(set_defaults(call->options));
    qd_status status = measure(call, one, rows);
    progress_watch_end();
    if (status == QD_OK && json)
        status = print_json(rows, count);
    else if (status == QD_OK)
        print_rows(rows, count);
    for (int i = 0; i < count; i++)
        qd_bench_actions_free(&rows[i].actions);
    return status;
}

const bench_part bench_pipeline = {.name = "pipeline", .options = " warm-up repeat json ", .run = run};
