/* What moving bytes between ranks costs, by the topology and the algorithm that suits it best. */
#ifndef QD_SIM_NETWORK_H
#define QD_SIM_NETWORK_H

#include "sim/cluster.h"
#include "spec/layout/mesh.h"

/* How a group of ranks lies in the cluster; ranks fill nodes (and the dimensions of a torus, the
 * first one fastest) in order. */
typedef struct qd_span {
    int size;
    int local;   /* of them in one node; torus: in one slice */
    int nodes;   /* or slices */
    bool beyond; /* further apart than a pod */
    int extent[QD_TORUS_DIMS]; /* torus: different coordinates along each dimension */
} qd_span;

qd_span qd_span_of_group(const qd_cluster *cluster, const qd_mesh *mesh, qd_group group, int rank);
/* Of two ranks, for messages. */
qd_span qd_span_of_pair(const qd_cluster *cluster, int rank, int other);

/* Seconds. `bytes` as qd_network_message() gives them. */
double qd_network_seconds(const qd_cluster *cluster, qd_coll_kind kind, double bytes, const qd_span *span);

/* From the elements that a step program counts, as qd_coll_bytes() does, to what
 * qd_network_seconds() takes: of collectives the whole message; all-to-all: what one rank sends,
 * its own part included; messages: one of them. A count of messages is that of the whole group
 * (each rank of a ring passes a part on), but a SEND between stages is one message. */
double qd_network_message(qd_coll_kind kind, double elements, qd_dtype dtype, int group_size);

/* Does it leave the node? */
static inline bool qd_span_is_remote(const qd_span *span)
{
    return span->nodes > 1;
}
#endif
