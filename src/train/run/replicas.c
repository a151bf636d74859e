/* Compares the state of replicas by hashes. See replicas.h.
 *
 * The common case costs one pass over the state and one small all-gather: each rank hashes what it
 * holds, in classes that have equal members on all replicas. Only if hashes differ are tensors
 * compared one by one. */
#include "train/run/replicas.h"

#include "ckpt/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { CLASSES = QD_REPLICA_MARKS };
typedef qd_replica_mark mark;

struct qd_replicas {
    qd_trainer *trainer;
    qd_comm *control;
    float *values; /* (largest shard) */
    mark *all;     /* (ranks × CLASSES) */
    bool exist;
};

static const qd_tensor_kind kinds[] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};
static const char *const kind_names[] = {"value", "moment1", "moment2"};
enum { KINDS = sizeof kinds / sizeof *kinds };

static int64_t mix(int64_t before, const void *data, size_t bytes)
{
    return (int64_t)XXH3_64bits_withSeed(data, bytes, (XXH64_hash_t)before);
}

static bool is_kept(const qd_replicas *r, int param, int kind)
{
    const qd_program *p = qd_trainer_program(r->trainer);
    if (p->ledger->params[param].tied_to >= 0)
        return false;
    return kinds[kind] == QD_TENSOR_VALUE ? qd_storage_has(p->ledger, &p->storage, param) : qd_trainer_holds(r->trainer, kinds[kind]);
}

/* The part of a tensor that this rank holds; bits: also hash its values. */
static qd_status mark_tensor(qd_replicas *r, int param, int kind, bool bits, mark *m, bool *whole)
{
    const qd_param *about = &qd_trainer_program(r->trainer)->ledger->params[param];
    *m = (mark){0, 0};
    if (!is_kept(r, param, kind))
        return QD_OK;
    qd_holding own = qd_trainer_holding(r->trainer, param, kinds[kind]);
    if (own.count == 0)
        return QD_OK;
    const int64_t part[] = {param,
                            kind,
                            own.box.begin[0],
                            own.box.begin[1],
                            own.box.length[0],
                            own.box.length[1]};
    int64_t elements = 1;
    for (int i = 0; i < about->ndim; i++)
        elements *= about->shape[i];
    *whole = own.count == elements;
    m->part = mix(1, part, sizeof part) | 1;
    if (!bits)
        return QD_OK;
    QD_TRY(qd_trainer_get(r->trainer, param, kinds[kind], r->values));
    m->bits = mix(0, r->values, (size_t)own.count * sizeof *r->values);
    return QD_OK;
}

/* Everything that this rank holds, one mark per class. */
static qd_status mark_all(qd_replicas *r, bool bits, mark classes[CLASSES])
{
    const qd_ledger *ledger = qd_trainer_program(r->trainer)->ledger;
    memset(classes, 0, CLASSES * sizeof *classes);
    for (int param = 0; param < ledger->param_count; param++)
        for (int kind = 0; kind < KINDS; kind++) {
            mark one;
            bool whole = false;
            QD_TRY(mark_tensor(r, param, kind, bits, &one, &whole));
            mark *m = &classes[2 * ledger->params[param].family + whole];
            if (one.part == 0)
                continue;
            m->part = mix(m->part, &one.part, sizeof one.part) | 1;
            m->bits = mix(m->bits, &one.bits, sizeof one.bits);
        }
    return QD_OK;
}

qd_status qd_replicas_mark(qd_replicas *r, qd_replica_mark marks[QD_REPLICA_MARKS])
{
    return mark_all(r, true, marks);
}

bool qd_replica_marks_differ(const qd_replica_mark *a, const qd_replica_mark *b)
{
    for (int i = 0; i < QD_REPLICA_MARKS; i++)
        if (a[i].part != 0 && a[i].part == b[i].part && a[i].bits != b[i].bits)
            return true;
    return false;
}

/* A failure to read the state is this rank's alone: the others must not wait for it. */
static qd_status gather(qd_replicas *r, const mark *mine, int count)
{
    int ranks = qd_comm_size(r->control);
    return qd_comm_all_gather(r->control, mine, r->all, (int64_t)ranks * count * 2, QD_I64, NULL);
}

/* Entry i of each rank: the number of ranks that hold the same part as `rank`, and of those that
 * are bit-identical there. */
static void count_equal(const qd_replicas *r, int count, int i, int rank, int *same_part, int *same_bits)
{
    const mark *own = &r->all[rank * count + i];
    *same_part = *same_bits = 0;
    for (int other = 0; other < qd_comm_size(r->control); other++) {
        const mark *m = &r->all[other * count + i];
        *same_part += m->part == own->part;
        *same_bits += m->part == own->part && m->bits == own->bits;
    }
}

static bool agree(const qd_replicas *r, int count)
{
    for (int rank = 0; rank < qd_comm_size(r->control); rank++)
        for (int i = 0; i < count; i++) {
            int part, bits;
            if (r->all[rank * count + i].part == 0)
                continue;
            count_equal(r, count, i, rank, &part, &bits);
            if (part != bits)
                return false;
        }
    return true;
}

qd_status qd_replicas_create(qd_trainer *trainer, qd_comm *control, qd_replicas **replicas)
{
    qd_replicas *r = calloc(1, sizeof *r);
    int ranks = qd_comm_size(control);
    mark mine[CLASSES];
    if (!r)
        return QD_FAIL(QD_NO_MEMORY, "no memory to compare replicas");
    r->trainer = trainer;
    r->control = control;
    r->values = malloc((size_t)qd_trainer_largest(trainer) * sizeof *r->values);
    r->all = calloc((size_t)ranks * CLASSES, sizeof *r->all);
    qd_status status = r->values && r->all ? mark_all(r, false, mine) : QD_FAIL(QD_NO_MEMORY, "no memory to compare replicas");
    if (status == QD_OK)
        status = gather(r, mine, CLASSES);
    for (int rank = 0; status == QD_OK && rank < ranks; rank++)
        for (int i = 0; i < CLASSES; i++) {
            int part, bits;
            count_equal(r, CLASSES, i, rank, &part, &bits);
            r->exist = r->exist || (r->all[rank * CLASSES + i].part != 0 && part > 1);
        }
    if (status != QD_OK) {
        qd_replicas_destroy(r);
        return status;
    }
    *replicas = r;
    return QD_OK;
}

void qd_replicas_destroy(qd_replicas *r)
{
    if (!r)
        return;
    free(r->values);
    free(r->all);
    free(r);
}

bool qd_replicas_exist(const qd_replicas *r)
{
    return r->exist;
}

/* What the search for the tensor has found. */
typedef struct finding {
    int tensors;    /* that differ */
    int healed;
    bool open;      /* one of them has no majority */
    char text[384]; /* about the first, or the first without a majority */
} finding;

/* The lowest rank of the majority that contradicts `rank`; -1: there is none. */
static int majority_against(const qd_replicas *r, int rank)
{
    int part, bits;
    for (int other = 0; other < qd_comm_size(r->control); other++) {
        if (r->all[other].part != r->all[rank].part || r->all[other].bits == r->all[rank].bits)
            continue;
        count_equal(r, 1, 0, other, &part, &bits);
        if (2 * bits > part)
            return other;
    }
    return -1;
}

static void describe(const qd_replicas *r, int param, int kind, int rank, int right, finding *f)
{
    const char *name = qd_trainer_program(r->trainer)->ledger->params[param].name;
    int other = 0;
    if (f->tensors > 0 && (right >= 0 || f->open))
        return;
    while (r->all[other].part != r->all[rank].part || r->all[other].bits == r->all[rank].bits)
        other++;
    if (right >= 0)
        snprintf(f->text, sizeof f->text, "rank %d holds other bits of '%s' (%s) than its replicas, such as rank %d", rank, name,
                 kind_names[kind], right);
    else
        snprintf(f->text, sizeof f->text,
                 "ranks %d and %d hold different bits of '%s' (%s), and no majority of replicas decides which are right",
                 rank < other ? rank : other, rank < other ? other : rank, name, kind_names[kind]);
}

/* Ranks `from` and `to` only. */
static qd_status copy_tensor(qd_replicas *r, int param, int kind, int from, int to)
{
    int me = qd_comm_rank(r->control);
    if (me != from && me != to)
        return QD_OK;
    int64_t count = qd_trainer_holding(r->trainer, param, kinds[kind]).count;
    if (me == from) {
        QD_TRY(qd_trainer_get(r->trainer, param, kinds[kind], r->values));
        return qd_comm_send(r->control, r->values, count, QD_F32, to, NULL);
    }
    QD_TRY(qd_comm_recv(r->control, r->values, count, QD_F32, from, NULL));
    return qd_trainer_put(r->trainer, param, kinds[kind], r->values);
}

/* All ranks see the same marks and take the same decisions. */
static qd_status compare_tensor(qd_replicas *r, int param, int kind, bool heal, finding *f)
{
    mark mine;
    bool whole = false, differs = false;
    QD_TRY(mark_tensor(r, param, kind, true, &mine, &whole));
    QD_TRY(gather(r, &mine, 1));
    for (int rank = 0; rank < qd_comm_size(r->control); rank++) {
        int part, bits;
        count_equal(r, 1, 0, rank, &part, &bits);
        if (r->all[rank].part == 0 || part == bits || 2 * bits > part)
            continue;
        int right = majority_against(r, rank);
        describe(r, param, kind, rank, right, f);
        differs = true;
        f->open = f->open || right < 0;
        if (heal && right >= 0)
            QD_TRY(copy_tensor(r, param, kind, right, rank));
        f->healed += heal && right >= 0;
    }
    f->tensors += differs;
    return QD_OK;
}

qd_status qd_replicas_compare(qd_replicas *r, bool heal, char healed[512])
{
    const qd_ledger *ledger = qd_trainer_program(r->trainer)->ledger;
    mark mine[CLASSES];
    finding f = {0};
    healed[0] = '\0';
    if (!r->exist)
        return QD_OK;
    QD_TRY(mark_all(r, true, mine));
    QD_TRY(gather(r, mine, CLASSES));
    if (agree(r, CLASSES))
        return QD_OK;
    for (int param = 0; param < ledger->param_count; param++)
        for (int kind = 0; kind < KINDS; kind++)
            QD_TRY(compare_tensor(r, param, kind, heal, &f));
    char more[48] = "";
    if (f.tensors > 1)
        snprintf(more, sizeof more, "; %d tensors differ", f.tensors);
    if (heal && !f.open) {
        snprintf(healed, 512, "%s%s: copied from there", f.text, more);
        return QD_OK;
    }
    return QD_FAIL(QD_DIFFERENT, "%s%s: memory, a message or a processor is damaged", f.text, more);
}
