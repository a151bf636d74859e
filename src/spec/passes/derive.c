/* Derives the op lists of a rank from a declaration by running the passes in order. */
#include "spec/layout/tensor.h"
#include "spec/passes/passes.h"

#include <string.h>

enum { QD_CLASS_NUMBERS, NUMBERS };
_Static_assert(NUMBERS == QD_CLASS_NUMBER_COUNT, "passes.h says how many");

static void set_numbers(qd_class_writer *w)
{
    const qd_model *m = w->model;
    const qd_class_config *c = w->config;
    int64_t most = c->batch * qd_context_most_rows(c->seq, w->ledger->mesh.degree[QD_AXIS_CP]);
    int64_t q = (int64_t)w->heads * m->head_dim, k = (int64_t)w->kv_heads * m->head_dim;
    const int64_t number[NUMBERS] = {
        [ONE] = 1, [TWO] = 2, [ROWS] = w->rows, [WHOLE_ROWS] = c->batch * c->seq, [MOST_ROWS] = most, [PORT_ROWS] = w->port_rows,
        [LOAD_ROWS] = m->moe.balance == QD_BALANCE_SEQUENCE ? w->seq : most, [SEQ] = c->seq,
        [POSITIONS] = qd_positions(c->seq, c->context), [CACHE_LENGTH] = c->context, [HIDDEN] = m->hidden, [HEADS] = w->heads,
        [KV_HEADS] = w->kv_heads, [ALL_HEADS] = w->heads + w->kv_heads, [Q] = q, [K] = k, [QK] = q + k,
        [KV] = qd_model_qkv(m, 0, w->kv_heads), [QKV_COLS] = qd_model_qkv(m, w->heads, w->kv_heads),
        [O_COLS] = (int64_t)w->heads * qd_model_v_dim(m), [EXPANDED_COLS] = (int64_t)w->heads * (m->qk_nope_head_dim + m->v_head_dim),
        [COUNTED_KEYS] = qd_tensor_counts_keys(m, &w->ledger->mesh, c->rank) ? k : 0, [EXPERTS] = m->moe.experts,
        [PER_TOKEN] = m->moe.per_token};
    memcpy(w->number, number, sizeof number);
}

static void begin(const qd_ledger *l, int decl, const qd_class_config *config, qd_arena *arena, qd_class_writer *w)
{
    const qd_mesh *mesh = &l->mesh;
    int tp = mesh->degree[QD_AXIS_TP], stage = qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_PP), config->rank);
    *w = (qd_class_writer){.ledger = l,
                           .model = &l->model,
                           .config = config,
                           .decl = &l->decls[decl],
                           .arena = arena,
                           .tensor = qd_group_whole(mesh, QD_AXIS_BIT(QD_AXIS_TP)),
                           .tensor_coord = qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_TP), config->rank)};
    w->heads = l->model.heads / tp;
    w->kv_heads = qd_tensor_kv_heads(&l->model, &l->mesh);
    w->seq = qd_ledger_rows(l, config->rank, config->seq);
    w->rows = config->batch * w->seq;
    qd_ledger_port_rows(l, config->rank, w->rows, &w->port_first, &w->port_rows);
    for (int i = 0; i < l->module_count && !w->module; i++)
        if (l->modules[i].decl == decl && l->modules[i].stage_rank == stage)
            w->module = &l->modules[i];
    set_numbers(w);
    w->weights = qd_class_table(w, w->decl->param_count);
}

static void (*const passes[])(qd_class_writer *w) = {
    qd_pass_forward, qd_pass_gradient,  qd_pass_place,   qd_pass_fuse,   qd_pass_order,     qd_pass_quantize,
    qd_pass_alias,   qd_pass_recompute, qd_pass_overlap, qd_pass_settle, qd_pass_lifetimes,
};

qd_status qd_module_class_create(const qd_ledger *ledger, int decl, const qd_class_config *config, qd_arena *arena, qd_module_class *out)
{
    qd_class_writer w;
    begin(ledger, decl, config, arena, &w);
    *out = (qd_module_class){.recompute = w.module->layer >= 0 && config->training ? config->recompute : QD_RECOMPUTE_NONE};
    w.out = out;
    for (size_t i = 0; i < sizeof passes / sizeof *passes && !w.wrong; i++)
        passes[i](&w);
    if (w.wrong)
        return QD_FAIL(w.status, "%s: %s", w.module->name, w.wrong);
    out->slot_count = w.slot_count;
    out->op_count = w.op_count;
    out->slots = w.slots;
    out->ops = w.ops;
    return QD_OK;
}
