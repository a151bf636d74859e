/* Worlds whose ranks share no memory: the protocol of heads and chunks, and the interface between
 * it and what carries the messages (mpi/, ucx/).
 *
 * A transport only moves bytes. Sums are ours (device/sum.h), so results are bit-identical to those
 * of the local backend. The backends are `serialized`: the core holds one lock around every call,
 * so a transport needs no lock of its own.
 *
 * A group is a number in the tags of its messages, so creating one needs no collective call that
 * could hang. Control messages (abort, questions about late ranks) use tags of their own.
 *
 * A message from one rank to another begins with a head: the caller's fingerprint, its place, and
 * the number of payload bytes. Short payloads, and between machines the first part of a long
 * message, are part of the head's message. The rest follows in chunks on tags of their own, and the
 * receiver posts receives for them only after it has checked the head: a rank that disagrees never
 * receives into a wrong buffer, whatever the sizes. */
#ifndef QD_COMM_REMOTE_REMOTE_H
#define QD_COMM_REMOTE_REMOTE_H

#include "comm/comm_impl.h"

#include <sched.h>

/* A message in flight is a request of the transport, at most this long, in an array of the
 * protocol. */
#define QD_REMOTE_REQUEST_BYTES 8

#define QD_REMOTE_CONTROL (-1) /* as a group: control messages */
#define QD_REMOTE_ANY (-1)     /* as a sender of those */

/* Every slot is required unless marked optional. `self` is the transport's own state. */
typedef struct qd_remote_transport {
    const char *name; /* of the backend; world.c lists them */
    /* Marks all requests as unused. */
    void (*clear)(void *requests, int count);
    /* Begins to send to, or to receive from, a world rank. Messages between two ranks with the same
     * group and channel arrive in the order in which they were sent. */
    qd_status (*send)(void *self, int to, int64_t group, int channel, const void *data, int64_t bytes, void *requests, int index);
    qd_status (*recv)(void *self, int from, int64_t group, int channel, void *data, int64_t bytes, void *requests, int index);
    /* Makes progress. *done: the request has ended and is unused again; also if it was unused. */
    qd_status (*test)(void *self, void *requests, int index, bool *done);
    /* The same for an array: the indices of the requests that have ended. */
    qd_status (*test_some)(void *self, void *requests, int count, int *completed, int *indices);
    /* Gives up requests: true if none of them can touch its buffer any more; otherwise they are
     * left to the transport. */
    bool (*give_up)(void *self, void *requests, int count);
    /* Meets the other ranks at the end of the world: called until *done. False if they cannot be
     * met. */
    bool (*meet)(void *self, bool *done);
    /* Optional: whether a rank is known to be gone. why: what is known about it. */
    bool (*lost)(void *self, int *rank, char *why, size_t bytes);
    /* met: all ranks have ended the world. Otherwise nothing here may wait for them; dirty:
     * requests are left that may still touch their buffers. */
    void (*close)(void *self, bool met, bool dirty);
    int64_t most_groups; /* ids of groups are below this */
    int64_t carry_most;  /* bytes of payload that are best sent with their head between machines */
} qd_remote_transport;

/* mailbox.c: a socket for control messages of ranks of this machine. Where there can be none, the
 * name is empty and nothing is sent or received. */
#define QD_REMOTE_MAILBOX_BYTES 16
typedef struct qd_remote_mailbox {
    bool open;
    int fd;
} qd_remote_mailbox;
void qd_remote_mailbox_open(qd_remote_mailbox *box, char name[QD_REMOTE_MAILBOX_BYTES]);
/* Not sent if the mailbox `to` is full. */
void qd_remote_mailbox_send(qd_remote_mailbox box, const char *to, const void *data, int64_t bytes);
/* False: there is no message. */
bool qd_remote_mailbox_recv(qd_remote_mailbox box, void *data, int64_t bytes);
void qd_remote_mailbox_close(qd_remote_mailbox box);

typedef struct qd_remote_head {
    qd_fingerprint fingerprint;
    int64_t bytes;   /* payload from this sender to this receiver, over the whole first phase of the operation */
    int64_t carried; /* payload bytes that follow this head in the same message; in collectives all or 0 */
    char place[QD_COMM_PLACE_BYTES];
} qd_remote_head;

/* Every head carries payloads of up to this much: it stays below the eager limit of common MPI
 * libraries (4 KiB with their own header). */
#define QD_REMOTE_CARRY_LEAST ((int64_t)(3968 - sizeof(qd_remote_head)))
/* What all heads of a group may carry together, if that is more: a rank has buffers for each peer
 * on another machine. */
#define QD_REMOTE_CARRY_ALL ((int64_t)1 << 20)

/* Channels of a group; with the id of the group they make up a tag. */
enum { QD_REMOTE_TAG_HEAD, QD_REMOTE_TAG_FIRST, QD_REMOTE_TAG_SECOND, QD_REMOTE_TAG_P2P_HEAD, QD_REMOTE_TAG_P2P, QD_REMOTE_CHANNELS = 8 };

/* Messages in flight per flow: while one is copied or summed, the next one is in transit. */
#define QD_REMOTE_DEPTH 2

/* Requests of a link; chunk c of a flow uses the flow's slot c % QD_REMOTE_DEPTH. */
enum {
    QD_REMOTE_HEAD_TX,
    QD_REMOTE_HEAD_RX,
    QD_REMOTE_FIRST_TX,
    QD_REMOTE_FIRST_RX = QD_REMOTE_FIRST_TX + QD_REMOTE_DEPTH,
    QD_REMOTE_SECOND_TX = QD_REMOTE_FIRST_RX + QD_REMOTE_DEPTH,
    QD_REMOTE_SECOND_RX = QD_REMOTE_SECOND_TX + QD_REMOTE_DEPTH,
    QD_REMOTE_REQUESTS = QD_REMOTE_SECOND_RX + QD_REMOTE_DEPTH
};

/* `count` elements in `chunks` messages: `posted` were passed to MPI, and the first `done` have
 * completed. ended: the later of two messages in flight has completed first. */
typedef struct qd_remote_flow {
    int64_t count, chunks, posted, done;
    bool ended[QD_REMOTE_DEPTH];
} qd_remote_flow;

/* What one group rank exchanges with another in the current collective. */
typedef struct qd_remote_link {
    qd_remote_flow first_tx, first_rx, second_tx, second_rx;
    bool head_leaves;                /* our head is being sent: a peer that reads nothing delays it */
    bool head_wanted, greeted;       /* a head is expected; it has arrived and agrees */
    bool carried;                    /* the payload came with the head */
    int64_t head_bytes;              /* of a head with the payload that it may carry; the peer has the same */
    unsigned char *tx, *rx;          /* (head_bytes) of collectives */
    unsigned char *p2p_tx, *p2p_rx;  /* (head_bytes) of sends and receives, allocated at first use */
    uint64_t received;               /* p2p heads so far */
    double answered;                 /* time of the peer's last answer, which contained: */
    uint64_t entered;                /* the last collective it has entered */
    char place[QD_COMM_PLACE_BYTES]; /* its last known place, from a head or an answer */
    uint64_t heard;           /* number of its last head here, among all heads of the world; 0: none */
    qd_fingerprint last;      /* from that head */
} qd_remote_link;

typedef struct qd_remote_world qd_remote_world;

typedef struct qd_remote_group {
    qd_comm *comm;
    qd_remote_world *world;
    uint64_t entered;       /* collectives started on this rank */
    qd_remote_link *links;     /* (size) */
    uint64_t *requests;     /* (size * QD_REMOTE_REQUESTS) of the current collective */
    int active;             /* of these, how many are in flight */
    int *indices;           /* (size * QD_REMOTE_REQUESTS) */
    const void **sources;   /* (size) of a sum */
    unsigned char *staging; /* (size, stages, stage bytes) */
    int64_t staging_bytes;
    double asked; /* when the peers were last asked about operation `entered`; 0: never */
    struct qd_remote_group *next;
} qd_remote_group;

typedef enum qd_remote_control_kind { QD_REMOTE_ABORT = 1, QD_REMOTE_ASK, QD_REMOTE_ANSWER } qd_remote_control_kind;

typedef struct qd_remote_control {
    int32_t kind, from; /* world rank */
    int64_t group;
    uint64_t sequence;
    char text[QD_COMM_REASON_BYTES]; /* abort: the reason; answer: the place */
    double sent;                     /* answer: by the sender's clock */
    qd_wait_note notes[QD_WAIT_NOTES]; /* answer: the sender's */
} qd_remote_control;

typedef struct qd_remote_control_send {
    qd_remote_control message;
    uint64_t request;
    struct qd_remote_control_send *next;
} qd_remote_control_send;

struct qd_remote_world {
    const qd_remote_transport *transport;
    void *self; /* the transport's */
    /* A request of a failed operation could not be completed: the transport may still read or write
     * its buffers. Ours are never freed. The caller may free its own, so from then on nothing here
     * lets the transport make progress. */
    bool dirty;
    int rank, size;
    int spin; /* for qd_world, like `where` and `hosts` */
    qd_comm_where where;
    char (*hosts)[QD_COMM_HOST_BYTES];
    int *machines; /* (size) the lowest rank of each rank's machine */
    double deadline;
    int64_t next_id;
    qd_remote_group *groups;
    uint64_t heard; /* heads so far */
    char place[QD_COMM_PLACE_BYTES];
    qd_wait_board *boards; /* (size) this rank's own, and what the others have answered */
    double *asked;         /* (size) when each was last asked */
    qd_remote_control incoming;
    uint64_t incoming_request;
    bool listening; /* incoming_request is in use */
    qd_remote_mailbox mailbox;
    char (*mailboxes)[QD_REMOTE_MAILBOX_BYTES]; /* (size) "" on another machine */
    double listened;                            /* when our mailbox was last read */
    qd_remote_control_send *sends;
    int aborted_by; /* world rank, or -1 */
    char reason[QD_COMM_REASON_BYTES];
    /* sleeping */
    pthread_mutex_t sleep_lock;
    pthread_cond_t sleep_wake;
    uint32_t wakes;        /* under sleep_lock */
    _Atomic unsigned naps; /* since the last progress */
};

/* What each rank tells the others when the world is created. Plain data: may be sent as bytes. */
typedef struct qd_remote_facts {
    char machine[64]; /* equal on ranks of one machine */
    char host[QD_COMM_HOST_BYTES];
    cpu_set_t cores; /* that the rank may use */
    char mailbox[QD_REMOTE_MAILBOX_BYTES];
} qd_remote_facts;
/* All but the machine. Opens the mailbox: the caller closes it or passes it on to
 * qd_remote_create(). */
void qd_remote_facts_find(qd_remote_facts *own, qd_remote_mailbox *mailbox);

/* Creates the world communicator of this rank. facts: (size) of all ranks. The transport and the
 * mailbox are closed with the world, or here on failure. */
qd_status qd_remote_create(const qd_remote_transport *transport, void *self, const qd_remote_facts *facts,
                           qd_remote_mailbox mailbox, int rank, int size, const qd_comm_config *config, qd_comm **comm);

/* Largest message of a transport: MPI counts are int, and libraries differ above 2^30. */
#define QD_REMOTE_MESSAGE_BYTES ((int64_t)1 << 28)

/* Begin to send bytes to, or to receive them from, a group rank. */
qd_status qd_remote_send(qd_remote_group *group, int peer, int channel, const void *data, int64_t bytes, uint64_t *requests, int index);
qd_status qd_remote_recv(qd_remote_group *group, int peer, int channel, void *data, int64_t bytes, uint64_t *requests, int index);

/* Payloads of up to so many bytes are sent in one message with their head. */
static inline int64_t qd_remote_carry(const qd_remote_link *link)
{
    return link->head_bytes - (int64_t)sizeof(qd_remote_head);
}

/* Writes the head of `op`, whose payload has `bytes` bytes, into `buffer`, followed by the first
 * `carried` bytes of the payload. Returns the length of the message. */
int64_t qd_remote_write_head(const qd_remote_world *world, const qd_transfer *op, int64_t bytes, const void *payload, int64_t carried,
                             unsigned char *buffer);

/* A head of the group rank has arrived: what it says about that rank. */
void qd_remote_hear(qd_remote_group *group, int peer, qd_remote_head *head);

/* Asks the ranks of the group (or only `peer`, if >= 0) what they are doing, repeatedly, once `op`
 * has waited for half the deadline. Ranks that an answer names are asked too. late() and the boards
 * use the answers. *asked: when this was last done for this operation. */
void qd_remote_ask(qd_remote_group *group, const qd_transfer *op, int peer, double *asked);
/* Whether the group rank has answered recently. */
bool qd_remote_answers(const qd_remote_group *group, int peer);

/* Gives up requests of a failed operation; those that do not end shortly make the world dirty. */
void qd_remote_give_up(qd_remote_world *world, uint64_t *requests, int count);

/* coll.c */
qd_status qd_remote_coll_start(qd_transfer *op);
qd_status qd_remote_coll_poll(qd_transfer *op, bool *done, bool *moved);
void qd_remote_coll_finish(qd_transfer *op);
bool qd_remote_coll_late(const qd_transfer *op, int peer, qd_peer_report *report);

/* p2p.c */
qd_status qd_remote_p2p_start(qd_transfer *op);
qd_status qd_remote_p2p_poll(qd_transfer *op, bool *done, bool *moved);
void qd_remote_p2p_finish(qd_transfer *op);
bool qd_remote_p2p_late(const qd_transfer *op, int peer, qd_peer_report *report);

#endif
