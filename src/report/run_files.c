/* Reads configuration and metrics of a run folder. */
#include "report/run_files.h"

#include "base/file.h"
#include "base/text/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const column_keys[QD_RUN_COLUMNS] = {
    [QD_RUN_STEP] = "step",          [QD_RUN_LOSS] = "loss",         [QD_RUN_GRAD_NORM] = "grad_norm",
    [QD_RUN_LR] = "lr",              [QD_RUN_TOKENS] = "tokens",     [QD_RUN_SECONDS] = "step_seconds",
    [QD_RUN_SPEED] = "tokens_per_second", [QD_RUN_MFU] = "mfu",      [QD_RUN_VALIDATION] = "validation_loss",
};

qd_status qd_run_files_path(const char *folder, const char *name, qd_run_files_name path)
{
    int n = snprintf(path, sizeof(qd_run_files_name), "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "the name of the folder is too long: %.64s…", folder);
}

char *qd_run_files_title(qd_arena *arena, const char *folder)
{
    size_t end = strlen(folder);
    while (end > 1 && folder[end - 1] == '/')
        end--;
    size_t begin = end;
    while (begin > 0 && folder[begin - 1] != '/')
        begin--;
    return qd_arena_printf(arena, "%.*s", (int)(end - begin), folder + begin);
}

qd_status qd_run_files_config(const char *folder, char **text, qd_options **options, qd_config *config)
{
    qd_run_files_name path, effective; /* the actual layout, also if mpirun determined it; earlier versions had one file */
    size_t length;
    qd_option_table keys = qd_config_table();
    QD_TRY(qd_run_files_path(folder, "config.yaml", path));
    if (access(path, R_OK) != 0)
        return QD_FAIL(QD_USAGE, "%s: this is not a run folder: it has no config.yaml", folder);
    QD_TRY(qd_file_read(path, 1 << 20, text, &length));
    QD_TRY(qd_options_create(&keys, 1, options));
    QD_TRY(qd_run_files_path(folder, "effective.yaml", effective));
    QD_TRY(qd_options_load(*options, access(effective, R_OK) == 0 ? effective : path));
    return qd_config_resolve(*options, 0, config);
}

static qd_status grow_columns(qd_run_table *t)
{
    int64_t capacity = t->capacity ? t->capacity * 2 : 1024;
    for (int i = 0; i < QD_RUN_COLUMNS; i++) {
        double *column = realloc(t->columns[i], (size_t)capacity * sizeof *column);
        if (!column)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %lld steps", (long long)capacity);
        t->columns[i] = column;
    }
    t->capacity = capacity;
    return QD_OK;
}

static qd_status read_line(qd_run_table *t, const char *name, const char *line, size_t length)
{
    qd_json *document = NULL;
    if (t->count == t->capacity)
        QD_TRY(grow_columns(t));
    QD_TRY(qd_json_load_text(name, line, length, &document));
    for (int i = 0; i < QD_RUN_COLUMNS; i++)
        if (!qd_json_as_double(qd_json_member(qd_json_root(document), column_keys[i]), &t->columns[i][t->count]))
            t->columns[i][t->count] = NAN;
    qd_json_destroy(document);
    if (isnan(t->columns[QD_RUN_STEP][t->count]))
        return QD_FAIL(QD_USAGE, "%s: \"step\" is missing", name);
    if (t->count > 0 && t->columns[QD_RUN_STEP][t->count] < t->columns[QD_RUN_STEP][t->count - 1])
        return QD_FAIL(QD_USAGE, "%s: lines must be in increasing order of steps", name);
    t->count++;
    return QD_OK;
}

/* Reads complete lines only; a run in progress may be writing another. */
qd_status qd_run_files_lines(qd_run_table *t, const char *path)
{
    qd_run_files_name name;
    char *text = NULL;
    size_t length;
    qd_status status = QD_OK;
    QD_TRY(qd_file_read(path, SIZE_MAX / 2, &text, &length));
    int64_t number = 1;
    for (char *line = text, *end; status == QD_OK && (end = strchr(line, '\n')) != NULL; line = end + 1, number++) {
        snprintf(name, sizeof name, "%.4000s, line %lld", path, (long long)number);
        status = read_line(t, name, line, (size_t)(end - line));
    }
    free(text);
    return status;
}

void qd_run_files_free(qd_run_table *t)
{
    for (int i = 0; i < QD_RUN_COLUMNS; i++)
        free(t->columns[i]);
    memset(t, 0, sizeof *t);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double qd_run_files_median(const qd_run_table *t, int column)
{
    double *values = malloc(((size_t)t->count + 1) * sizeof *values), result = NAN;
    int64_t n = 0;
    for (int64_t i = 0; values && i < t->count; i++)
        if (isfinite(t->columns[column][i]))
            values[n++] = t->columns[column][i];
    if (n > 0) {
        qsort(values, (size_t)n, sizeof *values, by_value);
        result = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
    }
    free(values);
    return result;
}

/* One step's loss says as much about its batch as about the model. The last twentieth of the steps,
 * five at least, but no more than a quarter of them: in a short run the loss still falls. */
static int64_t last_steps(int64_t steps)
{
    int64_t count = steps / 20 > 5 ? steps / 20 : 5, quarter = steps / 4 > 1 ? steps / 4 : 1;
    return count < quarter ? count : quarter;
}

double qd_run_files_loss(const qd_run_table *t, int64_t *count)
{
    double sum = 0.0;
    *count = last_steps(t->count);
    for (int64_t i = t->count - *count; i < t->count; i++)
        sum += t->columns[QD_RUN_LOSS][i];
    return sum / (double)*count; /* not finite if one of them is not */
}

int64_t qd_run_files_best(const qd_run_table *t)
{
    const double *losses = t->columns[QD_RUN_VALIDATION];
    int64_t best = -1;
    for (int64_t i = 0; i < t->count; i++)
        if (isfinite(losses[i]) && (best < 0 || losses[i] < losses[best]))
            best = i;
    return best;
}
