/* Internal interface of src/comm: the types and the tables of functions that the core shares with
 * the backends (local/, mpi/, device/, nccl/).
 *
 * The core (comm.c, calls.c, work.c, checked.c, progress.c, waits.c, guard.c, transfer.c) owns the
 * public functions, argument checks, sequence numbers, queues, work handles, deadlines, checksums,
 * error messages and statistics. A backend moves bytes: it executes one operation per queue through
 * start/poll/finish, never blocks in them, and never touches queues or handles.
 *
 * An operation (qd_transfer) is stored on the caller's stack for a blocking call and inside a
 * qd_work otherwise.
 *
 *   start(op)          once, when the op has become the head of its queue
 *   poll(op, ...)      repeatedly until done or failed; returns quickly when nothing can be done
 *   finish(op)         once after success or failure (also of start): frees what start allocated
 *
 * Queues: a communicator has one queue for collectives and, for every peer, one for sends and one
 * for receives. Only the head of a queue is started or polled. start/poll/finish of one op never
 * run in two threads concurrently. Heads of different queues, of the same or of different
 * communicators, may be polled concurrently, unless the backend sets `serialized`: then the core
 * holds one lock per world around every backend call marked [S] below. */
#ifndef QD_COMM_COMM_IMPL_H
#define QD_COMM_COMM_IMPL_H

#include "comm/copy.h"

#include <pthread.h>
#include <quadrille/comm.h>
#include <stdatomic.h>

#define QD_COMM_NAME_BYTES 32
#define QD_COMM_PLACE_BYTES 64
#define QD_COMM_HOST_BYTES 64 /* longer host names are truncated */
#define QD_COMM_REASON_BYTES 512
#define QD_TRANSFER_STATE_BYTES 512

typedef struct qd_world qd_world;
typedef struct qd_transfer qd_transfer;

typedef struct qd_coll_request {
    qd_coll_kind kind;
    qd_dtype dtype;
    qd_reduce_op reduce;
    int root;      /* root; the peer of a send or receive; -1 where there is none */
    int64_t count; /* elements as in qd_coll_bytes(); vectored forms: the sum over all lists; all-to-all: 0 */
    const void *in; /* broadcast: the data, on every rank; send: the data; may be NULL when nothing is read */
    void *out;      /* broadcast, recv: the data; may be NULL when nothing is written */
    /* Parts of the full buffer that each rank owns (reduce-scatter, all-gather). NULL: qd_slice().
     * Read through qd_transfer_segment(). */
    const qd_segment_list *lists;
    /* all-to-all only, `size` entries each; the core fills them for the even form too. */
    const int64_t *in_counts, *in_offsets, *out_counts, *out_offsets;
} qd_coll_request;

/* What ranks exchange to compare their calls. Plain data without padding: may be sent as bytes. */
typedef struct qd_fingerprint {
    uint64_t sequence; /* collectives: the communicator's operation number, from 1; send, recv: the message number of
                          this (sender, receiver) pair, from 1 */
    int64_t count;
    uint64_t shape; /* hash of the segment lists; 0: no lists */
    int32_t root;
    uint8_t kind, dtype, reduce, zero;
} qd_fingerprint;

/* An operation with checksums: see checked.c. The core's. */
typedef struct qd_checked {
    bool on, running; /* running: an operation of the backend is in progress */
    int stage;
    int64_t piece;
    uint64_t mark; /* of a send or receive */
    qd_coll_request call;
} qd_checked;

struct qd_transfer {
    qd_comm *comm;
    qd_coll_request request;
    qd_fingerprint fingerprint;
    int64_t bytes;       /* backend: adds the bytes it copied from other ranks' memory; the core adds them to the stats */
    double busy_seconds; /* backend: adds the time spent in copy and sum loops of large messages */
    double moved_at;     /* core: time of the last progress, for the deadline; shifted by the time this process was stopped */
    double checked_at;   /* core: time of the last deadline check */
    double noted_at;     /* core: time of the last write to its note */
    int note;            /* core: index of its note on the qd_wait_board, or -1 */
    bool started;        /* core */
    qd_checked checked;  /* core */
    struct qd_timeline *timeline; /* of the communication stream; NULL: not recorded */
    int timeline_id, piece;
    _Alignas(64) unsigned char state[QD_TRANSFER_STATE_BYTES]; /* the backend's; not cleared before start() */
};

/* A rank's place (qd_comm_at), written by one thread and read by others at any time. Stored as
 * atomic words: a reader may see a mix of old and new words, but there is no data race. */
typedef struct qd_comm_place {
    _Atomic uint64_t words[QD_COMM_PLACE_BYTES / 8];
} qd_comm_place;
void qd_comm_place_set(qd_comm_place *place, const char *text); /* truncated */
void qd_comm_place_get(const qd_comm_place *place, char text[QD_COMM_PLACE_BYTES]);

/* Wait notes: which rank waits for which. An operation that has waited for a while publishes a note
 * that every rank can read, and renews it as long as it waits. After the deadline a rank follows
 * the notes along the chain of waits to the rank that does not wait for another one. A stopped rank
 * writes nothing, so its notes grow stale. Notes are atomic words like places: a torn one only
 * makes an error message less exact. */

#define QD_WAIT_NOTES 8 /* noted operations of one rank; further waiting operations are not noted */
#define QD_WAIT_PEERS 4

typedef struct qd_wait_note {
    double renewed;              /* qd_clock_now(); 0: no note */
    int64_t group;               /* id of the communicator */
    qd_fingerprint fingerprint;  /* of the waiting call */
    char name[QD_COMM_NAME_BYTES]; /* of the communicator */
    int32_t peers[QD_WAIT_PEERS];  /* world ranks that it waits for; -1: none */
    uint64_t entered[QD_WAIT_PEERS]; /* the last operation (or message) of this queue that each peer has entered */
    int64_t holds;               /* 1: a thread of the rank is blocked until this call is done */
} qd_wait_note;

/* The last operation that a rank has started, for messages about a rank that can no longer report
 * anything itself. Atomic words like the notes. */
typedef struct qd_last_call {
    qd_fingerprint fingerprint;
    char name[QD_COMM_NAME_BYTES]; /* of the communicator */
    int64_t inside;                /* 1: it has not completed yet */
} qd_last_call;

typedef struct qd_wait_board {
    qd_comm_place place;
    _Atomic uint64_t last[sizeof(qd_last_call) / 8];
    struct {
        _Atomic uint64_t words[sizeof(qd_wait_note) / 8];
    } notes[QD_WAIT_NOTES];
} qd_wait_board;
void qd_wait_note_set(qd_wait_board *board, int index, const qd_wait_note *note);
void qd_wait_note_get(const qd_wait_board *board, int index, qd_wait_note *note);
void qd_last_call_set(qd_transfer *op); /* as the operation starts */
void qd_last_call_end(qd_transfer *op); /* as it completes */
/* "at 'step 3, norm', in all-reduce of 100 fp32 (sum), operation 3 of group world": what the rank
 * with this board did last; "" if it has done nothing. */
void qd_last_call_text(const qd_wait_board *board, char *text, size_t bytes);

typedef struct qd_queue qd_queue; /* work.h */
typedef struct qd_comm_device_ops qd_comm_device_ops;

struct qd_comm {
    qd_world *world;
    const qd_comm_device_ops *on_device; /* NULL: buffers are host memory and the world's backend moves them */
    qd_comm *host; /* on a device: the communicator of the same ranks for host memory */
    bool owns_host;
    struct qd_device *device;
    struct qd_timeline *timeline; /* on a device: records operations that start from now on as pieces timeline_id; may be NULL */
    int timeline_id;
    int rank, size;
    int *world_ranks; /* (size) */
    char name[QD_COMM_NAME_BYTES];
    int64_t id;          /* from reserve_id(); the world itself has 0 */
    void *backend_data;  /* the backend's, per communicator */
    uint64_t sequence;   /* collectives called so far; with checksums, those of the backend that have started */
    uint64_t *sent, *received; /* (size) messages so far to and from each peer; the same */
    struct qd_checks *checks;  /* NULL until the first collective with checksums */
    qd_queue *queues; /* (1 + 2 * size) collectives, sends to each peer, receives from each peer */
    pthread_mutex_t stats_lock;
    qd_comm_stats stats;
};

typedef struct qd_comm_backend_ops qd_comm_backend_ops;

struct qd_world {
    const qd_comm_backend_ops *backend;
    void *backend_data; /* the backend's, per rank */
    qd_comm_config config;
    int rank, size; /* world rank */
    qd_comm_where where; /* one machine, unless the backend sets it in group_create() */
    const char (*hosts)[QD_COMM_HOST_BYTES]; /* the backend's: host of each rank; NULL on one machine */
    int refs;       /* live communicators of this rank */
    _Atomic int spin; /* idle polls before yielding the core; a backend lowers it when ranks outnumber cores */
    qd_comm_place place; /* this rank's own */
    bool checks_messages;
    pthread_mutex_t lock;      /* refs and creation of the progress thread */
    pthread_mutex_t serialize; /* held around [S] calls of a `serialized` backend */
    struct qd_progress *progress; /* NULL until the first asynchronous call */
    struct qd_guard *guard;       /* guard.c; NULL: this rank watches no other */
    _Atomic int failed;           /* qd_status of the first failure of this rank, or QD_OK */
    char failure[QD_COMM_REASON_BYTES]; /* its message; written once before `failed` is set */
    _Atomic int forsaken;         /* qd_comm_forsake() */
    _Atomic int lost;             /* 1 + the rank of qd_comm_lost(), or 0; the backend's */
    _Atomic uint32_t notes;       /* bit mask of this rank's notes in use */
    _Atomic int failing;          /* claims the right to write `failure` */
};

/* What a waiting rank knows about a peer. */
typedef struct qd_peer_report {
    uint64_t sequence;               /* last operation (or message) of this queue that the peer has entered */
    char place[QD_COMM_PLACE_BYTES]; /* as set by qd_comm_at(); "" if unknown */
} qd_peer_report;

/* The table of a backend. Every slot is required unless marked optional. */
struct qd_comm_backend_ops {
    const char *name;
    bool serialized; /* see the top of this file */

    qd_status (*start)(qd_transfer *op);                         /* [S] */
    qd_status (*poll)(qd_transfer *op, bool *done, bool *moved); /* [S] *moved: progress since the last poll */
    void (*finish)(qd_transfer *op);                             /* [S] */

    /* True if `op` waits for group rank `peer`; *report is what is known about the peer. [S] */
    bool (*late)(const qd_transfer *op, int peer, qd_peer_report *report);

    /* The wait notes of world rank `rank`, as far as they are known here. The core writes this
     * rank's own. [S] */
    qd_wait_board *(*board)(qd_world *world, int rank);

    /* Sleeping. prepare() announces that a thread of this rank is about to sleep; the core then
     * polls once more and either cancels or sleeps. sleep() returns when a peer has made progress,
     * when wake() was called on this rank since prepare(), or after `seconds`. Spurious returns are
     * allowed. */
    uint32_t (*sleep_prepare)(qd_world *world);
    void (*sleep_cancel)(qd_world *world);
    void (*sleep)(qd_world *world, uint32_t ticket, double seconds);
    void (*wake)(qd_world *world); /* any thread of this rank */

    /* World-wide failure. abort: publishes that this rank failed (the first failure counts); never
     * blocks for long [S]. aborted: true if some rank failed; cheap, called often; fills rank and
     * reason only when true [S]. */
    void (*abort)(qd_world *world, const char *reason);
    bool (*aborted)(qd_world *world, int *rank, char *reason, size_t reason_bytes);

    /* Optional: whether a rank is known to be slow for a good reason (a debugger holds it), so that
     * deadlines do not expire. */
    bool (*excused)(qd_world *world);

    /* Optional: memory that the other ranks reach by address. alloc leaves *memory NULL where
     * ordinary memory is just as good. free returns false if the memory is not from alloc. */
    qd_status (*alloc)(qd_world *world, int64_t bytes, void **memory);
    bool (*free)(qd_world *world, void *memory);
    int64_t (*shared_bytes)(qd_world *world, int64_t *staging);

    void (*at)(qd_world *world, const char *place); /* what this rank is doing, for late() on other ranks [S] */

    /* Groups. The core exchanges colours over the parent, calls reserve_id on the first rank of
     * each new group, sends the id (> 0, unique among the world's live groups) to the members, then
     * calls group_create on each member with comm's rank, size, world_ranks, name and id filled. A
     * member calls group_destroy when it drops the group; the id may be reused once all members
     * have. release_id: the reserved id is not needed. [S] */
    qd_status (*reserve_id)(qd_comm *parent, int64_t *id);
    void (*release_id)(qd_comm *parent, int64_t id);
    qd_status (*group_create)(qd_comm *comm);
    void (*group_destroy)(qd_comm *comm);

    void (*world_destroy)(qd_world *world); /* after the last communicator of this rank [S] */
};

/* The table of a communicator on a device: moves its data. Everything that concerns the world
 * (sleeping, failure, places) stays with the world's backend. start, poll, finish and late are as
 * above, but never run under the lock of a serialized backend, so they may use communicators for
 * host memory. */

struct qd_comm_device_ops {
    const char *name;
    /* Creates comm->backend_data. The core has filled host, device, rank, size and name.
     * Collective. */
    qd_status (*create)(qd_comm *comm);
    void (*destroy)(qd_comm *comm);
    qd_status (*submit)(qd_transfer *op); /* in the caller's thread, at the call: records an event on the compute stream */
    qd_status (*start)(qd_transfer *op);
    qd_status (*poll)(qd_transfer *op, bool *done, bool *moved); /* done: everything is enqueued */
    void (*finish)(qd_transfer *op);
    bool (*late)(const qd_transfer *op, int peer, qd_peer_report *report);
    /* In the waiting thread, after finish (or a failed submit). If good, later work of the compute
     * stream is ordered after the operation. Frees what submit allocated. */
    qd_status (*complete)(qd_transfer *op, bool good);
};

extern const qd_comm_device_ops qd_comm_device_threads; /* device/: ranks as threads of one process */
extern const qd_comm_device_ops qd_comm_device_nccl;    /* nccl/: one rank per GPU */

/* Collective: whether all ranks are threads of one process. */
qd_status qd_comm_one_process(qd_comm *host, bool *one);

/* Creates this rank's world communicator (name "world", id 0, world_ranks 0 .. size-1). The backend
 * has filled its own world data; group_create is called for it. On failure world_destroy has been
 * called. */
qd_status qd_comm_create_world(const qd_comm_backend_ops *backend, void *backend_data, const qd_comm_config *config,
                               int rank, int size, qd_comm **comm);

/* Segment i of the list of group rank `rank` (i < qd_transfer_segment_count), for reduce-scatter,
 * all-gather, gather and scatter; and the number of elements of its packed buffer. */
int qd_transfer_segment_count(const qd_transfer *op, int rank);
qd_segment qd_transfer_segment(const qd_transfer *op, int rank, int i);
int64_t qd_transfer_packed_count(const qd_transfer *op, int rank);

/* Copies packed elements [first, first + count) of `rank` from the full buffer to `packed`, or from
 * `packed` to the full buffer. packed[0] is element `first`. */
void qd_transfer_pack(const qd_transfer *op, int rank, int64_t first, int64_t count, const void *full, void *packed);
void qd_transfer_unpack(const qd_transfer *op, int rank, int64_t first, int64_t count, const void *packed, void *full);

/* Whether this is a reduce in which every rank sums a slice (qd_coll_split). */
bool qd_transfer_is_split(const qd_transfer *op);

/* Whether group rank `rank` has data for others, and whether it receives data from others. A
 * barrier has neither. */
bool qd_transfer_produces(const qd_transfer *op, int rank);
bool qd_transfer_consumes(const qd_transfer *op, int rank);

/* Visits the pieces that stay on this rank (see below) and are not yet in place. */
typedef void (*qd_transfer_visit)(void *context, void *to, const void *from, int64_t bytes);
void qd_transfer_own_pieces(const qd_transfer *op, qd_transfer_visit visit, void *context);

/* Copies what stays on this rank: its own part in all-gather and all-to-all, and the root's in
 * gather and scatter (nothing if it is in place already). way NULL: large pieces bypass the
 * caches. For a group of one this is the whole operation; the core never calls a backend for
 * those. */
void qd_transfer_copy_own(const qd_transfer *op, const qd_copy_way *way);
qd_copy_way qd_transfer_copy_way(int64_t bytes); /* of a piece of this size, without a given way */

/* Compares a peer's call with ours. QD_MISMATCH names both sides; peer_place may be "". For send
 * and receive the kinds must be counterparts, and roots are not compared. */
qd_status qd_transfer_check(const qd_transfer *op, int peer, const qd_fingerprint *theirs, const char *peer_place);
/* The same error for an all-to-all pair: the peer sends `sends` elements to us, we expected
 * `expected`. */
qd_status qd_transfer_check_pair(const qd_transfer *op, int peer, int64_t sends, int64_t expected,
                                 const char *peer_place);

/* "all-reduce of 100 fp32 (sum)": buffer is returned. */
const char *qd_fingerprint_text(const qd_fingerprint *fingerprint, char *buffer, size_t bytes);

#endif
