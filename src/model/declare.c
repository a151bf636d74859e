/* The vocabulary of declarations: collects the parameters and ops of one module. */
#include "model/declare.h"

#include <math.h>
#include <string.h>

/* Makes sure that one more element fits into a growing array; NULL when out of memory. */
static void *grown(qd_layer *b, void *array, int count, int *capacity, size_t size)
{
    if (count < *capacity)
        return array;
    int wanted = *capacity ? 2 * *capacity : 32;
    void *larger = qd_arena_array(b->arena, (size_t)wanted, size);
    if (!larger) {
        b->no_memory = true;
        return NULL;
    }
    if (count > 0)
        memcpy(larger, array, (size_t)count * size);
    *capacity = wanted;
    return larger;
}

qd_val qd_declare_op(qd_layer *b, qd_decl_op op, const char *out, int64_t cols)
{
    void *ops = grown(b, b->ops, b->op_count, &b->op_capacity, sizeof *b->ops);
    void *values = grown(b, b->values, b->value_count, &b->value_capacity, sizeof *b->values);
    if (!ops || !values)
        return -1;
    b->ops = ops;
    b->values = values;
    op.out = out ? b->value_count : -1;
    op.ahead = b->ahead;
    if (out)
        b->values[b->value_count++] = (qd_decl_value){.name = out, .cols = cols};
    b->ops[b->op_count++] = op;
    return op.out;
}

static qd_decl_param *add_param(qd_layer *b, const char *suffix, int64_t rows, int64_t cols, qd_init init, double std, qd_split split)
{
    static _Thread_local qd_decl_param lost; /* written to when out of memory; the declaration then fails as a whole */
    void *params = grown(b, b->params, b->param_count, &b->param_capacity, sizeof *b->params);
    if (!params || !suffix) {
        b->no_memory = true;
        return &lost;
    }
    b->params = params;
    if (b->ahead > 0)
        suffix = qd_arena_printf(b->arena, "mtp.%d.%s", b->ahead - 1, suffix);
    b->no_memory = b->no_memory || !suffix;
    b->params[b->param_count] = (qd_decl_param){.suffix = suffix, .rows = rows, .cols = cols, .init = init, .init_std = std,
                                                .split = split, .fuse = b->fuse, .expert = -1, .ahead = b->ahead};
    return &b->params[b->param_count++];
}

qd_weight qd_declare_vector(qd_layer *b, const char *suffix, int64_t size, qd_init init, qd_split split)
{
    b->fuse++;
    add_param(b, suffix, size, 0, init, 0.0, split);
    return (qd_weight){b->param_count - 1, 1};
}

static qd_weight add_table(qd_layer *b, const char *suffix, int64_t rows, qd_split split)
{
    b->fuse++;
    add_param(b, suffix, rows, b->model->hidden, QD_INIT_NORMAL, b->model->init_std, split);
    return (qd_weight){b->param_count - 1, 1};
}

qd_val qd_input(qd_layer *b)
{
    return qd_declare_op(b, (qd_decl_op){QD_DECL_INPUT, .x = -1, .y = -1}, "in", b->model->hidden);
}

void qd_output(qd_layer *b, qd_val x)
{
    qd_declare_op(b, (qd_decl_op){QD_DECL_OUTPUT, .x = x, .y = -1}, NULL, 0);
}

/* Of the weights of norms, so that they scale by 1. */
static qd_init norm_init(const qd_model *m)
{
    return m->norm == QD_NORM_RMS_ONE ? QD_INIT_ZERO : QD_INIT_ONE;
}

qd_val qd_norm(qd_layer *b, qd_val x, const char *name, const char *out)
{
    const qd_model *m = b->model;
    qd_decl_op op = {QD_DECL_NORM, .x = x, .y = -1};
    int64_t width = x >= 0 ? b->values[x].cols : 0;
    if (m->norm != QD_NORM_PLAIN)
        op.weight = qd_declare_vector(b, qd_arena_printf(b->arena, "%s.weight", name), width, norm_init(m),
                                      QD_SPLIT_NORM);
    if (m->norm == QD_NORM_LAYER)
        op.weight2 = qd_declare_vector(b, qd_arena_printf(b->arena, "%s.bias", name), width, QD_INIT_ZERO, QD_SPLIT_NORM);
    return qd_declare_op(b, op, out, width);
}

/* The factors of the adapters of one linear layer: A (rank, in) and B (out, rank) of each part that
 * has one. Where the layer is sharded by outputs, A is replicated and B sharded like the layer;
 * where it is sharded by inputs, A is sharded like the layer and B is replicated. */
typedef struct adapter_part {
    const char *name;
    int64_t out;
    qd_split split;
    int expert, dim; /* of an expert: its index, and the dimension of its matrix that etp shards */
} adapter_part;

static qd_weight adapter_factors(qd_layer *b, const adapter_part *parts, int count, int64_t in, bool outer)
{
    int rank = b->model->lora.rank;
    qd_weight weight = {b->param_count, 0};
    b->fuse++;
    for (int i = 0; i < count; i++) {
        const adapter_part *part = &parts[i];
        if (!qd_lora_takes(&b->model->lora, part->name))
            continue;
        bool inputs = part->split == QD_SPLIT_COLS;
        const char *suffix = qd_arena_printf(b->arena, "%s.lora_%c.weight", part->name, outer ? 'B' : 'A');
        /* A: the variance of PEFT's initial values, which are uniform in ± 1 / sqrt(in). */
        qd_decl_param *p = outer ? add_param(b, suffix, part->out, rank, QD_INIT_ZERO, 0.0, inputs ? QD_SPLIT_NORM : part->split)
                                 : add_param(b, suffix, rank, in, QD_INIT_NORMAL, 1.0 / sqrt(3.0 * (double)in),
                                             inputs ? QD_SPLIT_COLS : QD_SPLIT_NORM);
        if (part->expert >= 0)
            p->split = QD_SPLIT_NONE;
        p->expert = part->expert;
        p->expert_dim = (int8_t)part->dim;
        p->adapter = true;
        weight.count++;
    }
    return weight;
}

/* Adds the adapters of a linear layer to its result `y`. `by`: number of parts that y is made of;
 * experts have that many each. */
static qd_val adapted(qd_layer *b, qd_val x, qd_val y, qd_val route, qd_weight base, const adapter_part *parts, int count, int by,
                      const char *out)
{
    const qd_lora *lora = &b->model->lora;
    int64_t in = x >= 0 ? b->values[x].cols : 0, cols = y >= 0 ? b->values[y].cols : 0;
    qd_decl_op op = {QD_DECL_ADAPT, .y = y, .weight2 = base};
    for (int i = 0; i < by; i++)
        op.parts |= qd_lora_takes(lora, parts[i].name) ? 1u << i : 0;
    int adapters = __builtin_popcount(op.parts), site = QD_DROPOUTS_MOST + b->adapters++;
    if (lora->dropout > 0.0)
        x = qd_declare_op(b, (qd_decl_op){QD_DECL_DROPOUT, .x = x, .y = -1, .site = site},
                          qd_arena_printf(b->arena, "%s_lora_in", out), in);
    qd_decl_op down = {route < 0 ? QD_DECL_LINEAR : QD_DECL_GROUPED_LINEAR, .x = x, .y = route};
    down.weight = adapter_factors(b, parts, count, in, false);
    op.weight = adapter_factors(b, parts, count, in, true);
    op.x = qd_declare_op(b, down, qd_arena_printf(b->arena, "%s_lora", out), adapters * (int64_t)lora->rank);
    double factor = qd_lora_scale(lora);
    if (factor != 1.0)
        op.x = qd_declare_op(b, (qd_decl_op){QD_DECL_SCALE, .x = op.x, .y = -1, .factor = factor},
                             qd_arena_printf(b->arena, "%s_lora_scaled", out), adapters * (int64_t)lora->rank);
    return qd_declare_op(b, op, out, cols);
}

qd_val qd_linear(qd_layer *b, qd_val x, const qd_linear_part *parts, int count, bool bias, double init_std, const char *out)
{
    qd_decl_op op = {QD_DECL_LINEAR, .x = x, .y = -1};
    int64_t in = x >= 0 ? b->values[x].cols : 0, cols = 0;
    adapter_part adapters[QD_PARTS_MOST];
    bool adapts = false;
    b->fuse++;
    op.weight = (qd_weight){b->param_count, count};
    for (int i = 0; i < count; i++) {
        add_param(b, qd_arena_printf(b->arena, "%s.weight", parts[i].name), parts[i].out, in, QD_INIT_NORMAL, init_std, parts[i].split);
        cols += parts[i].out;
        adapts = adapts || qd_lora_takes(&b->model->lora, parts[i].name);
        if (i < QD_PARTS_MOST)
            adapters[i] = (adapter_part){parts[i].name, parts[i].out, parts[i].split, -1, 0};
    }
    b->fuse++;
    op.weight2 = (qd_weight){b->param_count, bias ? count : 0};
    for (int i = 0; i < count && bias; i++)
        add_param(b, qd_arena_printf(b->arena, "%s.bias", parts[i].name), parts[i].out, 0, QD_INIT_ZERO, 0.0,
                  parts[i].split == QD_SPLIT_COLS ? QD_SPLIT_NONE : parts[i].split);
    if (!adapts || count > QD_PARTS_MOST)
        return qd_declare_op(b, op, out, cols);
    qd_val y = qd_declare_op(b, op, qd_arena_printf(b->arena, "%s_frozen", out), cols);
    return adapted(b, x, y, -1, op.weight, adapters, count, count, out);
}

double qd_residual_std(const qd_model *m)
{
    return m->init_std / sqrt(2.0 * m->layers);
}

qd_val qd_attention_gqa(qd_layer *b, qd_val x)
{
    return qd_attention_as(b, x, 0);
}

qd_val qd_attention_in(qd_layer *b, qd_val x, int64_t window)
{
    return qd_attention_as(b, x, window > 0 ? QD_ATTENTION_WINDOW : 0);
}

int qd_attention_variant(const qd_model *m, int layer)
{
    bool unrotated = m->position == QD_POSITION_ROPE && !qd_model_has_rope(m, layer);
    return (qd_model_has_window(m, layer) ? QD_ATTENTION_WINDOW : 0) | (unrotated ? QD_ATTENTION_NO_ROPE : 0);
}

bool qd_decl_reads(const qd_decl_op *op, qd_val value)
{
    return op->x == value || op->y == value || (op->kind == QD_DECL_LATENT_QKV && op->z == value);
}

const qd_decl_op *qd_layer_op(const qd_layer *b, qd_decl_kind kind)
{
    for (int i = 0; i < b->op_count; i++)
        if (b->ops[i].kind == kind)
            return &b->ops[i];
    return NULL;
}

int64_t qd_layer_window(const qd_layer *b)
{
    const qd_decl_op *op = qd_layer_op(b, QD_DECL_ATTENTION);
    return op ? op->window : 0;
}

qd_val qd_attention_as(qd_layer *b, qd_val x, int variant)
{
    const bool windowed = (variant & QD_ATTENTION_WINDOW) != 0;
    const qd_model *m = b->model;
    int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
    const qd_linear_part qkv[] = {{"attn.q", q, QD_SPLIT_ROWS}, {"attn.k", kv, QD_SPLIT_KV}, {"attn.v", kv, QD_SPLIT_KV}};
    x = qd_linear(b, x, qkv, 3, m->qkv_bias, m->init_std, m->qk_norm ? "qkv_before_norm" : "qkv");
    if (m->qk_norm) {
        bool wide = m->qk_over == QD_QK_WIDTH; /* weights are then sharded with the heads */
        qd_decl_op op = {wide ? QD_DECL_QK_NORM : QD_DECL_HEAD_NORM, .x = x, .y = -1};
        op.weight = qd_declare_vector(b, "attn.q_norm.weight", wide ? q : m->head_dim, norm_init(m), wide ? QD_SPLIT_ROWS : QD_SPLIT_HEADS);
        op.weight2 = qd_declare_vector(b, "attn.k_norm.weight", wide ? kv : m->head_dim, norm_init(m), wide ? QD_SPLIT_KV : QD_SPLIT_HEADS);
        x = qd_declare_op(b, op, "qkv", q + 2 * kv);
    }
    if (m->clip_qkv > 0.0)
        x = qd_declare_op(b, (qd_decl_op){QD_DECL_CLIP, .x = x, .y = -1}, "qkv_clipped", q + 2 * kv);
    if (m->position == QD_POSITION_ROPE && !(variant & QD_ATTENTION_NO_ROPE)) {
        qd_decl_op op = {QD_DECL_ROPE, .x = x, .y = -1, .local = windowed && qd_rope_is_local(m)};
        x = qd_declare_op(b, op, "qkv_turned", q + 2 * kv);
    }
    qd_decl_op attention = {QD_DECL_ATTENTION, .x = x, .y = -1, .window = windowed ? m->window : 0};
    if (m->sinks) {
        attention.weight = qd_declare_vector(b, "attn.sinks", m->heads, QD_INIT_NORMAL, QD_SPLIT_ROWS);
        if (!b->no_memory)
            b->params[b->param_count - 1].init_std = m->init_std;
    }
    x = qd_declare_op(b, attention, "attended", q);
    return qd_linear(b, x, &(qd_linear_part){"attn.out", m->hidden, QD_SPLIT_COLS}, 1, m->out_bias, qd_residual_std(m), "attn_branch");
}

/* A gated or plain MLP of inner width `ffn` whose parameters start with `name`. */
static qd_val mlp(qd_layer *b, qd_val x, const char *name, int64_t ffn, qd_split in_split, qd_split out_split, const char *const out[3])
{
    const qd_model *m = b->model;
    bool gated = qd_activation_is_gated(m->activation), bias = in_split == QD_SPLIT_ROWS && m->mlp_bias;
    const qd_linear_part up[] = {{qd_arena_printf(b->arena, "%s.gate", name), ffn, in_split},
                                 {qd_arena_printf(b->arena, "%s.up", name), ffn, in_split}};
    x = gated ? qd_linear(b, x, up, 2, bias, m->init_std, out[0]) : qd_linear(b, x, &up[1], 1, bias, m->init_std, out[0]);
    x = qd_declare_op(b, (qd_decl_op){QD_DECL_ACTIVATION, .x = x, .y = -1}, out[1], ffn);
    const qd_linear_part down = {qd_arena_printf(b->arena, "%s.down", name), m->hidden, out_split};
    return qd_linear(b, x, &down, 1, bias, qd_residual_std(m), out[2]);
}

qd_val qd_mlp(qd_layer *b, qd_val x)
{
    static const char *const names[] = {"up", "active", "mlp_branch"};
    return mlp(b, x, "mlp", b->model->ffn, QD_SPLIT_ROWS, QD_SPLIT_COLS, names);
}

/* The matrices of all experts for one grouped GEMM: those of expert 0, of expert 1, … `dim`: the
 * dimension that etp shards. */
static qd_val grouped_linear(qd_layer *b, qd_val x, qd_val route, const char *const *names, int count, int64_t out, int64_t in, int dim,
                             double std, const char *name)
{
    int experts = b->model->moe.experts;
    qd_decl_op op = {QD_DECL_GROUPED_LINEAR, .x = x, .y = route};
    adapter_part *adapters = QD_ARENA_NEW(b->arena, adapter_part, experts * count);
    bool adapts = false;
    b->fuse++;
    op.weight = (qd_weight){b->param_count, experts * count};
    for (int i = 0; i < experts; i++)
        for (int k = 0; k < count; k++) {
            const char *full = qd_arena_printf(b->arena, "mlp.experts.%d.%s", i, names[k]);
            qd_decl_param *p =
                add_param(b, qd_arena_printf(b->arena, "%s.weight", full ? full : ""), out, in, QD_INIT_NORMAL, std, QD_SPLIT_NONE);
            p->expert = i;
            p->expert_dim = (int8_t)dim;
            adapts = adapts || (full && qd_lora_takes(&b->model->lora, full));
            if (adapters && full)
                adapters[i * count + k] = (adapter_part){full, out, QD_SPLIT_NONE, i, dim};
        }
    b->fuse++;
    op.weight2 = (qd_weight){b->param_count, b->model->mlp_bias ? experts * count : 0};
    for (int i = 0; i < op.weight2.count; i++) /* etp shards biases by outputs, also those of partial sums: each rank adds its part */
        add_param(b, qd_arena_printf(b->arena, "mlp.experts.%d.%s.bias", i / count, names[i % count]), out, 0, QD_INIT_ZERO, 0.0,
                  QD_SPLIT_NONE)->expert = i / count;
    if (!adapters)
        b->no_memory = true;
    if (!adapts || b->no_memory)
        return qd_declare_op(b, op, name, count * out);
    qd_val y = qd_declare_op(b, op, qd_arena_printf(b->arena, "%s_frozen", name), count * out);
    return adapted(b, x, y, route, op.weight, adapters, experts * count, count, name);
}

/* The result of the shared experts, times a gate that each row of x computes. */
static qd_val gated(qd_layer *b, qd_val x, qd_val shared)
{
    const qd_model *m = b->model;
    qd_val gate = qd_linear(b, x, &(qd_linear_part){"mlp.shared_gate", 1, QD_SPLIT_NORM}, 1, false, m->init_std, "shared_gate");
    if (gate >= 0)
        b->values[gate].fp32 = true;
    return qd_declare_op(b, (qd_decl_op){QD_DECL_GATE, .x = shared, .y = gate}, "shared_gated", m->hidden);
}

qd_val qd_mlp_experts(qd_layer *b, qd_val x)
{
    static const char *const gate_up[] = {"gate", "up"}, *const down[] = {"down"};
    static const char *const shared_names[] = {"shared_up", "shared_active", "shared_out"};
    const qd_model *m = b->model;
    const qd_moe *e = &m->moe;
    /* Router and shared experts process the same rows of the residual stream as norms do. */
    qd_val logits = qd_linear(b, x, &(qd_linear_part){"mlp.router", e->experts, QD_SPLIT_NORM}, 1, e->logit_bias, m->init_std,
                              "router_logits");
    if (logits >= 0)
        b->values[logits].fp32 = true;
    qd_decl_op route = {QD_DECL_ROUTE, .x = logits, .y = -1};
    if (e->bias) {
        route.weight = qd_declare_vector(b, "mlp.router.bias", e->experts, QD_INIT_ZERO, QD_SPLIT_NORM);
        if (!b->no_memory)
            b->params[b->param_count - 1].counts = true;
    }
    qd_val r = qd_declare_op(b, route, "choice", e->per_token), shared = -1;
    qd_val rows = qd_declare_op(b, (qd_decl_op){QD_DECL_SEND, .x = x, .y = r}, "rows by expert", m->hidden);
    if (e->shared > 0) /* overlaps with the dispatch of rows */
        shared = mlp(b, x, "mlp.shared", qd_moe_shared_width(e), QD_SPLIT_NORM, QD_SPLIT_NORM, shared_names);
    if (e->shared > 0 && e->shared_gate)
        shared = gated(b, x, shared);
    rows = grouped_linear(b, rows, r, gate_up, 2, e->ffn, m->hidden, 0, m->init_std, "expert_up");
    rows = qd_declare_op(b, (qd_decl_op){QD_DECL_GROUPED_ACTIVATION, .x = rows, .y = r}, "expert_active", e->ffn);
    rows = grouped_linear(b, rows, r, down, 1, m->hidden, e->ffn, 1, qd_residual_std(m), "expert_out");
    qd_val sum = qd_declare_op(b, (qd_decl_op){QD_DECL_COLLECT, .x = rows, .y = r}, "expert_sum", m->hidden);
    return shared < 0 ? sum : qd_declare_op(b, (qd_decl_op){QD_DECL_ADD, .x = shared, .y = sum}, "mlp_branch", m->hidden);
}

static qd_val dropout(qd_layer *b, qd_val x, const char *out)
{
    qd_decl_op op = {QD_DECL_DROPOUT, .x = x, .y = -1, .site = b->site++};
    return b->model->dropout > 0.0 ? qd_declare_op(b, op, out, b->model->hidden) : x;
}

qd_val qd_residual(qd_layer *b, qd_val x, qd_val branch, const char *dropped, const char *out)
{
    b->site += b->site == 0; /* site 0 is the embedding */
    branch = dropout(b, branch, dropped);
    return qd_declare_op(b, (qd_decl_op){QD_DECL_ADD, .x = x, .y = branch}, out, b->model->hidden);
}

qd_val qd_embedding(qd_layer *b)
{
    const qd_model *m = b->model;
    qd_decl_op op = {QD_DECL_EMBED, .x = -1, .y = -1};
    op.weight = add_table(b, "tokens.weight", m->vocab, QD_SPLIT_ROWS);
    if (m->position == QD_POSITION_LEARNED)
        op.weight2 = add_table(b, "positions.weight", m->max_seq, QD_SPLIT_NONE);
    qd_val x = qd_declare_op(b, op, m->embed_scaled ? "embedded_unscaled" : "embedded", m->hidden);
    if (m->embed_scaled)
        x = qd_declare_op(b, (qd_decl_op){QD_DECL_SCALE, .x = x, .y = -1, .factor = sqrt((double)m->hidden)}, "embedded", m->hidden);
    return dropout(b, x, "embedded_dropped");
}

/* A table that shares the values of the token table. */
static qd_weight add_tied(qd_layer *b, const char *suffix, bool tied)
{
    qd_weight table = add_table(b, suffix, b->model->vocab, QD_SPLIT_ROWS);
    if (!b->no_memory)
        b->params[b->param_count - 1].tied = tied;
    return table;
}

qd_weight qd_head_loss(qd_layer *b, qd_val x)
{
    qd_decl_op op = {QD_DECL_LOSS, .x = x, .y = -1};
    op.weight = add_tied(b, "weight", b->model->tied);
    qd_declare_op(b, op, NULL, 0);
    return op.weight;
}

/* The token table as the head reads it: its own matrix if that is tied, else a parameter that all
 * prediction modules share. */
static qd_weight ahead_table(qd_layer *b, qd_weight matrix)
{
    if (b->model->tied)
        return matrix;
    const qd_decl_op *embed = qd_layer_op(b, QD_DECL_EMBED);
    return embed ? embed->weight : add_tied(b, "tokens.weight", true);
}

qd_val qd_ahead_begin(qd_layer *b, qd_val x, qd_weight matrix, int k)
{
    const qd_model *m = b->model;
    qd_decl_op embed = {QD_DECL_EMBED, .x = -1, .y = -1};
    embed.weight = ahead_table(b, matrix);
    b->ahead = k;
    qd_val e = qd_norm(b, qd_declare_op(b, embed, "embedded_ahead", m->hidden), "embed_norm", "embedded_normed");
    qd_val h = qd_norm(b, x, "hidden_norm", "hidden_normed");
    /* One matrix in the paper, which reads both side by side. */
    e = qd_linear(b, e, &(qd_linear_part){"embed_proj", m->hidden, QD_SPLIT_NORM}, 1, false, m->init_std, "embedded_part");
    h = qd_linear(b, h, &(qd_linear_part){"hidden_proj", m->hidden, QD_SPLIT_NORM}, 1, false, m->init_std, "hidden_part");
    return qd_declare_op(b, (qd_decl_op){QD_DECL_ADD, .x = e, .y = h}, "joined", m->hidden);
}

qd_val qd_ahead_end(qd_layer *b, qd_val x, qd_weight matrix)
{
    x = qd_norm(b, x, "norm", "normed_ahead");
    qd_declare_op(b, (qd_decl_op){QD_DECL_LOSS, .x = x, .y = -1, .weight = matrix}, NULL, 0);
    b->ahead = b->site = 0; /* no dropout, so no sites */
    return x;
}
