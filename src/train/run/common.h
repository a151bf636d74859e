/* What the ranks of a run agree on and must have in common, also where they lie on several
 * machines. */
#ifndef QD_TRAIN_RUN_COMMON_H
#define QD_TRAIN_RUN_COMMON_H

#include "data/data.h"

#include <quadrille/comm.h>
#include <quadrille/options.h>

/* The part of `path` that exists: itself, a folder above it, or ".". path: of PATH_MAX bytes,
 * shortened in place. */
qd_status qd_path_existing(char *path);

/* Collective. QD_OK, or the status of the lowest rank that failed, which keeps its message: it is
 * told once, and all processes end with the same exit status. *agreed: all ranks know of the
 * failure and return, so that no alarm is needed. */
qd_status qd_agree(qd_comm *comm, qd_status mine, bool *agreed);

/* Like qd_agree(), for what may be wrong on one machine alone: the message of another than rank 0
 * says whose it is. */
qd_status qd_agree_alone(qd_comm *comm, qd_status mine, bool *agreed);

/* These end in qd_agree().
 *
 * QD_USAGE when a rank runs another program than rank 0, or was given another configuration: the
 * first key that differs is named. Where a rank finds the same things (data.path and so on) and how
 * many threads it uses may differ. */
qd_status qd_common_setup(qd_comm *comm, const qd_options *options, bool *agreed);
/* QD_USAGE when a rank does not see the folder of rank 0, or the one in which it will be made.
 * Leaves nothing there. */
qd_status qd_common_folder(qd_comm *comm, const char *folder, bool *agreed);
/* QD_USAGE when a rank reads other data than rank 0: another number of windows, or other tokens in
 * a sample of them. */
qd_status qd_common_data(qd_comm *comm, qd_data *data, int64_t seq, bool *agreed);

/* Not collective. Which ranks lie on which machine, "alpha 0 to 3, beta 4 to 7"; "" on one machine,
 * and where it does not fit. */
void qd_common_hosts(const qd_comm *comm, char *text, size_t bytes);
#endif
