/* The word cache: open addressing with packed keys; it is cleared when full. */
#include "data/tokenizer/word_cache.h"

#include <xxhash.h>

#include <stdlib.h>

enum { FIRST_SLOTS = 1 << 12, MOST_SLOTS = 1 << 18, MOST_LONG = 4 << 20, MOST_IDS = 1 << 20 };

qd_status qd_word_cache_create(qd_word_cache *cache)
{
    /* The two stores become resident only as far as they are written. */
    cache->slots = calloc(FIRST_SLOTS, sizeof *cache->slots);
    cache->bytes = malloc(MOST_LONG);
    cache->ids = malloc(MOST_IDS * sizeof *cache->ids);
    cache->count = FIRST_SLOTS;
    return cache->slots && cache->bytes && cache->ids ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for an encoder");
}

void qd_word_cache_free(qd_word_cache *cache)
{
    free(cache->slots);
    free(cache->bytes);
    free(cache->ids);
}

static inline uint32_t slot_of(const uint64_t key[2], size_t length, uint32_t count)
{
    uint64_t mixed = (key[0] + length) * UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ mixed >> 32 ^ key[1]) * UINT64_C(0xd6e8feb86659fd93);
    return (uint32_t)(mixed >> 32) & (count - 1);
}

/* The offset of a long word's bytes is not part of its hash. */
static inline uint32_t home_of(const qd_word *word, uint32_t count)
{
    uint64_t key[2] = {word->key[0], word->length > QD_WORD_PACKED ? 0 : word->key[1]};
    return slot_of(key, word->length, count);
}

static void clear(qd_word_cache *cache)
{
    memset(cache->slots, 0, cache->count * sizeof *cache->slots);
    cache->used = cache->bytes_used = cache->ids_used = 0;
    cache->full = false;
}

static void enlarge(qd_word_cache *cache)
{
    qd_word *larger = cache->count < MOST_SLOTS ? calloc(cache->count * 2, sizeof *larger) : NULL;
    if (!larger) {
        clear(cache);
        return;
    }
    uint32_t count = cache->count * 2;
    for (uint32_t i = 0; i < cache->count; i++) {
        if (cache->slots[i].length == 0)
            continue;
        uint32_t slot = home_of(&cache->slots[i], count);
        while (larger[slot].length)
            slot = (slot + 1) & (count - 1);
        larger[slot] = cache->slots[i];
    }
    free(cache->slots);
    cache->slots = larger;
    cache->count = count;
}

static inline void pack(uint64_t key[2], const uint8_t *word, size_t length, const uint8_t *end)
{
    if (end - word >= QD_WORD_PACKED) {
        memcpy(key, word, QD_WORD_PACKED);
    } else {
        key[0] = key[1] = 0;
        memcpy(key, word, length);
    }
    /* Clears the bytes after the word: the low bytes come first. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (length < 8) {
        key[0] &= (UINT64_C(1) << 8 * length) - 1;
        key[1] = 0;
    } else if (length < 16) {
        key[1] &= (UINT64_C(1) << 8 * (length - 8)) - 1;
    }
#else
    uint8_t bytes[QD_WORD_PACKED] = {0};
    memcpy(bytes, word, length);
    memcpy(key, bytes, sizeof bytes);
#endif
}

qd_word *qd_word_cache_find(qd_word_cache *cache, const uint8_t *word, size_t length, const uint8_t *end)
{
    uint64_t key[2];
    bool is_long = length > QD_WORD_PACKED;
    if (is_long) {
        key[0] = XXH3_64bits(word, length);
        key[1] = 0;
    } else {
        pack(key, word, length, end);
    }
    if (cache->full)
        clear(cache);
    else if (cache->used * 4 >= cache->count * 3)
        enlarge(cache);
    uint32_t mask = cache->count - 1;
    qd_word *slot;
    for (uint32_t at = slot_of(key, length, cache->count); (slot = &cache->slots[at])->length; at = (at + 1) & mask) {
        if (slot->key[0] != key[0] || slot->length != length)
            continue;
        if (is_long ? memcmp(cache->bytes + slot->key[1], word, length) == 0 : slot->key[1] == key[1])
            return slot;
    }
    if (is_long) {
        if (cache->bytes_used + length > MOST_LONG) {
            cache->full = true;
            cache->spare = (qd_word){0};
            return &cache->spare;
        }
        key[1] = cache->bytes_used;
        memcpy(cache->bytes + cache->bytes_used, word, length);
        cache->bytes_used += (uint32_t)length;
    }
    cache->used++;
    *slot = (qd_word){.key = {key[0], key[1]}, .length = (uint8_t)length};
    return slot;
}

void qd_word_cache_fill(qd_word_cache *cache, qd_word *slot, const uint32_t *ids, size_t count)
{
    uint32_t *place = slot->ids;
    if (count > QD_WORD_INLINE) {
        if (cache->ids_used + count > MOST_IDS) {
            cache->full = true; /* and this word is not cached */
            return;
        }
        place = cache->ids + cache->ids_used;
        slot->ids[0] = cache->ids_used;
        cache->ids_used += (uint32_t)count;
    }
    memcpy(place, ids, count * sizeof *ids);
    slot->count = (uint8_t)count;
    slot->known = true;
}
