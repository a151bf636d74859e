/* Derives the op lists of a rank from a declaration by running the passes in order. */
#include "spec/layout/tensor.h"
#include "spec/passes/passes.h"

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
    w->weights = qd_class_table(w, w->decl->param_count);
    w->recompute = w->module->layer >= 0 && config->training ? config->recompute : QD_RECOMPUTE_NONE;
}

static void (*const passes[])(qd_class_writer *w) = {
    qd_pass_forward, qd_pass_gradient,  qd_pass_place,   qd_pass_fuse,   qd_pass_order,
    qd_pass_quantize, qd_pass_alias,    qd_pass_recompute, qd_pass_overlap, qd_pass_settle,
};

qd_status qd_module_class_create(const qd_ledger *ledger, int decl, const qd_class_config *config, qd_arena *arena, qd_module_class *out)
{
    qd_class_writer w;
    begin(ledger, decl, config, arena, &w);
    *out = (qd_module_class){.recompute = w.recompute};
    for (size_t i = 0; i < sizeof passes / sizeof *passes && !w.wrong; i++)
        passes[i](&w);
    if (!w.wrong)
        qd_pass_lifetimes(&w, out);
    if (w.wrong)
        return QD_FAIL(w.status, "%s: %s", w.module->name, w.wrong);
    out->slot_count = w.slot_count;
    out->op_count = w.op_count;
    out->slots = w.slots;
    out->ops = w.ops;
    return QD_OK;
}
