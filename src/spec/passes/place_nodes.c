/* Placement of experts on several nodes: each row crosses to a node once (spec/nodes.h).
 *
 * x → copies by node → across → relayed rows → rows by expert, which continue as under flat
 * dispatch (place_experts.c) → sums of relayed rows, weighted → back across → sum over nodes.
 * Backwards the same: gradients of sums cross once per node, gradients of x and of the weights
 * return. */
#include "spec/passes/experts_impl.h"

#include <math.h>

static int rows_of(qd_class_writer *w, const char *name, int64_t rows)
{
    return qd_class_local(w, name, rows, w->model->hidden);
}

/* Ops about relayed rows say how many there are, and how many by expert and of experts fit at a
 * time. */
static void relaying(const qd_expert_plan *e, qd_op *op)
{
    op->m = e->capacity;
    op->k = e->room;
    op->first = e->relayed;
    op->experts = e->held;
    op->expert = e->first;
}

/* Rows cross, with `beside` numbers of 4 bytes each. The planned bytes are those of experts that
 * are all as likely, and of ranks of tp and cp with equally many rows. */
static void cross(qd_class_writer *w, const qd_expert_plan *e, qd_op_kind kind, const int *slots, int64_t beside)
{
    const qd_mesh *mesh = &w->ledger->mesh;
    int64_t hidden = w->model->hidden;
    qd_op *op = qd_class_exchange(w, kind, qd_nodes_group(mesh), slots, 5, 0, e->relayed, hidden);
    double rows = (double)(w->config->batch * w->config->seq) / (mesh->degree[QD_AXIS_TP] * mesh->degree[QD_AXIS_CP]);
    double cols = (double)hidden + 4.0 * (double)beside / (double)qd_dtype_size(w->config->activation);
    op->k = beside;
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
    qd_op_sizes(QD_CLASS_OP(w, NODE_PLAN, e->choice, e->weight, e->place, e->count, n->place, n->from, n->count, n->chosen, n->counts),
                w->port_rows, e->nodes, 0, 0.0);
    qd_class_exchange(w, QD_OP_ALL_GATHER, qd_expert_group(&w->ledger->mesh), (const int[]){n->counts, n->table}, 2, 0,
                      w->slots[n->table].rows, w->slots[n->table].cols);
    qd_op_sizes(QD_CLASS_OP(w, PERMUTE, e->x, n->from, n->count, n->copies, n->place), w->port_rows, w->model->hidden, 0, 0.0);
    cross(w, e, QD_OP_NODE_DISPATCH, (const int[]){n->copies, n->chosen, n->table, n->relay, n->relay_chosen}, 2 * k);
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
    relaying(e, QD_CLASS_OP(w, RELAY_PLAN, n->relay_chosen, n->table, n->taken, e->table, n->relay_place, n->relay_from, n->relay_count,
                            n->relay_weight));
    qd_op_sizes(QD_CLASS_OP(w, PERMUTE, n->relay, n->relay_from, n->relay_count, e->sorted, n->relay_place), e->relayed, w->model->hidden,
                0, 0.0);
}

/* What exceeds room or capacity, in extra rounds inside the nodes. The last two slots are lists
 * and room of their own. */
static void extra_rounds(qd_class_writer *w, const qd_expert_plan *e, qd_op_kind kind, int *slots, int count, int lists)
{
    qd_nodes n = qd_nodes_of(w->model, &w->ledger->mesh, 0, e->room, e->capacity, NULL);
    qd_relay_room room = qd_relay_room_of(&n, e->relayed, w->model->hidden, e->ffn, kind == QD_OP_RELAY_ROUNDS_GRAD);
    slots[lists] = qd_class_i32(w, "lists of extra rounds", 1, room.numbers);
    slots[lists + 1] = qd_class_slot(w, "buffers of extra rounds", QD_SLOT_LOCAL, w->config->activation, 1, room.elements);
    qd_op *op = qd_class_exchange(w, kind, e->group, slots, count, 0, e->capacity, w->model->hidden);
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
    qd_op_sizes(QD_CLASS_OP(w, COMBINE, e->back, n->relay_place, n->relay_weight, -1, n->relay_sum), e->relayed, w->model->hidden, e->etp,
                0.0);
    if (e->rounds)
        extra_rounds(w, e, QD_OP_RELAY_ROUNDS,
                     (int[]){n->relay, n->relay_chosen, n->table, n->relay_weight, e->up_w, e->down_w, -1, -1, n->relay_sum}, 9, 6);
    cross(w, e, QD_OP_NODE_RETURN, (const int[]){n->relay_sum, -1, n->table, n->sums, -1}, 0);
}

void qd_place_grad_to_nodes(qd_class_writer *w, qd_expert_plan *e, int dy)
{
    qd_node_plan *n = &e->by_node;
    n->relay_dy = rows_of(w, "d_relayed sums", e->relayed);
    n->relay_d_weight = qd_class_f32(w, "d_relayed weight", e->relayed, w->model->moe.per_token);
    int copies = rows_of(w, "d_sums by node", w->slots[n->copies].rows);
    qd_op_sizes(QD_CLASS_OP(w, PERMUTE, dy, n->from, n->count, copies, n->place), w->port_rows, w->model->hidden, 0, 0.0);
    cross(w, e, QD_OP_NODE_DISPATCH, (const int[]){copies, -1, n->table, n->relay_dy, -1}, 0);
}

/* Rows of extra rounds are not kept: they cross a second time. With `dx` gradients of inputs are
 * computed, with `weights` those of weights. */
static void extra_rounds_grad(qd_class_writer *w, const qd_expert_plan *e, int d_weight, int dx, bool weights)
{
    const qd_node_plan *n = &e->by_node;
    int copies = rows_of(w, "rows by node again", w->slots[n->copies].rows), relay = rows_of(w, "relayed rows again", e->relayed);
    int lists = qd_class_i32(w, "lists of rounds", 2, w->slots[n->taken].rows * w->slots[n->taken].cols);
    qd_op *resend =
        qd_class_exchange(w, QD_OP_NODE_RESEND, qd_nodes_group(&w->ledger->mesh),
                          (const int[]){e->x, n->from, n->count, n->table, copies, relay, lists}, 7, 0, e->relayed, w->model->hidden);
    relaying(e, resend);
    resend->exchange.count = 0;
    resend->exchange.uneven = true;
    extra_rounds(w, e, QD_OP_RELAY_ROUNDS_GRAD,
                 (int[]){relay, n->relay_chosen, n->table, n->relay_weight, n->relay_dy, e->up_w, e->down_w,
                         weights ? qd_class_gradient(e->up_w) : -1, weights ? qd_class_gradient(e->down_w) : -1, d_weight, dx, -1, -1},
                 13, 11);
}

void qd_place_grad_from_nodes(qd_class_writer *w, qd_expert_plan *e)
{
    qd_node_plan *n = &e->by_node;
    int64_t k = w->model->moe.per_token;
    int relay_dx = rows_of(w, "d_relayed rows", e->relayed);
    int copy_weight = qd_class_f32(w, "d_weight of copies", w->slots[n->copies].rows, k);
    n->d_sums = rows_of(w, "d_rows by node", w->slots[n->copies].rows);
    qd_op_sizes(QD_CLASS_OP(w, COMBINE, e->d_back, n->relay_place, -1, -1, relay_dx), e->relayed, w->model->hidden, e->etp, 0.0);
    if (e->rounds) { /* gradients of weights stay in their phase: so their sums have one order, whatever runs between the phases */
        extra_rounds_grad(w, e, n->relay_d_weight, relay_dx, !w->config->split);
        w->phase = QD_PHASE_WEIGHT;
        if (w->config->split)
            extra_rounds_grad(w, e, -1, -1, true);
        w->phase = QD_PHASE_INPUT;
    }
    cross(w, e, QD_OP_NODE_RETURN, (const int[]){relay_dx, n->relay_d_weight, n->table, n->d_sums, copy_weight}, k);
    qd_op_sizes(QD_CLASS_OP(w, NODE_WEIGHTS, e->choice, e->place, n->place, copy_weight, e->d_weight), w->port_rows, e->nodes, 0, 0.0);
}
