/* Follows the largest attention scores through a step: they are 0 before the first pass, every
 * forward pass raises them, one exchange over all ranks completes them, and each weight of queries
 * and keys, of blocks and of prediction modules, is rescaled once, after its update. */
#include "spec/proof/step_impl.h"

static bool is_mine(const proof_run *r, int module)
{
    return r->ledger->modules[module].stage_rank == qd_mesh_group_coord(r->proof->mesh, QD_AXIS_BIT(QD_AXIS_PP), r->program->rank);
}

/* Whether the forward passes of all (or, with `none`, of no) modules and micro-batches have run. */
static bool forward_passes(const proof_run *r, bool none)
{
    const int batches = r->program->strategy.micro_batches;
    for (int m = 0; m < r->ledger->module_count; m++)
        for (int mb = 0; mb < batches && is_mine(r, m); mb++)
            if (((r->done[(size_t)m * (size_t)batches + (size_t)mb] & 1u << QD_PHASE_FORWARD) != 0) == none)
                return false;
    return true;
}

static int64_t scores(const proof_run *r)
{
    return (int64_t)(r->ledger->model.layers + qd_program_ahead(r->program)) * r->ledger->model.heads;
}

static bool has_heads(const proof_run *r, int module)
{
    const qd_module *m = &r->ledger->modules[module];
    return m->layer >= 0 || (m->kind == QD_MODULE_HEAD && qd_program_ahead(r->program) > 0);
}

static qd_status zero(proof_run *r)
{
    if (r->scores_zero || !forward_passes(r, true) || r->action->first != 0 || r->action->count != scores(r))
        return qd_proof_action_fail(r, -1, 0, -1, "largest scores are set to 0 after passes that raise them, twice, or not all of them");
    r->scores_zero = true;
    return qd_proof_follows(r, "the largest scores", &r->scores_by);
}

static qd_status exchange(proof_run *r)
{
    const qd_action *a = r->action;
    if (a->group < 0 || a->group >= r->program->group_count || r->program->groups[a->group].size != r->proof->mesh->world)
        return qd_proof_action_fail(r, -1, 0, -1, "largest scores are those of all ranks, but it does not reach all of them");
    if (!r->scores_zero || r->scores_known || !forward_passes(r, false) || a->first != 0 || a->count != scores(r) || a->dtype != QD_F32 ||
        a->buffer != r->program->persistent[QD_BUFFER_MAXIMA])
        return qd_proof_action_fail(r, -1, 0, -1, "largest scores are exchanged before they are complete, twice, or not all of them");
    r->scores_known = true;
    return qd_proof_follows(r, "the largest scores", &r->scores_by);
}

/* A chunk covers a range of what was updated; chunks come in ascending order. */
static qd_status clip_param(proof_run *r, int param)
{
    int64_t from, count = qd_proof_covered(r, param, &from);
    if (count == 0)
        return QD_OK;
    if (r->updated[param] < from + count)
        return qd_proof_action_fail(r, -1, 0, -1, "it rescales %s before its update", r->ledger->params[param].name);
    if (r->clipped[param] != from)
        return qd_proof_action_fail(r, -1, 0, -1, "it rescales heads of %s a second time, or leaves some out",
                                    r->ledger->params[param].name);
    r->clipped[param] += count;
    return QD_OK;
}

static bool is_clipped(const proof_run *r, int param)
{
    return qd_clip_rows(&r->ledger->model, r->ledger->params[param].name) != QD_HEAD_ROWS_NONE;
}

static qd_status clip(proof_run *r)
{
    const qd_action *a = r->action;
    if (r->proof->mesh->world == 1 && r->scores_zero && forward_passes(r, false))
        r->scores_known = true; /* there is no other rank */
    if (a->module < 0 || a->module >= r->ledger->module_count || !has_heads(r, a->module) || !is_mine(r, a->module))
        return qd_proof_action_fail(r, -1, 0, -1, "it rescales heads of no block of this rank");
    if (!r->scores_known)
        return qd_proof_action_fail(r, -1, 0, -1, "it rescales heads before their largest scores are known");
    if (a->chunk < 0 && r->program->strategy.offload && r->program->persistent[QD_BUFFER_MASTER] >= 0)
        return qd_proof_action_fail(r, -1, 0, -1, "it rescales master weights that are in host memory");
    QD_TRY(qd_proof_waits(r, -1, "the largest scores", r->scores_by));
    const qd_module *m = &r->ledger->modules[a->module];
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++)
        if (is_clipped(r, i))
            QD_TRY(clip_param(r, i));
    return QD_OK;
}

qd_status qd_proof_clip_action(proof_run *r)
{
    if (!r->program->strategy.qk_clip || r->program->persistent[QD_BUFFER_MAXIMA] < 0)
        return qd_proof_action_fail(r, -1, 0, -1, "the step has no largest scores (train.qk_clip)");
    return r->action->kind == QD_ACTION_ZERO ? zero(r) : r->action->kind == QD_ACTION_MAXIMA ? exchange(r) : clip(r);
}

qd_status qd_proof_clip_end(const proof_run *r)
{
    const qd_strategy *s = &r->program->strategy;
    for (int i = 0; i < r->ledger->param_count && s->qk_clip && s->training; i++)
        if (is_clipped(r, i) && r->clipped[i] != qd_program_holding(r->program, QD_BUFFER_PARAM, i).count)
            return qd_proof_action_fail(r, -1, 0, -1, "heads of %s are not rescaled (train.qk_clip)",
                                        r->ledger->modules[r->ledger->params[i].module].name);
    return QD_OK;
}
