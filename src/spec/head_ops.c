/* The op lists of the two ends of a model: the embedding and the head. */
#include "spec/ops_impl.h"

/* A lookup reads one row per token, not the table. */
static int64_t looked_up_bytes(const qd_class_writer *w, qd_class_weight tokens, qd_class_weight positions)
{
    const qd_slot *table = &w->slots[tokens.value];
    return (positions.value >= 0 ? 2 : 1) * w->rows * table->cols * (int64_t)qd_dtype_size(table->dtype);
}

void qd_write_embed(qd_class_writer *w)
{
    const qd_model *m = w->model;
    int input = qd_class_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    qd_class_weight tokens = qd_class_weights(w, "tokens.weight", 1), positions = qd_class_weights(w, "positions.weight", 1);
    int out = qd_class_slot(w, "out", QD_SLOT_OUT, w->config->activation, w->port_rows, m->hidden);
    w->phase = QD_PHASE_FORWARD;
    bool drops = m->dropout > 0.0 && w->config->training, sp = w->ledger->mesh.sp;
    /* Tokens whose row another rank holds give 0, and the sum over tp is the table's row; one rank adds the position. */
    int64_t first = qd_ledger_atom(w->ledger, w->module->param_begin, w->config->rank).begin[0];
    int y = drops || sp ? qd_class_local(w, "embedded", m->hidden) : out, own = y;
    qd_op *embed = QD_CLASS_OP(w, EMBED, input, tokens.value, qd_class_bias_once(w, positions).value, y);
    qd_op_sizes(embed, w->rows, m->hidden, tokens.out, 0.0);
    embed->first = first;
    embed->bytes = looked_up_bytes(w, tokens, positions) + qd_slot_bytes(&w->slots[y]);
    if (sp)
        own = drops ? qd_class_port(w, "embedded of the port", m->hidden) : out;
    if (w->tensor.size > 1)
        qd_class_exchange(w, sp ? QD_OP_REDUCE_SCATTER : QD_OP_ALL_REDUCE, w->tensor, (const int[]){y, own}, sp ? 2 : 1, 0, w->rows,
                          m->hidden);
    if (drops) {
        qd_op *drop = QD_CLASS_OP(w, DROPOUT, own, out);
        qd_op_sizes(drop, w->port_rows, m->hidden, 0, 0.0);
        drop->first = w->port_first;
    }
    if (!w->config->training)
        return;
    int dy = qd_class_slot(w, "grad_out", QD_SLOT_GRAD_OUT, w->config->activation, w->port_rows, m->hidden), gathered;
    w->phase = QD_PHASE_INPUT;
    dy = qd_class_dropout(w, "d_embedded", dy, 0);
    w->phase = QD_PHASE_WEIGHT;
    dy = qd_class_enter(w, "d_embedded of all ranks", dy, &gathered);
    qd_op *grad = QD_CLASS_OP(w, EMBED_GRAD, input, dy, tokens.grad, positions.grad);
    qd_class_await(w, gathered);
    qd_op_sizes(grad, w->rows, m->hidden, tokens.out, 0.0);
    grad->first = first;
    grad->bytes = 2 * looked_up_bytes(w, tokens, positions) + qd_slot_bytes(&w->slots[dy]);
}

/* In generation: norm → logits of the last row. */
void write_logits_head(qd_class_writer *w)
{
    const qd_model *m = w->model;
    int x = qd_class_slot(w, "in", QD_SLOT_IN, w->config->activation, w->rows, m->hidden);
    qd_class_norm_state n = qd_class_norm_slots(w, "norm.weight", "norm.bias", "mean", "rstd");
    qd_class_weight matrix = qd_class_weights(w, "weight", 1);
    int normed = qd_class_local(w, "normed", m->hidden);
    int logits = qd_class_slot(w, "logits", QD_SLOT_LOGITS, QD_F32, 1, m->vocab);
    qd_class_norm(w, x, -1, n, -1, normed);
    qd_op_sizes(QD_CLASS_OP(w, HEAD_LOGITS, normed, matrix.value, logits), 1, m->vocab, m->hidden,
                2.0 * (double)m->vocab * (double)m->hidden);
}

/* The head's matrix is cut by tokens over tp: each rank has the logits of its own tokens, for one chunk of rows at a time.
 * What a row's loss needs of the others is three numbers: the maximum, the sum of exponentials and the target's logit. `x`
 * (which `pending` may still be gathering) and `d_x` (-1: no gradients) have all rows; d_x is left as this rank's partial sum. */
static void write_parallel_loss(qd_class_writer *w, int x, int pending, int input, qd_class_weight matrix, int logits, int losses, int loss,
                                int d_x)
{
    int top = qd_class_local_f32(w, "row_max", w->rows, 1), sums = qd_class_local_f32(w, "row_sums", w->rows, 2);
    int64_t chunk = w->slots[logits].rows, tokens = matrix.out, hidden = matrix.in;
    int64_t first_token = qd_ledger_atom(w->ledger, w->module->param_begin + w->slots[matrix.value].param, w->config->rank).begin[0];
    for (int64_t first = 0; first < w->rows; first += chunk) {
        int64_t rows = w->rows - first < chunk ? w->rows - first : chunk;
        double flops = 2.0 * (double)rows * (double)tokens * (double)hidden;
        qd_op *op = QD_CLASS_OP(w, LINEAR, x, matrix.value, -1, logits);
        qd_op_sizes(op, rows, tokens, hidden, flops);
        op->first = first;
        qd_class_await(w, pending);
        op = QD_CLASS_OP(w, LOSS_MAX, logits, top);
        qd_op_sizes(op, rows, tokens, 0, 0.0);
        op->first = first;
        qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, (const int[]){top}, 1, first, rows, 1)->exchange.reduce = QD_MAX;
        op = QD_CLASS_OP(w, LOSS_PART, logits, input, top, sums);
        qd_op_sizes(op, rows, tokens, 0, 0.0);
        op->first = first;
        op->to = first_token;
        qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, (const int[]){sums}, 1, first, rows, 2);
        op = QD_CLASS_OP(w, LOSS_GRAD, logits, input, top, sums, losses);
        qd_op_sizes(op, rows, tokens, 0, 0.0);
        op->first = first;
        op->to = first_token;
        if (d_x < 0)
            continue;
        op = QD_CLASS_OP(w, LINEAR_DX, logits, matrix.value, d_x);
        qd_op_sizes(op, rows, hidden, tokens, flops);
        op->to = first;
        op = QD_CLASS_OP(w, LINEAR_DW, logits, x, matrix.grad, -1);
        qd_op_sizes(op, tokens, hidden, rows, flops);
        op->first = first;
    }
    qd_op_sizes(QD_CLASS_OP(w, LOSS_SUM, losses, input, loss), w->rows, 1, 0, 0.0);
}

/* norm → logits in chunks → loss, and in the same pass the gradients of the normed rows and of the head's matrix. */
void qd_write_head(qd_class_writer *w)
{
    const qd_model *m = w->model;
    if (w->config->context > 0) {
        write_logits_head(w);
        return;
    }
    const qd_device_traits *traits = w->config->traits;
    int64_t chunk = qd_head_chunk_rows(traits, m->vocab);
    if (chunk > w->rows)
        chunk = w->rows;
    int x = qd_class_slot(w, "in", QD_SLOT_IN, w->config->activation, w->port_rows, m->hidden);
    int input = qd_class_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    qd_class_norm_state n = qd_class_norm_slots(w, "norm.weight", "norm.bias", "mean", "rstd");
    qd_class_weight matrix = qd_class_weights(w, "weight", 1);
    int normed = qd_class_port(w, "normed", m->hidden), pending = -1;
    int logits = qd_class_slot(w, "logits", QD_SLOT_LOCAL, traits->narrow_logits ? w->config->activation : QD_F32, chunk,
                               qd_logits_stride(matrix.out));
    int losses = qd_class_local_f32(w, "losses", w->rows, 1);
    int loss = qd_class_slot(w, "loss", QD_SLOT_LOSS, QD_F64, 2, 1);
    bool training = w->config->training;
    int d_normed = training ? qd_class_local(w, "d_normed", m->hidden) : -1;

    w->phase = QD_PHASE_FORWARD;
    qd_class_norm(w, x, -1, n, -1, normed);
    if (w->tensor.size > 1) {
        int all = qd_class_enter(w, "normed of all ranks", normed, &pending);
        write_parallel_loss(w, all, pending, input, matrix, logits, losses, loss, d_normed);
        if (training)
            d_normed = qd_class_leave(w, "d_normed of the port", d_normed, &pending);
    } else {
        qd_op *op = QD_CLASS_OP(w, HEAD_LOSS, normed, matrix.value, input, d_normed, training ? matrix.grad : -1, loss, logits, losses);
        qd_op_sizes(op, w->rows, m->vocab, m->hidden,
                    (training ? 6.0 : 2.0) * (double)w->rows * (double)m->vocab * (double)m->hidden);
        op->chunk = chunk;
    }
    if (!training)
        return;
    int dx = qd_class_slot(w, "grad_in", QD_SLOT_GRAD_IN, w->config->activation, w->port_rows, m->hidden);
    w->phase = QD_PHASE_INPUT;
    qd_class_norm_grad(w, d_normed, x, n, -1, dx, -1, -1);
    qd_class_await(w, pending);
}
