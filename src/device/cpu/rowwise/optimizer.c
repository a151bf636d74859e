/* AdamW and SGD: checks and chunks of parameter ranges. */
#include "device/cpu/kernels_impl.h"
#include "device/split_master.h"

#include <math.h>

static int64_t count_chunks(const qd_param_range *ranges, int count)
{
    int64_t chunks = 0;
    for (int r = 0; r < count; r++)
        chunks += qd_cpu_range_chunks(&ranges[r]);
    return chunks;
}

qd_status qd_cpu_adamw(qd_stream *stream, const qd_adamw_args *a)
{
    QD_TRY(qd_check_float("adamw", "the parameter", a->param_dtype));
    QD_TRY(qd_check_float("adamw", "the gradient", a->grad_dtype));
    QD_TRY(qd_check_rest("adamw", a->rest, a->param_dtype));
    if (!(a->bias_correction1 > 0 && a->bias_correction2 > 0))
        return QD_FAIL(QD_USAGE, "adamw: bias corrections %g and %g; both are 1 - beta^step and above 0",
                       a->bias_correction1, a->bias_correction2);
    if (!isfinite(*a->grad_scale))
        return QD_OK;
    int64_t chunks = count_chunks(a->ranges, a->range_count);
    qd_cpu_for(stream, chunks, 1, qd_cpu_optimizer_ops_for(qd_cpu_of(stream))->adamw, a);
    return QD_OK;
}

qd_status qd_cpu_sgd(qd_stream *stream, const qd_sgd_args *a)
{
    QD_TRY(qd_check_float("sgd", "the parameter", a->param_dtype));
    QD_TRY(qd_check_float("sgd", "the gradient", a->grad_dtype));
    QD_TRY(qd_check_rest("sgd", a->rest, a->param_dtype));
    if (!a->m && a->momentum != 0)
        return QD_FAIL(QD_USAGE, "sgd: momentum %g needs a momentum buffer", a->momentum);
    if (!isfinite(*a->grad_scale))
        return QD_OK;
    int64_t chunks = count_chunks(a->ranges, a->range_count);
    qd_cpu_for(stream, chunks, 1, qd_cpu_optimizer_ops_for(qd_cpu_of(stream))->sgd, a);
    return QD_OK;
}
