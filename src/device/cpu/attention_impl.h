/* The boundary between attention.c (checks, cuts, threads) and attention_isa.c (one range of rows, vectorised). */
#ifndef QD_DEVICE_CPU_ATTENTION_IMPL_H
#define QD_DEVICE_CPU_ATTENTION_IMPL_H

#include "device/cpu/cpu_impl.h"

/* Rows of queries and of keys that are worked on together. Both are multiples of every register tile's rows and of
 * every vector's length. */
#define QD_ATTENTION_BLOCK 96
/* Queries of a range of the forward pass: more than a block, so that packed keys serve more of them. */
#define QD_ATTENTION_FORWARD_ROWS (2 * QD_ATTENTION_BLOCK)
#define QD_ATTENTION_HEAD_MOST 256

/* Floats of the workspace in which the backward pass may sum dq of a key head's queries when dq is not fp32. */
#define QD_ATTENTION_DQ_FLOATS ((int64_t)512 << 10)

typedef struct qd_cpu_attention {
    /* Rows of the queries of one head, QD_ATTENTION_FORWARD_ROWS from block * QD_ATTENTION_FORWARD_ROWS on. */
    void (*forward)(const qd_attention_args *a, int64_t batch, int head, int64_t block, void *workspace);
    /* dk and dv of one key head; with_dq: also dq of the query heads that use it. */
    void (*backward)(const qd_attention_args *a, int64_t batch, int kv_head, bool with_dq, void *workspace);
    /* dq of rows of the queries of one head, QD_ATTENTION_BLOCK from block * QD_ATTENTION_BLOCK on, where `backward` did not compute it. */
    void (*backward_dq)(const qd_attention_args *a, int64_t batch, int head, int64_t block, void *workspace);
    /* delta = rowsum(d_o * o) of one head. */
    void (*backward_delta)(const qd_attention_args *a, int64_t batch, int head);
} qd_cpu_attention;
QD_CPU_TABLE(qd_cpu_attention, qd_cpu_attention)

#endif
