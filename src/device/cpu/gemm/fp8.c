/* fp8 on the CPU, which has no such units: the reference that emulates what GPUs compute, so that
 * fp8 training can be tested everywhere. Casts round as the hardware does; codes multiply
 * exactly in fp32 and are summed there, in ascending k. */
#include "device/cpu/kernels_impl.h"

#include "base/fp8.h"

/* A row of values, and of results, is computed in the workspace of a thread. */
static qd_status check_activation(const qd_activation_args *of)
{
    if (!of)
        return QD_OK;
    QD_TRY(qd_activation_check("fp8_cast", of));
    if (of->cols * 3 * (int64_t)sizeof(float) > QD_CPU_WORKSPACE_BYTES)
        return QD_FAIL(QD_UNSUPPORTED, "fp8_cast: activations with rows of %lld elements", (long long)of->cols);
    return QD_OK;
}

static void put_scale(void *codes, int64_t elements, const float *amax, qd_dtype dtype)
{
    if (codes)
        *(float *)((char *)codes + qd_fp8_scale_at(elements)) = qd_fp8_scale(*amax, dtype);
}

qd_status qd_cpu_amax(qd_stream *stream, const qd_amax_args *a)
{
    QD_TRY(qd_check_float("amax", "x", a->dtype));
    qd_cpu_amax_job job = {.args = a, .cpu = qd_cpu_of(stream)};
    QD_TRY(check_activation(a->of));
    qd_pool_for(job.cpu->pool, a->of ? a->of->rows : a->n, a->of ? qd_cpu_row_grain(a->of->cols) : QD_CPU_GRAIN,
                qd_cpu_fp8_ops_for(job.cpu)->amax, &job);
    *a->amax = qd_f32_from_bits(job.bits);
    return QD_OK;
}

qd_status qd_cpu_fp8_cast(qd_stream *stream, const qd_fp8_cast_args *a)
{
    QD_TRY(qd_fp8_cast_check(a));
    QD_TRY(check_activation(a->of));
    if (a->sums && a->of)
        return QD_FAIL(QD_UNSUPPORTED, "fp8_cast: a CPU does not sum the gradient of an activation while it casts it");
    put_scale(a->to, a->rows * a->cols, a->amax, a->to_dtype);
    put_scale(a->transposed, a->rows * a->cols, a->amax, a->to_dtype);
    if (a->of)
        put_scale(a->result_transposed, a->rows * a->of->cols, a->result_amax, QD_F8E4M3);
    qd_cpu_cast_job job = {a, qd_cpu_of(stream)};
    qd_pool_for(job.cpu->pool, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_fp8_ops_for(job.cpu)->cast, &job);
    return !a->sums ? QD_OK : qd_cpu_bias_grad(stream, &(qd_bias_grad_args){
        .dy = a->x, .grad = a->sums, .rows = a->rows, .cols = a->cols, .accumulate = a->accumulate, .dtype = a->dtype,
        .grad_dtype = a->sums_dtype});
}

void qd_cpu_matmul_fp8(qd_stream *stream, const qd_matmul_args *a)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    qd_cpu_fp8_job job = {a, cpu};
    qd_pool_for(cpu->pool, (a->n + QD_CPU_FP8_COLUMNS - 1) / QD_CPU_FP8_COLUMNS, 1, qd_cpu_fp8_ops_for(cpu)->multiply, &job);
}
