/* Internals of the report: embedded page, sorted timelines, time spans. page/data.js reads the
 * data. */
#ifndef QD_REPORT_REPORT_IMPL_H
#define QD_REPORT_REPORT_IMPL_H

#include "base/text/json_writer.h"

#include <quadrille/report.h>

/* The page around the data: NUL-terminated texts inside the library. */
typedef struct qd_page {
    const char *html; /* with markers such as <!--title-->, in the order of qd_report_page() */
    const char *style;
    const char *const *scripts; /* in execution order, NULL-terminated */
} qd_page;
qd_page qd_page_parts(void);

/* Figures, notes and curves, as members of an object. */
qd_status qd_report_put_progress(qd_json_writer *w, const qd_report *report);

/* Bytes as base64: columns of little-endian numbers, which the page reads as typed arrays. */
qd_status qd_report_put_column(qd_json_writer *w, const char *key, const void *data, size_t bytes);

/* Time from `begin` to `end`. */
typedef struct qd_span {
    double begin, end;
} qd_span;
/* Sorts spans, merges adjacent ones and drops empty ones; returns how many are left. */
int64_t qd_spans_join(qd_span *spans, int64_t count);
double qd_spans_length(const qd_span *joined, int64_t count);
/* Total length of the intersection of two lists of merged spans. */
double qd_spans_overlap(const qd_span *a, int64_t a_count, const qd_span *b, int64_t b_count);

/* Writes a minus b, both merged, to `left`, which has space for a_count + b_count; returns the
 * number of spans. */
int64_t qd_spans_subtract(const qd_span *a, int64_t a_count, const qd_span *b, int64_t b_count, qd_span *left);

/* What events of one action have in common; texts that are equal have one address. */
typedef struct qd_action_key {
    const char *name, *kind, *module, *group;
    int64_t bytes;
    double flops;
} qd_action_key;

/* A sorted timeline: events in the order of rank, stream and begin. Timelines of a large layout
 * exceed the processor's caches: an entry repeats what most readers need of its event. */
typedef struct qd_sorted_event {
    const qd_report_event *event;
    double begin, end, waited;
    int32_t rank; /* index in the timeline's ranks */
    int32_t action; /* index in `actions` */
} qd_sorted_event;

typedef struct qd_sorted {
    const qd_report_timeline *timeline;
    qd_sorted_event *events;
    int64_t count;
    const qd_action_key **actions; /* distinct ones */
    int32_t action_count;
    double origin; /* begin of the earliest event */
    int64_t world; /* number of ranks that byte counts are summed over */
    double weight; /* sum of stands_for */
    struct qd_step_span {
        int64_t step;
        double begin, end; /* over all ranks, from the origin */
    } *steps; /* in increasing order */
    int64_t step_count;
} qd_sorted;

/* The events by row, merged as the timeline asks for: tracks and columns. */
qd_status qd_report_put_events(qd_json_writer *w, const qd_sorted *sorted);
/* Where the time goes: per rank, per kind of communication, per action name. */
qd_status qd_report_put_shares(qd_json_writer *w, const qd_sorted *sorted);
/* Writes a timeline as a member of the current object. */
qd_status qd_report_put_timeline(qd_json_writer *w, const char *key, const qd_report_timeline *timeline);

static inline double qd_rank_weight(const qd_report_rank *rank)
{
    return rank->stands_for > 0 ? (double)rank->stands_for : 1.0;
}
#endif
