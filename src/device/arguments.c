/* Argument checks that all devices share. Each returns one line that names the kernel and the
 * operand. */
#include "device/arguments_impl.h"

#include "base/fp8.h"

qd_status qd_check_float(const char *kernel, const char *what, qd_dtype dtype)
{
    if (dtype == QD_F32 || dtype == QD_BF16)
        return QD_OK;
    return QD_FAIL(QD_UNSUPPORTED, "%s: %s has type %s; fp32 and bf16 are supported", kernel, what,
                   qd_dtype_name(dtype));
}

bool qd_grouped_is_part(const qd_grouped_args *a)
{
    return a->a_stride || a->b_stride || a->c_stride || a->add_rows;
}

qd_status qd_grouped_check(const qd_grouped_args *a)
{
    QD_TRY(qd_check_float("grouped", "a", a->a_dtype));
    QD_TRY(qd_check_float("grouped", "b", a->b_dtype));
    QD_TRY(qd_check_float("grouped", "c", a->c_dtype));
    if (a->by_experts && (a->active || a->gate_up))
        return QD_FAIL(QD_USAGE, "grouped: SwiGLU can be fused into a GEMM by rows only, and this one is by experts");
    if (qd_grouped_is_part(a) && (a->active || a->gate_up || a->bias || a->squares))
        return QD_FAIL(QD_USAGE, "grouped: parts of matrices, and sums with rows, exclude a bias, SwiGLU and squares");
    if ((a->a_stride && a->a_stride < a->k) || (a->c_stride && a->c_stride < a->n) || (a->b_stride && a->b_stride < a->n * a->k))
        return QD_FAIL(QD_USAGE, "grouped: strides a %lld, b %lld, c %lld are shorter than matrices with n %lld, k %lld",
                       (long long)a->a_stride, (long long)a->b_stride, (long long)a->c_stride, (long long)a->n, (long long)a->k);
    if (a->bias && (a->by_experts || a->gate_up))
        return QD_FAIL(QD_USAGE, "grouped: a bias can be fused into a GEMM by rows only, without the gradient of SwiGLU");
    if (a->bias)
        QD_TRY(qd_check_float("grouped", "bias", a->bias_dtype));
    if (!a->gate_up != !a->d_gate_up)
        return QD_FAIL(QD_USAGE, "grouped: gate_up and d_gate_up must be given together");
    if (a->active && !a->gate_up && a->n % 2 != 0)
        return QD_FAIL(QD_USAGE, "grouped: gate and up are stored side by side, so n must be even, not %lld", (long long)a->n);
    return QD_OK;
}

static qd_status check_fp8(const qd_matmul_args *a)
{
    if (!qd_dtype_is_fp8(a->a_dtype) || !qd_dtype_is_fp8(a->b_dtype) || (a->a_dtype == QD_F8E5M2 && a->b_dtype == QD_F8E5M2))
        return QD_FAIL(QD_UNSUPPORTED, "matmul: operands of types %s and %s; with fp8 both must be, at most one of them E5M2",
                       qd_dtype_name(a->a_dtype), qd_dtype_name(a->b_dtype));
    if (a->trans_a || !a->trans_b || !a->a_scale || !a->b_scale)
        return QD_FAIL(QD_UNSUPPORTED, "matmul: fp8 operands are stored (m, k) and (n, k) and have scales");
    const bool in_blocks = a->a_scaling >= QD_FP8_VECTORS;
    if (in_blocks != (a->b_scaling >= QD_FP8_VECTORS) || (!in_blocks && a->a_scaling != a->b_scaling))
        return QD_FAIL(QD_UNSUPPORTED, "matmul: fp8 operands with scales of different kinds");
    if (a->n % 16 != 0 || a->k % 16 != 0 || a->lda % 16 != 0 || a->ldb % 16 != 0)
        return QD_FAIL(QD_UNSUPPORTED, "matmul: fp8 operands need n, k and row strides that are multiples of 16; they are %lld, %lld, "
                       "%lld and %lld", (long long)a->n, (long long)a->k, (long long)a->lda, (long long)a->ldb);
    if (a->gelu != QD_MATMUL_NO_GELU || a->bias_grad)
        return QD_FAIL(QD_UNSUPPORTED, "matmul: GELU and bias gradients cannot be fused into a GEMM of fp8 operands");
    return QD_OK;
}

qd_status qd_matmul_check(const qd_matmul_args *a)
{
    if (qd_dtype_is_fp8(a->a_dtype) || qd_dtype_is_fp8(a->b_dtype)) {
        QD_TRY(check_fp8(a));
    } else {
        QD_TRY(qd_check_float("matmul", "a", a->a_dtype));
        QD_TRY(qd_check_float("matmul", "b", a->b_dtype));
    }
    QD_TRY(qd_check_float("matmul", "c", a->c_dtype));
    if (a->m < 0 || a->n < 0 || a->k < 0)
        return QD_FAIL(QD_USAGE, "matmul: size (%lld, %lld, %lld) is negative", (long long)a->m, (long long)a->n,
                       (long long)a->k);
    if (a->lda < (a->trans_a ? a->m : a->k) || a->ldb < (a->trans_b ? a->k : a->n) || a->ldc < a->n)
        return QD_FAIL(
            QD_USAGE, "matmul: row strides a %lld, b %lld, c %lld are shorter than the rows of (%lld, %lld, %lld)",
            (long long)a->lda, (long long)a->ldb, (long long)a->ldc, (long long)a->m, (long long)a->n, (long long)a->k);
    if (a->gelu != QD_MATMUL_NO_GELU && (!a->aux || a->accumulate || a->residual))
        return QD_FAIL(QD_USAGE, "matmul: fused GELU needs aux and excludes accumulate and residual");
    if (a->gelu == QD_MATMUL_GELU_GRAD && a->bias)
        return QD_FAIL(QD_USAGE, "matmul: the fused derivative of GELU excludes a bias");
    if (a->residual && a->residual == a->c)
        return QD_FAIL(QD_USAGE, "matmul: residual must not be c; accumulate adds to c");
    return QD_OK;
}

qd_status qd_activation_check(const char *kernel, const qd_activation_args *a)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    if (a->kind != QD_ACT_GELU_TANH && a->kind != QD_ACT_GELU && !qd_activation_is_gated(a->kind))
        return QD_FAIL(QD_UNSUPPORTED, "%s: unknown activation %d", kernel, (int)a->kind);
    if (a->kind == QD_ACT_SWIGLU_CLAMPED && !(a->limit > 0.0f))
        return QD_FAIL(QD_USAGE, "%s: the limit of a clamped SwiGLU is %g: it must be above 0", kernel, (double)a->limit);
    return QD_OK;
}

qd_status qd_sink_check(const char *kernel, const qd_sink_args *a, bool backward)
{
    QD_TRY(qd_check_float(kernel, "sink", a->param_dtype));
    if (a->batch < 0 || a->seq < 0 || a->heads < 1 || a->first < 0 || a->first + a->heads > a->all)
        return QD_FAIL(QD_USAGE, "%s: heads %d to %d of %d, %lld sequences of %lld rows", kernel, a->first, a->first + a->heads, a->all,
                       (long long)a->batch, (long long)a->seq);
    if (backward)
        return qd_check_float(kernel, "gradient", a->grad_dtype);
    QD_TRY(qd_check_float(kernel, "o", a->dtype));
    if (a->head_dim < 1 || a->o_stride < (int64_t)a->heads * a->head_dim)
        return QD_FAIL(QD_USAGE, "%s: rows of %lld elements cannot have %d heads of %d", kernel, (long long)a->o_stride, a->heads,
                       a->head_dim);
    return QD_OK;
}

qd_status qd_grouped_bias_check(const char *kernel, const qd_grouped_bias_args *a)
{
    QD_TRY(qd_check_float(kernel, "x", a->dtype));
    QD_TRY(qd_check_float(kernel, "bias", a->bias_dtype));
    if (a->rows < 0 || a->first < 0 || a->n < 0 || a->first + a->n > a->width)
        return QD_FAIL(QD_USAGE, "%s: columns %lld to %lld of rows with %lld", kernel, (long long)a->first, (long long)(a->first + a->n),
                       (long long)a->width);
    return QD_OK;
}

qd_status qd_fp8_cast_check(const qd_fp8_cast_args *a)
{
    QD_TRY(qd_check_float("fp8_cast", "x", a->dtype));
    if (!qd_dtype_is_fp8(a->to_dtype))
        return QD_FAIL(QD_UNSUPPORTED, "fp8_cast: %s is not a type of fp8", qd_dtype_name(a->to_dtype));
    if (a->result_transposed && (!a->of || !a->of->dy || !a->result_amax))
        return QD_FAIL(QD_USAGE, "fp8_cast: the result of an activation is cast along with the gradient of its input, with its amax");
    if (a->sums)
        QD_TRY(qd_check_float("fp8_cast", "sums", a->sums_dtype));
    if (a->scaling == QD_FP8_TENSOR ? !a->amax : a->amax || a->of)
        return QD_FAIL(QD_USAGE, "fp8_cast: the scale of a tensor follows from its amax; those of rows and blocks are found by the cast");
    return QD_OK;
}

qd_status qd_check_scores(const char *kernel, int64_t window, float softcap)
{
    if (window < 0 || !(softcap >= 0))
        return QD_FAIL(QD_USAGE, "%s: window %lld and soft-cap %g must not be negative", kernel, (long long)window, (double)softcap);
    return QD_OK;
}

qd_status qd_row_runs_check(const char *kernel, const char *what, const qd_row_run *runs, int count, int64_t rows,
                            int64_t positions)
{
    for (int i = 0; i < count; i++) {
        const qd_row_run *r = &runs[i];
        if (r->row < 0 || r->position < 0 || r->count < 0 || r->row + r->count > rows)
            return QD_FAIL(QD_USAGE, "%s: run %d of %s, rows %lld to %lld at position %lld, is not within the %lld rows",
                           kernel, i, what, (long long)r->row, (long long)(r->row + r->count), (long long)r->position,
                           (long long)rows);
        if (r->position + r->count > positions)
            return QD_FAIL(QD_USAGE, "%s: run %d of %s ends at position %lld, beyond the last one, %lld", kernel,
                           i, what, (long long)(r->position + r->count), (long long)positions);
        if (i > 0 &&
            (r->position < runs[i - 1].position + runs[i - 1].count || r->row < runs[i - 1].row + runs[i - 1].count))
            return QD_FAIL(QD_USAGE, "%s: runs %d and %d of %s overlap or are not in ascending order of position", kernel,
                           i - 1, i, what);
    }
    return QD_OK;
}

qd_status qd_attention_part_check_gradients(const char *kernel, const qd_attention_part_args *a)
{
    int64_t q_width = (int64_t)a->heads * a->head_dim, kv_width = (int64_t)a->kv_heads * a->head_dim;
    int64_t v_width = (int64_t)a->kv_heads * qd_attention_v_dim(a->head_dim, a->v_dim);
    if (a->dq_stride < q_width || a->dk_stride < kv_width || a->dv_stride < v_width)
        return QD_FAIL(QD_USAGE, "%s: strides dq %lld, dk %lld, dv %lld are shorter than rows of %d and %d heads",
                       kernel, (long long)a->dq_stride, (long long)a->dk_stride, (long long)a->dv_stride, a->heads,
                       a->kv_heads);
    return QD_OK;
}

qd_status qd_attention_cached_check_values(const qd_attention_cached_args *a)
{
    if (a->v ? a->v_dim > 0 && a->v_dim != a->head_dim : a->v_dim < 1 || a->v_dim > a->head_dim)
        return QD_FAIL(QD_UNSUPPORTED, "attention_cached: values of %d elements %s keys of %d", a->v_dim, a->v ? "next to" : "in",
                       a->head_dim);
    return QD_OK;
}
