/* Limits of the kernels on models with experts. */
#include "spec/program/program_impl.h"

#include <string.h>

enum { GPU_EXPERTS = 512, GPU_CHOICES = 32 }; /* limits of the kernels of device/cuda */

qd_status qd_moe_check(const qd_model *m, const qd_strategy *s)
{
    bool cpu = strcmp(s->traits->device, "cpu") == 0;
    if (!cpu && (m->moe.experts > GPU_EXPERTS || m->moe.per_token > GPU_CHOICES))
        return QD_FAIL(QD_UNSUPPORTED, "on a GPU model.experts may be at most %d and model.experts_per_token %d; they are %d and %d",
                       GPU_EXPERTS, GPU_CHOICES, m->moe.experts, m->moe.per_token);
    if (m->moe.experts > 0 && m->moe.bias_rate > 0.0 && s->training && s->grad != QD_F32)
        return QD_FAIL(QD_USAGE, "model.router_bias_rate counts tokens in gradient buffers, which train.grad_dtype=bf16 cannot: leave it "
                                 "at auto, or set fp32");
    return QD_OK;
}
