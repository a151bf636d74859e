/* The checkpoints of one run: written to a temporary folder, flushed, then renamed. Finds the
 * newest intact one and removes old ones. */
#define _GNU_SOURCE /* renameat2 */
#include "base/text/strbuf.h"
#include "ckpt/checkpoint_impl.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

static qd_status no_memory(const char *root)
{
    return QD_FAIL(QD_NO_MEMORY, "no memory for the checkpoints in %s", root);
}

char *qd_ckpt_step_path(const char *root, int64_t step, const char *suffix)
{
    char name[64];
    snprintf(name, sizeof name, "step-%012lld%s", (long long)step, suffix);
    return qd_ckpt_path(root, name);
}

/* Parses "step-12"; returns what follows the number. */
static const char *parse_step(const char *name, long long *step)
{
    int used = 0;
    return sscanf(name, "step-%lld%n", step, &used) == 1 && used > 0 ? name + used : NULL;
}

static qd_status unlisted(const char *root)
{
    return errno == ENOMEM ? no_memory(root) : QD_FAIL(QD_IO, "%s: cannot be listed: %s", root, strerror(errno));
}

/* Steps of the checkpoints under `root`, newest first; none without the folder. A folder that
 * cannot be read is an error: it may hold a run. */
static qd_status list_steps(const char *root, long long **steps, int *count)
{
    int capacity = 0;
    *steps = NULL;
    *count = 0;
    DIR *dir = opendir(root);
    if (!dir)
        return errno == ENOENT || errno == ENOTDIR ? QD_OK : unlisted(root);
    qd_status status = QD_OK;
    errno = 0;
    for (struct dirent *entry; status == QD_OK && (entry = readdir(dir)) != NULL; errno = 0) {
        long long step;
        const char *rest = parse_step(entry->d_name, &step);
        if (!rest || *rest != '\0')
            continue;
        if (*count == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            long long *larger = realloc(*steps, (size_t)capacity * sizeof *larger);
            if (!larger) {
                status = no_memory(root);
                break;
            }
            *steps = larger;
        }
        int at = (*count)++;
        while (at > 0 && (*steps)[at - 1] < step) {
            (*steps)[at] = (*steps)[at - 1];
            at--;
        }
        (*steps)[at] = step;
    }
    if (status == QD_OK && errno != 0)
        status = unlisted(root);
    closedir(dir);
    if (status != QD_OK) {
        free(*steps);
        *steps = NULL;
        *count = 0;
    }
    return status;
}

/* The file contains "0123456789abcdef" and, after a space, its XXH3: a damaged file is ignored
 * instead of disowning all checkpoints. */
static void read_run(const char *root, char id[QD_CKPT_HASH_TEXT])
{
    char *path = qd_ckpt_path(root, QD_CKPT_RUN_ID), *text = NULL, hash[QD_CKPT_HASH_TEXT];
    size_t length = 0;
    id[0] = '\0';
    if (path && qd_file_read(path, 4096, &text, &length) == QD_OK && length >= 2 * QD_CKPT_HASH_TEXT - 1) {
        qd_ckpt_hash_text(XXH3_64bits(text, QD_CKPT_HASH_TEXT - 1), hash);
        if (memcmp(text + QD_CKPT_HASH_TEXT, hash, QD_CKPT_HASH_TEXT - 1) == 0)
            snprintf(id, QD_CKPT_HASH_TEXT, "%.*s", QD_CKPT_HASH_TEXT - 1, text);
    }
    qd_error_clear();
    free(text);
    free(path);
}

static uint64_t draw_run(void)
{
    uint64_t drawn = 0;
    struct timespec now;
    if (getrandom(&drawn, sizeof drawn, GRND_NONBLOCK) == (ssize_t)sizeof drawn)
        return drawn;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed[] = {(uint64_t)now.tv_sec, (uint64_t)now.tv_nsec, (uint64_t)getpid()};
    return XXH3_64bits(seed, sizeof seed);
}

/* The identity in the newest checkpoint that has one; "": none. */
static qd_status find_run(const char *root, char id[QD_CKPT_HASH_TEXT])
{
    long long *steps;
    int count;
    QD_TRY(list_steps(root, &steps, &count));
    for (int i = 0; i < count && id[0] == '\0'; i++) {
        char *folder = qd_ckpt_step_path(root, steps[i], "");
        qd_checkpoint *checkpoint = NULL;
        if (folder && qd_checkpoint_open(folder, &checkpoint) == QD_OK && qd_checkpoint_meta(checkpoint)->step == steps[i])
            snprintf(id, QD_CKPT_HASH_TEXT, "%s", qd_checkpoint_meta(checkpoint)->run);
        qd_checkpoint_close(checkpoint);
        free(folder);
    }
    qd_error_clear();
    free(steps);
    return QD_OK;
}

/* The first commit under `root` creates the run's identity; if the file is lost, it is restored
 * from a checkpoint. */
static qd_status ensure_run(const char *root, char id[QD_CKPT_HASH_TEXT])
{
    char text[2 * QD_CKPT_HASH_TEXT + 1], hash[QD_CKPT_HASH_TEXT];
    read_run(root, id);
    if (id[0] != '\0')
        return QD_OK;
    QD_TRY(find_run(root, id));
    if (id[0] == '\0')
        qd_ckpt_hash_text(draw_run(), id);
    qd_ckpt_hash_text(XXH3_64bits(id, strlen(id)), hash);
    snprintf(text, sizeof text, "%s %s\n", id, hash);
    char *path = qd_ckpt_path(root, QD_CKPT_RUN_ID);
    qd_status status = path ? qd_file_replace(path, text, strlen(text)) : no_memory(root);
    free(path);
    return status;
}

qd_status qd_store_prepare(const char *root, int64_t step)
{
    if (mkdir(root, 0755) == 0)
        QD_TRY(qd_folder_sync_of(root));
    else if (errno != EEXIST)
        return QD_FAIL(QD_IO, "%s: cannot be created: %s", root, strerror(errno));
    char *aside = qd_ckpt_step_path(root, step, QD_CKPT_ASIDE);
    qd_status status = aside ? qd_ckpt_remove_folder(aside) : no_memory(root); /* left by a killed run */
    if (status == QD_OK && mkdir(aside, 0755) != 0)
        status = QD_FAIL(QD_IO, "%s: cannot be created: %s", aside, strerror(errno));
    free(aside);
    return status;
}

void qd_store_abandon(const char *root, int64_t step)
{
    char *aside = qd_ckpt_step_path(root, step, QD_CKPT_ASIDE);
    if (aside)
        qd_ckpt_remove_folder(aside);
    free(aside);
}

/* Renames `aside` to `folder`. An existing folder of that name is exchanged with it, so that a
 * complete checkpoint exists at every moment. */
static qd_status move_into_place(const char *aside, const char *folder)
{
    if (renameat2(AT_FDCWD, aside, AT_FDCWD, folder, RENAME_NOREPLACE) == 0)
        return QD_OK;
    if (errno == EEXIST && renameat2(AT_FDCWD, aside, AT_FDCWD, folder, RENAME_EXCHANGE) == 0)
        return QD_OK; /* `aside` is now the old checkpoint, which the next pruning removes */
    if (errno == EINVAL || errno == ENOSYS) { /* the file system supports neither flag */
        QD_TRY(qd_ckpt_remove_folder(folder));
        if (rename(aside, folder) == 0)
            return QD_OK;
    }
    return QD_FAIL(QD_IO, "%s: cannot be renamed into place: %s", folder, strerror(errno));
}

static void add_message(char **messages, const char *message)
{
    if (!messages)
        return;
    size_t old = *messages ? strlen(*messages) : 0;
    char *longer = realloc(*messages, old + strlen(message) + 3);
    if (!longer)
        return;
    sprintf(longer + old, "%s%s", old ? "; " : "", message);
    *messages = longer;
}

/* Replaces the link atomically, or removes it (step -1). File systems without symbolic links get
 * none. A folder of that name (made by a copy that followed links) is kept and reported. */
static qd_status point_link(const char *root, const char *name, int64_t step, char **left)
{
    char target[64], aside[64];
    snprintf(target, sizeof target, "step-%012lld", (long long)step);
    snprintf(aside, sizeof aside, "%s" QD_CKPT_ASIDE, name);
    char *link = qd_ckpt_path(root, name), *beside = qd_ckpt_path(root, aside);
    qd_status status = link && beside ? QD_OK : no_memory(root);
    if (status == QD_OK) {
        unlink(beside);
        if (step < 0 || symlink(target, beside) != 0) {
            unlink(link);
        } else if (rename(beside, link) != 0) {
            status = QD_FAIL(QD_IO, "%s: cannot be renamed into place: %s", link, strerror(errno));
            bool folder = errno == EISDIR;
            unlink(beside);
            if (folder) {
                add_message(left, qd_error_message());
                qd_error_clear();
                status = QD_OK;
            }
        }
    }
    free(link);
    free(beside);
    return status;
}

/* Removes and frees `folder` (NULL: out of memory). With `left`, an error is appended there and not
 * returned. */
static qd_status remove_old(const char *root, char *folder, char **left)
{
    qd_status status = folder ? qd_ckpt_remove_folder(folder) : no_memory(root);
    free(folder);
    if (status == QD_OK || !left)
        return status;
    add_message(left, qd_error_message());
    qd_error_clear();
    return QD_OK;
}

/* Removes all but the newest `keep` checkpoints up to `newest`, and `best`. Later ones belong to an
 * abandoned continuation (damaged, or the run resumed from before them) and do not count. Temporary
 * folders were left by a kill or a replacement. What cannot be removed is reported in *left (NULL:
 * it is an error). A later checkpoint that cannot be removed is always an error: a resumed run
 * would start from it. */
static qd_status prune(const char *root, int keep, long long newest, int64_t best, char **left)
{
    long long *steps, step;
    int count;
    qd_status status = list_steps(root, &steps, &count);
    for (int i = 0, kept = 0; i < count && status == QD_OK && keep >= 0; i++) {
        if (steps[i] <= newest && (kept++ < keep || steps[i] == best))
            continue;
        status = remove_old(root, qd_ckpt_step_path(root, steps[i], ""), steps[i] <= newest ? left : NULL);
    }
    free(steps);
    DIR *dir = opendir(root);
    for (struct dirent *entry; dir && status == QD_OK && (entry = readdir(dir)) != NULL;) {
        const char *rest = parse_step(entry->d_name, &step);
        if (rest && strcmp(rest, QD_CKPT_ASIDE) == 0)
            status = remove_old(root, qd_ckpt_path(root, entry->d_name), left);
    }
    if (dir)
        closedir(dir);
    return status;
}

qd_status qd_store_commit(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, int parts, int keep, int64_t best,
                          char **left)
{
    char *aside = qd_ckpt_step_path(root, meta->step, QD_CKPT_ASIDE), *folder = qd_ckpt_step_path(root, meta->step, "");
    char run[QD_CKPT_HASH_TEXT];
    qd_ckpt_meta own = *meta;
    qd_status status = aside && folder ? ensure_run(root, run) : no_memory(root);
    *left = NULL;
    own.run = run;
    if (status == QD_OK)
        status = qd_ckpt_manifest_write(aside, ledger, &own, parts);
    if (status == QD_OK)
        status = qd_ckpt_sync_folder(aside);
    if (status == QD_OK)
        status = move_into_place(aside, folder);
    if (status == QD_OK)
        status = qd_ckpt_sync_folder(root);
    if (status == QD_OK)
        status = point_link(root, QD_CKPT_LATEST, meta->step, left);
    if (status == QD_OK)
        status = point_link(root, QD_CKPT_BEST, best, left);
    if (status == QD_OK)
        status = qd_ckpt_sync_folder(root); /* the links are durable before older checkpoints go */
    if (status == QD_OK)
        status = prune(root, keep > 0 ? keep : -1, meta->step, best, left);
    free(aside);
    free(folder);
    return status;
}

qd_status qd_store_save(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, const qd_state_pieces *pieces, int keep,
                        qd_ckpt_fetch fetch, void *context)
{
    char *left = NULL;
    qd_status status = qd_store_prepare(root, meta->step);
    if (status == QD_OK)
        status = qd_store_write(root, meta->step, 0, ledger, pieces, fetch, context);
    if (status == QD_OK)
        status = qd_store_commit(root, ledger, meta, 1, keep, -1, &left);
    free(left); /* the next commit tries again */
    if (status != QD_OK) {
        char message[1024];
        snprintf(message, sizeof message, "%s", qd_error_message());
        qd_store_abandon(root, meta->step);
        status = QD_FAIL(status, "%s", message);
    }
    return status;
}

void qd_store_repair_latest(const char *root, int64_t step)
{
    char target[64], found[64];
    char *link = qd_ckpt_path(root, QD_CKPT_LATEST), *unused = NULL;
    snprintf(target, sizeof target, "step-%012lld", (long long)step);
    ssize_t length = link ? readlink(link, found, sizeof found) : 0;
    if (link && (length != (ssize_t)strlen(target) || memcmp(found, target, (size_t)length) != 0) &&
        point_link(root, QD_CKPT_LATEST, step, &unused) != QD_OK)
        qd_error_clear(); /* the next commit tries again */
    free(unused);
    free(link);
}

int64_t qd_store_best(const char *root)
{
    char target[64];
    long long step;
    char *link = qd_ckpt_path(root, QD_CKPT_BEST);
    ssize_t length = link ? readlink(link, target, sizeof target - 1) : -1;
    free(link);
    if (length <= 0)
        return -1;
    target[length] = '\0';
    const char *rest = parse_step(target, &step);
    if (!rest || *rest != '\0')
        return -1;
    char *folder = qd_ckpt_step_path(root, step, "");
    bool there = folder && access(folder, F_OK) == 0;
    free(folder);
    return there ? step : -1;
}

bool qd_store_holds(const char *root)
{
    long long *steps;
    int count;
    qd_status status = list_steps(root, &steps, &count);
    free(steps);
    qd_error_clear();
    return status != QD_OK || count > 0;
}

/* Checkpoints of earlier versions have no identity and belong to any run. */
static qd_status check_belongs(const char *root, const char *folder, int64_t step, const qd_ckpt_meta *meta)
{
    char run[QD_CKPT_HASH_TEXT];
    if (meta->step != step)
        return QD_FAIL(QD_CORRUPT, "%s: its manifest is for step %lld: the folder was renamed or copied from another one", folder,
                       (long long)meta->step);
    read_run(root, run);
    if (run[0] == '\0' || meta->run[0] == '\0' || strcmp(run, meta->run) == 0)
        return QD_OK;
    return QD_FAIL(QD_CORRUPT, "%s: is a checkpoint of another run (%s; those of this run have %s, see %s/" QD_CKPT_RUN_ID ")", folder,
                   meta->run, run, root);
}

static qd_status open_one(const char *root, long long step, bool verify, qd_checkpoint **checkpoint)
{
    QD_TRY(qd_store_open_step(root, step, checkpoint));
    qd_status status = verify ? qd_checkpoint_verify(*checkpoint) : QD_OK;
    if (status != QD_OK) {
        qd_checkpoint_close(*checkpoint);
        *checkpoint = NULL;
    }
    return status;
}

qd_status qd_store_open(const char *root, int64_t below, bool verify, qd_checkpoint **checkpoint, char **passed_over)
{
    long long *steps;
    int count;
    *checkpoint = NULL;
    if (passed_over)
        *passed_over = NULL;
    QD_TRY(list_steps(root, &steps, &count));
    qd_status status = QD_FAIL(QD_USAGE, "%s: contains no checkpoint", root);
    for (int i = 0; i < count && status != QD_OK; i++) {
        if (steps[i] >= below)
            continue;
        status = open_one(root, steps[i], verify, checkpoint);
        if (status != QD_OK && status != QD_CORRUPT)
            break; /* not damage but fixable by the user: resuming from an older one would hide it */
        if (status != QD_OK)
            add_message(passed_over, qd_error_message());
    }
    free(steps);
    return status;
}

qd_status qd_store_open_step(const char *root, int64_t step, qd_checkpoint **checkpoint)
{
    char *folder = qd_ckpt_step_path(root, step, "");
    qd_checkpoint *opened = NULL;
    qd_status status = folder ? qd_checkpoint_open(folder, &opened) : no_memory(root);
    if (status == QD_OK)
        status = check_belongs(root, folder, step, qd_checkpoint_meta(opened));
    free(folder);
    if (status != QD_OK) {
        qd_checkpoint_close(opened);
        return status;
    }
    *checkpoint = opened;
    return QD_OK;
}

qd_status qd_store_clear(const char *root)
{
    static const char *const names[] = {QD_CKPT_LATEST, QD_CKPT_BEST, QD_CKPT_RUN_ID};
    qd_status status = QD_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names && status == QD_OK; i++) {
        char *path = qd_ckpt_path(root, names[i]);
        status = path ? QD_OK : no_memory(root);
        if (status == QD_OK && unlink(path) != 0 && errno != ENOENT && errno != ENOTDIR)
            status = QD_FAIL(QD_IO, "%s: cannot be removed: %s", path, strerror(errno));
        free(path);
    }
    return status == QD_OK ? prune(root, 0, LLONG_MAX, -1, NULL) : status;
}
