/* Placement of experts on several nodes with two-level dispatch (spec/layout/nodes.h): each row
 * crosses to a node at most once.
 *
 * x → copies sorted by node → across → relayed rows → rows sorted by expert, as in flat dispatch
 * (place_experts.c) → weighted sums of relayed rows → back across → sum over nodes. The backward
 * pass mirrors it: gradients of sums cross once per node; gradients of x and of the weights
 * return. */
#include "spec/passes/experts_impl.h"

#include <math.h>

static int rows_of(qd_class_writer *w, const char *name, int64_t rows)
{
    return qd_class_local(w, name, rows, w->model->hidden);
}

/* Sets the buffer capacities of ops on relayed rows: rows of experts, rows sorted by expert, and
 * relayed rows. */
static void relaying(const qd_expert_plan *e, qd_op *op)
{
    op->m = e->capacity;
    op->k = e->room;
    op->first = e->relayed;
    op->experts = e->held;
    op->expert = e->first;
}

/* Sends rows across nodes, each with `extra` 4-byte numbers. The planned bytes assume that all
 * experts are equally likely, and equally many rows on the ranks of tp and cp. */
static void cross(qd_class_writer *w, const qd_expert_plan *e, qd_op_kind kind, qd_operands operands, int64_t extra)
{
    const qd_mesh *mesh = &w->ledger->mesh;
    int64_t hidden = w->model->hidden;
    qd_op *op = qd_class_exchange(w, kind, qd_nodes_group(mesh), operands, 0, e->relayed, hidden);
    double rows = (double)(w->config->batch * w->config->seq) / (mesh->degree[QD_AXIS_TP] * mesh->degree[QD_AXIS_CP]);
    double cols = (double)hidden + 4.0 * (double)extra / (double)qd_dtype_size(w->config->activation);
    op->k = extra;
    op->exchange.count = llround(rows * qd_nodes_expected(&w->model->moe, e->nodes) * (e->nodes - 1) * cols);
    op->exchange.uneven = true;
    op->exchange.async = w->config->overlap;
}

void qd_place_to_nodes(qd_class_writer *w, qd_expert_plan *e)
{
    const qd_moe *moe = &w->model->moe;
    int64_t k = moe->per_token, copies = w->port_rows * (e->nodes < k ? e->nodes : k);
    qd_node_plan *n = &e->by_node;
    *n = (qd_node_plan){
        .place = qd_class_i32(w, "place of copies", w->port_rows, e->nodes),
        .from = qd_class_i32(w, "from of copies", 1, w->port_rows * e->nodes),
        .count = qd_class_i32(w, "rows per node", 1, e->nodes),
        .counts = qd_class_i32(w, "rows per expert and node", 1, moe->experts + e->nodes),
        .table = qd_class_i32(w, "rows per expert and node of all ranks", (int64_t)e->nodes * e->ranks, moe->experts + e->nodes),
        .copies = rows_of(w, "rows by node", copies),
        .chosen = qd_class_i32(w, "choices of copies", copies, 2 * k),
        .relay = rows_of(w, "relayed rows", e->relayed),
        .relay_chosen = qd_class_i32(w, "choices of relayed rows", e->relayed, 2 * k),
    };
    qd_op_sizes(QD_CLASS_OP(w, NODE_PLAN, (CHOICE, e->choice), (WEIGHT, e->weight), (PLACE, e->place), (COUNT, e->count),
                            (COPY_PLACE, n->place), (COPY_FROM, n->from), (NODE_COUNT, n->count), (CHOSEN, n->chosen), (COUNTS, n->counts)),
                w->port_rows, e->nodes, 0, 0.0);
    qd_class_exchange(w, QD_OP_ALL_GATHER, qd_expert_group(&w->ledger->mesh), QD_OPERANDS(ALL_GATHER, (X, n->counts), (Y, n->table)), 0,
                      w->slots[n->table].rows, w->slots[n->table].cols);
    qd_op_sizes(QD_CLASS_OP(w, PERMUTE, (X, e->x), (FROM, n->from), (COUNT, n->count), (Y, n->copies), (PLACE, n->place)),
                w->port_rows, w->model->hidden, 0, 0.0);
    cross(w, e, QD_OP_NODE_DISPATCH,
          QD_OPERANDS(NODE_DISPATCH, (X, n->copies), (NUMBERS, n->chosen), (TABLE, n->table), (Y, n->relay),
                      (NUMBERS_OUT, n->relay_chosen)),
          2 * k);
}

void qd_place_relay(qd_class_writer *w, qd_expert_plan *e)
{
    qd_node_plan *n = &e->by_node;
    int64_t k = w->model->moe.per_token, experts = w->model->moe.experts / e->nodes;
    n->taken = qd_class_i32(w, "rows of earlier rounds", e->ranks, experts);
    n->relay_place = qd_class_i32(w, "place of relayed rows", e->relayed, k);
    n->relay_from = qd_class_i32(w, "from of relayed rows", 1, e->relayed * k);
    n->relay_count = qd_class_i32(w, "relayed rows per expert", 1, experts);
    n->relay_weight = qd_class_f32(w, "weight of relayed rows", e->relayed, k);
    relaying(e, QD_CLASS_OP(w, RELAY_PLAN, (CHOSEN, n->relay_chosen), (TABLE, n->table), (TAKEN, n->taken), (TAKE, e->table),
                            (PLACE, n->relay_place), (FROM, n->relay_from), (COUNT, n->relay_count), (WEIGHT, n->relay_weight)));
    qd_op_sizes(QD_CLASS_OP(w, PERMUTE, (X, n->relay), (FROM, n->relay_from), (COUNT, n->relay_count), (Y, e->sorted),
                            (PLACE, n->relay_place)),
                e->relayed, w->model->hidden, 0, 0.0);
}

/* Workspace of extra dispatch rounds: lists and buffers. */
typedef struct rounds_room {
    int lists, buffers;
} rounds_room;

static rounds_room room_of(qd_class_writer *w, const qd_expert_plan *e, bool backward)
{
    qd_nodes n = qd_nodes_of(w->model, &w->ledger->mesh, 0, e->room, e->capacity, NULL);
    qd_relay_room room = qd_relay_room_of(&n, e->relayed, w->model->hidden, e->ffn, backward);
    int lists = qd_class_i32(w, "lists of extra rounds", 1, room.numbers);
    return (rounds_room){lists, qd_class_local(w, "buffers of extra rounds", 1, room.elements)};
}

/* Rows that exceed `room` or `capacity`, in extra rounds inside the nodes. */
static void extra_rounds(qd_class_writer *w, const qd_expert_plan *e, qd_op_kind kind, qd_operands operands)
{
    qd_op *op = qd_class_exchange(w, kind, e->group, operands, 0, e->capacity, w->model->hidden);
    relaying(e, op);
    op->exchange.count = 0;
    op->exchange.uneven = true;
    op->exchange.dtype = w->config->activation;
}

void qd_place_from_nodes(qd_class_writer *w, qd_expert_plan *e)
{
    qd_node_plan *n = &e->by_node;
    n->relay_sum = rows_of(w, "sums of relayed rows", e->relayed);
    n->sums = rows_of(w, "sums by node", w->slots[n->copies].rows);
    qd_op_sizes(QD_CLASS_OP(w, COMBINE, (ROWS, e->back), (PLACE, n->relay_place), (WEIGHT, n->relay_weight), (Y, n->relay_sum)),
                e->relayed, w->model->hidden, e->etp, 0.0);
    if (e->rounds) {
        rounds_room room = room_of(w, e, false);
        extra_rounds(w, e, QD_OP_RELAY_ROUNDS,
                     QD_OPERANDS(RELAY_ROUNDS, (X, n->relay), (CHOSEN, n->relay_chosen), (TABLE, n->table), (WEIGHT, n->relay_weight),
                                 (GATE_UP, e->up_w), (DOWN, e->down_w), (LISTS, room.lists), (ROOM, room.buffers), (Y, n->relay_sum)));
    }
    cross(w, e, QD_OP_NODE_RETURN, QD_OPERANDS(NODE_RETURN, (X, n->relay_sum), (TABLE, n->table), (Y, n->sums)), 0);
}

void qd_place_grad_to_nodes(qd_class_writer *w, qd_expert_plan *e, int dy)
{
    qd_node_plan *n = &e->by_node;
    n->relay_dy = rows_of(w, "d_relayed sums", e->relayed);
    n->relay_d_weight = qd_class_f32(w, "d_relayed weight", e->relayed, w->model->moe.per_token);
    int copies = rows_of(w, "d_sums by node", w->slots[n->copies].rows);
    qd_op_sizes(QD_CLASS_OP(w, PERMUTE, (X, dy), (FROM, n->from), (COUNT, n->count), (Y, copies), (PLACE, n->place)),
                w->port_rows, w->model->hidden, 0, 0.0);
    cross(w, e, QD_OP_NODE_DISPATCH, QD_OPERANDS(NODE_DISPATCH, (X, copies), (TABLE, n->table), (Y, n->relay_dy)), 0);
}

/* Rows of extra rounds are not kept: they are sent a second time. `dx` requests gradients of
 * inputs, `weights` gradients of weights. */
static void extra_rounds_grad(qd_class_writer *w, const qd_expert_plan *e, int d_weight, int dx, bool weights)
{
    const qd_node_plan *n = &e->by_node;
    int copies = rows_of(w, "rows by node again", w->slots[n->copies].rows), relay = rows_of(w, "relayed rows again", e->relayed);
    int lists = qd_class_i32(w, "lists of rounds", 2, w->slots[n->taken].rows * w->slots[n->taken].cols);
    qd_op *resend =
        qd_class_exchange(w, QD_OP_NODE_RESEND, qd_nodes_group(&w->ledger->mesh),
                          QD_OPERANDS(NODE_RESEND, (X, e->x), (COPY_FROM, n->from), (NODE_COUNT, n->count), (TABLE, n->table),
                                      (COPIES, copies), (RELAYED, relay), (LISTS, lists)),
                          0, e->relayed, w->model->hidden);
    relaying(e, resend);
    resend->exchange.count = 0;
    resend->exchange.uneven = true;
    rounds_room room = room_of(w, e, true);
    extra_rounds(w, e, QD_OP_RELAY_ROUNDS_GRAD,
                 QD_OPERANDS(RELAY_ROUNDS_GRAD, (X, relay), (CHOSEN, n->relay_chosen), (TABLE, n->table), (WEIGHT, n->relay_weight),
                             (DY, n->relay_dy), (GATE_UP, e->up_w), (DOWN, e->down_w),
                             (GATE_UP_GRAD, weights ? qd_class_gradient(e->up_w) : -1),
                             (DOWN_GRAD, weights ? qd_class_gradient(e->down_w) : -1), (D_WEIGHT, d_weight), (DX, dx),
                             (LISTS, room.lists), (ROOM, room.buffers)));
}

void qd_place_grad_from_nodes(qd_class_writer *w, qd_expert_plan *e)
{
    qd_node_plan *n = &e->by_node;
    int64_t k = w->model->moe.per_token;
    int relay_dx = rows_of(w, "d_relayed rows", e->relayed);
    int copy_weight = qd_class_f32(w, "d_weight of copies", w->slots[n->copies].rows, k);
    n->d_sums = rows_of(w, "d_rows by node", w->slots[n->copies].rows);
    qd_op_sizes(QD_CLASS_OP(w, COMBINE, (ROWS, e->d_back), (PLACE, n->relay_place), (Y, relay_dx)),
                e->relayed, w->model->hidden, e->etp, 0.0);
    /* Gradients of weights stay in their phase, so that the order of their sums does not depend on
     * what runs between the phases. */
    if (e->rounds) {
        extra_rounds_grad(w, e, n->relay_d_weight, relay_dx, !w->config->split);
        w->phase = QD_PHASE_WEIGHT;
        if (w->config->split)
            extra_rounds_grad(w, e, -1, -1, true);
        w->phase = QD_PHASE_INPUT;
    }
    cross(w, e, QD_OP_NODE_RETURN,
          QD_OPERANDS(NODE_RETURN, (X, relay_dx), (NUMBERS, n->relay_d_weight), (TABLE, n->table), (Y, n->d_sums),
                      (NUMBERS_OUT, copy_weight)),
          k);
    qd_op_sizes(QD_CLASS_OP(w, NODE_WEIGHTS, (CHOICE, e->choice), (PLACE, e->place), (COPY_PLACE, n->place), (COPY_D_WEIGHT, copy_weight),
                            (D_WEIGHT, e->d_weight)),
                w->port_rows, e->nodes, 0, 0.0);
}
