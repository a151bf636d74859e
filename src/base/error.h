/* A failure that is kept while something else, which may fail too, is done about it. */
#ifndef QD_BASE_ERROR_H
#define QD_BASE_ERROR_H

#include <quadrille/status.h>
#include <stddef.h>

enum { QD_ERROR_MESSAGE_BYTES = 2048, QD_ERROR_TRACE_BYTES = 2048 };

/* Fixed in size, so that running out of memory can be recorded too. */
typedef struct qd_error_record {
    char message[QD_ERROR_MESSAGE_BYTES];
    char trace[QD_ERROR_TRACE_BYTES];
    size_t trace_length;
    int frames_left_out;
} qd_error_record;

/* This thread's failure, message and trace; and it is this thread's again. */
void qd_error_keep(qd_error_record *kept);
void qd_error_put_back(const qd_error_record *kept);
#endif
