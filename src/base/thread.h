/* A compute thread pool that belongs to one rank. Not OpenMP: ranks may be threads of one process,
 * and each needs its own pool. */
#ifndef QD_BASE_THREAD_H
#define QD_BASE_THREAD_H

#include <pthread.h>
#include <quadrille/status.h>
#include <stdint.h>
#include <time.h>

/* CPU hint between two polls of a spin loop. */
static inline void qd_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` is a no-op on most arm64 machines: polls would follow without delay */
#endif
}

/* A condition whose timed waits follow the monotonic clock: one that is set back does not extend
 * them. The time `seconds` from now, for pthread_cond_timedwait() on such a condition. */
void qd_cond_init(pthread_cond_t *condition);
struct timespec qd_cond_until(double seconds);

/* Why pthread_create() failed with `error`. It answers EAGAIN also where there is no memory. */
const char *qd_thread_why(int error);

typedef struct qd_pool qd_pool;

int qd_cores(void);         /* on the machine */
int qd_cores_allowed(void); /* available to this process */

/* Pins the calling thread to one of the cores available to this process: the turn-th, from 0,
 * wrapping around. */
qd_status qd_thread_move(int turn);

/* A set of cores, by number. */
enum { QD_CORES_MOST = 1024 };
typedef struct qd_cores_set {
    uint64_t bits[QD_CORES_MOST / 64];
} qd_cores_set;

int qd_cores_set_count(const qd_cores_set *set);

/* The cores that the calling thread may use; and restricts it, and threads that it starts, to some
 * of them. */
qd_status qd_thread_cores(qd_cores_set *cores);
qd_status qd_thread_bind(const qd_cores_set *cores);

/* `threads` >= 1 includes the calling thread; pin_first >= 0 pins thread i to core pin_first +
 * i. */
qd_status qd_pool_create(int threads, int pin_first, qd_pool **pool);
void qd_pool_destroy(qd_pool *pool);
int qd_pool_threads(const qd_pool *pool);

/* Calls body(context, begin, end, thread) for the ranges of [0, count), each of `grain` items (the
 * last may be shorter); thread is 0 .. threads-1. Returns when all ranges have run. Ranges are
 * scheduled dynamically, so results must not depend on which thread runs which range. Not
 * re-entrant. */
typedef void (*qd_pool_body)(void *context, int64_t begin, int64_t end, int thread);
void qd_pool_for(qd_pool *pool, int64_t count, int64_t grain, qd_pool_body body, void *context);

#endif
