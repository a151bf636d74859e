/* Trace of a run: one event per action, named by the program, so that measured and simulated
 * timelines can be compared. */
#ifndef QD_TRAIN_EXEC_TRACE_H
#define QD_TRAIN_EXEC_TRACE_H

#include "spec/program/program.h"

#include <quadrille/comm.h>

typedef struct qd_trace qd_trace;

/* Collective over `world`. If it spans several machines, each rank measures the offset of its clock
 * from rank 0's, so that the file has one time base, to within half of a message's round trip.
 * Create it just before what is traced: clocks drift. */
qd_status qd_trace_create(qd_comm *world, qd_trace **trace);
void qd_trace_destroy(qd_trace *trace);

/* Times as qd_clock_now(), which all processes of a machine share. Memory grows as needed; when
 * allocation fails, later events are dropped and counted. A NULL trace is legal and does nothing.
 * Not thread-safe: one thread per rank. */
void qd_trace_add(qd_trace *trace, int64_t step, int action, double begin, double end);

/* The same for an exchange inside a module: `op` of the action's list; the rank waited for its end
 * from `waited` on. */
void qd_trace_add_exchange(qd_trace *trace, int64_t step, int action, int op, double begin, double end, double waited);

/* Collective over `world`: rank 0 writes one Chrome/Perfetto JSON file with a process per rank and
 * a track each for compute and communication. Events carry step, module, micro-batch, bytes and
 * FLOPs. */
qd_status qd_trace_write(const qd_trace *trace, const qd_program *program, qd_comm *world, const char *path);
#endif
