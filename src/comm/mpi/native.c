/* Calls MPI's own collectives, the baseline of `bench collectives --against mpi`, and aborts failed
 * jobs. */
#include "comm/mpi/native.h"

#include "comm/mpi/mpi_impl.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

qd_status qd_mpi_native_open(int *rank, int *size)
{
    int initialized = 0, provided = 0;
    MPI_Initialized(&initialized);
    if (initialized)
        return QD_FAIL(QD_USAGE, "MPI is already running in this process");
    QD_TRY(qd_mpi_check(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread"));
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    return QD_OK;
}

void qd_mpi_native_close(void)
{
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized)
        MPI_Finalize();
}

const char *qd_mpi_native_version(char *buffer, size_t bytes)
{
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    /* "Open MPI v4.1.4, package: …, ident: …": keep the first part. */
    text[strcspn(text, ",\n")] = '\0';
    snprintf(buffer, bytes, "%s", text);
    return buffer;
}

qd_status qd_mpi_native_alloc(int64_t bytes, void **memory)
{
    return qd_mpi_check(MPI_Alloc_mem((MPI_Aint)bytes, MPI_INFO_NULL, memory), "MPI_Alloc_mem");
}

void qd_mpi_native_free(void *memory)
{
    MPI_Free_mem(memory);
}

/* Limit of the comparison: the counts fit on the stack, so MPI's time includes no allocation. */
enum { RANKS_MOST = 256 };

qd_status qd_mpi_native_call(qd_coll_kind kind, const float *in, float *out, int64_t count, int root)
{
    MPI_Comm world = MPI_COMM_WORLD;
    int rank, size, code = MPI_SUCCESS, counts[RANKS_MOST], offsets[RANKS_MOST];
    if (count > INT_MAX)
        return QD_FAIL(QD_USAGE, "MPI counts are limited to %d elements", INT_MAX);
    int n = (int)count;
    MPI_Comm_rank(world, &rank);
    MPI_Comm_size(world, &size);
    bool even = count % size == 0;
    int part = n / size;
    if (size > RANKS_MOST)
        return QD_FAIL(QD_USAGE, "comparisons with MPI are limited to %d ranks", RANKS_MOST);
    for (int p = 0; !even && p < size; p++) {
        int64_t offset, length;
        qd_slice(count, size, p, &offset, &length);
        counts[p] = (int)length;
        offsets[p] = (int)offset;
    }
    switch (kind) {
    case QD_COLL_ALL_REDUCE:
        code = MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, world);
        break;
    case QD_COLL_REDUCE_SCATTER:
        code = even ? MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, world)
                    : MPI_Reduce_scatter(in, out, counts, MPI_FLOAT, MPI_SUM, world);
        break;
    case QD_COLL_ALL_GATHER:
        code = even ? MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, world)
                    : MPI_Allgatherv(in, counts[rank], MPI_FLOAT, out, counts, offsets, MPI_FLOAT, world);
        break;
    case QD_COLL_ALL_TO_ALL:
        code = MPI_Alltoall(in, n, MPI_FLOAT, out, n, MPI_FLOAT, world);
        break;
    case QD_COLL_BROADCAST:
        code = MPI_Bcast(out, n, MPI_FLOAT, root, world);
        break;
    case QD_COLL_REDUCE:
        code = MPI_Reduce(in, out, n, MPI_FLOAT, MPI_SUM, root, world);
        break;
    case QD_COLL_GATHER:
        code = even ? MPI_Gather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, root, world)
                    : MPI_Gatherv(in, counts[rank], MPI_FLOAT, out, counts, offsets, MPI_FLOAT, root, world);
        break;
    case QD_COLL_SCATTER:
        code = even ? MPI_Scatter(in, part, MPI_FLOAT, out, part, MPI_FLOAT, root, world)
                    : MPI_Scatterv(in, counts, offsets, MPI_FLOAT, out, counts[rank], MPI_FLOAT, root, world);
        break;
    case QD_COLL_BARRIER:
        code = MPI_Barrier(world);
        break;
    case QD_COLL_SEND:
        code = MPI_Send(in, n, MPI_FLOAT, root, 0, world);
        break;
    case QD_COLL_RECV:
        code = MPI_Recv(out, n, MPI_FLOAT, root, 0, world, MPI_STATUS_IGNORE);
        break;
    case QD_COLL_KIND_COUNT:
        break;
    }
    return qd_mpi_check(code, qd_coll_kind_name(kind));
}

void qd_mpi_end(int code)
{
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (initialized && !finalized)
        MPI_Abort(MPI_COMM_WORLD, code);
}
