/* Element types, and kinds and costs of collective operations, shared by all parts of the library.
 * No function here fails or is collective. */
#ifndef QUADRILLE_TYPES_H
#define QUADRILLE_TYPES_H

#include <quadrille/export.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum qd_dtype { QD_F32, QD_BF16, QD_F16, QD_I32, QD_I64, QD_F64, QD_U8, QD_F8E4M3, QD_F8E5M2, QD_DTYPE_COUNT } qd_dtype;

/* Bytes of an element, and the name of a type. */
QD_API size_t qd_dtype_size(qd_dtype dtype);
/* "fp32", "bf16", "fp16", "int32", "int64", "fp64", "uint8", "fp8_e4m3", "fp8_e5m2" */
QD_API const char *qd_dtype_name(qd_dtype dtype);

typedef enum qd_activation {
    QD_ACT_GELU_TANH, QD_ACT_GELU, QD_ACT_SWIGLU, QD_ACT_GEGLU_TANH, QD_ACT_GEGLU, QD_ACT_SWIGLU_CLAMPED
} qd_activation;
/* Whether it multiplies the activated half of its input by the other half. */
static inline bool qd_activation_is_gated(qd_activation kind)
{
    return kind != QD_ACT_GELU_TANH && kind != QD_ACT_GELU;
}
static inline bool qd_activation_is_swiglu(qd_activation kind)
{
    return kind == QD_ACT_SWIGLU || kind == QD_ACT_SWIGLU_CLAMPED;
}

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
enum { QD_COLL_KIND_MOST = 16 }; /* length of arrays indexed by kind, with capacity for later versions */
QD_API const char *qd_coll_kind_name(qd_coll_kind kind); /* "all-reduce", "send", … */

/* Payload bytes sent from rank to rank by an operation, summed over the group. This is the only
 * definition of the traffic of an operation: step programs carry this figure, backends choose their
 * algorithm with qd_coll_direct() and qd_coll_split() and count what they copy, and a test compares
 * the two.
 *
 * `count` is the number of elements of
 * - all-reduce, broadcast, reduce: the whole message
 * - reduce-scatter: the whole input
 * - all-gather: the whole output
 * - gather, scatter: the whole message at the root
 * - send, recv: the message, counted at the receiver
 * - all-to-all: all off-diagonal blocks */
QD_API int64_t qd_coll_bytes(qd_coll_kind kind, int64_t count, qd_dtype dtype, int group_size);

/* Whether an all-reduce of this size is direct: every rank sums all inputs, in one phase. Larger
 * ones are split into one slice per rank, which its owner sums and sends to all. The summation
 * order is the same in both. */
QD_API bool qd_coll_direct(int64_t bytes, int group_size);

/* Whether a reduce of this size is split into one slice per rank, which its owner sums and sends to
 * the root. Smaller ones are summed by the root from all inputs. The summation order is the same in
 * both. */
QD_API bool qd_coll_split(int64_t bytes);

/* The slice of `count` elements that part `index` of `parts` owns: the first count % parts slices
 * are one element longer. */
QD_API void qd_slice(int64_t count, int parts, int index, int64_t *offset, int64_t *length);

#ifdef __cplusplus
}
#endif
#endif
