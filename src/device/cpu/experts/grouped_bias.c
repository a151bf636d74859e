/* Biases of experts: the split into rows of one expert, or into experts. */
#include "device/cpu/kernels_impl.h"

qd_status qd_cpu_grouped_bias(qd_stream *stream, const qd_grouped_bias_args *a)
{
    const qd_cpu_grouped_bias_ops *ops = qd_cpu_grouped_bias_ops_for(qd_cpu_of(stream));
    int64_t at = 0, end = a->begin + a->rows;
    QD_TRY(qd_grouped_bias_check("grouped_bias", a));
    for (int s = 0; s < a->sources; s++)
        for (int e = 0; e < a->experts; e++) {
            int64_t first = at, last = at + a->counts[s * a->count_stride + e];
            at = last;
            first = first < a->begin ? a->begin : first;
            last = last > end ? end : last;
            if (first < last)
                qd_cpu_for(stream, last - first, qd_cpu_row_grain(a->n), ops->add, &(qd_cpu_grouped_bias_job){a, first - a->begin, e});
        }
    return QD_OK;
}

qd_status qd_cpu_grouped_bias_grad(qd_stream *stream, const qd_grouped_bias_args *a)
{
    QD_TRY(qd_grouped_bias_check("grouped_bias_grad", a));
    qd_cpu_for(stream, a->experts, 1, qd_cpu_grouped_bias_ops_for(qd_cpu_of(stream))->sum, a);
    return QD_OK;
}
