/* A hash table that numbers distinct keys in the order of their first occurrence. */
#include "base/intern.h"

#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

typedef struct entry {
    void *key;
    size_t length;
    uint64_t hash;
} entry;

struct qd_intern {
    qd_arena *arena; /* owns the keys */
    entry *entries;
    int32_t count, capacity;
    int32_t *slots; /* entry + 1, 0: free; a power of two, twice the capacity */
};

qd_status qd_intern_create(qd_intern **table)
{
    qd_intern *t = calloc(1, sizeof *t);
    if (!t)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a table");
    qd_status status = qd_arena_create(&t->arena);
    if (status != QD_OK) {
        free(t);
        return status;
    }
    *table = t;
    return QD_OK;
}

void qd_intern_destroy(qd_intern *t)
{
    if (!t)
        return;
    qd_arena_destroy(t->arena);
    free(t->entries);
    free(t->slots);
    free(t);
}

/* Eight bytes at a time, mixed by multiplication. */
static uint64_t hash_of(const void *key, size_t length)
{
    const unsigned char *bytes = key;
    uint64_t hash = 0xcbf29ce484222325u ^ length;
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, length - i < 8 ? length - i : 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash;
}

/* The slot that contains the key, or the free one where it belongs. */
static int32_t *slot_of(const qd_intern *t, const void *key, size_t length, uint64_t hash)
{
    uint64_t mask = (uint64_t)t->capacity * 2 - 1;
    for (uint64_t at = hash & mask;; at = (at + 1) & mask) {
        const entry *e = t->slots[at] ? &t->entries[t->slots[at] - 1] : NULL;
        if (!e || (e->hash == hash && e->length == length && memcmp(e->key, key, length) == 0))
            return &t->slots[at];
    }
}

static qd_status grow(qd_intern *t)
{
    int32_t capacity = t->capacity ? t->capacity * 2 : 64;
    entry *entries = realloc(t->entries, (size_t)capacity * sizeof *entries);
    if (entries)
        t->entries = entries;
    int32_t *slots = calloc((size_t)capacity * 2, sizeof *slots);
    if (!entries || !slots) {
        free(slots);
        return QD_FAIL(QD_NO_MEMORY, "no memory for a table of %d entries", capacity);
    }
    free(t->slots);
    t->slots = slots;
    t->capacity = capacity;
    for (int32_t i = 0; i < t->count; i++)
        *slot_of(t, entries[i].key, entries[i].length, entries[i].hash) = i + 1;
    return QD_OK;
}

qd_status qd_intern_add(qd_intern *t, const void *key, size_t length, int32_t *number)
{
    uint64_t hash = hash_of(key, length);
    if (t->count == t->capacity)
        QD_TRY(grow(t));
    int32_t *slot = slot_of(t, key, length, hash);
    if (*slot == 0) {
        void *copy = qd_arena_alloc(t->arena, length > 0 ? length : 1);
        if (!copy)
            return QD_NO_MEMORY;
        memcpy(copy, key, length);
        t->entries[t->count] = (entry){.key = copy, .length = length, .hash = hash};
        *slot = ++t->count;
    }
    *number = *slot - 1;
    return QD_OK;
}

qd_status qd_intern_text(qd_intern *t, const char *text, const char **kept)
{
    int32_t number;
    *kept = NULL;
    if (!text)
        return QD_OK;
    QD_TRY(qd_intern_add(t, text, strlen(text) + 1, &number));
    *kept = t->entries[number].key;
    return QD_OK;
}

int32_t qd_intern_count(const qd_intern *t)
{
    return t->count;
}

const void *qd_intern_key(const qd_intern *t, int32_t number)
{
    return t->entries[number].key;
}
