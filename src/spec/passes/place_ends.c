/* Placement of the loss. The head's matrix is sharded over tp by tokens of the vocabulary: each
 * rank computes the logits of its own tokens, one chunk of rows at a time. The loss of a row needs
 * three numbers of the other ranks: the maximum, the sum of exponentials and the logit of the
 * target. The gradient of x is left as this rank's partial sum. On one rank all of it is one op.
 *
 * The loss of a pair (preferences) needs the losses of all rows of both sequences before it has a
 * gradient. So the logits are computed twice, unless all fit: for the losses, whose sums are
 * reduced over cp, and for the gradients. */
#include "spec/passes/sequence.h"

enum { QD_CLASS_NUMBERS, CHUNK_MOST, CHUNK_ROWS, TOKENS, FIRST_ROW, FIRST_TOKEN, AHEAD };
enum { X, MATRIX, INPUT, DX, MATRIX_GRAD, LOSS, LOGITS, LOSSES, TOP, SUMS, SCORES, FACTORS, VALUES };
static const qd_sequence_value values[VALUES] = {
    [LOSSES] = {"losses", QD_VALUE_F32, ROWS, .cols = ONE},
    [TOP] = {"row_max", QD_VALUE_F32, ROWS, .cols = ONE},
    [SUMS] = {"row_sums", QD_VALUE_F32, ROWS, .cols = TWO},
    [SCORES] = {"scores", QD_VALUE_F64, WHOLE_ROWS, .cols = ONE, .kind = QD_SLOT_SCORES},
    [FACTORS] = {"row_factors", QD_VALUE_F32, ROWS, .cols = ONE},
};

/* Facts: gradients are wanted; the matrix is trained; sequences are compared in pairs; ranks of tp,
 * and of cp, share the logits; there are several chunks, so that logits are overwritten. */
enum { GRADIENTS = 1, TRAINED = 2, PAIRS = 4, SHARDED = 8, CONTEXT = 16, SEVERAL = 32 };
enum { ONE_RANK, CHUNK, END, CHUNK_GRADIENTS };
enum { ALL, GEMMS, OF_LOGITS, READS_GEMM, WRITES_GEMM, OF_TOKENS, MAXIMUM, SUM, SUM_OF_CONTEXT };
static const qd_manner manners[] = {
    [ALL] = {.ahead = AHEAD},
    [GEMMS] = {.work = QD_WORK_GIVEN, .chunk = CHUNK_MOST, .capped = true, .ahead = AHEAD},
    /* Rows of the chunk that an op reads, or writes. */
    [OF_LOGITS] = {.first = FIRST_ROW, .capped = true},
    [READS_GEMM] = {.first = FIRST_ROW, .work = QD_WORK_GEMM},
    [WRITES_GEMM] = {.to = FIRST_ROW, .work = QD_WORK_GEMM},
    [OF_TOKENS] = {.first = FIRST_ROW, .to = FIRST_TOKEN, .capped = true, .ahead = AHEAD},
    [MAXIMUM] = {.first = FIRST_ROW, .to = FIRST_ROW, .over = 1, .reduce = QD_MAX},
    [SUM] = {.first = FIRST_ROW, .to = FIRST_ROW, .over = 1},
    [SUM_OF_CONTEXT] = {.over = 2},
};

static const qd_step steps[] = {
    QD_STEP(ONE_RANK, 0, 0, HEAD_LOSS, GEMMS, ROWS, TOKENS, HIDDEN, (X, X), (WEIGHT, MATRIX), (INPUT, INPUT), (DX, DX),
            (WEIGHT_GRAD, MATRIX_GRAD), (LOSS, LOSS), (LOGITS, LOGITS), (LOSSES, LOSSES)),
    QD_STEP(CHUNK, 0, 0, LINEAR, READS_GEMM, CHUNK_ROWS, TOKENS, HIDDEN, (X, X), (WEIGHT, MATRIX), (Y, LOGITS)),
    QD_STEP(CHUNK, 0, 0, LOSS_MAX, OF_LOGITS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (TOP, TOP)),
    QD_STEP(CHUNK, SHARDED, 0, ALL_REDUCE, MAXIMUM, CHUNK_ROWS, ONE, NONE, (X, TOP)),
    QD_STEP(CHUNK, 0, 0, LOSS_PART, OF_TOKENS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (INPUT, INPUT), (TOP, TOP), (SUMS, SUMS)),
    QD_STEP(CHUNK, SHARDED, 0, ALL_REDUCE, SUM, CHUNK_ROWS, TWO, NONE, (X, SUMS)),
    QD_STEP(CHUNK, PAIRS, 0, LOSS_ROWS, OF_TOKENS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (INPUT, INPUT), (TOP, TOP), (SUMS, SUMS),
            (LOSSES, LOSSES)),
    QD_STEP(CHUNK, 0, PAIRS, LOSS_GRAD, OF_TOKENS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (INPUT, INPUT), (TOP, TOP), (SUMS, SUMS),
            (LOSSES, LOSSES)),
    QD_STEP(CHUNK, GRADIENTS, PAIRS, LINEAR_DX, WRITES_GEMM, CHUNK_ROWS, HIDDEN, TOKENS, (DY, LOGITS), (WEIGHT, MATRIX), (DX, DX)),
    QD_STEP(CHUNK, GRADIENTS | TRAINED, PAIRS, LINEAR_DW, READS_GEMM, TOKENS, HIDDEN, CHUNK_ROWS, (DY, LOGITS), (X, X),
            (WEIGHT_GRAD, MATRIX_GRAD)),
    QD_STEP(END, 0, PAIRS, LOSS_SUM, ALL, ROWS, ONE, NONE, (LOSSES, LOSSES), (INPUT, INPUT), (LOSS, LOSS)),
    QD_STEP(END, PAIRS, 0, PAIR_SUMS, ALL, ROWS, ONE, NONE, (LOSSES, LOSSES), (INPUT, INPUT), (SCORES, SCORES)),
    QD_STEP(END, PAIRS | CONTEXT, 0, ALL_REDUCE, SUM_OF_CONTEXT, WHOLE_ROWS, ONE, NONE, (X, SCORES)),
    QD_STEP(END, PAIRS, 0, PAIR_LOSS, ALL, ROWS, ONE, NONE, (SCORES, SCORES), (INPUT, INPUT), (FACTORS, FACTORS), (LOSS, LOSS)),
    QD_STEP(CHUNK_GRADIENTS, SEVERAL, 0, LINEAR, READS_GEMM, CHUNK_ROWS, TOKENS, HIDDEN, (X, X), (WEIGHT, MATRIX), (Y, LOGITS)),
    QD_STEP(CHUNK_GRADIENTS, 0, 0, LOSS_GRAD, OF_TOKENS, CHUNK_ROWS, TOKENS, NONE, (LOGITS, LOGITS), (INPUT, INPUT), (TOP, TOP),
            (SUMS, SUMS), (LOSSES, LOSSES), (FACTORS, FACTORS)),
    QD_STEP(CHUNK_GRADIENTS, 0, 0, LINEAR_DX, WRITES_GEMM, CHUNK_ROWS, HIDDEN, TOKENS, (DY, LOGITS), (WEIGHT, MATRIX), (DX, DX)),
    QD_STEP(CHUNK_GRADIENTS, TRAINED, 0, LINEAR_DW, READS_GEMM, TOKENS, HIDDEN, CHUNK_ROWS, (DY, LOGITS), (X, X),
            (WEIGHT_GRAD, MATRIX_GRAD)),
};

/* Each chunk is several ops: lists of millions of them would take `check` minutes. */
enum { MOST_CHUNKS = 1 << 17 };

/* One stage for each chunk of rows. */
static void emit_chunks(qd_sequence *s, int stage)
{
    const int64_t chunk = s->w->slots[s->slot[LOGITS]].rows;
    for (s->number[FIRST_ROW] = 0; s->number[FIRST_ROW] < s->w->rows; s->number[FIRST_ROW] += chunk) {
        int64_t left = s->w->rows - s->number[FIRST_ROW];
        s->number[CHUNK_ROWS] = left < chunk ? left : chunk;
        qd_sequence_emit(s, stage);
    }
}

void qd_place_loss(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    const qd_device_traits *traits = w->config->traits;
    int weight = op->slot[QD_HEAD_LOSS_WEIGHT];
    bool gradients = op->slot[QD_HEAD_LOSS_DX] >= 0, trained = op->slot[QD_HEAD_LOSS_WEIGHT_GRAD] >= 0;
    int64_t tokens = w->slots[weight].rows, hidden = w->slots[weight].cols, most = qd_head_chunk_rows(traits, w->model->vocab);
    int64_t chunk = most > w->rows ? w->rows : most;
    const qd_group context = qd_group_whole(&w->ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP));
    const bool pairs = w->config->pairs;
    qd_sequence s = {w, QD_SEQUENCE_TABLES(values, steps), manners,
                     .facts = (gradients ? GRADIENTS : 0) | (trained ? TRAINED : 0) | (pairs ? PAIRS : 0) |
                              (w->tensor.size > 1 ? SHARDED : 0) | (context.size > 1 ? CONTEXT : 0) | (chunk < w->rows ? SEVERAL : 0),
                     .group = {w->tensor, context},
                     .number = {[TOKENS] = tokens, [CHUNK_MOST] = chunk, [FIRST_TOKEN] = qd_class_first_token(w, weight),
                                [AHEAD] = op->ahead},
                     .flops = {2.0 * (1 + gradients + (gradients && trained)) * (double)w->rows * (double)tokens * (double)hidden}};
    qd_sequence_begin(&s);
    QD_SEQUENCE_TAKE(&s, op, HEAD_LOSS, (X, X), (WEIGHT, MATRIX), (INPUT, INPUT), (DX, DX), (WEIGHT_GRAD, MATRIX_GRAD), (LOSS, LOSS));
    s.slot[LOGITS] = qd_class_slot(w, "logits", QD_SLOT_LOCAL, traits->narrow_logits ? w->config->activation : QD_F32, chunk,
                                   qd_logits_stride(tokens));
    qd_sequence_slot(&s, LOSSES);
    if (w->tensor.size == 1 && !pairs) {
        qd_sequence_emit(&s, ONE_RANK);
        return;
    }
    if (w->rows / chunk > MOST_CHUNKS) {
        QD_CLASS_FAIL(w, QD_USAGE, "data.seq × train.micro_batch gives each rank %lld rows, and the loss is computed %lld rows at a time, "
                                   "in at most %d pieces: reduce data.seq, or raise parallel.cp", (long long)w->rows, (long long)chunk,
                      MOST_CHUNKS);
        return;
    }
    emit_chunks(&s, CHUNK);
    qd_sequence_emit(&s, END);
    if (pairs && gradients)
        emit_chunks(&s, CHUNK_GRADIENTS);
}
