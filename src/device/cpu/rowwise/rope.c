/* Rotary embedding: checks and ranges of rows. */
#include "device/cpu/kernels_impl.h"

qd_status qd_cpu_rope(qd_stream *stream, const qd_rope_args *a)
{
    QD_TRY(qd_check_float("rope", "x", a->dtype));
    if (a->head_dim < 2 || a->head_dim % 2)
        return QD_FAIL(QD_USAGE, "rope: head size %d; it must be even, because pairs are rotated", a->head_dim);
    if (a->dims < 0 || a->dims % 2 || a->dims > a->head_dim)
        return QD_FAIL(QD_USAGE, "rope: %d of the %d elements of a head; it must be an even number of them", a->dims, a->head_dim);
    for (int64_t row = 0; a->positions && row < a->rows; row++)
        if (a->positions[row] < 0)
            return QD_FAIL(QD_USAGE, "rope: row %lld has position %d; positions start at 0", (long long)row,
                           a->positions[row]);
    int64_t grain = qd_cpu_row_grain((int64_t)a->heads * a->head_dim);
    qd_cpu_for(stream, a->rows, grain, qd_cpu_rope_ops_for(qd_cpu_of(stream))->rotate, a);
    return QD_OK;
}
