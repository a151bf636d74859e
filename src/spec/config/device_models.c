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
        {m->sinks, "model.sinks"},
        {m->activation == QD_ACT_SWIGLU_CLAMPED, "model.activation=swiglu_clamped"},
        {m->moe.experts > 0 && m->mlp_bias, "model.mlp_bias of experts"},
    };
    for (size_t i = 0; i < sizeof absent / sizeof *absent && strcmp(config->device, "cpu") != 0; i++)
        if (absent[i].needed)
            return QD_FAIL(QD_UNSUPPORTED, "%s has no kernel for run.device=%s: use run.device=cpu", absent[i].what, config->device);
    return QD_OK;
}
