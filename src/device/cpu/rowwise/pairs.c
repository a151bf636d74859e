/* Sequences that are compared in pairs: sums of their log-probabilities, and the loss of pairs. */
#include "device/cpu/kernels_impl.h"
#include "device/pair_loss.h"

#include <string.h>

/* Rows are added one by one, in double: the order does not depend on the number of threads. */
static void sum_windows(void *context, int64_t begin, int64_t end, int thread)
{
    const qd_pair_sums_args *a = context;
    const qd_pair_rows *r = &a->rows;
    (void)thread;
    for (int64_t window = begin; window < end; window++) {
        double *scores = a->scores + window * r->sequences;
        memset(scores, 0, (size_t)r->sequences * sizeof *scores);
        for (int64_t row = window * r->rows; row < (window + 1) * r->rows; row++)
            if (r->sequence[row] >= 0)
                scores[r->sequence[row] >> 1] +=
                    (double)r->weight[row] * (double)a->losses[row] + ((double)r->reference[row] + (double)r->rest[row]);
    }
}

static qd_status check(const char *kernel, const qd_pair_rows *r)
{
    for (int64_t row = 0; row < r->windows * r->rows; row++)
        if (r->sequence[row] >> 1 >= r->sequences)
            return QD_FAIL(QD_USAGE, "%s: row %lld is of sequence %d; a window has at most %lld", kernel, (long long)row,
                           r->sequence[row] >> 1, (long long)r->sequences);
    return QD_OK;
}

qd_status qd_cpu_pair_sums(qd_stream *stream, const qd_pair_sums_args *a)
{
    QD_TRY(check("pair_sums", &a->rows));
    qd_cpu_for(stream, a->rows.windows, 1, sum_windows, a);
    return QD_OK;
}

qd_status qd_cpu_pair_loss(qd_stream *stream, const qd_pair_loss_args *a)
{
    (void)stream;
    QD_TRY(check("pair_loss", &a->rows));
    for (int64_t row = 0; row < a->rows.windows * a->rows.rows; row++)
        a->factors[row] = qd_pair_row(a, row, a->figures);
    return QD_OK;
}
