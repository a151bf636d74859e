#include "spec/muon.h"

#include "spec/program_impl.h"

#include <stdlib.h>

typedef struct muon_round {
    int first, count; /* in the program's matrices */
    int matrix, part; /* buffers, -1: none now */
    int left;         /* shared: results that are still to be applied */
} muon_round;

/* A result on its way to all ranks. */
typedef struct muon_share {
    int round, matrix, action, buffer;
    int64_t bytes;
} muon_share;

typedef struct qd_muon {
    muon_round *rounds;
    int round_count;
    int scratch;
    bool exchanged, shared; /* there is a matrix_group, a share_group */
    int collecting, handing; /* the newest COLLECT and HAND_BACK */
    muon_share *shares;      /* in the order of their start */
    int share_count, share_done;
    int64_t sharing_bytes;
} qd_muon;

bool qd_muon_takes(const qd_ledger *ledger, int param)
{
    const qd_param *p = &ledger->params[param];
    return p->ndim == 2 && p->tied_to < 0 && ledger->modules[p->module].layer >= 0;
}

static int place(const qd_program *p, int group, int rank)
{
    return group < 0 ? 0 : qd_group_coord(&p->ledger->mesh, p->groups[group], rank);
}

bool qd_muon_is_near(const qd_program *p, int matrix, int rank)
{
    return p->matrices[matrix].sharer == place(p, p->share_group, rank);
}

int qd_muon_own(const qd_program *p, const qd_action *run, int rank)
{
    int owner = place(p, p->matrix_group, rank);
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
    qd_slice(box.atom.length[0], p->storage.parts, qd_mesh_group_coord(&l->mesh, QD_AXES_DATA, rank) % p->storage.parts, &first,
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

/* ---- who has what ---- */

typedef struct candidate {
    int param, rank, round; /* rank: of all that do the work together */
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

/* The first of a heap has become heavier. */
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

/* The most expensive first, each to the rank that has the least to do. */
static qd_status assign(candidate *list, int count, int ranks)
{
    worker *heap = calloc((size_t)ranks, sizeof *heap);
    if (!heap)
        return QD_FAIL(QD_NO_MEMORY, "no memory to share out %d matrices", count);
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

/* The matrices that this rank has something of. Refuses those that are cut along other axes than the groups have. */
static qd_status find_matrices(const qd_builder *b, candidate *list, int *count)
{
    for (int i = 0; i < b->ledger->param_count; i++) {
        const qd_param *p = &b->ledger->params[i];
        int64_t rows = p->shape[0], cols = p->shape[1];
        if (!qd_muon_takes(b->ledger, i) || b->p->storage.count[i] == 0)
            continue;
        for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
            if (axis != QD_AXIS_TP && p->value[axis].kind == QD_SHARD && b->ledger->mesh.degree[axis] > 1)
                return QD_FAIL(QD_UNSUPPORTED, "train.optimizer=muon orthogonalizes whole matrices, but this layout cuts %s along %s: take "
                                               "train.optimizer=adamw", p->name, qd_axis_name((qd_axis)axis));
        list[(*count)++] = (candidate){.param = i, .cost = (double)rows * (double)cols * (double)(rows < cols ? rows : cols)};
    }
    return QD_OK;
}

static qd_status keep_rounds(qd_builder *b, qd_muon *m, const candidate *list, int count, int owners, qd_arena *arena)
{
    qd_program *p = b->p;
    p->matrices = QD_ARENA_NEW(arena, qd_matrix, count + 1);
    m->rounds = QD_ARENA_NEW(arena, muon_round, count + 1);
    m->shares = QD_ARENA_NEW(arena, muon_share, count + 1);
    if (!p->matrices || !m->rounds || !m->shares)
        return QD_NO_MEMORY;
    p->matrix_count = count;
    for (int i = 0; i < count; i++) {
        qd_matrix *x = &p->matrices[i];
        *x = (qd_matrix){list[i].param, list[i].round, list[i].rank % owners, list[i].rank / owners, 0};
        if (i > 0 && x[-1].round == x->round && x[-1].sharer == x->sharer)
            x->part = x[-1].part + qd_muon_box_of(p, i - 1, p->rank).count;
        if (i == 0 || list[i].round != list[i - 1].round)
            m->rounds[m->round_count++] = (muon_round){.first = i, .matrix = -1, .part = -1};
        m->rounds[m->round_count - 1].count++;
        m->rounds[m->round_count - 1].left++;
    }
    return QD_OK;
}

/* Matrices have no second moment; those of the rest lie without gaps. */
static qd_status place_moments(qd_builder *b, qd_arena *arena, int64_t *moment2)
{
    const qd_storage *s = &b->p->storage;
    b->p->moment2 = QD_ARENA_NEW(arena, int64_t, b->ledger->param_count);
    if (!b->p->moment2)
        return QD_NO_MEMORY;
    for (int i = 0; i < b->ledger->param_count; i++) {
        b->p->moment2[i] = qd_muon_takes(b->ledger, i) ? -1 : *moment2;
        if (b->p->moment2[i] >= 0 && b->ledger->params[i].tied_to < 0)
            *moment2 += qd_storage_part(s, i, s->parts, s->part).count;
    }
    return QD_OK;
}

/* The ranks that have parts of a matrix, and those that have the same parts. */
static void choose_groups(qd_builder *b)
{
    int tp = b->ledger->mesh.degree[QD_AXIS_TP], parts = b->p->storage.parts;
    bool sharded = parts > 1;
    qd_group all = {QD_AXES_DATA | QD_AXIS_BIT(QD_AXIS_TP), parts * tp, 1};
    b->p->matrix_group = sharded && tp > 1 ? qd_build_group(b, all)
                         : sharded         ? b->shard_group
                                           : qd_build_group(b, qd_group_whole(&b->ledger->mesh, QD_AXIS_BIT(QD_AXIS_TP)));
    b->p->share_group = sharded ? -1 : b->data_group;
    b->muon->exchanged = b->p->matrix_group >= 0;
    b->muon->shared = b->p->share_group >= 0;
}

static int group_size(const qd_builder *b, int group)
{
    return group < 0 ? 1 : b->p->groups[group].size;
}

qd_status qd_muon_create(qd_builder *b, qd_arena *arena, int64_t *moment2)
{
    if (b->strategy->optimizer != QD_OPTIM_MUON || !b->strategy->training)
        return QD_OK;
    qd_muon *m = b->muon = QD_ARENA_NEW(arena, qd_muon, 1);
    candidate *list = calloc((size_t)b->ledger->param_count, sizeof *list);
    int count = 0;
    qd_status status = m && list ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to share out matrices");
    if (status == QD_OK)
        status = find_matrices(b, list, &count);
    if (status == QD_OK) {
        m->scratch = -1;
        choose_groups(b);
        status = assign(list, count, group_size(b, b->p->matrix_group) * group_size(b, b->p->share_group));
    }
    if (status == QD_OK)
        status = keep_rounds(b, m, list, count, group_size(b, b->p->matrix_group), arena);
    free(list);
    return status == QD_OK ? place_moments(b, arena, moment2) : status;
}

/* ---- a round ---- */

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

/* The elements of the round that change ranks at an exchange, in all groups that have a matrix of it: of each matrix, every box but
 * the owner's; of boxes that several ranks of tp have, one is collected, and all are handed back. */
static int64_t moved(const qd_builder *b, qd_action_kind kind, const muon_round *r)
{
    const qd_mesh *mesh = &b->ledger->mesh;
    int64_t count = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        const qd_param *p = &b->ledger->params[b->p->matrices[i].param];
        const qd_place *tp = &p->value[QD_AXIS_TP];
        int copies = tp->kind == QD_SHARD ? (tp->repeat > 1 ? tp->repeat : 1) : mesh->degree[QD_AXIS_TP];
        qd_muon_box own = qd_muon_box_of(b->p, i, qd_group_rank(mesh, b->p->groups[b->p->matrix_group], b->p->rank, b->p->matrices[i].owner));
        bool back = kind == QD_ACTION_HAND_BACK;
        count += p->shape[0] * p->shape[1] * (back ? copies : 1) - (back || own.speaks ? own.count : 0);
    }
    return count;
}

static int exchange(qd_builder *b, qd_action_kind kind, const muon_round *r)
{
    int64_t count = moved(b, kind, r);
    qd_action *a = qd_build_collective(b, kind, -1, b->p->matrix_group, count, QD_F32, qd_build_last_compute(b));
    int together = group_size(b, b->p->matrix_group) * group_size(b, b->p->share_group);
    a->bytes = qd_coll_bytes(QD_COLL_ALL_TO_ALL, count, QD_F32, group_size(b, b->p->matrix_group)) * (b->ledger->mesh.world / together);
    set_run(a, r);
    a->parts = b->p->storage.parts;
    return b->p->action_count - 1;
}

/* Room for a rank's boxes of the round: as much as any rank of its share_group needs. */
static int64_t part_bytes(const qd_builder *b, const muon_round *r)
{
    int64_t most = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        int64_t end = b->p->matrices[i].part + qd_muon_box_of(b->p, i, b->p->rank).count;
        most = end > most ? end : most;
    }
    return most * 4;
}

/* Momentum in host memory is on the device for one matrix at a time. */
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

static void begin_round(qd_builder *b, muon_round *r)
{
    int64_t largest = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        int64_t bytes = matrix_bytes(b, i);
        largest = bytes > largest ? bytes : largest;
    }
    r->matrix = qd_build_alloc(b, QD_BUFFER_MATRIX, -1, -1, largest);
    if (b->muon->exchanged)
        r->part = qd_build_alloc(b, QD_BUFFER_PART, -1, -1, part_bytes(b, r));
    momentum(b, r);
    if (b->muon->exchanged)
        b->muon->collecting = exchange(b, QD_ACTION_COLLECT, r);
}

/* All ranks' scratch is that of the largest matrix of any round. */
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

/* `collected`: the COLLECT that it waits for, -1: none. */
static void orthogonalize(qd_builder *b, const muon_round *r, int collected)
{
    qd_action *a = qd_build_action(b, QD_ACTION_ORTHOGONALIZE, -1, -1);
    set_run(a, r);
    a->part = b->muon->scratch;
    for (int i = r->first; i < r->first + r->count; i++) {
        const qd_param *p = &b->ledger->params[b->p->matrices[i].param];
        double rows = (double)p->shape[0], cols = (double)p->shape[1], least = rows < cols ? rows : cols;
        double flops = b->strategy->muon_steps * 2.0 * least * least * (2.0 * (rows < cols ? cols : rows) + least);
        a->flops = flops > a->flops ? flops : a->flops; /* of the rank that has most */
    }
    if (b->strategy->overlap)
        qd_build_dep(b, collected);
}

/* Applies results once the transfer that brings them has ended (-1: none does). */
static void apply(qd_builder *b, int first, int count, int buffer, int part, int brought)
{
    int each = b->offload ? 1 : count; /* master weights in host memory are on the device for one matrix at a time */
    for (int i = first; i < first + count; i += each) {
        int chunk = qd_offload_matrix_begin(b, i, QD_BUFFER_MASTER);
        qd_action *a = qd_build_action(b, QD_ACTION_UPDATE_MATRICES, -1, -1);
        set_run(a, &(muon_round){.first = i, .count = each, .matrix = buffer, .part = part});
        if (b->strategy->overlap)
            qd_build_dep(b, brought);
        qd_offload_matrix_end(b, i, QD_BUFFER_MASTER, a, chunk);
    }
}

/* ---- parts of matrices: three rounds at a time ---- */

static void end_round(qd_builder *b, muon_round *r, int handed)
{
    apply(b, r->first, r->count, r->matrix, r->part, handed);
    qd_build_free(b, &r->part);
    qd_build_free(b, &r->matrix);
}

static void finish_exchanged(qd_builder *b)
{
    qd_muon *m = b->muon;
    bool overlap = b->strategy->overlap;
    for (int k = 0; k < m->round_count; k++) {
        muon_round *r = &m->rounds[k];
        int collected = m->collecting, handed = m->handing;
        if (overlap && k + 1 < m->round_count)
            begin_round(b, r + 1);
        orthogonalize(b, r, collected);
        m->handing = exchange(b, QD_ACTION_HAND_BACK, r);
        if (overlap && k > 0)
            end_round(b, r - 1, handed);
        if (!overlap)
            end_round(b, r, m->handing);
        if (!overlap && k + 1 < m->round_count)
            begin_round(b, r + 1);
    }
    if (overlap)
        end_round(b, &m->rounds[m->round_count - 1], m->handing);
}

/* ---- copies: results go to all ranks that have the same ---- */

static void end_share(qd_builder *b)
{
    qd_muon *m = b->muon;
    muon_share *s = &m->shares[m->share_done++];
    muon_round *r = &m->rounds[s->round];
    apply(b, s->matrix, 1, s->buffer, m->exchanged ? r->part : r->matrix, s->action);
    m->sharing_bytes -= s->bytes;
    qd_build_free(b, &s->buffer);
    if (--r->left > 0)
        return;
    qd_build_free(b, &r->part);
    qd_build_free(b, &r->matrix);
}

/* As many results are on their way as fit a bucket, and two at least: the next round is computed meanwhile. */
static void share(qd_builder *b, int round, int matrix)
{
    qd_muon *m = b->muon;
    int64_t bytes = qd_muon_box_of(b->p, matrix, b->p->rank).count * 4, most = b->strategy->bucket_bytes > 2 * bytes ? b->strategy->bucket_bytes : 2 * bytes;
    while (m->share_done < m->share_count && m->sharing_bytes + bytes > most)
        end_share(b);
    int buffer = qd_build_alloc(b, QD_BUFFER_MATRIX, -1, -1, bytes);
    qd_action *a = qd_build_collective(b, QD_ACTION_SHARE, -1, b->p->share_group, bytes / 4, QD_F32, qd_build_last_compute(b));
    set_run(a, &(muon_round){.first = matrix, .count = 1, .matrix = buffer, .part = m->exchanged ? m->rounds[round].part : m->rounds[round].matrix});
    if (b->strategy->overlap && m->exchanged)
        qd_build_dep(b, m->handing);
    m->shares[m->share_count++] = (muon_share){round, matrix, b->p->action_count - 1, buffer, bytes};
    m->sharing_bytes += bytes;
    if (!b->strategy->overlap)
        end_share(b);
}

static void run_round(qd_builder *b, int round)
{
    qd_muon *m = b->muon;
    muon_round *r = &m->rounds[round];
    begin_round(b, r);
    orthogonalize(b, r, m->collecting);
    if (m->exchanged)
        m->handing = exchange(b, QD_ACTION_HAND_BACK, r);
    for (int i = r->first; i < r->first + r->count && m->shared && !b->no_memory; i++)
        share(b, round, i);
    if (!m->shared)
        end_round(b, r, -1);
}

/* Whether rounds overlap each other; else each is computed and its results are shared. */
static bool pipelined(const qd_muon *m)
{
    return m->exchanged && !m->shared;
}

void qd_muon_begin(qd_builder *b)
{
    if (!b->muon || b->muon->round_count == 0)
        return;
    b->muon->collecting = b->muon->handing = -1;
    alloc_scratch(b);
    if (pipelined(b->muon))
        begin_round(b, &b->muon->rounds[0]);
    else
        run_round(b, 0);
}

void qd_muon_finish(qd_builder *b)
{
    qd_muon *m = b->muon;
    if (!m || m->round_count == 0)
        return;
    if (pipelined(m))
        finish_exchanged(b);
    for (int k = 1; k < m->round_count && !pipelined(m); k++)
        run_round(b, k);
    while (m->share_done < m->share_count)
        end_share(b);
    qd_build_free(b, &m->scratch);
}
