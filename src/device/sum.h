/* The order in which values of several ranks are combined. All backends use it, so that results do
 * not depend on the backend. */
#ifndef QD_DEVICE_SUM_H
#define QD_DEVICE_SUM_H

#include <quadrille/types.h>

/* out[i] = reduction of sources[0][i] .. sources[n-1][i] along the pairwise tree whose left subtree
 * has the largest power of two below n leaves. n >= 1, count >= 0. `out` may be one of the sources,
 * else it must not overlap any.
 *   fp32, bf16, fp16: added in fp32, rounded once; fp64: in fp64; int32, int64: modulo 2^32, 2^64.
 *   QD_AVG: the sum times 1/n, before rounding; integers: the sum divided by n, towards zero.
 *   QD_MAX: NaN if any value is NaN.
 * Results are bit-identical for every instruction set, count and alignment. */
void qd_sum_tree(void *out, const void *const *sources, int n, int64_t count, qd_dtype dtype, qd_reduce_op op);

/* False for types that are sent but never reduced (uint8). */
bool qd_sum_supported(qd_dtype dtype);

/* Largest power of two below n (n >= 2): number of leaves in the tree's left subtree. */
int qd_sum_left(int n);

/* For tests: use this version ("generic", "avx2", "avx512") from now on; false if the machine does
 * not support it. */
bool qd_sum_use(const char *isa);

#endif
