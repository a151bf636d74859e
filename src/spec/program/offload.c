/* Builds the actions of offloaded optimizer state: cuts it into chunks, and orders copies and
 * updates so that they overlap. */
#include "spec/program/offload.h"

#include "spec/program/muon.h"
#include "spec/program/program_impl.h"

#include <stdlib.h>

/* One buffer is filled, one updated, one emptied. */
enum { SLOTS = 3 };
/* Sections keep their alignment modulo this from host memory, so that vector loads stay aligned. */
enum { ALIGN = 64 };

/* A range of the state that is on the device at once. */
typedef struct chunk {
    int module, param;
    unsigned states;
    int64_t first, count;
} chunk;

struct qd_offload {
    chunk *chunks; /* of UPDATE */
    int count, fetched, capacity;
    int slots[SLOTS];   /* rotating buffers */
    int stored[SLOTS];  /* the STORE that empties it, -1: none yet */
    int filled[SLOTS];  /* the FETCH that fills it */
    int next, oldest;   /* slot to fill next; slot to use next */
    int before;         /* the last compute action before the slots were allocated, which may still use their memory */
    int64_t bytes;      /* size of a slot */
};

static int64_t padded(int64_t elements)
{
    return (elements + ALIGN - 1) / ALIGN * ALIGN;
}

int qd_offload_sections(const qd_program *p, const qd_action *a, qd_section sections[QD_STATE_KINDS])
{
    int count = 0;
    int64_t at = 0;
    for (int i = 0; i < QD_STATE_KINDS; i++) {
        qd_buffer_kind kind = (qd_buffer_kind)(QD_BUFFER_MASTER + i);
        if (!(a->states & QD_STATE_BIT(kind)))
            continue;
        int64_t host = a->first;
        if (kind == QD_BUFFER_MOMENT2 && p->moment2)
            host += p->moment2[a->param] - qd_program_holding(p, QD_BUFFER_MOMENT1, a->param).offset;
        sections[count++] = (qd_section){kind, host, at + host % ALIGN, a->count};
        at += padded(host % ALIGN + a->count);
    }
    return count;
}

static int64_t chunk_bytes(const chunk *c)
{
    int sections = __builtin_popcount(c->states);
    return sections * (padded(c->count) + ALIGN) * 4;
}

static unsigned kept(const qd_program *p)
{
    unsigned states = 0;
    for (int i = 0; i < QD_STATE_KINDS; i++)
        if (p->persistent[QD_BUFFER_MASTER + i] >= 0)
            states |= 1u << i;
    return states;
}

static qd_holding held(const qd_program *p, int param)
{
    return qd_program_holding(p, p->persistent[QD_BUFFER_MOMENT1] >= 0 ? QD_BUFFER_MOMENT1 : QD_BUFFER_MASTER, param);
}

static void note_size(struct qd_offload *o, const chunk *c)
{
    int64_t bytes = chunk_bytes(c);
    o->bytes = bytes > o->bytes ? bytes : o->bytes;
}

/* Cuts a range of state at multiples of ALIGN into chunks of about the requested size. */
static void add_stretch(qd_builder *b, int module, int param, int64_t first, int64_t end)
{
    struct qd_offload *o = b->offload;
    unsigned states = kept(b->p);
    int64_t most = b->strategy->chunk_bytes / (4 * __builtin_popcount(states)) / ALIGN * ALIGN;
    most = most > ALIGN ? most : ALIGN;
    while (first < end) {
        int64_t until = first / ALIGN * ALIGN + most;
        o->chunks = qd_build_grow(b, o->chunks, o->count, &o->capacity, sizeof *o->chunks);
        if (b->no_memory)
            return;
        chunk *c = &o->chunks[o->count++];
        *c = (chunk){module, param, states, first, (until < end ? until : end) - first};
        note_size(o, c);
        first = until;
    }
}

/* The state of a module is one range, but several with Muon: its matrices are left out, because
 * other actions fetch them, and second moments are packed more densely than the rest. */
static void add_module(qd_builder *b, const qd_module *module, int index)
{
    const qd_program *p = b->p;
    int from = -1; /* first parameter of the range */
    int64_t first = 0, end = 0;
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
        qd_holding h = held(p, i);
        bool matrix = p->matrices && qd_muon_takes(b->ledger, i);
        if (b->ledger->params[i].tied_to >= 0 || h.count == 0)
            continue;
        bool apart = from >= 0 && p->moment2 && !matrix && p->moment2[i] - h.offset != p->moment2[from] - first;
        if (from >= 0 && (matrix || apart)) {
            add_stretch(b, index, from, first, end);
            from = -1;
        }
        if (matrix)
            continue;
        if (from < 0) {
            from = i;
            first = h.offset;
        }
        end = h.offset + h.count;
    }
    if (from >= 0)
        add_stretch(b, index, from, first, end);
}

static chunk matrix_chunk(const qd_program *p, int matrix, qd_buffer_kind kind)
{
    int param = p->matrices[matrix].param;
    qd_holding h = held(p, param);
    return (chunk){-1, param, QD_STATE_BIT(kind), h.offset, h.count};
}

qd_status qd_offload_check(const qd_strategy *s)
{
    if (s->offload && s->training && s->optimizer == QD_OPTIM_SGD && !s->momentum && s->param == QD_F32)
        return QD_FAIL(QD_USAGE,
                       "train.offload=optimizer: train.optimizer=sgd without train.momentum keeps no state to offload: remove "
                       "train.offload, or set train.precision=bf16, which adds master weights");
    return QD_OK;
}

void qd_offload_create(qd_builder *b, qd_arena *arena)
{
    if (!b->strategy->offload || !b->strategy->training || b->no_memory)
        return;
    struct qd_offload *o = b->offload = QD_ARENA_NEW(arena, struct qd_offload, 1);
    b->no_memory = !o;
    if (!o)
        return;
    for (int i = 0; i < QD_STATE_KINDS; i++)
        if (b->p->persistent[QD_BUFFER_MASTER + i] >= 0)
            b->p->buffers[b->p->persistent[QD_BUFFER_MASTER + i]].host = true;
    for (int module = 0; module < b->modules; module++)
        if (qd_build_holds(b, module))
            add_module(b, &b->ledger->modules[module], module);
    for (int i = 0; i < b->p->matrix_count; i++) {
        chunk c = matrix_chunk(b->p, i, QD_BUFFER_MOMENT1);
        note_size(o, &c);
    }
}

static qd_action *chunk_action(qd_builder *b, qd_action_kind kind, const chunk *c, int buffer)
{
    qd_action *a = qd_build_action(b, kind, c->module, -1);
    a->chunk = buffer;
    a->states = (uint8_t)c->states;
    a->param = c->param;
    a->first = c->first;
    a->count = c->count;
    a->dtype = QD_F32;
    return a;
}

static void fetch(qd_builder *b, const chunk *c)
{
    struct qd_offload *o = b->offload;
    int slot = o->next;
    qd_action *a = chunk_action(b, QD_ACTION_FETCH, c, o->slots[slot]);
    a->stream = b->strategy->overlap ? QD_STREAM_IN : QD_STREAM_COMPUTE;
    if (b->strategy->overlap)
        qd_build_dep(b, o->stored[slot] >= 0 ? o->stored[slot] : o->before);
    o->filled[slot] = b->p->action_count - 1;
    o->next = (slot + 1) % SLOTS;
}

static void store(qd_builder *b, const chunk *c)
{
    struct qd_offload *o = b->offload;
    int slot = o->oldest, used = b->p->action_count - 1;
    qd_action *a = chunk_action(b, QD_ACTION_STORE, c, o->slots[slot]);
    a->stream = b->strategy->overlap ? QD_STREAM_OUT : QD_STREAM_COMPUTE;
    if (b->strategy->overlap)
        qd_build_dep(b, used);
    o->stored[slot] = b->p->action_count - 1;
    o->oldest = (slot + 1) % SLOTS;
}

/* Lets the newest action wait for the chunk that was fetched first. */
static void use(qd_builder *b)
{
    if (b->strategy->overlap)
        qd_build_dep(b, b->offload->filled[b->offload->oldest]);
}

void qd_offload_begin(qd_builder *b)
{
    struct qd_offload *o = b->offload;
    if (!o)
        return;
    o->before = qd_build_last_compute(b);
    for (int i = 0; i < SLOTS; i++) {
        o->slots[i] = qd_build_alloc(b, QD_BUFFER_CHUNK, -1, -1, o->bytes);
        o->stored[i] = -1;
    }
    for (; o->fetched < o->count && o->fetched < SLOTS && !b->p->matrices; o->fetched++)
        fetch(b, &o->chunks[o->fetched]);
}

bool qd_offload_updates(qd_builder *b)
{
    struct qd_offload *o = b->offload;
    if (!o)
        return false;
    for (int i = 0; i < o->count && !b->no_memory; i++) {
        const chunk *c = &o->chunks[i];
        if (o->fetched == i)
            fetch(b, &o->chunks[o->fetched++]);
        chunk_action(b, QD_ACTION_UPDATE, c, o->slots[o->oldest]);
        use(b);
        qd_clip_chunk(b, o->slots[o->oldest], c->states, c->first, c->count, c->module);
        store(b, c);
        if (o->fetched < o->count && !b->p->matrices)
            fetch(b, &o->chunks[o->fetched++]);
    }
    return true;
}

int qd_offload_matrix_begin(qd_builder *b, int matrix, qd_buffer_kind kind)
{
    if (!b->offload || b->p->persistent[kind] < 0)
        return -1;
    chunk c = matrix_chunk(b->p, matrix, kind);
    if (c.count == 0)
        return -1;
    fetch(b, &c);
    return b->offload->slots[b->offload->oldest];
}

void qd_offload_matrix_end(qd_builder *b, int matrix, qd_buffer_kind kind, qd_action *a, int buffer)
{
    if (buffer < 0)
        return;
    chunk c = matrix_chunk(b->p, matrix, kind);
    a->chunk = buffer;
    a->states = (uint8_t)c.states;
    a->first = c.first;
    a->count = c.count;
    use(b);
    qd_clip_chunk(b, buffer, c.states, c.first, c.count, b->ledger->params[c.param].module);
    store(b, &c);
}

void qd_offload_finish(qd_builder *b)
{
    struct qd_offload *o = b->offload;
    for (int i = 0; i < SLOTS && o; i++) {
        bool there = o->slots[i] >= 0;
        qd_build_free(b, &o->slots[i]);
        if (there && b->strategy->overlap)
            qd_build_dep(b, o->stored[i]);
    }
    if (o)
        free(o->chunks);
}
