/* Moves parameters, gradients and the sums of the norm between whole tensors and the parts that
 * ranks own. */
#ifndef QD_PARALLEL_SHARD_H
#define QD_PARALLEL_SHARD_H

#include "parallel/bind.h"

/* The elements of a run of parameters that belong to each rank of a group, in the form that
 * vectored collectives need. Offsets count from the first parameter of the run. */
typedef struct qd_shard_lists qd_shard_lists;

/* GATHER and REDUCE_SCATTER. Collective over the action's group; work as in quadrille/comm.h. */
qd_status qd_shard_gather(qd_bound *bound, const qd_action *action, qd_work **work);
qd_status qd_shard_reduce_scatter(qd_bound *bound, const qd_action *action, qd_work **work);

/* PACK and UNPACK, ordered on the stream. */
qd_status qd_shard_pack(qd_bound *bound, const qd_action *action, qd_stream *stream);
qd_status qd_shard_unpack(qd_bound *bound, const qd_action *action, qd_stream *stream);

void qd_shard_lists_destroy(qd_shard_lists *lists); /* NULL is legal */
#endif
