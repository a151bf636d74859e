/* Activation functions: checks and ranges of rows; the arithmetic is in activation_isa.c. */
#include "device/cpu/kernels_impl.h"

qd_status qd_cpu_activation_forward(qd_stream *stream, const qd_activation_args *a)
{
    QD_TRY(qd_activation_check("activation_forward", a));
    const qd_cpu_activation_ops *ops = qd_cpu_activation_ops_for(qd_cpu_of(stream));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), ops->forward, a);
    return QD_OK;
}

qd_status qd_cpu_activation_backward(qd_stream *stream, const qd_activation_args *a)
{
    QD_TRY(qd_activation_check("activation_backward", a));
    const qd_cpu_activation_ops *ops = qd_cpu_activation_ops_for(qd_cpu_of(stream));
    if (a->y)
        qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), ops->forward, a);
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), ops->backward, a);
    return QD_OK;
}
