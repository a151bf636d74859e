/* The run arena: memory for configuration and plans, which share their owner's lifetime and are
 * freed together. */
#ifndef QD_BASE_ARENA_H
#define QD_BASE_ARENA_H

#include <quadrille/status.h>
#include <stddef.h>

typedef struct qd_arena qd_arena;

qd_status qd_arena_create(qd_arena **arena);
void qd_arena_destroy(qd_arena *arena); /* NULL is legal */

/* Zeroed, aligned to 16 bytes. NULL when out of memory (the error is recorded). */
void *qd_arena_alloc(qd_arena *arena, size_t bytes);
#define QD_ARENA_NEW(arena, type, count) ((type *)qd_arena_array((arena), (size_t)(count), sizeof(type)))
void *qd_arena_array(qd_arena *arena, size_t count, size_t size); /* checks the product for overflow */
char *qd_arena_strdup(qd_arena *arena, const char *text);
char *qd_arena_printf(qd_arena *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Takes over memory of malloc(), which is freed with the arena, or now if that fails: then returns
 * NULL. */
void *qd_arena_adopt(qd_arena *arena, void *memory, size_t bytes);
size_t qd_arena_bytes(const qd_arena *arena); /* bytes allocated from the system */

#endif
