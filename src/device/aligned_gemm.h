/* Splits a GEMM whose size is not a multiple of the vector width into two calls that run fast. */
#ifndef QD_DEVICE_ALIGNED_GEMM_H
#define QD_DEVICE_ALIGNED_GEMM_H

#include "device/device.h"

/* With rows that start aligned but have an odd length (a vocabulary of 50,257 in rows of 50,304), a
 * GPU library falls back to kernels at a fraction of the speed. This splits the call into an
 * aligned part, whose length is a multiple of 16 bytes, and a remainder of at most 7 elements.
 *
 * Returns the number of calls in `parts`, to be made in that order: 2, or 1 (the unchanged call)
 * where a split gains nothing: types other than bf16, epilogues, unaligned strides, fewer than
 * `least` multiply-adds. Where k is split, the remainder runs first and the larger part accumulates
 * onto it. A bf16 result is then rounded once more, but the error has the size of the remainder's
 * rounding only. */
int qd_matmul_cut(const qd_matmul_args *a, double least, qd_matmul_args parts[2]);
#endif
