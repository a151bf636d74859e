/* Placement of the loss. The head's matrix is sharded over tp by tokens of the vocabulary: each
 * rank computes the logits of its own tokens, one chunk of rows at a time. The loss of a row needs
 * three numbers of the other ranks: the maximum, the sum of exponentials and the logit of the
 * target. The gradient of x is left as this rank's partial sum. On one rank all of it is one op. */
#include "spec/passes/sequence.h"

enum { NONE, ONE, TWO, ROWS, CHUNK_ROWS, TOKENS, HIDDEN };
enum { X, MATRIX, INPUT, DX, MATRIX_GRAD, LOSS, LOGITS, LOSSES, TOP, SUMS, VALUES };
static const qd_sequence_value values[VALUES] = {
    [LOSSES] = {"losses", QD_VALUE_F32, ROWS, .cols = ONE},
    [TOP] = {"row_max", QD_VALUE_F32, ROWS, .cols = ONE},
    [SUMS] = {"row_sums", QD_VALUE_F32, ROWS, .cols = TWO},
};

/* Facts: gradients are wanted; the matrix is trained. */
enum { GRADIENTS = 1, TRAINED = 2 };
enum { ONE_RANK, CHUNK, END };
/* Rows of the chunk that an op reads, or writes. MAXIMUM: an exchange that is not a sum. */
enum { ALL, READS, WRITES, MAXIMUM };

static const qd_step steps[] = {
    QD_STEP(ONE_RANK, 0, 0, HEAD_LOSS, ALL, ROWS, TOKENS, HIDDEN, (X, X), (WEIGHT, MATRIX), (INPUT, INPUT), (DX, DX),
            (WEIGHT_GRAD, MATRIX_GRAD), (LOSS, LOSS), (LOGITS, LOGITS), (LOSSES, LOSSES)),
    QD_STEP(CHUNK, 0, 0, LINEAR, READS, CHUNK_ROWS, TOKENS, HIDDEN, (X, X), (WEIGHT, MATRIX), (Y, LOGITS)),
    QD_STEP(CHUNK, 0, 0, LOSS_MAX, READS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (TOP, TOP)),
    QD_STEP(CHUNK, 0, 0, ALL_REDUCE, MAXIMUM, CHUNK_ROWS, ONE, NONE, (X, TOP)),
    QD_STEP(CHUNK, 0, 0, LOSS_PART, READS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (INPUT, INPUT), (TOP, TOP), (SUMS, SUMS)),
    QD_STEP(CHUNK, 0, 0, ALL_REDUCE, READS, CHUNK_ROWS, TWO, NONE, (X, SUMS)),
    QD_STEP(CHUNK, 0, 0, LOSS_GRAD, READS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (INPUT, INPUT), (TOP, TOP), (SUMS, SUMS),
            (LOSSES, LOSSES)),
    QD_STEP(CHUNK, GRADIENTS, 0, LINEAR_DX, WRITES, CHUNK_ROWS, HIDDEN, TOKENS, (DY, LOGITS), (WEIGHT, MATRIX), (DX, DX)),
    QD_STEP(CHUNK, GRADIENTS | TRAINED, 0, LINEAR_DW, READS, TOKENS, HIDDEN, CHUNK_ROWS, (DY, LOGITS), (X, X), (WEIGHT_GRAD, MATRIX_GRAD)),
    QD_STEP(END, 0, 0, LOSS_SUM, ALL, ROWS, ONE, NONE, (LOSSES, LOSSES), (INPUT, INPUT), (LOSS, LOSS)),
};

typedef struct loss {
    qd_sequence s;
    int64_t chunk, first; /* rows of a chunk; its first row */
} loss;

static void finish(qd_sequence *s, const qd_step *step, qd_op *op)
{
    const loss *l = (const loss *)(const void *)s;
    double products = op->kind != QD_OP_HEAD_LOSS || !(s->facts & GRADIENTS) ? 1.0 : s->facts & TRAINED ? 3.0 : 2.0;
    op->flops = 2.0 * products * (double)op->m * (double)op->n * (double)op->k; /* k is 0 unless it is a GEMM */
    op->first = step->how == READS || step->how == MAXIMUM ? l->first : 0;
    op->to = step->how == WRITES ? l->first : 0;
    switch (op->kind) {
    case QD_OP_HEAD_LOSS:
        op->chunk = l->chunk;
        op->cap = s->w->model->logit_softcap;
        break;
    case QD_OP_LOSS_PART:
    case QD_OP_LOSS_GRAD:
        op->to = qd_class_first_token(s->w, s->slot[MATRIX]); /* fall through */
    case QD_OP_LOSS_MAX:
        op->cap = s->w->model->logit_softcap;
        break;
    case QD_OP_ALL_REDUCE:
        op->to = op->first;
        qd_op_communicate(s->w, op, s->w->tensor);
        op->exchange.reduce = step->how == MAXIMUM ? QD_MAX : QD_SUM;
        break;
    default:
        break;
    }
}

void qd_place_loss(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    const qd_device_traits *traits = w->config->traits;
    const qd_slot matrix = w->slots[op->slot[QD_HEAD_LOSS_WEIGHT]];
    int64_t most = qd_head_chunk_rows(traits, w->model->vocab);
    loss l = {.s = {w, QD_SEQUENCE_TABLES(values, steps), finish, .facts = (op->slot[QD_HEAD_LOSS_DX] >= 0 ? GRADIENTS : 0) |
                             (op->slot[QD_HEAD_LOSS_WEIGHT_GRAD] >= 0 ? TRAINED : 0),
                    .number = {[ONE] = 1, [TWO] = 2, [ROWS] = w->rows, [TOKENS] = matrix.rows, [HIDDEN] = matrix.cols}},
              .chunk = most > w->rows ? w->rows : most};
    qd_sequence_begin(&l.s);
    QD_SEQUENCE_TAKE(&l.s, op, HEAD_LOSS, (X, X), (WEIGHT, MATRIX), (INPUT, INPUT), (DX, DX), (WEIGHT_GRAD, MATRIX_GRAD), (LOSS, LOSS));
    l.s.slot[LOGITS] = qd_class_slot(w, "logits", QD_SLOT_LOCAL, traits->narrow_logits ? w->config->activation : QD_F32, l.chunk,
                                     qd_logits_stride(matrix.rows));
    qd_sequence_slot(&l.s, LOSSES);
    if (w->tensor.size == 1) {
        qd_sequence_emit(&l.s, ONE_RANK);
        return;
    }
    for (l.first = 0; l.first < w->rows; l.first += l.chunk) {
        l.s.number[CHUNK_ROWS] = w->rows - l.first < l.chunk ? w->rows - l.first : l.chunk;
        qd_sequence_emit(&l.s, CHUNK);
    }
    qd_sequence_emit(&l.s, END);
}
