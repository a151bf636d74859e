/* One dispatch round as an uneven all-to-all: computes send and receive counts and counts the
 * bytes. */
#include "parallel/dispatch.h"

#include "spec/layout/nodes.h"

qd_status qd_dispatch_run(qd_dispatcher *r, const qd_bound *b, const qd_op *op, int64_t round, bool back, const int32_t *table,
                          const void *from, void *to, qd_work **work)
{
    const qd_program *p = b->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    qd_comm *group = b->groups[op->exchange.index];
    int ranks = op->exchange.group.size, etp = mesh->etp > 1 ? mesh->etp : 1; /* all ranks of experts, or those of a node */
    qd_dispatch d = {.table = table, .ep = ranks / etp, .etp = etp, .position = qd_comm_rank(group), .experts = ranks / etp * op->experts,
                     .capacity = op->m};
    bool planned = op->kind == QD_OP_RELAY_ROUNDS || op->kind == QD_OP_RELAY_ROUNDS_GRAD; /* the table covers only this round */
    int node = mesh->nodes > 1 ? qd_node_of(mesh, qd_comm_world_rank(group, d.position)) : 0;
    int64_t *send = r->lists, *send_first = send + ranks, *receive = send + 2 * ranks, *receive_first = send + 3 * ranks;
    qd_dispatch_lists(&d, planned ? 0 : round, send, send_first, receive, receive_first);
    for (int q = 0; q < ranks; q++) {
        if (back) /* the results of each rank of etp have their own rows */
            send_first[q] += (int64_t)(q % etp) * op->k;
        int64_t bytes = (back ? receive[q] : send[q]) * op->n * (int64_t)qd_dtype_size(op->exchange.dtype);
        if (q != d.position)
            r->sent += bytes;
        if (mesh->nodes > 1 && qd_node_of(mesh, qd_comm_world_rank(group, q)) != node) {
            r->crossed += bytes;
            r->flat += bytes;
        }
        send[q] *= op->n;
        send_first[q] *= op->n;
        receive[q] *= op->n;
        receive_first[q] *= op->n;
    }
    r->rounds += round > 0;
    if (back)
        return qd_comm_all_to_all_v(group, from, receive, receive_first, to, send, send_first, op->exchange.dtype, work);
    return qd_comm_all_to_all_v(group, from, send, send_first, to, receive, receive_first, op->exchange.dtype, work);
}
