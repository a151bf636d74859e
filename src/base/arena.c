/* The arena as a list of chunks that double in size; an allocation moves a pointer in the
 * newest. */
#include "base/arena.h"

#include <stdalign.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 16, FIRST_CHUNK = 16 * 1024, LARGEST_CHUNK = 1024 * 1024 };

typedef struct chunk {
    struct chunk *next;
    size_t used, size; /* bytes of data[] */
    alignas(ALIGNMENT) unsigned char data[];
} chunk;

typedef struct adopted {
    struct adopted *next;
    void *memory;
} adopted;

struct qd_arena {
    chunk *chunks; /* newest first; only the newest has free space */
    adopted *adopted; /* in the chunks */
    size_t bytes;
};

qd_status qd_arena_create(qd_arena **arena)
{
    *arena = calloc(1, sizeof **arena);
    return *arena ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for an arena");
}

void qd_arena_destroy(qd_arena *arena)
{
    if (!arena)
        return;
    for (const adopted *each = arena->adopted; each; each = each->next)
        free(each->memory);
    for (chunk *each = arena->chunks; each;) {
        chunk *next = each->next;
        free(each);
        each = next;
    }
    free(arena);
}

static chunk *chunk_add(qd_arena *arena, size_t bytes)
{
    size_t size = arena->chunks ? 2 * arena->chunks->size : FIRST_CHUNK;
    if (size > LARGEST_CHUNK)
        size = LARGEST_CHUNK;
    if (size < bytes)
        size = bytes;
    chunk *added = calloc(1, sizeof *added + size);
    if (!added) {
        (void)QD_FAIL(QD_NO_MEMORY, "no memory: %zu bytes requested, %zu in use by this arena", bytes, arena->bytes);
        return NULL;
    }
    added->size = size;
    added->next = arena->chunks;
    arena->chunks = added;
    arena->bytes += sizeof *added + size;
    return added;
}

void *qd_arena_alloc(qd_arena *arena, size_t bytes)
{
    if (bytes > SIZE_MAX / 2) {
        (void)QD_FAIL(QD_NO_MEMORY, "no memory: %zu bytes requested", bytes);
        return NULL;
    }
    size_t rounded = (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    chunk *from = arena->chunks;
    if (!from || from->size - from->used < rounded) {
        from = chunk_add(arena, rounded);
        if (!from)
            return NULL;
    }
    void *memory = from->data + from->used;
    from->used += rounded;
    return memory;
}

void *qd_arena_array(qd_arena *arena, size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        (void)QD_FAIL(QD_NO_MEMORY, "no memory: %zu items of %zu bytes requested", count, size);
        return NULL;
    }
    return qd_arena_alloc(arena, bytes);
}

void *qd_arena_adopt(qd_arena *arena, void *memory, size_t bytes)
{
    adopted *added = qd_arena_alloc(arena, sizeof *added);
    if (!added) {
        free(memory);
        return NULL;
    }
    *added = (adopted){.next = arena->adopted, .memory = memory};
    arena->adopted = added;
    arena->bytes += bytes;
    return memory;
}

char *qd_arena_strdup(qd_arena *arena, const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = qd_arena_alloc(arena, bytes);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

char *qd_arena_printf(qd_arena *arena, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    char *text = NULL;
    if (length < 0)
        (void)QD_FAIL(QD_SYSTEM, "the format \"%s\" cannot be formatted", format);
    else
        text = qd_arena_alloc(arena, (size_t)length + 1);
    if (text)
        vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    va_end(arguments);
    return text;
}

size_t qd_arena_bytes(const qd_arena *arena)
{
    return arena->bytes;
}
