/* Cross-entropy over a whole or a sharded vocabulary: checks and ranges of rows. */
#include "device/cpu/kernels_impl.h"

qd_status qd_cpu_cross_entropy(qd_stream *stream, const qd_cross_entropy_args *a)
{
    QD_TRY(qd_check_float("cross_entropy", "logits", a->dtype));
    if (a->ld < a->vocab)
        return QD_FAIL(QD_USAGE, "cross_entropy: row stride %lld is less than the vocabulary of %lld",
                       (long long)a->ld, (long long)a->vocab);
    for (int64_t row = 0; row < a->rows; row++)
        if (a->targets[row] >= a->vocab)
            return QD_FAIL(QD_USAGE, "cross_entropy: row %lld has target %d; the vocabulary ends at %lld",
                           (long long)row, a->targets[row], (long long)a->vocab - 1);
    const qd_cpu_cross_entropy_ops *ops = qd_cpu_cross_entropy_ops_for(qd_cpu_of(stream));
    const qd_cpu_cross_entropy_job job = {a, qd_cpu_of(stream)};
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->vocab), ops->rows, &job);
    return QD_OK;
}

qd_status qd_cpu_cross_entropy_part(qd_stream *stream, const qd_cross_entropy_part_args *a)
{
    QD_TRY(qd_check_float("cross_entropy_part", "logits", a->dtype));
    if (a->ld < a->vocab)
        return QD_FAIL(QD_USAGE, "cross_entropy_part: row stride %lld is less than the %lld tokens of a row", (long long)a->ld,
                       (long long)a->vocab);
    for (int64_t row = 0; a->targets && row < a->rows; row++)
        if (a->targets[row] >= a->all)
            return QD_FAIL(QD_USAGE, "cross_entropy_part: row %lld has target %d; the vocabulary ends at %lld", (long long)row,
                           a->targets[row], (long long)a->all - 1);
    const qd_cpu_cross_entropy_ops *ops = qd_cpu_cross_entropy_ops_for(qd_cpu_of(stream));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->vocab), ops->part, a);
    return QD_OK;
}
