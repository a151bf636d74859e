/* Element types and the words for collective operations, shared by every part. */
#ifndef QUADRILLE_TYPES_H
#define QUADRILLE_TYPES_H

#include <quadrille/export.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qd_dtype { QD_F32, QD_BF16, QD_F16, QD_I32, QD_I64, QD_F64, QD_U8, QD_DTYPE_COUNT } qd_dtype;

QD_API size_t qd_dtype_size(qd_dtype dtype);
QD_API const char *qd_dtype_name(qd_dtype dtype); /* "fp32", "bf16", "fp16", "int32", "int64", "fp64", "uint8" */

typedef enum qd_activation { QD_ACT_GELU_TANH, QD_ACT_GELU, QD_ACT_SWIGLU } qd_activation;

typedef enum qd_reduce_op { QD_SUM, QD_MAX, QD_AVG } qd_reduce_op;
QD_API const char *qd_reduce_op_name(qd_reduce_op op);

typedef enum qd_coll_kind {
    QD_COLL_ALL_REDUCE,
    QD_COLL_REDUCE_SCATTER,
    QD_COLL_ALL_GATHER,
    QD_COLL_ALL_TO_ALL,
    QD_COLL_BROADCAST,
    QD_COLL_REDUCE,
    QD_COLL_GATHER,
    QD_COLL_SCATTER,
    QD_COLL_SEND,
    QD_COLL_RECV,
    QD_COLL_BARRIER,
    QD_COLL_KIND_COUNT
} qd_coll_kind;
enum { QD_COLL_KIND_MOST = 16 }; /* of arrays by kind: later versions may have as many */
QD_API const char *qd_coll_kind_name(qd_coll_kind kind); /* "all-reduce", "send", … */

/* Payload bytes that cross from one rank to another, summed over the ranks of the group, when
 * `kind` moves `counts[i]` elements for rank i (equal counts: all the same). This is the one
 * statement of "who moves what": the backends choose their algorithm with qd_coll_direct() and
 * qd_coll_split() and count what they copy; the step program carries the figure of qd_coll_bytes();
 * a test compares the two.
 *
 * `count` is: all-reduce, broadcast, reduce: the elements of the whole message; reduce-scatter: the
 * elements of the whole input; all-gather: of the whole output; gather, scatter: of the whole
 * message at the root; send, recv: of the message (counted at the receiver). All-to-all: use the
 * sum of all off-diagonal counts as `count`. */
QD_API int64_t qd_coll_bytes(qd_coll_kind kind, int64_t count, qd_dtype dtype, int group_size);

/* Small all-reduces are summed by every rank from all inputs (one exchange, no second phase);
 * larger ones are cut in one slice per rank, summed by its owner and handed out. The order of
 * summation is the same in both. */
QD_API bool qd_coll_direct(int64_t bytes, int group_size);

/* Small reduces are summed by the root from all inputs; larger ones are cut in one slice per rank,
 * summed by its owner and gathered at the root, so that all ranks sum. The order of summation is
 * the same in both. */
QD_API bool qd_coll_split(int64_t bytes);

/* Slice of `count` elements that coordinate `index` of `parts` owns: the first count % parts slices
 * are one longer. */
QD_API void qd_slice(int64_t count, int parts, int index, int64_t *offset, int64_t *length);

#ifdef __cplusplus
}
#endif
#endif
