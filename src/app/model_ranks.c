/* Starts the ranks of a model as threads and runs a function on each. */
#include "app/model_ranks.h"

#include "base/error.h"
#include "train/ranks/rank_threads.h"

typedef struct ranks_call {
    qd_model_source model;
    qd_model_function function;
    void *context;
} ranks_call;

static qd_status call_rank(void *context, qd_comm *world)
{
    const ranks_call *c = context;
    qd_model_source model = c->model;
    model.world = world;
    qd_status status = c->function(c->context, &model);
    if (status != QD_OK)
        qd_comm_abort(world, qd_error_message());
    return status;
}

static int at_least_one(int degree)
{
    return degree > 1 ? degree : 1;
}

qd_status qd_model_ranks_call(const qd_model_ranks *ranks, const qd_model_source *model, qd_model_function function, void *context)
{
    enum { MOST = 4096 };
    ranks_call c = {.model = *model, .function = function, .context = context};
    qd_comm_config comm = qd_comm_config_default();
    qd_rank_threads *threads;
    int tp = c.model.tp = at_least_one(ranks->tp), pp = c.model.pp = at_least_one(ranks->pp), ep = c.model.ep = at_least_one(ranks->ep);
    if (tp > MOST || pp > MOST || ep > MOST || (int64_t)tp * pp * ep > MOST)
        return QD_FAIL(QD_USAGE, "tp %d, pp %d and ep %d make more than %d ranks: lower one of them", tp, pp, ep, (int)MOST);
    if (ep > tp && ep % tp != 0)
        return QD_FAIL(QD_USAGE, "ep is %d and tp is %d: one must divide the other", ep, tp);
    int world = pp * (ep > tp ? ep : tp);
    if (world == 1)
        return function(context, model);
    comm.deadline_seconds = 1e6; /* the reader of the text may take its time, and threads do not vanish */
    QD_TRY(qd_rank_threads_create(world, &comm, &threads));
    qd_status status = qd_rank_threads_call(threads, call_rank, &c);
    qd_rank_threads_destroy(threads);
    return status;
}
