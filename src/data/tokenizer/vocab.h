/* The vocabulary: tokens by id and by bytes, and the merges. */
#ifndef QD_DATA_TOKENIZER_VOCAB_H
#define QD_DATA_TOKENIZER_VOCAB_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QD_NO_TOKEN UINT32_MAX
/* Ids may have gaps, but a small file must not cause a large allocation: the highest id is below 2
 * · entries + this. */
#define QD_MOST_HOLES 65536

typedef enum qd_token_kind {
    QD_TOKEN_NONE,   /* a gap */
    QD_TOKEN_BYTES,  /* a byte sequence that merges can produce */
    QD_TOKEN_LITERAL /* matched only as a whole: special and added tokens */
} qd_token_kind;

typedef struct qd_merge {
    uint32_t left, right; /* left QD_NO_TOKEN: empty slot */
    uint32_t rank, id;
} qd_merge;

typedef struct qd_vocab {
    struct qd_token {
        uint32_t offset, length : 30, kind : 2;
    } *tokens;           /* (size) */
    uint32_t size, capacity;
    uint8_t *bytes;      /* of all tokens */
    size_t bytes_used, bytes_capacity;
    uint32_t *by_bytes;  /* open addressing: id + 1 */
    uint32_t by_bytes_slots, entries;
    qd_merge *merges;    /* open addressing */
    uint32_t merge_slots, merge_count;
} qd_vocab;

void qd_vocab_free(qd_vocab *vocab);
/* Reserves space for `tokens` entries with ids below `size` and `bytes` bytes, so that nothing is
 * reallocated while they are added. */
qd_status qd_vocab_reserve(qd_vocab *vocab, uint32_t size, uint32_t tokens, size_t bytes);
/* *old: QD_NO_TOKEN, or the entry that conflicts: the same id, or the same bytes of the same kind;
 * then nothing was added. */
qd_status qd_vocab_add(qd_vocab *vocab, uint32_t id, const void *bytes, size_t length, qd_token_kind kind, uint32_t *old);
uint32_t qd_vocab_find(const qd_vocab *vocab, const void *bytes, size_t length, qd_token_kind kind);

static inline qd_token_kind qd_vocab_kind(const qd_vocab *vocab, uint32_t id)
{
    return id < vocab->size ? (qd_token_kind)vocab->tokens[id].kind : QD_TOKEN_NONE;
}
static inline const uint8_t *qd_vocab_bytes(const qd_vocab *vocab, uint32_t id, size_t *length)
{
    *length = vocab->tokens[id].length;
    return vocab->bytes + vocab->tokens[id].offset;
}

qd_status qd_vocab_reserve_merges(qd_vocab *vocab, uint32_t count);
/* An existing pair gets the new rank and id. Space must have been reserved. */
void qd_vocab_add_merge(qd_vocab *vocab, uint32_t left, uint32_t right, uint32_t rank, uint32_t id);
/* All merges by increasing rank, (merge_count), freed by the caller. */
qd_status qd_vocab_sorted_merges(const qd_vocab *vocab, qd_merge **merges);

static inline uint32_t qd_pair_hash(uint32_t left, uint32_t right)
{
    uint64_t key = ((uint64_t)left << 32 | right) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(key >> 32) ^ (uint32_t)key >> 15;
}

/* NULL if the pair has no merge. */
static inline const qd_merge *qd_vocab_merge(const qd_vocab *vocab, uint32_t left, uint32_t right)
{
    if (vocab->merge_slots == 0)
        return NULL;
    uint32_t mask = vocab->merge_slots - 1;
    for (uint32_t slot = qd_pair_hash(left, right) & mask;; slot = (slot + 1) & mask) {
        const qd_merge *merge = &vocab->merges[slot];
        if (merge->left == left && merge->right == right)
            return merge;
        if (merge->left == QD_NO_TOKEN)
            return NULL;
    }
}

#endif
