/* Products over experts: the kernels that qd_cuda_grouped chooses from. */
#ifndef QD_DEVICE_CUDA_GROUPED_IMPL_H
#define QD_DEVICE_CUDA_GROUPED_IMPL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "device/cuda/launch_impl.h"

enum { QD_GROUPED_SEGMENTS = 1024 }; /* sources * experts at most */

/* On Hopper's tensor cores. */
qd_status qd_cuda_grouped_hopper(qd_stream *stream, const qd_grouped_args *a);
/* Whether this call can run there: the device, types, and rows that are multiples of 16 bytes. */
bool qd_cuda_grouped_hopper_takes(const qd_cuda_launch *launch, const qd_grouped_args *a);

/* Everything, on any device: bf16 operands on tensor cores, others in fp32. */
qd_status qd_cuda_grouped_general(qd_stream *stream, const qd_grouped_args *a);

#ifdef __cplusplus
}
#endif
#endif
