/* The sockets on which UCX listens accept anybody: its protocol over TCP proves nothing. They exist
 * as long as the world, but the ranks connect to each other once, at the start. So a filter of the
 * kernel that drops every packet is on them except in that short time, after which a port scan
 * finds nothing; and what has come in meanwhile is compared with the connections that the ranks
 * say, over the rendezvous, that they have made. */
#define _GNU_SOURCE
#include "comm/ucx/ucx_impl.h"

#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <quadrille/log.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* One end of a connection; IPv4 in the first bytes. */
typedef struct end_point {
    unsigned char address[16];
    uint16_t port, zero;
} end_point;

typedef struct connection {
    end_point local, remote;
} connection;

static bool end_of(const struct sockaddr_storage *s, end_point *e)
{
    memset(e, 0, sizeof *e);
    if (s->ss_family == AF_INET) {
        memcpy(e->address, &((const struct sockaddr_in *)(const void *)s)->sin_addr, 4);
        e->port = ((const struct sockaddr_in *)(const void *)s)->sin_port;
    } else if (s->ss_family == AF_INET6) {
        memcpy(e->address, &((const struct sockaddr_in6 *)(const void *)s)->sin6_addr, 16);
        e->port = ((const struct sockaddr_in6 *)(const void *)s)->sin6_port;
    } else {
        return false;
    }
    return true;
}

static int option(int fd, int name)
{
    int value = -1;
    socklen_t length = sizeof value;
    return getsockopt(fd, SOL_SOCKET, name, &value, &length) == 0 ? value : -1;
}

/* The stream sockets of this process, but those that it had before; listening ones, or the
 * others. */
static qd_status list(const qd_ucx_ports *g, bool listening, int **fds, int *count)
{
    DIR *folder = opendir("/proc/self/fd");
    struct dirent *entry;
    *fds = NULL;
    *count = 0;
    while (folder && (entry = readdir(folder))) {
        int fd = atoi(entry->d_name);
        bool old = entry->d_name[0] == '.' || option(fd, SO_TYPE) != SOCK_STREAM || (option(fd, SO_ACCEPTCONN) == 1) != listening;
        for (int i = 0; g && i < g->befores; i++)
            old = old || g->before[i] == fd;
        if (old)
            continue;
        int *more = realloc(*fds, (size_t)(*count + 1) * sizeof **fds);
        if (!more) {
            closedir(folder);
            return QD_FAIL(QD_NO_MEMORY, "no memory for a list of sockets");
        }
        *fds = more;
        more[(*count)++] = fd;
    }
    if (!folder)
        return QD_FAIL(QD_SYSTEM, "/proc/self/fd cannot be read");
    closedir(folder);
    return QD_OK;
}

qd_status qd_ucx_ports_begin(qd_ucx_ports *ports)
{
    int *streams, *listening, streams_count = 0, listening_count = 0;
    *ports = (qd_ucx_ports){0};
    QD_TRY(list(NULL, false, &streams, &streams_count));
    qd_status status = list(NULL, true, &listening, &listening_count);
    ports->before = status == QD_OK ? calloc((size_t)(streams_count + listening_count) + 1, sizeof *ports->before) : NULL;
    if (ports->before) {
        ports->befores = streams_count + listening_count;
        if (streams_count)
            memcpy(ports->before, streams, (size_t)streams_count * sizeof *streams);
        if (listening_count)
            memcpy(ports->before + streams_count, listening, (size_t)listening_count * sizeof *listening);
        free(listening);
    }
    free(streams);
    return ports->before || status != QD_OK ? status : QD_FAIL(QD_NO_MEMORY, "no memory for a list of sockets");
}

void qd_ucx_ports_open(qd_ucx_ports *ports, bool open)
{
    struct sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog program = {.len = 1, .filter = &drop};
    int none = 0, refused = 0;
    for (int i = 0; i < ports->count; i++) {
        if (open)
            setsockopt(ports->listening[i], SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none);
        else if (setsockopt(ports->listening[i], SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0)
            refused = errno;
    }
    if (refused != 0 && !ports->warned)
        qd_log(QD_LOG_WARN, "run.backend", "the ports of UCX stay open for the whole run, to anyone who can reach them: the kernel refuses "
                                           "to filter them: %s", strerror(refused));
    ports->warned = ports->warned || refused != 0;
}

qd_status qd_ucx_ports_find(qd_ucx_ports *ports)
{
    QD_TRY(list(ports, true, &ports->listening, &ports->count));
    qd_ucx_ports_open(ports, false);
    return QD_OK;
}

static bool incoming(const qd_ucx_ports *ports, const end_point *local)
{
    for (int i = 0; i < ports->count; i++) {
        struct sockaddr_storage address = {0};
        socklen_t length = sizeof address;
        end_point e;
        if (getsockname(ports->listening[i], (struct sockaddr *)&address, &length) == 0 && end_of(&address, &e) && e.port == local->port)
            return true;
    }
    return false;
}

/* The connections of this rank. fds: (count) of these, optional. */
static qd_status connections(const qd_ucx_ports *ports, bool only_incoming, connection **out, int **fds, int *count)
{
    int *all, most;
    *count = 0;
    *out = NULL;
    QD_TRY(list(ports, false, &all, &most));
    *out = calloc((size_t)most + 1, sizeof **out);
    if (!*out) {
        free(all);
        return QD_FAIL(QD_NO_MEMORY, "no memory for a list of connections");
    }
    for (int i = 0; i < most; i++) {
        struct sockaddr_storage local = {0}, remote = {0};
        socklen_t local_length = sizeof local, remote_length = sizeof remote;
        connection c;
        if (getsockname(all[i], (struct sockaddr *)&local, &local_length) != 0 ||
            getpeername(all[i], (struct sockaddr *)&remote, &remote_length) != 0 || !end_of(&local, &c.local) ||
            !end_of(&remote, &c.remote) || (only_incoming && !incoming(ports, &c.local)))
            continue;
        all[*count] = all[i];
        (*out)[(*count)++] = c;
    }
    if (fds)
        *fds = all;
    else
        free(all);
    return QD_OK;
}

static int by_ends(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(connection));
}

/* All lists of incoming connections are complete before any rank lists what it has made, so a
 * connection of a rank is in both. */
qd_status qd_ucx_ports_cut_strangers(const qd_ucx_ports *ports, qd_rendezvous *meeting)
{
    connection *in = NULL, *own = NULL;
    int *fds = NULL, count = 0, own_count = 0;
    qd_rendezvous_table table = {0};
    qd_status status = QD_OK;
    QD_TRY_DONE(connections(ports, true, &in, &fds, &count));
    QD_TRY_DONE(qd_rendezvous_exchange(meeting, "", 0, &table));
    qd_rendezvous_table_free(&table);
    QD_TRY_DONE(connections(ports, false, &own, NULL, &own_count));
    if (own_count > (int)(QD_RENDEZVOUS_BLOB_MOST / (int64_t)sizeof *own))
        QD_TRY_DONE(QD_FAIL(QD_UNSUPPORTED, "this rank has %d connections; a world over UCX has at most %d per rank", own_count,
                            (int)(QD_RENDEZVOUS_BLOB_MOST / (int64_t)sizeof *own)));
    QD_TRY_DONE(qd_rendezvous_exchange(meeting, own, own_count * (int64_t)sizeof *own, &table));
    size_t known = (size_t)table.total / sizeof(connection);
    qsort(table.bytes, known, sizeof(connection), by_ends);
    for (int i = 0; i < count; i++) {
        connection mirrored = {in[i].remote, in[i].local};
        if (!bsearch(&mirrored, table.bytes, known, sizeof mirrored, by_ends))
            shutdown(fds[i], SHUT_RDWR); /* UCX finds it closed and forgets it */
    }
done:
    free(in);
    free(own);
    free(fds);
    qd_rendezvous_table_free(&table);
    return status;
}

void qd_ucx_ports_free(qd_ucx_ports *ports)
{
    free(ports->before);
    free(ports->listening);
    *ports = (qd_ucx_ports){0};
}
