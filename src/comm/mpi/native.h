/* MPI's own collectives, for comparing ours with them, and the way out of a failed MPI job. Plain C
 * types: mpi.h stays in this folder. In builds without MPI every function that can fail returns
 * QD_UNSUPPORTED. */
#ifndef QD_COMM_MPI_NATIVE_H
#define QD_COMM_MPI_NATIVE_H

#include <quadrille/comm.h>

/* Initialises MPI for this process (MPI_THREAD_SERIALIZED). Collective over the job. Communicators
 * made by qd_mpi_comm_create() while it is open leave MPI running; qd_mpi_native_close() ends
 * it. */
qd_status qd_mpi_native_open(int *rank, int *size);
void qd_mpi_native_close(void);

/* The library's name and version, as it says itself; may be asked before qd_mpi_native_open(). */
const char *qd_mpi_native_version(char *buffer, size_t bytes);

/* Memory as MPI likes it best, for its own calls. */
qd_status qd_mpi_native_alloc(int64_t bytes, void **memory);
void qd_mpi_native_free(void *memory);

/* One call of MPI's own collective on fp32 (sums), blocking; `count` as in qd_coll_bytes()
 * (all-to-all: the elements for one peer). `in` and `out` must hold what the kind needs. Send and
 * receive: `root` is the peer. Collective, except for these two. */
qd_status qd_mpi_native_call(qd_coll_kind kind, const float *in, float *out, int64_t count, int root);

/* Ends every process of the MPI job that this process belongs to, with `code` as the exit status:
 * for a program that leaves after an error, when its peers may never come to MPI_Finalize. Does
 * nothing outside a running MPI job. */
void qd_mpi_end(int code);

#endif
