/* Every operation, type and count pattern against a serial reference, on threads, processes and
 * MPI, which must be bit-identical. The test of failures, which mostly waits, may run concurrently.
 * ctest: timeout 400 */
#define _GNU_SOURCE /* unshare */
#include "comm/checked.h"
#include "comm/remote/remote.h"
#include "dist/apart.h"
#include "dist/reference.h"
#include "dist/ways.h"
#include "support/ranks.h"
#include "support/sample.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* Buffers of a body: `in` and `out` with a guard after each, and a running hash of all results of
 * this rank. */
typedef struct bench {
    qd_comm *comm;
    const char *text; /* kind of memory: see ref_take() */
    int rank, size;
    uint64_t salt, hash;
    unsigned char *in, *out;
    int64_t room; /* bytes of in and out */
} bench;

#define GUARD 64
#define MOST_ELEMENTS 100003
/* More bytes than any limit below which processes reach into each other's memory or use
 * non-temporal stores. Smaller under the thread sanitizer, where the plain reference takes minutes
 * at that size and ranks are mostly threads. */
#if defined(__SANITIZE_THREAD__)
#define HUGE_ELEMENTS 300007
#else
#define HUGE_ELEMENTS 2200003
#endif

static qd_status bench_open(bench *b, qd_comm *comm, const char *text, int64_t most)
{
    *b = (bench){.comm = comm, .text = text, .salt = 1};
    qd_comm_check_messages(comm, strcmp(text, "checked") == 0);
    b->rank = qd_comm_rank(comm);
    b->size = qd_comm_size(comm);
    b->room = (most + 16) * 8;
    b->in = ref_take(comm, text, 0, b->room + GUARD);
    b->out = ref_take(comm, text, 1, b->room + GUARD);
    return b->in && b->out ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory");
}

static void bench_close(bench *b)
{
    ref_give(b->comm, b->text, 0, b->in);
    ref_give(b->comm, b->text, 1, b->out);
}

static unsigned char *element(unsigned char *base, qd_dtype dtype, int64_t i)
{
    return base + i * (int64_t)qd_dtype_size(dtype);
}

static void fill(bench *b, unsigned char *to, qd_dtype dtype, int rank, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++) ref_input(element(to, dtype, i), dtype, b->salt, rank, first + i);
}

static void clear(bench *b)
{
    memset(b->out, 0xa5, (size_t)b->room + GUARD);
}

/* Compares one element with the expected value, and hashes it. */
static qd_status expect(bench *b, const char *what, qd_dtype dtype, int64_t i, const void *got, const void *want)
{
    uint64_t word = ref_word(got, dtype), wanted = ref_word(want, dtype);
    b->hash = ref_hash(b->hash, word, (uint64_t)i);
    if (word == wanted) return QD_OK;
    return QD_FAIL(QD_DIFFERENT, "%s of %s on %d ranks, rank %d: element %lld is %llx, not %llx", what, qd_dtype_name(dtype),
                   b->size, b->rank, (long long)i, (unsigned long long)word, (unsigned long long)wanted);
}

static qd_status expect_input(bench *b, const char *what, qd_dtype dtype, int rank, int64_t first, int64_t count,
                              unsigned char *got)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t want[1];
        ref_input(want, dtype, b->salt, rank, first + i);
        QD_TRY(expect(b, what, dtype, first + i, element(got, dtype, i), want));
    }
    return QD_OK;
}

static qd_status expect_reduced(bench *b, const char *what, qd_dtype dtype, qd_reduce_op op, int64_t first, int64_t count,
                                unsigned char *got)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t want[1];
        ref_reduced(want, dtype, op, b->salt, b->size, first + i);
        QD_TRY(expect(b, what, dtype, first + i, element(got, dtype, i), want));
    }
    return QD_OK;
}

/* Nothing after the result may have been written. */
static qd_status expect_guard(bench *b, const char *what, const unsigned char *end)
{
    for (int i = 0; i < GUARD; i++)
        if (end[i] != 0xa5) return QD_FAIL(QD_DIFFERENT, "%s wrote behind its result on rank %d", what, b->rank);
    return QD_OK;
}

static qd_status try_all_reduce(bench *b, int64_t count, qd_dtype dtype, qd_reduce_op op, bool in_place)
{
    clear(b);
    fill(b, in_place ? b->out : b->in, dtype, b->rank, 0, count);
    QD_TRY(qd_comm_all_reduce(b->comm, in_place ? b->out : b->in, b->out, count, dtype, op, NULL));
    QD_TRY(expect_reduced(b, "all-reduce", dtype, op, 0, count, b->out));
    return expect_guard(b, "all-reduce", element(b->out, dtype, count));
}

static qd_status try_reduce(bench *b, int64_t count, qd_dtype dtype, qd_reduce_op op, int root, bool in_place)
{
    clear(b);
    fill(b, in_place ? b->out : b->in, dtype, b->rank, 0, count);
    bool here = b->rank == root;
    QD_TRY(qd_comm_reduce(b->comm, in_place ? b->out : b->in, here ? b->out : NULL, count, dtype, op, root, NULL));
    if (!here) return QD_OK;
    QD_TRY(expect_reduced(b, "reduce", dtype, op, 0, count, b->out));
    return expect_guard(b, "reduce", element(b->out, dtype, count));
}

static qd_status try_reduce_scatter(bench *b, int64_t count, qd_dtype dtype, qd_reduce_op op, bool in_place)
{
    int64_t offset, length;
    qd_slice(count, b->size, b->rank, &offset, &length);
    clear(b);
    fill(b, b->in, dtype, b->rank, 0, count);
    unsigned char *out = in_place ? element(b->in, dtype, offset) : b->out;
    QD_TRY(qd_comm_reduce_scatter(b->comm, b->in, out, count, dtype, op, NULL));
    QD_TRY(expect_reduced(b, "reduce-scatter", dtype, op, offset, length, out));
    return in_place ? QD_OK : expect_guard(b, "reduce-scatter", element(b->out, dtype, length));
}

static qd_status try_all_gather(bench *b, int64_t count, qd_dtype dtype, bool in_place)
{
    int64_t offset, length;
    qd_slice(count, b->size, b->rank, &offset, &length);
    clear(b);
    unsigned char *in = in_place ? element(b->out, dtype, offset) : b->in;
    fill(b, in, dtype, b->rank, offset, length);
    QD_TRY(qd_comm_all_gather(b->comm, in, b->out, count, dtype, NULL));
    for (int r = 0; r < b->size; r++) {
        qd_slice(count, b->size, r, &offset, &length);
        QD_TRY(expect_input(b, "all-gather", dtype, r, offset, length, element(b->out, dtype, offset)));
    }
    return expect_guard(b, "all-gather", element(b->out, dtype, count));
}

static qd_status try_broadcast(bench *b, int64_t count, qd_dtype dtype, int root)
{
    clear(b);
    if (b->rank == root) fill(b, b->out, dtype, root, 0, count);
    QD_TRY(qd_comm_broadcast(b->comm, b->out, count, dtype, root, NULL));
    QD_TRY(expect_input(b, "broadcast", dtype, root, 0, count, b->out));
    return expect_guard(b, "broadcast", element(b->out, dtype, count));
}

static qd_status try_gather_scatter(bench *b, int64_t count, qd_dtype dtype, int root)
{
    int64_t offset, length;
    qd_slice(count, b->size, b->rank, &offset, &length);
    clear(b);
    fill(b, b->in, dtype, b->rank, offset, length);
    bool here = b->rank == root;
    QD_TRY(qd_comm_gather(b->comm, b->in, here ? b->out : NULL, count, dtype, root, NULL));
    for (int r = 0; here && r < b->size; r++) {
        int64_t at, n;
        qd_slice(count, b->size, r, &at, &n);
        QD_TRY(expect_input(b, "gather", dtype, r, at, n, element(b->out, dtype, at)));
    }
    if (here) QD_TRY(expect_guard(b, "gather", element(b->out, dtype, count)));
    b->salt++;
    clear(b);
    if (here) fill(b, b->in, dtype, root, 0, count);
    QD_TRY(qd_comm_scatter(b->comm, here ? b->in : NULL, b->out, count, dtype, root, NULL));
    QD_TRY(expect_input(b, "scatter", dtype, root, offset, length, b->out));
    return expect_guard(b, "scatter", element(b->out, dtype, length));
}

/* Segments in an order that differs from that of the ranks: piece j of the buffer belongs to rank
 * (j * 3 + 1) % size, some pieces are empty, and some ranks may have none. */
enum { PIECES = 11 };
typedef struct deal {
    qd_segment segments[64][PIECES];
    qd_segment_list lists[64];
    int64_t total;
} deal;

static void deal_pieces(deal *d, int size, int64_t unit, bool skip_last_rank)
{
    memset(d, 0, sizeof *d);
    for (int r = 0; r < size; r++) d->lists[r].segments = d->segments[r];
    for (int j = 0; j < PIECES; j++) {
        int owner = (j * 3 + 1) % size;
        if (skip_last_rank && owner == size - 1) owner = 0;
        int64_t count = j % 4 == 2 ? 0 : unit * (1 + j % 3) + j;
        d->segments[owner][d->lists[owner].count++] = (qd_segment){d->total, count};
        d->total += count;
    }
}

static int64_t dealt(const deal *d, int rank)
{
    int64_t count = 0;
    for (int i = 0; i < d->lists[rank].count; i++) count += d->segments[rank][i].count;
    return count;
}

static qd_status try_vectored(bench *b, int64_t unit, bool skip, qd_dtype dtype, qd_reduce_op op)
{
    deal *d = malloc(sizeof *d);
    if (!d) return QD_FAIL(QD_NO_MEMORY, "no memory");
    qd_status status = QD_OK;
    deal_pieces(d, b->size, unit, skip);
    clear(b);
    fill(b, b->in, dtype, b->rank, 0, d->total);
    QD_TRY_DONE(qd_comm_reduce_scatter_v(b->comm, b->in, b->out, d->lists, dtype, op, NULL));
    int64_t at = 0;
    for (int i = 0; i < d->lists[b->rank].count; i++) {
        qd_segment s = d->segments[b->rank][i];
        QD_TRY_DONE(expect_reduced(b, "vectored reduce-scatter", dtype, op, s.offset, s.count, element(b->out, dtype, at)));
        at += s.count;
    }
    QD_TRY_DONE(expect_guard(b, "vectored reduce-scatter", element(b->out, dtype, at)));

    b->salt++;
    clear(b);
    fill(b, b->in, dtype, b->rank, 0, dealt(d, b->rank));
    QD_TRY_DONE(qd_comm_all_gather_v(b->comm, b->in, b->out, d->lists, dtype, NULL));
    for (int r = 0; r < b->size; r++) {
        at = 0;
        for (int i = 0; i < d->lists[r].count; i++) {
            qd_segment s = d->segments[r][i];
            QD_TRY_DONE(expect_input(b, "vectored all-gather", dtype, r, at, s.count, element(b->out, dtype, s.offset)));
            at += s.count;
        }
    }
    QD_TRY_DONE(expect_guard(b, "vectored all-gather", element(b->out, dtype, d->total)));
done:
    free(d);
    return status;
}

static qd_status try_all_to_all(bench *b, int64_t count, qd_dtype dtype)
{
    clear(b);
    fill(b, b->in, dtype, b->rank, 0, count * b->size);
    QD_TRY(qd_comm_all_to_all(b->comm, b->in, b->out, count, dtype, NULL));
    for (int r = 0; r < b->size; r++)
        QD_TRY(expect_input(b, "all-to-all", dtype, r, count * b->rank, count, element(b->out, dtype, count * r)));
    return expect_guard(b, "all-to-all", element(b->out, dtype, count * b->size));
}

/* Elements from one rank to another; many pairs have none. */
static int64_t pair_count(int64_t unit, int from, int to)
{
    return (from + 2 * to) % 3 == 0 ? 0 : unit * ((from * 5 + to * 3) % 4) + from + 1;
}

static qd_status try_all_to_all_v(bench *b, int64_t unit, qd_dtype dtype)
{
    int64_t in_counts[64], in_offsets[64], out_counts[64], out_offsets[64], sent = 0, received = 0;
    for (int r = 0; r < b->size; r++) {
        in_counts[r] = pair_count(unit, b->rank, r);
        out_counts[r] = pair_count(unit, r, b->rank);
        in_offsets[r] = sent;
        out_offsets[b->size - 1 - r] = 0;
        sent += in_counts[r];
    }
    for (int r = b->size - 1; r >= 0; r--) { /* the receiving side has another order than the ranks' */
        out_offsets[r] = received;
        received += out_counts[r];
    }
    clear(b);
    fill(b, b->in, dtype, b->rank, 0, sent);
    QD_TRY(qd_comm_all_to_all_v(b->comm, b->in, in_counts, in_offsets, b->out, out_counts, out_offsets, dtype, NULL));
    for (int r = 0; r < b->size; r++) {
        int64_t before = 0; /* where r's block for this rank begins in r's input */
        for (int q = 0; q < b->rank; q++) before += pair_count(unit, r, q);
        QD_TRY(expect_input(b, "uneven all-to-all", dtype, r, before, out_counts[r], element(b->out, dtype, out_offsets[r])));
    }
    return expect_guard(b, "uneven all-to-all", element(b->out, dtype, received));
}

/* All ranks pass data around a ring, large and small, with blocking calls on one side. */
static qd_status try_messages(bench *b, int64_t count, qd_dtype dtype)
{
    if (b->size == 1) return QD_OK;
    int next = (b->rank + 1) % b->size, previous = (b->rank + b->size - 1) % b->size;
    clear(b);
    fill(b, b->in, dtype, b->rank, 0, count);
    qd_work *work = NULL;
    QD_TRY(qd_comm_send(b->comm, b->in, count, dtype, next, &work));
    QD_TRY(qd_comm_recv(b->comm, b->out, count, dtype, previous, NULL));
    QD_TRY(qd_work_wait(work));
    QD_TRY(expect_input(b, "message", dtype, previous, 0, count, b->out));
    return expect_guard(b, "message", element(b->out, dtype, count));
}

static const qd_dtype reduced_types[] = {QD_F32, QD_BF16, QD_F16, QD_I32, QD_I64, QD_F64};
static const int64_t counts[] = {0, 1, 3, 7, 64, 1000, 4097};

static qd_status every_pattern(bench *b)
{
    for (size_t t = 0; t < sizeof reduced_types / sizeof *reduced_types; t++) {
        qd_dtype dtype = reduced_types[t];
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            int64_t count = counts[c];
            if (!sample_has(c, t, 3))
                continue;
            int root = (int)((c + t) % (size_t)b->size);
            bool in_place = (c + t) % 2;
            for (int op = QD_SUM; op <= QD_AVG; op++) {
                b->salt++;
                QD_TRY(try_all_reduce(b, count, dtype, (qd_reduce_op)op, in_place));
                QD_TRY(try_reduce_scatter(b, count, dtype, (qd_reduce_op)op, !in_place));
                QD_TRY(try_reduce(b, count, dtype, (qd_reduce_op)op, root, in_place));
            }
            QD_TRY(try_all_gather(b, count, dtype, in_place));
            QD_TRY(try_broadcast(b, count, dtype, root));
            QD_TRY(try_gather_scatter(b, count, dtype, root));
            QD_TRY(try_vectored(b, count, c % 2, dtype, (qd_reduce_op)(c % 3)));
            QD_TRY(try_all_to_all(b, count, dtype));
            QD_TRY(try_all_to_all_v(b, count, dtype));
            QD_TRY(try_messages(b, count, dtype));
            QD_TRY(qd_comm_barrier(b->comm, NULL));
        }
    }
    QD_TRY(try_all_gather(b, 1001, QD_U8, false));
    QD_TRY(try_broadcast(b, 1001, QD_U8, b->size - 1));
    return QD_OK;
}

/* Larger than every intermediate buffer, and without divisors. */
static qd_status large_messages(bench *b)
{
    const int64_t count = MOST_ELEMENTS;
    static const struct {
        qd_dtype dtype;
        qd_reduce_op op;
    } cases[] = {{QD_F32, QD_SUM}, {QD_BF16, QD_AVG}, {QD_F64, QD_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_dtype dtype = cases[i].dtype;
        b->salt++;
        QD_TRY(try_all_reduce(b, count, dtype, cases[i].op, i % 2));
        QD_TRY(try_all_reduce(b, count, dtype, cases[i].op, i % 2 == 0));
        QD_TRY(try_reduce_scatter(b, count, dtype, cases[i].op, i % 2));
        QD_TRY(try_reduce(b, count, dtype, cases[i].op, b->size - 1, i % 2));
        QD_TRY(try_all_gather(b, count, dtype, i % 2));
        QD_TRY(try_broadcast(b, count, dtype, 0));
        QD_TRY(try_gather_scatter(b, count, dtype, b->size / 2));
        QD_TRY(try_vectored(b, 4000, i % 2, dtype, cases[i].op));
        QD_TRY(try_all_to_all(b, count / b->size, dtype));
        QD_TRY(try_all_to_all_v(b, count / 4 / b->size, dtype));
        QD_TRY(try_messages(b, count, dtype));
    }
    return QD_OK;
}

/* Sizes on both sides of every limit that does not depend on the processor. */
static qd_status sizes_of_ways(bench *b)
{
    static const int64_t elements[] = {5, 1500, 20011, 50021};
    for (size_t i = 0; i < sizeof elements / sizeof *elements; i++) {
        const int64_t count = elements[i];
        b->salt++;
        QD_TRY(try_all_reduce(b, count, QD_F32, QD_SUM, i % 2));
        QD_TRY(try_reduce_scatter(b, count, QD_F32, QD_SUM, i % 2));
        QD_TRY(try_reduce(b, count, QD_F32, QD_SUM, b->size - 1, i % 2));
        QD_TRY(try_all_gather(b, count, QD_F32, i % 2));
        QD_TRY(try_broadcast(b, count, QD_F32, 0));
        QD_TRY(try_gather_scatter(b, count, QD_F32, b->size / 2));
        QD_TRY(try_vectored(b, count / 20, i % 2, QD_F32, QD_SUM));
        QD_TRY(try_all_to_all(b, count / b->size, QD_F32));
        QD_TRY(try_all_to_all_v(b, count / 4 / b->size, QD_F32));
        QD_TRY(try_messages(b, count, QD_F32));
    }
    return QD_OK;
}

/* Payloads just below, at and above what heads carry within a machine and between machines; in
 * large groups, between machines. */
static qd_status sizes_of_heads(bench *b)
{
    const int64_t limits[] = {QD_REMOTE_CARRY_LEAST, (64 << 10), QD_REMOTE_CARRY_ALL / b->size};
    for (int i = 0; i < 3 * 3; i++) {
        if ((i / 3 == 2) != (b->size > 16)) continue;
        const int64_t bytes = limits[i / 3] + i % 3 - 1, elements = limits[i / 3] / 2 + i % 3 - 1;
        b->salt++;
        QD_TRY(try_all_gather(b, bytes * b->size, QD_U8, i % 2));
        QD_TRY(try_broadcast(b, bytes, QD_U8, i % b->size));
        QD_TRY(try_gather_scatter(b, bytes * b->size, QD_U8, i % b->size));
        QD_TRY(try_all_to_all(b, bytes, QD_U8));
        QD_TRY(try_all_to_all_v(b, bytes / 3, QD_U8));
        QD_TRY(try_messages(b, bytes, QD_U8));
        QD_TRY(try_all_reduce(b, elements, QD_BF16, QD_SUM, i % 2));
        QD_TRY(try_all_reduce(b, elements * b->size, QD_BF16, QD_SUM, i % 2 == 0));
        QD_TRY(try_reduce_scatter(b, elements * b->size, QD_BF16, QD_SUM, i % 2));
        QD_TRY(try_reduce(b, elements, QD_BF16, QD_SUM, i % b->size, i % 2));
        QD_TRY(try_reduce(b, elements * b->size, QD_BF16, QD_SUM, i % b->size, i % 2 == 0));
        QD_TRY(try_vectored(b, elements / 4, i % 2, QD_BF16, QD_SUM));
    }
    return QD_OK;
}

static qd_status body_heads(qd_comm *world, void *arg)
{
    qd_ranks_call *call = arg;
    bench b;
    bool apart = strcmp(call->text, "apart") == 0;
    if (call->mode == QD_RANKS_UCX && apart != (qd_comm_locate(world).machines > 1))
        return QD_FAIL(QD_DIFFERENT, "the ranks are on %d machines", qd_comm_locate(world).machines);
    QD_TRY(bench_open(&b, world, "", 2 * MOST_ELEMENTS));
    qd_status status = sizes_of_heads(&b);
    call->value = b.hash;
    bench_close(&b);
    return status;
}

static qd_status body_ways(qd_comm *world, void *arg)
{
    qd_ranks_call *call = arg;
    bench b;
    QD_TRY(bench_open(&b, world, call->text, MOST_ELEMENTS));
    qd_status status = sizes_of_ways(&b);
    call->value = b.hash;
    bench_close(&b);
    return status;
}

static qd_status body_every(qd_comm *world, void *arg)
{
    qd_ranks_call *call = arg;
    bench b;
    QD_TRY(bench_open(&b, world, call->text, MOST_ELEMENTS));
    qd_status status = every_pattern(&b);
    if (status == QD_OK) status = large_messages(&b);
    call->value = b.hash;
    bench_close(&b);
    return status;
}

/* Results that are written with non-temporal stores. */
static qd_status huge_messages(bench *b)
{
    const int64_t count = HUGE_ELEMENTS;
    QD_TRY(try_reduce_scatter(b, count, QD_F32, QD_SUM, false));
    QD_TRY(try_reduce(b, count, QD_F32, QD_SUM, 1, true));
    for (int in_place = 0; in_place < 2; in_place++) {
        QD_TRY(try_all_reduce(b, count, QD_F32, QD_SUM, in_place));
        QD_TRY(try_all_gather(b, count, QD_F32, in_place));
    }
    QD_TRY(try_broadcast(b, count, QD_F32, 1));
    QD_TRY(try_gather_scatter(b, count, QD_F32, 0));
    QD_TRY(try_all_to_all(b, count / b->size, QD_F32));
    return try_messages(b, count, QD_F32);
}

static qd_status body_huge(qd_comm *world, void *arg)
{
    qd_ranks_call *call = arg;
    bench b;
    QD_TRY(bench_open(&b, world, call->text, HUGE_ELEMENTS));
    qd_status status = huge_messages(&b);
    call->value = b.hash;
    bench_close(&b);
    return status;
}

static qd_status body_groups(qd_comm *world, void *arg)
{
    qd_ranks_call *call = arg;
    int rank = qd_comm_rank(world), size = qd_comm_size(world);
    uint64_t hash = 0;
    /* More groups over the life of a world than it can hold at once. */
    for (int i = 0; i < 40; i++) {
        qd_comm *odd = NULL, *back = NULL, *inner = NULL;
        QD_TRY(qd_comm_split(world, i % 3 == 2 && rank == 0 ? -1 : rank % 2, rank, "parity", &odd));
        QD_TRY(qd_comm_split(world, 0, -rank, "back", &back));
        if (i % 3 == 2 && rank == 0) {
            if (odd) return QD_FAIL(QD_DIFFERENT, "a negative colour gave a group");
        } else {
            for (int r = 0; r < qd_comm_size(odd); r++)
                if (qd_comm_world_rank(odd, r) % 2 != rank % 2) return QD_FAIL(QD_DIFFERENT, "a stranger in the group");
            QD_TRY(qd_comm_split(odd, 0, 0, "inner", &inner));
            bench b;
            QD_TRY(bench_open(&b, inner, call->text, MOST_ELEMENTS));
            b.salt = (uint64_t)i;
            qd_status status = try_all_reduce(&b, 17 + i * 700, QD_F32, QD_SUM, false);
            if (status == QD_OK) status = try_all_gather(&b, 4097, QD_I32, false);
            if (status == QD_OK) status = try_messages(&b, 3000 + i, QD_F32);
            hash = ref_hash(hash, b.hash, 0);
            bench_close(&b);
            QD_TRY(status);
        }
        if (qd_comm_rank(back) != size - 1 - rank) return QD_FAIL(QD_DIFFERENT, "keys do not order the group");
        int32_t number = rank, sum = 0;
        QD_TRY(qd_comm_all_reduce(back, &number, &sum, 1, QD_I32, QD_SUM, NULL));
        if (sum != size * (size - 1) / 2) return QD_FAIL(QD_DIFFERENT, "sum over the group is %d", sum);
        qd_comm_destroy(inner);
        qd_comm_destroy(odd);
        qd_comm_destroy(back);
    }
    call->value = hash;
    return QD_OK;
}

enum { FLIGHTS = 12, GROUPS = 3 };

/* Many operations in flight on several communicators, started and waited for in an order that
 * differs by rank. */
static qd_status body_async(qd_comm *world, void *arg)
{
    qd_ranks_call *call = arg;
    int rank = qd_comm_rank(world), size = qd_comm_size(world);
    qd_comm *groups[GROUPS] = {world};
    qd_comm_check_messages(world, strcmp(call->text, "checked") == 0);
    for (int g = 1; g < GROUPS; g++) QD_TRY(qd_comm_split(world, 0, rank, "copy", &groups[g]));
    static const int64_t sizes[] = {5, 1000, 70001, 0, 20000, 3};
    float *in[GROUPS][FLIGHTS], *out[GROUPS][FLIGHTS];
    qd_work *work[GROUPS][FLIGHTS];
    uint64_t hash = 0;
    for (int g = 0; g < GROUPS; g++)
        for (int f = 0; f < FLIGHTS; f++) {
            int64_t n = sizes[(f + g) % 6];
            in[g][f] = ref_take(world, call->text, f, n * 4 + 4);
            out[g][f] = ref_take(world, call->text, f + 1, n * 4 + 4);
            for (int64_t i = 0; i < n; i++) ref_input(&in[g][f][i], QD_F32, (uint64_t)(g * 100 + f), rank, i);
        }
    for (int round = 0; round < 3; round++) {
        /* A long-waiting receive must not delay anything: it is posted first and sent last. */
        float late_in[2000] = {0}, late_out[2000];
        qd_work *late = NULL;
        int next = (rank + 1) % size, previous = (rank + size - 1) % size;
        for (int i = 0; i < 2000; i++) late_out[i] = (float)(rank * 10000 + i);
        if (size > 1) QD_TRY(qd_comm_recv(groups[1], late_in, 2000, QD_F32, previous, &late));
        for (int k = 0; k < GROUPS; k++) {
            int g = (k + rank) % GROUPS;
            for (int f = 0; f < FLIGHTS; f++)
                QD_TRY(qd_comm_all_reduce(groups[g], in[g][f], out[g][f], sizes[(f + g) % 6], QD_F32, QD_SUM, &work[g][f]));
        }
        /* A blocking call runs after the queued operations of its communicator. */
        int32_t one = 1, sum = 0;
        QD_TRY(qd_comm_all_reduce(groups[2], &one, &sum, 1, QD_I32, QD_SUM, NULL));
        if (sum != size) return QD_FAIL(QD_DIFFERENT, "blocking sum is %d", sum);
        for (int f = 0; f < FLIGHTS; f++)
            if (!qd_work_done(work[2][f])) return QD_FAIL(QD_DIFFERENT, "a blocking call overtook a queued one");
        for (int k = 0; k < GROUPS; k++) {
            int g = (k + 2 * rank) % GROUPS;
            for (int f = 0; f < FLIGHTS; f++) {
                int at = rank % 2 ? FLIGHTS - 1 - f : f;
                QD_TRY(qd_work_wait(work[g][at]));
            }
        }
        if (size > 1) {
            if (qd_work_done(late)) return QD_FAIL(QD_DIFFERENT, "a receive was done before its send");
            QD_TRY(qd_comm_barrier(world, NULL));
            QD_TRY(qd_comm_send(groups[1], late_out, 2000, QD_F32, next, NULL));
            QD_TRY(qd_work_wait(late));
            for (int i = 0; i < 2000; i++)
                if (late_in[i] != (float)(previous * 10000 + i)) return QD_FAIL(QD_DIFFERENT, "late message is wrong");
        }
    }
    for (int g = 0; g < GROUPS; g++)
        for (int f = 0; f < FLIGHTS; f++) {
            for (int64_t i = 0; i < sizes[(f + g) % 6]; i++) {
                float want;
                ref_reduced(&want, QD_F32, QD_SUM, (uint64_t)(g * 100 + f), size, i);
                if (memcmp(&want, &out[g][f][i], 4) != 0)
                    return QD_FAIL(QD_DIFFERENT, "asynchronous sum %d of group %d differs at %lld", f, g, (long long)i);
                uint32_t bits;
                memcpy(&bits, &want, 4);
                hash = ref_hash(hash, bits, 0);
            }
            ref_give(world, call->text, f, in[g][f]);
            ref_give(world, call->text, f + 1, out[g][f]);
        }
    for (int g = 1; g < GROUPS; g++) qd_comm_destroy(groups[g]);
    call->value = hash;
    return QD_OK;
}

static qd_status want_usage(qd_status got, const char *what)
{
    if (got == QD_USAGE) return QD_OK;
    return QD_FAIL(QD_DIFFERENT, "%s gave '%s' instead of a usage error", what, qd_status_text(got));
}

static qd_status body_arguments(qd_comm *world, void *arg)
{
    (void)arg;
    float x[4] = {0};
    uint8_t bytes[4] = {0};
    QD_TRY(want_usage(qd_comm_all_reduce(world, x, x, -1, QD_F32, QD_SUM, NULL), "a negative count"));
    QD_TRY(want_usage(qd_comm_all_reduce(world, NULL, x, 4, QD_F32, QD_SUM, NULL), "a NULL input"));
    QD_TRY(want_usage(qd_comm_all_reduce(world, bytes, bytes, 4, QD_U8, QD_SUM, NULL), "a sum of bytes"));
    QD_TRY(want_usage(qd_comm_broadcast(world, x, 4, QD_F32, qd_comm_size(world), NULL), "a root that does not exist"));
    QD_TRY(want_usage(qd_comm_send(world, x, 4, QD_F32, qd_comm_rank(world), NULL), "a message to itself"));
    QD_TRY(want_usage(qd_comm_all_reduce(world, x, x, 4, (qd_dtype)99, QD_SUM, NULL), "a type that does not exist"));
    return qd_comm_barrier(world, NULL); /* refused calls do not count as operations */
}

/* Blocks do not overlap, are zeroed when allocated, also when reused, and work with every
 * operation. */
static qd_status body_memory(qd_comm *world, void *arg)
{
    (void)arg;
    enum { BLOCKS = 20, ROUNDS = 4 };
    int rank = qd_comm_rank(world), size = qd_comm_size(world);
    int32_t *blocks[BLOCKS] = {NULL};
    int64_t lengths[BLOCKS] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            if (blocks[i] && (i + round) % 3) continue;
            qd_comm_free(world, blocks[i]);
            lengths[i] = (int64_t)(i * i * 3001 + round * 70001 + 1);
            QD_TRY(qd_comm_alloc(world, lengths[i] * 4, (void **)&blocks[i]));
            for (int64_t k = 0; k < lengths[i]; k++)
                if (blocks[i][k] != 0) return QD_FAIL(QD_DIFFERENT, "new shared memory is not zero");
            for (int64_t k = 0; k < lengths[i]; k++) blocks[i][k] = i;
        }
        for (int i = 0; i < BLOCKS; i++)
            for (int64_t k = 0; k < lengths[i]; k++)
                if (blocks[i][k] != i) return QD_FAIL(QD_DIFFERENT, "blocks %d and %d overlap", i, blocks[i][k]);
        /* Ranks allocate different blocks, and use a part from the middle. */
        int32_t *mine = blocks[BLOCKS - 1 - rank % 2] + 1000 + rank;
        for (int k = 0; k < 60000; k++) mine[k] = rank + k;
        QD_TRY(qd_comm_all_reduce(world, mine, mine, 60000, QD_I32, QD_SUM, NULL));
        for (int k = 0; k < 60000; k++)
            if (mine[k] != size * k + size * (size - 1) / 2) return QD_FAIL(QD_DIFFERENT, "the sum is wrong at %d", k);
        for (int k = 0; k < 60000; k++) mine[k] = BLOCKS - 1 - rank % 2;
    }
    void *none = blocks[0];
    if (qd_comm_alloc(world, INT64_MAX, &none) != QD_NO_MEMORY || none)
        return QD_FAIL(QD_DIFFERENT, "more memory than there can be was given");
    QD_TRY(want_usage(qd_comm_alloc(world, -1, &none), "a negative size"));
    for (int i = 0; i < BLOCKS; i++) qd_comm_free(world, blocks[i]);
    qd_comm_free(world, NULL);
    return qd_comm_barrier(world, NULL);
}

static const qd_ranks_entry bodies[] = {
    {"memory", body_memory},
    {"every", body_every}, {"heads", body_heads}, {"ways", body_ways}, {"huge", body_huge}, {"groups", body_groups}, {"async", body_async},
    {"arguments", body_arguments}};

/* Runs a body; its values must be those of `first`. */
static void run_same(const char *body, qd_ranks_mode mode, const char *text, int size, const qd_ranks_result *first,
                     qd_ranks_result *results)
{
    qd_ranks_options options = {
        .text = text, .deadline_seconds = 60, .limit_seconds = 180 /* for a busy machine */, .staging_bytes = size > 8 ? 1 << 20 : 0};
    if (qd_ranks_run_ok(body, mode, size, &options, results) != QD_OK) fail_msg("memory '%s': %s", text, qd_error_message());
    for (int r = 0; first && r < size; r++)
        if (results[r].value != first[r].value)
            fail_msg("%s: rank %d of %d has other bits with %s, memory '%s', than with %s", body, r, size,
                     qd_ranks_mode_name(mode), text, qd_ranks_mode_name(QD_RANKS_THREADS));
}

/* Runs a body in every mode; the values of each size must not depend on the mode. */
static void run_everywhere(const char *body, const int *sizes, int count)
{
    for (int i = 0; i < count; i++) {
        qd_ranks_result first[64], results[64];
        for (int mode = 0; mode < QD_RANKS_MODE_COUNT; mode++) {
            if (!qd_ranks_mode_available((qd_ranks_mode)mode)) continue;
            if (mode != QD_RANKS_THREADS && !sample_has((size_t)i, (size_t)mode, 2)) continue;
            const char *texts[3];
            for (int t = 0; t < ref_texts((qd_ranks_mode)mode, texts); t++) {
                run_same(body, (qd_ranks_mode)mode, texts[t], sizes[i], mode == QD_RANKS_THREADS ? NULL : first, results);
                if (mode == QD_RANKS_THREADS) memcpy(first, results, sizeof first);
            }
        }
    }
}

/* Checksums of messages do not change results. */
static void test_checked(void **unused)
{
    (void)unused;
    static const char *const names[] = {"every", "huge", "groups", "async"};
    qd_ranks_result first[4], results[4];
    for (int i = 0; i < 4; i++)
        for (int size = 2; size <= 4; size++) {
            if (!sample_has((size_t)i, (size_t)size, 2)) continue;
            run_same(names[i], QD_RANKS_THREADS, "", size, NULL, first);
            run_same(names[i], QD_RANKS_THREADS, "checked", size, first, results);
            run_same(names[i], QD_RANKS_PROCESSES, "checked", size, first, results);
            if (qd_ranks_mode_available(QD_RANKS_MPI)) run_same(names[i], QD_RANKS_MPI, "checked", size, first, results);
        }
}

/* Every way of moving data gives bit-identical results, whatever a processor would choose. */
static void test_ways(void **unused)
{
    (void)unused;
    static const char *const memories[] = {"", "shared", "mixed"};
    qd_ranks_result first[4], results[4];
    for (int size = 2; size <= 3; size++) {
        run_same("ways", QD_RANKS_THREADS, "", size, NULL, first);
        for (size_t w = 0; w < FORCED_WAYS; w++)
            for (size_t m = 0; m < sizeof memories / sizeof *memories; m++) {
                qd_ranks_options options = {.text = memories[m], .deadline_seconds = 60, .limit_seconds = 180, .ways = forced_ways[w]};
                qd_ranks_mode mode = (w + m) % 4 == 3 ? QD_RANKS_THREADS : QD_RANKS_PROCESSES;
                if (m == 2 && !sample_has(w, (size_t)size, 2)) continue;
                if (qd_ranks_run_ok("ways", mode, size, &options, results) != QD_OK)
                    fail_msg("ways '%s', memory '%s': %s", forced_ways[w], memories[m], qd_error_message());
                for (int r = 0; r < size; r++)
                    if (results[r].value != first[r].value) fail_msg("ways '%s', memory '%s': other bits", forced_ways[w], memories[m]);
            }
    }
    qd_local_world *world;
    qd_comm_config config = qd_comm_config_default();
    config.ways = "stream_bytes=1 speed=9";
    assert_int_equal(qd_local_world_create(2, &config, &world), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "there is no 'speed'"));
    qd_error_clear();
}

static void test_every(void **unused)
{
    (void)unused;
    run_everywhere("every", (const int[]){1, 2, 3, 4, 8}, 5);
}

/* Odd ranks live apart: with 4 ranks, some pairs share a machine and some do not. */
static void test_heads(void **unused)
{
    (void)unused;
    static const int sizes[] = {2, 3, 4, 17};
    qd_ranks_result first[17], results[17];
    for (int i = 0; i < sample_count(4, 2); i++) {
        run_same("heads", QD_RANKS_THREADS, "", sizes[i], NULL, first);
        if (qd_ranks_mode_available(QD_RANKS_MPI) && sizes[i] < 17) run_same("heads", QD_RANKS_MPI, "", sizes[i], first, results);
        if (!qd_ranks_mode_available(QD_RANKS_UCX)) continue;
        if (sizes[i] < 17) run_same("heads", QD_RANKS_UCX, "", sizes[i], first, results);
        if (may_live_apart()) run_same("heads", QD_RANKS_UCX, "apart", sizes[i], first, results);
    }
}

static void test_huge(void **unused)
{
    (void)unused;
    run_everywhere("huge", (const int[]){2, 3}, 2);
    qd_ranks_result first[5], results[5]; /* of 5 ranks, the second phase sends several chunks of sums at once */
    run_same("huge", QD_RANKS_THREADS, "", 5, NULL, first);
    if (qd_ranks_mode_available(QD_RANKS_MPI)) run_same("huge", QD_RANKS_MPI, "", 5, first, results);
    if (qd_ranks_mode_available(QD_RANKS_UCX) && may_live_apart()) run_same("huge", QD_RANKS_UCX, "apart", 5, first, results);
}

static void test_groups(void **unused)
{
    (void)unused;
    run_everywhere("groups", (const int[]){1, 2, 3, 8}, 4);
}

static void test_async(void **unused)
{
    (void)unused;
    run_everywhere("async", (const int[]){1, 2, 3, 4, 8}, 5);
}

static void test_arguments(void **unused)
{
    (void)unused;
    run_everywhere("arguments", (const int[]){1, 2}, 2);
}

static void test_memory(void **unused)
{
    (void)unused;
    run_everywhere("memory", (const int[]){1, 2, 4}, 3);
}

int main(int argc, char **argv)
{
    if (argc > 3 && strcmp(argv[argc - 1], "apart") == 0 && atoi(argv[3]) % 2) live_apart();
    qd_ranks_main(argc, argv, bodies, sizeof bodies / sizeof *bodies);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ways), cmocka_unit_test(test_every), cmocka_unit_test(test_heads),
                                       cmocka_unit_test(test_huge),
                                       cmocka_unit_test(test_groups), cmocka_unit_test(test_async),
                                       cmocka_unit_test(test_arguments), cmocka_unit_test(test_memory),
                                       cmocka_unit_test(test_checked)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
