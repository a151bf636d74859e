/* Files of a data set with a limit on open descriptors. The limit and the list of open files are
 * per process, as the system's limit is: ranks may be threads. */
#include "data/stored.h"

#include "base/file.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

struct qd_stored {
    char *path;
    int64_t bytes;
    dev_t device;
    ino_t inode;
    /* Protected by `lock`: */
    int fd;   /* -1: currently closed */
    int busy; /* number of threads reading it */
    qd_stored *newer, *older; /* list of open files, by last use */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static qd_stored *newest, *oldest;
static int open_count;

/* A quarter of the process's limit: the rest is left to other code. */
static int most_open(void)
{
    enum { LEAST = 16, MOST = 4096 };
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return LEAST;
    return limit.rlim_cur / 4 > MOST ? MOST : limit.rlim_cur / 4 < LEAST ? LEAST : (int)(limit.rlim_cur / 4);
}

static void unlist(qd_stored *f)
{
    *(f->newer ? &f->newer->older : &newest) = f->older;
    *(f->older ? &f->older->newer : &oldest) = f->newer;
    f->newer = f->older = NULL;
    open_count--;
}

static void list_first(qd_stored *f)
{
    f->older = newest;
    f->newer = NULL;
    *(newest ? &newest->newer : &oldest) = f;
    newest = f;
    open_count++;
}

/* Closes the least recently used files that no thread is reading, until at most `most` are open. */
static void close_old(int most)
{
    for (qd_stored *f = oldest, *next; f && open_count > most; f = next) {
        next = f->newer;
        if (f->busy > 0)
            continue;
        unlist(f);
        close(f->fd);
        f->fd = -1;
    }
}

static qd_status open_again(qd_stored *f)
{
    struct stat info;
    int64_t bytes;
    close_old(most_open() - 1);
    qd_status status = qd_file_open(f->path, &f->fd, &bytes);
    if (status == QD_SYSTEM && open_count > 0) { /* out of descriptors: other code of the process uses more than its share */
        close_old(0);
        status = qd_file_open(f->path, &f->fd, &bytes);
    }
    if (status != QD_OK) {
        f->fd = -1;
        return status;
    }
    if (fstat(f->fd, &info) == 0 && (f->inode == 0 || (info.st_dev == f->device && info.st_ino == f->inode))) {
        f->bytes = f->inode == 0 ? bytes : f->bytes;
        f->device = info.st_dev;
        f->inode = info.st_ino;
        list_first(f);
        return QD_OK;
    }
    close(f->fd);
    f->fd = -1;
    return QD_FAIL(QD_CORRUPT, "%s: the file was replaced after it was opened: do not modify data while a run reads it", f->path);
}

qd_status qd_stored_open(const char *path, qd_stored **file)
{
    qd_stored *f = calloc(1, sizeof *f);
    *file = NULL;
    if (!f || !(f->path = strdup(path))) {
        free(f);
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to open it", path);
    }
    f->fd = -1;
    pthread_mutex_lock(&lock);
    qd_status status = open_again(f);
    pthread_mutex_unlock(&lock);
    if (status == QD_OK && f->bytes == 0)
        status = QD_FAIL(QD_USAGE, "%s: the file is empty", path);
    if (status != QD_OK) {
        qd_stored_close(f);
        return status;
    }
    *file = f;
    return QD_OK;
}

void qd_stored_close(qd_stored *f)
{
    if (!f)
        return;
    pthread_mutex_lock(&lock);
    if (f->fd >= 0) {
        unlist(f);
        close(f->fd);
    }
    pthread_mutex_unlock(&lock);
    free(f->path);
    free(f);
}

int64_t qd_stored_bytes(const qd_stored *f)
{
    return f->bytes;
}

qd_status qd_stored_read(qd_stored *f, int64_t offset, void *out, size_t bytes)
{
    qd_status status = QD_OK;
    pthread_mutex_lock(&lock);
    if (f->fd < 0)
        status = open_again(f);
    else if (newest != f) {
        unlist(f);
        list_first(f);
    }
    if (status == QD_OK)
        f->busy++;
    const int fd = f->fd;
    pthread_mutex_unlock(&lock);
    QD_TRY(status);
    status = qd_file_read_at(f->path, fd, offset, out, bytes);
    pthread_mutex_lock(&lock);
    f->busy--;
    pthread_mutex_unlock(&lock);
    return status;
}
