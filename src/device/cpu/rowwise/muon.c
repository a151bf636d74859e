/* The element-wise steps of Muon: checks and ranges. */
#include "device/cpu/kernels_impl.h"

#include <math.h>

qd_status qd_cpu_momentum(qd_stream *stream, const qd_momentum_args *a)
{
    QD_TRY(qd_check_float("momentum", "the gradient", a->grad_dtype));
    if (isfinite(*a->grad_scale))
        qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_muon_ops_for(qd_cpu_of(stream))->momentum, a);
    return QD_OK;
}

qd_status qd_cpu_unit_norm(qd_stream *stream, const qd_unit_norm_args *a)
{
    if (!(a->eps > 0))
        return QD_FAIL(QD_USAGE, "unit_norm: eps is %g; it must be above 0", a->eps);
    double sum = 0.0;
    for (int64_t row = 0; row < a->rows; row++)
        sum += a->row_squares[row];
    double norm = sqrt(sum);
    qd_cpu_unit_norm_job job = {a, (float)(1.0 / (norm < a->eps ? a->eps : norm))}; /* NaN stays NaN */
    qd_cpu_for(stream, a->rows * a->cols, QD_CPU_GRAIN, qd_cpu_muon_ops_for(qd_cpu_of(stream))->unit_norm, &job);
    return QD_OK;
}

qd_status qd_cpu_axpby(qd_stream *stream, const qd_axpby_args *a)
{
    qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_muon_ops_for(qd_cpu_of(stream))->axpby, a);
    return QD_OK;
}

qd_status qd_cpu_matrix_update(qd_stream *stream, const qd_matrix_update_args *a)
{
    QD_TRY(qd_check_float("matrix_update", "the parameter", a->param_dtype));
    if (!a->grad_scale || isfinite(*a->grad_scale))
        qd_cpu_for(stream, a->n, QD_CPU_GRAIN, qd_cpu_muon_ops_for(qd_cpu_of(stream))->matrix_update, a);
    return QD_OK;
}
