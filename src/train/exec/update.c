/* Applies the optimizer to this rank's shards: element-wise updates, Muon's steps by matrix, the
 * rescaling of QK-Clip, and copies of offloaded state. */
#include "train/exec/update.h"

#include "optim/muon.h"
#include "parallel/matrices.h"
#include "spec/program/muon.h"
#include "spec/program/offload.h"

/* Offsets (in elements) of this rank's shard of a parameter in each buffer. */
typedef struct places {
    int64_t param, grad, state, moment2, count;
    bool decay;
} places;

static places find_places(const qd_program *p, int param)
{
    bool wide = p->strategy.param == QD_F32;
    qd_holding value = qd_program_holding(p, QD_BUFFER_PARAM, param);
    qd_holding state = qd_program_holding(p, wide && p->persistent[QD_BUFFER_MOMENT1] < 0 ? QD_BUFFER_PARAM
                                             : wide                                       ? QD_BUFFER_MOMENT1
                                                                                          : QD_BUFFER_MASTER, param);
    return (places){value.offset, qd_program_holding(p, QD_BUFFER_GRAD, param).offset, state.offset,
                    p->moment2 ? p->moment2[param] : state.offset, p->ledger->params[param].frozen ? 0 : value.count,
                    p->ledger->params[param].decay};
}

static void *shifted(void *base, int64_t elements, qd_dtype dtype)
{
    return base ? (char *)base + elements * (int64_t)qd_dtype_size(dtype) : NULL;
}

static bool equally_far(const places *x, const places *y)
{
    return x->param - x->state == y->param - y->state && x->grad - x->state == y->grad - y->state &&
           x->moment2 - x->state == y->moment2 - y->state;
}

/* The address at which element 0 of a kind of state would be: the start of its buffer, or, for a
 * chunk, shifted so that offsets in the whole state are valid. NULL: the optimizer keeps none. */
static qd_status find_state(const qd_bound *b, const qd_action *a, qd_buffer_kind kind, void **base)
{
    *base = qd_bound_kind(b, kind);
    if (a->chunk < 0 || !*base)
        return QD_OK;
    qd_section sections[QD_STATE_KINDS];
    int count = qd_offload_sections(b->program, a, sections);
    QD_TRY(qd_bound_buffer(b, a->chunk, base));
    for (int i = 0; i < count; i++)
        if (sections[i].kind == kind) {
            *base = shifted(*base, sections[i].chunk - sections[i].host, QD_F32);
            return QD_OK;
        }
    *base = NULL; /* this action does not use it */
    return QD_OK;
}

/* The part of a parameter that an action updates: all of it, or what its chunk contains. */
static places clipped(places at, const qd_action *a)
{
    int64_t begin = at.state > a->first ? at.state : a->first, end = a->first + a->count, last = at.state + at.count;
    if (a->chunk < 0)
        return at;
    end = last < end ? last : end;
    int64_t skipped = begin - at.state;
    return (places){at.param + skipped, at.grad + skipped, begin, at.moment2 + skipped, end > begin ? end - begin : 0, at.decay};
}

/* Moves the routing biases of a module's experts against the load counted in this step. */
static qd_status update_biases(const qd_update_context *c, const qd_action *a, const qd_module *module)
{
    const qd_bound *b = c->bound;
    const qd_program *p = b->program;
    void *master;
    QD_TRY(find_state(b, a, QD_BUFFER_MASTER, &master));
    double rate = p->ledger->model.moe.bias_rate;
    bool split = qd_master_is_split(&p->strategy);
    for (int i = module->param_begin; i < module->param_begin + module->param_count && rate > 0.0; i++) {
        if (!p->ledger->params[i].counts)
            continue;
        places at = clipped(find_places(p, i), a);
        void *param = shifted(qd_bound_kind(b, QD_BUFFER_PARAM), at.param, p->strategy.param);
        if (at.count > 0)
            QD_TRY(c->kernels->expert_bias(c->stream, &(qd_expert_bias_args){
                .bias = p->strategy.param == QD_F32 ? param : split ? NULL : shifted(master, at.state, QD_F32),
                .rest = split ? (int16_t *)master + at.state : NULL,
                .total = shifted(qd_bound_kind(b, QD_BUFFER_GRAD), at.grad, QD_F32),
                .param = param,
                .experts = at.count,
                .mean = c->expert_mean,
                .rate = rate,
                .grad_scale = c->grad_scale,
                .param_dtype = p->strategy.param,
            }));
    }
    return QD_OK;
}

/* Kernels take buffers with the same layout. Sharded and whole buffers differ, but a parameter is
 * contiguous in each: neighbours with the same distances in all buffers are updated in one call. */
qd_status qd_update_module(const qd_update_context *c, const qd_action *a)
{
    const qd_bound *b = c->bound;
    const qd_program *p = b->program;
    const qd_strategy *s = &p->strategy;
    const qd_module *module = &p->ledger->modules[a->module];
    int end = module->param_begin + module->param_count;
    bool split = qd_master_is_split(s);
    void *master, *moment1, *moment2;
    QD_TRY(find_state(b, a, QD_BUFFER_MASTER, &master));
    QD_TRY(find_state(b, a, QD_BUFFER_MOMENT1, &moment1));
    QD_TRY(find_state(b, a, QD_BUFFER_MOMENT2, &moment2));
    for (int i = module->param_begin; i < end;) {
        enum { MOST = 64 };
        qd_param_range ranges[MOST];
        int count = 0;
        places first = clipped(find_places(p, i), a);
        for (; i < end && count < MOST; i++) {
            places at = clipped(find_places(p, i), a);
            if (p->ledger->params[i].tied_to >= 0 || p->ledger->params[i].counts || at.count == 0 ||
                (p->matrices && qd_muon_takes(p->ledger, i)))
                continue;
            if (count == 0)
                first = at;
            if (!equally_far(&at, &first))
                break;
            ranges[count++] = (qd_param_range){at.state, at.count, at.decay};
        }
        if (count == 0)
            continue;
        void *param = shifted(qd_bound_kind(b, QD_BUFFER_PARAM), first.param - first.state, s->param);
        qd_optim_state state = {
            .param = param,
            .grad = shifted(qd_bound_kind(b, QD_BUFFER_GRAD), first.grad - first.state, s->grad),
            .master = s->param == QD_F32 ? param : split ? NULL : master,
            .rest = split ? master : NULL,
            .moment1 = moment1,
            .moment2 = shifted(moment2, first.moment2 - first.state, QD_F32),
            .param_dtype = s->param,
            .grad_dtype = s->grad,
        };
        QD_TRY(qd_optim_update(c->optim, c->kernels, c->stream, &state, ranges, count, c->step, c->grad_scale));
    }
    return update_biases(c, a, module);
}

qd_status qd_update_copy(const qd_bound *b, const qd_action *a, qd_stream *stream)
{
    qd_section sections[QD_STATE_KINDS];
    int count = qd_offload_sections(b->program, a, sections);
    bool in = a->kind == QD_ACTION_FETCH;
    void *chunk;
    QD_TRY(qd_bound_buffer(b, a->chunk, &chunk));
    for (int i = 0; i < count; i++) {
        void *near = shifted(chunk, sections[i].chunk, QD_F32),
             *far = shifted(qd_bound_kind(b, sections[i].kind), sections[i].host, QD_F32);
        QD_TRY(qd_copy(stream, in ? near : far, in ? far : near, sections[i].count * 4));
    }
    return QD_OK;
}

qd_status qd_update_momentum(const qd_update_context *c, const qd_action *a)
{
    const qd_bound *b = c->bound;
    const qd_program *p = b->program;
    int rank = qd_comm_rank(b->world), own = qd_muon_own(p, a, rank);
    void *part = NULL, *whole, *m;
    QD_TRY(find_state(b, a, QD_BUFFER_MOMENT1, &m));
    QD_TRY(qd_bound_buffer(b, a->buffer, &whole));
    if (a->part >= 0)
        QD_TRY(qd_bound_buffer(b, a->part, &part));
    for (int i = a->param; i < a->param + a->params; i++) {
        places at = find_places(p, p->matrices[i].param);
        bool cut = qd_muon_matrix_group(p, i) >= 0, exchanged = cut && qd_muon_is_near(p, i, rank);
        if (at.count == 0)
            continue;
        QD_TRY(c->kernels->momentum(c->stream, &(qd_momentum_args){
            .grad = shifted(qd_bound_kind(b, QD_BUFFER_GRAD), at.grad, p->strategy.grad),
            .m = (float *)m + qd_program_holding(p, QD_BUFFER_MOMENT1, p->matrices[i].param).offset,
            .out = exchanged ? (float *)part + p->matrices[i].part : i == own && !cut ? whole : NULL,
            .n = at.count,
            .momentum = c->optim->muon_momentum,
            .grad_scale = c->grad_scale,
            .nesterov = c->optim->muon_nesterov,
            .grad_dtype = p->strategy.grad,
        }));
    }
    return QD_OK;
}

/* Converts a matrix between its plain layout and column blocks as the ranks of tp (or etp) hold
 * them, one block after another. */
static qd_status rearrange(const qd_update_context *c, int matrix, float *x, float *room, bool into_blocks)
{
    const qd_program *p = c->bound->program;
    const qd_param *param = &p->ledger->params[p->matrices[matrix].param];
    const qd_mesh *mesh = &p->ledger->mesh;
    int64_t rows = param->shape[0], cols = param->shape[1];
    enum { TOGETHER = 512 };
    qd_piece pieces[TOGETHER];
    int count = 0;
    qd_group cut = qd_muon_cut_group(p->ledger, p->matrices[matrix].param);
    for (int t = 0; t < cut.size; t++) {
        int rank = qd_group_rank(mesh, cut, p->rank, t);
        qd_atom atom = qd_ledger_atom(p->ledger, p->matrices[matrix].param, rank);
        for (int64_t row = 0; row < rows && qd_ledger_counts(p->ledger, p->matrices[matrix].param, rank); row++) {
            int64_t in_block = atom.begin[1] * rows + row * atom.length[1], in_matrix = row * cols + atom.begin[1];
            pieces[count++] = (qd_piece){.from = x + (into_blocks ? in_matrix : in_block),
                                         .to = room + (into_blocks ? in_block : in_matrix),
                                         .bytes = atom.length[1] * 4};
            if (count < TOGETHER)
                continue;
            QD_TRY(c->kernels->copy_pieces(c->stream, &(qd_copy_pieces_args){pieces, count}));
            count = 0;
        }
    }
    if (count)
        QD_TRY(c->kernels->copy_pieces(c->stream, &(qd_copy_pieces_args){pieces, count}));
    return qd_copy(c->stream, x, room, rows * cols * 4);
}

qd_status qd_update_orthogonalize(const qd_update_context *c, const qd_action *a)
{
    const qd_program *p = c->bound->program;
    void *x, *scratch;
    int own = qd_muon_own(p, a, qd_comm_rank(c->bound->world));
    QD_TRY(qd_bound_buffer(c->bound, a->buffer, &x));
    QD_TRY(qd_bound_buffer(c->bound, a->part, &scratch));
    if (own < 0)
        return QD_OK;
    const qd_param *param = &p->ledger->params[p->matrices[own].param];
    qd_muon_scratch s = qd_muon_scratch_of(param->shape[0], param->shape[1]);
    char *base = scratch;
    qd_muon_room room = {.gram = (float *)(base + s.gram), .poly = (float *)(base + s.poly), .next = (float *)(base + s.next),
                         .squares = (double *)(base + s.squares)};
    bool blocks = qd_muon_cuts_columns(p, own);
    if (blocks)
        QD_TRY(rearrange(c, own, x, room.next, false));
    QD_TRY(qd_muon_orthogonalize(c->kernels, c->stream, x, param->shape[0], param->shape[1], c->optim->muon_steps, &room));
    return blocks ? rearrange(c, own, x, room.next, true) : QD_OK;
}

qd_status qd_update_matrices(const qd_update_context *c, const qd_action *a)
{
    const qd_bound *b = c->bound;
    const qd_program *p = b->program;
    void *master;
    QD_TRY(find_state(b, a, QD_BUFFER_MASTER, &master));
    double lr = qd_muon_lr(c->optim, c->step);
    for (int i = a->param; i < a->param + a->params; i++) {
        const qd_param *logical = &p->ledger->params[p->matrices[i].param];
        places at = find_places(p, p->matrices[i].param);
        void *direction;
        if (at.count == 0)
            continue;
        QD_TRY(qd_matrices_result(b, a, i, &direction));
        void *value = shifted(qd_bound_kind(b, QD_BUFFER_PARAM), at.param, p->strategy.param);
        QD_TRY(c->kernels->matrix_update(c->stream, &(qd_matrix_update_args){
            .param = value,
            .master = master ? (float *)master + at.state : value,
            .direction = direction,
            .n = at.count,
            .rate = lr * qd_muon_shape_factor(c->optim, logical->shape[0], logical->shape[1]),
            .decay = logical->decay ? lr * c->optim->weight_decay : 0.0,
            .grad_scale = c->grad_scale,
            .param_dtype = p->strategy.param,
        }));
    }
    return QD_OK;
}

/* QK-Clip (Kimi K2, arXiv 2507.20534, section 2.1): rescales query and key weights of heads whose
 * largest score of the step was above the limit, or the part of them in the action's chunk. */
qd_status qd_update_heads(const qd_update_context *c, const qd_action *a)
{
    const qd_bound *b = c->bound;
    const qd_program *p = b->program;
    const qd_model *m = &p->ledger->model;
    const qd_module *module = &p->ledger->modules[a->module];
    const bool wide = p->strategy.param == QD_F32, split = qd_master_is_split(&p->strategy);
    void *master;
    QD_TRY(find_state(b, a, QD_BUFFER_MASTER, &master));
    for (int i = module->param_begin; i < module->param_begin + module->param_count; i++) {
        const qd_param *logical = &p->ledger->params[i];
        const qd_holding own = qd_program_holding(p, QD_BUFFER_PARAM, i);
        const qd_head_rows rows = qd_clip_rows(m, logical->name);
        const places at = clipped(find_places(p, i), a);
        if (rows == QD_HEAD_ROWS_NONE || at.count == 0)
            continue;
        const int layer = logical->ahead > 0 ? m->layers + logical->ahead - 1 : module->layer;
        const int64_t cols = own.count / own.box.length[0];
        void *param = shifted(qd_bound_kind(b, QD_BUFFER_PARAM), at.param, p->strategy.param);
        QD_TRY(c->kernels->head_clip(c->stream, &(qd_head_clip_args){
            .param = param,
            .master = wide ? param : split ? NULL : shifted(master, at.state, QD_F32),
            .rest = split ? (int16_t *)master + at.state : NULL,
            .scores = (const float *)qd_bound_kind(b, QD_BUFFER_MAXIMA) + (int64_t)layer * m->heads,
            .first = own.box.begin[0] * cols + at.param - own.offset,
            .count = at.count,
            .cols = cols,
            .rows = rows,
            .heads = m->heads,
            .kv_heads = m->kv_heads,
            .head_dim = m->head_dim,
            .nope = m->qk_nope_head_dim,
            .v_dim = qd_model_v_dim(m),
            .limit = c->optim->qk_clip,
            .grad_scale = c->grad_scale,
            .param_dtype = p->strategy.param,
        }));
    }
    return QD_OK;
}
