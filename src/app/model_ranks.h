/* Ranks that share a model which does not fit one, as threads of this process. */
#ifndef QD_APP_MODEL_RANKS_H
#define QD_APP_MODEL_RANKS_H

#include "train/exec/model_run.h"

typedef struct qd_model_ranks {
    int tp, pp, ep; /* 0: 1 */
} qd_model_ranks;

typedef qd_status (*qd_model_function)(void *context, const qd_model_source *model);

/* Calls `function` on the thread of every rank, with the model's world and layout set; with one
 * rank, in this thread with the model as it is. Experts need tp × dp ranks that ep divides: dp is
 * chosen. Returns the failure that came first in cause. */
qd_status qd_model_ranks_call(const qd_model_ranks *ranks, const qd_model_source *model, qd_model_function function, void *context);
#endif
