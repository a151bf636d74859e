/* The one order in which values of several ranks are combined. */
#ifndef QD_DEVICE_SUM_H
#define QD_DEVICE_SUM_H

#include <quadrille/types.h>

/* out[i] = reduction of sources[0][i] .. sources[n-1][i] along the pairwise tree whose left part is
 * the largest power of two below n. n >= 1, count >= 0. `out` may be one of the sources, or must
 * not overlap any.
 *   fp32, bf16, fp16: added in fp32, rounded once; fp64: in fp64; int32, int64: modulo 2^32, 2^64.
 *   QD_AVG: the sum times 1/n, before rounding; integers: the sum divided by n, towards zero.
 *   QD_MAX: NaN if any value is NaN.
 * The bits do not depend on the instruction set, on count or on alignment. */
void qd_sum_tree(void *out, const void *const *sources, int n, int64_t count, qd_dtype dtype, qd_reduce_op op);

/* False for types that only travel (uint8). */
bool qd_sum_supported(qd_dtype dtype);

/* Largest power of two below n (n >= 2): how many of n values the left part of the tree holds. */
int qd_sum_left(int n);

/* For tests: use this version ("generic", "avx2", "avx512") from now on; false if the machine lacks
 * it. */
bool qd_sum_use(const char *isa);

#endif
