/* Shared memory that an MPI library leaves behind when its launcher is killed.
 *
 * Open MPI keeps a file per rank in /dev/shm and removes it when the rank exits normally. When
 * mpirun dies it kills the ranks, and the files stay and occupy memory. So a run writes their names
 * into its folder, and the next start in that folder, which holds the lock and therefore knows that
 * the run is dead, removes them. Files of other programs are never touched. */
#ifndef QD_TRAIN_RANKS_LEFTOVERS_H
#define QD_TRAIN_RANKS_LEFTOVERS_H

#include <quadrille/comm.h>

#define QD_LEFTOVERS_FILE "shared-memory.json"

/* Collective over `comm`. Rank 0 writes `path`, unless no rank has such memory. */
qd_status qd_leftovers_note(qd_comm *comm, const char *path);
/* One process: removes what the file at `path` lists for this machine, and the file. warning (of
 * `size` bytes) becomes "", or names what is left and where. A missing or unreadable list is
 * ignored. */
void qd_leftovers_clear(const char *path, char *warning, size_t size);

#endif
