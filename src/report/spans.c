/* Set operations on lists of time spans. */
#include "report/report_impl.h"

#include <stdlib.h>

static int by_begin(const void *a, const void *b)
{
    double x = ((const qd_span *)a)->begin, y = ((const qd_span *)b)->begin;
    return (x > y) - (x < y);
}

int64_t qd_spans_join(qd_span *spans, int64_t count)
{
    int64_t kept = 0, sorted = 1;
    while (sorted < count && spans[sorted - 1].begin <= spans[sorted].begin)
        sorted++;
    if (sorted < count) /* mostly they are in order */
        qsort(spans, (size_t)count, sizeof *spans, by_begin);
    for (int64_t i = 0; i < count; i++) {
        if (!(spans[i].end > spans[i].begin))
            continue;
        if (kept > 0 && spans[i].begin <= spans[kept - 1].end) {
            if (spans[i].end > spans[kept - 1].end)
                spans[kept - 1].end = spans[i].end;
        } else {
            spans[kept++] = spans[i];
        }
    }
    return kept;
}

double qd_spans_length(const qd_span *joined, int64_t count)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++)
        sum += joined[i].end - joined[i].begin;
    return sum;
}

double qd_spans_overlap(const qd_span *a, int64_t a_count, const qd_span *b, int64_t b_count)
{
    double sum = 0.0;
    for (int64_t i = 0, k = 0; i < a_count && k < b_count;) {
        double begin = a[i].begin > b[k].begin ? a[i].begin : b[k].begin;
        double end = a[i].end < b[k].end ? a[i].end : b[k].end;
        if (end > begin)
            sum += end - begin;
        if (a[i].end < b[k].end)
            i++;
        else
            k++;
    }
    return sum;
}

int64_t qd_spans_subtract(const qd_span *a, int64_t a_count, const qd_span *b, int64_t b_count, qd_span *left)
{
    int64_t n = 0, k = 0;
    for (int64_t i = 0; i < a_count; i++) {
        double from = a[i].begin;
        while (k < b_count && b[k].end <= from)
            k++;
        for (int64_t j = k; j < b_count && b[j].begin < a[i].end; j++) {
            if (b[j].begin > from)
                left[n++] = (qd_span){from, b[j].begin};
            from = b[j].end;
        }
        if (from < a[i].end)
            left[n++] = (qd_span){from, a[i].end};
    }
    return n;
}
