/* Runners of casts to fp8 (base/fp8.h): of stored values, and of the results of activations and the
 * gradients of their inputs, which are not stored. */
#include "nn/nn_impl.h"

qd_status qd_run_amax(const qd_op_call *c)
{
    return c->frame->kernels->amax(c->frame->stream, &(qd_amax_args){.x = c->at[QD_AMAX_X], .amax = c->at[QD_AMAX_AMAX],
                                                                     .n = c->op->m * c->op->n, .dtype = call_dtype(c, QD_AMAX_X)});
}

/* Bias gradients have a type, others none. */
static qd_dtype sums_dtype(const qd_op_call *c, int sums)
{
    return c->op->slot[sums] >= 0 ? call_dtype(c, sums) : QD_F32;
}

/* codes (m, n), and (n, m) transposed, of x (m, n) */
qd_status qd_run_cast(const qd_op_call *c)
{
    const int form = c->op->slot[QD_CAST_Y] >= 0 ? QD_CAST_Y : QD_CAST_YT;
    return c->frame->kernels->fp8_cast(c->frame->stream, &(qd_fp8_cast_args){
        .x = c->at[QD_CAST_X], .amax = c->at[QD_CAST_AMAX], .to = c->at[QD_CAST_Y], .transposed = c->at[QD_CAST_YT],
        .rows = c->op->m, .cols = c->op->n, .dtype = call_dtype(c, QD_CAST_X),
        .to_dtype = call_dtype(c, form), .scaling = c->slots[c->op->slot[form]].scaling,
        .sums = c->at[QD_CAST_SUMS], .accumulate = c->accumulate, .sums_dtype = sums_dtype(c, QD_CAST_SUMS),
    });
}

QD_SAME_PLACE(X, ACTIVATION_AMAX, ACTIVATION_CAST);
QD_SAME_PLACE(X, ACTIVATION_AMAX, ACTIVATION_GRAD_AMAX);
QD_SAME_PLACE(X, ACTIVATION_AMAX, ACTIVATION_GRAD_CAST);
QD_SAME_PLACE(DY, ACTIVATION_GRAD_AMAX, ACTIVATION_GRAD_CAST);

/* The activation of x, or with dy the gradient of x, of m rows and n columns of results. */
static qd_activation_args activation(const qd_op_call *c, bool gradient)
{
    qd_activation_args of = call_activation(c, c->op->m, c->op->n, call_dtype(c, QD_ACTIVATION_AMAX_X));
    of.x = c->at[QD_ACTIVATION_AMAX_X];
    of.dy = gradient ? c->at[QD_ACTIVATION_GRAD_AMAX_DY] : NULL;
    return of;
}

/* Columns of what is cast. */
static int64_t columns(const qd_activation_args *of)
{
    return of->dy && qd_activation_is_gated(of->kind) ? 2 * of->cols : of->cols;
}

static qd_status find_amax(const qd_op_call *c, qd_activation_args of, float *amax)
{
    return c->frame->kernels->amax(c->frame->stream,
                                   &(qd_amax_args){.amax = amax, .n = of.rows * columns(&of), .dtype = of.dtype, .of = &of});
}

qd_status qd_run_activation_amax(const qd_op_call *c)
{
    return find_amax(c, activation(c, false), c->at[QD_ACTIVATION_AMAX_AMAX]);
}

qd_status qd_run_activation_grad_amax(const qd_op_call *c)
{
    return find_amax(c, activation(c, true), c->at[QD_ACTIVATION_GRAD_AMAX_AMAX]);
}

qd_status qd_run_activation_cast(const qd_op_call *c)
{
    const qd_activation_args of = activation(c, false);
    return c->frame->kernels->fp8_cast(c->frame->stream, &(qd_fp8_cast_args){
        .of = &of, .amax = c->at[QD_ACTIVATION_CAST_AMAX], .to = c->at[QD_ACTIVATION_CAST_Y], .transposed = c->at[QD_ACTIVATION_CAST_YT],
        .rows = of.rows, .cols = of.cols, .dtype = of.dtype, .to_dtype = QD_F8E4M3,
    });
}

qd_status qd_run_activation_grad_cast(const qd_op_call *c)
{
    const qd_activation_args of = activation(c, true);
    const int form = c->op->slot[QD_ACTIVATION_GRAD_CAST_DX] >= 0 ? QD_ACTIVATION_GRAD_CAST_DX : QD_ACTIVATION_GRAD_CAST_DXT;
    return c->frame->kernels->fp8_cast(c->frame->stream, &(qd_fp8_cast_args){
        .of = &of, .amax = c->at[QD_ACTIVATION_GRAD_CAST_AMAX], .to = c->at[QD_ACTIVATION_GRAD_CAST_DX],
        .transposed = c->at[QD_ACTIVATION_GRAD_CAST_DXT], .result_amax = c->at[QD_ACTIVATION_GRAD_CAST_Y_AMAX],
        .result_transposed = c->at[QD_ACTIVATION_GRAD_CAST_YT], .rows = of.rows, .cols = columns(&of), .dtype = of.dtype,
        .to_dtype = call_dtype(c, form), .sums = c->at[QD_ACTIVATION_GRAD_CAST_SUMS], .accumulate = c->accumulate,
        .sums_dtype = sums_dtype(c, QD_ACTIVATION_GRAD_CAST_SUMS),
    });
}
