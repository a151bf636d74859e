/* Attention sinks: ranges of rows or heads. */
#include "device/cpu/kernels_impl.h"

qd_status qd_cpu_sink(qd_stream *stream, const qd_sink_args *a)
{
    QD_TRY(qd_sink_check("sink", a, false));
    qd_cpu_for(stream, a->batch * a->seq, qd_cpu_row_grain((int64_t)a->heads * a->head_dim),
               qd_cpu_sink_ops_for(qd_cpu_of(stream))->forward, a);
    return QD_OK;
}

qd_status qd_cpu_sink_backward(qd_stream *stream, const qd_sink_args *a)
{
    QD_TRY(qd_sink_check("sink_backward", a, true));
    qd_cpu_for(stream, a->all, qd_cpu_row_grain(a->batch * a->seq), qd_cpu_sink_ops_for(qd_cpu_of(stream))->backward, a);
    return QD_OK;
}
