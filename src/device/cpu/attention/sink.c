/* Attention sinks: checks, and ranges of rows or heads. */
#include "device/cpu/kernels_impl.h"

static qd_status check(const char *kernel, const qd_sink_args *a)
{
    QD_TRY(qd_check_float(kernel, "sink", a->param_dtype));
    if (a->batch < 0 || a->seq < 0 || a->heads < 1 || a->first < 0 || a->first + a->heads > a->all)
        return QD_FAIL(QD_USAGE, "%s: heads %d to %d of %d, %lld sequences of %lld rows", kernel, a->first, a->first + a->heads, a->all,
                       (long long)a->batch, (long long)a->seq);
    return QD_OK;
}

qd_status qd_cpu_sink(qd_stream *stream, const qd_sink_args *a)
{
    QD_TRY(check("sink", a));
    QD_TRY(qd_check_float("sink", "o", a->dtype));
    int64_t cols = (int64_t)a->heads * a->head_dim;
    if (a->head_dim < 1 || a->o_stride < cols)
        return QD_FAIL(QD_USAGE, "sink: rows of %lld elements cannot have %d heads of %d", (long long)a->o_stride, a->heads, a->head_dim);
    qd_cpu_for(stream, a->batch * a->seq, qd_cpu_row_grain(cols), qd_cpu_sink_ops_for(qd_cpu_of(stream))->forward, a);
    return QD_OK;
}

qd_status qd_cpu_sink_backward(qd_stream *stream, const qd_sink_args *a)
{
    QD_TRY(check("sink_backward", a));
    QD_TRY(qd_check_float("sink_backward", "gradient", a->grad_dtype));
    qd_cpu_for(stream, a->all, qd_cpu_row_grain(a->batch * a->seq), qd_cpu_sink_ops_for(qd_cpu_of(stream))->backward, a);
    return QD_OK;
}
