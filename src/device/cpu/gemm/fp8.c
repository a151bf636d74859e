/* fp8 on the CPU, which has no such units: the reference that emulates what GPUs compute, so that
 * fp8 training can be tested everywhere. Casts round as the hardware does; codes multiply
 * exactly in fp32 and are summed there, in ascending k. With scales of blocks, each block of k has
 * a sum of its own, which is scaled and added in fp32, as GPUs do it outside their tensor cores. */
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

static qd_status add_sums(qd_stream *stream, const qd_fp8_cast_args *a)
{
    return !a->sums ? QD_OK : qd_cpu_bias_grad(stream, &(qd_bias_grad_args){
        .dy = a->x, .grad = a->sums, .rows = a->rows, .cols = a->cols, .accumulate = a->accumulate, .dtype = a->dtype,
        .grad_dtype = a->sums_dtype});
}

static float value_at(const qd_cpu_scaled_job *job, int64_t row, int64_t i)
{
    const int64_t at = row * job->row_step + i * job->k_step;
    return job->dtype == QD_F32 ? ((const float *)job->x)[at] : qd_bf16_to_f32(((const uint16_t *)job->x)[at]);
}

/* Groups [begin, end) of rows that share scales. */
static void cast_groups(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_cpu_scaled_job *job = context;
    const int64_t high = qd_fp8_scale_rows(job->scaling, job->rows), length = qd_fp8_scale_length(job->scaling, job->k);
    uint8_t *codes = job->codes;
    float *scales = (float *)(codes + qd_fp8_scale_at(job->rows * job->k));
    for (int64_t group = begin; group < end; group++)
        for (int64_t i0 = 0; i0 < job->k; i0 += length) {
            const int64_t r0 = group * high, r1 = r0 + high < job->rows ? r0 + high : job->rows;
            const int64_t i1 = i0 + length < job->k ? i0 + length : job->k;
            uint32_t most = 0; /* magnitudes compare as integers, NaNs above all numbers */
            for (int64_t r = r0; r < r1; r++)
                for (int64_t i = i0; i < i1; i++) {
                    uint32_t bits = qd_f32_bits(value_at(job, r, i)) & 0x7fffffffu;
                    most = bits > most ? bits : most;
                }
            const float scale = qd_fp8_scale(qd_f32_from_bits(most), job->to), factor = 1.0f / scale;
            for (int64_t r = r0; r < r1; r++)
                for (int64_t i = i0; i < i1; i++)
                    codes[r * job->k + i] = qd_f32_to_fp8(value_at(job, r, i) * factor, job->to);
            scales[qd_fp8_scale_index(job->scaling, job->rows, job->k, r0, i0 / QD_FP8_BLOCK)] = scale;
        }
}

static void cast_scaled(qd_stream *stream, const qd_fp8_cast_args *a, void *codes, int64_t rows, int64_t k, int64_t row_step,
                        int64_t k_step)
{
    const qd_cpu_scaled_job job = {a->x, codes, rows, k, row_step, k_step, a->scaling, a->dtype, a->to_dtype};
    const int64_t high = qd_fp8_scale_rows(a->scaling, rows);
    if (codes)
        qd_cpu_for(stream, (rows + high - 1) / high, 1 + qd_cpu_row_grain(k) / high, cast_groups, &job);
}

qd_status qd_cpu_fp8_cast(qd_stream *stream, const qd_fp8_cast_args *a)
{
    QD_TRY(qd_fp8_cast_check(a));
    QD_TRY(check_activation(a->of));
    if (a->sums && a->of)
        return QD_FAIL(QD_UNSUPPORTED, "fp8_cast: a CPU does not sum the gradient of an activation while it casts it");
    if (a->scaling != QD_FP8_TENSOR) {
        cast_scaled(stream, a, a->to, a->rows, a->cols, a->cols, 1);
        cast_scaled(stream, a, a->transposed, a->cols, a->rows, 1, a->cols);
        return add_sums(stream, a);
    }
    put_scale(a->to, a->rows * a->cols, a->amax, a->to_dtype);
    put_scale(a->transposed, a->rows * a->cols, a->amax, a->to_dtype);
    if (a->of)
        put_scale(a->result_transposed, a->rows * a->of->cols, a->result_amax, QD_F8E4M3);
    qd_cpu_cast_job job = {a, qd_cpu_of(stream)};
    qd_pool_for(job.cpu->pool, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_fp8_ops_for(job.cpu)->cast, &job);
    return add_sums(stream, a);
}

void qd_cpu_matmul_fp8(qd_stream *stream, const qd_matmul_args *a)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    qd_cpu_fp8_job job = {a, cpu};
    qd_pool_for(cpu->pool, (a->n + QD_CPU_FP8_COLUMNS - 1) / QD_CPU_FP8_COLUMNS, 1, qd_cpu_fp8_ops_for(cpu)->multiply, &job);
}
