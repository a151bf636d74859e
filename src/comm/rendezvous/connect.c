/* Another rank than 0: finds rank 0 and proves that it belongs to the world. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "base/error.h"
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
#define LATER_SECONDS 0.5  /* between two attempts of a rank that is to try again */
#define REFUSED_SECONDS 5.0 /* a rank that rank 0 has refused for so long, and */
#define REFUSED_TIMES 5     /* so often, has another secret or version; fewer refusals may be losses */

/* REFUSED: silently. FAILED, AWAY: rank 0 has said why. */
typedef enum outcome { AGAIN, JOINED, LATER, TAKEN, REFUSED, STRANGER, FAILED, AWAY, OVER } outcome;

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

/* What rank 0 answers this rank, which has proved itself. *status: how the run has ended. */
static outcome hear_answer(qd_peer *peer, qd_status *status, char *text, size_t bytes)
{
    static const outcome outcomes[] = {[QD_SAYS_ADMITTED] = JOINED, [QD_SAYS_LATER] = LATER, [QD_SAYS_TAKEN] = TAKEN,
                                       [QD_SAYS_AWAY] = AWAY, [QD_SAYS_OVER] = OVER, [QD_SAYS_FAILED] = FAILED};
    unsigned char *message;
    int64_t length;
    const char *why = "";
    if (!qd_peer_receive(peer, QD_ERROR_MESSAGE_BYTES + 2, qd_clock_now() + TRY_SECONDS, &message, &length, &why)) {
        snprintf(text, bytes, "%s", why);
        return AGAIN;
    }
    const bool known = length > 1 && message[0] < sizeof outcomes / sizeof *outcomes;
    const outcome result = known ? outcomes[message[0]] : AGAIN;
    if (result != JOINED)
        snprintf(text, bytes, "%s", length > 2 ? (char *)message + 2 : "");
    *status = known ? (qd_status)message[1] : QD_OK;
    free(message);
    return result;
}

static outcome shake(qd_rendezvous *r, int fd, qd_status *status, char *text, size_t bytes)
{
    qd_peer peer = {.fd = fd};
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
    qd_handshake_answer(&h, r->key, r->rank, r->size, r->stays ? QD_HELLO_STAYS : 0);
    outcome result = JOINED;
    if (!qd_socket_write(fd, &h.hello, sizeof h.hello, qd_clock_now() + TRY_SECONDS, &why) ||
        !qd_socket_read(fd, &welcome, sizeof welcome, qd_clock_now() + TRY_SECONDS, &why)) {
        const bool late = strcmp(why, QD_NO_ANSWER) == 0;
        if (late)
            snprintf(text, bytes, "it has accepted the connection, but does not answer within %g s: check whether the process of rank 0 "
                                  "is stopped, or its machine overloaded", TRY_SECONDS);
        else
            snprintf(text, bytes, "it refuses this rank: its secret, or its version of quadrille, is another one (%s)", why);
        result = late ? AGAIN : REFUSED;
    } else if (!qd_handshake_accept(&h, r->key, &welcome, &peer.channel)) {
        snprintf(text, bytes, "what answers there does not know the secret");
        result = STRANGER;
    } else {
        result = hear_answer(&peer, status, text, bytes);
    }
    if (result == JOINED)
        r->peers[0] = peer;
    qd_handshake_wipe(&h, sizeof h);
    qd_handshake_wipe(&peer, sizeof peer);
    return result;
}

static outcome try_all(qd_rendezvous *r, const struct addrinfo *to, const struct sockaddr *from, socklen_t from_length,
                       qd_status *status, char *text, size_t bytes)
{
    outcome result = AGAIN;
    for (; to && (result == AGAIN || result == REFUSED || result == STRANGER); to = to->ai_next) {
        if (!r->keyed && !qd_address_loopback(to->ai_addr)) {
            snprintf(text, bytes, "it is another machine, and there is no secret");
            continue;
        }
        int fd = dial(to, from, from_length, text, bytes);
        if (fd < 0)
            continue;
        result = shake(r, fd, status, text, bytes);
        if (result != JOINED) {
            close(fd);
            continue;
        }
        struct sockaddr_storage own;
        socklen_t length = sizeof own;
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

/* What this rank has met with so far. */
typedef struct attempts {
    double begin;      /* since when it has been waiting without a sign of rank 0 */
    double refused_at, taken_at; /* since when it has been refused, or its place been taken; 0: not now */
    int refused;
    double pause;
} attempts;

/* Whether it tries again, or why not. */
static qd_status judge(const qd_rendezvous *r, const qd_comm_join *join, attempts *a, outcome result, qd_status status, const char *why)
{
    const double now = qd_clock_now();
    const char *hint = r->stays ? "; no other rank listens there, and the process that replaces rank 0 did not come"
                       : strcmp(why, strerror(ECONNREFUSED)) == 0 ? " (it accepts connections only while ranks are missing)"
                                                                   : "";
    if (result == LATER || result == TAKEN) {
        a->begin = now;
        a->pause = r->stays ? AGAIN_SECONDS : LATER_SECONDS; /* the others meet at this moment */
    }
    if (result == REFUSED && a->refused++ == 0)
        a->refused_at = now;
    a->taken_at = result != TAKEN ? 0.0 : a->taken_at > 0 ? a->taken_at : now;
    if (result == FAILED)
        return QD_FAIL(status == QD_SYSTEM ? QD_SYSTEM : QD_REMOTE, "%s", why);
    if (result == AWAY || (result == TAKEN && now - a->taken_at > QD_TAKEN_SECONDS))
        return QD_FAIL(QD_USAGE, "rank %d cannot join rank 0 at %s port %d: %s", r->rank, join->address, join->port, why);
    if (result == REFUSED && a->refused >= REFUSED_TIMES && now - a->refused_at > REFUSED_SECONDS)
        return QD_FAIL(QD_USAGE, "rank %d cannot join rank 0 at %s port %d: %s", r->rank, join->address, join->port, why);
    if (qd_rendezvous_stops(r))
        return QD_FAIL(QD_INTERRUPTED, "interrupted while rank %d tried to reach rank 0 at %s port %d: %s", r->rank, join->address,
                       join->port, why);
    if (now - a->begin > r->seconds)
        return QD_FAIL(QD_TIMEOUT, "rank %d did not reach rank 0 at %s port %d within %g s: %s%s", r->rank, join->address, join->port,
                       r->seconds, why, hint);
    return QD_OK;
}

qd_status qd_rendezvous_connect(qd_rendezvous *r, const qd_comm_join *join, bool *over)
{
    char port[16], why[QD_ERROR_MESSAGE_BYTES] = "";
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct sockaddr_storage source;
    socklen_t source_length = 0;
    attempts a = {.begin = qd_clock_now(), .pause = AGAIN_SECONDS};
    snprintf(port, sizeof port, "%d", join->port);
    QD_TRY(qd_interface_address(join->interface, &source, &source_length));
    for (;;) {
        struct addrinfo *to = NULL;
        outcome result = AGAIN;
        qd_status status = QD_OK;
        int error = getaddrinfo(join->address, port, &hints, &to);
        if (!error && !r->keyed && !any_loopback(to)) {
            freeaddrinfo(to);
            return qd_rendezvous_unprotected(join);
        }
        if (error)
            snprintf(why, sizeof why, "%s", gai_strerror(error));
        else
            result = try_all(r, to, source_length ? (struct sockaddr *)&source : NULL, source_length, &status, why, sizeof why);
        if (to)
            freeaddrinfo(to);
        if (result == JOINED)
            return QD_OK;
        *over = result == OVER;
        if (*over && status != QD_OK) /* the others report it */
            qd_error_clear();
        if (*over)
            return status;
        QD_TRY(judge(r, join, &a, result, status, why));
        nanosleep(&(struct timespec){.tv_sec = (time_t)a.pause, .tv_nsec = (long)(1e9 * (a.pause - (double)(time_t)a.pause))}, NULL);
        a.pause = 2 * a.pause < AGAIN_MOST ? 2 * a.pause : AGAIN_MOST;
    }
}
