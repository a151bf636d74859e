/* The op list that the passes read and write: adds slots and ops, and computes sizes, FLOPs and
 * bytes. */
#include "spec/layout/tensor.h"
#include "spec/passes/passes.h"

#include <string.h>

void qd_class_fail(qd_class_writer *w, qd_status status, const char *message)
{
    if (w->wrong)
        return;
    w->status = message ? status : QD_NO_MEMORY;
    w->wrong = message ? message : "no memory for the op lists";
}

void *qd_class_memory(qd_class_writer *w, int64_t count, size_t size)
{
    void *memory = qd_arena_array(w->arena, (size_t)count, size);
    if (!memory)
        qd_class_fail(w, QD_NO_MEMORY, NULL);
    return memory;
}

int *qd_class_table(qd_class_writer *w, int entries)
{
    int *table = QD_CLASS_NEW(w, int, entries + 1);
    return table ? memset(table, 0xff, (size_t)entries * sizeof *table) : NULL;
}

/* A table with space for one more entry: the same one, or a copy. */
static void *reserve(qd_class_writer *w, void *table, int count, int *capacity, size_t size)
{
    int wanted = *capacity ? 2 * *capacity : 64;
    void *larger = count < *capacity ? NULL : qd_class_memory(w, wanted, size);
    if (!larger)
        return table;
    *capacity = wanted;
    return count > 0 ? memcpy(larger, table, (size_t)count * size) : larger;
}

static int add_slot(qd_class_writer *w, qd_slot slot)
{
    w->slots = reserve(w, w->slots, w->slot_count, &w->slot_capacity, sizeof *w->slots);
    if (!slot.name)
        qd_class_fail(w, QD_NO_MEMORY, NULL);
    if (w->wrong)
        return 0;
    w->slots[w->slot_count] = slot;
    return w->slot_count++;
}

int qd_class_slot(qd_class_writer *w, const char *name, qd_slot_kind kind, qd_dtype dtype, int64_t rows, int64_t cols)
{
    return add_slot(w, (qd_slot){.name = name, .kind = kind, .dtype = dtype, .rows = rows, .cols = cols});
}

int qd_class_like(qd_class_writer *w, const char *name, int slot)
{
    qd_slot like = w->slots[slot];
    like.name = name;
    return add_slot(w, like);
}

int qd_class_f32(qd_class_writer *w, const char *name, int64_t rows, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, QD_F32, rows, cols);
}

const char *qd_class_name(qd_class_writer *w, const char *before, int slot, const char *behind)
{
    return qd_arena_printf(w->arena, "%s%s%s", before, w->slots[slot].name, behind);
}

int qd_class_weight(qd_class_writer *w, qd_weight weight)
{
    if (weight.count == 0)
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

static void check_operands(qd_class_writer *w, const qd_op *op)
{
    int count = (int)strlen(qd_op_roles(op->kind));
    for (int i = 0; i < QD_OP_SLOTS; i++) {
        if (i < count && op->slot[i] < 0 && qd_op_operand_needed(op->kind, i))
            QD_CLASS_FAIL(w, QD_SYSTEM, "%s lacks its operand %s", qd_op_name(op->kind), qd_op_operand_name(op->kind, i));
        else if (i >= count && op->slot[i] >= 0)
            QD_CLASS_FAIL(w, QD_SYSTEM, "%s is given operands of another kind", qd_op_name(op->kind));
    }
}

qd_op *qd_class_op(qd_class_writer *w, qd_op_kind kind, qd_operands operands)
{
    qd_op op = {.kind = kind, .phase = w->phase, .exchange.index = -1, .exchange.pieces = 1, .after = -1};
    for (int i = 0; i < QD_OP_SLOTS; i++)
        op.slot[i] = (int16_t)(operands.slot[i] - 1);
    check_operands(w, &op);
    if (!w->wrong)
        qd_class_count_bytes(w, &op);
    return qd_class_keep(w, &op);
}

int64_t qd_class_first_token(const qd_class_writer *w, int table)
{
    return qd_ledger_atom(w->ledger, w->module->param_begin + w->slots[table].param, w->config->rank).begin[0];
}

/* What the sizes of an op are taken from: a number of the class, or shapes of its operands. */
typedef enum size {
    QD_CLASS_NUMBERS,
    X_ROWS, X_COLS,           /* of the first operand */
    MATRIX_ROWS, MATRIX_COLS, /* of the weight, or of its gradient */
    RESULT_COLS,              /* of the first result */
    DY_COLS,                  /* of an activation */
} size;

static const struct {
    size m, n, k;
    bool gemm;  /* 2 m n k FLOPs */
    bool heads; /* the op knows this rank's heads */
    bool experts; /* the op knows this rank's experts, if it is of experts */
    bool port;  /* the op knows which rows of the micro-batch it works on */
} sizes[QD_OP_KIND_COUNT] = {
    [QD_OP_EMBED] = {ROWS, HIDDEN, .k = MATRIX_ROWS},
    [QD_OP_EMBED_GRAD] = {ROWS, HIDDEN, .k = MATRIX_ROWS},
    [QD_OP_LINEAR] = {X_ROWS, MATRIX_ROWS, MATRIX_COLS, .gemm = true},
    [QD_OP_LINEAR_DX] = {X_ROWS, MATRIX_COLS, MATRIX_ROWS, .gemm = true},
    [QD_OP_LINEAR_DW] = {MATRIX_ROWS, MATRIX_COLS, X_ROWS, .gemm = true},
    [QD_OP_ADAPT] = {X_ROWS, RESULT_COLS, MATRIX_COLS, .experts = true},
    [QD_OP_ADAPT_DX] = {X_ROWS, X_COLS, MATRIX_COLS, .experts = true},
    [QD_OP_ADAPT_DW] = {X_ROWS, X_COLS, MATRIX_COLS, .experts = true},
    [QD_OP_EXPERTS] = {X_ROWS, MATRIX_ROWS, MATRIX_COLS, .gemm = true, .experts = true},
    [QD_OP_EXPERTS_DX] = {X_ROWS, MATRIX_COLS, MATRIX_ROWS, .gemm = true, .experts = true},
    [QD_OP_EXPERTS_DW] = {X_ROWS, MATRIX_ROWS, MATRIX_COLS, .gemm = true, .experts = true},
    [QD_OP_EXPERTS_BIAS] = {X_ROWS, X_COLS, .experts = true},
    [QD_OP_EXPERTS_BIAS_GRAD] = {X_ROWS, X_COLS, .experts = true},
    [QD_OP_EXPERT_ACTIVATION] = {X_ROWS, RESULT_COLS, .experts = true},
    [QD_OP_EXPERT_ACTIVATION_GRAD] = {X_ROWS, DY_COLS, .experts = true},
    [QD_OP_ACTIVATION] = {X_ROWS, .n = RESULT_COLS},
    [QD_OP_ACTIVATION_GRAD] = {X_ROWS, .n = DY_COLS},
    [QD_OP_ROPE] = {X_ROWS, QK, .heads = true},
    [QD_OP_ROPE_INVERSE] = {X_ROWS, QK, .heads = true},
    [QD_OP_HEAD_NORM] = {X_ROWS, X_COLS, .heads = true},
    [QD_OP_HEAD_NORM_GRAD] = {X_ROWS, X_COLS, .heads = true},
    [QD_OP_QK_SQUARES] = {X_ROWS, X_COLS, COUNTED_KEYS, .heads = true},
    [QD_OP_QK_NORM] = {X_ROWS, X_COLS, .heads = true},
    [QD_OP_QK_DOTS] = {X_ROWS, X_COLS, .heads = true},
    [QD_OP_QK_NORM_GRAD] = {X_ROWS, X_COLS, COUNTED_KEYS, .heads = true},
    [QD_OP_LATENT_QKV] = {X_ROWS, X_COLS, .heads = true},
    [QD_OP_LATENT_QKV_GRAD] = {X_ROWS, X_COLS, .heads = true},
    [QD_OP_ATTENTION_CACHED] = {X_ROWS, Q, CACHE_LENGTH, .heads = true},
    [QD_OP_ATTENTION_LATENT] = {X_ROWS, Q, CACHE_LENGTH, .heads = true},
    [QD_OP_ROUTE] = {PORT_ROWS, EXPERTS, LOAD_ROWS, .port = true},
    [QD_OP_ROUTE_GRAD] = {PORT_ROWS, EXPERTS, LOAD_ROWS, .port = true},
    [QD_OP_ROUTE_PLAN] = {PORT_ROWS, .n = EXPERTS},
    [QD_OP_ROUTE_LOAD] = {PORT_ROWS, .n = EXPERTS},
    [QD_OP_DROPOUT] = {X_ROWS, X_COLS, .port = true},
    [QD_OP_HEAD_LOGITS] = {ONE, MATRIX_ROWS, MATRIX_COLS, .gemm = true},
};

int qd_op_weight(const qd_class_writer *w, const qd_op *op)
{
    for (int j = 0; j < QD_OP_SLOTS; j++)
        if (op->slot[j] >= 0 && (w->slots[op->slot[j]].kind == QD_SLOT_PARAM || w->slots[op->slot[j]].kind == QD_SLOT_GRAD))
            return op->slot[j];
    return -1;
}

int64_t qd_class_outputs(const qd_class_writer *w, int weight)
{
    return w->slots[weight].rows / (qd_class_of_experts(w, weight) ? w->held : 1);
}

static int result_of(const qd_op *op)
{
    int j = 0;
    while (!qd_op_writes(op, j))
        j++;
    return op->slot[j];
}

static int64_t size_of(const qd_class_writer *w, const qd_op *op, size from)
{
    switch (from) {
    case X_ROWS: return w->slots[qd_op_first(op)].rows;
    case X_COLS: return w->slots[qd_op_first(op)].cols;
    case MATRIX_ROWS: return qd_class_outputs(w, qd_op_weight(w, op));
    case MATRIX_COLS: return w->slots[qd_op_weight(w, op)].cols;
    case RESULT_COLS: return w->slots[result_of(op)].cols;
    case DY_COLS: return w->slots[op->slot[QD_ACTIVATION_GRAD_DY]].cols;
    default: return w->number[from];
    }
}

/* A lookup reads one row per token, not the whole table; its gradient reads and writes it. */
static int64_t lookup_bytes(const qd_class_writer *w, const qd_op *op, int table)
{
    bool grad = op->kind == QD_OP_EMBED_GRAD;
    int64_t rows = w->rows * (grad ? 2 : 1) * (w->model->position == QD_POSITION_LEARNED ? 2 : 1);
    return rows * w->slots[table].cols * (int64_t)qd_dtype_size(w->config->param) +
           qd_slot_bytes(&w->slots[op->slot[grad ? QD_EMBED_GRAD_DY : QD_EMBED_Y]]);
}

void qd_class_measure(const qd_class_writer *w, qd_op *op)
{
    if (w->wrong)
        return;
    size m = sizes[op->kind].m, n = sizes[op->kind].n;
    op->m = size_of(w, op, m ? m : X_ROWS);
    op->n = size_of(w, op, n ? n : X_COLS);
    op->k = size_of(w, op, sizes[op->kind].k);
    int weight = qd_op_weight(w, op);
    bool routed = sizes[op->kind].experts && (weight < 0 || qd_class_of_experts(w, weight));
    double rows = routed ? w->load : (double)op->m;
    op->flops = sizes[op->kind].gemm ? 2.0 * rows * (double)op->n * (double)op->k : 0.0;
    for (int i = 0; i < op->parts; i++) /* only the columns of parts with adapters are computed */
        op->flops += 2.0 * rows * (double)op->part_cols[i] * (double)op->k;
    op->experts = routed ? w->held : 0;
    op->expert = routed ? w->first_held : 0;
    op->heads = sizes[op->kind].heads ? w->heads : 0;
    op->kv_heads = sizes[op->kind].heads ? w->kv_heads : 0;
    qd_class_count_bytes(w, op);
    if (sizes[op->kind].port)
        op->first = w->port_first;
    if (op->kind == QD_OP_DROPOUT && w->tensor.size > 1 && w->slots[qd_op_first(op)].layout == QD_LAYOUT_COLUMNS) {
        op->first = 0; /* all rows, columns of one of k shards */
        op->k = w->tensor.size;
        op->to = w->tensor_coord;
    }
    bool lookup = op->kind == QD_OP_EMBED || op->kind == QD_OP_EMBED_GRAD;
    if (lookup || op->kind == QD_OP_HEAD_LOGITS)
        op->first = qd_class_first_token(w, weight);
    if (lookup)
        op->bytes = lookup_bytes(w, op, weight);
    if (op->kind == QD_OP_HEAD_LOGITS) { /* of one row of x */
        op->bytes -= qd_slot_bytes(&w->slots[qd_op_first(op)]);
        op->cap = w->model->logit_softcap;
    }
}

void qd_op_communicate(const qd_class_writer *w, qd_op *op, qd_group group)
{
    op->exchange.group = group;
    op->exchange.count = op->m * op->n;
    op->exchange.dtype = w->slots[qd_op_first(op)].dtype;
    op->exchange.reduce = QD_SUM;
}

qd_op *qd_class_exchange(qd_class_writer *w, qd_op_kind kind, qd_group group, int from, int to)
{
    qd_op *op = qd_class_op(w, kind, QD_OPERANDS(ALL_GATHER, (X, from), (Y, to)));
    const qd_slot *whole = &w->slots[kind == QD_OP_ALL_GATHER ? to : from];
    op->m = whole->rows;
    op->n = whole->cols;
    qd_op_communicate(w, op, group);
    return op;
}
QD_SAME_PLACE(X, ALL_GATHER, ALL_REDUCE);
QD_SAME_PLACE(X, ALL_GATHER, REDUCE_SCATTER);
QD_SAME_PLACE(Y, ALL_GATHER, REDUCE_SCATTER);

unsigned qd_op_access(const qd_op *op, int slot)
{
    unsigned access = 0;
    for (int j = 0; j < QD_OP_SLOTS && slot >= 0; j++)
        if (op->slot[j] == slot)
            access |= (qd_op_reads(op, j) ? QD_READS : 0) | (qd_op_writes(op, j) ? QD_WRITES : 0);
    return access;
}

int qd_class_next(const qd_class_writer *w, int slot, unsigned access, int first)
{
    while (first < w->op_count && !(qd_op_access(&w->ops[first], slot) & access))
        first++;
    return first;
}

int qd_class_read_backward(const qd_class_writer *w, int slot)
{
    int backward = 0;
    while (backward < w->op_count && w->ops[backward].phase == QD_PHASE_FORWARD)
        backward++;
    return qd_class_next(w, slot, QD_READS, backward);
}

int qd_class_definition(const qd_class_writer *w, int slot, int before)
{
    int i = before - 1;
    while (i >= 0 && !(qd_op_access(&w->ops[i], slot) & QD_WRITES))
        i--;
    return i;
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
    static _Thread_local qd_op dummy; /* written to after a failure */
    w->ops = reserve(w, w->ops, w->op_count, &w->op_capacity, sizeof *w->ops);
    if (w->wrong)
        return &dummy;
    w->ops[w->op_count] = *op;
    return &w->ops[w->op_count++];
}

void qd_class_move(qd_class_writer *w, int from, int to)
{
    qd_op op = w->ops[from];
    int low = from < to ? from : to, high = from < to ? to : from;
    memmove(&w->ops[from < to ? low : low + 1], &w->ops[from < to ? low + 1 : low], (size_t)(high - low) * sizeof *w->ops);
    w->ops[to] = op;
}

void qd_class_replace(qd_class_writer *w, int slot, int by, bool backward)
{
    for (int i = 0; i < w->op_count; i++)
        for (int j = 0; j < QD_OP_SLOTS && (!backward || w->ops[i].phase != QD_PHASE_FORWARD); j++)
            if (w->ops[i].slot[j] == slot)
                w->ops[i].slot[j] = (int16_t)by;
}
