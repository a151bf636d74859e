/* Runners of low-rank adapters. Each part of a layer is a small GEMM over a window of columns; with
 * experts, one for the rows of each expert. */
#include "nn/nn_impl.h"

/* A run of rows with the same matrices. */
typedef struct rows {
    int64_t first, count;
    int matrix; /* index of the expert on this rank; 0: not of experts */
} rows;

static void *moved(const qd_op_call *c, int operand, int64_t elements)
{
    return (char *)c->at[operand] + elements * (int64_t)qd_dtype_size(call_dtype(c, operand));
}

/* Elements of the matrices before part `part` of a matrix index. */
static int64_t matrix_at(const qd_op *op, int matrix, int part)
{
    int64_t before = 0, all = 0;
    for (int i = 0; i < op->parts; i++) {
        before += i < part ? op->part_cols[i] : 0;
        all += op->part_cols[i];
    }
    return (matrix * all + before) * op->k;
}

/* n columns wide, `narrow` columns narrow; W_i (cols, k). */
static qd_matmul_args part_gemm(const qd_op_call *c, int part, rows r, bool accumulate)
{
    const qd_op *op = c->op;
    int64_t narrow = op->parts * op->k, wide_at = r.first * op->n + op->part_at[part], narrow_at = r.first * narrow + part * op->k;
    int64_t cols = op->part_cols[part], at = matrix_at(op, r.matrix, part);
    switch (op->kind) {
    case QD_OP_ADAPT: /* y_i (rows, cols) += x_i (rows, k) · W_iᵀ */
        return (qd_matmul_args){
            .a = moved(c, QD_ADAPT_X, narrow_at), .b = moved(c, QD_ADAPT_WEIGHT, at), .c = moved(c, QD_ADAPT_Y, wide_at),
            .m = r.count, .n = cols, .k = op->k, .lda = narrow, .ldb = op->k, .ldc = op->n, .trans_b = true, .accumulate = true,
            .a_dtype = call_dtype(c, QD_ADAPT_X), .b_dtype = call_dtype(c, QD_ADAPT_WEIGHT), .c_dtype = call_dtype(c, QD_ADAPT_Y)};
    case QD_OP_ADAPT_DX: /* dx_i (rows, k) = dy_i (rows, cols) · W_i */
        return (qd_matmul_args){
            .a = moved(c, QD_ADAPT_DX_DY, wide_at), .b = moved(c, QD_ADAPT_DX_WEIGHT, at), .c = moved(c, QD_ADAPT_DX_DX, narrow_at),
            .m = r.count, .n = op->k, .k = cols, .lda = op->n, .ldb = op->k, .ldc = narrow,
            .a_dtype = call_dtype(c, QD_ADAPT_DX_DY), .b_dtype = call_dtype(c, QD_ADAPT_DX_WEIGHT),
            .c_dtype = call_dtype(c, QD_ADAPT_DX_DX)};
    default: /* dW_i (cols, k) [+]= dy_i (rows, cols)ᵀ · x_i (rows, k) */
        return (qd_matmul_args){
            .a = moved(c, QD_ADAPT_DW_DY, wide_at), .b = moved(c, QD_ADAPT_DW_X, narrow_at), .c = moved(c, QD_ADAPT_DW_WEIGHT_GRAD, at),
            .m = cols, .n = op->k, .k = r.count, .lda = op->n, .ldb = narrow, .ldc = op->k, .trans_a = true, .accumulate = accumulate,
            .a_dtype = call_dtype(c, QD_ADAPT_DW_DY), .b_dtype = call_dtype(c, QD_ADAPT_DW_X),
            .c_dtype = call_dtype(c, QD_ADAPT_DW_WEIGHT_GRAD)};
    }
}

bool qd_adapt_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args)
{
    if (number >= c->op->parts || c->op->experts > 0)
        return false;
    *args = part_gemm(c, (int)number, (rows){0, c->op->m, 0}, c->accumulate);
    return true;
}

static qd_status run_rows(const qd_op_call *c, rows r, bool accumulate)
{
    for (int part = 0; part < c->op->parts; part++) {
        qd_matmul_args args = part_gemm(c, part, r, accumulate);
        QD_TRY(c->frame->kernels->matmul(c->frame->stream, &args));
    }
    return QD_OK;
}

/* Rows come in blocks, one per sending rank, each sorted by expert. */
static qd_status run_experts(const qd_op_call *c)
{
    const qd_op *op = c->op;
    int operand = op->kind == QD_OP_ADAPT ? QD_ADAPT_COUNT : op->kind == QD_OP_ADAPT_DX ? QD_ADAPT_DX_COUNT : QD_ADAPT_DW_COUNT;
    const qd_slot *table = &c->slots[op->slot[operand]];
    const int32_t *counts;
    QD_TRY(qd_host_counts(c, operand, &counts));
    if (op->kind == QD_OP_ADAPT_DW && !c->accumulate)
        QD_TRY(qd_fill_zero(c->frame->stream, c->at[QD_ADAPT_DW_WEIGHT_GRAD],
                            qd_slot_bytes(&c->slots[op->slot[QD_ADAPT_DW_WEIGHT_GRAD]])));
    int64_t at = 0;
    for (int64_t source = 0; source < table->rows; source++)
        for (int e = 0; e < op->experts; e++) {
            rows r = {at, counts[source * table->cols + op->expert + e], e};
            if (r.count > 0)
                QD_TRY(run_rows(c, r, true));
            at += r.count;
        }
    return QD_OK;
}

qd_status qd_run_adapt(const qd_op_call *c)
{
    return c->op->experts > 0 ? run_experts(c) : run_rows(c, (rows){0, c->op->m, 0}, c->accumulate);
}
