/* Builds the report of a run folder, and follows it: config.yaml, metrics.jsonl, evaluations.jsonl,
 * memory.json, trace.json, starts.jsonl, samples.jsonl. */
#include "base/file.h"
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "base/text/text.h"
#include "report/report_impl.h"
#include "report/run_files.h"
#include "report/run_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const file_names[QD_RUN_FILE_COUNT] = {
    [QD_RUN_CONFIG] = "config.yaml",
    [QD_RUN_EFFECTIVE] = "effective.yaml",
    [QD_RUN_MEMORY] = "memory.json",
    [QD_RUN_TRACE] = "trace.json",
    [QD_RUN_STARTS] = "starts.jsonl",
    [QD_RUN_SAMPLES] = "samples.jsonl",
};

qd_status qd_run_file_open(const qd_run_report *r, int folder, const char *name, int *fd)
{
    struct stat info;
    *fd = openat(folder, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY | (r->live ? O_NOFOLLOW : 0));
    if (*fd < 0 && errno == ENOENT)
        return QD_OK;
    if (*fd < 0)
        return QD_FAIL(errno == EMFILE || errno == ENFILE ? QD_SYSTEM : QD_USAGE, "%s/%s: cannot be opened: %s", r->path, name,
                       errno == ELOOP ? "it is a symbolic link" : strerror(errno));
    if (fstat(*fd, &info) == 0 && S_ISREG(info.st_mode))
        return QD_OK;
    close(*fd);
    *fd = -1;
    return QD_FAIL(QD_USAGE, "%s/%s: is not a regular file", r->path, name);
}

qd_status qd_run_file_read(const qd_run_report *r, int folder, const char *name, size_t most, char **text, size_t *length)
{
    char path[64], *all = NULL;
    int fd;
    *text = NULL;
    QD_TRY(qd_run_file_open(r, folder, name, &fd));
    if (fd < 0)
        return QD_OK;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd); /* the open file, whatever its name refers to by now */
    qd_status status = qd_file_read(path, most, &all, length);
    close(fd);
    if (status != QD_OK)
        return qd_error_prefix(status, "%s/%s: ", r->path, name);
    *text = all;
    return QD_OK;
}

static qd_run_stamp stamp_of(int folder, const char *name)
{
    struct stat info;
    qd_run_stamp stamp;
    memset(&stamp, 0, sizeof stamp);
    if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
        stamp.inode = info.st_ino;
        stamp.bytes = info.st_size;
        stamp.changed = info.st_mtim;
    }
    return stamp;
}

/* Whether a file has changed since the last call. */
static bool has_changed(qd_run_report *r, int folder)
{
    bool changed = false;
    for (int i = 0; i < QD_RUN_FILE_COUNT; i++) {
        qd_run_stamp now = stamp_of(folder, file_names[i]);
        changed = changed || memcmp(&now, &r->stamps[i], sizeof now) != 0;
        r->stamps[i] = now;
    }
    return changed;
}

static qd_status read_config(qd_run_report *r, int folder)
{
    char *effective = NULL, name[4200];
    size_t length, own;
    qd_option_table keys = qd_config_table();
    QD_TRY(qd_run_file_read(r, folder, file_names[QD_RUN_CONFIG], 1 << 20, &r->config_text, &length));
    if (!r->config_text)
        return QD_FAIL(QD_USAGE, "%s: this is not a run folder: it has no config.yaml", r->path);
    QD_TRY(qd_options_create(&keys, 1, &r->options));
    /* The actual layout, also if mpirun determined it; earlier versions had one file. */
    QD_TRY(qd_run_file_read(r, folder, file_names[QD_RUN_EFFECTIVE], 1 << 20, &effective, &own));
    snprintf(name, sizeof name, "%.4000s/%s", r->path, file_names[effective ? QD_RUN_EFFECTIVE : QD_RUN_CONFIG]);
    qd_status status = qd_options_load_text(r->options, name, effective ? effective : r->config_text, effective ? own : length);
    free(effective);
    QD_TRY(status);
    QD_TRY(qd_config_resolve(r->options, 0, &r->config));
    r->plan = qd_check_report_default();
    return qd_check(r->options, 0, &r->plan);
}

static qd_status describe(qd_run_report *r)
{
    const qd_check_report *p = &r->plan;
    char parameters[32], tokens[32];
    qd_text_count((double)p->parameters, parameters, sizeof parameters);
    qd_text_count((double)p->tokens_per_step, tokens, sizeof tokens);
    QD_TRY(qd_run_keep(&r->report.title, qd_run_files_title(r->arena, r->path)));
    r->report.config = r->config_text;
    return qd_run_keep(&r->report.subtitle,
                       qd_arena_printf(r->arena, "%s, %s parameters · %lld × %lld = %s tokens per step", p->model, parameters,
                                       (long long)p->global_batch, (long long)p->seq, tokens));
}

/* "pp 0 · dp 3": coordinates on the axes that have more than one rank. */
static qd_status place_of(qd_run_report *r, const qd_mesh *mesh, int rank, const char **place)
{
    int coords[QD_AXIS_COUNT];
    qd_strbuf text = {0};
    qd_mesh_coords(mesh, rank, coords);
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--)
        if (mesh->degree[axis] > 1)
            qd_strbuf_printf(&text, "%s%s %d", text.length ? " · " : "", qd_axis_name((qd_axis)axis), coords[axis]);
    qd_status status = text.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the coordinates of a rank")
                                   : qd_run_keep(place, qd_arena_strdup(r->arena, text.length ? text.data : ""));
    qd_strbuf_free(&text);
    return status;
}

static qd_status place_ranks(qd_run_report *r)
{
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
    return QD_OK;
}

static qd_status read_trace(qd_run_report *r, int folder)
{
    char *text, name[4200];
    size_t length;
    QD_TRY(qd_run_file_read(r, folder, file_names[QD_RUN_TRACE], SIZE_MAX / 2, &text, &length));
    if (!text)
        return QD_OK;
    snprintf(name, sizeof name, "%.4000s/%s", r->path, file_names[QD_RUN_TRACE]);
    qd_status status = qd_report_trace_load_text(name, text, "measured", &r->measured);
    free(text);
    if (status == QD_USAGE && r->live) { /* it is being written */
        qd_error_clear();
        r->trace_failed = true;
        return QD_OK;
    }
    QD_TRY(status);
    r->timeline = *qd_report_trace_timeline(r->measured);
    return place_ranks(r);
}

/* A mark for each time the run was resumed. Earlier versions wrote no such file. */
static qd_status read_start(qd_run_report *r, const qd_json *document, char *before, size_t size)
{
    const char *layout = qd_json_as_string(qd_json_member(qd_json_root(document), "layout"));
    double step;
    bool known = qd_json_as_double(qd_json_member(qd_json_root(document), "step"), &step) && layout;
    if (known && step > 0.0 && r->mark_count < QD_RUN_MARKS) {
        qd_report_mark *mark = &r->marks[r->mark_count++];
        mark->x = step;
        QD_TRY(qd_run_keep(&mark->text, strcmp(layout, before) == 0 || !before[0]
                                            ? qd_arena_strdup(r->arena, "resumed")
                                            : qd_arena_printf(r->arena, "resumed on %s, before on %s", layout, before)));
    }
    snprintf(before, size, "%s", known ? layout : "");
    return QD_OK;
}

static qd_status read_starts(qd_run_report *r, int folder)
{
    char *text, name[4200], before[160] = "";
    size_t length;
    qd_status status = QD_OK;
    QD_TRY(qd_run_file_read(r, folder, file_names[QD_RUN_STARTS], 64 << 20, &text, &length));
    snprintf(name, sizeof name, "%.4000s/%s", r->path, file_names[QD_RUN_STARTS]);
    for (char *line = text, *end; line && status == QD_OK && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        qd_json *document = NULL;
        status = qd_json_load_text(name, line, (size_t)(end - line), &document);
        if (status == QD_OK)
            status = read_start(r, document, before, sizeof before);
        qd_json_destroy(document);
    }
    free(text);
    return status;
}

static void unload(qd_run_report *r)
{
    qd_report_trace_destroy(r->measured);
    qd_options_destroy(r->options);
    free(r->config_text);
    qd_arena_destroy(r->arena);
    r->measured = NULL;
    r->options = NULL;
    r->config_text = NULL;
    r->arena = NULL;
    r->one_process = r->trace_failed = false;
    r->mark_count = 0;
    r->memory = qd_report_memory_default();
    r->report = qd_report_default();
}

static qd_status load(qd_run_report *r, int folder)
{
    unload(r);
    r->version++;
    QD_TRY(qd_arena_create(&r->arena));
    QD_TRY(read_config(r, folder));
    QD_TRY(describe(r));
    QD_TRY(qd_run_memory(r, folder));
    QD_TRY(read_starts(r, folder));
    QD_TRY(qd_run_samples(r, folder, file_names[QD_RUN_SAMPLES]));
    return read_trace(r, folder);
}

static qd_status follow(const qd_run_report *r, int folder, const char *file, bool required, qd_table *t)
{
    char name[4200];
    int fd;
    QD_TRY(qd_run_file_open(r, folder, file, &fd));
    if (fd < 0 && required && !r->live)
        return QD_FAIL(QD_USAGE, "%s/%s: cannot be opened: %s", r->path, file, strerror(ENOENT));
    if (fd < 0) {
        int64_t rewritten = t->rewritten + (t->count > 0);
        qd_table_free(t);
        t->rewritten = rewritten;
        return QD_OK;
    }
    snprintf(name, sizeof name, "%.4000s/%s", r->path, file);
    qd_status status = qd_table_follow(t, fd, name, r->live);
    close(fd);
    return status;
}

qd_status qd_run_report_refresh(qd_run_report *r, int folder)
{
    if (has_changed(r, folder))
        QD_TRY(load(r, folder));
    QD_TRY(follow(r, folder, "metrics.jsonl", true, &r->metrics));
    /* evaluations.jsonl contains the output of `eval --json`, if the user stored it there. */
    QD_TRY(follow(r, folder, "evaluations.jsonl", false, &r->evaluations));
    return qd_run_fill_figures(r);
}

qd_status qd_run_report_open(int folder, const char *path, bool live, qd_run_report **run)
{
    qd_run_report *r = calloc(1, sizeof *r);
    if (!r || !(r->path = strdup(path))) {
        free(r);
        return QD_FAIL(QD_NO_MEMORY, "no memory for the report of %s", path);
    }
    r->live = live;
    unload(r);
    qd_status status = qd_run_report_refresh(r, folder);
    if (status == QD_OK && r->version == 0) /* no file at all */
        status = load(r, folder);
    if (status != QD_OK) {
        qd_run_report_close(r);
        return status;
    }
    *run = r;
    return QD_OK;
}

void qd_run_report_close(qd_run_report *r)
{
    if (!r)
        return;
    unload(r);
    qd_table_free(&r->metrics);
    qd_table_free(&r->evaluations);
    qd_arena_destroy(r->texts);
    free(r->path);
    free(r);
}

const qd_report *qd_run_report_view(const qd_run_report *r)
{
    return &r->report;
}

int64_t qd_run_report_rows(const qd_run_report *r)
{
    return r->metrics.count;
}

int64_t qd_run_report_rewritten(const qd_run_report *r)
{
    return r->metrics.rewritten;
}

int64_t qd_run_report_version(const qd_run_report *r)
{
    return r->version;
}

qd_status qd_run_report_put_progress(const qd_run_report *r, int64_t row, qd_json_writer *w)
{
    qd_report part = r->report;
    qd_report_series series[QD_RUN_SERIES];
    row = row < 0 || row > r->metrics.count ? 0 : row;
    for (int i = 0; i < part.series_count; i++) {
        series[i] = part.series[i];
        if (series[i].x != r->metrics.columns[QD_COLUMN_STEP])
            continue;
        series[i].x += row;
        series[i].y += row;
        series[i].count -= row;
    }
    part.series = series;
    qd_json_put_int(w, "from", row);
    qd_json_put_int(w, "rows", r->metrics.count);
    return qd_report_put_progress(w, &part);
}

static qd_status write_run(qd_run_report *r, const char *simulated, const char *path)
{
    qd_report_trace *trace = NULL;
    if (simulated)
        QD_TRY(qd_report_trace_load(simulated, "simulated", &trace));
    r->report.simulated = trace ? qd_report_trace_timeline(trace) : NULL;
    qd_status status = qd_report_write(&r->report, path);
    r->report.simulated = NULL;
    qd_report_trace_destroy(trace);
    return status;
}

qd_status qd_report_run(const char *folder, const char *simulated, const char *path, char **written)
{
    char own[PATH_MAX];
    qd_run_report *r = NULL;
    int n = snprintf(own, sizeof own, "%s/report.html", folder), fd;
    if (!path && (n < 0 || n >= PATH_MAX))
        return QD_FAIL(QD_USAGE, "the name of the folder is too long: %.64s…", folder);
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_USAGE, "%s: this is not a run folder: it has no config.yaml", folder);
    qd_status status = qd_run_report_open(fd, folder, false, &r);
    close(fd);
    if (status == QD_OK)
        status = write_run(r, simulated, path ? path : own);
    if (status == QD_OK && written && !(*written = strdup(path ? path : own)))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the name of a file");
    qd_run_report_close(r);
    return status;
}
