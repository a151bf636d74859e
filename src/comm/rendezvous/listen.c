/* Rank 0: listens on one address until all ranks have proved that they belong to the world.
 *
 * A stranger costs a slot for at most HELLO_SECONDS and one hash; when the slots are full, the
 * oldest connection that has not proved anything is closed, so neither silent nor busy strangers
 * keep a rank out. The ranks that are kept out by chance try again. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "comm/rendezvous/meeting.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ACCEPTS_MOST = 64, BACKLOG = 1024 };
#define HELLO_SECONDS 5.0
#define ERROR_SECONDS 2.0

typedef struct stranger {
    int fd; /* -1: none */
    double since;
    size_t read; /* bytes of the hello */
    qd_handshake h;
} stranger;

typedef struct listener {
    qd_rendezvous *r;
    int fd;
    stranger strangers[STRANGERS_MOST];
    int missing;
    int64_t refused[4]; /* by qd_hello_verdict */
    int64_t users;      /* of other users, where there is no secret */
} listener;

static void drop(stranger *s)
{
    close(s->fd);
    *s = (stranger){.fd = -1};
}

/* Binds to one of the addresses that the name has, if it is an address of this machine, else to the
 * chosen interface. */
static qd_status bind_one(listener *l, const qd_comm_join *join)
{
    qd_rendezvous *r = l->r;
    char port[16];
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *all = NULL, own = {0};
    struct sockaddr_storage chosen;
    socklen_t length = 0;
    int error, on = 1, failed = EADDRNOTAVAIL;
    snprintf(port, sizeof port, "%d", join->port);
    QD_TRY(qd_interface_address(join->interface, &chosen, &length));
    error = getaddrinfo(join->address, port, &hints, &all);
    if (error && length == 0)
        return QD_FAIL(QD_USAGE, "the address of rank 0, %s, is unknown: %s", join->address, gai_strerror(error));
    struct addrinfo *list = all;
    if (length > 0) {
        struct addrinfo numbers = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM}, *with_port = NULL;
        char host[64];
        getnameinfo((struct sockaddr *)&chosen, length, host, sizeof host, NULL, 0, NI_NUMERICHOST);
        if (getaddrinfo(host, port, &numbers, &with_port) == 0) {
            memcpy(&chosen, with_port->ai_addr, with_port->ai_addrlen);
            freeaddrinfo(with_port);
        }
        own = (struct addrinfo){.ai_family = chosen.ss_family, .ai_addr = (struct sockaddr *)&chosen, .ai_addrlen = length};
        list = &own;
    }
    qd_status status = QD_OK;
    for (const struct addrinfo *a = list; a && l->fd < 0 && status == QD_OK; a = a->ai_next) {
        if (!r->keyed && !qd_address_loopback(a->ai_addr)) {
            status = qd_rendezvous_unprotected(join);
            break;
        }
        int fd = socket(a->ai_family, SOCK_STREAM, 0);
        if (fd < 0)
            continue;
        qd_socket_prepare(fd);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) {
            l->fd = fd;
            qd_address_text(a->ai_addr, a->ai_addrlen, r->where, sizeof r->where);
            qd_address_interface(a->ai_addr, r->interface);
        } else {
            failed = errno;
            close(fd);
        }
    }
    if (all)
        freeaddrinfo(all);
    QD_TRY(status);
    if (l->fd >= 0)
        return QD_OK;
    if (failed == EADDRNOTAVAIL)
        return QD_FAIL(QD_USAGE,
                       "%s is not an address of this machine, and rank 0 must run there: correct MASTER_ADDR, or name the interface to use "
                       "(run.interface)",
                       join->address);
    return QD_FAIL(QD_SYSTEM, "rank 0 cannot listen at %s port %d: %s", join->address, join->port, strerror(failed));
}

/* Tells a rank that has proved itself why it cannot stay. */
static qd_status turn_away(qd_peer *peer, qd_status status)
{
    qd_rendezvous_refuse(peer, status, ERROR_SECONDS);
    return status;
}

/* Whether the other end has closed the connection. What it has sent before may still be unread. */
static bool has_closed(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLRDHUP};
    return poll(&ready, 1, 0) > 0;
}

/* The hello is complete. */
static qd_status judge(listener *l, stranger *s)
{
    qd_rendezvous *r = l->r;
    qd_welcome welcome;
    qd_peer peer = {.fd = s->fd};
    const char *why;
    qd_hello_verdict verdict = qd_handshake_judge(&s->h, r->key, &welcome, &peer.channel);
    if (verdict != QD_HELLO_GOOD) {
        l->refused[verdict]++;
        drop(s);
        return QD_OK;
    }
    int64_t rank = s->h.hello.rank, size = s->h.hello.size;
    if (!qd_socket_write(peer.fd, &welcome, sizeof welcome, qd_clock_now() + ERROR_SECONDS, &why)) {
        drop(s);
        return QD_OK;
    }
    qd_status status = QD_OK;
    if (size != r->size)
        status = QD_FAIL(QD_USAGE, "rank %lld was started as one of %lld ranks, and rank 0 as one of %d: WORLD_SIZE differs",
                         (long long)rank, (long long)size, r->size);
    else if (rank < 1 || rank >= size)
        status = QD_FAIL(QD_USAGE, "a second process was started as rank %lld of %d: every process needs a RANK of its own",
                         (long long)rank, r->size);
    if (status != QD_OK) {
        turn_away(&peer, status);
        drop(s);
        return status;
    }
    if (r->peers[rank].fd >= 0) {
        if (!has_closed(r->peers[rank].fd)) {
            status = QD_FAIL(QD_USAGE, "two processes were started as rank %lld of %d: every process needs a RANK of its own",
                             (long long)rank, r->size);
            turn_away(&peer, status);
            drop(s);
            return status;
        }
        close(r->peers[rank].fd); /* it was started again */
        l->missing++;
    }
    r->peers[rank] = peer;
    l->missing--;
    *s = (stranger){.fd = -1};
    return QD_OK;
}

static qd_status hear(listener *l, stranger *s)
{
    for (;;) {
        ssize_t n = recv(s->fd, (unsigned char *)&s->h.hello + s->read, sizeof s->h.hello - s->read, 0);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return QD_OK;
        if (n <= 0) {
            drop(s);
            return QD_OK;
        }
        s->read += (size_t)n;
        if (s->read == sizeof s->h.hello)
            return judge(l, s);
    }
}

static void receive_strangers(listener *l)
{
    for (int i = 0; i < ACCEPTS_MOST; i++) {
        int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        qd_socket_prepare(fd);
        if (!l->r->keyed && !qd_socket_same_user(fd)) {
            l->users++;
            close(fd);
            continue;
        }
        stranger *s = &l->strangers[0];
        for (int k = 0; k < STRANGERS_MOST; k++) {
            stranger *other = &l->strangers[k];
            if (other->fd < 0 || (s->fd >= 0 && other->since < s->since))
                s = other;
            if (s->fd < 0)
                break;
        }
        if (s->fd >= 0)
            drop(s);
        *s = (stranger){.fd = fd, .since = qd_clock_now()};
        qd_handshake_greet(&s->h);
        if (send(fd, &s->h.greeting, sizeof s->h.greeting, MSG_NOSIGNAL) != (ssize_t)sizeof s->h.greeting)
            drop(s);
    }
}

/* "ranks 1, 2 and 14 more" */
static void list_missing(const qd_rendezvous *r, char *text, size_t bytes)
{
    size_t used = 0;
    int more = 0;
    text[0] = '\0';
    for (int p = 1; p < r->size; p++) {
        if (r->peers[p].fd >= 0)
            continue;
        if (used + 32 < bytes)
            used += (size_t)snprintf(text + used, bytes - used, "%s%d", used ? ", " : "", p);
        else
            more++;
    }
    if (more)
        snprintf(text + used, bytes - used, " and %d more", more);
}

static qd_status late(const listener *l)
{
    char missing[128], refused[160] = "";
    const bool loopback = l->r->keyed && (strncmp(l->r->where, "127.", 4) == 0 || strncmp(l->r->where, "::1 ", 4) == 0);
    int64_t others = l->refused[QD_HELLO_JUNK] + l->users;
    list_missing(l->r, missing, sizeof missing);
    if (l->refused[QD_HELLO_SECRET] + l->refused[QD_HELLO_VERSION] + others > 0)
        snprintf(refused, sizeof refused, "; refused: %lld with another secret, %lld of another version, %lld strangers",
                 (long long)l->refused[QD_HELLO_SECRET], (long long)l->refused[QD_HELLO_VERSION], (long long)others);
    return QD_FAIL(QD_TIMEOUT, "rank 0, at %s, waited %g s in vain for rank %s%s%s", l->r->where, l->r->seconds, missing, refused,
                   loopback ? "; other machines cannot reach that address: name another one in MASTER_ADDR, or set run.interface" : "");
}

static qd_status wait_for_all(listener *l, const qd_comm_join *join)
{
    double end = qd_clock_now() + l->r->seconds, seen = qd_clock_now();
    while (l->missing > 0) {
        struct pollfd ready[1 + STRANGERS_MOST];
        stranger *of[1 + STRANGERS_MOST];
        nfds_t count = 1;
        ready[0] = (struct pollfd){.fd = l->fd, .events = POLLIN};
        for (int k = 0; k < STRANGERS_MOST; k++)
            if (l->strangers[k].fd >= 0) {
                of[count] = &l->strangers[k];
                ready[count++] = (struct pollfd){.fd = l->strangers[k].fd, .events = POLLIN};
            }
        poll(ready, count, 200);
        if (join->stops && join->stops(join->context))
            return QD_FAIL(QD_INTERRUPTED, "interrupted while rank 0, at %s, waited for other ranks", l->r->where);
        double now = qd_clock_now();
        end += qd_clock_lost(&seen, now); /* time in which the job was suspended */
        for (nfds_t i = 1; i < count; i++) {
            if (ready[i].revents)
                QD_TRY(hear(l, of[i]));
            if (of[i]->fd == ready[i].fd && now - of[i]->since > HELLO_SECONDS)
                drop(of[i]);
        }
        if (ready[0].revents)
            receive_strangers(l);
        if (l->missing > 0 && now > end)
            return late(l);
    }
    return QD_OK;
}

qd_status qd_rendezvous_listen(qd_rendezvous *r, const qd_comm_join *join)
{
    listener *l = calloc(1, sizeof *l);
    if (!l)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the rendezvous of %d ranks", r->size);
    l->r = r;
    l->fd = -1;
    l->missing = r->size - 1;
    for (int k = 0; k < STRANGERS_MOST; k++)
        l->strangers[k].fd = -1;
    qd_status status = bind_one(l, join);
    if (status == QD_OK)
        status = wait_for_all(l, join);
    for (int k = 0; k < STRANGERS_MOST; k++)
        if (l->strangers[k].fd >= 0)
            drop(&l->strangers[k]);
    if (l->fd >= 0)
        close(l->fd);
    if (status != QD_OK) /* the ranks that are there need not wait */
        for (int p = 1; p < r->size; p++)
            if (r->peers[p].fd >= 0)
                turn_away(&r->peers[p], status);
    free(l);
    return status;
}
