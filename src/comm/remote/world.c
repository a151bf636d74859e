/* A remote world: groups, control messages (abort, questions about late ranks), sleeping, start and
 * end. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/clock.h"
#include "base/sized.h"
#include "comm/remote/remote.h"
#include "comm/work.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A poll is a call into the transport, not the read of a flag: a few hundred take tens of
 * microseconds. */
enum { SPIN_POLLS = 200 };
/* A failed rank waits this long for the others to finish before it ends without them,
 * after which a launcher may kill them. One round of waiting counts as at most TURN_MOST_SECONDS:
 * where processes starve, rounds are long, and the others need more time to report. LEAVE_SECONDS
 * limits the total. */
#define FAILED_GRACE_SECONDS 2.0
#define TURN_MOST_SECONDS 0.005
#define LEAVE_SECONDS 20.0
/* Questions are repeated after this fraction of the deadline. */
#define ASK_AGAIN 0.125
/* To read the mailbox is a system call, and its messages are not urgent. */
#define HEAR_SECONDS 0.001

qd_status qd_remote_send(qd_remote_group *group, int peer, int channel, const void *data, int64_t bytes, uint64_t *requests, int index)
{
    const qd_remote_world *world = group->world;
    return world->transport->send(world->self, group->comm->world_ranks[peer], group->comm->id, channel, data, bytes, requests, index);
}

qd_status qd_remote_recv(qd_remote_group *group, int peer, int channel, void *data, int64_t bytes, uint64_t *requests, int index)
{
    const qd_remote_world *world = group->world;
    return world->transport->recv(world->self, group->comm->world_ranks[peer], group->comm->id, channel, data, bytes, requests, index);
}

int64_t qd_remote_write_head(const qd_remote_world *world, const qd_transfer *op, int64_t bytes, const void *payload, int64_t carried,
                             unsigned char *buffer)
{
    qd_remote_head head = {.fingerprint = op->fingerprint, .bytes = bytes, .carried = carried};
    memcpy(head.place, world->place, sizeof head.place);
    if (carried > 0)
        memcpy(buffer + sizeof head, payload, (size_t)carried);
    memcpy(buffer, &head, sizeof head);
    return (int64_t)sizeof head + head.carried;
}

void qd_remote_give_up(qd_remote_world *world, uint64_t *requests, int count)
{
    if (!world->transport->give_up(world->self, requests, count))
        world->dirty = true;
}

void qd_remote_hear(qd_remote_group *group, int peer, qd_remote_head *head)
{
    qd_remote_link *link = &group->links[peer];
    head->place[sizeof head->place - 1] = '\0';
    memcpy(link->place, head->place, sizeof link->place);
    link->last = head->fingerprint;
    link->heard = ++group->world->heard;
}

static void control_reap(qd_remote_world *world)
{
    for (qd_remote_control_send **at = &world->sends; *at;) {
        qd_remote_control_send *send = *at;
        bool done = false;
        if (world->transport->test(world->self, &send->request, 0, &done) == QD_OK && !done) {
            at = &send->next;
            continue;
        }
        *at = send->next;
        free(send);
    }
}

/* Losing a control message (no memory) only makes an error message less exact: the deadline still
 * ends every wait. */
static void control_send(qd_remote_world *world, int to, const qd_remote_control *message)
{
    qd_remote_mailbox_send(world->mailbox, world->mailboxes[to], message, sizeof *message);
    qd_remote_control_send *send = malloc(sizeof *send);
    if (!send)
        return;
    send->message = *message;
    world->transport->clear(&send->request, 1);
    if (world->transport->send(world->self, to, QD_REMOTE_CONTROL, 0, &send->message, sizeof send->message, &send->request, 0) != QD_OK) {
        free(send);
        return;
    }
    send->next = world->sends;
    world->sends = send;
}

static qd_status control_listen(qd_remote_world *world)
{
    world->listening = false;
    world->transport->clear(&world->incoming_request, 1);
    QD_TRY(world->transport->recv(world->self, QD_REMOTE_ANY, QD_REMOTE_CONTROL, 0, &world->incoming, sizeof world->incoming,
                                  &world->incoming_request, 0));
    world->listening = true;
    return QD_OK;
}

static qd_remote_group *find_group(const qd_remote_world *world, int64_t id)
{
    qd_remote_group *group = world->groups;
    while (group && group->comm->id != id)
        group = group->next;
    return group;
}

static void ask(qd_remote_world *world, int rank, int64_t group)
{
    qd_remote_control question = {.kind = QD_REMOTE_ASK, .from = world->rank, .group = group};
    world->asked[rank] = qd_clock_now();
    control_send(world, rank, &question);
}

/* Stores a rank's answer, with times converted to our clock, and asks the ranks that it waits
 * for. */
static void take_notes(qd_remote_world *world, const qd_remote_control *answer)
{
    if (answer->from < 0 || answer->from >= world->size)
        return;
    double now = qd_clock_now();
    qd_wait_board *board = &world->boards[answer->from];
    qd_comm_place_set(&board->place, answer->text);
    for (int i = 0; i < QD_WAIT_NOTES; i++) {
        qd_wait_note note = answer->notes[i];
        if (note.renewed > 0)
            note.renewed += now - answer->sent;
        qd_wait_note_set(board, i, &note);
        for (int k = 0; note.renewed > 0 && k < QD_WAIT_PEERS; k++) {
            int rank = note.peers[k];
            if (rank >= 0 && rank < world->size && rank != world->rank &&
                now - world->asked[rank] > world->deadline * ASK_AGAIN)
                ask(world, rank, note.group);
        }
    }
}

static void control_handle(qd_remote_world *world, qd_remote_control *message)
{
    if (message->from < 0 || message->from >= world->size) /* of a larger world, whose socket had the same name */
        return;
    qd_remote_group *group = find_group(world, message->group);
    message->text[sizeof message->text - 1] = '\0';
    switch (message->kind) {
    case QD_REMOTE_ABORT:
        if (world->aborted_by >= 0)
            break;
        world->aborted_by = message->from;
        memcpy(world->reason, message->text, sizeof world->reason);
        break;
    case QD_REMOTE_ASK: {
        qd_remote_control answer = {.kind = QD_REMOTE_ANSWER, .from = world->rank, .group = message->group};
        answer.sequence = group ? group->entered : 0;
        answer.sent = qd_clock_now();
        memcpy(answer.text, world->place, sizeof world->place);
        for (int i = 0; i < QD_WAIT_NOTES; i++)
            qd_wait_note_get(&world->boards[world->rank], i, &answer.notes[i]);
        control_send(world, message->from, &answer);
        break;
    }
    case QD_REMOTE_ANSWER:
        for (int p = 0; group && p < group->comm->size; p++) {
            if (group->comm->world_ranks[p] != message->from)
                continue;
            qd_remote_link *link = &group->links[p];
            link->answered = qd_clock_now();
            if (message->sequence > link->entered)
                link->entered = message->sequence;
            memcpy(link->place, message->text, sizeof link->place);
            link->place[sizeof link->place - 1] = '\0';
        }
        take_notes(world, message);
        break;
    default:
        break;
    }
}

/* Messages of the mailbox come through the transport, too, unless it is blocked. */
static void hear(qd_remote_world *world)
{
    qd_remote_control message;
    double now = qd_clock_now();
    if (now - world->listened < HEAR_SECONDS)
        return;
    world->listened = now;
    while (qd_remote_mailbox_recv(world->mailbox, &message, sizeof message))
        control_handle(world, &message);
}

static void control_poll(qd_remote_world *world)
{
    bool done = true;
    while (world->listening) {
        if (world->transport->test(world->self, &world->incoming_request, 0, &done) != QD_OK || !done)
            break;
        control_handle(world, &world->incoming);
        if (control_listen(world) != QD_OK)
            break;
    }
    hear(world);
    if (world->sends)
        control_reap(world);
}

void qd_remote_ask(qd_remote_group *group, const qd_transfer *op, int peer, double *asked)
{
    qd_remote_world *world = group->world;
    double now = qd_clock_now();
    if (op->moved_at == 0 || now - op->moved_at < 0.5 * world->deadline || now - *asked < ASK_AGAIN * world->deadline)
        return;
    *asked = now;
    for (int p = 0; p < group->comm->size; p++)
        if (p != group->comm->rank && (peer < 0 || p == peer))
            ask(world, group->comm->world_ranks[p], group->comm->id);
}

bool qd_remote_answers(const qd_remote_group *group, int peer)
{
    return qd_clock_now() - group->links[peer].answered < 3 * ASK_AGAIN * group->world->deadline;
}

static qd_wait_board *board(qd_world *w, int rank)
{
    qd_remote_world *world = w->backend_data;
    return &world->boards[rank];
}

static void world_abort(qd_world *w, const char *reason)
{
    qd_remote_world *world = w->backend_data;
    qd_remote_control message = {.kind = QD_REMOTE_ABORT, .from = world->rank};
    if (world->aborted_by >= 0) /* all ranks learn of the first failure */
        return;
    snprintf(message.text, sizeof message.text, "%s", reason);
    for (int p = 0; p < world->size && !world->dirty; p++) /* dirty: that failure has been reported already */
        if (p != world->rank)
            control_send(world, p, &message);
    /* Short messages leave at once; a stopped receiver must not delay us. */
    for (double end = qd_clock_now() + 0.1; !world->dirty && world->sends && qd_clock_now() < end; sched_yield())
        control_reap(world);
    world->aborted_by = world->rank;
    memcpy(world->reason, message.text, sizeof world->reason);
}

/* " at 'step 3', in all-reduce of 100 fp32 (sum), operation 3 of group world": what the last head
 * of a rank has told this one. */
static void last_heard(const qd_remote_world *world, int rank, char *text, size_t bytes)
{
    const qd_remote_link *last = NULL;
    const char *name = "";
    for (const qd_remote_group *g = world->groups; g; g = g->next)
        for (int p = 0; p < g->comm->size; p++)
            if (g->comm->world_ranks[p] == rank && g->links[p].heard > (last ? last->heard : 0)) {
                last = &g->links[p];
                name = g->comm->name;
            }
    char what[192];
    text[0] = '\0';
    if (last)
        snprintf(text, bytes, "; it was last heard of%s%s%s in %s", last->place[0] ? " at '" : "", last->place,
                 last->place[0] ? "'," : "", qd_call_text(&last->last, name, what, sizeof what));
}

/* A rank that has failed in an orderly way says so before it leaves: its own words come first. */
static void find_lost(qd_world *w)
{
    qd_remote_world *world = w->backend_data;
    int rank;
    char why[160], heard[320];
    if (!world->transport->lost(world->self, &rank, why, sizeof why))
        return;
    last_heard(world, rank, heard, sizeof heard);
    snprintf(world->reason, sizeof world->reason, "%s%s", why, heard);
    world->aborted_by = rank;
    atomic_store(&w->lost, 1 + rank);
}

static bool world_aborted(qd_world *w, int *rank, char *reason, size_t reason_bytes)
{
    qd_remote_world *world = w->backend_data;
    if (world->aborted_by < 0 && !world->dirty)
        control_poll(world);
    if (world->aborted_by < 0 && world->transport->lost)
        find_lost(w);
    if (world->aborted_by < 0)
        return false;
    *rank = world->aborted_by;
    snprintf(reason, reason_bytes, "%s", world->reason);
    return true;
}

static void world_at(qd_world *w, const char *place)
{
    qd_remote_world *world = w->backend_data;
    snprintf(world->place, sizeof world->place, "%s", place);
}

/* Sleeping: a transport offers nothing to wait on, so a thread naps, longer and longer while
 * nothing moves. */

enum { YIELDS = 256, NAPS_PER_LENGTH = 32, NAP_SHORTEST_NS = 20000, NAP_DOUBLINGS = 5 };

static uint32_t sleep_prepare(qd_world *w)
{
    qd_remote_world *world = w->backend_data;
    pthread_mutex_lock(&world->sleep_lock);
    uint32_t ticket = world->wakes;
    pthread_mutex_unlock(&world->sleep_lock);
    return ticket;
}

static void sleep_cancel(qd_world *w)
{
    (void)w; /* nothing was announced: peers do not wake us */
}

static void sleep_nap(qd_world *w, uint32_t ticket, double seconds)
{
    qd_remote_world *world = w->backend_data;
    unsigned naps = atomic_fetch_add_explicit(&world->naps, 1, memory_order_relaxed);
    if (naps < YIELDS) {
        sched_yield();
        return;
    }
    unsigned doublings = (naps - YIELDS) / NAPS_PER_LENGTH;
    double nap = 1e-9 * NAP_SHORTEST_NS * (double)(1u << (doublings < NAP_DOUBLINGS ? doublings : NAP_DOUBLINGS));
    if (nap > seconds)
        nap = seconds;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(nap * 1e9);
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_mutex_lock(&world->sleep_lock);
    while (world->wakes == ticket)
        if (pthread_cond_timedwait(&world->sleep_wake, &world->sleep_lock, &until) == ETIMEDOUT)
            break;
    pthread_mutex_unlock(&world->sleep_lock);
}

static void sleep_wake(qd_world *w)
{
    qd_remote_world *world = w->backend_data;
    pthread_mutex_lock(&world->sleep_lock);
    world->wakes++;
    pthread_cond_broadcast(&world->sleep_wake);
    pthread_mutex_unlock(&world->sleep_lock);
}

/* Ids are never reused, so a slow rank's old messages cannot reach a new group; there are tags for
 * millions. */
static qd_status reserve_id(qd_comm *parent, int64_t *id)
{
    qd_remote_world *world = parent->world->backend_data;
    int64_t next = 1 + world->next_id * world->size + world->rank;
    if (next >= world->transport->most_groups)
        return QD_FAIL(QD_UNSUPPORTED, "backend %s has tags for %lld groups only; create fewer groups", world->transport->name,
                       (long long)world->transport->most_groups);
    world->next_id++;
    *id = next;
    return QD_OK;
}

static void release_id(qd_comm *parent, int64_t id)
{
    qd_remote_world *world = parent->world->backend_data;
    if (id == 1 + (world->next_id - 1) * world->size + world->rank)
        world->next_id--;
}

static void group_free(qd_remote_group *group)
{
    for (int p = 0; group->links && p < group->comm->size; p++) {
        qd_remote_link *link = &group->links[p];
        if (group->world->dirty)
            break; /* the transport may still write there */
        free(link->tx);
        free(link->rx);
        free(link->p2p_tx);
        free(link->p2p_rx);
    }
    if (!group->world->dirty)
        free(group->staging);
    free(group->links);
    free(group->requests);
    free(group->indices);
    free(group->sources);
    free(group);
}

/* In shared memory a message of its own for the head costs less than copying the payload. */
static int64_t head_bytes(const qd_comm *comm, int peer)
{
    const qd_remote_world *world = comm->world->backend_data;
    bool same_machine = world->machines[comm->world_ranks[peer]] == world->machines[world->rank];
    int64_t carry = same_machine ? QD_REMOTE_CARRY_LEAST : QD_REMOTE_CARRY_ALL / comm->size;
    if (carry > world->transport->carry_most)
        carry = world->transport->carry_most;
    if (carry < QD_REMOTE_CARRY_LEAST)
        carry = QD_REMOTE_CARRY_LEAST;
    return (int64_t)sizeof(qd_remote_head) + carry;
}

static qd_status group_create(qd_comm *comm)
{
    qd_remote_world *world = comm->world->backend_data;
    size_t n = (size_t)comm->size;
    qd_remote_group *group = calloc(1, sizeof *group);
    bool complete = group != NULL;
    if (group) {
        *group = (qd_remote_group){.comm = comm, .world = world};
        group->links = calloc(n, sizeof *group->links);
        group->requests = calloc(n * QD_REMOTE_REQUESTS, sizeof *group->requests);
        group->indices = calloc(n * QD_REMOTE_REQUESTS, sizeof *group->indices);
        group->sources = calloc(n, sizeof *group->sources);
        complete = group->links && group->requests && group->indices && group->sources;
        if (complete)
            world->transport->clear(group->requests, (int)n * QD_REMOTE_REQUESTS);
        for (size_t p = 0; complete && p < n; p++) {
            if ((int)p == comm->rank)
                continue;
            qd_remote_link *link = &group->links[p];
            link->head_bytes = head_bytes(comm, (int)p);
            link->tx = malloc((size_t)link->head_bytes);
            link->rx = malloc((size_t)link->head_bytes);
            complete = link->tx && link->rx;
        }
    }
    if (!complete) {
        if (group)
            group_free(group);
        return QD_FAIL(QD_NO_MEMORY, "no memory for group '%s' of %d ranks", comm->name, comm->size);
    }
    group->next = world->groups;
    world->groups = group;
    comm->backend_data = group;
    comm->world->spin = world->spin;
    comm->world->where = world->where;
    comm->world->hosts = (const char(*)[QD_COMM_HOST_BYTES])world->hosts;
    return QD_OK;
}

static void group_destroy(qd_comm *comm)
{
    qd_remote_world *world = comm->world->backend_data;
    qd_remote_group *group = comm->backend_data;
    for (qd_remote_group **at = &world->groups; *at; at = &(*at)->next)
        if (*at == group) {
            *at = group->next;
            break;
        }
    group_free(group);
    comm->backend_data = NULL;
}

/* Meets the others before the transport is closed, which could wait without limit for a stopped
 * rank. False if not all of them arrive. In a dirty world it only gives the others time to
 * report. */
static bool meet_at_end(qd_remote_world *world)
{
    bool failed = world->aborted_by >= 0;
    /* A rank that is done early waits longer than the deadline of ranks that still wait for it, so
     * that they report first. */
    double left = FAILED_GRACE_SECONDS + (failed ? 0.0 : world->deadline), before = qd_clock_now(), end = before + left + LEAVE_SECONDS;
    for (unsigned turn = 0;; turn++) {
        bool met = false;
        if (!world->dirty && !world->transport->meet(world->self, &met))
            return false;
        if (met)
            return true;
        if (!world->dirty)
            control_poll(world);
        if (!failed && world->aborted_by >= 0) {
            failed = true;
            left = FAILED_GRACE_SECONDS;
        }
        double now = qd_clock_now(), turn_seconds = now - before;
        left -= turn_seconds < TURN_MOST_SECONDS ? turn_seconds : TURN_MOST_SECONDS;
        end += qd_clock_lost(&before, now); /* time in which the job was suspended; sets before = now */
        if (left < 0.0 || now > end)
            return false;
        if (turn < YIELDS)
            sched_yield();
        else
            nanosleep(&(struct timespec){.tv_nsec = NAP_SHORTEST_NS << NAP_DOUBLINGS}, NULL);
    }
}

static void world_free(qd_remote_world *world)
{
    pthread_mutex_destroy(&world->sleep_lock);
    pthread_cond_destroy(&world->sleep_wake);
    free(world->boards);
    free(world->asked);
    free(world->hosts);
    free(world->machines);
    free(world->mailboxes);
    qd_remote_mailbox_close(world->mailbox);
    /* The transport may still use these messages: leak them. */
    if (!world->sends && !world->listening)
        free(world);
}

static void world_destroy(qd_world *w)
{
    qd_remote_world *world = w->backend_data;
    bool met = !atomic_load(&w->forsaken) && meet_at_end(world);
    if (!world->dirty && world->listening && world->transport->give_up(world->self, &world->incoming_request, 1))
        world->listening = false;
    if (!world->dirty)
        control_reap(world);
    world->transport->close(world->self, met, world->dirty);
    world_free(world);
}

/* In a dirty world any call of the transport could touch memory that the failed operation's caller
 * has freed: nothing is started, polled or given up any more, and the core ends all pending
 * operations with the world's failure. */
static bool is_dirty(const qd_transfer *op)
{
    const qd_remote_world *world = op->comm->world->backend_data;
    return world->dirty;
}

static qd_status op_start(qd_transfer *op)
{
    if (is_dirty(op))
        return QD_OK;
    bool p2p = op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
    return p2p ? qd_remote_p2p_start(op) : qd_remote_coll_start(op);
}

static qd_status op_poll(qd_transfer *op, bool *done, bool *moved)
{
    if (is_dirty(op)) {
        *done = *moved = false;
        return QD_OK;
    }
    bool p2p = op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
    QD_TRY(p2p ? qd_remote_p2p_poll(op, done, moved) : qd_remote_coll_poll(op, done, moved));
    /* A transport may read large messages from the sender's memory late. A sender that gives up
     * publishes that before it reuses the memory, so data that arrives after the abort is
     * discarded. Small messages are eager everywhere. */
    qd_remote_world *world = op->comm->world->backend_data;
    if (!*done || op->bytes <= QD_REMOTE_CARRY_LEAST)
        return QD_OK;
    control_poll(world);
    if (world->aborted_by >= 0)
        *done = *moved = false;
    return QD_OK;
}

static void op_finish(qd_transfer *op)
{
    if (is_dirty(op))
        return;
    if (op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV)
        qd_remote_p2p_finish(op);
    else
        qd_remote_coll_finish(op);
}

static bool op_late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    bool p2p = op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
    return p2p ? qd_remote_p2p_late(op, peer, report) : qd_remote_coll_late(op, peer, report);
}

#define BACKEND(text)                                                                                       \
    {                                                                                                       \
        .name = text, .serialized = true, .start = op_start, .poll = op_poll, .finish = op_finish,          \
        .late = op_late, .board = board, .sleep_prepare = sleep_prepare, .sleep_cancel = sleep_cancel,      \
        .sleep = sleep_nap, .wake = sleep_wake, .abort = world_abort, .aborted = world_aborted,             \
        .at = world_at, .reserve_id = reserve_id, .release_id = release_id, .group_create = group_create,   \
        .group_destroy = group_destroy, .world_destroy = world_destroy                                      \
    }
static const qd_comm_backend_ops backends[] = {BACKEND("mpi"), BACKEND("ucx")};
enum { BACKENDS = sizeof backends / sizeof *backends };

void qd_remote_facts_find(qd_remote_facts *own, qd_remote_mailbox *mailbox)
{
    memset(own, 0, sizeof *own);
    qd_remote_mailbox_open(mailbox, own->mailbox);
    sched_getaffinity(0, sizeof own->cores, &own->cores); /* on failure no core is known, and no rank spins */
    char name[256] = "?";
    gethostname(name, sizeof name - 1);
    snprintf(own->host, sizeof own->host, "%.*s", (int)sizeof own->host - 1, name);
}

static int machine_of(const qd_remote_facts *facts, int rank)
{
    int first = 0;
    while (memcmp(facts[first].machine, facts[rank].machine, sizeof facts[rank].machine) != 0)
        first++;
    return first;
}

/* A machine is identified by its lowest rank; its index is the number of lower ones. No rank spins
 * before it yields where the ranks of this machine outnumber the cores that they may use together
 * (mpirun may have bound each to a core of its own). */
static qd_status look_around(qd_remote_world *world, const qd_remote_facts *facts)
{
    qd_comm_where *where = &world->where;
    int own = machine_of(facts, world->rank);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (int r = 0; r < world->size; r++) {
        int machine = world->machines[r] = machine_of(facts, r);
        where->machines += machine == r;
        where->machine += machine == r && r < own;
        if (machine != own)
            continue;
        if (r != world->rank)
            memcpy(world->mailboxes[r], facts[r].mailbox, sizeof world->mailboxes[r]);
        where->local_rank += r < world->rank;
        where->local_ranks++;
        CPU_OR(&cores, &cores, &facts[r].cores);
    }
    world->spin = where->local_ranks <= CPU_COUNT(&cores) ? SPIN_POLLS : 0;
    if (where->machines == 1)
        return QD_OK;
    world->hosts = calloc((size_t)world->size, sizeof *world->hosts);
    if (!world->hosts)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", world->size);
    for (int r = 0; r < world->size; r++)
        memcpy(world->hosts[r], facts[r].host, sizeof world->hosts[r]);
    return QD_OK;
}

/* On failure the caller frees the world. */
static qd_status world_open(qd_remote_world *world, const qd_remote_facts *facts)
{
    world->boards = calloc((size_t)world->size, sizeof *world->boards);
    world->asked = calloc((size_t)world->size, sizeof *world->asked);
    world->machines = calloc((size_t)world->size, sizeof *world->machines);
    world->mailboxes = calloc((size_t)world->size, sizeof *world->mailboxes);
    if (!world->boards || !world->asked || !world->machines || !world->mailboxes)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", world->size);
    QD_TRY(look_around(world, facts));
    return control_listen(world);
}

qd_status qd_remote_create(const qd_remote_transport *transport, void *self, const qd_remote_facts *facts,
                           qd_remote_mailbox mailbox, int rank, int size, const qd_comm_config *config, qd_comm **comm)
{
    *comm = NULL;
    qd_remote_world *world = calloc(1, sizeof *world);
    if (!world) {
        transport->close(self, false, false);
        qd_remote_mailbox_close(mailbox);
        return QD_FAIL(QD_NO_MEMORY, "no memory for the world of rank %d", rank);
    }
    world->mailbox = mailbox;
    world->transport = transport;
    world->self = self;
    world->rank = rank;
    world->size = size;
    world->deadline = config->deadline_seconds;
    world->aborted_by = -1;
    pthread_mutex_init(&world->sleep_lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&world->sleep_wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    qd_status status = world_open(world, facts);
    if (status != QD_OK) {
        qd_error_frame(__FILE__, __LINE__, __func__);
        transport->close(self, false, false);
        world_free(world);
        return status;
    }
    int at = 0;
    while (at + 1 < BACKENDS && strcmp(backends[at].name, transport->name) != 0)
        at++;
    return qd_comm_create_world(&backends[at], world, config, rank, size, comm);
}
