/* Runners of extra dispatch rounds: rows that exceed the capacity of a rank's experts repeat the
 * same exchanges and GEMMs, in buffers that every round reuses. No results are kept: the backward
 * pass sends the rows a second time. */
#include "nn/nn_impl.h"
#include "spec/layout/experts.h"

/* State common to both directions. */
typedef struct rounds {
    const qd_op_call *call;
    const int32_t *table; /* device address; dispatch.table is in host memory */
    qd_dispatch dispatch;
    qd_round_room room;
    char *base;
    qd_dtype dtype, param;
    int64_t hidden, ffn, count; /* number of rounds */
} rounds;

static qd_status rounds_of(const qd_op_call *c, int table, int down, int room, bool backward, rounds *out)
{
    const int32_t *counts;
    QD_TRY(qd_host_counts(c, table, &counts));
    const qd_mesh *mesh = &c->frame->program->ledger->mesh;
    int etp = mesh->etp > 1 ? mesh->etp : 1, ep = qd_expert_ranks(mesh) / etp;
    rounds r = {.call = c, .table = c->at[table], .base = c->at[room], .dtype = call_dtype(c, room), .param = call_dtype(c, down),
                .hidden = c->op->n, .ffn = call_stride(c, down)};
    r.dispatch = (qd_dispatch){.table = counts, .ep = ep, .etp = etp, .position = c->op->expert / c->op->experts * etp,
                               .experts = call_model(c)->moe.experts, .capacity = c->op->m};
    r.room = qd_round_room_of(c->op->m, r.hidden, r.ffn, c->op->k, backward);
    r.count = qd_dispatch_rounds(&r.dispatch);
    *out = r;
    return QD_OK;
}

static void *at(const rounds *r, int64_t element)
{
    return r->base + element * (int64_t)qd_dtype_size(r->dtype);
}

static qd_status exchange(const rounds *r, int64_t round, bool back, const void *from, void *to)
{
    const qd_exchange *e = r->call->frame->exchange;
    if (!e)
        return QD_FAIL(QD_SYSTEM, "no ranks to communicate with");
    return e->round(e->context, r->call->op, round, back, r->dispatch.table, from, to);
}

static qd_status product(const rounds *r, int64_t round, const void *a, void *b, void *c, int64_t n, int64_t k, bool trans_b,
                         bool by_experts, qd_dtype b_dtype)
{
    const qd_op *op = r->call->op;
    return r->call->frame->kernels->grouped(r->call->frame->stream, &(qd_grouped_args){
        .a = a, .b = b, .c = c, .counts = r->table + op->expert, .count_stride = r->dispatch.experts, .begin = round * op->m, .rows = op->m,
        .n = n, .k = k, .sources = r->dispatch.ep * r->dispatch.etp, .experts = op->experts, .trans_b = trans_b,
        .by_experts = by_experts, .accumulate = by_experts,
        .a_dtype = r->dtype, .b_dtype = b_dtype, .c_dtype = r->dtype,
    });
}

static qd_status bias(const rounds *r, int64_t round, void *x, int64_t width, int operand, bool grad)
{
    const qd_op *op = r->call->op;
    qd_grouped_bias_args rows = {.x = x, .width = width, .dtype = r->dtype, .counts = r->table + op->expert,
                                 .count_stride = r->dispatch.experts, .begin = round * op->m, .sources = r->dispatch.ep * r->dispatch.etp};
    return qd_round_bias(r->call, rows, operand, grad);
}

/* Receives the rows of a round and computes gate and up. */
static qd_status bring(const rounds *r, int64_t round, const void *sorted, void *up_w, int up_bias)
{
    QD_TRY(exchange(r, round, false, sorted, at(r, r->room.in)));
    QD_TRY(product(r, round, at(r, r->room.in), up_w, at(r, r->room.up), 2 * r->ffn, r->hidden, true, false, r->param));
    return bias(r, round, at(r, r->room.up), 2 * r->ffn, up_bias, false);
}

/* The activation of a round. */
static qd_activation_args active(const rounds *r, int64_t round)
{
    qd_activation_args a = call_activation(r->call, qd_dispatch_rows(&r->dispatch, round), r->ffn, r->dtype);
    a.x = at(r, r->room.up);
    a.y = at(r, r->room.active);
    return a;
}

qd_status qd_run_expert_rounds(const qd_op_call *c)
{
    rounds r;
    QD_TRY(rounds_of(c, QD_EXPERT_ROUNDS_TABLE, QD_EXPERT_ROUNDS_DOWN, QD_EXPERT_ROUNDS_ROOM, false, &r));
    const qd_kernels *k = c->frame->kernels;
    for (int64_t t = 1; t < r.count; t++) {
        QD_TRY(bring(&r, t, c->at[QD_EXPERT_ROUNDS_X], c->at[QD_EXPERT_ROUNDS_GATE_UP], QD_EXPERT_ROUNDS_UP_BIAS));
        qd_activation_args a = active(&r, t);
        QD_TRY(k->activation_forward(c->frame->stream, &a));
        QD_TRY(product(&r, t, at(&r, r.room.active), c->at[QD_EXPERT_ROUNDS_DOWN], at(&r, r.room.out), r.hidden, r.ffn, true, false,
                       r.param));
        QD_TRY(bias(&r, t, at(&r, r.room.out), r.hidden, QD_EXPERT_ROUNDS_DOWN_BIAS, false));
        QD_TRY(exchange(&r, t, true, at(&r, r.room.out), c->at[QD_EXPERT_ROUNDS_Y]));
    }
    return QD_OK;
}

qd_status qd_run_expert_rounds_grad(const qd_op_call *c)
{
    rounds r;
    QD_TRY(rounds_of(c, QD_EXPERT_ROUNDS_GRAD_TABLE, QD_EXPERT_ROUNDS_GRAD_DOWN, QD_EXPERT_ROUNDS_GRAD_ROOM, true, &r));
    const qd_kernels *k = c->frame->kernels;
    const qd_moe *moe = &call_model(c)->moe;
    void *sorted = at(&r, r.room.sorted), *d_out = at(&r, r.room.out), *d_active = at(&r, r.room.d_active), *d_up = at(&r, r.room.d_up);
    if (r.count > 1)
        QD_TRY(k->permute(c->frame->stream, &(qd_permute_args){
            .x = c->at[QD_EXPERT_ROUNDS_GRAD_X], .from = c->at[QD_EXPERT_ROUNDS_GRAD_FROM],
            .count = c->at[QD_EXPERT_ROUNDS_GRAD_COUNT], .y = sorted, .rows = c->op->k / moe->per_token, .cols = r.hidden,
            .per_token = moe->per_token, .experts = moe->experts, .dtype = r.dtype}));
    for (int64_t t = 1; t < r.count; t++) {
        QD_TRY(bring(&r, t, sorted, c->at[QD_EXPERT_ROUNDS_GRAD_GATE_UP], QD_EXPERT_ROUNDS_GRAD_UP_BIAS));
        QD_TRY(exchange(&r, t, false, c->at[QD_EXPERT_ROUNDS_GRAD_DY], d_out));
        QD_TRY(product(&r, t, d_out, c->at[QD_EXPERT_ROUNDS_GRAD_DOWN], d_active, r.ffn, r.hidden, false, false, r.param));
        qd_activation_args a = active(&r, t);
        a.dy = d_active;
        a.dx = d_up;
        QD_TRY(k->activation_backward(c->frame->stream, &a));
        QD_TRY(bias(&r, t, d_out, r.hidden, QD_EXPERT_ROUNDS_GRAD_DOWN_BIAS_GRAD, true));
        QD_TRY(bias(&r, t, d_up, 2 * r.ffn, QD_EXPERT_ROUNDS_GRAD_UP_BIAS_GRAD, true));
        if (c->at[QD_EXPERT_ROUNDS_GRAD_GATE_UP_GRAD]) {
            QD_TRY(product(&r, t, at(&r, r.room.active), c->at[QD_EXPERT_ROUNDS_GRAD_DOWN_GRAD], d_out, r.hidden, r.ffn, false,
                           true, call_dtype(c, QD_EXPERT_ROUNDS_GRAD_DOWN_GRAD)));
            QD_TRY(product(&r, t, at(&r, r.room.in), c->at[QD_EXPERT_ROUNDS_GRAD_GATE_UP_GRAD], d_up, 2 * r.ffn, r.hidden, false,
                           true, call_dtype(c, QD_EXPERT_ROUNDS_GRAD_GATE_UP_GRAD)));
        }
        if (!c->at[QD_EXPERT_ROUNDS_GRAD_DX])
            continue;
        QD_TRY(product(&r, t, d_up, c->at[QD_EXPERT_ROUNDS_GRAD_GATE_UP], d_out, r.hidden, 2 * r.ffn, false, false, r.param));
        QD_TRY(exchange(&r, t, true, d_out, c->at[QD_EXPERT_ROUNDS_GRAD_DX]));
    }
    return QD_OK;
}
