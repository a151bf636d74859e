/* Caches the tokens of words an encoder has seen. It is cleared when full. */
#ifndef QD_DATA_TOKENIZER_WORD_CACHE_H
#define QD_DATA_TOKENIZER_WORD_CACHE_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { QD_WORD_MOST = 64, QD_WORD_PACKED = 16, QD_WORD_INLINE = 3 };

/* Half a cache line. Words of up to 16 bytes are stored in the key itself; for longer ones it
 * contains the hash and the offset of their bytes. Up to three tokens are stored in the slot. */
typedef struct qd_word {
    uint64_t key[2];
    uint8_t length; /* 0: empty */
    uint8_t count;
    bool known;     /* the tokens are filled in */
    uint32_t ids[QD_WORD_INLINE]; /* more than three: ids[0] is their offset in cache->ids */
} qd_word;

typedef struct qd_word_cache {
    qd_word *slots;
    uint32_t count, used;
    uint8_t *bytes; /* bytes of long words */
    uint32_t *ids;  /* ids of words with many tokens */
    uint32_t bytes_used, ids_used;
    bool full;      /* a store is full: the next lookup clears the cache */
    qd_word spare;  /* for words that cannot be cached */
} qd_word_cache;

qd_status qd_word_cache_create(qd_word_cache *cache);
void qd_word_cache_free(qd_word_cache *cache);

/* The slot of a word of 1 to QD_WORD_MOST bytes; known = false if it is new. Bytes from the word up
 * to `end` may be read. */
qd_word *qd_word_cache_find(qd_word_cache *cache, const uint8_t *word, size_t length, const uint8_t *end);
/* Stores the tokens of the slot found last. */
void qd_word_cache_fill(qd_word_cache *cache, qd_word *slot, const uint32_t *ids, size_t count);

static inline const uint32_t *qd_word_ids(const qd_word_cache *cache, const qd_word *slot)
{
    return slot->count <= QD_WORD_INLINE ? slot->ids : cache->ids + slot->ids[0];
}

#endif
