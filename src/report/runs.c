/* Several runs next to each other: the figures of each, the keys in which their configurations
 * differ, and a page with their curves laid over each other. */
#include "base/arena.h"
#include "base/sized.h"
#include "base/text/strbuf.h"
#include "base/text/text.h"
#include "report/run_files.h"

#include <quadrille/report.h>

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* A run that was read. */
typedef struct one_run {
    const char *folder, *name;
    char *text;
    qd_options *options;
    qd_config config;
    qd_table metrics;
    double *x, *y; /* validation losses */
    int64_t validations;
} one_run;

static void close_run(one_run *r)
{
    free(r->text);
    qd_options_destroy(r->options);
    qd_table_free(&r->metrics);
    free(r->x);
    free(r->y);
}

static qd_status open_run(const char *folder, one_run *r)
{
    qd_run_files_name path;
    *r = (one_run){.folder = folder};
    QD_TRY(qd_run_files_config(folder, &r->text, &r->options, &r->config));
    QD_TRY(qd_run_files_path(folder, "metrics.jsonl", path));
    return access(path, F_OK) == 0 ? qd_run_files_lines(&r->metrics, path) : QD_OK;
}

/* A run that is being written holds a lock on its metrics. */
static bool is_running(const char *folder)
{
    qd_run_files_name path;
    if (qd_run_files_path(folder, "metrics.jsonl", path) != QD_OK)
        return false;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    bool locked = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (fd >= 0)
        close(fd);
    return locked;
}

/* The layout as the program of its first rank states it. */
static void find_layout(const qd_config *config, qd_run_figures *f)
{
    qd_arena *arena = NULL;
    qd_program *program = NULL;
    qd_config c = *config;
    c.evaluation.every = 0;
    c.evaluation.seconds = 0.0;
    qd_status status = qd_arena_create(&arena);
    if (status == QD_OK)
        status = qd_config_build(&c, 0, arena, &program);
    if (status == QD_OK) {
        qd_config_layout_text(program, f->layout, sizeof f->layout);
        f->parameters = qd_ledger_parameters(program->ledger);
    } else {
        qd_error_clear();
    }
    qd_arena_destroy(arena);
}

static void fill_figures(const one_run *r, qd_run_figures *f)
{
    const qd_table *t = &r->metrics;
    snprintf(f->model, sizeof f->model, "%s", r->config.model.name);
    find_layout(&r->config, f);
    f->ranks = r->config.world;
    f->steps_planned = r->config.steps;
    f->running = is_running(r->folder);
    f->loss = f->best_loss = f->tokens_per_second = NAN;
    f->best = -1;
    if (t->count == 0)
        return;
    f->steps = (int64_t)t->columns[QD_COLUMN_STEP][t->count - 1];
    f->loss = qd_run_files_loss(t, &f->loss_steps);
    f->tokens_per_second = qd_run_files_median(t, QD_COLUMN_SPEED);
    for (int64_t i = 0; i < t->count; i++) {
        f->seconds += isfinite(t->columns[QD_COLUMN_SECONDS][i]) ? t->columns[QD_COLUMN_SECONDS][i] : 0.0;
        f->tokens += isfinite(t->columns[QD_COLUMN_TOKENS][i]) ? t->columns[QD_COLUMN_TOKENS][i] : 0.0;
    }
    int64_t best = qd_run_files_best(t);
    if (best < 0)
        return;
    f->best = (int64_t)t->columns[QD_COLUMN_STEP][best];
    f->best_loss = t->columns[QD_COLUMN_VALIDATION][best];
}

qd_status qd_report_figures(const char *folder, qd_run_figures *figures)
{
    one_run r;
    qd_run_figures f = qd_run_figures_default();
    QD_TRY(QD_SIZED_CHECK(figures, qd_run_figures));
    qd_status status = open_run(folder, &r);
    if (status == QD_OK)
        fill_figures(&r, &f);
    close_run(&r);
    if (status == QD_OK)
        QD_SIZED_WRITE(figures, &f);
    return status;
}

/* Keys that say where a run is stored or how it was called, not what it does. */
static bool is_compared(const char *key)
{
    static const char *const others[] = {"run.dir", "run.resume", "run.overwrite", "model.preset"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(key, others[i]) == 0)
            return false;
    return true;
}

/* Calls `each` for every key that differs. */
static qd_status differences(const one_run *runs, int count, qd_report_difference each, void *context)
{
    qd_option_table table = qd_config_table();
    char **values = calloc((size_t)count, sizeof *values);
    qd_status status = values ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to compare %d runs", count);
    for (int k = 0; k < table.count && status == QD_OK; k++) {
        const char *key = table.options[k].key;
        bool differs = false;
        for (int i = 0; i < count && status == QD_OK && is_compared(key); i++) {
            status = qd_options_value_text(runs[i].options, key, &values[i]);
            differs = differs || (status == QD_OK && strcmp(values[i], values[0]) != 0);
        }
        if (status == QD_OK && differs)
            status = each(context, key, (const char *const *)values);
        for (int i = 0; i < count; i++) {
            free(values[i]);
            values[i] = NULL;
        }
    }
    free(values);
    return status;
}

static void close_runs(one_run *runs, int count)
{
    for (int i = 0; runs && i < count; i++)
        close_run(&runs[i]);
    free(runs);
}

static qd_status open_runs(const char *const *folders, int count, one_run **runs)
{
    *runs = calloc((size_t)count, sizeof **runs);
    qd_status status = *runs ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for %d runs", count);
    for (int i = 0; i < count && status == QD_OK; i++)
        status = open_run(folders[i], &(*runs)[i]);
    return status;
}

qd_status qd_report_differences(const char *const *folders, int count, qd_report_difference each, void *context)
{
    one_run *runs = NULL;
    qd_status status = open_runs(folders, count, &runs);
    if (status == QD_OK)
        status = differences(runs, count, each, context);
    close_runs(runs, count);
    return status;
}

/* ---- the page ---- */

typedef struct comparison {
    qd_arena *arena;
    one_run *runs;
    int count;
    qd_report_series *series;
    int series_count;
    const char **cells; /* of the differences: a key and its values, row by row, after the names of the runs */
    int rows, capacity;
} comparison;

static qd_status add_row(void *context, const char *key, const char *const *values)
{
    comparison *c = context;
    int width = c->count + 1;
    if (c->rows == c->capacity) {
        c->capacity = c->capacity ? 2 * c->capacity : 32;
        const char **larger = realloc(c->cells, (size_t)c->capacity * (size_t)width * sizeof *larger);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory to compare %d runs", c->count);
        c->cells = larger;
    }
    const char **row = &c->cells[c->rows++ * width];
    for (int i = 0; i < width; i++)
        if (!(row[i] = qd_arena_strdup(c->arena, i == 0 ? key : values[i - 1])))
            return QD_NO_MEMORY;
    return QD_OK;
}

static qd_status fill_validation(one_run *r)
{
    const qd_table *t = &r->metrics;
    r->x = calloc((size_t)t->count + 1, sizeof *r->x);
    r->y = calloc((size_t)t->count + 1, sizeof *r->y);
    if (!r->x || !r->y)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the validation losses of %s", r->folder);
    for (int64_t i = 0; i < t->count; i++)
        if (isfinite(t->columns[QD_COLUMN_VALIDATION][i])) {
            r->x[r->validations] = t->columns[QD_COLUMN_STEP][i];
            r->y[r->validations++] = t->columns[QD_COLUMN_VALIDATION][i];
        }
    return QD_OK;
}

static qd_status fill_series(comparison *c)
{
    static const struct {
        const char *chart, *unit;
        int column;
    } charts[] = {{"loss", "nats/token", QD_COLUMN_LOSS},
                  {"learning rate", "", QD_COLUMN_LR},
                  {"gradient norm", "", QD_COLUMN_GRAD_NORM},
                  {"speed", "tokens/s", QD_COLUMN_SPEED}};
    enum { CHARTS = sizeof charts / sizeof *charts };
    c->series = QD_ARENA_NEW(c->arena, qd_report_series, (size_t)c->count * (CHARTS + 1));
    if (!c->series)
        return QD_NO_MEMORY;
    for (int k = 0; k < CHARTS; k++)
        for (int i = 0; i < c->count; i++) {
            one_run *r = &c->runs[i];
            if (r->metrics.count > 0)
                c->series[c->series_count++] = (qd_report_series){
                    .chart = charts[k].chart, .name = r->name, .x_name = "step", .unit = charts[k].unit,
                    .x = r->metrics.columns[QD_COLUMN_STEP], .y = r->metrics.columns[charts[k].column], .count = r->metrics.count,
                    .log_y = charts[k].column == QD_COLUMN_GRAD_NORM};
            if (charts[k].column != QD_COLUMN_LOSS || r->validations == 0)
                continue;
            char *name = qd_arena_printf(c->arena, "%s, validation", r->name);
            if (!name)
                return QD_NO_MEMORY;
            c->series[c->series_count++] = (qd_report_series){
                .chart = "loss", .name = name, .x_name = "step", .unit = "nats/token", .x = r->x, .y = r->y, .count = r->validations};
        }
    return QD_OK;
}

/* The table of the runs: a head, then a row for each. */
enum { RUN_COLUMNS = 9 };
static qd_status fill_table(comparison *c, const char ***cells)
{
    static const char *const head[RUN_COLUMNS] = {"run",          "model",  "layout",   "steps",        "final loss",
                                                  "best validation", "after step", "tokens/s", "time in steps"};
    const char **out = QD_ARENA_NEW(c->arena, const char *, (size_t)(c->count + 1) * RUN_COLUMNS);
    if (!out)
        return QD_NO_MEMORY;
    memcpy(out, head, sizeof head);
    for (int i = 0; i < c->count; i++) {
        qd_run_figures f = qd_run_figures_default();
        char rate[32] = "–", seconds[32];
        fill_figures(&c->runs[i], &f);
        if (isfinite(f.tokens_per_second))
            qd_text_count(f.tokens_per_second, rate, sizeof rate);
        qd_text_seconds(f.seconds, seconds, sizeof seconds);
        const char **row = &out[(i + 1) * RUN_COLUMNS];
        row[0] = c->runs[i].name;
        row[1] = qd_arena_strdup(c->arena, f.model);
        row[2] = qd_arena_strdup(c->arena, f.layout);
        row[3] = qd_arena_printf(c->arena, "%lld of %lld", (long long)f.steps, (long long)f.steps_planned);
        row[4] = isfinite(f.loss) ? qd_arena_printf(c->arena, "%.4f", f.loss) : "–";
        row[5] = f.best >= 0 ? qd_arena_printf(c->arena, "%.4f", f.best_loss) : "–";
        row[6] = f.best >= 0 ? qd_arena_printf(c->arena, "%lld", (long long)f.best) : "–";
        row[7] = qd_arena_strdup(c->arena, rate);
        row[8] = qd_arena_strdup(c->arena, seconds);
        for (int k = 0; k < RUN_COLUMNS; k++)
            if (!row[k])
                return QD_NO_MEMORY;
    }
    *cells = out;
    return QD_OK;
}

/* Names of runs must be different: the whole path where the last component is not enough. */
static qd_status name_runs(comparison *c)
{
    for (int i = 0; i < c->count; i++)
        if (!(c->runs[i].name = qd_run_files_title(c->arena, c->runs[i].folder)))
            return QD_NO_MEMORY;
    for (int i = 0; i < c->count; i++)
        for (int k = 0; k < i; k++)
            if (strcmp(c->runs[i].name, c->runs[k].name) == 0) {
                for (int n = 0; n < c->count; n++)
                    c->runs[n].name = c->runs[n].folder;
                return QD_OK;
            }
    return QD_OK;
}

static qd_status write_page(comparison *c, const char *path)
{
    const char **cells = NULL, **names = QD_ARENA_NEW(c->arena, const char *, (size_t)c->count);
    qd_report report = qd_report_default();
    if (!names)
        return QD_NO_MEMORY;
    QD_TRY(name_runs(c));
    for (int i = 0; i < c->count; i++) {
        names[i] = c->runs[i].name;
        QD_TRY(fill_validation(&c->runs[i]));
    }
    QD_TRY(add_row(c, "key", names));
    QD_TRY(differences(c->runs, c->count, add_row, c));
    QD_TRY(fill_series(c));
    QD_TRY(fill_table(c, &cells));
    char *title = qd_arena_printf(c->arena, "%d runs", c->count);
    if (!title)
        return QD_NO_MEMORY;
    const qd_report_table tables[] = {
        {.title = "Runs", .lead = "The final loss is a mean over the last steps. Speed is the median over the steps.",
         .cells = cells, .columns = RUN_COLUMNS, .rows = c->count + 1},
        {.title = "Differences of configuration", .lead = c->rows > 1 ? "Keys that do not have the same value in all runs."
                                                                      : "All keys have the same value in all runs.",
         .cells = c->cells, .columns = c->count + 1, .rows = c->rows}};
    report.title = title;
    report.series = c->series;
    report.series_count = c->series_count;
    report.tables = tables;
    report.table_count = 2;
    return qd_report_write(&report, path);
}

/* comparison.html next to the first run. */
static qd_status default_path(const char *folder, qd_run_files_name path)
{
    size_t end = strlen(folder);
    while (end > 1 && folder[end - 1] == '/')
        end--;
    while (end > 0 && folder[end - 1] != '/')
        end--;
    int n = snprintf(path, sizeof(qd_run_files_name), "%.*scomparison.html", (int)end, folder);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "the name of the folder is too long: %.64s…", folder);
}

qd_status qd_report_compare(const char *const *folders, int count, const char *path, char **written)
{
    comparison c = {.count = count};
    qd_run_files_name own;
    qd_status status = count > 0 ? QD_OK : QD_FAIL(QD_USAGE, "there are no runs to compare");
    if (status == QD_OK && !path)
        status = default_path(folders[0], own);
    if (status == QD_OK)
        status = qd_arena_create(&c.arena);
    if (status == QD_OK)
        status = open_runs(folders, count, &c.runs);
    if (status == QD_OK)
        status = write_page(&c, path ? path : own);
    if (status == QD_OK && written && !(*written = strdup(path ? path : own)))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the name of a file");
    free(c.cells);
    close_runs(c.runs, count);
    qd_arena_destroy(c.arena);
    return status;
}
