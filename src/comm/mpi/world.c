/* The MPI world of this process: start and end of MPI, groups, control messages, sleeping. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/clock.h"
#include "base/sized.h"
#include "comm/mpi/mpi_impl.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A poll is a call into MPI, not the read of a flag: a few hundred take tens of microseconds. */
enum { SPIN_POLLS = 200 };
/* A failed rank waits this long for the others to finish before it exits without MPI_Finalize,
 * after which the launcher kills them. One round of waiting counts as at most TURN_MOST_SECONDS:
 * where processes starve, rounds are long, and the others need more time to report. LEAVE_SECONDS
 * limits the total. */
#define FAILED_GRACE_SECONDS 2.0
#define TURN_MOST_SECONDS 0.005
#define LEAVE_SECONDS 20.0
/* Questions are repeated after this fraction of the deadline. */
#define ASK_AGAIN 0.125

qd_status qd_mpi_check(int code, const char *call)
{
    if (code == MPI_SUCCESS)
        return QD_OK;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return QD_FAIL(QD_SYSTEM, "%s failed: %s", call, text);
}

int qd_mpi_tag(const qd_mpi_group *group, int channel)
{
    return (int)(group->comm->id * QD_MPI_CHANNELS + channel);
}

qd_status qd_mpi_send(qd_mpi_group *group, int peer, int channel, const void *data, int64_t bytes, MPI_Request *request)
{
    return qd_mpi_check(MPI_Isend(data, (int)bytes, MPI_BYTE, group->comm->world_ranks[peer],
                                  qd_mpi_tag(group, channel), group->world->data, request),
                        "MPI_Isend");
}

qd_status qd_mpi_recv(qd_mpi_group *group, int peer, int channel, void *data, int64_t bytes, MPI_Request *request)
{
    return qd_mpi_check(MPI_Irecv(data, (int)bytes, MPI_BYTE, group->comm->world_ranks[peer],
                                  qd_mpi_tag(group, channel), group->world->data, request),
                        "MPI_Irecv");
}

int64_t qd_mpi_write_head(const qd_mpi_world *world, const qd_transfer *op, int64_t bytes, const void *payload,
                          unsigned char *buffer)
{
    qd_mpi_head head = {.fingerprint = op->fingerprint, .bytes = bytes};
    memcpy(head.place, world->place, sizeof head.place);
    if (payload && bytes > 0 && bytes <= QD_MPI_CARRY_BYTES) {
        head.carried = bytes;
        memcpy(buffer + sizeof head, payload, (size_t)bytes);
    }
    memcpy(buffer, &head, sizeof head);
    return (int64_t)sizeof head + head.carried;
}

/* Lets MPI make progress until the requests are done or `seconds` have passed; true if they are
 * done. */
static bool turn_until_done(MPI_Request *requests, int count, double seconds)
{
    for (double end = qd_clock_now() + seconds;;) {
        int flag = 0;
        if (MPI_Testall(count, requests, &flag, MPI_STATUSES_IGNORE) != MPI_SUCCESS || flag)
            return flag;
        if (qd_clock_now() > end)
            return false;
        sched_yield();
    }
}

void qd_mpi_give_up(qd_mpi_world *world, MPI_Request *requests, int count)
{
    bool any = false;
    for (int i = 0; i < count; i++) {
        if (requests[i] == MPI_REQUEST_NULL)
            continue;
        any = true;
        /* Harmless for sends: the library may refuse, and the request is then unaffected. */
        MPI_Cancel(&requests[i]);
    }
    if (!any || turn_until_done(requests, count, 0.1))
        return;
    world->dirty = true;
    for (int i = 0; i < count; i++)
        if (requests[i] != MPI_REQUEST_NULL)
            MPI_Request_free(&requests[i]);
}

static void control_reap(qd_mpi_world *world)
{
    for (qd_mpi_control_send **at = &world->sends; *at;) {
        qd_mpi_control_send *send = *at;
        int flag = 0;
        if (MPI_Test(&send->request, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && !flag) {
            at = &send->next;
            continue;
        }
        *at = send->next;
        free(send);
    }
}

/* Losing a control message (no memory) only makes an error message less exact: the deadline still
 * ends every wait. */
static void control_send(qd_mpi_world *world, int to, const qd_mpi_control *message)
{
    qd_mpi_control_send *send = malloc(sizeof *send);
    if (!send)
        return;
    send->message = *message;
    if (MPI_Isend(&send->message, (int)sizeof send->message, MPI_BYTE, to, 0, world->control, &send->request) !=
        MPI_SUCCESS) {
        free(send);
        return;
    }
    send->next = world->sends;
    world->sends = send;
}

static qd_status control_listen(qd_mpi_world *world)
{
    return qd_mpi_check(MPI_Irecv(&world->incoming, (int)sizeof world->incoming, MPI_BYTE, MPI_ANY_SOURCE, 0,
                                  world->control, &world->incoming_request),
                        "MPI_Irecv");
}

static qd_mpi_group *find_group(const qd_mpi_world *world, int64_t id)
{
    qd_mpi_group *group = world->groups;
    while (group && group->comm->id != id)
        group = group->next;
    return group;
}

static void ask(qd_mpi_world *world, int rank, int64_t group)
{
    qd_mpi_control question = {.kind = QD_MPI_ASK, .from = world->rank, .group = group};
    world->asked[rank] = qd_clock_now();
    control_send(world, rank, &question);
}

/* Stores a rank's answer, with times converted to our clock, and asks the ranks that it waits
 * for. */
static void take_notes(qd_mpi_world *world, const qd_mpi_control *answer)
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

static void control_handle(qd_mpi_world *world, qd_mpi_control *message)
{
    qd_mpi_group *group = find_group(world, message->group);
    message->text[sizeof message->text - 1] = '\0';
    switch (message->kind) {
    case QD_MPI_ABORT:
        if (world->aborted_by >= 0)
            break;
        world->aborted_by = message->from;
        memcpy(world->reason, message->text, sizeof world->reason);
        break;
    case QD_MPI_ASK: {
        qd_mpi_control answer = {.kind = QD_MPI_ANSWER, .from = world->rank, .group = message->group};
        answer.sequence = group ? group->entered : 0;
        answer.sent = qd_clock_now();
        memcpy(answer.text, world->place, sizeof world->place);
        for (int i = 0; i < QD_WAIT_NOTES; i++)
            qd_wait_note_get(&world->boards[world->rank], i, &answer.notes[i]);
        control_send(world, message->from, &answer);
        break;
    }
    case QD_MPI_ANSWER:
        for (int p = 0; group && p < group->comm->size; p++) {
            if (group->comm->world_ranks[p] != message->from)
                continue;
            qd_mpi_link *link = &group->links[p];
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

static void control_poll(qd_mpi_world *world)
{
    int flag = 1;
    while (world->incoming_request != MPI_REQUEST_NULL) {
        if (MPI_Test(&world->incoming_request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || !flag)
            break;
        control_handle(world, &world->incoming);
        if (control_listen(world) != QD_OK)
            break;
    }
    if (world->sends)
        control_reap(world);
}

void qd_mpi_ask(qd_mpi_group *group, const qd_transfer *op, int peer, double *asked)
{
    qd_mpi_world *world = group->world;
    double now = qd_clock_now();
    if (op->moved_at == 0 || now - op->moved_at < 0.5 * world->deadline || now - *asked < ASK_AGAIN * world->deadline)
        return;
    *asked = now;
    for (int p = 0; p < group->comm->size; p++)
        if (p != group->comm->rank && (peer < 0 || p == peer))
            ask(world, group->comm->world_ranks[p], group->comm->id);
}

bool qd_mpi_answers(const qd_mpi_group *group, int peer)
{
    return qd_clock_now() - group->links[peer].answered < 3 * ASK_AGAIN * group->world->deadline;
}

static qd_wait_board *board(qd_world *w, int rank)
{
    qd_mpi_world *world = w->backend_data;
    return &world->boards[rank];
}

static void world_abort(qd_world *w, const char *reason)
{
    qd_mpi_world *world = w->backend_data;
    qd_mpi_control message = {.kind = QD_MPI_ABORT, .from = world->rank};
    snprintf(message.text, sizeof message.text, "%s", reason);
    for (int p = 0; p < world->size && !world->dirty; p++) /* dirty: that failure has been reported already */
        if (p != world->rank)
            control_send(world, p, &message);
    /* Short messages leave at once; a stopped receiver must not delay us. */
    for (double end = qd_clock_now() + 0.1; !world->dirty && world->sends && qd_clock_now() < end; sched_yield())
        control_reap(world);
    if (world->aborted_by < 0) {
        world->aborted_by = world->rank;
        memcpy(world->reason, message.text, sizeof world->reason);
    }
}

static bool world_aborted(qd_world *w, int *rank, char *reason, size_t reason_bytes)
{
    qd_mpi_world *world = w->backend_data;
    if (world->aborted_by < 0 && !world->dirty)
        control_poll(world);
    if (world->aborted_by < 0)
        return false;
    *rank = world->aborted_by;
    snprintf(reason, reason_bytes, "%s", world->reason);
    return true;
}

static void world_at(qd_world *w, const char *place)
{
    qd_mpi_world *world = w->backend_data;
    snprintf(world->place, sizeof world->place, "%s", place);
}

/* Sleeping: MPI offers nothing to wait on, so a thread naps, longer and longer while nothing
 * moves. */

enum { YIELDS = 256, NAPS_PER_LENGTH = 32, NAP_SHORTEST_NS = 20000, NAP_DOUBLINGS = 5 };

static uint32_t sleep_prepare(qd_world *w)
{
    qd_mpi_world *world = w->backend_data;
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
    qd_mpi_world *world = w->backend_data;
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
    qd_mpi_world *world = w->backend_data;
    pthread_mutex_lock(&world->sleep_lock);
    world->wakes++;
    pthread_cond_broadcast(&world->sleep_wake);
    pthread_mutex_unlock(&world->sleep_lock);
}

/* Ids are never reused, so a slow rank's old messages cannot reach a new group; there are tags for
 * millions. */
static qd_status reserve_id(qd_comm *parent, int64_t *id)
{
    qd_mpi_world *world = parent->world->backend_data;
    int64_t next = 1 + world->next_id * world->size + world->rank;
    if (next >= world->most_ids)
        return QD_FAIL(QD_UNSUPPORTED, "this MPI library has tags for %lld groups only; create fewer groups",
                       (long long)world->most_ids);
    world->next_id++;
    *id = next;
    return QD_OK;
}

static void release_id(qd_comm *parent, int64_t id)
{
    qd_mpi_world *world = parent->world->backend_data;
    if (id == 1 + (world->next_id - 1) * world->size + world->rank)
        world->next_id--;
}

static void group_free(qd_mpi_group *group)
{
    for (int p = 0; group->links && p < group->comm->size; p++) {
        qd_mpi_link *link = &group->links[p];
        if (group->world->dirty)
            break; /* MPI may still write there */
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

static qd_status group_create(qd_comm *comm)
{
    qd_mpi_world *world = comm->world->backend_data;
    size_t n = (size_t)comm->size;
    qd_mpi_group *group = calloc(1, sizeof *group);
    bool complete = group != NULL;
    if (group) {
        *group = (qd_mpi_group){.comm = comm, .world = world};
        group->links = calloc(n, sizeof *group->links);
        group->requests = calloc(n * QD_MPI_REQUESTS, sizeof *group->requests);
        group->indices = calloc(n * QD_MPI_REQUESTS, sizeof *group->indices);
        group->sources = calloc(n, sizeof *group->sources);
        complete = group->links && group->requests && group->indices && group->sources;
        for (size_t i = 0; complete && i < n * QD_MPI_REQUESTS; i++)
            group->requests[i] = MPI_REQUEST_NULL;
        for (size_t p = 0; complete && p < n; p++) {
            if ((int)p == comm->rank)
                continue;
            group->links[p].tx = malloc(QD_MPI_HEAD_BYTES);
            group->links[p].rx = malloc(QD_MPI_HEAD_BYTES);
            complete = group->links[p].tx && group->links[p].rx;
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
    qd_mpi_world *world = comm->world->backend_data;
    qd_mpi_group *group = comm->backend_data;
    for (qd_mpi_group **at = &world->groups; *at; at = &(*at)->next)
        if (*at == group) {
            *at = group->next;
            break;
        }
    group_free(group);
    comm->backend_data = NULL;
}

/* Meets the others before MPI_Finalize, which would wait without limit for a stopped rank. False if
 * not all of them arrive. In a dirty world it only gives the others time to report. */
static bool meet_at_end(qd_mpi_world *world)
{
    MPI_Request all = MPI_REQUEST_NULL;
    if (!world->dirty && MPI_Ibarrier(world->control, &all) != MPI_SUCCESS)
        return false;
    bool failed = world->aborted_by >= 0;
    /* A rank that is done early waits longer than the deadline of ranks that still wait for it, so
     * that they report first. */
    double left = FAILED_GRACE_SECONDS + (failed ? 0.0 : world->deadline), before = qd_clock_now(), end = before + left + LEAVE_SECONDS;
    for (unsigned turn = 0;; turn++) {
        int flag = 0;
        if (!world->dirty && MPI_Test(&all, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return false;
        if (flag)
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

static void world_free(qd_mpi_world *world)
{
    pthread_mutex_destroy(&world->sleep_lock);
    pthread_cond_destroy(&world->sleep_wake);
    free(world->boards);
    free(world->asked);
    free(world->hosts);
    /* MPI may still use these messages: leak them. */
    if (!world->sends && world->incoming_request == MPI_REQUEST_NULL)
        free(world);
}

static void world_destroy(qd_world *w)
{
    qd_mpi_world *world = w->backend_data;
    bool met = meet_at_end(world);
    if (!world->dirty && world->incoming_request != MPI_REQUEST_NULL) {
        MPI_Cancel(&world->incoming_request);
        turn_until_done(&world->incoming_request, 1, 0.1);
    }
    if (!world->dirty)
        control_reap(world);
    /* Without the others, freeing communicators or MPI_Finalize could block forever. The process
     * then ends without them (qd_mpi_end), and the launcher reports a failure. */
    if (met) {
        MPI_Comm_free(&world->control);
        MPI_Comm_free(&world->data);
    }
    if (met && world->finalize)
        MPI_Finalize();
    world_free(world);
}

/* In a dirty world any MPI call could touch memory that the failed operation's caller has freed:
 * nothing is started, polled or given up any more, and the core ends all pending operations with
 * the world's failure. */
static bool is_dirty(const qd_transfer *op)
{
    const qd_mpi_world *world = op->comm->world->backend_data;
    return world->dirty;
}

static qd_status op_start(qd_transfer *op)
{
    if (is_dirty(op))
        return QD_OK;
    bool p2p = op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
    return p2p ? qd_mpi_p2p_start(op) : qd_mpi_coll_start(op);
}

static qd_status op_poll(qd_transfer *op, bool *done, bool *moved)
{
    if (is_dirty(op)) {
        *done = *moved = false;
        return QD_OK;
    }
    bool p2p = op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
    QD_TRY(p2p ? qd_mpi_p2p_poll(op, done, moved) : qd_mpi_coll_poll(op, done, moved));
    /* MPI may read large messages from the sender's memory late. A sender that gives up publishes
     * that before it reuses the memory, so data that arrives after the abort is discarded. */
    qd_mpi_world *world = op->comm->world->backend_data;
    if (!*done || op->bytes <= QD_MPI_CARRY_BYTES)
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
        qd_mpi_p2p_finish(op);
    else
        qd_mpi_coll_finish(op);
}

static bool op_late(const qd_transfer *op, int peer, qd_peer_report *report)
{
    bool p2p = op->request.kind == QD_COLL_SEND || op->request.kind == QD_COLL_RECV;
    return p2p ? qd_mpi_p2p_late(op, peer, report) : qd_mpi_coll_late(op, peer, report);
}

static const qd_comm_backend_ops mpi_backend = {
    .name = "mpi",
    .serialized = true,
    .start = op_start,
    .poll = op_poll,
    .finish = op_finish,
    .late = op_late,
    .board = board,
    .sleep_prepare = sleep_prepare,
    .sleep_cancel = sleep_cancel,
    .sleep = sleep_nap,
    .wake = sleep_wake,
    .abort = world_abort,
    .aborted = world_aborted,
    .at = world_at,
    .reserve_id = reserve_id,
    .release_id = release_id,
    .group_create = group_create,
    .group_destroy = group_destroy,
    .world_destroy = world_destroy,
};

/* Polls before a waiting thread yields: none where the ranks of this machine outnumber the cores
 * they may use together (mpirun may have bound each to a core of its own). */
static qd_status choose_spin(qd_mpi_world *world, MPI_Comm machine)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    sched_getaffinity(0, sizeof cores, &cores); /* on failure no core is known, and no rank spins */
    QD_TRY(qd_mpi_check(MPI_Allreduce(MPI_IN_PLACE, &cores, (int)sizeof cores, MPI_BYTE, MPI_BOR, machine), "MPI_Allreduce"));
    world->spin = world->where.local_ranks <= CPU_COUNT(&cores) ? SPIN_POLLS : 0;
    return QD_OK;
}

/* A machine is identified by its lowest rank; its index is the number of lower ones. */
static qd_status count_machines(qd_mpi_world *world, MPI_Comm machine)
{
    qd_comm_where *where = &world->where;
    MPI_Comm_rank(machine, &where->local_rank);
    MPI_Comm_size(machine, &where->local_ranks);
    int first = world->rank, *firsts = calloc((size_t)world->size, sizeof *firsts);
    if (!firsts)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", world->size);
    qd_status status = qd_mpi_check(MPI_Bcast(&first, 1, MPI_INT, 0, machine), "MPI_Bcast");
    if (status == QD_OK)
        status = qd_mpi_check(MPI_Allgather(&first, 1, MPI_INT, firsts, 1, MPI_INT, world->data), "MPI_Allgather");
    for (int r = 0; r < world->size && status == QD_OK; r++) {
        where->machines += firsts[r] == r;
        where->machine += firsts[r] == r && r < first;
    }
    free(firsts);
    return status;
}

/* Collective. Host names for messages. */
static qd_status name_hosts(qd_mpi_world *world)
{
    char own[256] = "?";
    if (world->where.machines == 1) /* the same on all ranks */
        return QD_OK;
    world->hosts = calloc((size_t)world->size, sizeof *world->hosts);
    if (!world->hosts)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", world->size);
    gethostname(own, sizeof own - 1);
    own[QD_COMM_HOST_BYTES - 1] = '\0';
    return qd_mpi_check(MPI_Allgather(own, QD_COMM_HOST_BYTES, MPI_CHAR, world->hosts, QD_COMM_HOST_BYTES, MPI_CHAR, world->data),
                        "MPI_Allgather");
}

static qd_status look_around(qd_mpi_world *world)
{
    MPI_Comm machine;
    QD_TRY(qd_mpi_check(MPI_Comm_split_type(world->data, MPI_COMM_TYPE_SHARED, world->rank, MPI_INFO_NULL, &machine),
                        "MPI_Comm_split_type"));
    qd_status status = count_machines(world, machine);
    if (status == QD_OK)
        status = choose_spin(world, machine);
    if (status == QD_OK)
        status = name_hosts(world);
    MPI_Comm_free(&machine);
    return status;
}

/* Creates the private communicators. On failure the caller frees the world. */
static qd_status world_open(qd_mpi_world *world)
{
    QD_TRY(qd_mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &world->data), "MPI_Comm_dup"));
    QD_TRY(qd_mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &world->control), "MPI_Comm_dup"));
    MPI_Comm_set_errhandler(world->data, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(world->control, MPI_ERRORS_RETURN);
    MPI_Comm_rank(world->data, &world->rank);
    MPI_Comm_size(world->data, &world->size);
    world->boards = calloc((size_t)world->size, sizeof *world->boards);
    world->asked = calloc((size_t)world->size, sizeof *world->asked);
    if (!world->boards || !world->asked)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", world->size);
    QD_TRY(look_around(world));
    int *most = NULL, found = 0;
    MPI_Comm_get_attr(world->data, MPI_TAG_UB, &most, &found);
    world->most_ids = (found ? *most : 32767) / QD_MPI_CHANNELS;
    return control_listen(world);
}

static qd_status mpi_begin(bool *ours)
{
    int initialized = 0, finalized = 0, provided = MPI_THREAD_SINGLE;
    MPI_Finalized(&finalized);
    if (finalized)
        return QD_FAIL(QD_USAGE, "MPI has ended in this process; a process can join an MPI world only once");
    MPI_Initialized(&initialized);
    *ours = !initialized;
    if (initialized)
        MPI_Query_thread(&provided);
    else
        QD_TRY(qd_mpi_check(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread"));
    if (provided >= MPI_THREAD_SERIALIZED)
        return QD_OK;
    if (*ours)
        MPI_Finalize();
    return QD_FAIL(QD_UNSUPPORTED, "this MPI library offers thread level %d only; MPI_THREAD_SERIALIZED (%d) is needed",
                   provided, MPI_THREAD_SERIALIZED);
}

bool qd_mpi_built(void)
{
    return true;
}

qd_status qd_mpi_comm_create(const qd_comm_config *config, qd_comm **comm)
{
    *comm = NULL;
    qd_comm_config chosen = qd_comm_config_default();
    if (config)
        QD_TRY(QD_SIZED_READ(config, qd_comm_config, &chosen));
    qd_mpi_world *world = calloc(1, sizeof *world);
    if (!world)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the MPI world");
    world->deadline = chosen.deadline_seconds;
    world->aborted_by = -1;
    world->incoming_request = MPI_REQUEST_NULL;
    pthread_mutex_init(&world->sleep_lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&world->sleep_wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    qd_status status = mpi_begin(&world->finalize);
    if (status == QD_OK)
        status = world_open(world);
    if (status != QD_OK) {
        qd_error_frame(__FILE__, __LINE__, __func__);
        world_free(world);
        return status;
    }
    return qd_comm_create_world(&mpi_backend, world, &chosen, world->rank, world->size, comm);
}
