/* Rules of routing and of the dispatch of rows to experts and back.
 *
 * Rows are sorted by expert (or copied once per node), sent to the ranks of their experts,
 * multiplied with the experts' matrices and returned, once for each rank of etp, to be weighted and
 * summed. Before the dispatch every rank must hold rows of its own tokens. */
#include "spec/layout/experts.h"
#include "spec/layout/nodes.h"
#include "spec/proof/proof_impl.h"

#include <math.h>

/* Places, lists and counts carry the stage they lead to. */
static qd_status read_list(proof_walk *w, proof_operand operand, proof_value *v)
{
    QD_TRY(qd_proof_read(w, operand, v));
    return qd_proof_no_sum(w, operand, v);
}

static qd_status own_tokens(const proof_walk *w, proof_operand operand, const proof_value *v)
{
    for (int d = 0; d < w->proof->frames[v->place[0].fold].count; d++)
        if (v->place[0].code[d] != CODE_ROWS && v->place[0].code[d] != CODE_EXPERTS)
            return qd_proof_fail(w, operand, v->place[0].fold, d, "each rank must send rows of its own, but it is %s",
                                 qd_proof_code_text((proof_code)v->place[0].code[d]));
    return QD_OK;
}

/* Upper bound of the rows that a rank sends: the assignments of the rank with the most rows. */
static int64_t most_assignments(const proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    int tp = w->proof->mesh->sp ? w->proof->mesh->degree[QD_AXIS_TP] : 1;
    int64_t all = s->micro_batch * qd_context_most_rows(s->seq, w->proof->mesh->degree[QD_AXIS_CP]);
    return (all + tp - 1) / tp * w->ledger->model.moe.per_token;
}

static qd_status no_overflow(const proof_walk *w, proof_operand operand, const proof_value *v)
{
    return v->overflow ? qd_proof_fail(w, operand, 0, -1, "rows beyond the buffer space of experts are missing: no extra dispatch rounds")
                       : QD_OK;
}

/* Ranks of dp have different sequences: if the balance is per sequence, their loads are not terms
 * of one sum. */
qd_status qd_proof_rule_route(proof_walk *w)
{
    proof_value logits;
    QD_TRY(qd_proof_read(w, LOGITS, &logits));
    QD_TRY(qd_proof_is_gradient(w, LOGITS, &logits, false));
    QD_TRY(qd_proof_no_sum(w, LOGITS, &logits));
    proof_value out = qd_proof_value_of(w, &logits.place[0], false), load = out;
    for (int d = 0; d < w->proof->frames[FOLD_DENSE].count; d++) {
        bool apart = qd_proof_digit_axis(w->proof, d) == QD_AXIS_DP && w->ledger->model.moe.balance == QD_BALANCE_SEQUENCE;
        if (logits.place[0].code[d] == CODE_COLS)
            return qd_proof_fail(w, LOGITS, FOLD_DENSE, d, "the router needs the logits of all experts");
        if (logits.place[0].code[d] == CODE_ROWS && !apart)
            load.place[0].code[d] = CODE_SUM;
    }
    QD_TRY(qd_proof_write(w, CHOICE, &out));
    QD_TRY(qd_proof_write(w, COMBINE_WEIGHT, &out));
    return qd_proof_write(w, LOAD, &load);
}

qd_status qd_proof_rule_route_plan(proof_walk *w)
{
    proof_value choice;
    QD_TRY(read_list(w, CHOICE, &choice));
    choice.stage = BY_EXPERT;
    QD_TRY(qd_proof_write(w, PLACE, &choice));
    QD_TRY(qd_proof_write(w, FROM, &choice));
    return qd_proof_write(w, COUNTS, &choice);
}

/* Auxiliary losses: each token's part has the same scale as its part of the model's loss, and the
 * loads must be sums over as many tokens as they are divided by. */
qd_status qd_proof_rule_route_grad(proof_walk *w)
{
    const qd_strategy *s = &w->program->strategy;
    const qd_moe *moe = &w->ledger->model.moe;
    double ranks = w->proof->mesh->degree[QD_AXIS_DP], tokens = (double)s->micro_batch * (double)s->micro_batches * (double)s->seq * ranks;
    double loaded = (double)s->seq * (moe->balance == QD_BALANCE_BATCH ? (double)s->micro_batch * ranks : 1.0);
    proof_value logits, choice, weight, d_weight, load;
    QD_TRY(qd_proof_read(w, LOGITS, &logits));
    QD_TRY(qd_proof_is_gradient(w, LOGITS, &logits, false));
    QD_TRY(read_list(w, CHOICE, &choice));
    QD_TRY(read_list(w, COMBINE_WEIGHT, &weight));
    QD_TRY(qd_proof_read(w, D_COMBINE_WEIGHT, &d_weight));
    QD_TRY(qd_proof_is_gradient(w, D_COMBINE_WEIGHT, &d_weight, true));
    QD_TRY(qd_proof_no_sum(w, D_COMBINE_WEIGHT, &d_weight));
    QD_TRY(qd_proof_same_place(w, D_COMBINE_WEIGHT, &d_weight, LOGITS, &logits));
    if (moe->aux_loss != 0.0) {
        QD_TRY(qd_proof_read(w, LOAD, &load));
        QD_TRY(qd_proof_no_sum(w, LOAD, &load));
        if (fabs(w->op->load_tokens / loaded - 1.0) > 1e-9)
            return qd_proof_fail(w, LOAD, 0, -1, "loads are divided by %.0f tokens, but those of %.0f are summed", w->op->load_tokens,
                                 loaded);
    }
    if (fabs(w->op->scale * tokens - 1.0) > 1e-9)
        return qd_proof_fail(w, NO_OPERAND, 0, -1, "auxiliary losses are divided by %.0f tokens, but the global batch has %.0f",
                             w->op->scale > 0.0 ? 1.0 / w->op->scale : 0.0, tokens);
    proof_value out = qd_proof_value_of(w, &logits.place[0], true);
    return qd_proof_write(w, DX, &out);
}

qd_status qd_proof_rule_route_load(proof_walk *w)
{
    proof_value choice;
    QD_TRY(read_list(w, CHOICE, &choice));
    proof_place place = choice.place[0];
    for (int d = 0; d < w->proof->frames[place.fold].count; d++)
        place.code[d] = place.code[d] == CODE_ROWS ? CODE_SUM : place.code[d];
    return qd_proof_write_param_grad(w, BIAS_GRAD, (const proof_place[]){place, place});
}

/* Permutations of rows, and their inverse. */

static qd_status wrong_order(const proof_walk *w, proof_operand operand)
{
    return qd_proof_fail(w, operand, 0, -1, "its rows are not in the order that %s takes them in", qd_op_name(w->op->kind));
}

qd_status qd_proof_rule_permute(proof_walk *w)
{
    proof_value x, from;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(own_tokens(w, X, &x));
    QD_TRY(read_list(w, FROM, &from));
    QD_TRY(qd_proof_same_place(w, FROM, &from, X, &x));
    if (x.stage != (from.stage == RELAY_BY_EXPERT ? RELAYED : AT_HOME))
        return wrong_order(w, X);
    x.stage = from.stage;
    if (x.stage == RELAY_BY_EXPERT) /* the capacity of a relay */
        x.overflow = w->ops->slots[qd_proof_slot_of(w->op, Y)].rows < most_assignments(w) * qd_nodes_spanned(w->proof->mesh);
    return qd_proof_write(w, Y, &x);
}

/* Sums the rows of each token. The weights are applied once: in the forward pass by the sum over
 * experts or relays, in the backward pass by COMBINE_GRAD. */
qd_status qd_proof_rule_combine(proof_walk *w)
{
    proof_value rows, place, weight, add;
    QD_TRY(qd_proof_read(w, ROWS, &rows));
    QD_TRY(read_list(w, PLACE, &place));
    if (rows.stage != place.stage)
        return wrong_order(w, ROWS);
    if (rows.copies != w->op->k)
        return qd_proof_fail(w, ROWS, 0, -1, "%lld terms of each row are added, but there are %d", (long long)w->op->k, rows.copies);
    rows.copies = 1;
    QD_TRY(qd_proof_no_sum(w, ROWS, &rows));
    if (qd_proof_has(w, COMBINE_WEIGHT)) {
        QD_TRY(read_list(w, COMBINE_WEIGHT, &weight));
        if (rows.weighted)
            return qd_proof_fail(w, COMBINE_WEIGHT, 0, -1, "the router's weights are applied a second time");
        rows.weighted = true;
    }
    rows.stage = place.stage == RELAY_BY_EXPERT ? RELAYED : AT_HOME;
    if (rows.stage == AT_HOME) {
        QD_TRY(no_overflow(w, ROWS, &rows));
        if (!rows.weighted)
            return qd_proof_fail(w, ROWS, 0, -1, "rows of experts are added without the router's weights");
        rows.weighted = false;
        QD_TRY(qd_proof_in_fold(w, ROWS, &rows, FOLD_DENSE));
    }
    if (qd_proof_has(w, ADD)) {
        QD_TRY(qd_proof_read(w, ADD, &add));
        QD_TRY(qd_proof_is_gradient(w, ADD, &add, rows.gradient));
        QD_TRY(qd_proof_same_place(w, ADD, &add, ROWS, &rows));
    }
    return qd_proof_write(w, Y, &rows);
}

qd_status qd_proof_rule_combine_grad(proof_walk *w)
{
    proof_value dy, rows, from, weight;
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(qd_proof_no_sum(w, DY, &dy));
    QD_TRY(own_tokens(w, DY, &dy));
    QD_TRY(qd_proof_read(w, ROWS, &rows));
    QD_TRY(qd_proof_is_gradient(w, ROWS, &rows, false));
    QD_TRY(read_list(w, FROM, &from));
    QD_TRY(read_list(w, COMBINE_WEIGHT, &weight));
    if (dy.stage != (from.stage == RELAY_BY_EXPERT ? RELAYED : AT_HOME) || rows.stage != from.stage)
        return wrong_order(w, dy.stage == AT_HOME ? ROWS : DY);
    if (rows.copies != w->op->k)
        return qd_proof_fail(w, ROWS, 0, -1, "%lld terms of each row are added, but there are %d", (long long)w->op->k, rows.copies);
    if (dy.stage == AT_HOME)
        QD_TRY(no_overflow(w, ROWS, &rows));
    dy.overflow = rows.overflow;
    QD_TRY(qd_proof_write(w, D_COMBINE_WEIGHT, &dy));
    dy.stage = from.stage;
    dy.weighted = true;
    return qd_proof_write(w, D_ROWS, &dy);
}

/* Exchanges digits of the op's group; those of etp, which receive the same rows, may change
 * differently. */
static qd_status exchange(proof_walk *w, proof_value *v, proof_code from, proof_code to, proof_code etp_from, proof_code etp_to)
{
    const qd_op_exchange *e = &w->op->exchange;
    unsigned digits = qd_proof_group_digits(w->proof, FOLD_EXPERTS, e->group);
    int etp = w->proof->mesh->etp > 1 ? w->proof->mesh->etp : 1;
    if (e->index < 0 || e->index >= w->program->group_count || !qd_group_equal(w->program->groups[e->index], e->group) || digits == 0)
        return qd_proof_fail(w, X, 0, -1, "rows are exchanged in a group that does not hold the experts");
    QD_TRY(qd_proof_in_fold(w, X, v, FOLD_EXPERTS));
    for (int d = 0; d < w->proof->frames[FOLD_EXPERTS].count; d++) {
        bool shares = w->proof->frames[FOLD_EXPERTS].cut[d] < etp;
        if (!(digits & 1u << d))
            continue;
        if (v->place[0].code[d] != (shares ? etp_from : from))
            return qd_proof_fail(w, X, FOLD_EXPERTS, d, "%s needs %s, but it is %s", qd_op_name(w->op->kind),
                                 qd_proof_code_text(shares ? etp_from : from), qd_proof_code_text((proof_code)v->place[0].code[d]));
        v->place[0].code[d] = (uint8_t)(shares ? etp_to : to);
    }
    v->place[1] = v->place[0];
    return QD_OK;
}

/* The send and receive counts follow from a table that must be equal on all ranks of the group. */
static qd_status read_table(proof_walk *w)
{
    proof_value table;
    QD_TRY(qd_proof_read(w, COUNTS, &table));
    QD_TRY(qd_proof_in_fold(w, COUNTS, &table, FOLD_EXPERTS));
    unsigned digits = qd_proof_group_digits(w->proof, FOLD_EXPERTS, w->op->exchange.group);
    for (int d = 0; d < w->proof->frames[FOLD_EXPERTS].count; d++)
        if (digits & 1u << d && table.place[0].code[d] != CODE_SAME)
            return qd_proof_fail(w, COUNTS, FOLD_EXPERTS, d, "ranks have different counts: they have not been gathered");
    return QD_OK;
}

qd_status qd_proof_rule_dispatch(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(read_table(w));
    if (x.stage != BY_EXPERT && x.stage != RELAY_BY_EXPERT)
        return wrong_order(w, X);
    QD_TRY(exchange(w, &x, CODE_ROWS, CODE_EXPERTS, CODE_ROWS, CODE_SAME));
    x.overflow = x.overflow || w->op->m < most_assignments(w) * w->op->exchange.group.size * qd_nodes_spanned(w->proof->mesh);
    x.origin = x.stage;
    x.stage = AT_EXPERTS;
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_rule_return(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(read_table(w));
    if (x.stage != AT_EXPERTS)
        return wrong_order(w, X);
    QD_TRY(exchange(w, &x, CODE_EXPERTS, CODE_ROWS, CODE_SUM, CODE_ROWS));
    x.stage = x.origin;
    x.copies = w->proof->mesh->etp > 1 ? w->proof->mesh->etp : 1;
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_with_experts(const proof_walk *w, proof_operand operand, proof_value *v)
{
    QD_TRY(qd_proof_in_fold(w, operand, v, FOLD_EXPERTS));
    bool here = v->stage == AT_EXPERTS || (v->stage == BY_EXPERT && qd_expert_ranks(w->proof->mesh) == 1) ||
                (v->stage == RELAY_BY_EXPERT && qd_relay_group(w->proof->mesh).size == 1);
    return here ? QD_OK : qd_proof_fail(w, operand, 0, -1, "its rows are not with their experts");
}

/* Ranks of etp have terms of a sum, or the whole gradient of one (`whole`), or different
 * columns. */
static bool bias_fits(const proof_walk *w, int digit, int code, proof_code whole, bool *shares)
{
    *shares = w->proof->frames[FOLD_EXPERTS].cut[digit] < w->proof->mesh->etp;
    return *shares ? code == CODE_COLS || code == (int)whole : code == CODE_ROWS || code == CODE_EXPERTS;
}

/* Rows get the bias of their expert; each rank of etp has some columns of it, and adds them to its
 * term. */
static qd_status bias_joins(proof_walk *w, const proof_value *x)
{
    proof_value bias;
    QD_TRY(qd_proof_param(w, BIAS, &bias));
    QD_TRY(qd_proof_in_fold(w, BIAS, &bias, FOLD_EXPERTS));
    for (int d = 0; d < w->proof->frames[FOLD_EXPERTS].count; d++) {
        int code = x->place[0].code[d], has = bias.place[0].code[d];
        bool shares, fits = bias_fits(w, d, code, CODE_SUM, &shares);
        if (!fits || has != (int)(shares ? CODE_ROWS : code == CODE_EXPERTS ? CODE_EXPERTS : CODE_SAME))
            return qd_proof_fail(w, X, FOLD_EXPERTS, d, "it is %s, but the biases of experts are %s", qd_proof_code_text((proof_code)code),
                                 qd_proof_code_text((proof_code)has));
    }
    return QD_OK;
}

qd_status qd_proof_rule_experts(proof_walk *w)
{
    bool back = w->op->kind == QD_OP_EXPERTS_DX || w->op->kind == QD_OP_EXPERTS_DX_SWIGLU;
    proof_operand operand = back ? DY : X;
    proof_value x, weight;
    QD_TRY(qd_proof_read(w, operand, &x));
    QD_TRY(qd_proof_is_gradient(w, operand, &x, back));
    QD_TRY(qd_proof_with_experts(w, operand, &x));
    QD_TRY(qd_proof_param(w, WEIGHT, &weight));
    QD_TRY(qd_proof_in_fold(w, WEIGHT, &weight, FOLD_EXPERTS));
    for (int d = 0; d < w->proof->frames[FOLD_EXPERTS].count; d++) {
        proof_code a = (proof_code)x.place[0].code[d], b = (proof_code)weight.place[0].code[d];
        proof_code code = back ? qd_proof_code_linear_dx(a, b) : qd_proof_code_linear(a, b);
        if (code == CODE_PART)
            return qd_proof_fail(w, operand, FOLD_EXPERTS, d, "it is %s, but the experts' matrices are %s", qd_proof_code_text(a),
                                 qd_proof_code_text(b));
        x.place[0].code[d] = (uint8_t)code;
    }
    if (qd_proof_has(w, BIAS))
        QD_TRY(bias_joins(w, &x));
    if (w->op->kind == QD_OP_EXPERTS_SWIGLU) {
        QD_TRY(qd_proof_no_sum(w, SUMS, &x));
        QD_TRY(qd_proof_write(w, SUMS, &x));
    } else if (w->op->kind == QD_OP_EXPERTS_DX_SWIGLU) {
        proof_value gate;
        QD_TRY(qd_proof_no_sum(w, DX, &x));
        QD_TRY(qd_proof_read(w, X, &gate));
        QD_TRY(qd_proof_is_gradient(w, X, &gate, false));
        QD_TRY(qd_proof_no_sum(w, X, &gate));
        QD_TRY(qd_proof_same_place(w, X, &gate, DX, &x));
        QD_TRY(qd_proof_write(w, Y, &gate));
    }
    return qd_proof_write(w, back ? DX : Y, &x);
}

qd_status qd_proof_rule_experts_dw(proof_walk *w)
{
    proof_value dy, x;
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(qd_proof_with_experts(w, DY, &dy));
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_with_experts(w, X, &x));
    proof_place place = dy.place[0];
    for (int d = 0; d < w->proof->frames[FOLD_EXPERTS].count; d++) {
        proof_code a = (proof_code)dy.place[0].code[d], b = (proof_code)x.place[0].code[d], code = qd_proof_code_linear_dw(a, b);
        if (code == CODE_PART)
            return qd_proof_fail(w, X, FOLD_EXPERTS, d, "it is %s, but the gradient of the result is %s", qd_proof_code_text(b),
                                 qd_proof_code_text(a));
        place.code[d] = (uint8_t)code;
    }
    QD_TRY(qd_proof_write_param_grad(w, WEIGHT_GRAD, (const proof_place[]){place, place}));
    if (dy.overflow || x.overflow)
        qd_proof_note_overflow(w);
    return QD_OK;
}

qd_status qd_proof_rule_experts_bias(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_with_experts(w, X, &x));
    QD_TRY(bias_joins(w, &x));
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_rule_experts_bias_grad(proof_walk *w)
{
    proof_value dy;
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(qd_proof_with_experts(w, DY, &dy));
    proof_place place = dy.place[0];
    for (int d = 0; d < w->proof->frames[FOLD_EXPERTS].count; d++) {
        bool shares;
        if (!bias_fits(w, d, place.code[d], CODE_SAME, &shares))
            return qd_proof_fail(w, DY, FOLD_EXPERTS, d, "%s sums rows that are %s", qd_op_name(w->op->kind),
                                 qd_proof_code_text((proof_code)place.code[d]));
        place.code[d] = shares ? CODE_ROWS : place.code[d] == CODE_ROWS ? CODE_SUM : place.code[d];
    }
    QD_TRY(qd_proof_write_param_grad(w, BIAS_GRAD, (const proof_place[]){place, place}));
    if (dy.overflow)
        qd_proof_note_overflow(w);
    return QD_OK;
}

qd_status qd_proof_rule_expert_activation(proof_walk *w)
{
    return w->op->kind == QD_OP_EXPERT_ACTIVATION ? qd_proof_rule_activation(w) : qd_proof_rule_activation_grad(w);
}

/* Extra dispatch rounds: dispatch, experts and return within one op. */

/* Gradients of matrices or biases. */
static qd_status grouped_grad(proof_walk *w, proof_operand grad)
{
    if (!qd_proof_has(w, grad))
        return QD_OK;
    int first = w->ledger->modules[w->class_->module].param_begin + w->ops->slots[qd_proof_slot_of(w->op, grad)].param;
    proof_place place = qd_proof_param_place(w->proof, w->ledger, first);
    proof_value weight = qd_proof_value_of(w, &place, false);
    QD_TRY(qd_proof_in_fold(w, grad, &weight, FOLD_EXPERTS));
    for (int d = 0; d < w->proof->frames[FOLD_EXPERTS].count; d++)
        if (weight.place[0].code[d] == CODE_SAME) /* from the tokens of these ranks only */
            weight.place[0].code[d] = CODE_SUM;
    return qd_proof_write_param_grad(w, grad, (const proof_place[]){weight.place[0], weight.place[0]});
}

/* Rounds add to what the first round has returned. */
static qd_status joins_first_round(proof_walk *w, proof_operand operand, proof_stage stage, bool gradient)
{
    proof_value rows;
    if (!qd_proof_has(w, operand))
        return QD_OK;
    QD_TRY(qd_proof_read(w, operand, &rows));
    QD_TRY(qd_proof_is_gradient(w, operand, &rows, gradient));
    if (rows.stage != stage)
        return wrong_order(w, operand);
    rows.overflow = false;
    return qd_proof_write(w, operand, &rows);
}

static qd_status relayed_choices(proof_walk *w, bool relay)
{
    proof_value chosen;
    if (!relay)
        return QD_OK;
    QD_TRY(qd_proof_read(w, RELAY_CHOSEN, &chosen));
    return chosen.stage == RELAYED ? QD_OK : wrong_order(w, RELAY_CHOSEN);
}

qd_status qd_proof_rule_rounds(proof_walk *w)
{
    bool relay = w->op->kind == QD_OP_RELAY_ROUNDS;
    proof_value x, param;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    if (x.stage != (relay ? RELAYED : BY_EXPERT))
        return wrong_order(w, X);
    QD_TRY(read_table(w));
    QD_TRY(relayed_choices(w, relay));
    QD_TRY(qd_proof_param(w, UP, &param));
    QD_TRY(qd_proof_param(w, DOWN, &param));
    return joins_first_round(w, ROWS, relay ? RELAYED : BY_EXPERT, false);
}

qd_status qd_proof_rule_rounds_grad(proof_walk *w)
{
    bool relay = w->op->kind == QD_OP_RELAY_ROUNDS_GRAD;
    proof_value x, dy;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_is_gradient(w, X, &x, false));
    QD_TRY(qd_proof_read(w, DY, &dy));
    QD_TRY(qd_proof_is_gradient(w, DY, &dy, true));
    QD_TRY(qd_proof_no_sum(w, DY, &dy));
    if (x.stage != (relay ? RELAYED : AT_HOME) || dy.stage != (relay ? RELAYED : BY_EXPERT))
        return wrong_order(w, DY);
    QD_TRY(read_table(w));
    QD_TRY(relayed_choices(w, relay));
    QD_TRY(grouped_grad(w, UP_GRAD));
    QD_TRY(grouped_grad(w, DOWN_GRAD));
    QD_TRY(grouped_grad(w, UP_BIAS_GRAD));
    QD_TRY(grouped_grad(w, DOWN_BIAS_GRAD));
    if (relay)
        QD_TRY(joins_first_round(w, D_COMBINE_WEIGHT, RELAYED, true));
    return joins_first_round(w, D_ROWS, relay ? RELAYED : BY_EXPERT, true);
}

qd_status qd_proof_rule_node_plan(proof_walk *w)
{
    proof_value choice;
    QD_TRY(read_list(w, CHOICE, &choice));
    choice.stage = BY_NODE;
    QD_TRY(qd_proof_write(w, NODE_PLACE, &choice));
    QD_TRY(qd_proof_write(w, FROM, &choice));
    QD_TRY(qd_proof_write(w, TAKEN, &choice));
    QD_TRY(qd_proof_write(w, CHOSEN, &choice));
    return qd_proof_write(w, NODE_COUNTS, &choice);
}

qd_status qd_proof_rule_node_dispatch(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(read_table(w));
    if (x.stage != BY_NODE)
        return wrong_order(w, X);
    QD_TRY(exchange(w, &x, CODE_ROWS, CODE_EXPERTS, CODE_ROWS, CODE_ROWS));
    x.stage = RELAYED;
    QD_TRY(qd_proof_write(w, RELAY_CHOSEN, &x));
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_rule_node_return(proof_walk *w)
{
    proof_value x, d_weight;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(read_table(w));
    if (x.stage != RELAYED)
        return wrong_order(w, X);
    if (qd_proof_has(w, D_COMBINE_WEIGHT)) {
        QD_TRY(qd_proof_read(w, D_COMBINE_WEIGHT, &d_weight));
        if (d_weight.stage != RELAYED)
            return wrong_order(w, D_COMBINE_WEIGHT);
        QD_TRY(no_overflow(w, D_COMBINE_WEIGHT, &d_weight));
    }
    QD_TRY(no_overflow(w, X, &x));
    QD_TRY(exchange(w, &x, CODE_EXPERTS, CODE_ROWS, CODE_ROWS, CODE_ROWS));
    x.stage = BY_NODE;
    QD_TRY(qd_proof_write(w, STATE, &x));
    return qd_proof_write(w, Y, &x);
}

qd_status qd_proof_rule_node_weights(proof_walk *w)
{
    proof_value d_weight;
    QD_TRY(qd_proof_read(w, STATE, &d_weight));
    QD_TRY(qd_proof_is_gradient(w, STATE, &d_weight, true));
    if (d_weight.stage != BY_NODE)
        return wrong_order(w, STATE);
    QD_TRY(qd_proof_in_fold(w, STATE, &d_weight, FOLD_DENSE));
    d_weight.stage = AT_HOME;
    d_weight.weighted = false;
    return qd_proof_write(w, D_COMBINE_WEIGHT, &d_weight);
}

qd_status qd_proof_rule_node_resend(proof_walk *w)
{
    proof_value x;
    QD_TRY(qd_proof_read(w, X, &x));
    QD_TRY(qd_proof_no_sum(w, X, &x));
    QD_TRY(own_tokens(w, X, &x));
    QD_TRY(read_table(w));
    if (x.stage != AT_HOME)
        return wrong_order(w, X);
    x.stage = BY_NODE;
    QD_TRY(qd_proof_write(w, Y, &x));
    QD_TRY(exchange(w, &x, CODE_ROWS, CODE_EXPERTS, CODE_ROWS, CODE_ROWS));
    x.stage = RELAYED;
    QD_TRY(qd_proof_write(w, LISTS, &x));
    return qd_proof_write(w, RELAY, &x);
}

/* Lists of relayed rows. The table inside the node is computed from the gathered one, identically
 * on all its ranks. */
qd_status qd_proof_rule_relay_plan(proof_walk *w)
{
    proof_value chosen, table;
    QD_TRY(qd_proof_read(w, RELAY_CHOSEN, &chosen));
    if (chosen.stage != RELAYED)
        return wrong_order(w, RELAY_CHOSEN);
    QD_TRY(qd_proof_read(w, COUNTS, &table));
    QD_TRY(qd_proof_write(w, NODE_COUNTS, &table));
    QD_TRY(qd_proof_write(w, TAKEN, &table));
    chosen.stage = RELAY_BY_EXPERT;
    QD_TRY(qd_proof_write(w, PLACE, &chosen));
    QD_TRY(qd_proof_write(w, FROM, &chosen));
    QD_TRY(qd_proof_write(w, STATE, &chosen));
    return qd_proof_write(w, COMBINE_WEIGHT, &chosen);
}
