/* Token shards: a file of tokens, the documents they belong to, and checksums of everything. The
 * file layout is in docs/formats.md and, as C, in shard_impl.h.
 *
 * A shard is streamed to a temporary name, flushed and renamed: under its final name it is
 * complete. It is read with pread(); data/stored.h says why. */
#ifndef QD_DATA_SHARD_H
#define QD_DATA_SHARD_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QD_SHARD_SUFFIX ".qds"
#define QD_SHARD_COUNT_NAME "shards.json" /* in a folder: the number of its shards */

typedef struct qd_shard {
    const char *path; /* for messages; owned */
    int token_bytes;  /* 2 or 4 */
    int64_t vocab, token_count, document_count;
    uint64_t tokenizer_hash;
    uint64_t header_hash; /* covers everything: the header contains the hash of the checksum table */
    uint64_t documents_at;     /* offset of the document list */
    /* Of a view; NULL if opened from a file: */
    const void *tokens;        /* (token_count), of token_bytes each */
    const uint64_t *documents; /* (document_count): index of each document's first token, increasing */
    const char *memory;
    struct qd_stored *file; /* if opened from a file */
} qd_shard;

/* Opens a shard. The header and the document list are always checked; `verify` checks all checksums
 * and that each token is inside the vocabulary, with `threads` threads. QD_USAGE: no such file, or
 * not a shard; QD_CORRUPT: damaged. The message names the file and the position. */
qd_status qd_shard_open(const char *path, bool verify, int threads, qd_shard *shard);
void qd_shard_close(qd_shard *shard); /* a zeroed one is legal */

/* Tokens [first, first + count), token_bytes each, and entries of the document list. The caller
 * stays within the counts. Damage and disk errors as in qd_stored_read(). */
qd_status qd_shard_tokens(const qd_shard *shard, int64_t first, int64_t count, void *out);
qd_status qd_shard_documents(const qd_shard *shard, int64_t first, int64_t count, uint64_t *out);

/* The same for bytes in memory, aligned to 8, which belong to the caller and must outlive the
 * shard. */
qd_status qd_shard_view(const char *name, const void *bytes, size_t size, bool verify, int threads, qd_shard *shard);

/* True if the file starts with a shard's magic bytes. */
bool qd_shard_recognise(const char *path);

typedef struct qd_shard_writer qd_shard_writer;

/* Creates "<path>.partial". Tokens have qd_shard_token_bytes(vocab) bytes. */
qd_status qd_shard_writer_create(const char *path, int64_t vocab, uint64_t tokenizer_hash, qd_shard_writer **writer);
/* The next token begins a document. */
qd_status qd_shard_writer_document(qd_shard_writer *writer);
/* A token outside the vocabulary is QD_USAGE and writes nothing. */
qd_status qd_shard_writer_append(qd_shard_writer *writer, const int32_t *tokens, int64_t count);
int64_t qd_shard_writer_tokens(const qd_shard_writer *writer);
/* Flushes, renames and frees. After an error, and with qd_shard_writer_abandon, no file is left
 * behind. */
qd_status qd_shard_writer_finish(qd_shard_writer *writer, int64_t *bytes);
void qd_shard_writer_abandon(qd_shard_writer *writer); /* NULL is legal */

static inline int qd_shard_token_bytes(int64_t vocab)
{
    return vocab <= 65536 ? 2 : 4;
}

#endif
