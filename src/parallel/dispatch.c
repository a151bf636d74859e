#include "parallel/dispatch.h"

#include "spec/experts.h"

qd_status qd_dispatch_run(qd_dispatcher *r, const qd_bound *b, const qd_op *op, int64_t round, bool back, const int32_t *table,
                          const void *from, void *to, qd_work **work)
{
    const qd_program *p = b->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    qd_comm *group = b->groups[op->exchange.index];
    int ranks = qd_expert_ranks(mesh), etp = mesh->etp > 1 ? mesh->etp : 1;
    qd_dispatch d = {.table = table, .ep = ranks / etp, .etp = etp, .position = qd_comm_rank(group),
                     .experts = p->ledger->model.moe.experts, .capacity = op->m};
    int64_t *send = r->lists, *send_first = send + ranks, *receive = send + 2 * ranks, *receive_first = send + 3 * ranks;
    qd_dispatch_lists(&d, round, send, send_first, receive, receive_first);
    for (int q = 0; q < ranks; q++) {
        if (back) /* what each rank of etp computed has a place of its own */
            send_first[q] += (int64_t)(q % etp) * op->k;
        if (q != d.position)
            r->sent += (back ? receive[q] : send[q]) * op->n * (int64_t)qd_dtype_size(op->exchange.dtype);
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
