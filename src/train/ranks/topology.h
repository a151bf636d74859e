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

#endif
