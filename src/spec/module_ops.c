/* The op lists of the modules, written from the ledger. Shapes are local; R is the micro-batch's rows (batch × seq). */
#include "spec/ops_impl.h"

#include <string.h>

typedef qd_class_writer writer;

static int add_slot(writer *w, const char *name, qd_slot_kind kind, qd_dtype dtype, int64_t rows, int64_t cols)
{
    if (w->slot_count == QD_CLASS_SLOTS) {
        w->overflow = true;
        return 0;
    }
    w->slots[w->slot_count] = (qd_slot){.name = name, .kind = kind, .dtype = dtype, .rows = rows, .cols = cols};
    return w->slot_count++;
}

static int local(writer *w, const char *name, int64_t cols)
{
    return add_slot(w, name, QD_SLOT_LOCAL, w->config->activation, w->rows, cols);
}

static int local_f32(writer *w, const char *name, int64_t rows, int64_t cols)
{
    return add_slot(w, name, QD_SLOT_LOCAL, QD_F32, rows, cols);
}

/* A parameter (or the `count` fused ones that start with it) and its gradient. */
typedef struct weight {
    int value, grad; /* slots; -1 where the model has none */
    int64_t out, in;
} weight;

static weight weights(writer *w, const char *suffix, int count)
{
    const qd_ledger *l = w->ledger;
    for (int i = 0; i < w->module->param_count; i++) {
        const qd_param *p = &l->params[w->module->param_begin + i];
        if (strcmp(p->name + strlen(w->module->name) + 1, suffix) != 0)
            continue;
        int64_t out = 0, in = qd_ledger_atom(l, w->module->param_begin + i, w->config->rank).length[1];
        for (int j = 0; j < count; j++)
            out += qd_ledger_atom(l, w->module->param_begin + i + j, w->config->rank).length[0];
        weight found = {.out = out, .in = in};
        found.value = add_slot(w, suffix, QD_SLOT_PARAM, w->config->param, out, in);
        found.grad = add_slot(w, suffix, QD_SLOT_GRAD, w->config->grad, out, in);
        w->slots[found.value].param = w->slots[found.grad].param = i;
        w->slots[found.value].param_count = w->slots[found.grad].param_count = count;
        return found;
    }
    return (weight){-1, -1, 0, 0};
}

static qd_op *add_op(writer *w, qd_op_kind kind, const int *slots, int count)
{
    static _Thread_local qd_op dummy; /* written to when the table is full; the build then fails as a whole */
    if (w->op_count == QD_CLASS_OPS || count != (int)strlen(qd_op_roles(kind))) {
        w->overflow = true;
        return &dummy;
    }
    qd_op *op = &w->ops[w->op_count++];
    *op = (qd_op){.kind = kind, .phase = w->phase};
    for (int i = 0; i < QD_OP_SLOTS; i++)
        op->slot[i] = (int16_t)(i < count ? slots[i] : -1);
    for (int i = 0; i < count; i++)
        if (slots[i] >= 0)
            op->bytes += qd_slot_bytes(&w->slots[slots[i]]) * (qd_op_roles(kind)[i] == 'a' ? 2 : 1);
    return op;
}
#define OP(w, kind, ...) add_op((w), QD_OP_##kind, (const int[]){__VA_ARGS__}, (int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)))

static void sizes(qd_op *op, int64_t m, int64_t n, int64_t k, double flops)
{
    op->m = m;
    op->n = n;
    op->k = k;
    op->flops = flops;
}

static void linear(writer *w, int x, weight matrix, weight bias, int y)
{
    sizes(OP(w, LINEAR, x, matrix.value, bias.value, y), w->rows, matrix.out, matrix.in,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
}

/* y = x·Wᵀ + b + add, where the device adds in the same pass. */
static void linear_add(writer *w, int x, weight matrix, weight bias, int add, int y)
{
    sizes(OP(w, LINEAR_ADD, x, matrix.value, bias.value, add, y), w->rows, matrix.out, matrix.in,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
}

/* sum = x·Wᵀ + b, y = gelu(sum) */
static void linear_gelu(writer *w, int x, weight matrix, weight bias, int sum, int y)
{
    sizes(OP(w, LINEAR_GELU, x, matrix.value, bias.value, sum, y), w->rows, matrix.out, matrix.in,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
}

static void linear_weight_grad(writer *w, int dy, int x, weight matrix, weight bias)
{
    w->phase = QD_PHASE_WEIGHT;
    sizes(OP(w, LINEAR_DW, dy, x, matrix.grad, bias.grad), matrix.out, matrix.in, w->rows,
          2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in);
    w->phase = QD_PHASE_INPUT;
}

/* Backward of y = x·Wᵀ + b: dx in phase I, dW and db in phase W. With `sum` (-1: none) dx goes on through the GELU whose
 * argument that was. */
static void linear_grad(writer *w, int dy, int x, weight matrix, weight bias, int sum, int dx)
{
    double flops = 2.0 * (double)w->rows * (double)matrix.out * (double)matrix.in;
    w->phase = QD_PHASE_INPUT;
    qd_op *input = sum >= 0 ? OP(w, LINEAR_DX_GELU, dy, matrix.value, sum, dx) : OP(w, LINEAR_DX, dy, matrix.value, dx);
    sizes(input, w->rows, matrix.in, matrix.out, flops);
    linear_weight_grad(w, dy, x, matrix, bias);
}

/* Dropout as an op of its own; without dropout the value passes through. */
static int dropout(writer *w, const char *name, int x, int site)
{
    if (w->model->dropout == 0.0 || !w->config->training)
        return x;
    int y = local(w, name, w->model->hidden);
    qd_op *op = OP(w, DROPOUT, x, y);
    sizes(op, w->rows, w->model->hidden, 0, 0.0);
    op->site = site;
    return y;
}

typedef struct norm_state {
    weight gamma, beta;
    int mean, rstd;
} norm_state;

static norm_state norm_slots(writer *w, const char *gamma, const char *beta, const char *mean, const char *rstd)
{
    norm_state s = {.gamma = weights(w, gamma, 1), .beta = weights(w, beta, 1)};
    s.mean = w->model->norm == QD_NORM_LAYER ? local_f32(w, mean, w->rows, 1) : -1;
    s.rstd = local_f32(w, rstd, w->rows, 1);
    return s;
}

/* y = norm(x), or with `add`: sum = x + add, y = norm(sum). */
static void norm(writer *w, int x, int add, norm_state s, int sum, int y)
{
    sizes(OP(w, NORM, x, add, s.gamma.value, s.beta.value, sum, y, s.mean, s.rstd), w->rows, w->model->hidden, 0, 0.0);
}

static void norm_grad(writer *w, int dy, int x, norm_state s, int add, int dx)
{
    sizes(OP(w, NORM_GRAD, dy, x, s.gamma.value, add, s.mean, s.rstd, dx, s.gamma.grad, s.beta.grad), w->rows,
          w->model->hidden, 0, 0.0);
}

/* A lookup reads one row per token, not the table. */
static int64_t looked_up_bytes(const writer *w, weight tokens, weight positions)
{
    const qd_slot *table = &w->slots[tokens.value];
    return (positions.value >= 0 ? 2 : 1) * w->rows * table->cols * (int64_t)qd_dtype_size(table->dtype);
}

static void write_embed(writer *w)
{
    const qd_model *m = w->model;
    int input = add_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    weight tokens = weights(w, "tokens.weight", 1), positions = weights(w, "positions.weight", 1);
    int out = add_slot(w, "out", QD_SLOT_OUT, w->config->activation, w->rows, m->hidden);
    w->phase = QD_PHASE_FORWARD;
    bool drops = m->dropout > 0.0 && w->config->training;
    int y = drops ? local(w, "embedded", m->hidden) : out;
    qd_op *embed = OP(w, EMBED, input, tokens.value, positions.value, y);
    sizes(embed, w->rows, m->hidden, 0, 0.0);
    embed->bytes = looked_up_bytes(w, tokens, positions) + qd_slot_bytes(&w->slots[y]);
    if (drops)
        sizes(OP(w, DROPOUT, y, out), w->rows, m->hidden, 0, 0.0);
    if (!w->config->training)
        return;
    int dy = add_slot(w, "grad_out", QD_SLOT_GRAD_OUT, w->config->activation, w->rows, m->hidden);
    w->phase = QD_PHASE_INPUT;
    dy = dropout(w, "d_embedded", dy, 0);
    w->phase = QD_PHASE_WEIGHT;
    qd_op *grad = OP(w, EMBED_GRAD, input, dy, tokens.grad, positions.grad);
    sizes(grad, w->rows, m->hidden, 0, 0.0);
    grad->bytes = 2 * looked_up_bytes(w, tokens, positions) + qd_slot_bytes(&w->slots[dy]);
}

/* x → norm → qkv → rope → attention → out → + x → norm → up (gate) → activation → down → + . */
static void write_block(writer *w)
{
    const qd_model *m = w->model;
    int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
    int64_t up_cols = m->activation == QD_ACT_SWIGLU ? 2 * m->ffn : m->ffn;
    int up_parts = m->activation == QD_ACT_SWIGLU ? 2 : 1;
    /* QKᵀ and PV over the causal half. */
    double attention_flops = 2.0 * (double)w->rows * (double)w->config->seq * (double)q;

    int x = add_slot(w, "in", QD_SLOT_IN, w->config->activation, w->rows, m->hidden);
    int input = add_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    int table = m->position == QD_POSITION_ROPE
                    ? add_slot(w, "rope_table", QD_SLOT_ROPE, QD_F32, qd_positions(w->config->seq, w->config->context), m->head_dim)
                    : -1;
    norm_state n1 = norm_slots(w, "attn_norm.weight", "attn_norm.bias", "attn_mean", "attn_rstd");
    weight qkv_w = weights(w, "attn.q.weight", 3), qkv_b = weights(w, "attn.q.bias", 3);
    weight out_w = weights(w, "attn.out.weight", 1), out_b = weights(w, "attn.out.bias", 1);
    norm_state n2 = norm_slots(w, "mlp_norm.weight", "mlp_norm.bias", "mlp_mean", "mlp_rstd");
    const char *up_name = up_parts == 2 ? "mlp.gate.weight" : "mlp.up.weight";
    const char *up_bias = up_parts == 2 ? "mlp.gate.bias" : "mlp.up.bias";
    weight up_w = weights(w, up_name, up_parts), up_b = weights(w, up_bias, up_parts);
    weight down_w = weights(w, "mlp.down.weight", 1), down_b = weights(w, "mlp.down.bias", 1);
    int normed1 = local(w, "attn_normed", m->hidden);
    int qkv = local(w, "qkv", q + 2 * kv);
    int o = local(w, "attended", q);
    int lse = local_f32(w, "lse", w->config->batch * m->heads, w->config->seq);
    int branch1 = local(w, "attn_branch", m->hidden);
    int middle = local(w, "residual", m->hidden);
    int normed2 = local(w, "mlp_normed", m->hidden);
    int up = local(w, "up", up_cols);
    int active = local(w, "active", m->ffn);
    int branch2 = local(w, "mlp_branch", m->hidden);
    int out = add_slot(w, "out", QD_SLOT_OUT, w->config->activation, w->rows, m->hidden);

    w->phase = QD_PHASE_FORWARD;
    norm(w, x, -1, n1, -1, normed1);
    linear(w, normed1, qkv_w, qkv_b, qkv);
    if (table >= 0)
        sizes(OP(w, ROPE, qkv, table, w->config->context > 0 ? input : -1), w->rows, q + kv, 0, 0.0);
    if (w->config->context > 0) {
        int cache = add_slot(w, "cache", QD_SLOT_CACHE, w->config->activation, 2 * w->config->context, kv);
        sizes(OP(w, ATTENTION_CACHED, qkv, cache, o), w->rows, q, w->config->context, 0.0);
    } else {
        sizes(OP(w, ATTENTION, qkv, input, o, lse), w->rows, q, w->config->seq, attention_flops);
    }
    const qd_device_traits *traits = w->config->traits;
    bool drops = m->dropout > 0.0 && w->config->training;
    bool fuse_residual = traits->fused_residual && !drops;
    /* Computing the GELU again needs it as an op of its own. */
    bool fuse_gelu = traits->fused_gelu && m->activation == QD_ACT_GELU_TANH && w->config->recompute != QD_RECOMPUTE_SELECTIVE;
    if (fuse_residual) {
        linear_add(w, o, out_w, out_b, x, middle);
        norm(w, middle, -1, n2, -1, normed2);
    } else {
        linear(w, o, out_w, out_b, branch1);
        branch1 = dropout(w, "attn_dropped", branch1, 1);
        norm(w, x, branch1, n2, middle, normed2);
    }
    if (fuse_gelu) {
        linear_gelu(w, normed2, up_w, up_b, up, active);
    } else {
        linear(w, normed2, up_w, up_b, up);
        sizes(OP(w, ACTIVATION, up, active), w->rows, m->ffn, 0, 0.0);
    }
    if (fuse_residual) {
        linear_add(w, active, down_w, down_b, middle, out);
    } else {
        linear(w, active, down_w, down_b, branch2);
        branch2 = dropout(w, "mlp_dropped", branch2, 2);
        sizes(OP(w, ADD, middle, branch2, out), w->rows, m->hidden, 0, 0.0);
    }
    if (!w->config->training)
        return;

    int dy = add_slot(w, "grad_out", QD_SLOT_GRAD_OUT, w->config->activation, w->rows, m->hidden);
    int dx = add_slot(w, "grad_in", QD_SLOT_GRAD_IN, w->config->activation, w->rows, m->hidden);
    int d_active = local(w, "d_active", m->ffn);
    int d_up = local(w, "d_up", up_cols);
    int d_normed2 = local(w, "d_mlp_normed", m->hidden);
    int d_middle = local(w, "d_residual", m->hidden);
    int d_o = local(w, "d_attended", q);
    int d_qkv = local(w, "d_qkv", q + 2 * kv);
    int delta = local_f32(w, "delta", w->config->batch * m->heads, w->config->seq);
    int d_normed1 = local(w, "d_attn_normed", m->hidden);

    w->phase = QD_PHASE_INPUT;
    int d_branch2 = dropout(w, "d_mlp_branch", dy, 2);
    if (fuse_gelu) {
        linear_grad(w, d_branch2, active, down_w, down_b, up, d_up);
    } else if (traits->remade_activation && m->activation == QD_ACT_SWIGLU) {
        /* The pass over gate and up that gives their gradients gives their product again: it need not be kept. */
        int again = local(w, "active_again", m->ffn);
        sizes(OP(w, LINEAR_DX, d_branch2, down_w.value, d_active), w->rows, down_w.in, down_w.out,
              2.0 * (double)w->rows * (double)down_w.out * (double)down_w.in);
        sizes(OP(w, ACTIVATION_GRAD_Y, up, d_active, d_up, again), w->rows, m->ffn, 0, 0.0);
        linear_weight_grad(w, d_branch2, again, down_w, down_b);
    } else {
        linear_grad(w, d_branch2, active, down_w, down_b, -1, d_active);
        sizes(OP(w, ACTIVATION_GRAD, up, d_active, d_up), w->rows, m->ffn, 0, 0.0);
    }
    linear_grad(w, d_up, normed2, up_w, up_b, -1, d_normed2);
    norm_grad(w, d_normed2, middle, n2, dy, d_middle);
    int d_branch1 = dropout(w, "d_attn_branch", d_middle, 1);
    linear_grad(w, d_branch1, o, out_w, out_b, -1, d_o);
    sizes(OP(w, ATTENTION_GRAD, qkv, input, o, lse, d_o, d_qkv, delta), w->rows, q, w->config->seq, 2.5 * attention_flops);
    if (table >= 0)
        sizes(OP(w, ROPE_INVERSE, d_qkv, table), w->rows, q + kv, 0, 0.0);
    linear_grad(w, d_qkv, normed1, qkv_w, qkv_b, -1, d_normed1);
    norm_grad(w, d_normed1, x, n1, d_middle, dx);
}

/* In generation: norm → logits of the last row. */
static void write_logits_head(writer *w)
{
    const qd_model *m = w->model;
    int x = add_slot(w, "in", QD_SLOT_IN, w->config->activation, w->rows, m->hidden);
    norm_state n = norm_slots(w, "norm.weight", "norm.bias", "mean", "rstd");
    weight matrix = weights(w, "weight", 1);
    int normed = local(w, "normed", m->hidden);
    int logits = add_slot(w, "logits", QD_SLOT_LOGITS, QD_F32, 1, m->vocab);
    norm(w, x, -1, n, -1, normed);
    sizes(OP(w, HEAD_LOGITS, normed, matrix.value, logits), 1, m->vocab, m->hidden, 2.0 * (double)m->vocab * (double)m->hidden);
}

/* norm → logits in chunks → loss, and in the same pass the gradients of the normed rows and of the head's matrix. */
static void write_head(writer *w)
{
    const qd_model *m = w->model;
    if (w->config->context > 0) {
        write_logits_head(w);
        return;
    }
    const qd_device_traits *traits = w->config->traits;
    int64_t chunk = qd_head_chunk_rows(traits, m->vocab);
    if (chunk > w->rows)
        chunk = w->rows;
    int x = add_slot(w, "in", QD_SLOT_IN, w->config->activation, w->rows, m->hidden);
    int input = add_slot(w, "input", QD_SLOT_INPUT, QD_I32, 3, w->rows);
    norm_state n = norm_slots(w, "norm.weight", "norm.bias", "mean", "rstd");
    weight matrix = weights(w, "weight", 1);
    int normed = local(w, "normed", m->hidden);
    int logits = add_slot(w, "logits", QD_SLOT_LOCAL, traits->narrow_logits ? w->config->activation : QD_F32, chunk, m->vocab);
    int losses = local_f32(w, "losses", w->rows, 1);
    int loss = add_slot(w, "loss", QD_SLOT_LOSS, QD_F64, 2, 1);
    bool training = w->config->training;
    int d_normed = training ? local(w, "d_normed", m->hidden) : -1;

    w->phase = QD_PHASE_FORWARD;
    norm(w, x, -1, n, -1, normed);
    qd_op *op = OP(w, HEAD_LOSS, normed, matrix.value, input, d_normed, training ? matrix.grad : -1, loss, logits, losses);
    sizes(op, w->rows, m->vocab, m->hidden,
          (training ? 6.0 : 2.0) * (double)w->rows * (double)m->vocab * (double)m->hidden);
    op->chunk = chunk;
    if (!training)
        return;
    int dx = add_slot(w, "grad_in", QD_SLOT_GRAD_IN, w->config->activation, w->rows, m->hidden);
    w->phase = QD_PHASE_INPUT;
    norm_grad(w, d_normed, x, n, -1, dx);
}

/* ---- where local values live ---- */

static int64_t align64(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Phase for lifetimes: without the split, I and W are one. */
static qd_phase life_phase(const writer *w, const qd_op *op)
{
    return op->phase == QD_PHASE_WEIGHT && !w->config->split ? QD_PHASE_INPUT : op->phase;
}

typedef struct span {
    int first, last; /* op indices */
    bool used;
} span;

static void find_spans(const writer *w, span *spans)
{
    for (int i = 0; i < w->op_count; i++) {
        for (int j = 0; j < QD_OP_SLOTS; j++) {
            int s = w->ops[i].slot[j];
            if (s < 0)
                continue;
            if (!spans[s].used)
                spans[s].first = i;
            spans[s].last = i;
            spans[s].used = true;
        }
    }
}

static qd_region region_of(qd_phase first, qd_phase last)
{
    if (first == last)
        return QD_REGION_SCRATCH;
    if (first == QD_PHASE_FORWARD)
        return last == QD_PHASE_INPUT ? QD_REGION_STASH_I : QD_REGION_STASH_W;
    return QD_REGION_MID;
}

/* Lowest offset at which `bytes` do not overlap a scratch value that is alive at the same time. */
static int64_t scratch_offset(const writer *w, const span *spans, int slot)
{
    int64_t offset = 0, bytes = align64(qd_slot_bytes(&w->slots[slot]));
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < slot; s++) {
            const qd_slot *other = &w->slots[s];
            if (other->kind != QD_SLOT_LOCAL || other->region != QD_REGION_SCRATCH || !spans[s].used)
                continue;
            int64_t end = other->offset + align64(qd_slot_bytes(other));
            bool alive_together = spans[s].first <= spans[slot].last && spans[slot].first <= spans[s].last;
            if (alive_together && offset < end && other->offset < offset + bytes) {
                offset = end;
                moved = true;
            }
        }
    }
    return offset;
}

/* In split mode I and W run apart, so op order within the whole list does not say who is alive with whom: a scratch value
 * of phase I must not share memory with one of phase W only if both could be alive, which they never are (each phase runs
 * to its end before the other starts). Values of different phases may overlap; scratch_offset compares op spans, which
 * for interleaved I and W ops is the careful side. */
static void place_locals(writer *w, qd_module_class *c)
{
    span spans[QD_CLASS_SLOTS];
    memset(spans, 0, sizeof spans);
    find_spans(w, spans);
    for (int s = 0; s < w->slot_count; s++) {
        qd_slot *slot = &w->slots[s];
        if (!spans[s].used)
            continue;
        qd_phase first = life_phase(w, &w->ops[spans[s].first]), last = first;
        for (int i = spans[s].first; i <= spans[s].last; i++)
            for (int j = 0; j < QD_OP_SLOTS; j++)
                if (w->ops[i].slot[j] == s && life_phase(w, &w->ops[i]) > last)
                    last = life_phase(w, &w->ops[i]);
        switch (slot->kind) {
        case QD_SLOT_IN: c->in_until = last; break;
        case QD_SLOT_GRAD_OUT: c->grad_out_until = last; break;
        case QD_SLOT_INPUT:
            c->uses_input = true;
            break;
        case QD_SLOT_LOCAL:
            slot->region = region_of(first, last);
            if (slot->region == QD_REGION_SCRATCH) {
                slot->offset = scratch_offset(w, spans, s);
                int64_t end = slot->offset + align64(qd_slot_bytes(slot));
                if (end > c->region[QD_REGION_SCRATCH])
                    c->region[QD_REGION_SCRATCH] = end;
            } else {
                slot->offset = c->region[slot->region];
                c->region[slot->region] += align64(qd_slot_bytes(slot));
            }
            break;
        default: break;
        }
    }
    for (int i = 0; i < w->op_count; i++)
        c->has_weight_phase = c->has_weight_phase || w->ops[i].phase == QD_PHASE_WEIGHT;
}

qd_status qd_module_class_create(const qd_ledger *ledger, qd_module_kind kind, const qd_class_config *config,
                                 qd_arena *arena, qd_module_class *out)
{
    writer w = {.ledger = ledger, .model = &ledger->model, .config = config, .rows = config->batch * config->seq};
    for (int i = 0; i < ledger->module_count && !w.module; i++)
        if (ledger->modules[i].kind == kind)
            w.module = &ledger->modules[i];
    memset(out, 0, sizeof *out);
    out->kind = kind;
    switch (kind) {
    case QD_MODULE_EMBED: write_embed(&w); break;
    case QD_MODULE_BLOCK: write_block(&w); break;
    case QD_MODULE_HEAD: write_head(&w); break;
    }
    if (w.overflow)
        return QD_FAIL(QD_SYSTEM, "the op list of a module outgrew its table");
    if (kind == QD_MODULE_BLOCK && config->training)
        out->recompute = config->recompute;
    QD_TRY(qd_recompute_apply(&w, out->recompute));
    place_locals(&w, out);
    out->slot_count = w.slot_count;
    out->op_count = w.op_count;
    out->slots = QD_ARENA_NEW(arena, qd_slot, w.slot_count);
    out->ops = QD_ARENA_NEW(arena, qd_op, w.op_count);
    if (!out->slots || !out->ops)
        return QD_NO_MEMORY;
    memcpy(out->slots, w.slots, (size_t)w.slot_count * sizeof *w.slots);
    memcpy(out->ops, w.ops, (size_t)w.op_count * sizeof *w.ops);
    return QD_OK;
}
