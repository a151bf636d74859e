/* Runners of two-level dispatch (spec/layout/nodes.h): lists of destinations, and extra rounds
 * inside a node. The host computes the rows of each round from the gathered table of counts and
 * copies them to the device; kernels build the lists. */
#include "nn/nn_impl.h"
#include "spec/layout/nodes.h"

#include <string.h>

/* The dispatch of an op on relayed rows. op->m: capacity of a rank of experts, op->k: capacity of a
 * relay, op->first: upper bound of its rows. i: the operand with the table. */
static qd_status nodes_of(const qd_op_call *c, int i, qd_nodes *nodes)
{
    const qd_program *p = c->frame->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    const int32_t *table;
    QD_TRY(qd_host_counts(c, i, &table));
    *nodes = qd_nodes_of(&p->ledger->model, mesh, qd_group_coord(mesh, qd_expert_group(mesh), p->rank), c->op->k, c->op->m, table);
    return QD_OK;
}

/* The host side of `count` numbers on the device. */
static qd_status host_side(const qd_op_call *c, int32_t *table, int64_t count, int32_t **host)
{
    const qd_exchange *e = c->frame->exchange;
    if (!e)
        return QD_FAIL(QD_SYSTEM, "no ranks to communicate with");
    return e->compose(e->context, table, count, host);
}

/* On the row's own rank. */

qd_status qd_run_node_plan(const qd_op_call *c)
{
    const qd_moe *moe = &call_model(c)->moe;
    return c->frame->kernels->node_plan(c->frame->stream, &(qd_node_plan_args){
        .choice = c->at[QD_NODE_PLAN_CHOICE], .weight = c->at[QD_NODE_PLAN_WEIGHT], .kept = c->at[QD_NODE_PLAN_PLACE],
        .count = c->at[QD_NODE_PLAN_COUNT], .place = c->at[QD_NODE_PLAN_COPY_PLACE], .from = c->at[QD_NODE_PLAN_COPY_FROM],
        .copies = c->at[QD_NODE_PLAN_NODE_COUNT], .chosen = c->at[QD_NODE_PLAN_CHOSEN], .counts = c->at[QD_NODE_PLAN_COUNTS],
        .rows = c->op->m, .experts = moe->experts, .nodes = (int)c->op->n, .per_token = moe->per_token});
}

/* The gradient of each choice's weight returns with the copy that was sent to its node. */
qd_status qd_run_node_weights(const qd_op_call *c)
{
    const qd_moe *moe = &call_model(c)->moe;
    return c->frame->kernels->node_weights(c->frame->stream, &(qd_node_weights_args){
        .choice = c->at[QD_NODE_WEIGHTS_CHOICE], .kept = c->at[QD_NODE_WEIGHTS_PLACE], .place = c->at[QD_NODE_WEIGHTS_COPY_PLACE],
        .copies = c->at[QD_NODE_WEIGHTS_COPY_D_WEIGHT], .d_weight = c->at[QD_NODE_WEIGHTS_D_WEIGHT], .rows = c->op->m,
        .experts = moe->experts, .nodes = (int)c->op->n, .per_token = moe->per_token});
}

qd_status qd_run_node_resend(const qd_op_call *c)
{
    const qd_slot *from = &c->slots[c->op->slot[QD_NODE_RESEND_COPY_FROM]], *lists = &c->slots[c->op->slot[QD_NODE_RESEND_LISTS]];
    qd_nodes n;
    int32_t *room;
    QD_TRY(nodes_of(c, QD_NODE_RESEND_TABLE, &n));
    QD_TRY(host_side(c, c->at[QD_NODE_RESEND_LISTS], 2 * lists->cols, &room));
    int64_t rows = from->cols / n.nodes;
    if (!qd_relay_further(&n, room, room + lists->cols))
        return QD_OK;
    QD_TRY(c->frame->kernels->permute(c->frame->stream, &(qd_permute_args){
        .x = c->at[QD_NODE_RESEND_X], .from = c->at[QD_NODE_RESEND_COPY_FROM], .count = c->at[QD_NODE_RESEND_NODE_COUNT],
        .y = c->at[QD_NODE_RESEND_COPIES], .rows = rows, .cols = c->op->n, .per_token = n.nodes,
        .experts = n.nodes, .dtype = call_dtype(c, QD_NODE_RESEND_X)}));
    return c->frame->exchange->start(c->frame->exchange->context, c->index, c->op, c->slots, c->at);
}

/* On the relay. */

/* Copies a round that the host has computed to the device, and builds the lists of places there.
 * taken, rows (locals, experts of a node): on the device. */
static qd_status plan_round(const qd_op_call *c, const qd_nodes *n, const int32_t *chosen, int32_t *taken, int32_t *rows, int32_t *place,
                            int32_t *from, int32_t *count, float *weight)
{
    const qd_exchange *e = c->frame->exchange;
    int experts = qd_nodes_experts(n);
    int64_t own = (int64_t)(n->position % n->locals) * experts;
    QD_TRY(e->tell(e->context, taken));
    QD_TRY(e->tell(e->context, rows));
    return c->frame->kernels->relay_plan(c->frame->stream, &(qd_relay_plan_args){
        .chosen = chosen, .taken = taken + own, .take = rows + own, .place = place, .from = from, .count = count, .weight = weight,
        .rows = c->op->first, .relayed = qd_nodes_relayed(n), .experts = experts, .per_token = n->per_token});
}

/* Computes the first round into the host side of taken and rows. */
static qd_status first_round(const qd_op_call *c, const qd_nodes *n, int32_t *taken, int32_t *rows, int32_t **host_taken,
                             int32_t **host_rows)
{
    int64_t count = (int64_t)n->locals * qd_nodes_experts(n);
    QD_TRY(host_side(c, taken, count, host_taken));
    QD_TRY(host_side(c, rows, count, host_rows));
    memset(*host_taken, 0, (size_t)count * sizeof **host_taken);
    memset(*host_rows, 0, (size_t)count * sizeof **host_rows);
    qd_relay_next(n, n->position / n->locals, *host_taken, *host_rows);
    return QD_OK;
}

qd_status qd_run_relay_plan(const qd_op_call *c)
{
    qd_nodes n;
    int32_t *taken, *rows;
    QD_TRY(nodes_of(c, QD_RELAY_PLAN_TABLE, &n));
    QD_TRY(first_round(c, &n, c->at[QD_RELAY_PLAN_TAKEN], c->at[QD_RELAY_PLAN_TAKE], &taken, &rows));
    return plan_round(c, &n, c->at[QD_RELAY_PLAN_CHOSEN], c->at[QD_RELAY_PLAN_TAKEN], c->at[QD_RELAY_PLAN_TAKE],
                      c->at[QD_RELAY_PLAN_PLACE], c->at[QD_RELAY_PLAN_FROM], c->at[QD_RELAY_PLAN_COUNT], c->at[QD_RELAY_PLAN_WEIGHT]);
}

/* Runs the extra rounds one after another. */
typedef struct rounds {
    const qd_op_call *call;
    qd_nodes nodes;
    qd_relay_room room;
    char *base;
    int32_t *lists, *taken, *rows; /* device addresses */
    int32_t *host_taken, *host_rows;
    qd_dtype dtype, param;
    int64_t hidden, ffn, number; /* of this round */
} rounds;

QD_SAME_PLACE(X, RELAY_ROUNDS, RELAY_ROUNDS_GRAD);
QD_SAME_PLACE(CHOSEN, RELAY_ROUNDS, RELAY_ROUNDS_GRAD);
QD_SAME_PLACE(TABLE, RELAY_ROUNDS, RELAY_ROUNDS_GRAD);

static qd_status rounds_of(const qd_op_call *c, int down, int lists, int room, bool backward, rounds *r)
{
    *r = (rounds){.call = c, .base = c->at[room], .lists = c->at[lists], .dtype = call_dtype(c, room), .param = call_dtype(c, down),
                  .hidden = c->op->n, .ffn = call_stride(c, down)};
    QD_TRY(nodes_of(c, QD_RELAY_ROUNDS_TABLE, &r->nodes));
    r->room = qd_relay_room_of(&r->nodes, c->op->first, r->hidden, r->ffn, backward);
    r->taken = r->lists + r->room.taken;
    r->rows = r->lists + r->room.rows;
    return first_round(c, &r->nodes, r->taken, r->rows, &r->host_taken, &r->host_rows); /* other ops have executed it */
}

/* *any: whether there is another round. */
static qd_status next_round(rounds *r, bool *any)
{
    int64_t count = (int64_t)r->nodes.locals * qd_nodes_experts(&r->nodes);
    const qd_relay_room *room = &r->room;
    r->number++;
    QD_TRY(host_side(r->call, r->taken, count, &r->host_taken));
    QD_TRY(host_side(r->call, r->rows, count, &r->host_rows));
    *any = qd_relay_next(&r->nodes, r->nodes.position / r->nodes.locals, r->host_taken, r->host_rows);
    if (!*any)
        return QD_OK;
    return plan_round(r->call, &r->nodes, r->call->at[QD_RELAY_ROUNDS_CHOSEN], r->taken, r->rows, r->lists + room->place,
                      r->lists + room->from, r->lists + room->count, NULL);
}

static void *at(const rounds *r, int64_t element)
{
    return r->base + element * (int64_t)qd_dtype_size(r->dtype);
}

/* Sends rows to the ranks of experts, or back. *to: where they arrive; with one rank per node they
 * stay in place. */
static qd_status move(const rounds *r, bool back, void *from, void **to)
{
    const qd_exchange *e = r->call->frame->exchange;
    if (r->nodes.locals == 1) {
        *to = from;
        return QD_OK;
    }
    if (!e)
        return QD_FAIL(QD_SYSTEM, "no ranks to communicate with");
    return e->round(e->context, r->call->op, r->number, back, r->host_rows, from, *to);
}

static qd_status product(const rounds *r, const void *a, void *b, void *c, int64_t n, int64_t k, bool trans_b, bool by_experts,
                         qd_dtype b_dtype)
{
    const qd_op *op = r->call->op;
    return r->call->frame->kernels->grouped(r->call->frame->stream, &(qd_grouped_args){
        .a = a, .b = b, .c = c, .counts = r->rows + op->expert, .count_stride = qd_nodes_experts(&r->nodes), .rows = op->m, .n = n, .k = k,
        .sources = r->nodes.locals, .experts = op->experts, .trans_b = trans_b, .by_experts = by_experts, .accumulate = by_experts,
        .a_dtype = r->dtype, .b_dtype = b_dtype, .c_dtype = r->dtype});
}

/* Rows of this rank's experts in the round. */
static int64_t expert_rows(const rounds *r)
{
    int64_t rows = 0;
    for (int s = 0; s < r->nodes.locals; s++)
        for (int e = 0; e < r->call->op->experts; e++)
            rows += r->host_rows[(int64_t)s * qd_nodes_experts(&r->nodes) + r->call->op->expert + e];
    return rows;
}

/* Sorts relayed rows by expert. With `back`, the results of the experts, also computes their parts
 * of d_weight. */
static qd_status sort_rows(const rounds *r, const void *x, const float *weight, const void *back, void *sorted)
{
    return r->call->frame->kernels->permute(r->call->frame->stream, &(qd_permute_args){
        .x = x, .from = r->lists + r->room.from, .place = r->lists + r->room.place, .count = r->lists + r->room.count, .weight = weight,
        .y = sorted, .old = back, .d_weight = (float *)(void *)(r->lists + r->room.d_weight), .rows = r->call->op->first, .cols = r->hidden,
        .copy_rows = r->nodes.room, .per_token = r->nodes.per_token, .experts = qd_nodes_experts(&r->nodes), .copies = r->nodes.etp,
        .dtype = r->dtype});
}

static qd_status add_rows(const rounds *r, const void *back, const float *weight, void *sum)
{
    return r->call->frame->kernels->combine(r->call->frame->stream, &(qd_combine_args){
        .x = back, .place = r->lists + r->room.place, .weight = weight, .add = sum, .y = sum, .rows = r->call->op->first, .cols = r->hidden,
        .copy_rows = r->nodes.room, .per_token = r->nodes.per_token, .copies = r->nodes.etp, .dtype = r->dtype});
}

static qd_status bias(const rounds *r, void *x, int64_t width, int operand, bool grad)
{
    qd_grouped_bias_args rows = {.x = x, .width = width, .dtype = r->dtype, .counts = r->rows + r->call->op->expert,
                                 .count_stride = qd_nodes_experts(&r->nodes), .sources = r->nodes.locals};
    return qd_round_bias(r->call, rows, operand, grad);
}

static qd_activation_args active(const rounds *r)
{
    qd_activation_args a = call_activation(r->call, expert_rows(r), r->ffn, r->dtype);
    a.x = at(r, r->room.up);
    a.y = at(r, r->room.active);
    return a;
}

/* Sends relayed rows to their experts and computes gate and up; *in: their address there. */
static qd_status bring(const rounds *r, void **in, void *up_w, int up_bias)
{
    *in = at(r, r->room.in);
    QD_TRY(sort_rows(r, r->call->at[QD_RELAY_ROUNDS_X], NULL, NULL, at(r, r->room.sorted)));
    QD_TRY(move(r, false, at(r, r->room.sorted), in));
    QD_TRY(product(r, *in, up_w, at(r, r->room.up), 2 * r->ffn, r->hidden, true, false, r->param));
    return bias(r, at(r, r->room.up), 2 * r->ffn, up_bias, false);
}

/* Then computes down and returns the rows to their relays. */
static qd_status finish(const rounds *r, void *down_w, int down_bias, void **back)
{
    *back = at(r, r->room.back);
    qd_activation_args a = active(r);
    QD_TRY(r->call->frame->kernels->activation_forward(r->call->frame->stream, &a));
    QD_TRY(product(r, at(r, r->room.active), down_w, at(r, r->room.out), r->hidden, r->ffn, true, false, r->param));
    QD_TRY(bias(r, at(r, r->room.out), r->hidden, down_bias, false));
    return move(r, true, at(r, r->room.out), back);
}

qd_status qd_run_relay_rounds(const qd_op_call *c)
{
    rounds r;
    bool any;
    QD_TRY(rounds_of(c, QD_RELAY_ROUNDS_DOWN, QD_RELAY_ROUNDS_LISTS, QD_RELAY_ROUNDS_ROOM, false, &r));
    for (;;) {
        QD_TRY(next_round(&r, &any));
        if (!any)
            return QD_OK;
        void *in, *back;
        QD_TRY(bring(&r, &in, c->at[QD_RELAY_ROUNDS_GATE_UP], QD_RELAY_ROUNDS_UP_BIAS));
        QD_TRY(finish(&r, c->at[QD_RELAY_ROUNDS_DOWN], QD_RELAY_ROUNDS_DOWN_BIAS, &back));
        QD_TRY(add_rows(&r, back, c->at[QD_RELAY_ROUNDS_WEIGHT], c->at[QD_RELAY_ROUNDS_Y]));
    }
}

static qd_status keep_d_weight(const rounds *r, float *d_weight)
{
    return r->call->frame->kernels->relay_keep(r->call->frame->stream, &(qd_relay_keep_args){
        .place = r->lists + r->room.place, .from = (const float *)(const void *)(r->lists + r->room.d_weight), .to = d_weight,
        .n = qd_nodes_relayed(&r->nodes) * r->nodes.per_token});
}

qd_status qd_run_relay_rounds_grad(const qd_op_call *c)
{
    rounds r;
    bool any;
    QD_TRY(rounds_of(c, QD_RELAY_ROUNDS_GRAD_DOWN, QD_RELAY_ROUNDS_GRAD_LISTS, QD_RELAY_ROUNDS_GRAD_ROOM, true, &r));
    void *d_active = at(&r, r.room.d_active), *d_up = at(&r, r.room.d_up);
    for (;;) {
        QD_TRY(next_round(&r, &any));
        if (!any)
            return QD_OK;
        void *in, *back = NULL, *d_out = at(&r, r.room.out), *d_back = at(&r, r.room.back);
        QD_TRY(bring(&r, &in, c->at[QD_RELAY_ROUNDS_GRAD_GATE_UP], QD_RELAY_ROUNDS_GRAD_UP_BIAS));
        if (c->at[QD_RELAY_ROUNDS_GRAD_DX]) /* only d_weight needs the results of the experts */
            QD_TRY(finish(&r, c->at[QD_RELAY_ROUNDS_GRAD_DOWN], QD_RELAY_ROUNDS_GRAD_DOWN_BIAS, &back));
        QD_TRY(sort_rows(&r, c->at[QD_RELAY_ROUNDS_GRAD_DY], c->at[QD_RELAY_ROUNDS_GRAD_WEIGHT], back, at(&r, r.room.d_sorted)));
        if (c->at[QD_RELAY_ROUNDS_GRAD_DX])
            QD_TRY(keep_d_weight(&r, c->at[QD_RELAY_ROUNDS_GRAD_D_WEIGHT]));
        QD_TRY(move(&r, false, at(&r, r.room.d_sorted), &d_out));
        QD_TRY(product(&r, d_out, c->at[QD_RELAY_ROUNDS_GRAD_DOWN], d_active, r.ffn, r.hidden, false, false, r.param));
        qd_activation_args a = active(&r);
        a.dy = d_active;
        a.dx = d_up;
        QD_TRY(c->frame->kernels->activation_backward(c->frame->stream, &a));
        QD_TRY(bias(&r, d_out, r.hidden, QD_RELAY_ROUNDS_GRAD_DOWN_BIAS_GRAD, true));
        QD_TRY(bias(&r, d_up, 2 * r.ffn, QD_RELAY_ROUNDS_GRAD_UP_BIAS_GRAD, true));
        if (c->at[QD_RELAY_ROUNDS_GRAD_GATE_UP_GRAD]) {
            QD_TRY(product(&r, at(&r, r.room.active), c->at[QD_RELAY_ROUNDS_GRAD_DOWN_GRAD], d_out, r.hidden, r.ffn, false, true,
                           call_dtype(c, QD_RELAY_ROUNDS_GRAD_DOWN_GRAD)));
            QD_TRY(product(&r, in, c->at[QD_RELAY_ROUNDS_GRAD_GATE_UP_GRAD], d_up, 2 * r.ffn, r.hidden, false, true,
                           call_dtype(c, QD_RELAY_ROUNDS_GRAD_GATE_UP_GRAD)));
        }
        if (!c->at[QD_RELAY_ROUNDS_GRAD_DX])
            continue;
        QD_TRY(product(&r, d_up, c->at[QD_RELAY_ROUNDS_GRAD_GATE_UP], at(&r, r.room.out), r.hidden, 2 * r.ffn, false, false, r.param));
        QD_TRY(move(&r, true, at(&r, r.room.out), &d_back));
        QD_TRY(add_rows(&r, d_back, NULL, c->at[QD_RELAY_ROUNDS_GRAD_DX]));
    }
}
