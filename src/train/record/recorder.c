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

/* ---- CSV ---- */

static const char *const columns[] = {"step",         "loss",          "grad_norm",        "lr",
                                      "tokens",       "step_seconds",  "tokens_per_second", "mfu",
                                      "memory_peak_bytes", "validation_loss"};
enum { COLUMN_COUNT = sizeof columns / sizeof *columns };

static void put_header(qd_strbuf *out)
{
    for (int i = 0; i < COLUMN_COUNT; i++)
        qd_strbuf_printf(out, "%s%s", i ? "," : "", columns[i]);
    qd_strbuf_puts(out, "\n");
}

/* Numbers that are not known or not finite are empty. */
static void put_row(qd_strbuf *out, const qd_train_step *s)
{
    const double values[COLUMN_COUNT] = {
        (double)s->step, s->loss, s->grad_norm, s->lr, s->tokens, s->step_seconds, s->tokens_per_second, s->mfu > 0.0 ? s->mfu : NAN,
        (double)s->memory_peak_bytes, s->validation_tokens > 0 ? s->validation_loss : NAN};
    for (int i = 0; i < COLUMN_COUNT; i++) {
        char text[QD_DOUBLE_TEXT] = "";
        if (isfinite(values[i]))
            qd_double_17(values[i], text);
        qd_strbuf_printf(out, "%s%s", i ? "," : "", text);
    }
    qd_strbuf_puts(out, "\n");
}

/* Bytes of the header and of whole lines up to `step`; 0: the file does not begin with this
 * header. */
static off_t rows_to_keep(const char *path, const qd_strbuf *header, int64_t step)
{
    char *text = NULL;
    size_t length;
    off_t keep = 0;
    if (step == 0 || access(path, F_OK) != 0 || qd_file_read(path, SIZE_MAX / 2, &text, &length) != QD_OK)
        return 0;
    if (strncmp(text, header->data, header->length) == 0)
        keep = (off_t)header->length;
    for (char *line = text + keep, *end; keep > 0 && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        if (strtod(line, NULL) > (double)step)
            break;
        keep = end + 1 - text;
    }
    free(text);
    return keep;
}

static qd_status start_csv(qd_recorder *r, int64_t step)
{
    qd_strbuf_clear(&r->record);
    put_header(&r->record);
    if (r->record.failed)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a line", r->csv.path);
    r->csv.whole = rows_to_keep(r->csv.path, &r->record, step);
    bool there = r->csv.whole > 0;
    if (there ? ftruncate(r->csv.fd, r->csv.whole) == 0 : append(&r->csv, &r->record))
        return QD_OK;
    return QD_FAIL(QD_IO, "%s: cannot be written: %s", r->csv.path, strerror(errno));
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
    const qd_tf_scalar all[] = {
        {"loss/training", s->loss},           {"train/gradient_norm", s->grad_norm},         {"train/learning_rate", s->lr},
        {"speed/step_seconds", s->step_seconds}, {"speed/tokens_per_second", s->tokens_per_second},
        {"loss/validation", s->validation_loss}, {"speed/mfu", s->mfu},
        {"loss/mtp", s->mtp_loss},            {"train/max_score", s->max_score},
        {"rewards/margin", s->reward_margin}, {"rewards/chosen", s->reward_chosen}, {"rewards/accuracy", s->reward_accuracy},
    };
    enum { ALWAYS = 5, VALIDATION = 5, MFU = 6, MTP = 7, SCORE = 8, REWARDS = 9 };
    qd_tf_scalar chosen[sizeof all / sizeof *all];
    int count = ALWAYS;
    memcpy(chosen, all, ALWAYS * sizeof *all);
    if (s->validation_tokens > 0)
        chosen[count++] = all[VALIDATION];
    if (s->mfu > 0.0)
        chosen[count++] = all[MFU];
    if (s->mtp_loss > 0.0)
        chosen[count++] = all[MTP];
    if (s->max_score > 0.0)
        chosen[count++] = all[SCORE];
    for (size_t i = REWARDS; s->pairs > 0 && i < sizeof all / sizeof *all; i++)
        chosen[count++] = all[i];
    qd_tf_put_scalars(out, wall_time(), s->step, chosen, count);
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
        r->csv.fd = open(r->csv.path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
        if (r->csv.fd < 0)
            return QD_FAIL(QD_IO, "%s: cannot be created: %s", r->csv.path, strerror(errno));
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
