/* Token shards: a file of tokens with the documents they belong to and checksums of everything. The
 * layout is in docs/formats.md and, as C, in shard_impl.h.
 *
 * Written as a stream under another name, flushed and renamed: a shard under its final name is
 * whole. Read with pread(): see data/stored.h. */
#ifndef QD_DATA_SHARD_H
#define QD_DATA_SHARD_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QD_SHARD_SUFFIX ".qds"
#define QD_SHARD_COUNT_NAME "shards.json" /* of a folder: how many shards it has */

/* ---- reading ---- */

typedef struct qd_shard {
    const char *path; /* for messages; owned */
    int token_bytes;  /* 2 or 4 */
    int64_t vocab, token_count, document_count;
    uint64_t tokenizer_hash;
    uint64_t header_hash; /* of the header, which has the hash of the hashes of all else */
    uint64_t documents_at;     /* offset of the list of documents */
    /* of a view; NULL in an opened one: */
    const void *tokens;        /* (token_count), of token_bytes each */
    const uint64_t *documents; /* (document_count): index of each document's first token, increasing */
    const char *memory;
    struct qd_stored *file; /* of an opened one */
} qd_shard;

/* Opens a shard. The header and the list of documents are always checked; `verify` checks all
 * checksums and that each token is inside the vocabulary, with `threads` threads. QD_USAGE: no such
 * file, or no shard; QD_CORRUPT: damaged; the message names the file and the position. */
qd_status qd_shard_open(const char *path, bool verify, int threads, qd_shard *shard);
void qd_shard_close(qd_shard *shard); /* a zeroed one is legal */

/* Tokens [first, first + count), token_bytes each, and entries of the list of documents. The caller
 * keeps to their counts. Damage and failures of the disk as in qd_stored_read(). */
qd_status qd_shard_tokens(const qd_shard *shard, int64_t first, int64_t count, void *out);
qd_status qd_shard_documents(const qd_shard *shard, int64_t first, int64_t count, uint64_t *out);

/* The same over bytes in memory, aligned to 8, that stay with the caller and must outlive the
 * shard. */
qd_status qd_shard_view(const char *name, const void *bytes, size_t size, bool verify, int threads, qd_shard *shard);

/* True when the file begins as a shard does. */
bool qd_shard_recognise(const char *path);

/* ---- writing ---- */

typedef struct qd_shard_writer qd_shard_writer;

/* Makes "<path>.partial". token_bytes: qd_shard_token_bytes(vocab). */
qd_status qd_shard_writer_create(const char *path, int64_t vocab, uint64_t tokenizer_hash, qd_shard_writer **writer);
/* The next token begins a document. */
qd_status qd_shard_writer_document(qd_shard_writer *writer);
/* A token outside the vocabulary is QD_USAGE and writes nothing. */
qd_status qd_shard_writer_append(qd_shard_writer *writer, const int32_t *tokens, int64_t count);
int64_t qd_shard_writer_tokens(const qd_shard_writer *writer);
/* Flushes, renames and frees. On failure, and with qd_shard_writer_abandon, nothing is left
 * behind. */
qd_status qd_shard_writer_finish(qd_shard_writer *writer, int64_t *bytes);
void qd_shard_writer_abandon(qd_shard_writer *writer); /* NULL is legal */

static inline int qd_shard_token_bytes(int64_t vocab)
{
    return vocab <= 65536 ? 2 : 4;
}

#endif
