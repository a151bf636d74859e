/* Pass 2: derives the backward pass from the forward list.
 *
 * One table gives the gradient ops of each op. The forward list is in SSA form, so the gradient of
 * a value is the sum of the contributions of the ops that read it. Contributions are added pairwise
 * in the order of the forward pass. Ops whose gradient can absorb a sum (norms, permutations) come
 * after the others, from the last of the forward pass to the first: each absorbs the sum so far.
 * Gradients of inputs are phase I, gradients of weights phase W; an op that computes both counts as
 * I. */
#include "spec/passes/passes.h"

#include <string.h>

/* What an operand of a gradient op is, in terms of the forward op: the value of an operand, the
 * gradient of an operand, an operand of the ROUTE_PLAN that wrote the op's places, or one of a
 * few others. The gradient of a result is the sum of what its readers contributed; that of an input
 * is what this op contributes; that of a weight is accumulated. */
enum { VALUE = 0, GRADIENT = 32, FP32_GRADIENT = 64, PLAN = 96, SUM = 128, SINK, SINK_GRAD, DOTS, DELTA, SOURCE_STEP = 32 };
#define v(operand) (VALUE + QD_##operand)
#define d(operand) (GRADIENT + QD_##operand)
#define d32(operand) (FP32_GRADIENT + QD_##operand) /* in fp32 regardless of the activation type */
#define plan(operand) (PLAN + QD_ROUTE_PLAN_##operand)
/* SUM: what other readers contributed to the gradient of the input; the op absorbs it, and is
 * deferred until they all have. SINK, SINK_GRAD: the sinks that the next op of the forward list
 * adds to an attention. DOTS and what follows: buffers that ops of a rule share. */
static const struct {
    const char *name;
    int cols; /* 0: the placement rule decides */
} buffers[] = {{"qk_dots", 2}, {"delta", 0}};
enum { BUFFERS = sizeof buffers / sizeof *buffers };

/* An op of phase W that would write no gradient, because the layer lacks the weight or the weight
 * is frozen, is left out. */
typedef struct gradient_rule {
    qd_phase phase;
    qd_op_kind op;
    enum { NO_RULE, NO_GRADIENT, OP, ABSORBING, SAME } what; /* ABSORBING: reads SUM. SAME: no op, the first operand is the second */
    qd_operands operands;                         /* sources */
} gradient_rule;
#define RULE(phase, kind, ...) {QD_PHASE_##phase, QD_OP_##kind, OP, QD_OPERAND_TABLE(kind, __VA_ARGS__)}
#define RULE_OF_SUM(phase, kind, ...) {QD_PHASE_##phase, QD_OP_##kind, ABSORBING, QD_OPERAND_TABLE(kind, (ADD, SUM), __VA_ARGS__)}
#define SAME(gradient, as) {.what = SAME, .operands = {{1 + (gradient), 1 + (as)}}}
enum { MOST_RULES = 3 };

/* For each op of a forward list, its gradient ops and what they read. Later passes add the other
 * kinds of ops. */
static const gradient_rule rules[QD_OP_KIND_COUNT][MOST_RULES] = {
    [QD_OP_EMBED] = {RULE(WEIGHT, EMBED_GRAD, (INPUT, v(EMBED_INPUT)), (DY, d(EMBED_Y)), (TOKEN_GRAD, d(EMBED_TOKEN_TABLE)),
                          (POSITION_GRAD, d(EMBED_POSITION_TABLE)))},
    [QD_OP_NORM] = {RULE_OF_SUM(INPUT, NORM_GRAD, (DY, d(NORM_Y)), (X, v(NORM_X)), (GAMMA, v(NORM_GAMMA)),
                         (MEAN, v(NORM_MEAN)), (RSTD, v(NORM_RSTD)), (DX, d(NORM_X)), (GAMMA_GRAD, d(NORM_GAMMA)),
                         (BETA_GRAD, d(NORM_BETA)))},
    [QD_OP_LINEAR] = {RULE(INPUT, LINEAR_DX, (DY, d(LINEAR_Y)), (WEIGHT, v(LINEAR_WEIGHT)), (DX, d(LINEAR_X))),
                      RULE(WEIGHT, LINEAR_DW, (DY, d(LINEAR_Y)), (X, v(LINEAR_X)), (WEIGHT_GRAD, d(LINEAR_WEIGHT))),
                      RULE(WEIGHT, BIAS_GRAD, (DY, d(LINEAR_Y)), (GRAD, d(LINEAR_BIAS)))},
    [QD_OP_HEAD_NORM] = {RULE(INPUT, HEAD_NORM_GRAD, (DY, d(HEAD_NORM_Y)), (X, v(HEAD_NORM_X)), (Q_GAMMA, v(HEAD_NORM_Q_GAMMA)),
                              (K_GAMMA, v(HEAD_NORM_K_GAMMA)), (RSTD, v(HEAD_NORM_RSTD)), (Q_GAMMA_GRAD, d(HEAD_NORM_Q_GAMMA)),
                              (K_GAMMA_GRAD, d(HEAD_NORM_K_GAMMA)), (DX, d(HEAD_NORM_X)))},
    [QD_OP_QK_SQUARES] = {{.what = NO_GRADIENT}}, /* that of the norm includes it */
    [QD_OP_QK_NORM] = {RULE(INPUT, QK_DOTS, (DY, d(QK_NORM_Y)), (X, v(QK_NORM_X)), (Q_GAMMA, v(QK_NORM_Q_GAMMA)),
                            (K_GAMMA, v(QK_NORM_K_GAMMA)), (DOTS, DOTS)),
                       RULE(INPUT, QK_NORM_GRAD, (DY, d(QK_NORM_Y)), (X, v(QK_NORM_X)), (SUMS, v(QK_NORM_SUMS)), (DOTS, DOTS),
                            (Q_GAMMA, v(QK_NORM_Q_GAMMA)), (K_GAMMA, v(QK_NORM_K_GAMMA)), (Q_GAMMA_GRAD, d(QK_NORM_Q_GAMMA)),
                            (K_GAMMA_GRAD, d(QK_NORM_K_GAMMA)), (DX, d(QK_NORM_X)))},
    [QD_OP_CLIP] = {RULE(INPUT, CLIP_GRAD, (X, v(CLIP_X)), (DY, d(CLIP_Y)), (DX, d(CLIP_X)))},
    [QD_OP_ROPE] = {RULE(INPUT, ROPE_INVERSE, (X, d(ROPE_Y)), (TABLE, v(ROPE_TABLE)), (INPUT, v(ROPE_INPUT)), (Y, d(ROPE_X)))},
    [QD_OP_LATENT_QKV] = {RULE(INPUT, LATENT_QKV_GRAD, (D_QKV, d(LATENT_QKV_QKV)), (TABLE, v(LATENT_QKV_TABLE)),
                               (INPUT, v(LATENT_QKV_INPUT)), (DQ, d(LATENT_QKV_Q)), (DKV, d(LATENT_QKV_KV)),
                               (DK_ROPE, d(LATENT_QKV_K_ROPE)))},
    [QD_OP_ATTENTION] = {RULE(INPUT, ATTENTION_GRAD, (QKV, v(ATTENTION_QKV)), (INPUT, v(ATTENTION_INPUT)), (O, v(ATTENTION_O)),
                              (LSE, v(ATTENTION_LSE)), (D_O, d(ATTENTION_O)), (D_QKV, d(ATTENTION_QKV)), (DELTA, DELTA)),
                         RULE(WEIGHT, ATTENTION_SINK_GRAD, (LSE, v(ATTENTION_LSE)), (DELTA, DELTA), (SINK, SINK), (SINK_GRAD, SINK_GRAD))},
    [QD_OP_ATTENTION_SINK] = {{.what = NO_GRADIENT}}, /* that of attention includes it, from results with the sinks */
    [QD_OP_ACTIVATION] = {RULE(INPUT, ACTIVATION_GRAD, (X, v(ACTIVATION_X)), (DY, d(ACTIVATION_Y)), (DX, d(ACTIVATION_X)))},
    [QD_OP_ADAPT] = {RULE(INPUT, ADAPT_DX, (DY, d(ADAPT_Y)), (WEIGHT, v(ADAPT_WEIGHT)), (COUNT, v(ADAPT_COUNT)), (DX, d(ADAPT_X))),
                     RULE(WEIGHT, ADAPT_DW, (DY, d(ADAPT_Y)), (X, v(ADAPT_X)), (COUNT, v(ADAPT_COUNT)), (WEIGHT_GRAD, d(ADAPT_WEIGHT))),
                     SAME(d(ADAPT_ADD), d(ADAPT_Y))},
    [QD_OP_GATE] = {RULE(INPUT, GATE_GRAD, (DY, d(GATE_Y)), (X, v(GATE_X)), (GATE, v(GATE_GATE)), (DX, d(GATE_X)),
                         (D_GATE, d(GATE_GATE)))},
    [QD_OP_SCALE] = {RULE(INPUT, SCALE, (X, d(SCALE_Y)), (Y, d(SCALE_X)))},
    [QD_OP_DROPOUT] = {RULE(INPUT, DROPOUT, (X, d(DROPOUT_Y)), (Y, d(DROPOUT_X)))}, /* with the same mask */
    [QD_OP_ADD] = {SAME(d(ADD_A), d(ADD_Y)), SAME(d(ADD_B), d(ADD_Y))},
    [QD_OP_HEAD_LOSS] = {SAME(d(HEAD_LOSS_X), v(HEAD_LOSS_DX))}, /* computed along with the loss */
    [QD_OP_ROUTE] = {RULE(INPUT, ROUTE_GRAD, (LOGITS, v(ROUTE_LOGITS)), (CHOICE, v(ROUTE_CHOICE)), (WEIGHT, v(ROUTE_WEIGHT)),
                          (D_WEIGHT, d(ROUTE_WEIGHT)), (LOAD, v(ROUTE_LOAD)), (D_LOGITS, d(ROUTE_LOGITS))),
                     RULE(WEIGHT, ROUTE_LOAD, (CHOICE, v(ROUTE_CHOICE)), (BIAS_GRAD, d(ROUTE_BIAS)))},
    [QD_OP_ROUTE_PLAN] = {{.what = NO_GRADIENT}}, /* its results are integers */
    [QD_OP_PERMUTE] = {RULE_OF_SUM(INPUT, COMBINE, (ROWS, d(PERMUTE_Y)), (PLACE, v(PERMUTE_PLACE)), (Y, d(PERMUTE_X)))},
    [QD_OP_EXPERTS] = {RULE(INPUT, EXPERTS_DX, (DY, d(EXPERTS_Y)), (WEIGHT, v(EXPERTS_WEIGHT)), (COUNT, v(EXPERTS_COUNT)),
                            (DX, d(EXPERTS_X))),
                       RULE(WEIGHT, EXPERTS_DW, (DY, d(EXPERTS_Y)), (X, v(EXPERTS_X)), (COUNT, v(EXPERTS_COUNT)),
                            (WEIGHT_GRAD, d(EXPERTS_WEIGHT)))},
    [QD_OP_EXPERTS_BIAS] = {RULE(WEIGHT, EXPERTS_BIAS_GRAD, (DY, d(EXPERTS_BIAS_Y)), (COUNT, v(EXPERTS_BIAS_COUNT)),
                                 (GRAD, d(EXPERTS_BIAS_BIAS))),
                            SAME(d(EXPERTS_BIAS_X), d(EXPERTS_BIAS_Y))},
    [QD_OP_EXPERT_ACTIVATION] = {RULE(INPUT, EXPERT_ACTIVATION_GRAD, (X, v(EXPERT_ACTIVATION_X)), (DY, d(EXPERT_ACTIVATION_Y)),
                                      (COUNT, v(EXPERT_ACTIVATION_COUNT)), (DX, d(EXPERT_ACTIVATION_X)))},
    [QD_OP_COMBINE] = {RULE(INPUT, COMBINE_GRAD, (DY, d(COMBINE_Y)), (ROWS, v(COMBINE_ROWS)), (FROM, plan(FROM)),
                            (PLACE, v(COMBINE_PLACE)), (COUNT, plan(COUNT)), (WEIGHT, v(COMBINE_WEIGHT)), (D_ROWS, d(COMBINE_ROWS)),
                            (D_WEIGHT, d32(COMBINE_WEIGHT)))},
};

/* Whether the gradient op absorbs what other readers contributed to the gradient of its input. */
static bool absorbs(qd_op_kind kind)
{
    return rules[kind][0].what == ABSORBING;
}

bool qd_op_has_gradient(qd_op_kind kind)
{
    return rules[kind][0].what != NO_RULE;
}

typedef struct contribution {
    int value, grad; /* slots */
} contribution;

typedef struct gradients {
    qd_class_writer *w;
    contribution *list; /* from the last reader of the forward list to the first */
    int count;
    int forward_count;  /* ops of the forward list */
    int *done;          /* per slot of the forward list: its gradient, -1: not summed so far */
} gradients;

static int grad_of(gradients *g, int value);

/* A slot for the gradient of a value. */
static int new_slot(gradients *g, int value, qd_dtype dtype)
{
    qd_class_writer *w = g->w;
    return qd_class_slot(w, qd_class_name(w, "d_", value, ""), QD_SLOT_LOCAL, dtype, 0, w->slots[value].cols);
}

/* The gradient of one op of the forward list, while its gradient ops are emitted. */
typedef struct derivation {
    gradients *g;
    qd_op op;
    int index;
    int grad[QD_OP_SLOTS]; /* gradients of its operands; UNKNOWN: not used so far */
    int sum;               /* see SUM */
    int buffer[BUFFERS];   /* -1: not used so far */
    bool unused;           /* the loss does not depend on its result */
} derivation;
enum { UNKNOWN = -2 };

static int find_gradient(derivation *d, int operand, qd_dtype dtype)
{
    qd_class_writer *w = d->g->w;
    int value = d->op.slot[operand];
    if (d->grad[operand] != UNKNOWN || value < 0)
        return value < 0 ? -1 : d->grad[operand];
    if (w->slots[value].kind == QD_SLOT_PARAM)
        return qd_class_trained(w, value);
    bool result = qd_op_writes(&d->op, operand);
    d->grad[operand] = result ? grad_of(d->g, value) : new_slot(d->g, value, dtype);
    d->unused = d->unused || (result && d->grad[operand] < 0);
    return d->grad[operand];
}

static int sink_of(const derivation *d)
{
    const qd_op *next = d->index + 1 < d->g->forward_count ? &d->g->w->ops[d->index + 1] : NULL;
    return next && next->kind == QD_OP_ATTENTION_SINK ? next->slot[QD_ATTENTION_SINK_SINK] : -1;
}

static int find_source(derivation *d, int source)
{
    qd_class_writer *w = d->g->w;
    int operand = source % SOURCE_STEP;
    if (source < GRADIENT)
        return d->op.slot[operand];
    if (source < PLAN)
        return find_gradient(d, operand, source < FP32_GRADIENT ? w->config->activation : QD_F32);
    if (source < SUM)
        return w->ops[qd_class_definition(w, d->op.slot[QD_COMBINE_PLACE], d->index)].slot[operand];
    if (source == SINK || source == SINK_GRAD)
        return source == SINK ? sink_of(d) : qd_class_trained(w, sink_of(d));
    if (source == SUM)
        return d->sum;
    int *buffer = &d->buffer[source - DOTS];
    if (*buffer < 0)
        *buffer = qd_class_f32(w, buffers[source - DOTS].name, 0, buffers[source - DOTS].cols);
    return *buffer;
}

static void apply(derivation *d, const gradient_rule *rule)
{
    qd_class_writer *w = d->g->w;
    qd_operands operands = {{0}};
    bool trains = rule->phase == QD_PHASE_INPUT;
    if (rule->what == SAME) {
        d->grad[(rule->operands.slot[0] - 1) % SOURCE_STEP] = find_source(d, rule->operands.slot[1] - 1);
        return;
    }
    for (int j = 0; j < QD_OP_SLOTS && !d->unused; j++) {
        int slot = rule->operands.slot[j] > 0 ? find_source(d, rule->operands.slot[j] - 1) : -1;
        trains = trains || (slot >= 0 && w->slots[slot].kind == QD_SLOT_GRAD);
        operands.slot[j] = 1 + slot;
    }
    if (d->unused || !trains)
        return;
    /* The gradient of a table that another stage owns is sent to it after phase I. */
    w->phase = d->op.ahead > 0 ? QD_PHASE_INPUT : rule->phase;
    qd_op *op = qd_class_op(w, rule->op, operands);
    op->ahead = d->op.ahead;
    op->window = d->op.window;
    op->scale = d->op.scale;
    op->site = d->op.site;
    op->parts = d->op.parts;
    memcpy(op->part_at, d->op.part_at, sizeof op->part_at);
    memcpy(op->part_cols, d->op.part_cols, sizeof op->part_cols);
    w->phase = QD_PHASE_INPUT;
}

/* Emits the gradient ops of op `index` of the forward list, which contribute to the gradients of
 * its inputs. An op that absorbs `sum` contributes nothing: the gradient of its first operand is
 * returned. */
static int derive(gradients *g, int index, int sum)
{
    derivation d = {.g = g, .op = g->w->ops[index], .index = index, .sum = sum, .buffer = {-1, -1}};
    for (int j = 0; j < QD_OP_SLOTS; j++)
        d.grad[j] = UNKNOWN;
    for (int r = 0; r < MOST_RULES; r++)
        if (rules[d.op.kind][r].what >= OP)
            apply(&d, &rules[d.op.kind][r]);
    for (int j = 0; j < QD_OP_SLOTS && !absorbs(d.op.kind); j++)
        if (d.grad[j] >= 0 && !qd_op_writes(&d.op, j))
            g->list[g->count++] = (contribution){d.op.slot[j], d.grad[j]};
    return d.grad[QD_NORM_X];
}
QD_SAME_PLACE(X, NORM, PERMUTE);

/* The gradient of a value, once all ops that read it have contributed; -1: the loss does not depend
 * on it. Ops that absorb a sum come last. */
static int grad_of(gradients *g, int value)
{
    qd_class_writer *w = g->w;
    int sum = -1;
    if (g->done[value] >= 0)
        return g->done[value];
    for (int i = g->count - 1; i >= 0; i--) { /* in the order of the forward pass */
        if (g->list[i].value != value)
            continue;
        int both = sum < 0 ? g->list[i].grad : new_slot(g, value, w->config->activation);
        if (sum >= 0)
            QD_CLASS_OP(w, ADD, (A, sum), (B, g->list[i].grad), (Y, both));
        sum = both;
    }
    for (int i = g->forward_count - 1; i >= 0; i--)
        if (absorbs(w->ops[i].kind) && w->ops[i].slot[QD_NORM_X] == value)
            sum = derive(g, i, sum);
    return g->done[value] = sum;
}

/* Whether no parameter of the module is trained. */
static bool is_frozen(const qd_class_writer *w)
{
    for (int i = 0; i < w->module->param_count; i++)
        if (!w->ledger->params[w->module->param_begin + i].frozen)
            return false;
    return true;
}

/* What the module gives to the one before it: the gradient of its input. */
static void leave(gradients *g, int in)
{
    qd_class_writer *w = g->w;
    int grad = grad_of(g, in);
    if (grad < 0 || w->slots[grad].kind != QD_SLOT_LOCAL)
        qd_class_fail(w, QD_SYSTEM, "no op writes the gradient of the module's input");
    else
        w->slots[grad] = (qd_slot){.name = "grad_in", .kind = QD_SLOT_GRAD_IN, .dtype = w->config->activation, .cols = w->model->hidden};
}

void qd_pass_gradient(qd_class_writer *w)
{
    gradients g = {.w = w, .forward_count = w->op_count};
    int in = -1, out = -1;
    if (!w->config->training)
        return;
    for (int s = 0; s < w->slot_count; s++) {
        in = w->slots[s].kind == QD_SLOT_IN ? s : in;
        out = w->slots[s].kind == QD_SLOT_OUT ? s : out;
    }
    for (int i = 0; i < w->op_count; i++)
        if (!qd_op_has_gradient(w->ops[i].kind))
            qd_class_fail(w, QD_SYSTEM, "an op of the forward list has no gradient rule");
    g.list = QD_CLASS_NEW(w, contribution, (w->op_count + 1) * QD_OP_SLOTS);
    g.done = qd_class_table(w, w->slot_count);
    if (w->wrong || (in < 0 && is_frozen(w))) /* a frozen embedding */
        return;
    w->phase = QD_PHASE_INPUT;
    if (out >= 0)
        g.list[g.count++] =
            (contribution){out, qd_class_slot(w, "grad_out", QD_SLOT_GRAD_OUT, w->config->activation, 0, w->model->hidden)};
    for (int i = g.forward_count - 1; i >= 0; i--)
        if (!absorbs(w->ops[i].kind))
            derive(&g, i, -1);
        else if (w->ops[i].kind == QD_OP_PERMUTE) /* complete before the gradient of the router, which may need it */
            grad_of(&g, w->ops[i].slot[QD_PERMUTE_Y]);
    if (in >= 0)
        leave(&g, in);
}
