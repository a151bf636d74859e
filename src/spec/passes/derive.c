/* Derives the op lists of a rank from a declaration by running the passes in order. */
#include "spec/layout/tensor.h"
#include "spec/passes/passes.h"

#include <string.h>

static qd_status check(const qd_class_writer *w)
{
    if (w->no_memory)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the op lists of %s", w->module->name);
    return w->wrong ? QD_FAIL(QD_SYSTEM, "%s: %s", w->module->name, w->wrong) : QD_OK;
}

static qd_status begin(const qd_ledger *l, int decl, const qd_class_config *config, qd_arena *arena, qd_class_writer *w)
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
    w->weights = QD_ARENA_NEW(arena, int, w->decl->param_count + 1);
    if (!w->weights || !qd_class_reserve_slot(w) || !qd_class_reserve_op(w))
        return QD_NO_MEMORY;
    memset(w->weights, 0xff, (size_t)w->decl->param_count * sizeof *w->weights);
    return QD_OK;
}

qd_status qd_module_class_create(const qd_ledger *ledger, int decl, const qd_class_config *config, qd_arena *arena, qd_module_class *out)
{
    qd_class_writer w;
    QD_TRY(begin(ledger, decl, config, arena, &w));
    memset(out, 0, sizeof *out);
    qd_pass_forward(&w);
    QD_TRY(check(&w));
    if (config->training) {
        qd_pass_gradient(&w);
        QD_TRY(check(&w));
    }
    qd_pass_place(&w);
    QD_TRY(check(&w));
    qd_pass_fuse(&w);
    QD_TRY(check(&w));
    qd_pass_order(&w);
    qd_pass_alias(&w);
    QD_TRY(check(&w));
    out->recompute = w.module->layer >= 0 && config->training ? config->recompute : QD_RECOMPUTE_NONE;
    QD_TRY(qd_pass_recompute(&w, out->recompute));
    QD_TRY(qd_pass_overlap(&w, config->tensor_pieces));
    QD_TRY(qd_pass_settle(&w));
    QD_TRY(qd_pass_lifetimes(&w, out));
    out->slot_count = w.slot_count;
    out->op_count = w.op_count;
    out->slots = w.slots;
    out->ops = w.ops;
    return QD_OK;
}
