/* Kernels on rows of experts: permute, grouped GEMM, combine, gates of shared experts; and the
 * update of expert biases. */
#include "device/cpu/kernels_impl.h"

#include "base/half.h"
#include "device/split_master.h"

#include <math.h>

qd_status qd_cpu_permute(qd_stream *stream, const qd_permute_args *a)
{
    QD_TRY(qd_check_float("permute", "x", a->dtype));
    int64_t places = 0;
    for (int e = 0; e < a->experts; e++)
        places += a->count[e];
    if (places > a->rows * a->per_token)
        return QD_FAIL(QD_USAGE, "permute: %lld places for %lld assignments; places must not exceed assignments", (long long)places,
                       (long long)(a->rows * a->per_token));
    for (int64_t i = 0; a->old && i < a->rows * a->per_token; i++)
        if (a->place[i] < 0)
            a->d_weight[i] = 0.0f;
    qd_cpu_for(stream, places, qd_cpu_row_grain(a->cols), qd_cpu_expert_rows_ops_for(qd_cpu_of(stream))->permute, a);
    return QD_OK;
}

qd_status qd_cpu_combine(qd_stream *stream, const qd_combine_args *a)
{
    QD_TRY(qd_check_float("combine", "x", a->dtype));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols * a->per_token), qd_cpu_expert_rows_ops_for(qd_cpu_of(stream))->combine, a);
    return QD_OK;
}

qd_status qd_cpu_gate(qd_stream *stream, const qd_gate_args *a)
{
    QD_TRY(qd_check_float("gate", "x", a->dtype));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_expert_rows_ops_for(qd_cpu_of(stream))->gate, a);
    return QD_OK;
}

qd_status qd_cpu_gate_backward(qd_stream *stream, const qd_gate_args *a)
{
    QD_TRY(qd_check_float("gate_backward", "x", a->dtype));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_expert_rows_ops_for(qd_cpu_of(stream))->gate_backward, a);
    return QD_OK;
}

static void *matrix_of(const qd_grouped_args *a, int expert)
{
    return qd_cpu_at_mut(a->b, expert * (a->b_stride ? a->b_stride : a->n * a->k), a->b_dtype);
}

/* One GEMM over the rows that an expert has from one source. accumulate: by experts, added to b. */
static qd_status expert_gemm(qd_stream *stream, const qd_grouped_args *a, int expert, int64_t row, int64_t rows, bool accumulate)
{
    const int64_t lda = a->a_stride ? a->a_stride : a->k, ldc = a->c_stride ? a->c_stride : a->n;
    const void *x = qd_cpu_at(a->a, row * lda, a->a_dtype);
    void *weight = matrix_of(a, expert), *y = qd_cpu_at_mut(a->c, row * ldc, a->c_dtype);
    if (a->by_experts)
        return qd_cpu_matmul(stream, &(qd_matmul_args){
            .a = y, .b = x, .c = weight, .m = a->n, .n = a->k, .k = rows, .lda = ldc, .ldb = lda, .ldc = a->k, .trans_a = true,
            .accumulate = accumulate, .a_dtype = a->c_dtype, .b_dtype = a->a_dtype, .c_dtype = a->b_dtype});
    return qd_cpu_matmul(stream, &(qd_matmul_args){
        .a = x, .b = weight, .c = y, .m = rows, .n = a->n, .k = a->k, .lda = lda, .ldb = a->trans_b ? a->k : a->n, .ldc = ldc,
        .trans_b = a->trans_b, .accumulate = a->add_rows, .a_dtype = a->a_dtype, .b_dtype = a->b_dtype, .c_dtype = a->c_dtype});
}

/* Bias and SwiGLU of rows of an expert whose GEMM is done. */
static qd_status finish(qd_stream *stream, const qd_grouped_args *a, int expert, int64_t row, int64_t rows)
{
    const qd_dtype t = a->c_dtype;
    const qd_activation kind = a->limit > 0.0f ? QD_ACT_SWIGLU_CLAMPED : QD_ACT_SWIGLU;
    const int32_t count = (int32_t)rows;
    if (a->bias)
        QD_TRY(qd_cpu_grouped_bias(stream, &(qd_grouped_bias_args){
            .x = qd_cpu_at_mut(a->c, row * a->n, t), .bias = (void *)(uintptr_t)qd_cpu_at(a->bias, expert * a->n, a->bias_dtype),
            .counts = &count, .rows = rows, .width = a->n, .n = a->n, .sources = 1, .experts = 1, .dtype = t,
            .bias_dtype = a->bias_dtype}));
    if (a->gate_up)
        return qd_cpu_activation_backward(stream, &(qd_activation_args){
            .kind = kind, .x = qd_cpu_at(a->gate_up, row * 2 * a->n, t), .dy = qd_cpu_at(a->c, row * a->n, t),
            .dx = qd_cpu_at_mut(a->d_gate_up, row * 2 * a->n, t), .y = a->active ? qd_cpu_at_mut(a->active, row * a->n, t) : NULL,
            .rows = rows, .cols = a->n, .alpha = a->alpha, .limit = a->limit, .dtype = t});
    return !a->active ? QD_OK : qd_cpu_activation_forward(stream, &(qd_activation_args){
        .kind = kind, .x = qd_cpu_at(a->c, row * a->n, t), .y = qd_cpu_at_mut(a->active, row * a->n / 2, t), .rows = rows,
        .cols = a->n / 2, .alpha = a->alpha, .limit = a->limit, .dtype = t});
}

static qd_status zero_weights(qd_stream *stream, const qd_grouped_args *a, int expert, int experts)
{
    for (int e = expert; e < expert + experts; e++)
        QD_TRY(qd_fill_zero(stream, matrix_of(a, e), a->n * a->k * (int64_t)qd_dtype_size(a->b_dtype)));
    return QD_OK;
}

qd_status qd_cpu_grouped(qd_stream *stream, const qd_grouped_args *a)
{
    QD_TRY(qd_grouped_check(a));
    int64_t at = 0, end = a->begin + a->rows;
    bool overwrite = a->by_experts && !a->accumulate;
    if (overwrite && a->sources != 1) { /* which source is the first with rows of an expert is not known until all have been read */
        QD_TRY(zero_weights(stream, a, 0, a->experts));
        overwrite = false;
    }
    for (int s = 0; s < a->sources; s++) {
        for (int e = 0; e < a->experts; e++) {
            int64_t first = at, last = at + a->counts[s * a->count_stride + e];
            at = last;
            first = first < a->begin ? a->begin : first;
            last = last > end ? end : last;
            if (first < last) {
                QD_TRY(expert_gemm(stream, a, e, first - a->begin, last - first, !overwrite));
                QD_TRY(finish(stream, a, e, first - a->begin, last - first));
            } else if (overwrite) {
                QD_TRY(zero_weights(stream, a, e, 1));
            }
        }
    }
    return !a->squares ? QD_OK : qd_cpu_row_squares(stream, &(qd_row_squares_args){
        .x = a->b, .out = a->squares, .rows = a->experts * a->n, .cols = a->k, .dtype = a->b_dtype});
}

qd_status qd_cpu_expert_bias(qd_stream *stream, const qd_expert_bias_args *a)
{
    (void)stream;
    QD_TRY(qd_check_float("expert_bias", "param", a->param_dtype));
    QD_TRY(qd_check_rest("expert_bias", a->rest, a->param_dtype));
    if (a->grad_scale && !isfinite(*a->grad_scale))
        return QD_OK;
    for (int64_t e = 0; e < a->experts; e++) {
        double over = (double)a->total[e] - a->mean, before = a->rest ? qd_f32_join(((uint16_t *)a->param)[e], a->rest[e]) : a->bias[e];
        float bias = (float)(before - a->rate * (double)((over > 0.0) - (over < 0.0)));
        if (a->param_dtype == QD_BF16)
            ((uint16_t *)a->param)[e] = qd_f32_to_bf16(bias);
        else
            ((float *)a->param)[e] = bias;
        if (a->rest)
            a->rest[e] = qd_f32_rest(bias, ((uint16_t *)a->param)[e]);
        else
            a->bias[e] = bias;
    }
    return QD_OK;
}
