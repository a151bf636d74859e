/* Agreement between the ranks of a run, also on several machines: status, program, configuration,
 * run folder and data. */
#ifndef QD_TRAIN_RANKS_COMMON_H
#define QD_TRAIN_RANKS_COMMON_H

#include "data/data.h"

#include <quadrille/comm.h>
#include <quadrille/options.h>

/* Shortens `path` (PATH_MAX bytes) in place to its deepest part that exists: itself, a parent
 * folder, or ".". */
qd_status qd_path_existing(char *path);

/* Collective. QD_OK, or the status of the lowest rank that failed, which keeps its message: it is
 * printed once, and all processes exit with the same status. *agreed: all ranks know of the failure
 * and return, so no abort is needed. */
qd_status qd_agree(qd_comm *comm, qd_status mine, bool *agreed);

/* Like qd_agree(), for failures that concern one machine only: the message of a rank other than 0
 * names the rank. */
qd_status qd_agree_alone(qd_comm *comm, qd_status mine, bool *agreed);

/* These end in qd_agree().
 *
 * QD_USAGE when a rank runs another program than rank `root`, or was given another configuration:
 * the first key that differs is named. Paths (data.path and so on) and the number of threads may
 * differ. rejoins: so may run.resume and run.overwrite, because some ranks may be in the middle of
 * the run that others begin. */
qd_status qd_common_setup(qd_comm *comm, const qd_options *options, bool rejoins, int root, bool *agreed);
/* Not collective. Whether the rank may have another value of this "key=value". */
bool qd_common_may_differ(const char *entry);
/* QD_USAGE when a rank does not see rank 0's folder, or the one in which it will be created. Leaves
 * nothing there. */
qd_status qd_common_folder(qd_comm *comm, const char *folder, bool *agreed);
/* QD_USAGE when a rank reads other data than rank 0: another number of windows, or other tokens in
 * a sample of them. key: the option that names the data. */
qd_status qd_common_data(qd_comm *comm, const char *key, qd_data *data, int64_t seq, bool *agreed);

/* Not collective. The ranks of each machine, "alpha 0 to 3, beta 4 to 7"; "" on one machine, or if
 * it does not fit. */
void qd_common_hosts(const qd_comm *comm, char *text, size_t bytes);
#endif
