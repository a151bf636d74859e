/* Causal attention of whole sequences and of parts of them: checks, and the split into ranges that
 * one thread computes alone, in a fixed order. */
#include "device/cpu/attention/attention_impl.h"
#include "device/arguments_impl.h"

static qd_status check(const char *kernel, const qd_attention_args *a)
{
    QD_TRY(qd_check_float(kernel, "q", a->dtype));
    if (a->batch < 0 || a->seq < 0)
        return QD_FAIL(QD_USAGE, "%s: batch %lld and seq %lld must not be negative", kernel, (long long)a->batch,
                       (long long)a->seq);
    if (a->head_dim < 2 || a->head_dim % 2 || a->head_dim > QD_ATTENTION_HEAD_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "%s: head_dim %d; even sizes from 2 to %d are supported", kernel, a->head_dim,
                       QD_ATTENTION_HEAD_MOST);
    const int v_dim = qd_attention_v_dim(a->head_dim, a->v_dim);
    if (v_dim < 1 || v_dim > QD_ATTENTION_HEAD_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "%s: v_dim %d; sizes from 1 to %d are supported", kernel, v_dim, QD_ATTENTION_HEAD_MOST);
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads)
        return QD_FAIL(QD_USAGE, "%s: %d heads and %d kv_heads; heads must be a multiple of kv_heads", kernel, a->heads,
                       a->kv_heads);
    int64_t q_width = (int64_t)a->heads * a->head_dim, kv_width = (int64_t)a->kv_heads * a->head_dim;
    if (a->q_stride < q_width || a->o_stride < (int64_t)a->heads * v_dim || a->k_stride < kv_width ||
        a->v_stride < (int64_t)a->kv_heads * v_dim)
        return QD_FAIL(QD_USAGE, "%s: strides q %lld, k %lld, v %lld, o %lld are shorter than rows of %d and %d heads",
                       kernel, (long long)a->q_stride, (long long)a->k_stride, (long long)a->v_stride,
                       (long long)a->o_stride, a->heads, a->kv_heads);
    return qd_check_scores(kernel, a->window, a->softcap);
}

/* The work of a kernel, split into tiles of queries. */
typedef struct work {
    const qd_cpu *cpu;
    const qd_cpu_attention *kernel;
    qd_cpu_attention_job job;
    int64_t tile_rows, tiles; /* per sequence */
    bool with_dq;
} work;

/* Every row of a sequence, in order. */
static qd_row_run whole(int64_t seq)
{
    return (qd_row_run){0, 0, seq};
}

static work make_work(qd_stream *stream, const qd_attention_args *a, const qd_row_run *run, int64_t rows)
{
    const qd_cpu *cpu = qd_cpu_of(stream);
    return (work){
        .cpu = cpu,
        .kernel = qd_cpu_attention_of(cpu, a->dtype, a->head_dim, qd_attention_v_dim(a->head_dim, a->v_dim)),
        .tile_rows = rows,
        .tiles = (a->seq + rows - 1) / rows,
        .job = {.q = a->q, .k = a->k, .v = a->v, .d_o = a->d_o, .o = a->o, .dq = a->dq, .dk = a->dk, .dv = a->dv, .delta = a->delta,
                .lse = a->lse, .maxima = a->maxima,
                .doc_start = a->doc_start, .q_runs = run, .k_runs = run, .q_run_count = 1, .k_run_count = 1,
                .batch = a->batch, .q_seq = a->seq, .k_seq = a->seq, .q_stride = a->q_stride, .k_stride = a->k_stride,
                .v_stride = a->v_stride, .o_stride = a->o_stride, .dq_stride = a->q_stride, .dk_stride = a->k_stride,
                .dv_stride = a->v_stride, .window = a->window, .heads = a->heads, .kv_heads = a->kv_heads, .head_dim = a->head_dim,
                .v_dim = qd_attention_v_dim(a->head_dim, a->v_dim), .scale = a->scale, .softcap = a->softcap, .dtype = a->dtype,
                .out_dtype = a->dtype},
    };
}

/* Tile i of a sequence, counted from its end. */
static qd_cpu_attention_tile tile_at(const work *w, int64_t i)
{
    for (int run = w->job.q_run_count - 1; run >= 0; run--) {
        const qd_row_run *r = &w->job.q_runs[run];
        int64_t tiles = (r->count + w->tile_rows - 1) / w->tile_rows, at = (tiles - 1 - i) * w->tile_rows;
        if (i < tiles)
            return (qd_cpu_attention_tile){r->row + at, r->position + at,
                                           (int)(r->count - at < w->tile_rows ? r->count - at : w->tile_rows)};
        i -= tiles;
    }
    return (qd_cpu_attention_tile){0, 0, 0};
}

static int64_t item_count(const work *w)
{
    return w->tiles * w->job.batch * w->job.heads;
}

/* Item i of (tiles, batch, heads). The last tiles attend to the most keys and come first, so that
 * the threads finish together. */
static qd_cpu_attention_item item_at(const work *w, int64_t i)
{
    int64_t each = w->job.batch * w->job.heads;
    return (qd_cpu_attention_item){i % each / w->job.heads, (int)(i % each % w->job.heads), tile_at(w, i / each)};
}

typedef void tile_kernel(const qd_cpu_attention_job *j, const qd_cpu_attention_item *item, const qd_cpu_attention_item *ahead,
                         void *workspace);
static void run_tiles(const work *w, tile_kernel *kernel, int64_t begin, int64_t end, int thread)
{
    for (int64_t i = begin; i < end; i++) {
        int64_t next = i + qd_pool_threads(w->cpu->pool); /* the other threads take the items in between */
        bool last = next >= item_count(w);
        qd_cpu_attention_item item = item_at(w, i), ahead = item_at(w, last ? i : next);
        kernel(&w->job, &item, last ? NULL : &ahead, qd_cpu_workspace(w->cpu, thread));
    }
}

static void forward_range(void *context, int64_t begin, int64_t end, int thread)
{
    const work *w = context;
    run_tiles(w, w->kernel->forward, begin, end, thread);
}

static void backward_dq_range(void *context, int64_t begin, int64_t end, int thread)
{
    const work *w = context;
    run_tiles(w, w->kernel->backward_dq, begin, end, thread);
}

static qd_cpu_attention_keys keys_at(const work *w, int64_t i)
{
    return (qd_cpu_attention_keys){i / w->job.kv_heads, (int)(i % w->job.kv_heads)};
}

static void backward_range(void *context, int64_t begin, int64_t end, int thread)
{
    const work *w = context;
    for (int64_t i = begin; i < end; i++) {
        int64_t next = i + qd_pool_threads(w->cpu->pool);
        qd_cpu_attention_keys keys = keys_at(w, i), ahead = keys_at(w, next);
        w->kernel->backward(&w->job, &keys, next < w->job.batch * w->job.kv_heads ? &ahead : NULL, w->with_dq,
                            qd_cpu_workspace(w->cpu, thread));
    }
}

enum { DELTA_ROWS = 16 }; /* per range; the heads of a row are contiguous */

typedef struct delta_work {
    const qd_attention_args *args;
    const qd_cpu_attention *kernel;
} delta_work;

static void delta_range(void *context, int64_t begin, int64_t end, int thread)
{
    const delta_work *w = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        w->kernel->backward_delta(w->args, i / w->args->seq, i % w->args->seq);
}

static void compute_delta(const qd_cpu *cpu, const qd_attention_args *a)
{
    delta_work w = {a, qd_cpu_attention_for(cpu)};
    qd_pool_for(cpu->pool, a->batch * a->seq, DELTA_ROWS, delta_range, &w);
}

qd_status qd_cpu_attention_forward(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(check("attention_forward", a));
    qd_row_run run = whole(a->seq);
    work w = make_work(stream, a, &run, QD_ATTENTION_FORWARD_ROWS);
    qd_pool_for(w.cpu->pool, item_count(&w), 1, forward_range, &w);
    return QD_OK;
}

qd_status qd_cpu_attention_delta(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(check("attention_delta", a));
    compute_delta(qd_cpu_of(stream), a);
    return QD_OK;
}

qd_status qd_cpu_attention_backward(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(check("attention_backward", a));
    qd_row_run run = whole(a->seq);
    work w = make_work(stream, a, &run, QD_ATTENTION_BLOCK);
    /* One pass over the pairs of blocks if dq can be accumulated in fp32 during the pass over keys,
     * else two. */
    int64_t group = a->heads / a->kv_heads;
    w.with_dq = a->dtype == QD_F32 || group * a->seq * a->head_dim <= QD_ATTENTION_KEPT_FLOATS;
    compute_delta(w.cpu, a);
    qd_pool_for(w.cpu->pool, a->batch * a->kv_heads, 1, backward_range, &w);
    if (!w.with_dq)
        qd_pool_for(w.cpu->pool, item_count(&w), 1, backward_dq_range, &w);
    return QD_OK;
}

static qd_status make_part_work(const char *kernel, qd_stream *stream, const qd_attention_part_args *a, int64_t rows, work *w)
{
    QD_TRY(check(kernel, &(qd_attention_args){.dtype = a->dtype, .batch = a->batch, .seq = a->q_seq, .head_dim = a->head_dim,
                                              .v_dim = a->v_dim,
                                              .heads = a->heads, .kv_heads = a->kv_heads, .q_stride = a->q_stride,
                                              .k_stride = a->k_stride, .v_stride = a->v_stride, .o_stride = a->o_stride,
                                              .window = a->window, .softcap = a->softcap}));
    QD_TRY(qd_row_runs_check(kernel, "queries", a->q_runs, a->q_run_count, a->q_seq, INT64_MAX));
    QD_TRY(qd_row_runs_check(kernel, "keys", a->k_runs, a->k_run_count, a->k_seq, INT64_MAX));
    const qd_cpu *cpu = qd_cpu_of(stream);
    *w = (work){
        .cpu = cpu,
        .kernel = qd_cpu_attention_of(cpu, a->dtype, a->head_dim, qd_attention_v_dim(a->head_dim, a->v_dim)),
        .tile_rows = rows,
        .with_dq = true,
        .job = {.q = a->q, .k = a->k, .v = a->v, .d_o = a->d_o, .o = a->o, .dq = a->dq, .dk = a->dk, .dv = a->dv, .delta = a->delta,
                .lse = a->lse, .maxima = a->maxima,
                .doc_start = a->doc_start, .q_runs = a->q_runs, .k_runs = a->k_runs, .q_run_count = a->q_run_count,
                .k_run_count = a->k_run_count, .batch = a->batch, .q_seq = a->q_seq, .k_seq = a->k_seq, .q_stride = a->q_stride,
                .k_stride = a->k_stride, .v_stride = a->v_stride, .o_stride = a->o_stride, .dq_stride = a->dq_stride,
                .dk_stride = a->dk_stride, .dv_stride = a->dv_stride, .window = a->window, .heads = a->heads,
                .kv_heads = a->kv_heads, .head_dim = a->head_dim, .v_dim = qd_attention_v_dim(a->head_dim, a->v_dim), .scale = a->scale,
                .softcap = a->softcap, .dtype = a->dtype, .out_dtype = QD_F32, .merge = !a->begin, .accumulate = true},
    };
    for (int i = 0; i < a->q_run_count; i++)
        w->tiles += (a->q_runs[i].count + rows - 1) / rows;
    return QD_OK;
}

qd_status qd_cpu_attention_part_forward(qd_stream *stream, const qd_attention_part_args *a)
{
    work w;
    QD_TRY(make_part_work("attention_part_forward", stream, a, QD_ATTENTION_FORWARD_ROWS, &w));
    qd_pool_for(w.cpu->pool, item_count(&w), 1, forward_range, &w);
    return QD_OK;
}

qd_status qd_cpu_attention_part_backward(qd_stream *stream, const qd_attention_part_args *a)
{
    work w;
    QD_TRY(make_part_work("attention_part_backward", stream, a, QD_ATTENTION_BLOCK, &w));
    QD_TRY(qd_attention_part_check_gradients("attention_part_backward", a));
    bool meets = false; /* if not, there is nothing to add to the gradients */
    for (int i = 0; i < a->k_run_count; i++)
        meets = meets || qd_cpu_attention_meets(&w.job, &a->k_runs[i]);
    if (meets)
        qd_pool_for(w.cpu->pool, a->batch * a->kv_heads, 1, backward_range, &w);
    return QD_OK;
}
