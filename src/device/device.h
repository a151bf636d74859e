/* A device: memory, streams and a table of kernels. src/device/README.md describes the folder.
 *
 * Addresses in argument structs are device addresses (plain pointers on the CPU). Matrices are
 * row-major. Kernels are enqueued on a stream and take their element types at run time; on the CPU
 * a kernel has completed when its call returns. Kernels never allocate: scratch memory is the
 * device's workspace, whose size is in qd_device_caps. Results do not depend on the number of
 * compute threads: one thread computes each output element, in an order fixed by the shapes. On an
 * accelerator the host does not wait: an error of a kernel may be returned by a later call, and
 * host memory used by a copy must stay unchanged until the stream has executed the copy. */
#ifndef QD_DEVICE_DEVICE_H
#define QD_DEVICE_DEVICE_H

#include "base/preference.h"
#include "base/runs.h"
#include "device/experts.h"
#include "device/fp8.h"
#include "device/variants.h"

#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <quadrille/types.h>

typedef struct qd_device qd_device;
typedef struct qd_stream qd_stream;
typedef struct qd_event qd_event;

typedef struct qd_device_config {
    int threads;     /* compute threads of this rank, >= 1, including the caller */
    int pin_first;   /* first core to pin compute threads to; -1: do not pin */
    const char *isa; /* CPU: as run.kernels: "amx", "avx512bf16", "avx2", "neon" …; NULL: the best one */
    int ordinal;     /* which accelerator */
    bool share;      /* ordinals wrap around at the number of devices, so that ranks share them */
    bool deterministic; /* use only kernels that are bit-identical on every run; the CPU's always are */
} qd_device_config;
qd_device_config qd_device_config_default(void);

typedef struct qd_device_caps {
    const char *name;        /* "cpu" */
    const char *isa;         /* as run.kernels: "amx", "avx512bf16", "avx2", "neon" …, "sm_90" */
    const char *blas;        /* GEMM implementation: "packed kernels", "cuBLAS 13.0" */
    int threads;
    int64_t workspace_bytes; /* held for kernels for the lifetime of the device */
    int count;               /* devices of this kind in the machine; ranks may share one */
    bool host_memory;        /* device memory is host memory: addresses are plain pointers */
    /* What GEMMs can fuse; see qd_matmul_args. Op lists are built accordingly. */
    bool fused_residual, fused_gelu, fused_bias_grad;
    bool fp8;         /* GEMMs take fp8 operands */
    bool fp8_recipes; /* also with scales of rows and blocks */
} qd_device_caps;

/* kind: "cpu" or "cuda". QD_UNSUPPORTED with the reason if this build or machine has no such
 * device. */
qd_status qd_device_create(const char *kind, const qd_device_config *config, qd_device **device);
void qd_device_destroy(qd_device *device);
const qd_device_caps *qd_device_get_caps(const qd_device *device);

/* Zeroed memory, aligned to at least 64 bytes. bytes == 0 gives a valid empty allocation. */
qd_status qd_device_alloc(qd_device *device, int64_t bytes, void **address);
void qd_device_free(qd_device *device, void *address, int64_t bytes);
/* Counts memory that was allocated elsewhere for this device's buffers; negative: counts its
 * release. */
void qd_device_adopt(qd_device *device, int64_t bytes);
/* Bytes held through qd_device_alloc, or adopted. */
int64_t qd_device_allocated(const qd_device *device);

/* Total and currently free memory of the accelerator (or the machine). */
qd_status qd_device_memory(qd_device *device, int64_t *free_bytes, int64_t *total_bytes);
/* Lists library workspaces by name, for the memory report: "cuBLAS workspace 64.0 MiB, ...". */
void qd_device_describe_workspace(const qd_device *device, qd_strbuf *text);

/* Host memory that device copies access directly (page-locked); plain memory on the CPU. */
qd_status qd_host_alloc(qd_device *device, int64_t bytes, void **address);
void qd_host_free(qd_device *device, void *address);

/* Kernels of the step run on the compute stream, communication on the comm stream; device/copies.h
 * has two more, for copies from and to the host. Work on one stream runs in order. */
qd_stream *qd_device_compute_stream(qd_device *device);
qd_stream *qd_device_comm_stream(qd_device *device);
qd_device *qd_stream_device(qd_stream *stream);
qd_status qd_stream_wait(qd_stream *stream); /* the host waits until all enqueued work has completed */

/* Events order streams, also of different devices of this process, and measure times. An event that
 * was never recorded counts as completed. On the CPU every event is complete at once; its time is
 * that of recording. */
qd_status qd_event_create(qd_device *device, qd_event **event);
void qd_event_destroy(qd_event *event); /* NULL is legal */
qd_status qd_event_record(qd_event *event, qd_stream *stream);
/* Later work of the stream runs after the event; the host does not wait. */
qd_status qd_stream_wait_event(qd_stream *stream, qd_event *event);
qd_status qd_event_wait(qd_event *event);                           /* the host waits */
qd_status qd_event_done(qd_event *event, bool *done);
qd_status qd_event_seconds(qd_event *from, qd_event *to, double *seconds); /* both must be complete */

/* Makes memory of `other` accessible to kernels and copies of `device`. QD_UNSUPPORTED if they
 * cannot access each other. */
qd_status qd_device_reach(qd_device *device, qd_device *other);
/* For libraries with their own API (NCCL): make_current makes the device current in the calling
 * thread, native returns the stream's handle (a cudaStream_t); NULL on the CPU. */
qd_status qd_device_make_current(qd_device *device);
void *qd_stream_native(qd_stream *stream);

/* Host to device, device to host or within the device, ordered on the stream. Host memory must stay
 * valid until the copy has run. */
qd_status qd_copy(qd_stream *stream, void *to, const void *from, int64_t bytes);
qd_status qd_fill_zero(qd_stream *stream, void *to, int64_t bytes);

/* GEMM: c (m, n) = op(a) · op(b) [+ c if accumulate] [+ bias (n)].
 * op(a) is (m, k): a is stored as (m, k) with row stride lda, or as (k, m) if trans_a.
 * op(b) is (k, n): b is stored as (k, n) with row stride ldb, or as (n, k) if trans_b.
 * Accumulation is in fp32; a bf16 c is rounded once per call.
 * fp8: a and b are codes and are multiplied by *a_scale and *b_scale (device memory), or by scales
 * of their rows or blocks (base/fp8.h; both alike, vectors and blocks may be mixed). a is stored
 * (m, k) and b (n, k); n, k and the row strides are multiples of 16; only one of them is E5M2; bias
 * has c's type. fast: tensor cores may keep fewer than 24 bits of a sum.
 * Fused where the device's caps say so:
 *   residual   (m, n) with c's type and row stride is added as well; it must not be c
 *   gelu       QD_MATMUL_GELU: aux (m, n) = the sum with bias, c = GELU (tanh form) of it
 *              QD_MATMUL_GELU_GRAD: c = (op(a) · op(b)) times the derivative of GELU at aux (m, n)
 *              aux has c's type and row stride
 *   bias_grad  (m) = sum over k of op(a) [+ bias_grad if accumulate]: the bias gradient, computed
 *              together with dW = dyᵀ · x; it has c's type */
typedef enum qd_matmul_gelu { QD_MATMUL_NO_GELU, QD_MATMUL_GELU, QD_MATMUL_GELU_GRAD } qd_matmul_gelu;
typedef struct qd_matmul_args {
    const void *a, *b, *bias; /* bias may be NULL; it has b_dtype, with fp8 operands c_dtype */
    void *c;
    int64_t m, n, k, lda, ldb, ldc;
    bool trans_a, trans_b, accumulate;
    qd_dtype a_dtype, b_dtype, c_dtype; /* QD_F32 or QD_BF16; a and b: also fp8, both of them */
    const float *a_scale, *b_scale;
    qd_fp8_scaling a_scaling, b_scaling;
    bool fast;
    const void *residual;
    qd_matmul_gelu gelu;
    void *aux;
    void *bias_grad;
} qd_matmul_args;

/* Autotuning, for devices whose library offers several algorithms per GEMM. `calls`: the GEMMs of a
 * run; addresses are ignored. GEMMs without a choice yet are timed, with temporary memory;
 * *searched says whether there were any. The choices are a text that other ranks, or a later run on
 * the same kind of device, can load; a text of another device or library version is ignored. The
 * text is empty on devices without choices. */
typedef struct qd_tune_args {
    const qd_matmul_args *calls;
    const int64_t *times; /* calls of each per step; NULL: 1 */
    int count;
    /* Approximate time of all searches; the GEMMs that take most of a step get most of it
     * (device/tune_share.h). 0: no search, the library's heuristic decides; INFINITY: try
     * everything. */
    double seconds;
    void (*begin)(void *context, int searches); /* called before the first search, if any; may be NULL */
    void *context;
    /* Device memory that searches may overwrite, for operands that fit into it; NULL: none, all of
     * it is temporary memory. */
    void *scratch;
    int64_t scratch_bytes;
} qd_tune_args;
qd_status qd_device_tune(qd_device *device, const qd_tune_args *args, bool *searched);
/* Refines what qd_device_tune() found under a time limit: one search without a limit, for the GEMM
 * that takes most of a step among those that have had none. *left: how many of those remain; 0 on
 * devices without choices. */
qd_status qd_device_tune_more(qd_device *device, const qd_tune_args *args, int *left);
qd_status qd_device_tuning_get(qd_device *device, qd_strbuf *text);
qd_status qd_device_tuning_set(qd_device *device, const char *text);

/* grad (cols) = sum over rows of dy (rows, cols) [+ grad if accumulate]; rows are added in
 * ascending order within fixed blocks. */
typedef struct qd_bias_grad_args {
    const void *dy;
    void *grad;
    int64_t rows, cols;
    bool accumulate;
    qd_dtype dtype, grad_dtype;
} qd_bias_grad_args;

/* LayerNorm (rms false) or RMSNorm over the last dimension: y = (x - mean) * rstd * gamma + beta.
 * If `add` is set, sum = x + add is written to `sum` and normalized instead of x. mean is NULL for
 * RMSNorm; beta may be NULL, and so may gamma: 1. plus_one: the factor is 1 + gamma. */
typedef struct qd_norm_forward_args {
    const void *x, *add, *gamma, *beta;
    void *sum, *y;
    float *mean, *rstd; /* (rows) */
    float *amax;        /* the largest magnitude of y, as in qd_amax_args; may be NULL */
    int64_t rows, cols;
    float eps;
    bool rms, plus_one;
    qd_dtype dtype, param_dtype;
} qd_norm_forward_args;

/* dx = gradient through the norm [+ add, the gradient of the residual branch, if not NULL; add may
 * equal dx]. add_grad and dx_grad are the sums over rows of add and dx: the gradients of biases
 * that were added to the residual stream. dgamma, dbeta, add_grad and dx_grad (each may be NULL)
 * are accumulated into if accumulate, else overwritten. */
typedef struct qd_norm_backward_args {
    const void *dy, *x, *gamma, *add;
    const float *mean, *rstd;
    void *dx, *dgamma, *dbeta, *add_grad, *dx_grad;
    float *amax; /* the largest magnitude of dx; may be NULL */
    int64_t rows, cols;
    bool rms, plus_one, accumulate;
    qd_dtype dtype, param_dtype, grad_dtype;
} qd_norm_backward_args;

/* Rotary embedding: rotates pairs (i, i + dims/2) of the first `dims` elements of `heads` heads in
 * each row of x, in place, by the angle of the row's position (positions[row], or row % seq if
 * NULL). table: (max positions, dims/2, 2) fp32, cosine then sine. inverse: backward pass. */
typedef struct qd_rope_args {
    void *x;
    const float *table;
    const int32_t *positions;
    int64_t rows, seq, row_stride; /* row_stride in elements */
    int heads, head_dim;
    int dims; /* 0: head_dim */
    bool inverse;
    bool interleaved; /* rotates pairs (2i, 2i + 1) instead */
    qd_dtype dtype;
} qd_rope_args;

/* Causal self-attention over `batch` sequences of `seq` rows. q, k, v and their gradients are
 * strided views of one or several buffers: element (row, head, i) is at row * stride + head *
 * head_dim + i, of v and o at row * stride + head * v_dim + i. Query head h uses key head h /
 * (heads / kv_heads). Row t attends to rows max(doc_start[row], 0) .. t of its sequence (doc_start:
 * position within the sequence at which the row's document starts; NULL: 0); with a window, to the
 * last `window` of them. Memory is linear in seq: scores are never stored. Scores are q · k ·
 * scale; with a soft-cap c, c · tanh(score / c). lse: (batch, heads, seq), log-sum-exp of the
 * scores. */
typedef struct qd_attention_args {
    const void *q, *k, *v;
    void *o; /* forward: output; backward: input */
    float *lse;
    const int32_t *doc_start; /* (batch * seq) or NULL */
    int64_t batch, seq, q_stride, k_stride, v_stride, o_stride;
    int64_t window; /* 0: none */
    int heads, kv_heads, head_dim;
    int v_dim; /* size of a head of v and o; 0: head_dim */
    float scale, softcap; /* softcap 0: none */
    /* (heads), forward: raised to the largest score of each head; scores below 0 are not noted.
     * NULL: none. */
    float *maxima;
    qd_dtype dtype;
    /* Backward only. dq, dk, dv are overwritten and have the strides of q, k, v; d_o has that of
     * o. */
    const void *d_o;
    void *dq, *dk, *dv;
    float *delta; /* (batch, heads, seq) output of the backward pass and of attention_delta: rowsum(d_o * o) per head */
} qd_attention_args;

static inline int qd_attention_v_dim(int head_dim, int v_dim)
{
    return v_dim > 0 ? v_dim : head_dim;
}

/* Causal attention of some rows of each sequence to keys and values of other rows, for sequences
 * that are sharded over ranks. q holds q_seq rows of each of `batch` sequences, k and v hold k_seq
 * rows; runs give their positions (host memory; ascending positions, each row in one run). A row at
 * position t attends to the keys at positions max(doc_start, 0) .. t, if there are any, with a
 * window to those above t - window. Views, heads, scale and soft-cap as above.
 *
 * Forward: o (fp32) and lse are a running result. Each call merges its keys by their log-sum-exp,
 * so calls for all parts of the keys, in any order, give attention over all keys. begin: first
 * call, both are overwritten. A row without a key so far has o 0 and lse minus infinity.
 *
 * Backward: lse is the final one, delta the result of attention_delta. dq, dk, dv are fp32 and
 * accumulated into. */
typedef struct qd_attention_part_args {
    const void *q, *k, *v;
    float *o, *lse;           /* lse: (batch, heads, q_seq) */
    const int32_t *doc_start; /* (batch * q_seq), positions, or NULL */
    const qd_row_run *q_runs, *k_runs;
    int q_run_count, k_run_count;
    int64_t batch, q_seq, k_seq, q_stride, k_stride, v_stride, o_stride;
    int64_t window; /* 0: none */
    int heads, kv_heads, head_dim;
    int v_dim; /* 0: head_dim */
    float scale, softcap; /* softcap 0: none */
    float *maxima; /* as above */
    bool begin;
    qd_dtype dtype;
    /* Backward only. d_o has the stride of o. */
    const void *d_o;
    const float *delta; /* (batch, heads, q_seq) */
    float *dq, *dk, *dv;
    int64_t dq_stride, dk_stride, dv_stride;
} qd_attention_part_args;

/* Attention of new rows of one sequence to a cache of earlier ones, for generation. Row r of q, k,
 * v is at position past + r. Its key and value are first stored in the caches, (context, kv_heads *
 * head_dim) each; then it attends to positions 0 .. past + r. past + rows must not exceed context.
 * v NULL: values are the first v_dim elements of keys, and there is only the cache of keys.
 * With a window, it attends to the last `window` of these positions, and the caches are rings:
 * position t is stored in row t modulo context, and window + rows - 1 must not exceed context. */
typedef struct qd_attention_cached_args {
    const void *q, *k, *v;
    void *o, *k_cache, *v_cache;
    float *lse; /* (heads, rows), log-sum-exps of the scores; may be NULL */
    int64_t rows, past, context, q_stride, k_stride, v_stride, o_stride;
    int64_t window; /* 0: none */
    int heads, kv_heads, head_dim;
    int v_dim; /* 0: head_dim; else v must be NULL */
    float scale, softcap; /* softcap 0: none */
    qd_dtype dtype;
} qd_attention_cached_args;

/* gelu: x (rows, cols) -> y (rows, cols). swiglu: x (rows, 2*cols) = [gate | up], y = silu(gate) *
 * up (rows, cols). swiglu_clamped: y = (up + 1) * gate * sigmoid(alpha * gate), gate limited to at
 * most `limit` and up to [-limit, limit]; what is outside has no gradient. Backward: dx from dy and
 * x; dx may equal x (gelu: also dy). If y is not NULL, the backward pass also recomputes the
 * forward result into it; dx must then differ from x. */
typedef struct qd_activation_args {
    qd_activation kind;
    const void *x, *dy;
    void *y, *dx;
    int64_t rows, cols;
    float alpha, limit; /* swiglu_clamped only */
    qd_dtype dtype;
} qd_activation_args;

/* Copies rows of a matrix into another: to[r * to_stride + c] [+]= from[r * from_stride + c],
 * rounded to nearest even. */
typedef struct qd_copy_rows_args {
    const void *from;
    void *to;
    int64_t rows, cols, from_stride, to_stride;
    bool accumulate;
    qd_dtype from_dtype, to_dtype; /* QD_F32 or QD_BF16 */
} qd_copy_rows_args;

/* y = a + b, n elements. y may equal a or b. */
typedef struct qd_add_args {
    const void *a, *b;
    void *y;
    int64_t n;
    qd_dtype a_dtype, b_dtype, y_dtype;
} qd_add_args;

/* y = x * mask / (1 - p). Element (row, col) is kept if the Philox draw for (seed, site, step,
 * (first_row + row) * cols + col) is at least p, so forward pass, backward pass and all layouts
 * agree. first_row: global index of row 0. y may equal x. */
typedef struct qd_dropout_args {
    const void *x;
    void *y;
    int64_t rows, cols, first_row;
    float p;
    uint64_t seed, step;
    uint32_t site;
    qd_dtype dtype;
} qd_dropout_args;

/* y (rows, cols) = token_table[tokens[row]] [+ position_table[positions[row] or row % seq]]. The
 * table holds `held` rows of the vocabulary starting at `first` (held 0: all); other tokens give
 * rows of zeros. */
typedef struct qd_embedding_forward_args {
    const int32_t *tokens, *positions;
    const void *token_table, *position_table; /* position_table may be NULL */
    void *y;
    int64_t rows, cols, seq, vocab, first, held;
    qd_dtype dtype, param_dtype;
} qd_embedding_forward_args;

/* Gradients of the tables += rows of dy, in ascending order of rows for each table row. No atomics.
 * first, held: as above. */
typedef struct qd_embedding_backward_args {
    const int32_t *tokens, *positions;
    const void *dy;
    void *token_grad, *position_grad; /* either may be NULL */
    int64_t rows, cols, seq, vocab, first, held;
    qd_dtype dtype, grad_dtype;
} qd_embedding_backward_args;

/* logits (rows, vocab) with row stride ld, fp32 or bf16. losses[row] = -log
 * softmax(logits)[target], 0 if target < 0. If grad, logits are overwritten by (softmax - onehot) *
 * scale (0 where target < 0), and columns from vocab to ld by 0. With a cap above 0 each logit z
 * stands for cap tanh(z / cap); gradients are those of z. */
typedef struct qd_cross_entropy_args {
    void *logits;
    const int32_t *targets;
    float *losses;
    int64_t rows, vocab, ld;
    float scale, cap;
    bool grad;
    qd_dtype dtype;
} qd_cross_entropy_args;

/* Cross-entropy over a sharded vocabulary: each rank has columns [first, first + vocab) of `all`.
 * Three stages; between them the ranks reduce `top` (maximum) and `sums` (sum):
 *   MAX   top[row] = maximum of the row's logits
 *   SUM   sums[2 row] = sum of e^(logit - top),
 *         sums[2 row + 1] = the target's logit - top on the rank that holds it, else 0
 *   GRAD  losses[row] = log sums[2 row] - sums[2 row + 1], 0 if target < 0; if grad, logits are
 *         overwritten by gradients as above */
typedef enum qd_cross_entropy_stage { QD_CROSS_ENTROPY_MAX, QD_CROSS_ENTROPY_SUM, QD_CROSS_ENTROPY_GRAD } qd_cross_entropy_stage;
typedef struct qd_cross_entropy_part_args {
    qd_cross_entropy_stage stage;
    void *logits;
    const int32_t *targets; /* not used in MAX */
    float *top, *sums, *losses;
    int64_t rows, vocab, ld, first, all;
    float scale, cap;
    const float *factors; /* (rows): of each row, besides scale; NULL: 1 */
    bool grad;
    qd_dtype dtype;
} qd_cross_entropy_part_args;

/* Sequences that are compared in pairs (base/preference.h): windows of `rows` rows each, with up to
 * `sequences` sequences. */
typedef struct qd_pair_rows {
    const int32_t *sequence; /* (windows, rows), as the others */
    const float *weight, *reference, *rest;
    int64_t windows, rows, sequences;
} qd_pair_rows;

/* scores (windows, sequences) = sum of weight · loss + reference + rest over the rows of each
 * sequence, in ascending order; 0: no rows. */
typedef struct qd_pair_sums_args {
    qd_pair_rows rows;
    const float *losses;
    double *scores;
} qd_pair_sums_args;

/* factors (windows, rows) = derivative of the loss of the row's pair by the row's own loss; 0 for
 * rows that do not count. figures += the sums of losses and numbers of pairs, of reward margins, of
 * rewards of chosen completions, and the number of positive margins, over the pairs whose chosen
 * sequence begins in these rows. */
typedef struct qd_pair_loss_args {
    qd_pair_rows rows;
    const double *scores;
    float *factors;
    double *figures;
    qd_preference loss;
} qd_pair_loss_args;

/* *total += sum of losses in ascending order, in double; *counted += number of targets >= 0. */
typedef struct qd_loss_sum_args {
    const float *losses;
    const int32_t *targets;
    int64_t rows;
    double *total, *counted;
} qd_loss_sum_args;

/* out[row] = sum of squares of a row of x (rows, cols), in double, in an order fixed by cols.
 * Non-finite values stay non-finite. next: another matrix, or NULL; small ones are batched into one
 * launch. */
typedef struct qd_row_squares_args {
    const void *x;
    double *out;
    int64_t rows, cols;
    qd_dtype dtype;
    const struct qd_row_squares_args *next;
} qd_row_squares_args;

/* sums[r.sum] = sum of x over run r and the following runs of the same sum, in an order fixed by
 * the number of elements, however they are split into runs (on the CPU: sequentially). Sums without
 * a run are not written. */
typedef struct qd_sum_run {
    int64_t first, count; /* elements of x */
    int32_t sum;
} qd_sum_run;
typedef struct qd_run_sums_args {
    const double *x;
    const qd_sum_run *runs; /* host memory, read before the call returns */
    int64_t run_count;
    double *sums;
} qd_run_sums_args;

/* The norm of all gradients, from the sum of squares of each parameter (added in ascending order on
 * the CPU, in an order fixed by `count` elsewhere), and the factor to multiply gradients by.
 * Gradients were scaled for `planned` tokens, but the loss counts only tokens with a target: norm =
 * sqrt(total) * planned / counted. factor = planned / counted, times clip / (norm + 1e-6) if the
 * norm exceeds clip (clip 0: never). factor is NaN if the loss, a sum or the norm is not finite, or
 * above its limit. */
typedef struct qd_grad_norm_args {
    const double *sums, *loss; /* loss: its sum, number of tokens counted */
    int64_t count;
    double planned, clip;
    double most_norm, most_loss; /* what the norm, and the loss per token, may be; 0: anything */
    double *out; /* norm, factor, index of the first non-finite sum or -1 */
} qd_grad_norm_args;

/* A range of parameter, gradient and state buffers, which have the same layout, in elements. */
typedef struct qd_param_range {
    int64_t offset, count;
    bool decay; /* weight decay applies */
} qd_param_range;

/* AdamW: Adam with decoupled weight decay. The gradient is g * *grad_scale (device memory; cast to
 * float). If grad_scale is not finite, nothing is written. master is the fp32 parameter; a bf16
 * `param` is another buffer, into which the new value is rounded. If `rest` is set, it replaces
 * master: `param` (bf16), which is then read too, holds the high half of the fp32 value and rest
 * the low 16 bits (qd_f32_rest). Addresses are those of element 0, whether the buffer contains it
 * or not. bias_correction{1,2} = 1 - beta^step.
 *
 * Coefficients are double because 1 - beta would lose half of its digits in fp32. Moments decay as
 * x - x*(1 - beta), because a beta rounded to fp32 (0.99999999 becomes 1) would decay at another
 * rate. */
typedef struct qd_adamw_args {
    void *param, *grad;
    float *master, *m, *v;
    int16_t *rest;
    const qd_param_range *ranges; /* host memory */
    int range_count;
    double lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2;
    const double *grad_scale;
    qd_dtype param_dtype, grad_dtype;
} qd_adamw_args;

/* SGD, with members as above: m = momentum*m + g; p -= lr*(m + weight_decay*p). m may be NULL when
 * momentum is 0. */
typedef struct qd_sgd_args {
    void *param, *grad;
    float *master, *m;
    int16_t *rest;
    const qd_param_range *ranges;
    int range_count;
    double lr, momentum, weight_decay;
    const double *grad_scale;
    qd_dtype param_dtype, grad_dtype;
} qd_sgd_args;

/* Muon, first step: the matrix that optim/muon.h orthogonalizes with GEMMs, unit_norm and axpby;
 * matrix_update then applies the result. n consecutive elements, g = grad * *grad_scale: m =
 * momentum*m + (1 - momentum)*g; out = m, or with nesterov momentum*m + (1 - momentum)*g. out may
 * be NULL. If grad_scale is not finite, nothing is written. */
typedef struct qd_momentum_args {
    const void *grad;
    float *m, *out;
    int64_t n;
    double momentum;
    const double *grad_scale; /* device memory */
    bool nesterov;
    qd_dtype grad_dtype;
} qd_momentum_args;

/* x (rows, cols) fp32 = x / max(sqrt(sum of row_squares), eps); row_squares (rows) are added in
 * ascending order. */
typedef struct qd_unit_norm_args {
    float *x;
    const double *row_squares;
    int64_t rows, cols;
    double eps;
} qd_unit_norm_args;

/* y = alpha*a + beta*b, n elements of fp32. y may equal a or b. */
typedef struct qd_axpby_args {
    const float *a, *b;
    float *y;
    int64_t n;
    float alpha, beta;
} qd_axpby_args;

/* master = master*(1 - decay) - rate*direction; `param`, if it is another buffer, gets the rounded
 * value. If grad_scale is set and not finite, nothing is written. */
typedef struct qd_matrix_update_args {
    void *param;
    float *master;
    const float *direction;
    int64_t n;
    double rate, decay;
    const double *grad_scale; /* device memory, or NULL */
    qd_dtype param_dtype;
} qd_matrix_update_args;

/* to = from, n elements, rounded to nearest even. */
typedef struct qd_cast_args {
    const void *from;
    void *to;
    int64_t n;
    qd_dtype from_dtype, to_dtype;
} qd_cast_args;

/* sum_ranks and copy_pieces work between ranks that are threads of one process. Addresses may
 * belong to several devices of one kind that can access each other (qd_device_reach). Unlike other
 * kernels, these two may be called by a second thread while the rank's own thread enqueues
 * kernels. */

/* For each segment and each output j: outs[j][out + i] = reduction of sources[0][in + i] ..
 * sources[n-1][in + i], bit-identical to the pairwise tree of device/sum.h. An output may be one of
 * the sources if in == out. */
#define QD_SUM_RANKS_MOST 64 /* most sources, and most outputs */
typedef struct qd_sum_segment {
    int64_t in, out, count; /* elements */
} qd_sum_segment;
typedef struct qd_sum_ranks_args {
    const void *const *sources; /* these arrays are host memory, read before the call returns */
    void *const *outs;
    const qd_sum_segment *segments;
    int source_count, out_count, segment_count;
    qd_dtype dtype;
    qd_reduce_op reduce;
} qd_sum_ranks_args;

/* Copies pieces, which must not overlap. The array is host memory, read before the call returns. */
typedef struct qd_piece {
    const void *from;
    void *to;
    int64_t bytes;
} qd_piece;
typedef struct qd_copy_pieces_args {
    const qd_piece *pieces;
    int count;
} qd_copy_pieces_args;

/* One table per device; every slot is required. X(slot, argument struct). */
#define QD_KERNEL_TABLE(X)                                                                                  \
    X(matmul, qd_matmul_args)                                                                               \
    X(bias_grad, qd_bias_grad_args)                                                                         \
    X(norm_forward, qd_norm_forward_args)                                                                   \
    X(norm_backward, qd_norm_backward_args)                                                                 \
    X(rope, qd_rope_args)                                                                                   \
    X(attention_forward, qd_attention_args)                                                                 \
    X(attention_backward, qd_attention_args)                                                                \
    X(attention_delta, qd_attention_args)                                                                   \
    X(attention_part_forward, qd_attention_part_args)                                                       \
    X(attention_part_backward, qd_attention_part_args)                                                      \
    X(attention_cached, qd_attention_cached_args)                                                           \
    X(activation_forward, qd_activation_args)                                                               \
    X(activation_backward, qd_activation_args)                                                              \
    X(add, qd_add_args)                                                                                     \
    X(copy_rows, qd_copy_rows_args)                                                                         \
    X(dropout, qd_dropout_args)                                                                             \
    X(embedding_forward, qd_embedding_forward_args)                                                         \
    X(embedding_backward, qd_embedding_backward_args)                                                       \
    X(cross_entropy, qd_cross_entropy_args)                                                                 \
    X(cross_entropy_part, qd_cross_entropy_part_args)                                                       \
    X(loss_sum, qd_loss_sum_args)                                                                           \
    X(pair_sums, qd_pair_sums_args)                                                                         \
    X(pair_loss, qd_pair_loss_args)                                                                         \
    X(row_squares, qd_row_squares_args)                                                                     \
    X(run_sums, qd_run_sums_args)                                                                           \
    X(grad_norm, qd_grad_norm_args)                                                                         \
    X(adamw, qd_adamw_args)                                                                                 \
    X(sgd, qd_sgd_args)                                                                                     \
    X(momentum, qd_momentum_args)                                                                           \
    X(unit_norm, qd_unit_norm_args)                                                                         \
    X(axpby, qd_axpby_args)                                                                                 \
    X(matrix_update, qd_matrix_update_args)                                                                 \
    X(cast, qd_cast_args)                                                                                   \
    X(sum_ranks, qd_sum_ranks_args)                                                                         \
    X(copy_pieces, qd_copy_pieces_args)                                                                     \
    QD_EXPERT_KERNEL_TABLE(X)                                                                               \
    QD_VARIANT_KERNEL_TABLE(X)                                                                              \
    QD_FP8_KERNEL_TABLE(X)

typedef struct qd_kernels {
#define QD_KERNEL_SLOT(slot, args) qd_status (*slot)(qd_stream * stream, const args *a);
    QD_KERNEL_TABLE(QD_KERNEL_SLOT)
#undef QD_KERNEL_SLOT
} qd_kernels;

const qd_kernels *qd_device_kernels(const qd_device *device);

#endif
