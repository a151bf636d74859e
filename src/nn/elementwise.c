/* Runners of elementwise ops: activations, additions, dropout. */
#include "nn/nn_impl.h"

qd_status qd_run_activation(const qd_op_call *c)
{
    qd_activation_args a = call_activation(c, c->op->m, c->op->n, call_dtype(c, QD_ACTIVATION_X));
    a.x = c->at[QD_ACTIVATION_X];
    a.y = c->at[QD_ACTIVATION_Y];
    return c->frame->kernels->activation_forward(c->frame->stream, &a);
}

QD_SAME_PLACE(X, ACTIVATION_GRAD, ACTIVATION_GRAD_Y);
QD_SAME_PLACE(DY, ACTIVATION_GRAD, ACTIVATION_GRAD_Y);
QD_SAME_PLACE(DX, ACTIVATION_GRAD, ACTIVATION_GRAD_Y);

static qd_status activation_grad(const qd_op_call *c, void *y)
{
    qd_activation_args a = call_activation(c, c->op->m, c->op->n, call_dtype(c, QD_ACTIVATION_GRAD_X));
    a.x = c->at[QD_ACTIVATION_GRAD_X];
    a.dy = c->at[QD_ACTIVATION_GRAD_DY];
    a.dx = c->at[QD_ACTIVATION_GRAD_DX];
    a.y = y;
    return c->frame->kernels->activation_backward(c->frame->stream, &a);
}

qd_status qd_run_activation_grad(const qd_op_call *c)
{
    return activation_grad(c, NULL);
}

qd_status qd_run_activation_grad_y(const qd_op_call *c)
{
    return activation_grad(c, c->at[QD_ACTIVATION_GRAD_Y_Y]);
}

qd_status qd_run_clip(const qd_op_call *c)
{
    return c->frame->kernels->clip(c->frame->stream, &(qd_clip_args){
        .x = c->at[QD_CLIP_X], .y = c->at[QD_CLIP_Y], .n = c->op->m * c->op->n, .limit = (float)call_model(c)->clip_qkv,
        .dtype = call_dtype(c, QD_CLIP_X),
    });
}

qd_status qd_run_clip_grad(const qd_op_call *c)
{
    return c->frame->kernels->clip_backward(c->frame->stream, &(qd_clip_args){
        .x = c->at[QD_CLIP_GRAD_X], .dy = c->at[QD_CLIP_GRAD_DY], .y = c->at[QD_CLIP_GRAD_DX], .n = c->op->m * c->op->n,
        .limit = (float)call_model(c)->clip_qkv, .dtype = call_dtype(c, QD_CLIP_GRAD_X),
    });
}

qd_status qd_run_add(const qd_op_call *c)
{
    return c->frame->kernels->add(c->frame->stream, &(qd_add_args){
        .a = c->at[QD_ADD_A], .b = c->at[QD_ADD_B], .y = c->at[QD_ADD_Y], .n = c->op->m * c->op->n,
        .a_dtype = call_dtype(c, QD_ADD_A), .b_dtype = call_dtype(c, QD_ADD_B), .y_dtype = call_dtype(c, QD_ADD_Y),
    });
}

qd_status qd_run_scale(const qd_op_call *c)
{
    return c->frame->kernels->scale(c->frame->stream, &(qd_scale_args){
        .x = c->at[QD_SCALE_X], .y = c->at[QD_SCALE_Y], .n = c->op->m * c->op->n, .factor = (float)c->op->scale,
        .dtype = call_dtype(c, QD_SCALE_X),
    });
}

/* Rows [row, row + rows) of the operand, of which the first is row `first` of the global batch. */
static qd_status dropout_rows(const qd_op_call *c, int64_t row, int64_t rows, int64_t first)
{
    const qd_frame *f = c->frame;
    const qd_op *op = c->op;
    bool adapter = op->site >= QD_DROPOUTS_MOST; /* sites behind those of all modules */
    int modules = f->program->ledger->module_count;
    qd_dropout_args a = {
        .x = call_row(c, QD_DROPOUT_X, row), .y = call_row(c, QD_DROPOUT_Y, row), .rows = rows, .cols = op->n, .first_row = first,
        .p = (float)(adapter ? call_model(c)->lora.dropout : call_model(c)->dropout), .seed = f->seed, .step = f->step,
        .site = (uint32_t)(adapter ? QD_DROPOUTS_MOST * modules + QD_ADAPTERS_MOST * f->module + op->site - QD_DROPOUTS_MOST
                                   : QD_DROPOUTS_MOST * f->module + op->site),
        .dtype = call_dtype(c, QD_DROPOUT_X),
    };
    if (op->k <= 1)
        return f->kernels->dropout(f->stream, &a);
    /* Columns are shard `to` of k equal ones: in rows of n columns, every row has k. */
    a.rows = 1;
    for (int64_t i = 0; i < rows; i++) {
        a.x = call_row(c, QD_DROPOUT_X, row + i);
        a.y = call_row(c, QD_DROPOUT_Y, row + i);
        a.first_row = (first + i) * op->k + op->to;
        QD_TRY(f->kernels->dropout(f->stream, &a));
    }
    return QD_OK;
}

/* Masks are keyed by the index of a row in the global batch. Under cp the rows of a sequence have
 * other positions, run by run. */
qd_status qd_run_dropout(const qd_op_call *c)
{
    const qd_frame *f = c->frame;
    const qd_program *p = f->program;
    qd_row_run runs[QD_CONTEXT_RUNS];
    int coord, cp = qd_program_cp(p, &coord), count = qd_context_runs(p->strategy.seq, cp, coord, runs);
    int64_t seq = qd_ledger_rows(p->ledger, p->rank, p->strategy.seq), end = c->op->first + c->op->m;
    for (int64_t row = c->op->first; row < end;) {
        int64_t batch = row / seq, within = row % seq, first = f->first_row + row, rows = end - row;
        for (int i = 0; cp > 1 && i < count; i++) {
            if (within < runs[i].row || within >= runs[i].row + runs[i].count)
                continue;
            int64_t left = runs[i].row + runs[i].count - within;
            first = f->first_row + batch * p->strategy.seq + runs[i].position + within - runs[i].row;
            rows = left < rows ? left : rows;
        }
        QD_TRY(dropout_rows(c, row - c->op->first, rows, first));
        row += rows;
    }
    return QD_OK;
}
