/* The part of a block's op list that is experts instead of an MLP.
 *
 * x → router → choices → places → rows by expert → gate and up → activation → down → weighted sum per row, beside the shared
 * experts. R is the micro-batch's rows, A = R · experts per token the assignments. */
#include "spec/nodes.h"
#include "spec/ops_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* All matrices of one product, those of this rank's experts lying one after another: (experts, out, in). */
static qd_class_weight expert_weights(qd_class_writer *w, const char *matrix, int parts)
{
    const qd_ledger *l = w->ledger;
    char suffix[64];
    snprintf(suffix, sizeof suffix, "mlp.experts.0.%s.weight", matrix);
    int first = 0, count = w->model->moe.experts * parts;
    while (first < w->module->param_count &&
           strcmp(l->params[w->module->param_begin + first].name + strlen(w->module->name) + 1, suffix) != 0)
        first++;
    qd_class_weight found = {0};
    for (int i = first; i < first + count; i++) {
        qd_atom atom = qd_ledger_atom(l, w->module->param_begin + i, w->config->rank);
        found.out += atom.length[0];
        found.in = atom.length[0] > 0 ? atom.length[1] : found.in;
    }
    const char *name = parts == 2 ? "experts.gate" : "experts.down";
    found.value = qd_class_slot(w, name, QD_SLOT_PARAM, w->config->param, found.out, found.in);
    found.grad = qd_class_slot(w, name, QD_SLOT_GRAD, w->config->grad, found.out, found.in);
    if (w->no_memory)
        return found;
    w->slots[found.value].param = w->slots[found.grad].param = first;
    w->slots[found.value].param_count = w->slots[found.grad].param_count = count;
    return found;
}

static int local_i32(qd_class_writer *w, const char *name, int64_t rows, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, QD_I32, rows, cols);
}

static int local_rows(qd_class_writer *w, const char *name, int64_t rows, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, w->config->activation, rows, cols);
}

/* Products over experts count what the assignments of a mean load cost. */
static void grouped(qd_class_writer *w, qd_op *op, const qd_class_experts *e, int64_t n, int64_t k)
{
    double rows = (double)w->rows * w->model->moe.per_token * e->etp;
    qd_op_sizes(op, e->capacity, n, k, 2.0 * rows * (double)n * (double)k);
    op->experts = e->held;
    op->expert = e->first;
}

static void on_expert_rows(qd_op *op, const qd_class_experts *e)
{
    qd_op_sizes(op, e->capacity, e->ffn, 0, 0.0);
    op->experts = e->held;
    op->expert = e->first;
}

/* Rows go to the ranks of their experts, or come back. Returns the op that readers of the result wait for. */
static int dispatch(qd_class_writer *w, const qd_class_experts *e, qd_op_kind kind, int from, int to)
{
    int64_t cols = w->model->hidden;
    qd_op *op = qd_class_exchange(w, kind, e->group, (const int[]){from, e->table, to}, 3, 0, e->capacity, cols);
    op->k = e->room;
    op->experts = e->held;
    /* An even load, and ranks of tp and cp with equally many rows: so all of the group say the same. */
    const int *degree = w->ledger->mesh.degree;
    op->exchange.count = w->config->batch * w->config->seq * w->model->moe.per_token * e->etp * (e->ranks - 1) * cols /
                         (degree[QD_AXIS_TP] * degree[QD_AXIS_CP]);
    op->exchange.uneven = true;
    op->exchange.async = w->config->overlap;
    return w->config->overlap ? w->op_count - 1 : -1;
}

static int64_t at_most(double wanted, int64_t worst)
{
    return ceil(wanted) < (double)worst ? (int64_t)ceil(wanted) : worst;
}

static void choose_layout(qd_class_writer *w, qd_class_experts *e)
{
    const qd_mesh *mesh = &w->ledger->mesh;
    const qd_moe *moe = &w->model->moe;
    int64_t all = w->config->batch * qd_context_most_rows(w->config->seq, mesh->degree[QD_AXIS_CP]); /* of the rank of cp with most */
    int tp = mesh->sp ? mesh->degree[QD_AXIS_TP] : 1;
    int64_t most = (all + tp - 1) / tp * moe->per_token; /* assignments of the rank with most rows */
    e->nodes = qd_nodes_spanned(mesh);
    e->group = qd_relay_group(mesh);
    e->etp = mesh->etp > 1 ? mesh->etp : 1;
    e->ranks = e->group.size;
    e->held = qd_experts_of(w->model, mesh, w->config->rank, &e->first);
    e->first %= moe->experts / e->nodes;
    e->relayed = e->nodes * (most / moe->per_token);
    int64_t worst = most * e->ranks * e->nodes;
    e->room = e->nodes == 1 ? w->rows * moe->per_token : at_most(w->config->expert_rows * (double)most, most * e->nodes);
    e->capacity = e->ranks == 1 ? e->room : at_most(w->config->expert_rows * (double)most * e->etp, worst);
    e->rounds = (e->ranks > 1 && e->capacity < worst) || (e->nodes > 1 && e->room < most * e->nodes);
    e->load_rows = moe->balance == QD_BALANCE_SEQUENCE ? w->seq : all;
}

/* What exceeds the room, in further rounds. */
static void further_rounds(qd_class_writer *w, const qd_class_experts *e, qd_op_kind kind, int *slots, int room, int count)
{
    bool backward = kind == QD_OP_EXPERT_ROUNDS_GRAD;
    slots[room] = local_rows(w, "room of further rounds", 1,
                             qd_round_room_of(e->capacity, w->model->hidden, e->ffn, e->room, backward).elements);
    qd_op *op = qd_class_exchange(w, kind, e->group, slots, count, 0, e->capacity, w->model->hidden);
    op->k = e->room;
    op->experts = e->held;
    op->expert = e->first;
    op->exchange.count = 0;
    op->exchange.uneven = true;
    op->exchange.dtype = w->config->activation;
}

static void sum_loads(qd_class_writer *w, const qd_class_experts *e)
{
    qd_group group = qd_expert_load_group(w->model, &w->ledger->mesh);
    if (group.size > 1 && w->config->training)
        qd_class_exchange(w, QD_OP_ALL_REDUCE, group, (const int[]){e->load}, 1, 0, w->slots[e->load].rows, w->slots[e->load].cols);
}

void qd_write_experts(qd_class_writer *w, qd_class_experts *e, int x, int residual, int out)
{
    const qd_model *m = w->model;
    const qd_moe *moe = &m->moe;
    qd_class_weight none = {-1, -1, 0, 0};
    int64_t all_rows = w->rows;
    w->rows = w->port_rows; /* each rank of tp routes its own */
    int64_t assignments = w->rows * moe->per_token, loads = moe->balance == QD_BALANCE_SEQUENCE ? w->config->batch : 1;
    *e = (qd_class_experts){
        .router = qd_class_weights(w, "mlp.router.weight", 1),
        .bias = qd_class_weights(w, "mlp.router.bias", 1),
        .up_w = expert_weights(w, "gate", 2),
        .down_w = expert_weights(w, "down", 1),
        .shared_up = moe->shared > 0 ? qd_class_weights(w, "mlp.shared.gate.weight", 2) : none,
        .shared_down = moe->shared > 0 ? qd_class_weights(w, "mlp.shared.down.weight", 1) : none,
        .logits = qd_class_local_f32(w, "router_logits", w->rows, moe->experts),
        .choice = local_i32(w, "choice", w->rows, moe->per_token),
        .weight = qd_class_local_f32(w, "expert_weight", w->rows, moe->per_token),
        .load = qd_class_local_f32(w, "expert_load", loads, moe->experts),
        .place = local_i32(w, "place", w->rows, moe->per_token),
        .from = local_i32(w, "from", 1, assignments),
        .count = local_i32(w, "expert_rows", 1, moe->experts),
    };
    choose_layout(w, e);
    bool apart = e->ranks > 1, by_node = e->nodes > 1;
    e->ffn = e->down_w.in;
    e->table = apart || by_node ? local_i32(w, "expert_rows of all ranks", e->ranks, moe->experts / e->nodes) : e->count;
    e->sorted = local_rows(w, "rows by expert", e->room, m->hidden);
    e->rows_in = apart ? local_rows(w, "expert_in", e->capacity, m->hidden) : e->sorted;
    e->up = local_rows(w, "expert_up", e->capacity, 2 * e->ffn);
    e->active = local_rows(w, "expert_active", e->capacity, e->ffn);
    e->rows_out = local_rows(w, "expert_out", e->capacity, m->hidden);
    e->back = apart ? local_rows(w, "rows from experts", e->room * e->etp, m->hidden) : e->rows_out;

    qd_class_linear(w, x, e->router, none, e->logits);
    qd_op *route = QD_CLASS_OP(w, ROUTE, e->logits, e->bias.value, e->choice, e->weight, e->load);
    qd_op_sizes(route, w->rows, moe->experts, e->load_rows, 0.0);
    route->first = w->port_first;
    sum_loads(w, e);
    qd_op_sizes(QD_CLASS_OP(w, ROUTE_PLAN, e->choice, e->weight, e->place, e->from, e->count), w->rows, moe->experts, 0, 0.0);
    int pending = -1;
    if (by_node) {
        pending = qd_write_to_nodes(w, e, x);
    } else {
        if (apart)
            qd_class_exchange(w, QD_OP_ALL_GATHER, e->group, (const int[]){e->count, e->table}, 2, 0, e->ranks, moe->experts);
        qd_op_sizes(QD_CLASS_OP(w, PERMUTE, x, e->from, e->count, e->sorted, e->place), w->rows, m->hidden, 0, 0.0);
        pending = apart ? dispatch(w, e, QD_OP_DISPATCH, e->sorted, e->rows_in) : -1;
    }
    int add = residual;
    bool drops = m->dropout > 0.0 && w->config->training, fuse_residual = w->config->traits->fused_residual && !drops;
    if (moe->shared > 0) { /* beside the dispatch */
        e->shared_sum = qd_class_local(w, "shared_up", e->shared_up.out);
        e->shared_active = qd_class_local(w, "shared_active", e->shared_down.in);
        add = qd_class_local(w, "shared_out", m->hidden);
        qd_class_linear(w, x, e->shared_up, none, e->shared_sum);
        qd_op_sizes(QD_CLASS_OP(w, ACTIVATION, e->shared_sum, e->shared_active), w->rows, e->shared_down.in, 0, 0.0);
        if (fuse_residual)
            qd_class_linear_add(w, e->shared_active, e->shared_down, none, residual, add);
        else
            qd_class_linear(w, e->shared_active, e->shared_down, none, add);
    }
    if (by_node) {
        qd_write_relay(w, e, pending);
        pending = apart ? dispatch(w, e, QD_OP_DISPATCH, e->sorted, e->rows_in) : -1;
    }
    grouped(w, QD_CLASS_OP(w, EXPERTS, e->rows_in, e->up_w.value, e->table, e->up), e, 2 * e->ffn, m->hidden);
    qd_class_await(w, pending);
    on_expert_rows(QD_CLASS_OP(w, EXPERT_ACTIVATION, e->up, e->table, e->active), e);
    grouped(w, QD_CLASS_OP(w, EXPERTS, e->active, e->down_w.value, e->table, e->rows_out), e, m->hidden, e->ffn);
    pending = apart ? dispatch(w, e, QD_OP_RETURN, e->rows_out, e->back) : -1;
    if (by_node) {
        pending = qd_write_from_nodes(w, e, pending);
    } else if (e->rounds) {
        further_rounds(w, e, QD_OP_EXPERT_ROUNDS, (int[]){e->sorted, e->table, e->up_w.value, e->down_w.value, -1, e->back}, 4, 6);
        qd_class_await(w, pending);
    }
    int branch = drops || (moe->shared > 0 && !fuse_residual) ? qd_class_local(w, "mlp_branch", m->hidden) : out;
    int added = branch == out || moe->shared > 0 ? add : -1;
    qd_op *combine = by_node ? QD_CLASS_OP(w, COMBINE, e->by_node.sums, e->by_node.place, -1, added, branch)
                             : QD_CLASS_OP(w, COMBINE, e->back, e->place, e->weight, added, branch);
    qd_op_sizes(combine, w->rows, m->hidden, by_node ? 1 : e->etp, 0.0);
    qd_class_await(w, pending);
    if (branch != out) {
        branch = qd_class_dropout(w, "mlp_dropped", branch, 2);
        qd_op_sizes(QD_CLASS_OP(w, ADD, residual, branch, out), w->rows, m->hidden, 0, 0.0);
    }
    w->rows = all_rows;
}

/* Whether the products that give the gradients of a matrix are the last to write them: no further rounds, no sums over ranks. */
static bool sums_squares(const qd_class_writer *w, const qd_class_experts *e, int grad)
{
    int param = w->module->param_begin + w->slots[grad].param;
    return w->config->traits->squares_in_products && w->config->training && e->ranks == 1 && e->nodes == 1 &&
           qd_ledger_data_group(w->ledger, w->ledger->params[param].family).size == 1 && qd_ledger_tensor_group(w->ledger, param).size == 1;
}

static void experts_weight_grad(qd_class_writer *w, const qd_class_experts *e, int dy, int x, qd_class_weight matrix, int64_t n, int64_t k)
{
    w->phase = QD_PHASE_WEIGHT;
    qd_op *op = QD_CLASS_OP(w, EXPERTS_DW, dy, x, e->table, matrix.grad);
    grouped(w, op, e, n, k);
    op->squares = sums_squares(w, e, matrix.grad);
    w->phase = QD_PHASE_INPUT;
}

/* The router's part of the gradient of x. */
static int router_grad(qd_class_writer *w, const qd_class_experts *e, int d_weight, int x)
{
    const qd_moe *moe = &w->model->moe;
    int d_logits = qd_class_local(w, "d_router_logits", moe->experts); /* as narrow as what it is multiplied with */
    int d_router = qd_class_local(w, "d_router_in", w->model->hidden);
    qd_op *route = QD_CLASS_OP(w, ROUTE_GRAD, e->logits, e->choice, e->weight, d_weight, e->load, d_logits);
    qd_op_sizes(route, w->rows, moe->experts, e->load_rows, 0.0);
    route->first = w->port_first;
    if (moe->bias && moe->bias_rate > 0.0) {
        w->phase = QD_PHASE_WEIGHT;
        qd_op_sizes(QD_CLASS_OP(w, ROUTE_LOAD, e->choice, e->bias.grad), w->rows, moe->experts, 0, 0.0);
        w->phase = QD_PHASE_INPUT;
    }
    qd_class_linear_grad(w, d_logits, x, e->router, (qd_class_weight){-1, -1, 0, 0}, -1, d_router);
    return d_router;
}

/* The shared experts' part; -1: there are none. */
static int shared_grad(qd_class_writer *w, const qd_class_experts *e, int dy, int x)
{
    qd_class_weight none = {-1, -1, 0, 0};
    if (w->model->moe.shared == 0)
        return -1;
    int d_shared_active = qd_class_local(w, "d_shared_active", e->shared_down.in);
    int d_shared_up = qd_class_local(w, "d_shared_up", e->shared_up.out);
    int d_shared = qd_class_local(w, "d_shared_in", w->model->hidden);
    qd_class_linear_input_grad(w, dy, e->shared_down, -1, d_shared_active);
    if (qd_class_swiglu_again(w, false)) {
        int again = qd_class_local(w, "shared_active_again", e->shared_down.in);
        qd_op_sizes(QD_CLASS_OP(w, ACTIVATION_GRAD_Y, e->shared_sum, d_shared_active, d_shared_up, again), w->rows, e->shared_down.in, 0,
                    0.0);
        qd_class_linear_weight_grad(w, dy, again, e->shared_down, none);
    } else {
        qd_class_linear_weight_grad(w, dy, e->shared_active, e->shared_down, none);
        qd_op_sizes(QD_CLASS_OP(w, ACTIVATION_GRAD, e->shared_sum, d_shared_active, d_shared_up), w->rows, e->shared_down.in, 0, 0.0);
    }
    qd_class_linear_grad(w, d_shared_up, x, e->shared_up, none, -1, d_shared);
    return d_shared;
}

/* Both together. */
static int beside_grad(qd_class_writer *w, int d_router, int d_shared)
{
    if (d_shared < 0)
        return d_router;
    int sum = qd_class_local(w, "d_beside_experts", w->model->hidden);
    qd_op_sizes(QD_CLASS_OP(w, ADD, d_router, d_shared, sum), w->rows, w->model->hidden, 0, 0.0);
    return sum;
}

int qd_write_experts_grad(qd_class_writer *w, const qd_class_experts *e, int dy, int x)
{
    const qd_model *m = w->model;
    const qd_moe *moe = &m->moe;
    int64_t all_rows = w->rows;
    w->rows = w->port_rows;
    bool apart = e->ranks > 1, by_node = e->nodes > 1;
    int d_sorted = local_rows(w, "d_rows by expert", e->room, m->hidden);
    int d_out = apart ? local_rows(w, "d_expert_out", e->capacity, m->hidden) : d_sorted;
    int d_weight = qd_class_local_f32(w, "d_expert_weight", w->rows, moe->per_token);
    int d_active = local_rows(w, "d_expert_active", e->capacity, e->ffn);
    int d_up = local_rows(w, "d_expert_up", e->capacity, 2 * e->ffn);
    bool again = qd_class_swiglu_again(w, true);
    int active = again ? local_rows(w, "expert_active_again", e->capacity, e->ffn) : e->active;
    int d_in = local_rows(w, "d_expert_in", e->capacity, m->hidden);
    int d_back = apart ? local_rows(w, "d_rows from experts", e->room * e->etp, m->hidden) : d_in;
    int dx = qd_class_local(w, "d_experts", m->hidden);
    int relay_dy = -1, relay_d_weight = -1, d_router = -1, d_shared, pending;

    if (by_node) {
        relay_dy = local_rows(w, "d_relayed sums", e->relayed, m->hidden);
        relay_d_weight = qd_class_local_f32(w, "d_relayed weight", e->relayed, moe->per_token);
        pending = qd_write_grad_to_nodes(w, e, dy, relay_dy);
        d_shared = shared_grad(w, e, dy, x); /* beside it */
        qd_op *grad = QD_CLASS_OP(w, COMBINE_GRAD, relay_dy, e->back, e->by_node.relay_from, e->by_node.relay_place, e->by_node.relay_count,
                                  e->by_node.relay_weight, d_sorted, relay_d_weight);
        qd_op_sizes(grad, e->relayed, m->hidden, e->etp, 0.0);
        qd_class_await(w, pending);
        pending = apart ? dispatch(w, e, QD_OP_DISPATCH, d_sorted, d_out) : -1;
    } else {
        qd_op_sizes(QD_CLASS_OP(w, COMBINE_GRAD, dy, e->back, e->from, e->place, e->count, e->weight, d_sorted, d_weight), w->rows,
                    m->hidden, e->etp, 0.0);
        pending = apart ? dispatch(w, e, QD_OP_DISPATCH, d_sorted, d_out) : -1;
        d_router = router_grad(w, e, d_weight, x); /* router and shared experts beside the dispatch */
        d_shared = shared_grad(w, e, dy, x);
    }
    int add = by_node ? -1 : beside_grad(w, d_router, d_shared);
    grouped(w, QD_CLASS_OP(w, EXPERTS_DX, d_out, e->down_w.value, e->table, d_active), e, e->ffn, m->hidden);
    qd_class_await(w, pending);
    /* The pass that gives the gradients of gate and up can give their product again: it need not be kept then. */
    on_expert_rows(QD_CLASS_OP(w, EXPERT_ACTIVATION_GRAD, e->up, d_active, e->table, d_up, again ? active : -1), e);
    grouped(w, QD_CLASS_OP(w, EXPERTS_DX, d_up, e->up_w.value, e->table, d_in), e, m->hidden, 2 * e->ffn);
    pending = apart ? dispatch(w, e, QD_OP_RETURN, d_in, d_back) : -1;
    experts_weight_grad(w, e, d_out, active, e->down_w, m->hidden, e->ffn); /* beside it */
    experts_weight_grad(w, e, d_up, e->rows_in, e->up_w, 2 * e->ffn, m->hidden);
    if (by_node) {
        int d_sums = local_rows(w, "d_rows by node", w->slots[e->by_node.copies].rows, m->hidden);
        qd_write_grad_from_nodes(w, e, x, relay_dy, relay_d_weight, d_back, pending, d_sums, d_weight);
        add = beside_grad(w, router_grad(w, e, d_weight, x), d_shared);
        qd_op_sizes(QD_CLASS_OP(w, COMBINE, d_sums, e->by_node.place, -1, add, dx), w->rows, m->hidden, 1, 0.0);
        w->rows = all_rows;
        return dx;
    }
    if (e->rounds) { /* gradients of weights stay in their phase: so their sums have one order, whatever runs between the phases */
        int slots[] = {x, e->from, e->count, d_sorted, e->table, e->up_w.value, e->down_w.value, e->up_w.grad, e->down_w.grad, d_back, -1};
        if (w->config->split)
            slots[7] = slots[8] = -1;
        further_rounds(w, e, QD_OP_EXPERT_ROUNDS_GRAD, slots, 10, 11);
        qd_class_await(w, pending);
        w->phase = QD_PHASE_WEIGHT;
        if (w->config->split)
            further_rounds(
                w, e, QD_OP_EXPERT_ROUNDS_GRAD,
                (int[]){x, e->from, e->count, d_sorted, e->table, e->up_w.value, e->down_w.value, e->up_w.grad, e->down_w.grad, -1, -1}, 10,
                11);
        w->phase = QD_PHASE_INPUT;
    }
    qd_op_sizes(QD_CLASS_OP(w, COMBINE, d_back, e->place, -1, add, dx), w->rows, m->hidden, e->etp, 0.0);
    qd_class_await(w, pending);
    w->rows = all_rows;
    return dx;
}
