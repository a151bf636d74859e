/* Chooses the failure that a run reports. See failure.h. */
#include "train/ranks/failure.h"

#include <stdio.h>
#include <string.h>

static int weight(qd_status status, const char *message)
{
    return status == QD_OK ? 0 : status == QD_REMOTE ? 1 : message[0] == '\0' ? 2 : 3;
}

void qd_failure_add(qd_failure *failure, qd_status status, const char *message, const char *trace)
{
    if (weight(status, message) <= weight(failure->status, failure->message))
        return;
    failure->status = status;
    snprintf(failure->message, sizeof failure->message, "%s", message);
    snprintf(failure->trace, sizeof failure->trace, "%s", trace);
}

void qd_failure_add_own(qd_failure *failure, qd_status status)
{
    qd_failure_add(failure, status, qd_error_message(), qd_error_trace());
}

qd_status qd_failure_raise(const qd_failure *failure)
{
    qd_error_record record = {0};
    if (failure->status == QD_OK)
        return QD_OK;
    memcpy(record.message, failure->message, sizeof record.message);
    memcpy(record.trace, failure->trace, sizeof record.trace);
    record.trace_length = strlen(record.trace);
    qd_error_put_back(&record);
    qd_error_frame(__FILE__, __LINE__, __func__);
    return failure->status;
}

bool qd_ended_in_order(qd_status status)
{
    return status == QD_INTERRUPTED || status == QD_STOPPED;
}
