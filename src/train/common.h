/* What the ranks of a run agree on and must have in common, also where they lie on several machines. */
#ifndef QD_TRAIN_COMMON_H
#define QD_TRAIN_COMMON_H

#include "data/data.h"

#include <quadrille/comm.h>

/* The part of `path` that exists: itself, a folder above it, or ".". path: of PATH_MAX bytes, shortened in place. */
qd_status qd_path_existing(char *path);

/* Collective. QD_OK, or the status of the lowest rank that failed, which keeps its message: it is told once, and all processes end
 * with the same exit status. *agreed: all ranks know of the failure and return, so that no alarm is needed. */
qd_status qd_agree(qd_comm *comm, qd_status mine, bool *agreed);

/* Both end in qd_agree().
 *
 * QD_USAGE when a rank does not see the folder of rank 0, or the one in which it will be made. Leaves nothing there. */
qd_status qd_common_folder(qd_comm *comm, const char *folder, bool *agreed);
/* QD_USAGE when a rank reads other data than rank 0: another number of windows, or other tokens in a sample of them. */
qd_status qd_common_data(qd_comm *comm, qd_data *data, int64_t seq, bool *agreed);
#endif
