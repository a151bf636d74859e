/* Attention through cuDNN: one plan per shape and pass, made on first use. cuDNN proposes a few
 * engines. They are timed on the call's own buffers, which repeated runs overwrite with the same
 * values, and the fastest is kept. Deterministic runs take the first proposal instead, so that two
 * runs choose the same. A shape that no engine supports is cached as such. */
#include "device/cuda/attention/attention_cudnn_impl.h"
#include "device/cuda/attention/attention_impl.h"
#include "device/cuda/cuda_impl.h"
#include "device/cuda/gemm/search.h"

#include <math.h>
#include <quadrille/log.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    REPEATS = 5,
    WHOLE_TILES_ONLY = 91600, /* before this version the backward pass needs sequences of whole tiles, or a padding mask */
};
static const int64_t most_workspace = (int64_t)8 << 30; /* the deterministic backward pass needs seq² per head */

typedef struct entry {
    qd_attention_shape shape;
    char wanted[sizeof((qd_cudnn_plan){0}.name)]; /* engine name from a tuning text, or "" */
    bool tried, usable;
    qd_cudnn_graph graph; /* this and the next: if usable */
    qd_cudnn_plan plan;
    double seconds; /* measured; 0: not timed */
} entry;

struct qd_cuda_attention {
    entry *entries;
    int count, capacity;
};

qd_status qd_cuda_attention_create(qd_cuda *cuda)
{
    QD_CUDNN_TRY(cudnnCreate(&cuda->cudnn_handle));
    cuda->attention = calloc(1, sizeof *cuda->attention);
    return cuda->attention ? QD_OK : QD_FAIL(QD_NO_MEMORY, "attention plans: no host memory");
}

void qd_cuda_attention_destroy(qd_cuda *cuda)
{
    if (cuda->attention) {
        for (int i = 0; i < cuda->attention->count; i++) {
            qd_cudnn_plan_destroy(&cuda->attention->entries[i].plan);
            qd_cudnn_graph_destroy(&cuda->attention->entries[i].graph);
        }
        free(cuda->attention->entries);
        free(cuda->attention);
        cuda->attention = NULL;
    }
    if (cuda->cudnn_handle)
        cudnnDestroy(cuda->cudnn_handle);
    cuda->cudnn_handle = NULL;
}

void qd_cuda_attention_describe(const qd_cuda *cuda, qd_strbuf *text)
{
    (void)cuda;
    (void)text; /* plans use the stream's workspace */
}

static bool same_shape(const qd_attention_shape *x, const qd_attention_shape *y)
{
    return x->batch == y->batch && x->seq == y->seq && x->heads == y->heads && x->kv_heads == y->kv_heads &&
           x->head_dim == y->head_dim && x->v_dim == y->v_dim && x->q_stride == y->q_stride && x->k_stride == y->k_stride &&
           x->v_stride == y->v_stride && x->o_stride == y->o_stride && x->backward == y->backward &&
           x->deterministic == y->deterministic && x->maxima == y->maxima && x->window == y->window && x->capped == y->capped;
}

static qd_status find_entry(qd_cuda_attention *attention, const qd_attention_shape *shape, entry **found)
{
    for (int i = 0; i < attention->count; i++) {
        if (same_shape(&attention->entries[i].shape, shape)) {
            *found = &attention->entries[i];
            return QD_OK;
        }
    }
    if (attention->count == attention->capacity) {
        int capacity = attention->capacity ? 2 * attention->capacity : 8;
        entry *grown = realloc(attention->entries, (size_t)capacity * sizeof *grown);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "attention plans: no host memory for %d", capacity);
        attention->entries = grown;
        attention->capacity = capacity;
    }
    *found = &attention->entries[attention->count++];
    **found = (entry){.shape = *shape};
    return QD_OK;
}

static bool aligned(const void *address)
{
    return (uintptr_t)address % 16 == 0;
}

/* Hopper has engines for larger heads; on other GPUs their backward pass is missing. */
static int most_head_dim(const qd_cuda *cuda)
{
    return cuda->properties.major == 9 ? 256 : 128;
}

static bool takes_head_dim(const qd_cuda *cuda, int dim)
{
    return dim >= 8 && dim % 8 == 0 && dim <= most_head_dim(cuda);
}

/* What engines can support at all, checked without asking cuDNN. */
static bool takes(const qd_cuda *cuda, const qd_attention_args *a, bool backward)
{
    if (a->dtype != QD_BF16 || a->doc_start || !takes_head_dim(cuda, a->head_dim) ||
        !takes_head_dim(cuda, qd_attention_v_dim(a->head_dim, a->v_dim)) || a->seq < 2 || a->batch < 1 || a->kv_heads < 1 ||
        a->heads % a->kv_heads || cuda->properties.major < 8)
        return false;
    if (a->q_stride % 8 || a->k_stride % 8 || a->v_stride % 8 || a->o_stride % 8)
        return false;
    if (!aligned(a->q) || !aligned(a->k) || !aligned(a->v) || !aligned(a->o) || !aligned(a->lse))
        return false;
    if (!backward)
        return true;
    if (cudnnGetVersion() < WHOLE_TILES_ONLY && a->seq % 128)
        return false;
    return aligned(a->d_o) && aligned(a->dq) && aligned(a->dk) && aligned(a->dv) && aligned(a->delta) && a->dq != a->q &&
           a->dk != a->k && a->dv != a->v;
}

/* What a call keeps at the start of the workspace: the sum of dq, or the largest score of each
 * row. */
static int64_t own_bytes(const qd_attention_shape *s)
{
    const int64_t rows = s->batch * s->heads * s->seq * (int64_t)sizeof(float);
    const int64_t bytes = s->maxima ? rows : s->backward && !s->deterministic ? rows * s->head_dim : 0;
    return (bytes + 255) / 256 * 256;
}

static qd_status execute(qd_stream *stream, const qd_attention_shape *shape, const qd_cudnn_plan *plan,
                         const qd_attention_args *a)
{
    static const float masked = -INFINITY, one = 1;
    const float window = (float)a->window;
    qd_cuda *cuda = qd_cuda_of(stream);
    int64_t own = own_bytes(shape);
    void *workspace;
    QD_TRY(qd_cuda_workspace(stream, own + plan->workspace_bytes, &workspace));
    void *rest = (char *)workspace + own;
    int64_t numbers[QD_CUDNN_VIRTUAL];
    void *addresses[QD_CUDNN_VIRTUAL];
    int count = 0;
#define GIVE(number, address) (numbers[count] = (number), addresses[count++] = (void *)(uintptr_t)(address))
    GIVE(QD_CUDNN_Q, a->q);
    GIVE(QD_CUDNN_K, a->k);
    GIVE(QD_CUDNN_V, a->v);
    GIVE(QD_CUDNN_O, a->o);
    if (shape->maxima)
        GIVE(QD_CUDNN_MOST, workspace);
    GIVE(shape->maxima ? QD_CUDNN_SUM : QD_CUDNN_LSE, a->lse);
    GIVE(QD_CUDNN_SCALE, &a->scale);
    GIVE(QD_CUDNN_MASKED, &masked);
    if (shape->window)
        GIVE(QD_CUDNN_WINDOW, &window);
    if (shape->capped)
        GIVE(QD_CUDNN_CAP, &a->softcap);
    if (shape->backward) {
        GIVE(QD_CUDNN_ONE, &one);
        GIVE(QD_CUDNN_D_O, a->d_o);
        GIVE(QD_CUDNN_DELTA, a->delta);
        GIVE(QD_CUDNN_DQ, a->dq);
        GIVE(QD_CUDNN_DK, a->dk);
        GIVE(QD_CUDNN_DV, a->dv);
        if (own)
            GIVE(QD_CUDNN_DQ_SUM, workspace);
    }
#undef GIVE
    cudnnBackendDescriptor_t pack;
    QD_CUDNN_TRY(cudnnSetStream(cuda->cudnn_handle, qd_cuda_stream_of(stream)));
    QD_CUDNN_TRY(cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack));
    cudnnStatus_t error = cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count,
                                                   addresses);
    if (error == CUDNN_STATUS_SUCCESS)
        error = cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, numbers);
    if (error == CUDNN_STATUS_SUCCESS)
        error = cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &rest);
    if (error == CUDNN_STATUS_SUCCESS)
        error = cudnnBackendFinalize(pack);
    if (error == CUDNN_STATUS_SUCCESS)
        error = cudnnBackendExecute(cuda->cudnn_handle, plan->plan, pack);
    qd_status status = QD_OK;
    if (error != CUDNN_STATUS_SUCCESS)
        status = qd_cudnn_fail_at(__FILE__, __LINE__, __func__, plan->name, error);
    cudnnBackendDestroyDescriptor(pack);
    return status == QD_OK && shape->maxima ? qd_cuda_attention_maxima(stream, workspace, a) : status;
}

static int compare_floats(const void *x, const void *y)
{
    float a = *(const float *)x, b = *(const float *)y;
    return (a > b) - (a < b);
}

/* The median of a few runs after a warm-up run. */
static qd_status time_plan(qd_stream *stream, const qd_attention_shape *shape, const qd_cudnn_plan *plan,
                           const qd_attention_args *a, double *seconds)
{
    cudaEvent_t from = NULL, to = NULL;
    float ms[REPEATS];
    qd_status status = QD_OK;
    QD_CUDA_TRY_DONE(cudaEventCreate(&from));
    QD_CUDA_TRY_DONE(cudaEventCreate(&to));
    QD_TRY_DONE(execute(stream, shape, plan, a));
    for (int i = 0; i < REPEATS; i++) {
        QD_CUDA_TRY_DONE(cudaEventRecord(from, qd_cuda_stream_of(stream)));
        QD_TRY_DONE(execute(stream, shape, plan, a));
        QD_CUDA_TRY_DONE(cudaEventRecord(to, qd_cuda_stream_of(stream)));
        QD_CUDA_TRY_DONE(cudaEventSynchronize(to));
        QD_CUDA_TRY_DONE(cudaEventElapsedTime(&ms[i], from, to));
    }
    qsort(ms, REPEATS, sizeof *ms, compare_floats);
    *seconds = ms[REPEATS / 2] * 1e-3;
done:
    if (from)
        (void)cudaEventDestroy(from);
    if (to)
        (void)cudaEventDestroy(to);
    return status;
}

/* The host cannot wait for a stream that is being captured into a graph. */
static bool can_time(qd_stream *stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusActive;
    return cudaStreamIsCapturing(qd_cuda_stream_of(stream), &capture) == cudaSuccess && capture == cudaStreamCaptureStatusNone;
}

/* Keeps the fastest of `plans` in e and destroys the others. Plans that fail are skipped. */
static void choose(qd_stream *stream, entry *e, qd_cudnn_plan *plans, int count, const qd_attention_args *a)
{
    int best = -1;
    double best_seconds = 0;
    bool timed = count > 1 && !qd_cuda_of(stream)->deterministic && can_time(stream);
    for (int i = 0; i < count; i++) {
        if (plans[i].workspace_bytes + own_bytes(&e->shape) > most_workspace)
            continue;
        double seconds = 0;
        if (timed && time_plan(stream, &e->shape, &plans[i], a, &seconds) != QD_OK) {
            qd_log(QD_LOG_INFO, "device", "attention: %s failed: %s", plans[i].name, qd_error_message());
            continue;
        }
        if (best < 0 || seconds < best_seconds) {
            best = i;
            best_seconds = seconds;
        }
        if (!timed)
            break;
    }
    for (int i = 0; i < count; i++) {
        if (i == best)
            e->plan = plans[i];
        else
            qd_cudnn_plan_destroy(&plans[i]);
    }
    e->usable = best >= 0;
    if (timed)
        e->seconds = best_seconds;
}

/* As in the tuning text. */
static const char *pass_of(const qd_attention_shape *s)
{
    return s->backward ? "backward" : s->maxima ? "forward_maxima" : "forward";
}

/* Makes the plan of a shape. If there is none, the entry records that; this is not an error. */
static void try_entry(qd_stream *stream, entry *e, const qd_attention_args *a)
{
    qd_cuda *cuda = qd_cuda_of(stream);
    qd_cudnn_plan plans[QD_CUDNN_CANDIDATES];
    int count = 0;
    e->tried = true;
    qd_status status = qd_cudnn_graph_create(cuda->cudnn_handle, &e->shape, &e->graph);
    if (status == QD_OK && *e->wanted)
        status = qd_cudnn_plans_create(cuda->cudnn_handle, NULL, &e->graph, e->wanted, plans, &count);
    if (status == QD_OK && count == 0)
        status = qd_cudnn_plans_create(cuda->cudnn_handle, NULL, &e->graph, NULL, plans, &count);
    if (status == QD_OK)
        choose(stream, e, plans, count, a);
    if (e->usable)
        return;
    qd_log(QD_LOG_WARN, "device", "attention %s of %lld x %lld rows, %d heads of %d, values of %d: cuDNN is not used: %s",
           pass_of(&e->shape), (long long)a->batch, (long long)a->seq, a->heads, a->head_dim, (int)e->shape.v_dim,
           status == QD_OK ? "no engine supports it" : qd_error_message());
    qd_cudnn_graph_destroy(&e->graph);
    qd_error_clear();
}

static qd_attention_shape shape_of(const qd_attention_args *a, bool backward, bool deterministic)
{
    return (qd_attention_shape){
        .batch = a->batch, .seq = a->seq, .heads = a->heads, .kv_heads = a->kv_heads, .head_dim = a->head_dim,
        .v_dim = qd_attention_v_dim(a->head_dim, a->v_dim), .q_stride = a->q_stride, .k_stride = a->k_stride, .v_stride = a->v_stride,
        .o_stride = a->o_stride,
        .window = a->window < a->seq ? a->window : 0, .capped = a->softcap != 0, .backward = backward,
        .deterministic = backward && deterministic, .maxima = !backward && a->maxima,
    };
}

qd_status qd_cuda_attention_graph_check(const qd_attention_args *a, bool backward, bool deterministic)
{
    qd_attention_shape shape = shape_of(a, backward, deterministic);
    qd_cudnn_graph graph;
    QD_TRY(qd_cudnn_graph_create(NULL, &shape, &graph));
    qd_cudnn_graph_destroy(&graph);
    return QD_OK;
}

static qd_status run(qd_stream *stream, const qd_attention_args *a, bool backward)
{
    qd_cuda *cuda = qd_cuda_of(stream);
    if (!takes(cuda, a, backward))
        return QD_UNSUPPORTED;
    qd_attention_shape shape = shape_of(a, backward, cuda->deterministic);
    entry *e;
    QD_TRY(find_entry(cuda->attention, &shape, &e));
    if (!e->tried)
        try_entry(stream, e, a);
    return e->usable ? execute(stream, &shape, &e->plan, a) : QD_UNSUPPORTED;
}

qd_status qd_cuda_attention_forward_cudnn(qd_stream *stream, const qd_attention_args *a)
{
    return run(stream, a, false);
}

qd_status qd_cuda_attention_backward_cudnn(qd_stream *stream, const qd_attention_args *a)
{
    return run(stream, a, true);
}

/* attention forward 64 1024 12 12 64 64 strides 2304 2304 2304 768 window 0 capped 0 us 812.5
 * engine 2 knobs 24=7 */

void qd_cuda_attention_tuning_get(const qd_cuda *cuda, qd_strbuf *text)
{
    for (int i = 0; i < cuda->attention->count; i++) {
        const entry *e = &cuda->attention->entries[i];
        const qd_attention_shape *s = &e->shape;
        const char *name = e->usable ? e->plan.name : e->wanted;
        if (*name && (e->usable || !e->tried))
            qd_strbuf_printf(text,
                             "attention %s %lld %lld %lld %lld %lld %lld strides %lld %lld %lld %lld window %lld capped %d us %.1f %s\n",
                             pass_of(s), (long long)s->batch, (long long)s->seq,
                             (long long)s->heads, (long long)s->kv_heads, (long long)s->head_dim, (long long)s->v_dim,
                             (long long)s->q_stride, (long long)s->k_stride, (long long)s->v_stride, (long long)s->o_stride,
                             (long long)s->window, s->capped, e->seconds * 1e6, name);
    }
}

qd_status qd_cuda_attention_tuning_set(qd_cuda *cuda, const char *line)
{
    char pass[16];
    long long v[12];
    double us;
    int used = 0;
    if (sscanf(line, "attention %15s %lld %lld %lld %lld %lld %lld strides %lld %lld %lld %lld window %lld capped %lld us %lf %n", pass,
               &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7], &v[8], &v[9], &v[10], &v[11], &us, &used) != 14 || !used)
        return QD_FAIL(QD_CORRUPT, "tuning text: not a valid attention line: %.80s", line);
    bool backward = strcmp(pass, "backward") == 0;
    qd_attention_shape shape = {
        .batch = v[0], .seq = v[1], .heads = v[2], .kv_heads = v[3], .head_dim = v[4], .v_dim = v[5],
        .q_stride = v[6], .k_stride = v[7], .v_stride = v[8], .o_stride = v[9], .window = v[10], .capped = v[11] != 0,
        .backward = backward, .deterministic = backward && cuda->deterministic, .maxima = strcmp(pass, "forward_maxima") == 0,
    };
    entry *e;
    QD_TRY(find_entry(cuda->attention, &shape, &e));
    if (strlen(line + used) >= sizeof e->wanted)
        return QD_FAIL(QD_CORRUPT, "tuning text: the name of an engine is too long: %.80s", line);
    strcpy(e->wanted, line + used);
    e->seconds = us * 1e-6;
    return QD_OK;
}
