/* RMSNorm of all queries of a row, and of all keys: checks, ranges of rows and sums of the gamma
 * gradients. */
#include "device/cpu/kernels_impl.h"

static qd_status check(const char *kernel, const qd_qk_norm_args *a, bool gammas)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    if (gammas)
        QD_TRY(qd_check_float(kernel, "gamma", a->param_dtype));
    if (a->q_cols < 1 || a->k_cols < 1 || a->q_width < a->q_cols || a->k_width < a->k_cols || a->row_stride < a->q_cols + a->k_cols)
        return QD_FAIL(QD_USAGE, "%s: rows of %lld elements cannot have %lld of %lld query columns and %lld of %lld key columns", kernel,
                       (long long)a->row_stride, (long long)a->q_cols, (long long)a->q_width, (long long)a->k_cols, (long long)a->k_width);
    return QD_OK;
}

static const qd_cpu_qk_norm_ops *ops_of(qd_stream *stream)
{
    return qd_cpu_qk_norm_ops_for(qd_cpu_of(stream));
}

qd_status qd_cpu_qk_squares(qd_stream *stream, const qd_qk_norm_args *a)
{
    QD_TRY(check("qk_squares", a, false));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->row_stride), ops_of(stream)->squares, a);
    return QD_OK;
}

qd_status qd_cpu_qk_norm(qd_stream *stream, const qd_qk_norm_args *a)
{
    QD_TRY(check("qk_norm", a, true));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->row_stride), ops_of(stream)->forward, a);
    return QD_OK;
}

qd_status qd_cpu_qk_dots(qd_stream *stream, const qd_qk_norm_args *a)
{
    QD_TRY(check("qk_dots", a, true));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->row_stride), ops_of(stream)->dots, a);
    return QD_OK;
}

typedef struct backward_job {
    const qd_qk_norm_args *args;
    const qd_cpu_qk_norm_ops *ops;
} backward_job;

static void backward_block(void *context, int64_t begin, int64_t end, float *part)
{
    const backward_job *job = context;
    job->ops->backward(job->args, begin, end, part);
}

qd_status qd_cpu_qk_norm_backward(qd_stream *stream, const qd_qk_norm_args *a)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    QD_TRY(check("qk_norm_backward", a, true));
    QD_TRY(qd_check_float("qk_norm_backward", "gradient", a->grad_dtype));
    backward_job job = {a, ops_of(stream)};
    const float *sum;
    QD_TRY(qd_cpu_row_sum(cpu, "qk_norm_backward", a->rows, a->q_cols + a->k_cols, backward_block, &job, &sum));
    const qd_cpu_reduce_ops *reduce = qd_cpu_reduce_ops_for(cpu);
    if (a->q_grad)
        reduce->put_grad(a->q_grad, a->grad_dtype, sum, a->q_cols, a->accumulate);
    if (a->k_grad)
        reduce->put_grad(a->k_grad, a->grad_dtype, sum + a->q_cols, a->k_cols, a->accumulate);
    return QD_OK;
}
