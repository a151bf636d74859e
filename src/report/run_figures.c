/* Figures, notes and curves of a run, from the steps read so far. */
#include "base/text/text.h"
#include "report/run_files.h"
#include "report/run_impl.h"

#include <math.h>

static void add_note(qd_run_report *r, const char *text)
{
    r->notes[r->report.note_count++] = text;
}

static qd_report_figure *add_figure(qd_run_report *r, const char *name)
{
    qd_report_figure *figure = &r->figures[r->report.figure_count++];
    *figure = (qd_report_figure){.name = name};
    return figure;
}

/* Whether the run compares pairs of completions. */
static bool of_pairs(const qd_run_report *r)
{
    return r->metrics.count > 0 && isfinite(r->metrics.columns[QD_COLUMN_MARGIN][r->metrics.count - 1]);
}

static const char *loss_unit(const qd_run_report *r)
{
    return of_pairs(r) ? "nats/pair" : "nats/token";
}

static qd_status add_loss(qd_run_report *r)
{
    const double *losses = r->metrics.columns[QD_COLUMN_LOSS];
    int64_t count;
    double loss = qd_run_files_loss(&r->metrics, &count);
    qd_report_figure *f = add_figure(r, "final loss");
    f->unit = loss_unit(r);
    QD_TRY(qd_run_keep(&f->value, qd_arena_printf(r->texts, "%.4f", loss)));
    if (of_pairs(r))
        return qd_run_keep(&f->note, qd_arena_printf(r->texts, "mean of the last %lld steps · first %.4f", (long long)count, losses[0]));
    if (count == 1)
        return qd_run_keep(&f->note, qd_arena_printf(r->texts, "of the last step · perplexity %.2f · first %.4f", exp(loss), losses[0]));
    return qd_run_keep(&f->note, qd_arena_printf(r->texts, "mean of the last %lld steps · perplexity %.2f · first %.4f", (long long)count,
                                          exp(loss), losses[0]));
}

static qd_status add_speed(qd_run_report *r)
{
    char text[32];
    qd_report_figure *f = add_figure(r, "speed");
    qd_text_count(qd_run_files_median(&r->metrics, QD_COLUMN_SPEED), text, sizeof text);
    f->unit = "tokens/s";
    QD_TRY(qd_run_keep(&f->value, qd_arena_strdup(r->texts, text)));
    char step[32];
    qd_text_unit(qd_run_files_median(&r->metrics, QD_COLUMN_SECONDS), "s", step, sizeof step);
    return qd_run_keep(&f->note, qd_arena_printf(r->texts, "median of %lld steps · %s per step", (long long)r->metrics.count, step));
}

static qd_status add_time(qd_run_report *r)
{
    double seconds = 0.0, tokens = 0.0;
    char text[32];
    for (int64_t i = 0; i < r->metrics.count; i++) {
        seconds += isfinite(r->metrics.columns[QD_COLUMN_SECONDS][i]) ? r->metrics.columns[QD_COLUMN_SECONDS][i] : 0.0;
        tokens += isfinite(r->metrics.columns[QD_COLUMN_TOKENS][i]) ? r->metrics.columns[QD_COLUMN_TOKENS][i] : 0.0;
    }
    qd_report_figure *f = add_figure(r, "time in steps");
    qd_text_seconds(seconds, text, sizeof text);
    QD_TRY(qd_run_keep(&f->value, qd_arena_strdup(r->texts, text)));
    qd_text_count(tokens, text, sizeof text);
    long long last = (long long)r->metrics.columns[QD_COLUMN_STEP][r->metrics.count - 1];
    return qd_run_keep(&f->note, qd_arena_printf(r->texts, "step %lld of %lld · %s tokens", last, (long long)r->config.steps, text));
}

static qd_status add_mfu(qd_run_report *r)
{
    double mfu = qd_run_files_median(&r->metrics, QD_COLUMN_MFU);
    if (isnan(mfu))
        return QD_OK;
    qd_report_figure *f = add_figure(r, "MFU");
    f->unit = "%";
    f->note = "median · relative to the multiply-add rate measured at the start";
    return qd_run_keep(&f->value, qd_arena_printf(r->texts, "%.1f", 100.0 * mfu));
}

static qd_status add_memory(qd_run_report *r)
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
    QD_TRY(qd_run_keep(&f->value, qd_arena_strdup(r->texts, text)));
    if (allocated < 0) {
        f->note = "planned; the run has not reported measurements";
        return QD_OK;
    }
    qd_text_bytes(resident, other, sizeof other);
    if (allocated == planned)
        return qd_run_keep(&f->note, qd_arena_printf(r->texts, "planned and allocated · resident peak %s", other));
    qd_text_bytes(allocated, text, sizeof text);
    return qd_run_keep(&f->note, qd_arena_printf(r->texts, "planned · %s allocated · resident peak %s", text, other));
}

static qd_status add_layout(qd_run_report *r)
{
    const qd_check_report *p = &r->plan;
    char traffic[32];
    qd_report_figure *f = add_figure(r, "layout");
    QD_TRY(qd_run_keep(&f->value, qd_arena_strdup(r->texts, p->world > 1 ? p->layout : "1 rank")));
    qd_text_bytes(p->comm_bytes, traffic, sizeof traffic);
    return qd_run_keep(&f->note, qd_arena_printf(r->texts, "%d rank%s, %lld micro-batch%s of %lld × %lld · %s sent per step", p->world,
                                              p->world == 1 ? "" : "s", (long long)p->micro_batches, p->micro_batches == 1 ? "" : "es",
                                              (long long)p->micro_batch, (long long)p->seq, traffic));
}

/* The evaluations of the run itself, as a curve and as the figure of the best. */
static qd_status add_validation(qd_run_report *r)
{
    const qd_table *t = &r->metrics;
    double *x = QD_ARENA_NEW(r->texts, double, t->count), *y = QD_ARENA_NEW(r->texts, double, t->count);
    int64_t count = 0, best = 0;
    if (!x || !y)
        return QD_NO_MEMORY;
    for (int64_t i = 0; i < t->count; i++) {
        if (!isfinite(t->columns[QD_COLUMN_VALIDATION][i]))
            continue;
        x[count] = t->columns[QD_COLUMN_STEP][i];
        y[count] = t->columns[QD_COLUMN_VALIDATION][i];
        best = y[count] < y[best] ? count : best;
        count++;
    }
    if (count == 0)
        return QD_OK;
    r->series[r->report.series_count++] = (qd_report_series){
        .chart = "loss", .name = "validation", .x_name = "step", .unit = loss_unit(r), .x = x, .y = y, .count = count};
    qd_report_figure *f = add_figure(r, "best validation loss");
    f->unit = loss_unit(r);
    QD_TRY(qd_run_keep(&f->value, qd_arena_printf(r->texts, "%.4f", y[best])));
    return qd_run_keep(&f->note, qd_arena_printf(r->texts, "after step %lld · last %.4f", (long long)x[best], y[count - 1]));
}

static void add_series(qd_run_report *r, const qd_table *t, const char *chart, const char *name, const char *unit, int column)
{
    r->series[r->report.series_count++] = (qd_report_series){.chart = chart,
                                                             .name = name,
                                                             .x_name = "step",
                                                             .unit = unit,
                                                             .x = t->columns[QD_COLUMN_STEP],
                                                             .y = t->columns[column],
                                                             .count = t->count,
                                                             .log_y = column == QD_COLUMN_GRAD_NORM};
}

static qd_status note_skipped(qd_run_report *r)
{
    const char **note = &r->notes[r->report.note_count++];
    return qd_run_keep(note, qd_arena_printf(r->texts, "%lld line%s of metrics.jsonl cannot be read.", (long long)r->metrics.skipped,
                                             r->metrics.skipped == 1 ? "" : "s"));
}

static qd_status fill_curves(qd_run_report *r)
{
    if (r->metrics.count == 0) {
        add_note(r, "No step has finished yet.");
        return QD_OK;
    }
    QD_TRY(add_loss(r));
    QD_TRY(add_speed(r));
    QD_TRY(add_time(r));
    QD_TRY(add_mfu(r));
    add_series(r, &r->metrics, "loss", "training", loss_unit(r), QD_COLUMN_LOSS);
    QD_TRY(add_validation(r));
    if (r->evaluations.count > 0)
        add_series(r, &r->evaluations, "loss", "evaluation", loss_unit(r), QD_COLUMN_LOSS);
    add_series(r, &r->metrics, "learning rate", NULL, "", QD_COLUMN_LR);
    add_series(r, &r->metrics, "gradient norm", NULL, "", QD_COLUMN_GRAD_NORM);
    add_series(r, &r->metrics, "speed", NULL, "tokens/s", QD_COLUMN_SPEED);
    add_series(r, &r->metrics, "memory", "peak of rank 0", "B", QD_COLUMN_MEMORY);
    if (of_pairs(r)) {
        add_series(r, &r->metrics, "reward margin", NULL, "nats", QD_COLUMN_MARGIN);
        add_series(r, &r->metrics, "reward accuracy", NULL, "", QD_COLUMN_ACCURACY);
    }
    return QD_OK;
}

qd_status qd_run_fill_figures(qd_run_report *r)
{
    qd_arena_destroy(r->texts);
    r->texts = NULL;
    QD_TRY(qd_arena_create(&r->texts));
    r->report.figure_count = r->report.note_count = r->report.series_count = 0;
    QD_TRY(fill_curves(r));
    QD_TRY(add_memory(r));
    QD_TRY(add_layout(r));
    if (r->one_process && r->plan.world > 1)
        add_note(r, "The ranks were threads of one process: the resident peak is their total.");
    if (r->trace_failed)
        add_note(r, "The trace cannot be read: it is incomplete, or not a trace of this program.");
    else if (!r->measured)
        add_note(r, "The run wrote no trace: use --trace to draw the first steps action by action.");
    if (r->live && r->metrics.skipped > 0)
        QD_TRY(note_skipped(r));
    r->report.figures = r->figures;
    r->report.notes = r->notes;
    r->report.series = r->series;
    r->report.marks = r->marks;
    r->report.mark_count = r->mark_count;
    return QD_OK;
}
