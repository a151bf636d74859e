/* Shared by reading and writing checkpoints: paths, folders, checksums as text, the check for
 * values that are not finite. */
#define _GNU_SOURCE /* nftw */
#include "ckpt/checkpoint_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <math.h>
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

bool qd_ckpt_hash_parse(const char *text, uint64_t *hash)
{
    char *end;
    if (!text || strlen(text) != QD_CKPT_HASH_TEXT - 1)
        return false;
    *hash = strtoull(text, &end, 16);
    return *end == '\0';
}

/* In blocks, so that the common case has no branch per element. */
int64_t qd_ckpt_first_not_finite(const float *values, int64_t count)
{
    enum { STRETCH = 4096 };
    for (int64_t begin = 0; begin < count; begin += STRETCH) {
        const int64_t end = begin + STRETCH < count ? begin + STRETCH : count;
        uint32_t found = 0;
        for (int64_t i = begin; i < end; i++) {
            uint32_t bits;
            memcpy(&bits, &values[i], sizeof bits);
            found |= (bits & 0x7f800000u) == 0x7f800000u;
        }
        for (int64_t i = begin; found && i < end; i++)
            if (!isfinite(values[i]))
                return i;
    }
    return -1;
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

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *place)
{
    (void)info;
    (void)kind;
    (void)place;
    return remove(path);
}

qd_status qd_ckpt_remove_folder(const char *path)
{
    enum { OPEN_FOLDERS = 16 };
    if (nftw(path, remove_one, OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT)
        return QD_OK;
    return QD_FAIL(QD_IO, "%s: cannot be removed: %s", path, strerror(errno));
}
