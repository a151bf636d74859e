/* Reads configuration and metrics of a run folder. */
#include "report/run_files.h"

#include "base/file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

qd_status qd_run_files_lines(qd_table *t, const char *path)
{
    int fd;
    int64_t bytes;
    QD_TRY(qd_file_open(path, &fd, &bytes));
    qd_status status = qd_table_follow(t, fd, path, false);
    close(fd);
    return status;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double qd_run_files_median(const qd_table *t, int column)
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

double qd_run_files_loss(const qd_table *t, int64_t *count)
{
    double sum = 0.0;
    *count = last_steps(t->count);
    for (int64_t i = t->count - *count; i < t->count; i++)
        sum += t->columns[QD_COLUMN_LOSS][i];
    return sum / (double)*count; /* not finite if one of them is not */
}

int64_t qd_run_files_best(const qd_table *t)
{
    const double *losses = t->columns[QD_COLUMN_VALIDATION];
    int64_t best = -1;
    for (int64_t i = 0; i < t->count; i++)
        if (isfinite(losses[i]) && (best < 0 || losses[i] < losses[best]))
            best = i;
    return best;
}
