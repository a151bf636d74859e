/* Where the ranks of a world meet that no launcher has connected: rank 0 listens on one address,
 * the others connect, both sides prove that they know the world's secret, and all exchange what
 * they need to build a transport (addresses, machines). The connections stay open as the world's
 * lifeline: a rank whose process ends is known to all at once.
 *
 * Nothing but this bootstrap uses these connections. They are encrypted and authenticated with keys
 * of their own (see handshake.c), every message has a size limit and every wait a time limit. The
 * listening socket is closed when all ranks are there. */
#ifndef QD_COMM_RENDEZVOUS_RENDEZVOUS_H
#define QD_COMM_RENDEZVOUS_RENDEZVOUS_H

#include <quadrille/comm.h>

#define QD_RENDEZVOUS_BLOB_MOST ((int64_t)256 << 10) /* bytes that one rank may contribute to an exchange */

typedef struct qd_rendezvous qd_rendezvous;

/* Meets all ranks. Collective over the world. QD_USAGE for settings that cannot work; QD_TIMEOUT
 * names the ranks that are missing. Here and in an exchange, QD_SYSTEM: a rank was lost, and the
 * others may meet again; QD_REMOTE: rank 0 has given up, with its message; QD_INTERRUPTED:
 * join->stops says so. NULL in *meeting: the run that was to be joined has ended in order. */
qd_status qd_rendezvous_open(const qd_comm_join *join, qd_rendezvous **meeting);

/* Known after the first exchange: only then is it settled who has come. */
int qd_rendezvous_rank(const qd_rendezvous *meeting);
int qd_rendezvous_size(const qd_rendezvous *meeting);

/* What each rank has given: blob r is bytes[offsets[r], offsets[r + 1]). */
typedef struct qd_rendezvous_table {
    unsigned char *bytes;
    int64_t *offsets; /* (size + 1) */
    int64_t total;    /* the last one */
} qd_rendezvous_table;
/* Gathers the blobs of all ranks; the caller frees the table. Collective, before watch(). */
qd_status qd_rendezvous_exchange(qd_rendezvous *meeting, const void *blob, int64_t bytes, qd_rendezvous_table *table);
void qd_rendezvous_table_free(qd_rendezvous_table *table);

/* The name of the network interface of this rank's connections. */
const char *qd_rendezvous_interface(const qd_rendezvous *meeting);

/* Starts the thread that watches the connections. Not collective. */
qd_status qd_rendezvous_watch(qd_rendezvous *meeting);
/* Whether the process of another rank has ended without leaving; *rank: the first one. */
bool qd_rendezvous_lost(qd_rendezvous *meeting, int *rank);
/* Says, once, that this rank is about to leave. True when all ranks are. */
bool qd_rendezvous_leave(qd_rendezvous *meeting);
/* Not collective; NULL is legal. */
void qd_rendezvous_close(qd_rendezvous *meeting);

#endif
