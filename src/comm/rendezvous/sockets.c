/* Sockets with time limits, sealed messages, and questions about addresses. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "comm/rendezvous/meeting.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void qd_socket_prepare(int fd)
{
    int on = 1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* Waits until the socket is ready; false after `end`. */
static bool wait_ready(int fd, short events, double end)
{
    for (;;) {
        double left = end - qd_clock_now();
        struct pollfd ready = {.fd = fd, .events = events};
        if (left <= 0)
            return false;
        int n = poll(&ready, 1, left > 1 ? 1000 : 1 + (int)(1000 * left));
        if (n > 0)
            return true;
        if (n < 0 && errno != EINTR)
            return false;
    }
}

bool qd_socket_readable(int fd, double seconds)
{
    return wait_ready(fd, POLLIN, qd_clock_now() + seconds);
}

static bool move(int fd, void *data, size_t bytes, bool out, double end, const char **why)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = out ? send(fd, (char *)data + done, bytes - done, MSG_NOSIGNAL) : recv(fd, (char *)data + done, bytes - done, 0);
        if (n > 0) {
            done += (size_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
            if (!wait_ready(fd, out ? POLLOUT : POLLIN, end)) {
                *why = QD_NO_ANSWER;
                return false;
            }
        } else {
            *why = n == 0 ? "it has closed the connection" : strerror(errno);
            return false;
        }
    }
    return true;
}

bool qd_socket_read(int fd, void *data, size_t bytes, double end, const char **why)
{
    return move(fd, data, bytes, false, end, why);
}

bool qd_socket_write(int fd, const void *data, size_t bytes, double end, const char **why)
{
    return move(fd, (void *)(uintptr_t)data, bytes, true, end, why);
}

bool qd_peer_send(qd_peer *peer, const void *text, int64_t bytes, double end, const char **why)
{
    uint32_t length = (uint32_t)(bytes + QD_SEAL_BYTES);
    unsigned char *message = malloc(sizeof length + length);
    *why = "there is no memory";
    if (!message)
        return false;
    memcpy(message, &length, sizeof length);
    qd_channel_seal(&peer->channel, text, (size_t)bytes, message + sizeof length);
    bool good = qd_socket_write(peer->fd, message, sizeof length + length, end, why);
    free(message);
    return good;
}

bool qd_peer_receive(qd_peer *peer, int64_t most, double end, unsigned char **text, int64_t *bytes, const char **why)
{
    uint32_t length;
    *text = NULL;
    if (!qd_socket_read(peer->fd, &length, sizeof length, end, why))
        return false;
    if (length < QD_SEAL_BYTES || length > most + QD_SEAL_BYTES) {
        *why = "it sent a message of a length that does not belong here";
        return false;
    }
    unsigned char *sealed = malloc(length);
    *text = malloc(length - QD_SEAL_BYTES + 1);
    *bytes = length - QD_SEAL_BYTES;
    bool good = sealed && *text;
    if (!good)
        *why = "there is no memory";
    good = good && qd_socket_read(peer->fd, sealed, length, end, why);
    if (good && !qd_channel_open(&peer->channel, sealed, length, *text)) {
        *why = "its message was changed on the way";
        good = false;
    }
    free(sealed);
    if (!good) {
        free(*text);
        *text = NULL;
        return false;
    }
    (*text)[*bytes] = '\0';
    return true;
}

void qd_address_text(const struct sockaddr *address, socklen_t length, char *text, size_t bytes)
{
    char host[64] = "?", port[16] = "?";
    getnameinfo(address, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(text, bytes, "%s port %s", host, port);
}

static const void *number_of(const struct sockaddr *address, size_t *bytes)
{
    *bytes = address->sa_family == AF_INET ? sizeof(struct in_addr) : sizeof(struct in6_addr);
    return address->sa_family == AF_INET ? (const void *)&((const struct sockaddr_in *)(const void *)address)->sin_addr
                                         : (const void *)&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
}

void qd_address_interface(const struct sockaddr *address, char name[IF_NAMESIZE])
{
    struct ifaddrs *all = NULL;
    size_t bytes;
    const void *number = number_of(address, &bytes);
    name[0] = '\0';
    if (getifaddrs(&all) != 0)
        return;
    for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != address->sa_family)
            continue;
        if (memcmp(number_of(i->ifa_addr, &bytes), number, bytes) == 0)
            snprintf(name, IF_NAMESIZE, "%s", i->ifa_name);
    }
    freeifaddrs(all);
    if (name[0] == '\0' && qd_address_loopback(address)) /* all of 127.0.0.0/8 is on it */
        snprintf(name, IF_NAMESIZE, "lo");
}

bool qd_address_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 == 127;
    return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

/* An address as /proc/net/tcp writes it. */
static void proc_text(const struct sockaddr_storage *address, char text[64])
{
    size_t bytes;
    const unsigned char *number = number_of((const struct sockaddr *)address, &bytes);
    unsigned port = ntohs(address->ss_family == AF_INET ? ((const struct sockaddr_in *)(const void *)address)->sin_port
                                                         : ((const struct sockaddr_in6 *)(const void *)address)->sin6_port);
    size_t at = 0;
    for (size_t i = 0; i < bytes; i += 4) {
        uint32_t word;
        memcpy(&word, number + i, sizeof word);
        at += (size_t)snprintf(text + at, 64 - at, "%08X", word);
    }
    snprintf(text + at, 64 - at, ":%04X", port);
}

bool qd_socket_same_user(int fd)
{
    struct sockaddr_storage own = {0}, other = {0};
    socklen_t own_length = sizeof own, other_length = sizeof other;
    char mine[64], theirs[64], line[512];
    bool same = false;
    if (getsockname(fd, (struct sockaddr *)&own, &own_length) != 0 || getpeername(fd, (struct sockaddr *)&other, &other_length) != 0)
        return false;
    proc_text(&own, mine);
    proc_text(&other, theirs);
    FILE *table = fopen(own.ss_family == AF_INET ? "/proc/net/tcp" : "/proc/net/tcp6", "re");
    while (table && fgets(line, sizeof line, table)) {
        char local[64], remote[64];
        unsigned user;
        if (sscanf(line, " %*d: %63s %63s %*s %*s %*s %*s %u", local, remote, &user) == 3 && strcmp(local, theirs) == 0 &&
            strcmp(remote, mine) == 0)
            same = user == (unsigned)geteuid();
    }
    if (table)
        fclose(table);
    return same;
}

qd_status qd_interface_address(const char *interface, struct sockaddr_storage *address, socklen_t *length)
{
    struct ifaddrs *all = NULL;
    *length = 0;
    if (!interface || interface[0] == '\0')
        return QD_OK;
    if (getifaddrs(&all) != 0)
        return QD_FAIL(QD_SYSTEM, "the network interfaces cannot be listed: %s", strerror(errno));
    for (int family = AF_INET; *length == 0; family = AF_INET6) { /* IPv4 first */
        for (const struct ifaddrs *i = all; i && *length == 0; i = i->ifa_next) {
            char number[64] = "";
            if (!i->ifa_addr || i->ifa_addr->sa_family != family)
                continue;
            socklen_t bytes = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
            getnameinfo(i->ifa_addr, bytes, number, sizeof number, NULL, 0, NI_NUMERICHOST);
            if (strcmp(i->ifa_name, interface) != 0 && strcmp(number, interface) != 0)
                continue;
            memcpy(address, i->ifa_addr, bytes);
            *length = bytes;
        }
        if (family == AF_INET6)
            break;
    }
    freeifaddrs(all);
    if (*length == 0)
        return QD_FAIL(QD_USAGE, "run.interface: '%s' is neither the name nor an address of a network interface here", interface);
    return QD_OK;
}
