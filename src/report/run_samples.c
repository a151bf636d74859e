/* Sample texts of a run (samples.jsonl) as a table, the newest first. */
#define _GNU_SOURCE /* memrchr */
#include "base/text/json.h"
#include "report/run_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COLUMNS = 3, MOST_ROWS = 60, MOST_BYTES = 4 << 20 };

static qd_status keep_cell(qd_run_report *r, const qd_json_node *line, const char *key, const char **cell)
{
    const char *text = qd_json_as_string(qd_json_member(line, key));
    return qd_run_keep(cell, qd_arena_strdup(r->arena, text ? text : ""));
}

/* One row; false: the line is not one of ours. */
static qd_status read_line(qd_run_report *r, const char *name, const char *line, size_t length, const char **cells, bool *read)
{
    qd_json *document = NULL;
    int64_t step;
    *read = false;
    if (qd_json_load_text(name, line, length, &document) != QD_OK) {
        qd_error_clear();
        return QD_OK;
    }
    const qd_json_node *root = qd_json_root(document);
    qd_status status = QD_OK;
    if (qd_json_as_int(qd_json_member(root, "step"), &step)) {
        *read = true;
        status = qd_run_keep(&cells[0], qd_arena_printf(r->arena, "%lld", (long long)step));
        if (status == QD_OK)
            status = keep_cell(r, root, "prompt", &cells[1]);
        if (status == QD_OK)
            status = keep_cell(r, root, "text", &cells[2]);
    }
    qd_json_destroy(document);
    return status;
}

/* The end of the file, from the beginning of a line. *text is NULL if the file is missing. */
static qd_status read_end(qd_run_report *r, int folder, const char *name, char **text, size_t *length, bool *whole)
{
    struct stat info;
    int fd;
    *text = NULL;
    QD_TRY(qd_run_file_open(r, folder, name, &fd));
    if (fd < 0)
        return QD_OK;
    off_t bytes = fstat(fd, &info) == 0 ? info.st_size : 0, from = bytes > MOST_BYTES ? bytes - MOST_BYTES : 0;
    char *end = malloc((size_t)(bytes - from) + 1);
    ssize_t got = end ? pread(fd, end, (size_t)(bytes - from), from) : -1;
    close(fd);
    if (got < 0) {
        free(end);
        return QD_FAIL(end ? QD_IO : QD_NO_MEMORY, "%s/%s: cannot be read", r->path, name);
    }
    end[got] = '\0';
    char *first = from > 0 ? memchr(end, '\n', (size_t)got) : NULL;
    size_t skipped = first ? (size_t)(first + 1 - end) : 0;
    memmove(end, end + skipped, (size_t)got - skipped + 1);
    *text = end;
    *length = (size_t)got - skipped;
    *whole = from == 0;
    return QD_OK;
}

qd_status qd_run_samples(qd_run_report *r, int folder, const char *name)
{
    char *text = NULL;
    size_t length;
    bool whole;
    qd_status status = QD_OK;
    QD_TRY(read_end(r, folder, name, &text, &length, &whole));
    if (!text)
        return QD_OK;
    const char **cells = QD_ARENA_NEW(r->arena, const char *, (MOST_ROWS + 1) * COLUMNS);
    int rows = 1;
    if (cells) {
        cells[0] = "step";
        cells[1] = "prompt";
        cells[2] = "text";
    } else {
        status = QD_NO_MEMORY;
    }
    /* From the end; a line that is being written has no line end yet. */
    char *end = length > 0 ? memrchr(text, '\n', length) : NULL;
    while (end && rows <= MOST_ROWS && status == QD_OK) {
        char *before = end > text ? memrchr(text, '\n', (size_t)(end - text)) : NULL, *line = before ? before + 1 : text;
        bool read;
        status = read_line(r, name, line, (size_t)(end - line), &cells[rows * COLUMNS], &read);
        rows += read;
        end = before;
    }
    bool all = whole && !end;
    free(text);
    if (status != QD_OK || rows == 1)
        return status;
    r->samples = (qd_report_table){.title = "Sample texts", .cells = cells, .columns = COLUMNS, .rows = rows,
                                   .lead = all ? "What the model wrote after a step, the newest first."
                                               : "What the model wrote after a step, the newest first; samples.jsonl has all."};
    r->report.tables = &r->samples;
    r->report.table_count = 1;
    return QD_OK;
}
