/* Reads JSON lines into columns, by offset, so that following a run costs what it has appended. */
#include "report/table.h"

#include "base/text/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const column_keys[QD_COLUMN_COUNT] = {
    [QD_COLUMN_STEP] = "step",
    [QD_COLUMN_LOSS] = "loss",
    [QD_COLUMN_GRAD_NORM] = "grad_norm",
    [QD_COLUMN_LR] = "lr",
    [QD_COLUMN_TOKENS] = "tokens",
    [QD_COLUMN_SECONDS] = "step_seconds",
    [QD_COLUMN_SPEED] = "tokens_per_second",
    [QD_COLUMN_MFU] = "mfu",
    [QD_COLUMN_VALIDATION] = "validation_loss",
    [QD_COLUMN_MEMORY] = "memory_peak_bytes",
    [QD_COLUMN_MARGIN] = "reward_margin",
    [QD_COLUMN_ACCURACY] = "reward_accuracy",
};

enum { PIECE = 1 << 18, LONGEST_LINE = 1 << 24 };

static qd_status grow(qd_table *t)
{
    int64_t capacity = t->capacity ? t->capacity * 2 : 1024;
    for (int i = 0; i < QD_COLUMN_COUNT; i++) {
        double *column = realloc(t->columns[i], (size_t)capacity * sizeof *column);
        if (!column)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %lld steps", (long long)capacity);
        t->columns[i] = column;
    }
    t->capacity = capacity;
    return QD_OK;
}

/* Drops rows from this step on: a resumed run has repeated them. */
static void rewind_to(qd_table *t, double step)
{
    int64_t before = t->count;
    while (t->count > 0 && t->columns[QD_COLUMN_STEP][t->count - 1] >= step)
        t->count--;
    t->rewritten += t->count < before;
}

static qd_status add_row(qd_table *t, const qd_json *document, const char *name, bool tolerant)
{
    double *steps;
    if (t->count == t->capacity)
        QD_TRY(grow(t));
    for (int i = 0; i < QD_COLUMN_COUNT; i++)
        if (!qd_json_as_double(qd_json_member(qd_json_root(document), column_keys[i]), &t->columns[i][t->count]))
            t->columns[i][t->count] = NAN;
    steps = t->columns[QD_COLUMN_STEP];
    if (isnan(steps[t->count])) {
        t->skipped++;
        return tolerant ? QD_OK : QD_FAIL(QD_USAGE, "%s: \"step\" is missing", name);
    }
    if (t->count > 0 && steps[t->count] < steps[t->count - 1]) {
        int64_t row = t->count;
        if (!tolerant)
            return QD_FAIL(QD_USAGE, "%s: lines must be in increasing order of steps", name);
        rewind_to(t, steps[row]);
        for (int i = 0; i < QD_COLUMN_COUNT; i++)
            t->columns[i][t->count] = t->columns[i][row];
    }
    t->count++;
    return QD_OK;
}

static qd_status add_line(qd_table *t, const char *file, const char *line, size_t length, bool tolerant)
{
    char name[4200];
    qd_json *document = NULL;
    snprintf(name, sizeof name, "%.4000s, line %lld", file, (long long)++t->lines);
    qd_status status = qd_json_load_text(name, line, length, &document);
    if (status == QD_OK)
        status = add_row(t, document, name, tolerant);
    else if (tolerant && status == QD_USAGE) {
        qd_error_clear();
        t->skipped++;
        status = QD_OK;
    }
    qd_json_destroy(document);
    return status;
}

static ssize_t read_at(int fd, void *out, size_t bytes, int64_t offset)
{
    ssize_t n;
    do
        n = pread(fd, out, bytes, (off_t)offset);
    while (n < 0 && errno == EINTR);
    return n;
}

/* Whether the bytes before the offset are those that were read. A resumed run truncates the file
 * and may have appended more than it removed. */
static bool is_same(const qd_table *t, int fd)
{
    char now[sizeof t->last];
    struct stat info;
    if (fstat(fd, &info) != 0 || (int64_t)info.st_size < t->offset)
        return false;
    return read_at(fd, now, (size_t)t->last_bytes, t->offset - t->last_bytes) == t->last_bytes &&
           memcmp(now, t->last, (size_t)t->last_bytes) == 0;
}

static void start_over(qd_table *t)
{
    t->rewritten += t->count > 0;
    t->count = t->offset = t->lines = t->skipped = 0;
    t->last_bytes = 0;
}

/* The whole lines of a piece; *used: their bytes. */
static qd_status add_lines(qd_table *t, const char *name, const char *piece, size_t bytes, bool tolerant, size_t *used)
{
    const char *line = piece, *end;
    while ((end = memchr(line, '\n', bytes - (size_t)(line - piece))) != NULL) {
        QD_TRY(add_line(t, name, line, (size_t)(end - line), tolerant));
        line = end + 1;
    }
    *used = (size_t)(line - piece);
    if (*used > 0) {
        t->last_bytes = *used < sizeof t->last ? (int)*used : (int)sizeof t->last;
        memcpy(t->last, line - t->last_bytes, (size_t)t->last_bytes);
    }
    t->offset += (int64_t)*used;
    return QD_OK;
}

qd_status qd_table_follow(qd_table *t, int fd, const char *name, bool tolerant)
{
    size_t capacity = PIECE, used;
    char *piece = NULL;
    ssize_t n;
    qd_status status = QD_OK;
    if (t->offset > 0 && !is_same(t, fd))
        start_over(t);
    for (;;) {
        char *larger = realloc(piece, capacity);
        if (!larger)
            QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "%s: no memory for a line", name));
        piece = larger;
        n = read_at(fd, piece, capacity, t->offset);
        if (n < 0)
            QD_TRY_DONE(QD_FAIL(QD_IO, "%s: cannot be read: %s", name, strerror(errno)));
        QD_TRY_DONE(add_lines(t, name, piece, (size_t)n, tolerant, &used));
        if ((size_t)n < capacity)
            break;
        if (used == 0 && (capacity *= 2) > LONGEST_LINE)
            QD_TRY_DONE(QD_FAIL(QD_USAGE, "%s, line %lld: is longer than %d MiB", name, (long long)t->lines + 1, LONGEST_LINE >> 20));
    }
done:
    free(piece);
    return status;
}

void qd_table_free(qd_table *t)
{
    for (int i = 0; i < QD_COLUMN_COUNT; i++)
        free(t->columns[i]);
    memset(t, 0, sizeof *t);
}
