/* The actions that change parameters: the optimizer, applied to the shards that this rank owns. */
#ifndef QD_TRAIN_EXEC_UPDATE_H
#define QD_TRAIN_EXEC_UPDATE_H

#include "optim/optim.h"
#include "parallel/bind.h"

typedef struct qd_update_context {
    const qd_bound *bound;
    const qd_kernels *kernels;
    qd_stream *stream;
    const qd_optim *optim;
    int64_t step; /* from 1 */
    const double *grad_scale; /* in device memory */
    double expert_mean; /* token assignments per expert in this step */
} qd_update_context;

/* FETCH and STORE: copy a chunk of optimizer state between host memory and the device; ordered on
 * the stream. */
qd_status qd_update_copy(const qd_bound *bound, const qd_action *action, qd_stream *stream);

/* UPDATE, MOMENTUM, ORTHOGONALIZE, UPDATE_MATRICES and CLIP; ordered on the stream. Not
 * collective. */
qd_status qd_update_module(const qd_update_context *context, const qd_action *action);
qd_status qd_update_momentum(const qd_update_context *context, const qd_action *action);
qd_status qd_update_orthogonalize(const qd_update_context *context, const qd_action *action);
qd_status qd_update_matrices(const qd_update_context *context, const qd_action *action);
qd_status qd_update_heads(const qd_update_context *context, const qd_action *action);
#endif
