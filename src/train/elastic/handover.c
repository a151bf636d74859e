/* Writes and reads the state that surviving ranks hand over. See handover.h. */
#define _GNU_SOURCE
#include "train/elastic/handover.h"

#include "base/error.h"
#include "train/exec/state.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_SECTIONS = 64, HEAD_BYTES = 4096, CHUNK = 1 << 20 }; /* CHUNK: elements of a broadcast */

/* At the beginning of the file. Each rank appends a section: facts, records, values. */
typedef struct head {
    _Atomic int64_t used; /* bytes of the file */
    _Atomic int32_t sections;
    _Atomic int64_t at[MOST_SECTIONS];
} head;
_Static_assert(sizeof(head) <= HEAD_BYTES, "the head has a page");

typedef struct record {
    int32_t param, kind; /* index of the ledger, the same on every layout; qd_ckpt_kind */
    qd_atom box;
    int64_t at; /* of its values, in the file */
} record;

typedef struct section {
    qd_handover_facts facts;
    int64_t params, records; /* of the ledger, and here */
} section;

/* A section, seen from here. */
typedef struct source {
    int64_t params, count;
    const record *records;
} source;

struct qd_handover {
    const char *file; /* mapped; NULL: this rank has none */
    size_t bytes;
    qd_handover_facts facts;
    bool differs;
    source *sources; /* (count) */
    int count;
    /* Gathered: */
    qd_comm *comm; /* NULL: it is not */
    int *ranks;    /* (count) that have written the sections */
    record *table; /* what their `records` point to */
    float *chunk;
};

static const qd_tensor_kind tensor_of[QD_CKPT_KIND_COUNT] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};

static qd_status fail(const char *what)
{
    return QD_FAIL(QD_SYSTEM, "the state cannot be handed over in memory: %s: %s", what, strerror(errno));
}

qd_status qd_handover_create(int *fd)
{
    *fd = memfd_create("quadrille state", MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, HEAD_BYTES) != 0)
        return fail("memfd_create");
    head first = {.used = HEAD_BYTES};
    return pwrite(*fd, &first, sizeof first, 0) == (ssize_t)sizeof first ? QD_OK : fail("write");
}

static qd_status put(int fd, const void *data, size_t bytes, int64_t at)
{
    for (const char *from = data; bytes > 0;) {
        ssize_t n = pwrite(fd, from, bytes, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fail("write");
        from += n;
        at += n;
        bytes -= (size_t)n;
    }
    return QD_OK;
}

/* The records of the section and then the values, one tensor of this rank after another. */
static qd_status put_pieces(int fd, qd_trainer *t, const qd_state_pieces *pieces, int64_t at, float *tensor)
{
    int param = -1;
    qd_ckpt_kind kind = QD_CKPT_VALUE;
    const int64_t values = at + pieces->count * (int64_t)sizeof(record);
    for (int i = 0; i < pieces->count; i++) {
        const qd_state_piece *piece = &pieces->list[i];
        const qd_atom held = qd_trainer_holding(t, piece->param, tensor_of[piece->kind]).box;
        const record r = {piece->param, piece->kind, piece->box, values + piece->before * (int64_t)sizeof(float)};
        if (param != piece->param || kind != piece->kind)
            QD_TRY(qd_trainer_get(t, piece->param, tensor_of[piece->kind], tensor));
        param = piece->param;
        kind = piece->kind;
        QD_TRY(put(fd, tensor + (piece->box.begin[0] - held.begin[0]) * held.length[1], (size_t)piece->count * sizeof(float), r.at));
        QD_TRY(put(fd, &r, sizeof r, at + i * (int64_t)sizeof r));
    }
    return QD_OK;
}

static qd_status put_section(int fd, qd_trainer *t, const qd_state_pieces *pieces, const qd_handover_facts *facts)
{
    const section s = {*facts, qd_trainer_program(t)->ledger->param_count, pieces->count};
    const int64_t bytes = (int64_t)sizeof s + pieces->count * (int64_t)sizeof(record) + pieces->elements * (int64_t)sizeof(float);
    head *shared = mmap(NULL, HEAD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    float *tensor = malloc((size_t)qd_trainer_largest(t) * sizeof *tensor);
    qd_status status = shared == MAP_FAILED ? fail("mmap") : !tensor ? QD_FAIL(QD_NO_MEMORY, "no memory to hand over the state") : QD_OK;
    if (status == QD_OK) {
        const int64_t at = atomic_fetch_add(&shared->used, (bytes + 63) / 64 * 64);
        status = put(fd, &s, sizeof s, at);
        if (status == QD_OK)
            status = put_pieces(fd, t, pieces, at + (int64_t)sizeof s, tensor);
        if (status == QD_OK)
            atomic_store(&shared->at[atomic_fetch_add(&shared->sections, 1)], at);
    }
    free(tensor);
    if (shared != MAP_FAILED)
        munmap(shared, HEAD_BYTES);
    return status;
}

/* A process that writes beyond the limit on the size of files is killed. */
static bool may_write(void)
{
    struct rlimit most;
    return getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur == RLIM_INFINITY;
}

static qd_status find_left(const qd_program *p, uint64_t left, qd_arena *arena, qd_state_pieces *pieces, bool *complete)
{
    return qd_pieces_left(p, qd_pieces_kinds(p) | QD_PIECES_OMITTED, left, arena, pieces, complete);
}

qd_status qd_handover_covers(qd_trainer *t, uint64_t left, bool *complete)
{
    qd_arena *arena = NULL;
    qd_state_pieces pieces;
    *complete = false;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = find_left(qd_trainer_program(t), left, arena, &pieces, complete);
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_handover_write(int fd, qd_trainer *t, uint64_t left, const qd_handover_facts *facts, bool *complete)
{
    qd_arena *arena = NULL;
    qd_state_pieces pieces;
    *complete = false;
    if (!may_write())
        return QD_OK;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = find_left(qd_trainer_program(t), left, arena, &pieces, complete);
    if (status == QD_OK && *complete)
        status = put_section(fd, t, &pieces, facts);
    qd_arena_destroy(arena);
    return status;
}

static qd_status map_file(qd_handover *h, int fd)
{
    struct stat info;
    if (fstat(fd, &info) != 0 || info.st_size < HEAD_BYTES)
        return fail("it is not a file of sections");
    void *file = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (file == MAP_FAILED)
        return fail("mmap");
    h->file = file;
    h->bytes = (size_t)info.st_size;
    return QD_OK;
}

static qd_status begin(int sources, qd_handover **handover)
{
    qd_handover *h = *handover = calloc(1, sizeof *h);
    if (h)
        h->sources = calloc((size_t)sources + 1, sizeof *h->sources);
    return h && h->sources ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to take over the state");
}

/* The facts are equal, except whether what follows the step is done: one rank that has done it is
 * enough. */
static void add_facts(qd_handover *h, const qd_handover_facts *facts)
{
    const int32_t followed = h->facts.followed;
    h->facts = *facts;
    h->facts.followed = followed || facts->followed;
}

qd_status qd_handover_open(int fd, qd_handover **handover)
{
    qd_status status = begin(MOST_SECTIONS, handover);
    qd_handover *h = *handover;
    if (status == QD_OK)
        status = map_file(h, fd);
    if (status != QD_OK) {
        qd_handover_close(h);
        *handover = NULL;
        return status;
    }
    const head *shared = (const head *)h->file;
    h->count = shared->sections;
    for (int i = 0; i < h->count; i++) {
        const section *s = (const section *)(h->file + shared->at[i]);
        h->sources[i] = (source){s->params, s->records, (const record *)(s + 1)};
        for (int k = 0; k < i; k++)
            h->differs = h->differs ||
                         qd_replica_marks_differ(s->facts.marks, ((const section *)(h->file + shared->at[k]))->facts.marks);
        add_facts(h, &s->facts);
    }
    return QD_OK;
}

/* The section of this rank's own file; NULL: it has none. */
static const section *own_section(const qd_handover *h)
{
    const head *shared = (const head *)h->file;
    return shared && shared->sections == 1 ? (const section *)(h->file + shared->at[0]) : NULL;
}

/* Collective: all ranks get the facts of each section. */
static qd_status gather_facts(qd_handover *h)
{
    const section *own = own_section(h);
    qd_handover_facts *facts = calloc((size_t)h->count + 1, sizeof *facts);
    qd_status status = facts ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to take over the state");
    for (int i = 0; i < h->count && status == QD_OK; i++) {
        if (h->ranks[i] == qd_comm_rank(h->comm))
            facts[i] = own->facts;
        status = qd_comm_broadcast(h->comm, &facts[i], sizeof *facts, QD_U8, h->ranks[i], NULL);
        for (int k = 0; k < i && status == QD_OK; k++)
            h->differs = h->differs || qd_replica_marks_differ(facts[i].marks, facts[k].marks);
        if (status == QD_OK)
            add_facts(h, &facts[i]);
    }
    free(facts);
    return status;
}

/* Collective: all ranks get the records of each section. */
static qd_status gather_records(qd_handover *h)
{
    const section *own = own_section(h);
    int64_t total = 0, at = 0;
    for (int i = 0; i < h->count; i++)
        total += h->sources[i].count;
    h->table = calloc((size_t)total + 1, sizeof *h->table);
    h->chunk = malloc(CHUNK * sizeof *h->chunk);
    if (!h->table || !h->chunk)
        return QD_FAIL(QD_NO_MEMORY, "no memory to take over the state");
    for (int i = 0; i < h->count; at += h->sources[i++].count) {
        h->sources[i].records = h->table + at;
        if (h->ranks[i] == qd_comm_rank(h->comm))
            memcpy(h->table + at, own + 1, (size_t)own->records * sizeof *h->table);
        QD_TRY(qd_comm_broadcast(h->comm, h->table + at, h->sources[i].count * (int64_t)sizeof *h->table, QD_U8, h->ranks[i], NULL));
    }
    return QD_OK;
}

static qd_status gather(qd_handover *h, int64_t *sizes)
{
    const int rank = qd_comm_rank(h->comm), ranks = qd_comm_size(h->comm);
    const section *own = own_section(h);
    if (own)
        memcpy(sizes + 2 * rank, (int64_t[]){own->params, own->records}, 2 * sizeof *sizes);
    QD_TRY(qd_comm_all_gather(h->comm, sizes + 2 * rank, sizes, 2 * (int64_t)ranks, QD_I64, NULL));
    for (int p = 0; p < ranks; p++) {
        if (sizes[2 * p] == 0)
            continue;
        h->ranks[h->count] = p;
        h->sources[h->count++] = (source){.params = sizes[2 * p], .count = sizes[2 * p + 1]};
    }
    QD_TRY(gather_facts(h));
    return gather_records(h);
}

qd_status qd_handover_gather(int fd, qd_comm *comm, qd_handover **handover)
{
    const int ranks = qd_comm_size(comm);
    qd_status status = begin(ranks, handover);
    qd_handover *h = *handover;
    int64_t *sizes = calloc(2 * (size_t)ranks, sizeof *sizes);
    if (status == QD_OK)
        h->ranks = calloc((size_t)ranks, sizeof *h->ranks);
    if (status == QD_OK && (!h->ranks || !sizes))
        status = QD_FAIL(QD_NO_MEMORY, "no memory to take over the state");
    if (status == QD_OK && fd >= 0)
        status = map_file(h, fd);
    if (status == QD_OK) {
        h->comm = comm;
        status = gather(h, sizes);
    }
    free(sizes);
    if (status == QD_OK)
        return QD_OK;
    qd_handover_close(h);
    *handover = NULL;
    return status;
}

bool qd_handover_is_gathered(const qd_handover *h)
{
    return h->comm != NULL;
}

void qd_handover_close(qd_handover *h)
{
    if (!h)
        return;
    if (h->file)
        munmap((void *)(uintptr_t)h->file, h->bytes);
    free(h->sources);
    free(h->ranks);
    free(h->table);
    free(h->chunk);
    free(h);
}

const qd_handover_facts *qd_handover_get_facts(const qd_handover *h)
{
    return &h->facts;
}

bool qd_handover_differs(const qd_handover *h)
{
    return h->differs;
}

/* Copies what two boxes have in common; returns the number of elements. */
static int64_t copy_common(const qd_atom *from, const float *values, const qd_atom *to, float *out)
{
    int64_t begin[2], end[2];
    for (int d = 0; d < 2; d++) {
        const int64_t a = from->begin[d] + from->length[d], b = to->begin[d] + to->length[d];
        begin[d] = from->begin[d] > to->begin[d] ? from->begin[d] : to->begin[d];
        end[d] = a < b ? a : b;
        if (begin[d] >= end[d])
            return 0;
    }
    for (int64_t row = begin[0]; row < end[0]; row++)
        memcpy(out + (row - to->begin[0]) * to->length[1] + begin[1] - to->begin[1],
               values + (row - from->begin[0]) * from->length[1] + begin[1] - from->begin[1], (size_t)(end[1] - begin[1]) * sizeof *out);
    return (end[0] - begin[0]) * (end[1] - begin[1]);
}

/* Collective: the values of a record in chunks, whole rows or parts of one; keeps what `to` has of
 * them. */
static qd_status receive(const qd_handover *h, const record *r, int root, const qd_atom *to, float *out, int64_t *found)
{
    const int64_t row = r->box.length[1], all = r->box.length[0] * row;
    for (int64_t at = 0, count; at < all; at += count) {
        const int64_t column = at % row, rows = (all - at) / row < CHUNK / row ? (all - at) / row : CHUNK / row;
        const bool whole = column == 0 && rows > 0;
        qd_atom part = {.begin = {r->box.begin[0] + at / row, r->box.begin[1] + column}, .length = {1, row - column}};
        if (whole)
            part.length[0] = rows;
        else if (part.length[1] > CHUNK)
            part.length[1] = CHUNK;
        count = part.length[0] * part.length[1];
        if (root == qd_comm_rank(h->comm))
            memcpy(h->chunk, (const float *)(h->file + r->at) + at, (size_t)count * sizeof *h->chunk);
        QD_TRY(qd_comm_broadcast(h->comm, h->chunk, count, QD_F32, root, NULL));
        *found += copy_common(&part, h->chunk, to, out);
    }
    return QD_OK;
}

typedef struct reading {
    const qd_handover *handover;
    const qd_ledger *ledger; /* of the trainer that is filled */
} reading;

static qd_status read_box(void *context, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out)
{
    const qd_handover *h = ((const reading *)context)->handover;
    const qd_ledger *ledger = ((const reading *)context)->ledger;
    const int index = (int)(param - ledger->params);
    int64_t found = 0;
    for (int i = 0; i < h->count; i++) {
        const source *s = &h->sources[i];
        if (s->params != ledger->param_count)
            return QD_FAIL(QD_SYSTEM, "the state that was handed over is of another model");
        for (int64_t k = 0; k < s->count; k++) {
            const record *r = &s->records[k];
            if (r->param != index || r->kind != (int32_t)kind)
                continue;
            if (h->comm)
                QD_TRY(receive(h, r, h->ranks[i], box, out, &found));
            else
                found += copy_common(&r->box, (const float *)(h->file + r->at), box, out);
        }
    }
    if (found == box->length[0] * box->length[1])
        return QD_OK;
    return QD_FAIL(QD_SYSTEM, "%s was not handed over: %lld of %lld elements", param->name, (long long)found,
                   (long long)(box->length[0] * box->length[1]));
}

qd_status qd_handover_load(qd_handover *h, qd_trainer *t)
{
    reading context = {h, qd_trainer_program(t)->ledger};
    QD_TRY((h->comm ? qd_state_load_together : qd_state_load_from)(t, read_box, &context));
    qd_trainer_set_position(t, h->facts.position);
    return QD_OK;
}
