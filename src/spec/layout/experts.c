/* Expert parallelism: groups of the folded mesh, the experts of each rank, and the row counts of
 * each dispatch round. */
#include "spec/layout/nodes.h"
#include "spec/layout/tensor.h"

static int etp_of(const qd_mesh *mesh)
{
    return mesh->etp > 1 ? mesh->etp : 1;
}

static int ep_of(const qd_mesh *mesh)
{
    return mesh->ep > 1 ? mesh->ep : 1;
}

int qd_expert_ranks(const qd_mesh *mesh)
{
    return etp_of(mesh) * ep_of(mesh);
}

qd_group qd_expert_group(const qd_mesh *mesh)
{
    return (qd_group){QD_AXES_TOKENS, qd_expert_ranks(mesh), 1};
}

qd_group qd_expert_data_group(const qd_mesh *mesh)
{
    int ranks = qd_expert_ranks(mesh);
    return (qd_group){QD_AXES_TOKENS, qd_mesh_group_size(mesh, QD_AXES_TOKENS) / ranks, ranks};
}

qd_group qd_expert_load_group(const qd_model *m, const qd_mesh *mesh)
{
    unsigned axes = QD_AXIS_BIT(QD_AXIS_TP) | QD_AXIS_BIT(QD_AXIS_CP);
    if (m->moe.balance == QD_BALANCE_BATCH)
        axes |= QD_AXIS_BIT(QD_AXIS_DP);
    qd_group group = qd_group_whole(mesh, axes);
    if (m->moe.aux_loss == 0.0)
        group.size = 1;
    return group;
}

bool qd_experts_apart(const qd_model *m, const qd_mesh *mesh)
{
    return m->moe.experts > 0 && (qd_expert_ranks(mesh) > 1 || mesh->degree[QD_AXIS_TP] > 1);
}

qd_group qd_norm_group(const qd_model *m, const qd_mesh *mesh)
{
    int tp = mesh->degree[QD_AXIS_TP], ranks = qd_expert_ranks(mesh);
    if (!qd_experts_apart(m, mesh))
        return qd_group_whole(mesh, QD_AXIS_BIT(QD_AXIS_TP));
    return (qd_group){QD_AXES_TOKENS, ranks > tp ? ranks : tp, 1};
}

static bool divides_experts(const void *model, int ep)
{
    return ((const qd_model *)model)->moe.experts % ep == 0;
}

static bool divides_width(const void *model, int etp)
{
    return ((const qd_model *)model)->moe.ffn % etp == 0;
}

qd_status qd_experts_check(const qd_model *m, const qd_mesh *mesh)
{
    char take[48];
    int ep = ep_of(mesh), etp = etp_of(mesh), tp = mesh->degree[QD_AXIS_TP], all = qd_mesh_group_size(mesh, QD_AXES_TOKENS);
    if (m->moe.experts == 0) {
        if (ep * etp > 1)
            return QD_FAIL(QD_USAGE, "parallel.%s is %d, but the model has no experts: remove it", ep > 1 ? "ep" : "etp",
                           ep > 1 ? ep : etp);
        return qd_nodes_check(m, mesh);
    }
    if (all % (ep * etp) != 0)
        return QD_FAIL(QD_USAGE, "parallel.etp %d × ep %d does not divide the %d ranks of tp × cp × dp", etp, ep, all);
    if (!divides_experts(m, ep)) {
        qd_degree_nearest(ep, m->moe.experts, divides_experts, m, take, sizeof take);
        return QD_FAIL(QD_USAGE, "parallel.ep is %d, which does not divide the model's %d experts%s", ep, m->moe.experts, take);
    }
    if (!divides_width(m, etp)) {
        qd_degree_nearest(etp, QD_TENSOR_MOST, divides_width, m, take, sizeof take);
        return QD_FAIL(QD_USAGE, "parallel.etp is %d, which does not divide the experts' inner width (%lld)%s", etp,
                       (long long)m->moe.ffn, take);
    }
    if ((ep * etp) % tp != 0 && tp % (ep * etp) != 0)
        return QD_FAIL(QD_USAGE, "parallel.etp × ep is %d and parallel.tp is %d: one must divide the other", ep * etp, tp);
    if (tp > 1 && !mesh->sp && !mesh->forward)
        return QD_FAIL(QD_UNSUPPORTED,
                       "parallel.sp is false: experts under tensor parallelism need the rows that sp gives each rank; set it to true");
    return qd_nodes_check(m, mesh);
}

int qd_experts_of(const qd_model *m, const qd_mesh *mesh, int rank, int *first)
{
    int count = m->moe.experts / ep_of(mesh);
    *first = qd_group_coord(mesh, qd_expert_group(mesh), rank) / etp_of(mesh) * count;
    return count;
}

qd_atom qd_expert_atom(const qd_ledger *ledger, const qd_param *p, int rank)
{
    const qd_mesh *mesh = &ledger->mesh;
    qd_atom atom = {{0, 0}, {p->shape[0], p->shape[1]}};
    int first, count = qd_experts_of(&ledger->model, mesh, rank, &first);
    if (p->expert < first || p->expert >= first + count)
        return (qd_atom){{0, 0}, {0, 0}};
    qd_slice(p->shape[p->expert_dim], etp_of(mesh), qd_group_coord(mesh, qd_expert_group(mesh), rank) % etp_of(mesh),
             &atom.begin[p->expert_dim], &atom.length[p->expert_dim]);
    return atom;
}

/* Rows that rank `source` has for the experts at ep coordinate `owner`; *before: rows that it has
 * for the experts before those. */
static int64_t rows_for(const qd_dispatch *d, int source, int owner, int64_t *before)
{
    const int32_t *row = d->table + (int64_t)source * d->experts;
    int share = d->experts / d->ep;
    int64_t rows = 0;
    *before = 0;
    for (int e = 0; e < owner * share; e++)
        *before += row[e];
    for (int e = owner * share; e < (owner + 1) * share; e++)
        rows += row[e];
    return rows;
}

static int64_t list_rows(const qd_dispatch *d, int owner)
{
    int64_t rows = 0, before;
    for (int s = 0; s < d->ep * d->etp; s++)
        rows += rows_for(d, s, owner, &before);
    return rows;
}

int64_t qd_dispatch_rounds(const qd_dispatch *d)
{
    int64_t most = 1;
    for (int owner = 0; owner < d->ep; owner++) {
        int64_t rounds = (list_rows(d, owner) + d->capacity - 1) / d->capacity;
        most = rounds > most ? rounds : most;
    }
    return most;
}

int64_t qd_dispatch_rows(const qd_dispatch *d, int64_t round)
{
    int64_t left = list_rows(d, d->position / d->etp) - round * d->capacity;
    return left < 0 ? 0 : left < d->capacity ? left : d->capacity;
}

/* Length of the part of [first, first + rows) that falls into the round; *at: where that part
 * begins. */
static int64_t overlap(const qd_dispatch *d, int64_t round, int64_t first, int64_t rows, int64_t *at)
{
    int64_t begin = round * d->capacity, end = begin + d->capacity, last = first + rows < end ? first + rows : end;
    *at = first > begin ? first : begin;
    return last > *at ? last - *at : 0;
}

void qd_dispatch_lists(const qd_dispatch *d, int64_t round, int64_t *send, int64_t *send_first, int64_t *receive, int64_t *receive_first)
{
    int ranks = d->ep * d->etp;
    int64_t before, at, first = 0;
    for (int s = 0; s < ranks; s++) {
        int64_t rows = rows_for(d, s, d->position / d->etp, &before);
        receive[s] = overlap(d, round, first, rows, &at);
        receive_first[s] = receive[s] > 0 ? at - round * d->capacity : 0;
        first += rows;
    }
    for (int q = 0; q < ranks; q++) {
        int owner = q / d->etp;
        first = 0;
        for (int s = 0; s < d->position; s++)
            first += rows_for(d, s, owner, &before);
        int64_t rows = rows_for(d, d->position, owner, &before);
        send[q] = overlap(d, round, first, rows, &at);
        send_first[q] = send[q] > 0 ? before + at - first : 0;
    }
}

qd_round_room qd_round_room_of(int64_t capacity, int64_t hidden, int64_t ffn, int64_t assignments, bool backward)
{
    qd_round_room space = {0};
    const struct {
        int64_t *at, elements;
    } arrays[] = {{&space.in, capacity * hidden},    {&space.up, 2 * capacity * ffn},     {&space.active, capacity * ffn},
                  {&space.out, capacity * hidden},   {&space.d_active, capacity * ffn},   {&space.d_up, 2 * capacity * ffn},
                  {&space.sorted, assignments * hidden}};
    for (size_t i = 0; i < (backward ? sizeof arrays / sizeof *arrays : 4); i++) {
        *arrays[i].at = space.elements;
        space.elements += (arrays[i].elements + 31) / 32 * 32; /* align to a cache line */
    }
    return space;
}
