/* Pass 1: lowers declared ops to ops over whole values. Adds what declarations leave out:
 * statistics for the backward pass (means, log-sum-exps), tables, the steps of routing. Shapes are
 * those of whole tensors, without rows; the pass `place` fills them in. */
#include "base/half.h"
#include "base/preference.h"
#include "spec/passes/sequence.h"

enum {
    QD_CLASS_NUMBERS,
    INPUT_PARTS, ASSIGNMENTS, TOKENS,
    LOADS,      /* rows of the router's load */
    ROPE_DIMS,  /* of the table of rotary angles */
    CACHE_ROWS,
    KEY_COLS, ABSORBED_COLS, MIXED_COLS, /* of latent attention in generation */
    OUT_COLS,
    PER_ROW = NONE, /* set when the value is placed */
};

enum {
    X, Y, Z, OUT, WEIGHT, WEIGHT2, WEIGHT_GRAD, /* of the declared op */
    MEAN, RSTD, DX, UNBIASED,                   /* named after its values */
    INPUT, ROPE_TABLE, LOCAL_ROPE_TABLE, CACHE, LSE, HEAD_RSTD, SQUARES, LOSS, LOGITS,
    LATENT_Q, LATENT_X, LATENT_ROPE, LATENT_WEIGHT, /* what the queries, keys and values of latent attention are made of */
    LATENT_CACHE, KEY, ABSORBED, MIXED,
    LOAD, CHOICE, EXPERT_WEIGHT, PLACE, FROM, COUNT, /* routing */
    VALUES
};

static const qd_sequence_value values[VALUES] = {
    [INPUT] = {"input", QD_VALUE_I32, INPUT_PARTS, ROWS, .kind = QD_SLOT_INPUT},
    [MEAN] = {" mean", QD_VALUE_F32, PER_ROW, ONE, .buffer = true, .of = 1 + OUT},
    [RSTD] = {" rstd", QD_VALUE_F32, PER_ROW, ONE, .buffer = true, .of = 1 + OUT},
    [DX] = {"", QD_VALUE_ACTIVATION, PER_ROW, HIDDEN, .buffer = true, .of = 1 + X, .before = "d_"},
    [UNBIASED] = {" without bias", QD_VALUE_ACTIVATION, PER_ROW, OUT_COLS, .buffer = true, .of = 1 + OUT},
    [ROPE_TABLE] = {"rope_table", QD_VALUE_F32, POSITIONS, ROPE_DIMS, .kind = QD_SLOT_ROPE},
    [LOCAL_ROPE_TABLE] = {"rope_table", QD_VALUE_F32, POSITIONS, ROPE_DIMS, .kind = QD_SLOT_ROPE, .param = 1},
    [CACHE] = {"cache", QD_VALUE_ACTIVATION, CACHE_ROWS, K, .buffer = true, .kind = QD_SLOT_CACHE},
    [LATENT_CACHE] = {"cache", QD_VALUE_ACTIVATION, POSITIONS, KEY_COLS, .buffer = true, .kind = QD_SLOT_CACHE},
    [KEY] = {"key", QD_VALUE_ACTIVATION, PER_ROW, KEY_COLS, .buffer = true},
    [ABSORBED] = {"q_absorbed", QD_VALUE_ACTIVATION, PER_ROW, ABSORBED_COLS, .buffer = true},
    [MIXED] = {"latent_attended", QD_VALUE_ACTIVATION, PER_ROW, MIXED_COLS, .buffer = true},
    [LSE] = {"lse", QD_VALUE_F32, PER_ROW, PER_ROW, .buffer = true}, /* per head */
    [HEAD_RSTD] = {"head_rstd", QD_VALUE_F32, PER_ROW, ALL_HEADS, .buffer = true},
    [SQUARES] = {"qk_squares", QD_VALUE_F32, PER_ROW, TWO, .buffer = true},
    [LOSS] = {"loss", QD_VALUE_F64, TWO, ONE, .kind = QD_SLOT_LOSS},
    [LOGITS] = {"logits", QD_VALUE_F32, ONE, TOKENS, .kind = QD_SLOT_LOGITS},
    [CHOICE] = {"choice", QD_VALUE_I32, PER_ROW, .cols = PER_TOKEN},
    [EXPERT_WEIGHT] = {"expert_weight", QD_VALUE_F32, PER_ROW, .cols = PER_TOKEN},
    [LOAD] = {"expert_load", QD_VALUE_F32, LOADS, .cols = EXPERTS},
    [PLACE] = {"place", QD_VALUE_I32, PER_ROW, .cols = PER_TOKEN},
    [FROM] = {"from", QD_VALUE_I32, ONE, .cols = ASSIGNMENTS},
    [COUNT] = {"expert_rows", QD_VALUE_I32, ONE, .cols = EXPERTS},
};

/* Facts. POSITIONED: positions do not count from 0 in each sequence: in generation, or because the
 * rank holds only some of them. CENTERED: norms subtract the mean. LATENT: in generation, keys stay
 * compressed. Of the declared op: WEIGHTED, BIASED: it has its weight (attention: sinks), or its
 * second weight. GROUPED: the weight is that of experts. LOCAL: the angles of layers with windows.
 * EXPANDS: the GEMM that would expand compressed keys. */
enum {
    TRAINING = 1, GENERATING = 2, POSITIONED = 4, CENTERED = 8, LATENT = 16,
    WEIGHTED = 32, BIASED = 64, GROUPED = 128, LOCAL = 256, EXPANDS = 512,
};

#define LOWER(declared, when, unless, kind, ...) \
    QD_STEP(QD_DECL_##declared, when, unless, kind, 0, PER_ROW, PER_ROW, PER_ROW, __VA_ARGS__)
static const qd_step steps[] = {
    LOWER(EMBED, 0, 0, EMBED, (INPUT, INPUT), (TOKEN_TABLE, WEIGHT), (POSITION_TABLE, WEIGHT2), (Y, OUT)),
    LOWER(NORM, CENTERED, 0, NORM, (X, X), (GAMMA, WEIGHT), (BETA, WEIGHT2), (Y, OUT), (MEAN, MEAN), (RSTD, RSTD)),
    LOWER(NORM, 0, CENTERED, NORM, (X, X), (GAMMA, WEIGHT), (BETA, WEIGHT2), (Y, OUT), (RSTD, RSTD)),
    LOWER(LINEAR, 0, EXPANDS, LINEAR, (X, X), (WEIGHT, WEIGHT), (BIAS, WEIGHT2), (Y, OUT)),
    LOWER(HEAD_NORM, 0, 0, HEAD_NORM, (X, X), (Q_GAMMA, WEIGHT), (K_GAMMA, WEIGHT2), (Y, OUT), (RSTD, HEAD_RSTD)),
    LOWER(QK_NORM, 0, 0, QK_SQUARES, (X, X), (SUMS, SQUARES)),
    LOWER(QK_NORM, 0, 0, QK_NORM, (X, X), (SUMS, SQUARES), (Q_GAMMA, WEIGHT), (K_GAMMA, WEIGHT2), (Y, OUT)),
    LOWER(CLIP, 0, 0, CLIP, (X, X), (Y, OUT)),
    LOWER(ROPE, POSITIONED, LOCAL, ROPE, (X, X), (TABLE, ROPE_TABLE), (INPUT, INPUT), (Y, OUT)),
    LOWER(ROPE, 0, POSITIONED | LOCAL, ROPE, (X, X), (TABLE, ROPE_TABLE), (Y, OUT)),
    LOWER(ROPE, POSITIONED | LOCAL, 0, ROPE, (X, X), (TABLE, LOCAL_ROPE_TABLE), (INPUT, INPUT), (Y, OUT)),
    LOWER(ROPE, LOCAL, POSITIONED, ROPE, (X, X), (TABLE, LOCAL_ROPE_TABLE), (Y, OUT)),
    LOWER(LATENT_QKV, POSITIONED, GENERATING, LATENT_QKV, (Q, X), (KV, Y), (K_ROPE, Z), (TABLE, ROPE_TABLE), (INPUT, INPUT),
          (QKV, OUT)),
    LOWER(LATENT_QKV, 0, POSITIONED, LATENT_QKV, (Q, X), (KV, Y), (K_ROPE, Z), (TABLE, ROPE_TABLE), (QKV, OUT)),
    LOWER(ATTENTION, LATENT, 0, ATTENTION_LATENT, (Q, LATENT_Q), (LATENT, LATENT_X), (K_ROPE, LATENT_ROPE), (WEIGHT, LATENT_WEIGHT),
          (TABLE, ROPE_TABLE), (INPUT, INPUT), (CACHE, LATENT_CACHE), (KEY, KEY), (ABSORBED, ABSORBED), (MIXED, MIXED), (O, OUT)),
    LOWER(ATTENTION, GENERATING, WEIGHTED | LATENT, ATTENTION_CACHED, (QKV, X), (CACHE, CACHE), (O, OUT)),
    LOWER(ATTENTION, GENERATING | WEIGHTED, 0, ATTENTION_CACHED, (QKV, X), (CACHE, CACHE), (O, OUT), (LSE, LSE)),
    LOWER(ATTENTION, 0, GENERATING, ATTENTION, (QKV, X), (INPUT, INPUT), (O, OUT), (LSE, LSE)),
    LOWER(ATTENTION, WEIGHTED, 0, ATTENTION_SINK, (O, OUT), (LSE, LSE), (SINK, WEIGHT)),
    LOWER(ACTIVATION, 0, 0, ACTIVATION, (X, X), (Y, OUT)),
    LOWER(SCALE, 0, 0, SCALE, (X, X), (Y, OUT)),
    LOWER(DROPOUT, TRAINING, 0, DROPOUT, (X, X), (Y, OUT)),
    LOWER(ADD, 0, 0, ADD, (A, X), (B, Y), (Y, OUT)),
    LOWER(ADAPT, GROUPED, 0, ADAPT, (X, X), (WEIGHT, WEIGHT), (ADD, Y), (COUNT, COUNT), (Y, OUT)),
    LOWER(ADAPT, 0, GROUPED, ADAPT, (X, X), (WEIGHT, WEIGHT), (ADD, Y), (Y, OUT)),
    LOWER(GATE, 0, 0, GATE, (X, X), (GATE, Y), (Y, OUT)),
    LOWER(ROUTE, 0, 0, ROUTE, (LOGITS, X), (BIAS, WEIGHT), (CHOICE, CHOICE), (WEIGHT, EXPERT_WEIGHT), (LOAD, LOAD)),
    LOWER(ROUTE, 0, 0, ROUTE_PLAN, (CHOICE, CHOICE), (WEIGHT, EXPERT_WEIGHT), (PLACE, PLACE), (FROM, FROM), (COUNT, COUNT)),
    LOWER(SEND, 0, 0, PERMUTE, (X, X), (FROM, FROM), (COUNT, COUNT), (Y, OUT), (PLACE, PLACE)),
    LOWER(GROUPED_LINEAR, 0, BIASED, EXPERTS, (X, X), (WEIGHT, WEIGHT), (COUNT, COUNT), (Y, OUT)),
    LOWER(GROUPED_LINEAR, BIASED, 0, EXPERTS, (X, X), (WEIGHT, WEIGHT), (COUNT, COUNT), (Y, UNBIASED)),
    LOWER(GROUPED_LINEAR, BIASED, 0, EXPERTS_BIAS, (X, UNBIASED), (BIAS, WEIGHT2), (COUNT, COUNT), (Y, OUT)),
    LOWER(GROUPED_ACTIVATION, 0, 0, EXPERT_ACTIVATION, (X, X), (COUNT, COUNT), (Y, OUT)),
    LOWER(COLLECT, 0, 0, COMBINE, (ROWS, X), (PLACE, PLACE), (WEIGHT, EXPERT_WEIGHT), (Y, OUT)),
    /* The loss computes its gradients along with it, in chunks of rows, so that the logits never
     * exist as a whole. In generation: the logits of the last row. */
    LOWER(LOSS, GENERATING, 0, HEAD_LOGITS, (X, X), (WEIGHT, WEIGHT), (LOGITS, LOGITS)),
    LOWER(LOSS, TRAINING, GENERATING, HEAD_LOSS, (X, X), (WEIGHT, WEIGHT), (INPUT, INPUT), (DX, DX), (WEIGHT_GRAD, WEIGHT_GRAD),
          (LOSS, LOSS)),
    LOWER(LOSS, 0, TRAINING | GENERATING, HEAD_LOSS, (X, X), (WEIGHT, WEIGHT), (INPUT, INPUT), (LOSS, LOSS)),
};

bool qd_decl_has_lowering(qd_decl_kind kind)
{
    bool found = kind == QD_DECL_INPUT || kind == QD_DECL_OUTPUT; /* ports of the module */
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        found = found || steps[i].stage == (int)kind;
    return found;
}

typedef struct lowering {
    qd_sequence s;
    int *slot; /* per declared value */
    unsigned facts;
    const qd_decl_op *expand; /* see EXPANDS; NULL: none */
} lowering;

/* The columns of the parts of an adapter follow from the shapes of the layer's matrices on this
 * rank. */
static void set_parts(const qd_class_writer *w, const qd_decl_op *d, qd_op *op)
{
    bool grouped = w->decl->params[d->weight.param].expert >= 0;
    int64_t at = 0;
    int first = w->module->param_begin + d->weight2.param;
    for (int i = 0; i < QD_PARTS_MOST && i < d->weight2.count; i++) {
        /* Experts have matrices of the same shape, and this rank may not hold the first. */
        int64_t cols = grouped ? w->ledger->params[first + i].shape[0] : qd_ledger_atom(w->ledger, first + i, w->config->rank).length[0];
        if (d->parts & 1u << i) {
            op->part_at[op->parts] = (int32_t)at;
            op->part_cols[op->parts++] = (int32_t)cols;
        }
        at += cols;
    }
}

/* What an op states as declared. */
static void state(const qd_class_writer *w, const qd_decl_op *d, qd_op *op)
{
    const qd_class_config *c = w->config;
    op->eps = op->kind == QD_OP_NORM ? d->factor : 0.0;
    op->site = op->kind == QD_OP_DROPOUT ? d->site : 0;
    op->ahead = op->kind == QD_OP_EMBED || op->kind == QD_OP_HEAD_LOSS || op->kind == QD_OP_ATTENTION ? d->ahead : 0;
    if (op->kind == QD_OP_ATTENTION || op->kind == QD_OP_ATTENTION_CACHED)
        op->window = qd_window_within(d->window, w->number[POSITIONS]);
    if (op->kind == QD_OP_SCALE) { /* in the type of the weights, as transformers does */
        float factor = (float)d->factor;
        op->scale = c->param == QD_BF16 ? (double)qd_bf16_to_f32(qd_f32_to_bf16(factor)) : (double)factor;
    }
    if (op->kind == QD_OP_ADAPT)
        set_parts(w, d, op);
}

/* In generation, attention reads what its queries, keys and values are made of. */
static void keep_latent(lowering *l, const qd_decl_op *join)
{
    qd_class_writer *w = l->s.w;
    const qd_decl_op *expand = w->decl->ops;
    while (expand->out != join->y)
        expand++;
    if (expand->kind != QD_DECL_LINEAR)
        qd_class_fail(w, QD_UNSUPPORTED,
                      "generation from compressed keys does not apply the adapter of attn.kv_b: 'quadrille convert' merges "
                      "adapters, and lora.targets=o_proj,gate_proj,up_proj,down_proj adds none there");
    l->expand = expand;
    l->facts |= LATENT;
    l->s.slot[LATENT_Q] = l->slot[join->x];
    l->s.slot[LATENT_X] = l->slot[expand->x];
    l->s.slot[LATENT_ROPE] = l->slot[join->z];
    l->s.slot[LATENT_WEIGHT] = qd_class_weight(w, expand->weight);
}

/* Values, facts and numbers of a declared op. */
static void prepare(lowering *l, const qd_decl_op *d)
{
    qd_class_writer *w = l->s.w;
    const qd_class_config *c = w->config;
    int *slot = l->s.slot;
    slot[X] = d->x >= 0 ? l->slot[d->x] : -1;
    slot[Y] = d->y >= 0 ? l->slot[d->y] : -1;
    slot[Z] = d->kind == QD_DECL_LATENT_QKV ? l->slot[d->z] : -1;
    slot[OUT] = d->out >= 0 ? l->slot[d->out] : -1;
    slot[WEIGHT] = qd_class_weight(w, d->weight);
    slot[WEIGHT2] = qd_class_weight(w, d->weight2);
    slot[WEIGHT_GRAD] = qd_class_trained(w, slot[WEIGHT]);
    bool weighted = slot[WEIGHT] >= 0, grouped = weighted && w->decl->params[d->weight.param].expert >= 0;
    l->s.facts = l->facts | (weighted ? WEIGHTED : 0) | (slot[WEIGHT2] >= 0 ? BIASED : 0) | (grouped ? GROUPED : 0) |
                 (d->local ? LOCAL : 0) | (d == l->expand ? EXPANDS : 0);
    l->s.number[OUT_COLS] = slot[OUT] >= 0 ? w->slots[slot[OUT]].cols : 0;
    l->s.number[TOKENS] = weighted ? w->slots[slot[WEIGHT]].rows : 0; /* of this rank's shard */
    l->s.number[CACHE_ROWS] = 2 * qd_cache_rows(qd_window_within(d->window, w->number[POSITIONS]), c->context);
    if (d->kind == QD_DECL_INPUT)
        w->slots[slot[OUT]].kind = QD_SLOT_IN;
    if (d->kind == QD_DECL_OUTPUT)
        w->slots[slot[X]].kind = QD_SLOT_OUT;
    if (d->kind == QD_DECL_DROPOUT && !c->training)
        l->slot[d->out] = slot[X];
    if (d->kind == QD_DECL_ROUTE) {
        for (int value = LOAD; value <= COUNT; value++)
            slot[value] = -1; /* each router has its own */
        qd_sequence_slot(&l->s, LOAD);
    }
}

void qd_pass_forward(qd_class_writer *w)
{
    const qd_layer *decl = w->decl;
    const qd_class_config *c = w->config;
    const qd_moe *moe = &w->model->moe;
    const int64_t key = w->model->kv_lora_rank + w->model->qk_rope_head_dim;
    const int64_t parts = 3 + (c->training ? 2 * qd_model_ahead(w->model) : 0) + (c->pairs ? QD_PAIR_PARTS : 0);
    bool positioned = c->context > 0 || w->seq < c->seq;
    lowering l = {.s = {w, QD_SEQUENCE_TABLES(values, steps),
                        .number = {[INPUT_PARTS] = parts, [ASSIGNMENTS] = w->port_rows * moe->per_token,
                                   [LOADS] = moe->balance == QD_BALANCE_SEQUENCE ? c->batch : 1, [ROPE_DIMS] = qd_rope_dims(w->model),
                                   [KEY_COLS] = key, [ABSORBED_COLS] = w->heads * key,
                                   [MIXED_COLS] = (int64_t)w->heads * w->model->kv_lora_rank}},
                  .facts = (c->training ? TRAINING : 0) | (c->context > 0 ? GENERATING : 0) | (positioned ? POSITIONED : 0) |
                           (qd_model_norm_is_rms(w->model) ? 0 : CENTERED),
                  .slot = QD_CLASS_NEW(w, int, decl->value_count + 1)};
    if (!l.slot)
        return;
    qd_sequence_begin(&l.s);
    w->phase = QD_PHASE_FORWARD;
    for (int i = 0; i < decl->value_count; i++) {
        const qd_decl_value *v = &decl->values[i];
        l.slot[i] = qd_class_slot(w, v->name, QD_SLOT_LOCAL, v->fp32 ? QD_F32 : c->activation, 0, v->cols);
    }
    const qd_decl_op *join = c->context > 0 ? qd_layer_op(decl, QD_DECL_LATENT_QKV) : NULL;
    if (join && join->ahead == 0)
        keep_latent(&l, join);
    for (int i = 0; i < decl->op_count; i++) {
        const qd_decl_op *d = &decl->ops[i];
        int before = w->op_count;
        if (d->ahead > 0 && !c->training)
            continue; /* only training predicts further tokens */
        if (!qd_decl_has_lowering(d->kind))
            qd_class_fail(w, QD_SYSTEM, "a declared op has no rule in the pass `forward`");
        prepare(&l, d);
        qd_sequence_emit(&l.s, d->kind);
        for (int k = before; k < w->op_count; k++)
            state(w, d, &w->ops[k]);
    }
}
