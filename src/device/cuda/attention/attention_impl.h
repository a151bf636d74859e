/* Attention with our own kernels. Blocks of queries and keys are multiplied in shared memory;
 * scores never leave the chip. One thread (tensor cores: one warp) sums each output element, in a
 * fixed order: the backward pass computes dq in one kernel and dk and dv in another, so that no two
 * blocks add to the same element. */
#ifndef QD_DEVICE_CUDA_ATTENTION_ATTENTION_IMPL_H
#define QD_DEVICE_CUDA_ATTENTION_ATTENTION_IMPL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "device/device.h"

#define QD_CUDA_HEAD_MOST 256
#define QD_CUDA_TENSOR_HEAD_MOST 256
#define QD_CUDA_RUNS_MOST 16 /* most runs of queries, and of keys, per launch */

/* A qd_row_run with the integer type of the kernels. */
typedef struct qd_cuda_run {
    int row, position, count;
} qd_cuda_run;

/* What attention_* and attention_part_* have in common, as a kernel parameter: queries and keys in
 * runs of positions. A whole sequence is one run of each. */
typedef struct qd_cuda_attention_job {
    const void *q, *k, *v, *d_o;
    void *o, *dq, *dk, *dv;
    const float *delta;
    float *lse;
    float *maxima; /* forward: raised to the largest score of each head; NULL: none */
    const int32_t *doc_start;
    int64_t batch, q_seq, k_seq, q_stride, k_stride, v_stride, o_stride, dq_stride, dk_stride, dv_stride;
    int heads, kv_heads, head_dim;
    int v_dim;  /* size of a head of v and o */
    int window; /* 0: none */
    float scale, softcap; /* softcap 0: none */
    bool half;  /* q, k, v and d_o are bf16 */
    bool part;  /* o and gradients are fp32, gradients are accumulated; else both have q's type and are overwritten */
    bool merge; /* forward: merge into the existing o and lse */
    int q_run_count, k_run_count;
    qd_cuda_run q_runs[QD_CUDA_RUNS_MOST], k_runs[QD_CUDA_RUNS_MOST];
} qd_cuda_attention_job;

/* fp32 multiply-adds: both types, any head size, stride and alignment (attention_plain.cu). */
qd_status qd_cuda_attention_forward_plain(qd_stream *stream, const qd_cuda_attention_job *a);
qd_status qd_cuda_attention_backward_plain(qd_stream *stream, const qd_cuda_attention_job *a);
/* bf16 tensor cores: head sizes that are multiples of 8, rows and addresses aligned to 16 bytes
 * (attention_tensor.cu); v_dim likewise. */
qd_status qd_cuda_attention_forward_tensor(qd_stream *stream, const qd_cuda_attention_job *a);
qd_status qd_cuda_attention_backward_tensor(qd_stream *stream, const qd_cuda_attention_job *a);
/* After a cuDNN plan that gives the largest score of each row, `most`, and the sum of exponentials,
 * in a->lse (both (batch, heads, seq)): writes lse and raises a->maxima (attention_maxima.cu). */
qd_status qd_cuda_attention_maxima(qd_stream *stream, const float *most, const qd_attention_args *a);

#ifdef __cplusplus
}
#endif
#endif
