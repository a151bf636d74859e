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
    int out = qd_class_slot(w, "out", QD_SLOT_OUT, w->config->activation, w->rows, m->hidden);
    w->phase = QD_PHASE_FORWARD;
    bool drops = m->dropout > 0.0 && w->config->training;
    int y = drops ? qd_class_local(w, "embedded", m->hidden) : out;
    qd_op *embed = QD_CLASS_OP(w, EMBED, input, tokens.value, positions.value, y);
    qd_op_sizes(embed, w->rows, m->hidden, 0, 0.0);
    embed->bytes = looked_up_bytes(w, tokens, positions) + qd_slot_bytes(&w->slots[y]);
    if (drops)
        qd_op_sizes(QD_CLASS_OP(w, DROPOUT, y, out), w->rows, m->hidden, 0, 0.0);
    if (!w->config->training)
        return;
    int dy = qd_class_slot(w, "grad_out", QD_SLOT_GRAD_OUT, w->config->activation, w->rows, m->hidden);
    w->phase = QD_PHASE_INPUT;
    dy = qd_class_dropout(w, "d_embedded", dy, 0);
    w->phase = QD_PHASE_WEIGHT;
    qd_op *grad = QD_CLASS_OP(w, EMBED_GRAD, input, dy, tokens.grad, positions.grad);
    qd_op_sizes(grad, w->rows, m->hidden, 0, 0.0);
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
    qd_op_sizes(QD_CLASS_OP(w, HEAD_LOGITS, normed, matrix.value, logits), 1, m->vocab, m->hidden, 2.0 * (double)m->vocab * (double)m->hidden);
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
    int x = qd_class_slot(w, "in", QD_SLOT_IN, w->config->activation, w->rows, m->hidden);
    int input = qd_class_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    qd_class_norm_state n = qd_class_norm_slots(w, "norm.weight", "norm.bias", "mean", "rstd");
    qd_class_weight matrix = qd_class_weights(w, "weight", 1);
    int normed = qd_class_local(w, "normed", m->hidden);
    int logits = qd_class_slot(w, "logits", QD_SLOT_LOCAL, traits->narrow_logits ? w->config->activation : QD_F32, chunk, m->vocab);
    int losses = qd_class_local_f32(w, "losses", w->rows, 1);
    int loss = qd_class_slot(w, "loss", QD_SLOT_LOSS, QD_F64, 2, 1);
    bool training = w->config->training;
    int d_normed = training ? qd_class_local(w, "d_normed", m->hidden) : -1;

    w->phase = QD_PHASE_FORWARD;
    qd_class_norm(w, x, -1, n, -1, normed);
    qd_op *op = QD_CLASS_OP(w, HEAD_LOSS, normed, matrix.value, input, d_normed, training ? matrix.grad : -1, loss, logits, losses);
    qd_op_sizes(op, w->rows, m->vocab, m->hidden,
          (training ? 6.0 : 2.0) * (double)w->rows * (double)m->vocab * (double)m->hidden);
    op->chunk = chunk;
    if (!training)
        return;
    int dx = qd_class_slot(w, "grad_in", QD_SLOT_GRAD_IN, w->config->activation, w->rows, m->hidden);
    w->phase = QD_PHASE_INPUT;
    qd_class_norm_grad(w, d_normed, x, n, -1, dx);
}
