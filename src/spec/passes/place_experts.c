/* Placement of routed experts: dispatch of rows, and buffer capacity. R is the number of rows of
 * the port, A = R · experts per token the number of assignments. Rows sorted by expert are sent to
 * the ranks of their experts before the first grouped GEMM of a pass, and returned after the last
 * one. Rows that exceed the planned buffers are sent in extra dispatch rounds. */
#include "spec/passes/experts_impl.h"

#include <math.h>

/* FLOPs of a grouped GEMM, for a balanced load. */
static void grouped(const qd_class_writer *w, qd_op *op, int64_t n, int64_t k)
{
    const qd_expert_plan *e = w->experts;
    double rows = (double)w->port_rows * w->model->moe.per_token * e->etp;
    qd_op_sizes(op, e->capacity, n, k, 2.0 * rows * (double)n * (double)k);
    op->experts = e->held;
    op->expert = e->first;
}

void qd_place_dispatch(qd_class_writer *w, const qd_expert_plan *e, qd_op_kind kind, int from, int to)
{
    int64_t cols = w->model->hidden;
    qd_op *op = qd_class_exchange(w, kind, e->group, QD_OPERANDS(DISPATCH, (X, from), (TABLE, e->table), (Y, to)), 0, e->capacity, cols);
    op->k = e->room;
    op->experts = e->held;
    /* Assumes a balanced load and equally many rows on the ranks of tp and cp, so that all ranks of
     * the group compute the same count. */
    const int *degree = w->ledger->mesh.degree;
    op->exchange.count = w->config->batch * w->config->seq * w->model->moe.per_token * e->etp * (e->ranks - 1) * cols /
                         (degree[QD_AXIS_TP] * degree[QD_AXIS_CP]);
    op->exchange.uneven = true;
    op->exchange.async = w->config->overlap;
}

static int64_t at_most(double wanted, int64_t worst)
{
    return ceil(wanted) < (double)worst ? (int64_t)ceil(wanted) : worst;
}

static qd_expert_plan *plan_experts(qd_class_writer *w)
{
    const qd_mesh *mesh = &w->ledger->mesh;
    const qd_moe *moe = &w->model->moe;
    qd_expert_plan *e = QD_ARENA_NEW(w->arena, qd_expert_plan, 1);
    if (!e) {
        w->no_memory = true;
        return NULL;
    }
    /* on the rank of cp with the most rows */
    int64_t all = w->config->batch * qd_context_most_rows(w->config->seq, mesh->degree[QD_AXIS_CP]);
    int tp = mesh->sp ? mesh->degree[QD_AXIS_TP] : 1;
    int64_t most = (all + tp - 1) / tp * moe->per_token; /* assignments of the rank with the most rows */
    e->nodes = qd_nodes_spanned(mesh);
    e->group = qd_relay_group(mesh);
    e->etp = mesh->etp > 1 ? mesh->etp : 1;
    e->ranks = e->group.size;
    e->held = qd_experts_of(w->model, mesh, w->config->rank, &e->first);
    e->first %= moe->experts / e->nodes;
    e->relayed = e->nodes * (most / moe->per_token);
    int64_t worst = most * e->ranks * e->nodes;
    e->room = e->nodes == 1 ? w->port_rows * moe->per_token : at_most(w->config->expert_rows * (double)most, most * e->nodes);
    e->capacity = e->ranks == 1 ? e->room : at_most(w->config->expert_rows * (double)most * e->etp, worst);
    e->rounds = (e->ranks > 1 && e->capacity < worst) || (e->nodes > 1 && e->room < most * e->nodes);
    e->load_rows = moe->balance == QD_BALANCE_SEQUENCE ? w->seq : all;
    e->up_w = e->down_w = -1;
    return e;
}

static void shape(qd_class_writer *w, int slot, int64_t rows, int64_t cols)
{
    w->slots[slot].rows = rows;
    w->slots[slot].cols = cols;
    w->slots[slot].layout = QD_LAYOUT_ROUTED;
}

/* Results of the router, per row of the port. */
void qd_place_route(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    const qd_moe *moe = &w->model->moe;
    bool forward = op->kind == QD_OP_ROUTE;
    if (forward && !(w->experts = plan_experts(w)))
        return;
    qd_expert_plan *e = w->experts;
    qd_op placed = *op;
    switch (op->kind) {
    case QD_OP_ROUTE:
        placed.slot[QD_ROUTE_LOGITS] = (int16_t)qd_place_want(p, op->slot[QD_ROUTE_LOGITS], QD_LAYOUT_PORT);
        qd_place_give(p, e->choice = op->slot[QD_ROUTE_CHOICE], QD_LAYOUT_PORT, 0);
        qd_place_give(p, e->weight = op->slot[QD_ROUTE_WEIGHT], QD_LAYOUT_PORT, 0);
        w->slots[op->slot[QD_ROUTE_LOAD]].rows = moe->balance == QD_BALANCE_SEQUENCE ? w->config->batch : 1;
        break;
    case QD_OP_ROUTE_PLAN:
        qd_place_give(p, e->place = op->slot[QD_ROUTE_PLAN_PLACE], QD_LAYOUT_PORT, 0);
        e->from = op->slot[QD_ROUTE_PLAN_FROM];
        e->count = op->slot[QD_ROUTE_PLAN_COUNT];
        w->slots[e->from].cols = w->port_rows * moe->per_token;
        break;
    case QD_OP_ROUTE_GRAD:
        qd_place_give(p, op->slot[QD_ROUTE_GRAD_D_LOGITS], QD_LAYOUT_PORT, 0);
        break;
    default:
        break;
    }
    qd_op *kept = qd_class_keep(w, &placed);
    qd_class_measure(w, kept);
    bool loads = forward || op->kind == QD_OP_ROUTE_GRAD;
    qd_op_sizes(kept, w->port_rows, moe->experts, loads ? e->load_rows : 0, 0.0);
    kept->first = loads ? w->port_first : 0;
    qd_group group = qd_expert_load_group(w->model, &w->ledger->mesh);
    if (forward && group.size > 1 && w->config->training)
        qd_class_exchange(w, QD_OP_ALL_REDUCE, group, QD_OPERANDS(ALL_REDUCE, (X, op->slot[QD_ROUTE_LOAD])), 0,
                          w->slots[op->slot[QD_ROUTE_LOAD]].rows, moe->experts);
}

void qd_place_send(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_expert_plan *e = w->experts;
    int64_t hidden = w->model->hidden, experts = w->model->moe.experts;
    bool apart = e->ranks > 1;
    e->x = qd_place_want(p, op->slot[QD_PERMUTE_X], QD_LAYOUT_PORT);
    e->sorted = op->slot[QD_PERMUTE_Y];
    shape(w, e->sorted, e->room, hidden);
    e->table = apart || e->nodes > 1 ? qd_class_i32(w, "expert_rows of all ranks", e->ranks, experts / e->nodes) : e->count;
    e->rows_in = apart ? qd_class_local(w, "expert_in", e->capacity, hidden) : e->sorted;
    p->now[e->sorted] = e->rows_in;
    if (e->nodes > 1) {
        qd_place_to_nodes(w, e);
        e->to_relay = true;
        return;
    }
    if (apart)
        qd_class_exchange(w, QD_OP_ALL_GATHER, e->group, QD_OPERANDS(ALL_GATHER, (X, e->count), (Y, e->table)), 0, e->ranks, experts);
    qd_op_sizes(QD_CLASS_OP(w, PERMUTE, (X, e->x), (FROM, e->from), (COUNT, e->count), (Y, e->sorted), (PLACE, e->place)),
                w->port_rows, hidden, 0, 0.0);
    if (apart)
        qd_place_dispatch(w, e, QD_OP_DISPATCH, e->sorted, e->rows_in);
}

/* Whether a result is the last of the experts, whose rows are combined next. */
static bool is_collected(const qd_placing *p, int slot)
{
    for (int i = p->at + 1; i < p->old.count; i++)
        if (p->old.ops[i].kind == QD_OP_COMBINE && p->old.ops[i].slot[QD_COMBINE_ROWS] == slot)
            return true;
    return false;
}

/* Returns rows to the ranks they came from. */
static int send_back(qd_placing *p, const char *name, int slot)
{
    qd_class_writer *w = p->w;
    const qd_expert_plan *e = w->experts;
    if (e->ranks == 1)
        return slot;
    int back = qd_class_local(w, name, e->room * e->etp, w->model->hidden);
    qd_place_dispatch(w, e, QD_OP_RETURN, slot, back);
    return p->now[slot] = back;
}

/* Ops over the rows of this rank's experts. */
void qd_place_grouped(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_expert_plan *e = w->experts;
    qd_op placed = *op;
    bool product = op->kind == QD_OP_EXPERTS || op->kind == QD_OP_EXPERTS_DX;
    int weight = product ? op->slot[QD_EXPERTS_WEIGHT] : op->kind == QD_OP_EXPERTS_DW ? op->slot[QD_EXPERTS_DW_WEIGHT_GRAD] : -1;
    int64_t out = weight >= 0 ? w->slots[weight].rows / e->held : 0, in = weight >= 0 ? w->slots[weight].cols : 0;
    if (e->to_relay) {
        qd_place_relay(w, e);
        if (e->ranks > 1)
            qd_place_dispatch(w, e, QD_OP_DISPATCH, e->sorted, e->rows_in);
        e->to_relay = false;
    }
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (qd_op_reads(op, j) && op->slot[j] != weight)
            placed.slot[j] = (int16_t)(op->slot[j] == e->count ? e->table : p->now[op->slot[j]]);
    switch (op->kind) {
    case QD_OP_EXPERTS:
        shape(w, op->slot[QD_EXPERTS_Y], e->capacity, out);
        e->ffn = e->up_w < 0 ? out / 2 : in;
        *(e->up_w < 0 ? &e->up_w : &e->down_w) = weight;
        break;
    case QD_OP_EXPERTS_DX:
        shape(w, op->slot[QD_EXPERTS_DX_DX], e->capacity, in);
        break;
    case QD_OP_EXPERT_ACTIVATION:
        shape(w, op->slot[QD_EXPERT_ACTIVATION_Y], e->capacity, w->slots[placed.slot[QD_EXPERT_ACTIVATION_X]].cols / 2);
        break;
    case QD_OP_EXPERT_ACTIVATION_GRAD:
        shape(w, op->slot[QD_EXPERT_ACTIVATION_GRAD_DX], e->capacity, w->slots[placed.slot[QD_EXPERT_ACTIVATION_GRAD_X]].cols);
        break;
    default:
        break;
    }
    qd_op *kept = qd_class_keep(w, &placed);
    qd_class_measure(w, kept);
    grouped(w, kept, op->kind == QD_OP_EXPERTS_DX ? in : out, op->kind == QD_OP_EXPERTS_DX ? out : in);
    if (weight < 0) /* SwiGLU and its gradient */
        qd_op_sizes(kept, e->capacity, e->ffn, 0, 0.0);
    bool forward = op->kind == QD_OP_EXPERTS;
    int result = op->slot[forward ? QD_EXPERTS_Y : QD_EXPERTS_DX_DX];
    if (!product || !is_collected(p, result))
        return;
    *(forward ? &e->back : &e->d_back) = send_back(p, forward ? "rows from experts" : "d_rows from experts", result);
    if (!forward && e->nodes > 1)
        qd_place_grad_from_nodes(w, e);
}

static int rounds_room(qd_class_writer *w, bool backward)
{
    const qd_expert_plan *e = w->experts;
    int64_t elements = qd_round_room_of(e->capacity, w->model->hidden, e->ffn, e->room, backward).elements;
    return qd_class_local(w, "buffers of extra rounds", 1, elements);
}

/* Rows that exceed the buffers, in extra dispatch rounds. */
static void extra_rounds(qd_class_writer *w, qd_op_kind kind, qd_operands operands)
{
    const qd_expert_plan *e = w->experts;
    qd_op *op = qd_class_exchange(w, kind, e->group, operands, 0, e->capacity, w->model->hidden);
    op->k = e->room;
    op->experts = e->held;
    op->expert = e->first;
    op->exchange.count = 0;
    op->exchange.uneven = true;
    op->exchange.dtype = w->config->activation;
}

static void grad_rounds(qd_class_writer *w, bool inputs, bool weights)
{
    const qd_expert_plan *e = w->experts;
    extra_rounds(w, QD_OP_EXPERT_ROUNDS_GRAD,
                 QD_OPERANDS(EXPERT_ROUNDS_GRAD, (X, e->x), (FROM, e->from), (COUNT, e->count), (DY, e->d_sorted), (TABLE, e->table),
                             (GATE_UP, e->up_w), (DOWN, e->down_w), (GATE_UP_GRAD, weights ? qd_class_gradient(e->up_w) : -1),
                             (DOWN_GRAD, weights ? qd_class_gradient(e->down_w) : -1), (DX, inputs ? e->d_back : -1),
                             (ROOM, rounds_room(w, true))));
}

/* Gradients of weights stay in their phase, so that the order of their sums does not depend on what
 * runs between the phases. */
static void extra_rounds_grad(qd_class_writer *w)
{
    grad_rounds(w, true, !w->config->split);
    if (!w->config->split)
        return;
    w->phase = QD_PHASE_WEIGHT;
    grad_rounds(w, false, true);
    w->phase = QD_PHASE_INPUT;
}

/* Forward: the weighted sum over each row's experts. Backward: the gradient of the dispatch. */
void qd_place_collect(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_expert_plan *e = w->experts;
    bool forward = op->phase == QD_PHASE_FORWARD, by_node = e->nodes > 1;
    int add = qd_place_want(p, op->slot[QD_COMBINE_ADD], QD_LAYOUT_PORT), y = op->slot[QD_COMBINE_Y];
    qd_place_give(p, y, QD_LAYOUT_PORT, 0);
    if (by_node && forward)
        qd_place_from_nodes(w, e);
    else if (e->rounds && !by_node && forward)
        extra_rounds(w, QD_OP_EXPERT_ROUNDS,
                     QD_OPERANDS(EXPERT_ROUNDS, (X, e->sorted), (TABLE, e->table), (GATE_UP, e->up_w), (DOWN, e->down_w),
                                 (ROOM, rounds_room(w, false)), (Y, e->back)));
    else if (e->rounds && !by_node)
        extra_rounds_grad(w);
    qd_op *kept = by_node ? QD_CLASS_OP(w, COMBINE, (ROWS, forward ? e->by_node.sums : e->by_node.d_sums), (PLACE, e->by_node.place),
                                        (ADD, add), (Y, y))
                          : QD_CLASS_OP(w, COMBINE, (ROWS, forward ? e->back : e->d_back), (PLACE, e->place),
                                        (WEIGHT, forward ? e->weight : -1), (ADD, add), (Y, y));
    qd_op_sizes(kept, w->port_rows, w->model->hidden, by_node ? 1 : e->etp, 0.0);
}

void qd_place_collect_grad(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_expert_plan *e = w->experts;
    const qd_node_plan *n = &e->by_node;
    int64_t hidden = w->model->hidden;
    int dy = qd_place_want(p, op->slot[QD_COMBINE_GRAD_DY], QD_LAYOUT_PORT), d_out = op->slot[QD_COMBINE_GRAD_D_ROWS];
    e->d_sorted = op->slot[QD_COMBINE_GRAD_D_ROWS];
    e->d_weight = op->slot[QD_COMBINE_GRAD_D_WEIGHT];
    shape(w, e->d_sorted, e->room, hidden);
    qd_place_give(p, e->d_weight, QD_LAYOUT_PORT, 0);
    if (e->nodes > 1) {
        qd_place_grad_to_nodes(w, e, dy);
        qd_op *grad = QD_CLASS_OP(w, COMBINE_GRAD, (DY, n->relay_dy), (ROWS, e->back), (FROM, n->relay_from), (PLACE, n->relay_place),
                                  (COUNT, n->relay_count), (WEIGHT, n->relay_weight), (D_ROWS, e->d_sorted), (D_WEIGHT, n->relay_d_weight));
        qd_op_sizes(grad, e->relayed, hidden, e->etp, 0.0);
    } else {
        qd_op_sizes(QD_CLASS_OP(w, COMBINE_GRAD, (DY, dy), (ROWS, e->back), (FROM, e->from), (PLACE, e->place), (COUNT, e->count),
                                (WEIGHT, e->weight), (D_ROWS, e->d_sorted), (D_WEIGHT, e->d_weight)),
                    w->port_rows, hidden, e->etp, 0.0);
    }
    if (e->ranks > 1) {
        d_out = qd_class_local(w, "d_expert_out", e->capacity, hidden);
        qd_place_dispatch(w, e, QD_OP_DISPATCH, e->d_sorted, d_out);
    }
    p->now[e->d_sorted] = d_out;
}
