/* Pass 3: local shapes, and the collectives of tensor and sequence parallelism.
 *
 * The placements of parameters decide; every op has one rule. A GEMM whose weight is sharded by
 * outputs needs all rows and computes this rank's columns; one whose weight is sharded by inputs
 * needs this rank's columns and computes partial sums. Gradients follow by duality: what was whole
 * becomes a partial sum, what was a partial sum is needed whole. A value that is needed in a
 * different layout is gathered before its reader; a partial sum is reduced after its writer (under
 * sp reduce-scattered to the rows of the port). Rows that the forward pass gathered are not kept:
 * the backward pass gathers them again. Context and expert parallelism have rules that emit several
 * ops (place_attention.c, place_experts.c). */
#include "spec/passes/passes.h"

/* What an op needs of an operand, or gives as a result. */
typedef enum need {
    AS_IS,              /* a weight, a table, an input of the step */
    PORT, ALL, COLUMNS, /* these layouts */
    PARTIAL,            /* a partial sum, which is summed over tp right after the op */
    ONE_RANK,           /* of a partial sum, only one rank may add it: a bias, a position */
    IN, OUT,            /* the input and the result of a GEMM: how its weight is sharded decides */
    D_IN, D_OUT,        /* their gradients */
    WIDE, D_NARROW,     /* of adapters: as OUT and D_IN, with the width of what is added to, or their own */
    ALIKE,              /* the layout and the width of the first operand; ACTIVATED: half of it if the activation is gated */
    ACTIVATED,
    ALIKE_ROWS,         /* the layout of the first operand, with its own width */
    TOTAL,              /* the same, and summed over the columns of all ranks of tp */
    QUERIES, QKV,       /* COLUMNS, with the width of this rank's queries; of its queries, keys and values */
    GROUPED,            /* rows sorted by expert */
    RESULT, EXPANDED,   /* of what its heads attend to; of what is expanded from latents */
    OF_BIAS,            /* the rows that give a bias the gradient that its placement rule speaks of */
    OVER_ROWS,          /* the gradient of a parameter that is not sharded: under sp a partial sum, of the rows of a port */
    OVER_HEADS,         /* the same, always a partial sum, of this rank's heads */
} need;

typedef struct placement {
    void (*rule)(qd_placing *p, const qd_op *op); /* emits the op, or others, with these operands; NULL: no op of a placed list */
    qd_operands needs;
} placement;
#define NEEDS(kind, ...) {qd_place_keep, QD_OPERAND_TABLE(kind, __VA_ARGS__)}
#define RULE(rule, kind, ...) {rule, QD_OPERAND_TABLE(kind, __VA_ARGS__)}

static const placement placements[QD_OP_KIND_COUNT] = {
    [QD_OP_EMBED] = NEEDS(EMBED, (POSITION_TABLE, ONE_RANK), (Y, PARTIAL)), /* tokens of another rank's shard yield 0 */
    [QD_OP_EMBED_GRAD] = NEEDS(EMBED_GRAD, (DY, ALL)),
    [QD_OP_NORM] = NEEDS(NORM, (X, PORT), (Y, PORT), (MEAN, PORT), (RSTD, PORT)),
    [QD_OP_NORM_GRAD] = NEEDS(NORM_GRAD, (DY, PORT), (X, PORT), (ADD, PORT), (MEAN, PORT), (RSTD, PORT), (DX, PORT),
                              (GAMMA_GRAD, OVER_ROWS), (BETA_GRAD, OVER_ROWS)),
    [QD_OP_LINEAR] = NEEDS(LINEAR, (X, IN), (BIAS, ONE_RANK), (Y, OUT)), /* all ranks compute the gradient of the bias */
    [QD_OP_LINEAR_DX] = NEEDS(LINEAR_DX, (DY, D_OUT), (DX, D_IN)),
    [QD_OP_LINEAR_DW] = NEEDS(LINEAR_DW, (DY, D_OUT), (X, IN), (WEIGHT_GRAD, OVER_ROWS)),
    [QD_OP_BIAS_GRAD] = NEEDS(BIAS_GRAD, (DY, OF_BIAS)),
    [QD_OP_HEAD_NORM] = NEEDS(HEAD_NORM, (X, ALIKE), (Y, ALIKE), (RSTD, ALIKE_ROWS)),
    [QD_OP_HEAD_NORM_GRAD] = NEEDS(HEAD_NORM_GRAD, (DY, ALIKE), (X, ALIKE), (RSTD, ALIKE), (Q_GAMMA_GRAD, OVER_HEADS),
                                   (K_GAMMA_GRAD, OVER_HEADS), (DX, ALIKE)),
    [QD_OP_QK_SQUARES] = NEEDS(QK_SQUARES, (X, ALIKE), (SUMS, TOTAL)),
    [QD_OP_QK_NORM] = NEEDS(QK_NORM, (X, ALIKE), (SUMS, ALIKE), (Y, ALIKE)),
    [QD_OP_QK_DOTS] = NEEDS(QK_DOTS, (DY, ALIKE), (X, ALIKE), (DOTS, TOTAL)),
    [QD_OP_QK_NORM_GRAD] = NEEDS(QK_NORM_GRAD, (DY, ALIKE), (X, ALIKE), (SUMS, ALIKE), (DOTS, ALIKE), (DX, ALIKE)),
    [QD_OP_CLIP] = NEEDS(CLIP, (X, ALIKE), (Y, ALIKE)),
    [QD_OP_CLIP_GRAD] = NEEDS(CLIP_GRAD, (X, ALIKE), (DY, ALIKE), (DX, ALIKE)),
    [QD_OP_ROPE] = NEEDS(ROPE, (X, ALIKE), (Y, ALIKE)),
    [QD_OP_ROPE_INVERSE] = NEEDS(ROPE_INVERSE, (X, ALIKE), (Y, ALIKE)),
    [QD_OP_ATTENTION] = RULE(qd_place_attention, ATTENTION, (QKV, COLUMNS), (O, RESULT)),
    [QD_OP_ATTENTION_GRAD] = RULE(qd_place_attention_grad, ATTENTION_GRAD, (D_O, COLUMNS), (D_QKV, QKV)),
    [QD_OP_ATTENTION_CACHED] = RULE(qd_place_cached, ATTENTION_CACHED, (QKV, COLUMNS), (O, RESULT)),
    [QD_OP_ATTENTION_SINK] = RULE(qd_place_sink, ATTENTION_SINK, (O, AS_IS)),
    [QD_OP_ATTENTION_SINK_GRAD] = RULE(qd_place_sink_grad, ATTENTION_SINK_GRAD, (LSE, AS_IS)),
    /* The rotary part of the key is shared by the heads of all ranks. */
    [QD_OP_LATENT_QKV] = NEEDS(LATENT_QKV, (Q, COLUMNS), (KV, COLUMNS), (K_ROPE, ALL), (QKV, QKV)),
    [QD_OP_LATENT_QKV_GRAD] = NEEDS(LATENT_QKV_GRAD, (D_QKV, COLUMNS), (DQ, QUERIES), (DKV, EXPANDED), (DK_ROPE, PARTIAL)),
    [QD_OP_ATTENTION_LATENT] = NEEDS(ATTENTION_LATENT, (Q, COLUMNS), (LATENT, ALL), (K_ROPE, ALL), (KEY, ALL), (ABSORBED, COLUMNS),
                                     (MIXED, COLUMNS), (O, RESULT)),
    [QD_OP_ACTIVATION] = NEEDS(ACTIVATION, (X, ALIKE), (Y, ACTIVATED)),
    [QD_OP_ACTIVATION_GRAD] = NEEDS(ACTIVATION_GRAD, (X, ALIKE), (DY, ALIKE), (DX, ALIKE)),
    [QD_OP_ADAPT] = NEEDS(ADAPT, (X, IN), (ADD, WIDE), (COUNT, ALIKE), (Y, WIDE)),
    [QD_OP_ADAPT_DX] = NEEDS(ADAPT_DX, (DY, D_OUT), (COUNT, ALIKE), (DX, D_NARROW)),
    [QD_OP_ADAPT_DW] = NEEDS(ADAPT_DW, (DY, D_OUT), (X, IN), (COUNT, ALIKE), (WEIGHT_GRAD, OVER_ROWS)),
    [QD_OP_ADD] = NEEDS(ADD, (A, ALIKE), (B, ALIKE), (Y, ALIKE)),
    [QD_OP_SCALE] = NEEDS(SCALE, (X, ALIKE), (Y, ALIKE)),
    [QD_OP_GATE] = NEEDS(GATE, (X, PORT), (GATE, PORT), (Y, PORT)),
    [QD_OP_GATE_GRAD] = NEEDS(GATE_GRAD, (DY, PORT), (X, PORT), (GATE, PORT), (DX, PORT), (D_GATE, PORT)),
    [QD_OP_DROPOUT] = NEEDS(DROPOUT, (X, ALIKE), (Y, ALIKE)),
    [QD_OP_HEAD_LOSS] = RULE(qd_place_loss, HEAD_LOSS, (X, ALL), (DX, PARTIAL)),
    [QD_OP_HEAD_LOGITS] = NEEDS(HEAD_LOGITS, (X, ALL)),
    [QD_OP_ROUTE] = RULE(qd_place_route, ROUTE, (LOGITS, PORT), (CHOICE, PORT), (WEIGHT, PORT)),
    [QD_OP_ROUTE_PLAN] = RULE(qd_place_route, ROUTE_PLAN, (CHOICE, PORT), (WEIGHT, PORT), (PLACE, PORT)),
    [QD_OP_ROUTE_GRAD] = NEEDS(ROUTE_GRAD, (LOGITS, PORT), (CHOICE, PORT), (WEIGHT, PORT), (D_WEIGHT, PORT), (D_LOGITS, PORT)),
    [QD_OP_ROUTE_LOAD] = NEEDS(ROUTE_LOAD, (CHOICE, PORT)),
    /* Rows of experts are in no layout of tp; place_experts.c says where counts of rows are. */
    [QD_OP_PERMUTE] = RULE(qd_place_send, PERMUTE, (X, PORT), (Y, GROUPED)),
    [QD_OP_EXPERTS] = RULE(qd_place_grouped, EXPERTS, (X, IN), (COUNT, ALIKE), (Y, OUT)),
    [QD_OP_EXPERTS_DX] = NEEDS(EXPERTS_DX, (DY, D_OUT), (COUNT, ALIKE), (DX, D_IN)),
    [QD_OP_EXPERTS_DW] = NEEDS(EXPERTS_DW, (DY, D_OUT), (X, IN), (COUNT, ALIKE)),
    [QD_OP_EXPERTS_BIAS] = RULE(qd_place_expert_bias, EXPERTS_BIAS, (X, ALIKE), (COUNT, ALIKE), (Y, ALIKE)),
    [QD_OP_EXPERTS_BIAS_GRAD] = RULE(qd_place_expert_bias, EXPERTS_BIAS_GRAD, (DY, ALIKE), (COUNT, ALIKE)),
    [QD_OP_EXPERT_ACTIVATION] = NEEDS(EXPERT_ACTIVATION, (X, ALIKE), (COUNT, ALIKE), (Y, ACTIVATED)),
    [QD_OP_EXPERT_ACTIVATION_GRAD] = NEEDS(EXPERT_ACTIVATION_GRAD, (X, ALIKE), (DY, ALIKE), (COUNT, ALIKE), (DX, ALIKE)),
    [QD_OP_COMBINE] = RULE(qd_place_collect, COMBINE, (ADD, PORT), (Y, PORT)),
    [QD_OP_COMBINE_GRAD] = RULE(qd_place_collect_grad, COMBINE_GRAD, (DY, PORT), (D_ROWS, GROUPED), (D_WEIGHT, PORT)),
};

bool qd_op_has_placement(qd_op_kind kind)
{
    return placements[kind].rule != NULL;
}

/* The slot with the value of `slot` in a layout; inserts a gather if needed. */
static int want(qd_placing *p, int slot, qd_layout wanted)
{
    qd_class_writer *w = p->w;
    if (slot < 0)
        return slot;
    slot = slot < p->slots ? p->slot[slot].now : slot;
    qd_layout have = w->slots[slot].layout;
    bool sp = w->ledger->mesh.sp,
         whole = (have == QD_LAYOUT_PORT || have == QD_LAYOUT_ALL) && (wanted == QD_LAYOUT_PORT || wanted == QD_LAYOUT_ALL);
    if (have == wanted || have == QD_LAYOUT_NONE || w->tensor.size == 1 || (whole && !sp))
        return slot;
    if (have != QD_LAYOUT_PORT || wanted != QD_LAYOUT_ALL) {
        QD_CLASS_FAIL(w, QD_SYSTEM, "%s needs '%s' in a layout that it cannot be converted to", qd_op_name(p->old.ops[p->at].kind),
                      w->slots[slot].name);
        return slot;
    }
    int *gathered = slot < p->slots ? &p->slot[slot].gathered[w->phase != QD_PHASE_FORWARD] : NULL;
    if (gathered && *gathered >= 0)
        return *gathered;
    const char *name = qd_class_name(w, "", slot, " of all ranks");
    int all = qd_class_slot(w, name, QD_SLOT_LOCAL, w->config->activation, w->rows, w->slots[slot].cols);
    w->slots[all].layout = QD_LAYOUT_ALL;
    qd_class_exchange(w, QD_OP_ALL_GATHER, w->tensor, slot, all)->exchange.async = w->config->overlap;
    if (gathered)
        *gathered = all;
    return all;
}

/* Sets layout and shape of a result; cols 0: as declared. */
static void give(qd_placing *p, int slot, qd_layout layout, int64_t cols)
{
    qd_class_writer *w = p->w;
    if (slot < 0)
        return;
    qd_slot *s = &w->slots[slot];
    s->layout = layout;
    s->rows = layout == QD_LAYOUT_PORT ? w->port_rows : layout == QD_LAYOUT_ROUTED ? w->routed_rows : w->rows;
    s->cols = cols > 0 ? cols : s->cols;
}

/* Sums a partial result over tp. */
static void sum(qd_placing *p, int slot)
{
    qd_class_writer *w = p->w;
    bool sp = w->ledger->mesh.sp;
    int own = slot;
    if (sp) { /* the scattered rows are what leaves the module */
        own = qd_class_like(w, qd_class_name(w, "", slot, " of the port"), slot);
        w->slots[own].rows = w->port_rows;
        w->slots[slot].kind = QD_SLOT_LOCAL;
    }
    w->slots[own].layout = QD_LAYOUT_PORT;
    p->slot[slot].now = own;
    qd_op *op = qd_class_exchange(w, sp ? QD_OP_REDUCE_SCATTER : QD_OP_ALL_REDUCE, w->tensor, slot, sp ? own : -1);
    op->exchange.async = w->config->overlap;
}

/* Layouts of x and y in y = x·Wᵀ + b for W not sharded, sharded by outputs, sharded by inputs, of
 * experts. */
static const qd_layout linear_x[] = {QD_LAYOUT_PORT, QD_LAYOUT_ALL, QD_LAYOUT_COLUMNS, QD_LAYOUT_ROUTED};
static const qd_layout linear_y[] = {QD_LAYOUT_PORT, QD_LAYOUT_COLUMNS, QD_LAYOUT_PARTIAL, QD_LAYOUT_ROUTED};
enum { OF_EXPERTS = 2 };

/* The layout of a gradient: required for a result with this layout, produced for an operand with
 * this layout. */
static qd_layout dual(qd_layout layout)
{
    return layout == QD_LAYOUT_PARTIAL ? QD_LAYOUT_ALL : layout == QD_LAYOUT_ALL ? QD_LAYOUT_PARTIAL : layout;
}

/* How the parameters of a weight are sharded over tp: along dimension 0 (outputs), 1 (inputs), or
 * not at all (-1); OF_EXPERTS: by expert instead. */
static int cut_of(const qd_class_writer *w, int weight)
{
    if (qd_class_of_experts(w, weight))
        return OF_EXPERTS;
    const qd_place *place = &qd_class_param(w, weight)->value[QD_AXIS_TP];
    return w->tensor.size > 1 && place->kind == QD_SHARD ? place->dim : -1;
}

static qd_layout bias_rows(const qd_param *bias)
{
    return bias->value[QD_AXIS_TP].kind == QD_SHARD        ? QD_LAYOUT_COLUMNS
           : bias->gradient[QD_AXIS_TP].kind == QD_PARTIAL ? QD_LAYOUT_PORT
                                                           : QD_LAYOUT_ALL;
}

enum { QD_CLASS_NUMBERS };
static const struct {
    qd_layout layout;
    int width; /* a number; NONE: as declared */
} layouts[OVER_HEADS + 1] = {
    [PORT] = {QD_LAYOUT_PORT, NONE},
    [ALL] = {QD_LAYOUT_ALL, NONE},
    [PARTIAL] = {QD_LAYOUT_PARTIAL, NONE},
    [COLUMNS] = {QD_LAYOUT_COLUMNS, NONE},
    [QUERIES] = {QD_LAYOUT_COLUMNS, Q},
    [QKV] = {QD_LAYOUT_COLUMNS, QKV_COLS},
    [GROUPED] = {QD_LAYOUT_ROUTED, NONE},
    [RESULT] = {QD_LAYOUT_COLUMNS, O_COLS},
    [EXPANDED] = {QD_LAYOUT_COLUMNS, EXPANDED_COLS},
};

static qd_layout layout_of(const qd_placing *p, const qd_op *op, need n)
{
    const qd_class_writer *w = p->w;
    int weight = qd_op_weight(w, op);
    switch (n) {
    case IN: return linear_x[cut_of(w, weight) + 1];
    case WIDE:
    case OUT: return linear_y[cut_of(w, weight) + 1];
    case D_NARROW:
    case D_IN: return dual(linear_x[cut_of(w, weight) + 1]);
    case D_OUT: return dual(linear_y[cut_of(w, weight) + 1]);
    case OF_BIAS: return bias_rows(qd_class_param(w, weight));
    default: return layouts[n].layout != QD_LAYOUT_NONE ? layouts[n].layout : w->slots[p->slot[qd_op_first(op)].now].layout;
    }
}

/* The width of a result; 0: as declared. */
static int64_t width_of(const qd_placing *p, const qd_op *op, need n)
{
    const qd_class_writer *w = p->w;
    int64_t like = w->slots[p->slot[qd_op_first(op)].now].cols;
    switch (n) {
    case OUT: return qd_class_outputs(w, qd_op_weight(w, op));
    case D_IN: return w->slots[qd_op_weight(w, op)].cols;
    case WIDE: return w->slots[p->slot[op->slot[QD_ADAPT_ADD]].now].cols;
    case ALIKE: return like;
    case ACTIVATED: return like / (qd_activation_is_gated(w->model->activation) ? 2 : 1);
    default: return w->number[layouts[n].width];
    }
}

/* The gradient of a parameter that every rank has whole: of all rows, or a sum over some
 * (`partial`), which is summed over tp if the placement rule of the parameter says so. */
static void expect_gradient(qd_placing *p, int grad, bool partial)
{
    qd_class_writer *w = p->w;
    const qd_param *param = qd_class_param(w, grad);
    if (w->tensor.size > 1 && cut_of(w, grad) < 0 && (param->gradient[QD_AXIS_TP].kind == QD_PARTIAL) != partial)
        QD_CLASS_FAIL(w, QD_SYSTEM, "%s gives %s as %s, and its placement rule says otherwise (QD_SPLIT_NONE, _NORM, _HEADS)",
                      qd_op_name(p->old.ops[p->at].kind), param->name,
                      partial ? "a gradient to be summed over parallel.tp" : "a whole gradient");
}

void qd_place_keep(qd_placing *p, const qd_op *op)
{
    qd_class_measure(p->w, qd_class_keep(p->w, op));
}

/* Converts the operands of an op to what it needs, gives its results their layouts, emits it and
 * sums its results. */
static void place(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    const placement *rule = &placements[op->kind];
    qd_op placed = *op;
    bool partial = false;
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        need n = rule->needs.slot[j] > 0 ? (need)(rule->needs.slot[j] - 1) : AS_IS;
        if (op->slot[j] < 0 || n == AS_IS || n == ONE_RANK)
            continue;
        if (n == OVER_ROWS || n == OVER_HEADS)
            expect_gradient(p, op->slot[j], n == OVER_HEADS || w->ledger->mesh.sp);
        else if (qd_op_reads(op, j))
            placed.slot[j] = (int16_t)want(p, op->slot[j], layout_of(p, op, n));
        else
            give(p, op->slot[j], layout_of(p, op, n), width_of(p, op, n));
        partial = partial || (qd_op_writes(op, j) && w->slots[op->slot[j]].layout == QD_LAYOUT_PARTIAL);
    }
    for (int j = 0; j < QD_OP_SLOTS && w->tensor_coord > 0; j++)
        if (partial && rule->needs.slot[j] == 1 + ONE_RANK)
            placed.slot[j] = -1;
    rule->rule(p, &placed);
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        int slot = op->slot[j];
        if (slot < 0 || !qd_op_writes(op, j))
            continue;
        if (w->slots[slot].layout == QD_LAYOUT_ROUTED)
            qd_place_rows(p, slot);
        else if (w->tensor.size > 1 && rule->needs.slot[j] == 1 + TOTAL)
            qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, slot, -1);
        else if (w->tensor.size > 1 && w->slots[slot].layout == QD_LAYOUT_PARTIAL)
            sum(p, slot);
    }
}

void qd_pass_place(qd_class_writer *w)
{
    qd_placing p = {.w = w, .slots = w->slot_count};
    p.slot = QD_CLASS_NEW(w, struct qd_placed_slot, w->slot_count);
    for (int s = 0; s < w->slot_count && !w->wrong; s++) {
        p.slot[s] = (struct qd_placed_slot){.now = s, .gathered = {-1, -1}};
        if (w->slots[s].kind == QD_SLOT_IN || w->slots[s].kind == QD_SLOT_GRAD_OUT)
            give(&p, s, QD_LAYOUT_PORT, 0);
    }
    for (int i = 0; i < w->op_count && !w->wrong; i++)
        if (w->ops[i].kind == QD_OP_COMBINE)
            p.slot[w->ops[i].slot[QD_COMBINE_ROWS]].collected = true;
    p.old = qd_class_restart(w);
    for (p.at = 0; p.at < p.old.count && !w->wrong; p.at++) {
        const qd_op *op = &p.old.ops[p.at];
        w->phase = op->phase;
        if (placements[op->kind].rule)
            place(&p, op);
        else
            qd_class_fail(w, QD_SYSTEM, "an op has no placement rule");
    }
}
