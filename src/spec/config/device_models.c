/* Models that a device has no kernels for, refused before anything is built. */
#include "spec/config/config.h"

#include <string.h>

qd_status qd_config_check_device(const qd_config *config)
{
    const qd_model *m = &config->model;
    const struct {
        bool needed;
        const char *what;
    } absent[] = {
        {m->norm == QD_NORM_PLAIN, "model.arch=olmo, with norms without weights,"},
        {m->norm == QD_NORM_RMS_ONE, "model.arch=gemma2 or gemma3, with norms that scale by 1 + weight,"},
        {m->norm == QD_NORM_RMS_ONE && m->qk_norm, "model.arch=gemma3, whose norms of queries and keys scale by 1 + weight,"},
        {m->moe.experts > 0 && m->moe.shared_gate, "model.shared_gate"},
        {m->clip_qkv > 0.0, "model.clip_qkv"},
        {m->embed_scaled, "model.embed_scaled"},
        {m->logit_softcap > 0.0, "model.logit_softcap"},
        {m->activation == QD_ACT_GEGLU_TANH || m->activation == QD_ACT_GEGLU, "model.activation=geglu"},
        {m->qk_norm && m->qk_over == QD_QK_WIDTH, "model.qk_norm_over=width"},
    };
    for (size_t i = 0; i < sizeof absent / sizeof *absent && strcmp(config->device, "cpu") != 0; i++)
        if (absent[i].needed)
            return QD_FAIL(QD_UNSUPPORTED, "%s has no kernel for run.device=%s: use run.device=cpu", absent[i].what, config->device);
    return QD_OK;
}
