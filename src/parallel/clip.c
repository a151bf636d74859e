/* The table of largest attention scores that QK-Clip keeps: a rank's heads in it, its exchange, and
 * its copy for the host. */
#include "parallel/clip.h"

float *qd_clip_scores(const qd_bound *b, int module)
{
    const qd_program *p = b->program;
    const qd_mesh *mesh = &p->ledger->mesh;
    float *all = qd_bound_kind(b, QD_BUFFER_MAXIMA);
    int layer = p->ledger->modules[module].layer, heads = p->ledger->model.heads;
    if (!all || !qd_ledger_attends(p->ledger, module))
        return NULL;
    int tp = mesh->degree[QD_AXIS_TP], cp = p->strategy.cp_mode == QD_CP_ULYSSES ? mesh->degree[QD_AXIS_CP] : 1;
    int coords[QD_AXIS_COUNT];
    qd_mesh_coords(mesh, qd_comm_rank(b->world), coords);
    int64_t first = (int64_t)(layer >= 0 ? layer : p->ledger->model.layers) * heads;
    return all + first + (coords[QD_AXIS_TP] * cp + (cp > 1 ? coords[QD_AXIS_CP] : 0)) * (heads / tp / cp);
}

static int64_t score_count(const qd_program *p)
{
    return qd_program_maxima(&p->ledger->model);
}

qd_status qd_clip_host_scores(const qd_bound *b, float **scores)
{
    void *memory = NULL;
    if (qd_bound_kind(b, QD_BUFFER_MAXIMA))
        QD_TRY(qd_host_alloc(b->device, score_count(b->program) * (int64_t)sizeof **scores, &memory));
    *scores = memory;
    return QD_OK;
}

qd_status qd_clip_copy_scores(const qd_bound *b, qd_stream *stream, float *scores)
{
    if (!scores)
        return QD_OK;
    return qd_copy(stream, scores, qd_bound_kind(b, QD_BUFFER_MAXIMA), score_count(b->program) * (int64_t)sizeof *scores);
}

double qd_clip_largest(const qd_program *p, const float *scores)
{
    double most = 0.0;
    for (int64_t i = 0; scores && i < score_count(p); i++)
        most = scores[i] > most ? scores[i] : most;
    return most;
}

qd_status qd_clip_exchange_scores(const qd_bound *b, const qd_action *a)
{
    void *scores = qd_bound_kind(b, QD_BUFFER_MAXIMA);
    return qd_comm_all_reduce(b->groups[a->group], scores, scores, a->count, a->dtype, QD_MAX, NULL);
}
