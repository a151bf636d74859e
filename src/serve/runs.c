/* Finds run folders and keeps what was read of those that are watched. */
#include "serve/runs.h"

#include "base/clock.h"
#include "base/text/json.h"
#include "base/text/json_writer.h"
#include "report/page.h"
#include "report/run.h"
#include "serve/access.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <quadrille/config.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RUNS = 2000, MOST_DEPTH = 2, MOST_NAME = 512, MOST_ENTRIES = 20000, TAIL = 1 << 16 };
/* A folder is scanned again after this time, and what was read of a run is freed if it is not asked
 * for. */
#define SCAN_SECONDS 2.0
#define FORGET_SECONDS 120.0
/* A folder that is away for longer is another run when it is back; a run that is overwritten or
 * moved keeps its number. */
#define GONE_SECONDS 60.0

typedef struct run_entry {
    int64_t number;        /* unique; requests name a run by it */
    int root;              /* index of the given folder */
    char name[MOST_NAME];  /* below it; "": itself */
    char *title;           /* as shown */
    bool found;            /* by the scan in progress */
    double gone;           /* clock of the first scan that did not find its folder; 0: it is there */
    int users;             /* requests that use it, with the list's mutex */
    struct timespec configured; /* effective.yaml, from which the next two are */
    char model[64];
    int64_t steps, ranks;
    pthread_mutex_t mutex; /* of what follows */
    qd_run_report *report; /* NULL: it is not watched */
    char epoch[17];        /* changes when `report` is opened again */
    double asked;          /* clock of the last request */
} run_entry;

struct qd_runs {
    const char **paths;
    int *roots; /* open folders */
    int root_count;
    pthread_mutex_t mutex; /* of the list */
    run_entry **list;      /* in the order of their numbers */
    int count;
    int64_t last_number;
    double scanned;
};

qd_status qd_runs_create(const char *const *folders, int count, qd_runs **out)
{
    qd_runs *r = calloc(1, sizeof *r);
    qd_status status = QD_OK;
    if (r) {
        r->paths = calloc((size_t)count + 1, sizeof *r->paths);
        r->roots = calloc((size_t)count + 1, sizeof *r->roots);
        r->list = calloc(MOST_RUNS, sizeof(run_entry *));
        pthread_mutex_init(&r->mutex, NULL);
    }
    if (!r || !r->paths || !r->roots || !r->list)
        status = QD_FAIL(QD_NO_MEMORY, "serve: no memory for the list of runs");
    for (int i = 0; i < count && status == QD_OK; i++) {
        char *path = strdup(folders[i]);
        int fd = path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
        if (fd < 0) {
            status = QD_FAIL(path ? QD_USAGE : QD_NO_MEMORY, "serve: %s: cannot be opened as a folder: %s", folders[i], strerror(errno));
            free(path);
        } else {
            r->paths[i] = path;
            r->roots[i] = fd;
            r->root_count++;
        }
    }
    if (status != QD_OK) {
        qd_runs_destroy(r);
        return status;
    }
    r->scanned = -SCAN_SECONDS;
    *out = r;
    return QD_OK;
}

static void free_entry(run_entry *e)
{
    qd_run_report_close(e->report);
    pthread_mutex_destroy(&e->mutex);
    free(e->title);
    free(e);
}

void qd_runs_destroy(qd_runs *r)
{
    if (!r)
        return;
    for (int i = 0; i < r->count; i++)
        free_entry(r->list[i]);
    for (int i = 0; i < r->root_count; i++) {
        close(r->roots[i]);
        free((char *)r->paths[i]);
    }
    pthread_mutex_destroy(&r->mutex);
    free(r->paths);
    free(r->roots);
    free(r->list);
    free(r);
}

static bool has_file(int folder, const char *name)
{
    struct stat info;
    return fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info.st_mode);
}

/* Opens a folder below another, without following links; "" is the folder itself. -1: failed. */
static int open_below(int root, const char *name)
{
    int fd = openat(root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (fd >= 0 && *name) {
        char part[NAME_MAX + 1];
        size_t length = strcspn(name, "/");
        if (length == 0 || length > NAME_MAX) {
            close(fd);
            return -1;
        }
        memcpy(part, name, length);
        part[length] = '\0';
        int next = openat(fd, part, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        close(fd);
        fd = next;
        name += length + (name[length] == '/');
    }
    return fd;
}

static run_entry *find(qd_runs *r, int root, const char *name)
{
    for (int i = 0; i < r->count; i++)
        if (r->list[i]->root == root && strcmp(r->list[i]->name, name) == 0)
            return r->list[i];
    return NULL;
}

/* "demo" for runs/demo, or the given folder's own name. */
static char *title_of(const qd_runs *r, int root, const char *name)
{
    char *text = NULL;
    const char *path = r->paths[root];
    size_t end = strlen(path), begin;
    while (end > 1 && path[end - 1] == '/')
        end--;
    for (begin = end; begin > 0 && path[begin - 1] != '/'; begin--)
        continue;
    qd_strbuf out = {0};
    if (!name[0] || r->root_count > 1)
        qd_strbuf_append_utf8(&out, path + begin, end - begin);
    if (name[0] && r->root_count > 1)
        qd_strbuf_puts(&out, "/");
    qd_strbuf_append_utf8(&out, name, strlen(name));
    if (qd_strbuf_take(&out, &text) != QD_OK)
        qd_error_clear();
    return text;
}

static void found(qd_runs *r, int root, const char *name)
{
    run_entry *e = find(r, root, name);
    if (!e) {
        if (r->count == MOST_RUNS || strlen(name) >= MOST_NAME || !(e = calloc(1, sizeof *e)))
            return;
        if (!(e->title = title_of(r, root, name))) {
            free(e);
            return;
        }
        e->number = ++r->last_number;
        e->root = root;
        strcpy(e->name, name);
        pthread_mutex_init(&e->mutex, NULL);
        r->list[r->count++] = e;
    }
    e->found = true;
}

/* Adds the runs in an open folder, which is closed. left: how many entries may still be looked
 * at. */
static void scan(qd_runs *r, int root, int fd, const char *name, int depth, int *left)
{
    if (has_file(fd, "config.yaml")) {
        found(r, root, name);
        close(fd);
        return;
    }
    DIR *folder = depth < MOST_DEPTH ? fdopendir(fd) : NULL;
    if (!folder) {
        close(fd);
        return;
    }
    for (struct dirent *item; *left > 0 && (item = readdir(folder)) != NULL; --*left) {
        char below[MOST_NAME];
        if (item->d_name[0] == '.' || (item->d_type != DT_DIR && item->d_type != DT_UNKNOWN))
            continue;
        if (snprintf(below, sizeof below, "%s%s%s", name, name[0] ? "/" : "", item->d_name) >= MOST_NAME)
            continue;
        int next = openat(dirfd(folder), item->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (next >= 0)
            scan(r, root, next, below, depth + 1, left);
    }
    closedir(folder);
}

static void forget_unwatched(qd_runs *r, double now)
{
    for (int i = 0; i < r->count; i++) {
        run_entry *e = r->list[i];
        if (pthread_mutex_trylock(&e->mutex) != 0)
            continue;
        if (e->report && now - e->asked > FORGET_SECONDS) {
            qd_run_report_close(e->report);
            e->report = NULL;
        }
        pthread_mutex_unlock(&e->mutex);
    }
}

static void scan_all(qd_runs *r)
{
    double now = qd_clock_now();
    int left = MOST_ENTRIES;
    if (now - r->scanned < SCAN_SECONDS)
        return;
    r->scanned = now;
    for (int i = 0; i < r->count; i++)
        r->list[i]->found = false;
    for (int i = 0; i < r->root_count; i++) {
        int fd = open_below(r->roots[i], "");
        if (fd >= 0)
            scan(r, i, fd, "", 0, &left);
    }
    int kept = 0;
    for (int i = 0; i < r->count; i++) {
        run_entry *e = r->list[i];
        e->gone = e->found ? 0.0 : e->gone > 0.0 ? e->gone : now;
        /* At once if the list is full, so that new runs have a place. */
        if (e->gone > 0.0 && e->users == 0 && (now - e->gone > GONE_SECONDS || r->count == MOST_RUNS))
            free_entry(e);
        else
            r->list[kept++] = e;
    }
    r->count = kept;
    forget_unwatched(r, now);
}

/* Opens a file of a run for reading; -1: it is missing or not a regular file. */
static int open_file(int folder, const char *name, struct stat *info)
{
    int fd = openat(folder, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    if (fd >= 0 && (fstat(fd, info) != 0 || !S_ISREG(info->st_mode))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Reads at most `most` bytes from an offset; the caller frees the NUL-terminated text. */
static char *read_part(int fd, off_t offset, size_t most)
{
    char *text = malloc(most + 1);
    size_t used = 0;
    for (ssize_t n; text && used < most; used += (size_t)n) {
        n = pread(fd, text + used, most - used, offset + (off_t)used);
        if (n < 0 && errno == EINTR)
            n = 0;
        else if (n <= 0)
            break;
    }
    if (text)
        text[used] = '\0';
    return text;
}

/* Model, ranks and steps, from the configuration as it was resolved. */
static void read_configuration(run_entry *e, int folder)
{
    struct stat info;
    qd_option_table keys = qd_config_table();
    qd_options *options = NULL;
    int fd = open_file(folder, "effective.yaml", &info);
    if (fd < 0)
        fd = open_file(folder, "config.yaml", &info);
    if (fd < 0 || memcmp(&info.st_mtim, &e->configured, sizeof info.st_mtim) == 0 || info.st_size > 1 << 20) {
        if (fd >= 0)
            close(fd);
        return;
    }
    char *text = read_part(fd, 0, (size_t)info.st_size);
    close(fd);
    e->configured = info.st_mtim;
    if (text && qd_options_create(&keys, 1, &options) == QD_OK &&
        qd_options_load_text(options, "config.yaml", text, strlen(text)) == QD_OK) {
        snprintf(e->model, sizeof e->model, "%.60s", qd_options_string(options, "model.preset"));
        e->steps = qd_options_int(options, "train.steps");
        e->ranks = qd_options_int(options, "parallel.ranks");
    }
    qd_error_clear();
    qd_options_destroy(options);
    free(text);
}

static void put_number(qd_json_writer *w, const char *key, const qd_json_node *line)
{
    double value;
    if (qd_json_as_double(qd_json_member(line, key), &value))
        qd_json_put_double(w, key, value);
}

/* The last whole line of the metrics. */
static void put_last(qd_json_writer *w, int folder)
{
    struct stat info;
    qd_json *document = NULL;
    int fd = open_file(folder, "metrics.jsonl", &info);
    if (fd < 0)
        return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    qd_json_put_double(w, "age", difftime(now.tv_sec, info.st_mtim.tv_sec) + 1e-9 * (double)(now.tv_nsec - info.st_mtim.tv_nsec));
    char *text = read_part(fd, info.st_size > TAIL ? info.st_size - TAIL : 0, TAIL), *end = text ? strrchr(text, '\n') : NULL;
    close(fd);
    if (end) {
        *end = '\0';
        char *line = strrchr(text, '\n');
        line = line ? line + 1 : text;
        if (qd_json_load_text("metrics.jsonl", line, strlen(line), &document) == QD_OK) {
            static const char *const keys[] = {"step", "loss", "validation_loss", "step_seconds", "tokens_per_second"};
            for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
                put_number(w, keys[i], qd_json_root(document));
            qd_json_destroy(document);
        }
        qd_error_clear();
    }
    free(text);
}

static void put_entry(qd_runs *r, run_entry *e, qd_json_writer *w)
{
    int folder = open_below(r->roots[e->root], e->name);
    if (folder < 0)
        return;
    read_configuration(e, folder);
    qd_json_object_begin(w, NULL);
    qd_json_put_int(w, "run", e->number);
    qd_json_put_string(w, "name", e->title);
    qd_json_put_string(w, "model", e->model);
    qd_json_put_int(w, "ranks", e->ranks);
    qd_json_put_int(w, "steps", e->steps);
    put_last(w, folder);
    qd_json_end(w);
    close(folder);
}

static int by_title(const void *a, const void *b)
{
    return strcmp((*(run_entry *const *)a)->title, (*(run_entry *const *)b)->title);
}

qd_status qd_runs_list(qd_runs *r, qd_strbuf *json)
{
    qd_json_writer w = qd_json_writer_on(json);
    run_entry *sorted[MOST_RUNS];
    pthread_mutex_lock(&r->mutex);
    scan_all(r);
    qd_json_object_begin(&w, NULL);
    qd_json_list_begin(&w, "runs");
    memcpy(sorted, r->list, (size_t)r->count * sizeof *sorted);
    qsort(sorted, (size_t)r->count, sizeof *sorted, by_title);
    for (int i = 0; i < r->count; i++)
        if (sorted[i]->gone == 0.0)
            put_entry(r, sorted[i], &w);
    qd_json_end(&w);
    qd_json_end(&w);
    pthread_mutex_unlock(&r->mutex);
    return json->failed ? QD_FAIL(QD_NO_MEMORY, "serve: no memory for the list of runs") : QD_OK;
}

/* The entry with its mutex locked, until unlock_run(). */
static qd_status lock_run(qd_runs *r, int64_t number, run_entry **entry)
{
    *entry = NULL;
    pthread_mutex_lock(&r->mutex);
    for (int i = 0; i < r->count && !*entry; i++)
        *entry = r->list[i]->number == number ? r->list[i] : NULL;
    if (*entry)
        (*entry)->users++;
    pthread_mutex_unlock(&r->mutex);
    if (!*entry)
        return QD_FAIL(QD_USAGE, "there is no run %lld", (long long)number);
    pthread_mutex_lock(&(*entry)->mutex);
    (*entry)->asked = qd_clock_now();
    return QD_OK;
}

static void unlock_run(qd_runs *r, run_entry *e)
{
    pthread_mutex_unlock(&e->mutex);
    pthread_mutex_lock(&r->mutex);
    e->users--;
    pthread_mutex_unlock(&r->mutex);
}

/* Reads what the run has written. A run that cannot be read is opened anew by the next request. */
static qd_status refresh(qd_runs *r, run_entry *e)
{
    int folder = open_below(r->roots[e->root], e->name);
    qd_status status = QD_OK;
    if (folder < 0)
        status = QD_FAIL(QD_USAGE, "%s: the run was removed", e->title);
    else if (e->report)
        status = qd_run_report_refresh(e->report, folder);
    else if ((status = qd_access_random(e->epoch, sizeof e->epoch - 1)) == QD_OK)
        status = qd_run_report_open(folder, e->title, true, &e->report);
    if (folder >= 0)
        close(folder);
    if (status != QD_OK) {
        qd_run_report_close(e->report);
        e->report = NULL;
    }
    return status;
}

qd_status qd_runs_progress(qd_runs *r, int64_t run, const char *epoch, int64_t row, qd_strbuf *json)
{
    run_entry *e;
    char now[64];
    QD_TRY(lock_run(r, run, &e));
    qd_status status = refresh(r, e);
    if (status == QD_OK) {
        qd_json_writer w = qd_json_writer_on(json);
        snprintf(now, sizeof now, "%s-%lld", e->epoch, (long long)qd_run_report_rewritten(e->report));
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "epoch", now);
        qd_json_put_int(&w, "version", qd_run_report_version(e->report));
        status = qd_run_report_put_progress(e->report, strcmp(now, epoch) == 0 ? row : 0, &w);
        qd_json_end(&w);
    }
    unlock_run(r, e);
    return status;
}

qd_status qd_runs_report(qd_runs *r, int64_t run, qd_strbuf *json)
{
    run_entry *e;
    QD_TRY(lock_run(r, run, &e));
    qd_status status = refresh(r, e);
    if (status == QD_OK)
        status = qd_report_data(qd_run_report_view(e->report), json);
    unlock_run(r, e);
    return status;
}
