/* Placement of the two ends of a model, embedding and loss, whose tables are sharded over tp by
 * tokens of the vocabulary. */
#include "spec/passes/passes.h"

/* The first token in this rank's shard of a table. */
static int64_t first_token(const qd_class_writer *w, int weight)
{
    return qd_ledger_atom(w->ledger, w->module->param_begin + w->slots[weight].param, w->config->rank).begin[0];
}

/* A lookup reads one row per token, not the whole table. */
static int64_t looked_up_bytes(const qd_class_writer *w, const qd_slot *table, bool positions)
{
    return (positions ? 2 : 1) * w->rows * table->cols * (int64_t)qd_dtype_size(table->dtype);
}

/* Tokens of another rank's shard yield 0, so the sum over tp is the row of the table. One rank adds
 * the position. */
void qd_place_embed(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_op placed = *op;
    bool backward = op->kind == QD_OP_EMBED_GRAD;
    bool positions = op->slot[backward ? QD_EMBED_GRAD_POSITION_GRAD : QD_EMBED_POSITION_TABLE] >= 0;
    int tokens = backward ? qd_class_weight_of(op->slot[QD_EMBED_GRAD_TOKEN_GRAD]) : op->slot[QD_EMBED_TOKEN_TABLE];
    int rows = op->slot[backward ? QD_EMBED_GRAD_DY : QD_EMBED_Y];
    if (backward) {
        placed.slot[QD_EMBED_GRAD_DY] = (int16_t)(rows = qd_place_want(p, rows, QD_LAYOUT_ALL));
    } else {
        qd_place_give(p, rows, QD_LAYOUT_PARTIAL, 0);
        if (w->tensor_coord > 0)
            placed.slot[QD_EMBED_POSITION_TABLE] = -1;
    }
    qd_op *kept = qd_class_keep(w, &placed);
    qd_op_sizes(kept, w->rows, w->model->hidden, w->slots[tokens].rows, 0.0);
    kept->first = first_token(w, tokens);
    kept->bytes = (backward ? 2 : 1) * looked_up_bytes(w, &w->slots[tokens], positions) + qd_slot_bytes(&w->slots[rows]);
    if (!backward)
        qd_place_sum(p, rows);
}

/* The head's matrix is sharded over tp by tokens: each rank computes the logits of its own tokens,
 * one chunk of rows at a time. The loss of a row needs three numbers of the other ranks: the
 * maximum, the sum of exponentials and the logit of the target. `x` and `d_x` (-1: no gradients)
 * have all rows; d_x is left as this rank's partial sum. */
static void parallel_loss(qd_class_writer *w, const qd_op *loss, int x, int logits, int losses)
{
    int matrix = loss->slot[QD_HEAD_LOSS_WEIGHT], input = loss->slot[QD_HEAD_LOSS_INPUT], d_x = loss->slot[QD_HEAD_LOSS_DX];
    int top = qd_class_f32(w, "row_max", w->rows, 1), sums = qd_class_f32(w, "row_sums", w->rows, 2);
    int64_t chunk = w->slots[logits].rows, tokens = w->slots[matrix].rows, hidden = w->slots[matrix].cols, begin = first_token(w, matrix);
    for (int64_t first = 0; first < w->rows; first += chunk) {
        int64_t rows = w->rows - first < chunk ? w->rows - first : chunk;
        double flops = 2.0 * (double)rows * (double)tokens * (double)hidden;
        qd_op *op = QD_CLASS_OP(w, LINEAR, (X, x), (WEIGHT, matrix), (Y, logits));
        qd_op_sizes(op, rows, tokens, hidden, flops);
        op->first = first;
        op = QD_CLASS_OP(w, LOSS_MAX, (LOGITS, logits), (TOP, top));
        qd_op_sizes(op, rows, tokens, 0, 0.0);
        op->cap = w->model->logit_softcap;
        op->first = first;
        qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, QD_OPERANDS(ALL_REDUCE, (X, top)), first, rows, 1)->exchange.reduce = QD_MAX;
        op = QD_CLASS_OP(w, LOSS_PART, (LOGITS, logits), (INPUT, input), (TOP, top), (SUMS, sums));
        qd_op_sizes(op, rows, tokens, 0, 0.0);
        op->cap = w->model->logit_softcap;
        op->first = first;
        op->to = begin;
        qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, QD_OPERANDS(ALL_REDUCE, (X, sums)), first, rows, 2);
        op = QD_CLASS_OP(w, LOSS_GRAD, (LOGITS, logits), (INPUT, input), (TOP, top), (SUMS, sums), (LOSSES, losses));
        qd_op_sizes(op, rows, tokens, 0, 0.0);
        op->cap = w->model->logit_softcap;
        op->first = first;
        op->to = begin;
        if (d_x < 0)
            continue;
        op = QD_CLASS_OP(w, LINEAR_DX, (DY, logits), (WEIGHT, matrix), (DX, d_x));
        qd_op_sizes(op, rows, hidden, tokens, flops);
        op->to = first;
        op = QD_CLASS_OP(w, LINEAR_DW, (DY, logits), (X, x), (WEIGHT_GRAD, loss->slot[QD_HEAD_LOSS_WEIGHT_GRAD]));
        qd_op_sizes(op, tokens, hidden, rows, flops);
        op->first = first;
    }
    qd_op_sizes(QD_CLASS_OP(w, LOSS_SUM, (LOSSES, losses), (INPUT, input), (LOSS, loss->slot[QD_HEAD_LOSS_LOSS])), w->rows, 1, 0, 0.0);
}

void qd_place_loss(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    const qd_model *m = w->model;
    const qd_device_traits *traits = w->config->traits;
    if (op->kind == QD_OP_HEAD_LOGITS) {
        qd_op placed = *op;
        int64_t tokens = w->slots[op->slot[QD_HEAD_LOGITS_WEIGHT]].rows; /* of this rank's shard */
        placed.slot[QD_HEAD_LOGITS_X] = (int16_t)qd_place_want(p, op->slot[QD_HEAD_LOGITS_X], QD_LAYOUT_ALL);
        w->slots[op->slot[QD_HEAD_LOGITS_LOGITS]].cols = tokens;
        qd_op *logits = qd_class_keep(w, &placed);
        qd_op_sizes(logits, 1, tokens, m->hidden, 2.0 * (double)tokens * (double)m->hidden);
        logits->first = first_token(w, op->slot[QD_HEAD_LOGITS_WEIGHT]);
        logits->cap = m->logit_softcap;
        return;
    }
    int64_t chunk = qd_head_chunk_rows(traits, m->vocab);
    chunk = chunk > w->rows ? w->rows : chunk;
    qd_dtype type = traits->narrow_logits ? w->config->activation : QD_F32;
    int logits = qd_class_slot(w, "logits", QD_SLOT_LOCAL, type, chunk, qd_logits_stride(w->slots[op->slot[QD_HEAD_LOSS_WEIGHT]].rows));
    int losses = qd_class_f32(w, "losses", w->rows, 1), d_x = op->slot[QD_HEAD_LOSS_DX];
    qd_place_give(p, d_x, QD_LAYOUT_PARTIAL, 0);
    int x = qd_place_want(p, op->slot[QD_HEAD_LOSS_X], QD_LAYOUT_ALL);
    if (w->tensor.size > 1) {
        parallel_loss(w, op, x, logits, losses);
        qd_place_sum(p, d_x);
        return;
    }
    qd_op *kept = QD_CLASS_OP(w, HEAD_LOSS, (X, x), (WEIGHT, op->slot[QD_HEAD_LOSS_WEIGHT]), (INPUT, op->slot[QD_HEAD_LOSS_INPUT]),
                              (DX, d_x), (WEIGHT_GRAD, op->slot[QD_HEAD_LOSS_WEIGHT_GRAD]), (LOSS, op->slot[QD_HEAD_LOSS_LOSS]),
                              (LOGITS, logits), (LOSSES, losses));
    qd_op_sizes(kept, w->rows, m->vocab, m->hidden, (d_x >= 0 ? 6.0 : 2.0) * (double)w->rows * (double)m->vocab * (double)m->hidden);
    kept->chunk = chunk;
    kept->cap = m->logit_softcap;
}
