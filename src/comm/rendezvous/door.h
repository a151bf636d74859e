/* The port of rank 0, for a run whose ranks may be lost and return: held from its first world to
 * its last, so that no other process can pose as rank 0 there. It accepts connections only while
 * ranks meet, and between meetings if ranks are missing that may return. Those that cannot be let
 * in yet are asked to try again; a second process of a rank is turned away. */
#ifndef QD_COMM_RENDEZVOUS_DOOR_H
#define QD_COMM_RENDEZVOUS_DOOR_H

#include <quadrille/status.h>
#include <stdbool.h>

typedef struct qd_door qd_door;

/* ranks: as many as may meet (WORLD_SIZE). The port is bound by the first meeting. */
qd_status qd_door_create(int ranks, qd_door **door);
/* After the last world. NULL is legal. */
void qd_door_destroy(qd_door *door);

/* How many ranks that are not in the present world are waiting to be let in. */
int qd_door_waiting(const qd_door *door);
/* invited: (ranks) by the numbers with which they were started. The next meeting is of these; the
 * others wait. */
void qd_door_invite(qd_door *door, const bool *invited);
/* There is no further world: those that wait learn how the run has ended. Returns when they have,
 * after at most some seconds. */
void qd_door_say_end(qd_door *door, qd_status status);

#endif
