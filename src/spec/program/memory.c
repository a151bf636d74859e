/* The memory plan: the offset of each dynamic buffer, and what is live at the peak. Both follow
 * from the program's ALLOC and FREE actions alone. */
#include "spec/program/program.h"

#include <stdlib.h>
#include <string.h>

#define ALIGN 256

static int64_t aligned(int64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* Free ranges of the dynamic area, by offset, never adjacent to each other. The area ends at
 * `end`. */
typedef struct hole {
    int64_t offset, bytes;
} hole;
typedef struct area {
    hole *holes;
    int count, capacity;
    int64_t end;
} area;

/* Best fit; if nothing fits, at the end of the area (using the last hole first if it touches the
 * end). */
static int64_t take(area *a, int64_t bytes)
{
    int best = -1;
    for (int i = 0; i < a->count; i++)
        if (a->holes[i].bytes >= bytes && (best < 0 || a->holes[i].bytes < a->holes[best].bytes))
            best = i;
    if (best < 0) {
        int64_t offset = a->end;
        if (a->count > 0 && a->holes[a->count - 1].offset + a->holes[a->count - 1].bytes == a->end)
            offset = a->holes[--a->count].offset;
        a->end = offset + bytes;
        return offset;
    }
    hole *h = &a->holes[best];
    int64_t offset = h->offset;
    h->offset += bytes;
    h->bytes -= bytes;
    if (h->bytes == 0)
        memmove(h, h + 1, (size_t)(--a->count - best) * sizeof *h);
    return offset;
}

static qd_status give(area *a, int64_t offset, int64_t bytes)
{
    if (a->count == a->capacity) {
        int capacity = a->capacity ? 2 * a->capacity : 64;
        hole *larger = realloc(a->holes, (size_t)capacity * sizeof *larger);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the memory plan");
        a->holes = larger;
        a->capacity = capacity;
    }
    int at = 0;
    while (at < a->count && a->holes[at].offset < offset)
        at++;
    bool left = at > 0 && a->holes[at - 1].offset + a->holes[at - 1].bytes == offset;
    bool right = at < a->count && offset + bytes == a->holes[at].offset;
    if (left && right) {
        a->holes[at - 1].bytes += bytes + a->holes[at].bytes;
        memmove(&a->holes[at], &a->holes[at + 1], (size_t)(--a->count - at) * sizeof *a->holes);
    } else if (left) {
        a->holes[at - 1].bytes += bytes;
    } else if (right) {
        a->holes[at].offset = offset;
        a->holes[at].bytes += bytes;
    } else {
        memmove(&a->holes[at + 1], &a->holes[at], (size_t)(a->count++ - at) * sizeof *a->holes);
        a->holes[at] = (hole){offset, bytes};
    }
    return QD_OK;
}

/* Calls `change` (may be NULL) at each ALLOC (+1) and FREE (-1), and rejects programs with invalid
 * buffer lifetimes. */
typedef qd_status (*change_fn)(void *context, int action, int buffer, int sign);

static qd_status bad(const qd_program *p, int action, int buffer, const char *what)
{
    char text[160];
    qd_action_describe(p, action, text, sizeof text);
    return QD_FAIL(QD_USAGE, "step program, action %d (%s): buffer %d (%s) %s", action, text, buffer,
                   qd_buffer_kind_name(p->buffers[buffer].kind), what);
}

/* An operation on the communication stream is complete for an action that waits for it, or for a
 * later one of its group. `busy`: the last such action on each buffer. */
static void note_communication(const qd_program *p, int index, int *busy, int *ended)
{
    const qd_action *a = &p->actions[index];
    for (int d = 0; d < a->dep_count; d++) {
        const qd_action *on = &p->actions[p->deps[a->dep_first + d]];
        if (qd_action_transfers(on) && busy[on->buffer] == p->deps[a->dep_first + d]) /* completes no other messages */
            busy[on->buffer] = 0;
        else if (qd_action_copies(on) && busy[on->chunk] == p->deps[a->dep_first + d])
            busy[on->chunk] = 0;
        else if (!qd_action_transfers(on) && qd_action_communicates(on) && p->deps[a->dep_first + d] > ended[on->group])
            ended[on->group] = p->deps[a->dep_first + d];
    }
    if (qd_action_copies(a) && a->stream != QD_STREAM_COMPUTE)
        busy[a->chunk] = index;
    if (!qd_action_communicates(a) || a->stream != QD_STREAM_COMM)
        return;
    if (a->buffer >= 0)
        busy[a->buffer] = index;
    if (a->part >= 0)
        busy[a->part] = index;
}

static qd_status walk(const qd_program *p, change_fn change, void *context)
{
    qd_status status = QD_OK;
    bool *alive = calloc((size_t)p->buffer_count + 1, sizeof *alive);
    int *busy = calloc((size_t)p->buffer_count + 1, sizeof *busy), ended[QD_GROUP_LIMIT] = {0};
    if (!alive || !busy) {
        free(alive);
        free(busy);
        return QD_FAIL(QD_NO_MEMORY, "no memory for the memory plan");
    }
    for (int i = 0; i < p->action_count && status == QD_OK; i++) {
        const qd_action *a = &p->actions[i];
        bool allocates = a->kind == QD_ACTION_ALLOC, frees = a->kind == QD_ACTION_FREE;
        if (a->buffer >= p->buffer_count || (a->buffer < 0 && (allocates || frees)))
            status = bad(p, i, a->buffer, "does not exist");
        else if (allocates && (alive[a->buffer] || p->buffers[a->buffer].persistent))
            status = bad(p, i, a->buffer, "is allocated already");
        else if (a->buffer >= 0 && !allocates && !alive[a->buffer] && !p->buffers[a->buffer].persistent)
            status = bad(p, i, a->buffer, "is not allocated here");
        else if (a->part >= p->buffer_count)
            status = bad(p, i, a->part, "does not exist");
        else if (a->part >= 0 && !alive[a->part] && !p->buffers[a->part].persistent)
            status = bad(p, i, a->part, "is not allocated here");
        else if (a->chunk >= p->buffer_count || (a->chunk < 0 && qd_action_copies(a)))
            status = bad(p, i, a->chunk, "does not exist");
        else if (a->chunk >= 0 && !alive[a->chunk])
            status = bad(p, i, a->chunk, "is not allocated here");
        for (int u = 0; u < QD_USE_COUNT && status == QD_OK; u++) {
            if (a->use[u] >= p->buffer_count)
                status = bad(p, i, a->use[u], "does not exist");
            else if (a->use[u] >= 0 && !alive[a->use[u]] && !p->buffers[a->use[u]].persistent)
                status = bad(p, i, a->use[u], "is used but not allocated here");
        }
        if (status != QD_OK)
            continue;
        note_communication(p, i, busy, ended);
        if (!(allocates || frees))
            continue;
        const qd_action *last = &p->actions[busy[a->buffer]];
        bool waits = busy[a->buffer] > 0 && (qd_action_transfers(last) || qd_action_copies(last) || busy[a->buffer] > ended[last->group]);
        if (frees && waits)
            status = bad(p, i, a->buffer, "is freed while a transfer on it is in flight");
        busy[a->buffer] = 0;
        if (status != QD_OK)
            continue;
        alive[a->buffer] = allocates;
        status = change(context, i, a->buffer, allocates ? 1 : -1);
    }
    for (int b = 0; b < p->buffer_count && status == QD_OK; b++)
        if (alive[b])
            status = bad(p, p->action_count - 1, b, "is never freed");
    free(alive);
    free(busy);
    return status;
}

typedef struct plan_context {
    qd_program *program;
    area area;
    int64_t most;
} plan_context;

static qd_status place(void *context, int action, int buffer, int sign)
{
    (void)action;
    plan_context *c = context;
    qd_buffer *b = &c->program->buffers[buffer];
    if (sign < 0)
        return give(&c->area, b->offset, aligned(b->bytes));
    b->offset = take(&c->area, aligned(b->bytes));
    if (c->area.end > c->most)
        c->most = c->area.end;
    return QD_OK;
}

qd_status qd_memory_plan(qd_program *program)
{
    plan_context c = {.program = program};
    qd_status status = walk(program, place, &c);
    free(c.area.holes);
    if (status != QD_OK)
        return status;
    program->dynamic_bytes = c.most;
    program->persistent_bytes = program->host_bytes = 0;
    for (int i = 0; i < program->buffer_count; i++)
        if (program->buffers[i].persistent)
            *(program->buffers[i].host ? &program->host_bytes : &program->persistent_bytes) += program->buffers[i].bytes;
    return QD_OK;
}

typedef struct account_context {
    const qd_program *program;
    qd_memory_report *report;
    int64_t live[QD_BUFFER_KIND_COUNT], live_total;
} account_context;

static qd_status account(void *context, int action, int buffer, int sign)
{
    account_context *c = context;
    const qd_buffer *b = &c->program->buffers[buffer];
    if (b->kind == QD_BUFFER_CHUNK && sign > 0)
        c->report->chunks += b->bytes;
    c->live[b->kind] += sign * aligned(b->bytes);
    c->live_total += sign * aligned(b->bytes);
    if (c->live_total > c->report->live_peak) {
        c->report->live_peak = c->live_total;
        c->report->peak_action = action;
        memcpy(c->report->at_peak, c->live, sizeof c->live);
    }
    return QD_OK;
}

qd_status qd_memory_account(const qd_program *program, qd_memory_report *report)
{
    memset(report, 0, sizeof *report);
    account_context c = {.program = program, .report = report};
    for (int i = 0; i < program->buffer_count; i++) {
        const qd_buffer *b = &program->buffers[i];
        if (b->host) {
            report->host[b->kind] += b->bytes;
            report->host_total += b->bytes;
        }
        if (!b->persistent || b->host)
            continue;
        c.live[b->kind] += b->bytes;
        c.live_total += b->bytes;
    }
    /* not at the time of the peak, but allocated for the whole run */
    c.live[QD_BUFFER_SCRATCH] -= program->evaluation_scratch;
    c.live[QD_BUFFER_EVALUATION] = program->evaluation_scratch + program->evaluation_dynamic;
    c.live_total += program->evaluation_dynamic;
    c.live[QD_BUFFER_SAMPLES] = program->sample_bytes;
    c.live_total += program->sample_bytes;
    memcpy(report->at_peak, c.live, sizeof c.live);
    report->live_peak = c.live_total;
    QD_TRY(walk(program, account, &c));
    report->total = program->persistent_bytes + program->dynamic_bytes + program->sample_bytes;
    return QD_OK;
}

/* Both programs store parameters in the same buffer. */
static bool same_parameters(const qd_program *a, const qd_program *b)
{
    static const qd_buffer_kind kinds[] = {QD_BUFFER_PARAM, QD_BUFFER_TABLE, QD_BUFFER_LOSS, QD_BUFFER_SCORES};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        int x = a->persistent[kinds[i]], y = b->persistent[kinds[i]];
        if ((x < 0) != (y < 0) || (x >= 0 && a->buffers[x].bytes != b->buffers[y].bytes))
            return false;
    }
    return true;
}

qd_status qd_memory_attach(qd_program *program, const qd_program *evaluation)
{
    qd_buffer *scratch = &program->buffers[program->persistent[QD_BUFFER_SCRATCH]];
    const qd_buffer *wanted = &evaluation->buffers[evaluation->persistent[QD_BUFFER_SCRATCH]];
    if (!same_parameters(program, evaluation))
        return QD_FAIL(QD_SYSTEM, "the program of evaluations stores parameters differently from the step program");
    program->evaluation = evaluation;
    program->evaluation_scratch = wanted->bytes > scratch->bytes ? wanted->bytes - scratch->bytes : 0;
    scratch->bytes += program->evaluation_scratch;
    program->persistent_bytes += program->evaluation_scratch;
    if (evaluation->dynamic_bytes > program->dynamic_bytes)
        program->evaluation_dynamic = evaluation->dynamic_bytes - program->dynamic_bytes;
    program->dynamic_bytes += program->evaluation_dynamic;
    return QD_OK;
}

/* With longrope, generation changes its rotary table with the length of the text. */
static bool keeps_table(const qd_program *p)
{
    return p->strategy.context > 0 && p->ledger->model.rope.scaling == QD_ROPE_LONG;
}

int qd_memory_shared(const qd_program *share, const qd_program *program, const qd_buffer *buffer)
{
    int other = share->persistent[buffer->kind];
    if (other < 0 || (buffer->kind == QD_BUFFER_TABLE && keeps_table(program) != keeps_table(share)))
        return -1;
    int64_t there = share->buffers[other].bytes;
    return there == buffer->bytes || (buffer->kind == QD_BUFFER_SCRATCH && there > buffer->bytes) ? other : -1;
}

int64_t qd_memory_beside(const qd_program *program, const qd_program *share)
{
    int64_t bytes = share->dynamic_bytes >= program->dynamic_bytes ? 0 : program->dynamic_bytes;
    for (int i = 0; i < program->buffer_count; i++)
        if (program->buffers[i].persistent && !program->buffers[i].host && qd_memory_shared(share, program, &program->buffers[i]) < 0)
            bytes += program->buffers[i].bytes;
    return bytes;
}
