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

enum { MOST_SECTIONS = 64, HEAD_BYTES = 4096 };

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

struct qd_handover {
    const char *file;
    size_t bytes;
    qd_handover_facts facts;
    bool differs;
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

qd_status qd_handover_write(int fd, qd_trainer *t, uint64_t left, const qd_handover_facts *facts, bool *complete)
{
    const qd_program *p = qd_trainer_program(t);
    qd_arena *arena = NULL;
    qd_state_pieces pieces;
    *complete = false;
    if (!may_write())
        return QD_OK;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_pieces_left(p, qd_pieces_kinds(p) | QD_PIECES_OMITTED, left, arena, &pieces, complete);
    if (status == QD_OK && *complete)
        status = put_section(fd, t, &pieces, facts);
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_handover_open(int fd, qd_handover **handover)
{
    struct stat info;
    qd_handover *h = calloc(1, sizeof *h);
    if (!h)
        return QD_FAIL(QD_NO_MEMORY, "no memory to take over the state");
    if (fstat(fd, &info) != 0 || info.st_size < HEAD_BYTES) {
        free(h);
        return fail("it is not the file of a launcher");
    }
    h->bytes = (size_t)info.st_size;
    h->file = mmap(NULL, h->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (h->file == MAP_FAILED) {
        free(h);
        return fail("mmap");
    }
    const head *shared = (const head *)h->file;
    for (int i = 0; i < shared->sections; i++) {
        const qd_handover_facts *facts = &((const section *)(h->file + shared->at[i]))->facts;
        const int32_t followed = h->facts.followed;
        for (int k = 0; k < i; k++)
            h->differs = h->differs ||
                         qd_replica_marks_differ(facts->marks, ((const section *)(h->file + shared->at[k]))->facts.marks);
        h->facts = *facts;
        h->facts.followed = followed || facts->followed;
    }
    *handover = h;
    return QD_OK;
}

void qd_handover_close(qd_handover *h)
{
    if (!h)
        return;
    munmap((void *)(uintptr_t)h->file, h->bytes);
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

typedef struct reading {
    const qd_handover *handover;
    const qd_ledger *ledger; /* of the trainer that is filled */
} reading;

static qd_status read_box(void *context, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out)
{
    const qd_handover *h = ((const reading *)context)->handover;
    const qd_ledger *ledger = ((const reading *)context)->ledger;
    const head *shared = (const head *)h->file;
    const int index = (int)(param - ledger->params);
    int64_t found = 0;
    for (int i = 0; i < shared->sections; i++) {
        const section *s = (const section *)(h->file + shared->at[i]);
        const record *records = (const record *)(s + 1);
        if (s->params != ledger->param_count)
            return QD_FAIL(QD_SYSTEM, "the state that was handed over is of another model");
        for (int64_t k = 0; k < s->records; k++)
            if (records[k].param == index && records[k].kind == (int32_t)kind)
                found += copy_common(&records[k].box, (const float *)(h->file + records[k].at), box, out);
    }
    if (found == box->length[0] * box->length[1])
        return QD_OK;
    return QD_FAIL(QD_SYSTEM, "%s was not handed over: %lld of %lld elements", param->name, (long long)found,
                   (long long)(box->length[0] * box->length[1]));
}

qd_status qd_handover_load(qd_handover *h, qd_trainer *t)
{
    reading context = {h, qd_trainer_program(t)->ledger};
    QD_TRY(qd_state_load_from(t, read_box, &context));
    qd_trainer_set_position(t, h->facts.position);
    return QD_OK;
}
