/* The parts that the op lists of all modules are written from: slots, products, norms. Shapes are local; R is the
 * micro-batch's rows (batch × seq). */
#include "spec/ops_impl.h"

#include <string.h>

/* A table of twice the size, with what was in it; NULL when memory is out. */
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

bool qd_class_reserve(qd_class_writer *w)
{
    if (w->slot_count == w->slot_capacity && !w->no_memory) {
        void *larger = grow(w, w->slots, w->slot_count, &w->slot_capacity, sizeof *w->slots);
        w->slots = larger ? larger : w->slots;
    }
    if (w->op_count == w->op_capacity && !w->no_memory) {
        void *larger = grow(w, w->ops, w->op_count, &w->op_capacity, sizeof *w->ops);
        w->ops = larger ? larger : w->ops;
    }
    return !w->no_memory;
}

int qd_class_slot(qd_class_writer *w, const char *name, qd_slot_kind kind, qd_dtype dtype, int64_t rows, int64_t cols)
{
    if (!qd_class_reserve(w))
        return 0;
    w->slots[w->slot_count] = (qd_slot){.name = name, .kind = kind, .dtype = dtype, .rows = rows, .cols = cols};
    return w->slot_count++;
}

int qd_class_local(qd_class_writer *w, const char *name, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, w->config->activation, w->rows, cols);
}

int qd_class_port(qd_class_writer *w, const char *name, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, w->config->activation, w->port_rows, cols);
}

int qd_class_local_f32(qd_class_writer *w, const char *name, int64_t rows, int64_t cols)
{
    return qd_class_slot(w, name, QD_SLOT_LOCAL, QD_F32, rows, cols);
}

qd_class_weight qd_class_weights(qd_class_writer *w, const char *suffix, int count)
{
    const qd_ledger *l = w->ledger;
    for (int i = 0; i < w->module->param_count; i++) {
        const qd_param *p = &l->params[w->module->param_begin + i];
        if (strcmp(p->name + strlen(w->module->name) + 1, suffix) != 0)
            continue;
        int64_t out = 0, in = qd_ledger_atom(l, w->module->param_begin + i, w->config->rank).length[1];
        for (int j = 0; j < count; j++)
            out += qd_ledger_atom(l, w->module->param_begin + i + j, w->config->rank).length[0];
        qd_class_weight found = {.out = out, .in = in};
        found.value = qd_class_slot(w, suffix, QD_SLOT_PARAM, w->config->param, out, in);
        found.grad = qd_class_slot(w, suffix, QD_SLOT_GRAD, w->config->grad, out, in);
        w->slots[found.value].param = w->slots[found.grad].param = i;
        w->slots[found.value].param_count = w->slots[found.grad].param_count = count;
        return found;
    }
    return (qd_class_weight){-1, -1, 0, 0};
}

qd_op *qd_class_op(qd_class_writer *w, qd_op_kind kind, const int *slots, int count)
{
    static _Thread_local qd_op dummy; /* written to when memory is out; the build then fails as a whole */
    w->wrong = w->wrong || count != (int)strlen(qd_op_roles(kind));
    if (w->wrong || !qd_class_reserve(w))
        return &dummy;
    qd_op *op = &w->ops[w->op_count++];
    *op = (qd_op){.kind = kind, .phase = w->phase, .exchange.index = -1, .exchange.pieces = 1, .after = -1};
    for (int i = 0; i < QD_OP_SLOTS; i++)
        op->slot[i] = (int16_t)(i < count ? slots[i] : -1);
    for (int i = 0; i < count; i++)
        if (slots[i] >= 0)
            op->bytes += qd_slot_bytes(&w->slots[slots[i]]) * (strchr("ag", qd_op_roles(kind)[i]) ? 2 : 1);
    return op;
}

void qd_op_sizes(qd_op *op, int64_t m, int64_t n, int64_t k, double flops)
{
    op->m = m;
    op->n = n;
    op->k = k;
    op->flops = flops;
}

qd_op *qd_op_heads(qd_op *op, int64_t m, int64_t n, int heads, int kv_heads)
{
    qd_op_sizes(op, m, n, 0, 0.0);
    op->heads = heads;
    op->kv_heads = kv_heads;
    return op;
}

void qd_class_linear(qd_class_writer *w, int x, qd_class_weight matrix, qd_class_weight bias, int y)
{
    qd_op_sizes(QD_CLASS_OP(w, LINEAR, x, matrix.value, bias.value, y), w->rows, matrix.out, matrix.in,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
}

/* y = x·Wᵀ + b + add, where the device adds in the same pass. */
void qd_class_linear_add(qd_class_writer *w, int x, qd_class_weight matrix, qd_class_weight bias, int add, int y)
{
    qd_op_sizes(QD_CLASS_OP(w, LINEAR_ADD, x, matrix.value, bias.value, add, y), w->rows, matrix.out, matrix.in,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
}

/* sum = x·Wᵀ + b, y = gelu(sum) */
void qd_class_linear_gelu(qd_class_writer *w, int x, qd_class_weight matrix, qd_class_weight bias, int sum, int y)
{
    qd_op_sizes(QD_CLASS_OP(w, LINEAR_GELU, x, matrix.value, bias.value, sum, y), w->rows, matrix.out, matrix.in,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
}

void qd_class_linear_weight_grad(qd_class_writer *w, int dy, int x, qd_class_weight matrix, qd_class_weight bias)
{
    w->phase = QD_PHASE_WEIGHT;
    qd_op_sizes(QD_CLASS_OP(w, LINEAR_DW, dy, x, matrix.grad, bias.grad), matrix.out, matrix.in, w->rows,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
    w->phase = QD_PHASE_INPUT;
}

/* Backward of y = x·Wᵀ + b: dx in phase I, dW and db in phase W. With `sum` (-1: none) dx goes on through the GELU whose
 * argument that was. */
void qd_class_linear_input_grad(qd_class_writer *w, int dy, qd_class_weight matrix, int sum, int dx)
{
    double flops = 2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in;
    w->phase = QD_PHASE_INPUT;
    qd_op *input = sum >= 0 ? QD_CLASS_OP(w, LINEAR_DX_GELU, dy, matrix.value, sum, dx) : QD_CLASS_OP(w, LINEAR_DX, dy, matrix.value, dx);
    qd_op_sizes(input, w->rows, matrix.in, matrix.out, flops);
}

bool qd_class_swiglu_again(const qd_class_writer *w, bool by_itself)
{
    return w->config->swiglu == QD_SWIGLU_AGAIN || (w->config->swiglu == QD_SWIGLU_AUTO && by_itself);
}

void qd_class_linear_grad(qd_class_writer *w, int dy, int x, qd_class_weight matrix, qd_class_weight bias, int sum, int dx)
{
    qd_class_linear_input_grad(w, dy, matrix, sum, dx);
    qd_class_linear_weight_grad(w, dy, x, matrix, bias);
}

/* Dropout as an op of its own; without dropout the value passes through. */
int qd_class_dropout(qd_class_writer *w, const char *name, int x, int site)
{
    if (w->model->dropout == 0.0 || !w->config->training)
        return x;
    int y = qd_class_port(w, name, w->model->hidden);
    qd_op *op = QD_CLASS_OP(w, DROPOUT, x, y);
    qd_op_sizes(op, w->port_rows, w->model->hidden, 0, 0.0);
    op->first = w->port_first;
    op->site = site;
    return y;
}

qd_class_norm_state qd_class_norm_slots(qd_class_writer *w, const char *gamma, const char *beta, const char *mean, const char *rstd)
{
    qd_class_norm_state s = {.gamma = qd_class_weights(w, gamma, 1), .beta = qd_class_weights(w, beta, 1)};
    s.mean = w->model->norm == QD_NORM_LAYER ? qd_class_local_f32(w, mean, w->port_rows, 1) : -1;
    s.rstd = qd_class_local_f32(w, rstd, w->port_rows, 1);
    return s;
}

/* y = norm(x), or with `add`: sum = x + add, y = norm(sum). */
void qd_class_norm(qd_class_writer *w, int x, int add, qd_class_norm_state s, int sum, int y)
{
    qd_op_sizes(QD_CLASS_OP(w, NORM, x, add, s.gamma.value, s.beta.value, sum, y, s.mean, s.rstd), w->port_rows, w->model->hidden, 0, 0.0);
}

void qd_class_norm_grad(qd_class_writer *w, int dy, int x, qd_class_norm_state s, int add, int dx, int add_grad, int dx_grad)
{
    qd_op_sizes(QD_CLASS_OP(w, NORM_GRAD, dy, x, s.gamma.value, add, s.mean, s.rstd, dx, s.gamma.grad, s.beta.grad, add_grad, dx_grad),
          w->port_rows, w->model->hidden, 0, 0.0);
}
