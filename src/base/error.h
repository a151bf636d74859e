/* Saves and restores a thread's error record around cleanup that may fail itself. */
#ifndef QD_BASE_ERROR_H
#define QD_BASE_ERROR_H

#include <quadrille/status.h>
#include <stddef.h>

enum { QD_ERROR_MESSAGE_BYTES = 2048, QD_ERROR_TRACE_BYTES = 2048 };

/* Fixed size, so that an out-of-memory error can be recorded too. */
typedef struct qd_error_record {
    char message[QD_ERROR_MESSAGE_BYTES];
    char trace[QD_ERROR_TRACE_BYTES];
    size_t trace_length;
    int frames_left_out;
} qd_error_record;

/* Saves this thread's message and trace, and restores them. */
void qd_error_keep(qd_error_record *kept);
void qd_error_put_back(const qd_error_record *kept);
#endif
