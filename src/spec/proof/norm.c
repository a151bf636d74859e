/* Proves that the gradient norm counts every element of every parameter exactly once among the
 * ranks whose sums are added. */
#include "spec/layout/experts.h"
#include "spec/proof/proof_impl.h"

#include <stdio.h>
#include <string.h>

/* Whether the rank counts a parameter, according to qd_program.norm. */
static bool counted(const qd_program *p, int param, int rank)
{
    const qd_mesh *mesh = &p->ledger->mesh;
    int place = qd_group_coord(mesh, qd_norm_group(&p->ledger->model, mesh), rank);
    return place < p->norm[param].holders && p->norm[param].repeat > 0 && place % p->norm[param].repeat == 0;
}

/* Along a group of ranks, boxes either follow each other along one dimension or are replicas. */
static qd_status count_param(const qd_program *p, int param, int action, const qd_group *groups, int count)
{
    const qd_param *of = &p->ledger->params[param];
    const qd_mesh *mesh = &p->ledger->mesh;
    int64_t all = of->shape[0] * of->shape[1], elements = 0, next = -1;
    int ranks = 1, first = count > 0 ? groups[0].size : 1, second = count > 1 ? groups[1].size : 1;
    ranks = first * second;
    for (int i = 0; i < ranks; i++) {
        int rank = count > 1 ? qd_group_rank(mesh, groups[1], p->rank, i / first) : p->rank;
        rank = count > 0 ? qd_group_rank(mesh, groups[0], rank, i % first) : rank;
        if (!counted(p, param, rank))
            continue;
        qd_atom atom = qd_ledger_atom(p->ledger, param, rank);
        int64_t size = qd_atom_count(&atom, of->ndim);
        if (size == 0)
            continue;
        int dim = atom.length[0] < of->shape[0] ? 0 : 1;
        int64_t begin = atom.begin[dim];
        if (next >= 0 && begin < next && size > 0)
            return QD_FAIL(QD_MISMATCH,
                           "gradients: rank %d, action %d (norm), gradient of %s: several of the ranks whose squares are summed "
                           "count the same elements; rank %d is one of them",
                           p->rank, action, of->name, rank);
        next = begin + atom.length[dim];
        elements += size;
    }
    if (elements != all)
        return QD_FAIL(QD_MISMATCH, "gradients: rank %d, action %d (norm), gradient of %s: %lld of its %lld elements are counted", p->rank,
                       action, of->name, (long long)elements, (long long)all);
    return QD_OK;
}

qd_status qd_proof_norm(qd_proof *proof, const qd_program *p, int action, const qd_group *groups, int count)
{
    const qd_ledger *l = p->ledger;
    int stage = qd_mesh_group_coord(proof->mesh, QD_AXIS_BIT(QD_AXIS_PP), p->rank), pipeline = 0, inside = 0;
    qd_group within[2];
    bool seen[QD_DECLARATIONS_MOST] = {false};
    int like[QD_DECLARATIONS_MOST] = {0};
    for (int i = 0; i < count; i++) {
        if (qd_group_equal(groups[i], qd_group_whole(proof->mesh, QD_AXIS_BIT(QD_AXIS_PP))))
            pipeline++;
        else if (inside < 2)
            within[inside++] = groups[i];
    }
    if (pipeline != (proof->mesh->degree[QD_AXIS_PP] > 1))
        return QD_FAIL(QD_MISMATCH,
                       "gradients: rank %d, action %d (norm), axis pp: the squares of each stage are summed over the stages %d "
                       "times",
                       p->rank, action, pipeline);
    for (int m = 0; m < l->module_count; m++) {
        const qd_module *module = &l->modules[m];
        if (module->stage_rank != stage)
            continue;
        for (int i = 0; i < module->param_count; i++) {
            int param = module->param_begin + i;
            const qd_param *of = &l->params[param];
            if (of->tied_to >= 0 || of->counts || of->frozen) {
                if (p->norm[param].holders != 0)
                    return QD_FAIL(QD_MISMATCH, "gradients: rank %d, action %d (norm): %s must not count in the norm",
                                   p->rank, action, of->name);
                continue;
            }
            bool alike = seen[module->decl] &&
                         memcmp(&p->norm[param], &p->norm[l->modules[like[module->decl]].param_begin + i], sizeof *p->norm) == 0;
            if (!alike)
                QD_TRY(count_param(p, param, action, within, inside));
        }
        like[module->decl] = seen[module->decl] ? like[module->decl] : m;
        seen[module->decl] = true;
    }
    return QD_OK;
}
