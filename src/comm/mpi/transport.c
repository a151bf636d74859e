/* MPI as the transport of a remote world: start and end of MPI, and its messages.
 *
 * All traffic of a world uses one private duplicate of MPI_COMM_WORLD; control messages use a
 * second one. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "comm/mpi/mpi_impl.h"

#include "base/clock.h"
#include "base/sized.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct mpi_state {
    qd_remote_transport transport; /* with the number of groups that this library has tags for */
    MPI_Comm data, control;
    MPI_Request all; /* of the meeting at the end */
    bool finalize;   /* we initialized MPI, so we finalize it */
    int rank, size;
    qd_remote_mailbox mailbox; /* until the world has it */
} mpi_state;
_Static_assert(sizeof(MPI_Request) <= QD_REMOTE_REQUEST_BYTES, "the protocol keeps the requests");

qd_status qd_mpi_check(int code, const char *call)
{
    if (code == MPI_SUCCESS)
        return QD_OK;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return QD_FAIL(QD_SYSTEM, "%s failed: %s", call, text);
}

static void clear(void *requests, int count)
{
    for (int i = 0; i < count; i++)
        ((MPI_Request *)requests)[i] = MPI_REQUEST_NULL;
}

static MPI_Comm comm_of(const mpi_state *m, int64_t group)
{
    return group == QD_REMOTE_CONTROL ? m->control : m->data;
}

static int tag_of(int64_t group, int channel)
{
    return group == QD_REMOTE_CONTROL ? 0 : (int)(group * QD_REMOTE_CHANNELS + channel);
}

static qd_status mpi_send(void *self, int to, int64_t group, int channel, const void *data, int64_t bytes, void *requests, int index)
{
    const mpi_state *m = self;
    return qd_mpi_check(
        MPI_Isend(data, (int)bytes, MPI_BYTE, to, tag_of(group, channel), comm_of(m, group), (MPI_Request *)requests + index),
        "MPI_Isend");
}

static qd_status mpi_recv(void *self, int from, int64_t group, int channel, void *data, int64_t bytes, void *requests, int index)
{
    const mpi_state *m = self;
    return qd_mpi_check(MPI_Irecv(data, (int)bytes, MPI_BYTE, from == QD_REMOTE_ANY ? MPI_ANY_SOURCE : from, tag_of(group, channel),
                                  comm_of(m, group), (MPI_Request *)requests + index),
                        "MPI_Irecv");
}

static qd_status test(void *self, void *requests, int index, bool *done)
{
    int flag = 0;
    (void)self;
    QD_TRY(qd_mpi_check(MPI_Test((MPI_Request *)requests + index, &flag, MPI_STATUS_IGNORE), "MPI_Test"));
    *done = flag;
    return QD_OK;
}

static qd_status test_some(void *self, void *requests, int count, int *completed, int *indices)
{
    (void)self;
    QD_TRY(qd_mpi_check(MPI_Testsome(count, requests, completed, indices, MPI_STATUSES_IGNORE), "MPI_Testsome"));
    if (*completed == MPI_UNDEFINED) /* no request is active */
        *completed = 0;
    return QD_OK;
}

static bool give_up(void *self, void *array, int count)
{
    MPI_Request *requests = array;
    bool any = false;
    (void)self;
    for (int i = 0; i < count; i++) {
        if (requests[i] == MPI_REQUEST_NULL)
            continue;
        any = true;
        /* Harmless for sends: the library may refuse, and the request is then unaffected. */
        MPI_Cancel(&requests[i]);
    }
    for (double end = qd_clock_now() + 0.1; any && qd_clock_now() < end; sched_yield()) {
        int flag = 0;
        if (MPI_Testall(count, requests, &flag, MPI_STATUSES_IGNORE) != MPI_SUCCESS)
            break;
        any = !flag;
    }
    for (int i = 0; any && i < count; i++)
        if (requests[i] != MPI_REQUEST_NULL)
            MPI_Request_free(&requests[i]);
    return !any;
}

static bool meet(void *self, bool *done)
{
    mpi_state *m = self;
    int flag = 0;
    if (m->all == MPI_REQUEST_NULL && MPI_Ibarrier(m->control, &m->all) != MPI_SUCCESS)
        return false;
    if (MPI_Test(&m->all, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return false;
    *done = flag;
    return true;
}

/* Without the others, freeing communicators or MPI_Finalize could block forever. The process then
 * ends without them (qd_mpi_end), and the launcher reports a failure. */
static void mpi_close(void *self, bool met, bool dirty)
{
    mpi_state *m = self;
    (void)dirty;
    if (met) {
        MPI_Comm_free(&m->control);
        MPI_Comm_free(&m->data);
    }
    if (met && m->finalize)
        MPI_Finalize();
    free(m);
}

static const qd_remote_transport mpi_transport = {
    .name = "mpi",
    .clear = clear,
    .send = mpi_send,
    .recv = mpi_recv,
    .test = test,
    .test_some = test_some,
    .give_up = give_up,
    .meet = meet,
    .close = mpi_close,
    .carry_most = QD_REMOTE_CARRY_LEAST,
};

/* Collective: a machine is known by its lowest rank. */
static qd_status gather_facts(mpi_state *m, qd_remote_facts *facts)
{
    MPI_Comm machine;
    qd_remote_facts own;
    int first = m->rank;
    qd_remote_facts_find(&own, &m->mailbox);
    QD_TRY(qd_mpi_check(MPI_Comm_split_type(m->data, MPI_COMM_TYPE_SHARED, m->rank, MPI_INFO_NULL, &machine), "MPI_Comm_split_type"));
    qd_status status = qd_mpi_check(MPI_Bcast(&first, 1, MPI_INT, 0, machine), "MPI_Bcast");
    MPI_Comm_free(&machine);
    snprintf(own.machine, sizeof own.machine, "%d", first);
    if (status == QD_OK)
        status = qd_mpi_check(MPI_Allgather(&own, sizeof own, MPI_BYTE, facts, sizeof own, MPI_BYTE, m->data), "MPI_Allgather");
    return status;
}

static qd_status state_open(mpi_state *m)
{
    QD_TRY(qd_mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &m->data), "MPI_Comm_dup"));
    QD_TRY(qd_mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &m->control), "MPI_Comm_dup"));
    MPI_Comm_set_errhandler(m->data, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(m->control, MPI_ERRORS_RETURN);
    MPI_Comm_rank(m->data, &m->rank);
    MPI_Comm_size(m->data, &m->size);
    int *most = NULL, found = 0;
    MPI_Comm_get_attr(m->data, MPI_TAG_UB, &most, &found);
    m->transport.most_groups = (found ? *most : 32767) / QD_REMOTE_CHANNELS;
    return QD_OK;
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
    qd_remote_facts *facts = NULL;
    if (config)
        QD_TRY(QD_SIZED_READ(config, qd_comm_config, &chosen));
    mpi_state *m = calloc(1, sizeof *m);
    if (!m)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the MPI world");
    m->transport = mpi_transport;
    m->all = MPI_REQUEST_NULL;
    qd_status status = QD_OK;
    QD_TRY_DONE(mpi_begin(&m->finalize));
    QD_TRY_DONE(state_open(m));
    facts = calloc((size_t)m->size, sizeof *facts);
    if (!facts)
        QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", m->size));
    QD_TRY_DONE(gather_facts(m, facts));
    mpi_state *used = m;
    m = NULL; /* the world's from here on */
    status = qd_remote_create(&used->transport, used, facts, used->mailbox, used->rank, used->size, &chosen, comm);
done:
    if (m)
        qd_remote_mailbox_close(m->mailbox);
    free(facts);
    free(m);
    return status;
}
