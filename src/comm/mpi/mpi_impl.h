/* Internal to src/comm/mpi: what its files share. */
#ifndef QD_COMM_MPI_MPI_IMPL_H
#define QD_COMM_MPI_MPI_IMPL_H

#include "comm/remote/remote.h"

#include <mpi.h>

/* QD_SYSTEM with the library's text when `code` is an error. */
qd_status qd_mpi_check(int code, const char *call);

#endif
