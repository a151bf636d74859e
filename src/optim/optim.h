/* Optimizers: the learning rate of a step, and the update of ranges of parameters. */
#ifndef QD_OPTIM_OPTIM_H
#define QD_OPTIM_OPTIM_H

#include "base/optim_config.h"
#include "device/device.h"

/* Learning rate of a step, counted from 1: rises linearly during the warmup, then follows the
 * schedule, which would reach min_lr one step after the last, so that no step has a rate of 0. */
double qd_optim_lr(const qd_optim *optim, int64_t step);

/* Buffers with the same layout. master: the parameter itself if `param` is fp32, NULL if there is
 * `rest` (see qd_adamw_args). */
typedef struct qd_optim_state {
    void *param, *grad;
    float *master, *moment1, *moment2;
    int16_t *rest;
    qd_dtype param_dtype, grad_dtype;
} qd_optim_state;

/* One step (counted from 1) on the given ranges. grad_scale, in device memory, multiplies the
 * gradients; if it is not finite, the step is skipped. */
qd_status qd_optim_update(const qd_optim *optim, const qd_kernels *kernels, qd_stream *stream,
                          const qd_optim_state *state, const qd_param_range *ranges, int range_count, int64_t step,
                          const double *grad_scale);
#endif
