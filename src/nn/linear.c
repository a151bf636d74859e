/* Weights are stored (out, in): y = x·Wᵀ + b. Products may be of a window of rows.
 * Rows of logits, which a head that is cut over tp computes here, lie further apart than they are long. */
#include "nn/nn_impl.h"

/* y (m, n) = x (m, k) · W (n, k)ᵀ + b (n) */
qd_status qd_run_linear(const qd_op_call *c)
{
    const qd_op *op = c->op;
    return c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = call_row(c, 0, op->first), .b = c->at[1], .bias = c->at[2], .c = call_row(c, 3, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = call_stride(c, 3),
        .trans_b = true,
        .a_dtype = call_dtype(c, 0), .b_dtype = call_dtype(c, 1), .c_dtype = call_dtype(c, 3),
    });
}

/* y (m, n) = x (m, k) · W (n, k)ᵀ + b (n) + add (m, n) */
qd_status qd_run_linear_add(const qd_op_call *c)
{
    const qd_op *op = c->op;
    return c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = c->at[0], .b = c->at[1], .bias = c->at[2], .residual = c->at[3], .c = c->at[4],
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = op->n,
        .trans_b = true,
        .a_dtype = call_dtype(c, 0), .b_dtype = call_dtype(c, 1), .c_dtype = call_dtype(c, 4),
    });
}

/* sum (m, n) = x (m, k) · W (n, k)ᵀ + b (n), y = gelu(sum) */
qd_status qd_run_linear_gelu(const qd_op_call *c)
{
    const qd_op *op = c->op;
    return c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = call_row(c, 0, op->first), .b = c->at[1], .bias = c->at[2], .aux = call_row(c, 3, op->to), .c = call_row(c, 4, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = op->n,
        .trans_b = true, .gelu = QD_MATMUL_GELU,
        .a_dtype = call_dtype(c, 0), .b_dtype = call_dtype(c, 1), .c_dtype = call_dtype(c, 4),
    });
}

/* dx (m, n) = (dy (m, k) · W (k, n)) times gelu' at sum (m, n) */
qd_status qd_run_linear_dx_gelu(const qd_op_call *c)
{
    const qd_op *op = c->op;
    return c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = call_row(c, 0, op->first), .b = c->at[1], .aux = call_row(c, 2, op->to), .c = call_row(c, 3, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->n, .ldc = op->n,
        .gelu = QD_MATMUL_GELU_GRAD,
        .a_dtype = call_dtype(c, 0), .b_dtype = call_dtype(c, 1), .c_dtype = call_dtype(c, 3),
    });
}

/* dx (m, n) = dy (m, k) · W (k, n) */
qd_status qd_run_linear_dx(const qd_op_call *c)
{
    const qd_op *op = c->op;
    return c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = call_row(c, 0, op->first), .b = c->at[1], .c = call_row(c, 2, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = call_stride(c, 0), .ldb = op->n, .ldc = op->n,
        .a_dtype = call_dtype(c, 0), .b_dtype = call_dtype(c, 1), .c_dtype = call_dtype(c, 2),
    });
}

/* dW (m, n) [+]= dy (k, m)ᵀ · x (k, n); db (m) [+]= column sums of dy */
qd_status qd_run_linear_dw(const qd_op_call *c)
{
    const qd_op *op = c->op;
    bool fused = c->frame->program->strategy.traits->fused_bias_grad;
    QD_TRY(c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = call_row(c, 0, op->to), .b = call_row(c, 1, op->first), .c = c->at[2], .bias_grad = fused ? c->at[3] : NULL,
        .m = op->m, .n = op->n, .k = op->k, .lda = call_stride(c, 0), .ldb = op->n, .ldc = op->n,
        .trans_a = true, .accumulate = c->accumulate,
        .a_dtype = call_dtype(c, 0), .b_dtype = call_dtype(c, 1), .c_dtype = call_dtype(c, 2),
    }));
    if (!c->at[3] || fused)
        return QD_OK;
    return c->frame->kernels->bias_grad(c->frame->stream, &(qd_bias_grad_args){
        .dy = c->at[0], .grad = c->at[3], .rows = op->k, .cols = op->m, .accumulate = c->accumulate,
        .dtype = call_dtype(c, 0), .grad_dtype = call_dtype(c, 3),
    });
}
