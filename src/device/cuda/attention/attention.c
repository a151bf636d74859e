/* Causal attention: checks, and the choice between cuDNN and our own kernels. */
#include "device/cuda/attention/attention_impl.h"
#include "device/cuda/cuda_impl.h"
#include "device/cuda/gemm/search.h"
#include "device/arguments_impl.h"

#define MOST_SEQ (INT32_MAX - QD_CUDA_HEAD_MOST) /* kernels use int for rows and positions, up to a tile beyond the last */

static qd_status check(const char *kernel, const qd_attention_args *a)
{
    QD_TRY(qd_check_float(kernel, "q", a->dtype));
    const int64_t most_batch = 65535; /* limit of a grid dimension */
    if (a->batch < 0 || a->seq < 0 || a->batch > most_batch || a->seq > MOST_SEQ)
        return QD_FAIL(QD_USAGE, "%s: batch %lld and seq %lld are not within 0 .. 65535 and 0 .. 2^31", kernel,
                       (long long)a->batch, (long long)a->seq);
    if (a->head_dim < 2 || a->head_dim % 2 || a->head_dim > QD_CUDA_HEAD_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "%s: head_dim %d; even sizes from 2 to %d are supported", kernel, a->head_dim,
                       QD_CUDA_HEAD_MOST);
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads)
        return QD_FAIL(QD_USAGE, "%s: %d heads and %d kv_heads; heads must be a multiple of kv_heads", kernel, a->heads,
                       a->kv_heads);
    const int v_dim = qd_attention_v_dim(a->head_dim, a->v_dim);
    if (v_dim > QD_CUDA_HEAD_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "%s: v_dim %d; sizes up to %d are supported", kernel, v_dim, QD_CUDA_HEAD_MOST);
    if (a->q_stride < (int64_t)a->heads * a->head_dim || a->o_stride < (int64_t)a->heads * v_dim ||
        a->k_stride < (int64_t)a->kv_heads * a->head_dim || a->v_stride < (int64_t)a->kv_heads * v_dim)
        return QD_FAIL(QD_USAGE, "%s: strides q %lld, k %lld, v %lld, o %lld are shorter than rows of %d and %d heads", kernel,
                       (long long)a->q_stride, (long long)a->k_stride, (long long)a->v_stride, (long long)a->o_stride,
                       a->heads, a->kv_heads);
    return qd_check_scores(kernel, a->window, a->softcap);
}

/* Tensor-core kernels read 16 bytes per access; the others have no alignment requirements. */
static bool can_use_tensor_cores(const qd_cuda_attention_job *j)
{
    const void *addresses[] = {j->q, j->k, j->v, j->o, j->d_o, j->dq, j->dk, j->dv};
    const int64_t strides[] = {j->q_stride, j->k_stride, j->v_stride, j->o_stride, j->dq_stride, j->dk_stride, j->dv_stride};
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++)
        if ((uintptr_t)addresses[i] % 16)
            return false;
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        if (strides[i] % 8)
            return false;
    return j->half && j->head_dim % 8 == 0 && j->v_dim % 8 == 0 && j->head_dim <= QD_CUDA_TENSOR_HEAD_MOST;
}

static qd_status run_forward(qd_stream *stream, const qd_cuda_attention_job *j)
{
    return can_use_tensor_cores(j) ? qd_cuda_attention_forward_tensor(stream, j) : qd_cuda_attention_forward_plain(stream, j);
}

static qd_status run_backward(qd_stream *stream, const qd_cuda_attention_job *j)
{
    return can_use_tensor_cores(j) ? qd_cuda_attention_backward_tensor(stream, j) : qd_cuda_attention_backward_plain(stream, j);
}

/* A window as long as the positions go is none. */
static int window_of(int64_t window, int64_t positions)
{
    return window < positions ? (int)window : 0;
}

/* Every row of a sequence, in order. */
static qd_cuda_attention_job whole(const qd_attention_args *a)
{
    const qd_cuda_run all = {0, 0, (int)a->seq};
    return (qd_cuda_attention_job){
        .q = a->q, .k = a->k, .v = a->v, .d_o = a->d_o, .o = a->o, .dq = a->dq, .dk = a->dk, .dv = a->dv, .delta = a->delta,
        .lse = a->lse, .maxima = a->maxima, .doc_start = a->doc_start, .batch = a->batch, .q_seq = a->seq, .k_seq = a->seq,
        .q_stride = a->q_stride, .k_stride = a->k_stride, .v_stride = a->v_stride, .o_stride = a->o_stride, .dq_stride = a->q_stride,
        .dk_stride = a->k_stride, .dv_stride = a->v_stride, .heads = a->heads, .kv_heads = a->kv_heads, .head_dim = a->head_dim,
        .v_dim = qd_attention_v_dim(a->head_dim, a->v_dim), .window = window_of(a->window, a->seq), .scale = a->scale,
        .softcap = a->softcap, .half = a->dtype == QD_BF16,
        .q_run_count = 1, .k_run_count = 1, .q_runs = {all}, .k_runs = {all},
    };
}

qd_status qd_cuda_attention_forward_own(qd_stream *stream, const qd_attention_args *a)
{
    const qd_cuda_attention_job j = whole(a);
    return run_forward(stream, &j);
}

qd_status qd_cuda_attention_backward_own(qd_stream *stream, const qd_attention_args *a)
{
    const qd_cuda_attention_job j = whole(a);
    QD_TRY(qd_cuda_attention_delta(stream, a));
    return run_backward(stream, &j);
}

qd_status qd_cuda_attention_forward(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(check("attention_forward", a));
    if (a->batch == 0 || a->seq == 0)
        return QD_OK;
    if (a->dtype == QD_BF16) {
        qd_status status = qd_cuda_attention_forward_cudnn(stream, a);
        if (status != QD_UNSUPPORTED)
            return status;
    }
    return qd_cuda_attention_forward_own(stream, a);
}

qd_status qd_cuda_attention_backward(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(check("attention_backward", a));
    if (a->batch == 0 || a->seq == 0)
        return QD_OK;
    if (a->dtype == QD_BF16) {
        qd_status status = qd_cuda_attention_backward_cudnn(stream, a);
        if (status != QD_UNSUPPORTED)
            return status;
    }
    return qd_cuda_attention_backward_own(stream, a);
}

static qd_status check_part(const char *kernel, const qd_attention_part_args *a)
{
    QD_TRY(check(kernel, &(qd_attention_args){.dtype = a->dtype, .batch = a->batch, .seq = a->q_seq, .head_dim = a->head_dim,
                                              .v_dim = a->v_dim, .heads = a->heads, .kv_heads = a->kv_heads, .q_stride = a->q_stride,
                                              .k_stride = a->k_stride, .v_stride = a->v_stride, .o_stride = a->o_stride,
                                              .window = a->window, .softcap = a->softcap}));
    QD_TRY(qd_row_runs_check(kernel, "queries", a->q_runs, a->q_run_count, a->q_seq, MOST_SEQ));
    return qd_row_runs_check(kernel, "keys", a->k_runs, a->k_run_count, a->k_seq, MOST_SEQ);
}

/* Takes runs starting at `first`, as many as one launch can have. */
static int take_runs(const qd_row_run *runs, int count, int first, qd_cuda_run *out)
{
    int taken = 0;
    for (; taken < QD_CUDA_RUNS_MOST && first + taken < count; taken++) {
        const qd_row_run *r = &runs[first + taken];
        out[taken] = (qd_cuda_run){(int)r->row, (int)r->position, (int)r->count};
    }
    return taken;
}

/* One launch, or several if there are many runs: each merges or adds to the results of earlier
 * ones. */
static qd_status run_part(qd_stream *stream, const qd_attention_part_args *a, qd_status (*run)(qd_stream *, const qd_cuda_attention_job *))
{
    qd_cuda_attention_job j = {
        .q = a->q, .k = a->k, .v = a->v, .d_o = a->d_o, .o = a->o, .dq = a->dq, .dk = a->dk, .dv = a->dv, .delta = a->delta,
        .lse = a->lse, .maxima = a->maxima, .doc_start = a->doc_start, .batch = a->batch, .q_seq = a->q_seq, .k_seq = a->k_seq,
        .q_stride = a->q_stride, .k_stride = a->k_stride, .v_stride = a->v_stride, .o_stride = a->o_stride, .dq_stride = a->dq_stride,
        .dk_stride = a->dk_stride, .dv_stride = a->dv_stride, .heads = a->heads, .kv_heads = a->kv_heads, .head_dim = a->head_dim,
        .v_dim = qd_attention_v_dim(a->head_dim, a->v_dim), .window = window_of(a->window, MOST_SEQ), .scale = a->scale,
        .softcap = a->softcap, .half = a->dtype == QD_BF16, .part = true,
    };
    if (a->batch == 0)
        return QD_OK;
    for (int q = 0; q < a->q_run_count; q += QD_CUDA_RUNS_MOST) {
        j.q_run_count = take_runs(a->q_runs, a->q_run_count, q, j.q_runs);
        int k = 0;
        do { /* even without keys: rows that attend to no key start with 0 */
            j.k_run_count = take_runs(a->k_runs, a->k_run_count, k, j.k_runs);
            j.merge = !a->begin || k > 0;
            QD_TRY(run(stream, &j));
            k += QD_CUDA_RUNS_MOST;
        } while (k < a->k_run_count);
    }
    return QD_OK;
}

qd_status qd_cuda_attention_part_forward(qd_stream *stream, const qd_attention_part_args *a)
{
    QD_TRY(check_part("attention_part_forward", a));
    return run_part(stream, a, run_forward);
}

qd_status qd_cuda_attention_part_backward(qd_stream *stream, const qd_attention_part_args *a)
{
    QD_TRY(check_part("attention_part_backward", a));
    QD_TRY(qd_attention_part_check_gradients("attention_part_backward", a));
    return run_part(stream, a, run_backward);
}
