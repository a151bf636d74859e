/* Learning-rate schedules, and the update of AdamW and SGD through the kernels of a device. */
#include "optim/optim.h"

#include <math.h>

double qd_optim_lr(const qd_optim *o, int64_t step)
{
    if (step <= o->warmup)
        return o->lr * (double)step / (double)o->warmup;
    /* Fraction of the decay that is complete before this step. */
    int64_t start = o->schedule == QD_LR_WSD ? o->steps - o->decay_steps : o->warmup;
    double done = o->steps > start ? (double)(step - 1 - start) / (double)(o->steps - start) : 1.0;
    done = done < 0.0 ? 0.0 : done > 1.0 ? 1.0 : done;
    switch (o->schedule) {
    case QD_LR_COSINE: return o->min_lr + (o->lr - o->min_lr) * 0.5 * (1.0 + cos(3.14159265358979323846 * done));
    case QD_LR_LINEAR:
    case QD_LR_WSD: return o->lr + (o->min_lr - o->lr) * done;
    case QD_LR_CONSTANT: break;
    }
    return o->lr;
}

qd_status qd_optim_update(const qd_optim *o, const qd_kernels *kernels, qd_stream *stream, const qd_optim_state *s,
                          const qd_param_range *ranges, int range_count, int64_t step, const double *grad_scale)
{
    /* Coefficients stay in double until the kernels, which derive 1 - beta and other factors from
     * them before rounding. */
    double lr = qd_optim_lr(o, step);
    if (o->kind == QD_OPTIM_SGD)
        return kernels->sgd(stream, &(qd_sgd_args){
            .param = s->param, .grad = s->grad, .master = s->master, .rest = s->rest, .m = s->moment1,
            .ranges = ranges, .range_count = range_count,
            .lr = lr, .momentum = o->momentum, .weight_decay = o->weight_decay,
            .grad_scale = grad_scale, .param_dtype = s->param_dtype, .grad_dtype = s->grad_dtype,
        });
    return kernels->adamw(stream, &(qd_adamw_args){
        .param = s->param, .grad = s->grad, .master = s->master, .rest = s->rest, .m = s->moment1, .v = s->moment2,
        .ranges = ranges, .range_count = range_count,
        .lr = lr, .beta1 = o->beta1, .beta2 = o->beta2, .eps = o->eps, .weight_decay = o->weight_decay,
        .bias_correction1 = 1.0 - pow(o->beta1, (double)step), .bias_correction2 = 1.0 - pow(o->beta2, (double)step),
        .grad_scale = grad_scale, .param_dtype = s->param_dtype, .grad_dtype = s->grad_dtype,
    });
}
