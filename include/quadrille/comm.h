/* Communicators: groups of ranks that exchange data.
 *
 * Every collective must be called by all ranks of the communicator, in the same order. Each call
 * carries a sequence number and a fingerprint (kind, count, type, operation, root), so ranks that
 * disagree get QD_MISMATCH with both sides named, and a rank that does not arrive before the
 * deadline is named in a QD_TIMEOUT. A rank that fails calls qd_comm_abort(); its peers' calls then
 * return QD_REMOTE. After any of these the communicator (and all that were split from the same
 * world) only returns errors.
 *
 * Sums are deterministic: element i of a sum over n ranks is always added along one pairwise tree
 * over the group's ranks (split n as: the left part is the largest power of two below n), whatever
 * the message size, the bucket it travels in, or the backend. bf16 and fp16 are summed in fp32 and
 * rounded once. Average is the sum times 1/n.
 *
 * Blocking and asynchronous: the last argument `work` is NULL for a blocking call. Otherwise the
 * call returns at once and *work must be passed to qd_work_wait() exactly once; buffers must stay
 * untouched until then. Operations of one communicator run in the order of their calls; operations
 * of different communicators do not hold each other back. In-place operation is allowed everywhere:
 * in == out where both have the same size, else the smaller buffer may be the rank's own slice (or
 * its only segment) of the larger one. Calls on one communicator must not be made by two threads at
 * the same time.
 *
 * On communicators whose buffers are device memory, which the library makes for training on GPUs,
 * the end of an operation is ordered on streams: a blocking call or a wait returns when everything
 * is enqueued, and what the rank's compute stream is given afterwards runs behind the operation.
 * Backend "nccl" adds in an order of its own. */
#ifndef QUADRILLE_COMM_H
#define QUADRILLE_COMM_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <quadrille/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_comm qd_comm;
typedef struct qd_work qd_work;

typedef struct qd_comm_config {
    size_t size;
    double deadline_seconds; /* how long a rank may be missing from an operation */
    int64_t staging_bytes;   /* shared staging memory per rank and communicator, used as needed (local processes only) */
    bool no_remote_reads;    /* local: ranks reach only memory of qd_comm_alloc(), and the rest is staged: no system calls
                                between processes, and threads go the ways of processes */
} qd_comm_config;
QD_API void qd_comm_config_init(qd_comm_config *config, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_comm_config)

/* ---- worlds ---- */

/* One machine. A local world is one shared segment. Ranks are threads of this process (create, then
 * attach once per thread) or processes (create in the launcher, hand the file descriptor down, open
 * in each child). Nothing has a name in the file system, so nothing is left behind. Not collective,
 * except that attach and open return only when the world exists; destroy the world after all its
 * communicators. */
typedef struct qd_local_world qd_local_world;
#define QD_LOCAL_MAX_RANKS 64
QD_API qd_status qd_local_world_create(int size, const qd_comm_config *config, qd_local_world **world);
QD_API int qd_local_world_fd(const qd_local_world *world);
QD_API qd_status qd_local_comm_attach(qd_local_world *world, int rank, qd_comm **comm); /* ranks as threads */
QD_API qd_status qd_local_comm_open(int fd, int rank, qd_comm **comm);                  /* ranks as processes */
/* Tells the others that a rank has died ("killed by signal 9"): their pending and later operations
 * return QD_REMOTE. */
QD_API void qd_local_world_mark_dead(qd_local_world *world, int rank, const char *how);
QD_API void qd_local_world_destroy(qd_local_world *world);

/* MPI. Joins the world that mpirun or srun made; collective over it. QD_UNSUPPORTED in builds
 * without MPI. */
QD_API bool qd_mpi_built(void);
QD_API qd_status qd_mpi_comm_create(const qd_comm_config *config, qd_comm **comm);

/* ---- communicators ---- */

QD_API int qd_comm_rank(const qd_comm *comm);
QD_API int qd_comm_size(const qd_comm *comm);
QD_API int qd_comm_world_rank(const qd_comm *comm, int rank); /* of a rank of this group */
QD_API const char *qd_comm_backend(const qd_comm *comm);      /* "local", "mpi" or "nccl" */

/* Where this rank lies among those of its world. Machines are numbered in the order of their lowest
 * ranks; ranks need not lie on them one after another, nor as many on each. Not collective. */
typedef struct qd_comm_where {
    int machine, machines;
    int local_rank, local_ranks; /* among the ranks of this machine */
} qd_comm_where;
QD_API qd_comm_where qd_comm_locate(const qd_comm *comm);
/* Not collective. The name of the machine that a rank of `comm` lies on; "" where all ranks lie on
 * one. */
QD_API const char *qd_comm_host(const qd_comm *comm, int rank);

/* Collective over `comm`: ranks with the same colour form a group, ordered by (key, rank). colour <
 * 0: no group, *group becomes NULL. `name` appears in messages and traces ("dp"). */
QD_API qd_status qd_comm_split(qd_comm *comm, int colour, int key, const char *name, qd_comm **group);

/* Not collective. Waits for nothing: work must have been waited for. NULL is legal. */
QD_API void qd_comm_destroy(qd_comm *comm);

/* Memory that the other ranks of this world reach without system calls: operations whose buffers
 * all lie in such memory copy it once, in user space. Local processes have it; elsewhere, and where
 * a process's own memory was limited (ulimit -d, -v) when the world was made, this is ordinary
 * memory. Any part of it may be passed to any operation, together with other memory or without. Not
 * collective. Zeroed, aligned to 64 bytes or better; resident from the start. Give it back before
 * the last communicator of its world is destroyed; a rank that dies leaves nothing. */
QD_API qd_status qd_comm_alloc(qd_comm *comm, int64_t bytes, void **memory);
QD_API void qd_comm_free(qd_comm *comm, void *memory); /* NULL is legal */
/* Of the memory that local processes share, what this rank has taken: its buffers of
 * qd_comm_alloc() and the staging that it has filled (*staging: those alone). What else its process
 * has mapped of it is the other ranks'. -1, and 0: no such memory (threads, MPI). Not
 * collective. */
QD_API int64_t qd_comm_shared_bytes(qd_comm *comm, int64_t *staging);

/* What this rank is doing, for messages of all ranks ("step 12, backward block.3"). Cheap;
 * truncated to 63 bytes. */
QD_API void qd_comm_at(qd_comm *comm, const char *place);

/* Not collective. Makes every operation of every rank of this world fail with QD_REMOTE that names
 * this rank. */
QD_API void qd_comm_abort(qd_comm *comm, const char *reason);

/* ---- operations; see the top of this file for collectivity, order, work and in-place ---- */

QD_API qd_status qd_comm_barrier(qd_comm *comm, qd_work **work);

/* out[i] = reduce over ranks of in[i]; count elements. */
QD_API qd_status qd_comm_all_reduce(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_reduce_op op,
                                    qd_work **work);

/* in: count elements; out: this rank's slice (qd_slice(count, size, rank)). */
QD_API qd_status qd_comm_reduce_scatter(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype,
                                        qd_reduce_op op, qd_work **work);

/* in: this rank's slice (qd_slice(count, size, rank)); out: count elements. */
QD_API qd_status qd_comm_all_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work);

/* Vectored forms. lists[r] says which parts of the full buffer belong to rank r, the same on all
 * ranks; a packed buffer holds a rank's segments one after another. Segments of all ranks must not
 * overlap; any may be empty. */
typedef struct qd_segment {
    int64_t offset, count; /* elements in the full buffer */
} qd_segment;
typedef struct qd_segment_list {
    const qd_segment *segments;
    int count;
} qd_segment_list;
QD_API qd_status qd_comm_reduce_scatter_v(qd_comm *comm, const void *full, void *packed, const qd_segment_list *lists,
                                          qd_dtype dtype, qd_reduce_op op, qd_work **work);
QD_API qd_status qd_comm_all_gather_v(qd_comm *comm, const void *packed, void *full, const qd_segment_list *lists,
                                      qd_dtype dtype, qd_work **work);

/* Block r of `in` (count elements each) goes to rank r; block r of `out` comes from rank r. in !=
 * out. */
QD_API qd_status qd_comm_all_to_all(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work);
/* Uneven: in + in_offsets[r], in_counts[r] elements to rank r. A pair that disagrees on its count
 * is a mismatch. */
QD_API qd_status qd_comm_all_to_all_v(qd_comm *comm, const void *in, const int64_t *in_counts, const int64_t *in_offsets,
                                      void *out, const int64_t *out_counts, const int64_t *out_offsets, qd_dtype dtype,
                                      qd_work **work);

QD_API qd_status qd_comm_broadcast(qd_comm *comm, void *data, int64_t count, qd_dtype dtype, int root, qd_work **work);
/* out is written at the root only. */
QD_API qd_status qd_comm_reduce(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_reduce_op op,
                                int root, qd_work **work);
/* `count` elements of the whole message, cut by qd_slice; the full buffer is used at the root
 * only. */
QD_API qd_status qd_comm_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, int root,
                                qd_work **work);
QD_API qd_status qd_comm_scatter(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, int root,
                                 qd_work **work);

/* Matched in order per (sender, receiver, communicator). A receive whose count or type differs is a
 * mismatch. A send may block until it is received. Asynchronous sends and receives to different
 * peers progress independently. */
QD_API qd_status qd_comm_send(qd_comm *comm, const void *data, int64_t count, qd_dtype dtype, int to, qd_work **work);
QD_API qd_status qd_comm_recv(qd_comm *comm, void *data, int64_t count, qd_dtype dtype, int from, qd_work **work);

/* Waits, frees the handle, returns the operation's status. */
QD_API qd_status qd_work_wait(qd_work *work);
/* The same, and when the operation began to run (its predecessors on the communicator were done)
 * and when it was complete: seconds of the monotonic clock. Either may be NULL. */
QD_API qd_status qd_work_wait_timed(qd_work *work, double *begin, double *end);
/* True when qd_work_wait would not block. */
QD_API bool qd_work_done(const qd_work *work);

/* Counted where bytes are copied between ranks, never by formula; this rank's receiving side. */
typedef struct qd_comm_stats {
    size_t size;
    int64_t calls[QD_COLL_KIND_MOST]; /* by qd_coll_kind */
    int64_t bytes[QD_COLL_KIND_MOST]; /* bytes this rank took from other ranks */
    double busy_seconds;               /* time in copy and sum loops */
} qd_comm_stats;
QD_SIZED_DEFAULT(qd_comm_stats)
QD_API void qd_comm_get_stats(const qd_comm *comm, qd_comm_stats *stats);
QD_API void qd_comm_reset_stats(qd_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
