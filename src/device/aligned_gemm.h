/* GEMMs of sizes that are not multiples of a tile's vectors, as two that are fast. */
#ifndef QD_DEVICE_ALIGNED_GEMM_H
#define QD_DEVICE_ALIGNED_GEMM_H

#include "device/device.h"

/* A bf16 GEMM whose rows begin aligned but have an odd length (a vocabulary of 50,257 in rows of
 * 50,304) makes a GPU library fall back to kernels of a fraction of the speed. Cut into the part
 * whose length is a multiple of 16 bytes and a remainder of at most 7 elements, nearly all of the
 * work is aligned. Returns how many calls there are in `parts`, to be made in that order: 2, or 1
 * (the call itself) where nothing is gained: other types, epilogues, unaligned strides, fewer than
 * `least` multiply-adds. Where k is cut, the remainder comes first and the larger part adds to it:
 * bf16 results are rounded once more, but by the remainder's size only. */
int qd_matmul_cut(const qd_matmul_args *a, double least, qd_matmul_args parts[2]);
#endif
