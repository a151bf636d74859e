/* Control messages between ranks of one machine, past the transport. In shared memory UCX has one
 * queue per receiver: a rank that is stopped while it writes an entry holds back all later entries
 * of all senders, and the receiver would hear no answer and name innocent ranks. A datagram is
 * delivered whole or not at all.
 *
 * The sockets have no name in the file system, and only messages of the same user are read. */
#define _GNU_SOURCE
#include "comm/remote/remote.h"

#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { STRANGE_MOST = 64 }; /* messages of other users that are discarded at once: they may never end */

void qd_remote_mailbox_open(qd_remote_mailbox *box, char name[QD_REMOTE_MAILBOX_BYTES])
{
    int on = 1;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t length = sizeof address;
    memset(name, 0, QD_REMOTE_MAILBOX_BYTES);
    box->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    box->open = box->fd >= 0;
    if (!box->open)
        return;
    /* Bound without an address, the kernel chooses one: a zero and a few digits. */
    if (setsockopt(box->fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0 &&
        bind(box->fd, (struct sockaddr *)&address, sizeof address.sun_family) == 0 &&
        getsockname(box->fd, (struct sockaddr *)&address, &length) == 0) {
        size_t bytes = length - offsetof(struct sockaddr_un, sun_path);
        if (bytes > 1 && bytes < QD_REMOTE_MAILBOX_BYTES) {
            memcpy(name, address.sun_path + 1, bytes - 1);
            return;
        }
    }
    qd_remote_mailbox_close(*box);
    box->open = false;
}

void qd_remote_mailbox_send(qd_remote_mailbox box, const char *to, const void *data, int64_t bytes)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strnlen(to, QD_REMOTE_MAILBOX_BYTES - 1);
    if (!box.open || length == 0)
        return;
    memcpy(address.sun_path + 1, to, length);
    (void)sendto(box.fd, data, (size_t)bytes, MSG_NOSIGNAL, (struct sockaddr *)&address,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length));
}

bool qd_remote_mailbox_recv(qd_remote_mailbox box, void *data, int64_t bytes)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(struct ucred))];
    } extra;
    for (int strange = 0; box.open && strange < STRANGE_MOST; strange++) {
        struct iovec part = {.iov_base = data, .iov_len = (size_t)bytes};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra};
        struct ucred sender = {.uid = (uid_t)-1};
        ssize_t length = recvmsg(box.fd, &message, MSG_CMSG_CLOEXEC);
        if (length < 0)
            return false;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS)
            memcpy(&sender, CMSG_DATA(header), sizeof sender);
        if (sender.uid == geteuid() && length == bytes && !(message.msg_flags & MSG_TRUNC))
            return true;
    }
    return false;
}

void qd_remote_mailbox_close(qd_remote_mailbox box)
{
    if (box.open)
        close(box.fd);
}
