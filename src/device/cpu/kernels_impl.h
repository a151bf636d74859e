/* The boundary between row-wise and element-wise kernels (norm.c …) and their *_isa.c files.
 * Kernels check arguments and pass ranges to the pool; the functions below compute one range.
 * Ranges depend on the shapes only. */
#ifndef QD_DEVICE_CPU_KERNELS_IMPL_H
#define QD_DEVICE_CPU_KERNELS_IMPL_H

#include "base/rng.h"
#include "device/cpu/cpu_impl.h"

/* Elements that make a range worth a thread. */
#define QD_CPU_GRAIN ((int64_t)16384)

/* Rows of `cols` elements per range. */
static inline int64_t qd_cpu_row_grain(int64_t cols)
{
    return cols >= QD_CPU_GRAIN || cols < 1 ? 1 : QD_CPU_GRAIN / cols;
}

/* Runs body on [0, count) in ranges of `grain`. Its context is `args`, which it only reads. */
static inline void qd_cpu_for(qd_stream *stream, int64_t count, int64_t grain, qd_pool_body body, const void *args)
{
    qd_pool_for(qd_cpu_of(stream)->pool, count, grain, body, (void *)(uintptr_t)args);
}

/* The context of a body is the kernel's argument struct unless a comment says otherwise. */
typedef struct qd_cpu_norm_ops {
    qd_pool_body forward; /* rows */
    /* Rows begin .. end-1. dgamma, dbeta: (cols) fp32, accumulated into; either may be NULL. */
    void (*backward)(const qd_norm_backward_args *a, int64_t begin, int64_t end, float *dgamma, float *dbeta);
} qd_cpu_norm_ops;
QD_CPU_TABLE(qd_cpu_norm_ops, qd_cpu_norm_ops)

typedef struct qd_cpu_head_norm_ops {
    qd_pool_body forward; /* rows */
    /* Rows begin .. end-1. sums: (2, head_dim) fp32, gradients of the two gammas, accumulated
     * into. */
    void (*backward)(const qd_head_norm_args *a, int64_t begin, int64_t end, float *sums);
} qd_cpu_head_norm_ops;
QD_CPU_TABLE(qd_cpu_head_norm_ops, qd_cpu_head_norm_ops)

typedef struct qd_cpu_qk_norm_ops {
    qd_pool_body squares, forward, dots; /* rows */
    /* Rows begin .. end-1. part: (q_cols + k_cols) fp32, gradients of the two gammas, accumulated
     * into. */
    void (*backward)(const qd_qk_norm_args *a, int64_t begin, int64_t end, float *part);
} qd_cpu_qk_norm_ops;
QD_CPU_TABLE(qd_cpu_qk_norm_ops, qd_cpu_qk_norm_ops)

typedef struct qd_cpu_expert_rows_ops {
    qd_pool_body permute; /* places */
    qd_pool_body combine, gate, gate_backward; /* rows */
} qd_cpu_expert_rows_ops;
QD_CPU_TABLE(qd_cpu_expert_rows_ops, qd_cpu_expert_rows_ops)

/* Rows [row, row + rows) of x, which belong to one expert. */
typedef struct qd_cpu_grouped_bias_job {
    const qd_grouped_bias_args *args;
    int64_t row;
    int expert;
} qd_cpu_grouped_bias_job;
typedef struct qd_cpu_grouped_bias_ops {
    qd_pool_body add; /* rows; context: qd_cpu_grouped_bias_job */
    qd_pool_body sum; /* experts */
} qd_cpu_grouped_bias_ops;
QD_CPU_TABLE(qd_cpu_grouped_bias_ops, qd_cpu_grouped_bias_ops)

/* fp8 (gemm/fp8.c). A GEMM is computed in blocks of QD_CPU_FP8_COLUMNS columns. */
#define QD_CPU_FP8_COLUMNS 32
typedef struct qd_cpu_amax_job {
    const qd_amax_args *args;
    const qd_cpu *cpu;
    _Atomic uint32_t bits; /* of the largest magnitude so far */
} qd_cpu_amax_job;
typedef struct qd_cpu_cast_job {
    const qd_fp8_cast_args *args;
    const qd_cpu *cpu;
} qd_cpu_cast_job;
/* One form of a tensor with scales of rows or blocks: its element (row, i) is element row *
 * row_step + i * k_step of x. */
typedef struct qd_cpu_scaled_job {
    const void *x;
    void *codes;
    int64_t rows, k, row_step, k_step;
    qd_fp8_scaling scaling;
    qd_dtype dtype, to;
} qd_cpu_scaled_job;
typedef struct qd_cpu_fp8_job {
    const qd_matmul_args *args;
    const qd_cpu *cpu;
} qd_cpu_fp8_job;
typedef struct qd_cpu_fp8_ops {
    qd_pool_body amax;     /* elements, or rows of an activation; context: qd_cpu_amax_job */
    qd_pool_body cast;     /* rows; context: qd_cpu_cast_job */
    qd_pool_body multiply; /* blocks of columns; context: qd_cpu_fp8_job */
} qd_cpu_fp8_ops;
QD_CPU_TABLE(qd_cpu_fp8_ops, qd_cpu_fp8_ops)

typedef struct qd_cpu_rope_ops {
    qd_pool_body rotate; /* rows */
} qd_cpu_rope_ops;
QD_CPU_TABLE(qd_cpu_rope_ops, qd_cpu_rope_ops)

typedef struct qd_cpu_sink_ops {
    qd_pool_body forward;  /* rows of all sequences */
    qd_pool_body backward; /* heads of the parameter */
} qd_cpu_sink_ops;
QD_CPU_TABLE(qd_cpu_sink_ops, qd_cpu_sink_ops)

#define QD_CPU_LATENT_ROPE 256 /* most rotated elements of a head */
typedef struct qd_cpu_latent_ops {
    qd_pool_body join, split; /* rows */
} qd_cpu_latent_ops;
QD_CPU_TABLE(qd_cpu_latent_ops, qd_cpu_latent_ops)

#define QD_CPU_CACHED_HEAD_DIM 1024 /* compressed keys are longer than heads */
typedef struct qd_cpu_attention_cached_ops {
    qd_pool_body rows; /* (row, head) pairs, heads fastest */
} qd_cpu_attention_cached_ops;
QD_CPU_TABLE(qd_cpu_attention_cached_ops, qd_cpu_attention_cached_ops)

typedef struct qd_cpu_activation_ops {
    qd_pool_body forward, backward; /* rows */
} qd_cpu_activation_ops;
QD_CPU_TABLE(qd_cpu_activation_ops, qd_cpu_activation_ops)

typedef struct qd_cpu_elementwise_ops {
    qd_pool_body add, cast, clip, clip_backward, scale, softcap; /* elements */
    qd_pool_body copy_rows; /* rows */
} qd_cpu_elementwise_ops;
QD_CPU_TABLE(qd_cpu_elementwise_ops, qd_cpu_elementwise_ops)

typedef struct qd_cpu_dropout_job {
    const qd_dropout_args *args;
    qd_philox_key key;
} qd_cpu_dropout_job;
typedef struct qd_cpu_dropout_ops {
    qd_pool_body apply; /* elements; context: qd_cpu_dropout_job */
} qd_cpu_dropout_ops;
QD_CPU_TABLE(qd_cpu_dropout_ops, qd_cpu_dropout_ops)

typedef struct qd_cpu_embedding_ops {
    qd_pool_body forward; /* rows */
    /* grad (cols) += rows (uint32_t)keys[0], (uint32_t)keys[1] … of dy, in this order, rounded
     * once. */
    void (*add_rows)(void *grad, qd_dtype grad_dtype, const void *dy, qd_dtype dtype, int64_t cols,
                     const uint64_t *keys, int64_t count);
} qd_cpu_embedding_ops;
QD_CPU_TABLE(qd_cpu_embedding_ops, qd_cpu_embedding_ops)

typedef struct qd_cpu_cross_entropy_job {
    const qd_cross_entropy_args *args;
    const qd_cpu *cpu;
} qd_cpu_cross_entropy_job;
typedef struct qd_cpu_cross_entropy_ops {
    qd_pool_body rows; /* context: qd_cpu_cross_entropy_job */
    qd_pool_body part; /* context: qd_cross_entropy_part_args */
} qd_cpu_cross_entropy_ops;
QD_CPU_TABLE(qd_cpu_cross_entropy_ops, qd_cpu_cross_entropy_ops)

/* A parameter range is updated in chunks of QD_CPU_GRAIN elements; the last may be shorter. */
static inline int64_t qd_cpu_range_chunks(const qd_param_range *range)
{
    return (range->count + QD_CPU_GRAIN - 1) / QD_CPU_GRAIN;
}
typedef struct qd_cpu_optimizer_ops {
    qd_pool_body adamw, sgd; /* chunks, numbered across all ranges */
} qd_cpu_optimizer_ops;
QD_CPU_TABLE(qd_cpu_optimizer_ops, qd_cpu_optimizer_ops)

typedef struct qd_cpu_unit_norm_job {
    const qd_unit_norm_args *args;
    float factor;
} qd_cpu_unit_norm_job;
typedef struct qd_cpu_muon_ops {
    qd_pool_body momentum, unit_norm, axpby, matrix_update; /* elements; unit_norm's context: qd_cpu_unit_norm_job */
} qd_cpu_muon_ops;
QD_CPU_TABLE(qd_cpu_muon_ops, qd_cpu_muon_ops)

typedef struct qd_cpu_reduce_ops {
    qd_pool_body row_squares; /* rows */
    /* sum (cols) += rows begin .. end-1 of dy, in ascending order. */
    void (*column_sums)(const qd_bias_grad_args *a, int64_t begin, int64_t end, float *sum);
    /* sum[begin .. end-1] += each of the `count` vectors of `width` at `parts`, in ascending
     * order. */
    void (*add_parts)(float *sum, const float *parts, int64_t count, int64_t width, int64_t begin, int64_t end);
    /* grad = sum [+ grad if accumulate], in grad's type. */
    void (*put_grad)(void *grad, qd_dtype dtype, const float *sum, int64_t count, bool accumulate);
} qd_cpu_reduce_ops;
QD_CPU_TABLE(qd_cpu_reduce_ops, qd_cpu_reduce_ops)

/* Sums over rows: splits [0, rows) into blocks of a fixed number of rows, calls body(context,
 * begin, end, part) for each with a zeroed part (width), and adds the parts in ascending order. The
 * result (width, fp32) is in the device's workspace. Neither blocks nor order depend on the number
 * of threads. */
typedef void (*qd_cpu_row_sum_body)(void *context, int64_t begin, int64_t end, float *part);
qd_status qd_cpu_row_sum(qd_cpu *cpu, const char *kernel, int64_t rows, int64_t width, qd_cpu_row_sum_body body,
                         void *context, const float **sum);

#endif
