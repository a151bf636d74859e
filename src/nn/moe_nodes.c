/* Rows that go to the experts of a node once (spec/nodes.h): lists of who goes where, and further rounds inside a node. The lists are
 * in host memory: dispatch by node is refused on other devices. */
#include "nn/nn_impl.h"
#include "spec/nodes.h"

#include <string.h>

/* Of an op about relayed rows: m rows fit at a rank of experts, k at a relay, which has `first` rows at most. */
static qd_nodes nodes_of(const qd_op_call *c, const int32_t *table)
{
    const qd_program *p = c->frame->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    return qd_nodes_of(&p->ledger->model, mesh, qd_group_coord(mesh, qd_expert_group(mesh), p->rank), c->op->k, c->op->m, table);
}

/* ---- on the row's own rank ---- */

/* Copies are numbered by node, then by row. */
qd_status qd_run_node_plan(const qd_op_call *c)
{
    const qd_moe *moe = &call_model(c)->moe;
    const int32_t *choice = c->at[0], *kept = c->at[2];
    const float *weight = c->at[1];
    int32_t *place = c->at[4], *from = c->at[5], *count = c->at[6], *chosen = c->at[7], *counts = c->at[8];
    int nodes = (int)c->op->n, k = moe->per_token, each = moe->experts / nodes;
    int32_t *next = counts + moe->experts; /* place of a node's next copy, until it becomes their number */
    memcpy(counts, c->at[3], (size_t)moe->experts * sizeof *counts);
    memset(count, 0, (size_t)nodes * sizeof *count);
    for (int64_t i = 0; i < c->op->m * nodes; i++)
        place[i] = -1;
    for (int64_t i = 0; i < c->op->m * k; i++) {
        int32_t *at = &place[i / k * nodes + choice[i] / each];
        if (kept[i] < 0 || *at >= 0)
            continue;
        *at = 0;
        count[choice[i] / each]++;
    }
    next[0] = 0;
    for (int b = 1; b < nodes; b++)
        next[b] = next[b - 1] + count[b - 1];
    for (int64_t row = 0; row < c->op->m; row++) {
        for (int b = 0; b < nodes; b++) {
            if (place[row * nodes + b] < 0)
                continue;
            int32_t at = place[row * nodes + b] = next[b]++, *list = chosen + (int64_t)at * 2 * k;
            from[at] = (int32_t)(row * nodes + b);
            for (int64_t j = 0, i = row * k; j < k; j++, i++)
                list[j] = kept[i] >= 0 && choice[i] / each == b ? choice[i] % each : -1;
            memcpy(list + k, weight + row * k, (size_t)k * sizeof *weight);
        }
    }
    memcpy(next, count, (size_t)nodes * sizeof *count);
    return QD_OK;
}

/* Each choice's gradient comes back with the copy that went to its node. */
qd_status qd_run_node_weights(const qd_op_call *c)
{
    const qd_moe *moe = &call_model(c)->moe;
    const int32_t *choice = c->at[0], *kept = c->at[1], *place = c->at[2];
    const float *copies = c->at[3];
    float *d_weight = c->at[4];
    int nodes = (int)c->op->n, k = moe->per_token, each = moe->experts / nodes;
    for (int64_t i = 0; i < c->op->m * k; i++)
        d_weight[i] = kept[i] < 0 ? 0.0f : copies[(int64_t)place[i / k * nodes + choice[i] / each] * k + i % k];
    return QD_OK;
}

qd_status qd_run_node_resend(const qd_op_call *c)
{
    const qd_slot *from = &c->slots[c->op->slot[1]], *lists = &c->slots[c->op->slot[6]];
    qd_nodes n = nodes_of(c, c->at[3]);
    int64_t rows = from->cols / n.nodes;
    if (!qd_relay_further(&n, c->at[6], (int32_t *)c->at[6] + lists->cols))
        return QD_OK;
    QD_TRY(c->frame->kernels->permute(c->frame->stream, &(qd_permute_args){
        .x = c->at[0], .from = c->at[1], .count = c->at[2], .y = c->at[4], .rows = rows, .cols = c->op->n, .per_token = n.nodes,
        .experts = n.nodes, .dtype = call_dtype(c, 0)}));
    if (!c->frame->exchange)
        return QD_FAIL(QD_SYSTEM, "no ranks to communicate with");
    return c->frame->exchange->start(c->frame->exchange->context, c->index, c->op, c->slots, c->at);
}

/* ---- on the relay ---- */

/* The places of one round, by expert, then by row: of each expert's rows, as they come, those from taken on, `rows` of them. All
 * others have none. */
static void plan_round(const qd_nodes *n, int64_t most, const int32_t *chosen, const int32_t *taken, const int32_t *rows, int32_t *place,
                       int32_t *from, int32_t *count)
{
    int experts = qd_nodes_experts(n), k = n->per_token;
    int64_t own = (int64_t)(n->position % n->locals) * experts, relayed = qd_nodes_relayed(n) * k;
    memset(count, 0, (size_t)experts * sizeof *count);
    for (int64_t i = 0; i < most * k; i++) {
        int32_t expert = i < relayed ? chosen[i / k * 2 * k + i % k] : -1;
        place[i] = expert < 0 ? -1 : count[expert]++; /* its number among the expert's */
    }
    int32_t first = 0; /* count[e] becomes what makes a number a place */
    for (int e = 0; e < experts; e++) {
        count[e] = first - taken[own + e];
        first += rows[own + e];
    }
    for (int64_t i = 0; i < relayed; i++) {
        if (place[i] < 0)
            continue;
        int32_t expert = chosen[i / k * 2 * k + i % k], number = place[i] - taken[own + expert];
        place[i] = number >= 0 && number < rows[own + expert] ? place[i] + count[expert] : -1;
        if (place[i] >= 0)
            from[place[i]] = (int32_t)i;
    }
    memcpy(count, rows + own, (size_t)experts * sizeof *count);
}

qd_status qd_run_relay_plan(const qd_op_call *c)
{
    const int32_t *chosen = c->at[0];
    int32_t *taken = c->at[2], *rows = c->at[3];
    float *weight = c->at[7];
    qd_nodes n = nodes_of(c, c->at[1]);
    size_t bytes = (size_t)(n.locals * qd_nodes_experts(&n)) * sizeof *rows, list = (size_t)n.per_token * sizeof *weight;
    memset(taken, 0, bytes);
    memset(rows, 0, bytes);
    qd_relay_next(&n, n.position / n.locals, taken, rows);
    plan_round(&n, c->op->first, chosen, taken, rows, c->at[4], c->at[5], c->at[6]);
    for (int64_t row = 0; row < qd_nodes_relayed(&n); row++)
        memcpy(weight + row * n.per_token, chosen + (2 * row + 1) * n.per_token, list);
    return QD_OK;
}

/* One round after another. */
typedef struct rounds {
    const qd_op_call *call;
    qd_nodes nodes;
    qd_relay_room room;
    char *base;
    int32_t *lists, *taken, *rows;
    qd_dtype dtype, param;
    int64_t hidden, ffn, number; /* of this round */
} rounds;

static rounds rounds_of(const qd_op_call *c, int down, int lists, bool backward)
{
    rounds r = {.call = c, .nodes = nodes_of(c, c->at[2]), .base = c->at[lists + 1], .lists = c->at[lists], .dtype = call_dtype(c, lists + 1),
                .param = call_dtype(c, down), .hidden = c->op->n, .ffn = c->slots[c->op->slot[down]].cols};
    r.room = qd_relay_room_of(&r.nodes, c->op->first, r.hidden, r.ffn, backward);
    r.taken = r.lists + r.room.taken;
    r.rows = r.lists + r.room.rows;
    size_t bytes = (size_t)(r.nodes.locals * qd_nodes_experts(&r.nodes)) * sizeof *r.rows;
    memset(r.taken, 0, bytes);
    memset(r.rows, 0, bytes);
    qd_relay_next(&r.nodes, r.nodes.position / r.nodes.locals, r.taken, r.rows); /* the first, which other ops have carried out */
    return r;
}

static bool next_round(rounds *r)
{
    r->number++;
    if (!qd_relay_next(&r->nodes, r->nodes.position / r->nodes.locals, r->taken, r->rows))
        return false;
    plan_round(&r->nodes, r->call->op->first, r->call->at[1], r->taken, r->rows, r->lists + r->room.place, r->lists + r->room.from,
               r->lists + r->room.count);
    return true;
}

static void *at(const rounds *r, int64_t element)
{
    return r->base + element * (int64_t)qd_dtype_size(r->dtype);
}

/* To the ranks of experts, or back; *to becomes where the rows are: with one rank per node they stay. */
static qd_status move(const rounds *r, bool back, void *from, void **to)
{
    const qd_exchange *e = r->call->frame->exchange;
    if (r->nodes.locals == 1) {
        *to = from;
        return QD_OK;
    }
    if (!e)
        return QD_FAIL(QD_SYSTEM, "no ranks to communicate with");
    return e->round(e->context, r->call->op, r->number, back, r->rows, from, *to);
}

static qd_status product(const rounds *r, const void *a, void *b, void *c, int64_t n, int64_t k, bool trans_b, bool by_experts, qd_dtype b_dtype)
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
            rows += r->rows[(int64_t)s * qd_nodes_experts(&r->nodes) + r->call->op->expert + e];
    return rows;
}

/* Relayed rows by expert. With `back`, which is what the experts made of them, also their parts of d_weight. */
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

/* Relayed rows go to their experts and through gate and up; *in: where they are there. */
static qd_status bring(const rounds *r, void **in, void *up_w)
{
    *in = at(r, r->room.in);
    QD_TRY(sort_rows(r, r->call->at[0], NULL, NULL, at(r, r->room.sorted)));
    QD_TRY(move(r, false, at(r, r->room.sorted), in));
    return product(r, *in, up_w, at(r, r->room.up), 2 * r->ffn, r->hidden, true, false, r->param);
}

/* And on through down and back to their relays. */
static qd_status finish(const rounds *r, void *down_w, void **back)
{
    *back = at(r, r->room.back);
    QD_TRY(r->call->frame->kernels->activation_forward(r->call->frame->stream, &(qd_activation_args){
        .kind = QD_ACT_SWIGLU, .x = at(r, r->room.up), .y = at(r, r->room.active), .rows = expert_rows(r), .cols = r->ffn, .dtype = r->dtype}));
    QD_TRY(product(r, at(r, r->room.active), down_w, at(r, r->room.out), r->hidden, r->ffn, true, false, r->param));
    return move(r, true, at(r, r->room.out), back);
}

qd_status qd_run_relay_rounds(const qd_op_call *c)
{
    rounds r = rounds_of(c, 5, 6, false);
    while (next_round(&r)) {
        void *in, *back;
        QD_TRY(bring(&r, &in, c->at[4]));
        QD_TRY(finish(&r, c->at[5], &back));
        QD_TRY(add_rows(&r, back, c->at[3], c->at[8]));
    }
    return QD_OK;
}

static void keep_d_weight(const rounds *r, float *d_weight)
{
    const int32_t *place = r->lists + r->room.place;
    const float *from = (const float *)(const void *)(r->lists + r->room.d_weight);
    for (int64_t i = 0; i < qd_nodes_relayed(&r->nodes) * r->nodes.per_token; i++)
        d_weight[i] = place[i] >= 0 ? from[i] : d_weight[i];
}

qd_status qd_run_relay_rounds_grad(const qd_op_call *c)
{
    rounds r = rounds_of(c, 6, 11, true);
    void *d_active = at(&r, r.room.d_active), *d_up = at(&r, r.room.d_up);
    while (next_round(&r)) {
        void *in, *back = NULL, *d_out = at(&r, r.room.out), *d_back = at(&r, r.room.back);
        QD_TRY(bring(&r, &in, c->at[5]));
        if (c->at[10])
            QD_TRY(finish(&r, c->at[6], &back)); /* only d_weight needs what the experts made of the rows */
        QD_TRY(sort_rows(&r, c->at[4], c->at[3], back, at(&r, r.room.d_sorted)));
        if (c->at[10])
            keep_d_weight(&r, c->at[9]);
        QD_TRY(move(&r, false, at(&r, r.room.d_sorted), &d_out));
        QD_TRY(product(&r, d_out, c->at[6], d_active, r.ffn, r.hidden, false, false, r.param));
        QD_TRY(c->frame->kernels->activation_backward(c->frame->stream, &(qd_activation_args){
            .kind = QD_ACT_SWIGLU, .x = at(&r, r.room.up), .dy = d_active, .dx = d_up, .y = at(&r, r.room.active), .rows = expert_rows(&r),
            .cols = r.ffn, .dtype = r.dtype}));
        if (c->at[7]) {
            QD_TRY(product(&r, at(&r, r.room.active), c->at[8], d_out, r.hidden, r.ffn, false, true, call_dtype(c, 8)));
            QD_TRY(product(&r, in, c->at[7], d_up, 2 * r.ffn, r.hidden, false, true, call_dtype(c, 7)));
        }
        if (!c->at[10])
            continue;
        QD_TRY(product(&r, d_up, c->at[5], at(&r, r.room.out), r.hidden, 2 * r.ffn, false, false, r.param));
        QD_TRY(move(&r, true, at(&r, r.room.out), &d_back));
        QD_TRY(add_rows(&r, d_back, NULL, c->at[10]));
    }
    return QD_OK;
}
