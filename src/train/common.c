#define _GNU_SOURCE /* mkostemp */
#include "train/common.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { HOST_BYTES = 256, SAMPLES = 16 };

/* What rank 0 tells the others: its host, and a file it has made (PATH_MAX of both is plenty). */
typedef struct mark {
    int32_t status; /* of making it */
    char host[HOST_BYTES], path[PATH_MAX];
} mark;

static void find_host(char host[HOST_BYTES])
{
    if (gethostname(host, HOST_BYTES) != 0)
        snprintf(host, HOST_BYTES, "?");
    host[HOST_BYTES - 1] = '\0';
}

qd_status qd_agree(qd_comm *comm, qd_status mine, bool *agreed)
{
    int rank = qd_comm_rank(comm), size = qd_comm_size(comm);
    int64_t vote = mine == QD_OK ? 0 : ((int64_t)(size - rank) << 8) | (int64_t)mine;
    int64_t worst = 0;
    QD_TRY(qd_comm_all_reduce(comm, &vote, &worst, 1, QD_I64, QD_MAX, NULL));
    *agreed = worst != 0;
    if (worst == 0 || worst == vote)
        return mine;
    qd_error_clear();
    return (qd_status)(worst & 0xff);
}

qd_status qd_path_existing(char *path)
{
    struct stat info;
    while (stat(path, &info) != 0) {
        char *slash = strrchr(path, '/');
        if (errno != ENOENT && errno != ENOTDIR)
            return QD_FAIL(QD_USAGE, "run.dir: %s: %s", path, strerror(errno));
        if (!slash || slash == path)
            snprintf(path, PATH_MAX, "%s", slash ? "/" : ".");
        else
            *slash = '\0';
    }
    return QD_OK;
}

/* A name that no rank has looked up before: network file systems remember what was not there. */
static qd_status make_mark(const char *folder, mark *m)
{
    char existing[PATH_MAX];
    find_host(m->host);
    snprintf(existing, sizeof existing, "%s", folder);
    QD_TRY(qd_path_existing(existing));
    int n = snprintf(m->path, sizeof m->path, "%s/.quadrille-XXXXXX", existing);
    int fd = n > 0 && n < PATH_MAX ? mkostemp(m->path, O_CLOEXEC) : -1;
    if (fd < 0)
        return QD_FAIL(QD_USAGE, "run.dir: nothing can be written in %s: %s", existing, strerror(errno));
    close(fd);
    return QD_OK;
}

static qd_status see_mark(const mark *m, const char *folder, int rank)
{
    char host[HOST_BYTES];
    struct stat info;
    if (stat(m->path, &info) == 0)
        return QD_OK;
    find_host(host);
    return QD_FAIL(QD_USAGE, "run.dir: %s on host %s, as rank %d sees it, is not the folder of rank 0 on host %s: all ranks write checkpoints there, so put it on a file "
                             "system that all machines mount, under one path", folder, host, rank, m->host);
}

qd_status qd_common_folder(qd_comm *comm, const char *folder, bool *agreed)
{
    mark *m = calloc(1, sizeof *m);
    int rank = qd_comm_rank(comm);
    qd_status status = m ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to compare folders");
    QD_TRY_DONE(qd_agree(comm, status, agreed));
    if (rank == 0)
        m->status = status = make_mark(folder, m);
    bool made = rank == 0 && status == QD_OK;
    qd_status told = qd_comm_broadcast(comm, m, sizeof *m, QD_U8, 0, NULL);
    if (told == QD_OK && rank > 0)
        status = m->status == QD_OK ? see_mark(m, folder, rank) : QD_OK;
    status = told == QD_OK ? qd_agree(comm, status, agreed) : told;
    if (made)
        unlink(m->path);
done:
    free(m);
    return status;
}

/* Of the number of windows and of the tokens of some, spread over the first epoch. */
static qd_status hash_data(qd_data *data, int64_t seq, int64_t *windows, int64_t *hash)
{
    qd_batch_source source = qd_data_source(data);
    int32_t *sample = malloc((size_t)(3 * seq) * sizeof *sample); /* tokens, targets, document starts */
    XXH64_hash_t value = 0;
    qd_status status = sample ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to compare data");
    *windows = qd_data_windows(data);
    for (int i = 0; i < SAMPLES && status == QD_OK; i++) {
        status = source.fill(source.context, *windows / SAMPLES * i, 1, seq, sample, sample + seq, sample + 2 * seq);
        if (status == QD_OK)
            value = XXH3_64bits_withSeed(sample, (size_t)(3 * seq) * sizeof *sample, value);
    }
    free(sample);
    *hash = (int64_t)value;
    return status;
}

qd_status qd_common_data(qd_comm *comm, qd_data *data, int64_t seq, bool *agreed)
{
    int64_t own[2] = {0}, first[2];
    char host[HOST_BYTES];
    QD_TRY(qd_agree(comm, hash_data(data, seq, &own[0], &own[1]), agreed));
    memcpy(first, own, sizeof first);
    QD_TRY(qd_comm_broadcast(comm, first, 2, QD_I64, 0, NULL));
    qd_status status = QD_OK;
    find_host(host);
    if (own[0] != first[0])
        status = QD_FAIL(QD_USAGE, "data.path: rank %d on host %s reads %lld windows of %lld tokens, rank 0 reads %lld: all ranks must read the same data", qd_comm_rank(comm), host,
                         (long long)own[0], (long long)seq, (long long)first[0]);
    else if (own[1] != first[1])
        status = QD_FAIL(QD_USAGE, "data.path: rank %d on host %s reads other tokens than rank 0: all ranks must read the same data, with the same tokenizer", qd_comm_rank(comm), host);
    return qd_agree(comm, status, agreed);
}
