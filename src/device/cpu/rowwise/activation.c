/* Activation functions: checks and ranges of rows; the arithmetic is in activation_isa.c. */
#include "device/cpu/kernels_impl.h"

static qd_status check(const char *kernel, const qd_activation_args *a)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    if (a->kind != QD_ACT_GELU_TANH && a->kind != QD_ACT_GELU && !qd_activation_is_gated(a->kind))
        return QD_FAIL(QD_UNSUPPORTED, "%s: unknown activation %d", kernel, (int)a->kind);
    if (a->kind == QD_ACT_SWIGLU_CLAMPED && !(a->limit > 0.0f))
        return QD_FAIL(QD_USAGE, "%s: the limit of a clamped SwiGLU is %g: it must be above 0", kernel, (double)a->limit);
    return QD_OK;
}

qd_status qd_cpu_activation_forward(qd_stream *stream, const qd_activation_args *a)
{
    QD_TRY(check("activation_forward", a));
    const qd_cpu_activation_ops *ops = qd_cpu_activation_ops_for(qd_cpu_of(stream));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), ops->forward, a);
    return QD_OK;
}

qd_status qd_cpu_activation_backward(qd_stream *stream, const qd_activation_args *a)
{
    QD_TRY(check("activation_backward", a));
    const qd_cpu_activation_ops *ops = qd_cpu_activation_ops_for(qd_cpu_of(stream));
    if (a->y)
        qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), ops->forward, a);
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), ops->backward, a);
    return QD_OK;
}
