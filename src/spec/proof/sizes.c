/* Sizes: every op works on all of its operands, on the heads, experts, rows and columns that its
 * rank has, and exchanges move values in their own type. A table gives the shape that each operand
 * must have in terms of the op's sizes; a kernel that gets fewer rows than a value has would
 * leave the rest of a gradient as it was. */
#include "spec/proof/proof_impl.h"

#include "spec/layout/context.h"
#include "spec/layout/experts.h"
#include "spec/layout/nodes.h"

#include <stdio.h>

/* Rows and columns of an operand:
 *   m n k  the op's sizes             1 2    one, two      *  not checked here
 *   w v    m rows from `first`, `to` on; x y  k rows from `first`, `to` on: at least those
 *   > ]    at least n, at least k     l      chunk         i  `first`
 *   N h    2n, n / 2                  a      n, or 2n where the activation is gated
 *   Q      n, k and as many values    e f    experts · n, experts · k; b  k for each rank of etp
 *   q o c  columns of queries, keys and values; of results; of keys and values, by the op's heads
 *   O L R  columns of queries; of the expanded latents; of the rotary part of keys
 *   g d K  heads and kv heads; size of a head; columns of keys
 *   A P    parts · k; columns of all parts, of each expert
 *   E t    experts of the model; experts per token
 *   s r p  rows of whole sequences; of this rank's positions; of a port */
#define SHAPE(kind, triple) [QD_OPERAND_PLACE(kind, FIRST triple)] = {SECOND triple, THIRD triple},
#define FIRST(a, b, c) a
#define SECOND(a, b, c) b
#define THIRD(a, b, c) c
#define ROW(kind, ...) [QD_OP_##kind] = {QD_EACH(SHAPE, kind, __VA_ARGS__)}
static const char shapes[QD_OP_KIND_COUNT][QD_OP_SLOTS][2] = {
    ROW(EMBED, (TOKEN_TABLE, 'k', 'n'), (POSITION_TABLE, '*', 'n'), (Y, 'm', 'n')),
    ROW(EMBED_GRAD, (DY, 'm', 'n'), (TOKEN_GRAD, 'k', 'n'), (POSITION_GRAD, '*', 'n')),
    ROW(NORM, (X, 'm', 'n'), (ADD, 'm', 'n'), (GAMMA, 'n', '1'), (BETA, 'n', '1'), (SUM, 'm', 'n'), (Y, 'm', 'n'), (MEAN, 'm', '1'),
        (RSTD, 'm', '1'), (AMAX, '1', '1')),
    ROW(NORM_GRAD, (DY, 'm', 'n'), (X, 'm', 'n'), (GAMMA, 'n', '1'), (ADD, 'm', 'n'), (MEAN, 'm', '1'), (RSTD, 'm', '1'), (DX, 'm', 'n'),
        (GAMMA_GRAD, 'n', '1'), (BETA_GRAD, 'n', '1'), (ADD_SUMS, 'n', '1'), (DX_SUMS, 'n', '1'), (AMAX, '1', '1')),
    ROW(LINEAR, (X, 'w', 'k'), (WEIGHT, 'n', 'k'), (BIAS, 'n', '1'), (Y, 'v', '>')),
    ROW(LINEAR_ADD, (X, 'm', 'k'), (WEIGHT, 'n', 'k'), (BIAS, 'n', '1'), (ADD, 'm', 'n'), (Y, 'm', 'n')),
    ROW(LINEAR_GELU, (X, 'w', 'k'), (WEIGHT, 'n', 'k'), (BIAS, 'n', '1'), (SUM, 'v', 'n'), (Y, 'v', 'n')),
    ROW(LINEAR_DX, (DY, 'w', ']'), (WEIGHT, 'k', 'n'), (DX, 'v', 'n')),
    ROW(LINEAR_DX_GELU, (DY, 'w', 'k'), (WEIGHT, 'k', 'n'), (SUM, 'v', 'n'), (DX, 'v', 'n')),
    ROW(LINEAR_DW, (DY, 'y', '*'), (X, 'x', 'n'), (WEIGHT_GRAD, 'm', 'n'), (BIAS_GRAD, 'm', '1')),
    ROW(AMAX, (X, 'm', 'n'), (AMAX, '1', '1')),
    ROW(CAST, (X, 'm', 'n'), (AMAX, '1', '1'), (Y, 'm', 'n'), (YT, 'm', 'n'), (SUMS, 'n', '1')),
    ROW(ACTIVATION_AMAX, (X, 'm', 'a'), (AMAX, '1', '1')),
    ROW(ACTIVATION_CAST, (X, 'm', 'a'), (AMAX, '1', '1'), (Y, 'm', 'n'), (YT, 'm', 'n')),
    ROW(ACTIVATION_GRAD_AMAX, (X, 'm', 'a'), (DY, 'm', 'n'), (AMAX, '1', '1')),
    ROW(ACTIVATION_GRAD_CAST, (X, 'm', 'a'), (DY, 'm', 'n'), (AMAX, '1', '1'), (Y_AMAX, '1', '1'), (DX, 'm', 'a'), (DXT, 'm', 'a'),
        (YT, 'm', 'n'), (SUMS, 'a', '1')),
    ROW(ADAPT, (X, 'm', 'A'), (WEIGHT, 'P', 'k'), (ADD, 'm', 'n'), (Y, 'm', 'n')),
    ROW(ADAPT_DX, (DY, 'm', 'n'), (WEIGHT, 'P', 'k'), (DX, 'm', 'A')),
    ROW(ADAPT_DW, (DY, 'm', 'n'), (X, 'm', 'A'), (WEIGHT_GRAD, 'P', 'k')),
    ROW(BIAS_GRAD, (DY, 'm', 'n'), (GRAD, 'n', '1')),
    ROW(ROPE, (X, 'm', 'q'), (Y, 'm', 'q')),
    ROW(ROPE_INVERSE, (X, 'm', 'q'), (Y, 'm', 'q')),
    ROW(LATENT_QKV, (Q, 'm', 'O'), (KV, 'm', 'L'), (K_ROPE, 'm', 'R'), (QKV, 'm', 'q')),
    ROW(LATENT_QKV_GRAD, (D_QKV, 'm', 'q'), (DQ, 'm', 'O'), (DKV, 'm', 'L'), (DK_ROPE, 'm', 'R')),
    ROW(ATTENTION, (QKV, 's', 'q'), (O, 's', 'o')),
    ROW(ATTENTION_LATENT, (Q, 'm', 'O'), (K_ROPE, 'm', 'R'), (O, 'm', 'o')),
    ROW(ATTENTION_CACHED, (QKV, 'm', 'q'), (O, 'm', 'o')),
    ROW(ATTENTION_SINK, (O, 'm', 'o')),
    ROW(ATTENTION_SINK_GRAD, (SINK_GRAD, '*', '1')),
    ROW(ATTENTION_GRAD, (QKV, 's', 'q'), (O, 's', 'o'), (D_O, 's', 'o'), (D_QKV, 's', 'q')),
    ROW(ACTIVATION, (X, 'm', 'a'), (Y, 'm', 'n')),
    ROW(ACTIVATION_GRAD, (X, 'm', 'a'), (DY, 'm', 'n'), (DX, 'm', 'a')),
    ROW(ACTIVATION_GRAD_Y, (X, 'm', 'a'), (DY, 'm', 'n'), (DX, 'm', 'a'), (Y, 'm', 'n')),
    ROW(CLIP, (X, 'm', 'n'), (Y, 'm', 'n')),
    ROW(CLIP_GRAD, (X, 'm', 'n'), (DY, 'm', 'n'), (DX, 'm', 'n')),
    ROW(ADD, (A, 'm', 'n'), (B, 'm', 'n'), (Y, 'm', 'n')),
    ROW(SCALE, (X, 'm', 'n'), (Y, 'm', 'n')),
    ROW(GATE, (X, 'm', 'n'), (GATE, 'm', '1'), (Y, 'm', 'n')),
    ROW(GATE_GRAD, (DY, 'm', 'n'), (X, 'm', 'n'), (GATE, 'm', '1'), (DX, 'm', 'n'), (D_GATE, 'm', '1')),
    ROW(DROPOUT, (X, 'm', 'n'), (Y, 'm', 'n')),
    ROW(HEAD_LOSS, (X, 'm', 'k'), (WEIGHT, 'n', 'k'), (DX, 'm', 'k'), (WEIGHT_GRAD, 'n', 'k'), (LOGITS, 'l', '>'), (LOSSES, 'm', '1')),
    ROW(HEAD_LOGITS, (X, '*', 'k'), (WEIGHT, 'n', 'k'), (LOGITS, '1', 'n')),
    ROW(HEAD_NORM, (X, 'm', 'q'), (Q_GAMMA, 'd', '1'), (K_GAMMA, 'd', '1'), (Y, 'm', 'n'), (RSTD, 'm', 'g')),
    ROW(HEAD_NORM_GRAD, (DY, 'm', 'q'), (X, 'm', 'n'), (Q_GAMMA, 'd', '1'), (K_GAMMA, 'd', '1'), (RSTD, 'm', 'g'),
        (Q_GAMMA_GRAD, 'd', '1'), (K_GAMMA_GRAD, 'd', '1'), (DX, 'm', 'n')),
    ROW(QK_SQUARES, (X, 'm', 'n'), (SUMS, 'm', '2')),
    ROW(QK_NORM, (X, 'm', 'n'), (SUMS, 'm', '2'), (Q_GAMMA, 'O', '1'), (K_GAMMA, 'K', '1'), (Y, 'm', 'n')),
    ROW(QK_DOTS, (DY, 'm', 'n'), (X, 'm', 'n'), (Q_GAMMA, 'O', '1'), (K_GAMMA, 'K', '1'), (DOTS, 'm', '2')),
    ROW(QK_NORM_GRAD, (DY, 'm', 'n'), (X, 'm', 'n'), (SUMS, 'm', '2'), (DOTS, 'm', '2'), (Q_GAMMA, 'O', '1'), (K_GAMMA, 'K', '1'),
        (Q_GAMMA_GRAD, 'O', '1'), (K_GAMMA_GRAD, 'K', '1'), (DX, 'm', 'n')),
    ROW(ROUTE, (LOGITS, 'm', 'E'), (BIAS, 'E', '1'), (CHOICE, 'm', 't'), (WEIGHT, 'm', 't'), (LOAD, '*', 'E')),
    ROW(ROUTE_PLAN, (CHOICE, 'm', 't'), (WEIGHT, 'm', 't'), (PLACE, 'm', 't'), (COUNT, '1', 'E')),
    ROW(ROUTE_GRAD, (LOGITS, 'm', 'E'), (CHOICE, 'm', 't'), (WEIGHT, 'm', 't'), (D_WEIGHT, 'm', 't'), (LOAD, '*', 'E'),
        (D_LOGITS, 'm', 'E')),
    ROW(ROUTE_LOAD, (CHOICE, 'm', 't'), (BIAS_GRAD, 'E', '1')),
    ROW(PERMUTE, (X, 'm', 'n'), (Y, '*', 'n'), (PLACE, 'm', '*')),
    ROW(COMBINE, (ROWS, '*', 'n'), (PLACE, 'm', '*'), (WEIGHT, 'm', 't'), (ADD, 'm', 'n'), (Y, 'm', 'n')),
    ROW(COMBINE_GRAD, (DY, 'm', 'n'), (ROWS, '*', 'n'), (PLACE, 'm', 't'), (WEIGHT, 'm', 't'), (D_ROWS, '*', 'n'), (D_WEIGHT, 'm', 't')),
    ROW(EXPERTS, (X, 'm', 'k'), (WEIGHT, 'e', 'k'), (Y, 'm', 'n'), (BIASES, 'e', '1')),
    ROW(EXPERTS_DX, (DY, 'm', 'k'), (WEIGHT, 'f', 'n'), (DX, 'm', 'n')),
    ROW(EXPERTS_DW, (DY, 'm', 'n'), (X, 'm', 'k'), (WEIGHT_GRAD, 'e', 'k')),
    ROW(EXPERTS_BIAS, (X, 'm', '*'), (BIAS, 'e', '1'), (Y, 'm', '*')),
    ROW(EXPERTS_BIAS_GRAD, (DY, 'm', '*'), (GRAD, 'e', '1')),
    ROW(EXPERTS_SWIGLU, (X, 'm', 'k'), (WEIGHT, 'e', 'k'), (GATE_UP, 'm', 'n'), (Y, 'm', 'h'), (BIASES, 'e', '1')),
    ROW(EXPERTS_DX_SWIGLU, (DY, 'm', 'k'), (WEIGHT, 'f', 'n'), (GATE_UP, 'm', 'N'), (D_ACTIVE, 'm', 'n'), (D_GATE_UP, 'm', 'N'),
        (Y, 'm', 'n')),
    ROW(EXPERT_ACTIVATION, (X, 'm', 'N'), (Y, 'm', 'n')),
    ROW(EXPERT_ACTIVATION_GRAD, (X, 'm', 'N'), (DY, 'm', 'n'), (DX, 'm', 'N'), (Y, 'm', 'n')),
    ROW(DISPATCH, (X, 'k', 'n'), (Y, 'm', 'n')),
    ROW(RETURN, (X, 'm', 'n'), (Y, 'b', 'n')),
    ROW(EXPERT_ROUNDS, (X, 'k', 'n'), (Y, 'b', 'n')),
    ROW(EXPERT_ROUNDS_GRAD, (X, '*', 'n'), (DY, 'k', 'n'), (DX, 'b', 'n')),
    ROW(NODE_PLAN, (CHOICE, 'm', 't'), (WEIGHT, 'm', 't'), (PLACE, 'm', 't'), (COPY_PLACE, 'm', 'n'), (NODE_COUNT, '1', 'n')),
    ROW(NODE_DISPATCH, (X, '*', 'n'), (NUMBERS, '*', 'k'), (Y, 'm', 'n'), (NUMBERS_OUT, 'm', 'k')),
    ROW(NODE_RETURN, (X, 'm', 'n'), (NUMBERS, 'm', 'k'), (Y, '*', 'n'), (NUMBERS_OUT, '*', 'k')),
    ROW(NODE_WEIGHTS, (CHOICE, 'm', 't'), (PLACE, 'm', 't'), (COPY_PLACE, 'm', 'n'), (D_WEIGHT, 'm', 't')),
    ROW(NODE_RESEND, (X, '*', 'n'), (COPIES, '*', 'n'), (RELAYED, 'i', 'n')),
    ROW(RELAY_PLAN, (CHOSEN, 'i', '*'), (PLACE, 'i', 't'), (WEIGHT, 'i', 't')),
    ROW(RELAY_ROUNDS, (X, 'i', 'n'), (CHOSEN, 'i', '*'), (WEIGHT, 'i', 't'), (Y, 'i', 'n')),
    ROW(RELAY_ROUNDS_GRAD, (X, 'i', 'n'), (CHOSEN, 'i', '*'), (WEIGHT, 'i', 't'), (DY, 'i', 'n'), (D_WEIGHT, 'i', 't'), (DX, 'i', 'n')),
    ROW(LOSS_MAX, (LOGITS, '*', '>'), (TOP, 'w', '1')),
    ROW(LOSS_PART, (LOGITS, '*', '>'), (TOP, 'w', '1')),
    ROW(LOSS_GRAD, (LOGITS, '*', '>'), (TOP, 'w', '1'), (LOSSES, 'w', '1'), (FACTORS, 'r', '1')),
    ROW(LOSS_SUM, (LOSSES, 'm', '1')),
    ROW(LOSS_ROWS, (LOGITS, '*', '>'), (TOP, 'w', '1'), (LOSSES, 'w', '1')),
    ROW(PAIR_SUMS, (LOSSES, 'm', '1'), (SCORES, 's', '1')),
    ROW(PAIR_LOSS, (SCORES, 's', '1'), (FACTORS, 'm', '1')),
    ROW(ALL_REDUCE, (X, 'w', 'n')),
    ROW(ALL_GATHER, (X, '*', 'n'), (Y, 'm', 'n')),
    ROW(REDUCE_SCATTER, (X, 'm', 'n'), (Y, '*', 'n')),
    ROW(ZERO, (X, 'm', 'n')),
    ROW(COLUMNS, (X, '*', '>'), (Y, '*', '>')),
    ROW(ATTENTION_PART, (QKV, 'r', 'q'), (KV, '*', 'c'), (O, 'r', 'o')),
    ROW(ATTENTION_DELTA, (O, 'r', 'o'), (D_O, 'r', 'o')),
    ROW(ATTENTION_PART_GRAD, (QKV, 'r', 'q'), (KV, '*', 'c'), (D_O, 'r', 'o'), (DQ, 'r', '*'), (DKV, '*', 'c')),
    ROW(HEADS_SPLIT, (X, 'm', 'Q'), (Y, 'm', '*')),
    ROW(HEADS_JOIN, (X, 'm', '*'), (Y, 'm', 'Q')),
    ROW(ROWS_SPLIT, (X, 's', '*'), (Y, 's', '*')),
    ROW(ROWS_JOIN, (X, 's', '*'), (Y, 's', '*')),
    ROW(CONTEXT_SHIFT, (X, '*', 'n'), (Y, '*', 'n')),
    ROW(CONTEXT_GATHER, (X, 'r', 'n'), (Y, 's', 'n')),
    ROW(CONTEXT_SCATTER, (X, 's', 'n'), (Y, 'r', 'n')),
    ROW(CONTEXT_SWAP, (X, '*', '*'), (Y, '*', '*')),
};
#undef ROW
#undef SHAPE
#undef FIRST
#undef SECOND
#undef THIRD

bool qd_proof_sizes_known(qd_op_kind kind)
{
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (shapes[kind][j][0] != '\0')
            return true;
    return false;
}

static int64_t port_rows(const proof_walk *w, int64_t *first)
{
    int64_t count;
    qd_ledger_port_rows(w->ledger, w->program->rank, qd_program_rows(w->program), first, &count);
    return count;
}

static int64_t covered(const qd_op *op)
{
    int64_t cols = 0;
    for (int i = 0; i < op->parts && i < QD_PARTS_MOST; i++)
        cols += op->part_cols[i];
    return cols;
}

/* What a letter stands for. */
static int64_t meaning(const proof_walk *w, char letter)
{
    const qd_op *op = w->op;
    const qd_model *model = &w->ledger->model;
    const qd_strategy *s = &w->program->strategy;
    int64_t first;
    switch (letter) {
    case 'm': return op->m;
    case 'n':
    case '>': return op->n;
    case 'k':
    case ']': return op->k;
    case '1': return 1;
    case '2': return 2;
    case 'w': return op->first + op->m;
    case 'v': return op->to + op->m;
    case 'x': return op->first + op->k;
    case 'y': return op->to + op->k;
    case 'l': return op->chunk;
    case 'i': return op->first;
    case 'N': return 2 * op->n;
    case 'h': return op->n / 2;
    case 'a': return qd_activation_is_gated(model->activation) ? 2 * op->n : op->n;
    case 'Q': return op->n + op->k + op->k / model->head_dim * qd_model_v_dim(model);
    case 'e': return op->experts * op->n;
    case 'f': return op->experts * op->k;
    case 'b': return op->k * (w->proof->mesh->etp > 1 ? w->proof->mesh->etp : 1);
    case 'q': return qd_model_qkv(model, op->heads, op->kv_heads);
    case 'o': return (int64_t)op->heads * qd_model_v_dim(model);
    case 'c': return qd_model_qkv(model, 0, op->kv_heads);
    case 'O': return (int64_t)op->heads * model->head_dim;
    case 'L': return (int64_t)op->heads * (model->qk_nope_head_dim + model->v_head_dim);
    case 'R': return model->qk_rope_head_dim;
    case 'g': return op->heads + op->kv_heads;
    case 'd': return model->head_dim;
    case 'K': return (int64_t)op->kv_heads * model->head_dim;
    case 'A': return op->parts * op->k;
    case 'P': return covered(op) * (op->experts > 0 ? op->experts : 1);
    case 'E': return model->moe.experts;
    case 't': return model->moe.per_token;
    case 's': return s->micro_batch * s->seq;
    case 'r': return qd_program_rows(w->program);
    default: return port_rows(w, &first);
    }
}

static qd_status wrong(const proof_walk *w, int slot, const char *what, int64_t has, int64_t wanted)
{
    char text[160];
    snprintf(text, sizeof text, "it has %lld %s, and the op works on %lld", (long long)has, what, (long long)wanted);
    return qd_proof_fail_slot(w, slot, text);
}

static qd_status check_shapes(const proof_walk *w)
{
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        const char *shape = shapes[w->op->kind][j];
        if (w->op->slot[j] < 0 || shape[0] == '\0')
            continue;
        const qd_slot *slot = &w->ops->slots[w->op->slot[j]];
        for (int d = 0; d < 2; d++) {
            int64_t has = d == 0 ? slot->rows : slot->cols, wanted = shape[d] == '*' ? has : meaning(w, shape[d]);
            bool at_least = shape[d] == '>' || shape[d] == ']' || shape[d] == 'w' || shape[d] == 'v' || shape[d] == 'x' || shape[d] == 'y';
            if (at_least ? has < wanted : has != wanted)
                return wrong(w, w->op->slot[j], d == 0 ? "rows" : "columns", has, wanted);
        }
    }
    return QD_OK;
}

/* Sizes of an op other than m, n and k. */

static qd_status number(const proof_walk *w, const char *what, int64_t has, int64_t wanted)
{
    if (has == wanted)
        return QD_OK;
    return qd_proof_fail(w, NO_OPERAND, 0, -1, "it uses %lld for %s, which is %lld", (long long)has, what, (long long)wanted);
}

/* Heads of this rank: of its share of tp, and in ulysses of that again of cp. */
static qd_status check_heads(const proof_walk *w)
{
    const qd_model *m = &w->ledger->model;
    const int *degree = w->proof->mesh->degree;
    int heads = m->heads / degree[QD_AXIS_TP], kv = m->kv_heads > degree[QD_AXIS_TP] ? m->kv_heads / degree[QD_AXIS_TP] : 1;
    bool swapped = (w->op->kind == QD_OP_ATTENTION || w->op->kind == QD_OP_ATTENTION_GRAD) && degree[QD_AXIS_CP] > 1;
    if (swapped) {
        heads /= degree[QD_AXIS_CP];
        kv = kv > degree[QD_AXIS_CP] ? kv / degree[QD_AXIS_CP] : 1;
    }
    QD_TRY(number(w, "the heads of this rank", w->op->heads, heads));
    return number(w, "the kv heads of this rank", w->op->kv_heads, kv);
}

/* The epsilon that is declared with the norm's weight. */
static qd_status check_norm(const proof_walk *w)
{
    const qd_layer *decl = &w->ledger->decls[w->ledger->modules[w->class_->module].decl];
    int gamma = w->op->slot[QD_NORM_GAMMA];
    for (int i = 0; gamma >= 0 && i < decl->op_count; i++)
        if (decl->ops[i].kind == QD_DECL_NORM && decl->ops[i].weight.param == w->ops->slots[gamma].param &&
            decl->ops[i].factor != w->op->eps)
            return qd_proof_fail(w, NO_OPERAND, 0, -1, "its epsilon is %g, and %g is declared", w->op->eps, decl->ops[i].factor);
    return QD_OK;
}

/* The window of the layer, unless sequences fit into it. */
static qd_status check_attention(const proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    int64_t window = qd_layer_window(&w->ledger->decls[w->ledger->modules[w->class_->module].decl]);
    int64_t positions = s->context > 0 ? s->context : s->seq;
    QD_TRY(check_heads(w));
    return number(w, "the window of this layer", w->op->window, window < positions ? window : 0);
}

/* Log-sum-exps of whole sequences under cp are those of a share of this rank's heads. */
static qd_status check_sinks(const proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    const int *degree = w->proof->mesh->degree;
    const qd_slot *lse = &w->ops->slots[qd_proof_slot_of(w->op, LSE)];
    bool swapped = degree[QD_AXIS_CP] > 1 && lse->cols == s->seq;
    int heads = w->ledger->model.heads / degree[QD_AXIS_TP] / (swapped ? degree[QD_AXIS_CP] : 1);
    int coord = qd_mesh_group_coord(w->proof->mesh, QD_AXIS_BIT(QD_AXIS_CP), w->program->rank);
    QD_TRY(number(w, "the heads of this rank", w->op->heads, heads));
    QD_TRY(number(w, "the first head of this rank", w->op->first, swapped ? coord * heads : 0));
    QD_TRY(number(w, "the log-sum-exps of its rows", lse->rows * lse->cols, w->op->m * heads));
    return number(w, "the rows of this rank", w->op->m, meaning(w, swapped ? 's' : 'r'));
}

/* An op that counts keys counts all of this rank's, or none. */
static qd_status check_keys(const proof_walk *w)
{
    QD_TRY(check_heads(w));
    QD_TRY(number(w, "the columns of this rank's queries, keys and values", w->op->n, meaning(w, 'q')));
    return w->op->k == 0 ? QD_OK : number(w, "the columns of this rank's keys", w->op->k, meaning(w, 'K'));
}

static qd_status check_experts(const proof_walk *w)
{
    const qd_mesh *mesh = w->proof->mesh;
    int first, held = qd_experts_of(&w->ledger->model, mesh, w->program->rank, &first);
    QD_TRY(number(w, "the experts of this rank", w->op->experts, held));
    if (w->op->kind == QD_OP_DISPATCH || w->op->kind == QD_OP_RETURN)
        return QD_OK;
    return number(w, "this rank's first expert", w->op->expert, first % (w->ledger->model.moe.experts / qd_nodes_spanned(mesh)));
}

/* A rank has the biases of all columns that it has, or its share of those of a partial sum. */
static qd_status check_expert_bias(const proof_walk *w)
{
    const qd_mesh *mesh = w->proof->mesh;
    int64_t width = w->ops->slots[w->op->slot[0]].cols, first = 0, n = width;
    int etp = mesh->etp > 1 ? mesh->etp : 1;
    if (w->op->n < width)
        qd_slice(width, etp, qd_group_coord(mesh, qd_expert_group(mesh), w->program->rank) % etp, &first, &n);
    QD_TRY(number(w, "the columns of its bias", w->op->n, n));
    QD_TRY(number(w, "the first column of its bias", w->op->first, first));
    return check_experts(w);
}

/* Loads are counted by sequence, or over all rows that are computed at the same time. */
static qd_status check_route(const proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    int64_t first, own = qd_ledger_rows(w->ledger, w->program->rank, s->seq);
    int64_t most = s->micro_batch * qd_context_most_rows(s->seq, w->proof->mesh->degree[QD_AXIS_CP]);
    port_rows(w, &first);
    QD_TRY(number(w, "the first row of this rank", w->op->first, first));
    return number(w, "the rows that share a load", w->op->k, w->ledger->model.moe.balance == QD_BALANCE_SEQUENCE ? own : most);
}

/* Columns are copied as a whole; of queries, keys and values only the latter are read apart, and
 * written apart from queries. */
static qd_status check_columns(const proof_walk *w)
{
    const qd_op *op = w->op;
    const qd_model *m = &w->ledger->model;
    int64_t q = m->heads / w->proof->mesh->degree[QD_AXIS_TP] * (int64_t)m->head_dim;
    for (int j = 0; j < 2; j++) {
        int slot = op->slot[j == 0 ? QD_COLUMNS_X : QD_COLUMNS_Y];
        int64_t cols = w->ops->slots[slot].cols, at = j == 0 ? op->first : op->to;
        bool whole = at == 0 && op->n == cols, keys = at == q && op->n == cols - q, queries = j == 1 && at == 0 && op->n == q;
        if (!whole && !keys && !queries)
            return wrong(w, slot, "columns", cols, at + op->n);
    }
    /* Buffers that pass from rank to rank of cp have the rows of the rank with most. */
    int64_t x = w->ops->slots[op->slot[QD_COLUMNS_X]].rows, y = w->ops->slots[op->slot[QD_COLUMNS_Y]].rows;
    return number(w, "the rows that both have", op->m, x < y ? x : y);
}

/* Extra rounds go the way of the first one, with the same buffer space. */
static qd_status check_rounds(const proof_walk *w)
{
    const qd_op *op = w->op;
    bool exchanges = op->kind != QD_OP_RELAY_PLAN && op->kind != QD_OP_NODE_RESEND;
    for (int i = 0; i < w->ops->op_count; i++) {
        const qd_op *first = &w->ops->ops[i];
        if (first->kind != QD_OP_DISPATCH)
            continue;
        if (first->m != op->m || first->k != op->k || (exchanges && !qd_group_equal(first->exchange.group, op->exchange.group)))
            return qd_proof_fail(w, NO_OPERAND, 0, -1, "its ranks, or their buffer space, are not those of op %d (dispatch)", i);
    }
    return QD_OK;
}

/* A value is exchanged in its own type, in the group that the program has bound. */
static qd_status check_exchange(const proof_walk *w)
{
    const qd_op *op = w->op;
    const qd_op_exchange *x = &op->exchange;
    bool rounds = op->kind == QD_OP_EXPERT_ROUNDS || op->kind == QD_OP_EXPERT_ROUNDS_GRAD || op->kind == QD_OP_RELAY_ROUNDS ||
                  op->kind == QD_OP_RELAY_ROUNDS_GRAD;
    if (x->index < 0 || x->index >= w->program->group_count || !qd_group_equal(w->program->groups[x->index], x->group))
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "it communicates in another group than it names");
    qd_dtype dtype = rounds ? w->program->strategy.activation : w->ops->slots[op->slot[0]].dtype;
    if (x->dtype != dtype)
        return qd_proof_fail_slot(w, op->slot[0], "it is exchanged as a value of another type than it has");
    if (op->kind == QD_OP_ALL_REDUCE)
        return number(w, "the elements of its rows", x->count, op->m * op->n);
    if (op->kind == QD_OP_ALL_GATHER || op->kind == QD_OP_REDUCE_SCATTER) {
        int64_t first, own;
        int part = op->slot[op->kind == QD_OP_ALL_GATHER ? QD_ALL_GATHER_X : QD_REDUCE_SCATTER_Y];
        qd_slice(op->m, x->group.size, qd_group_coord(w->proof->mesh, x->group, w->program->rank), &first, &own);
        if (w->ops->slots[part].rows != own)
            return wrong(w, part, "rows", w->ops->slots[part].rows, own);
    }
    if (op->kind == QD_OP_CONTEXT_SWAP) { /* rows of this rank become whole sequences of its heads (round 1), or back */
        int whole = op->slot[op->round ? QD_CONTEXT_SWAP_Y : QD_CONTEXT_SWAP_X];
        if (w->ops->slots[whole].rows != meaning(w, 's') || w->ops->slots[whole].cols != op->n)
            return wrong(w, whole, "columns", w->ops->slots[whole].cols, op->n);
    }
    return QD_OK;
}

/* Rows of a matrix multiplication stay in their order. Logits are held for some rows at a time:
 * from which row on, all ops that work on them agree. */
static int64_t moved_by(const qd_op *op)
{
    return op->kind == QD_OP_LINEAR_DX ? op->to - op->first : op->kind == QD_OP_LINEAR || op->kind == QD_OP_LINEAR_DW ? op->first - op->to
                                                                                                                     : op->first;
}

static qd_status check_rows(const proof_walk *w)
{
    proof_operand held = w->op->kind == QD_OP_LINEAR ? Y : w->op->kind == QD_OP_LINEAR_DX || w->op->kind == QD_OP_LINEAR_DW ? DY : LOGITS;
    int logits = qd_proof_slot_of(w->op, held);
    bool is_loss = held == LOGITS, are_logits = is_loss;
    for (int i = 0; i < w->ops->op_count && !are_logits; i++)
        are_logits = w->ops->ops[i].kind == QD_OP_LOSS_MAX && w->ops->ops[i].slot[QD_LOSS_MAX_LOGITS] == logits;
    if (!are_logits)
        return number(w, "the first row of its result", moved_by(w->op), 0);
    for (int i = w->index; i >= 0; i--) {
        const qd_op *op = &w->ops->ops[i];
        if (op->kind != QD_OP_LINEAR || op->slot[QD_LINEAR_Y] != logits)
            continue;
        if (is_loss)
            QD_TRY(number(w, "the tokens of the logits", w->op->n, op->n));
        return number(w, "the first row of the logits", moved_by(w->op), moved_by(op));
    }
    return QD_OK;
}

/* Rows of a port, or of columns that are sharded over tp all rows and this rank's shard. */
static qd_status check_dropout(const proof_walk *w)
{
    int64_t first;
    port_rows(w, &first);
    if (w->op->k == 0)
        return number(w, "the first row of this rank", w->op->first, first);
    QD_TRY(number(w, "the first row", w->op->first, 0));
    QD_TRY(number(w, "the ranks of tp", w->op->k, w->proof->mesh->degree[QD_AXIS_TP]));
    return number(w, "this rank's position in tp", w->op->to,
                  qd_mesh_group_coord(w->proof->mesh, QD_AXIS_BIT(QD_AXIS_TP), w->program->rank));
}

/* The parts of an adapter follow from the declaration: the layer's matrices that have one, and
 * their columns on this rank. */
static qd_status check_adapter(const proof_walk *w)
{
    const qd_op *op = w->op;
    const qd_module *module = &w->ledger->modules[w->class_->module];
    const qd_layer *decl = &w->ledger->decls[module->decl];
    int weight = w->ops->slots[op->slot[op->kind == QD_OP_ADAPT_DW ? QD_ADAPT_DW_WEIGHT_GRAD : QD_ADAPT_WEIGHT]].param;
    for (int i = 0; i < decl->op_count; i++) {
        const qd_decl_op *declared = &decl->ops[i];
        if (declared->kind != QD_DECL_ADAPT || declared->weight.param != weight)
            continue;
        bool grouped = decl->params[weight].expert >= 0;
        int64_t at = 0;
        int parts = 0;
        for (int k = 0; k < declared->weight2.count && k < QD_PARTS_MOST; k++) {
            int base = module->param_begin + declared->weight2.param + k;
            int64_t cols = grouped ? w->ledger->params[base].shape[0] : qd_ledger_atom(w->ledger, base, w->program->rank).length[0];
            if (declared->parts & 1u << k) {
                QD_TRY(number(w, "the first column of a part", op->part_at[parts], at));
                QD_TRY(number(w, "the columns of a part", op->part_cols[parts++], cols));
            }
            at += cols;
        }
        QD_TRY(number(w, "the parts with adapters", op->parts, parts));
        if (grouped)
            return check_experts(w);
        QD_TRY(number(w, "the experts of a dense layer", op->experts, 0));
        return number(w, "the first expert of a dense layer", op->expert, 0);
    }
    return qd_proof_fail(w, NO_OPERAND, 0, -1, "the layer does not declare this adapter");
}

qd_status qd_proof_sizes(const proof_walk *w)
{
    QD_TRY(check_shapes(w));
    if (qd_op_communicates(w->op))
        QD_TRY(check_exchange(w));
    switch (w->op->kind) {
    case QD_OP_NORM: return check_norm(w);
    case QD_OP_ROPE:
    case QD_OP_ROPE_INVERSE:
    case QD_OP_LATENT_QKV:
    case QD_OP_LATENT_QKV_GRAD:
    case QD_OP_HEAD_NORM:
    case QD_OP_HEAD_NORM_GRAD:
    case QD_OP_ATTENTION_DELTA: return check_heads(w);
    case QD_OP_ATTENTION:
    case QD_OP_ATTENTION_GRAD:
    case QD_OP_ATTENTION_CACHED:
    case QD_OP_ATTENTION_PART:
    case QD_OP_ATTENTION_PART_GRAD: return check_attention(w);
    case QD_OP_ATTENTION_SINK:
    case QD_OP_ATTENTION_SINK_GRAD: return check_sinks(w);
    case QD_OP_QK_SQUARES:
    case QD_OP_QK_NORM:
    case QD_OP_QK_DOTS:
    case QD_OP_QK_NORM_GRAD: return check_keys(w);
    case QD_OP_DROPOUT: return check_dropout(w);
    case QD_OP_ADAPT:
    case QD_OP_ADAPT_DX:
    case QD_OP_ADAPT_DW: return check_adapter(w);
    case QD_OP_ROUTE:
    case QD_OP_ROUTE_GRAD: return check_route(w);
    case QD_OP_COLUMNS: return check_columns(w);
    case QD_OP_LOSS_MAX:
    case QD_OP_LOSS_PART:
    case QD_OP_LOSS_ROWS:
    case QD_OP_LOSS_GRAD:
    case QD_OP_LINEAR:
    case QD_OP_LINEAR_DX:
    case QD_OP_LINEAR_DW: return check_rows(w);
    case QD_OP_LINEAR_GELU:
    case QD_OP_LINEAR_DX_GELU: return number(w, "the first row of its result", w->op->first, w->op->to);
    case QD_OP_NODE_DISPATCH:
    case QD_OP_NODE_RETURN:
        return w->op->slot[QD_NODE_DISPATCH_NUMBERS] >= 0 ? QD_OK : number(w, "the numbers that go with a row", w->op->k, 0);
    case QD_OP_NODE_RESEND: return check_rounds(w);
    case QD_OP_PAIR_SUMS:
    case QD_OP_PAIR_LOSS: return number(w, "the rows of a micro-batch", w->op->m, qd_program_rows(w->program));
    case QD_OP_HEAD_LOSS: return w->op->chunk > 0 ? QD_OK : qd_proof_fail(w, NO_OPERAND, 0, -1, "it takes no rows at a time");
    case QD_OP_EXPERTS_BIAS:
    case QD_OP_EXPERTS_BIAS_GRAD: return check_expert_bias(w);
    case QD_OP_EXPERTS:
    case QD_OP_EXPERTS_DX:
    case QD_OP_EXPERTS_DW:
    case QD_OP_EXPERTS_SWIGLU:
    case QD_OP_EXPERTS_DX_SWIGLU:
    case QD_OP_EXPERT_ACTIVATION:
    case QD_OP_EXPERT_ACTIVATION_GRAD:
    case QD_OP_DISPATCH:
    case QD_OP_RETURN:
        return check_experts(w);
    case QD_OP_EXPERT_ROUNDS:
    case QD_OP_EXPERT_ROUNDS_GRAD:
    case QD_OP_RELAY_PLAN:
    case QD_OP_RELAY_ROUNDS:
    case QD_OP_RELAY_ROUNDS_GRAD: QD_TRY(check_rounds(w)); return check_experts(w);
    default: return QD_OK;
    }
}

/* ---- the slots of a class ---- */

static qd_status slot_number(const proof_walk *w, const qd_slot *slot, const char *what, int64_t has, int64_t wanted)
{
    if (has == wanted)
        return QD_OK;
    return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s, value '%s': it has %lld %s, and this rank has %lld of it", w->program->rank,
                   w->ledger->modules[w->class_->module].name, slot->name, (long long)has, what, (long long)wanted);
}

/* Parameters and ports have the shapes that the ledger gives this rank. */
qd_status qd_proof_slot_sizes(const proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    const qd_module *module = &w->ledger->modules[w->class_->module];
    int64_t first, rows = port_rows(w, &first);
    for (int i = 0; i < w->ops->slot_count; i++) {
        const qd_slot *slot = &w->ops->slots[i];
        bool param = slot->kind == QD_SLOT_PARAM || slot->kind == QD_SLOT_GRAD;
        bool port = slot->kind == QD_SLOT_IN || slot->kind == QD_SLOT_OUT || slot->kind == QD_SLOT_GRAD_IN ||
                    slot->kind == QD_SLOT_GRAD_OUT;
        if (!param && !port)
            continue;
        int64_t out = param ? 0 : rows, in = param ? 0 : w->ledger->model.hidden;
        for (int k = 0; param && k < slot->param_count; k++) {
            if (slot->param < 0 || slot->param + k >= module->param_count)
                return slot_number(w, slot, "parameters", slot->param + slot->param_count, module->param_count);
            qd_atom atom = qd_ledger_atom(w->ledger, module->param_begin + slot->param + k, w->program->rank);
            out += atom.length[0];
            in = atom.length[0] > 0 || k == 0 ? atom.length[1] : in;
        }
        QD_TRY(slot_number(w, slot, "rows", slot->rows, out));
        QD_TRY(slot_number(w, slot, "columns", slot->cols, in));
        qd_dtype dtype = slot->kind == QD_SLOT_PARAM ? s->param : slot->kind == QD_SLOT_GRAD ? s->grad : s->activation;
        if (slot->dtype != dtype)
            return QD_FAIL(QD_MISMATCH, "gradients: rank %d, %s, value '%s': it is taken for values of another type", w->program->rank,
                           module->name, slot->name);
    }
    return QD_OK;
}
