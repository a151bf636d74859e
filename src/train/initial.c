#include "train/initial.h"

#include "base/rng.h"
#include "base/thread.h"

#include <stdlib.h>

enum { PIECE = 1 << 14 }; /* elements that a thread draws at a time */

typedef struct drawing {
    const qd_param *param;
    qd_philox_key key;
    qd_atom box;   /* of the parameter that is drawn, row by row; */
    int64_t first; /* values[0] is this element of it */
    float *values;
} drawing;

/* Numbers go by the element's place in the whole parameter. */
static void draw(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const drawing *d = context;
    if (d->param->init != QD_INIT_NORMAL) {
        for (int64_t i = begin; i < end; i++)
            d->values[i] = d->param->init == QD_INIT_ONE ? 1.0f : 0.0f;
        return;
    }
    int64_t width = d->box.length[1], cols = d->param->shape[1];
    for (int64_t i = begin; i < end;) {
        int64_t row = (d->first + i) / width, col = (d->first + i) % width, count = width - col < end - i ? width - col : end - i;
        if (width == cols) /* whole rows follow each other */
            count = end - i;
        qd_rng_normal(d->key, (d->box.begin[0] + row) * cols + d->box.begin[1] + col, count, d->param->init_std, d->values + i);
        i += count;
    }
}

static qd_status draw_param(const qd_program *p, int param, drawing *d, qd_pool *pool, qd_initial_sink sink, void *context)
{
    qd_holding own = qd_program_holding(p, QD_BUFFER_PARAM, param);
    int64_t most = (int64_t)qd_pool_threads(pool) * PIECE;
    d->box = own.box;
    for (int64_t first = 0; first < own.count; first += most) {
        int64_t count = own.count - first < most ? own.count - first : most;
        d->first = first;
        qd_pool_for(pool, count, PIECE, draw, d);
        QD_TRY(sink(context, param, first, count, d->values));
    }
    return QD_OK;
}

qd_status qd_initial_values(const qd_program *p, uint64_t seed, int threads, qd_initial_sink sink, void *context)
{
    qd_pool *pool = NULL;
    QD_TRY(qd_pool_create(threads, -1, &pool));
    drawing d = {.values = malloc((size_t)threads * PIECE * sizeof(float))};
    qd_status status = d.values ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to draw initial values");
    for (int i = 0; i < p->ledger->param_count && status == QD_OK; i++) {
        d.param = &p->ledger->params[i];
        /* A copy of tied values begins as its owner does, on other ranks. */
        d.key = qd_rng_key(seed, p->ledger->params[d.param->tied_to >= 0 ? d.param->tied_to : i].name);
        if (qd_storage_has(p->ledger, &p->storage, i))
            status = draw_param(p, i, &d, pool, sink, context);
    }
    free(d.values);
    qd_pool_destroy(pool);
    return status;
}
