/* LayerNorm and RMSNorm: checks, ranges of rows and sums of the parameter gradients. */
#include "device/cpu/kernels_impl.h"

static qd_status find_amax(qd_stream *stream, const void *x, int64_t n, qd_dtype dtype, float *amax)
{
    return !amax ? QD_OK : qd_cpu_amax(stream, &(qd_amax_args){.x = x, .amax = amax, .n = n, .dtype = dtype});
}

qd_status qd_cpu_norm_forward(qd_stream *stream, const qd_norm_forward_args *a)
{
    QD_TRY(qd_check_float("norm_forward", "x", a->dtype));
    QD_TRY(qd_check_float("norm_forward", "gamma", a->param_dtype));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_norm_ops_for(qd_cpu_of(stream))->forward, a);
    return find_amax(stream, a->y, a->rows * a->cols, a->dtype, a->amax);
}

typedef struct norm_backward_job {
    const qd_norm_backward_args *args;
    const qd_cpu_norm_ops *ops;
} norm_backward_job;

/* part: (dgamma (cols), if requested | dbeta (cols), if requested) */
static void backward_block(void *context, int64_t begin, int64_t end, float *part)
{
    const norm_backward_job *job = context;
    const qd_norm_backward_args *a = job->args;
    float *dgamma = a->dgamma ? part : NULL;
    float *dbeta = a->dbeta ? part + (a->dgamma ? a->cols : 0) : NULL;
    job->ops->backward(a, begin, end, dgamma, dbeta);
}

static qd_status branch_grad(qd_stream *stream, const qd_norm_backward_args *a, const void *dy, void *grad)
{
    return !grad ? QD_OK : qd_cpu_bias_grad(stream, &(qd_bias_grad_args){
        .dy = dy, .grad = grad, .rows = a->rows, .cols = a->cols, .accumulate = a->accumulate, .dtype = a->dtype,
        .grad_dtype = a->grad_dtype});
}

qd_status qd_cpu_norm_backward(qd_stream *stream, const qd_norm_backward_args *a)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    QD_TRY(qd_check_float("norm_backward", "x", a->dtype));
    QD_TRY(qd_check_float("norm_backward", "gamma", a->param_dtype));
    if (a->dgamma || a->dbeta)
        QD_TRY(qd_check_float("norm_backward", "dgamma", a->grad_dtype));
    QD_TRY(branch_grad(stream, a, a->add, a->add_grad)); /* first, because dx may overwrite add */
    norm_backward_job job = {a, qd_cpu_norm_ops_for(cpu)};
    const float *sum;
    int64_t width = (a->dgamma ? a->cols : 0) + (a->dbeta ? a->cols : 0);
    QD_TRY(qd_cpu_row_sum(cpu, "norm_backward", a->rows, width, backward_block, &job, &sum));
    const qd_cpu_reduce_ops *reduce = qd_cpu_reduce_ops_for(cpu);
    if (a->dgamma) {
        reduce->put_grad(a->dgamma, a->grad_dtype, sum, a->cols, a->accumulate);
        sum += a->cols;
    }
    if (a->dbeta)
        reduce->put_grad(a->dbeta, a->grad_dtype, sum, a->cols, a->accumulate);
    QD_TRY(find_amax(stream, a->dx, a->rows * a->cols, a->dtype, a->amax));
    return branch_grad(stream, a, a->dx, a->dx_grad);
}
