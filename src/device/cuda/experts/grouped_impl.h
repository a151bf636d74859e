/* Grouped GEMM: Hopper's kernels, which qd_cuda_grouped calls where they can run. */
#ifndef QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_H
#define QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "device/cuda/launch_impl.h"

enum { QD_GROUPED_SEGMENTS = 1024 }; /* most sources * experts */

/* Whether Hopper's kernels support this call: device, types, and rows that are multiples of 16
 * bytes. */
bool qd_cuda_grouped_hopper_takes(const qd_cuda_launch *launch, const qd_grouped_args *a);
/* Of the calls that they support, whether the kernel of grouped_pingpong.cu is faster. */
bool qd_cuda_grouped_pingpong_suits(const qd_cuda_launch *launch, const qd_grouped_args *a);
qd_status qd_cuda_grouped_pingpong(qd_stream *stream, const qd_grouped_args *a); /* with bias and SwiGLU if requested */
/* There must be results and rows. Without bias and SwiGLU. Computes a->squares where b is bf16; the
 * caller does so where b is fp32. */
qd_status qd_cuda_grouped_hopper(qd_stream *stream, const qd_grouped_args *a);

#ifdef __cplusplus
}
#endif
#endif
