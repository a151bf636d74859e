/* Tensor parallelism: checks that tp can shard a model, and places each parameter on tp. */
#include "spec/layout/tensor.h"

static bool can_share(const void *model, int tp)
{
    const qd_model *m = model;
    return m->heads % tp == 0 && (m->kv_heads % tp == 0 || tp % m->kv_heads == 0) && m->ffn >= tp && m->vocab >= tp;
}

qd_status qd_tensor_check(const qd_model *m, const qd_mesh *mesh)
{
    int tp = mesh->degree[QD_AXIS_TP];
    char take[48];
    if (tp > QD_TENSOR_MOST)
        return QD_FAIL(QD_USAGE, "parallel.tp is %d: at most %d ranks can share a layer", tp, QD_TENSOR_MOST);
    if (can_share(m, tp))
        return QD_OK;
    qd_degree_nearest(tp, m->heads, can_share, m, take, sizeof take);
    if (m->heads % tp != 0)
        return QD_FAIL(QD_USAGE, "parallel.tp is %d, which does not divide the model's %d heads (a head is never cut)%s", tp, m->heads,
                       take);
    if (m->kv_heads % tp != 0 && tp % m->kv_heads != 0)
        return QD_FAIL(QD_USAGE,
                       "parallel.tp is %d, but the model has %d kv heads: one must divide the other, so that each rank "
                       "has whole kv heads or all ranks that share one have the same%s",
                       tp, m->kv_heads, take);
    return QD_FAIL(QD_USAGE, "parallel.tp is %d, more than the model's %s (%lld)%s", tp, m->ffn < tp ? "inner width" : "vocabulary",
                   (long long)(m->ffn < tp ? m->ffn : m->vocab), take);
}

bool qd_tensor_counts_keys(const qd_model *m, const qd_mesh *mesh, int rank)
{
    int tp = mesh->degree[QD_AXIS_TP], sharing = tp > m->kv_heads ? tp / m->kv_heads : 1;
    return qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_TP), rank) % sharing == 0;
}

void qd_tensor_place(const qd_model *m, const qd_mesh *mesh, qd_split split, qd_param *p)
{
    int tp = mesh->degree[QD_AXIS_TP], repeat = split == QD_SPLIT_KV && tp > m->kv_heads ? tp / m->kv_heads : 0;
    qd_place *value = &p->value[QD_AXIS_TP], *gradient = &p->gradient[QD_AXIS_TP];
    if (tp == 1)
        return;
    switch (split) {
    case QD_SPLIT_NONE: break;
    case QD_SPLIT_NORM: gradient->kind = mesh->sp ? QD_PARTIAL : QD_REPLICATE; break;
    case QD_SPLIT_HEADS: gradient->kind = QD_PARTIAL; break;
    case QD_SPLIT_ROWS:
    case QD_SPLIT_COLS: *value = *gradient = (qd_place){QD_SHARD, split == QD_SPLIT_COLS, 0}; break;
    case QD_SPLIT_KV:
        *value = *gradient = (qd_place){QD_SHARD, 0, (int16_t)repeat};
        if (repeat > 1) /* each of these ranks has different query heads */
            gradient->kind = QD_PARTIAL;
        break;
    }
}

qd_status qd_tensor_check_param(const qd_mesh *mesh, const qd_param *p)
{
    const qd_place *value = &p->value[QD_AXIS_TP];
    int parts = value->kind != QD_SHARD ? 1 : mesh->degree[QD_AXIS_TP] / (value->repeat > 1 ? value->repeat : 1);
    int64_t size = p->shape[value->dim];
    if (parts > size)
        return QD_FAIL(QD_USAGE, "parallel.tp is %d, and %s has %lld %s to share: take at most %lld", mesh->degree[QD_AXIS_TP], p->name,
                       (long long)size, value->dim == 0 ? "outputs" : "inputs", (long long)size);
    return QD_OK;
}
