/* Collectives between machines: the backends ucx and mpi, and MPI's own calls, alternately in the
 * same processes. Started by mpirun on all ranks (measure.py does it on two namespaced machines):
 *
 *   QUADRILLE_SECRET=... mpirun ... bench-remote ADDRESS PORT SECONDS [OPERATION]
 *
 * Rank 0 prints, for each operation and size, the median time of the slowest rank. */
#include "base/clock.h"
#include "comm/mpi/native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UCX, MPI_BACKEND, MPI_OWN, SIDES, SAMPLES = 9 };

typedef struct bench {
    qd_comm *comms[SIDES];
    float *in, *out;
    int rank, size;
    double seconds;
} bench;

static qd_status call(const bench *b, int side, qd_coll_kind kind, int64_t count, bool first)
{
    qd_comm *c = b->comms[side];
    int peer = (b->rank + b->size / 2) % b->size;
    if (kind == QD_COLL_SEND) { /* there and back */
        bool sends = (b->rank < b->size / 2) == first;
        if (side == MPI_OWN)
            return qd_mpi_native_call(sends ? QD_COLL_SEND : QD_COLL_RECV, b->in, b->out, count, peer);
        return sends ? qd_comm_send(c, b->in, count, QD_F32, peer, NULL) : qd_comm_recv(c, b->out, count, QD_F32, peer, NULL);
    }
    if (side == MPI_OWN)
        return qd_mpi_native_call(kind, b->in, b->out, count, 0);
    switch (kind) {
    case QD_COLL_ALL_REDUCE:
        return qd_comm_all_reduce(c, b->in, b->out, count, QD_F32, QD_SUM, NULL);
    case QD_COLL_REDUCE_SCATTER:
        return qd_comm_reduce_scatter(c, b->in, b->out, count, QD_F32, QD_SUM, NULL);
    case QD_COLL_ALL_GATHER:
        return qd_comm_all_gather(c, b->in, b->out, count, QD_F32, NULL);
    case QD_COLL_ALL_TO_ALL:
        return qd_comm_all_to_all(c, b->in, b->out, count, QD_F32, NULL);
    default:
        return qd_comm_broadcast(c, b->out, count, QD_F32, 0, NULL);
    }
}

static qd_status sample(const bench *b, int side, qd_coll_kind kind, int64_t count, int rounds, double *seconds)
{
    double begin = 0;
    for (int i = -1; i < rounds; i++) {
        if (i == 0) {
            QD_TRY(qd_mpi_native_call(QD_COLL_BARRIER, NULL, NULL, 0, 0));
            begin = qd_clock_now();
        }
        QD_TRY(call(b, side, kind, count, true));
        if (kind == QD_COLL_SEND)
            QD_TRY(call(b, side, kind, count, false));
    }
    *seconds = (qd_clock_now() - begin) / rounds / (kind == QD_COLL_SEND ? 2 : 1);
    return qd_comm_all_reduce(b->comms[MPI_BACKEND], seconds, seconds, 1, QD_F64, QD_MAX, NULL);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static qd_status measure(const bench *b, qd_coll_kind kind, int64_t bytes)
{
    double times[SIDES][SAMPLES], estimate;
    int64_t count = bytes / 4 / (kind == QD_COLL_ALL_TO_ALL ? b->size : 1);
    int rounds[SIDES];
    for (int side = 0; side < SIDES; side++) {
        QD_TRY(sample(b, side, kind, count, 2, &estimate));
        rounds[side] = 1 + (int)(b->seconds / SAMPLES / SIDES / estimate);
    }
    for (int i = 0; i < SAMPLES; i++)
        for (int side = 0; side < SIDES; side++)
            QD_TRY(sample(b, side, kind, count, rounds[side], &times[side][i]));
    for (int side = 0; side < SIDES; side++)
        qsort(times[side], SAMPLES, sizeof times[side][0], by_value);
    const double ucx = times[UCX][SAMPLES / 2], mpi = times[MPI_BACKEND][SAMPLES / 2], own = times[MPI_OWN][SAMPLES / 2];
    if (b->rank == 0)
        printf("%-15s %9lld %11.1f us %11.1f us %11.1f us %8.2f x %8.2f x\n", qd_coll_kind_name(kind), (long long)bytes, 1e6 * ucx,
               1e6 * mpi, 1e6 * own, mpi / ucx, own / ucx);
    fflush(stdout);
    return QD_OK;
}

static qd_status run(char **argv, const char *only)
{
    static const qd_coll_kind kinds[] = {QD_COLL_SEND,       QD_COLL_ALL_REDUCE, QD_COLL_REDUCE_SCATTER,
                                         QD_COLL_ALL_GATHER, QD_COLL_ALL_TO_ALL, QD_COLL_BROADCAST};
    static const int64_t sizes[] = {1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
    bench b = {.seconds = atof(argv[3])};
    const char *secret = getenv("QUADRILLE_SECRET");
    QD_TRY(qd_mpi_native_open(&b.rank, &b.size));
    QD_TRY(qd_mpi_comm_create(NULL, &b.comms[MPI_BACKEND]));
    qd_comm_join join = qd_comm_join_default();
    join.address = argv[1];
    join.port = atoi(argv[2]);
    join.rank = b.rank;
    join.ranks = b.size;
    join.secret = secret;
    join.secret_bytes = secret ? (int64_t)strlen(secret) : 0;
    QD_TRY(qd_ucx_comm_create(NULL, &join, &b.comms[UCX]));
    b.in = calloc(sizes[5] / 4, sizeof *b.in);
    b.out = calloc(sizes[5] / 4, sizeof *b.out);
    if (!b.in || !b.out)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the buffers");
    if (b.rank == 0)
        printf("%-15s %9s %14s %14s %14s %10s %10s\n", "operation", "bytes", "ucx", "mpi backend", "MPI", "mpi / ucx", "MPI / ucx");
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes && (!only || strcmp(only, qd_coll_kind_name(kinds[k])) == 0); s++)
            QD_TRY(measure(&b, kinds[k], sizes[s]));
    free(b.in);
    free(b.out);
    qd_comm_destroy(b.comms[UCX]);
    qd_comm_destroy(b.comms[MPI_BACKEND]);
    qd_mpi_native_close();
    return QD_OK;
}

int main(int argc, char **argv)
{
    if (argc != 4 && argc != 5) {
        fprintf(stderr, "usage: mpirun ... bench-remote ADDRESS PORT SECONDS [OPERATION]\n");
        return 2;
    }
    if (run(argv, argc == 5 ? argv[4] : NULL) == QD_OK)
        return 0;
    fprintf(stderr, "bench-remote: %s\n", qd_error_message());
    qd_mpi_end(1);
    return 1;
}
