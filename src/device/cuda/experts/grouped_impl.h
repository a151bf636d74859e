/* Products over experts: Hopper's kernels, which qd_cuda_grouped calls where they can run. */
#ifndef QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_H
#define QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "device/cuda/launch_impl.h"

enum { QD_GROUPED_SEGMENTS = 1024 }; /* sources * experts at most */

/* Whether Hopper's kernels take this call: the device, types, and rows that are multiples of 16
 * bytes. */
bool qd_cuda_grouped_hopper_takes(const qd_cuda_launch *launch, const qd_grouped_args *a);
/* Of what they take, whether the kernel of grouped_turns.cu is the faster one. */
bool qd_cuda_grouped_turns_suits(const qd_cuda_launch *launch, const qd_grouped_args *a);
qd_status qd_cuda_grouped_turns(qd_stream *stream, const qd_grouped_args *a); /* with SwiGLU, where that is asked for */
/* There are results, and rows. Without SwiGLU. a->squares are summed where b is bf16; the squares
 * of fp32 are left to the caller. */
qd_status qd_cuda_grouped_hopper(qd_stream *stream, const qd_grouped_args *a);

#ifdef __cplusplus
}
#endif
#endif
