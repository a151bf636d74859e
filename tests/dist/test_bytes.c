/* Bytes are counted where they are copied, and their sum over the ranks equals qd_coll_bytes(). */
#include "dist/reference.h"
#include "support/ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 60013 };

static qd_status call_kind(qd_comm *comm, qd_coll_kind kind, void *in, void *out, int64_t count, qd_dtype dtype)
{
    int rank = qd_comm_rank(comm), size = qd_comm_size(comm);
    switch (kind) {
    case QD_COLL_ALL_REDUCE: return qd_comm_all_reduce(comm, in, out, count, dtype, QD_SUM, NULL);
    case QD_COLL_REDUCE_SCATTER: return qd_comm_reduce_scatter(comm, in, out, count, dtype, QD_SUM, NULL);
    case QD_COLL_ALL_GATHER: return qd_comm_all_gather(comm, in, out, count, dtype, NULL);
    case QD_COLL_ALL_TO_ALL: return qd_comm_all_to_all(comm, in, out, count / size, dtype, NULL);
    case QD_COLL_BROADCAST: return qd_comm_broadcast(comm, out, count, dtype, 0, NULL);
    case QD_COLL_REDUCE: return qd_comm_reduce(comm, in, out, count, dtype, QD_SUM, 0, NULL);
    case QD_COLL_GATHER: return qd_comm_gather(comm, in, out, count, dtype, 0, NULL);
    case QD_COLL_SCATTER: return qd_comm_scatter(comm, in, out, count, dtype, 0, NULL);
    case QD_COLL_RECV: /* one message, from the last rank to the first */
        if (rank == 0) return qd_comm_recv(comm, out, count, dtype, size - 1, NULL);
        return rank == size - 1 ? qd_comm_send(comm, in, count, dtype, 0, NULL) : QD_OK;
    default: return qd_comm_barrier(comm, NULL);
    }
}

static qd_status body_bytes(qd_comm *world, void *arg)
{
    const char *text = ((qd_ranks_call *)arg)->text;
    static const int64_t counts[] = {0, 1, 5, 1000, 5000, MOST};
    static const qd_dtype types[] = {QD_F32, QD_BF16, QD_I64};
    int size = qd_comm_size(world);
    void *in = ref_take(world, text, 0, MOST * 8), *out = ref_take(world, text, 1, MOST * 8);
    qd_status status = QD_OK;
    for (int kind = 0; kind < QD_COLL_KIND_COUNT; kind++) {
        if (kind == QD_COLL_SEND || (kind == QD_COLL_RECV && size == 1)) continue; /* receive counts for both */
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
                qd_comm_stats stats = qd_comm_stats_default();
                qd_comm_reset_stats(world);
                QD_TRY_DONE(call_kind(world, (qd_coll_kind)kind, in, out, counts[c], types[t]));
                qd_comm_get_stats(world, &stats);
                int64_t bytes = 0, calls = stats.calls[kind];
                for (int k = 0; k < QD_COLL_KIND_COUNT; k++) bytes += stats.bytes[k];
                if (bytes != stats.bytes[kind] || (calls != 1 && kind != QD_COLL_RECV)) {
                    status = QD_FAIL(QD_DIFFERENT, "%s: counted under another kind", qd_coll_kind_name((qd_coll_kind)kind));
                    goto done;
                }
                QD_TRY_DONE(qd_comm_all_reduce(world, &bytes, &bytes, 1, QD_I64, QD_SUM, NULL));
                int64_t count = counts[c];
                if (kind == QD_COLL_ALL_TO_ALL) count = counts[c] / size * size * (size - 1);
                int64_t want = qd_coll_bytes((qd_coll_kind)kind, count, types[t], size);
                if (bytes != want) {
                    status = QD_FAIL(QD_DIFFERENT, "%s of %lld %s on %d ranks moved %lld bytes, not %lld",
                                     qd_coll_kind_name((qd_coll_kind)kind), (long long)counts[c], qd_dtype_name(types[t]),
                                     size, (long long)bytes, (long long)want);
                    goto done;
                }
            }
    }
done:
    ref_give(world, text, 0, in);
    ref_give(world, text, 1, out);
    return status;
}

static const qd_ranks_entry bodies[] = {{"bytes", body_bytes}};

static void test_bytes(void **unused)
{
    (void)unused;
    static const int sizes[] = {1, 2, 3, 4, 8};
    for (int mode = 0; mode < QD_RANKS_MODE_COUNT; mode++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            qd_ranks_result results[8];
            if (!qd_ranks_mode_available((qd_ranks_mode)mode)) continue;
            const char *texts[3];
            for (int t = 0; t < ref_texts((qd_ranks_mode)mode, texts); t++)
                if (qd_ranks_run_ok("bytes", (qd_ranks_mode)mode, sizes[i], &(qd_ranks_options){.text = texts[t]}, results) !=
                    QD_OK)
                    fail_msg("memory '%s': %s", texts[t], qd_error_message());
        }
}

int main(int argc, char **argv)
{
    qd_ranks_main(argc, argv, bodies, sizeof bodies / sizeof *bodies);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
