/* The last step of sums: over rows (norm.cu) and of squares (optimizer.cu). */
#ifndef QD_DEVICE_CUDA_SUMS_IMPL_H
#define QD_DEVICE_CUDA_SUMS_IMPL_H

#include "device/cuda/launch_impl.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { QD_CUDA_PARTS_MOST = 4 };
/* For each to[i] (cols) that is not NULL, in order: the sum over `count` parts of the next cols of
 * their columns [+ to[i] if accumulate]; at most QD_CUDA_PARTS_MOST outputs. The order of summation
 * is fixed by `count`. */
qd_status qd_cuda_add_parts(cudaStream_t stream, void *const *to, int outputs, qd_dtype dtype, const float *parts, int count, int64_t cols,
                            bool accumulate);

/* out (rows) = the sum of each row of parts (rows, count), in ascending order. */
qd_status qd_cuda_join_squares(cudaStream_t stream, double *out, const double *parts, int64_t rows, int count);

#ifdef __cplusplus
}
#endif
#endif
