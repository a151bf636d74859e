/* Random sequences of collectives over every mixture of memory, with ranks that pause between any
 * two steps of the backend: results must not depend on which rank is late, and buffers may be
 * reused as soon as an operation completes. test_interleavings OPERATIONS SEED [KIND] runs one
 * longer sequence per case.
 * ctest: wrap qd_clock_now qd_comm_copy qd_comm_spread qd_sum_tree qd_transfer_consumes */
#include "dist/reference.h"
#include "dist/ways.h"
#include "support/ranks.h"
#include "support/sample.h"

#include "comm/comm_impl.h"
#include "device/sum.h"

#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

double __real_qd_clock_now(void);
double __wrap_qd_clock_now(void);
void __real_qd_comm_copy(void *to, const void *from, int64_t bytes, qd_copy_way way);
void __wrap_qd_comm_copy(void *to, const void *from, int64_t bytes, qd_copy_way way);
void __real_qd_comm_spread(void *const *to, int count, const void *from, int64_t bytes, qd_copy_way way);
void __wrap_qd_comm_spread(void *const *to, int count, const void *from, int64_t bytes, qd_copy_way way);
bool __real_qd_transfer_consumes(const qd_transfer *op, int rank);
bool __wrap_qd_transfer_consumes(const qd_transfer *op, int rank);
void __real_qd_sum_tree(void *out, const void *const *sources, int n, int64_t count, qd_dtype dtype, qd_reduce_op op);
void __wrap_qd_sum_tree(void *out, const void *const *sources, int n, int64_t count, qd_dtype dtype, qd_reduce_op op);

static void pause_ms(int ms)
{
    struct timespec t = {.tv_nsec = ms * 1000000L};
    nanosleep(&t, NULL);
}

static _Atomic uint64_t stop_seed; /* 0: no random pauses */
static _Thread_local uint64_t stop_state, stop_often;
static _Thread_local int stop_turns;

static uint64_t next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return ref_hash(*state, 1, 2);
}

/* For up to half a millisecond: long enough for the others to get as far ahead as they can. The
 * frequency changes all the time: a bug may need a rank that pauses twice in a row next to one that
 * does not. */
static void stop_sometimes(void)
{
    uint64_t seed = atomic_load_explicit(&stop_seed, memory_order_relaxed);
    if (seed == 0) return;
    if (stop_state == 0) stop_state = ref_hash(seed, (uint64_t)(uintptr_t)&stop_state, 0) | 1;
    uint64_t drawn = next(&stop_state);
    if (stop_turns-- <= 0) {
        static const uint64_t often[] = {2, 4, 16, 64, 1000, 1000};
        stop_often = often[drawn % 6];
        stop_turns = (int)(drawn >> 16) % 64;
    }
    if ((drawn >> 8) % stop_often) return;
    struct timespec t = {.tv_nsec = (long)(drawn >> 32) % 500000};
    nanosleep(&t, NULL);
}

/* Or scripted: at the count-th call of a kind from now on; the first of the remaining lines
 * applies. */
enum call { NO_CALL, CLOCK, CONSUMES, COPY };
#define UNTIL_CONTINUED (-1) /* by SIGCONT */
typedef struct planned_stop {
    enum call call;
    int count, ms;
} planned_stop;
static const planned_stop *planned; /* ended by NO_CALL; for ranks as processes */

static void stop_as_planned(enum call call)
{
    static int calls;
    if (!planned || planned->call != call || ++calls < planned->count) return;
    calls = 0;
    int ms = (planned++)->ms;
    if (ms == UNTIL_CONTINUED)
        raise(SIGSTOP);
    else
        pause_ms(ms);
}

/* The backend reads the clock at the beginning and end of each step, sums and copies in the middle
 * of it, and checks which ranks have consumed after looking for other work and before deciding
 * whether it may produce. */
double __wrap_qd_clock_now(void)
{
    stop_sometimes();
    stop_as_planned(CLOCK);
    return __real_qd_clock_now();
}

bool __wrap_qd_transfer_consumes(const qd_transfer *op, int rank)
{
    stop_sometimes();
    stop_as_planned(CONSUMES);
    return __real_qd_transfer_consumes(op, rank);
}

void __wrap_qd_comm_copy(void *to, const void *from, int64_t bytes, qd_copy_way way)
{
    stop_sometimes();
    stop_as_planned(COPY);
    __real_qd_comm_copy(to, from, bytes, way);
}

void __wrap_qd_comm_spread(void *const *to, int count, const void *from, int64_t bytes, qd_copy_way way)
{
    stop_sometimes();
    stop_as_planned(COPY);
    __real_qd_comm_spread(to, count, from, bytes, way);
}

void __wrap_qd_sum_tree(void *out, const void *const *sources, int n, int64_t count, qd_dtype dtype, qd_reduce_op op)
{
    stop_sometimes();
    __real_qd_sum_tree(out, sources, n, count, dtype, op);
}

enum { FLIGHTS = 2, MOST_RANKS = 4, MOST_BYTES = 1 << 20, GUARD = 64 };

/* Drawn identically by all ranks. */
typedef struct operation {
    qd_coll_kind kind;
    qd_dtype dtype;
    qd_reduce_op reduce;
    int64_t count; /* of the whole message */
    int root;
    bool in_place;
    bool lists; /* reduce-scatter and all-gather: each rank's part in two pieces; all-to-all: uneven */
    bool all_shared; /* else each rank draws the memory of its own buffers */
    uint64_t salt;
} operation;

/* Buffers of one operation in flight: [shared]. */
typedef struct buffers {
    unsigned char *in[2], *out[2];
    qd_segment segments[MOST_RANKS][2];
    qd_segment_list lists[MOST_RANKS];
    int64_t counts[MOST_RANKS];
    int64_t sent[MOST_RANKS], got[MOST_RANKS], offsets[MOST_RANKS]; /* all-to-all */
    unsigned char *from, *to; /* those that the operation uses */
    qd_work *work, *other;
} buffers;

static operation draw(uint64_t *state, int size, int kind)
{
    static const qd_coll_kind kinds[] = {QD_COLL_ALL_REDUCE, QD_COLL_ALL_REDUCE,     QD_COLL_REDUCE_SCATTER,
                                         QD_COLL_ALL_GATHER, QD_COLL_ALL_GATHER,     QD_COLL_ALL_TO_ALL,
                                         QD_COLL_BROADCAST,  QD_COLL_REDUCE,         QD_COLL_GATHER,
                                         QD_COLL_SCATTER,    QD_COLL_SEND};
    static const qd_dtype types[] = {QD_F32, QD_BF16, QD_I64};
    /* On both sides of every limit at which the algorithm changes. */
    static const int64_t bytes[] = {100, 5000, 30000, 60000, 66000, 70000, 100000, 131072, 250000, 400000, 700000, 1000000};
    uint64_t drawn = next(state);
    operation o = {.kind = kind < 0 ? kinds[drawn % (sizeof kinds / sizeof *kinds)] : (qd_coll_kind)kind,
                   .dtype = types[next(state) % 3],
                   .reduce = (qd_reduce_op)(next(state) % 3)};
    o.count = bytes[next(state) % (sizeof bytes / sizeof *bytes)] / (int64_t)qd_dtype_size(o.dtype);
    o.root = (int)(next(state) % (uint64_t)size);
    o.in_place = next(state) % 3 == 0;
    o.lists = next(state) % 4 == 0 && !o.in_place && (o.kind == QD_COLL_REDUCE_SCATTER || o.kind == QD_COLL_ALL_GATHER);
    if (o.kind == QD_COLL_ALL_TO_ALL) o.lists = o.in_place;
    o.all_shared = next(state) % 3 == 0;
    o.salt = next(state);
    return o;
}

/* Part r of the message: two separate pieces, or one. */
static void deal(buffers *b, const operation *o, int size)
{
    for (int r = 0; r < size; r++) {
        qd_segment *s = b->segments[r];
        b->lists[r].segments = s;
        b->lists[r].count = 2;
        if (o->lists) {
            qd_slice(o->count, 2 * size, r, &s[0].offset, &s[0].count);
            qd_slice(o->count, 2 * size, 2 * size - 1 - r, &s[1].offset, &s[1].count);
        } else {
            qd_slice(o->count, size, r, &s[0].offset, &s[0].count);
            s[1] = (qd_segment){0, 0};
        }
        b->counts[r] = s[0].count + s[1].count;
    }
}

/* Elements of an all-to-all from one rank to another: whole blocks, or none, half or all of
 * each. */
static int64_t block_count(const operation *o, int size, int from, int to)
{
    int64_t part = o->count / size;
    return o->lists ? part * (int64_t)(ref_hash(o->salt, (uint64_t)from, (uint64_t)to) % 3) / 2 : part;
}

static void fill(const operation *o, int rank, int64_t first, int64_t count, unsigned char *to)
{
    int64_t width = (int64_t)qd_dtype_size(o->dtype);
    for (int64_t i = 0; i < count; i++) ref_input(to + i * width, o->dtype, o->salt, rank, first + i);
}

static qd_status differs(const operation *o, int rank, int64_t i, uint64_t got, uint64_t want)
{
    return QD_FAIL(QD_DIFFERENT, "%s of %lld %s%s%s, root %d, rank %d: element %lld is %llx, not %llx", qd_coll_kind_name(o->kind),
                   (long long)o->count, qd_dtype_name(o->dtype), o->in_place ? " in place" : "", o->lists ? " in lists" : "",
                   o->root, rank, (long long)i, (unsigned long long)got, (unsigned long long)want);
}

/* Checks that `count` elements at `got` are those of `from`, or the sum over `n` ranks if from < 0,
 * from `first` on. */
static qd_status expect(const operation *o, int rank, int from, int n, int64_t first, int64_t count, const unsigned char *got)
{
    int64_t width = (int64_t)qd_dtype_size(o->dtype);
    for (int64_t i = 0; i < count; i++) {
        uint64_t want[1] = {0};
        if (from >= 0)
            ref_input(want, o->dtype, o->salt, from, first + i);
        else
            ref_reduced(want, o->dtype, o->reduce, o->salt, n, first + i);
        uint64_t word = ref_word(got + i * width, o->dtype), wanted = ref_word(want, o->dtype);
        if (word != wanted) return differs(o, rank, first + i, word, wanted);
    }
    return QD_OK;
}

/* Fills the buffers and starts the operation. */
static qd_status begin(qd_comm *comm, const operation *o, buffers *b, bool in_shared, bool out_shared)
{
    int rank = qd_comm_rank(comm), size = qd_comm_size(comm), right = (rank + 1) % size, left = (rank + size - 1) % size;
    int64_t width = (int64_t)qd_dtype_size(o->dtype), count = o->count, part = count / size;
    b->from = b->in[in_shared];
    b->to = b->out[out_shared];
    b->work = b->other = NULL;
    memset(b->to, 0xa5, MOST_BYTES + GUARD);
    deal(b, o, size);
    bool here = rank == o->root;
    const qd_segment *own = b->segments[rank];
    switch (o->kind) {
    case QD_COLL_ALL_REDUCE:
    case QD_COLL_REDUCE:
        if (o->in_place) b->from = b->to;
        fill(o, rank, 0, count, b->from);
        if (o->kind == QD_COLL_ALL_REDUCE)
            return qd_comm_all_reduce(comm, b->from, b->to, count, o->dtype, o->reduce, &b->work);
        return qd_comm_reduce(comm, b->from, here ? b->to : NULL, count, o->dtype, o->reduce, o->root, &b->work);
    case QD_COLL_REDUCE_SCATTER:
        if (o->in_place) {
            b->from = b->to;
            b->to += own->offset * width;
        }
        fill(o, rank, 0, count, b->from);
        return o->lists ? qd_comm_reduce_scatter_v(comm, b->from, b->to, b->lists, o->dtype, o->reduce, &b->work)
                        : qd_comm_reduce_scatter(comm, b->from, b->to, count, o->dtype, o->reduce, &b->work);
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER:
        if (o->in_place && (here || o->kind == QD_COLL_ALL_GATHER)) b->from = b->to + own->offset * width;
        fill(o, rank, 0, b->counts[rank], b->from);
        if (o->kind == QD_COLL_GATHER)
            return qd_comm_gather(comm, b->from, here ? b->to : NULL, count, o->dtype, o->root, &b->work);
        return o->lists ? qd_comm_all_gather_v(comm, b->from, b->to, b->lists, o->dtype, &b->work)
                        : qd_comm_all_gather(comm, b->from, b->to, count, o->dtype, &b->work);
    case QD_COLL_SCATTER:
        if (here) fill(o, rank, 0, count, b->from);
        return qd_comm_scatter(comm, here ? b->from : NULL, b->to, count, o->dtype, o->root, &b->work);
    case QD_COLL_BROADCAST:
        if (here) fill(o, rank, 0, count, b->to);
        return qd_comm_broadcast(comm, b->to, count, o->dtype, o->root, &b->work);
    case QD_COLL_ALL_TO_ALL:
        fill(o, rank, 0, part * size, b->from);
        if (!o->lists) return qd_comm_all_to_all(comm, b->from, b->to, part, o->dtype, &b->work);
        for (int r = 0; r < size; r++) {
            b->sent[r] = block_count(o, size, rank, r);
            b->got[r] = block_count(o, size, r, rank);
            b->offsets[r] = part * r;
        }
        return qd_comm_all_to_all_v(comm, b->from, b->sent, b->offsets, b->to, b->got, b->offsets, o->dtype, &b->work);
    default: /* around a ring */
        fill(o, rank, 0, count, b->from);
        QD_TRY(qd_comm_send(comm, b->from, count, o->dtype, right, &b->work));
        return qd_comm_recv(comm, b->to, count, o->dtype, left, &b->other);
    }
}

/* Waits for it and checks every element. */
static qd_status end(qd_comm *comm, const operation *o, buffers *b)
{
    int rank = qd_comm_rank(comm), size = qd_comm_size(comm);
    int64_t width = (int64_t)qd_dtype_size(o->dtype), count = o->count, part = count / size;
    QD_TRY(qd_work_wait(b->work));
    if (b->other) QD_TRY(qd_work_wait(b->other));
    switch (o->kind) {
    case QD_COLL_ALL_REDUCE: return expect(o, rank, -1, size, 0, count, b->to);
    case QD_COLL_REDUCE: return rank == o->root ? expect(o, rank, -1, size, 0, count, b->to) : QD_OK;
    case QD_COLL_REDUCE_SCATTER: {
        const qd_segment *s = b->segments[rank];
        QD_TRY(expect(o, rank, -1, size, s[0].offset, s[0].count, b->to));
        return expect(o, rank, -1, size, s[1].offset, s[1].count, b->to + s[0].count * width);
    }
    case QD_COLL_ALL_GATHER:
    case QD_COLL_GATHER:
        for (int r = 0; r < size && (rank == o->root || o->kind == QD_COLL_ALL_GATHER); r++) {
            const qd_segment *s = b->segments[r];
            QD_TRY(expect(o, rank, r, size, 0, s[0].count, b->to + s[0].offset * width));
            QD_TRY(expect(o, rank, r, size, s[0].count, s[1].count, b->to + s[1].offset * width));
        }
        return QD_OK;
    case QD_COLL_SCATTER: return expect(o, rank, o->root, size, b->segments[rank][0].offset, b->counts[rank], b->to);
    case QD_COLL_BROADCAST: return expect(o, rank, o->root, size, 0, count, b->to);
    case QD_COLL_ALL_TO_ALL:
        for (int r = 0; r < size; r++) {
            int64_t got = block_count(o, size, r, rank);
            QD_TRY(expect(o, rank, r, size, part * rank, got, b->to + part * r * width));
            for (int64_t i = (part * r + got) * width; i < part * (r + 1) * width; i++)
                if (b->to[i] != 0xa5)
                    return QD_FAIL(QD_DIFFERENT, "an uneven all-to-all has written behind the block of rank %d on rank %d", r, rank);
        }
        return QD_OK;
    default: return expect(o, rank, (rank + size - 1) % size, size, 0, count, b->to);
    }
}

static qd_status take_buffers(qd_comm *world, buffers *b)
{
    for (int shared = 0; shared < 2; shared++) {
        const char *text = shared ? "shared" : "";
        b->in[shared] = ref_take(world, text, 0, MOST_BYTES + GUARD);
        b->out[shared] = ref_take(world, text, 0, MOST_BYTES + GUARD);
        if (!b->in[shared] || !b->out[shared]) return QD_FAIL(QD_NO_MEMORY, "no memory");
    }
    return QD_OK;
}

static void give_buffers(qd_comm *world, buffers *b)
{
    for (int shared = 0; shared < 2; shared++) {
        ref_give(world, shared ? "shared" : "", 0, b->in[shared]);
        ref_give(world, shared ? "shared" : "", 0, b->out[shared]);
    }
}

/* text: seed, number of operations, and their kind or -1. */
static qd_status body_sequence(qd_comm *world, void *arg)
{
    unsigned long long seed = 0;
    int operations = 0, kind = -1, rank = qd_comm_rank(world), size = qd_comm_size(world);
    if (sscanf(((qd_ranks_call *)arg)->text, "%llu %d %d", &seed, &operations, &kind) != 3) return QD_FAIL(QD_USAGE, "bad text");
    uint64_t alike = ref_hash(seed, 7, 7), own = ref_hash(seed, (uint64_t)rank, 9);
    buffers sets[FLIGHTS] = {{.work = NULL}};
    qd_comm *others = NULL; /* the same ranks in reverse order: operations of two groups at the same time */
    qd_status status = QD_OK;
    QD_TRY(qd_comm_split(world, 0, -rank, "others", &others));
    atomic_store(&stop_seed, seed * 64 + 1 + (uint64_t)rank);
    for (int f = 0; f < FLIGHTS; f++) QD_TRY_DONE(take_buffers(world, &sets[f]));
    for (int i = 0; i < operations;) {
        operation drawn[FLIGHTS];
        qd_comm *comms[FLIGHTS];
        int flights = 1 + (int)(next(&alike) % FLIGHTS), started = 0;
        for (int f = 0; f < flights; f++) {
            drawn[f] = draw(&alike, size, kind);
            comms[f] = next(&alike) % 3 == 0 ? others : world;
        }
        for (int f = 0; f < flights && status == QD_OK; f++, started++) {
            uint64_t where = next(&own);
            if (drawn[f].all_shared) where = 3;
            status = begin(comms[f], &drawn[f], &sets[f], where & 1, where >> 1 & 1);
        }
        for (int f = 0; f < started; f++, i++) {
            QD_TRY_DONE(status);
            status = end(comms[f], &drawn[f], &sets[f]);
        }
        QD_TRY_DONE(status);
        if (next(&own) % 16 == 0) { /* the next one may use the same memory */
            int f = (int)(next(&own) % FLIGHTS);
            give_buffers(world, &sets[f]);
            QD_TRY_DONE(take_buffers(world, &sets[f]));
        }
    }
done:
    if (status == QD_OK)
        for (int f = 0; f < FLIGHTS; f++) give_buffers(world, &sets[f]);
    qd_comm_destroy(others);
    return status;
}

/* Two ranks, an all-reduce through rings of four buffers. Rank 1 produces one round and stops. Rank
 * 0 sums that, produces four, finds no sum of rank 1 to fetch, and stops before it checks whether
 * it may produce more. Rank 1 continues: it sums all four rounds and fetches the one sum of rank 0.
 * Rank 0 continues and produces the fifth round, since rank 1 has consumed the first, and stops
 * again before it has fetched anything. Now rank 1 could sum the fifth round, in the place of its
 * first sum, which rank 0 needs. */
static qd_status body_ahead(qd_comm *world, void *arg)
{
    (void)arg;
    static const planned_stop of_0[] = {{CONSUMES, 2, 120}, {CLOCK, 1, 80}, {NO_CALL, 0, 0}};
    static const planned_stop of_1[] = {{CLOCK, 1, 80}, {NO_CALL, 0, 0}};
    int rank = qd_comm_rank(world);
    operation o = {.kind = QD_COLL_ALL_REDUCE, .dtype = QD_F32, .reduce = QD_SUM, .count = 250000, .salt = 3};
    buffers b = {.work = NULL};
    qd_status status = QD_OK;
    b.in[0] = malloc(MOST_BYTES + GUARD);
    b.out[0] = malloc(MOST_BYTES + GUARD);
    if (!b.in[0] || !b.out[0]) return QD_FAIL(QD_NO_MEMORY, "no memory");
    fill(&o, rank, 0, o.count, b.in[0]);
    QD_TRY_DONE(qd_comm_barrier(world, NULL));
    if (rank == 0) pause_ms(30);
    planned = rank == 0 ? of_0 : of_1;
    QD_TRY_DONE(qd_comm_all_reduce(world, b.in[0], b.out[0], o.count, o.dtype, o.reduce, NULL));
    QD_TRY_DONE(expect(&o, rank, -1, qd_comm_size(world), 0, o.count, b.out[0]));
    if (planned->call != NO_CALL) status = QD_FAIL(QD_DIFFERENT, "the rank has not stopped where it should");
done:
    free(b.in[0]);
    free(b.out[0]);
    return status;
}

/* Direct all-reduces of buffers that all ranks reach by address, except those of rank 0, which is
 * late. The others cannot know that before it posts, and it sums as soon as it has posted: their
 * data must be in their lanes by then, whatever the ways say about such small messages. */
static qd_status body_direct(qd_comm *world, void *arg)
{
    (void)arg;
    enum { TIMES = 6 };
    int rank = qd_comm_rank(world);
    operation o = {.kind = QD_COLL_ALL_REDUCE, .dtype = QD_F32, .reduce = QD_SUM, .count = 4001};
    buffers b = {.work = NULL};
    qd_status status = QD_OK;
    QD_TRY(take_buffers(world, &b));
    for (int i = 0; i < TIMES; i++) {
        o.salt = (uint64_t)i + 1;
        o.in_place = i % 2;
        if (rank == 0) pause_ms(20);
        QD_TRY_DONE(begin(world, &o, &b, rank > 0, rank > 0));
        QD_TRY_DONE(end(world, &o, &b));
    }
done:
    if (status == QD_OK) give_buffers(world, &b);
    return status;
}

/* Rank 1 stops while it reads a piece of rank 0's memory. Rank 0 gives up, names it, and reuses its
 * memory; then rank 1 continues. It must not take what it now finds for the message: its call
 * fails, or had received the message before. text: kind and bytes. */
static qd_status body_outdated(qd_comm *world, void *arg)
{
    int kind = 0, rank = qd_comm_rank(world), size = qd_comm_size(world);
    long long bytes = 0;
    if (sscanf(((qd_ranks_call *)arg)->text, "%d %lld", &kind, &bytes) != 2) return QD_FAIL(QD_USAGE, "bad text");
    static const planned_stop of_0[] = {{COPY, 1, 600}, {NO_CALL, 0, 0}}; /* else it might do all the work */
    /* the first is its own block */
    const planned_stop of_1[] = {{COPY, kind == QD_COLL_ALL_TO_ALL ? 2 : 1, UNTIL_CONTINUED}, {NO_CALL, 0, 0}};
    operation o = {.kind = (qd_coll_kind)kind, .dtype = QD_F32, .reduce = QD_SUM, .count = bytes / 4, .salt = 5};
    buffers b = {.work = NULL};
    int64_t process = rank == 1 ? getpid() : 0;
    QD_TRY(qd_comm_all_reduce(world, &process, &process, 1, QD_I64, QD_MAX, NULL));
    QD_TRY(take_buffers(world, &b));
    memset(b.out[1], 0xa5, MOST_BYTES);
    fill(&o, rank, 0, o.count, b.in[1]);
    QD_TRY(qd_comm_barrier(world, NULL));
    bool mpi = ((qd_ranks_call *)arg)->mode == QD_RANKS_MPI;
    if (mpi && rank == 1) raise(SIGSTOP); /* MPI copies by itself: stop before it can */
    if (!mpi) planned = rank == 0 ? of_0 : of_1;
    qd_status status;
    switch (o.kind) {
    case QD_COLL_ALL_TO_ALL: status = qd_comm_all_to_all(world, b.in[1], b.out[1], o.count / size, o.dtype, NULL); break;
    case QD_COLL_SCATTER: status = qd_comm_scatter(world, b.in[1], b.out[1], o.count, o.dtype, 0, NULL); break;
    default:
        status =
            rank == 0 ? qd_comm_send(world, b.in[1], o.count, o.dtype, 1, NULL) : qd_comm_recv(world, b.out[1], o.count, o.dtype, 0, NULL);
    }
    bool named = strstr(qd_error_message(), "rank 1") != NULL;
    if (rank == 0) {
        memset(b.in[1], 0x77, (size_t)bytes);
        kill((pid_t)process, SIGCONT);
        if (mpi) pause_ms(500); /* MPI sees it */
        status = status == QD_TIMEOUT && named ? QD_OK : QD_FAIL(QD_DIFFERENT, "rank 1 stopped, and rank 0 got %s", qd_status_text(status));
    } else if (!mpi && planned->call != NO_CALL) {
        status = QD_FAIL(QD_DIFFERENT, "the rank has not stopped where it should");
    } else if (status == QD_OK) {
        bool cut = o.kind != QD_COLL_SEND; /* in halves; this rank gets the second */
        status = expect(&o, rank, 0, size, cut ? o.count / 2 : 0, cut ? o.count / 2 : o.count, b.out[1]);
    } else {
        status = status == QD_REMOTE ? QD_OK : QD_FAIL(QD_DIFFERENT, "the call returned %s", qd_status_text(status));
    }
    planned = NULL;
    give_buffers(world, &b);
    return status;
}

static const qd_ranks_entry bodies[] = {
    {"sequence", body_sequence}, {"ahead", body_ahead}, {"direct", body_direct}, {"outdated", body_outdated}};

static int wanted_operations, wanted_kind = -1;
static unsigned long long wanted_seed = 1;

static void run(qd_ranks_mode mode, bool staged, const char *ways)
{
    int operations = wanted_operations ? wanted_operations : sample_count(ways ? 60 : 120, 30);
    if (!qd_ranks_mode_available(mode)) skip();
    for (int size = 2; size <= MOST_RANKS; size++) {
        char text[64];
        qd_ranks_result results[MOST_RANKS];
        snprintf(text, sizeof text, "%llu %d %d", wanted_seed * 10 + (unsigned long long)size, operations, wanted_kind);
        qd_ranks_options options = {.text = text, .deadline_seconds = 60, .limit_seconds = 500, .no_remote_reads = staged,
                                    .ways = ways};
        if (qd_ranks_run_ok("sequence", mode, size, &options, results) != QD_OK)
            fail_msg("%s%s, ways '%s', seed %s: %s", qd_ranks_mode_name(mode), staged ? ", staged" : "", ways ? ways : "", text,
                     qd_error_message());
    }
}

static void test_ahead(void **unused)
{
    (void)unused;
    qd_ranks_result results[2];
    if (!qd_ranks_mode_available(QD_RANKS_STAGED)) skip();
    if (qd_ranks_run_ok("ahead", QD_RANKS_STAGED, 2, &(qd_ranks_options){.deadline_seconds = 60}, results) != QD_OK)
        fail_msg("%s", qd_error_message());
}

static void test_direct(void **unused)
{
    (void)unused;
    static const qd_ranks_mode modes[] = {QD_RANKS_PROCESSES, QD_RANKS_THREADS};
    qd_ranks_result results[3];
    for (size_t m = 0; m < 2; m++)
        for (int size = 2; size <= 3 && qd_ranks_mode_available(modes[m]); size++)
            for (int w = 0; w < FORCED_WAYS; w++) {
                qd_ranks_options options = {.deadline_seconds = 60, .no_remote_reads = m == 1, .ways = forced_ways[w]};
                if (qd_ranks_run_ok("direct", modes[m], size, &options, results) != QD_OK)
                    fail_msg("ways '%s': %s", forced_ways[w], qd_error_message());
            }
}

static void test_outdated(void **unused)
{
    (void)unused;
    static const struct {
        qd_ranks_mode mode;
        qd_coll_kind kind;
        int bytes;
    } cases[] = {{QD_RANKS_STAGED, QD_COLL_ALL_TO_ALL, 1 << 20}, {QD_RANKS_STAGED, QD_COLL_SEND, 1 << 20},
                 {QD_RANKS_STAGED, QD_COLL_SCATTER, 1 << 20}, {QD_RANKS_MPI, QD_COLL_SEND, 1 << 20}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[64];
        qd_ranks_result results[2];
        if (!qd_ranks_mode_available(cases[i].mode)) {
            if (i == 0) skip(); /* MPI may be missing; without processes there is nothing to test */
            continue;
        }
        snprintf(text, sizeof text, "%d %d", cases[i].kind, cases[i].bytes);
        if (qd_ranks_run_ok("outdated", cases[i].mode, 2, &(qd_ranks_options){.text = text, .deadline_seconds = 1.5}, results) != QD_OK)
            fail_msg("%s of %d bytes: %s", qd_coll_kind_name(cases[i].kind), cases[i].bytes, qd_error_message());
    }
}

static void test_processes(void **unused)
{
    (void)unused;
    run(QD_RANKS_PROCESSES, false, NULL);
}

static void test_staged_processes(void **unused)
{
    (void)unused;
    run(QD_RANKS_PROCESSES, true, NULL);
}

static void test_threads(void **unused)
{
    (void)unused;
    run(QD_RANKS_THREADS, false, NULL);
}

/* The same with one way taken wherever it can be. */
static void test_forced_ways(void **unused)
{
    (void)unused;
    for (int w = 0; w < FORCED_WAYS; w++) {
        if (qd_ranks_mode_available(QD_RANKS_PROCESSES)) run(QD_RANKS_PROCESSES, false, forced_ways[w]);
        if (sample_has((size_t)w, 0, 2)) run(QD_RANKS_THREADS, true, forced_ways[w]);
    }
}

/* Every path that processes take, where the thread sanitizer sees it. */
static void test_staged_threads(void **unused)
{
    (void)unused;
    run(QD_RANKS_THREADS, true, NULL);
}

int main(int argc, char **argv)
{
    qd_ranks_main(argc, argv, bodies, sizeof bodies / sizeof *bodies);
    if (argc > 1) wanted_operations = atoi(argv[1]);
    if (argc > 2) wanted_seed = strtoull(argv[2], NULL, 10);
    for (int k = 0; argc > 3 && k < QD_COLL_KIND_COUNT; k++)
        if (strcmp(argv[3], qd_coll_kind_name((qd_coll_kind)k)) == 0) wanted_kind = k;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ahead),     cmocka_unit_test(test_direct),           cmocka_unit_test(test_outdated),
        cmocka_unit_test(test_processes), cmocka_unit_test(test_staged_processes), cmocka_unit_test(test_threads),
        cmocka_unit_test(test_staged_threads), cmocka_unit_test(test_forced_ways)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
