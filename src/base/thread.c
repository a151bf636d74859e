/* The compute thread pool: a parallel-for over a generation-counted gate, spinning before sleeping
 * on a futex. */
#define _GNU_SOURCE
#include "base/thread.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* How threads synchronize. The caller writes the job and opens the gate; workers enter, process
 * ranges and leave. The caller processes ranges too, then closes the gate and waits until no worker
 * is inside. A worker that wakes late finds the gate closed and touches nothing, so a short job
 * never waits for a sleeping thread.
 *
 * gate: generation << 32 | OPEN | number of workers inside. It carries all synchronization: the
 * caller's store releases the job and a worker's entry acquires it; a worker's exit releases its
 * results and the caller's final load acquires them. */
#define GATE_OPEN ((uint64_t)1 << 31)
#define GATE_INSIDE (GATE_OPEN - 1)
#define GATE_GENERATION(gate) ((gate) >> 32)

/* Two 64-byte lines, which x86 prefetches in pairs, or one line of arm64 machines with longer
 * lines. */
enum { CACHE_LINE = 128, SPINS = 512, SPINS_PER_YIELD = 32 };

typedef struct worker {
    qd_pool *pool;
    int index;
    pthread_t thread;
} worker;

struct qd_pool {
    alignas(CACHE_LINE) _Atomic uint64_t gate;
    alignas(CACHE_LINE) _Atomic int64_t next;      /* first item that no thread has taken */
    alignas(CACHE_LINE) _Atomic uint32_t job_word; /* futex: changes with each job */
    _Atomic int sleepers;
    _Atomic int stop;
    alignas(CACHE_LINE) _Atomic uint32_t done_word; /* futex: changes when the last worker leaves a closed gate */
    _Atomic int caller_sleeps;
    alignas(CACHE_LINE) qd_pool_body body;
    void *context;
    int64_t count, grain;
    int threads, started;
    worker *workers; /* threads - 1 */
    int pinned;
    cpu_set_t caller_cores; /* before pinning */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void pause_briefly(int spin)
{
    /* With more threads than cores, the awaited thread may need this core. */
    if (spin % SPINS_PER_YIELD == SPINS_PER_YIELD - 1)
        sched_yield();
    qd_pause();
}

static void take_ranges(qd_pool *pool, int thread)
{
    int64_t count = pool->count, grain = pool->grain;
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&pool->next, grain, memory_order_relaxed);
        if (begin >= count)
            return;
        pool->body(pool->context, begin, count - begin < grain ? count : begin + grain, thread);
    }
}

/* True when the worker has entered a generation it has not seen. */
static int enter(qd_pool *pool, uint64_t *seen)
{
    uint64_t gate = atomic_load_explicit(&pool->gate, memory_order_relaxed);
    while ((gate & GATE_OPEN) && GATE_GENERATION(gate) != *seen) {
        if (atomic_compare_exchange_weak_explicit(&pool->gate, &gate, gate + 1, memory_order_acquire,
                                                  memory_order_relaxed)) {
            *seen = GATE_GENERATION(gate);
            return 1;
        }
    }
    return 0;
}

static void leave(qd_pool *pool)
{
    uint64_t gate = atomic_fetch_sub(&pool->gate, 1) - 1;
    if (!(gate & GATE_OPEN) && (gate & GATE_INSIDE) == 0) {
        atomic_fetch_add(&pool->done_word, 1);
        if (atomic_load(&pool->caller_sleeps))
            futex_wake_all(&pool->done_word);
    }
}

static void *worker_main(void *argument)
{
    worker *self = argument;
    qd_pool *pool = self->pool;
    uint64_t seen = 0;
    for (;;) {
        uint32_t word = atomic_load(&pool->job_word);
        int entered = 0;
        for (int spin = 0; spin < SPINS && !(entered = enter(pool, &seen)); spin++) {
            if (atomic_load_explicit(&pool->stop, memory_order_relaxed))
                return NULL;
            pause_briefly(spin);
        }
        if (entered) {
            take_ranges(pool, self->index);
            leave(pool);
            continue;
        }
        /* The caller changes the word, then checks for sleepers; this thread registers as a
         * sleeper, then the kernel compares the word. So at least one of them notices the other. */
        atomic_fetch_add(&pool->sleepers, 1);
        futex_wait(&pool->job_word, word);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
}

static void announce(qd_pool *pool)
{
    atomic_fetch_add(&pool->job_word, 1);
    if (atomic_load(&pool->sleepers) > 0)
        futex_wake_all(&pool->job_word);
}

static int none_inside(qd_pool *pool)
{
    return (atomic_load(&pool->gate) & GATE_INSIDE) == 0;
}

static void wait_until_empty(qd_pool *pool)
{
    for (int spin = 0; spin < SPINS; spin++) {
        if (none_inside(pool))
            return;
        pause_briefly(spin);
    }
    atomic_store(&pool->caller_sleeps, 1);
    for (;;) {
        uint32_t word = atomic_load(&pool->done_word);
        if (none_inside(pool))
            break;
        futex_wait(&pool->done_word, word);
    }
    atomic_store(&pool->caller_sleeps, 0);
}

void qd_pool_for(qd_pool *pool, int64_t count, int64_t grain, qd_pool_body body, void *context)
{
    assert(grain > 0);
    if (pool->started == 0 || count <= grain) {
        for (int64_t begin = 0; begin < count; begin += grain)
            body(context, begin, count - begin < grain ? count : begin + grain, 0);
        return;
    }
    uint64_t gate = atomic_load_explicit(&pool->gate, memory_order_relaxed);
    assert((gate & (GATE_OPEN | GATE_INSIDE)) == 0 && "qd_pool_for is not re-entrant");
    pool->body = body;
    pool->context = context;
    pool->count = count;
    pool->grain = grain;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store(&pool->gate, ((GATE_GENERATION(gate) + 1) & UINT32_MAX) << 32 | GATE_OPEN);
    announce(pool);
    take_ranges(pool, 0);
    atomic_fetch_and(&pool->gate, ~GATE_OPEN);
    wait_until_empty(pool);
}

int qd_pool_threads(const qd_pool *pool)
{
    return pool->threads;
}

static qd_status pin(pthread_t thread, int core)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (core < CPU_SETSIZE)
        CPU_SET(core, &cores);
    int error = pthread_setaffinity_np(thread, sizeof cores, &cores);
    if (error != 0)
        return QD_FAIL(QD_USAGE,
                       "cannot pin a thread to core %d: %s; the core must exist and be in the affinity mask of this process", core,
                       strerror(error));
    return QD_OK;
}

const char *qd_thread_why(int error)
{
    return error == EAGAIN ? "not enough memory, or the limit of threads is reached" : strerror(error);
}

static qd_status start_worker(qd_pool *pool, int index, int pin_first)
{
    worker *self = &pool->workers[index - 1];
    *self = (worker){.pool = pool, .index = index};
    /* Workers block all signals: they are handled by the program's own threads. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&self->thread, NULL, worker_main, self);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error != 0)
        return QD_FAIL(QD_SYSTEM, "cannot start compute thread %d of %d: %s", index, pool->threads, qd_thread_why(error));
    pool->started++;
    char name[16];
    snprintf(name, sizeof name, "qd-pool-%d", index % 10000);
    pthread_setname_np(self->thread, name);
    return pin_first >= 0 ? pin(self->thread, pin_first + index) : QD_OK;
}

qd_status qd_pool_create(int threads, int pin_first, qd_pool **out)
{
    *out = NULL;
    if (threads < 1)
        return QD_FAIL(QD_USAGE, "a pool of %d threads; it needs at least 1", threads);
    qd_status status = QD_OK;
    qd_pool *pool = aligned_alloc(CACHE_LINE, sizeof *pool);
    if (!pool)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a pool of %d threads", threads);
    memset(pool, 0, sizeof *pool);
    pool->threads = threads;
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    if (!pool->workers) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory for a pool of %d threads", threads);
        goto done;
    }
    if (pin_first >= 0) {
        pool->pinned = pthread_getaffinity_np(pthread_self(), sizeof pool->caller_cores, &pool->caller_cores) == 0;
        QD_TRY_DONE(pin(pthread_self(), pin_first));
    }
    for (int i = 1; i < threads; i++)
        QD_TRY_DONE(start_worker(pool, i, pin_first));
done:
    if (status != QD_OK) {
        qd_pool_destroy(pool);
        return status;
    }
    *out = pool;
    return QD_OK;
}

void qd_pool_destroy(qd_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stop, 1);
    announce(pool);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    if (pool->pinned)
        pthread_setaffinity_np(pthread_self(), sizeof pool->caller_cores, &pool->caller_cores);
    free(pool->workers);
    free(pool);
}

int qd_cores(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores > 0 ? (int)cores : 1;
}

int qd_cores_allowed(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : qd_cores();
}

qd_status qd_thread_move(int turn)
{
    cpu_set_t set;
    /* Of the main thread: the calling thread may already be pinned. */
    if (sched_getaffinity(getpid(), sizeof set, &set) != 0)
        return QD_FAIL(QD_SYSTEM, "cannot find the cores of this process: %s", strerror(errno));
    int wanted = turn % CPU_COUNT(&set);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &set) && wanted-- == 0)
            return pin(pthread_self(), core);
    return QD_OK;
}

int qd_cores_set_count(const qd_cores_set *set)
{
    int count = 0;
    for (int i = 0; i < QD_CORES_MOST / 64; i++)
        count += __builtin_popcountll(set->bits[i]);
    return count;
}

qd_status qd_thread_cores(qd_cores_set *cores)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return QD_FAIL(QD_SYSTEM, "cannot find the cores of a thread: %s", strerror(errno));
    *cores = (qd_cores_set){0};
    for (int core = 0; core < CPU_SETSIZE && core < QD_CORES_MOST; core++)
        if (CPU_ISSET(core, &set))
            cores->bits[core / 64] |= (uint64_t)1 << core % 64;
    return QD_OK;
}

qd_status qd_thread_bind(const qd_cores_set *cores)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core = 0; core < CPU_SETSIZE && core < QD_CORES_MOST; core++)
        if (cores->bits[core / 64] >> core % 64 & 1)
            CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        return QD_FAIL(QD_SYSTEM, "cannot restrict a thread to %d cores: %s", qd_cores_set_count(cores), strerror(errno));
    return QD_OK;
}

void qd_cond_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

struct timespec qd_cond_until(double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds;
    until.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return until;
}
