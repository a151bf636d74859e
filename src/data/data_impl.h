#ifndef QD_DATA_DATA_IMPL_H
#define QD_DATA_DATA_IMPL_H

#include "data/data.h"
#include "data/shard.h"

/* Tokens that lie in one piece of memory: a shard, a mapped text, or text that was encoded into memory. */
typedef struct qd_token_part {
    char *path; /* for messages */
    const void *tokens;
    int token_bytes;           /* 1, 2 or 4 */
    int64_t count, first;      /* first: place of its first token in the source */
    const uint64_t *documents; /* (document_count): as in a shard */
    int64_t document_count;
    /* what to give back; each may be empty */
    qd_shard shard;
    const void *mapping; /* of a text */
    size_t mapped;
    uint64_t inode; /* of that file */
    void *memory[2];
} qd_token_part;

/* Parts one after another: one stream of tokens. */
typedef struct qd_token_source {
    char *path;
    double weight; /* share of the samples; 0 while unknown */
    qd_token_part *parts;
    int64_t part_count, part_capacity;
    int64_t tokens, documents, files, skipped;
    int64_t windows, validation_windows; /* trained on, and the held-out ones after them */
} qd_token_source;

struct qd_data {
    int64_t seq, vocab;
    bool document_mask;
    qd_token_source *sources;
    int source_count;
    int64_t *mixture_windows, *mixture_bounds; /* of `mixture` */
    qd_mixture mixture;
    int64_t windows, validation_windows; /* of all sources */
    uint64_t tokenizer_hash;             /* of all tokens; 0: unknown */
    char *tokenizer_from;                /* who said so, for messages */
};

/* Tokens [first, first + count) of a source, checked against the vocabulary. */
qd_status qd_token_source_read(const qd_token_source *source, int64_t vocab, int64_t first, int64_t count,
                               int32_t *out);

/* The first document of the source that begins at or after `position`; source->tokens: none. */
int64_t qd_token_source_document(const qd_token_source *source, int64_t position);

/* Adds what `path` names (no mixture) to the source. */
qd_status qd_token_source_add(const qd_data_options *options, const char *path, qd_data *data, qd_token_source *source);

#endif
