/* The cost of moving bytes between ranks, with the best algorithm for the topology. */
#ifndef QD_SIM_NETWORK_H
#define QD_SIM_NETWORK_H

#include "sim/cluster.h"
#include "spec/layout/mesh.h"

/* The placement of a group of ranks in the cluster; ranks fill nodes (and the dimensions of a
 * torus, the first one fastest) in order. */
typedef struct qd_span {
    int size;
    int local;   /* members per node; torus: per slice */
    int nodes;   /* or slices */
    bool beyond; /* spans several pods */
    int extent[QD_TORUS_DIMS]; /* torus: distinct coordinates along each dimension */
} qd_span;

qd_span qd_span_of_group(const qd_cluster *cluster, const qd_mesh *mesh, qd_group group, int rank);
/* Span of two ranks, for messages. */
qd_span qd_span_of_pair(const qd_cluster *cluster, int rank, int other);

/* Seconds; `bytes` as returned by qd_network_message(). */
double qd_network_seconds(const qd_cluster *cluster, qd_coll_kind kind, double bytes, const qd_span *span);

/* Converts the elements that a step program counts, as qd_coll_bytes() does, to the argument of
 * qd_network_seconds(): for collectives the whole message; for all-to-all what one rank sends,
 * including its own part; for messages one of them. A count of messages covers the whole group
 * (each rank of a ring passes a part on), but a SEND between stages is one message. */
double qd_network_message(qd_coll_kind kind, double elements, qd_dtype dtype, int group_size);

/* Whether it leaves the node. */
static inline bool qd_span_is_remote(const qd_span *span)
{
    return span->nodes > 1;
}
#endif
