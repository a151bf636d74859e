/* Status texts and the thread-local error record: message, and the trace of where it passed. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MESSAGE_BYTES = QD_ERROR_MESSAGE_BYTES, TRACE_BYTES = QD_ERROR_TRACE_BYTES };

static _Thread_local qd_error_record record;

static const char *const texts[] = {
#define STATUS_LINE(name, text) [QD_##name] = text,
    QD_STATUS_TABLE(STATUS_LINE)
#undef STATUS_LINE
};

/* Bytes reserved at the end of the trace for the line that counts omitted frames. */
enum { TRACE_TAIL = 32 };

const char *qd_status_text(qd_status status)
{
    if ((size_t)status >= sizeof texts / sizeof texts[0])
        return "unknown status";
    return texts[status];
}

const char *qd_error_message(void)
{
    return record.message;
}

const char *qd_error_trace(void)
{
    return record.trace;
}

void qd_error_clear(void)
{
    record.message[0] = '\0';
    record.trace[0] = '\0';
    record.trace_length = 0;
    record.frames_left_out = 0;
}

void qd_error_keep(qd_error_record *kept)
{
    *kept = record;
}

void qd_error_put_back(const qd_error_record *kept)
{
    record = *kept;
}

/* A truncated message must not end inside a UTF-8 character. */
static void store_message(const char *text)
{
    size_t length = strlen(text);
    if (length >= MESSAGE_BYTES) {
        length = MESSAGE_BYTES - 1;
        while (length > 0 && ((unsigned char)text[length] & 0xc0) == 0x80)
            length--;
    }
    memcpy(record.message, text, length);
    record.message[length] = '\0';
}

qd_status qd_fail_at(const char *file, int line, const char *function, qd_status status, const char *format, ...)
{
    /* Formatted into a temporary: an argument may be the old message. */
    char text[MESSAGE_BYTES + 8];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    qd_error_clear();
    store_message(text);
    qd_error_frame(file, line, function);
    return status;
}

qd_status qd_error_prefix(qd_status status, const char *format, ...)
{
    char text[2 * MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, MESSAGE_BYTES, format, arguments);
    va_end(arguments);
    if (length < 0)
        return status;
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "%s", record.message);
    store_message(text);
    return status;
}

void qd_error_frame(const char *file, int line, const char *function)
{
    char *end = record.trace + record.trace_length;
    if (record.frames_left_out == 0) {
        size_t room = TRACE_BYTES - TRACE_TAIL - record.trace_length;
        int length = snprintf(end, room, "%s%s:%d %s", record.trace_length > 0 ? "\n" : "", file, line, function);
        if (length >= 0 && (size_t)length < room) {
            record.trace_length += (size_t)length;
            return;
        }
    }
    record.frames_left_out++;
    snprintf(end, TRACE_TAIL, "\n… %d more", record.frames_left_out);
}
