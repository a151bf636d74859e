/* Opens, reads and replaces files. See file.h for why nothing here maps a file or blocks on one. */
#define _GNU_SOURCE
#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define PIPE_FILE_SYSTEM 0x50495045 /* PIPEFS_MAGIC of linux/magic.h: where anonymous pipes live */

/* Reports a file that cannot be opened. */
static qd_status opening_failed(const char *path, int error)
{
    qd_status status = error == ENOMEM                        ? QD_NO_MEMORY
                       : error == EMFILE || error == ENFILE ? QD_SYSTEM
                       : error == EIO || error == ESTALE || error == ENXIO || error == ENODEV ? QD_IO
                                                                                               : QD_USAGE;
    QD_FAIL(status, "%s: cannot be read: %s", path, strerror(error));
    errno = error;
    return status;
}

static const char *kind_of(mode_t mode)
{
    return S_ISDIR(mode) ? "folder" : S_ISFIFO(mode) ? "named pipe" : S_ISSOCK(mode) ? "socket" : "device";
}

/* O_NONBLOCK: opening a named pipe would wait for a writer. streams: also accept anonymous pipes
 * and devices. */
static qd_status open_any(const char *path, bool streams, int *fd, struct stat *info)
{
    struct statfs system;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd < 0)
        return opening_failed(path, errno);
    if (fstat(*fd, info) != 0) {
        int error = errno;
        close(*fd);
        return opening_failed(path, error);
    }
    bool anonymous = S_ISFIFO(info->st_mode) && fstatfs(*fd, &system) == 0 && system.f_type == PIPE_FILE_SYSTEM;
    if (S_ISREG(info->st_mode))
        return QD_OK;
    if (streams && (anonymous || S_ISCHR(info->st_mode))) {
        fcntl(*fd, F_SETFL, fcntl(*fd, F_GETFL) & ~O_NONBLOCK);
        return QD_OK;
    }
    close(*fd);
    QD_FAIL(QD_USAGE, "%s: is a %s; a file is needed", path, kind_of(info->st_mode));
    errno = S_ISDIR(info->st_mode) ? EISDIR : EINVAL;
    return QD_USAGE;
}

qd_status qd_file_open(const char *path, int *fd, int64_t *bytes)
{
    struct stat info;
    QD_TRY(open_any(path, false, fd, &info));
    *bytes = info.st_size;
    return QD_OK;
}

qd_status qd_file_read_at(const char *path, int fd, int64_t offset, void *out, size_t bytes)
{
    char *to = out;
    while (bytes > 0) {
        ssize_t got = pread(fd, to, bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            int error = errno;
            QD_FAIL(QD_IO, "%s: byte %lld cannot be read: %s", path, (long long)offset, strerror(error));
            errno = error;
            return QD_IO;
        }
        if (got == 0) {
            QD_FAIL(QD_CORRUPT, "%s: ends before byte %lld: it has shrunk since it was opened, or is truncated", path,
                    (long long)offset);
            errno = 0;
            return QD_CORRUPT;
        }
        to += got;
        offset += got;
        bytes -= (size_t)got;
    }
    return QD_OK;
}

/* Reads to the end of the file; pipes and files of /proc do not report a length. */
static qd_status read_to_end(const char *path, int fd, size_t most, size_t capacity, char **data, size_t *used)
{
    for (;;) {
        char *grown = realloc(*data, capacity);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a file of more than %zu bytes", path, *used);
        *data = grown;
        ssize_t got = read(fd, *data + *used, capacity - 1 - *used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return QD_FAIL(QD_IO, "%s: byte %zu cannot be read: %s", path, *used, strerror(errno));
        if (got == 0)
            return QD_OK;
        *used += (size_t)got;
        if (*used > most)
            return QD_FAIL(QD_USAGE, "%s: is too large; at most %zu bytes are read", path, most);
        if (*used + 1 >= capacity)
            capacity *= 2;
    }
}

qd_status qd_file_read(const char *path, size_t most, char **text, size_t *length)
{
    struct stat info;
    char *data = NULL;
    size_t used = 0, capacity = 4096;
    int fd;
    *text = NULL;
    *length = 0;
    QD_TRY(open_any(path, true, &fd, &info));
    if (info.st_size > 0 && (uint64_t)info.st_size <= most)
        capacity = (size_t)info.st_size + 2;
    qd_status status = read_to_end(path, fd, most, capacity, &data, &used);
    int error = status == QD_IO ? errno : 0;
    close(fd);
    if (status != QD_OK) {
        free(data);
        errno = error;
        return status;
    }
    data[used] = '\0';
    *text = data;
    *length = used;
    return QD_OK;
}

qd_status qd_file_write(const char *path, int fd, const void *data, size_t bytes)
{
    const char *from = data;
    while (bytes > 0) {
        ssize_t wrote = write(fd, from, bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) /* 0: nothing was written, nor would it be the next time */
            return QD_FAIL(QD_IO, "%s: cannot be written: %s", path, strerror(wrote < 0 ? errno : ENOSPC));
        from += wrote;
        bytes -= (size_t)wrote;
    }
    return QD_OK;
}

/* The process id in a name "<base>.<pid>.tmp"; 0 for any other name. */
static pid_t writer_of(const char *name, const char *base)
{
    size_t length = strlen(base);
    long pid;
    int end = 0;
    if (strncmp(name, base, length) != 0 || sscanf(name + length, ".%9ld.tmp%n", &pid, &end) != 1 || end == 0 ||
        name[length + (size_t)end] != '\0' || pid <= 0)
        return 0;
    return (pid_t)pid;
}

/* Removes temporary files of writers that are no longer running. */
static void remove_leftovers(const char *path)
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    char *folder = slash == path ? strdup("/") : slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    DIR *dir = folder ? opendir(folder) : NULL;
    for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;) {
        pid_t writer = writer_of(entry->d_name, base);
        if (writer > 0 && kill(writer, 0) != 0 && errno == ESRCH)
            unlinkat(dirfd(dir), entry->d_name, 0);
    }
    if (dir)
        closedir(dir);
    free(folder);
}

qd_status qd_folder_sync_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash == path ? strdup("/") : slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    if (!folder)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory", path);
    qd_status status = QD_OK;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Some file systems cannot flush a folder and return EINVAL. A folder that may not be listed
     * (EACCES) cannot be opened. */
    if ((fd < 0 && errno != EACCES) || (fd >= 0 && fsync(fd) != 0 && errno != EINVAL))
        status = QD_FAIL(QD_IO, "%s: cannot be flushed to the disk: %s", folder, strerror(errno));
    if (fd >= 0)
        close(fd);
    free(folder);
    return status;
}

/* *gone: another machine that writes the same file, and knows no process of this one, has taken
 * `aside` for a leftover. */
static qd_status replace_by(const char *aside, const char *path, const char *text, size_t length, bool *gone)
{
    int fd = open(aside, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    *gone = false;
    if (fd < 0)
        return QD_FAIL(QD_IO, "%s: cannot be created: %s", path, strerror(errno));
    qd_status status = qd_file_write(path, fd, text, length);
    if (status == QD_OK && fsync(fd) != 0 && errno != EINVAL && errno != EROFS)
        status = QD_FAIL(QD_IO, "%s: cannot be written to the disk: %s", path, strerror(errno));
    close(fd);
    if (status == QD_OK && rename(aside, path) != 0) {
        *gone = errno == ENOENT;
        status = QD_FAIL(QD_IO, "%s: cannot be put in place: %s", path, strerror(errno));
    }
    if (status != QD_OK)
        unlink(aside);
    return status == QD_OK ? qd_folder_sync_of(path) : status;
}

qd_status qd_file_replace(const char *path, const char *text, size_t length)
{
    enum { TRIES = 5 };
    char *aside = NULL;
    bool gone = true;
    qd_status status = QD_OK;
    remove_leftovers(path);
    if (asprintf(&aside, "%s.%ld.tmp", path, (long)getpid()) < 0)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its name", path);
    for (int i = 0; i < TRIES && gone; i++)
        status = replace_by(aside, path, text, length, &gone);
    free(aside);
    return status;
}

qd_status qd_file_copy(const char *from, const char *to, size_t most)
{
    char *text;
    size_t length;
    QD_TRY(qd_file_read(from, most, &text, &length));
    qd_status status = qd_file_replace(to, text, length);
    free(text);
    return status;
}
