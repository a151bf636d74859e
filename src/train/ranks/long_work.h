/* Work of unlimited duration for which other ranks wait. */
#ifndef QD_TRAIN_RANKS_LONG_WORK_H
#define QD_TRAIN_RANKS_LONG_WORK_H

#include <quadrille/comm.h>

typedef qd_status (*qd_long_work)(void *context);

/* Collective over `comm`. Rank 0 runs `work` in a thread of its own while all ranks communicate a
 * few times per second, so that no deadline passes and a rank that dies is noticed. Returns the
 * status of the work on rank 0, QD_OK on the others; failed communication is returned on all. */
qd_status qd_long_work_run(qd_comm *comm, qd_long_work work, void *context);

/* The same for work that every rank does and that takes longer on some, such as reading a
 * checkpoint. Returns when all have finished, each with its own status. The work must not
 * communicate over `comm`. */
qd_status qd_long_work_run_all(qd_comm *comm, qd_long_work work, void *context);
#endif
