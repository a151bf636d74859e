/* Checksums of messages. In a world that checks its messages, every rank receives with the data of
 * an operation also the checksums that the senders took of it, and compares them with what has
 * arrived before the operation completes. A damaged message is QD_DIFFERENT and names sender,
 * receiver, operation and place.
 *
 * It covers communicators for host memory on every backend. Sums become an exchange of their parts
 * and a local sum in the same order, so results are bit-identical to those without checksums. */
#ifndef QD_COMM_CHECKED_H
#define QD_COMM_CHECKED_H

#include <quadrille/comm.h>

/* Turns checksums on or off for all communicators of the world of `comm`. Not collective, but all
 * ranks must do it between the same operations, with none in flight. */
void qd_comm_check_messages(qd_comm *comm, bool check);

#endif
