/* Writes metrics.csv and TensorBoard's event files, a step at a time. */
#include "train/record/recorder.h"

#include "base/file.h"
#include "base/text/strbuf.h"
#include "train/record/tfevents.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CSV_FILE "metrics.csv"
#define EVENT_FOLDER "tensorboard"
#define EVENT_PREFIX "events.out.tfevents."

typedef char file_path[PATH_MAX];

/* A file that gets whole records only. */
typedef struct output {
    int fd; /* -1: not asked for */
    file_path path;
    off_t whole; /* bytes of whole records */
    bool failed; /* a warning was given */
} output;

struct qd_recorder {
    file_path folder;
    output csv, events;
    qd_strbuf record;
    char warning[512];
};

static qd_status path_in(const char *folder, const char *name, file_path path)
{
    int n = snprintf(path, sizeof(file_path), "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "run.dir is too long: %.64s…", folder);
}

static double wall_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* False: the disk refused, and the file ends with its last whole record. */
static bool append(output *o, const qd_strbuf *record)
{
    if (ftruncate(o->fd, o->whole) != 0 || record->failed)
        return false;
    for (size_t at = 0; at < record->length;) {
        ssize_t n = pwrite(o->fd, record->data + at, record->length - at, o->whole + (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            int error = n < 0 ? errno : ENOSPC;
            (void)!ftruncate(o->fd, o->whole);
            errno = error;
            return false;
        }
        at += (size_t)n;
    }
    o->whole += (off_t)record->length;
    return true;
}

static void close_output(output *o)
{
    if (o->fd >= 0)
        close(o->fd);
    o->fd = -1;
}

/* ---- figures ---- */

/* A figure of a step, by its names in metrics.csv and in TensorBoard (NULL: not there). New figures
 * are appended: rows of files with fewer columns are extended. */
typedef struct figure {
    const char *column, *scalar;
    double value;
    bool known;
} figure;

enum { FIGURE_COUNT = 17 };

static void figures_of(const qd_train_step *s, figure out[FIGURE_COUNT])
{
    const bool validated = s->validation_tokens > 0, pairs = s->pairs > 0;
    const figure all[FIGURE_COUNT] = {
        {"step", NULL, (double)s->step, true},
        {"loss", "loss/training", s->loss, true},
        {"grad_norm", "train/gradient_norm", s->grad_norm, true},
        {"lr", "train/learning_rate", s->lr, true},
        {"tokens", NULL, s->tokens, true},
        {"step_seconds", "speed/step_seconds", s->step_seconds, true},
        {"tokens_per_second", "speed/tokens_per_second", s->tokens_per_second, true},
        {"mfu", "speed/mfu", s->mfu, s->mfu > 0.0},
        {"memory_peak_bytes", NULL, (double)s->memory_peak_bytes, true},
        {"validation_loss", "loss/validation", s->validation_loss, validated},
        {"mtp_loss", "loss/mtp", s->mtp_loss, s->mtp_loss > 0.0},
        {"max_score", "train/max_score", s->max_score, s->max_score > 0.0},
        {"reward_margin", "rewards/margin", s->reward_margin, pairs},
        {"reward_chosen", "rewards/chosen", s->reward_chosen, pairs},
        {"reward_accuracy", "rewards/accuracy", s->reward_accuracy, pairs},
        {"validation_reward_margin", "rewards/validation_margin", s->validation_margin, pairs && validated},
        {"validation_reward_accuracy", "rewards/validation_accuracy", s->validation_accuracy, pairs && validated},
    };
    memcpy(out, all, sizeof all);
}

/* ---- CSV ---- */

static void put_header(qd_strbuf *out)
{
    const qd_train_step none = qd_train_step_default();
    figure figures[FIGURE_COUNT];
    figures_of(&none, figures);
    for (int i = 0; i < FIGURE_COUNT; i++)
        qd_strbuf_printf(out, "%s%s", i ? "," : "", figures[i].column);
    qd_strbuf_puts(out, "\n");
}

/* Numbers that are not known or not finite are empty. */
static void put_row(qd_strbuf *out, const qd_train_step *s)
{
    figure figures[FIGURE_COUNT];
    figures_of(s, figures);
    for (int i = 0; i < FIGURE_COUNT; i++) {
        char text[QD_DOUBLE_TEXT] = "";
        if (figures[i].known && isfinite(figures[i].value))
            qd_double_17(figures[i].value, text);
        qd_strbuf_printf(out, "%s%s", i ? "," : "", text);
    }
    qd_strbuf_puts(out, "\n");
}

static qd_status open_csv(qd_recorder *r)
{
    r->csv.fd = open(r->csv.path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    return r->csv.fd >= 0 ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be created: %s", r->csv.path, strerror(errno));
}

/* Columns that a file with this text lacks at the end, as those of earlier versions do; -1: it has
 * another header. */
static int columns_missing(const char *text, const qd_strbuf *header)
{
    const size_t length = strcspn(text, "\n");
    const bool same = text[length] == '\n' && length < header->length && strncmp(text, header->data, length) == 0;
    if (!same || !strchr(",\n", header->data[length]))
        return -1;
    int missing = 0;
    for (size_t i = length; i < header->length; i++)
        missing += header->data[i] == ',';
    return missing;
}

/* The end of the header and of whole rows up to `step`. */
static const char *end_of_rows(const char *text, int64_t step)
{
    const char *at = strchr(text, '\n') + 1;
    for (const char *end; (end = strchr(at, '\n')) != NULL && strtod(at, NULL) <= (double)step;)
        at = end + 1;
    return at;
}

/* Replaces the file by its rows with empty cells in new columns, after the header in r->record. */
static qd_status extend_rows(qd_recorder *r, const char *text, const char *until, int missing)
{
    for (const char *row = strchr(text, '\n') + 1, *end; row < until; row = end + 1) {
        end = strchr(row, '\n');
        qd_strbuf_append(&r->record, row, (size_t)(end - row));
        for (int i = 0; i < missing; i++)
            qd_strbuf_puts(&r->record, ",");
        qd_strbuf_puts(&r->record, "\n");
    }
    if (r->record.failed)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its lines", r->csv.path);
    QD_TRY(qd_file_replace(r->csv.path, r->record.data, r->record.length));
    r->csv.whole = (off_t)r->record.length;
    close_output(&r->csv);
    return open_csv(r);
}

/* Keeps rows up to `step`, and writes the header if there are none. */
static qd_status start_csv(qd_recorder *r, int64_t step)
{
    char *text = NULL;
    size_t length;
    qd_strbuf_clear(&r->record);
    put_header(&r->record);
    if (r->record.failed)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a line", r->csv.path);
    if (step > 0)
        QD_TRY(qd_file_read(r->csv.path, SIZE_MAX / 2, &text, &length));
    const int missing = text ? columns_missing(text, &r->record) : -1;
    qd_status status = QD_OK;
    if (missing > 0) {
        status = extend_rows(r, text, end_of_rows(text, step), missing);
    } else {
        r->csv.whole = missing == 0 ? (off_t)(end_of_rows(text, step) - text) : 0;
        if (missing == 0 ? ftruncate(r->csv.fd, r->csv.whole) != 0 : !append(&r->csv, &r->record))
            status = QD_FAIL(QD_IO, "%s: cannot be written: %s", r->csv.path, strerror(errno));
    }
    free(text);
    return status;
}

/* ---- TensorBoard ---- */

/* Creates the first file of this second, host and process that does not exist yet. */
static qd_status create_events(qd_recorder *r, double now)
{
    enum { MOST = 1000 };
    char host[64] = "host", name[192];
    gethostname(host, sizeof host - 1);
    for (int i = 0; i < MOST && r->events.fd < 0; i++) {
        snprintf(name, sizeof name, EVENT_FOLDER "/" EVENT_PREFIX "%010lld.%s.%d.%03d", (long long)now, host, (int)getpid(), i);
        QD_TRY(path_in(r->folder, name, r->events.path));
        r->events.fd = open(r->events.path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (r->events.fd < 0 && errno != EEXIST)
            break;
    }
    return r->events.fd >= 0 ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be created: %s", r->events.path, strerror(errno));
}

/* A file of its own for each start of the run, because another one may be open in TensorBoard.
 * Readers take files in the order of their names. */
static qd_status start_events(qd_recorder *r, int64_t step)
{
    double now = wall_time();
    close_output(&r->events);
    QD_TRY(create_events(r, now));
    r->events.whole = 0;
    qd_strbuf_clear(&r->record);
    qd_tf_put_version(&r->record, now);
    qd_tf_put_start(&r->record, now, step + 1);
    if (append(&r->events, &r->record))
        return QD_OK;
    return QD_FAIL(QD_IO, "%s: cannot be written: %s", r->events.path, strerror(errno));
}

static void put_event(qd_strbuf *out, const qd_train_step *s)
{
    figure figures[FIGURE_COUNT];
    qd_tf_scalar scalars[FIGURE_COUNT];
    int count = 0;
    figures_of(s, figures);
    for (int i = 0; i < FIGURE_COUNT; i++)
        if (figures[i].scalar && figures[i].known)
            scalars[count++] = (qd_tf_scalar){figures[i].scalar, figures[i].value};
    qd_tf_put_scalars(out, wall_time(), s->step, scalars, count);
}

/* ---- both ---- */

qd_status qd_recorder_rewind(qd_recorder *r, int64_t step)
{
    if (r->csv.fd >= 0)
        QD_TRY(start_csv(r, step));
    return r->events.path[0] != '\0' ? start_events(r, step) : QD_OK;
}

static qd_status open_files(const qd_config *c, int64_t step, qd_recorder *r)
{
    if (c->csv) {
        QD_TRY(path_in(r->folder, CSV_FILE, r->csv.path));
        QD_TRY(open_csv(r));
        QD_TRY(start_csv(r, step));
    }
    if (!c->tensorboard)
        return QD_OK;
    QD_TRY(path_in(r->folder, EVENT_FOLDER, r->events.path));
    if (mkdir(r->events.path, 0777) != 0 && errno != EEXIST)
        return QD_FAIL(QD_IO, "%s: cannot be created: %s", r->events.path, strerror(errno));
    return start_events(r, step);
}

qd_status qd_recorder_create(const qd_config *c, int64_t step, qd_recorder **recorder)
{
    qd_recorder *r = calloc(1, sizeof *r);
    if (!r)
        return QD_FAIL(QD_NO_MEMORY, "no memory to record the run");
    r->csv.fd = r->events.fd = -1;
    snprintf(r->folder, sizeof r->folder, "%s", c->run_dir);
    qd_status status = open_files(c, step, r);
    if (status != QD_OK) {
        qd_recorder_destroy(r);
        return status;
    }
    *recorder = r;
    return QD_OK;
}

/* Appends the record, or remembers the first failure as a warning. */
static void add(qd_recorder *r, output *o)
{
    if (append(o, &r->record) || o->failed)
        return;
    o->failed = true;
    size_t used = strlen(r->warning);
    snprintf(r->warning + used, sizeof r->warning - used, "%s%.200s: %s: steps that cannot be written are left out", used ? "; " : "",
             o->path, strerror(errno));
}

const char *qd_recorder_write(qd_recorder *r, const qd_train_step *s)
{
    r->warning[0] = '\0';
    if (r->csv.fd >= 0) {
        qd_strbuf_clear(&r->record);
        put_row(&r->record, s);
        add(r, &r->csv);
    }
    if (r->events.fd >= 0) {
        qd_strbuf_clear(&r->record);
        put_event(&r->record, s);
        add(r, &r->events);
    }
    return r->warning[0] != '\0' ? r->warning : NULL;
}

void qd_recorder_destroy(qd_recorder *r)
{
    if (!r)
        return;
    close_output(&r->csv);
    close_output(&r->events);
    qd_strbuf_free(&r->record);
    free(r);
}

/* Other files of the folder are not ours. */
static qd_status clear_events(const char *folder)
{
    DIR *dir = opendir(folder);
    qd_status status = QD_OK;
    for (struct dirent *entry; dir && status == QD_OK && (entry = readdir(dir)) != NULL;) {
        file_path path;
        if (strncmp(entry->d_name, EVENT_PREFIX, sizeof EVENT_PREFIX - 1) != 0)
            continue;
        status = path_in(folder, entry->d_name, path);
        if (status == QD_OK && unlink(path) != 0 && errno != ENOENT)
            status = QD_FAIL(QD_IO, "%s: cannot be removed: %s", path, strerror(errno));
    }
    if (dir)
        closedir(dir);
    return status;
}

qd_status qd_recorder_clear(const qd_config *c)
{
    file_path path;
    QD_TRY(path_in(c->run_dir, CSV_FILE, path));
    if (unlink(path) != 0 && errno != ENOENT)
        return QD_FAIL(QD_IO, "%s: cannot be removed: %s", path, strerror(errno));
    QD_TRY(path_in(c->run_dir, EVENT_FOLDER, path));
    return clear_events(path);
}
