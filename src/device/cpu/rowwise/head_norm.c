/* RMSNorm of queries and keys per head: checks, ranges of rows and sums of the gamma gradients. */
#include "device/cpu/kernels_impl.h"

static qd_status check(const char *kernel, const qd_head_norm_args *a)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    QD_TRY(qd_check_float(kernel, "gamma", a->param_dtype));
    int64_t width = (int64_t)(a->heads + a->kv_heads) * a->head_dim;
    if (a->head_dim < 1 || a->row_stride < width)
        return QD_FAIL(QD_USAGE, "%s: rows of %lld elements are shorter than their queries and keys, %lld elements", kernel,
                       (long long)a->row_stride, (long long)width);
    return QD_OK;
}

qd_status qd_cpu_head_norm(qd_stream *stream, const qd_head_norm_args *a)
{
    QD_TRY(check("head_norm", a));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->row_stride), qd_cpu_head_norm_ops_for(qd_cpu_of(stream))->forward, a);
    return QD_OK;
}

typedef struct backward_job {
    const qd_head_norm_args *args;
    const qd_cpu_head_norm_ops *ops;
} backward_job;

static void backward_block(void *context, int64_t begin, int64_t end, float *part)
{
    const backward_job *job = context;
    job->ops->backward(job->args, begin, end, part);
}

qd_status qd_cpu_head_norm_backward(qd_stream *stream, const qd_head_norm_args *a)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    QD_TRY(check("head_norm_backward", a));
    QD_TRY(qd_check_float("head_norm_backward", "gradient", a->grad_dtype));
    backward_job job = {a, qd_cpu_head_norm_ops_for(cpu)};
    const float *sum;
    QD_TRY(qd_cpu_row_sum(cpu, "head_norm_backward", a->rows, 2 * (int64_t)a->head_dim, backward_block, &job, &sum));
    const qd_cpu_reduce_ops *reduce = qd_cpu_reduce_ops_for(cpu);
    if (a->q_grad)
        reduce->put_grad(a->q_grad, a->grad_dtype, sum, a->head_dim, a->accumulate);
    if (a->k_grad)
        reduce->put_grad(a->k_grad, a->grad_dtype, sum + a->head_dim, a->head_dim, a->accumulate);
    return QD_OK;
}
