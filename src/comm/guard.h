/* Ranks that no launcher of ours supervises watch each other: each one the next of its machine. A
 * rank that was killed, crashed, or stays stopped by a signal is named at once, with its place and
 * last operation, instead of after the deadline. What the watching rank knows comes from the kernel
 * (/proc), so ranks that are slow but alive (page faults, a busy machine) are never suspected; a
 * rank that a debugger holds, and a suspended job, do not count as stopped. */
#ifndef QD_COMM_GUARD_H
#define QD_COMM_GUARD_H

#include <quadrille/comm.h>

/* Starts watching, until the last communicator of the world is destroyed. Collective over the
 * world. A rank that is alone on its machine, or shares no process ids with the others there
 * (containers), is not watched. patience: see below. tell: called from the watching thread when the
 * watched rank is lost, after the operations of this rank have been ended; may be NULL. */
typedef void (*qd_guard_tell)(void *context, const char *message);
qd_status qd_comm_guard_start(qd_comm *world, double patience, qd_guard_tell tell, void *context);

/* The ranks that are left of this world continue in another one: its end waits for none of them.
 * Not collective. */
void qd_comm_forsake(qd_comm *world);

/* Whether this rank has found that the one it watches is lost. Not collective. */
bool qd_comm_guard_found(const qd_comm *world);
/* Why the world has failed, in the words of the rank that found out; "": it has not. Not
 * collective. */
const char *qd_comm_failure(const qd_comm *world);

/* How long a rank may be stopped, in seconds. Not collective; nothing without a guard. */
void qd_comm_guard_patience(qd_comm *world, double seconds);

#endif
