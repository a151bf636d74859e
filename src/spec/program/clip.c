/* The limit of attention scores, QK-Clip (Kimi K2's MuonClip): attention keeps the largest score of
 * each head over the tokens of the step, ranks exchange them, and after the update the weights of
 * queries and keys of heads above the threshold are rescaled.
 *
 * MAXIMA holds the scores of all heads of all layers, and after them those of prediction modules,
 * on every rank, 0 where another rank computes them, so that one reduction over all ranks completes
 * it on any layout. */
#include "spec/program/offload.h"
#include "spec/program/program_impl.h"

#include <string.h>

qd_status qd_clip_check(const qd_model *m, const qd_strategy *s)
{
    if (!s->qk_clip || !s->training)
        return QD_OK;
    if (m->qk_norm)
        return QD_FAIL(QD_USAGE, "train.qk_clip rescales weights of queries and keys, which has no effect on a model with model.qk_norm: "
                                 "leave it out");
    if (m->score_softcap > 0.0)
        return QD_FAIL(QD_USAGE, "train.qk_clip limits scores that model.score_softcap (%g) already limits: leave it out",
                       m->score_softcap);
    if (m->clip_qkv > 0.0)
        return QD_FAIL(QD_USAGE, "train.qk_clip limits scores that model.clip_qkv (%g) already limits: leave it out", m->clip_qkv);
    if (m->lora.rank > 0)
        return QD_FAIL(QD_USAGE, "train.qk_clip rescales weights that adapters (lora.rank=%d) leave unchanged: leave it out", m->lora.rank);
    if (s->preference.kind)
        return QD_FAIL(QD_UNSUPPORTED, "train.qk_clip is not for training on pairs (data.format=preferences): leave it out");
    return QD_OK;
}

static int64_t scores(const qd_builder *b)
{
    return qd_program_maxima(&b->ledger->model);
}

static bool is_on(const qd_builder *b)
{
    return b->strategy->qk_clip && b->strategy->training;
}

void qd_clip_begin(qd_builder *b)
{
    if (!is_on(b))
        return;
    int buffer = qd_build_buffer(b, QD_BUFFER_MAXIMA, -1, -1, scores(b) * (int64_t)sizeof(float), true);
    qd_build_zero(b, buffer, 0, scores(b), QD_F32);
}

qd_head_rows qd_clip_rows(const qd_model *m, const char *name)
{
    static const struct {
        const char *name;
        bool latent;
        qd_head_rows rows;
    } table[] = {
        {".attn.q.weight", false, QD_HEAD_ROWS_QUERY},         {".attn.q.bias", false, QD_HEAD_ROWS_QUERY},
        {".attn.k.weight", false, QD_HEAD_ROWS_KEY},           {".attn.k.bias", false, QD_HEAD_ROWS_KEY},
        {".attn.q.weight", true, QD_HEAD_ROWS_LATENT_QUERY},   {".attn.q_b.weight", true, QD_HEAD_ROWS_LATENT_QUERY},
        {".attn.kv_b.weight", true, QD_HEAD_ROWS_LATENT_KEY},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        size_t length = strlen(name), wanted = strlen(table[i].name);
        if (table[i].latent == qd_model_is_latent(m) && length > wanted && strcmp(name + length - wanted, table[i].name) == 0)
            return table[i].rows;
    }
    return QD_HEAD_ROWS_NONE;
}

void qd_clip_exchange(qd_builder *b)
{
    if (!is_on(b))
        return;
    int group = qd_build_group(b, qd_group_whole(&b->ledger->mesh, QD_AXES_ALL));
    if (group >= 0) {
        qd_action *a = qd_build_collective(b, QD_ACTION_MAXIMA, -1, group, scores(b), QD_F32, -1);
        a->stream = QD_STREAM_COMPUTE;
        a->buffer = b->p->persistent[QD_BUFFER_MAXIMA];
    }
}

void qd_clip_chunk(qd_builder *b, int buffer, unsigned states, int64_t first, int64_t count, int module)
{
    const qd_module *m = &b->ledger->modules[module];
    if (!is_on(b) || !(states & QD_STATE_BIT(QD_BUFFER_MASTER)))
        return;
    for (int i = m->param_begin; i < m->param_begin + m->param_count; i++) {
        qd_holding h = qd_program_holding(b->p, QD_BUFFER_MASTER, i);
        if (qd_clip_rows(&b->ledger->model, b->ledger->params[i].name) == QD_HEAD_ROWS_NONE || h.count == 0 ||
            h.offset >= first + count || h.offset + h.count <= first)
            continue;
        qd_action *a = qd_build_action(b, QD_ACTION_CLIP, module, -1);
        a->buffer = b->p->persistent[QD_BUFFER_MAXIMA];
        a->chunk = buffer;
        a->states = (uint8_t)states;
        a->param = i;
        a->first = first;
        a->count = count;
        return;
    }
}

void qd_clip_finish(qd_builder *b)
{
    if (!is_on(b) || (b->offload && b->p->persistent[QD_BUFFER_MASTER] >= 0))
        return; /* or done while chunks of master weights were on the device */
    for (int module = 0; module < b->modules; module++)
        if (qd_build_holds(b, module) && qd_ledger_attends(b->ledger, module))
            qd_build_action(b, QD_ACTION_CLIP, module, -1)->buffer = b->p->persistent[QD_BUFFER_MAXIMA];
}
