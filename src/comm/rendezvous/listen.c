/* Rank 0: listens on one address until all ranks have proved that they belong to the world, and,
 * where ranks may return later, until they do (door.h).
 *
 * A stranger costs a slot for at most HELLO_SECONDS and one hash; when the slots are full, the
 * oldest connection that has not proved anything is closed, so neither silent nor busy strangers
 * keep a rank out. The ranks that are kept out by chance try again. */
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

enum { ACCEPTS_MOST = 64, BACKLOG = 1024 };
#define HELLO_SECONDS 5.0
#define ROUND_SECONDS 0.2
#define KNOCK_SECONDS 5.0 /* a rank that waits tries again within this time */
#define END_SECONDS 3.0

typedef struct stranger {
    int fd; /* -1: none */
    double since;
    size_t read; /* bytes of the hello */
    qd_handshake h;
} stranger;

/* Of the rank that was started with a number. */
typedef struct place {
    bool invited, expected; /* at the next meeting: it may come; the others wait for it */
    bool inside;            /* of the present world */
    double knocked;         /* when it was last asked to try again; 0: never, or it is inside */
} place;

struct qd_door {
    int fd, ranks; /* fd: -1: not bound yet */
    bool listening, keyed;
    unsigned char key[QD_KEY_BYTES];
    char where[sizeof((qd_rendezvous *)0)->where], interface[IF_NAMESIZE];
    stranger strangers[STRANGERS_MOST];
    int64_t refused[4]; /* by qd_hello_verdict */
    int64_t users;      /* of other users, where there is no secret */
    int64_t doubles;    /* processes of a rank that was there */
    place *places;      /* (ranks) */
    qd_rendezvous *meeting; /* that is going on; NULL: a thread receives those who come between meetings */
    double stayed_at;       /* since when a rank of an earlier world waits for the others; 0: none does */
    pthread_t thread;
    bool serving;
    atomic_bool closing;
    atomic_int waiting; /* see qd_door_waiting() */
    pthread_mutex_t lock; /* for what follows: */
    const qd_rendezvous *world; /* the present one */
    bool over;
    qd_status end;
};

static void drop(stranger *s)
{
    close(s->fd);
    *s = (stranger){.fd = -1};
}

/* Binds to one of the addresses that the name has, if it is an address of this machine, else to the
 * chosen interface. */
static qd_status bind_one(qd_door *d, const qd_comm_join *join)
{
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
    for (const struct addrinfo *a = list; a && d->fd < 0 && status == QD_OK; a = a->ai_next) {
        if (!d->keyed && !qd_address_loopback(a->ai_addr)) {
            status = qd_rendezvous_unprotected(join);
            break;
        }
        int fd = socket(a->ai_family, SOCK_STREAM, 0);
        if (fd < 0)
            continue;
        qd_socket_prepare(fd);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) {
            d->fd = fd;
            qd_address_text(a->ai_addr, a->ai_addrlen, d->where, sizeof d->where);
            qd_address_interface(a->ai_addr, d->interface);
        } else {
            failed = errno;
            close(fd);
        }
    }
    if (all)
        freeaddrinfo(all);
    QD_TRY(status);
    if (d->fd >= 0)
        return QD_OK;
    if (failed == EADDRINUSE)
        return QD_FAIL(QD_BUSY, "rank 0 cannot listen at %s port %d: another process does, which may be a second one with RANK 0 (every "
                                "process needs a RANK of its own) or another program (choose another MASTER_PORT)",
                       join->address, join->port);
    if (failed == EADDRNOTAVAIL)
        return QD_FAIL(QD_USAGE,
                       "%s is not an address of this machine, and rank 0 must run there: correct MASTER_ADDR, or name the interface to use "
                       "(run.interface)",
                       join->address);
    return QD_FAIL(QD_SYSTEM, "rank 0 cannot listen at %s port %d: %s", join->address, join->port, strerror(failed));
}

/* Whether the other end has closed the connection. What it has sent before may still be unread. */
static bool has_closed(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLRDHUP};
    return poll(&ready, 1, 0) > 0;
}

/* A rank that has proved itself cannot be let in. */
static void turn_away(stranger *s, qd_peer *peer, int what, qd_status status, const char *text)
{
    qd_rendezvous_say(peer, what, status, text, QD_ANSWER_SECONDS);
    drop(s);
}

/* Between meetings: what to answer a rank. */
static int answer_later(qd_door *d, place *p, qd_status *end)
{
    int what = QD_SAYS_LATER, lost;
    pthread_mutex_lock(&d->lock);
    if (d->over)
        what = QD_SAYS_OVER;
    else if (p->inside && d->world && !qd_rendezvous_lost((qd_rendezvous *)(uintptr_t)d->world, &lost))
        what = QD_SAYS_TAKEN;
    *end = d->end;
    pthread_mutex_unlock(&d->lock);
    if (what == QD_SAYS_LATER)
        p->knocked = qd_clock_now();
    else if (what == QD_SAYS_OVER)
        p->knocked = 0;
    return what;
}

/* The size of its world differs. When all begin, that is a mistake of all. */
static qd_status refuse_size(const qd_door *d, stranger *s, qd_peer *peer, int64_t rank, int64_t size)
{
    char text[160];
    const bool all = d->meeting && !d->meeting->stays;
    snprintf(text, sizeof text, "rank %lld was started as one of %lld ranks, and rank 0 as one of %d: WORLD_SIZE differs",
             (long long)rank, (long long)size, d->ranks);
    turn_away(s, peer, all ? QD_SAYS_FAILED : QD_SAYS_AWAY, QD_USAGE, text);
    return all ? QD_FAIL(QD_USAGE, "%s", text) : QD_OK;
}

/* A rank has proved itself. */
static qd_status receive_rank(qd_door *d, stranger *s, qd_peer *peer)
{
    const int64_t rank = s->h.hello.rank, size = s->h.hello.size;
    qd_rendezvous *r = d->meeting;
    char text[160];
    qd_status end = QD_OK;
    if (size != d->ranks)
        return refuse_size(d, s, peer, rank, size);
    snprintf(text, sizeof text, "another process is rank %lld of %d, and has not ended: every process needs a RANK of its own",
             (long long)rank, d->ranks);
    if (rank < 1 || rank >= size) {
        turn_away(s, peer, QD_SAYS_AWAY, QD_USAGE, text);
        return QD_OK;
    }
    place *p = &d->places[rank];
    int what = !r || !p->invited ? answer_later(d, p, &end) : QD_SAYS_ADMITTED;
    const bool again = what == QD_SAYS_ADMITTED && r->peers[rank].fd >= 0;
    peer->stays = (s->h.hello.flags & QD_HELLO_STAYS) != 0;
    if (again && !has_closed(r->peers[rank].fd)) {
        if (peer->stays && !r->peers[rank].stays) /* the other one came between */
            qd_rendezvous_say(&r->peers[rank], QD_SAYS_AWAY, QD_USAGE, text, QD_ANSWER_SECONDS);
        else
            what = QD_SAYS_TAKEN;
    }
    d->doubles += what == QD_SAYS_TAKEN;
    if (what != QD_SAYS_ADMITTED) {
        turn_away(s, peer, what, end, text);
        return QD_OK;
    }
    if (!qd_rendezvous_say(peer, what, QD_OK, "", QD_ANSWER_SECONDS)) {
        drop(s);
        return QD_OK;
    }
    if (again)
        close(r->peers[rank].fd); /* it was started again */
    if (peer->stays) {
        r->stays = true;
        d->stayed_at = d->stayed_at > 0 ? d->stayed_at : qd_clock_now();
    }
    r->peers[rank] = *peer;
    *s = (stranger){.fd = -1};
    return QD_OK;
}

/* The hello is complete. */
static qd_status judge(qd_door *d, stranger *s)
{
    qd_welcome welcome;
    qd_peer peer = {.fd = s->fd};
    const char *why;
    qd_hello_verdict verdict = qd_handshake_judge(&s->h, d->key, &welcome, &peer.channel);
    if (verdict == QD_HELLO_GOOD && qd_socket_write(peer.fd, &welcome, sizeof welcome, qd_clock_now() + QD_ANSWER_SECONDS, &why))
        return receive_rank(d, s, &peer);
    if (verdict != QD_HELLO_GOOD)
        d->refused[verdict]++;
    drop(s);
    return QD_OK;
}

static qd_status hear(qd_door *d, stranger *s)
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
            return judge(d, s);
    }
}

static void receive_strangers(qd_door *d)
{
    for (int i = 0; i < ACCEPTS_MOST; i++) {
        int fd = accept4(d->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            return;
        qd_socket_prepare(fd);
        if (!d->keyed && !qd_socket_same_user(fd)) {
            d->users++;
            close(fd);
            continue;
        }
        stranger *s = &d->strangers[0];
        for (int k = 0; k < STRANGERS_MOST; k++) {
            stranger *other = &d->strangers[k];
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

static qd_status late(const qd_door *d)
{
    const qd_rendezvous *r = d->meeting;
    char missing[128], refused[160] = "", doubles[96] = "";
    const bool loopback = d->keyed && (strncmp(d->where, "127.", 4) == 0 || strncmp(d->where, "::1 ", 4) == 0);
    int64_t others = d->refused[QD_HELLO_JUNK] + d->users;
    list_missing(r, missing, sizeof missing);
    if (d->refused[QD_HELLO_SECRET] + d->refused[QD_HELLO_VERSION] + others > 0)
        snprintf(refused, sizeof refused, "; refused: %lld with another secret, %lld of another version, %lld strangers",
                 (long long)d->refused[QD_HELLO_SECRET], (long long)d->refused[QD_HELLO_VERSION], (long long)others);
    if (d->doubles > 0)
        snprintf(doubles, sizeof doubles, "; processes came as ranks that were there: two may have the same RANK");
    return QD_FAIL(QD_TIMEOUT, "rank 0, at %s, waited %g s in vain for rank %s%s%s%s", d->where, r->seconds, missing, refused, doubles,
                   loopback ? "; other machines cannot reach that address: name another one in MASTER_ADDR, or set run.interface" : "");
}

/* Receives for a while those who come. */
static qd_status serve(qd_door *d)
{
    struct pollfd ready[1 + STRANGERS_MOST];
    stranger *of[1 + STRANGERS_MOST];
    nfds_t count = 1;
    ready[0] = (struct pollfd){.fd = d->fd, .events = POLLIN};
    for (int k = 0; k < STRANGERS_MOST; k++)
        if (d->strangers[k].fd >= 0) {
            of[count] = &d->strangers[k];
            ready[count++] = (struct pollfd){.fd = d->strangers[k].fd, .events = POLLIN};
        }
    poll(ready, count, (int)(1000 * ROUND_SECONDS));
    const double now = qd_clock_now();
    for (nfds_t i = 1; i < count; i++) {
        if (ready[i].revents)
            QD_TRY(hear(d, of[i]));
        if (of[i]->fd == ready[i].fd && now - of[i]->since > HELLO_SECONDS)
            drop(of[i]);
    }
    if (ready[0].revents)
        receive_strangers(d);
    return QD_OK;
}

static bool waits(const place *p)
{
    return p->knocked > 0 && qd_clock_now() - p->knocked < KNOCK_SECONDS;
}

/* Ranks that have come, with rank 0; *missing: of those for which the meeting waits. */
static int count_present(const qd_door *d, int *missing)
{
    int present = 1;
    *missing = 0;
    for (int p = 1; p < d->ranks; p++) {
        const bool here = d->meeting->peers[p].fd >= 0;
        present += here;
        *missing += !here && d->places[p].expected;
    }
    return present;
}

static qd_status wait_for_all(qd_door *d, const qd_comm_join *join)
{
    double seen = qd_clock_now(), end = seen + d->meeting->seconds;
    d->stayed_at = join->stays ? seen : 0.0;
    for (;;) {
        int missing;
        const int present = count_present(d, &missing);
        const double now = qd_clock_now(), lost = qd_clock_lost(&seen, now); /* time in which the job was suspended */
        const bool enough = present >= (join->least > 0 ? join->least : d->ranks);
        end += lost;
        d->stayed_at += d->stayed_at > 0 ? lost : 0.0;
        if (enough && (missing == 0 || now > end || (d->stayed_at > 0 && now > d->stayed_at + join->patience)))
            return QD_OK;
        if (now > end)
            return late(d);
        QD_TRY(serve(d));
        if (qd_rendezvous_stops(d->meeting))
            return QD_FAIL(QD_INTERRUPTED, "interrupted while rank 0, at %s, waited for other ranks", d->where);
    }
}

static void drop_strangers(qd_door *d)
{
    for (int k = 0; k < STRANGERS_MOST; k++)
        if (d->strangers[k].fd >= 0)
            drop(&d->strangers[k]);
}

/* Without the option, a socket that does not listen keeps the port for itself; with it, the port
 * can be bound although connections of an earlier process are still being closed. */
static void share_port(const qd_door *d, int on)
{
    setsockopt(d->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
}

/* Connections are refused from here on, and the port stays ours. */
static void hold(qd_door *d)
{
    drop_strangers(d);
    if (d->fd < 0 || !d->listening)
        return;
    shutdown(d->fd, SHUT_RDWR);
    share_port(d, 0);
    d->listening = false;
}

/* The port may be in use by a process that is just ending. */
static qd_status open_port(qd_door *d, const qd_comm_join *join)
{
    if (d->fd >= 0 && !d->listening) {
        share_port(d, 1);
        if (listen(d->fd, BACKLOG) != 0) {
            close(d->fd);
            d->fd = -1;
        }
    }
    for (const double end = qd_clock_now() + QD_TAKEN_SECONDS; d->fd < 0;) {
        const qd_status status = bind_one(d, join);
        if (status == QD_BUSY && qd_clock_now() > end)
            return QD_USAGE;
        if (status != QD_OK && status != QD_BUSY)
            return status;
        if (status == QD_BUSY && qd_rendezvous_stops(d->meeting))
            return QD_FAIL(QD_INTERRUPTED, "interrupted while rank 0 waited for its port");
        if (status == QD_BUSY)
            nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * ROUND_SECONDS)}, NULL);
    }
    qd_error_clear();
    d->listening = true;
    return QD_OK;
}

static void count_waiting(qd_door *d)
{
    int waiting = 0;
    for (int p = 1; p < d->ranks; p++)
        waiting += waits(&d->places[p]);
    atomic_store(&d->waiting, waiting);
}

static void *serve_main(void *context)
{
    qd_door *d = context;
    while (!atomic_load(&d->closing)) {
        if (serve(d) != QD_OK)
            qd_error_clear();
        count_waiting(d);
    }
    return NULL;
}

static void stop_serving(qd_door *d)
{
    if (!d->serving)
        return;
    atomic_store(&d->closing, true);
    pthread_join(d->thread, NULL);
    atomic_store(&d->closing, false);
    d->serving = false;
}

/* Those who have come, in the order of their numbers, are the ranks of the world. */
static void renumber(qd_door *d)
{
    qd_rendezvous *r = d->meeting;
    int ranks = 1;
    for (int p = 1; p < d->ranks; p++) {
        const bool inside = r->peers[p].fd >= 0;
        d->places[p] = (place){.invited = true, .expected = inside, .inside = inside, .knocked = inside ? 0.0 : d->places[p].knocked};
        if (inside)
            r->peers[ranks++] = r->peers[p];
    }
    for (int p = ranks; p < d->ranks; p++)
        r->peers[p].fd = -1;
    r->size = ranks;
}

/* Between two meetings. If this fails, those who come are received at the next one. */
static void keep_open(qd_door *d, int least)
{
    qd_rendezvous *r = d->meeting;
    d->meeting = NULL;
    pthread_mutex_lock(&d->lock);
    d->world = r;
    pthread_mutex_unlock(&d->lock);
    count_waiting(d);
    if (least > 0 && r->size < d->ranks)
        d->serving = pthread_create(&d->thread, NULL, serve_main, d) == 0;
    if (!d->serving)
        hold(d);
}

static qd_status meet(qd_door *d, qd_rendezvous *r, const qd_comm_join *join)
{
    d->meeting = r;
    d->keyed = r->keyed;
    memcpy(d->key, r->key, sizeof d->key);
    for (int p = 1; p < d->ranks; p++) /* a rank that has knocked is on its way */
        d->places[p].expected = d->places[p].invited && (d->places[p].expected || waits(&d->places[p]));
    qd_status status = open_port(d, join);
    memcpy(r->where, d->where, sizeof r->where);
    memcpy(r->interface, d->interface, sizeof r->interface);
    if (status == QD_OK)
        status = wait_for_all(d, join);
    drop_strangers(d);
    if (status == QD_OK)
        renumber(d);
    for (int p = 1; p < r->size && status != QD_OK; p++) /* the ranks that are there need not wait */
        if (r->peers[p].fd >= 0)
            qd_rendezvous_say(&r->peers[p], QD_SAYS_FAILED, status, qd_error_message(), QD_ANSWER_SECONDS);
    return status;
}

qd_status qd_rendezvous_listen(qd_rendezvous *r, const qd_comm_join *join)
{
    qd_door *d = join->door;
    if (!d)
        QD_TRY(qd_door_create(r->size, &d));
    stop_serving(d);
    qd_status status = meet(d, r, join);
    if (!join->door)
        qd_door_destroy(d);
    else if (status == QD_OK)
        keep_open(d, join->least);
    else
        hold(d);
    return status;
}

qd_status qd_door_create(int ranks, qd_door **door)
{
    qd_door *d = calloc(1, sizeof *d);
    *door = d;
    if (d)
        d->places = calloc((size_t)ranks, sizeof *d->places);
    if (!d || !d->places) {
        free(d);
        *door = NULL;
        return QD_FAIL(QD_NO_MEMORY, "no memory for the rendezvous of %d ranks", ranks);
    }
    d->fd = -1;
    d->ranks = ranks;
    pthread_mutex_init(&d->lock, NULL);
    for (int p = 0; p < ranks; p++)
        d->places[p].invited = d->places[p].expected = true;
    for (int k = 0; k < STRANGERS_MOST; k++)
        d->strangers[k].fd = -1;
    return QD_OK;
}

void qd_door_destroy(qd_door *d)
{
    if (!d)
        return;
    stop_serving(d);
    drop_strangers(d);
    if (d->fd >= 0)
        close(d->fd);
    qd_handshake_wipe(d->key, sizeof d->key);
    pthread_mutex_destroy(&d->lock);
    free(d->places);
    free(d);
}

int qd_door_waiting(const qd_door *d)
{
    return atomic_load(&d->waiting);
}

void qd_door_invite(qd_door *d, const bool *invited)
{
    stop_serving(d);
    for (int p = 0; p < d->ranks; p++) {
        d->places[p].invited = invited[p];
        if (d->places[p].inside && !invited[p])
            d->places[p].knocked = qd_clock_now(); /* it will */
    }
}

void qd_door_forget(qd_door *d, const qd_rendezvous *world)
{
    pthread_mutex_lock(&d->lock);
    if (d->world == world)
        d->world = NULL;
    pthread_mutex_unlock(&d->lock);
}

void qd_door_say_end(qd_door *d, qd_status status)
{
    pthread_mutex_lock(&d->lock);
    d->over = true;
    d->end = status;
    pthread_mutex_unlock(&d->lock);
    for (const double end = qd_clock_now() + END_SECONDS; d->serving && atomic_load(&d->waiting) > 0 && qd_clock_now() < end;)
        nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * ROUND_SECONDS)}, NULL);
}
