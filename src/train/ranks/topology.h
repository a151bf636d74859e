/* NUMA nodes of a machine, and where its ranks run. A rank whose threads stay on one node allocates
 * its buffers there, since memory belongs to the node that touches it first. */
#ifndef QD_TRAIN_RANKS_TOPOLOGY_H
#define QD_TRAIN_RANKS_TOPOLOGY_H

#include "base/thread.h"

#include <stdbool.h>

enum { QD_TOPOLOGY_NODES = 64 };

/* The nodes that have cores, in the order of their numbers. */
typedef struct qd_topology {
    int nodes;
    qd_cores_set cores[QD_TOPOLOGY_NODES];
} qd_topology;

#define QD_TOPOLOGY_FOLDER "/sys/devices/system/node"

/* Reads `folder`, which has node0/cpulist, node1/cpulist … as the kernel writes them. One that
 * cannot be read has no nodes. */
void qd_topology_read(const char *folder, qd_topology *topology);

/* The cores of rank `rank` of `ranks` on this machine that share the cores `allowed`: those of one
 * node, where neighbouring ranks share a node. False if all should stay allowed: there is one node,
 * there are fewer ranks than nodes, or a node has fewer cores for each of its ranks than the
 * machine. */
bool qd_topology_place(const qd_topology *topology, const qd_cores_set *allowed, int rank, int ranks, qd_cores_set *cores);

/* Binds the calling thread, and threads that it starts later, to the cores of such a node, if there
 * is one and nothing else has bound the thread. `before` is then what it was bound to; else it is
 * empty. */
qd_status qd_topology_bind(const char *folder, int rank, int ranks, qd_cores_set *before);
/* Undoes it, so that a thread that becomes another rank chooses among all cores again. */
void qd_topology_release(const qd_cores_set *before);

/* Compute threads of a rank that may use `allowed` of the `cores` of its machine, which has `ranks`
 * ranks. together: one launcher started them, so they share what is allowed; mpirun and srun may
 * have bound each rank to cores of its own. */
int qd_topology_threads(int cores, int allowed, int ranks, bool together);

#endif
