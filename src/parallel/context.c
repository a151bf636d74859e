/* Exchanges of context parallelism on the bound communicators: ring shifts and the all-to-all of
 * Ulysses. */
#include "parallel/context.h"

qd_segment_list qd_context_segments(const qd_program *p, int coord, int64_t cols, qd_segment *segments)
{
    int own, cp = qd_program_cp(p, &own);
    qd_row_run runs[QD_CONTEXT_RUNS];
    int count = qd_context_runs(p->strategy.seq, cp, coord, runs), used = 0;
    for (int64_t b = 0; b < p->strategy.micro_batch; b++)
        for (int i = 0; i < count; i++)
            segments[used++] = (qd_segment){(b * p->strategy.seq + runs[i].position) * cols, runs[i].count * cols};
    return (qd_segment_list){segments, used};
}

/* Elements of the rows that rank `coord` of cp holds. */
static int64_t held(const qd_program *p, int coord, int64_t cols)
{
    int own, cp = qd_program_cp(p, &own);
    return p->strategy.micro_batch * qd_context_rows(p->strategy.seq, cp, coord) * cols;
}

/* In round t, a rank holds the rows that started at the rank t positions before it. They go to the
 * rank that needs them next. */
qd_status qd_context_shift(qd_bound *bound, const qd_op *op, void *const *at, qd_work *works[2])
{
    const qd_program *p = bound->program;
    qd_comm *group = bound->groups[op->exchange.index];
    int n = qd_comm_size(group), rank = qd_comm_rank(group), of = (rank + n - op->round) % n, hop = op->hop;
    QD_TRY(qd_comm_send(group, at[QD_CONTEXT_SHIFT_X], held(p, of, op->n), op->exchange.dtype, (rank + hop) % n, &works[0]));
    return qd_comm_recv(group, at[QD_CONTEXT_SHIFT_Y], held(p, (of + n - hop) % n, op->n), op->exchange.dtype, (rank + n - hop) % n,
                        &works[1]);
}

/* Rows for heads (round 1): each rank receives all of this rank's rows and sends all of its own.
 * Back (round 0): the reverse. */
qd_status qd_context_swap(qd_bound *bound, const qd_op *op, void *const *at, qd_work **work)
{
    enum { RANKS = 1024 };
    const qd_program *p = bound->program;
    qd_comm *group = bound->groups[op->exchange.index];
    int n = qd_comm_size(group), rank = qd_comm_rank(group);
    int64_t own[RANKS], own_at[RANKS], others[RANKS], others_at[RANKS], next = 0;
    if (n > RANKS)
        return QD_FAIL(QD_UNSUPPORTED, "parallel.cp_mode ulysses takes up to %d ranks of cp, not %d", RANKS, n);
    for (int r = 0; r < n; r++) {
        own[r] = held(p, rank, op->n);
        own_at[r] = r * own[r];
        others[r] = held(p, r, op->n);
        others_at[r] = next;
        next += others[r];
    }
    void *x = at[QD_CONTEXT_SWAP_X], *y = at[QD_CONTEXT_SWAP_Y];
    return op->round ? qd_comm_all_to_all_v(group, x, own, own_at, y, others, others_at, op->exchange.dtype, work)
                     : qd_comm_all_to_all_v(group, x, others, others_at, y, own, own_at, op->exchange.dtype, work);
}
