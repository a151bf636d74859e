#include "spec/muon.h"

#include "spec/program_impl.h"

#include <stdlib.h>

typedef struct muon_round {
    int first, count; /* in the program's matrices */
    int matrix, part; /* buffers, -1: none now */
    int left;         /* not sharded: results that are still to be applied */
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
    bool sharded;
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

int qd_muon_place(const qd_program *p, int rank)
{
    return p->matrix_group < 0 ? 0 : qd_group_coord(&p->ledger->mesh, p->groups[p->matrix_group], rank);
}

int qd_muon_own(const qd_program *p, const qd_action *run, int place)
{
    for (int i = run->param; i < run->param + run->params; i++)
        if (p->matrices[i].owner == place)
            return i;
    return -1;
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
    int param, owner, round;
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
    return x->round != y->round ? x->round - y->round : x->owner - y->owner;
}

/* The most expensive first, each to the rank that has the least to do. */
static qd_status assign(candidate *list, int count, int ranks)
{
    double *load = calloc((size_t)ranks, sizeof *load);
    int *rounds = calloc((size_t)ranks, sizeof *rounds);
    qd_status status = load && rounds ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to share out %d matrices", count);
    qsort(list, (size_t)count, sizeof *list, by_cost);
    for (int i = 0; i < count && status == QD_OK; i++) {
        int least = 0;
        for (int r = 1; r < ranks; r++)
            least = load[r] < load[least] ? r : least;
        list[i].owner = least;
        list[i].round = rounds[least]++;
        load[least] += list[i].cost;
    }
    qsort(list, (size_t)count, sizeof *list, by_round);
    free(load);
    free(rounds);
    return status;
}

/* What this rank has of the matrices; refuses those of which it has a part only that nobody joins. */
static qd_status find_matrices(const qd_builder *b, candidate *list, int *count)
{
    for (int i = 0; i < b->ledger->param_count; i++) {
        const qd_param *p = &b->ledger->params[i];
        int64_t rows = p->shape[0], cols = p->shape[1], held = b->p->storage.count[i];
        if (!qd_muon_takes(b->ledger, i) || held == 0)
            continue;
        if (held != rows * cols)
            return QD_FAIL(QD_UNSUPPORTED, "train.optimizer=muon orthogonalizes whole matrices, but this layout splits %s over model-parallel "
                                           "ranks: set parallel.tp to 1, or train.optimizer to adamw", p->name);
        list[(*count)++] = (candidate){.param = i, .cost = (double)rows * (double)cols * (double)(rows < cols ? rows : cols)};
    }
    return QD_OK;
}

static qd_status keep_rounds(qd_builder *b, qd_muon *m, const candidate *list, int count, qd_arena *arena)
{
    qd_program *p = b->p;
    p->matrices = QD_ARENA_NEW(arena, qd_matrix, count + 1);
    m->rounds = QD_ARENA_NEW(arena, muon_round, count + 1);
    m->shares = QD_ARENA_NEW(arena, muon_share, count + 1);
    if (!p->matrices || !m->rounds || !m->shares)
        return QD_NO_MEMORY;
    p->matrix_count = count;
    for (int i = 0; i < count; i++) {
        p->matrices[i] = (qd_matrix){list[i].param, list[i].owner};
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
        m->sharded = b->shard_group >= 0;
        m->scratch = -1;
        b->p->matrix_group = m->sharded ? b->shard_group : b->data_group;
        status = assign(list, count, b->p->matrix_group < 0 ? 1 : b->p->groups[b->p->matrix_group].size);
    }
    if (status == QD_OK)
        status = keep_rounds(b, m, list, count, arena);
    free(list);
    return status == QD_OK ? place_moments(b, arena, moment2) : status;
}

/* ---- a round ---- */

static int64_t matrix_bytes(const qd_builder *b, int matrix)
{
    return b->p->storage.count[b->p->matrices[matrix].param] * 4;
}

static void set_run(qd_action *a, const muon_round *r)
{
    a->buffer = r->matrix;
    a->part = r->part;
    a->param = r->first;
    a->params = r->count;
}

/* The elements of the round that change ranks, at each of the two exchanges: all but the rows that the owner has itself. */
static int64_t moved(const qd_builder *b, const muon_round *r)
{
    const qd_storage *s = &b->p->storage;
    int64_t count = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        const qd_matrix *x = &b->p->matrices[i];
        count += s->count[x->param] - qd_storage_part(s, x->param, s->parts, x->owner).count;
    }
    return count;
}

static int exchange(qd_builder *b, qd_action_kind kind, const muon_round *r)
{
    qd_action *a = qd_build_collective(b, kind, -1, b->p->matrix_group, moved(b, r), QD_F32, qd_build_last_compute(b));
    set_run(a, r);
    a->parts = b->p->storage.parts;
    return b->p->action_count - 1;
}

static void begin_round(qd_builder *b, muon_round *r)
{
    const qd_storage *s = &b->p->storage;
    int64_t largest = 0, own = 0;
    for (int i = r->first; i < r->first + r->count; i++) {
        int64_t bytes = matrix_bytes(b, i);
        largest = bytes > largest ? bytes : largest;
        own += qd_storage_part(s, b->p->matrices[i].param, s->parts, s->part).count;
    }
    r->matrix = qd_build_alloc(b, QD_BUFFER_MATRIX, -1, -1, largest);
    if (b->muon->sharded)
        r->part = qd_build_alloc(b, QD_BUFFER_PART, -1, -1, own * 4);
    set_run(qd_build_action(b, QD_ACTION_MOMENTUM, -1, -1), r);
    if (b->muon->sharded)
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
    qd_action *a = qd_build_action(b, QD_ACTION_UPDATE_MATRICES, -1, -1);
    set_run(a, &(muon_round){.first = first, .count = count, .matrix = buffer, .part = part});
    if (b->strategy->overlap)
        qd_build_dep(b, brought);
}

/* ---- sharded: three rounds at a time ---- */

static void end_round(qd_builder *b, muon_round *r, int handed)
{
    apply(b, r->first, r->count, r->matrix, r->part, handed);
    qd_build_free(b, &r->part);
    qd_build_free(b, &r->matrix);
}

static void finish_sharded(qd_builder *b)
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

/* ---- whole copies: results go to all ranks ---- */

static void end_share(qd_builder *b)
{
    qd_muon *m = b->muon;
    muon_share *s = &m->shares[m->share_done++];
    muon_round *r = &m->rounds[s->round];
    apply(b, s->matrix, 1, s->buffer, r->matrix, s->action);
    m->sharing_bytes -= s->bytes;
    qd_build_free(b, &s->buffer);
    if (--r->left == 0)
        qd_build_free(b, &r->matrix);
}

/* As many results are on their way as fit a bucket, and two at least: the next round is computed meanwhile. */
static void share(qd_builder *b, int round, int matrix)
{
    qd_muon *m = b->muon;
    int64_t bytes = matrix_bytes(b, matrix), most = b->strategy->bucket_bytes > 2 * bytes ? b->strategy->bucket_bytes : 2 * bytes;
    while (m->share_done < m->share_count && m->sharing_bytes + bytes > most)
        end_share(b);
    int buffer = qd_build_alloc(b, QD_BUFFER_MATRIX, -1, -1, bytes);
    qd_action *a = qd_build_collective(b, QD_ACTION_SHARE, -1, b->p->matrix_group, bytes / 4, QD_F32, qd_build_last_compute(b));
    set_run(a, &(muon_round){.first = matrix, .count = 1, .matrix = buffer, .part = m->rounds[round].matrix});
    m->shares[m->share_count++] = (muon_share){round, matrix, b->p->action_count - 1, buffer, bytes};
    m->sharing_bytes += bytes;
    if (!b->strategy->overlap)
        end_share(b);
}

static void run_whole(qd_builder *b, int round)
{
    muon_round *r = &b->muon->rounds[round];
    begin_round(b, r);
    orthogonalize(b, r, -1);
    for (int i = r->first; i < r->first + r->count && b->p->matrix_group >= 0 && !b->no_memory; i++)
        share(b, round, i);
    if (b->p->matrix_group < 0)
        end_round(b, r, -1);
}

void qd_muon_begin(qd_builder *b)
{
    if (!b->muon || b->muon->round_count == 0)
        return;
    b->muon->collecting = b->muon->handing = -1;
    alloc_scratch(b);
    if (b->muon->sharded)
        begin_round(b, &b->muon->rounds[0]);
    else
        run_whole(b, 0);
}

void qd_muon_finish(qd_builder *b)
{
    qd_muon *m = b->muon;
    if (!m || m->round_count == 0)
        return;
    if (m->sharded)
        finish_sharded(b);
    for (int k = 1; k < m->round_count && !m->sharded; k++)
        run_whole(b, k);
    while (m->share_done < m->share_count)
        end_share(b);
    qd_build_free(b, &m->scratch);
}
