/* metrics.jsonl: appends whole lines only, also on a full or failing disk, and holds the lock that
 * keeps two runs out of one folder. */
#include "train/run/metrics.h"

#include "base/clock.h"
#include "base/sized.h"
#include "base/text/json_writer.h"
#include "base/text/strbuf.h"

#include <errno.h>
#include <fcntl.h>
#include <quadrille/log.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* A process that only checks the lock holds it for microseconds. */
#define SECONDS_FOR_LOOKERS 0.5

struct qd_metrics {
    int fd;
    char *path;
    qd_strbuf line;
    off_t whole;  /* bytes of whole lines */
    bool torn;    /* part of a failed line follows them */
    int64_t lost; /* lines that could not be written */
    int error;    /* of the first of them */
    bool unsynced; /* the disk has refused to keep lines, and a warning was given */
    char warning[512];
};

/* Bytes of the file that are whole lines of steps up to `step`. Lines are in the order of steps. */
static off_t lines_to_keep(const char *path, int64_t step)
{
    char *text = NULL;
    size_t length = 0;
    off_t keep = 0;
    if (step == 0 || qd_file_read(path, SIZE_MAX / 2, &text, &length) != QD_OK)
        return 0;
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        long long number;
        if (sscanf(line, "{\"step\":%lld", &number) != 1 || number > step)
            break;
        keep = end + 1 - text;
    }
    free(text);
    return keep;
}

/* kind: LOCK_EX to write; LOCK_SH to check, so that concurrent checks, by the ranks of one run, do
 * not see each other. On a file system without locks this always succeeds. */
static qd_status lock(int fd, int kind, const char *path, double seconds, const atomic_int *stop)
{
    const double begin = qd_clock_now();
    for (bool logged = false; flock(fd, kind | LOCK_NB) != 0 && errno == EWOULDBLOCK;) {
        const double waited = qd_clock_now() - begin;
        if (stop && atomic_load(stop) != 0)
            return QD_FAIL(QD_INTERRUPTED, "interrupted while waiting for the run that writes %s", path);
        if (waited >= seconds)
            return QD_FAIL(QD_BUSY, "run.dir: another run is writing %s: try again when it has ended, or name another folder", path);
        if (!logged && waited > SECONDS_FOR_LOOKERS) {
            qd_log(QD_LOG_WARN, "run.dir", "another run is still writing %s: waiting up to %.0f s for it to end", path, seconds);
            logged = true;
        }
        nanosleep(&(struct timespec){.tv_nsec = 20 * 1000 * 1000}, NULL);
    }
    return QD_OK;
}

qd_status qd_metrics_wait_free(const char *path, double seconds, const atomic_int *stop)
{
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC); /* NFS locks only writable files */
    if (fd < 0)
        return QD_OK; /* the writer will report what is wrong */
    qd_status status = lock(fd, LOCK_SH, path, seconds, stop);
    close(fd);
    return status;
}

qd_status qd_metrics_check_free(const char *path)
{
    return qd_metrics_wait_free(path, 0.0, NULL);
}

/* Truncates the file to its whole lines. EINVAL: a device, which has no length. */
static bool cut(const qd_metrics *m)
{
    return ftruncate(m->fd, m->whole) == 0 || errno == EINVAL;
}

qd_status qd_metrics_rewind(qd_metrics *m, int64_t step)
{
    m->whole = lines_to_keep(m->path, step);
    m->torn = false;
    if (cut(m))
        return QD_OK;
    return QD_FAIL(QD_IO, "%s: cannot be truncated to its first %lld steps: %s", m->path, (long long)step, strerror(errno));
}

qd_status qd_metrics_create(const char *path, int64_t step, qd_metrics **metrics)
{
    qd_metrics *m = calloc(1, sizeof *m);
    if (!m || !(m->path = strdup(path))) {
        free(m);
        return QD_FAIL(QD_NO_MEMORY, "no memory to write %s", path);
    }
    struct stat info = {0};
    m->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0666); /* do not block on a pipe without a reader */
    qd_status status = QD_OK;
    int error = errno;
    if ((m->fd < 0 ? stat(path, &info) : fstat(m->fd, &info)) == 0 && S_ISFIFO(info.st_mode))
        status = QD_FAIL(QD_USAGE, "%s: is a named pipe; a file is needed", path);
    else if (m->fd < 0)
        status = QD_FAIL(QD_IO, "%s: cannot be created: %s", path, strerror(error));
    if (status == QD_OK)
        status = lock(m->fd, LOCK_EX, path, SECONDS_FOR_LOOKERS, NULL);
    if (status == QD_OK)
        status = qd_metrics_rewind(m, step);
    if (status != QD_OK) {
        qd_metrics_destroy(m);
        return status;
    }
    *metrics = m;
    return QD_OK;
}

static void put_step(qd_json_writer *w, const qd_train_step *s)
{
    qd_json_put_int(w, "step", s->step);
    qd_json_put_double(w, "loss", s->loss);
    qd_json_put_double(w, "grad_norm", s->grad_norm);
    qd_json_put_double(w, "lr", s->lr);
    qd_json_put_int(w, "tokens", (int64_t)s->tokens);
    qd_json_put_double(w, "step_seconds", s->step_seconds);
    qd_json_put_double(w, "tokens_per_second", s->tokens_per_second);
    if (s->mfu > 0.0)
        qd_json_put_double(w, "mfu", s->mfu);
    else
        qd_json_put_null(w, "mfu");
    qd_json_put_int(w, "memory_peak_bytes", s->memory_peak_bytes);
    if (s->skipped)
        qd_json_put_bool(w, "skipped", true);
    if (s->mtp_loss > 0.0)
        qd_json_put_double(w, "mtp_loss", s->mtp_loss);
    if (s->max_score > 0.0)
        qd_json_put_double(w, "max_score", s->max_score);
    if (s->validation_tokens > 0) {
        qd_json_put_double(w, "validation_loss", s->validation_loss);
        qd_json_put_int(w, "validation_tokens", s->validation_tokens);
        qd_json_put_double(w, "validation_seconds", s->validation_seconds);
        qd_json_put_bool(w, "validation_best", s->validation_best);
    }
    if (s->pairs > 0) {
        qd_json_put_int(w, "pairs", s->pairs);
        qd_json_put_double(w, "reward_margin", s->reward_margin);
        qd_json_put_double(w, "reward_chosen", s->reward_chosen);
        qd_json_put_double(w, "reward_accuracy", s->reward_accuracy);
    }
    if (s->pairs > 0 && s->validation_tokens > 0) {
        qd_json_put_double(w, "validation_reward_margin", s->validation_margin);
        qd_json_put_double(w, "validation_reward_accuracy", s->validation_accuracy);
    }
    if (s->dispatch_bytes > 0)
        qd_json_put_int(w, "dispatch_bytes", s->dispatch_bytes);
    if (s->across_flat_bytes > 0) {
        qd_json_put_int(w, "dispatch_across_nodes_bytes", s->across_bytes);
        qd_json_put_int(w, "dispatch_across_nodes_flat_bytes", s->across_flat_bytes);
    }
}

void qd_train_put_step(qd_json_writer *w, const qd_train_step *step)
{
    qd_train_step s = qd_train_step_default();
    if (QD_SIZED_READ(step, qd_train_step, &s) == QD_OK)
        put_step(w, &s);
}

/* Returns 0 or the error. One write per line, so that readers see whole lines even if the run is
 * killed. */
static int append(qd_metrics *m)
{
    if (m->torn && !cut(m))
        return errno;
    m->torn = false;
    for (size_t at = 0; at < m->line.length;) {
        ssize_t n = write(m->fd, m->line.data + at, m->line.length - at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            int error = n < 0 ? errno : ENOSPC;
            m->torn = at > 0 && !cut(m);
            return error;
        }
        at += (size_t)n;
    }
    m->whole += (off_t)m->line.length;
    return 0;
}

/* Disk errors that may be gone by the next step or the next day. Any other error means that the
 * file itself is wrong. */
static bool may_pass(int error)
{
    static const int passing[] = {ENOSPC, EDQUOT, EIO, EROFS, ESTALE, EFBIG, ENODEV, ENXIO, ETIMEDOUT, EAGAIN};
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
        if (passing[i] == error)
            return true;
    return false;
}

static bool is_full(int error)
{
    return error == ENOSPC || error == EDQUOT;
}

qd_status qd_metrics_write(qd_metrics *m, const qd_train_step *s, const char **warning)
{
    *warning = NULL;
    qd_strbuf_clear(&m->line);
    qd_json_writer w = qd_json_writer_on(&m->line);
    qd_json_object_begin(&w, NULL);
    put_step(&w, s);
    qd_json_end(&w);
    qd_json_newline(&w);
    if (m->line.failed)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a line", m->path);
    int error = append(m);
    if (error == 0)
        return QD_OK;
    if (!may_pass(error))
        return QD_FAIL(QD_IO, "%s: cannot be written: %s", m->path, strerror(error));
    if (m->lost++ == 0) {
        m->error = error;
        snprintf(m->warning, sizeof m->warning, "%.400s: %s: steps are not written until %s", m->path, strerror(error),
                 is_full(error) ? "the disk has free space" : "it can be written again");
        *warning = m->warning;
    }
    return QD_OK;
}

const char *qd_metrics_sync(qd_metrics *m)
{
    if (!m || fdatasync(m->fd) == 0 || errno == EINVAL || m->unsynced) /* EINVAL: a device */
        return NULL;
    m->unsynced = true;
    snprintf(m->warning, sizeof m->warning, "%.400s: %s: its lines may not survive a crash of the machine", m->path, strerror(errno));
    return m->warning;
}

const char *qd_metrics_lost(qd_metrics *m)
{
    if (!m || m->lost == 0)
        return NULL;
    snprintf(m->warning, sizeof m->warning, "%.400s: %lld step%s not written: %s", m->path, (long long)m->lost,
             m->lost == 1 ? " was" : "s were", is_full(m->error) ? "the disk was full" : strerror(m->error));
    return m->warning;
}

void qd_metrics_destroy(qd_metrics *m)
{
    if (!m)
        return;
    if (m->fd >= 0) {
        (void)fdatasync(m->fd); /* a failure was reported with the last checkpoint */
        close(m->fd);
    }
    qd_strbuf_free(&m->line);
    free(m->path);
    free(m);
}
