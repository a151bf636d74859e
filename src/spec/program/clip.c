/* The limit of attention scores, QK-Clip (Kimi K2's MuonClip): attention keeps the largest score of
 * each head over the tokens of the step, ranks exchange them, and after the update the weights of
 * queries and keys of heads above the threshold are rescaled.
 *
 * MAXIMA holds the scores of all heads of all layers, and after them those of prediction modules,
 * on every rank, 0 where another rank computes them, so that one reduction over all ranks completes
 * it on any layout. */
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
    if (s->offload)
        return QD_FAIL(QD_UNSUPPORTED, "train.qk_clip rescales master weights on the device, but train.offload=optimizer moves them to "
                                       "host memory: set train.offload=none");
    if (strcmp(s->traits->device, "cpu") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "train.qk_clip reads the largest scores of heads, which the kernels of a GPU do not keep: set "
                                       "run.device=cpu, or leave it out");
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

void qd_clip_finish(qd_builder *b)
{
    if (!is_on(b))
        return;
    int group = qd_build_group(b, qd_group_whole(&b->ledger->mesh, QD_AXES_ALL));
    if (group >= 0) {
        qd_action *a = qd_build_collective(b, QD_ACTION_MAXIMA, -1, group, scores(b), QD_F32, -1);
        a->stream = QD_STREAM_COMPUTE;
        a->buffer = b->p->persistent[QD_BUFFER_MAXIMA];
    }
    for (int module = 0; module < b->modules; module++)
        if (qd_build_holds(b, module) && qd_ledger_attends(b->ledger, module))
            qd_build_action(b, QD_ACTION_CLIP, module, -1)->buffer = b->p->persistent[QD_BUFFER_MAXIMA];
}
