/* The vocabulary and merge tables: open addressing with linear probing. */
#include "data/tokenizer/vocab.h"

#include <xxhash.h>

#include <stdlib.h>
#include <string.h>

void qd_vocab_free(qd_vocab *vocab)
{
    free(vocab->tokens);
    free(vocab->bytes);
    free(vocab->by_bytes);
    free(vocab->merges);
    *vocab = (qd_vocab){0};
}

/* Grows a zeroed array of `size`-byte items to `capacity`. */
static bool grow(void *array, size_t size, size_t used, size_t capacity)
{
    void **place = array;
    void *larger = realloc(*place, capacity * size);
    if (!larger)
        return false;
    memset((char *)larger + used * size, 0, (capacity - used) * size);
    *place = larger;
    return true;
}

static uint32_t hash_bytes(const void *bytes, size_t length, qd_token_kind kind)
{
    return (uint32_t)XXH3_64bits_withSeed(bytes, length, (XXH64_hash_t)kind);
}

/* Number of slots for `count` entries with a quarter of them free. */
static uint32_t slots_for(uint64_t count)
{
    uint64_t slots = 64;
    while (slots * 3 < count * 4)
        slots *= 2;
    return (uint32_t)slots;
}

static bool rehash(qd_vocab *vocab, uint32_t slots)
{
    uint32_t *table = calloc(slots, sizeof *table);
    if (!table)
        return false;
    for (uint32_t id = 0; id < vocab->size; id++) {
        if (vocab->tokens[id].kind == QD_TOKEN_NONE)
            continue;
        size_t length;
        const uint8_t *bytes = qd_vocab_bytes(vocab, id, &length);
        uint32_t slot = hash_bytes(bytes, length, (qd_token_kind)vocab->tokens[id].kind) & (slots - 1);
        while (table[slot])
            slot = (slot + 1) & (slots - 1);
        table[slot] = id + 1;
    }
    free(vocab->by_bytes);
    vocab->by_bytes = table;
    vocab->by_bytes_slots = slots;
    return true;
}

qd_status qd_vocab_reserve(qd_vocab *vocab, uint32_t size, uint32_t tokens, size_t bytes)
{
    if (size > vocab->capacity) {
        if (!grow(&vocab->tokens, sizeof *vocab->tokens, vocab->capacity, size))
            goto full;
        vocab->capacity = size;
    }
    if (bytes > vocab->bytes_capacity) {
        if (!grow(&vocab->bytes, 1, vocab->bytes_capacity, bytes))
            goto full;
        vocab->bytes_capacity = bytes;
    }
    if (slots_for(tokens) > vocab->by_bytes_slots && !rehash(vocab, slots_for(tokens)))
        goto full;
    return QD_OK;
full:
    return QD_FAIL(QD_NO_MEMORY, "no memory for a vocabulary of %u tokens", tokens);
}

uint32_t qd_vocab_find(const qd_vocab *vocab, const void *bytes, size_t length, qd_token_kind kind)
{
    if (vocab->by_bytes_slots == 0)
        return QD_NO_TOKEN;
    uint32_t mask = vocab->by_bytes_slots - 1;
    for (uint32_t slot = hash_bytes(bytes, length, kind) & mask; vocab->by_bytes[slot]; slot = (slot + 1) & mask) {
        uint32_t id = vocab->by_bytes[slot] - 1;
        const struct qd_token *token = &vocab->tokens[id];
        if (token->length == length && token->kind == kind &&
            (length == 0 || memcmp(vocab->bytes + token->offset, bytes, length) == 0))
            return id;
    }
    return QD_NO_TOKEN;
}

qd_status qd_vocab_add(qd_vocab *vocab, uint32_t id, const void *bytes, size_t length, qd_token_kind kind, uint32_t *old)
{
    const bool taken = qd_vocab_kind(vocab, id) != QD_TOKEN_NONE;
    *old = taken ? id : qd_vocab_find(vocab, bytes, length, kind);
    if (*old != QD_NO_TOKEN)
        return QD_OK;
    uint32_t capacity = vocab->capacity;
    while (id >= capacity)
        capacity = capacity < 512 ? 512 : capacity * 2;
    size_t room = vocab->bytes_capacity;
    while (vocab->bytes_used + length > room)
        room = room < 4096 ? 4096 : room * 2;
    if (vocab->bytes_used + length > UINT32_MAX || length >= 1u << 30)
        return QD_FAIL(QD_USAGE, "the tokens of a vocabulary have more than 4 GiB together");
    QD_TRY(qd_vocab_reserve(vocab, capacity, vocab->entries + 1, room));
    if (length)
        memcpy(vocab->bytes + vocab->bytes_used, bytes, length);
    vocab->tokens[id] =
        (struct qd_token){.offset = (uint32_t)vocab->bytes_used, .length = (uint32_t)length & 0x3fffffff, .kind = kind};
    vocab->bytes_used += length;
    vocab->entries++;
    if (id >= vocab->size)
        vocab->size = id + 1;
    uint32_t mask = vocab->by_bytes_slots - 1, slot = hash_bytes(bytes, length, kind) & mask;
    while (vocab->by_bytes[slot])
        slot = (slot + 1) & mask;
    vocab->by_bytes[slot] = id + 1;
    return QD_OK;
}

qd_status qd_vocab_reserve_merges(qd_vocab *vocab, uint32_t count)
{
    uint32_t slots = slots_for(count);
    if (slots <= vocab->merge_slots)
        return QD_OK;
    qd_merge *table = malloc((size_t)slots * sizeof *table), *former = vocab->merges;
    uint32_t former_slots = vocab->merge_slots;
    if (!table)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %u merges", count);
    memset(table, 0xff, (size_t)slots * sizeof *table);
    vocab->merges = table;
    vocab->merge_slots = slots;
    vocab->merge_count = 0;
    for (uint32_t i = 0; i < former_slots; i++)
        if (former[i].left != QD_NO_TOKEN)
            qd_vocab_add_merge(vocab, former[i].left, former[i].right, former[i].rank, former[i].id);
    free(former);
    return QD_OK;
}

void qd_vocab_add_merge(qd_vocab *vocab, uint32_t left, uint32_t right, uint32_t rank, uint32_t id)
{
    uint32_t mask = vocab->merge_slots - 1, slot = qd_pair_hash(left, right) & mask;
    while (vocab->merges[slot].left != QD_NO_TOKEN &&
           (vocab->merges[slot].left != left || vocab->merges[slot].right != right))
        slot = (slot + 1) & mask;
    if (vocab->merges[slot].left == QD_NO_TOKEN)
        vocab->merge_count++;
    vocab->merges[slot] = (qd_merge){left, right, rank, id};
}

static int by_rank(const void *a, const void *b)
{
    const qd_merge *x = a, *y = b;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

qd_status qd_vocab_sorted_merges(const qd_vocab *vocab, qd_merge **merges)
{
    qd_merge *list = malloc(((size_t)vocab->merge_count + 1) * sizeof *list);
    if (!list)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %u merges", vocab->merge_count);
    uint32_t count = 0;
    for (uint32_t i = 0; i < vocab->merge_slots; i++)
        if (vocab->merges[i].left != QD_NO_TOKEN)
            list[count++] = vocab->merges[i];
    qsort(list, count, sizeof *list, by_rank);
    *merges = list;
    return QD_OK;
}
