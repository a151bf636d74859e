/* Dispatch of rows to the ranks of their experts and back: uneven all-to-alls, in rounds of a
 * planned size. */
#ifndef QD_PARALLEL_DISPATCH_H
#define QD_PARALLEL_DISPATCH_H

#include "parallel/bind.h"

typedef struct qd_dispatcher {
    int64_t *lists;    /* space for four lists with one entry per rank of the largest group */
    int64_t sent;      /* bytes that this rank has sent to others so far */
    int64_t crossed;   /* of these: to other nodes */
    int64_t flat;      /* bytes that flat dispatch would have sent to other nodes, all rows in one round */
    int64_t rounds;    /* extra dispatch rounds so far */
} qd_dispatcher;

/* One round of an op DISPATCH or RETURN. `back`: from the ranks of experts. from, to: rows, laid
 * out as in the op's slots. Collective over the op's group; work as in quadrille/comm.h. table: in
 * host memory. */
qd_status qd_dispatch_run(qd_dispatcher *dispatcher, const qd_bound *bound, const qd_op *op, int64_t round, bool back, const int32_t *table,
                          const void *from, void *to, qd_work **work);

/* dispatch_nodes.c: an op NODE_DISPATCH, NODE_RETURN or NODE_RESEND. table: in host memory; at:
 * addresses of its slots. Collective over the op's group. work: NULL, or space for two. */
qd_status qd_dispatch_nodes(qd_dispatcher *dispatcher, const qd_bound *bound, const qd_op *op, const int32_t *table, void *const *at,
                            qd_work **work);
#endif
