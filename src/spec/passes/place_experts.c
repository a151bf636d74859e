/* Placement of routed experts: dispatch of rows, and buffer capacity. R is the number of rows of
 * the port, A = R · experts per token the number of assignments.
 *
 * Rows sorted by expert are sent to the ranks of their experts before the first grouped GEMM of a
 * pass, and returned after the last one. Rows that exceed the planned buffers are sent in extra
 * dispatch rounds. On several nodes with two-level dispatch (spec/layout/nodes.h) each row crosses
 * to a node at most once: x → copies sorted by node → across → relayed rows → rows sorted by
 * expert, as in flat dispatch → weighted sums of relayed rows → back across → sum over nodes. The
 * backward pass mirrors it: gradients of sums cross once per node; gradients of x and of the
 * weights return. */
#include "spec/layout/nodes.h"
#include "spec/passes/sequence.h"

#include <math.h>

enum {
    QD_CLASS_NUMBERS, NODES, RANKS, ETP,
    NODE_EXPERTS,          /* experts of a node */
    /* Rows sorted by expert that this rank can send in one round (its assignments, or those of the
     * rows that it relays), and that it can receive. */
    ROOM, CAPACITY,
    RETURNED,              /* rows that return to this rank: one from each rank of etp */
    ROW_COPIES,            /* R · nodes */
    COPIES_MOST, RELAYED,  /* rows sent to nodes, rows relayed to experts: most of both */
    RELAYED_CHOICES,       /* choices of the relayed rows */
    CHOICE_NUMBERS,        /* choices and weights of one row */
    COUNTS, ALL_RANKS,     /* columns and rows of the table of counts */
    TAKEN_SIZE,
    ROUND_NUMBERS, ROUND_ELEMENTS, /* workspace of extra rounds */
    HELD, FIRST_HELD,      /* experts of this rank, and the first among those of its node */
    FIRST_RELAYED,         /* RELAYED if there are nodes */
    /* Elements sent to experts of a node, if the load is balanced; to nodes, if all experts are
     * equally likely: rows alone, with choices, with gradients of weights. */
    DISPATCH_COUNT, ROWS_COUNT, CHOICES_COUNT, WEIGHTS_COUNT,
};

enum {
    /* Given by the list: rows, routing, weights. */
    X, CHOICE, WEIGHT, PLACE, FROM, COUNT, SORTED, UP, DOWN, UP_BIAS, DOWN_BIAS,
    UP_GRAD, DOWN_GRAD, UP_BIAS_GRAD, DOWN_BIAS_GRAD, /* in the order of the weights */
    OUT, DY, D_SORTED, D_WEIGHT, ADD, Y,
    /* Rows per expert of all ranks; rows of this rank's experts; rows back from experts. Without
     * other ranks they are COUNT, SORTED and OUT. */
    TABLE, ROWS_IN, BACK, D_OUT, D_BACK,
    /* Two-level dispatch. A copy is a row sent to one node. */
    COPY_PLACE, COPY_FROM, NODE_COUNT, ALL_COUNTS, ALL_TABLE, COPIES, CHOSEN, RELAY, RELAY_CHOSEN, TAKEN, RELAY_PLACE, RELAY_FROM,
    RELAY_COUNT, RELAY_WEIGHT, RELAY_SUM, SUMS, D_COPIES, RELAY_DY, RELAY_D_WEIGHT, RELAY_DX, COPY_D_WEIGHT, D_SUMS,
    /* Extra rounds. Their gradients: -1 if only gradients of weights are wanted. */
    ROUND_LISTS, ROUND_BUFFERS, COPIES_AGAIN, RELAY_AGAIN, RESEND_LISTS, ROUND_D_WEIGHT, ROUND_DX,
    VALUES
};
_Static_assert(VALUES <= QD_SEQUENCE_VALUES && WEIGHTS_COUNT < QD_SEQUENCE_NUMBERS, "the limits of a sequence");

/* Facts: experts on other ranks of a node; experts on other nodes; rows may exceed the buffers. */
enum { APART = 1, BY_NODE = 2, ROUNDS = 4 };

static const qd_sequence_value values[VALUES] = {
    [TABLE] = {"expert_rows of all ranks", QD_VALUE_I32, RANKS, .cols = NODE_EXPERTS, .same = 1 + COUNT, .unless = APART | BY_NODE},
    [ROWS_IN] = {"expert_in", QD_VALUE_ACTIVATION, CAPACITY, .cols = HIDDEN, .same = 1 + SORTED, .unless = APART},
    [BACK] = {"rows from experts", QD_VALUE_ACTIVATION, RETURNED, .cols = HIDDEN, .same = 1 + OUT, .unless = APART},
    [D_OUT] = {"d_expert_out", QD_VALUE_ACTIVATION, CAPACITY, .cols = HIDDEN, .same = 1 + D_SORTED, .unless = APART},
    [D_BACK] = {"d_rows from experts", QD_VALUE_ACTIVATION, RETURNED, .cols = HIDDEN, .same = 1 + OUT, .unless = APART},
    [COPY_PLACE] = {"place of copies", QD_VALUE_I32, PORT_ROWS, .cols = NODES},
    [COPY_FROM] = {"from of copies", QD_VALUE_I32, ONE, .cols = ROW_COPIES},
    [NODE_COUNT] = {"rows per node", QD_VALUE_I32, ONE, .cols = NODES},
    [ALL_COUNTS] = {"rows per expert and node", QD_VALUE_I32, ONE, .cols = COUNTS},
    [ALL_TABLE] = {"rows per expert and node of all ranks", QD_VALUE_I32, ALL_RANKS, .cols = COUNTS},
    [COPIES] = {"rows by node", QD_VALUE_ACTIVATION, COPIES_MOST, .cols = HIDDEN},
    [CHOSEN] = {"choices of copies", QD_VALUE_I32, COPIES_MOST, .cols = CHOICE_NUMBERS},
    [RELAY] = {"relayed rows", QD_VALUE_ACTIVATION, RELAYED, .cols = HIDDEN},
    [RELAY_CHOSEN] = {"choices of relayed rows", QD_VALUE_I32, RELAYED, .cols = CHOICE_NUMBERS},
    [TAKEN] = {"rows of earlier rounds", QD_VALUE_I32, RANKS, .cols = NODE_EXPERTS},
    [RELAY_PLACE] = {"place of relayed rows", QD_VALUE_I32, RELAYED, .cols = PER_TOKEN},
    [RELAY_FROM] = {"from of relayed rows", QD_VALUE_I32, ONE, .cols = RELAYED_CHOICES},
    [RELAY_COUNT] = {"relayed rows per expert", QD_VALUE_I32, ONE, .cols = NODE_EXPERTS},
    [RELAY_WEIGHT] = {"weight of relayed rows", QD_VALUE_F32, RELAYED, .cols = PER_TOKEN},
    [RELAY_SUM] = {"sums of relayed rows", QD_VALUE_ACTIVATION, RELAYED, .cols = HIDDEN},
    [SUMS] = {"sums by node", QD_VALUE_ACTIVATION, COPIES_MOST, .cols = HIDDEN},
    [D_COPIES] = {"d_sums by node", QD_VALUE_ACTIVATION, COPIES_MOST, .cols = HIDDEN},
    [RELAY_DY] = {"d_relayed sums", QD_VALUE_ACTIVATION, RELAYED, .cols = HIDDEN},
    [RELAY_D_WEIGHT] = {"d_relayed weight", QD_VALUE_F32, RELAYED, .cols = PER_TOKEN},
    [RELAY_DX] = {"d_relayed rows", QD_VALUE_ACTIVATION, RELAYED, .cols = HIDDEN},
    [COPY_D_WEIGHT] = {"d_weight of copies", QD_VALUE_F32, COPIES_MOST, .cols = PER_TOKEN},
    [D_SUMS] = {"d_rows by node", QD_VALUE_ACTIVATION, COPIES_MOST, .cols = HIDDEN},
    [ROUND_LISTS] = {"lists of extra rounds", QD_VALUE_I32, ONE, ROUND_NUMBERS, .buffer = true},
    [ROUND_BUFFERS] = {"buffers of extra rounds", QD_VALUE_ACTIVATION, ONE, ROUND_ELEMENTS, .buffer = true},
    [COPIES_AGAIN] = {"rows by node again", QD_VALUE_ACTIVATION, COPIES_MOST, HIDDEN, .buffer = true},
    [RELAY_AGAIN] = {"relayed rows again", QD_VALUE_ACTIVATION, RELAYED, HIDDEN, .buffer = true},
    [RESEND_LISTS] = {"lists of rounds", QD_VALUE_I32, TWO, TAKEN_SIZE, .buffer = true},
};

enum { SEND, FROM_EXPERTS, COLLECT, GRAD_SEND, GRAD_FROM_EXPERTS, GRAD_ROUNDS, GRAD_FROM_NODES, GRAD_COLLECT };

/* LOCAL: on this rank. PLAN: this rank's buffers as sizes. COUNTS_OF_ALL: gathers counts.
 * DISPATCHED: rows move between ranks of a node. ACROSS: between nodes. IN_ROUNDS: extra rounds
 * inside a node; RESENT: between nodes. */
enum { LOCAL, PLAN, COUNTS_OF_ALL, DISPATCHED, ACROSS, ACROSS_CHOICES, ACROSS_WEIGHTS, IN_ROUNDS, RESENT };
enum { OVER_ALL = 1, OVER_NODE, OVER_NODES };
static const qd_manner manners[] = {
    [LOCAL] = {0},
    [PLAN] = {.experts = HELD, .expert = FIRST_HELD, .first = FIRST_RELAYED},
    [COUNTS_OF_ALL] = {.over = OVER_ALL},
    [DISPATCHED] = {.experts = HELD, .over = OVER_NODE, .uneven = true, .async = true, .count = DISPATCH_COUNT},
    [ACROSS] = {.over = OVER_NODES, .uneven = true, .async = true, .count = ROWS_COUNT},
    [ACROSS_CHOICES] = {.over = OVER_NODES, .uneven = true, .async = true, .count = CHOICES_COUNT},
    [ACROSS_WEIGHTS] = {.over = OVER_NODES, .uneven = true, .async = true, .count = WEIGHTS_COUNT},
    [IN_ROUNDS] = {.experts = HELD, .expert = FIRST_HELD, .first = FIRST_RELAYED, .over = OVER_NODE, .uneven = true},
    [RESENT] = {.experts = HELD, .expert = FIRST_HELD, .first = FIRST_RELAYED, .over = OVER_NODES, .uneven = true},
};

static const qd_step steps[] = {
    QD_STEP(SEND, BY_NODE, 0, NODE_PLAN, LOCAL, PORT_ROWS, NODES, NONE, (CHOICE, CHOICE), (WEIGHT, WEIGHT), (PLACE, PLACE), (COUNT, COUNT),
            (COPY_PLACE, COPY_PLACE), (COPY_FROM, COPY_FROM), (NODE_COUNT, NODE_COUNT), (CHOSEN, CHOSEN), (COUNTS, ALL_COUNTS)),
    QD_STEP(SEND, BY_NODE, 0, ALL_GATHER, COUNTS_OF_ALL, ALL_RANKS, COUNTS, NONE, (X, ALL_COUNTS), (Y, ALL_TABLE)),
    QD_STEP(SEND, BY_NODE, 0, PERMUTE, LOCAL, PORT_ROWS, HIDDEN, NONE, (X, X), (FROM, COPY_FROM), (COUNT, NODE_COUNT), (Y, COPIES),
            (PLACE, COPY_PLACE)),
    QD_STEP(SEND, BY_NODE, 0, NODE_DISPATCH, ACROSS_CHOICES, RELAYED, HIDDEN, CHOICE_NUMBERS, (X, COPIES), (NUMBERS, CHOSEN),
            (TABLE, ALL_TABLE), (Y, RELAY), (NUMBERS_OUT, RELAY_CHOSEN)),
    QD_STEP(SEND, APART, BY_NODE, ALL_GATHER, COUNTS_OF_ALL, RANKS, EXPERTS, NONE, (X, COUNT), (Y, TABLE)),
    QD_STEP(SEND, 0, BY_NODE, PERMUTE, LOCAL, PORT_ROWS, HIDDEN, NONE, (X, X), (FROM, FROM), (COUNT, COUNT), (Y, SORTED), (PLACE, PLACE)),
    QD_STEP(SEND, APART, BY_NODE, DISPATCH, DISPATCHED, CAPACITY, HIDDEN, ROOM, (X, SORTED), (TABLE, TABLE), (Y, ROWS_IN)),
    QD_STEP(SEND, BY_NODE, 0, RELAY_PLAN, PLAN, CAPACITY, NONE, ROOM, (CHOSEN, RELAY_CHOSEN), (TABLE, ALL_TABLE), (TAKEN, TAKEN),
            (TAKE, TABLE), (PLACE, RELAY_PLACE), (FROM, RELAY_FROM), (COUNT, RELAY_COUNT), (WEIGHT, RELAY_WEIGHT)),
    QD_STEP(SEND, BY_NODE, 0, PERMUTE, LOCAL, RELAYED, HIDDEN, NONE, (X, RELAY), (FROM, RELAY_FROM), (COUNT, RELAY_COUNT),
            (Y, SORTED), (PLACE, RELAY_PLACE)),
    QD_STEP(SEND, BY_NODE | APART, 0, DISPATCH, DISPATCHED, CAPACITY, HIDDEN, ROOM, (X, SORTED), (TABLE, TABLE), (Y, ROWS_IN)),

    /* After the last one. */
    QD_STEP(FROM_EXPERTS, APART, 0, RETURN, DISPATCHED, CAPACITY, HIDDEN, ROOM, (X, OUT), (TABLE, TABLE), (Y, BACK)),

    QD_STEP(COLLECT, BY_NODE, 0, COMBINE, LOCAL, RELAYED, HIDDEN, ETP, (ROWS, BACK), (PLACE, RELAY_PLACE), (WEIGHT, RELAY_WEIGHT),
            (Y, RELAY_SUM)),
    QD_STEP(COLLECT, BY_NODE | ROUNDS, 0, RELAY_ROUNDS, IN_ROUNDS, CAPACITY, HIDDEN, ROOM, (X, RELAY), (CHOSEN, RELAY_CHOSEN),
            (TABLE, ALL_TABLE), (WEIGHT, RELAY_WEIGHT), (GATE_UP, UP), (DOWN, DOWN), (LISTS, ROUND_LISTS), (ROOM, ROUND_BUFFERS),
            (Y, RELAY_SUM), (UP_BIAS, UP_BIAS), (DOWN_BIAS, DOWN_BIAS)),
    QD_STEP(COLLECT, BY_NODE, 0, NODE_RETURN, ACROSS, RELAYED, HIDDEN, NONE, (X, RELAY_SUM), (TABLE, ALL_TABLE), (Y, SUMS)),
    QD_STEP(COLLECT, BY_NODE, 0, COMBINE, LOCAL, PORT_ROWS, HIDDEN, ONE, (ROWS, SUMS), (PLACE, COPY_PLACE), (ADD, ADD), (Y, Y)),
    QD_STEP(COLLECT, ROUNDS, BY_NODE, EXPERT_ROUNDS, IN_ROUNDS, CAPACITY, HIDDEN, ROOM, (X, SORTED), (TABLE, TABLE), (GATE_UP, UP),
            (DOWN, DOWN), (ROOM, ROUND_BUFFERS), (Y, BACK), (UP_BIAS, UP_BIAS), (DOWN_BIAS, DOWN_BIAS)),
    QD_STEP(COLLECT, 0, BY_NODE, COMBINE, LOCAL, PORT_ROWS, HIDDEN, ETP, (ROWS, BACK), (PLACE, PLACE), (WEIGHT, WEIGHT), (ADD, ADD),
            (Y, Y)),

    QD_STEP(GRAD_SEND, BY_NODE, 0, PERMUTE, LOCAL, PORT_ROWS, HIDDEN, NONE, (X, DY), (FROM, COPY_FROM), (COUNT, NODE_COUNT), (Y, D_COPIES),
            (PLACE, COPY_PLACE)),
    QD_STEP(GRAD_SEND, BY_NODE, 0, NODE_DISPATCH, ACROSS, RELAYED, HIDDEN, NONE, (X, D_COPIES), (TABLE, ALL_TABLE), (Y, RELAY_DY)),
    QD_STEP(GRAD_SEND, BY_NODE, 0, COMBINE_GRAD, LOCAL, RELAYED, HIDDEN, ETP, (DY, RELAY_DY), (ROWS, BACK), (FROM, RELAY_FROM),
            (PLACE, RELAY_PLACE), (COUNT, RELAY_COUNT), (WEIGHT, RELAY_WEIGHT), (D_ROWS, D_SORTED), (D_WEIGHT, RELAY_D_WEIGHT)),
    QD_STEP(GRAD_SEND, 0, BY_NODE, COMBINE_GRAD, LOCAL, PORT_ROWS, HIDDEN, ETP, (DY, DY), (ROWS, BACK), (FROM, FROM), (PLACE, PLACE),
            (COUNT, COUNT), (WEIGHT, WEIGHT), (D_ROWS, D_SORTED), (D_WEIGHT, D_WEIGHT)),
    QD_STEP(GRAD_SEND, APART, 0, DISPATCH, DISPATCHED, CAPACITY, HIDDEN, ROOM, (X, D_SORTED), (TABLE, TABLE), (Y, D_OUT)),

    QD_STEP(GRAD_FROM_EXPERTS, APART, 0, RETURN, DISPATCHED, CAPACITY, HIDDEN, ROOM, (X, OUT), (TABLE, TABLE), (Y, D_BACK)),
    QD_STEP(GRAD_FROM_EXPERTS, BY_NODE, 0, COMBINE, LOCAL, RELAYED, HIDDEN, ETP, (ROWS, D_BACK), (PLACE, RELAY_PLACE), (Y, RELAY_DX)),

    /* Rows of extra rounds are not kept: they are sent a second time. */
    QD_STEP(GRAD_ROUNDS, BY_NODE, 0, NODE_RESEND, RESENT, CAPACITY, HIDDEN, ROOM, (X, X), (COPY_FROM, COPY_FROM), (NODE_COUNT, NODE_COUNT),
            (TABLE, ALL_TABLE), (COPIES, COPIES_AGAIN), (RELAYED, RELAY_AGAIN), (LISTS, RESEND_LISTS)),
    QD_STEP(GRAD_ROUNDS, BY_NODE, 0, RELAY_ROUNDS_GRAD, IN_ROUNDS, CAPACITY, HIDDEN, ROOM, (X, RELAY_AGAIN), (CHOSEN, RELAY_CHOSEN),
            (TABLE, ALL_TABLE), (WEIGHT, RELAY_WEIGHT), (DY, RELAY_DY), (GATE_UP, UP), (DOWN, DOWN), (GATE_UP_GRAD, UP_GRAD),
            (DOWN_GRAD, DOWN_GRAD), (D_WEIGHT, ROUND_D_WEIGHT), (DX, ROUND_DX), (LISTS, ROUND_LISTS), (ROOM, ROUND_BUFFERS),
            (UP_BIAS, UP_BIAS), (DOWN_BIAS, DOWN_BIAS), (UP_BIAS_GRAD, UP_BIAS_GRAD), (DOWN_BIAS_GRAD, DOWN_BIAS_GRAD)),
    QD_STEP(GRAD_ROUNDS, 0, BY_NODE, EXPERT_ROUNDS_GRAD, IN_ROUNDS, CAPACITY, HIDDEN, ROOM, (X, X), (FROM, FROM), (COUNT, COUNT),
            (DY, D_SORTED), (TABLE, TABLE), (GATE_UP, UP), (DOWN, DOWN), (GATE_UP_GRAD, UP_GRAD), (DOWN_GRAD, DOWN_GRAD), (DX, ROUND_DX),
            (ROOM, ROUND_BUFFERS), (UP_BIAS, UP_BIAS), (UP_BIAS_GRAD, UP_BIAS_GRAD), (DOWN_BIAS_GRAD, DOWN_BIAS_GRAD)),

    QD_STEP(GRAD_FROM_NODES, BY_NODE, 0, NODE_RETURN, ACROSS_WEIGHTS, RELAYED, HIDDEN, PER_TOKEN, (X, RELAY_DX), (NUMBERS, RELAY_D_WEIGHT),
            (TABLE, ALL_TABLE), (Y, D_SUMS), (NUMBERS_OUT, COPY_D_WEIGHT)),
    QD_STEP(GRAD_FROM_NODES, BY_NODE, 0, NODE_WEIGHTS, LOCAL, PORT_ROWS, NODES, NONE, (CHOICE, CHOICE), (PLACE, PLACE),
            (COPY_PLACE, COPY_PLACE), (COPY_D_WEIGHT, COPY_D_WEIGHT), (D_WEIGHT, D_WEIGHT)),

    QD_STEP(GRAD_COLLECT, BY_NODE, 0, COMBINE, LOCAL, PORT_ROWS, HIDDEN, ONE, (ROWS, D_SUMS), (PLACE, COPY_PLACE), (ADD, ADD), (Y, Y)),
    QD_STEP(GRAD_COLLECT, 0, BY_NODE, COMBINE, LOCAL, PORT_ROWS, HIDDEN, ETP, (ROWS, D_BACK), (PLACE, PLACE), (ADD, ADD), (Y, Y)),
};

/* Elements that cross to other nodes, with `numbers` 4-byte numbers sent along with each row. An
 * estimate, the same on all ranks of a group: it assumes equally many rows on each rank of tp and
 * cp. */
static int64_t crossing(const qd_class_writer *w, int nodes, double rows, int64_t numbers)
{
    double cols = (double)w->model->hidden + 4.0 * (double)numbers / (double)qd_dtype_size(w->config->activation);
    return llround(rows * qd_nodes_expected(&w->model->moe, nodes) * (nodes - 1) * cols);
}

static int64_t at_most(double wanted, int64_t worst)
{
    return ceil(wanted) < (double)worst ? (int64_t)ceil(wanted) : worst;
}

static bool has_adapters(const qd_class_writer *w)
{
    for (int i = 0; i < w->decl->param_count; i++)
        if (w->decl->params[i].adapter && w->decl->params[i].expert >= 0)
            return true;
    return false;
}

/* Groups, buffer space and volumes of the experts of a module. */
static qd_sequence *plan_experts(qd_class_writer *w)
{
    const qd_mesh *mesh = &w->ledger->mesh;
    const qd_moe *moe = &w->model->moe;
    qd_sequence *s = QD_CLASS_NEW(w, qd_sequence, 1);
    if (!s)
        return NULL;
    int nodes = qd_nodes_spanned(mesh), etp = mesh->etp > 1 ? mesh->etp : 1, ranks = qd_relay_group(mesh).size;
    int tp = mesh->sp ? mesh->degree[QD_AXIS_TP] : 1;
    int64_t k = moe->per_token, most = (w->number[MOST_ROWS] + tp - 1) / tp * k; /* assignments of the rank with the most rows */
    w->held = qd_experts_of(w->model, mesh, w->config->rank, &w->first_held);
    w->first_held %= moe->experts / nodes;
    w->load = (double)w->port_rows * (double)k * etp;
    int64_t worst = most * ranks * nodes, relayed = nodes * (most / k);
    /* Extra rounds do not know adapters: with them there is buffer space for all rows. */
    double space = has_adapters(w) ? (double)worst : w->config->expert_rows * (double)most;
    int64_t room = nodes == 1 ? w->port_rows * k : at_most(space, most * nodes);
    w->routed_rows = ranks == 1 ? room : at_most(space * etp, worst);
    int64_t rows = w->number[WHOLE_ROWS];
    int shares = mesh->degree[QD_AXIS_TP] * mesh->degree[QD_AXIS_CP];
    double mean = (double)rows / shares;
    bool rounds = (ranks > 1 && w->routed_rows < worst) || (nodes > 1 && room < most * nodes);
    *s = (qd_sequence){
        w, QD_SEQUENCE_TABLES(values, steps), manners,
        .facts = (ranks > 1 ? APART : 0) | (nodes > 1 ? BY_NODE : 0) | (rounds ? ROUNDS : 0),
        .group = {qd_expert_group(mesh), qd_relay_group(mesh), qd_nodes_group(mesh)},
        .number = {[NODES] = nodes, [RANKS] = ranks, [ETP] = etp, [NODE_EXPERTS] = moe->experts / nodes, [ROOM] = room,
                   [CAPACITY] = w->routed_rows, [RETURNED] = room * etp, [ROW_COPIES] = w->port_rows * nodes,
                   [COPIES_MOST] = w->port_rows * (nodes < k ? nodes : k), [RELAYED] = relayed, [RELAYED_CHOICES] = relayed * k,
                   [CHOICE_NUMBERS] = 2 * k, [COUNTS] = moe->experts + nodes, [ALL_RANKS] = (int64_t)nodes * ranks,
                   [TAKEN_SIZE] = (int64_t)ranks * (moe->experts / nodes), [HELD] = w->held, [FIRST_HELD] = w->first_held,
                   [FIRST_RELAYED] = nodes > 1 ? relayed : 0,
                   [DISPATCH_COUNT] = rows * k * etp * (ranks - 1) * w->model->hidden / shares,
                   [ROWS_COUNT] = crossing(w, nodes, mean, 0), [CHOICES_COUNT] = crossing(w, nodes, mean, 2 * k),
                   [WEIGHTS_COUNT] = crossing(w, nodes, mean, k)}};
    qd_sequence_begin(s);
    return s;
}

/* The workspace of extra dispatch rounds. */
static void plan_rounds(qd_sequence *s, bool backward)
{
    qd_class_writer *w = s->w;
    int64_t ffn = w->slots[s->slot[DOWN]].cols;
    qd_nodes nodes = qd_nodes_of(w->model, &w->ledger->mesh, 0, s->number[ROOM], w->routed_rows, NULL);
    qd_relay_room relay = qd_relay_room_of(&nodes, s->number[RELAYED], w->model->hidden, ffn, backward);
    qd_round_room flat = qd_round_room_of(w->routed_rows, w->model->hidden, ffn, s->number[ROOM], backward);
    s->number[ROUND_NUMBERS] = relay.numbers;
    s->number[ROUND_ELEMENTS] = s->facts & BY_NODE ? relay.elements : flat.elements;
}

/* Results of the router, per row of the port. */
void qd_place_route(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_group group = qd_expert_load_group(w->model, &w->ledger->mesh);
    if (op->kind == QD_OP_ROUTE && !(w->experts = plan_experts(w)))
        return;
    qd_place_keep(p, op);
    if (op->kind == QD_OP_ROUTE_PLAN)
        QD_SEQUENCE_TAKE(w->experts, op, ROUTE_PLAN, (CHOICE, CHOICE), (WEIGHT, WEIGHT), (PLACE, PLACE), (FROM, FROM), (COUNT, COUNT));
    if (op->kind == QD_OP_ROUTE && group.size > 1 && w->config->training)
        qd_class_exchange(w, QD_OP_ALL_REDUCE, group, op->slot[QD_ROUTE_LOAD], -1);
}

void qd_place_send(qd_placing *p, const qd_op *op)
{
    qd_sequence *s = p->w->experts;
    int *slot = s->slot;
    QD_SEQUENCE_TAKE(s, op, PERMUTE, (X, X), (Y, SORTED));
    p->w->slots[slot[SORTED]].rows = s->number[ROOM];
    p->slot[slot[COUNT]].now = qd_sequence_slot(s, TABLE);
    p->slot[slot[SORTED]].now = qd_sequence_slot(s, ROWS_IN);
    qd_sequence_emit(s, SEND);
}

/* Gradients of rows in extra rounds. Those of weights stay in their phase, so that the order of
 * their sums does not depend on what runs between the phases. */
static void grad_rounds(qd_sequence *s, int d_weight, int dx)
{
    qd_class_writer *w = s->w;
    int *slot = s->slot;
    if (!(s->facts & ROUNDS))
        return;
    plan_rounds(s, true);
    bool trained = qd_class_trained(w, slot[UP]) >= 0;
    for (int half = 0; half < (w->config->split && trained ? 2 : 1); half++) {
        bool inputs = half == 0, weights = half == 1 || !w->config->split;
        w->phase = inputs ? QD_PHASE_INPUT : QD_PHASE_WEIGHT;
        for (int weight = UP; weight <= DOWN_BIAS; weight++)
            slot[weight + UP_GRAD - UP] = weights ? qd_class_trained(w, slot[weight]) : -1;
        slot[ROUND_D_WEIGHT] = inputs ? d_weight : -1;
        slot[ROUND_DX] = inputs ? dx : -1;
        qd_sequence_emit(s, GRAD_ROUNDS);
    }
    w->phase = QD_PHASE_INPUT;
}

/* The rows that are combined next, the result of the last op of the experts, return to the ranks
 * they came from. */
void qd_place_rows(qd_placing *p, int result)
{
    qd_sequence *s = p->w->experts;
    int *slot = s->slot;
    bool forward = p->old.ops[p->at].phase == QD_PHASE_FORWARD;
    if (!p->slot[result].collected)
        return;
    slot[OUT] = result;
    qd_sequence_emit(s, forward ? FROM_EXPERTS : GRAD_FROM_EXPERTS);
    p->slot[result].now = qd_sequence_slot(s, forward ? BACK : D_BACK);
    if (!forward && s->facts & BY_NODE) {
        grad_rounds(s, slot[RELAY_D_WEIGHT], slot[RELAY_DX]);
        qd_sequence_emit(s, GRAD_FROM_NODES);
    }
}

/* The matrices of experts, and their biases, are those of the first grouped GEMM and of the
 * second. */
static void note_weight(const qd_class_writer *w, const qd_op *op, int first)
{
    int *slot = w->experts->slot, weight = qd_op_weight(w, op);
    if (op->phase == QD_PHASE_FORWARD && !w->decl->params[w->slots[weight].param].adapter)
        slot[slot[first] < 0 ? first : first + 1] = weight;
}

void qd_place_grouped(qd_placing *p, const qd_op *op)
{
    note_weight(p->w, op, UP);
    qd_place_keep(p, op);
}

/* Biases of experts, and their gradients: of all columns that the rank has, or of its share of
 * those of a partial sum, so that the ranks of etp together add each element once. */
void qd_place_expert_bias(qd_placing *p, const qd_op *op)
{
    const qd_class_writer *w = p->w;
    const qd_mesh *mesh = &w->ledger->mesh;
    int etp = (int)w->experts->number[ETP], coord = qd_group_coord(mesh, qd_expert_group(mesh), w->config->rank) % etp;
    int64_t width = w->slots[qd_op_first(op)].cols;
    note_weight(w, op, UP_BIAS);
    qd_place_keep(p, op);
    qd_op *placed = &w->ops[w->op_count - 1];
    placed->n = qd_class_outputs(w, qd_op_weight(w, op));
    if (placed->n < width)
        qd_slice(width, etp, coord, &placed->first, &placed->n);
}

/* Forward: the weighted sum over each row's experts. Backward: the gradient of the dispatch. */
void qd_place_collect(qd_placing *p, const qd_op *op)
{
    qd_sequence *s = p->w->experts;
    int *slot = s->slot;
    bool forward = op->phase == QD_PHASE_FORWARD;
    QD_SEQUENCE_TAKE(s, op, COMBINE, (ADD, ADD), (Y, Y));
    if (forward)
        plan_rounds(s, false);
    else if (!(s->facts & BY_NODE))
        grad_rounds(s, -1, slot[D_BACK]);
    qd_sequence_emit(s, forward ? COLLECT : GRAD_COLLECT);
}

void qd_place_collect_grad(qd_placing *p, const qd_op *op)
{
    qd_sequence *s = p->w->experts;
    int *slot = s->slot;
    QD_SEQUENCE_TAKE(s, op, COMBINE_GRAD, (DY, DY), (D_ROWS, D_SORTED), (D_WEIGHT, D_WEIGHT));
    p->w->slots[slot[D_SORTED]].rows = s->number[ROOM];
    qd_sequence_emit(s, GRAD_SEND);
    p->slot[slot[D_SORTED]].now = qd_sequence_slot(s, D_OUT);
}
