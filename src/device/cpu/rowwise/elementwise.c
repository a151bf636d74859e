/* Element-wise kernels: add, cast, clip, scale, soft-cap and row copies with conversion. */
#include "device/cpu/kernels_impl.h"

qd_status qd_cpu_add(qd_stream *stream, const qd_add_args *a)
{
    QD_TRY(qd_check_float("add", "a", a->a_dtype));
    QD_TRY(qd_check_float("add", "b", a->b_dtype));
    QD_TRY(qd_check_float("add", "y", a->y_dtype));
    qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_elementwise_ops_for(qd_cpu_of(stream))->add, a);
    return QD_OK;
}

qd_status qd_cpu_cast(qd_stream *stream, const qd_cast_args *a)
{
    QD_TRY(qd_check_float("cast", "from", a->from_dtype));
    QD_TRY(qd_check_float("cast", "to", a->to_dtype));
    qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_elementwise_ops_for(qd_cpu_of(stream))->cast, a);
    return QD_OK;
}

qd_status qd_cpu_clip(qd_stream *stream, const qd_clip_args *a)
{
    QD_TRY(qd_check_float("clip", "x", a->dtype));
    qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_elementwise_ops_for(qd_cpu_of(stream))->clip, a);
    return QD_OK;
}

qd_status qd_cpu_clip_backward(qd_stream *stream, const qd_clip_args *a)
{
    QD_TRY(qd_check_float("clip_backward", "x", a->dtype));
    qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_elementwise_ops_for(qd_cpu_of(stream))->clip_backward, a);
    return QD_OK;
}

qd_status qd_cpu_scale(qd_stream *stream, const qd_scale_args *a)
{
    QD_TRY(qd_check_float("scale", "x", a->dtype));
    qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_elementwise_ops_for(qd_cpu_of(stream))->scale, a);
    return QD_OK;
}

qd_status qd_cpu_softcap(qd_stream *stream, const qd_softcap_args *a)
{
    QD_TRY(qd_check_float("softcap", "x", a->dtype));
    qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_elementwise_ops_for(qd_cpu_of(stream))->softcap, a);
    return QD_OK;
}

qd_status qd_cpu_copy_rows(qd_stream *stream, const qd_copy_rows_args *a)
{
    QD_TRY(qd_check_float("copy_rows", "from", a->from_dtype));
    QD_TRY(qd_check_float("copy_rows", "to", a->to_dtype));
    if (a->from_stride < a->cols || a->to_stride < a->cols)
        return QD_FAIL(QD_USAGE, "copy_rows: strides %lld and %lld are shorter than rows of %lld", (long long)a->from_stride,
                       (long long)a->to_stride, (long long)a->cols);
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_elementwise_ops_for(qd_cpu_of(stream))->copy_rows, a);
    return QD_OK;
}
