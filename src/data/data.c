#include "data/data.h"

#include "base/rng.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct qd_data {
    const uint8_t *bytes;
    int64_t count, seq, windows;
    uint64_t seed;
};

int64_t qd_permute(uint64_t seed, int64_t epoch, int64_t index, int64_t size)
{
    int bits = 2; /* of the domain, even, so that both halves are equal */
    while (bits < 62 && (INT64_C(1) << bits) < size)
        bits += 2;
    const int half = bits / 2;
    const uint64_t mask = (UINT64_C(1) << half) - 1;
    const qd_philox_key key = qd_rng_key(seed, "sample order");
    uint64_t value = (uint64_t)index;
    do {
        uint64_t left = value >> half, right = value & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint32_t words[4];
            qd_philox4x32(key, right, (uint64_t)epoch * 4 + round, words);
            uint64_t next = left ^ ((((uint64_t)words[1] << 32) | words[0]) & mask);
            left = right;
            right = next;
        }
        value = (left << half) | right;
    } while (value >= (uint64_t)size);
    return (int64_t)value;
}

static qd_status check_file(const char *path, int fd, int64_t seq, int64_t *size)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return QD_FAIL(QD_IO, "%s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return QD_FAIL(QD_USAGE, "data.path: %s is not a file", path);
    if (info.st_size < seq + 1)
        return QD_FAIL(QD_USAGE, "data.path: %s has %lld tokens, but one sample needs data.seq + 1 = %lld", path,
                       (long long)info.st_size, (long long)(seq + 1));
    *size = info.st_size;
    return QD_OK;
}

qd_status qd_data_open_bytes(const char *path, int64_t seq, uint64_t seed, qd_data **data)
{
    if (!path || path[0] == '\0')
        return QD_FAIL(QD_USAGE, "data.path is not set: name the file to train on, for example data.path=corpus.txt");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_USAGE, "data.path: cannot open %s: %s", path, strerror(errno));
    qd_status status = QD_OK;
    int64_t size = 0;
    void *bytes = MAP_FAILED;
    qd_data *d = calloc(1, sizeof *d);
    if (!d)
        status = QD_FAIL(QD_NO_MEMORY, "no memory to open %s", path);
    if (status == QD_OK)
        status = check_file(path, fd, seq, &size);
    if (status == QD_OK && (bytes = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED)
        status = QD_FAIL(QD_IO, "%s: cannot be mapped: %s", path, strerror(errno));
    close(fd);
    if (status != QD_OK) {
        free(d);
        return status;
    }
    *d = (qd_data){.bytes = bytes, .count = size, .seq = seq, .windows = (size - 1) / seq, .seed = seed};
    *data = d;
    return QD_OK;
}

void qd_data_close(qd_data *data)
{
    if (!data)
        return;
    munmap((void *)(uintptr_t)data->bytes, (size_t)data->count);
    free(data);
}

int64_t qd_data_windows(const qd_data *data)
{
    return data->windows;
}

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    const qd_data *d = context;
    for (int64_t i = 0; i < count; i++) {
        int64_t g = first + i;
        int64_t window = qd_permute(d->seed, g / d->windows, g % d->windows, d->windows);
        const uint8_t *text = d->bytes + window * d->seq;
        for (int64_t t = 0; t < seq; t++) {
            tokens[i * seq + t] = text[t];
            targets[i * seq + t] = text[t + 1];
            doc_start[i * seq + t] = 0;
        }
    }
    return QD_OK;
}

qd_batch_source qd_data_source(qd_data *data)
{
    return (qd_batch_source){.fill = fill, .context = data};
}
