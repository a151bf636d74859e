/* Builds the placement ledger from the declarations of a model's modules, and answers which box of
 * each parameter a rank holds. */
#include "spec/layout/ledger.h"

#include "spec/layout/context.h"
#include "spec/layout/experts.h"
#include "spec/layout/tensor.h"

#include <string.h>

/* Adds a declared parameter to a module: sets its name and its placement on the mesh. */
static qd_status add_param(qd_ledger *l, qd_arena *arena, int module, int fuse, const qd_decl_param *d)
{
    qd_param *p = &l->params[l->param_count++];
    p->name = qd_arena_printf(arena, "%s.%s", l->modules[module].name, d->suffix);
    if (!p->name)
        return QD_NO_MEMORY;
    p->ndim = d->cols > 0 ? 2 : 1;
    p->shape[0] = d->rows;
    p->shape[1] = d->cols > 0 ? d->cols : 1;
    p->init = d->init;
    p->init_std = d->init_std;
    p->decay = p->ndim > 1;
    p->module = module;
    p->fuse = fuse + d->fuse;
    p->tied_to = d->tied ? 0 : -1;
    p->counts = d->counts;
    p->adapter = d->adapter;
    p->ahead = d->ahead;
    p->frozen = l->model.lora.rank > 0 && !d->adapter;
    p->expert = d->expert;
    p->expert_dim = d->expert_dim;
    p->family = d->expert >= 0 && qd_experts_apart(&l->model, &l->mesh);
    /* Each rank of dp and cp sees different tokens, so gradients are partial sums. */
    p->gradient[QD_AXIS_DP].kind = QD_PARTIAL;
    p->gradient[QD_AXIS_CP].kind = QD_PARTIAL;
    qd_tensor_place(&l->model, &l->mesh, d->split, p);
    return qd_tensor_check_param(&l->mesh, p);
}

/* A family that ignores the fields by which layers differ would compute another model. */
static qd_status check_attention(const qd_ledger *l, const qd_family *family, int layer, const qd_layer *decl)
{
    const qd_model *m = &l->model;
    const qd_decl_op *rope = qd_layer_op(decl, QD_DECL_ROPE);
    if (layer < 0)
        return QD_OK;
    bool windowed = qd_model_has_window(m, layer);
    if (qd_layer_window(decl) != (windowed ? m->window : 0))
        return QD_FAIL(QD_UNSUPPORTED, "the %s family does not declare the window of layer %d: set model.window=0", family->name, layer);
    if (m->rope.nope_every > 0 && (rope != NULL) != qd_model_has_rope(m, layer))
        return QD_FAIL(QD_UNSUPPORTED, "the %s family declares the same positions in all layers: set model.nope_every=0", family->name);
    if (rope && rope->local != (windowed && qd_rope_is_local(m)))
        return QD_FAIL(QD_UNSUPPORTED, "the %s family declares the same angles in all layers: set model.rope_local_base=0", family->name);
    return QD_OK;
}

/* Creates the modules with their declarations: embedding, layers, head. */
static qd_status add_modules(qd_ledger *l, const qd_family *family, qd_arena *arena)
{
    if (family->variants < 1 || family->variants > QD_DECLARATIONS_MOST - 2)
        return QD_FAIL(QD_USAGE, "the %s family has %d variants of layers: 1 to %d are supported", family->name, family->variants,
                       QD_DECLARATIONS_MOST - 2);
    l->module_count = l->model.layers + 2;
    l->decl_count = family->variants + 2;
    l->modules = QD_ARENA_NEW(arena, qd_module, l->module_count);
    l->decls = QD_ARENA_NEW(arena, qd_layer, l->decl_count);
    l->ports = QD_ARENA_NEW(arena, qd_port, l->module_count - 1);
    if (!l->modules || !l->decls || !l->ports)
        return QD_NO_MEMORY;
    for (int i = 0; i < l->module_count; i++) {
        qd_module *module = &l->modules[i];
        bool first = i == 0, last = i == l->module_count - 1;
        module->layer = first || last ? -1 : i - 1;
        module->name = first ? "embed" : last ? "head" : qd_arena_printf(arena, "block.%d", i - 1);
        if (!module->name)
            return QD_NO_MEMORY;
        module->kind = first ? QD_MODULE_EMBED : last ? QD_MODULE_HEAD : QD_MODULE_LAYER;
        int variant = first || last ? 0 : family->variant(&l->model, i - 1);
        if (variant < 0 || variant >= family->variants)
            return QD_FAIL(QD_USAGE, "the %s family: layer %d is variant %d, and there are %d", family->name, i - 1, variant,
                           family->variants);
        module->decl = first ? 0 : last ? l->decl_count - 1 : 1 + variant;
        qd_layer *decl = &l->decls[module->decl];
        if (!decl->model)
            QD_TRY(qd_family_declare(family, &l->model, module->decl, arena, decl));
        QD_TRY(check_attention(l, family, module->layer, decl));
        module->param_begin = l->param_count;
        module->param_count = decl->param_count;
        l->param_count += decl->param_count;
    }
    return QD_OK;
}

qd_status qd_ledger_create(const qd_model *model, const qd_family *family, const qd_mesh *mesh, qd_arena *arena, qd_ledger **ledger)
{
    QD_TRY(qd_model_validate(model));
    QD_TRY(qd_tensor_check(model, mesh));
    QD_TRY(qd_experts_check(model, mesh));
    qd_ledger *l = QD_ARENA_NEW(arena, qd_ledger, 1);
    if (!l)
        return QD_NO_MEMORY;
    l->model = *model;
    l->mesh = *mesh;
    QD_TRY(add_modules(l, family ? family : qd_family_of(model), arena));
    /* Activations are sharded over the ranks that hold different tokens. */
    for (int i = 0; i < l->module_count - 1; i++) {
        l->ports[i].place[QD_AXIS_DP] = (qd_place){QD_SHARD, 0, 0};
        l->ports[i].place[QD_AXIS_CP] = (qd_place){QD_SHARD, 0, 0};
        if (mesh->sp)
            l->ports[i].place[QD_AXIS_TP] = (qd_place){QD_SHARD, 0, 0};
    }
    l->params = QD_ARENA_NEW(arena, qd_param, l->param_count);
    if (!l->params)
        return QD_NO_MEMORY;
    l->param_count = 0;
    for (int i = 0, fuse = 0; i < l->module_count; i++) {
        const qd_layer *decl = &l->decls[l->modules[i].decl];
        for (int k = 0; k < decl->param_count; k++)
            QD_TRY(add_param(l, arena, i, fuse, &decl->params[k]));
        fuse += decl->fuse + 1;
    }
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
    /* From the slowest axis to the fastest: each cuts what the axes before it left. */
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
        return true; /* all ranks with the same box are in its data group */
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

int qd_ledger_tied(const qd_ledger *ledger)
{
    const qd_module *head = &ledger->modules[ledger->module_count - 1];
    for (int i = head->param_begin; i < head->param_begin + head->param_count; i++)
        if (ledger->params[i].tied_to >= 0)
            return i;
    return -1;
}

int64_t qd_ledger_parameters(const qd_ledger *ledger)
{
    int64_t count = 0;
    for (int i = 0; i < ledger->param_count; i++)
        count += ledger->params[i].tied_to < 0 ? ledger->params[i].shape[0] * ledger->params[i].shape[1] : 0;
    return count;
}

int qd_ledger_find(const qd_ledger *ledger, const char *name)
{
    for (int i = 0; i < ledger->param_count; i++)
        if (strcmp(ledger->params[i].name, name) == 0)
            return i;
    return -1;
}

const qd_param *qd_ledger_adapter(const qd_ledger *ledger, const qd_param *matrix, char factor)
{
    static const char ending[] = ".weight";
    const qd_module *module = &ledger->modules[matrix->module];
    size_t length = strlen(matrix->name), stem = length - (sizeof ending - 1);
    if (ledger->model.lora.rank == 0 || matrix->adapter || length < sizeof ending || strcmp(matrix->name + stem, ending) != 0)
        return NULL;
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
        const qd_param *p = &ledger->params[i];
        if (p->adapter && strncmp(p->name, matrix->name, stem) == 0 && strncmp(p->name + stem, ".lora_", 6) == 0 &&
            p->name[stem + 6] == factor)
            return p;
    }
    return NULL;
}
