/* Finds the late rank: notes of waiting operations, and the verdict after a deadline. */
#include "comm/work.h"

#include "base/clock.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(qd_wait_note) % 8 == 0, "notes travel as words");

void qd_wait_note_set(qd_wait_board *board, int index, const qd_wait_note *note)
{
    uint64_t words[sizeof *note / 8];
    memcpy(words, note, sizeof *note);
    for (size_t i = 0; i < sizeof *note / 8; i++)
        atomic_store_explicit(&board->notes[index].words[i], words[i], memory_order_relaxed);
}

void qd_wait_note_get(const qd_wait_board *board, int index, qd_wait_note *note)
{
    uint64_t words[sizeof *note / 8];
    for (size_t i = 0; i < sizeof *note / 8; i++)
        words[i] = atomic_load_explicit(&board->notes[index].words[i], memory_order_relaxed);
    memcpy(note, words, sizeof *note);
    note->name[sizeof note->name - 1] = '\0';
}

_Static_assert(sizeof(qd_last_call) % 8 == 0, "calls are stored as words");

/* The boards on which this rank's last call is read. */
static int own_boards(qd_world *world, qd_wait_board *boards[2])
{
    boards[0] = world->backend->board(world, world->rank);
    if (world->guard) boards[1] = qd_guard_board(world->guard);
    return world->guard ? 2 : 1;
}

void qd_last_call_set(qd_transfer *op)
{
    uint64_t words[sizeof(qd_last_call) / 8];
    qd_last_call call = {.fingerprint = op->fingerprint, .inside = 1};
    memcpy(call.name, op->comm->name, sizeof call.name);
    memcpy(words, &call, sizeof call);
    qd_wait_board *boards[2];
    for (int b = 0, count = own_boards(op->comm->world, boards); b < count; b++)
        for (size_t i = 0; i < sizeof call / 8; i++)
            atomic_store_explicit(&boards[b]->last[i], words[i], memory_order_relaxed);
}

void qd_last_call_end(qd_transfer *op)
{
    const size_t at = offsetof(qd_last_call, inside) / 8;
    qd_wait_board *boards[2];
    for (int b = 0, count = own_boards(op->comm->world, boards); b < count; b++) /* another queue may have started an operation since */
        if (atomic_load_explicit(&boards[b]->last[0], memory_order_relaxed) == op->fingerprint.sequence)
            atomic_store_explicit(&boards[b]->last[at], 0, memory_order_relaxed);
}

static bool is_message(const qd_fingerprint *fingerprint)
{
    return fingerprint->kind == QD_COLL_SEND || fingerprint->kind == QD_COLL_RECV;
}

void qd_wait_write(qd_transfer *op, double now, bool holds)
{
    const qd_comm *comm = op->comm;
    qd_world *world = comm->world;
    if (op->note < 0) {
        for (int i = 0; i < QD_WAIT_NOTES && op->note < 0; i++)
            if (!(atomic_fetch_or(&world->notes, 1u << i) >> i & 1)) op->note = i;
        if (op->note < 0) return;
    }
    qd_wait_note note = {.renewed = now, .group = comm->id, .fingerprint = op->fingerprint, .holds = holds};
    memcpy(note.name, comm->name, sizeof note.name);
    int count = 0;
    qd_world_lock(world);
    for (int peer = 0; peer < comm->size && count < QD_WAIT_PEERS; peer++) {
        qd_peer_report report = {0};
        if (peer == comm->rank || !qd_op_late(op, peer, &report)) continue;
        note.entered[count] = report.sequence;
        note.peers[count++] = comm->world_ranks[peer];
    }
    while (count < QD_WAIT_PEERS) note.peers[count++] = -1;
    qd_wait_note_set(world->backend->board(world, world->rank), op->note, &note);
    qd_world_unlock(world);
    op->noted_at = now;
}

void qd_wait_clear(qd_transfer *op)
{
    qd_world *world = op->comm->world;
    qd_world_lock(world);
    qd_wait_note_set(world->backend->board(world, world->rank), op->note, &(qd_wait_note){0});
    qd_world_unlock(world);
    atomic_fetch_and(&world->notes, ~(1u << op->note));
    op->note = -1;
}

/* A rank that another rank waits for. */
typedef struct suspect {
    int rank;   /* of the world */
    int waiter; /* index of the suspect that waits for it; -1: this rank waits for it */
    int first;  /* index of the first suspect of the chain, for which this rank waits */
    uint64_t entered;
    char place[QD_COMM_PLACE_BYTES];
    qd_wait_note note; /* the waiter's */
    bool waits;        /* it waits for other ranks itself, so it is not the culprit */
} suspect;

typedef struct hunt {
    const qd_transfer *op;
    double now;
    suspect *suspects; /* (world size) */
    int count;
} hunt;

static void add(hunt *h, int rank, int waiter, uint64_t entered, const char *place, const qd_wait_note *note)
{
    const qd_world *world = h->op->comm->world;
    if (rank < 0 || rank >= world->size || rank == world->rank) return;
    for (int i = 0; i < h->count; i++)
        if (h->suspects[i].rank == rank) return;
    suspect *s = &h->suspects[h->count];
    *s = (suspect){.rank = rank, .waiter = waiter, .entered = entered, .note = *note};
    s->first = waiter < 0 ? h->count : h->suspects[waiter].first;
    memcpy(s->place, place, sizeof s->place);
    h->count++;
}

/* Adds the ranks that suspect i waits for: in the operation that its waiter is in, if suspect i has
 * entered it, else in any operation that blocks suspect i. */
static void follow(hunt *h, int i)
{
    qd_world *world = h->op->comm->world;
    suspect *s = &h->suspects[i];
    qd_wait_board *board = world->backend->board(world, s->rank);
    qd_wait_note notes[QD_WAIT_NOTES];
    bool inside = false;
    for (int k = 0; k < QD_WAIT_NOTES; k++) {
        qd_wait_note *note = &notes[k];
        qd_wait_note_get(board, k, note);
        /* A waiting rank renews its note many times in this interval. */
        if (note->renewed <= 0 || h->now - note->renewed > world->config.deadline_seconds / 2) {
            note->renewed = 0;
            continue;
        }
        inside = inside || (note->group == s->note.group && !is_message(&note->fingerprint) &&
                            !is_message(&s->note.fingerprint) &&
                            note->fingerprint.sequence == s->note.fingerprint.sequence);
    }
    for (int k = 0; k < QD_WAIT_NOTES; k++) {
        const qd_wait_note *note = &notes[k];
        if (note->renewed <= 0) continue;
        bool same = note->group == s->note.group && !is_message(&note->fingerprint) &&
                    note->fingerprint.sequence == s->note.fingerprint.sequence;
        if (inside ? !same : !note->holds) continue;
        for (int p = 0; p < QD_WAIT_PEERS && note->peers[p] >= 0; p++) {
            char place[QD_COMM_PLACE_BYTES] = "";
            if (note->peers[p] < world->size)
                qd_comm_place_get(&world->backend->board(world, note->peers[p])->place, place);
            s->waits = true;
            add(h, note->peers[p], i, note->entered[p], place, note);
            s = &h->suspects[i];
        }
    }
}

/* "rank 1 on host a (last in 2 at 'step 3'), rank 2 (...)": the first culprit and the others that
 * the same operation waits for. Returns the first one's index, or -1. */
static int list(const hunt *h, char *text, size_t bytes)
{
    const char(*hosts)[QD_COMM_HOST_BYTES] = h->op->comm->world->hosts;
    int first = -1;
    size_t used = 0;
    for (int pass = 0; pass < 2 && first < 0; pass++) /* second pass: all wait in a cycle; list those that this rank waits for */
        for (int i = 0; i < h->count; i++) {
            const suspect *s = &h->suspects[i];
            if ((pass == 0 && s->waits) || (first >= 0 && s->waiter != h->suspects[first].waiter) || used + 1 >= bytes)
                continue;
            if (first < 0) first = i;
            int n = snprintf(text + used, bytes - used, "%srank %d%s%s (last in %llu%s%s%s)", used ? ", " : "", s->rank,
                             hosts ? " on host " : "", hosts ? hosts[s->rank] : "", (unsigned long long)s->entered,
                             s->place[0] ? " at '" : "", s->place, s->place[0] ? "'" : "");
            used += n > 0 ? (size_t)n : 0;
        }
    return first;
}

const char *qd_call_text(const qd_fingerprint *fingerprint, const char *group, char *text, size_t bytes)
{
    char what[128];
    snprintf(text, bytes, "%s, %s %llu of group %s", qd_fingerprint_text(fingerprint, what, sizeof what),
             is_message(fingerprint) ? "message" : "operation", (unsigned long long)fingerprint->sequence, group);
    return text;
}

void qd_last_call_text(const qd_wait_board *board, char *text, size_t bytes)
{
    uint64_t words[sizeof(qd_last_call) / 8];
    qd_last_call call;
    char place[QD_COMM_PLACE_BYTES], what[192] = "";
    for (size_t i = 0; i < sizeof call / 8; i++) words[i] = atomic_load_explicit(&board->last[i], memory_order_relaxed);
    memcpy(&call, words, sizeof call);
    call.name[sizeof call.name - 1] = '\0';
    qd_comm_place_get(&board->place, place);
    if (call.fingerprint.sequence > 0) qd_call_text(&call.fingerprint, call.name, what, sizeof what);
    snprintf(text, bytes, "%s%s%s%s%s%s", place[0] ? "at '" : "", place, place[0] ? "'" : "", place[0] && what[0] ? ", " : "",
             !what[0] ? "" : call.inside ? "in " : "after ", what);
}

qd_status qd_wait_verdict(const qd_transfer *op)
{
    const qd_comm *comm = op->comm;
    qd_world *world = comm->world;
    hunt h = {.op = op, .now = qd_clock_now(), .suspects = malloc((size_t)world->size * sizeof *h.suspects)};
    if (!h.suspects)
        return QD_FAIL(QD_TIMEOUT, "a peer did not arrive in group %s; there is no memory for details", comm->name);
    qd_wait_note own = {.group = comm->id, .fingerprint = op->fingerprint};
    qd_world_lock(world);
    for (int peer = 0; peer < comm->size; peer++) {
        qd_peer_report report = {0};
        if (peer != comm->rank && qd_op_late(op, peer, &report))
            add(&h, comm->world_ranks[peer], -1, report.sequence, report.place, &own);
    }
    for (int i = 0; i < h.count; i++) follow(&h, i);
    qd_world_unlock(world);

    char missing[384] = "a peer", mine[192], theirs[192], at[QD_COMM_PLACE_BYTES + 8] = "", place[QD_COMM_PLACE_BYTES];
    int found = list(&h, missing, sizeof missing);
    qd_comm_place_get(&world->place, place);
    if (place[0]) snprintf(at, sizeof at, " at '%s'", place);
    qd_call_text(&op->fingerprint, comm->name, mine, sizeof mine);
    qd_status status;
    const suspect *s = found >= 0 ? &h.suspects[found] : NULL;
    if (!s || s->waiter < 0) {
        status = QD_FAIL(QD_TIMEOUT, "%s did not arrive within %g s in %s; rank %d waits%s%s", missing,
                         world->config.deadline_seconds, mine, world->rank, at,
                         s && s->waits ? ", and all of them wait for each other" : "");
    } else {
        status = QD_FAIL(QD_TIMEOUT, "%s did not arrive within %g s in %s; rank %d waits there, and rank %d for rank %d in %s%s", missing,
                         world->config.deadline_seconds, qd_call_text(&s->note.fingerprint, s->note.name, theirs, sizeof theirs),
                         h.suspects[s->waiter].rank, world->rank, h.suspects[s->first].rank, mine, at);
    }
    free(h.suspects);
    return status;
}
