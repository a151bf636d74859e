/* Pass 2: derives the backward pass from the forward list.
 *
 * One table gives the gradient ops of each op. The forward list is in SSA form, so the gradient of
 * a value is the sum of the contributions of the ops that read it. Contributions are added pairwise
 * in the order of the forward pass. Ops whose gradient can absorb a sum (norms, permutations) come
 * after the others, from the last of the forward pass to the first: each absorbs the sum so far.
 * Gradients of inputs are phase I, gradients of weights phase W; an op that computes both counts as
 * I. */
#include "spec/passes/passes.h"

typedef struct contribution {
    int value, grad; /* slots */
    int reader;      /* op of the forward pass */
} contribution;

typedef struct gradients {
    qd_class_writer *w;
    contribution *list;
    int count;
    int forward_count; /* ops of the forward list */
    int *absorbers;    /* per slot: number of ops that read it and whose gradients absorb a sum */
    int *readers;      /* per slot: number of ops that may contribute to its gradient */
    int *done;         /* per slot: its gradient, -1: not summed so far */
    int in_grad;       /* the slot GRAD_IN, -1: the module has none */
} gradients;

static int grad_of(gradients *g, int value);

static void give(gradients *g, int value, int grad, int reader)
{
    g->list[g->count++] = (contribution){value, grad, reader};
}

/* A slot for the gradient of a value. */
static int new_slot(gradients *g, int value)
{
    qd_class_writer *w = g->w;
    return qd_class_local(w, qd_class_name(w, "d_", value, ""), 0, w->slots[value].cols);
}

/* The slot that receives an op's contribution to the gradient of a value. */
static int part_of(gradients *g, int value, bool last)
{
    if (g->w->slots[value].kind == QD_SLOT_IN && (last || g->readers[value] == 1))
        return g->in_grad;
    return new_slot(g, value);
}

/* The rules: op `i` of the forward list, given the gradient dy of its result. */

static const qd_op *forward(const gradients *g, int i)
{
    return &g->w->ops[i];
}

static void linear(gradients *g, int i)
{
    qd_class_writer *w = g->w;
    int x = forward(g, i)->slot[QD_LINEAR_X], weight = forward(g, i)->slot[QD_LINEAR_WEIGHT], bias = forward(g, i)->slot[QD_LINEAR_BIAS];
    int dy = grad_of(g, forward(g, i)->slot[QD_LINEAR_Y]);
    if (dy < 0)
        return;
    int dx = part_of(g, x, false);
    QD_CLASS_OP(w, LINEAR_DX, (DY, dy), (WEIGHT, weight), (DX, dx));
    w->phase = QD_PHASE_WEIGHT;
    QD_CLASS_OP(w, LINEAR_DW, (DY, dy), (X, x), (WEIGHT_GRAD, qd_class_gradient(weight)));
    if (bias >= 0)
        QD_CLASS_OP(w, BIAS_GRAD, (DY, dy), (GRAD, qd_class_gradient(bias)));
    w->phase = QD_PHASE_INPUT;
    give(g, x, dx, i);
}

/* Absorbs `sum`, what other readers contribute to the gradient of x. last: nothing is added to the
 * result. */
static int norm_taking(gradients *g, int i, int sum, bool last)
{
    const qd_op *op = forward(g, i);
    int x = op->slot[QD_NORM_X], gamma = op->slot[QD_NORM_GAMMA], beta = op->slot[QD_NORM_BETA], mean = op->slot[QD_NORM_MEAN],
        rstd = op->slot[QD_NORM_RSTD];
    int dy = grad_of(g, op->slot[QD_NORM_Y]), dx = part_of(g, x, last);
    QD_CLASS_OP(g->w, NORM_GRAD, (DY, dy), (X, x), (GAMMA, gamma), (ADD, sum), (MEAN, mean), (RSTD, rstd), (DX, dx),
                (GAMMA_GRAD, qd_class_gradient(gamma)), (BETA_GRAD, qd_class_gradient(beta)));
    return dx;
}

static int permute_taking(gradients *g, int i, int sum, bool last)
{
    const qd_op *op = forward(g, i);
    int place = op->slot[QD_PERMUTE_PLACE], dy = grad_of(g, op->slot[QD_PERMUTE_Y]), dx = part_of(g, op->slot[QD_PERMUTE_X], last);
    QD_CLASS_OP(g->w, COMBINE, (ROWS, dy), (PLACE, place), (ADD, sum), (Y, dx));
    return dx;
}

QD_SAME_PLACE(X, NORM, PERMUTE);

/* Deferred until the gradient of x is requested, after the contributions of other readers. */
static void absorbing(gradients *g, int i)
{
    g->absorbers[forward(g, i)->slot[QD_NORM_X]]++;
}

/* Emits the gradients of the absorbing ops that read a value; each absorbs the sum so far. */
static int absorb(gradients *g, int value, int sum)
{
    int left = g->absorbers[value];
    for (int i = g->forward_count - 1; i >= 0 && left > 0; i--) {
        qd_op_kind kind = forward(g, i)->kind;
        if (forward(g, i)->slot[QD_NORM_X] == value && (kind == QD_OP_NORM || kind == QD_OP_PERMUTE))
            sum = (kind == QD_OP_NORM ? norm_taking : permute_taking)(g, i, sum, --left == 0);
    }
    return sum;
}

static void head_norm(gradients *g, int i)
{
    const qd_op *op = forward(g, i);
    int x = op->slot[QD_HEAD_NORM_X], q = op->slot[QD_HEAD_NORM_Q_GAMMA], k = op->slot[QD_HEAD_NORM_K_GAMMA],
        rstd = op->slot[QD_HEAD_NORM_RSTD], dy = grad_of(g, op->slot[QD_HEAD_NORM_Y]), dx = part_of(g, x, false);
    QD_CLASS_OP(g->w, HEAD_NORM_GRAD, (DY, dy), (X, x), (Q_GAMMA, q), (K_GAMMA, k), (RSTD, rstd), (Q_GAMMA_GRAD, qd_class_gradient(q)),
                (K_GAMMA_GRAD, qd_class_gradient(k)), (DX, dx));
    give(g, x, dx, i);
}

static void qk_norm(gradients *g, int i)
{
    const qd_op *op = forward(g, i);
    int x = op->slot[QD_QK_NORM_X], sums = op->slot[QD_QK_NORM_SUMS], q = op->slot[QD_QK_NORM_Q_GAMMA], k = op->slot[QD_QK_NORM_K_GAMMA],
        dy = grad_of(g, op->slot[QD_QK_NORM_Y]), dx = part_of(g, x, false), dots = qd_class_f32(g->w, "qk_dots", 0, 2);
    QD_CLASS_OP(g->w, QK_DOTS, (DY, dy), (X, x), (Q_GAMMA, q), (K_GAMMA, k), (DOTS, dots));
    QD_CLASS_OP(g->w, QK_NORM_GRAD, (DY, dy), (X, x), (SUMS, sums), (DOTS, dots), (Q_GAMMA, q), (K_GAMMA, k),
                (Q_GAMMA_GRAD, qd_class_gradient(q)), (K_GAMMA_GRAD, qd_class_gradient(k)), (DX, dx));
    give(g, x, dx, i);
}

static void rope(gradients *g, int i)
{
    const qd_op *op = forward(g, i);
    int x = op->slot[QD_ROPE_X], table = op->slot[QD_ROPE_TABLE], positions = op->slot[QD_ROPE_INPUT],
        dy = grad_of(g, op->slot[QD_ROPE_Y]), dx = part_of(g, x, false);
    QD_CLASS_OP(g->w, ROPE_INVERSE, (X, dy), (TABLE, table), (INPUT, positions), (Y, dx));
    give(g, x, dx, i);
}

static void attention(gradients *g, int i)
{
    const qd_op *op = forward(g, i);
    int x = op->slot[QD_ATTENTION_QKV], input = op->slot[QD_ATTENTION_INPUT], o = op->slot[QD_ATTENTION_O],
        lse = op->slot[QD_ATTENTION_LSE], dy = grad_of(g, o), dx = part_of(g, x, false);
    QD_CLASS_OP(g->w, ATTENTION_GRAD, (QKV, x), (INPUT, input), (O, o), (LSE, lse), (D_O, dy), (D_QKV, dx),
                (DELTA, qd_class_f32(g->w, "delta", 0, 0)))
        ->window = forward(g, i)->window;
    give(g, x, dx, i);
}

static void activation(gradients *g, int i)
{
    int x = forward(g, i)->slot[QD_ACTIVATION_X], dy = grad_of(g, forward(g, i)->slot[QD_ACTIVATION_Y]), dx = part_of(g, x, false);
    QD_CLASS_OP(g->w, ACTIVATION_GRAD, (X, x), (DY, dy), (DX, dx));
    give(g, x, dx, i);
}

static void clip(gradients *g, int i)
{
    int x = forward(g, i)->slot[QD_CLIP_X], dy = grad_of(g, forward(g, i)->slot[QD_CLIP_Y]), dx = part_of(g, x, false);
    QD_CLASS_OP(g->w, CLIP_GRAD, (X, x), (DY, dy), (DX, dx));
    give(g, x, dx, i);
}

static void scale(gradients *g, int i)
{
    int x = forward(g, i)->slot[QD_SCALE_X], dy = grad_of(g, forward(g, i)->slot[QD_SCALE_Y]), dx = part_of(g, x, false);
    double factor = forward(g, i)->scale;
    QD_CLASS_OP(g->w, SCALE, (X, dy), (Y, dx))->scale = factor;
    give(g, x, dx, i);
}

/* The same op with the same mask. */
static void dropout(gradients *g, int i)
{
    int x = forward(g, i)->slot[QD_DROPOUT_X], site = forward(g, i)->site, dy = grad_of(g, forward(g, i)->slot[QD_DROPOUT_Y]),
        dx = part_of(g, x, false);
    QD_CLASS_OP(g->w, DROPOUT, (X, dy), (Y, dx))->site = site;
    give(g, x, dx, i);
}

static void add(gradients *g, int i)
{
    int a = forward(g, i)->slot[QD_ADD_A], b = forward(g, i)->slot[QD_ADD_B], dy = grad_of(g, forward(g, i)->slot[QD_ADD_Y]);
    give(g, a, dy, i);
    give(g, b, dy, i);
}

static void embed(gradients *g, int i)
{
    const qd_op *op = forward(g, i);
    int input = op->slot[QD_EMBED_INPUT], tokens = op->slot[QD_EMBED_TOKEN_TABLE], positions = op->slot[QD_EMBED_POSITION_TABLE],
        dy = grad_of(g, op->slot[QD_EMBED_Y]);
    g->w->phase = QD_PHASE_WEIGHT;
    QD_CLASS_OP(g->w, EMBED_GRAD, (INPUT, input), (DY, dy), (TOKEN_GRAD, qd_class_gradient(tokens)),
                (POSITION_GRAD, qd_class_gradient(positions)));
    g->w->phase = QD_PHASE_INPUT;
}

/* The gradients were computed along with the loss. */
static void loss(gradients *g, int i)
{
    give(g, forward(g, i)->slot[QD_HEAD_LOSS_X], forward(g, i)->slot[QD_HEAD_LOSS_DX], i);
}

static void route(gradients *g, int i)
{
    qd_class_writer *w = g->w;
    const qd_op *op = forward(g, i);
    int logits = op->slot[QD_ROUTE_LOGITS], bias = op->slot[QD_ROUTE_BIAS], choice = op->slot[QD_ROUTE_CHOICE],
        weight = op->slot[QD_ROUTE_WEIGHT], load = op->slot[QD_ROUTE_LOAD];
    int d_weight = grad_of(g, weight);
    int d_logits = qd_class_local(w, "d_router_logits", 0, w->model->moe.experts); /* same type as the operands of the GEMM that reads it */
    QD_CLASS_OP(w, ROUTE_GRAD, (LOGITS, logits), (CHOICE, choice), (WEIGHT, weight), (D_WEIGHT, d_weight), (LOAD, load),
                (D_LOGITS, d_logits));
    if (w->model->moe.bias && w->model->moe.bias_rate > 0.0) {
        w->phase = QD_PHASE_WEIGHT;
        QD_CLASS_OP(w, ROUTE_LOAD, (CHOICE, choice), (BIAS_GRAD, qd_class_gradient(bias)));
        w->phase = QD_PHASE_INPUT;
    }
    give(g, logits, d_logits, i);
}

static void experts(gradients *g, int i)
{
    qd_class_writer *w = g->w;
    int x = forward(g, i)->slot[QD_EXPERTS_X], weight = forward(g, i)->slot[QD_EXPERTS_WEIGHT],
        count = forward(g, i)->slot[QD_EXPERTS_COUNT];
    int dy = grad_of(g, forward(g, i)->slot[QD_EXPERTS_Y]), dx = part_of(g, x, false);
    QD_CLASS_OP(w, EXPERTS_DX, (DY, dy), (WEIGHT, weight), (COUNT, count), (DX, dx));
    w->phase = QD_PHASE_WEIGHT;
    QD_CLASS_OP(w, EXPERTS_DW, (DY, dy), (X, x), (COUNT, count), (WEIGHT_GRAD, qd_class_gradient(weight)));
    w->phase = QD_PHASE_INPUT;
    give(g, x, dx, i);
}

static void expert_activation(gradients *g, int i)
{
    int x = forward(g, i)->slot[QD_EXPERT_ACTIVATION_X], count = forward(g, i)->slot[QD_EXPERT_ACTIVATION_COUNT],
        dy = grad_of(g, forward(g, i)->slot[QD_EXPERT_ACTIVATION_Y]), dx = part_of(g, x, false);
    QD_CLASS_OP(g->w, EXPERT_ACTIVATION_GRAD, (X, x), (DY, dy), (COUNT, count), (DX, dx));
    give(g, x, dx, i);
}

static void combine(gradients *g, int i)
{
    qd_class_writer *w = g->w;
    const qd_op *op = forward(g, i), *plan = forward(g, qd_class_definition(w, op->slot[QD_COMBINE_PLACE], i));
    int rows = op->slot[QD_COMBINE_ROWS], place = op->slot[QD_COMBINE_PLACE], weight = op->slot[QD_COMBINE_WEIGHT],
        from = plan->slot[QD_ROUTE_PLAN_FROM], count = plan->slot[QD_ROUTE_PLAN_COUNT];
    int dy = grad_of(g, op->slot[QD_COMBINE_Y]), d_rows = part_of(g, rows, false);
    int d_weight = qd_class_f32(w, "d_expert_weight", 0, w->model->moe.per_token);
    QD_CLASS_OP(w, COMBINE_GRAD, (DY, dy), (ROWS, rows), (FROM, from), (PLACE, place), (COUNT, count), (WEIGHT, weight), (D_ROWS, d_rows),
                (D_WEIGHT, d_weight));
    give(g, rows, d_rows, i);
    give(g, weight, d_weight, i);
}

/* Routing choices are integers and have no gradient; that of the squares of a norm is part of the
 * norm's. */
static void none(gradients *g, int i)
{
    (void)g;
    (void)i;
}

/* Ops that can occur in a forward list; later passes add the others. */
static void (*const rules[QD_OP_KIND_COUNT])(gradients *g, int i) = {
    [QD_OP_EMBED] = embed,           [QD_OP_NORM] = absorbing,  [QD_OP_LINEAR] = linear,
    [QD_OP_HEAD_NORM] = head_norm,   [QD_OP_ROPE] = rope,       [QD_OP_ATTENTION] = attention,
    [QD_OP_ACTIVATION] = activation, [QD_OP_DROPOUT] = dropout, [QD_OP_ADD] = add,
    [QD_OP_HEAD_LOSS] = loss,        [QD_OP_ROUTE] = route,     [QD_OP_ROUTE_PLAN] = none,
    [QD_OP_PERMUTE] = absorbing,     [QD_OP_EXPERTS] = experts, [QD_OP_EXPERT_ACTIVATION] = expert_activation,
    [QD_OP_COMBINE] = combine,       [QD_OP_QK_SQUARES] = none, [QD_OP_QK_NORM] = qk_norm,
    [QD_OP_CLIP] = clip,             [QD_OP_SCALE] = scale,
};

bool qd_op_has_gradient(qd_op_kind kind)
{
    return rules[kind] != NULL;
}

/* Whether contribution i is added after contribution k (-1: the start). */
static bool comes_after(const gradients *g, int i, int k)
{
    return k < 0 || g->list[i].reader > g->list[k].reader || (g->list[i].reader == g->list[k].reader && i > k);
}

/* The gradient of a value, once all ops that read it have contributed; -1: the loss does not depend
 * on it. */
static int grad_of(gradients *g, int value)
{
    qd_class_writer *w = g->w;
    int sum = -1, last = -1, left = 0;
    if (g->done[value] >= 0)
        return g->done[value];
    for (int i = 0; i < g->count; i++)
        left += g->list[i].value == value;
    bool absorbs = g->absorbers[value] > 0;
    for (; left > 0; left--) { /* in the order of the forward pass */
        int next = -1;
        for (int i = 0; i < g->count; i++)
            if (g->list[i].value == value && comes_after(g, i, last) && (next < 0 || comes_after(g, next, i)))
                next = i;
        last = next;
        if (sum < 0) {
            sum = g->list[next].grad;
            continue;
        }
        int both = left == 1 && !absorbs ? part_of(g, value, true) : new_slot(g, value);
        QD_CLASS_OP(w, ADD, (A, sum), (B, g->list[next].grad), (Y, both));
        sum = both;
    }
    sum = absorb(g, value, sum);
    if (sum >= 0 && w->slots[value].kind == QD_SLOT_IN && sum != g->in_grad)
        w->wrong = "no op writes the gradient of the module's input";
    return g->done[value] = sum;
}

void qd_pass_gradient(qd_class_writer *w)
{
    int forward_count = w->op_count, in = -1, out = -1;
    gradients g = {.w = w, .forward_count = forward_count, .in_grad = -1};
    size_t slots = (size_t)w->slot_count;
    g.list = QD_ARENA_NEW(w->arena, contribution, (size_t)forward_count * 2 + 2);
    g.absorbers = QD_ARENA_NEW(w->arena, int, slots);
    g.readers = QD_ARENA_NEW(w->arena, int, slots);
    g.done = QD_ARENA_NEW(w->arena, int, slots);
    if (!g.list || !g.absorbers || !g.readers || !g.done || w->no_memory) {
        w->no_memory = true;
        return;
    }
    for (int s = 0; s < w->slot_count; s++) {
        g.done[s] = -1;
        in = w->slots[s].kind == QD_SLOT_IN ? s : in;
        out = w->slots[s].kind == QD_SLOT_OUT ? s : out;
    }
    for (int i = 0; i < forward_count; i++) {
        if (!rules[w->ops[i].kind]) {
            w->wrong = "an op of the forward list has no gradient rule";
            return;
        }
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (qd_op_reads(&w->ops[i], j))
                g.readers[w->ops[i].slot[j]]++;
    }
    w->phase = QD_PHASE_INPUT;
    if (out >= 0)
        give(&g, out, qd_class_slot(w, "grad_out", QD_SLOT_GRAD_OUT, w->config->activation, 0, w->model->hidden), forward_count);
    if (in >= 0)
        g.in_grad = qd_class_slot(w, "grad_in", QD_SLOT_GRAD_IN, w->config->activation, 0, w->model->hidden);
    for (int i = forward_count - 1; i >= 0 && !w->no_memory && !w->wrong; i--)
        rules[w->ops[i].kind](&g, i);
    if (in >= 0 && !w->no_memory && !w->wrong)
        grad_of(&g, in);
}
