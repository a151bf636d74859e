/* Files and folders of checkpoints. */
#include "ckpt/checkpoint_impl.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

char *qd_ckpt_path(const char *folder, const char *name)
{
    size_t size = strlen(folder) + strlen(name) + 2;
    char *path = malloc(size);
    if (path)
        snprintf(path, size, "%s/%s", folder, name);
    return path;
}

void qd_ckpt_hash_text(uint64_t hash, char text[QD_CKPT_HASH_TEXT])
{
    snprintf(text, QD_CKPT_HASH_TEXT, "%016" PRIx64, hash);
}

qd_status qd_ckpt_sync_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_IO, "%s: cannot be opened: %s", path, strerror(errno));
    bool synced = fsync(fd) == 0;
    int error = errno;
    close(fd);
    return synced ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be flushed to the disk: %s", path, strerror(error));
}

qd_status qd_ckpt_remove_folder(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir)
        return errno == ENOENT ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be opened: %s", path, strerror(errno));
    qd_status status = QD_OK;
    for (struct dirent *entry; status == QD_OK && (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) != 0)
            status = QD_FAIL(QD_IO, "%s/%s: cannot be removed: %s", path, entry->d_name, strerror(errno));
    }
    closedir(dir);
    if (status == QD_OK && rmdir(path) != 0)
        status = QD_FAIL(QD_IO, "%s: cannot be removed: %s", path, strerror(errno));
    return status;
}
