/* A pool of compute threads that belongs to one rank. No OpenMP: ranks may be threads of one
 * process, and each needs a pool of its own. */
#ifndef QD_BASE_THREAD_H
#define QD_BASE_THREAD_H

#include <quadrille/status.h>
#include <stdint.h>

/* Between two looks of a loop that waits for another thread. */
static inline void qd_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` takes no time on most of these machines: the looks would follow at once */
#endif
}

typedef struct qd_pool qd_pool;

int qd_cores(void);         /* of the machine */
int qd_cores_allowed(void); /* that this process may run on */

/* Binds the calling thread to one core, the turn-th (from 0, round and round) of those that this
 * process may run on. */
qd_status qd_thread_move(int turn);

/* `threads` >= 1 counts the calling thread; pin_first >= 0 pins thread i to core (pin_first +
 * i). */
qd_status qd_pool_create(int threads, int pin_first, qd_pool **pool);
void qd_pool_destroy(qd_pool *pool);
int qd_pool_threads(const qd_pool *pool);

/* Calls body(context, begin, end, thread) for the ranges of [0, count), each of `grain` items (the
 * last may be shorter); thread is 0 .. threads-1. Returns when all have run. Ranges are handed out
 * dynamically, so results must not depend on who runs which. Not re-entrant. */
typedef void (*qd_pool_body)(void *context, int64_t begin, int64_t end, int thread);
void qd_pool_for(qd_pool *pool, int64_t count, int64_t grain, qd_pool_body body, void *context);

#endif
