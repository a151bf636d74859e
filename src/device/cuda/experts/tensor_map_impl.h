/* Tensor maps: descriptors with which Hopper's TMA copies boxes of matrices. */
#ifndef QD_DEVICE_CUDA_EXPERTS_TENSOR_MAP_IMPL_H
#define QD_DEVICE_CUDA_EXPERTS_TENSOR_MAP_IMPL_H

#include "device/cuda/launch_impl.h"

#include <cuda.h>

/* Whether the driver can build them. */
bool qd_cuda_has_tensor_maps(void);
/* (tables, rows, cols) of bf16, in boxes of 64 columns and box_rows rows, swizzled as wgmma
 * expects; tables 0: (rows, cols). */
qd_status qd_cuda_tensor_map(CUtensorMap *map, const void *p, int64_t tables, int64_t rows, int64_t cols, int box_rows);

#endif
