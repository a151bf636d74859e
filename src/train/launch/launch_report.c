/* Reports from a local rank to its launcher, and the choice among several failures. */
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
    report->failure.message[QD_REPORT_MESSAGE_BYTES - 1] = '\0';
    return bytes > (ssize_t)offsetof(qd_report, step);
}

static int weight(qd_status status, const char *message)
{
    return status == QD_OK ? 0 : status == QD_REMOTE ? 1 : message[0] == '\0' ? 2 : 3;
}

void qd_failure_add(qd_failure *failure, qd_status status, const char *message)
{
    if (weight(status, message) <= weight(failure->status, failure->message))
        return;
    failure->status = status;
    snprintf(failure->message, sizeof failure->message, "%s", message);
}

qd_status qd_failure_raise(const qd_failure *failure)
{
    return failure->status == QD_OK ? QD_OK : QD_FAIL(failure->status, "%s", failure->message);
}

bool qd_ended_in_order(qd_status status)
{
    return status == QD_INTERRUPTED || status == QD_STOPPED;
}
