/* What travels from a rank to its launcher. */
#include "train/launch/launch.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

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
