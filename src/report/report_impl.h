/* How the page's data is put together; the page reads it in page/data.js. */
#ifndef QD_REPORT_REPORT_IMPL_H
#define QD_REPORT_REPORT_IMPL_H

#include "base/text/json_writer.h"

#include <quadrille/report.h>

/* The page around the data: texts inside the library, ended by '\0'. */
typedef struct qd_page {
    const char *html; /* with the marks <!--title-->, <!--style-->, <!--data--> and <!--script-->, in this order */
    const char *style;
    const char *const *scripts; /* in the order in which they run, ended by NULL */
} qd_page;
qd_page qd_page_parts(void);

/* Bytes as base64: columns of little-endian numbers, which the page reads as typed arrays. */
qd_status qd_report_put_column(qd_json_writer *w, const char *key, const void *data, size_t bytes);

/* Time from `begin` to `end`. */
typedef struct qd_span {
    double begin, end;
} qd_span;
/* Sorts, joins what touches, drops what is empty; returns how many are left. */
int64_t qd_spans_join(qd_span *spans, int64_t count);
double qd_spans_length(const qd_span *joined, int64_t count);
/* Length of what is in both; both joined. */
double qd_spans_overlap(const qd_span *a, int64_t a_count, const qd_span *b, int64_t b_count);

/* What is in a and not in b, both joined, into `left`, which has room for a_count + b_count;
 * returns how many. */
int64_t qd_spans_subtract(const qd_span *a, int64_t a_count, const qd_span *b, int64_t b_count, qd_span *left);

/* A timeline made ready: events in the order of rank, stream and begin, each with its rank's
 * index. */
typedef struct qd_sorted_event {
    const qd_report_event *event;
    int32_t rank; /* index in the timeline's ranks */
    int32_t action; /* index in the table of different actions */
} qd_sorted_event;

typedef struct qd_sorted {
    const qd_report_timeline *timeline;
    qd_sorted_event *events;
    int64_t count;
    double origin; /* of the earliest event */
    int64_t world; /* ranks that bytes are the sum of */
    double weight; /* sum of stands_for */
    struct qd_step_span {
        int64_t step;
        double begin, end; /* over all ranks, from the origin */
    } *steps; /* in ascending order */
    int64_t step_count;
} qd_sorted;

/* Where the time goes: per rank, per kind of communication, per action name. */
qd_status qd_report_put_shares(qd_json_writer *w, const qd_sorted *sorted);
/* A whole timeline as a member of the object that is being written. */
qd_status qd_report_put_timeline(qd_json_writer *w, const char *key, const qd_report_timeline *timeline);

/* A trace from memory; `text` is ended by '\0', `file` stands for it in messages. */
qd_status qd_report_trace_read(const char *file, const char *text, const char *name, qd_report_trace **trace);

static inline double qd_rank_weight(const qd_report_rank *rank)
{
    return rank->stands_for > 0 ? (double)rank->stands_for : 1.0;
}
#endif
