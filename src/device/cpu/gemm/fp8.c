/* fp8 on the CPU, which has no such units: the reference that emulates what GPUs compute, so that
 * fp8 training can be tested everywhere. Casts round as the hardware does; codes multiply
 * exactly in fp32 and are summed there, in ascending k. */
#include "device/cpu/kernels_impl.h"

#include "base/fp8.h"

qd_status qd_cpu_amax(qd_stream *stream, const qd_amax_args *a)
{
    QD_TRY(qd_check_float("amax", "x", a->dtype));
    qd_cpu_amax_job job = {.args = a};
    qd_pool_for(qd_cpu_of(stream)->pool, a->n, QD_CPU_GRAIN, qd_cpu_fp8_ops_for(qd_cpu_of(stream))->amax, &job);
    *a->amax = qd_f32_from_bits(job.bits);
    return QD_OK;
}

qd_status qd_cpu_fp8_cast(qd_stream *stream, const qd_fp8_cast_args *a)
{
    QD_TRY(qd_fp8_cast_check(a));
    const float scale = qd_fp8_scale(*a->amax, a->to_dtype);
    void *const copies[] = {a->to, a->transposed};
    for (int i = 0; i < 2; i++)
        if (copies[i])
            *(float *)((char *)copies[i] + qd_fp8_scale_at(a->rows * a->cols)) = scale;
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_fp8_ops_for(qd_cpu_of(stream))->cast, a);
    return QD_OK;
}

void qd_cpu_matmul_fp8(qd_stream *stream, const qd_matmul_args *a)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    qd_cpu_fp8_job job = {a, cpu};
    qd_pool_for(cpu->pool, (a->n + QD_CPU_FP8_COLUMNS - 1) / QD_CPU_FP8_COLUMNS, 1, qd_cpu_fp8_ops_for(cpu)->multiply, &job);
}
