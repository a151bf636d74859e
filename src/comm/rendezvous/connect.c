/* Another rank than 0: finds rank 0 and proves that it belongs to the world. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "comm/rendezvous/meeting.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TRY_SECONDS 5.0     /* for a connection and for each message of the handshake */
#define AGAIN_SECONDS 0.1   /* between two attempts, doubled up to */
#define AGAIN_MOST 1.0
#define REFUSED_SECONDS 5.0 /* a rank that rank 0 has refused for so long, and */
#define REFUSED_TIMES 5     /* so often, has another secret or version; fewer refusals may be losses */

typedef enum outcome { JOINED, AGAIN, REFUSED, STRANGER } outcome;

/* A connection to the address, from the chosen interface. -1 on failure. */
static int dial(const struct addrinfo *to, const struct sockaddr *from, socklen_t from_length, char *why, size_t bytes)
{
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
    socklen_t length = sizeof error;
    if (fd < 0) {
        snprintf(why, bytes, "%s", strerror(errno));
        return -1;
    }
    qd_socket_prepare(fd);
    if (from && from->sa_family == to->ai_family && bind(fd, from, from_length) != 0)
        error = errno;
    if (!error && connect(fd, to->ai_addr, to->ai_addrlen) != 0) {
        struct pollfd ready = {.fd = fd, .events = POLLOUT};
        if (errno != EINPROGRESS)
            error = errno;
        else if (poll(&ready, 1, (int)(1000 * TRY_SECONDS)) <= 0)
            error = ETIMEDOUT;
        else
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (!error)
        return fd;
    snprintf(why, bytes, "%s", strerror(error));
    close(fd);
    return -1;
}

static outcome shake(qd_rendezvous *r, int fd, char *text, size_t bytes)
{
    qd_handshake h;
    qd_welcome welcome;
    const char *why = "";
    if (!qd_socket_read(fd, &h.greeting, sizeof h.greeting, qd_clock_now() + TRY_SECONDS, &why)) {
        snprintf(text, bytes, "%s", why);
        return AGAIN;
    }
    if (!r->keyed && !qd_socket_same_user(fd)) { /* known once the other end has accepted */
        snprintf(text, bytes, "a process of another user listens there");
        return STRANGER;
    }
    qd_handshake_answer(&h, r->key, r->rank, r->size);
    outcome result = JOINED;
    if (!qd_socket_write(fd, &h.hello, sizeof h.hello, qd_clock_now() + TRY_SECONDS, &why) ||
        !qd_socket_read(fd, &welcome, sizeof welcome, qd_clock_now() + TRY_SECONDS, &why)) {
        snprintf(text, bytes, "it refuses this rank: its secret, or its version of quadrille, is another one (%s)", why);
        result = REFUSED;
    } else if (!qd_handshake_accept(&h, r->key, &welcome, &r->peers[0].channel)) {
        snprintf(text, bytes, "what answers there does not know the secret");
        result = STRANGER;
    }
    qd_handshake_wipe(&h, sizeof h);
    return result;
}

static outcome try_all(qd_rendezvous *r, const struct addrinfo *to, const struct sockaddr *from, socklen_t from_length, char *text,
                       size_t bytes)
{
    outcome result = AGAIN;
    for (; to && result != JOINED; to = to->ai_next) {
        if (!r->keyed && !qd_address_loopback(to->ai_addr)) {
            snprintf(text, bytes, "it is another machine, and there is no secret");
            continue;
        }
        int fd = dial(to, from, from_length, text, bytes);
        if (fd < 0)
            continue;
        result = shake(r, fd, text, bytes);
        if (result != JOINED) {
            close(fd);
            continue;
        }
        struct sockaddr_storage own;
        socklen_t length = sizeof own;
        r->peers[0].fd = fd;
        qd_address_text(to->ai_addr, to->ai_addrlen, r->where, sizeof r->where);
        if (getsockname(fd, (struct sockaddr *)&own, &length) == 0)
            qd_address_interface((struct sockaddr *)&own, r->interface);
    }
    return result;
}

static bool any_loopback(const struct addrinfo *a)
{
    while (a && !qd_address_loopback(a->ai_addr))
        a = a->ai_next;
    return a != NULL;
}

qd_status qd_rendezvous_connect(qd_rendezvous *r, const qd_comm_join *join)
{
    char port[16], why[256] = "";
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct sockaddr_storage source;
    socklen_t source_length = 0;
    double begin = qd_clock_now(), pause = AGAIN_SECONDS, refused_at = 0;
    int refused = 0;
    outcome result = AGAIN;
    snprintf(port, sizeof port, "%d", join->port);
    QD_TRY(qd_interface_address(join->interface, &source, &source_length));
    while (result != JOINED) {
        struct addrinfo *to = NULL;
        int error = getaddrinfo(join->address, port, &hints, &to);
        if (!error && !r->keyed && !any_loopback(to)) {
            freeaddrinfo(to);
            return qd_rendezvous_unprotected(join);
        }
        if (error)
            snprintf(why, sizeof why, "%s", gai_strerror(error));
        else
            result = try_all(r, to, source_length ? (struct sockaddr *)&source : NULL, source_length, why, sizeof why);
        if (to)
            freeaddrinfo(to);
        if (result != JOINED && join->stops && join->stops(join->context))
            return QD_FAIL(QD_INTERRUPTED, "interrupted while rank %d tried to reach rank 0 at %s port %d: %s", r->rank, join->address,
                           join->port, why);
        double now = qd_clock_now();
        if (result == REFUSED && refused++ == 0)
            refused_at = now;
        if (result == REFUSED && refused >= REFUSED_TIMES && now - refused_at > REFUSED_SECONDS)
            return QD_FAIL(QD_USAGE, "rank %d cannot join rank 0 at %s port %d: %s", r->rank, join->address, join->port, why);
        if (result != JOINED && now - begin > r->seconds)
            return QD_FAIL(QD_TIMEOUT, "rank %d did not reach rank 0 at %s port %d within %g s: %s", r->rank, join->address, join->port,
                           r->seconds, why);
        if (result == JOINED)
            break;
        nanosleep(&(struct timespec){.tv_sec = (time_t)pause, .tv_nsec = (long)(1e9 * (pause - (double)(time_t)pause))}, NULL);
        pause = 2 * pause < AGAIN_MOST ? 2 * pause : AGAIN_MOST;
    }
    return QD_OK;
}
