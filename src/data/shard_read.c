/* Reads and verifies shards. No field of the header is trusted before it is checked, and all reads
 * use pread() (data/stored.h). */
#include "data/shard.h"

#include "base/file.h"
#include "base/thread.h"
#include "data/shard_impl.h"
#include "data/stored.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum { BUFFER_BYTES = 1 << 18 }; /* bytes per read; fits a core's caches */

/* Bytes of the file, or of the memory of a view. */
static qd_status shard_bytes(const qd_shard *s, uint64_t offset, void *out, size_t bytes)
{
    if (s->file)
        return qd_stored_read(s->file, (int64_t)offset, out, bytes);
    memcpy(out, s->memory + offset, bytes);
    return QD_OK;
}

qd_status qd_shard_tokens(const qd_shard *s, int64_t first, int64_t count, void *out)
{
    return shard_bytes(s, SHARD_HEADER_BYTES + (uint64_t)first * (uint64_t)s->token_bytes, out, (size_t)count * (size_t)s->token_bytes);
}

qd_status qd_shard_documents(const qd_shard *s, int64_t first, int64_t count, uint64_t *out)
{
    return shard_bytes(s, s->documents_at + (uint64_t)first * 8, out, (size_t)count * 8);
}

static qd_status check_header_bytes(const char *path, const shard_header *h, size_t size)
{
    if (size < SHARD_HEADER_BYTES)
        return QD_FAIL(QD_CORRUPT, "%s: a shard begins with %d bytes of header, but the file has %zu", path,
                       SHARD_HEADER_BYTES, size);
    if (memcmp(h->magic, SHARD_MAGIC, sizeof h->magic) != 0)
        return QD_FAIL(QD_CORRUPT, "%s: not a token shard: it does not start with " SHARD_MAGIC, path);
    /* Check the version first: another version may store its checksum elsewhere. */
    if (h->version != SHARD_VERSION)
        return QD_FAIL(QD_CORRUPT, "%s: shard of version %u, but this program reads version %d", path, h->version,
                       SHARD_VERSION);
    uint64_t hash = XXH3_64bits(h, offsetof(shard_header, header_hash));
    if (hash != h->header_hash)
        return QD_FAIL(QD_CORRUPT, "%s: the checksum of the header (bytes 0 to 119) is %016llx, but should be %016llx",
                       path, (unsigned long long)hash, (unsigned long long)h->header_hash);
    if (h->file_bytes != size)
        return QD_FAIL(QD_CORRUPT, "%s: %s: the file has %zu bytes, but its header says %llu", path,
                       size < h->file_bytes ? "truncated" : "extra bytes after the shard", size,
                       (unsigned long long)h->file_bytes);
    return QD_OK;
}

/* A header with a valid checksum may still come from another program: nothing in it is trusted
 * before it is consistent. Offsets follow from the counts, so each must be exactly the value that
 * the counts give. */
static qd_status check_header_sense(const char *path, const shard_header *h, size_t size)
{
    const uint64_t most = size; /* no count exceeds the file size */
    if (h->token_bytes != 2 && h->token_bytes != 4)
        return QD_FAIL(QD_CORRUPT, "%s: tokens of %u bytes; must be 2 or 4", path, h->token_bytes);
    if (h->vocab == 0 || h->vocab > (h->token_bytes == 2 ? UINT64_C(1) << 16 : UINT64_C(1) << 31))
        return QD_FAIL(QD_CORRUPT, "%s: a vocabulary of %llu does not fit tokens of %u bytes", path,
                       (unsigned long long)h->vocab, h->token_bytes);
    if (h->chunk_bytes < 4096 || h->chunk_bytes % 8 != 0)
        return QD_FAIL(QD_CORRUPT, "%s: chunks of %llu bytes; must be a multiple of 8 and at least 4096", path,
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
    enum { STRETCH = 4096 };
    uint64_t *documents = malloc(STRETCH * sizeof *documents), before = 0;
    qd_status status = documents ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to check its documents", s->path);
    for (int64_t first = 0, count; first < s->document_count && status == QD_OK; first += count) {
        count = s->document_count - first < STRETCH ? s->document_count - first : STRETCH;
        status = qd_shard_documents(s, first, count, documents);
        for (int64_t k = 0; k < count && status == QD_OK; k++) {
            const long long i = (long long)(first + k);
            if (documents[k] >= (uint64_t)s->token_count)
                status = QD_FAIL(QD_CORRUPT, "%s: document %lld begins at token %llu of %lld", s->path, i,
                                 (unsigned long long)documents[k], (long long)s->token_count);
            else if (i > 0 && documents[k] <= before)
                status = QD_FAIL(QD_CORRUPT, "%s: document %lld does not begin after document %lld", s->path, i, i - 1);
            before = documents[k];
        }
    }
    free(documents);
    return status;
}

typedef struct verify_job {
    const qd_shard *shard;
    const shard_header *header;
    const uint64_t *table;
    unsigned char **buffers; /* (threads): BUFFER_BYTES each */
    pthread_mutex_t lock;    /* protects the fields below */
    int64_t bad_chunk, bad_token; /* the lowest offender; INT64_MAX: none */
    qd_status status;             /* first read error */
    char message[512];
} verify_job;

static void remember_lowest(verify_job *job, int64_t *lowest, int64_t value)
{
    pthread_mutex_lock(&job->lock);
    *lowest = value < *lowest ? value : *lowest;
    pthread_mutex_unlock(&job->lock);
}

static void remember_failure(verify_job *job, qd_status status)
{
    pthread_mutex_lock(&job->lock);
    if (job->status == QD_OK)
        snprintf(job->message, sizeof job->message, "%s", qd_error_message());
    job->status = job->status == QD_OK ? status : job->status;
    pthread_mutex_unlock(&job->lock);
}

static void chunk_range(const shard_header *h, int64_t chunk, uint64_t *offset, uint64_t *length)
{
    *offset = SHARD_HEADER_BYTES + (uint64_t)chunk * h->chunk_bytes;
    uint64_t left = h->table_offset - *offset;
    *length = left < h->chunk_bytes ? left : h->chunk_bytes;
}

/* Checks tokens [first, first + count), as stored. */
static void verify_tokens(verify_job *job, const void *tokens, int64_t first, int64_t count)
{
    const qd_shard *s = job->shard;
    const uint16_t *narrow = tokens;
    const uint32_t *wide = tokens;
    uint32_t largest = 0;
    if (s->token_bytes == 2)
        for (int64_t i = 0; i < count; i++)
            largest = narrow[i] > largest ? narrow[i] : largest;
    else
        for (int64_t i = 0; i < count; i++)
            largest = wide[i] > largest ? wide[i] : largest;
    for (int64_t i = 0; i < count && (int64_t)largest >= s->vocab; i++)
        if ((int64_t)(s->token_bytes == 2 ? narrow[i] : wide[i]) >= s->vocab) {
            remember_lowest(job, &job->bad_token, first + i);
            return;
        }
}

/* Checksum and tokens in one pass. Relative to the end of the header, chunks, buffers and tokens
 * are aligned to 8 bytes, or to one token. */
static qd_status verify_chunk(verify_job *job, int64_t chunk, XXH3_state_t *hash, unsigned char *buffer)
{
    const qd_shard *s = job->shard;
    uint64_t offset, length;
    chunk_range(job->header, chunk, &offset, &length);
    XXH3_64bits_reset(hash);
    for (uint64_t end = offset + length, bytes; offset < end; offset += bytes) {
        bytes = end - offset < BUFFER_BYTES ? end - offset : BUFFER_BYTES;
        QD_TRY(shard_bytes(s, offset, buffer, bytes));
        XXH3_64bits_update(hash, buffer, bytes);
        const int64_t first = (int64_t)(offset - SHARD_HEADER_BYTES) / s->token_bytes, rest = s->token_count - first,
                      count = (int64_t)bytes / s->token_bytes;
        if (rest > 0)
            verify_tokens(job, buffer, first, count < rest ? count : rest);
    }
    if (XXH3_64bits_digest(hash) != job->table[chunk])
        remember_lowest(job, &job->bad_chunk, chunk);
    return QD_OK;
}

static void verify_chunks(void *context, int64_t begin, int64_t end, int thread)
{
    verify_job *job = context;
    XXH3_state_t *hash = XXH3_createState();
    qd_status status = hash ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to verify it", job->shard->path);
    for (int64_t i = begin; i < end && status == QD_OK; i++)
        status = verify_chunk(job, i, hash, job->buffers[thread]);
    if (status != QD_OK)
        remember_failure(job, status);
    XXH3_freeState(hash);
}

/* Reports what the threads found. A wrong checksum is more specific than a token out of range. */
static qd_status verdict(verify_job *job, int64_t chunks)
{
    const qd_shard *s = job->shard;
    uint64_t offset, length;
    uint32_t wide = 0;
    uint16_t narrow = 0;
    if (job->status != QD_OK)
        return QD_FAIL(job->status, "%s", job->message);
    if (job->bad_chunk != INT64_MAX) {
        chunk_range(job->header, job->bad_chunk, &offset, &length);
        return QD_FAIL(QD_CORRUPT, "%s: the checksum of bytes %llu to %llu is wrong (chunk %lld of %lld)", s->path,
                       (unsigned long long)offset, (unsigned long long)(offset + length - 1), (long long)job->bad_chunk, (long long)chunks);
    }
    if (job->bad_token == INT64_MAX)
        return QD_OK;
    QD_TRY(qd_shard_tokens(s, job->bad_token, 1, s->token_bytes == 2 ? (void *)&narrow : &wide));
    return QD_FAIL(QD_CORRUPT, "%s: token %lld is %u, outside the vocabulary of %lld", s->path, (long long)job->bad_token,
                   s->token_bytes == 2 ? narrow : wide, (long long)s->vocab);
}

static qd_status verify_all(const qd_shard *s, const shard_header *h, const uint64_t *table, int threads)
{
    const int64_t chunks = (int64_t)((h->file_bytes - h->table_offset) / 8);
    verify_job job = {.shard = s, .header = h, .table = table, .bad_chunk = INT64_MAX, .bad_token = INT64_MAX,
                      .lock = PTHREAD_MUTEX_INITIALIZER};
    qd_pool *pool;
    threads = threads < 1 ? 1 : threads < chunks ? threads : (int)(chunks > 0 ? chunks : 1);
    QD_TRY(qd_pool_create(threads, -1, &pool));
    qd_status status = QD_OK;
    job.buffers = calloc((size_t)threads, sizeof *job.buffers);
    for (int t = 0; t < threads && status == QD_OK; t++)
        if (!job.buffers || !(job.buffers[t] = malloc(BUFFER_BYTES)))
            status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to verify it", s->path);
    if (status == QD_OK) {
        qd_pool_for(pool, chunks, 4, verify_chunks, &job);
        status = verdict(&job, chunks);
    }
    for (int t = 0; t < threads && job.buffers; t++)
        free(job.buffers[t]);
    free(job.buffers);
    pthread_mutex_destroy(&job.lock);
    qd_pool_destroy(pool);
    return status;
}

/* The checksum table, verified against its own checksum; the caller frees it. */
static qd_status read_table(const qd_shard *s, const shard_header *h, uint64_t **table)
{
    const size_t bytes = (size_t)(h->file_bytes - h->table_offset);
    *table = malloc(bytes + 1);
    qd_status status = *table ? shard_bytes(s, h->table_offset, *table, bytes)
                              : QD_FAIL(QD_NO_MEMORY, "%s: no memory for its checksums", s->path);
    if (status == QD_OK && XXH3_64bits(*table, bytes) != h->table_hash)
        status = QD_FAIL(QD_CORRUPT, "%s: the checksum of the checksum table (from byte %llu) is wrong", s->path,
                         (unsigned long long)h->table_offset);
    if (status != QD_OK) {
        free(*table);
        *table = NULL;
    }
    return status;
}

/* shard->path and the storage have been filled in. */
static qd_status open_shard(qd_shard *shard, size_t size, bool verify, int threads)
{
    shard_header h = {0};
    uint64_t *table;
    QD_TRY(shard_bytes(shard, 0, &h, size < sizeof h ? size : sizeof h));
    QD_TRY(check_header_bytes(shard->path, &h, size));
    QD_TRY(check_header_sense(shard->path, &h, size));
    shard->token_bytes = (int)h.token_bytes;
    shard->vocab = (int64_t)h.vocab;
    shard->token_count = (int64_t)h.token_count;
    shard->document_count = (int64_t)h.document_count;
    shard->documents_at = h.documents_offset;
    shard->tokenizer_hash = h.tokenizer_hash;
    shard->header_hash = h.header_hash;
    QD_TRY(read_table(shard, &h, &table));
    /* A wrong checksum is a better diagnosis of a damaged document list than its order. */
    qd_status status = verify ? verify_all(shard, &h, table, threads) : QD_OK;
    free(table);
    return status == QD_OK ? check_documents(shard) : status;
}

qd_status qd_shard_view(const char *name, const void *bytes, size_t size, bool verify, int threads, qd_shard *shard)
{
    *shard = (qd_shard){.path = name, .memory = bytes};
    QD_TRY(open_shard(shard, size, verify, threads));
    shard->tokens = shard->memory + SHARD_HEADER_BYTES;
    shard->documents = (const uint64_t *)(shard->memory + shard->documents_at);
    return QD_OK;
}

qd_status qd_shard_open(const char *path, bool verify, int threads, qd_shard *shard)
{
    qd_stored *file = NULL;
    *shard = (qd_shard){0};
    QD_TRY(qd_stored_open(path, &file));
    *shard = (qd_shard){.path = strdup(path), .file = file};
    qd_status status = shard->path ? open_shard(shard, (size_t)qd_stored_bytes(file), verify, threads)
                                   : QD_FAIL(QD_NO_MEMORY, "%s: no memory", path);
    if (status != QD_OK)
        qd_shard_close(shard);
    return status;
}

void qd_shard_close(qd_shard *shard)
{
    if (shard->file) {
        qd_stored_close(shard->file);
        free((void *)(uintptr_t)shard->path);
    }
    *shard = (qd_shard){0};
}

bool qd_shard_recognise(const char *path)
{
    char magic[sizeof SHARD_MAGIC - 1];
    int64_t bytes;
    int fd;
    if (qd_file_open(path, &fd, &bytes) != QD_OK)
        return false;
    bool same = read(fd, magic, sizeof magic) == (ssize_t)sizeof magic && memcmp(magic, SHARD_MAGIC, sizeof magic) == 0;
    close(fd);
    return same;
}
