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

#include <string.h>

int qd_place_want(qd_placing *p, int slot, qd_layout need)
{
    qd_class_writer *w = p->w;
    if (slot < 0 || w->no_memory || w->wrong)
        return slot;
    slot = slot < p->slots ? p->now[slot] : slot;
    qd_layout have = w->slots[slot].layout;
    bool sp = w->ledger->mesh.sp,
         whole = (have == QD_LAYOUT_PORT || have == QD_LAYOUT_ALL) && (need == QD_LAYOUT_PORT || need == QD_LAYOUT_ALL);
    if (have == need || have == QD_LAYOUT_NONE || w->tensor.size == 1 || (whole && !sp))
        return slot;
    if (have != QD_LAYOUT_PORT || need != QD_LAYOUT_ALL) {
        w->wrong = qd_arena_printf(w->arena, "%s needs '%s' in a layout that it cannot be converted to", qd_op_name(p->old.ops[p->at].kind),
                                   w->slots[slot].name);
        return slot;
    }
    int *gathered = slot < p->slots ? &p->gathered[w->phase != QD_PHASE_FORWARD][slot] : NULL;
    if (gathered && *gathered >= 0)
        return *gathered;
    int all = qd_class_local(w, qd_class_name(w, "", slot, " of all ranks"), w->rows, w->slots[slot].cols);
    w->slots[all].layout = QD_LAYOUT_ALL;
    qd_operands operands = QD_OPERANDS(ALL_GATHER, (X, slot), (Y, all));
    qd_op *gather = qd_class_exchange(w, QD_OP_ALL_GATHER, w->tensor, operands, 0, w->rows, w->slots[slot].cols);
    gather->exchange.async = w->config->overlap;
    if (gathered)
        *gathered = all;
    return all;
}

void qd_place_give(qd_placing *p, int slot, qd_layout layout, int64_t cols)
{
    qd_class_writer *w = p->w;
    if (slot < 0 || w->no_memory)
        return;
    qd_slot *s = &w->slots[slot];
    s->layout = layout;
    if (layout == QD_LAYOUT_NONE)
        return;
    s->rows = layout == QD_LAYOUT_PORT ? w->port_rows : w->rows;
    s->cols = cols > 0 ? cols : s->cols;
}

void qd_place_sum(qd_placing *p, int slot)
{
    qd_class_writer *w = p->w;
    if (slot < 0 || w->tensor.size == 1 || w->no_memory || w->wrong)
        return;
    int64_t cols = w->slots[slot].cols;
    int own = slot;
    if (w->ledger->mesh.sp) { /* the scattered rows are what leaves the module */
        own = qd_class_local(w, qd_class_name(w, "", slot, " of the port"), w->port_rows, cols);
        if (w->no_memory)
            return;
        w->slots[own].kind = w->slots[slot].kind;
        w->slots[slot].kind = QD_SLOT_LOCAL;
    }
    w->slots[own].layout = QD_LAYOUT_PORT;
    p->now[slot] = own;
    qd_op *op;
    if (own == slot)
        op = qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, QD_OPERANDS(ALL_REDUCE, (X, slot)), 0, w->rows, cols);
    else
        op = qd_class_exchange(w, QD_OP_REDUCE_SCATTER, w->tensor, QD_OPERANDS(REDUCE_SCATTER, (X, slot), (Y, own)), 0, w->rows, cols);
    op->exchange.async = w->config->overlap;
}

/* How the parameters of a weight are sharded over tp: along dimension 0 (outputs), 1 (inputs), or
 * not at all (-1). */
static int cut_of(const qd_class_writer *w, int weight)
{
    const qd_place *place = &w->ledger->params[w->module->param_begin + w->slots[weight].param].value[QD_AXIS_TP];
    return w->tensor.size > 1 && place->kind == QD_SHARD ? place->dim : -1;
}

static qd_op *keep(qd_placing *p, const qd_op *op)
{
    qd_op *kept = qd_class_keep(p->w, op);
    qd_class_measure(p->w, kept);
    return kept;
}

/* The gradient of a parameter that every rank has whole: of all rows, or a sum over some
 * (`partial`), which is summed over tp if the placement rule of the parameter says so. */
static void expect_gradient(qd_placing *p, int grad, bool partial)
{
    qd_class_writer *w = p->w;
    if (grad < 0 || w->tensor.size == 1 || w->no_memory || w->wrong)
        return;
    const qd_param *param = &w->ledger->params[w->module->param_begin + w->slots[grad].param];
    if ((param->gradient[QD_AXIS_TP].kind == QD_PARTIAL) != partial)
        w->wrong = qd_arena_printf(w->arena, "%s gives %s as %s, and its placement rule says otherwise (QD_SPLIT_NONE, _NORM, _HEADS)",
                                   qd_op_name(p->old.ops[p->at].kind), param->name,
                                   partial ? "a gradient to be summed over parallel.tp" : "a whole gradient");
}

/* Results that are not per row have their shapes already. */
void qd_place_rowwise(qd_placing *p, const qd_op *op)
{
    qd_op placed = *op;
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        qd_slot_kind kind = op->slot[j] >= 0 ? p->w->slots[op->slot[j]].kind : QD_SLOT_PARAM;
        if (kind == QD_SLOT_GRAD)
            expect_gradient(p, op->slot[j], p->w->ledger->mesh.sp);
        if (kind == QD_SLOT_PARAM || kind == QD_SLOT_GRAD)
            continue;
        if (qd_op_reads(op, j))
            placed.slot[j] = (int16_t)qd_place_want(p, op->slot[j], QD_LAYOUT_PORT);
        else
            qd_place_give(p, op->slot[j], p->w->slots[op->slot[j]].rows == 0 ? QD_LAYOUT_PORT : QD_LAYOUT_NONE, 0);
    }
    keep(p, &placed);
}

/* Layouts of x and y in y = x·Wᵀ + b for W not sharded, sharded by outputs, sharded by inputs. */
static const qd_layout linear_x[] = {QD_LAYOUT_PORT, QD_LAYOUT_ALL, QD_LAYOUT_COLUMNS};
static const qd_layout linear_y[] = {QD_LAYOUT_PORT, QD_LAYOUT_COLUMNS, QD_LAYOUT_PARTIAL};

/* The layout of a gradient: required for a result with this layout, produced for an operand with
 * this layout. */
static qd_layout dual(qd_layout layout)
{
    return layout == QD_LAYOUT_PARTIAL ? QD_LAYOUT_ALL : layout == QD_LAYOUT_ALL ? QD_LAYOUT_PARTIAL : layout;
}

static void linear(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_op placed = *op;
    int cut = cut_of(w, op->slot[QD_LINEAR_WEIGHT]);
    placed.slot[QD_LINEAR_X] = (int16_t)qd_place_want(p, op->slot[QD_LINEAR_X], linear_x[cut + 1]);
    if (linear_y[cut + 1] == QD_LAYOUT_PARTIAL && w->tensor_coord > 0)
        placed.slot[QD_LINEAR_BIAS] = -1; /* one rank adds the bias; all compute its gradient */
    qd_place_give(p, op->slot[QD_LINEAR_Y], linear_y[cut + 1], w->slots[op->slot[QD_LINEAR_WEIGHT]].rows);
    keep(p, &placed);
    if (linear_y[cut + 1] == QD_LAYOUT_PARTIAL)
        qd_place_sum(p, op->slot[QD_LINEAR_Y]);
}

static void linear_dx(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_op placed = *op;
    int cut = cut_of(w, op->slot[QD_LINEAR_DX_WEIGHT]);
    placed.slot[QD_LINEAR_DX_DY] = (int16_t)qd_place_want(p, op->slot[QD_LINEAR_DX_DY], dual(linear_y[cut + 1]));
    qd_place_give(p, op->slot[QD_LINEAR_DX_DX], dual(linear_x[cut + 1]), w->slots[op->slot[QD_LINEAR_DX_WEIGHT]].cols);
    keep(p, &placed);
    if (dual(linear_x[cut + 1]) == QD_LAYOUT_PARTIAL)
        qd_place_sum(p, op->slot[QD_LINEAR_DX_DX]);
}

static void linear_dw(qd_placing *p, const qd_op *op)
{
    qd_op placed = *op;
    int cut = cut_of(p->w, op->slot[QD_LINEAR_DW_WEIGHT_GRAD]);
    placed.slot[QD_LINEAR_DW_DY] = (int16_t)qd_place_want(p, op->slot[QD_LINEAR_DW_DY], dual(linear_y[cut + 1]));
    placed.slot[QD_LINEAR_DW_X] = (int16_t)qd_place_want(p, op->slot[QD_LINEAR_DW_X], linear_x[cut + 1]);
    if (cut < 0)
        expect_gradient(p, op->slot[QD_LINEAR_DW_WEIGHT_GRAD], p->w->ledger->mesh.sp);
    keep(p, &placed);
}

/* Sums the rows that give the bias the gradient that its placement rule speaks of: of this rank's
 * columns, of the rows of a port, or of all rows. */
static void bias_grad(qd_placing *p, const qd_op *op)
{
    const qd_class_writer *w = p->w;
    qd_op placed = *op;
    const qd_param *bias = &w->ledger->params[w->module->param_begin + w->slots[op->slot[QD_BIAS_GRAD_GRAD]].param];
    qd_layout rows = bias->value[QD_AXIS_TP].kind == QD_SHARD         ? QD_LAYOUT_COLUMNS
                     : bias->gradient[QD_AXIS_TP].kind == QD_PARTIAL ? QD_LAYOUT_PORT
                                                                     : QD_LAYOUT_ALL;
    placed.slot[QD_BIAS_GRAD_DY] = (int16_t)qd_place_want(p, op->slot[QD_BIAS_GRAD_DY], rows);
    keep(p, &placed);
}

/* Ops that work in any layout. Results have the layout of the first operand; SwiGLU halves the
 * columns. */
static void alike(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_op placed = *op;
    int first = p->now[qd_op_first(op)];
    if (op->kind == QD_OP_HEAD_NORM_GRAD) { /* of this rank's heads */
        expect_gradient(p, op->slot[QD_HEAD_NORM_GRAD_Q_GAMMA_GRAD], true);
        expect_gradient(p, op->slot[QD_HEAD_NORM_GRAD_K_GAMMA_GRAD], true);
    }
    qd_layout layout = w->slots[first].layout;
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        if (op->slot[j] < 0 || (w->slots[op->slot[j]].kind != QD_SLOT_LOCAL && w->slots[op->slot[j]].layout == QD_LAYOUT_NONE))
            continue;
        bool statistics = (op->kind == QD_OP_HEAD_NORM && j == QD_HEAD_NORM_RSTD) || /* one number per head */
                          op->kind == QD_OP_QK_SQUARES || op->kind == QD_OP_QK_DOTS;  /* two per row */
        bool halved = op->kind == QD_OP_ACTIVATION && qd_activation_is_gated(w->model->activation);
        if (qd_op_reads(op, j))
            placed.slot[j] = (int16_t)qd_place_want(p, op->slot[j], layout);
        else
            qd_place_give(p, op->slot[j], layout, statistics ? 0 : w->slots[first].cols / (halved ? 2 : 1));
    }
    keep(p, &placed);
}

/* Sums over the columns of all ranks of tp. */
static void over_columns(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    int sums = op->slot[op->kind == QD_OP_QK_SQUARES ? QD_QK_SQUARES_SUMS : QD_QK_DOTS_DOTS];
    alike(p, op);
    if (w->tensor.size > 1 && !w->no_memory && !w->wrong)
        qd_class_exchange(w, QD_OP_ALL_REDUCE, w->tensor, QD_OPERANDS(ALL_REDUCE, (X, sums)), 0, w->slots[sums].rows, 2);
}

static void cached(qd_placing *p, const qd_op *op)
{
    qd_class_writer *w = p->w;
    qd_place_give(p, op->slot[QD_ATTENTION_CACHED_O], QD_LAYOUT_COLUMNS, (int64_t)w->heads * w->model->head_dim);
    qd_op *placed = keep(p, op);
    qd_op_sizes(placed, w->rows, (int64_t)w->heads * w->model->head_dim, w->config->context, 0.0);
    placed->heads = w->heads;
    placed->kv_heads = w->kv_heads;
}

static void (*const rules[QD_OP_KIND_COUNT])(qd_placing *p, const qd_op *op) = {
    [QD_OP_EMBED] = qd_place_embed,
    [QD_OP_EMBED_GRAD] = qd_place_embed,
    [QD_OP_NORM] = qd_place_rowwise,
    [QD_OP_NORM_GRAD] = qd_place_rowwise,
    [QD_OP_LINEAR] = linear,
    [QD_OP_LINEAR_DX] = linear_dx,
    [QD_OP_LINEAR_DW] = linear_dw,
    [QD_OP_BIAS_GRAD] = bias_grad,
    [QD_OP_HEAD_NORM] = alike,
    [QD_OP_HEAD_NORM_GRAD] = alike,
    [QD_OP_QK_SQUARES] = over_columns,
    [QD_OP_QK_NORM] = alike,
    [QD_OP_QK_DOTS] = over_columns,
    [QD_OP_QK_NORM_GRAD] = alike,
    [QD_OP_ROPE] = alike,
    [QD_OP_ROPE_INVERSE] = alike,
    [QD_OP_ATTENTION] = qd_place_attention,
    [QD_OP_ATTENTION_GRAD] = qd_place_attention_grad,
    [QD_OP_ATTENTION_CACHED] = cached,
    [QD_OP_ACTIVATION] = alike,
    [QD_OP_ACTIVATION_GRAD] = alike,
    [QD_OP_CLIP] = alike,
    [QD_OP_CLIP_GRAD] = alike,
    [QD_OP_ADD] = qd_place_rowwise,
    [QD_OP_SCALE] = qd_place_rowwise,
    [QD_OP_GATE] = qd_place_rowwise,
    [QD_OP_GATE_GRAD] = qd_place_rowwise,
    [QD_OP_DROPOUT] = qd_place_rowwise,
    [QD_OP_HEAD_LOSS] = qd_place_loss,
    [QD_OP_HEAD_LOGITS] = qd_place_loss,
    [QD_OP_ROUTE] = qd_place_route,
    [QD_OP_ROUTE_PLAN] = qd_place_route,
    [QD_OP_ROUTE_GRAD] = qd_place_route,
    [QD_OP_ROUTE_LOAD] = qd_place_route,
    [QD_OP_PERMUTE] = qd_place_send,
    [QD_OP_EXPERTS] = qd_place_grouped,
    [QD_OP_EXPERTS_DX] = qd_place_grouped,
    [QD_OP_EXPERTS_DW] = qd_place_grouped,
    [QD_OP_EXPERT_ACTIVATION] = qd_place_grouped,
    [QD_OP_EXPERT_ACTIVATION_GRAD] = qd_place_grouped,
    [QD_OP_COMBINE] = qd_place_collect,
    [QD_OP_COMBINE_GRAD] = qd_place_collect_grad,
};

bool qd_op_has_placement(qd_op_kind kind)
{
    return rules[kind] != NULL;
}

void qd_pass_place(qd_class_writer *w)
{
    qd_placing p = {.w = w, .slots = w->slot_count};
    int *table = QD_ARENA_NEW(w->arena, int, (size_t)w->slot_count * 5);
    if (!table) {
        w->no_memory = true;
        return;
    }
    p.now = table;
    p.gathered[0] = table + w->slot_count;
    p.gathered[1] = table + 2 * w->slot_count;
    p.attended[0] = table + 3 * w->slot_count;
    p.attended[1] = table + 4 * w->slot_count;
    memset(p.gathered[0], 0xff, (size_t)w->slot_count * 2 * sizeof *table);
    for (int s = 0; s < w->slot_count; s++) {
        p.now[s] = s;
        if (w->slots[s].kind == QD_SLOT_IN || w->slots[s].kind == QD_SLOT_GRAD_OUT)
            qd_place_give(&p, s, QD_LAYOUT_PORT, 0);
    }
    p.old = qd_class_restart(w);
    for (p.at = 0; p.at < p.old.count && !w->no_memory && !w->wrong; p.at++) {
        const qd_op *op = &p.old.ops[p.at];
        w->phase = op->phase;
        if (rules[op->kind])
            rules[op->kind](&p, op);
        else
            w->wrong = "an op has no placement rule";
    }
}
