/* Internal to src/comm/rendezvous: the state of a meeting, and sockets with time limits. */
#ifndef QD_COMM_RENDEZVOUS_MEETING_H
#define QD_COMM_RENDEZVOUS_MEETING_H

#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/rendezvous.h"

#include <net/if.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

/* Connections to rank 0 that have not proved anything yet. */
enum { STRANGERS_MOST = 128 };

/* The connection to another rank. */
typedef struct qd_peer {
    int fd; /* -1: none */
    qd_channel channel;
    bool left; /* it has said that it leaves */
} qd_peer;

struct qd_rendezvous {
    int rank, size;
    unsigned char key[QD_KEY_BYTES];
    bool keyed; /* there is a secret */
    double seconds;
    char where[128]; /* "10.0.0.1 port 29500": where rank 0 is */
    char interface[IF_NAMESIZE];
    qd_peer *peers; /* (size) rank 0: of all others; others: entry 0 alone */
    pthread_t watcher;
    bool watching;
    int kick; /* eventfd: this rank leaves or closes */
    atomic_bool leaving, closing, all_left;
    atomic_int lost; /* 1 + rank, or 0 */
};

/* Reads or writes all bytes until `end` (qd_clock_now()). False on failure: *why. */
bool qd_socket_read(int fd, void *data, size_t bytes, double end, const char **why);
bool qd_socket_write(int fd, const void *data, size_t bytes, double end, const char **why);
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

/* rendezvous.c: rank 0 tells a rank why it has given up: `status`, with the present message. */
void qd_rendezvous_refuse(qd_peer *peer, qd_status status, double seconds);
/* rendezvous.c: QD_USAGE for an address that is not a loopback one, without a secret. */
qd_status qd_rendezvous_unprotected(const qd_comm_join *join);

/* listen.c: rank 0 waits for the others. connect.c: another rank finds rank 0. */
qd_status qd_rendezvous_listen(qd_rendezvous *r, const qd_comm_join *join);
qd_status qd_rendezvous_connect(qd_rendezvous *r, const qd_comm_join *join);

#endif
