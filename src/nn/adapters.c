/* Runners of low-rank adapters. Each part of a layer is a small GEMM over a window of columns; with
 * experts, a grouped one. */
#include "nn/nn_impl.h"

static void *moved(const qd_op_call *c, int operand, int64_t elements)
{
    return (char *)c->at[operand] + elements * (int64_t)qd_dtype_size(call_dtype(c, operand));
}

/* Elements of an expert's matrices, or of the only ones, before those of a part. */
static int64_t matrices_before(const qd_op *op, int part)
{
    int64_t cols = 0;
    for (int i = 0; i < part; i++)
        cols += op->part_cols[i];
    return cols * op->k;
}

/* n columns wide, `narrow` columns narrow; W_i (cols, k). */
static qd_matmul_args part_gemm(const qd_op_call *c, int part, bool accumulate)
{
    const qd_op *op = c->op;
    int64_t narrow = op->parts * op->k, wide_at = op->part_at[part], narrow_at = part * op->k;
    int64_t cols = op->part_cols[part], at = matrices_before(op, part);
    switch (op->kind) {
    case QD_OP_ADAPT: /* y_i (rows, cols) += x_i (rows, k) · W_iᵀ */
        return (qd_matmul_args){
            .a = moved(c, QD_ADAPT_X, narrow_at), .b = moved(c, QD_ADAPT_WEIGHT, at), .c = moved(c, QD_ADAPT_Y, wide_at),
            .m = op->m, .n = cols, .k = op->k, .lda = narrow, .ldb = op->k, .ldc = op->n, .trans_b = true, .accumulate = true,
            .a_dtype = call_dtype(c, QD_ADAPT_X), .b_dtype = call_dtype(c, QD_ADAPT_WEIGHT), .c_dtype = call_dtype(c, QD_ADAPT_Y)};
    case QD_OP_ADAPT_DX: /* dx_i (rows, k) = dy_i (rows, cols) · W_i */
        return (qd_matmul_args){
            .a = moved(c, QD_ADAPT_DX_DY, wide_at), .b = moved(c, QD_ADAPT_DX_WEIGHT, at), .c = moved(c, QD_ADAPT_DX_DX, narrow_at),
            .m = op->m, .n = op->k, .k = cols, .lda = op->n, .ldb = op->k, .ldc = narrow,
            .a_dtype = call_dtype(c, QD_ADAPT_DX_DY), .b_dtype = call_dtype(c, QD_ADAPT_DX_WEIGHT),
            .c_dtype = call_dtype(c, QD_ADAPT_DX_DX)};
    default: /* dW_i (cols, k) [+]= dy_i (rows, cols)ᵀ · x_i (rows, k) */
        return (qd_matmul_args){
            .a = moved(c, QD_ADAPT_DW_DY, wide_at), .b = moved(c, QD_ADAPT_DW_X, narrow_at), .c = moved(c, QD_ADAPT_DW_WEIGHT_GRAD, at),
            .m = cols, .n = op->k, .k = op->m, .lda = op->n, .ldb = narrow, .ldc = op->k, .trans_a = true, .accumulate = accumulate,
            .a_dtype = call_dtype(c, QD_ADAPT_DW_DY), .b_dtype = call_dtype(c, QD_ADAPT_DW_X),
            .c_dtype = call_dtype(c, QD_ADAPT_DW_WEIGHT_GRAD)};
    }
}

bool qd_adapt_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args)
{
    if (number >= c->op->parts || c->op->experts > 0)
        return false;
    *args = part_gemm(c, (int)number, c->accumulate);
    return true;
}

static qd_status run_rows(const qd_op_call *c)
{
    for (int part = 0; part < c->op->parts; part++) {
        qd_matmul_args args = part_gemm(c, part, c->accumulate);
        QD_TRY(c->frame->kernels->matmul(c->frame->stream, &args));
    }
    return QD_OK;
}

/* The same GEMM for the rows of each expert. */
static qd_status run_experts(const qd_op_call *c)
{
    const qd_op *op = c->op;
    int operand = op->kind == QD_OP_ADAPT ? QD_ADAPT_COUNT : op->kind == QD_OP_ADAPT_DX ? QD_ADAPT_DX_COUNT : QD_ADAPT_DW_COUNT;
    const qd_slot *table = &c->slots[op->slot[operand]];
    for (int part = 0; part < op->parts; part++) {
        qd_matmul_args m = part_gemm(c, part, c->accumulate);
        qd_grouped_args a = {
            .a = m.a, .b = (void *)(uintptr_t)m.b, .c = m.c, .n = m.n, .k = m.k, .a_stride = m.lda, .c_stride = m.ldc,
            .trans_b = m.trans_b, .add_rows = m.accumulate, .a_dtype = m.a_dtype, .b_dtype = m.b_dtype, .c_dtype = m.c_dtype};
        if (op->kind == QD_OP_ADAPT_DW)
            a = (qd_grouped_args){
                .a = m.b, .b = m.c, .c = (void *)(uintptr_t)m.a, .n = m.m, .k = m.n, .a_stride = m.ldb, .c_stride = m.lda,
                .by_experts = true, .accumulate = m.accumulate, .a_dtype = m.b_dtype, .b_dtype = m.c_dtype, .c_dtype = m.a_dtype};
        a.b_stride = matrices_before(op, op->parts);
        a.counts = (const int32_t *)c->at[operand] + op->expert;
        a.count_stride = table->cols;
        a.rows = op->m;
        a.sources = (int)table->rows;
        a.experts = op->experts;
        QD_TRY(c->frame->kernels->grouped(c->frame->stream, &a));
    }
    return QD_OK;
}

qd_status qd_run_adapt(const qd_op_call *c)
{
    return c->op->experts > 0 ? run_experts(c) : run_rows(c);
}
