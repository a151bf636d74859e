/* Shared memory that an MPI library leaves behind when its launcher is killed.
 *
 * Open MPI keeps a file per rank in /dev/shm and removes it when the rank leaves in order. When
 * mpirun dies it ends the ranks on the spot, and the files stay and take memory. So a run writes
 * their names into its folder, and the next start in that folder, which holds the lock and so knows
 * that the run is dead, removes them. Files of other programs are never touched. */
#ifndef QD_TRAIN_RUN_LEFTOVERS_H
#define QD_TRAIN_RUN_LEFTOVERS_H

#include <quadrille/comm.h>

#define QD_LEFTOVERS_FILE "shared-memory.json"

/* Collective over `comm`. Rank 0 writes `path`, unless no rank has such memory. */
qd_status qd_leftovers_note(qd_comm *comm, const char *path);
/* One process: removes what the file at `path` names on this machine, and the file. remark (of
 * `size` bytes) becomes "", or says what is left and where. A file that is missing or makes no
 * sense is nothing to do. */
void qd_leftovers_clear(const char *path, char *remark, size_t size);

#endif
