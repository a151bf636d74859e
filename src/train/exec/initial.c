/* Draws the initial values of this rank's shards, in the foreground or ahead of time on a
 * background thread. */
#include "train/exec/initial.h"

#include "base/rng.h"
#include "base/thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { PIECE = 1 << 14 }; /* elements that a thread draws per task */

typedef struct drawing {
    const qd_param *param;
    qd_philox_key key;
    qd_atom box;   /* the shard being drawn, row by row */
    int64_t first; /* values[0] is this element of it */
    float *values;
} drawing;

/* The random number of an element depends on its index in the whole parameter. */
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
        if (width == cols) /* whole rows are contiguous */
            count = end - i;
        qd_rng_normal(d->key, (d->box.begin[0] + row) * cols + d->box.begin[1] + col, count, d->param->init_std, d->values + i);
        i += count;
    }
}

static drawing drawing_of(const qd_program *p, uint64_t seed, int param)
{
    const qd_param *drawn = &p->ledger->params[param];
    /* A copy of tied values on another rank starts with its owner's values. */
    return (drawing){.param = drawn, .key = qd_rng_key(seed, p->ledger->params[drawn->tied_to >= 0 ? drawn->tied_to : param].name),
                     .box = qd_program_holding(p, QD_BUFFER_PARAM, param).box};
}

struct qd_initial_ahead {
    const qd_program *program;
    uint64_t seed;
    int64_t bytes; /* limit */
    qd_pool *pool;
    pthread_t thread;
    atomic_bool stop;
    int done;       /* parameters below this index are drawn */
    float **values; /* values of each of this rank's shards; NULL: none */
};

static void *draw_ahead(void *argument)
{
    qd_initial_ahead *a = argument;
    const qd_program *p = a->program;
    for (; a->done < p->ledger->param_count && !atomic_load(&a->stop); a->done++) {
        int64_t count = qd_program_holding(p, QD_BUFFER_PARAM, a->done).count;
        if (!qd_storage_has(p->ledger, &p->storage, a->done) || count == 0)
            continue;
        a->bytes -= count * (int64_t)sizeof(float);
        float *values = a->bytes >= 0 ? malloc((size_t)count * sizeof *values) : NULL;
        if (!values)
            break;
        drawing d = drawing_of(p, a->seed, a->done);
        d.values = values;
        qd_pool_for(a->pool, count, PIECE, draw, &d);
        a->values[a->done] = values;
    }
    return NULL;
}

qd_initial_ahead *qd_initial_begin(const qd_program *p, uint64_t seed, int threads, int64_t bytes)
{
    qd_initial_ahead *a = calloc(1, sizeof *a);
    float **values = calloc((size_t)p->ledger->param_count + 1, sizeof *values);
    if (a && values) {
        *a = (qd_initial_ahead){.program = p, .seed = seed, .bytes = bytes, .values = values};
        if (qd_pool_create(threads, -1, &a->pool) == QD_OK && pthread_create(&a->thread, NULL, draw_ahead, a) == 0)
            return a;
        qd_pool_destroy(a->pool);
    }
    qd_error_clear();
    free(values);
    free(a);
    return NULL;
}

/* Stops after the parameter that is being drawn. */
static void settle(qd_initial_ahead *a)
{
    if (!a || !a->pool)
        return;
    atomic_store(&a->stop, true);
    pthread_join(a->thread, NULL);
    qd_pool_destroy(a->pool);
    a->pool = NULL;
}

void qd_initial_end(qd_initial_ahead *a)
{
    if (!a)
        return;
    settle(a);
    for (int i = 0; i < a->done; i++)
        free(a->values[i]);
    free(a->values);
    free(a);
}

static qd_status store_drawn(const qd_program *p, int param, float **drawn, qd_initial_sink sink, void *context)
{
    enum { AT_A_TIME = 1 << 22 };
    int64_t all = qd_program_holding(p, QD_BUFFER_PARAM, param).count;
    qd_status status = QD_OK;
    for (int64_t first = 0; first < all && status == QD_OK; first += AT_A_TIME)
        status = sink(context, param, first, all - first < AT_A_TIME ? all - first : AT_A_TIME, *drawn + first);
    free(*drawn);
    *drawn = NULL;
    return status;
}

static qd_status draw_param(const qd_program *p, int param, drawing *d, qd_pool *pool, qd_initial_sink sink, void *context)
{
    qd_holding own = qd_program_holding(p, QD_BUFFER_PARAM, param);
    int64_t most = (int64_t)qd_pool_threads(pool) * PIECE;
    for (int64_t first = 0; first < own.count; first += most) {
        int64_t count = own.count - first < most ? own.count - first : most;
        d->first = first;
        qd_pool_for(pool, count, PIECE, draw, d);
        QD_TRY(sink(context, param, first, count, d->values));
    }
    return QD_OK;
}

qd_status qd_initial_adapters(const qd_program *p, uint64_t seed, qd_initial_sink sink, void *context)
{
    qd_pool *pool = NULL;
    QD_TRY(qd_pool_create(1, -1, &pool));
    float *values = malloc(PIECE * sizeof *values);
    qd_status status = values ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to draw initial values");
    for (int i = 0; i < p->ledger->param_count && status == QD_OK; i++) {
        drawing d = drawing_of(p, seed, i);
        d.values = values;
        if (p->ledger->params[i].adapter)
            status = draw_param(p, i, &d, pool, sink, context);
    }
    free(values);
    qd_pool_destroy(pool);
    return status;
}

qd_status qd_initial_values(const qd_program *p, uint64_t seed, int threads, qd_initial_ahead *ahead, qd_initial_sink sink, void *context)
{
    qd_pool *pool = NULL;
    settle(ahead);
    QD_TRY(qd_pool_create(threads, -1, &pool));
    float *values = malloc((size_t)threads * PIECE * sizeof *values);
    qd_status status = values ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to draw initial values");
    for (int i = 0; i < p->ledger->param_count && status == QD_OK; i++) {
        drawing d = drawing_of(p, seed, i);
        d.values = values;
        if (ahead && i < ahead->done && ahead->values[i])
            status = store_drawn(p, i, &ahead->values[i], sink, context);
        else if (qd_storage_has(p->ledger, &p->storage, i))
            status = draw_param(p, i, &d, pool, sink, context);
    }
    free(values);
    qd_pool_destroy(pool);
    return status;
}
