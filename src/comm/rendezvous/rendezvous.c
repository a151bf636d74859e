/* The meeting of all ranks: exchanges through rank 0 and the thread that watches the
 * connections. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "comm/rendezvous/meeting.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#define MESSAGE_MOST ((int64_t)1 << 30) /* bytes; lengths are sent in 32 bits */
#define SEND_SECONDS 5.0 /* for a message of the watching thread */
#define SLACK_SECONDS 10.0 /* rank 0 does not count time in which it was kept from running */
#define STOP_SECONDS 0.2 /* between two questions whether to stop */
#define SECRET_LEAST 16  /* bytes: a shorter secret can be found by trying */
enum { OTHER_FILES = 64 }; /* that a rank has open, at least */

static qd_status check(const qd_comm_join *join)
{
    if (join->ranks < 1 || join->rank < 0 || join->rank >= join->ranks)
        return QD_FAIL(QD_USAGE, "rank %d of %d does not exist: ranks are 0 to %d", join->rank, join->ranks, join->ranks - 1);
    if (!join->address || join->address[0] == '\0' || join->port < 1 || join->port > 65535)
        return QD_FAIL(QD_USAGE, "the address of rank 0 is '%s' port %d: it must be a host name or an address, and a port from 1 to 65535",
                       join->address ? join->address : "", join->port);
    if (join->secret_bytes > 0 && join->secret_bytes < SECRET_LEAST)
        return QD_FAIL(QD_USAGE, "the secret of the world has %lld bytes and needs at least %d: make one with 'openssl rand -hex 32'",
                       (long long)join->secret_bytes, SECRET_LEAST);
    return QD_OK;
}

qd_status qd_rendezvous_unprotected(const qd_comm_join *join)
{
    return QD_FAIL(QD_USAGE,
                   "the ranks meet at %s, which other machines reach, and there is no secret that keeps strangers out: set "
                   "run.secret_file, or the variable QUADRILLE_SECRET, to the same on all ranks (docs/clusters.md)",
                   join->address);
}

/* Rank 0 is connected to every rank here, and over TCP every rank to every other one. The soft
 * limit on open files is often 1024; the hard one is what the system allows. */
static qd_status allow_connections(const qd_comm_join *join)
{
    const rlim_t least = (rlim_t)join->ranks + OTHER_FILES, most = 2 * (rlim_t)join->ranks + STRANGERS_MOST + OTHER_FILES;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return QD_OK;
    if (limit.rlim_cur < most) {
        limit.rlim_cur = limit.rlim_max < most ? limit.rlim_max : most;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (join->rank > 0 || limit.rlim_cur >= least)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "rank 0 is connected to %d ranks and may have %lld files open: raise the limit (ulimit -n) to %lld",
                   join->ranks, (long long)limit.rlim_cur, (long long)most);
}

qd_status qd_rendezvous_open(const qd_comm_join *join, qd_rendezvous **out)
{
    bool over = false;
    *out = NULL;
    QD_TRY(check(join));
    QD_TRY(allow_connections(join));
    qd_rendezvous *r = calloc(1, sizeof *r);
    if (!r)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the rendezvous of %d ranks", join->ranks);
    r->rank = join->rank;
    r->size = join->ranks;
    r->keyed = join->secret_bytes > 0;
    r->seconds = join->seconds;
    r->stops = join->stops;
    r->context = join->context;
    r->stays = join->stays;
    r->door = join->rank == 0 ? join->door : NULL;
    r->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    r->peers = calloc((size_t)r->size, sizeof *r->peers);
    for (int p = 0; r->peers && p < r->size; p++)
        r->peers[p].fd = -1;
    qd_status status = !r->peers      ? QD_FAIL(QD_NO_MEMORY, "no memory for the rendezvous of %d ranks", join->ranks)
                       : r->kick < 0 ? QD_FAIL(QD_SYSTEM, "no event for the rendezvous: %s", strerror(errno))
                                      : qd_handshake_key(join->secret, (size_t)join->secret_bytes, r->key);
    if (status == QD_OK)
        status = r->rank == 0 ? qd_rendezvous_listen(r, join) : qd_rendezvous_connect(r, join, &over);
    if (status != QD_OK || over) {
        if (status != QD_OK)
            qd_error_frame(__FILE__, __LINE__, __func__);
        qd_rendezvous_close(r);
        return status;
    }
    *out = r;
    return QD_OK;
}

int qd_rendezvous_rank(const qd_rendezvous *r)
{
    return r->rank;
}

int qd_rendezvous_size(const qd_rendezvous *r)
{
    return r->size;
}

bool qd_rendezvous_stops(const qd_rendezvous *r)
{
    return r->stops && r->stops(r->context);
}

const char *qd_rendezvous_interface(const qd_rendezvous *r)
{
    return r->interface;
}

void qd_rendezvous_table_free(qd_rendezvous_table *table)
{
    free(table->bytes);
    free(table->offsets);
    *table = (qd_rendezvous_table){0};
}

/* Before the blobs: QD_SAYS_TABLE, 3 bytes of nothing, the rank of the receiver (4), the number of
 * ranks and the offsets. */
static int64_t head_bytes(int size)
{
    return 16 + 8 * ((int64_t)size + 1);
}

/* Rank 0's part. */
static qd_status gather(qd_rendezvous *r, const void *blob, int64_t bytes, unsigned char **message, int64_t *length)
{
    const int64_t head = head_bytes(r->size), size = r->size;
    int64_t at = 0;
    double end = qd_clock_now() + r->seconds;
    unsigned char *all = calloc(1, (size_t)(head + bytes));
    if (!all)
        return QD_FAIL(QD_NO_MEMORY, "no memory for what %d ranks exchange", r->size);
    memcpy(all + 8, &size, sizeof size);
    memcpy(all + head, blob, (size_t)bytes);
    at = bytes;
    memcpy(all + 24, &at, sizeof at);
    for (int p = 1; p < r->size; p++) {
        unsigned char *part;
        int64_t part_bytes;
        const char *why = "";
        if (!qd_peer_receive(&r->peers[p], QD_RENDEZVOUS_BLOB_MOST, end, &part, &part_bytes, &why)) {
            free(all);
            return QD_FAIL(QD_SYSTEM, "rank %d was lost at the start: %s", p, why);
        }
        unsigned char *more = realloc(all, (size_t)(head + at + part_bytes));
        if (!more) {
            free(part);
            free(all);
            return QD_FAIL(QD_NO_MEMORY, "no memory for what %d ranks exchange", r->size);
        }
        all = more;
        memcpy(all + head + at, part, (size_t)part_bytes);
        free(part);
        at += part_bytes;
        if (head + at > MESSAGE_MOST) {
            free(all);
            return QD_FAIL(QD_UNSUPPORTED, "ranks 0 to %d exchange more than %lld bytes at the start: the world of %d ranks is too large",
                           p, (long long)MESSAGE_MOST, r->size);
        }
        memcpy(all + 24 + 8 * p, &at, sizeof at);
    }
    *message = all;
    *length = head + at;
    return QD_OK;
}

static qd_status send_all(qd_rendezvous *r, unsigned char *message, int64_t length)
{
    double end = qd_clock_now() + r->seconds;
    qd_status status = QD_OK;
    for (int p = 1; p < r->size; p++) {
        const char *why = "";
        memcpy(message + 4, &(int32_t){p}, 4);
        if (!qd_peer_send(&r->peers[p], message, length, end, &why) && status == QD_OK)
            status = QD_FAIL(QD_SYSTEM, "rank %d was lost at the start: %s", p, why);
    }
    return status;
}

bool qd_rendezvous_say(qd_peer *peer, int what, qd_status status, const char *text, double seconds)
{
    const char *why;
    unsigned char message[QD_ERROR_MESSAGE_BYTES + 2] = {(unsigned char)what, (unsigned char)status};
    snprintf((char *)message + 2, sizeof message - 2, "%s", text);
    return qd_peer_send(peer, message, 2 + (int64_t)strlen((char *)message + 2), qd_clock_now() + seconds, &why);
}

/* The others wait for the table. */
static void send_failure(qd_rendezvous *r, qd_status status)
{
    for (int p = 1; p < r->size; p++)
        if (r->peers[p].fd >= 0)
            qd_rendezvous_say(&r->peers[p], QD_SAYS_FAILED, status, qd_error_message(), 1.0);
}

static qd_status receive_table(qd_rendezvous *r, unsigned char **message, int64_t *length)
{
    const char *why = "";
    const int64_t most = head_bytes(r->size) + QD_RENDEZVOUS_BLOB_MOST * r->size;
    const double end = qd_clock_now() + 2 * r->seconds + SLACK_SECONDS;
    while (!r->met && qd_clock_now() < end && !qd_socket_readable(r->peers[0].fd, STOP_SECONDS)) /* others may be missing */
        if (qd_rendezvous_stops(r))
            return QD_FAIL(QD_INTERRUPTED, "interrupted while rank %d, at rank 0, waited for other ranks", r->rank);
    if (!qd_peer_receive(&r->peers[0], most < MESSAGE_MOST ? most : MESSAGE_MOST, end, message, length, &why))
        return QD_FAIL(QD_SYSTEM, "rank 0, at %s, was lost at the start: %s", r->where, why);
    if (*length > 0 && (*message)[0] == QD_SAYS_TABLE)
        return QD_OK;
    const bool again = *length > 1 && (*message)[1] == QD_SYSTEM, away = *length > 0 && (*message)[0] == QD_SAYS_AWAY;
    qd_status status = QD_FAIL(away ? QD_USAGE : again ? QD_SYSTEM : QD_REMOTE, "%s",
                               *length > 2 ? (char *)*message + 2 : "rank 0 has failed at the start");
    free(*message);
    return status;
}

/* Another rank than 0 learns here how many have come, and which of them it is. */
static bool take_head(qd_rendezvous *r, const unsigned char *message, int64_t length)
{
    int64_t size;
    int32_t rank;
    if (r->rank == 0)
        return true;
    if (length < head_bytes(1))
        return false;
    memcpy(&rank, message + 4, sizeof rank);
    memcpy(&size, message + 8, sizeof size);
    if (size < 2 || size > r->size || rank < 1 || rank >= size)
        return false;
    r->size = (int)size;
    r->rank = rank;
    r->met = true;
    return true;
}

qd_status qd_rendezvous_exchange(qd_rendezvous *r, const void *blob, int64_t bytes, qd_rendezvous_table *table)
{
    unsigned char *message = NULL;
    int64_t length = 0;
    const char *why = "";
    qd_status status;
    *table = (qd_rendezvous_table){0};
    if (r->rank == 0) {
        status = gather(r, blob, bytes, &message, &length);
        if (status == QD_OK)
            status = send_all(r, message, length);
        if (status != QD_OK)
            send_failure(r, status);
    } else {
        /* If this fails, rank 0 has closed the connection, and may have said why. */
        qd_peer_send(&r->peers[0], blob, bytes, qd_clock_now() + r->seconds, &why);
        status = receive_table(r, &message, &length);
    }
    if (status != QD_OK) {
        if (r->rank == 0)
            free(message);
        return status;
    }
    bool good = take_head(r, message, length);
    const int64_t head = head_bytes(r->size);
    table->offsets = calloc((size_t)r->size + 1, sizeof *table->offsets);
    good = good && length >= head && table->offsets;
    for (int p = 0; good && p <= r->size; p++) {
        memcpy(&table->offsets[p], message + 16 + 8 * p, sizeof table->offsets[p]);
        good = table->offsets[p] >= (p ? table->offsets[p - 1] : 0) && table->offsets[p] <= length - head;
    }
    table->total = good ? table->offsets[r->size] : 0;
    table->bytes = good ? malloc((size_t)(length - head) + 1) : NULL;
    if (table->bytes)
        memcpy(table->bytes, message + head, (size_t)(length - head));
    free(message);
    if (table->bytes)
        return QD_OK;
    qd_rendezvous_table_free(table);
    return QD_FAIL(QD_NO_MEMORY, "no memory for what %d ranks exchange", r->size);
}

/* The watching thread. */

static void tell(qd_rendezvous *r, int kind, int rank, int except)
{
    unsigned char text[5] = {(unsigned char)kind};
    const char *why;
    memcpy(text + 1, &(int32_t){rank}, 4);
    for (int p = 0; p < r->size; p++)
        if (r->peers[p].fd >= 0 && p != except)
            qd_peer_send(&r->peers[p], text, sizeof text, qd_clock_now() + SEND_SECONDS, &why);
}

static void lose(qd_rendezvous *r, int rank)
{
    int none = 0;
    atomic_compare_exchange_strong(&r->lost, &none, 1 + rank);
}

/* Rank 0: all others have said that they leave, and so has this rank. */
static void meet(qd_rendezvous *r)
{
    for (int p = 1; p < r->size; p++)
        if (!r->peers[p].left)
            return;
    if (!atomic_load(&r->leaving) || atomic_load(&r->all_left))
        return;
    tell(r, QD_SAYS_ALL_LEFT, 0, -1);
    atomic_store(&r->all_left, true);
}

/* The connection to peer p has something to say. */
static void listen_to(qd_rendezvous *r, int p)
{
    unsigned char *text;
    int64_t bytes;
    const char *why;
    qd_peer *peer = &r->peers[p];
    if (!qd_peer_receive(peer, 64, qd_clock_now() + SEND_SECONDS, &text, &bytes, &why)) {
        close(peer->fd);
        peer->fd = -1;
        if (peer->left || atomic_load(&r->all_left))
            return;
        lose(r, p); /* of another rank than 0, peer 0 is rank 0 */
        if (r->rank == 0)
            tell(r, QD_SAYS_LOST, p, p);
        return;
    }
    int32_t rank = -1;
    if (bytes >= 5)
        memcpy(&rank, text + 1, 4);
    if (text[0] == QD_SAYS_LEAVING)
        peer->left = true;
    else if (text[0] == QD_SAYS_ALL_LEFT)
        atomic_store(&r->all_left, true);
    else if (text[0] == QD_SAYS_LOST && rank >= 0 && rank < r->size)
        lose(r, rank);
    free(text);
}

static void *watch_main(void *context)
{
    qd_rendezvous *r = context;
    int connections = r->rank == 0 ? r->size : 1;
    struct pollfd *ready = calloc((size_t)connections + 1, sizeof *ready);
    bool told = false;
    while (ready && !atomic_load(&r->closing)) {
        for (int p = 0; p < connections; p++)
            ready[p] = (struct pollfd){.fd = r->peers[p].fd, .events = POLLIN}; /* a negative one is passed over */
        ready[connections] = (struct pollfd){.fd = r->kick, .events = POLLIN};
        poll(ready, (nfds_t)connections + 1, -1);
        uint64_t kicks;
        if (ready[connections].revents && read(r->kick, &kicks, sizeof kicks) < 0)
            continue;
        for (int p = 0; p < connections; p++)
            if (ready[p].revents && r->peers[p].fd >= 0)
                listen_to(r, p);
        if (atomic_load(&r->leaving) && !told && r->rank != 0) {
            told = true;
            tell(r, QD_SAYS_LEAVING, r->rank, -1);
        }
        if (r->rank == 0)
            meet(r);
    }
    free(ready);
    return NULL;
}

static void kick(qd_rendezvous *r)
{
    uint64_t one = 1;
    if (write(r->kick, &one, sizeof one) < 0)
        return; /* it is awake */
}

qd_status qd_rendezvous_watch(qd_rendezvous *r)
{
    int error = pthread_create(&r->watcher, NULL, watch_main, r);
    if (error)
        return QD_FAIL(QD_SYSTEM, "cannot start the thread that watches the other ranks: %s", qd_thread_why(error));
    r->watching = true;
    return QD_OK;
}

bool qd_rendezvous_lost(qd_rendezvous *r, int *rank)
{
    int lost = atomic_load_explicit(&r->lost, memory_order_relaxed);
    *rank = lost - 1;
    return lost > 0;
}

bool qd_rendezvous_leave(qd_rendezvous *r)
{
    if (!atomic_exchange(&r->leaving, true))
        kick(r);
    return atomic_load(&r->all_left);
}

void qd_rendezvous_close(qd_rendezvous *r)
{
    if (!r)
        return;
    if (r->door)
        qd_door_forget(r->door, r);
    atomic_store(&r->closing, true);
    if (r->watching) {
        kick(r);
        pthread_join(r->watcher, NULL);
    }
    for (int p = 0; r->peers && p < r->size; p++)
        if (r->peers[p].fd >= 0)
            close(r->peers[p].fd);
    if (r->kick >= 0)
        close(r->kick);
    qd_handshake_wipe(r->key, sizeof r->key);
    free(r->peers);
    free(r);
}
