/* Communicators for device memory, ordered by streams alone. Every operation runs twice, with host
 * memory on the world and with device memory on its devices, and must be bit-identical. On the CPU,
 * and on a GPU that all ranks share if there is one.
 * ctest: timeout 300 */
#include "comm/device.h"
#include "dist/reference.h"
#include "support/ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { MOST = 70001, MOST_BYTES = MOST * 8, ROUNDS = 15 };

typedef struct bench {
    qd_comm *host, *comm; /* the same ranks */
    qd_device *device;
    qd_stream *stream;
    int rank, size;
    uint64_t salt;
    unsigned char *in, *out, *got; /* host */
    void *device_in, *device_out;
} bench;

static qd_status bench_open(bench *b, qd_comm *world, const char *kind)
{
    *b = (bench){.host = world, .salt = 1};
    b->rank = qd_comm_rank(world);
    b->size = qd_comm_size(world);
    qd_device_config config = qd_device_config_default();
    config.ordinal = b->rank;
    config.share = true;
    QD_TRY(qd_device_create(kind, &config, &b->device));
    QD_TRY(qd_comm_on_device(world, b->device, "local", &b->comm));
    b->stream = qd_device_compute_stream(b->device);
    b->in = malloc(MOST_BYTES);
    b->out = malloc(MOST_BYTES);
    b->got = malloc(MOST_BYTES);
    if (!b->in || !b->out || !b->got) return QD_FAIL(QD_NO_MEMORY, "no memory");
    QD_TRY(qd_device_alloc(b->device, MOST_BYTES, &b->device_in));
    return qd_device_alloc(b->device, MOST_BYTES, &b->device_out);
}

static void bench_close(bench *b)
{
    qd_comm_destroy(b->comm);
    if (b->device) {
        qd_device_free(b->device, b->device_in, MOST_BYTES);
        qd_device_free(b->device, b->device_out, MOST_BYTES);
    }
    qd_device_destroy(b->device);
    free(b->in);
    free(b->out);
    free(b->got);
}

typedef struct trial {
    qd_coll_kind kind;
    int64_t count;
    qd_dtype dtype;
    qd_reduce_op reduce;
    bool lists, in_place;
} trial;

/* Uneven segments with gaps: rank r has two, of r + 1 and 3 hundredths of the buffer. */
static void make_lists(int size, int64_t count, qd_segment (*parts)[2], qd_segment_list *lists)
{
    int64_t at = 0, unit = count / 100;
    for (int r = 0; r < size; r++) {
        parts[r][0] = (qd_segment){at, unit * (r + 1)};
        parts[r][1] = (qd_segment){at + unit * (r + 2), r == 1 ? 0 : unit * 3};
        at += unit * (r + 5);
        lists[r] = (qd_segment_list){parts[r], 2};
    }
}

/* In place: the smaller buffer is the rank's own slice of the larger one, or both are the same. */
static qd_status call(qd_comm *comm, const trial *t, void *in, void *out, qd_work **work)
{
    int rank = qd_comm_rank(comm), size = qd_comm_size(comm), root = size - 1;
    int64_t first, count, width = (int64_t)qd_dtype_size(t->dtype);
    qd_segment parts[8][2];
    qd_segment_list lists[8];
    qd_slice(t->count, size, rank, &first, &count);
    void *in_slice = t->in_place ? (char *)out + first * width : in, *out_slice = t->in_place ? (char *)in + first * width : out;
    make_lists(size, t->count, parts, lists);
    switch (t->kind) {
    case QD_COLL_ALL_REDUCE:
        return qd_comm_all_reduce(comm, t->in_place ? out : in, out, t->count, t->dtype, t->reduce, work);
    case QD_COLL_REDUCE:
        return qd_comm_reduce(comm, t->in_place ? out : in, out, t->count, t->dtype, t->reduce, root, work);
    case QD_COLL_REDUCE_SCATTER:
        if (t->lists) return qd_comm_reduce_scatter_v(comm, in, out, lists, t->dtype, t->reduce, work);
        return qd_comm_reduce_scatter(comm, in, out_slice, t->count, t->dtype, t->reduce, work);
    case QD_COLL_ALL_GATHER:
        if (t->lists) return qd_comm_all_gather_v(comm, in, out, lists, t->dtype, work);
        return qd_comm_all_gather(comm, in_slice, out, t->count, t->dtype, work);
    case QD_COLL_ALL_TO_ALL: {
        int64_t counts[2][8], offsets[2][8], unit = t->count / 100;
        if (!t->lists) return qd_comm_all_to_all(comm, in, out, t->count / size, t->dtype, work);
        for (int p = 0; p < size; p++) {
            counts[0][p] = unit * ((rank + 2 * p) % 3); /* to p; some pairs exchange nothing */
            counts[1][p] = unit * ((p + 2 * rank) % 3);
            offsets[0][p] = 3 * unit * p;
            offsets[1][p] = 3 * unit * (size - 1 - p);
        }
        return qd_comm_all_to_all_v(comm, in, counts[0], offsets[0], out, counts[1], offsets[1], t->dtype, work);
    }
    case QD_COLL_BROADCAST: return qd_comm_broadcast(comm, out, t->count, t->dtype, root, work);
    case QD_COLL_GATHER: return qd_comm_gather(comm, in, out, t->count, t->dtype, root, work);
    case QD_COLL_SCATTER: return qd_comm_scatter(comm, in, out, t->count, t->dtype, root, work);
    default: return qd_comm_barrier(comm, work);
    }
}

static qd_status run_trial(bench *b, const trial *t, bool async)
{
    int64_t width = (int64_t)qd_dtype_size(t->dtype), bytes = t->count * width;
    qd_work *work = NULL;
    b->salt++;
    for (int64_t i = 0; i < t->count; i++) {
        ref_input(b->in + i * width, t->dtype, b->salt, b->rank, i);
        ref_input(b->out + i * width, t->dtype, b->salt + 1000, b->rank, i);
    }
    QD_TRY(qd_copy(b->stream, b->device_in, b->in, bytes));
    QD_TRY(qd_copy(b->stream, b->device_out, b->out, bytes));
    qd_comm_reset_stats(b->host);
    qd_comm_reset_stats(b->comm);
    QD_TRY(call(b->comm, t, b->device_in, b->device_out, async ? &work : NULL));
    if (async) QD_TRY(qd_work_wait(work));
    for (int both = 0; both < 2; both++) { /* in place, reduce-scatter's result is in `in` */
        QD_TRY(qd_copy(b->stream, b->got, both ? b->device_in : b->device_out, bytes));
        QD_TRY(qd_stream_wait(b->stream));
        if (!both) QD_TRY(call(b->host, t, b->in, b->out, NULL));
        const unsigned char *want = both ? b->in : b->out;
        if (memcmp(b->got, want, (size_t)bytes) == 0) continue;
        for (int64_t i = 0; i < bytes; i++)
            if (b->got[i] != want[i])
                return QD_FAIL(QD_DIFFERENT, "%s of %lld %s (%s%s%s), rank %d of %d: byte %lld of the %s differs",
                               qd_coll_kind_name(t->kind), (long long)t->count, qd_dtype_name(t->dtype),
                               qd_reduce_op_name(t->reduce), t->lists ? ", lists" : "", t->in_place ? ", in place" : "", b->rank,
                               b->size, (long long)i, both ? "input" : "output");
    }
    qd_comm_stats host = qd_comm_stats_default(), device = qd_comm_stats_default();
    qd_comm_get_stats(b->host, &host);
    qd_comm_get_stats(b->comm, &device);
    if (host.bytes[t->kind] == device.bytes[t->kind] && device.calls[t->kind] == 1) return QD_OK;
    return QD_FAIL(QD_DIFFERENT, "%s: %lld bytes counted on the device, %lld on the host", qd_coll_kind_name(t->kind),
                   (long long)device.bytes[t->kind], (long long)host.bytes[t->kind]);
}

static qd_status every_trial(bench *b)
{
    static const int64_t counts[] = {0, 1, 7, 1000, 4099, MOST};
    static const qd_dtype types[] = {QD_F32, QD_BF16, QD_F16, QD_I32, QD_I64, QD_F64};
    for (int kind = 0; kind < QD_COLL_KIND_COUNT; kind++) {
        bool reduces = kind == QD_COLL_ALL_REDUCE || kind == QD_COLL_REDUCE || kind == QD_COLL_REDUCE_SCATTER;
        bool listed = kind == QD_COLL_REDUCE_SCATTER || kind == QD_COLL_ALL_GATHER || kind == QD_COLL_ALL_TO_ALL;
        bool placed = reduces || kind == QD_COLL_ALL_GATHER;
        if (kind == QD_COLL_SEND || kind == QD_COLL_RECV) continue;
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (size_t d = 0; d < sizeof types / sizeof *types; d++)
                for (int reduce = QD_SUM; reduce <= (reduces ? QD_AVG : QD_SUM); reduce++)
                    for (int way = 0; way < 4; way++) {
                        trial t = {(qd_coll_kind)kind, counts[c], types[d], (qd_reduce_op)reduce, way & 1, way & 2};
                        if (t.count == MOST && d > 1) continue; /* the same kernels with more data */
                        if ((t.lists && (!listed || t.in_place)) || (t.in_place && !placed)) continue;
                        QD_TRY(run_trial(b, &t, (c + d) % 2));
                    }
    }
    return QD_OK;
}

/* A ring of messages in both directions, all in flight, forwarded without the host reading them:
 * after `size` rounds every block has returned. A received block is overwritten as soon as it is
 * sent on, so only stream order protects it. */
static qd_status ring(bench *b)
{
    int next = (b->rank + 1) % b->size, previous = (b->rank + b->size - 1) % b->size;
    const int64_t count = 20000;
    if (b->size == 1) return QD_OK;
    for (int64_t i = 0; i < count; i++) ref_input(b->in + 4 * i, QD_F32, 77, b->rank, i);
    QD_TRY(qd_copy(b->stream, b->device_in, b->in, 4 * count));
    for (int round = 0; round < b->size; round++) {
        qd_work *sent, *received;
        QD_TRY(qd_comm_recv(b->comm, b->device_out, count, QD_F32, previous, &received));
        QD_TRY(qd_comm_send(b->comm, b->device_in, count, QD_F32, next, &sent));
        QD_TRY(qd_work_wait(sent));
        QD_TRY(qd_fill_zero(b->stream, b->device_in, 4 * count)); /* the receiver has it */
        QD_TRY(qd_work_wait(received));
        QD_TRY(qd_copy(b->stream, b->device_in, b->device_out, 4 * count));
        QD_TRY(qd_fill_zero(b->stream, b->device_out, 4 * count));
    }
    QD_TRY(qd_copy(b->stream, b->got, b->device_in, 4 * count));
    QD_TRY(qd_stream_wait(b->stream));
    return memcmp(b->got, b->in, (size_t)(4 * count)) == 0 ? QD_OK : QD_FAIL(QD_DIFFERENT, "a block came back changed");
}

/* Sums in flight on several groups at once, in buffers that are overwritten right after each
 * wait. */
static qd_status in_flight(bench *b)
{
    enum { GROUPS = 3 };
    qd_comm *groups[GROUPS] = {b->comm};
    void *data[GROUPS] = {NULL}, *zero = NULL;
    const int64_t count = 50000, bytes = 4 * count;
    qd_status status = QD_OK;
    for (int g = 0; g < GROUPS; g++) {
        if (g > 0) QD_TRY_DONE(qd_comm_split(b->comm, 0, g == 1 ? b->rank : -b->rank, "copy", &groups[g]));
        QD_TRY_DONE(qd_device_alloc(b->device, bytes, &data[g]));
    }
    QD_TRY_DONE(qd_device_alloc(b->device, bytes, &zero));
    for (int round = 0; round < ROUNDS; round++) {
        qd_work *work[GROUPS];
        float *host = (float *)b->in;
        for (int64_t i = 0; i < count; i++) host[i] = (float)(b->rank + 1) * (float)(i % 1000 + round);
        for (int g = 0; g < GROUPS; g++) {
            int at = (g + b->rank) % GROUPS;
            QD_TRY_DONE(qd_copy(b->stream, data[at], b->in, bytes));
            QD_TRY_DONE(qd_comm_all_reduce(groups[at], data[at], data[at], count, QD_F32, QD_SUM, &work[at]));
        }
        for (int g = 0; g < GROUPS; g++) {
            QD_TRY_DONE(qd_work_wait(work[g]));
            QD_TRY_DONE(qd_copy(b->stream, b->got, data[g], bytes));
            QD_TRY_DONE(qd_copy(b->stream, data[g], zero, bytes)); /* peers may still be summing other groups */
            QD_TRY_DONE(qd_stream_wait(b->stream));
            float ranks = (float)(b->size * (b->size + 1) / 2);
            for (int64_t i = 0; i < count; i++)
                if (((float *)b->got)[i] != ranks * (float)(i % 1000 + round)) {
                    status = QD_FAIL(QD_DIFFERENT, "round %d, group %d: element %lld is %g", round, g, (long long)i,
                                     (double)((float *)b->got)[i]);
                    goto done;
                }
        }
    }
done:
    for (int g = 0; g < GROUPS; g++) {
        if (g > 0) qd_comm_destroy(groups[g]);
        qd_device_free(b->device, data[g], bytes);
    }
    qd_device_free(b->device, zero, bytes);
    return status;
}

static qd_status body(qd_comm *world, void *arg)
{
    bench b;
    qd_status status = bench_open(&b, world, ((const qd_ranks_call *)arg)->text);
    if (status == QD_OK) status = every_trial(&b);
    if (status == QD_OK) status = ring(&b);
    if (status == QD_OK) status = in_flight(&b);
    bench_close(&b);
    return status;
}

/* NCCL with one rank: all that one GPU can test. */
static qd_status body_nccl(qd_comm *world, void *arg)
{
    (void)arg;
    bench b;
    qd_status status = bench_open(&b, world, "cuda");
    qd_comm *nccl = NULL;
    if (status == QD_OK) status = qd_comm_on_device(world, b.device, "nccl", &nccl);
    if (status == QD_OK && strcmp(qd_comm_backend(nccl), "nccl") != 0) status = QD_FAIL(QD_DIFFERENT, "not NCCL");
    qd_comm *ours = b.comm;
    if (status == QD_OK) {
        b.comm = nccl;
        status = every_trial(&b);
        if (status == QD_OK) status = in_flight(&b);
    }
    b.comm = ours;
    qd_comm_destroy(nccl);
    bench_close(&b);
    return status;
}

static void run_on(const char *kind)
{
    static const int sizes[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        qd_ranks_result results[8];
        qd_ranks_options options = {.text = kind, .deadline_seconds = 60, .limit_seconds = 180};
        if (qd_ranks_run_ok("device", QD_RANKS_THREADS, sizes[i], &options, results) != QD_OK)
            fail_msg("%s: %s", kind, qd_error_message());
    }
}

static void test_cpu(void **unused)
{
    (void)unused;
    run_on("cpu");
}

/* Skips the test if there is no GPU, and says why. */
static void need_gpu(void)
{
    qd_device *device = NULL;
    if (qd_device_create("cuda", NULL, &device) != QD_OK) {
        print_message("no GPU: %s\n", qd_error_message());
        skip();
    }
    qd_device_destroy(device);
}

static void test_cuda(void **unused)
{
    (void)unused;
    need_gpu();
    run_on("cuda");
}

static void test_nccl(void **unused)
{
    (void)unused;
    char version[32];
    need_gpu();
    if (!qd_nccl_version(version, sizeof version)) skip();
    qd_ranks_result results[1];
    if (qd_ranks_run_ok("nccl", QD_RANKS_THREADS, 1, NULL, results) != QD_OK) fail_msg("%s", qd_error_message());
}

static qd_status body_refused(qd_comm *world, void *arg)
{
    (void)arg;
    qd_device *device = NULL;
    qd_comm *comm = NULL;
    QD_TRY(qd_device_create("cpu", NULL, &device));
    qd_status processes = qd_comm_on_device(world, device, "local", &comm);
    bool named = strstr(qd_error_message(), "run.ranks_as=threads") != NULL;
    qd_status unknown = qd_comm_on_device(world, device, "ring", &comm);
    qd_status nccl = qd_comm_on_device(world, device, "nccl", &comm);
    qd_device_destroy(device);
    if (processes != QD_UNSUPPORTED || !named) return QD_FAIL(QD_DIFFERENT, "processes may share device memory");
    if (unknown != QD_USAGE) return QD_FAIL(QD_DIFFERENT, "a backend that does not exist");
    return nccl != QD_OK ? QD_OK : QD_FAIL(QD_DIFFERENT, "NCCL moves host memory");
}

static const qd_ranks_entry bodies[] = {{"device", body}, {"nccl", body_nccl}, {"refused", body_refused}};

static void test_refused(void **unused)
{
    (void)unused;
    qd_ranks_result results[2];
    if (!qd_ranks_mode_available(QD_RANKS_PROCESSES)) skip();
    if (qd_ranks_run_ok("refused", QD_RANKS_PROCESSES, 2, NULL, results) != QD_OK) fail_msg("%s", qd_error_message());
}

int main(int argc, char **argv)
{
    qd_ranks_main(argc, argv, bodies, sizeof bodies / sizeof *bodies);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cpu), cmocka_unit_test(test_cuda), cmocka_unit_test(test_nccl),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
