/* Causal attention: checks, and the choice between cuDNN and kernels of our own. */
#include "device/cuda/attention_impl.h"
#include "device/cuda/cuda_impl.h"

static qd_status check(const char *kernel, const qd_attention_args *a)
{
    QD_TRY(qd_cuda_check_float(kernel, "q", a->dtype));
    const int64_t most_batch = 65535, most_seq = INT32_MAX - QD_CUDA_HEAD_MOST; /* of a grid, and of its row numbers */
    if (a->batch < 0 || a->seq < 0 || a->batch > most_batch || a->seq > most_seq)
        return QD_FAIL(QD_USAGE, "%s: batch %lld and seq %lld are not within 0 .. 65535 and 0 .. 2^31", kernel,
                       (long long)a->batch, (long long)a->seq);
    if (a->head_dim < 2 || a->head_dim % 2 || a->head_dim > QD_CUDA_HEAD_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "%s: head_dim %d; even sizes from 2 to %d are supported", kernel, a->head_dim,
                       QD_CUDA_HEAD_MOST);
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads)
        return QD_FAIL(QD_USAGE, "%s: %d heads and %d kv_heads; heads must be a multiple of kv_heads", kernel, a->heads,
                       a->kv_heads);
    int64_t q_width = (int64_t)a->heads * a->head_dim, kv_width = (int64_t)a->kv_heads * a->head_dim;
    if (a->q_stride < q_width || a->o_stride < q_width || a->k_stride < kv_width || a->v_stride < kv_width)
        return QD_FAIL(QD_USAGE, "%s: strides q %lld, k %lld, v %lld, o %lld are shorter than rows of %d and %d heads", kernel,
                       (long long)a->q_stride, (long long)a->k_stride, (long long)a->v_stride, (long long)a->o_stride,
                       a->heads, a->kv_heads);
    return QD_OK;
}

/* Tensor-core kernels read 16 bytes at a time; the others take anything. */
static bool can_use_tensor_cores(const qd_attention_args *a)
{
    const void *addresses[] = {a->q, a->k, a->v, a->o, a->d_o, a->dq, a->dk, a->dv};
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++)
        if ((uintptr_t)addresses[i] % 16)
            return false;
    return a->dtype == QD_BF16 && a->head_dim % 8 == 0 && a->head_dim <= QD_CUDA_TENSOR_HEAD_MOST && a->q_stride % 8 == 0 &&
           a->k_stride % 8 == 0 && a->v_stride % 8 == 0 && a->o_stride % 8 == 0;
}

qd_status qd_cuda_attention_forward_own(qd_stream *stream, const qd_attention_args *a)
{
    return can_use_tensor_cores(a) ? qd_cuda_attention_forward_tensor(stream, a) : qd_cuda_attention_forward_plain(stream, a);
}

qd_status qd_cuda_attention_backward_own(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(qd_cuda_attention_delta(stream, a));
    return can_use_tensor_cores(a) ? qd_cuda_attention_backward_tensor(stream, a) : qd_cuda_attention_backward_plain(stream, a);
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

/* Sequences shared out over ranks have no kernel of their own here yet. */
static qd_status no_parts(const char *kernel)
{
    return QD_FAIL(QD_UNSUPPORTED, "%s: attention of a part of a sequence (parallel.cp above 1 with cp_mode ring or gather) runs on the CPU "
                                   "only so far", kernel);
}

qd_status qd_cuda_attention_part_forward(qd_stream *stream, const qd_attention_part_args *a)
{
    (void)stream;
    (void)a;
    return no_parts("attention_part_forward");
}

qd_status qd_cuda_attention_part_backward(qd_stream *stream, const qd_attention_part_args *a)
{
    (void)stream;
    (void)a;
    return no_parts("attention_part_backward");
}
