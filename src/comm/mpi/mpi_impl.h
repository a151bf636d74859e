/* Internal to src/comm/mpi: the state of the MPI backend and what its files share.
 *
 * MPI only moves bytes. Sums are ours (device/sum.h), so results are bit-identical to those of the
 * local backend. The backend is `serialized`: the core holds one lock around every call into it, so
 * MPI_THREAD_SERIALIZED is enough.
 *
 * All traffic of a world uses one private duplicate of MPI_COMM_WORLD. A group is a range of tags,
 * so creating one needs no collective MPI call that could hang. Control messages (abort, questions
 * about late ranks) use a second duplicate.
 *
 * A message from one rank to another begins with a head: the caller's fingerprint, its place, and
 * the number of payload bytes. Short payloads are part of the head's message. Long ones follow in
 * chunks on tags of their own, and the receiver posts receives for them only after it has checked
 * the head: a rank that disagrees never receives into a wrong buffer, whatever the sizes. */
#ifndef QD_COMM_MPI_MPI_IMPL_H
#define QD_COMM_MPI_MPI_IMPL_H

#include "comm/comm_impl.h"

#include <mpi.h>

/* A head with its payload stays below the eager limit of common MPI libraries (4 KiB with their own
 * header). */
#define QD_MPI_HEAD_BYTES 3968

typedef struct qd_mpi_head {
    qd_fingerprint fingerprint;
    int64_t bytes;   /* payload from this sender to this receiver, over the whole first phase of the operation */
    int64_t carried; /* payload bytes that follow this head in the same message: all or 0 */
    char place[QD_COMM_PLACE_BYTES];
} qd_mpi_head;
#define QD_MPI_CARRY_BYTES ((int64_t)(QD_MPI_HEAD_BYTES - sizeof(qd_mpi_head)))

/* Tags of a group: id * QD_MPI_CHANNELS + channel. */
enum { QD_MPI_TAG_HEAD, QD_MPI_TAG_FIRST, QD_MPI_TAG_SECOND, QD_MPI_TAG_P2P_HEAD, QD_MPI_TAG_P2P, QD_MPI_CHANNELS = 8 };

/* Messages in flight per flow: while one is copied or summed, the next one is in transit. */
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

/* `count` elements in `chunks` messages: `posted` were passed to MPI, and the first `done` have
 * completed. ended: the later of two messages in flight has completed first. */
typedef struct qd_mpi_flow {
    int64_t count, chunks, posted, done;
    bool ended[QD_MPI_DEPTH];
} qd_mpi_flow;

/* What one group rank exchanges with another in the current collective. */
typedef struct qd_mpi_link {
    qd_mpi_flow first_tx, first_rx, second_tx, second_rx;
    bool head_wanted, greeted;       /* a head is expected; it has arrived and agrees */
    bool carried;                    /* the payload came with the head */
    unsigned char *tx, *rx;          /* (QD_MPI_HEAD_BYTES) of collectives */
    unsigned char *p2p_tx, *p2p_rx;  /* (QD_MPI_HEAD_BYTES) of sends and receives, allocated at first use */
    uint64_t received;               /* p2p heads so far */
    double answered;                 /* time of the peer's last answer, which contained: */
    uint64_t entered;                /* the last collective it has entered */
    char place[QD_COMM_PLACE_BYTES]; /* its last known place, from a head or an answer */
} qd_mpi_link;

typedef struct qd_mpi_world qd_mpi_world;

typedef struct qd_mpi_group {
    qd_comm *comm;
    qd_mpi_world *world;
    uint64_t entered;       /* collectives started on this rank */
    qd_mpi_link *links;     /* (size) */
    MPI_Request *requests;  /* (size * QD_MPI_REQUESTS) of the current collective */
    int *indices;           /* (size * QD_MPI_REQUESTS) */
    const void **sources;   /* (size) of a sum */
    unsigned char *staging; /* (size, stages, stage bytes) */
    int64_t staging_bytes;
    double asked; /* when the peers were last asked about operation `entered`; 0: never */
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
    bool finalize; /* we initialized MPI, so we finalize it */
    /* A request of a failed operation could not be completed: MPI may still read or write its
     * buffers. Ours are never freed. The caller may free its own, so from then on nothing here lets
     * MPI make progress, and the process exits without MPI_Finalize. */
    bool dirty;
    int rank, size;
    int spin; /* for qd_world, like `where` and `hosts` */
    qd_comm_where where;
    char (*hosts)[QD_COMM_HOST_BYTES];
    double deadline;
    int64_t next_id, most_ids;
    qd_mpi_group *groups;
    char place[QD_COMM_PLACE_BYTES];
    qd_wait_board *boards; /* (size) this rank's own, and what the others have answered */
    double *asked;         /* (size) when each was last asked */
    qd_mpi_control incoming;
    MPI_Request incoming_request;
    qd_mpi_control_send *sends;
    int aborted_by; /* world rank, or -1 */
    char reason[QD_COMM_REASON_BYTES];
    /* sleeping */
    pthread_mutex_t sleep_lock;
    pthread_cond_t sleep_wake;
    uint32_t wakes;        /* under sleep_lock */
    _Atomic unsigned naps; /* since the last progress */
};

/* QD_SYSTEM with the library's text when `code` is an error. */
qd_status qd_mpi_check(int code, const char *call);

/* Tag and MPI rank for a channel and a group rank. */
int qd_mpi_tag(const qd_mpi_group *group, int channel);

/* Largest MPI call: counts are int, and libraries differ above 2^30. */
#define QD_MPI_MESSAGE_BYTES ((int64_t)1 << 28)

/* Send bytes to, or receive them from, a group rank. */
qd_status qd_mpi_send(qd_mpi_group *group, int peer, int channel, const void *data, int64_t bytes,
                      MPI_Request *request);
qd_status qd_mpi_recv(qd_mpi_group *group, int peer, int channel, void *data, int64_t bytes, MPI_Request *request);

/* Writes the head of `op` into `buffer` (QD_MPI_HEAD_BYTES), followed by `bytes` bytes of `payload`
 * if it is given and fits. Returns the length of the message. */
int64_t qd_mpi_write_head(const qd_mpi_world *world, const qd_transfer *op, int64_t bytes, const void *payload,
                          unsigned char *buffer);

/* Asks the ranks of the group (or only `peer`, if >= 0) what they are doing, repeatedly, once `op`
 * has waited for half the deadline. Ranks that an answer names are asked too. late() and the boards
 * use the answers. *asked: when this was last done for this operation. */
void qd_mpi_ask(qd_mpi_group *group, const qd_transfer *op, int peer, double *asked);
/* Whether the group rank has answered recently. */
bool qd_mpi_answers(const qd_mpi_group *group, int peer);

/* Gives up requests of a failed operation: cancels receives; a request that does not end shortly is
 * left to MPI (world->dirty). */
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
