/* Runners of the head. Logits exist for one chunk of rows at a time; the same pass computes the
 * loss, the gradient of the rows and the gradient of the matrix. */
#include "nn/nn_impl.h"

/* The GEMMs of a chunk of rows, in order. */
typedef enum head_gemm { LOGITS, DX, WEIGHT_GRAD, HEAD_GEMMS } head_gemm;

static bool with_gradients(const qd_op_call *c)
{
    return c->at[QD_HEAD_LOSS_DX] != NULL;
}

/* A frozen matrix has no gradient. */
static int gemm_count(const qd_op_call *c)
{
    return !with_gradients(c) ? 1 : c->at[QD_HEAD_LOSS_WEIGHT_GRAD] ? HEAD_GEMMS : WEIGHT_GRAD;
}

static int64_t chunk_rows(const qd_op *op, int64_t first)
{
    return op->m - first < op->chunk ? op->m - first : op->chunk;
}

/* The padding columns of logits are never read. */
static qd_matmul_args chunk_gemm(const qd_op_call *c, head_gemm which, int64_t first)
{
    const qd_op *op = c->op;
    const int64_t count = chunk_rows(op, first), vocab = op->n, hidden = op->k, stride = call_stride(c, QD_HEAD_LOSS_LOGITS);
    const qd_dtype x_dtype = call_dtype(c, QD_HEAD_LOSS_X), w_dtype = call_dtype(c, QD_HEAD_LOSS_WEIGHT),
                   logits_dtype = call_dtype(c, QD_HEAD_LOSS_LOGITS);
    const void *x = call_row(c, QD_HEAD_LOSS_X, first);
    switch (which) {
    case DX: /* dx (count, hidden) = dlogits (count, vocab) · W (vocab, hidden) */
        return (qd_matmul_args){
            .a = c->at[QD_HEAD_LOSS_LOGITS], .b = c->at[QD_HEAD_LOSS_WEIGHT],
            .c = call_row(c, QD_HEAD_LOSS_DX, first), .m = count, .n = hidden, .k = vocab, .lda = stride, .ldb = hidden, .ldc = hidden,
            .a_dtype = logits_dtype, .b_dtype = w_dtype, .c_dtype = call_dtype(c, QD_HEAD_LOSS_DX),
        };
    case WEIGHT_GRAD: /* dW (vocab, hidden) [+]= dlogits (count, vocab)ᵀ · x (count, hidden) */
        return (qd_matmul_args){
            .a = c->at[QD_HEAD_LOSS_LOGITS], .b = x, .c = c->at[QD_HEAD_LOSS_WEIGHT_GRAD], .m = vocab, .n = hidden, .k = count,
            .lda = stride, .ldb = hidden, .ldc = hidden, .trans_a = true, .accumulate = c->accumulate || first > 0,
            .a_dtype = logits_dtype, .b_dtype = x_dtype, .c_dtype = call_dtype(c, QD_HEAD_LOSS_WEIGHT_GRAD),
        };
    default: /* logits (count, vocab) = x (count, hidden) · W (vocab, hidden)ᵀ */
        return (qd_matmul_args){
            .a = x, .b = c->at[QD_HEAD_LOSS_WEIGHT], .c = c->at[QD_HEAD_LOSS_LOGITS], .m = count, .n = vocab, .k = hidden,
            .lda = hidden, .ldb = hidden, .ldc = stride, .trans_b = true,
            .a_dtype = x_dtype, .b_dtype = w_dtype, .c_dtype = logits_dtype,
        };
    }
}

bool qd_head_loss_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args)
{
    int each = gemm_count(c);
    int64_t first = number / each * c->op->chunk;
    if (first >= c->op->m)
        return false;
    *args = chunk_gemm(c, (head_gemm)(number % each), first);
    return true;
}

qd_status qd_run_head_loss(const qd_op_call *c)
{
    const qd_op *op = c->op;
    const qd_frame *f = c->frame;
    const bool training = with_gradients(c);
    const int32_t *targets = input_targets(c, QD_HEAD_LOSS_INPUT);
    float *losses = c->at[QD_HEAD_LOSS_LOSSES];
    for (int64_t first = 0; first < op->m; first += op->chunk) {
        qd_matmul_args gemm = chunk_gemm(c, LOGITS, first);
        QD_TRY(f->kernels->matmul(f->stream, &gemm));
        QD_TRY(f->kernels->cross_entropy(f->stream, &(qd_cross_entropy_args){
            .logits = c->at[QD_HEAD_LOSS_LOGITS], .targets = targets + first, .losses = losses + first, .rows = chunk_rows(op, first),
            .vocab = op->n, .ld = call_stride(c, QD_HEAD_LOSS_LOGITS), .scale = (float)op->scale, .cap = (float)op->cap,
            .grad = training,
            .dtype = call_dtype(c, QD_HEAD_LOSS_LOGITS),
        }));
        if (!training)
            continue;
        gemm = chunk_gemm(c, DX, first);
        QD_TRY(f->kernels->matmul(f->stream, &gemm));
        if (gemm_count(c) < HEAD_GEMMS)
            continue;
        gemm = chunk_gemm(c, WEIGHT_GRAD, first);
        QD_TRY(f->kernels->matmul(f->stream, &gemm));
    }
    return f->kernels->loss_sum(f->stream, &(qd_loss_sum_args){
        .losses = losses, .targets = targets, .rows = op->m, .total = loss_sums(c, QD_HEAD_LOSS_LOSS),
        .counted = loss_sums(c, QD_HEAD_LOSS_LOSS) + 1,
    });
}

/* logits (1, vocab) = the last row of x · W (vocab, hidden)ᵀ */
bool qd_head_logits_gemm(const qd_op_call *c, int64_t number, qd_matmul_args *args)
{
    const qd_op *op = c->op;
    *args = (qd_matmul_args){
        .a = call_row(c, QD_HEAD_LOGITS_X, c->slots[op->slot[QD_HEAD_LOGITS_X]].rows - 1), .b = c->at[QD_HEAD_LOGITS_WEIGHT],
        .c = c->at[QD_HEAD_LOGITS_LOGITS],
        .m = 1, .n = op->n, .k = op->k, .lda = op->k, .ldb = op->k, .ldc = op->n, .trans_b = true,
        .a_dtype = call_dtype(c, QD_HEAD_LOGITS_X), .b_dtype = call_dtype(c, QD_HEAD_LOGITS_WEIGHT), .c_dtype = QD_F32,
    };
    return number == 0;
}

qd_status qd_run_head_logits(const qd_op_call *c)
{
    qd_matmul_args args;
    qd_head_logits_gemm(c, 0, &args);
    QD_TRY(c->frame->kernels->matmul(c->frame->stream, &args));
    return c->op->cap > 0.0 ? c->frame->kernels->softcap(c->frame->stream, &(qd_softcap_args){
        .x = c->at[QD_HEAD_LOGITS_LOGITS], .n = c->op->n, .cap = (float)c->op->cap, .dtype = QD_F32}) : QD_OK;
}

/* The loss of logits that are sharded over ranks by tokens, for a window of rows. */

QD_SAME_PLACE(LOGITS, LOSS_MAX, LOSS_PART);
QD_SAME_PLACE(LOGITS, LOSS_MAX, LOSS_GRAD);

static qd_cross_entropy_part_args part_args(const qd_op_call *c, qd_cross_entropy_stage stage)
{
    return (qd_cross_entropy_part_args){
        .stage = stage, .logits = c->at[QD_LOSS_MAX_LOGITS], .rows = c->op->m, .vocab = c->op->n, .ld = call_stride(c, QD_LOSS_MAX_LOGITS),
        .all = call_model(c)->vocab, .first = c->op->to, .scale = (float)c->op->scale, .cap = (float)c->op->cap,
        .grad = c->op->kind == QD_OP_LOSS_GRAD && c->frame->program->strategy.training, .dtype = call_dtype(c, QD_LOSS_MAX_LOGITS),
    };
}

qd_status qd_run_loss_max(const qd_op_call *c)
{
    qd_cross_entropy_part_args args = part_args(c, QD_CROSS_ENTROPY_MAX);
    args.top = (float *)c->at[QD_LOSS_MAX_TOP] + c->op->first;
    return c->frame->kernels->cross_entropy_part(c->frame->stream, &args);
}

qd_status qd_run_loss_part(const qd_op_call *c)
{
    qd_cross_entropy_part_args args = part_args(c, QD_CROSS_ENTROPY_SUM);
    args.targets = input_targets(c, QD_LOSS_PART_INPUT) + c->op->first;
    args.top = (float *)c->at[QD_LOSS_PART_TOP] + c->op->first;
    args.sums = (float *)c->at[QD_LOSS_PART_SUMS] + 2 * c->op->first;
    return c->frame->kernels->cross_entropy_part(c->frame->stream, &args);
}

/* Also without gradients (LOSS_ROWS). */
qd_status qd_run_loss_grad(const qd_op_call *c)
{
    qd_cross_entropy_part_args args = part_args(c, QD_CROSS_ENTROPY_GRAD);
    args.targets = input_targets(c, QD_LOSS_GRAD_INPUT) + c->op->first;
    args.top = (float *)c->at[QD_LOSS_GRAD_TOP] + c->op->first;
    args.sums = (float *)c->at[QD_LOSS_GRAD_SUMS] + 2 * c->op->first;
    args.losses = (float *)c->at[QD_LOSS_GRAD_LOSSES] + c->op->first;
    if (c->op->kind == QD_OP_LOSS_GRAD && c->at[QD_LOSS_GRAD_FACTORS])
        args.factors = (const float *)c->at[QD_LOSS_GRAD_FACTORS] + c->op->first;
    return c->frame->kernels->cross_entropy_part(c->frame->stream, &args);
}

QD_SAME_PLACE(INPUT, LOSS_GRAD, LOSS_ROWS);
QD_SAME_PLACE(TOP, LOSS_GRAD, LOSS_ROWS);
QD_SAME_PLACE(SUMS, LOSS_GRAD, LOSS_ROWS);
QD_SAME_PLACE(LOSSES, LOSS_GRAD, LOSS_ROWS);
qd_status qd_run_loss_rows(const qd_op_call *c)
{
    return qd_run_loss_grad(c);
}

/* The pairs of a micro-batch. */
static qd_pair_rows pair_rows(const qd_op_call *c, int input)
{
    const qd_strategy *s = &c->frame->program->strategy;
    const int32_t *in = input_pairs(c, input);
    const int64_t rows = c->op->m;
    return (qd_pair_rows){
        .sequence = in + QD_PAIR_SEQUENCE * rows,
        .weight = (const float *)(const void *)(in + QD_PAIR_WEIGHT * rows),
        .reference = (const float *)(const void *)(in + QD_PAIR_REFERENCE * rows),
        .rest = (const float *)(const void *)(in + QD_PAIR_REST * rows),
        .windows = s->micro_batch, .rows = rows / s->micro_batch, .sequences = s->seq};
}

qd_status qd_run_pair_sums(const qd_op_call *c)
{
    return c->frame->kernels->pair_sums(c->frame->stream, &(qd_pair_sums_args){
        .rows = pair_rows(c, QD_PAIR_SUMS_INPUT), .losses = c->at[QD_PAIR_SUMS_LOSSES], .scores = c->at[QD_PAIR_SUMS_SCORES]});
}

qd_status qd_run_pair_loss(const qd_op_call *c)
{
    return c->frame->kernels->pair_loss(c->frame->stream, &(qd_pair_loss_args){
        .rows = pair_rows(c, QD_PAIR_LOSS_INPUT), .scores = c->at[QD_PAIR_LOSS_SCORES], .factors = c->at[QD_PAIR_LOSS_FACTORS],
        .figures = c->at[QD_PAIR_LOSS_LOSS], .loss = c->frame->program->strategy.preference});
}

qd_status qd_run_loss_sum(const qd_op_call *c)
{
    return c->frame->kernels->loss_sum(c->frame->stream, &(qd_loss_sum_args){
        .losses = c->at[QD_LOSS_SUM_LOSSES], .targets = input_targets(c, QD_LOSS_SUM_INPUT), .rows = c->op->m,
        .total = loss_sums(c, QD_LOSS_SUM_LOSS), .counted = loss_sums(c, QD_LOSS_SUM_LOSS) + 1,
    });
}
