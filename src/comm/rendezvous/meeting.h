/* Internal to src/comm/rendezvous: the state of a meeting, and sockets with time limits. */
#ifndef QD_COMM_RENDEZVOUS_MEETING_H
#define QD_COMM_RENDEZVOUS_MEETING_H

#include "comm/rendezvous/door.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/rendezvous.h"

#include <net/if.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

/* The first byte of a message. The first one of rank 0 answers a rank that has proved itself. */
enum {
    QD_SAYS_TABLE,
    QD_SAYS_FAILED, /* the meeting has failed; a qd_status and a text follow */
    QD_SAYS_LEAVING,
    QD_SAYS_ALL_LEFT,
    QD_SAYS_LOST,
    /* Answers: */
    QD_SAYS_ADMITTED,
    QD_SAYS_LATER, /* try again: a world without this rank exists */
    QD_SAYS_TAKEN, /* another process is this rank */
    QD_SAYS_AWAY,  /* this rank can never be let in; a qd_status and a text follow */
    QD_SAYS_OVER   /* the run has ended; a qd_status follows */
};
#define QD_ANSWER_SECONDS 2.0 /* rank 0 waits no longer than this for a rank to take its answer */
#define QD_TAKEN_SECONDS 5.0  /* another process may be ending, or its end may not be known yet */

/* Connections to rank 0 that have not proved anything yet. */
enum { STRANGERS_MOST = 128 };

/* The connection to another rank. */
typedef struct qd_peer {
    int fd; /* -1: none */
    qd_channel channel;
    bool left;  /* it has said that it leaves */
    bool stays; /* rank 0: it was in an earlier world */
} qd_peer;

struct qd_rendezvous {
    int rank, size; /* until all have met, those that the process was started with */
    unsigned char key[QD_KEY_BYTES];
    bool keyed; /* there is a secret */
    double seconds;
    bool (*stops)(void *context);
    void *context;
    bool stays; /* this process, or one that has come, was in an earlier world */
    bool met;      /* all have come */
    qd_door *door; /* rank 0 of a run with several worlds; NULL: none */
    char where[128]; /* "10.0.0.1 port 29500": where rank 0 is */
    char interface[IF_NAMESIZE];
    qd_peer *peers; /* (size) rank 0: of all others; others: entry 0 alone */
    pthread_t watcher;
    bool watching;
    int kick; /* eventfd: this rank leaves or closes */
    atomic_bool leaving, closing, all_left;
    atomic_int lost; /* 1 + rank, or 0 */
};

/* Reads or writes all bytes until `end` (qd_clock_now()). False on failure: *why, which is
 * QD_NO_ANSWER after `end`. */
#define QD_NO_ANSWER "it does not answer"
bool qd_socket_read(int fd, void *data, size_t bytes, double end, const char **why);
bool qd_socket_write(int fd, const void *data, size_t bytes, double end, const char **why);
/* Whether there is something to read, after at most `seconds`. */
bool qd_socket_readable(int fd, double seconds);
/* Makes a socket ready for use here; it never blocks. */
void qd_socket_prepare(int fd);

/* Sealed messages: a length and the text. The receiver frees *text. most: the largest length that
 * is accepted. */
bool qd_peer_send(qd_peer *peer, const void *text, int64_t bytes, double end, const char **why);
bool qd_peer_receive(qd_peer *peer, int64_t most, double end, unsigned char **text, int64_t *bytes, const char **why);

/* An address as text, "10.0.0.1 port 29500". */
void qd_address_text(const struct sockaddr *address, socklen_t length, char *text, size_t bytes);
/* The interface that has this address; "" if none has. */
void qd_address_interface(const struct sockaddr *address, char name[IF_NAMESIZE]);
bool qd_address_loopback(const struct sockaddr *address);
/* An address of a network interface, given by its name or one of its addresses. *length: 0 if
 * `interface` is empty. QD_USAGE if there is none. */
qd_status qd_interface_address(const char *interface, struct sockaddr_storage *address, socklen_t *length);
/* Whether the other end of this loopback connection belongs to a process of this user. */
bool qd_socket_same_user(int fd);

/* rendezvous.c: a message of rank 0 to a rank: QD_SAYS_…, `status` and `text`. */
bool qd_rendezvous_say(qd_peer *peer, int what, qd_status status, const char *text, double seconds);
bool qd_rendezvous_stops(const qd_rendezvous *r);
/* rendezvous.c: QD_USAGE for an address that is not a loopback one, without a secret. */
qd_status qd_rendezvous_unprotected(const qd_comm_join *join);

/* listen.c: the world of a door has ended. */
void qd_door_forget(qd_door *door, const qd_rendezvous *world);

/* listen.c: rank 0 waits for the others, and renumbers those that have come. connect.c: another
 * rank finds rank 0. *over: there is nothing to join: the run has ended in order. */
qd_status qd_rendezvous_listen(qd_rendezvous *r, const qd_comm_join *join);
qd_status qd_rendezvous_connect(qd_rendezvous *r, const qd_comm_join *join, bool *over);

#endif
