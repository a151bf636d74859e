/* Pass 1: lowers declared ops to ops over whole values. Adds what declarations leave out:
 * statistics for the backward pass (means, log-sum-exps), tables, the steps of routing. Shapes are
 * those of whole tensors, without rows; the pass `place` fills them in. */
#include "base/half.h"
#include "spec/passes/passes.h"

typedef struct lowering {
    qd_class_writer *w;
    int *slot;                              /* per declared value */
    int choice, weight, place, from, count; /* routing */
} lowering;

static void embed(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    QD_CLASS_OP(w, EMBED, (INPUT, qd_class_input(w)), (TOKEN_TABLE, qd_class_weight(w, d->weight)),
                (POSITION_TABLE, qd_class_weight(w, d->weight2)), (Y, l->slot[d->out]));
}

static void norm(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    int mean = !qd_model_norm_is_rms(w->model) ? qd_class_f32(w, qd_class_name(w, "", l->slot[d->out], " mean"), 0, 1) : -1;
    int rstd = qd_class_f32(w, qd_class_name(w, "", l->slot[d->out], " rstd"), 0, 1);
    QD_CLASS_OP(w, NORM, (X, l->slot[d->x]), (GAMMA, qd_class_weight(w, d->weight)), (BETA, qd_class_weight(w, d->weight2)),
                (Y, l->slot[d->out]), (MEAN, mean), (RSTD, rstd));
}

static void linear(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, LINEAR, (X, l->slot[d->x]), (WEIGHT, qd_class_weight(l->w, d->weight)), (BIAS, qd_class_weight(l->w, d->weight2)),
                (Y, l->slot[d->out]));
}

static void head_norm(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    int rstd = qd_class_f32(w, "head_rstd", 0, w->heads + w->kv_heads);
    QD_CLASS_OP(w, HEAD_NORM, (X, l->slot[d->x]), (Q_GAMMA, qd_class_weight(w, d->weight)), (K_GAMMA, qd_class_weight(w, d->weight2)),
                (Y, l->slot[d->out]), (RSTD, rstd));
}

static void qk_norm(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    int sums = qd_class_f32(w, "qk_squares", 0, 2);
    QD_CLASS_OP(w, QK_SQUARES, (X, l->slot[d->x]), (SUMS, sums));
    QD_CLASS_OP(w, QK_NORM, (X, l->slot[d->x]), (SUMS, sums), (Q_GAMMA, qd_class_weight(w, d->weight)),
                (K_GAMMA, qd_class_weight(w, d->weight2)), (Y, l->slot[d->out]));
}

/* Positions count from 0 in each sequence, unless the rank holds only some of them. */
static void rope(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    const qd_class_config *c = w->config;
    int positions = c->context > 0 || w->seq < c->seq ? qd_class_input(w) : -1;
    int *table = &w->rope[d->local];
    if (*table < 0) {
        *table = qd_class_slot(w, "rope_table", QD_SLOT_ROPE, QD_F32, qd_positions(c->seq, c->context), qd_rope_dims(w->model));
        w->slots[*table].param = d->local;
    }
    QD_CLASS_OP(w, ROPE, (X, l->slot[d->x]), (TABLE, *table), (INPUT, positions), (Y, l->slot[d->out]));
}

static void attention(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    const qd_class_config *c = w->config;
    int64_t window = qd_window_within(d->window, qd_positions(c->seq, c->context));
    if (c->context > 0) {
        int64_t kv = (int64_t)w->kv_heads * w->model->head_dim;
        int cache = qd_class_slot(w, "cache", QD_SLOT_CACHE, c->activation, 2 * qd_cache_rows(window, c->context), kv);
        QD_CLASS_OP(w, ATTENTION_CACHED, (QKV, l->slot[d->x]), (CACHE, cache), (O, l->slot[d->out]))->window = window;
        return;
    }
    QD_CLASS_OP(w, ATTENTION, (QKV, l->slot[d->x]), (INPUT, qd_class_input(w)), (O, l->slot[d->out]), (LSE, qd_class_f32(w, "lse", 0, 0)))
        ->window = window;
}

static void activation(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, ACTIVATION, (X, l->slot[d->x]), (Y, l->slot[d->out]));
}

static void clip(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, CLIP, (X, l->slot[d->x]), (Y, l->slot[d->out]));
}

/* In the type of the weights, as transformers does. */
static void scale(lowering *l, const qd_decl_op *d)
{
    float factor = (float)d->factor;
    if (l->w->config->param == QD_BF16)
        factor = qd_bf16_to_f32(qd_f32_to_bf16(factor));
    QD_CLASS_OP(l->w, SCALE, (X, l->slot[d->x]), (Y, l->slot[d->out]))->scale = (double)factor;
}

static void dropout(lowering *l, const qd_decl_op *d)
{
    if (l->w->config->training)
        QD_CLASS_OP(l->w, DROPOUT, (X, l->slot[d->x]), (Y, l->slot[d->out]))->site = d->site;
    else
        l->slot[d->out] = l->slot[d->x];
}

static void add(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, ADD, (A, l->slot[d->x]), (B, l->slot[d->y]), (Y, l->slot[d->out]));
}

static void gate(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, GATE, (X, l->slot[d->x]), (GATE, l->slot[d->y]), (Y, l->slot[d->out]));
}

static void route(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    const qd_moe *e = &w->model->moe;
    int load = qd_class_f32(w, "expert_load", e->balance == QD_BALANCE_SEQUENCE ? w->config->batch : 1, e->experts);
    l->choice = qd_class_i32(w, "choice", 0, e->per_token);
    l->weight = qd_class_f32(w, "expert_weight", 0, e->per_token);
    l->place = qd_class_i32(w, "place", 0, e->per_token);
    l->from = qd_class_i32(w, "from", 1, w->port_rows * e->per_token);
    l->count = qd_class_i32(w, "expert_rows", 1, e->experts);
    QD_CLASS_OP(w, ROUTE, (LOGITS, l->slot[d->x]), (BIAS, qd_class_weight(w, d->weight)), (CHOICE, l->choice), (WEIGHT, l->weight),
                (LOAD, load));
    QD_CLASS_OP(w, ROUTE_PLAN, (CHOICE, l->choice), (WEIGHT, l->weight), (PLACE, l->place), (FROM, l->from), (COUNT, l->count));
}

static void send(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, PERMUTE, (X, l->slot[d->x]), (FROM, l->from), (COUNT, l->count), (Y, l->slot[d->out]), (PLACE, l->place));
}

static void grouped_linear(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, EXPERTS, (X, l->slot[d->x]), (WEIGHT, qd_class_weight(l->w, d->weight)), (COUNT, l->count), (Y, l->slot[d->out]));
}

static void grouped_activation(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, EXPERT_ACTIVATION, (X, l->slot[d->x]), (COUNT, l->count), (Y, l->slot[d->out]));
}

static void collect(lowering *l, const qd_decl_op *d)
{
    QD_CLASS_OP(l->w, COMBINE, (ROWS, l->slot[d->x]), (PLACE, l->place), (WEIGHT, l->weight), (Y, l->slot[d->out]));
}

/* The loss computes its gradients along with it, in chunks of rows, so that the logits never exist
 * as a whole. In generation: the logits of the last row. */
static void loss(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->w;
    int matrix = qd_class_weight(w, d->weight);
    if (w->config->context > 0) {
        int logits = qd_class_slot(w, "logits", QD_SLOT_LOGITS, QD_F32, 1, w->slots[matrix].rows);
        QD_CLASS_OP(w, HEAD_LOGITS, (X, l->slot[d->x]), (WEIGHT, matrix), (LOGITS, logits));
        return;
    }
    bool training = w->config->training;
    int d_x = training ? qd_class_local(w, qd_class_name(w, "d_", l->slot[d->x], ""), 0, w->model->hidden) : -1;
    w->loss = qd_class_slot(w, "loss", QD_SLOT_LOSS, QD_F64, 2, 1);
    QD_CLASS_OP(w, HEAD_LOSS, (X, l->slot[d->x]), (WEIGHT, matrix), (INPUT, qd_class_input(w)), (DX, d_x),
                (WEIGHT_GRAD, training ? qd_class_gradient(matrix) : -1), (LOSS, w->loss));
}

static void input(lowering *l, const qd_decl_op *d)
{
    l->w->slots[l->slot[d->out]].kind = QD_SLOT_IN;
}

static void output(lowering *l, const qd_decl_op *d)
{
    l->w->slots[l->slot[d->x]].kind = QD_SLOT_OUT;
}

static void (*const rules[QD_DECL_KIND_COUNT])(lowering *, const qd_decl_op *) = {
    [QD_DECL_INPUT] = input,
    [QD_DECL_OUTPUT] = output,
    [QD_DECL_EMBED] = embed,
    [QD_DECL_NORM] = norm,
    [QD_DECL_LINEAR] = linear,
    [QD_DECL_HEAD_NORM] = head_norm,
    [QD_DECL_QK_NORM] = qk_norm,
    [QD_DECL_CLIP] = clip,
    [QD_DECL_ROPE] = rope,
    [QD_DECL_ATTENTION] = attention,
    [QD_DECL_ACTIVATION] = activation,
    [QD_DECL_SCALE] = scale,
    [QD_DECL_DROPOUT] = dropout,
    [QD_DECL_ADD] = add,
    [QD_DECL_GATE] = gate,
    [QD_DECL_ROUTE] = route,
    [QD_DECL_SEND] = send,
    [QD_DECL_GROUPED_LINEAR] = grouped_linear,
    [QD_DECL_GROUPED_ACTIVATION] = grouped_activation,
    [QD_DECL_COLLECT] = collect,
    [QD_DECL_LOSS] = loss,
};

bool qd_decl_has_lowering(qd_decl_kind kind)
{
    return rules[kind] != NULL;
}

void qd_pass_forward(qd_class_writer *w)
{
    const qd_layer *decl = w->decl;
    lowering l = {.w = w, .slot = QD_ARENA_NEW(w->arena, int, decl->value_count + 1)};
    if (!l.slot) {
        w->no_memory = true;
        return;
    }
    w->phase = QD_PHASE_FORWARD;
    for (int i = 0; i < decl->value_count; i++) {
        const qd_decl_value *v = &decl->values[i];
        l.slot[i] = qd_class_slot(w, v->name, QD_SLOT_LOCAL, v->fp32 ? QD_F32 : w->config->activation, 0, v->cols);
    }
    for (int i = 0; i < decl->op_count && !w->no_memory && !w->wrong; i++) {
        if (rules[decl->ops[i].kind])
            rules[decl->ops[i].kind](&l, &decl->ops[i]);
        else
            w->wrong = "a declared op has no rule in the pass `forward`";
    }
}
