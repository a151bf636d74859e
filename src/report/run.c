/* Builds the report of a run folder: config.yaml, metrics.jsonl, evaluations.jsonl, memory.json,
 * trace.json. */
#include "base/arena.h"
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "base/text/text.h"
#include "report/run_files.h"
#include "spec/config/config.h"

#include <quadrille/check.h>
#include <quadrille/report.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_FIGURES = 9, MOST_NOTES = 8, MOST_SERIES = 8, MOST_MARKS = 64 };

/* The data that was read, and the description that points into it. */
typedef struct run_report {
    qd_report report;
    qd_arena *arena; /* texts, the programs, the memory table */
    qd_options *options;
    qd_config config;
    qd_check_report plan;
    char *config_text;
    qd_run_table metrics, evaluations;
    qd_report_figure figures[MOST_FIGURES];
    const char *notes[MOST_NOTES];
    qd_report_series series[MOST_SERIES];
    qd_report_mark marks[MOST_MARKS];
    qd_report_memory memory;
    qd_report_memory_rank *memory_ranks;
    qd_report_trace *measured, *simulated;
    qd_report_timeline timeline; /* the measured one, with mesh coordinates */
} run_report;

/* Stores a text of the arena, or fails if there is none. */
static qd_status keep(const char **text, char *printed)
{
    *text = printed;
    return printed ? QD_OK : QD_NO_MEMORY;
}

static void add_note(run_report *r, const char *text)
{
    r->notes[r->report.note_count++] = text;
}

static qd_status read_config(run_report *r, const char *folder)
{
    QD_TRY(qd_run_files_config(folder, &r->config_text, &r->options, &r->config));
    r->plan = qd_check_report_default();
    return qd_check(r->options, 0, &r->plan);
}

static qd_status describe(run_report *r, const char *folder)
{
    const qd_check_report *p = &r->plan;
    char parameters[32], tokens[32];
    qd_text_count((double)p->parameters, parameters, sizeof parameters);
    qd_text_count((double)p->tokens_per_step, tokens, sizeof tokens);
    QD_TRY(keep(&r->report.title, qd_run_files_title(r->arena, folder)));
    return keep(&r->report.subtitle,
                 qd_arena_printf(r->arena, "%s, %s parameters · %lld × %lld = %s tokens per step", p->model, parameters,
                                (long long)p->global_batch, (long long)p->seq, tokens));
}

/* evaluations.jsonl contains the output of `eval --json`, if the user stored it there. */
static qd_status read_metrics(run_report *r, const char *folder)
{
    qd_run_files_name path;
    QD_TRY(qd_run_files_path(folder, "metrics.jsonl", path));
    QD_TRY(qd_run_files_lines(&r->metrics, path));
    QD_TRY(qd_run_files_path(folder, "evaluations.jsonl", path));
    return access(path, F_OK) == 0 ? qd_run_files_lines(&r->evaluations, path) : QD_OK;
}

static qd_report_figure *add_figure(run_report *r, const char *name)
{
    qd_report_figure *figure = &r->figures[r->report.figure_count++];
    *figure = (qd_report_figure){.name = name};
    return figure;
}

static qd_status add_loss(run_report *r)
{
    const double *losses = r->metrics.columns[QD_RUN_LOSS];
    int64_t count;
    double loss = qd_run_files_loss(&r->metrics, &count);
    qd_report_figure *f = add_figure(r, "final loss");
    f->unit = "nats/token";
    QD_TRY(keep(&f->value, qd_arena_printf(r->arena, "%.4f", loss)));
    if (count == 1)
        return keep(&f->note, qd_arena_printf(r->arena, "of the last step · perplexity %.2f · first %.4f", exp(loss), losses[0]));
    return keep(&f->note, qd_arena_printf(r->arena, "mean of the last %lld steps · perplexity %.2f · first %.4f", (long long)count,
                                          exp(loss), losses[0]));
}

static qd_status add_speed(run_report *r)
{
    char text[32];
    qd_report_figure *f = add_figure(r, "speed");
    qd_text_count(qd_run_files_median(&r->metrics, QD_RUN_SPEED), text, sizeof text);
    f->unit = "tokens/s";
    QD_TRY(keep(&f->value, qd_arena_strdup(r->arena, text)));
    char step[32];
    qd_text_unit(qd_run_files_median(&r->metrics, QD_RUN_SECONDS), "s", step, sizeof step);
    return keep(&f->note, qd_arena_printf(r->arena, "median of %lld steps · %s per step", (long long)r->metrics.count, step));
}

static qd_status add_time(run_report *r)
{
    double seconds = 0.0, tokens = 0.0;
    char text[32];
    for (int64_t i = 0; i < r->metrics.count; i++) {
        seconds += isfinite(r->metrics.columns[QD_RUN_SECONDS][i]) ? r->metrics.columns[QD_RUN_SECONDS][i] : 0.0;
        tokens += isfinite(r->metrics.columns[QD_RUN_TOKENS][i]) ? r->metrics.columns[QD_RUN_TOKENS][i] : 0.0;
    }
    qd_report_figure *f = add_figure(r, "time in steps");
    qd_text_seconds(seconds, text, sizeof text);
    QD_TRY(keep(&f->value, qd_arena_strdup(r->arena, text)));
    qd_text_count(tokens, text, sizeof text);
    int64_t last = (int64_t)r->metrics.columns[QD_RUN_STEP][r->metrics.count - 1];
    return keep(&f->note, qd_arena_printf(r->arena, "step %lld of %lld · %s tokens", (long long)last, (long long)r->config.steps, text));
}

static qd_status add_mfu(run_report *r)
{
    double mfu = qd_run_files_median(&r->metrics, QD_RUN_MFU);
    if (isnan(mfu))
        return QD_OK;
    qd_report_figure *f = add_figure(r, "MFU");
    f->unit = "%";
    f->note = "median · relative to the multiply-add rate measured at the start";
    return keep(&f->value, qd_arena_printf(r->arena, "%.1f", 100.0 * mfu));
}

static qd_status add_layout(run_report *r)
{
    const qd_check_report *p = &r->plan;
    char traffic[32];
    qd_report_figure *f = add_figure(r, "layout");
    QD_TRY(keep(&f->value, qd_arena_strdup(r->arena, p->world > 1 ? p->layout : "1 rank")));
    qd_text_bytes(p->comm_bytes, traffic, sizeof traffic);
    return keep(&f->note, qd_arena_printf(r->arena, "%d rank%s, %lld micro-batch%s of %lld × %lld · %s sent per step", p->world,
                                              p->world == 1 ? "" : "s", (long long)p->micro_batches, p->micro_batches == 1 ? "" : "es",
                                              (long long)p->micro_batch, (long long)p->seq, traffic));
}

/* The evaluations of the run itself, as a curve and as the figure of the best. */
static qd_status add_validation(run_report *r)
{
    const qd_run_table *t = &r->metrics;
    double *x = QD_ARENA_NEW(r->arena, double, t->count), *y = QD_ARENA_NEW(r->arena, double, t->count);
    int64_t count = 0, best = 0;
    if (!x || !y)
        return QD_NO_MEMORY;
    for (int64_t i = 0; i < t->count; i++) {
        if (!isfinite(t->columns[QD_RUN_VALIDATION][i]))
            continue;
        x[count] = t->columns[QD_RUN_STEP][i];
        y[count] = t->columns[QD_RUN_VALIDATION][i];
        best = y[count] < y[best] ? count : best;
        count++;
    }
    if (count == 0)
        return QD_OK;
    r->series[r->report.series_count++] = (qd_report_series){
        .chart = "loss", .name = "validation", .x_name = "step", .unit = "nats/token", .x = x, .y = y, .count = count};
    qd_report_figure *f = add_figure(r, "best validation loss");
    f->unit = "nats/token";
    QD_TRY(keep(&f->value, qd_arena_printf(r->arena, "%.4f", y[best])));
    return keep(&f->note, qd_arena_printf(r->arena, "after step %lld · last %.4f", (long long)x[best], y[count - 1]));
}

static void add_series(run_report *r, const qd_run_table *t, const char *chart, const char *name, const char *unit, int column)
{
    r->series[r->report.series_count++] = (qd_report_series){.chart = chart,
                                                             .name = name,
                                                             .x_name = "step",
                                                             .unit = unit,
                                                             .x = t->columns[QD_RUN_STEP],
                                                             .y = t->columns[column],
                                                             .count = t->count,
                                                             .log_y = column == QD_RUN_GRAD_NORM};
}

static qd_status fill_curves(run_report *r)
{
    if (r->metrics.count == 0) {
        add_note(r, "No step has finished yet.");
        return QD_OK;
    }
    QD_TRY(add_loss(r));
    QD_TRY(add_speed(r));
    QD_TRY(add_time(r));
    QD_TRY(add_mfu(r));
    add_series(r, &r->metrics, "loss", "training", "nats/token", QD_RUN_LOSS);
    QD_TRY(add_validation(r));
    if (r->evaluations.count > 0)
        add_series(r, &r->evaluations, "loss", "evaluation", "nats/token", QD_RUN_LOSS);
    add_series(r, &r->metrics, "learning rate", NULL, "", QD_RUN_LR);
    add_series(r, &r->metrics, "gradient norm", NULL, "", QD_RUN_GRAD_NORM);
    add_series(r, &r->metrics, "speed", NULL, "tokens/s", QD_RUN_SPEED);
    return QD_OK;
}

/* starts.jsonl: a mark for each time the run was resumed. Earlier versions wrote no such file. */
static qd_status read_starts(run_report *r, const char *folder)
{
    qd_run_files_name path;
    char *text = NULL, before[160] = "";
    size_t length;
    QD_TRY(qd_run_files_path(folder, "starts.jsonl", path));
    if (access(path, F_OK) != 0)
        return QD_OK;
    QD_TRY(qd_file_read(path, 64 << 20, &text, &length));
    qd_status status = QD_OK;
    for (char *line = text, *end; status == QD_OK && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        qd_json *document = NULL;
        double step;
        status = qd_json_load_text(path, line, (size_t)(end - line), &document);
        if (status != QD_OK)
            break;
        const char *layout = qd_json_as_string(qd_json_member(qd_json_root(document), "layout"));
        bool known = qd_json_as_double(qd_json_member(qd_json_root(document), "step"), &step) && layout;
        if (known && step > 0.0 && r->report.mark_count < MOST_MARKS) {
            qd_report_mark *mark = &r->marks[r->report.mark_count++];
            mark->x = step;
            status = keep(&mark->text, strcmp(layout, before) == 0 || !before[0]
                                           ? qd_arena_strdup(r->arena, "resumed")
                                           : qd_arena_printf(r->arena, "resumed on %s, before on %s", layout, before));
        }
        snprintf(before, sizeof before, "%s", known ? layout : "");
        qd_json_destroy(document);
    }
    free(text);
    return status;
}

/* memory.json: measurements by rank. A run that did not finish has none. */
static qd_status read_measured(run_report *r, const char *folder, int64_t *allocated, int64_t *resident)
{
    qd_run_files_name path;
    qd_json *document = NULL;
    const qd_json_node *ranks;
    for (int i = 0; i < r->plan.world; i++)
        allocated[i] = resident[i] = -1;
    QD_TRY(qd_run_files_path(folder, "memory.json", path));
    if (access(path, F_OK) != 0)
        return QD_OK;
    QD_TRY(qd_json_load(path, &document));
    qd_status status = qd_json_get_node(document, qd_json_root(document), "ranks", QD_JSON_LIST, &ranks);
    for (size_t i = 0; status == QD_OK && i < qd_json_count(ranks); i++) {
        const qd_json_node *item = qd_json_item(ranks, i);
        int64_t rank = 0;
        status = qd_json_get_int(document, item, "rank", &rank);
        if (status == QD_OK && (rank < 0 || rank >= r->plan.world))
            status = QD_FAIL(QD_USAGE, "%s: contains rank %lld, but the run has %d ranks", path, (long long)rank, r->plan.world);
        if (status == QD_OK)
            status = qd_json_get_int(document, item, "allocated_bytes", &allocated[rank]);
        if (status == QD_OK)
            status = qd_json_get_int(document, item, "resident_peak_bytes", &resident[rank]);
    }
    bool shared = false;
    if (status == QD_OK && qd_json_as_bool(qd_json_member(qd_json_root(document), "one_process"), &shared) && shared && r->plan.world > 1)
        add_note(r, "The ranks were threads of one process: the resident peak is their total.");
    qd_json_destroy(document);
    return status;
}

/* Buffer kinds that some rank has, and the loss to packing. */
static qd_status fill_kinds(run_report *r, const qd_memory_report *accounts, int count, int kinds[QD_BUFFER_KIND_COUNT])
{
    const char **names = QD_ARENA_NEW(r->arena, const char *, QD_BUFFER_KIND_COUNT + 1);
    int n = 0;
    if (!names)
        return QD_NO_MEMORY;
    for (int kind = 0; kind < QD_BUFFER_KIND_COUNT; kind++)
        for (int i = 0; i < count; i++)
            if (accounts[i].at_peak[kind] > 0) {
                kinds[n] = kind;
                names[n++] = qd_buffer_kind_name((qd_buffer_kind)kind);
                break;
            }
    names[n++] = "lost to packing";
    r->memory.kinds = names;
    r->memory.kind_count = n;
    return QD_OK;
}

/* Number of ranks from `first` on that share a bar: one each up to 32 ranks, otherwise those that
 * share a program. */
static int alike(const run_report *r, const qd_program *const *programs, int first)
{
    int end = first + 1;
    while (r->plan.world > 32 && end < r->plan.world && programs[end] == programs[first])
        end++;
    return end - first;
}

static qd_status fill_rank(run_report *r, qd_report_memory_rank *row, const qd_memory_report *account, const int *kinds, int first,
                           int count)
{
    int64_t *planned = QD_ARENA_NEW(r->arena, int64_t, r->memory.kind_count);
    if (!planned)
        return QD_NO_MEMORY;
    for (int k = 0; k + 1 < r->memory.kind_count; k++)
        planned[k] = account->at_peak[kinds[k]];
    planned[r->memory.kind_count - 1] = account->total - account->live_peak;
    row->planned = planned;
    return keep(&row->label, count == 1 ? qd_arena_printf(r->arena, "rank %d", first)
                                            : qd_arena_printf(r->arena, "ranks %d to %d", first, first + count - 1));
}

static qd_status fill_memory(run_report *r, const char *folder)
{
    int world = r->plan.world, rows = 0;
    const qd_program **programs;
    int kinds[QD_BUFFER_KIND_COUNT];
    QD_TRY(qd_config_build_all(&r->config, r->arena, &programs));
    qd_memory_report *accounts = QD_ARENA_NEW(r->arena, qd_memory_report, world);
    int64_t *allocated = QD_ARENA_NEW(r->arena, int64_t, world), *resident = QD_ARENA_NEW(r->arena, int64_t, world);
    r->memory_ranks = QD_ARENA_NEW(r->arena, qd_report_memory_rank, world);
    if (!accounts || !allocated || !resident || !r->memory_ranks)
        return QD_NO_MEMORY;
    QD_TRY(read_measured(r, folder, allocated, resident));
    for (int first = 0, count; first < world; first += count, rows++) {
        count = alike(r, programs, first);
        QD_TRY(qd_memory_account(programs[first], &accounts[rows]));
        qd_report_memory_rank *row = &r->memory_ranks[rows];
        row->allocated = row->resident = -1;
        for (int i = first; i < first + count; i++) {
            row->allocated = allocated[i] > row->allocated ? allocated[i] : row->allocated;
            row->resident = resident[i] > row->resident ? resident[i] : row->resident;
        }
    }
    QD_TRY(fill_kinds(r, accounts, rows, kinds));
    rows = 0;
    for (int first = 0, count; first < world; first += count, rows++) {
        count = alike(r, programs, first);
        QD_TRY(fill_rank(r, &r->memory_ranks[rows], &accounts[rows], kinds, first, count));
    }
    r->memory.ranks = r->memory_ranks;
    r->memory.rank_count = rows;
    r->report.memory = &r->memory;
    return QD_OK;
}

static qd_status add_memory(run_report *r)
{
    int64_t planned = 0, allocated = -1, resident = -1;
    char text[32], other[32];
    for (int i = 0; i < r->memory.rank_count; i++) {
        const qd_report_memory_rank *row = &r->memory_ranks[i];
        int64_t sum = 0;
        for (int k = 0; k < r->memory.kind_count; k++)
            sum += row->planned[k];
        planned = sum > planned ? sum : planned;
        allocated = row->allocated > allocated ? row->allocated : allocated;
        resident = row->resident > resident ? row->resident : resident;
    }
    qd_report_figure *f = add_figure(r, "peak memory per rank");
    qd_text_bytes(planned, text, sizeof text);
    QD_TRY(keep(&f->value, qd_arena_strdup(r->arena, text)));
    if (allocated < 0) {
        f->note = "planned; the run has not reported measurements";
        return QD_OK;
    }
    qd_text_bytes(resident, other, sizeof other);
    if (allocated == planned)
        return keep(&f->note, qd_arena_printf(r->arena, "planned and allocated · resident peak %s", other));
    qd_text_bytes(allocated, text, sizeof text);
    return keep(&f->note, qd_arena_printf(r->arena, "planned · %s allocated · resident peak %s", text, other));
}

/* "pp 0 · dp 3": coordinates on the axes that have more than one rank. */
static qd_status place_of(run_report *r, const qd_mesh *mesh, int rank, const char **place)
{
    int coords[QD_AXIS_COUNT];
    qd_strbuf text = {0};
    qd_mesh_coords(mesh, rank, coords);
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--)
        if (mesh->degree[axis] > 1)
            qd_strbuf_printf(&text, "%s%s %d", text.length ? " · " : "", qd_axis_name((qd_axis)axis), coords[axis]);
    qd_status status = text.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the coordinates of a rank")
                                   : keep(place, qd_arena_strdup(r->arena, text.length ? text.data : ""));
    qd_strbuf_free(&text);
    return status;
}

static qd_status read_traces(run_report *r, const char *folder, const char *simulated)
{
    qd_run_files_name path;
    QD_TRY(qd_run_files_path(folder, "trace.json", path));
    if (access(path, F_OK) == 0) {
        QD_TRY(qd_report_trace_load(path, "measured", &r->measured));
        r->timeline = *qd_report_trace_timeline(r->measured);
        qd_report_rank *ranks = QD_ARENA_NEW(r->arena, qd_report_rank, r->timeline.rank_count + 1);
        qd_mesh mesh;
        QD_TRY(qd_mesh_create(r->config.world, r->config.degrees, &mesh));
        if (!ranks)
            return QD_NO_MEMORY;
        for (int i = 0; i < r->timeline.rank_count; i++) {
            ranks[i] = r->timeline.ranks[i];
            if (!ranks[i].place && ranks[i].rank >= 0 && ranks[i].rank < mesh.world)
                QD_TRY(place_of(r, &mesh, ranks[i].rank, &ranks[i].place));
        }
        r->timeline.ranks = ranks;
        r->report.measured = &r->timeline;
    } else {
        add_note(r, "The run wrote no trace: use --trace to draw the first steps action by action.");
    }
    if (simulated) {
        QD_TRY(qd_report_trace_load(simulated, "simulated", &r->simulated));
        r->report.simulated = qd_report_trace_timeline(r->simulated);
    }
    return QD_OK;
}

static qd_status fill(run_report *r, const char *folder, const char *simulated)
{
    QD_TRY(qd_arena_create(&r->arena));
    QD_TRY(read_config(r, folder));
    QD_TRY(describe(r, folder));
    QD_TRY(read_metrics(r, folder));
    QD_TRY(fill_curves(r));
    QD_TRY(read_starts(r, folder));
    QD_TRY(fill_memory(r, folder));
    QD_TRY(add_memory(r));
    QD_TRY(add_layout(r));
    QD_TRY(read_traces(r, folder, simulated));
    r->report.figures = r->figures;
    r->report.notes = r->notes;
    r->report.series = r->series;
    r->report.marks = r->marks;
    r->report.config = r->config_text;
    return QD_OK;
}

qd_status qd_report_run(const char *folder, const char *simulated, const char *path, char **written)
{
    run_report r = {.report = qd_report_default(), .memory = qd_report_memory_default(), .timeline = qd_report_timeline_default()};
    qd_run_files_name own;
    qd_status status = path ? QD_OK : qd_run_files_path(folder, "report.html", own);
    if (status == QD_OK)
        status = fill(&r, folder, simulated);
    if (status == QD_OK)
        status = qd_report_write(&r.report, path ? path : own);
    if (status == QD_OK && written && !(*written = strdup(path ? path : own)))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the name of a file");
    qd_report_trace_destroy(r.measured);
    qd_report_trace_destroy(r.simulated);
    qd_run_files_free(&r.metrics);
    qd_run_files_free(&r.evaluations);
    qd_options_destroy(r.options);
    free(r.config_text);
    qd_arena_destroy(r.arena);
    return status;
}
