/* Writes shards as a stream: tokens in checksummed chunks, then documents, checksums and the
 * header. */
#include "data/shard.h"

#include "base/file.h"
#include "data/files.h"
#include "data/shard_impl.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

typedef struct word_list {
    uint64_t *data;
    int64_t count, capacity;
} word_list;

struct qd_shard_writer {
    char *path, *partial;
    int fd;
    shard_header header;
    unsigned char *chunk; /* (SHARD_CHUNK_BYTES): part of the body that is not written yet */
    size_t filled;
    word_list documents, table;
};

qd_status qd_shard_writer_create(const char *path, int64_t vocab, uint64_t tokenizer_hash, qd_shard_writer **writer)
{
    *writer = NULL;
    if (vocab < 1 || vocab > INT32_MAX)
        return QD_FAIL(QD_USAGE, "%s: a vocabulary of %lld; must be from 1 to 2147483647", path, (long long)vocab);
    qd_shard_writer *w = calloc(1, sizeof *w);
    if (!w)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", path);
    w->fd = -1;
    w->header = (shard_header){
        .version = SHARD_VERSION,
        .token_bytes = (uint32_t)qd_shard_token_bytes(vocab),
        .vocab = (uint64_t)vocab,
        .tokenizer_hash = tokenizer_hash,
        .chunk_bytes = SHARD_CHUNK_BYTES,
    };
    memcpy(w->header.magic, SHARD_MAGIC, sizeof w->header.magic);
    w->path = strdup(path);
    w->partial = qd_path_with(path, ".partial");
    w->chunk = malloc(SHARD_CHUNK_BYTES);
    qd_status status = QD_OK;
    if (!w->path || !w->partial || !w->chunk)
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", path);
    else if ((w->fd = open(w->partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) < 0)
        status = QD_FAIL(QD_IO, "%s: cannot be created: %s", w->partial, strerror(errno));
    /* The header stays zero until everything is written. */
    static const char zeros[SHARD_HEADER_BYTES];
    if (status == QD_OK)
        status = qd_file_write(w->partial, w->fd, zeros, sizeof zeros);
    if (status != QD_OK) {
        qd_shard_writer_abandon(w);
        return status;
    }
    *writer = w;
    return QD_OK;
}

void qd_shard_writer_abandon(qd_shard_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0) {
        close(w->fd);
        unlink(w->partial);
    }
    free(w->path);
    free(w->partial);
    free(w->chunk);
    free(w->documents.data);
    free(w->table.data);
    free(w);
}

static qd_status push(qd_shard_writer *w, word_list *list, uint64_t word)
{
    if (list->count == list->capacity) {
        int64_t capacity = list->capacity ? list->capacity * 2 : 256;
        uint64_t *data = realloc(list->data, (size_t)capacity * sizeof *data);
        if (!data)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its documents", w->path);
        list->data = data;
        list->capacity = capacity;
    }
    list->data[list->count++] = word;
    return QD_OK;
}

static qd_status flush_chunk(qd_shard_writer *w)
{
    QD_TRY(push(w, &w->table, XXH3_64bits(w->chunk, w->filled)));
    QD_TRY(qd_file_write(w->partial, w->fd, w->chunk, w->filled));
    w->filled = 0;
    return QD_OK;
}

static qd_status write_body(qd_shard_writer *w, const void *bytes, size_t length)
{
    const unsigned char *from = bytes;
    while (length > 0) {
        size_t part = SHARD_CHUNK_BYTES - w->filled;
        part = length < part ? length : part;
        memcpy(w->chunk + w->filled, from, part);
        w->filled += part;
        from += part;
        length -= part;
        if (w->filled == SHARD_CHUNK_BYTES)
            QD_TRY(flush_chunk(w));
    }
    return QD_OK;
}

qd_status qd_shard_writer_document(qd_shard_writer *w)
{
    /* A document without tokens is dropped. */
    if (w->documents.count > 0 && w->documents.data[w->documents.count - 1] == w->header.token_count)
        return QD_OK;
    return push(w, &w->documents, w->header.token_count);
}

qd_status qd_shard_writer_append(qd_shard_writer *w, const int32_t *tokens, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || (uint64_t)tokens[i] >= w->header.vocab)
            return QD_FAIL(QD_USAGE, "%s: token %llu would be %d, outside the vocabulary of %llu", w->path,
                           (unsigned long long)w->header.token_count + (unsigned long long)i, tokens[i],
                           (unsigned long long)w->header.vocab);
    if (w->header.token_bytes == 4) {
        QD_TRY(write_body(w, tokens, (size_t)count * 4));
    } else {
        uint16_t narrow[4096];
        for (int64_t at = 0; at < count; at += 4096) {
            int64_t part = count - at < 4096 ? count - at : 4096;
            for (int64_t i = 0; i < part; i++)
                narrow[i] = (uint16_t)tokens[at + i];
            QD_TRY(write_body(w, narrow, (size_t)part * 2));
        }
    }
    w->header.token_count += (uint64_t)count;
    return QD_OK;
}

int64_t qd_shard_writer_tokens(const qd_shard_writer *w)
{
    return (int64_t)w->header.token_count;
}

static qd_status write_end(qd_shard_writer *w)
{
    shard_header *h = &w->header;
    static const char zeros[8];
    if (h->token_count == 0)
        return QD_FAIL(QD_USAGE, "%s: no tokens to write", w->path);
    /* Drop a last document that got no tokens. */
    if (w->documents.count > 0 && w->documents.data[w->documents.count - 1] == h->token_count)
        w->documents.count--;
    uint64_t token_bytes = h->token_count * h->token_bytes;
    QD_TRY(write_body(w, zeros, (8 - token_bytes % 8) % 8));
    QD_TRY(write_body(w, w->documents.data, (size_t)w->documents.count * 8));
    if (w->filled > 0)
        QD_TRY(flush_chunk(w));
    h->document_count = (uint64_t)w->documents.count;
    h->documents_offset = SHARD_HEADER_BYTES + (token_bytes + 7) / 8 * 8;
    h->table_offset = h->documents_offset + h->document_count * 8;
    h->file_bytes = h->table_offset + (uint64_t)w->table.count * 8;
    h->table_hash = XXH3_64bits(w->table.data, (size_t)w->table.count * 8);
    QD_TRY(qd_file_write(w->partial, w->fd, w->table.data, (size_t)w->table.count * 8));
    h->header_hash = XXH3_64bits(h, offsetof(shard_header, header_hash));
    if (pwrite(w->fd, h, sizeof *h, 0) != (ssize_t)sizeof *h)
        return QD_FAIL(QD_IO, "%s: cannot be written: %s", w->partial, strerror(errno));
    if (fsync(w->fd) != 0)
        return QD_FAIL(QD_IO, "%s: cannot be flushed to the disk: %s", w->partial, strerror(errno));
    return QD_OK;
}

qd_status qd_shard_writer_finish(qd_shard_writer *w, int64_t *bytes)
{
    qd_status status = write_end(w);
    if (status == QD_OK && rename(w->partial, w->path) != 0)
        status = QD_FAIL(QD_IO, "%s: cannot be renamed to %s: %s", w->partial, w->path, strerror(errno));
    if (status == QD_OK) {
        status = qd_folder_sync_of(w->path);
        *bytes = (int64_t)w->header.file_bytes;
        close(w->fd);
        w->fd = -1; /* nothing left to clean up */
    }
    qd_shard_writer_abandon(w);
    return status;
}
