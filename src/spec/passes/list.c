/* The op list that the passes read and write: adds slots and ops, and computes sizes, FLOPs and
 * bytes. */
#include "spec/layout/tensor.h"
#include "spec/passes/passes.h"

#include <string.h>

/* A copy of the table with twice the capacity; NULL when out of memory. */
static void *grow(qd_class_writer *w, const void *table, int count, int *capacity, size_t size)
{
    int wanted = *capacity ? 2 * *capacity : 64;
    void *larger = qd_arena_array(w->arena, (size_t)wanted, size);
    if (!larger) {
        w->no_memory = true;
        return NULL;
    }
    if (count > 0)
        memcpy(larger, table, (size_t)count * size);
    *capacity = wanted;
    return larger;
}

bool qd_class_reserve_slot(qd_class_writer *w)
{
    if (w->slot_count == w->slot_capacity && !w->no_memory) {
        void *larger = grow(w, w->slots, w->slot_count, &w->slot_capacity, sizeof *w->slots);
        w->slots = larger ? larger : w->slots;
    }
    return !w->no_memory;
}

bool qd_class_reserve_op(qd_class_writer *w)
{
    if (w->op_count == w->op_capacity && !w->no_memory) {
        void *larger = grow(w, w->ops, w->op_count, &w->op_capacity, sizeof *w->ops);
        w->ops = larger ? larger : w->ops;
    }
    return !w->no_memory;
}

int qd_class_slot(qd_class_writer *w, const char *name, qd_slot_kind kind, qd_dtype dtype, int64_t rows, int64_t cols)
{
    if (!qd_class_reserve_slot(w) || !name) {
        w->no_memory = true;
        return 0;
    }
    w->slots[w->slot_count] = (qd_slot){.name = name, .kind = kind, .dtype = dtype, .rows = rows, .cols = cols};
    return w->slot_count++;
}

int qd_class_local(qd_class_writer *w, const char *name, int64_t rows, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, w->config->activation, rows, cols);
}

int qd_class_f32(qd_class_writer *w, const char *name, int64_t rows, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, QD_F32, rows, cols);
}

int qd_class_i32(qd_class_writer *w, const char *name, int64_t rows, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, QD_I32, rows, cols);
}

int qd_class_input(qd_class_writer *w)
{
    if (w->input < 0)
        w->input = qd_class_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    return w->input;
}

const char *qd_class_name(qd_class_writer *w, const char *before, int slot, const char *behind)
{
    return qd_arena_printf(w->arena, "%s%s%s", before, w->slots[slot].name, behind);
}

int qd_class_weight(qd_class_writer *w, qd_weight weight)
{
    if (weight.count == 0 || w->no_memory)
        return -1;
    if (w->weights[weight.param] >= 0)
        return w->weights[weight.param];
    int64_t out = 0, in = 0;
    for (int i = 0; i < weight.count; i++) { /* of experts, this rank holds those that are not empty */
        qd_atom atom = qd_ledger_atom(w->ledger, w->module->param_begin + weight.param + i, w->config->rank);
        out += atom.length[0];
        in = atom.length[0] > 0 || i == 0 ? atom.length[1] : in;
    }
    const char *name = w->decl->params[weight.param].suffix;
    int value = qd_class_slot(w, name, QD_SLOT_PARAM, w->config->param, out, in);
    int grad = qd_class_slot(w, name, QD_SLOT_GRAD, w->config->grad, out, in);
    if (w->no_memory)
        return -1;
    w->slots[value].param = w->slots[grad].param = weight.param;
    w->slots[value].param_count = w->slots[grad].param_count = weight.count;
    return w->weights[weight.param] = value;
}

void qd_class_count_bytes(const qd_class_writer *w, qd_op *op)
{
    op->bytes = 0;
    for (int i = 0; i < QD_OP_SLOTS; i++)
        if (op->slot[i] >= 0)
            op->bytes += qd_slot_bytes(&w->slots[op->slot[i]]) * (strchr("ag", qd_op_roles(op->kind)[i]) ? 2 : 1);
}

void qd_op_set_operands(qd_op *op, qd_operands operands)
{
    for (int i = 0; i < QD_OP_SLOTS; i++)
        op->slot[i] = (int16_t)(operands.slot[i] - 1);
}

static void check_operands(qd_class_writer *w, qd_op_kind kind, const qd_operands *operands)
{
    int count = (int)strlen(qd_op_roles(kind));
    for (int i = 0; i < QD_OP_SLOTS && !w->wrong; i++) {
        bool given = operands->slot[i] > 0;
        if (i < count && !given && qd_op_operand_needed(kind, i))
            w->wrong = qd_arena_printf(w->arena, "%s lacks its operand %s", qd_op_name(kind), qd_op_operand_name(kind, i));
        else if (i >= count && given)
            w->wrong = qd_arena_printf(w->arena, "%s is given operands of another kind", qd_op_name(kind));
    }
}

qd_op *qd_class_op(qd_class_writer *w, qd_op_kind kind, qd_operands operands)
{
    static _Thread_local qd_op dummy; /* written to when out of memory; the build then fails as a whole */
    if (!w->no_memory)
        check_operands(w, kind, &operands);
    if (w->wrong || !qd_class_reserve_op(w))
        return &dummy;
    qd_op *op = &w->ops[w->op_count++];
    *op = (qd_op){.kind = kind, .phase = w->phase, .exchange.index = -1, .exchange.pieces = 1, .after = -1};
    qd_op_set_operands(op, operands);
    qd_class_count_bytes(w, op);
    return op;
}

void qd_op_sizes(qd_op *op, int64_t m, int64_t n, int64_t k, double flops)
{
    op->m = m;
    op->n = n;
    op->k = k;
    op->flops = flops;
}

static void gemm(qd_op *op, int64_t m, int64_t n, int64_t k)
{
    qd_op_sizes(op, m, n, k, 2.0 * (double)m * (double)n * (double)k);
}

static void heads(const qd_class_writer *w, qd_op *op, int64_t n)
{
    qd_op_sizes(op, w->slots[qd_op_first(op)].rows, n, 0, 0.0);
    op->heads = w->heads;
    op->kv_heads = w->kv_heads;
}

static int64_t counted_keys(const qd_class_writer *w)
{
    return qd_tensor_counts_keys(w->model, &w->ledger->mesh, w->config->rank) ? (int64_t)w->kv_heads * w->model->head_dim : 0;
}

static const qd_slot *operand(const qd_class_writer *w, const qd_op *op, int place)
{
    return &w->slots[op->slot[place]];
}

/* The columns of an activation's result, taken from the result or from its gradient. */
static int64_t activated_cols(const qd_class_writer *w, const qd_op *op)
{
    return operand(w, op, op->kind == QD_OP_ACTIVATION ? QD_ACTIVATION_Y : QD_ACTIVATION_GRAD_DY)->cols;
}
QD_SAME_PLACE(DY, ACTIVATION_GRAD, ACTIVATION_GRAD_Y);

/* Rows whose choices are summed in one load, on the rank of cp with the most rows. */
static int64_t load_rows(const qd_class_writer *w)
{
    const qd_class_config *c = w->config;
    return w->model->moe.balance == QD_BALANCE_SEQUENCE
               ? w->seq
               : c->batch * qd_context_most_rows(c->seq, w->ledger->mesh.degree[QD_AXIS_CP]);
}

void qd_class_measure(const qd_class_writer *w, qd_op *op)
{
    if (w->no_memory || w->wrong)
        return;
    const qd_slot *first = qd_op_first(op) >= 0 ? &w->slots[qd_op_first(op)] : NULL, *matrix;
    qd_class_count_bytes(w, op);
    switch (op->kind) {
    case QD_OP_LINEAR:
    case QD_OP_LINEAR_ADD:
    case QD_OP_LINEAR_GELU:
        matrix = operand(w, op, QD_LINEAR_WEIGHT);
        gemm(op, first->rows, matrix->rows, matrix->cols);
        break;
    case QD_OP_LINEAR_DX:
    case QD_OP_LINEAR_DX_GELU:
        matrix = operand(w, op, QD_LINEAR_DX_WEIGHT);
        gemm(op, first->rows, matrix->cols, matrix->rows);
        break;
    case QD_OP_LINEAR_DW:
        matrix = operand(w, op, QD_LINEAR_DW_WEIGHT_GRAD);
        gemm(op, matrix->rows, matrix->cols, first->rows);
        break;
    case QD_OP_ACTIVATION:
    case QD_OP_ACTIVATION_GRAD:
    case QD_OP_ACTIVATION_GRAD_Y:
        qd_op_sizes(op, first->rows, activated_cols(w, op), 0, 0.0);
        break;
    case QD_OP_ROPE:
    case QD_OP_ROPE_INVERSE:
        heads(w, op, (int64_t)(w->heads + w->kv_heads) * w->model->head_dim);
        break;
    case QD_OP_HEAD_NORM:
    case QD_OP_HEAD_NORM_GRAD:
    case QD_OP_QK_NORM:
    case QD_OP_QK_DOTS:
        heads(w, op, first->cols);
        break;
    case QD_OP_QK_SQUARES:
    case QD_OP_QK_NORM_GRAD:
        heads(w, op, first->cols);
        op->k = counted_keys(w);
        break;
    case QD_OP_ROUTE:
    case QD_OP_ROUTE_GRAD:
        qd_op_sizes(op, w->port_rows, w->model->moe.experts, load_rows(w), 0.0);
        op->first = w->port_first;
        break;
    case QD_OP_ROUTE_PLAN:
    case QD_OP_ROUTE_LOAD:
        qd_op_sizes(op, w->port_rows, w->model->moe.experts, 0, 0.0);
        break;
    case QD_OP_DROPOUT:
        op->first = w->port_first; /* fall through */
    default:
        qd_op_sizes(op, first->rows, first->cols, 0, 0.0);
        break;
    }
}

void qd_op_communicate(const qd_class_writer *w, qd_op *op, qd_group group)
{
    op->exchange.group = group;
    op->exchange.count = op->m * op->n;
    op->exchange.dtype = w->slots[qd_op_first(op)].dtype;
    op->exchange.reduce = QD_SUM;
}

qd_op *qd_class_exchange(qd_class_writer *w, qd_op_kind kind, qd_group group, qd_operands operands, int64_t first, int64_t rows,
                         int64_t cols)
{
    qd_op *op = qd_class_op(w, kind, operands);
    op->m = rows;
    op->n = cols;
    op->first = op->to = first;
    qd_op_communicate(w, op, group);
    return op;
}

bool qd_op_touches(const qd_op *op, int slot, bool write)
{
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (op->slot[j] == slot && (!write || qd_op_writes(op, j)))
            return true;
    return false;
}

int qd_class_reader(const qd_class_writer *w, int slot, int first)
{
    for (int i = first; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS; j++)
            if (w->ops[i].slot[j] == slot && qd_op_reads(&w->ops[i], j))
                return i;
    return -1;
}

int qd_class_definition(const qd_class_writer *w, int slot, int before)
{
    for (int i = before - 1; i >= 0 && slot >= 0; i--)
        if (qd_op_touches(&w->ops[i], slot, true))
            return i;
    return -1;
}

qd_old_list qd_class_restart(qd_class_writer *w)
{
    qd_old_list old = {w->ops, w->op_count};
    w->ops = NULL;
    w->op_count = w->op_capacity = 0;
    return old;
}

qd_op *qd_class_keep(qd_class_writer *w, const qd_op *op)
{
    static _Thread_local qd_op dummy;
    if (!qd_class_reserve_op(w))
        return &dummy;
    w->ops[w->op_count] = *op;
    return &w->ops[w->op_count++];
}
