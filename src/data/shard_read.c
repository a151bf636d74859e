#include "data/shard.h"

#include "base/thread.h"
#include "data/files.h"
#include "data/shard_impl.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- header ---- */

static qd_status check_header_bytes(const char *path, const shard_header *h, size_t size)
{
    if (size < SHARD_HEADER_BYTES)
        return QD_FAIL(QD_CORRUPT, "%s: a shard begins with %d bytes of header, but the file has %zu", path,
                       SHARD_HEADER_BYTES, size);
    if (memcmp(h->magic, SHARD_MAGIC, sizeof h->magic) != 0)
        return QD_FAIL(QD_CORRUPT, "%s: not a token shard: it does not begin with " SHARD_MAGIC, path);
    /* The version comes first: another version may keep its checksum elsewhere. */
    if (h->version != SHARD_VERSION)
        return QD_FAIL(QD_CORRUPT, "%s: shard of version %u, but this program reads version %d", path, h->version,
                       SHARD_VERSION);
    uint64_t hash = XXH3_64bits(h, offsetof(shard_header, header_hash));
    if (hash != h->header_hash)
        return QD_FAIL(QD_CORRUPT, "%s: the checksum of the header (bytes 0 to 119) is %016llx, but should be %016llx",
                       path, (unsigned long long)hash, (unsigned long long)h->header_hash);
    if (h->file_bytes != size)
        return QD_FAIL(QD_CORRUPT, "%s: %s: the file has %zu bytes, but its header says %llu", path,
                       size < h->file_bytes ? "cut off" : "something follows the shard", size,
                       (unsigned long long)h->file_bytes);
    return QD_OK;
}

/* A header with a right checksum may still be made by somebody else's program: nothing in it is believed before it
 * fits. Offsets follow from the counts, so each must be the one value that the counts give. */
static qd_status check_header_sense(const char *path, const shard_header *h, size_t size)
{
    const uint64_t most = size; /* no count can be larger than the file */
    if (h->token_bytes != 2 && h->token_bytes != 4)
        return QD_FAIL(QD_CORRUPT, "%s: tokens of %u bytes; 2 or 4 would be right", path, h->token_bytes);
    if (h->vocab == 0 || h->vocab > (h->token_bytes == 2 ? UINT64_C(1) << 16 : UINT64_C(1) << 31))
        return QD_FAIL(QD_CORRUPT, "%s: a vocabulary of %llu does not fit tokens of %u bytes", path,
                       (unsigned long long)h->vocab, h->token_bytes);
    if (h->chunk_bytes < 4096 || h->chunk_bytes % 8 != 0)
        return QD_FAIL(QD_CORRUPT, "%s: chunks of %llu bytes; a multiple of 8 from 4096 on would be right", path,
                       (unsigned long long)h->chunk_bytes);
    for (size_t i = 0; i < sizeof h->reserved / sizeof h->reserved[0]; i++)
        if (h->reserved[i] != 0)
            return QD_FAIL(QD_CORRUPT, "%s: a reserved field of the header is not 0", path);
    if (h->token_count == 0)
        return QD_FAIL(QD_CORRUPT, "%s: the shard is empty", path);
    if (h->token_count > most || h->document_count > h->token_count)
        return QD_FAIL(QD_CORRUPT, "%s: %llu tokens in %llu documents do not fit a file of %zu bytes", path,
                       (unsigned long long)h->token_count, (unsigned long long)h->document_count, size);
    uint64_t documents = SHARD_HEADER_BYTES + (h->token_count * h->token_bytes + 7) / 8 * 8;
    uint64_t table = documents + h->document_count * 8;
    uint64_t chunks =
        (table - SHARD_HEADER_BYTES) / h->chunk_bytes + ((table - SHARD_HEADER_BYTES) % h->chunk_bytes != 0);
    if (h->documents_offset != documents || h->table_offset != table || h->file_bytes != table + chunks * 8)
        return QD_FAIL(QD_CORRUPT, "%s: the counts in the header do not give its offsets or its size", path);
    return QD_OK;
}

static qd_status check_documents(const qd_shard *s)
{
    for (int64_t i = 0; i < s->document_count; i++) {
        if (s->documents[i] >= (uint64_t)s->token_count)
            return QD_FAIL(QD_CORRUPT, "%s: document %lld begins at token %llu of %lld", s->path, (long long)i,
                           (unsigned long long)s->documents[i], (long long)s->token_count);
        if (i > 0 && s->documents[i] <= s->documents[i - 1])
            return QD_FAIL(QD_CORRUPT, "%s: document %lld does not begin after document %lld", s->path, (long long)i,
                           (long long)(i - 1));
    }
    return QD_OK;
}

/* ---- all of it ---- */

typedef struct verify_job {
    const qd_shard *shard;
    const shard_header *header;
    const uint64_t *table;
    _Atomic int64_t first_bad; /* the lowest chunk or token that is wrong */
} verify_job;

static void remember_lowest(_Atomic int64_t *lowest, int64_t value)
{
    int64_t seen = atomic_load(lowest);
    while (value < seen && !atomic_compare_exchange_weak(lowest, &seen, value))
        ;
}

static void chunk_range(const shard_header *h, int64_t chunk, uint64_t *offset, uint64_t *length)
{
    *offset = SHARD_HEADER_BYTES + (uint64_t)chunk * h->chunk_bytes;
    uint64_t left = h->table_offset - *offset;
    *length = left < h->chunk_bytes ? left : h->chunk_bytes;
}

static void verify_chunks(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    verify_job *job = context;
    for (int64_t i = begin; i < end; i++) {
        uint64_t offset, length;
        chunk_range(job->header, i, &offset, &length);
        if (XXH3_64bits((const char *)job->shard->mapping + offset, length) != job->table[i])
            remember_lowest(&job->first_bad, i);
    }
}

static void verify_tokens(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    verify_job *job = context;
    const qd_shard *s = job->shard;
    const uint16_t *narrow = s->tokens;
    const uint32_t *wide = s->tokens;
    uint32_t largest = 0;
    if (s->token_bytes == 2)
        for (int64_t i = begin; i < end; i++)
            largest = narrow[i] > largest ? narrow[i] : largest;
    else
        for (int64_t i = begin; i < end; i++)
            largest = wide[i] > largest ? wide[i] : largest;
    if ((int64_t)largest < s->vocab)
        return;
    for (int64_t i = begin; i < end; i++)
        if ((int64_t)(s->token_bytes == 2 ? narrow[i] : wide[i]) >= s->vocab) {
            remember_lowest(&job->first_bad, i);
            return;
        }
}

static qd_status verify_all(const qd_shard *s, const shard_header *h, int threads)
{
    qd_pool *pool;
    QD_TRY(qd_pool_create(threads, -1, &pool));
    const uint64_t *table = (const uint64_t *)((const char *)s->mapping + h->table_offset);
    const int64_t chunks = (int64_t)((h->file_bytes - h->table_offset) / 8);
    verify_job job = {.shard = s, .header = h, .table = table, .first_bad = INT64_MAX};
    qd_status status = QD_OK;
    qd_pool_for(pool, chunks, 4, verify_chunks, &job);
    if (job.first_bad != INT64_MAX) {
        uint64_t offset, length;
        chunk_range(h, job.first_bad, &offset, &length);
        status = QD_FAIL(QD_CORRUPT, "%s: the checksum of bytes %llu to %llu is wrong (chunk %lld of %lld)", s->path,
                         (unsigned long long)offset, (unsigned long long)(offset + length - 1),
                         (long long)job.first_bad, (long long)chunks);
    } else {
        qd_pool_for(pool, s->token_count, 1 << 20, verify_tokens, &job);
        if (job.first_bad != INT64_MAX) {
            int64_t at = job.first_bad;
            uint32_t token =
                s->token_bytes == 2 ? ((const uint16_t *)s->tokens)[at] : ((const uint32_t *)s->tokens)[at];
            status = QD_FAIL(QD_CORRUPT, "%s: token %lld is %u, outside the vocabulary of %lld", s->path, (long long)at,
                             token, (long long)s->vocab);
        }
    }
    qd_pool_destroy(pool);
    return status;
}

qd_status qd_shard_view(const char *name, const void *bytes, size_t size, bool verify, int threads, qd_shard *shard)
{
    const shard_header *h = bytes;
    QD_TRY(check_header_bytes(name, h, size));
    QD_TRY(check_header_sense(name, h, size));
    const char *base = bytes;
    uint64_t table_hash = XXH3_64bits(base + h->table_offset, h->file_bytes - h->table_offset);
    if (table_hash != h->table_hash)
        return QD_FAIL(QD_CORRUPT, "%s: the checksum of the checksum table (from byte %llu) is wrong", name,
                       (unsigned long long)h->table_offset);
    *shard = (qd_shard){
        .path = name,
        .token_bytes = (int)h->token_bytes,
        .vocab = (int64_t)h->vocab,
        .token_count = (int64_t)h->token_count,
        .document_count = (int64_t)h->document_count,
        .tokenizer_hash = h->tokenizer_hash,
        .tokens = base + SHARD_HEADER_BYTES,
        .documents = (const uint64_t *)(base + h->documents_offset),
        .mapping = bytes,
        .size = size,
    };
    /* A wrong checksum says more about a damaged list of documents than its order does. */
    if (verify)
        QD_TRY(verify_all(shard, h, threads));
    return check_documents(shard);
}

/* ---- files ---- */

qd_status qd_shard_open(const char *path, bool verify, int threads, qd_shard *shard)
{
    const void *bytes = NULL;
    size_t size = 0;
    *shard = (qd_shard){0};
    QD_TRY(qd_file_map(path, &bytes, &size));
    char *name = strdup(path);
    qd_status status =
        name ? qd_shard_view(name, bytes, size, verify, threads, shard) : QD_FAIL(QD_NO_MEMORY, "%s: no memory", path);
    if (status != QD_OK) {
        qd_file_unmap(bytes, size);
        free(name);
        *shard = (qd_shard){0};
    }
    return status;
}

void qd_shard_close(qd_shard *shard)
{
    qd_file_unmap(shard->mapping, shard->size);
    free((void *)(uintptr_t)shard->path);
    *shard = (qd_shard){0};
}

bool qd_shard_recognise(const char *path)
{
    char magic[sizeof SHARD_MAGIC - 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool same = read(fd, magic, sizeof magic) == (ssize_t)sizeof magic && memcmp(magic, SHARD_MAGIC, sizeof magic) == 0;
    close(fd);
    return same;
}
