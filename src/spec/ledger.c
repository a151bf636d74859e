#include "spec/ledger.h"

#include "spec/context.h"
#include "spec/experts.h"
#include "spec/tensor.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Collects parameters while the modules are written down; counts first, then fills. */
typedef struct builder {
    qd_ledger *ledger;
    qd_arena *arena;
    int module, fuse;
    int expert; /* whose parameters are being added, -1: none' */
    bool failed;
} builder;

static void add_param(builder *b, const char *suffix, int64_t rows, int64_t cols, qd_init init, double std, qd_split split)
{
    qd_ledger *l = b->ledger;
    qd_module *module = &l->modules[b->module];
    int index = l->param_count++;
    module->param_count++;
    if (!l->params)
        return; /* counting pass */
    qd_param *p = &l->params[index];
    p->name = qd_arena_printf(b->arena, "%s.%s", module->name, suffix);
    b->failed = b->failed || !p->name;
    p->ndim = cols > 0 ? 2 : 1;
    p->shape[0] = rows;
    p->shape[1] = cols > 0 ? cols : 1;
    p->init = init;
    p->init_std = std;
    p->decay = p->ndim > 1;
    p->module = b->module;
    p->fuse = b->fuse;
    p->tied_to = -1;
    p->expert = b->expert;
    /* Each rank of dp and cp sees other tokens, so gradients are partial sums. */
    p->gradient[QD_AXIS_DP].kind = QD_PARTIAL;
    p->gradient[QD_AXIS_CP].kind = QD_PARTIAL;
    qd_tensor_place(&l->model, &l->mesh, split, p);
}

static void add_norm(builder *b, const char *weight, const char *bias)
{
    const qd_model *m = &b->ledger->model;
    b->fuse++;
    add_param(b, weight, m->hidden, 0, QD_INIT_ONE, 0.0, QD_SPLIT_NORM);
    if (m->norm == QD_NORM_LAYER) {
        b->fuse++;
        add_param(b, bias, m->hidden, 0, QD_INIT_ZERO, 0.0, QD_SPLIT_NORM);
    }
}

/* One product's matrix, made of `parts` logical matrices with a common input, and their biases. */
typedef struct linear_part {
    const char *weight, *bias;
    int64_t out;
    qd_split split; /* of the matrix; a bias goes with the rows */
} linear_part;

static void add_linear(builder *b, const linear_part *parts, int count, int64_t in, bool bias, double std)
{
    b->fuse++;
    for (int i = 0; i < count; i++)
        add_param(b, parts[i].weight, parts[i].out, in, QD_INIT_NORMAL, std, parts[i].split);
    if (!bias)
        return;
    b->fuse++;
    for (int i = 0; i < count; i++)
        add_param(b, parts[i].bias, parts[i].out, 0, QD_INIT_ZERO, 0.0, parts[i].split == QD_SPLIT_COLS ? QD_SPLIT_NONE : parts[i].split);
}

static void add_embed(builder *b)
{
    const qd_model *m = &b->ledger->model;
    b->fuse++;
    add_param(b, "tokens.weight", m->vocab, m->hidden, QD_INIT_NORMAL, m->init_std, QD_SPLIT_ROWS);
    if (m->position == QD_POSITION_LEARNED) {
        b->fuse++;
        add_param(b, "positions.weight", m->max_seq, m->hidden, QD_INIT_NORMAL, m->init_std, QD_SPLIT_NONE);
    }
}

/* One expert's matrix; all of one product lie one after another, so that grouped products run over them. */
static void add_expert(builder *b, int expert, const char *matrix, int64_t out, int64_t in, double std)
{
    char suffix[64];
    snprintf(suffix, sizeof suffix, "mlp.experts.%d.%s.weight", expert, matrix);
    b->expert = expert;
    add_param(b, suffix, out, in, QD_INIT_NORMAL, std, QD_SPLIT_NONE);
    b->expert = -1;
    if (!b->ledger->params)
        return;
    qd_param *p = &b->ledger->params[b->ledger->param_count - 1];
    p->expert_dim = matrix[0] == 'd'; /* the inner width: rows of gate and up, columns of down */
    p->family = qd_experts_apart(&b->ledger->model, &b->ledger->mesh);
}

/* The router, the shared experts, then all experts: gate and up of each, down of each. Router and shared experts see the rows of
 * the port alone, as norms do. */
static void add_experts(builder *b, double residual_std)
{
    const qd_model *m = &b->ledger->model;
    const qd_moe *e = &m->moe;
    int64_t shared = e->shared * e->ffn;
    add_linear(b, (linear_part[]){{"mlp.router.weight", NULL, e->experts, QD_SPLIT_NORM}}, 1, m->hidden, false, m->init_std);
    if (e->bias) {
        b->fuse++;
        add_param(b, "mlp.router.bias", e->experts, 0, QD_INIT_ZERO, 0.0, QD_SPLIT_NORM);
        if (b->ledger->params)
            b->ledger->params[b->ledger->param_count - 1].counts = true;
    }
    if (shared > 0) {
        add_linear(
            b,
            (linear_part[]){{"mlp.shared.gate.weight", NULL, shared, QD_SPLIT_NORM}, {"mlp.shared.up.weight", NULL, shared, QD_SPLIT_NORM}},
            2, m->hidden, false, m->init_std);
        add_linear(b, (linear_part[]){{"mlp.shared.down.weight", NULL, m->hidden, QD_SPLIT_NORM}}, 1, shared, false, residual_std);
    }
    b->fuse++;
    for (int i = 0; i < e->experts; i++) {
        add_expert(b, i, "gate", e->ffn, m->hidden, m->init_std);
        add_expert(b, i, "up", e->ffn, m->hidden, m->init_std);
    }
    b->fuse++;
    for (int i = 0; i < e->experts; i++)
        add_expert(b, i, "down", m->hidden, e->ffn, residual_std);
}

static void add_block(builder *b, bool experts)
{
    const qd_model *m = &b->ledger->model;
    int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
    /* Projections that write into the residual stream start smaller, so that its variance does not grow with depth. */
    double residual_std = m->init_std / sqrt(2.0 * m->layers);
    add_norm(b, "attn_norm.weight", "attn_norm.bias");
    add_linear(b,
               (linear_part[]){{"attn.q.weight", "attn.q.bias", q, QD_SPLIT_ROWS},
                               {"attn.k.weight", "attn.k.bias", kv, QD_SPLIT_KV},
                               {"attn.v.weight", "attn.v.bias", kv, QD_SPLIT_KV}},
               3, m->hidden, m->qkv_bias, m->init_std);
    if (m->qk_norm) {
        b->fuse++;
        add_param(b, "attn.q_norm.weight", m->head_dim, 0, QD_INIT_ONE, 0.0, QD_SPLIT_HEADS);
        b->fuse++;
        add_param(b, "attn.k_norm.weight", m->head_dim, 0, QD_INIT_ONE, 0.0, QD_SPLIT_HEADS);
    }
    add_linear(b, (linear_part[]){{"attn.out.weight", "attn.out.bias", m->hidden, QD_SPLIT_COLS}}, 1, q, m->linear_bias, residual_std);
    add_norm(b, "mlp_norm.weight", "mlp_norm.bias");
    if (experts) {
        add_experts(b, residual_std);
        return;
    }
    if (m->activation == QD_ACT_SWIGLU)
        add_linear(b,
                   (linear_part[]){{"mlp.gate.weight", "mlp.gate.bias", m->ffn, QD_SPLIT_ROWS},
                                   {"mlp.up.weight", "mlp.up.bias", m->ffn, QD_SPLIT_ROWS}},
                   2, m->hidden, m->linear_bias, m->init_std);
    else
        add_linear(b, (linear_part[]){{"mlp.up.weight", "mlp.up.bias", m->ffn, QD_SPLIT_ROWS}}, 1, m->hidden, m->linear_bias, m->init_std);
    add_linear(b, (linear_part[]){{"mlp.down.weight", "mlp.down.bias", m->hidden, QD_SPLIT_COLS}}, 1, m->ffn, m->linear_bias, residual_std);
}

static void add_head(builder *b)
{
    const qd_model *m = &b->ledger->model;
    add_norm(b, "norm.weight", "norm.bias");
    b->fuse++;
    add_param(b, "weight", m->vocab, m->hidden, QD_INIT_NORMAL, m->init_std, QD_SPLIT_ROWS);
    if (m->tied && b->ledger->params)
        b->ledger->params[b->ledger->param_count - 1].tied_to = 0;
}

static void add_all(builder *b)
{
    qd_ledger *l = b->ledger;
    l->param_count = 0;
    for (b->module = 0; b->module < l->module_count; b->module++) {
        l->modules[b->module].param_begin = l->param_count;
        l->modules[b->module].param_count = 0;
        switch (l->modules[b->module].kind) {
        case QD_MODULE_EMBED: add_embed(b); break;
        case QD_MODULE_BLOCK: add_block(b, false); break;
        case QD_MODULE_MOE: add_block(b, true); break;
        case QD_MODULE_HEAD: add_head(b); break;
        }
    }
}

qd_status qd_ledger_create(const qd_model *model, const qd_mesh *mesh, qd_arena *arena, qd_ledger **ledger)
{
    QD_TRY(qd_model_validate(model));
    QD_TRY(qd_tensor_check(model, mesh));
    QD_TRY(qd_experts_check(model, mesh));
    qd_ledger *l = QD_ARENA_NEW(arena, qd_ledger, 1);
    if (!l)
        return QD_NO_MEMORY;
    l->model = *model;
    l->mesh = *mesh;
    l->module_count = model->layers + 2;
    l->modules = QD_ARENA_NEW(arena, qd_module, l->module_count);
    l->ports = QD_ARENA_NEW(arena, qd_port, l->module_count - 1);
    if (!l->modules || !l->ports)
        return QD_NO_MEMORY;
    for (int i = 0; i < l->module_count; i++) {
        bool first = i == 0, last = i == l->module_count - 1;
        l->modules[i].kind = first                                ? QD_MODULE_EMBED
                             : last                               ? QD_MODULE_HEAD
                             : qd_model_has_experts(model, i - 1) ? QD_MODULE_MOE
                                                                  : QD_MODULE_BLOCK;
        l->modules[i].layer = first || last ? -1 : i - 1;
        l->modules[i].name = first ? "embed" : last ? "head" : qd_arena_printf(arena, "block.%d", i - 1);
        if (!l->modules[i].name)
            return QD_NO_MEMORY;
    }
    /* Activations are cut over the ranks that hold different tokens. */
    for (int i = 0; i < l->module_count - 1; i++) {
        l->ports[i].place[QD_AXIS_DP] = (qd_place){QD_SHARD, 0, 0};
        l->ports[i].place[QD_AXIS_CP] = (qd_place){QD_SHARD, 0, 0};
        if (mesh->sp)
            l->ports[i].place[QD_AXIS_TP] = (qd_place){QD_SHARD, 0, 0};
    }
    builder b = {.ledger = l, .arena = arena, .expert = -1};
    add_all(&b);
    l->params = QD_ARENA_NEW(arena, qd_param, l->param_count);
    if (!l->params)
        return QD_NO_MEMORY;
    add_all(&b);
    if (b.failed)
        return QD_NO_MEMORY;
    *ledger = l;
    return QD_OK;
}

qd_atom qd_ledger_atom(const qd_ledger *ledger, int param, int rank)
{
    const qd_param *p = &ledger->params[param];
    int coords[QD_AXIS_COUNT];
    qd_mesh_coords(&ledger->mesh, rank, coords);
    if (ledger->modules[p->module].stage_rank != coords[QD_AXIS_PP])
        return (qd_atom){{0, 0}, {0, 0}};
    if (p->expert >= 0)
        return qd_expert_atom(ledger, p, rank);
    qd_atom atom = {{0, 0}, {p->shape[0], p->shape[1]}};
    /* From the slowest axis to the fastest: each cuts what the ones before it left. */
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--) {
        if (p->value[axis].kind != QD_SHARD)
            continue;
        int dim = p->value[axis].dim, repeat = p->value[axis].repeat > 1 ? p->value[axis].repeat : 1;
        int64_t offset, length;
        qd_slice(atom.length[dim], ledger->mesh.degree[axis] / repeat, coords[axis] / repeat, &offset, &length);
        atom.begin[dim] += offset;
        atom.length[dim] = length;
    }
    return atom;
}

int64_t qd_atom_count(const qd_atom *atom, int ndim)
{
    int64_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= atom->length[d];
    return count;
}

bool qd_ledger_counts(const qd_ledger *ledger, int param, int rank)
{
    const qd_place *place = &ledger->params[param].value[QD_AXIS_TP];
    if (ledger->params[param].family == 1)
        return true; /* all ranks with the same box are of its data group */
    int coord = qd_mesh_group_coord(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_TP), rank);
    if (place->kind == QD_SHARD)
        return place->repeat <= 1 || coord % place->repeat == 0;
    return coord == 0;
}

qd_group qd_ledger_data_group(const qd_ledger *ledger, int family)
{
    return family == 1 ? qd_expert_data_group(&ledger->mesh) : qd_group_whole(&ledger->mesh, QD_AXES_DATA);
}

qd_group qd_ledger_tensor_group(const qd_ledger *ledger, int param)
{
    const qd_place *place = &ledger->params[param].gradient[QD_AXIS_TP];
    qd_group group = qd_group_whole(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_TP));
    if (place->kind != QD_PARTIAL)
        group.size = 1;
    else if (place->repeat > 0)
        group.size = place->repeat;
    return group;
}

int64_t qd_ledger_rows(const qd_ledger *ledger, int rank, int64_t seq)
{
    return qd_context_rows(seq, ledger->mesh.degree[QD_AXIS_CP], qd_mesh_group_coord(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_CP), rank));
}

void qd_ledger_port_rows(const qd_ledger *ledger, int rank, int64_t rows, int64_t *first, int64_t *count)
{
    int tp = ledger->mesh.sp ? ledger->mesh.degree[QD_AXIS_TP] : 1;
    qd_slice(rows, tp, qd_mesh_group_coord(&ledger->mesh, QD_AXIS_BIT(QD_AXIS_TP), rank) % tp, first, count);
}

unsigned qd_ledger_gradient_axes(const qd_ledger *ledger, int param)
{
    unsigned axes = 0;
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        if (ledger->params[param].gradient[axis].kind == QD_PARTIAL)
            axes |= QD_AXIS_BIT(axis);
    return axes;
}

int qd_ledger_find(const qd_ledger *ledger, const char *name)
{
    for (int i = 0; i < ledger->param_count; i++)
        if (strcmp(ledger->params[i].name, name) == 0)
            return i;
    return -1;
}
