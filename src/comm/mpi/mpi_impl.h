/* Inside src/comm/mpi: the MPI backend's state and what its files share.
 *
 * MPI moves bytes and nothing else; sums are ours (device/sum.h), so the bits equal those of the
 * local backend. The backend is `serialized`: the core holds one lock around every call into it, so
 * MPI_THREAD_SERIALIZED is enough.
 *
 * All traffic of a world runs over one private duplicate of MPI_COMM_WORLD; a group is a range of
 * tags, so making one needs no collective MPI call that could hang. Control messages (abort,
 * who-is-late) have a second duplicate.
 *
 * A message from one rank to another begins with a head: the caller's fingerprint, its place, and
 * how many payload bytes follow. Short payloads travel inside the head's message. Long ones follow
 * in chunks on tags of their own, and the receiver posts them only after it has checked the head: a
 * rank that disagrees never receives into a wrong buffer, whatever the sizes. */
#ifndef QD_COMM_MPI_MPI_IMPL_H
#define QD_COMM_MPI_MPI_IMPL_H

#include "comm/comm_impl.h"

#include <mpi.h>

/* A head with its payload stays under the eager limit of the common MPI libraries (4 KiB with their
 * own header). */
#define QD_MPI_HEAD_BYTES 3968

typedef struct qd_mpi_head {
    qd_fingerprint fingerprint;
    int64_t bytes;   /* payload from this sender to this receiver, over the whole first phase of the operation */
    int64_t carried; /* of it, bytes behind this head in the same message: all or 0 */
    char place[QD_COMM_PLACE_BYTES];
} qd_mpi_head;
#define QD_MPI_CARRY_BYTES ((int64_t)(QD_MPI_HEAD_BYTES - sizeof(qd_mpi_head)))

/* Tags of a group: id * QD_MPI_CHANNELS + channel. */
enum { QD_MPI_TAG_HEAD, QD_MPI_TAG_FIRST, QD_MPI_TAG_SECOND, QD_MPI_TAG_P2P_HEAD, QD_MPI_TAG_P2P, QD_MPI_CHANNELS = 8 };

/* A flow has at most this many messages under way: while one is copied or summed, the next is on
 * its way. */
#define QD_MPI_DEPTH 2

/* Requests of a link; chunk c of a flow uses the flow's slot c % QD_MPI_DEPTH. */
enum {
    QD_MPI_HEAD_TX,
    QD_MPI_HEAD_RX,
    QD_MPI_FIRST_TX,
    QD_MPI_FIRST_RX = QD_MPI_FIRST_TX + QD_MPI_DEPTH,
    QD_MPI_SECOND_TX = QD_MPI_FIRST_RX + QD_MPI_DEPTH,
    QD_MPI_SECOND_RX = QD_MPI_SECOND_TX + QD_MPI_DEPTH,
    QD_MPI_REQUESTS = QD_MPI_SECOND_RX + QD_MPI_DEPTH
};

/* `count` elements in `chunks` messages, of which `posted` were given to MPI and the first `done`
 * have completed; ended: the later one has completed before the earlier one. */
typedef struct qd_mpi_flow {
    int64_t count, chunks, posted, done;
    bool ended[QD_MPI_DEPTH];
} qd_mpi_flow;

/* What one group rank exchanges with another in the collective that runs. */
typedef struct qd_mpi_link {
    qd_mpi_flow first_tx, first_rx, second_tx, second_rx;
    bool head_wanted, greeted;       /* a head is expected; it has come and agrees */
    bool carried;                    /* the payload came with the head */
    unsigned char *tx, *rx;          /* (QD_MPI_HEAD_BYTES) of collectives */
    unsigned char *p2p_tx, *p2p_rx;  /* (QD_MPI_HEAD_BYTES) of sends and receives, made at first use */
    uint64_t received;               /* p2p heads so far */
    double answered;                 /* when the peer answered a question last, with: */
    uint64_t entered;                /* the last collective it has entered */
    char place[QD_COMM_PLACE_BYTES]; /* the last place heard of, in a head or an answer */
} qd_mpi_link;

typedef struct qd_mpi_world qd_mpi_world;

typedef struct qd_mpi_group {
    qd_comm *comm;
    qd_mpi_world *world;
    uint64_t entered;       /* collectives started on this rank */
    qd_mpi_link *links;     /* (size) */
    MPI_Request *requests;  /* (size * QD_MPI_REQUESTS) of the collective that runs */
    int *indices;           /* (size * QD_MPI_REQUESTS) */
    const void **sources;   /* (size) of a sum */
    unsigned char *staging; /* (size, stages, stage bytes) */
    int64_t staging_bytes;
    double asked; /* when the peers were last asked where they are, for the operation `entered`; 0: never */
    struct qd_mpi_group *next;
} qd_mpi_group;

typedef enum qd_mpi_control_kind { QD_MPI_ABORT = 1, QD_MPI_ASK, QD_MPI_ANSWER } qd_mpi_control_kind;

typedef struct qd_mpi_control {
    int32_t kind, from; /* world rank */
    int64_t group;
    uint64_t sequence;
    char text[QD_COMM_REASON_BYTES]; /* abort: the reason; answer: the place */
    double sent;                     /* answer: by the sender's clock */
    qd_wait_note notes[QD_WAIT_NOTES]; /* answer: the sender's */
} qd_mpi_control;

typedef struct qd_mpi_control_send {
    qd_mpi_control message;
    MPI_Request request;
    struct qd_mpi_control_send *next;
} qd_mpi_control_send;

struct qd_mpi_world {
    MPI_Comm data, control;
    bool finalize; /* we initialised MPI, so we end it */
    /* A request of a failed operation could not be ended: MPI may still read or write its buffers.
     * Ours are never freed; the caller's are its own to free, so from then on nothing here lets MPI
     * make progress, and the process leaves without MPI_Finalize. */
    bool dirty;
    int rank, size;
    int spin; /* for qd_world, as are `where` and `hosts` */
    qd_comm_where where;
    char (*hosts)[QD_COMM_HOST_BYTES];
    double deadline;
    int64_t next_id, most_ids;
    qd_mpi_group *groups;
    char place[QD_COMM_PLACE_BYTES];
    qd_wait_board *boards; /* (size): this rank's own, and what the others have answered */
    double *asked;         /* (size): when each was asked last */
    qd_mpi_control incoming;
    MPI_Request incoming_request;
    qd_mpi_control_send *sends;
    int aborted_by; /* world rank, or -1 */
    char reason[QD_COMM_REASON_BYTES];
    /* sleeping */
    pthread_mutex_t sleep_lock;
    pthread_cond_t sleep_wake;
    uint32_t wakes;        /* under sleep_lock */
    _Atomic unsigned naps; /* since something moved */
};

/* QD_SYSTEM with the library's text when `code` is an error. */
qd_status qd_mpi_check(int code, const char *call);

/* Tag and MPI rank for a channel and a group rank. */
int qd_mpi_tag(const qd_mpi_group *group, int channel);

/* At most this much in one MPI call: counts are int, and libraries differ above 2^30. */
#define QD_MPI_MESSAGE_BYTES ((int64_t)1 << 28)

/* Bytes to or from a group rank. */
qd_status qd_mpi_send(qd_mpi_group *group, int peer, int channel, const void *data, int64_t bytes,
                      MPI_Request *request);
qd_status qd_mpi_recv(qd_mpi_group *group, int peer, int channel, void *data, int64_t bytes, MPI_Request *request);

/* Writes the head of `op` into `buffer` (QD_MPI_HEAD_BYTES) and, if it fits and `payload` is given,
 * `bytes` bytes behind it. Returns the message's length. */
int64_t qd_mpi_write_head(const qd_mpi_world *world, const qd_transfer *op, int64_t bytes, const void *payload,
                          unsigned char *buffer);

/* Asks the ranks of the group (or only `peer`, if >= 0) what they are doing, again and again once
 * `op` has waited for half the deadline. Those that an answer names are asked in turn. The answers
 * are for late() and for the boards. *asked: when it was done last for this operation. */
void qd_mpi_ask(qd_mpi_group *group, const qd_transfer *op, int peer, double *asked);
/* The group rank has answered, not long ago. */
bool qd_mpi_answers(const qd_mpi_group *group, int peer);

/* Gives up requests of a failed operation: receives are cancelled, and what does not end within a
 * moment is left to MPI (world->dirty). */
void qd_mpi_give_up(qd_mpi_world *world, MPI_Request *requests, int count);

/* coll.c */
qd_status qd_mpi_coll_start(qd_transfer *op);
qd_status qd_mpi_coll_poll(qd_transfer *op, bool *done, bool *moved);
void qd_mpi_coll_finish(qd_transfer *op);
bool qd_mpi_coll_late(const qd_transfer *op, int peer, qd_peer_report *report);

/* p2p.c */
qd_status qd_mpi_p2p_start(qd_transfer *op);
qd_status qd_mpi_p2p_poll(qd_transfer *op, bool *done, bool *moved);
void qd_mpi_p2p_finish(qd_transfer *op);
bool qd_mpi_p2p_late(const qd_transfer *op, int peer, qd_peer_report *report);

#endif
