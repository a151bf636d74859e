/* Messages between pipeline ranks: activations to the next stage, their gradients to the previous
 * one, and the gradient of a tied parameter from the last stage to the first.
 *
 * Sends and receives run on the communication stream. A receive is posted one turn ahead of its
 * use, so that it overlaps with that turn. Messages between two ranks arrive in the order in which
 * they are sent, so receives are posted in that order too.
 *
 * There is no deadlock, even if a send blocks until it is received. Every rank replays the schedule
 * with the same unit times and places its waits by that clock: it waits for a message at the turn
 * that uses it, which starts no earlier than the sender's turn ends; and for the completion of a
 * send (to free its memory) at a turn that starts later than the receiver's turn that posts the
 * receive. So each wait is for something that happens at an earlier time on that clock, and there
 * is no cycle. */
#include "spec/layout/stages.h"
#include "spec/program/program_impl.h"

#include <string.h>

typedef enum message_kind { MESSAGE_PORT, MESSAGE_PORT_GRAD, MESSAGE_TIED } message_kind;

/* Turns are counted per rank. */
typedef struct message {
    uint8_t kind;
    int32_t from, to;   /* pipeline ranks */
    int32_t module;     /* PORT, PORT_GRAD: the last module before the boundary */
    int32_t microbatch;
    int32_t sent, used; /* the sender's turn that produces it, the receiver's that needs it */
    int32_t asked;      /* the receiver's turn before which it posts the receive */
    int32_t next;       /* next message that this rank sends (receives) at the same turn; -1: none */
} message;

typedef struct pending_send {
    int action, buffer;
    double over; /* completion time by the replay's clock */
} pending_send;

struct qd_transfers {
    message *messages;
    int count;
    int *sends, *asks;    /* per turn of this rank: its first message, -1: none */
    const double *start, *end; /* of all turns of all ranks */
    pending_send *pending;
    int pending_count;
    int *turn_of[3];      /* per (stage, micro-batch): the turn of F, of B or I, of B or W */
};

static size_t cell(const qd_schedule *s, int stage, int microbatch)
{
    return (size_t)stage * (size_t)s->micro_batches + (size_t)microbatch;
}

static void index_turns(const qd_schedule *s, int *const turn_of[3])
{
    for (int rank = 0; rank < s->ranks; rank++)
        for (int i = s->begin[rank]; i < s->begin[rank + 1]; i++) {
            const qd_turn *t = &s->turns[i];
            size_t at = cell(s, t->stage, t->microbatch);
            if (t->pass == QD_PASS_F)
                turn_of[0][at] = i - s->begin[rank];
            if (t->pass == QD_PASS_B || t->pass == QD_PASS_I)
                turn_of[1][at] = i - s->begin[rank];
            if (t->pass == QD_PASS_B || t->pass == QD_PASS_W)
                turn_of[2][at] = i - s->begin[rank];
        }
}

static int last_module_of(const qd_builder *b, int stage)
{
    int module = b->modules - 1;
    while (b->ledger->modules[module].stage != stage)
        module--;
    return module;
}

static void add_message(qd_builder *b, message m)
{
    qd_transfers *t = b->transfers;
    if (m.from == m.to || (m.from != b->order.stage_rank && m.to != b->order.stage_rank))
        return;
    if (t->messages)
        t->messages[t->count] = m;
    t->count++;
}

/* The messages that one turn of a rank produces, in the order in which they are sent. */
static void turn_messages(qd_builder *b, int rank, int index, const int *last_module)
{
    const qd_schedule *s = b->order.schedule;
    const qd_turn *turn = &s->turns[index];
    int stage = turn->stage, mb = turn->microbatch, sent = index - s->begin[rank];
    int *const *turn_of = b->transfers->turn_of;
    if (turn->pass == QD_PASS_F && stage < s->stages - 1)
        add_message(b, (message){.kind = MESSAGE_PORT, .from = rank, .to = s->rank_of[stage + 1], .module = last_module[stage],
                                 .microbatch = mb, .sent = sent, .used = turn_of[0][cell(s, stage + 1, mb)]});
    if (turn->pass != QD_PASS_B && turn->pass != QD_PASS_I)
        return;
    if (stage > 0)
        add_message(b, (message){.kind = MESSAGE_PORT_GRAD, .from = rank, .to = s->rank_of[stage - 1], .module = last_module[stage - 1],
                                 .microbatch = mb, .sent = sent, .used = turn_of[1][cell(s, stage - 1, mb)]});
    int param = qd_ledger_tied(b->ledger);
    bool tied = param >= 0 && !b->ledger->params[param].frozen && stage == s->stages - 1 &&
                (b->strategy->sync_each || mb == s->micro_batches - 1);
    if (tied)
        add_message(b, (message){.kind = MESSAGE_TIED, .from = rank, .to = s->rank_of[0], .microbatch = mb, .sent = sent,
                                 .used = turn_of[2][cell(s, 0, mb)]});
}

static void collect(qd_builder *b, const int *last_module)
{
    const qd_schedule *s = b->order.schedule;
    b->transfers->count = 0;
    for (int rank = 0; rank < s->ranks; rank++)
        for (int i = s->begin[rank]; i < s->begin[rank + 1]; i++)
            turn_messages(b, rank, i, last_module);
}

/* A receive is posted one turn before its use, and not after that of a message that is sent
 * later. */
static void choose_asking(qd_transfers *t, int self, int *least_in, int *least_out, int ranks)
{
    for (int r = 0; r < ranks; r++)
        least_in[r] = least_out[r] = INT32_MAX;
    for (int i = t->count - 1; i >= 0; i--) {
        message *m = &t->messages[i];
        int *least = m->from == self ? &least_out[m->to] : &least_in[m->from];
        int wanted = m->used > 0 ? m->used - 1 : 0;
        *least = wanted < *least ? wanted : *least;
        m->asked = *least;
    }
}

static void chain(qd_builder *b)
{
    qd_transfers *t = b->transfers;
    memset(t->sends, 0xff, (size_t)b->order.turn_count * sizeof *t->sends);
    memset(t->asks, 0xff, (size_t)b->order.turn_count * sizeof *t->asks);
    for (int i = t->count - 1; i >= 0; i--) {
        message *m = &t->messages[i];
        int *head = m->from == b->order.stage_rank ? &t->sends[m->sent] : &t->asks[m->asked];
        m->next = *head;
        *head = i;
    }
}

qd_status qd_transfers_create(qd_builder *b, qd_arena *arena)
{
    const qd_schedule *s = b->order.schedule;
    if (s->ranks == 1)
        return QD_OK;
    qd_transfers *t = b->transfers = QD_ARENA_NEW(arena, qd_transfers, 1);
    size_t cells = (size_t)s->stages * (size_t)s->micro_batches;
    int *tables = QD_ARENA_NEW(arena, int, 3 * cells), *last_module = QD_ARENA_NEW(arena, int, s->stages);
    int *least = QD_ARENA_NEW(arena, int, 2 * s->ranks);
    if (!t || !tables || !last_module || !least)
        return QD_NO_MEMORY;
    for (int i = 0; i < 3; i++)
        t->turn_of[i] = tables + (size_t)i * cells;
    index_turns(s, t->turn_of);
    for (int stage = 0; stage < s->stages; stage++)
        last_module[stage] = last_module_of(b, stage);
    qd_schedule_times times;
    QD_TRY(qd_schedule_replay(s, (const double[]){1.0, 2.0, 1.0, 1.0}, 0.0, arena, &times));
    t->start = times.start;
    t->end = times.end;
    collect(b, last_module);
    t->messages = QD_ARENA_NEW(arena, message, t->count + 1);
    t->pending = QD_ARENA_NEW(arena, pending_send, t->count + 1);
    t->sends = QD_ARENA_NEW(arena, int, b->order.turn_count + 1);
    t->asks = QD_ARENA_NEW(arena, int, b->order.turn_count + 1);
    if (!t->messages || !t->pending || !t->sends || !t->asks)
        return QD_NO_MEMORY;
    collect(b, last_module);
    choose_asking(t, b->order.stage_rank, least, least + s->ranks, s->ranks);
    chain(b);
    return QD_OK;
}

/* Actions in the program. */

qd_action *qd_transfers_action(qd_builder *b, qd_action_kind kind, int module, int microbatch, int peer, int buffer, int64_t first,
                               int64_t count, qd_dtype dtype)
{
    int ranks = b->order.schedule->ranks;
    qd_action *a = qd_build_action(b, kind, module, microbatch);
    a->stream = QD_STREAM_COMM;
    a->group = b->group.pipeline;
    a->peer = (peer - b->order.stage_rank + ranks) % ranks;
    a->buffer = buffer;
    a->first = first;
    a->count = count;
    a->dtype = dtype;
    a->bytes = kind == QD_ACTION_SEND ? count * (int64_t)qd_dtype_size(dtype) * b->ledger->mesh.world : 0;
    return a;
}

/* The last compute action may have freed the memory that is received into. */
static int receive(qd_builder *b, const message *m, int buffer, int64_t count, qd_dtype dtype)
{
    int after = qd_build_last_compute(b);
    qd_transfers_action(b, QD_ACTION_RECV, m->kind == MESSAGE_TIED ? 0 : m->module, m->microbatch, m->from, buffer, 0, count, dtype);
    qd_build_dep(b, after);
    return b->p->action_count - 1;
}

static void ask(qd_builder *b, const message *m)
{
    qd_flight *flight = qd_flight_of(b, m->module, m->microbatch);
    int64_t size = (int64_t)qd_dtype_size(b->strategy->activation);
    switch ((message_kind)m->kind) {
    case MESSAGE_PORT:
        flight->port = qd_build_alloc(b, QD_BUFFER_PORT, m->module, m->microbatch, qd_build_port_bytes(b));
        flight->arrives = receive(b, m, flight->port, qd_build_port_bytes(b) / size, b->strategy->activation);
        break;
    case MESSAGE_PORT_GRAD:
        flight->port_grad = qd_build_alloc(b, QD_BUFFER_PORT_GRAD, m->module, m->microbatch, qd_build_port_bytes(b));
        flight->grad_arrives = receive(b, m, flight->port_grad, qd_build_port_bytes(b) / size, b->strategy->activation);
        break;
    case MESSAGE_TIED: {
        int64_t count = b->p->storage.count[0];
        int *tied = &b->grad.tied[m->microbatch % b->grad.depth];
        *tied = qd_build_alloc(b, QD_BUFFER_TIED_GRAD, 0, m->microbatch, count * (int64_t)qd_dtype_size(b->strategy->grad));
        b->grad.tied_arrives[m->microbatch % b->grad.depth] = receive(b, m, *tied, count, b->strategy->grad);
        break;
    }
    }
}

/* Frees buffers whose send is complete, by the clock, before `time`. */
static void free_sent(qd_builder *b, double time)
{
    qd_transfers *t = b->transfers;
    int kept = 0;
    for (int i = 0; i < t->pending_count; i++) {
        pending_send *p = &t->pending[i];
        if (p->over >= time) {
            t->pending[kept++] = *p;
            continue;
        }
        qd_build_free(b, &p->buffer);
        qd_build_dep(b, p->action);
    }
    t->pending_count = kept;
}

void qd_transfers_before(qd_builder *b, int turn)
{
    qd_transfers *t = b->transfers;
    if (!t || b->no_memory)
        return;
    free_sent(b, t->start[b->order.schedule->begin[b->order.stage_rank] + turn]);
    for (int i = t->asks[turn]; i >= 0; i = t->messages[i].next)
        ask(b, &t->messages[i]);
}

/* Takes the buffer from its module; it is freed once it has been sent. */
static void send(qd_builder *b, const message *m, int *buffer, int64_t first, int64_t count, qd_dtype dtype)
{
    qd_transfers *t = b->transfers;
    const int *begin = b->order.schedule->begin;
    int after = qd_build_last_compute(b);
    qd_transfers_action(b, QD_ACTION_SEND, m->kind == MESSAGE_TIED ? b->modules - 1 : m->module, m->microbatch, m->to, *buffer, first,
                        count, dtype);
    qd_build_dep(b, after);
    if (b->no_memory || b->p->buffers[*buffer].persistent)
        return; /* nothing writes to it before the end of the step */
    double made = t->end[begin[m->from] + m->sent], asked = t->start[begin[m->to] + m->asked];
    t->pending[t->pending_count++] = (pending_send){b->p->action_count - 1, *buffer, made > asked ? made : asked};
    *buffer = -1;
}

void qd_transfers_after(qd_builder *b, int turn)
{
    qd_transfers *t = b->transfers;
    int64_t count = qd_build_port_bytes(b) / (int64_t)qd_dtype_size(b->strategy->activation);
    for (int i = t && !b->no_memory ? t->sends[turn] : -1; i >= 0; i = t->messages[i].next) {
        const message *m = &t->messages[i];
        qd_flight *flight = qd_flight_of(b, m->module, m->microbatch);
        int tied = m->kind == MESSAGE_TIED ? qd_ledger_tied(b->ledger) : -1;
        if (tied >= 0)
            send(b, m, b->grad.in_blocks ? &b->grad.tied[m->microbatch % b->grad.depth] : &b->p->persistent[QD_BUFFER_TIED_GRAD],
                 b->p->storage.offset[tied], b->p->storage.count[tied], b->strategy->grad);
        else
            send(b, m, m->kind == MESSAGE_PORT ? &flight->port : &flight->port_grad, 0, count, b->strategy->activation);
    }
}

void qd_transfers_finish(qd_builder *b)
{
    if (b->transfers)
        free_sent(b, 1e300);
}

/* After the update, sends the values that the last stage has a copy of, each rank its part. */
void qd_transfers_values(qd_builder *b)
{
    int tied = qd_ledger_tied(b->ledger), owner = tied < 0 ? -1 : b->ledger->params[tied].tied_to;
    if (owner < 0 || b->ledger->params[tied].frozen || b->order.schedule->ranks == 1 || !qd_ledger_tied_apart(b->ledger, tied))
        return;
    const qd_module *first = &b->ledger->modules[0], *last = &b->ledger->modules[b->modules - 1];
    bool sends = first->stage_rank == b->order.stage_rank, receives = last->stage_rank == b->order.stage_rank;
    qd_holding own = qd_program_holding(b->p, QD_BUFFER_PARAM, sends ? owner : tied);
    if ((!sends && !receives) || own.count == 0)
        return;
    qd_transfers_action(b, sends ? QD_ACTION_SEND : QD_ACTION_RECV, sends ? 0 : b->modules - 1, -1,
                        sends ? last->stage_rank : first->stage_rank, b->p->persistent[QD_BUFFER_PARAM], own.offset, own.count,
                        b->strategy->param)
        ->stream = QD_STREAM_COMPUTE;
}
