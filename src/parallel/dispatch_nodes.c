/* The exchanges of two-level dispatch: rows that cross to another node, once each, and the returned
 * rows. */
#include "parallel/dispatch.h"

#include "spec/layout/nodes.h"

/* One exchange of `cols` elements per row; counts its bytes. */
static qd_status exchange(qd_dispatcher *r, qd_comm *group, const qd_nodes *n, bool back, const void *from, void *to, int64_t cols,
                          qd_dtype dtype, qd_work **work)
{
    int64_t *send = r->lists, *send_first = send + n->nodes, *receive = send + 2 * n->nodes, *receive_first = send + 3 * n->nodes;
    qd_nodes_lists(n, send, send_first, receive, receive_first);
    for (int node = 0; node < n->nodes; node++) {
        int64_t bytes = (back ? receive[node] : send[node]) * cols * (int64_t)qd_dtype_size(dtype);
        if (node != n->position / n->locals) {
            r->sent += bytes;
            r->crossed += bytes;
        }
        send[node] *= cols;
        send_first[node] *= cols;
        receive[node] *= cols;
        receive_first[node] *= cols;
    }
    if (back)
        return qd_comm_all_to_all_v(group, from, receive, receive_first, to, send, send_first, dtype, work);
    return qd_comm_all_to_all_v(group, from, send, send_first, to, receive, receive_first, dtype, work);
}

qd_status qd_dispatch_nodes(qd_dispatcher *r, const qd_bound *b, const qd_op *op, const int32_t *table, void *const *at, qd_work **work)
{
    const qd_ledger *l = b->program->ledger;
    qd_comm *group = b->groups[op->exchange.index];
    bool again = op->kind == QD_OP_NODE_RESEND, back = op->kind == QD_OP_NODE_RETURN;
    int position = qd_group_coord(&l->mesh, qd_expert_group(&l->mesh), b->program->rank);
    qd_nodes n = qd_nodes_of(&l->model, &l->mesh, position, 0, 0, table);
    if (again)
        return exchange(r, group, &n, false, at[QD_NODE_RESEND_COPIES], at[QD_NODE_RESEND_RELAYED], op->n, op->exchange.dtype, NULL);
    int64_t flat = qd_nodes_far(&n) * n.etp * op->n * (int64_t)qd_dtype_size(op->exchange.dtype);
    /* A dispatch that full recompute repeats: flat dispatch would repeat its return too, which the
     * sums by node avoid. Each of the two runs counts half of that. */
    r->flat += op->again ? flat + flat / 2 : flat;
    QD_TRY(exchange(r, group, &n, back, at[QD_NODE_DISPATCH_X], at[QD_NODE_DISPATCH_Y], op->n, op->exchange.dtype, work));
    if (op->k == 0)
        return QD_OK;
    return exchange(r, group, &n, back, at[QD_NODE_DISPATCH_NUMBERS], at[QD_NODE_DISPATCH_NUMBERS_OUT], op->k, QD_I32,
                    work ? work + 1 : NULL);
}
