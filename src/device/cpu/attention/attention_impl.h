/* The boundary between attention.c (checks, work items, threads) and attention_isa.c (one range of
 * rows, vectorized). */
#ifndef QD_DEVICE_CPU_ATTENTION_ATTENTION_IMPL_H
#define QD_DEVICE_CPU_ATTENTION_ATTENTION_IMPL_H

#include "device/cpu/cpu_impl.h"

/* Block size in queries and keys: a multiple of the register tile's rows and of the vector length,
 * for every instruction set. */
#define QD_ATTENTION_BLOCK 96
/* Queries per item of the forward pass: several blocks, so that packed keys are reused more
 * often. */
#define QD_ATTENTION_FORWARD_ROWS (3 * QD_ATTENTION_BLOCK)
#define QD_ATTENTION_HEAD_MOST 256

/* Floats of the workspace in which the backward pass keeps a key head's packed queries and their
 * gradients or, if those do not fit, accumulates a dq that is not fp32. */
#define QD_ATTENTION_KEPT_FLOATS ((int64_t)512 << 10)
/* Most floats that the backward pass prefetches. */
#define QD_ATTENTION_AHEAD_FLOATS (96 << 10)

/* What attention_* and attention_part_* have in common: queries and keys in runs of positions. A
 * whole sequence is one run of each. */
typedef struct qd_cpu_attention_job {
    const void *q, *k, *v, *d_o;
    void *o, *dq, *dk, *dv; /* o and gradients have type out_dtype */
    const float *delta;
    float *lse;
    float *maxima; /* (heads), forward: raised to the largest scores; NULL: none */
    const int32_t *doc_start;
    const qd_row_run *q_runs, *k_runs;
    int q_run_count, k_run_count;
    int64_t batch, q_seq, k_seq, q_stride, k_stride, v_stride, o_stride, dq_stride, dk_stride, dv_stride;
    int64_t window; /* 0: none */
    int heads, kv_heads, head_dim, v_dim;
    float scale, softcap;
    qd_dtype dtype, out_dtype;
    bool merge;      /* forward: merge into the existing o and lse; o is fp32 */
    bool accumulate; /* backward: accumulate into the gradients; they are fp32 */
} qd_cpu_attention_job;

/* Whether the windows of any queries contain keys of the run. */
static inline bool qd_cpu_attention_meets(const qd_cpu_attention_job *j, const qd_row_run *keys)
{
    bool meets = j->window == 0;
    for (int i = 0; i < j->q_run_count && !meets; i++) {
        const qd_row_run *q = &j->q_runs[i];
        meets = keys->position < q->position + q->count && keys->position + keys->count > q->position - j->window + 1;
    }
    return meets;
}

/* Consecutive rows of queries, starting at row `row` of the part, at position `position`. */
typedef struct qd_cpu_attention_tile {
    int64_t row, position;
    int rows;
} qd_cpu_attention_tile;

/* Rows of one head's queries: the unit of work of the forward pass. */
typedef struct qd_cpu_attention_item {
    int64_t batch;
    int head;
    qd_cpu_attention_tile tile;
} qd_cpu_attention_item;

/* One key head: the unit of work of the backward pass. */
typedef struct qd_cpu_attention_keys {
    int64_t batch;
    int kv_head;
} qd_cpu_attention_keys;

typedef struct qd_cpu_attention {
    /* Up to QD_ATTENTION_FORWARD_ROWS rows. ahead: the thread's probable next item, whose memory is
     * prefetched; may be NULL. */
    void (*forward)(const qd_cpu_attention_job *j, const qd_cpu_attention_item *item, const qd_cpu_attention_item *ahead, void *workspace);
    /* dk and dv of one key head; with_dq: also dq of the query heads that use it. */
    void (*backward)(const qd_cpu_attention_job *j, const qd_cpu_attention_keys *keys, const qd_cpu_attention_keys *ahead, bool with_dq,
                     void *workspace);
    /* dq of up to QD_ATTENTION_BLOCK rows, where `backward` did not compute it. */
    void (*backward_dq)(const qd_cpu_attention_job *j, const qd_cpu_attention_item *item, const qd_cpu_attention_item *ahead,
                        void *workspace);
    /* delta = rowsum(d_o * o) of all heads, for one row of (batch, seq). */
    void (*backward_delta)(const qd_attention_args *a, int64_t batch, int64_t t);
} qd_cpu_attention;
QD_CPU_TABLE_EMULATED(qd_cpu_attention, qd_cpu_attention)

/* Heads that AMX tiles or dot products compute, if q, k, v and d_o are bf16. Others are computed in
 * fp32. */
static inline bool qd_cpu_attention_has_tiles(int head_dim, int v_dim)
{
    return head_dim % 32 == 0 && v_dim % 32 == 0;
}

#if defined(__x86_64__)
extern const qd_cpu_attention qd_cpu_attention_amx, qd_cpu_attention_amx_emulated, qd_cpu_attention_dots,
    qd_cpu_attention_dots_emulated;
#endif

static inline const qd_cpu_attention *qd_cpu_attention_of(const qd_cpu *cpu, qd_dtype dtype, int head_dim, int v_dim)
{
#if defined(__x86_64__)
    const bool tiles = dtype == QD_BF16 && qd_cpu_attention_has_tiles(head_dim, v_dim);
    if (tiles && cpu->isa == QD_CPU_amx)
        return &qd_cpu_attention_amx;
    if (tiles && cpu->isa == QD_CPU_amx_emulated)
        return &qd_cpu_attention_amx_emulated;
    if (tiles && cpu->isa == QD_CPU_avx512bf16)
        return &qd_cpu_attention_dots;
    if (tiles && cpu->isa == QD_CPU_avx512bf16_emulated)
        return &qd_cpu_attention_dots_emulated;
#else
    (void)dtype;
    (void)head_dim;
    (void)v_dim;
#endif
    return qd_cpu_attention_for(cpu);
}

#endif
