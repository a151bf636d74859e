/* Builds the actions of Muon: assigns matrices to ranks, and orders the rounds so that exchanges
 * overlap with computation. */
#include "spec/program/muon.h"

#include "spec/layout/experts.h"
#include "spec/program/program_impl.h"

#include <stdlib.h>

typedef struct muon_round {
    int first, count; /* in the program's matrices */
    int matrix, part; /* buffers, -1: not allocated */
    int left;         /* shared: results that are not applied yet */
} muon_round;

/* A result that is being broadcast. */
typedef struct muon_share {
    int round, matrix, action, buffer;
    int64_t bytes;
} muon_share;

/* The matrices of a family of parameters, and the ranks that share their work. */
typedef struct muon_team {
    muon_round *rounds;
    int round_count;
    int matrix_group, share_group, workers; /* groups of the program; number of ranks of both together */
    bool exchanged, shared; /* whether there is a matrix_group, a share_group */
    int collecting, handing; /* the newest COLLECT and HAND_BACK */
    muon_share *shares;      /* in the order in which they start */
    int share_count, share_done;
    int64_t sharing_bytes;
} muon_team;

typedef struct qd_muon {
    muon_team teams[QD_FAMILY_COUNT]; /* one after another */
    int first;                        /* the first team with matrices */
    int scratch;
} qd_muon;

bool qd_muon_takes(const qd_ledger *ledger, int param)
{
    const qd_param *p = &ledger->params[param];
    return p->ndim == 2 && p->tied_to < 0 && !p->frozen && (p->ahead || ledger->modules[p->module].layer >= 0);
}

static int family_of(const qd_program *p, int matrix)
{
    return p->ledger->params[p->matrices[matrix].param].family;
}

int qd_muon_matrix_group(const qd_program *p, int matrix)
{
    return p->matrix_groups[family_of(p, matrix)];
}

int qd_muon_share_group(const qd_program *p, int matrix)
{
    return p->share_groups[family_of(p, matrix)];
}

qd_group qd_muon_cut_group(const qd_ledger *l, int param)
{
    if (l->params[param].family == 1)
        return (qd_group){QD_AXES_TOKENS, l->mesh.etp > 1 ? l->mesh.etp : 1, 1};
    return qd_group_whole(&l->mesh, QD_AXIS_BIT(QD_AXIS_TP));
}

static int place(const qd_program *p, int group, int rank)
{
    return group < 0 ? 0 : qd_group_coord(&p->ledger->mesh, p->groups[group], rank);
}

bool qd_muon_is_near(const qd_program *p, int matrix, int rank)
{
    return p->matrices[matrix].sharer == place(p, qd_muon_share_group(p, matrix), rank);
}

int qd_muon_own(const qd_program *p, const qd_action *run, int rank)
{
    int owner = place(p, qd_muon_matrix_group(p, run->param), rank);
    for (int i = run->param; i < run->param + run->params; i++)
        if (p->matrices[i].owner == owner && qd_muon_is_near(p, i, rank))
            return i;
    return -1;
}

qd_muon_box qd_muon_box_of(const qd_program *p, int matrix, int rank)
{
    const qd_ledger *l = p->ledger;
    int param = p->matrices[matrix].param;
    int64_t first;
    qd_muon_box box = {.atom = qd_ledger_atom(l, param, rank), .speaks = qd_ledger_counts(l, param, rank)};
    int parts = qd_storage_share(&p->storage, param).parts;
    qd_slice(box.atom.length[0], parts, qd_group_coord(&l->mesh, qd_ledger_data_group(l, l->params[param].family), rank) % parts, &first,
             &box.atom.length[0]);
    box.atom.begin[0] += first;
    box.count = qd_atom_count(&box.atom, 2);
    box.at = box.atom.begin[1] * l->params[param].shape[0] + box.atom.begin[0] * box.atom.length[1];
    return box;
}

bool qd_muon_cuts_columns(const qd_program *p, int matrix)
{
    const qd_ledger *l = p->ledger;
    return qd_ledger_atom(l, p->matrices[matrix].param, p->rank).length[1] < l->params[p->matrices[matrix].param].shape[1];
}

qd_muon_scratch qd_muon_scratch_of(int64_t rows, int64_t cols)
{
    enum { LINE = 64 };
    int64_t r = rows < cols ? rows : cols, square = (r * r * 4 + LINE - 1) / LINE * LINE;
    qd_muon_scratch s = {.poly = square, .next = 2 * square};
    s.squares = s.next + (rows * cols * 4 + LINE - 1) / LINE * LINE;
    s.bytes = s.squares + rows * 8;
    return s;
}

/* Assignment of matrices to ranks. */

typedef struct candidate {
    int param, rank, round; /* rank: among all that share the work */
    double cost;
} candidate;

static int by_cost(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    return x->cost != y->cost ? (x->cost > y->cost ? -1 : 1) : x->param - y->param;
}

static int by_round(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    return x->round != y->round ? x->round - y->round : x->rank - y->rank;
}

typedef struct worker {
    int rank, rounds;
    double load;
} worker;

static bool less(const worker *x, const worker *y)
{
    return x->load != y->load ? x->load < y->load : x->rank < y->rank;
}

/* Restores the heap after its first element has become heavier. */
static void sink(worker *heap, int count)
{
    for (int at = 0, next; (next = 2 * at + 1) < count; at = next) {
        if (next + 1 < count && less(&heap[next + 1], &heap[next]))
            next++;
        if (!less(&heap[next], &heap[at]))
            return;
        worker light = heap[next];
        heap[next] = heap[at];
        heap[at] = light;
    }
}

/* The most expensive first, each to the rank with the least work so far. */
static qd_status assign(candidate *list, int count, int ranks)
{
    worker *heap = calloc((size_t)ranks, sizeof *heap);
    if (!heap)
        return QD_FAIL(QD_NO_MEMORY, "no memory to assign %d matrices", count);
    for (int r = 0; r < ranks; r++)
        heap[r].rank = r;
    qsort(list, (size_t)count, sizeof *list, by_cost);
    for (int i = 0; i < count; i++) {
        list[i].rank = heap[0].rank;
        list[i].round = heap[0].rounds++;
        heap[0].load += list[i].cost;
        sink(heap, ranks);
    }
    qsort(list, (size_t)count, sizeof *list, by_round);
    free(heap);
    return QD_OK;
}

/* The matrices of a family that this rank holds parts of. Rejects those that are cut along axes
 * that the groups do not have. */
static qd_status find_matrices(const qd_builder *b, int family, candidate *list, int *count)
{
    *count = 0;
    for (int i = 0; i < b->ledger->param_count; i++) {
        const qd_param *p = &b->ledger->params[i];
        int64_t rows = p->shape[0], cols = p->shape[1];
        if (!qd_muon_takes(b->ledger, i) || p->family != family || b->p->storage.count[i] == 0)
            continue;
        for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
            if (axis != QD_AXIS_TP && p->value[axis].kind == QD_SHARD && b->ledger->mesh.degree[axis] > 1)
                return QD_FAIL(QD_UNSUPPORTED, "train.optimizer=muon orthogonalizes whole matrices, but this layout cuts %s along %s: take "
                                               "train.optimizer=adamw", p->name, qd_axis_name((qd_axis)axis));
        list[(*count)++] = (candidate){.param = i, .cost = (double)rows * (double)cols * (double)(rows < cols ? rows : cols)};
    }
    return QD_OK;
}

/* The position in the matrix_group of a rank, given its number among all that share the work. */
static int owner_of(const qd_builder *b, const muon_team *t, int number)
{
    const qd_mesh *mesh = &b->ledger->mesh;
    int size = t->matrix_group < 0 ? 1 : b->p->groups[t->matrix_group].size,
        sharers = t->share_group < 0 ? 1 : b->p->groups[t->share_group].size;
    if (size * sharers == t->workers)
        return number % size;
    int etp = mesh->etp, ranks = qd_expert_ranks(mesh); /* ranks of other experts are in between */
    return number / etp * ranks + qd_group_coord(mesh, qd_expert_group(mesh), b->p->rank) / etp * etp + number % etp;
}

/* Adds a team's matrices to those of the program. */
static qd_status keep_rounds(qd_builder *b, muon_team *t, const candidate *list, int count, qd_arena *arena)
{
    qd_program *p = b->p;
    int before = p->matrix_count, owners = t->share_group < 0 ? t->workers : t->workers / p->groups[t->share_group].size;
    t->rounds = QD_ARENA_NEW(arena, muon_round, count + 1);
    t->shares = QD_ARENA_NEW(arena, muon_share, count + 1);
    if (!t->rounds || !t->shares)
        return QD_NO_MEMORY;
    p->matrix_count += count;
    for (int i = 0; i < count; i++) {
        qd_matrix *x = &p->matrices[before + i];
        *x = (qd_matrix){list[i].param, list[i].round, owner_of(b, t, list[i].rank), list[i].rank / owners, 0};
        if (i > 0 && x[-1].round == x->round && x[-1].sharer == x->sharer)
            x->part = x[-1].part + qd_muon_box_of(p, before + i - 1, p->rank).count;
        if (i == 0 || list[i].round != list[i - 1].round)
            t->rounds[t->round_count++] = (muon_round){.first = before + i, .matrix = -1, .part = -1};
        t->rounds[t->round_count - 1].count++;
        t->rounds[t->round_count - 1].left++;
    }
    return QD_OK;
}

/* Matrices have no second moment; those of other parameters are packed without gaps. */
static qd_status place_moments(qd_builder *b, qd_arena *arena, int64_t *moment2)
{
    const qd_storage *s = &b->p->storage;
    b->p->moment2 = QD_ARENA_NEW(arena, int64_t, b->ledger->param_count);
    if (!b->p->moment2)
        return QD_NO_MEMORY;
    for (int i = 0; i < b->ledger->param_count; i++) {
        b->p->moment2[i] = qd_muon_takes(b->ledger, i) || b->ledger->params[i].frozen ? -1 : *moment2;
        if (b->p->moment2[i] >= 0 && b->ledger->params[i].tied_to < 0)
            *moment2 += qd_storage_part(s, i, qd_storage_share(s, i).parts, qd_storage_share(s, i).part).count;
    }
    return QD_OK;
}

/* The ranks that hold parts of a matrix, and those that hold the same parts. */
static void choose_groups(qd_builder *b, int family)
{
    const qd_mesh *mesh = &b->ledger->mesh;
    muon_team *t = &b->muon->teams[family];
    qd_group data = qd_ledger_data_group(b->ledger, family);
    int cut = family == 1 ? (mesh->etp > 1 ? mesh->etp : 1) : mesh->degree[QD_AXIS_TP], parts = b->p->storage.share[family].parts;
    bool sharded = parts > 1;
    t->workers = cut * (sharded ? parts : data.size);
    qd_group group = {QD_AXES_TOKENS, cut, 1};
    if (family == 0)
        group = qd_group_whole(mesh, QD_AXIS_BIT(QD_AXIS_TP));
    if (sharded && cut == 1)
        group = b->p->groups[b->group.shard[family]];
    else if (sharded)
        group = family == 0 ? (qd_group){QD_AXES_DATA | QD_AXIS_BIT(QD_AXIS_TP), t->workers, 1}
                            : (qd_group){QD_AXES_TOKENS, parts * qd_expert_ranks(mesh), 1};
    t->matrix_group = b->p->matrix_groups[family] = qd_build_group(b, group);
    t->share_group = b->p->share_groups[family] = sharded ? -1 : qd_build_group(b, data);
    t->exchanged = t->matrix_group >= 0;
    t->shared = t->share_group >= 0;
}

qd_status qd_muon_create(qd_builder *b, qd_arena *arena, int64_t *moment2)
{
    if (b->strategy->optimizer != QD_OPTIM_MUON || !b->strategy->training)
        return QD_OK;
    qd_muon *m = b->muon = QD_ARENA_NEW(arena, qd_muon, 1);
    b->p->matrices = QD_ARENA_NEW(arena, qd_matrix, b->ledger->param_count);
    candidate *list = calloc((size_t)b->ledger->param_count, sizeof *list);
    qd_status status = m && b->p->matrices && list ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to assign matrices");
    for (int family = 0; family < QD_FAMILY_COUNT && status == QD_OK; family++) {
        muon_team *t = &m->teams[family];
        int count;
        b->p->matrix_groups[family] = b->p->share_groups[family] = -1;
        status = find_matrices(b, family, list, &count);
        if (status != QD_OK || count == 0)
            continue;
        choose_groups(b, family);
        status = assign(list, count, t->workers);
        if (status == QD_OK)
            status = keep_rounds(b, t, list, count, arena);
    }
    free(list);
    return status == QD_OK ? place_moments(b, arena, moment2) : status;
}

static int64_t matrix_bytes(const qd_builder *b, int matrix)
{
    const qd_param *p = &b->ledger->params[b->p->matrices[matrix].param];
    return p->shape[0] * p->shape[1] * 4;
}

static void set_run(qd_action *a, const muon_round *r)
{
    a->buffer = r->matrix;
    a->part = r->part;
    a->param = r->first;
    a->params = r->count;
}

/* Elements of the round that change ranks in an exchange, over all groups with a matrix of it:
 * every box of each matrix except the owner's. Of boxes that several ranks of tp hold, one is
 * collected, and all are handed back. */
static int64_t moved(const qd_builder *b, const muon_team *t, qd_action_kind kind, const muon_round *r)
{
    const qd_mesh *mesh = &b->ledger->mesh;
    int64_t count = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        const qd_param *p = &b->ledger->params[b->p->matrices[i].param];
        const qd_place *tp = &p->value[QD_AXIS_TP];
        int copies = p->family == 1          ? 1 /* etp shards all matrices of experts */
                     : tp->kind == QD_SHARD ? (tp->repeat > 1 ? tp->repeat : 1)
                                            : mesh->degree[QD_AXIS_TP];
        qd_muon_box own = qd_muon_box_of(b->p, i, qd_group_rank(mesh, b->p->groups[t->matrix_group], b->p->rank, b->p->matrices[i].owner));
        bool back = kind == QD_ACTION_HAND_BACK;
        count += p->shape[0] * p->shape[1] * (back ? copies : 1) - (back || own.speaks ? own.count : 0);
    }
    return count;
}

static int exchange(qd_builder *b, const muon_team *t, qd_action_kind kind, const muon_round *r)
{
    int64_t count = moved(b, t, kind, r);
    qd_action *a = qd_build_collective(b, kind, -1, t->matrix_group, count, QD_F32, qd_build_last_compute(b));
    a->bytes = qd_coll_bytes(QD_COLL_ALL_TO_ALL, count, QD_F32, b->p->groups[t->matrix_group].size) * (b->ledger->mesh.world / t->workers);
    set_run(a, r);
    a->parts = qd_storage_share(&b->p->storage, b->p->matrices[r->first].param).parts;
    return b->p->action_count - 1;
}

/* Size of a rank's boxes of the round: the maximum over its share_group. */
static int64_t part_bytes(const qd_builder *b, const muon_round *r)
{
    int64_t most = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        int64_t end = b->p->matrices[i].part + qd_muon_box_of(b->p, i, b->p->rank).count;
        most = end > most ? end : most;
    }
    return most * 4;
}

/* Offloaded momentum is on the device for one matrix at a time. */
static void momentum(qd_builder *b, const muon_round *r)
{
    if (!b->offload)
        set_run(qd_build_action(b, QD_ACTION_MOMENTUM, -1, -1), r);
    for (int i = r->first; i < r->first + r->count && b->offload; i++) {
        int chunk = qd_offload_matrix_begin(b, i, QD_BUFFER_MOMENT1);
        qd_action *a = qd_build_action(b, QD_ACTION_MOMENTUM, -1, -1);
        set_run(a, &(muon_round){.first = i, .count = 1, .matrix = r->matrix, .part = r->part});
        qd_offload_matrix_end(b, i, QD_BUFFER_MOMENT1, a, chunk);
    }
}

static void begin_round(qd_builder *b, muon_team *t, muon_round *r)
{
    int64_t largest = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        int64_t bytes = matrix_bytes(b, i);
        largest = bytes > largest ? bytes : largest;
    }
    r->matrix = qd_build_alloc(b, QD_BUFFER_MATRIX, -1, -1, largest);
    if (t->exchanged)
        r->part = qd_build_alloc(b, QD_BUFFER_PART, -1, -1, part_bytes(b, r));
    momentum(b, r);
    if (t->exchanged)
        t->collecting = exchange(b, t, QD_ACTION_COLLECT, r);
}

/* The scratch of all ranks is sized for the largest matrix of any round. */
static void alloc_scratch(qd_builder *b)
{
    int64_t bytes = 0;
    for (int i = 0; i < b->p->matrix_count; i++) {
        const qd_param *p = &b->ledger->params[b->p->matrices[i].param];
        int64_t wanted = qd_muon_scratch_of(p->shape[0], p->shape[1]).bytes;
        bytes = wanted > bytes ? wanted : bytes;
    }
    b->muon->scratch = qd_build_alloc(b, QD_BUFFER_MATRIX_SCRATCH, -1, -1, bytes);
}

/* `collected`: the COLLECT to wait for, -1: none. */
static void orthogonalize(qd_builder *b, const muon_round *r, int collected)
{
    qd_action *a = qd_build_action(b, QD_ACTION_ORTHOGONALIZE, -1, -1);
    set_run(a, r);
    a->part = b->muon->scratch;
    for (int i = r->first; i < r->first + r->count; i++) {
        const qd_param *p = &b->ledger->params[b->p->matrices[i].param];
        double rows = (double)p->shape[0], cols = (double)p->shape[1], least = rows < cols ? rows : cols;
        double flops = b->strategy->muon_steps * 2.0 * least * least * (2.0 * (rows < cols ? cols : rows) + least);
        a->flops = flops > a->flops ? flops : a->flops; /* of the rank with the most work */
    }
    if (b->strategy->overlap)
        qd_build_dep(b, collected);
}

/* Applies results once the transfer `brought` is complete (-1: none). */
static void apply(qd_builder *b, int first, int count, int buffer, int part, int brought)
{
    int each = b->offload ? 1 : count; /* offloaded master weights are on the device for one matrix at a time */
    for (int i = first; i < first + count; i += each) {
        int chunk = qd_offload_matrix_begin(b, i, QD_BUFFER_MASTER);
        qd_action *a = qd_build_action(b, QD_ACTION_UPDATE_MATRICES, -1, -1);
        set_run(a, &(muon_round){.first = i, .count = each, .matrix = buffer, .part = part});
        if (b->strategy->overlap)
            qd_build_dep(b, brought);
        qd_offload_matrix_end(b, i, QD_BUFFER_MASTER, a, chunk);
    }
}

/* Sharded matrices: three rounds are in flight. */

static void end_round(qd_builder *b, muon_round *r, int handed)
{
    apply(b, r->first, r->count, r->matrix, r->part, handed);
    qd_build_free(b, &r->part);
    qd_build_free(b, &r->matrix);
}

static void finish_exchanged(qd_builder *b, muon_team *t)
{
    bool overlap = b->strategy->overlap;
    for (int k = 0; k < t->round_count; k++) {
        muon_round *r = &t->rounds[k];
        int collected = t->collecting, handed = t->handing;
        if (overlap && k + 1 < t->round_count)
            begin_round(b, t, r + 1);
        orthogonalize(b, r, collected);
        t->handing = exchange(b, t, QD_ACTION_HAND_BACK, r);
        if (overlap && k > 0)
            end_round(b, r - 1, handed);
        if (!overlap)
            end_round(b, r, t->handing);
        if (!overlap && k + 1 < t->round_count)
            begin_round(b, t, r + 1);
    }
    if (overlap)
        end_round(b, &t->rounds[t->round_count - 1], t->handing);
}

/* Replicated matrices: results are broadcast to all ranks that hold the same. */

static void end_share(qd_builder *b, muon_team *t)
{
    muon_share *s = &t->shares[t->share_done++];
    muon_round *r = &t->rounds[s->round];
    apply(b, s->matrix, 1, s->buffer, t->exchanged ? r->part : r->matrix, s->action);
    t->sharing_bytes -= s->bytes;
    qd_build_free(b, &s->buffer);
    if (--r->left > 0)
        return;
    qd_build_free(b, &r->part);
    qd_build_free(b, &r->matrix);
}

/* As many results are in flight as fit into a bucket, at least two, while the next round is
 * computed. */
static void share(qd_builder *b, muon_team *t, int round, int matrix)
{
    int64_t bytes = qd_muon_box_of(b->p, matrix, b->p->rank).count * 4,
            most = b->strategy->bucket_bytes > 2 * bytes ? b->strategy->bucket_bytes : 2 * bytes;
    while (t->share_done < t->share_count && t->sharing_bytes + bytes > most)
        end_share(b, t);
    int buffer = qd_build_alloc(b, QD_BUFFER_MATRIX, -1, -1, bytes);
    qd_action *a = qd_build_collective(b, QD_ACTION_SHARE, -1, t->share_group, bytes / 4, QD_F32, qd_build_last_compute(b));
    set_run(a, &(muon_round){
                   .first = matrix, .count = 1, .matrix = buffer, .part = t->exchanged ? t->rounds[round].part : t->rounds[round].matrix});
    if (b->strategy->overlap && t->exchanged)
        qd_build_dep(b, t->handing);
    t->shares[t->share_count++] = (muon_share){round, matrix, b->p->action_count - 1, buffer, bytes};
    t->sharing_bytes += bytes;
    if (!b->strategy->overlap)
        end_share(b, t);
}

static void run_round(qd_builder *b, muon_team *t, int round)
{
    muon_round *r = &t->rounds[round];
    begin_round(b, t, r);
    orthogonalize(b, r, t->collecting);
    if (t->exchanged)
        t->handing = exchange(b, t, QD_ACTION_HAND_BACK, r);
    for (int i = r->first; i < r->first + r->count && t->shared && !b->no_memory; i++)
        share(b, t, round, i);
    if (!t->shared)
        end_round(b, r, -1);
}

/* Whether rounds overlap; otherwise each is computed and its results are broadcast. */
static bool pipelined(const muon_team *t)
{
    return t->exchanged && !t->shared;
}

static void begin_team(qd_builder *b, muon_team *t)
{
    t->collecting = t->handing = -1;
    if (pipelined(t))
        begin_round(b, t, &t->rounds[0]);
    else
        run_round(b, t, 0);
}

static void finish_team(qd_builder *b, muon_team *t)
{
    if (pipelined(t))
        finish_exchanged(b, t);
    for (int k = 1; k < t->round_count && !pipelined(t); k++)
        run_round(b, t, k);
    while (t->share_done < t->share_count)
        end_share(b, t);
}

void qd_muon_begin(qd_builder *b)
{
    qd_muon *m = b->muon;
    if (!m || b->p->matrix_count == 0)
        return;
    while (m->teams[m->first].round_count == 0)
        m->first++;
    alloc_scratch(b);
    begin_team(b, &m->teams[m->first]);
}

void qd_muon_finish(qd_builder *b)
{
    qd_muon *m = b->muon;
    if (!m || b->p->matrix_count == 0)
        return;
    for (int family = m->first; family < QD_FAMILY_COUNT; family++) {
        muon_team *t = &m->teams[family];
        if (t->round_count == 0)
            continue;
        if (family > m->first)
            begin_team(b, t);
        finish_team(b, t);
    }
    qd_build_free(b, &m->scratch);
}
