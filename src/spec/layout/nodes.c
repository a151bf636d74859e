/* Two-level dispatch: which ranks form nodes and relay groups, how much traffic to expect between
 * nodes, and the row counts of each round. */
#include "spec/layout/nodes.h"

#include <math.h>
#include <string.h>

static int node_size(const qd_mesh *mesh)
{
    return mesh->world / (mesh->nodes > 1 ? mesh->nodes : 1);
}

int qd_node_of(const qd_mesh *mesh, int rank)
{
    return rank / node_size(mesh);
}

int qd_nodes_spanned(const qd_mesh *mesh)
{
    int ranks = qd_expert_ranks(mesh), size = node_size(mesh);
    return mesh->by_node && ranks > size ? ranks / size : 1;
}

qd_group qd_nodes_group(const qd_mesh *mesh)
{
    int nodes = qd_nodes_spanned(mesh);
    return (qd_group){QD_AXES_TOKENS, nodes, qd_expert_ranks(mesh) / nodes};
}

qd_group qd_relay_group(const qd_mesh *mesh)
{
    return (qd_group){QD_AXES_TOKENS, qd_expert_ranks(mesh) / qd_nodes_spanned(mesh), 1};
}

qd_status qd_nodes_check(const qd_model *m, const qd_mesh *mesh)
{
    int nodes = mesh->nodes > 1 ? mesh->nodes : 1, size = node_size(mesh), ranks = qd_expert_ranks(mesh);
    if (mesh->world % nodes != 0)
        return QD_FAIL(QD_USAGE, "parallel.nodes is %d, which does not divide the %d ranks: all nodes must have the same number of ranks",
                       nodes, mesh->world);
    if (!mesh->by_node)
        return QD_OK;
    if (m->moe.experts == 0)
        return QD_FAIL(QD_USAGE, "parallel.dispatch is node, but the model has no experts: remove it");
    if (ranks % size != 0 && size % ranks != 0)
        return QD_FAIL(QD_USAGE,
                       "parallel.dispatch=node: the %d ranks of etp × ep and the %d ranks of a node (%d ranks, parallel.nodes %d) do not "
                       "divide one another, so groups would span nodes in different ways",
                       ranks, size, mesh->world, nodes);
    if (ranks > size && size % (mesh->etp > 1 ? mesh->etp : 1) != 0)
        return QD_FAIL(QD_USAGE,
                       "parallel.dispatch=node: parallel.etp %d would share an expert across nodes of %d ranks; it must divide them",
                       mesh->etp, size);
    return QD_OK;
}

/* Probability that none of k items drawn out of n is one of `some` of them. */
static double none_of(double n, double some, int k)
{
    double chance = 1.0;
    for (int i = 0; i < k; i++)
        chance *= fmax(0.0, n - some - i) / (n - i);
    return chance;
}

/* Binomial coefficient; below 1e308 for n up to 1,000. */
static double choose(int n, int k)
{
    double ways = 1.0;
    for (int i = 0; i < k; i++)
        ways *= (double)(n - i) / (i + 1);
    return ways;
}

double qd_nodes_expected(const qd_moe *e, int nodes)
{
    int k = e->per_token;
    double size = (double)e->experts / e->groups, each = (double)e->experts / nodes, open = e->top_groups * size;
    double missed = 0.0;
    if (e->groups % nodes == 0) { /* a node has whole groups, `in` of which the row may choose from */
        int own = e->groups / nodes;
        for (int in = 0; in <= own && in <= e->top_groups; in++) {
            if (e->top_groups - in > e->groups - own)
                continue;
            double ways = choose(own, in) * choose(e->groups - own, e->top_groups - in) / choose(e->groups, e->top_groups);
            missed += ways * none_of(open, in * size, k);
        }
    } else if (nodes % e->groups == 0) { /* a node has a part of a group */
        double chosen = (double)e->top_groups / e->groups;
        missed = 1.0 - chosen + chosen * none_of(open, each, k);
    } else { /* groups straddle nodes: ignore them */
        missed = none_of(e->experts, each, k);
    }
    return nodes * (1.0 - missed);
}

/* Average fraction of the ranks of an expert group that are on a different node than a given rank
 * of the group. */
static double far_share(const qd_mesh *mesh)
{
    qd_group group = qd_expert_group(mesh);
    int64_t far = 0;
    for (int rank = 0; rank < mesh->world; rank++)
        for (int i = 0; i < group.size; i++)
            far += qd_node_of(mesh, qd_group_rank(mesh, group, rank, i)) != qd_node_of(mesh, rank);
    return (double)far / ((double)mesh->world * group.size);
}

qd_across qd_nodes_across(const qd_program *p)
{
    const qd_mesh *mesh = &p->ledger->mesh;
    const qd_moe *moe = &p->ledger->model.moe;
    int ranks = qd_expert_ranks(mesh), size = node_size(mesh), etp = mesh->etp > 1 ? mesh->etp : 1;
    qd_across sum = {.nodes = ranks > size && ranks % size == 0 && size % etp == 0 ? ranks / size : 1};
    if (mesh->nodes < 2 || ranks < 2 || moe->experts == 0)
        return sum;
    bool by_node = qd_nodes_spanned(mesh) > 1;
    double rows = (double)(p->strategy.micro_batch * p->strategy.seq) * mesh->degree[QD_AXIS_DP]; /* summed over all ranks of the stage */
    double row = (double)p->ledger->model.hidden * (double)qd_dtype_size(p->strategy.activation), flat = 0.0, once = 0.0;
    double share = far_share(mesh), copies = rows * qd_nodes_expected(moe, sum.nodes) * (sum.nodes - 1) / sum.nodes;
    for (int i = 0; i < p->action_count; i++) {
        unsigned phases = qd_action_phases(&p->actions[i]);
        const qd_module_class *c = phases ? qd_program_class(p, p->actions[i].module) : NULL;
        for (int k = 0; c && k < c->op_count; k++) {
            const qd_op *op = &c->ops[k];
            bool to = op->kind == (by_node ? QD_OP_NODE_DISPATCH : QD_OP_DISPATCH),
                 back = op->kind == (by_node ? QD_OP_NODE_RETURN : QD_OP_RETURN);
            if (!(to || back) || !qd_op_runs(op, phases))
                continue;
            bool forward = op->phase == QD_PHASE_FORWARD, again = phases == QD_PHASES_AGAIN;
            /* Full recompute repeats the dispatch, and the return too if dispatch is flat. */
            flat += (by_node && again ? 2.0 : 1.0) * rows * moe->per_token * etp * share * row;
            once += (again && back ? 0.0 : copies) * (row + moe->per_token * (to && forward ? 8.0 : back && !forward ? 4.0 : 0.0));
        }
    }
    sum.flat = llround(flat);
    sum.by_node = llround(once);
    return sum;
}

qd_nodes qd_nodes_of(const qd_model *model, const qd_mesh *mesh, int position, int64_t room, int64_t capacity, const int32_t *table)
{
    int nodes = qd_nodes_spanned(mesh);
    return (qd_nodes){.table = table, .nodes = nodes, .locals = qd_expert_ranks(mesh) / nodes, .etp = mesh->etp > 1 ? mesh->etp : 1,
                      .position = position, .experts = model->moe.experts, .per_token = model->moe.per_token, .room = room,
                      .capacity = capacity};
}

static const int32_t *row_of(const qd_nodes *n, int node, int local)
{
    return n->table + (int64_t)(node * n->locals + local) * (n->experts + n->nodes);
}

/* Distinct rows that a rank has for a node. */
static int64_t rows_for(const qd_nodes *n, int from, int local, int to)
{
    return row_of(n, from, local)[n->experts + to];
}

int64_t qd_nodes_relayed(const qd_nodes *n)
{
    int64_t rows = 0;
    for (int from = 0; from < n->nodes; from++)
        rows += rows_for(n, from, n->position % n->locals, n->position / n->locals);
    return rows;
}

void qd_nodes_lists(const qd_nodes *n, int64_t *send, int64_t *send_first, int64_t *receive, int64_t *receive_first)
{
    int node = n->position / n->locals, local = n->position % n->locals;
    int64_t sent = 0, received = 0;
    for (int other = 0; other < n->nodes; other++) {
        send[other] = rows_for(n, node, local, other);
        receive[other] = rows_for(n, other, local, node);
        send_first[other] = sent;
        receive_first[other] = received;
        sent += send[other];
        received += receive[other];
    }
}

int64_t qd_nodes_far(const qd_nodes *n)
{
    int node = n->position / n->locals, each = qd_nodes_experts(n);
    const int32_t *row = row_of(n, node, n->position % n->locals);
    int64_t rows = 0;
    for (int e = 0; e < n->experts; e++)
        rows += e / each == node ? 0 : row[e];
    return rows;
}

/* Rows that a relay of a node has for one of the node's experts, over all rounds. */
static int64_t relay_rows(const qd_nodes *n, int node, int local, int expert)
{
    int64_t rows = 0;
    for (int from = 0; from < n->nodes; from++)
        rows += row_of(n, from, local)[node * qd_nodes_experts(n) + expert];
    return rows;
}

/* Fills the expert ranks of the node one after another with rows of the relays, as far as the
 * buffers on both sides allow. */
bool qd_relay_next(const qd_nodes *n, int node, int32_t *taken, int32_t *rows)
{
    int experts = qd_nodes_experts(n), held = experts * n->etp / n->locals;
    bool any = false;
    for (int i = 0; i < n->locals * experts; i++)
        taken[i] += rows[i];
    memset(rows, 0, (size_t)(n->locals * experts) * sizeof *rows);
    for (int first = 0; first < experts; first += held) {
        int64_t open = n->capacity;
        for (int local = 0; local < n->locals; local++) {
            int32_t *own = rows + (int64_t)local * experts;
            int64_t left = n->room;
            for (int e = 0; e < first; e++)
                left -= own[e];
            for (int e = first; e < first + held; e++) {
                int64_t take = relay_rows(n, node, local, e) - taken[(int64_t)local * experts + e];
                take = take < left ? take : left;
                take = take < open ? take : open;
                own[e] = (int32_t)take;
                left -= take;
                open -= take;
                any = any || take > 0;
            }
        }
    }
    return any;
}

bool qd_relay_further(const qd_nodes *n, int32_t *taken, int32_t *rows)
{
    size_t bytes = (size_t)(n->locals * qd_nodes_experts(n)) * sizeof *rows;
    bool further = false;
    for (int node = 0; node < n->nodes && !further; node++) {
        memset(taken, 0, bytes);
        memset(rows, 0, bytes);
        further = qd_relay_next(n, node, taken, rows) && qd_relay_next(n, node, taken, rows);
    }
    return further;
}

qd_relay_room qd_relay_room_of(const qd_nodes *n, int64_t relayed, int64_t hidden, int64_t ffn, bool backward)
{
    qd_relay_room space = {0};
    bool apart = n->locals > 1; /* otherwise rows sorted by expert are already in place */
    int64_t assignments = relayed * n->per_token, lists = (int64_t)n->locals * qd_nodes_experts(n);
    const struct {
        int64_t *at, elements;
        bool backward;
    } arrays[] = {{&space.sorted, n->room * hidden, false},
                  {&space.in, apart ? n->capacity * hidden : 0, false},
                  {&space.up, 2 * n->capacity * ffn, false},
                  {&space.active, n->capacity * ffn, false},
                  {&space.out, n->capacity * hidden, false},
                  {&space.back, apart ? n->room * n->etp * hidden : 0, false},
                  {&space.d_active, n->capacity * ffn, true},
                  {&space.d_up, 2 * n->capacity * ffn, true},
                  {&space.d_sorted, n->room * hidden, true}};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        *arrays[i].at = space.elements;
        if (backward || !arrays[i].backward)
            space.elements += (arrays[i].elements + 31) / 32 * 32; /* align to a cache line */
    }
    space.rows = lists;
    space.place = space.rows + lists;
    space.from = space.place + assignments;
    space.count = space.from + n->room;
    space.d_weight = space.count + qd_nodes_experts(n);
    space.numbers = space.d_weight + (backward ? assignments : 0);
    return space;
}
