/* MPI's own collectives, as a baseline for ours, and the exit of a failed MPI job. Plain C types:
 * mpi.h is included in this folder only. In builds without MPI every function that can fail returns
 * QD_UNSUPPORTED. */
#ifndef QD_COMM_MPI_NATIVE_H
#define QD_COMM_MPI_NATIVE_H

#include <quadrille/comm.h>

/* Initializes MPI for this process (MPI_THREAD_SERIALIZED). Collective over the job. Communicators
 * of qd_mpi_comm_create() that are created while it is open leave MPI running;
 * qd_mpi_native_close() finalizes it. */
qd_status qd_mpi_native_open(int *rank, int *size);
void qd_mpi_native_close(void);

/* The library's name and version; may be called before qd_mpi_native_open(). */
const char *qd_mpi_native_version(char *buffer, size_t bytes);

/* Memory from MPI_Alloc_mem, which suits MPI's own calls best. */
qd_status qd_mpi_native_alloc(int64_t bytes, void **memory);
void qd_mpi_native_free(void *memory);

/* One call of MPI's own collective on fp32 (sums), blocking; `count` as in qd_coll_bytes()
 * (all-to-all: the elements for one peer). `in` and `out` must hold what the kind needs. Send and
 * receive: `root` is the peer. Collective, except for these two. */
qd_status qd_mpi_native_call(qd_coll_kind kind, const float *in, float *out, int64_t count, int root);

/* Ends every process of this process's MPI job, with `code` as the exit status: for a program that
 * exits after an error, when its peers may never reach MPI_Finalize. Does nothing outside a running
 * MPI job. */
void qd_mpi_end(int code);

#endif
