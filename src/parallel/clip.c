/* Rescales query and key weights of heads whose largest score of the step, S, is above the limit,
 * by gamma = limit / S (Kimi K2, arXiv 2507.20534, section 2.1).
 *
 * Latent attention: the parts of queries and keys without positions by sqrt(gamma) each, the rotary
 * part of queries by gamma; the rotary key belongs to all heads and stays. Other attention: queries
 * and keys by sqrt(gamma). Where several query heads share a key head, its keys are rescaled by the
 * smallest sqrt(gamma) of them, and each head's queries by what is missing to its own gamma, which
 * is above 1 for heads of a smaller score: so every head's scores change by its gamma alone. */
#include "parallel/clip.h"

#include "base/half.h"

#include <math.h>
#include <string.h>

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

double qd_clip_largest(const qd_bound *b)
{
    const int64_t count = qd_program_maxima(&b->program->ledger->model);
    const float *all = qd_bound_kind(b, QD_BUFFER_MAXIMA);
    double most = 0.0;
    for (int64_t i = 0; all && i < count; i++)
        most = all[i] > most ? all[i] : most;
    return most;
}

qd_status qd_clip_exchange(const qd_bound *b, const qd_action *a)
{
    void *scores = qd_bound_kind(b, QD_BUFFER_MAXIMA);
    return qd_comm_all_reduce(b->groups[a->group], scores, scores, a->count, a->dtype, QD_MAX, NULL);
}

/* A layer's scores and the limit. */
typedef struct heads {
    const qd_model *model;
    const float *score;
    double limit;
} heads;

/* An infinite score has made the loss meaningless, and no factor would help. */
static double gamma_of(const heads *h, int64_t head)
{
    double score = h->score[head];
    return score > h->limit && isfinite(score) ? h->limit / score : 1.0;
}

static double smallest_gamma(const heads *h, int64_t kv_head)
{
    int64_t group = h->model->heads / h->model->kv_heads;
    double least = 1.0;
    for (int64_t i = kv_head * group; i < (kv_head + 1) * group; i++)
        least = fmin(least, gamma_of(h, i));
    return least;
}

/* The factor of a row of a weight, or of an element of a bias. */
typedef double factor_of_row(const heads *h, int64_t row);

static double of_query(const heads *h, int64_t row)
{
    int64_t head = row / h->model->head_dim, group = h->model->heads / h->model->kv_heads;
    double gamma = gamma_of(h, head);
    return group == 1 ? sqrt(gamma) : gamma / sqrt(smallest_gamma(h, head / group));
}

static double of_key(const heads *h, int64_t row)
{
    return sqrt(smallest_gamma(h, row / h->model->head_dim));
}

static double of_latent_query(const heads *h, int64_t row)
{
    double gamma = gamma_of(h, row / h->model->head_dim);
    return row % h->model->head_dim < h->model->qk_nope_head_dim ? sqrt(gamma) : gamma;
}

static double of_latent_key_and_value(const heads *h, int64_t row)
{
    int64_t each = h->model->qk_nope_head_dim + h->model->v_head_dim;
    return row % each < h->model->qk_nope_head_dim ? sqrt(gamma_of(h, row / each)) : 1.0;
}

static factor_of_row *find_factor(const qd_model *m, const char *name)
{
    static const struct {
        const char *name;
        bool latent;
        factor_of_row *factor;
    } table[] = {
        {".attn.q.weight", false, of_query},        {".attn.q.bias", false, of_query},
        {".attn.k.weight", false, of_key},          {".attn.k.bias", false, of_key},
        {".attn.q.weight", true, of_latent_query},  {".attn.q_b.weight", true, of_latent_query},
        {".attn.kv_b.weight", true, of_latent_key_and_value},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        size_t length = strlen(name), wanted = strlen(table[i].name);
        if (table[i].latent == qd_model_is_latent(m) && length > wanted && strcmp(name + length - wanted, table[i].name) == 0)
            return table[i].factor;
    }
    return NULL;
}

/* Multiplies elements of a parameter, or of its master weights, from which it then is rounded. */
static void rescale(const qd_bound *b, int64_t param_at, int64_t master_at, int64_t count, float factor)
{
    const qd_strategy *s = &b->program->strategy;
    void *params = qd_bound_kind(b, QD_BUFFER_PARAM), *masters = qd_bound_kind(b, QD_BUFFER_MASTER);
    for (int64_t i = 0; i < count; i++) {
        if (s->param == QD_F32) {
            ((float *)params)[param_at + i] *= factor;
            continue;
        }
        uint16_t *half = (uint16_t *)params + param_at + i;
        if (qd_master_is_split(s)) {
            int16_t *rest = (int16_t *)masters + master_at + i;
            float value = qd_f32_join(*half, *rest) * factor;
            *half = qd_f32_to_bf16(value);
            *rest = qd_f32_rest(value, *half);
        } else {
            float *master = (float *)masters + master_at + i;
            *master *= factor;
            *half = qd_f32_to_bf16(*master);
        }
    }
}

void qd_clip_module(const qd_bound *b, const qd_action *a, double limit)
{
    const qd_program *p = b->program;
    const qd_module *module = &p->ledger->modules[a->module];
    const qd_model *m = &p->ledger->model;
    const float *scores = qd_bound_kind(b, QD_BUFFER_MAXIMA);
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
        const qd_param *param = &p->ledger->params[i];
        const int layer = param->ahead > 0 ? m->layers + param->ahead - 1 : module->layer;
        const heads h = {m, scores + (int64_t)layer * m->heads, limit};
        factor_of_row *factor = find_factor(m, param->name);
        qd_holding own = qd_program_holding(p, QD_BUFFER_PARAM, i);
        if (!factor || own.count == 0)
            continue;
        int64_t cols = own.count / own.box.length[0], master = qd_program_holding(p, QD_BUFFER_MASTER, i).offset;
        for (int64_t row = 0; row < own.box.length[0]; row++) {
            double by = factor(&h, own.box.begin[0] + row);
            if (by != 1.0)
                rescale(b, own.offset + row * cols, master + row * cols, cols, (float)by);
        }
    }
}
