/* Runners of linear layers. Weights are stored (out, in): y = x·Wᵀ + b. A GEMM may cover a window
 * of rows. Rows of logits, which a head sharded over tp computes here, have a stride larger than
 * their length. */
#include "nn/nn_impl.h"

#include "base/fp8.h"

/* y (m, n) = x (m, k) · W (n, k)ᵀ + b (n) */
static qd_matmul_args linear(const qd_op_call *c, const qd_op *op)
{
    return (qd_matmul_args){
        .a = call_row(c, QD_LINEAR_X, op->first), .b = c->at[QD_LINEAR_WEIGHT], .bias = c->at[QD_LINEAR_BIAS],
        .c = call_row(c, QD_LINEAR_Y, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = call_stride(c, QD_LINEAR_Y),
        .trans_b = true,
        .a_dtype = call_dtype(c, QD_LINEAR_X), .b_dtype = call_dtype(c, QD_LINEAR_WEIGHT), .c_dtype = call_dtype(c, QD_LINEAR_Y),
    };
}

/* y (m, n) = x (m, k) · W (n, k)ᵀ + b (n) + add (m, n) */
static qd_matmul_args linear_add(const qd_op_call *c, const qd_op *op)
{
    return (qd_matmul_args){
        .a = c->at[QD_LINEAR_ADD_X], .b = c->at[QD_LINEAR_ADD_WEIGHT], .bias = c->at[QD_LINEAR_ADD_BIAS],
        .residual = c->at[QD_LINEAR_ADD_ADD], .c = c->at[QD_LINEAR_ADD_Y],
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = op->n,
        .trans_b = true,
        .a_dtype = call_dtype(c, QD_LINEAR_ADD_X), .b_dtype = call_dtype(c, QD_LINEAR_ADD_WEIGHT),
        .c_dtype = call_dtype(c, QD_LINEAR_ADD_Y),
    };
}

/* sum (m, n) = x (m, k) · W (n, k)ᵀ + b (n), y = gelu(sum) */
static qd_matmul_args linear_gelu(const qd_op_call *c, const qd_op *op)
{
    return (qd_matmul_args){
        .a = call_row(c, QD_LINEAR_GELU_X, op->first), .b = c->at[QD_LINEAR_GELU_WEIGHT], .bias = c->at[QD_LINEAR_GELU_BIAS],
        .aux = call_row(c, QD_LINEAR_GELU_SUM, op->to), .c = call_row(c, QD_LINEAR_GELU_Y, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = op->n,
        .trans_b = true, .gelu = QD_MATMUL_GELU,
        .a_dtype = call_dtype(c, QD_LINEAR_GELU_X), .b_dtype = call_dtype(c, QD_LINEAR_GELU_WEIGHT),
        .c_dtype = call_dtype(c, QD_LINEAR_GELU_Y),
    };
}

/* dx (m, n) = (dy (m, k) · W (k, n)) · gelu'(sum (m, n)) */
static qd_matmul_args linear_dx_gelu(const qd_op_call *c, const qd_op *op)
{
    return (qd_matmul_args){
        .a = call_row(c, QD_LINEAR_DX_GELU_DY, op->first), .b = c->at[QD_LINEAR_DX_GELU_WEIGHT],
        .aux = call_row(c, QD_LINEAR_DX_GELU_SUM, op->to), .c = call_row(c, QD_LINEAR_DX_GELU_DX, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->n, .ldc = op->n,
        .gelu = QD_MATMUL_GELU_GRAD,
        .a_dtype = call_dtype(c, QD_LINEAR_DX_GELU_DY), .b_dtype = call_dtype(c, QD_LINEAR_DX_GELU_WEIGHT),
        .c_dtype = call_dtype(c, QD_LINEAR_DX_GELU_DX),
    };
}

/* dx (m, n) = dy (m, k) · W (k, n) */
static qd_matmul_args linear_dx(const qd_op_call *c, const qd_op *op)
{
    return (qd_matmul_args){
        .a = call_row(c, QD_LINEAR_DX_DY, op->first), .b = c->at[QD_LINEAR_DX_WEIGHT], .c = call_row(c, QD_LINEAR_DX_DX, op->to),
        .m = op->m, .n = op->n, .k = op->k, .lda = call_stride(c, QD_LINEAR_DX_DY), .ldb = op->n, .ldc = op->n,
        .a_dtype = call_dtype(c, QD_LINEAR_DX_DY), .b_dtype = call_dtype(c, QD_LINEAR_DX_WEIGHT), .c_dtype = call_dtype(c, QD_LINEAR_DX_DX),
    };
}

/* dW (m, n) [+]= dy (k, m)ᵀ · x (k, n); with a bias, db (m) [+]= column sums of dy */
static qd_matmul_args linear_dw(const qd_op_call *c, const qd_op *op)
{
    return (qd_matmul_args){
        .a = call_row(c, QD_LINEAR_DW_DY, op->to), .b = call_row(c, QD_LINEAR_DW_X, op->first),
        .c = c->at[QD_LINEAR_DW_WEIGHT_GRAD], .bias_grad = c->at[QD_LINEAR_DW_BIAS_GRAD],
        .m = op->m, .n = op->n, .k = op->k, .lda = call_stride(c, QD_LINEAR_DW_DY), .ldb = op->n, .ldc = op->n,
        .trans_a = true, .accumulate = c->accumulate,
        .a_dtype = call_dtype(c, QD_LINEAR_DW_DY), .b_dtype = call_dtype(c, QD_LINEAR_DW_X),
        .c_dtype = call_dtype(c, QD_LINEAR_DW_WEIGHT_GRAD),
    };
}

/* The scale of an fp8 operand, which follows its codes. Integer arithmetic: when the GEMMs of a
 * program are listed, the addresses have no memory behind them. */
static const float *scale_of(const qd_op_call *c, int place)
{
    const qd_slot *slot = &c->slots[c->op->slot[place]];
    return (const float *)((uintptr_t)c->at[place] + (uintptr_t)qd_fp8_scale_at(slot->rows * slot->cols));
}

/* fp8 operands are stored along k, transposed where the types above are not. */
static void with_scales(const qd_op_call *c, int a, int b, qd_matmul_args *args)
{
    if (!qd_dtype_is_fp8(args->a_dtype))
        return;
    args->a_scale = scale_of(c, a);
    args->b_scale = scale_of(c, b);
    args->a_scaling = c->slots[c->op->slot[a]].scaling;
    args->b_scaling = c->slots[c->op->slot[b]].scaling;
    args->trans_a = false;
    args->trans_b = true;
    args->lda = args->ldb = args->k;
    args->fast = c->op->phase == QD_PHASE_FORWARD || c->op->again;
}

bool qd_linear_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args)
{
    if (number > 0)
        return false;
    switch (c->op->kind) {
    case QD_OP_LINEAR:
        *args = linear(c, c->op);
        with_scales(c, QD_LINEAR_X, QD_LINEAR_WEIGHT, args);
        return true;
    case QD_OP_LINEAR_ADD:
        *args = linear_add(c, c->op);
        with_scales(c, QD_LINEAR_ADD_X, QD_LINEAR_ADD_WEIGHT, args);
        return true;
    case QD_OP_LINEAR_GELU: *args = linear_gelu(c, c->op); return true;
    case QD_OP_LINEAR_DX:
        *args = linear_dx(c, c->op);
        with_scales(c, QD_LINEAR_DX_DY, QD_LINEAR_DX_WEIGHT, args);
        return true;
    case QD_OP_LINEAR_DX_GELU: *args = linear_dx_gelu(c, c->op); return true;
    case QD_OP_LINEAR_DW:
        *args = linear_dw(c, c->op);
        with_scales(c, QD_LINEAR_DW_DY, QD_LINEAR_DW_X, args);
        return true;
    default: return false;
    }
}

qd_status qd_run_linear(const qd_op_call *c)
{
    qd_matmul_args args;
    if (!qd_linear_gemm(c, 0, &args))
        return QD_FAIL(QD_SYSTEM, "step program: %s is not a GEMM", qd_op_name(c->op->kind));
    return c->frame->kernels->matmul(c->frame->stream, &args);
}

/* db (n) [+]= column sums of dy (m, n) */
qd_status qd_run_bias_grad(const qd_op_call *c)
{
    return c->frame->kernels->bias_grad(c->frame->stream, &(qd_bias_grad_args){
        .dy = c->at[QD_BIAS_GRAD_DY], .grad = c->at[QD_BIAS_GRAD_GRAD], .rows = c->op->m, .cols = c->op->n, .accumulate = c->accumulate,
        .dtype = call_dtype(c, QD_BIAS_GRAD_DY), .grad_dtype = call_dtype(c, QD_BIAS_GRAD_GRAD),
    });
}
