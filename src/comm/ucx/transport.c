/* UCX as the transport of a remote world: shared memory between ranks of a machine, TCP or a faster
 * network between machines. The ranks meet without a launcher (rendezvous/), whose connections also
 * tell when the process of a rank has ended. */
#define _GNU_SOURCE
#include "comm/ucx/ucx_impl.h"

#include "base/clock.h"
#include "base/sized.h"

#include <dirent.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* A tag: 1 bit control, 20 bits sender, 3 bits channel, 40 bits group. */
enum { SENDER_BITS = 20, CHANNEL_BITS = 3, GROUP_BITS = 40 };
#define CONTROL_TAG ((uint64_t)1 << 63)
#define WIRE_GROUP (((int64_t)1 << GROUP_BITS) - 1) /* of the first message between two ranks */
_Static_assert(QD_REMOTE_CHANNELS <= 1 << CHANNEL_BITS, "a channel must fit into a tag");

/* A request is a word: one of these, or UCX's pointer, at which UCX keeps a place for the rank of
 * the peer. BROKEN: it will never end, because the peer is lost; the world fails as soon as it is
 * known why. */
enum { UNUSED, ENDED, BROKEN, MOST_WORDS };

#define LOST_SECONDS 1.0   /* what the rendezvous reports about a broken connection comes first */
#define REPORT_SECONDS 0.5 /* a rank of the same machine may know more about a lost one, and report it */
#define GIVE_UP_SECONDS 0.1
#define PROGRESS_MOST 8
#define CARRY_MOST ((int64_t)64 << 10) /* a message of its own for the head costs more than copying the payload */
/* Messages of this size and longer are announced, and fetched when a receive waits for them. */
#define EAGER_MOST "524288"

typedef struct ucx_state ucx_state;
typedef struct ucx_peer {
    ucx_state *state;
    ucp_ep_h ep;
    bool tcp;    /* it is on another machine, and neither has a faster network */
    bool broken; /* the connection to it */
} ucx_peer;

/* What ranks tell each other when they meet; the address of UCX follows. */
typedef struct ucx_facts {
    qd_remote_facts facts;
    bool rdma; /* the machine has a network that reads the memory of another by itself */
} ucx_facts;

struct ucx_state {
    ucp_context_h context;
    ucp_worker_h worker;
    qd_rendezvous *meeting;
    qd_ucx_ports ports;
    qd_remote_mailbox mailbox; /* until the world has it */
    ucx_peer *peers; /* (size) */
    int rank, size;
    int broken; /* the first rank whose connection broke, or -1 */
    double broken_at;
    ucs_status_t broken_how;
    double lost_at; /* when the rendezvous reported the loss of a rank; 0: not yet */
};

qd_status qd_ucx_check(ucs_status_t status, const char *call)
{
    if (status == UCS_OK)
        return QD_OK;
    return QD_FAIL(QD_SYSTEM, "%s failed: %s", call, ucs_status_string(status));
}

static uint64_t tag_of(int64_t group, int channel, int sender)
{
    if (group == QD_REMOTE_CONTROL)
        return CONTROL_TAG;
    return (uint64_t)sender << (CHANNEL_BITS + GROUP_BITS) | (uint64_t)channel << GROUP_BITS | (uint64_t)group;
}

static void peer_broken(ucx_state *u, int rank, ucs_status_t how)
{
    if (u->broken >= 0)
        return;
    u->broken = rank;
    u->broken_how = how;
    u->broken_at = qd_clock_now();
}

static void on_error(void *argument, ucp_ep_h ep, ucs_status_t status)
{
    ucx_peer *peer = argument;
    (void)ep;
    peer->broken = true;
    peer_broken(peer->state, (int)(peer - peer->state->peers), status);
}

static void progress(ucx_state *u)
{
    for (int i = 0; i < PROGRESS_MOST && ucp_worker_progress(u->worker); i++)
        continue;
}

static void clear(void *requests, int count)
{
    memset(requests, 0, (size_t)count * sizeof(uint64_t));
}

/* What a call of UCX has returned, as a request. */
static uint64_t request_from(ucx_state *u, ucs_status_ptr_t begun, int peer)
{
    if (begun == NULL)
        return ENDED;
    if (!UCS_PTR_IS_ERR(begun)) {
        *(int *)begun = peer;
        return (uint64_t)(uintptr_t)begun;
    }
    if (peer >= 0)
        peer_broken(u, peer, UCS_PTR_STATUS(begun));
    return BROKEN;
}

static qd_status ucx_send(void *self, int to, int64_t group, int channel, const void *data, int64_t bytes, void *requests, int index)
{
    ucx_state *u = self;
    ucp_request_param_t how = {.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE, .memory_type = UCS_MEMORY_TYPE_HOST};
    ((uint64_t *)requests)[index] =
        request_from(u, ucp_tag_send_nbx(u->peers[to].ep, data, (size_t)bytes, tag_of(group, channel, u->rank), &how), to);
    return QD_OK;
}

static qd_status ucx_recv(void *self, int from, int64_t group, int channel, void *data, int64_t bytes, void *requests, int index)
{
    ucx_state *u = self;
    ucp_request_param_t how = {.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE, .memory_type = UCS_MEMORY_TYPE_HOST};
    ((uint64_t *)requests)[index] =
        request_from(u, ucp_tag_recv_nbx(u->worker, data, (size_t)bytes, tag_of(group, channel, from), ~(uint64_t)0, &how), from);
    return QD_OK;
}

static void *pointer_of(uint64_t request)
{
    return (void *)(uintptr_t)request;
}

/* *done: the request has ended and is unused again. */
static qd_status settle(uint64_t *request, bool *done)
{
    *done = *request <= ENDED;
    if (*request < MOST_WORDS) {
        *request = *done ? UNUSED : *request;
        return QD_OK;
    }
    void *pending = pointer_of(*request);
    ucs_status_t status = ucp_request_check_status(pending);
    if (status == UCS_INPROGRESS)
        return QD_OK;
    ucp_request_free(pending);
    *request = UNUSED;
    if (status == UCS_ERR_MESSAGE_TRUNCATED)
        return QD_FAIL(QD_SYSTEM, "UCX received a message that is longer than the one that belongs here");
    *done = status == UCS_OK || status == UCS_ERR_CANCELED;
    if (!*done) /* on_error() tells which peer it is */
        *request = BROKEN;
    return QD_OK;
}

static qd_status check_peers(const ucx_state *u)
{
    if (u->broken < 0 || qd_clock_now() - u->broken_at < LOST_SECONDS)
        return QD_OK;
    return QD_FAIL(QD_SYSTEM, "the connection to rank %d is broken: %s", u->broken, ucs_status_string(u->broken_how));
}

static qd_status test(void *self, void *requests, int index, bool *done)
{
    progress(self);
    QD_TRY(check_peers(self));
    return settle((uint64_t *)requests + index, done);
}

static qd_status test_some(void *self, void *array, int count, int *completed, int *indices)
{
    uint64_t *requests = array;
    *completed = 0;
    progress(self);
    QD_TRY(check_peers(self));
    for (int i = 0; i < count; i++) {
        bool done = false;
        if (requests[i] == UNUSED)
            continue;
        QD_TRY(settle(&requests[i], &done));
        if (done)
            indices[(*completed)++] = i;
    }
    return QD_OK;
}

/* Whether the peer is reached over TCP and its connection is broken, so that nothing arrives any
 * more. */
static bool is_cut(const ucx_state *u, int peer)
{
    return peer >= 0 && u->peers[peer].tcp && u->peers[peer].broken;
}

static bool give_up(void *self, void *array, int count)
{
    ucx_state *u = self;
    uint64_t *requests = array;
    bool any = false;
    for (int i = 0; i < count; i++) {
        if (requests[i] < MOST_WORDS)
            requests[i] = UNUSED;
        else
            ucp_request_cancel(u->worker, pointer_of(requests[i])); /* of receives; sends continue */
    }
    for (double end = qd_clock_now() + GIVE_UP_SECONDS;; sched_yield()) {
        any = false;
        progress(u);
        for (int i = 0; i < count; i++) {
            void *pending = pointer_of(requests[i]);
            if (requests[i] < MOST_WORDS)
                continue;
            if (ucp_request_check_status(pending) != UCS_INPROGRESS) {
                ucp_request_free(pending);
            } else if (!is_cut(u, *(int *)pending)) {
                any = true;
                continue;
            }
            requests[i] = UNUSED;
        }
        if (!any || qd_clock_now() > end)
            return !any;
    }
}

static bool meet(void *self, bool *done)
{
    ucx_state *u = self;
    progress(u); /* the last messages of this rank leave */
    *done = qd_rendezvous_leave(u->meeting);
    return true;
}

static bool lost(void *self, int *rank, char *why, size_t bytes)
{
    ucx_state *u = self;
    if (!qd_rendezvous_lost(u->meeting, rank))
        return false;
    if (u->lost_at == 0)
        u->lost_at = qd_clock_now();
    if (qd_clock_now() - u->lost_at < REPORT_SECONDS)
        return false;
    snprintf(why, bytes, "its process has ended (killed, or its machine is gone)");
    return true;
}

/* Ends connections without notice to the peer: who is still there knows from the rendezvous. */
static void close_peers(ucx_state *u)
{
    ucp_request_param_t how = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    for (int p = 0; u->peers && p < u->size; p++) {
        if (!u->peers[p].ep || u->peers[p].tcp) /* those over TCP end with the worker */
            continue;
        ucs_status_ptr_t closing = ucp_ep_close_nbx(u->peers[p].ep, &how);
        double end = qd_clock_now() + GIVE_UP_SECONDS;
        if (!closing || UCS_PTR_IS_ERR(closing))
            continue;
        while (ucp_request_check_status(closing) == UCS_INPROGRESS && qd_clock_now() < end)
            progress(u);
        ucp_request_free(closing);
    }
}

static void ucx_close(void *self, bool met, bool dirty)
{
    ucx_state *u = self;
    (void)met;
    if (!dirty) { /* else UCX may still use our buffers, until the process ends */
        if (u->worker) {
            close_peers(u);
            ucp_worker_destroy(u->worker);
        }
        if (u->context)
            ucp_cleanup(u->context);
    }
    qd_rendezvous_close(u->meeting);
    qd_ucx_ports_free(&u->ports);
    if (dirty)
        return;
    free(u->peers);
    free(u);
}

static const qd_remote_transport ucx_transport = {
    .name = "ucx",
    .clear = clear,
    .send = ucx_send,
    .recv = ucx_recv,
    .test = test,
    .test_some = test_some,
    .give_up = give_up,
    .meet = meet,
    .lost = lost,
    .close = ucx_close,
    .most_groups = WIRE_GROUP,
    .carry_most = CARRY_MOST,
};

/* Whether the user has left a setting of UCX at its default. */
static bool is_default(const ucp_config_t *config, const char *line)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (!stream)
        return true;
    ucp_config_print(config, stream, "", UCS_CONFIG_PRINT_CONFIG);
    fclose(stream);
    bool found = text && strstr(text, line) != NULL;
    free(text);
    return found;
}

/* Whether this machine has a network that reads the memory of another by itself. */
static bool has_rdma(void)
{
    DIR *devices = opendir("/sys/class/infiniband");
    bool any = false;
    for (struct dirent *entry; devices && !any && (entry = readdir(devices));)
        any = entry->d_name[0] != '.';
    if (devices)
        closedir(devices);
    return any;
}

/* Settings that an older or newer UCX may not know change nothing else. */
static qd_status choose(ucp_config_t *config, const char *interface)
{
    static const char *const settings[][2] = {
        {"MM_ERROR_HANDLING", "y"},    /* shared memory although the death of a peer is reported */
        {"KEEPALIVE_INTERVAL", "inf"}, /* a network that is gone for a while is no death: deadlines are the core's */
        {"KEEPIDLE", "inf"},           /* the same, of TCP */
        {"RX_SEG_SIZE", "131072"},     /* of TCP: longer messages arrive in fewer pieces */
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        ucp_config_modify(config, settings[i][0], settings[i][1]);
    /* Over TCP, and in shared memory, asking first costs more than the copy that it saves
     * (docs/notes/transports.md). */
    if (!has_rdma() && is_default(config, "UCX_RNDV_THRESH=auto\n"))
        ucp_config_modify(config, "RNDV_THRESH", EAGER_MOST);
    if (interface[0] != '\0' && is_default(config, "UCX_NET_DEVICES=all\n"))
        return qd_ucx_check(ucp_config_modify(config, "NET_DEVICES", interface), "ucp_config_modify");
    return QD_OK;
}

static qd_status start(ucx_state *u)
{
    ucp_config_t *config = NULL;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS | UCP_PARAM_FIELD_MT_WORKERS_SHARED |
                                         UCP_PARAM_FIELD_REQUEST_SIZE,
                           .features = UCP_FEATURE_TAG,
                           .request_size = sizeof(int), /* the rank of the peer */
                           .estimated_num_eps = (size_t)u->size};
    ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    QD_TRY(qd_ucx_ports_begin(&u->ports));
    QD_TRY(qd_ucx_check(ucp_config_read(NULL, NULL, &config), "ucp_config_read"));
    qd_status status = choose(config, qd_rendezvous_interface(u->meeting));
    if (status == QD_OK)
        status = qd_ucx_check(ucp_init(&params, config, &u->context), "ucp_init");
    ucp_config_release(config);
    QD_TRY(status);
    QD_TRY(qd_ucx_check(ucp_worker_create(u->context, &worker, &u->worker), "ucp_worker_create"));
    return qd_ucx_ports_find(&u->ports);
}

static void find_machine(char *text, size_t bytes)
{
    char boot[48] = "";
    struct stat memory = {0};
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file && !fgets(boot, sizeof boot, file))
        boot[0] = '\0';
    if (file)
        fclose(file);
    boot[strcspn(boot, "\n")] = '\0';
    stat("/proc/self/ns/ipc", &memory); /* containers share memory only within one */
    snprintf(text, bytes, "%.36s %lx", boot, (unsigned long)memory.st_ino);
}

/* Exchanges addresses and makes the connections' ends. */
static qd_status introduce(ucx_state *u, qd_remote_facts *facts)
{
    ucp_address_t *address = NULL;
    size_t length = 0;
    ucx_facts own = {.rdma = has_rdma()};
    qd_rendezvous_table table = {0};
    unsigned char *blob = NULL;
    qd_status status = QD_OK;
    qd_remote_facts_find(&own.facts, &u->mailbox);
    find_machine(own.facts.machine, sizeof own.facts.machine);
    QD_TRY(qd_ucx_check(ucp_worker_get_address(u->worker, &address, &length), "ucp_worker_get_address"));
    if (length + sizeof own > (size_t)QD_RENDEZVOUS_BLOB_MOST)
        QD_TRY_DONE(QD_FAIL(QD_UNSUPPORTED, "the address that UCX gives this rank has %zu bytes: choose one network with UCX_NET_DEVICES",
                            length));
    blob = malloc(sizeof own + length);
    if (!blob)
        QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for the address of rank %d", u->rank));
    memcpy(blob, &own, sizeof own);
    memcpy(blob + sizeof own, address, length);
    QD_TRY_DONE(qd_rendezvous_exchange(u->meeting, blob, (int64_t)(sizeof own + length), &table));
    u->rank = qd_rendezvous_rank(u->meeting);
    u->size = qd_rendezvous_size(u->meeting);
    for (int p = 0; p < u->size; p++) {
        const unsigned char *at = table.bytes + table.offsets[p];
        if (table.offsets[p + 1] - table.offsets[p] <= (int64_t)sizeof own)
            QD_TRY_DONE(QD_FAIL(QD_REMOTE, "rank %d has sent no address", p));
        ucx_facts theirs;
        memcpy(&theirs, at, sizeof theirs);
        facts[p] = theirs.facts;
        facts[p].host[sizeof facts[p].host - 1] = '\0';
        u->peers[p].state = u;
        u->peers[p].tcp = !own.rdma && !theirs.rdma &&
                          memcmp(own.facts.machine, facts[p].machine, sizeof own.facts.machine) != 0;
        ucp_ep_params_t ep = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = (const ucp_address_t *)(const void *)(at + sizeof own),
                              /* With the other mode UCX receives over TCP into a buffer of its own
                               * first. It reports broken connections in both. */
                              .err_mode = u->peers[p].tcp ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_error, .arg = &u->peers[p]}};
        if (p == 0) { /* all ranks have made theirs: whoever comes first finds the others ready */
            qd_rendezvous_table none;
            QD_TRY_DONE(qd_rendezvous_exchange(u->meeting, "", 0, &none));
            qd_rendezvous_table_free(&none);
            qd_ucx_ports_open(&u->ports, true);
            QD_TRY_DONE(qd_rendezvous_exchange(u->meeting, "", 0, &none));
            qd_rendezvous_table_free(&none);
        }
        QD_TRY_DONE(qd_ucx_check(ucp_ep_create(u->worker, &ep, &u->peers[p].ep), "ucp_ep_create"));
    }
done:
    ucp_worker_release_address(u->worker, address);
    qd_rendezvous_table_free(&table);
    free(blob);
    return status;
}

/* One message to and from every rank: all connections are made. */
static qd_status wire(ucx_state *u, double seconds)
{
    int n = u->size, left = 2 * n;
    uint64_t *requests = calloc(2 * (size_t)n, sizeof *requests), *words = calloc(2 * (size_t)n, sizeof *words);
    int *indices = calloc(2 * (size_t)n, sizeof *indices);
    qd_status status = requests && words && indices ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to connect %d ranks", n);
    for (int p = 0; p < n && status == QD_OK; p++) {
        status = ucx_recv(u, p, WIRE_GROUP, 0, &words[p], sizeof *words, requests, p);
        if (status == QD_OK)
            status = ucx_send(u, p, WIRE_GROUP, 0, &words[n + p], sizeof *words, requests, n + p);
    }
    for (double begin = qd_clock_now(); status == QD_OK && left > 0; sched_yield()) {
        int completed = 0;
        status = test_some(u, requests, 2 * n, &completed, indices);
        left -= completed;
        if (status != QD_OK || (u->broken < 0 && qd_clock_now() - begin < seconds))
            continue;
        int rank = 0;
        while (rank + 1 < n && requests[rank] == UNUSED && requests[n + rank] == UNUSED)
            rank++;
        status = QD_FAIL(u->broken < 0 ? QD_TIMEOUT : QD_SYSTEM, "rank %d cannot connect to rank %d over interface %s: %s", u->rank, rank,
                         qd_rendezvous_interface(u->meeting), u->broken < 0 ? "no answer" : ucs_status_string(u->broken_how));
    }
    if (left > 0 && requests && !give_up(u, requests, 2 * n))
        return status; /* UCX may still use them */
    free(requests);
    free(words);
    free(indices);
    return status;
}

/* Whatever has come in is from strangers: the ranks have sent nothing else yet. */
static void discard_messages(ucx_state *u)
{
    ucp_tag_recv_info_t info;
    ucp_tag_message_h message;
    progress(u);
    while ((message = ucp_tag_probe_nb(u->worker, 0, 0, 1, &info))) {
        ucp_request_param_t how = {0};
        void *room = malloc(info.length ? info.length : 1);
        ucs_status_ptr_t reading = room ? ucp_tag_msg_recv_nbx(u->worker, room, info.length, message, &how) : NULL;
        double end = qd_clock_now() + GIVE_UP_SECONDS;
        bool pending = reading && !UCS_PTR_IS_ERR(reading);
        while (pending && ucp_request_check_status(reading) == UCS_INPROGRESS && qd_clock_now() < end)
            progress(u);
        if (!pending || ucp_request_check_status(reading) != UCS_INPROGRESS)
            free(room);
        if (pending)
            ucp_request_free(reading);
    }
}

static qd_status join_all(ucx_state *u, double seconds, qd_remote_facts *facts)
{
    qd_rendezvous_table none;
    QD_TRY(start(u));
    QD_TRY(introduce(u, facts));
    QD_TRY(wire(u, seconds));
    QD_TRY(qd_rendezvous_exchange(u->meeting, "", 0, &none));
    qd_rendezvous_table_free(&none);
    qd_ucx_ports_open(&u->ports, false);
    QD_TRY(qd_ucx_ports_cut_strangers(&u->ports, u->meeting));
    discard_messages(u);
    QD_TRY(qd_rendezvous_exchange(u->meeting, "", 0, &none));
    qd_rendezvous_table_free(&none);
    return qd_rendezvous_watch(u->meeting);
}

bool qd_ucx_built(void)
{
    return true;
}

qd_status qd_ucx_comm_create(const qd_comm_config *config, const qd_comm_join *join, qd_comm **comm)
{
    qd_comm_config chosen = qd_comm_config_default();
    qd_comm_join how = qd_comm_join_default();
    qd_status status = QD_OK;
    *comm = NULL;
    if (config)
        QD_TRY(QD_SIZED_READ(config, qd_comm_config, &chosen));
    QD_TRY(QD_SIZED_READ(join, qd_comm_join, &how));
    if (how.ranks > 1 << SENDER_BITS)
        return QD_FAIL(QD_UNSUPPORTED, "a world over UCX has at most %d ranks", 1 << SENDER_BITS);
    QD_TRY(qd_ucx_load());
    ucx_state *u = calloc(1, sizeof *u);
    qd_remote_facts *facts = how.ranks > 0 ? calloc((size_t)how.ranks, sizeof *facts) : NULL;
    if (!u || (!facts && how.ranks > 0)) {
        free(u);
        return QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", how.ranks);
    }
    u->rank = how.rank;
    u->size = how.ranks;
    u->broken = -1;
    QD_TRY_DONE(qd_rendezvous_open(&how, &u->meeting));
    if (!u->meeting) /* the run has ended */
        goto done;
    u->peers = calloc((size_t)u->size, sizeof *u->peers);
    if (!u->peers)
        QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for a world of %d ranks", how.ranks));
    QD_TRY_DONE(join_all(u, how.seconds, facts));
    ucx_state *used = u;
    u = NULL; /* the world's from here on */
    status = qd_remote_create(&ucx_transport, used, facts, used->mailbox, used->rank, used->size, &chosen, comm);
done:
    if (u) {
        qd_remote_mailbox_close(u->mailbox);
        ucx_close(u, false, false);
    }
    free(facts);
    return status;
}
