/* The head: logits exist for one chunk of rows at a time; the same pass gives the loss, the gradient of the rows and the
 * gradient of the matrix. */
#include "nn/nn_impl.h"

qd_status qd_run_head_loss(const qd_op_call *c)
{
    const qd_op *op = c->op;
    const qd_frame *f = c->frame;
    const int64_t rows = op->m, vocab = op->n, hidden = op->k;
    const qd_dtype x_dtype = call_dtype(c, 0), w_dtype = call_dtype(c, 1);
    const bool training = c->at[3] != NULL;
    const int32_t *targets = input_targets(c, 2);
    const qd_dtype logits_dtype = call_dtype(c, 6);
    void *logits = c->at[6];
    const int64_t stride = call_stride(c, 6); /* of logits; their columns from vocab on are never read */
    float *losses = c->at[7];
    for (int64_t first = 0; first < rows; first += op->chunk) {
        int64_t count = rows - first < op->chunk ? rows - first : op->chunk;
        const char *x = (const char *)c->at[0] + first * hidden * (int64_t)qd_dtype_size(x_dtype);
        /* logits (count, vocab) = x (count, hidden) · W (vocab, hidden)ᵀ */
        QD_TRY(f->kernels->matmul(f->stream, &(qd_matmul_args){
            .a = x, .b = c->at[1], .c = logits, .m = count, .n = vocab, .k = hidden,
            .lda = hidden, .ldb = hidden, .ldc = stride, .trans_b = true,
            .a_dtype = x_dtype, .b_dtype = w_dtype, .c_dtype = logits_dtype,
        }));
        QD_TRY(f->kernels->cross_entropy(f->stream, &(qd_cross_entropy_args){
            .logits = logits, .targets = targets + first, .losses = losses + first, .rows = count, .vocab = vocab,
            .ld = stride, .scale = (float)op->scale, .grad = training, .dtype = logits_dtype,
        }));
        if (!training)
            continue;
        /* dx (count, hidden) = dlogits (count, vocab) · W (vocab, hidden) */
        QD_TRY(f->kernels->matmul(f->stream, &(qd_matmul_args){
            .a = logits, .b = c->at[1],
            .c = (char *)c->at[3] + first * hidden * (int64_t)qd_dtype_size(call_dtype(c, 3)),
            .m = count, .n = hidden, .k = vocab, .lda = stride, .ldb = hidden, .ldc = hidden,
            .a_dtype = logits_dtype, .b_dtype = w_dtype, .c_dtype = call_dtype(c, 3),
        }));
        /* dW (vocab, hidden) [+]= dlogits (count, vocab)ᵀ · x (count, hidden) */
        QD_TRY(f->kernels->matmul(f->stream, &(qd_matmul_args){
            .a = logits, .b = x, .c = c->at[4], .m = vocab, .n = hidden, .k = count,
            .lda = stride, .ldb = hidden, .ldc = hidden, .trans_a = true, .accumulate = c->accumulate || first > 0,
            .a_dtype = logits_dtype, .b_dtype = x_dtype, .c_dtype = call_dtype(c, 4),
        }));
    }
    return f->kernels->loss_sum(f->stream, &(qd_loss_sum_args){
        .losses = losses, .targets = targets, .rows = rows, .total = c->at[5], .counted = (double *)c->at[5] + 1,
    });
}

/* logits (1, vocab) = the last row of x · W (vocab, hidden)ᵀ */
qd_status qd_run_head_logits(const qd_op_call *c)
{
    const qd_op *op = c->op;
    qd_dtype dtype = call_dtype(c, 0);
    int64_t last = (c->slots[op->slot[0]].rows - 1) * op->k;
    return c->frame->kernels->matmul(c->frame->stream, &(qd_matmul_args){
        .a = (const char *)c->at[0] + last * (int64_t)qd_dtype_size(dtype), .b = c->at[1], .c = c->at[2],
        .m = 1, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = op->n, .trans_b = true,
        .a_dtype = dtype, .b_dtype = call_dtype(c, 1), .c_dtype = QD_F32,
    });
}

/* ---- the loss of logits that ranks share out by tokens, for a window of rows ---- */

static qd_cross_entropy_part_args part_args(const qd_op_call *c, qd_cross_entropy_stage stage)
{
    return (qd_cross_entropy_part_args){
        .stage = stage, .logits = c->at[0], .rows = c->op->m, .vocab = c->op->n, .ld = call_stride(c, 0),
        .all = call_model(c)->vocab, .first = c->op->to, .scale = (float)c->op->scale,
        .grad = c->frame->program->strategy.training, .dtype = call_dtype(c, 0),
    };
}

qd_status qd_run_loss_max(const qd_op_call *c)
{
    qd_cross_entropy_part_args args = part_args(c, QD_CROSS_ENTROPY_MAX);
    args.top = (float *)c->at[1] + c->op->first;
    return c->frame->kernels->cross_entropy_part(c->frame->stream, &args);
}

qd_status qd_run_loss_part(const qd_op_call *c)
{
    qd_cross_entropy_part_args args = part_args(c, QD_CROSS_ENTROPY_SUM);
    args.targets = input_targets(c, 1) + c->op->first;
    args.top = (float *)c->at[2] + c->op->first;
    args.sums = (float *)c->at[3] + 2 * c->op->first;
    return c->frame->kernels->cross_entropy_part(c->frame->stream, &args);
}

qd_status qd_run_loss_grad(const qd_op_call *c)
{
    qd_cross_entropy_part_args args = part_args(c, QD_CROSS_ENTROPY_GRAD);
    args.targets = input_targets(c, 1) + c->op->first;
    args.top = (float *)c->at[2] + c->op->first;
    args.sums = (float *)c->at[3] + 2 * c->op->first;
    args.losses = (float *)c->at[4] + c->op->first;
    return c->frame->kernels->cross_entropy_part(c->frame->stream, &args);
}

qd_status qd_run_loss_sum(const qd_op_call *c)
{
    return c->frame->kernels->loss_sum(c->frame->stream, &(qd_loss_sum_args){
        .losses = c->at[0], .targets = input_targets(c, 1), .rows = c->op->m, .total = c->at[2], .counted = (double *)c->at[2] + 1,
    });
}
