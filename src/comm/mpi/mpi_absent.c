/* Stands in for the MPI backend in builds without an MPI library. */
#include "comm/mpi/native.h"

#include <stdio.h>

static qd_status absent(void)
{
    return QD_FAIL(QD_UNSUPPORTED, "this build has no MPI; install an MPI library (Debian: libopenmpi-dev and "
                                   "openmpi-bin) and build again, or use run.backend=local");
}

bool qd_mpi_built(void)
{
    return false;
}

qd_status qd_mpi_comm_create(const qd_comm_config *config, qd_comm **comm)
{
    (void)config;
    *comm = NULL;
    return absent();
}

qd_status qd_mpi_native_open(int *rank, int *size)
{
    *rank = 0;
    *size = 1;
    return absent();
}

void qd_mpi_native_close(void)
{
}

const char *qd_mpi_native_version(char *buffer, size_t bytes)
{
    snprintf(buffer, bytes, "no MPI");
    return buffer;
}

qd_status qd_mpi_native_alloc(int64_t bytes, void **memory)
{
    (void)bytes;
    *memory = NULL;
    return absent();
}

void qd_mpi_native_free(void *memory)
{
    (void)memory;
}

qd_status qd_mpi_native_call(qd_coll_kind kind, const float *in, float *out, int64_t count, int root)
{
    (void)kind, (void)in, (void)out, (void)count, (void)root;
    return absent();
}

void qd_mpi_end(int code)
{
    (void)code; /* no MPI job to end */
}
