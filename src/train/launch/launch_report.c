/* What travels between a rank and its launcher: reports and orders. */
#define _GNU_SOURCE
#include "train/launch/launch.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void qd_report_send(int fd, const qd_report *report)
{
    size_t bytes = report->kind == QD_REPORT_STEP  ? offsetof(qd_report, step) + sizeof report->step
                   : report->kind == QD_REPORT_END ? offsetof(qd_report, end) + sizeof report->end
                                                   : sizeof *report;
    /* A launcher that is blocked (its output is not read) must not block training: steps are in
     * metrics.jsonl too. */
    int flags = MSG_NOSIGNAL | (report->kind == QD_REPORT_STEP ? MSG_DONTWAIT : 0);
    while (send(fd, report, bytes, flags) < 0 && errno == EINTR)
        continue;
}

bool qd_report_receive(int fd, qd_report *report)
{
    ssize_t bytes;
    memset(report, 0, sizeof *report);
    do
        bytes = recv(fd, report, sizeof *report, MSG_DONTWAIT);
    while (bytes < 0 && errno == EINTR);
    report->failure.message[sizeof report->failure.message - 1] = '\0';
    report->failure.trace[sizeof report->failure.trace - 1] = '\0';
    return bytes > (ssize_t)offsetof(qd_report, step);
}

bool qd_order_send(int socket, const qd_order *order, const int *fds, int count)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(QD_ORDER_FDS * sizeof(int))];
    } control = {0};
    struct iovec data = {(void *)(uintptr_t)order, sizeof *order};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof *fds);
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN((size_t)count * sizeof *fds);
        memcpy(CMSG_DATA(head), fds, (size_t)count * sizeof *fds);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof *order;
}

bool qd_order_receive(int socket, bool wait, qd_order *order, int fds[QD_ORDER_FDS])
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(QD_ORDER_FDS * sizeof(int))];
    } control = {0};
    struct iovec data = {order, sizeof *order};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t received;
    for (int i = 0; i < QD_ORDER_FDS; i++)
        fds[i] = -1;
    do
        received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
    while (received < 0 && errno == EINTR);
    struct cmsghdr *head = received > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
        memcpy(fds, CMSG_DATA(head), head->cmsg_len - CMSG_LEN(0));
    return received == (ssize_t)sizeof *order;
}
