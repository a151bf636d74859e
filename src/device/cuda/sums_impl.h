/* Sums over rows, the last step (norm.cu). */
#ifndef QD_DEVICE_CUDA_SUMS_IMPL_H
#define QD_DEVICE_CUDA_SUMS_IMPL_H

#include "device/cuda/launch_impl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* first (cols) = the sum over `count` parts of their first cols columns, second that of the next cols, each added to what is there
 * if accumulate; either may be NULL, then the parts have no columns for it. In an order fixed by `count`. */
qd_status qd_cuda_add_parts(cudaStream_t stream, void *first, void *second, qd_dtype dtype, const float *parts, int count, int64_t cols,
                            bool accumulate);

#ifdef __cplusplus
}
#endif
#endif
