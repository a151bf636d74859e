/* Communicators: groups of ranks that exchange data.
 *
 * Collectivity: all ranks of a communicator must call its collectives in the same order. Each call
 * carries a sequence number and a fingerprint (kind, count, type, operation, root).
 *
 * Failures of every operation: QD_MISMATCH when ranks disagree (the message names both sides),
 * QD_TIMEOUT when a rank does not arrive before the deadline (the message names it), QD_REMOTE when
 * another rank died or called qd_comm_abort(). After any of these, the communicator and all others
 * of the same world only return errors.
 *
 * Determinism: element i of a sum over n ranks is always added along the same pairwise tree over
 * the ranks of the group (the left part of n is the largest power of two below n), independent of
 * message size, bucket and backend. bf16 and fp16 are summed in fp32 and rounded once. An average
 * is the sum times 1/n. The exception is backend "nccl", which has its own order.
 *
 * Blocking and asynchronous calls: with `work` NULL, the last argument, the call blocks. Otherwise
 * it returns at once, and *work must be passed to qd_work_wait() exactly once; the caller must not
 * touch the buffers until then. Operations of one communicator run in call order; operations of
 * different communicators progress independently. Two threads must not call into one communicator
 * concurrently.
 *
 * In-place operation is always allowed: in == out where both have the same size; otherwise the
 * smaller buffer may be the rank's own slice (or only segment) of the larger one.
 *
 * Device memory: the library makes communicators for device buffers when it trains on GPUs. On
 * those, a blocking call or a wait returns when the operation is enqueued, and work enqueued on the
 * rank's compute stream afterwards runs after the operation. */
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
    double deadline_seconds; /* how long an operation waits for a missing rank */
    int64_t staging_bytes;   /* shared staging memory per rank and communicator, committed on use (local processes only) */
    bool no_remote_reads;    /* local: access only memory of qd_comm_alloc() directly and stage everything else, without
                                system calls between processes; threads take the same code paths as processes */
    const char *ways;        /* local: the sizes and copy kernels of all ranks, as qd_local_ways_measure() writes them; NULL:
                                those of a machine that was not measured. No choice changes a result */
} qd_comm_config;
/* Sets the defaults: a deadline of 300 s, 1 MiB of staging memory. */
QD_API void qd_comm_config_init(qd_comm_config *config, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_comm_config)

/* A local world: the ranks of one machine, in one anonymous shared memory segment that leaves
 * nothing behind. Ranks are threads of this process (create, then attach once per thread) or
 * processes (create in the launcher, pass the file descriptor down, open in each child). None of
 * these functions is collective; attach and open return when the world exists. */
typedef struct qd_local_world qd_local_world;
#define QD_LOCAL_MAX_RANKS 64
/* Creates the segment, owned by the caller. QD_USAGE for a size, deadline or staging memory out of
 * range. */
QD_API qd_status qd_local_world_create(int size, const qd_comm_config *config, qd_local_world **world);
/* Measures which ways of moving data suit this machine, with up to four threads on cores of their
 * own, in about `seconds` (0.2 is enough), at most five times that, with at most 256 MiB. The
 * text, for qd_comm_config.ways, has at most QD_LOCAL_WAYS_MOST bytes with its end. *settled:
 * nothing disturbed the measurement, so the result may be kept. Without memory or idle cores to
 * measure with, the text is that of a machine that was not measured. Not collective. */
enum { QD_LOCAL_WAYS_MOST = 640 };
QD_API void qd_local_ways_measure(double seconds, char *text, size_t size, bool *settled);
/* Checks a text for qd_comm_config.ways. QD_USAGE names what is wrong. */
QD_API qd_status qd_local_ways_check(const char *text);
/* The file descriptor for qd_local_comm_open(); it belongs to the world. */
QD_API int qd_local_world_fd(const qd_local_world *world);
/* Joins as `rank`; the caller owns *comm. attach: ranks as threads; open: ranks as processes.
 * QD_USAGE for a rank out of range. */
QD_API qd_status qd_local_comm_attach(qd_local_world *world, int rank, qd_comm **comm);
QD_API qd_status qd_local_comm_open(int fd, int rank, qd_comm **comm);
/* Marks a rank as dead, for example how = "killed by signal 9": pending and later operations of the
 * other ranks return QD_REMOTE. */
QD_API void qd_local_world_mark_dead(qd_local_world *world, int rank, const char *how);
/* What a rank did last, for messages about one that can no longer report it: "at 'step 3, norm', in
 * all-reduce of 100 fp32 (sum), operation 3 of group world"; "" if nothing is known. */
QD_API void qd_local_world_last(const qd_local_world *world, int rank, char *text, size_t bytes);
/* While excused is set, for example because a debugger holds a rank, no deadline expires. */
QD_API void qd_local_world_excuse(qd_local_world *world, bool excused);
/* Call it after all communicators of the world are destroyed. */
QD_API void qd_local_world_destroy(qd_local_world *world);

/* Whether this build has MPI. */
QD_API bool qd_mpi_built(void);
/* Joins the world that mpirun or srun started. Collective over it. The caller owns *comm.
 * QD_UNSUPPORTED in builds without MPI. */
QD_API qd_status qd_mpi_comm_create(const qd_comm_config *config, qd_comm **comm);

/* A world without a launcher that connects its ranks: they meet at an address of rank 0, prove to
 * each other that they know the same secret, and then exchange data over UCX. */
typedef struct qd_comm_join {
    size_t size;
    const char *address;   /* of rank 0: a host name or an address */
    int port;              /* where rank 0 listens until all ranks are there */
    int rank, ranks;
    const void *secret;    /* the same on all ranks, at least 16 bytes; none: only ranks of one user on one machine, at a
                              loopback address */
    int64_t secret_bytes;
    const char *interface; /* network interface to use, by name or address; NULL: the one on the way to `address` */
    double seconds;        /* how long to wait for all ranks */
    bool (*stops)(void *context); /* NULL, or called while waiting, several times per second: true ends it with QD_INTERRUPTED */
    void *context;
    bool stays;            /* this process was in an earlier world of the same ranks, some of which were lost */
    int least;             /* 0: all ranks must come; otherwise rank 0 begins with so many or more, renumbered without gaps in the
                              order of their numbers, after `seconds`, and */
    double patience;       /* where processes stay, after so many seconds */
    struct qd_door *door;  /* NULL; internal */
} qd_comm_join;
/* Sets the defaults: 300 s; no address. */
QD_API void qd_comm_join_init(qd_comm_join *join, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_comm_join)
/* Whether this build has UCX. */
QD_API bool qd_ucx_built(void);
/* Joins. Collective over the world. The caller owns *comm. QD_UNSUPPORTED in builds without UCX and
 * on machines without its library; QD_USAGE for settings that cannot work or differ between ranks,
 * and for a second process of a rank; QD_TIMEOUT names the ranks that are missing. */
QD_API qd_status qd_ucx_comm_create(const qd_comm_config *config, const qd_comm_join *join, qd_comm **comm);

/* Properties of a communicator. Not collective. */
QD_API int qd_comm_rank(const qd_comm *comm);
QD_API int qd_comm_size(const qd_comm *comm);
QD_API int qd_comm_world_rank(const qd_comm *comm, int rank); /* world rank of `rank` of this group */
QD_API const char *qd_comm_backend(const qd_comm *comm);      /* "local", "mpi", "ucx" or "nccl" */

/* Placement of this rank. Machines are numbered in the order of their lowest ranks. Ranks of a
 * machine need not be consecutive, and machines may have different numbers of ranks. */
typedef struct qd_comm_where {
    int machine, machines;
    int local_rank, local_ranks; /* among the ranks of this machine */
} qd_comm_where;
/* The placement of this rank in its world. Not collective. */
QD_API qd_comm_where qd_comm_locate(const qd_comm *comm);
/* The name of the machine of a rank of `comm`; "" when all ranks are on one machine. It belongs to
 * the communicator. Not collective. */
QD_API const char *qd_comm_host(const qd_comm *comm, int rank);

/* Splits `comm` into groups: ranks with the same colour form one, ordered by (key, rank).
 * Collective over `comm`. The caller owns *group; with colour < 0 the rank joins no group and it is
 * NULL. `name` appears in messages and traces ("dp"). */
QD_API qd_status qd_comm_split(qd_comm *comm, int colour, int key, const char *name, qd_comm **group);

/* Frees the communicator. Not collective. All its work must have been waited for. NULL is legal. */
QD_API void qd_comm_destroy(qd_comm *comm);

/* Allocates memory that the other ranks of the world access without system calls: operations whose
 * buffers are all in such memory copy once, in user space. Any part of it may be passed to any
 * operation, also together with other memory. Not collective. Zeroed, aligned to at least 64 bytes,
 * resident from the start. Only local processes have such memory; otherwise, and if the memory of
 * the process was limited (ulimit -d, -v) when the world was created, this is ordinary memory.
 * Free it before the last communicator of the world is destroyed; that of a rank that dies is
 * released. QD_NO_MEMORY; QD_USAGE for negative sizes. */
QD_API qd_status qd_comm_alloc(qd_comm *comm, int64_t bytes, void **memory);
QD_API void qd_comm_free(qd_comm *comm, void *memory); /* NULL is legal */
/* Bytes of shared memory that this rank uses: its buffers of qd_comm_alloc() and the staging memory
 * it has filled. *staging: the latter alone. Other shared memory that its process has mapped
 * belongs to other ranks. Returns -1, with *staging 0, if there is none (threads, MPI). Not
 * collective. */
QD_API int64_t qd_comm_shared_bytes(qd_comm *comm, int64_t *staging);

/* After QD_REMOTE: the world rank whose process has ended without saying why, as far as this rank
 * has noticed by itself (backend "ucx"); otherwise -1. Not collective. */
QD_API int qd_comm_lost(const qd_comm *comm);

/* Sets what this rank is doing, for error messages of all ranks ("step 12, backward block.3").
 * Cheap; truncated to 63 bytes. Not collective. */
QD_API void qd_comm_at(qd_comm *comm, const char *place);

/* Makes every operation of every rank of this world fail with a QD_REMOTE that names this
 * rank. Not collective. */
QD_API void qd_comm_abort(qd_comm *comm, const char *reason);

/* The operations. All are collective over `comm`, except send and recv. See the top of this file
 * for failures, ordering, `work` and in-place use. */

/* Returns when all ranks have called it. */
QD_API qd_status qd_comm_barrier(qd_comm *comm, qd_work **work);

/* out[i] = reduction over ranks of in[i]; count elements. */
QD_API qd_status qd_comm_all_reduce(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_reduce_op op,
                                    qd_work **work);

/* Reduces `in` of count elements and writes this rank's slice (qd_slice(count, size, rank)) to
 * `out`. */
QD_API qd_status qd_comm_reduce_scatter(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype,
                                        qd_reduce_op op, qd_work **work);

/* Gathers the slices `in` of all ranks (qd_slice(count, size, rank)) into `out` of count
 * elements. */
QD_API qd_status qd_comm_all_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work);

/* Vectored forms. lists[r] lists the segments of the full buffer that belong to rank r, identical
 * on all ranks; a packed buffer holds a rank's segments one after another. Segments must not
 * overlap; they may be empty. */
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

/* Sends block r of `in` (count elements each) to rank r and receives block r of `out` from it.
 * in != out. */
QD_API qd_status qd_comm_all_to_all(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_work **work);
/* The same with uneven blocks: in_counts[r] elements at in + in_offsets[r] are sent to rank r. A
 * pair that disagrees on its count is a mismatch. */
QD_API qd_status qd_comm_all_to_all_v(qd_comm *comm, const void *in, const int64_t *in_counts, const int64_t *in_offsets,
                                      void *out, const int64_t *out_counts, const int64_t *out_offsets, qd_dtype dtype,
                                      qd_work **work);

/* Copies `data` of the root to all ranks. */
QD_API qd_status qd_comm_broadcast(qd_comm *comm, void *data, int64_t count, qd_dtype dtype, int root, qd_work **work);
/* Like all-reduce, but `out` is written at the root only. */
QD_API qd_status qd_comm_reduce(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, qd_reduce_op op,
                                int root, qd_work **work);
/* Gathers the slices of all ranks at the root, or scatters them from it. `count`: elements of the
 * whole message, sliced by qd_slice(); the full buffer is used at the root only. */
QD_API qd_status qd_comm_gather(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, int root,
                                qd_work **work);
QD_API qd_status qd_comm_scatter(qd_comm *comm, const void *in, void *out, int64_t count, qd_dtype dtype, int root,
                                 qd_work **work);

/* Point-to-point messages, matched in order per (sender, receiver, communicator). A receive whose
 * count or type differs is a mismatch. A send may block until it is received. Asynchronous sends
 * and receives with different peers progress independently. */
QD_API qd_status qd_comm_send(qd_comm *comm, const void *data, int64_t count, qd_dtype dtype, int to, qd_work **work);
QD_API qd_status qd_comm_recv(qd_comm *comm, void *data, int64_t count, qd_dtype dtype, int from, qd_work **work);

/* Waits for the operation, frees the handle and returns the operation's status. */
QD_API qd_status qd_work_wait(qd_work *work);
/* The same, and reports when the operation began to run (its predecessors on the communicator were
 * complete) and when it was complete, in seconds of the monotonic clock. Either may be NULL. */
QD_API qd_status qd_work_wait_timed(qd_work *work, double *begin, double *end);
/* Whether qd_work_wait() would return without blocking. */
QD_API bool qd_work_done(const qd_work *work);

/* Traffic received by this rank, counted where bytes are copied, never by formula. */
typedef struct qd_comm_stats {
    size_t size;
    int64_t calls[QD_COLL_KIND_MOST]; /* by qd_coll_kind */
    int64_t bytes[QD_COLL_KIND_MOST]; /* received from other ranks */
    double busy_seconds;               /* time in copy and sum loops */
} qd_comm_stats;
QD_SIZED_DEFAULT(qd_comm_stats)
/* Copies or resets the counters of this communicator. Not collective. */
QD_API void qd_comm_get_stats(const qd_comm *comm, qd_comm_stats *stats);
QD_API void qd_comm_reset_stats(qd_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
