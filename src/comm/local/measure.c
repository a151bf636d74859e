/* Measures which copies suit this machine: below which size results are better written through the
 * caches, and which non-temporal copy is the fastest beyond. Each thread copies from the memory of
 * its neighbour into its own, all at once, as the ranks of a collective do. */
#include "comm/local/ways.h"

#include "base/clock.h"
#include "base/memory.h"
#include "base/thread.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS_MOST = 4, SIZES_MOST = 8, SIZES_LEAST = 4, RUNS_MOST = 12, RUNS_LEAST = 2, PAUSES = 2000 };
#define PATIENCE 5.0 /* times the time for a measurement, after which one on a busy machine is given up */
enum { EVEN, ODD, ALL, HALVES };
#define LEAST_BYTES (512 << 10) /* of one copy */
#define PIECE_BYTES (256 << 10) /* collectives copy in pieces, and a long memcpy may bypass the caches by itself */
/* Of all buffers: more than the caches that cores share. With less a copy that is slow from and to
 * memory may look fast. */
#define TOTAL_BYTES (256 << 20)
#define TOTAL_SHARE 16 /* and at most this part of the memory that is free */
#define CLEARLY 1.03   /* how much faster a copy must be to replace the built-in one */
/* How much faster a copy through the caches must be: in a collective, results in the caches
 * displace the next sources, which this measurement does not show. */
#define CACHED_LEAST 1.05

typedef struct meter {
    int threads, sizes;
    char *from[THREADS_MOST], *to[THREADS_MOST];
    _Atomic unsigned arrived; /* at a barrier, ever */
    _Atomic int begin;        /* 1: all threads run; -1: one could not be started */
    _Atomic int failed;       /* a thread could not be moved to its core */
    int runs;                 /* complete ones */
    bool stop;                /* these two: written by the first thread between two barriers */
    double until, given_up;
    double best[HALVES][SIZES_MOST][QD_COPY_WAYS]; /* seconds, of the even and of the odd runs; ALL: of both */
} meter;

typedef struct worker {
    meter *m;
    int index;
    unsigned passed; /* barriers */
    pthread_t thread;
} worker;

static int calls_of(int64_t bytes)
{
    return bytes < 8 << 20 ? 10 : bytes < 32 << 20 ? 8 : 2;
}

static void barrier(worker *w)
{
    const unsigned all = ++w->passed * (unsigned)w->m->threads;
    atomic_fetch_add_explicit(&w->m->arrived, 1, memory_order_acq_rel);
    for (int polls = 0; (int)(atomic_load_explicit(&w->m->arrived, memory_order_acquire) - all) < 0; polls++) {
        if (polls < PAUSES)
            qd_pause();
        else
            sched_yield(); /* another program has the core of a thread */
    }
}

/* False: it takes too long. */
static bool time_copies(worker *w, int run, int size, int way)
{
    meter *m = w->m;
    const int next = (w->index + 1) % m->threads;
    const int64_t bytes = (int64_t)LEAST_BYTES << size;
    double seconds = INFINITY;
    /* The first calls bring back into the caches what the way before has displaced: one is not
     * enough where a cache keeps lines only once they are used again. */
    for (int call = 0; call < calls_of(bytes); call++) {
        barrier(w);
        const double from_time = qd_clock_now();
        for (int64_t at = 0; at < bytes; at += PIECE_BYTES)
            qd_comm_copy(m->to[w->index] + at, m->from[next] + at, PIECE_BYTES, (qd_copy_way)way);
        barrier(w);
        const double taken = qd_clock_now() - from_time;
        seconds = call > 0 && taken < seconds ? taken : seconds;
    }
    if (w->index == 0)
        m->stop = qd_clock_now() > m->given_up;
    barrier(w);
    for (int half = run % 2; w->index == 0 && !m->stop && half < HALVES; half += ALL - run % 2)
        if (seconds < m->best[half][size][way])
            m->best[half][size][way] = seconds;
    return !m->stop;
}

static void *work(void *argument)
{
    worker *w = argument;
    meter *m = w->m;
    if (qd_thread_move(w->index) != QD_OK) {
        qd_error_clear();
        atomic_store(&m->failed, 1);
    }
    int begin;
    while ((begin = atomic_load(&m->begin)) == 0)
        sched_yield();
    if (begin < 0)
        return NULL;
    memset(m->from[w->index], 1, (size_t)LEAST_BYTES << (m->sizes - 1));
    memset(m->to[w->index], 1, (size_t)LEAST_BYTES << (m->sizes - 1));
    barrier(w);
    for (int run = 0; run < RUNS_MOST; run++) {
        for (int size = 0; size < m->sizes; size++)
            for (int way = 0; way < QD_COPY_WAYS; way++)
                if (!time_copies(w, run, size, way))
                    return NULL;
        if (w->index == 0)
            m->stop = ++m->runs >= RUNS_LEAST && qd_clock_now() > m->until;
        barrier(w);
        if (m->stop)
            break;
    }
    return NULL;
}

/* The fastest non-temporal copy over sizes [first, last]; `usual` unless another is clearly
 * faster. */
static int fastest(const meter *m, int first, int last, int64_t usual)
{
    int best = (int)usual;
    double least = INFINITY;
    for (int way = QD_COPY_PAGE; way < QD_COPY_WAYS; way++) {
        double sum = 0;
        for (int size = first; size <= last; size++)
            sum += log(m->best[ALL][size][way] * (way == usual ? 1 / CLEARLY : 1.0));
        if (sum < least) {
            least = sum;
            best = way;
        }
    }
    return best;
}

/* How much faster a copy through the caches is, as a logarithm; 0 at CACHED_LEAST. */
static double gain_of_caches(const meter *m, int half, int size, int way)
{
    const double *best = m->best[half][size];
    return log(best[way] / best[QD_COPY_NEAR] / CACHED_LEAST);
}

/* The number of sizes, from the smallest, that are better copied through the caches: the one with
 * the least time lost over all sizes. */
static int cached_sizes(const meter *m, int half, int way)
{
    int best = 0;
    double sum = 0, most = 0;
    for (int size = 0; size < m->sizes; size++) {
        sum += gain_of_caches(m, half, size, way);
        if (sum > most) {
            most = sum;
            best = size + 1;
        }
    }
    return best;
}

/* Bytes of the buffers of all threads from which on copies should bypass the caches. Between the
 * last size that should not and the first that should, the gain is taken as linear. */
static double stream_limit(const meter *m, int half, int way)
{
    const int cached = cached_sizes(m, half, way);
    double steps = cached > 0 ? cached : -1; /* doublings of the first size; twice the largest, half of the smallest */
    if (cached > 0 && cached < m->sizes) {
        const double before = gain_of_caches(m, half, cached - 1, way), after = gain_of_caches(m, half, cached, way);
        steps = cached - 1 + before / (before - after);
    }
    return 2.0 * m->threads * LEAST_BYTES * exp2(steps);
}

static void choose(const meter *m, qd_local_ways *ways)
{
    const int last = m->sizes - 1;
    ways->far_copy = fastest(m, last, last, ways->far_copy);
    const int cached = cached_sizes(m, ALL, (int)ways->far_copy);
    ways->stream_copy = fastest(m, cached < last ? cached : last, last, ways->stream_copy);
    ways->stream_bytes = (int64_t)stream_limit(m, ALL, (int)ways->far_copy) / (64 << 10) * (64 << 10);
}

/* Whether each half of the runs would choose nearly the same sizes, so that no other program can
 * have decided. */
static bool is_settled(meter *m, const qd_local_ways *ways)
{
    const double apart = stream_limit(m, EVEN, (int)ways->far_copy) / stream_limit(m, ODD, (int)ways->far_copy);
    return !atomic_load(&m->failed) && apart >= 0.5 && apart <= 2.0;
}

/* Whether the machine has that many idle cores now. /proc/loadavg: "… 3/250 …" are the threads that
 * run, this one included, of all. */
static bool is_idle(int threads)
{
    int running = 0;
    FILE *file = fopen("/proc/loadavg", "re");
    if (file && fscanf(file, "%*f %*f %*f %d/", &running) != 1)
        running = 0;
    if (file)
        fclose(file);
    return running - 1 <= qd_cores() - threads;
}

/* False if a thread could not be started. */
static bool run(meter *m)
{
    worker workers[THREADS_MOST];
    int started = 0;
    for (; started < m->threads; started++) {
        workers[started] = (worker){.m = m, .index = started};
        if (pthread_create(&workers[started].thread, NULL, work, &workers[started]) != 0)
            break;
    }
    const bool all = started == m->threads;
    atomic_store(&m->begin, all ? 1 : -1);
    for (int i = 0; i < started; i++)
        pthread_join(workers[i].thread, NULL);
    return all;
}

void qd_local_ways_measure(double seconds, char *text, size_t size, bool *settled)
{
    qd_local_ways ways = qd_local_ways_default();
    const double begin = qd_clock_now();
    meter m = {.threads = qd_cores_allowed(), .until = begin + seconds, .given_up = begin + PATIENCE * seconds};
    m.threads = m.threads > THREADS_MOST ? THREADS_MOST : m.threads;
    const int64_t free_bytes = (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE) / TOTAL_SHARE;
    const int64_t most = free_bytes < TOTAL_BYTES ? free_bytes : TOTAL_BYTES;
    while (m.sizes < SIZES_MOST && (m.sizes < SIZES_LEAST || ((int64_t)2 * m.threads * LEAST_BYTES << m.sizes) <= most))
        m.sizes++;
    for (int i = 0; i < HALVES * SIZES_MOST * QD_COPY_WAYS; i++)
        (&m.best[0][0][0])[i] = INFINITY;
    bool good = is_idle(m.threads);
    for (int i = 0; i < m.threads && good; i++) {
        m.from[i] = qd_memory_take((int64_t)LEAST_BYTES << (m.sizes - 1));
        m.to[i] = qd_memory_take((int64_t)LEAST_BYTES << (m.sizes - 1));
        good = good && m.from[i] && m.to[i];
    }
    good = good && run(&m) && m.runs >= RUNS_LEAST;
    if (good)
        choose(&m, &ways);
    *settled = good && is_settled(&m, &ways);
    for (int i = 0; i < m.threads; i++) {
        free(m.from[i]);
        free(m.to[i]);
    }
    qd_local_ways_write(&ways, text, size);
}
