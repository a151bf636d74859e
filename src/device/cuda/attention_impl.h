/* Attention with kernels of our own. Blocks of queries and of keys meet in shared memory; scores never leave it. Each
 * output element is summed by one thread (tensor cores: one warp) in a fixed order: the backward pass computes dq in one
 * kernel and dk and dv in another, so that no two blocks add to the same place. */
#ifndef QD_DEVICE_CUDA_ATTENTION_IMPL_H
#define QD_DEVICE_CUDA_ATTENTION_IMPL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "device/device.h"

#define QD_CUDA_HEAD_MOST 256
#define QD_CUDA_TENSOR_HEAD_MOST 128

/* fp32 multiply-adds: both types, any head size, stride and alignment (attention_plain.cu). */
qd_status qd_cuda_attention_forward_plain(qd_stream *stream, const qd_attention_args *a);
qd_status qd_cuda_attention_backward_plain(qd_stream *stream, const qd_attention_args *a);
/* bf16 tensor cores: head sizes that are multiples of 8, rows and addresses aligned to 16 bytes (attention_tensor.cu). */
qd_status qd_cuda_attention_forward_tensor(qd_stream *stream, const qd_attention_args *a);
qd_status qd_cuda_attention_backward_tensor(qd_stream *stream, const qd_attention_args *a);
/* delta = rowsum(d_o * o), which both backward passes read (attention_plain.cu). */
qd_status qd_cuda_attention_delta(qd_stream *stream, const qd_attention_args *a);

#ifdef __cplusplus
}
#endif
#endif
