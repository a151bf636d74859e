/* A device: memory, streams and a table of kernels. src/device/README.md says what may live here.
 *
 * Addresses in argument structs are device addresses (plain pointers on the CPU). Matrices are
 * row-major. Kernels are enqueued on a stream and take their element type at run time; on the CPU
 * they have run when the call returns. Kernels never allocate: what they need beyond their
 * arguments is the device's workspace, of the size announced in qd_device_caps. Results do not
 * depend on the number of compute threads: each output element is computed by one thread in an
 * order fixed by the shapes. On an accelerator the host does not wait: errors of a kernel may come
 * back from a later call, and host memory that a copy uses must stay as it is until the stream has
 * come so far. */
#ifndef QD_DEVICE_DEVICE_H
#define QD_DEVICE_DEVICE_H

#include "base/runs.h"
#include "device/experts.h"

#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <quadrille/types.h>

typedef struct qd_device qd_device;
typedef struct qd_stream qd_stream;
typedef struct qd_event qd_event;

typedef struct qd_device_config {
    int threads;     /* compute threads of this rank, >= 1, the caller included */
    int pin_first;   /* first core to pin compute threads to, or -1: leave it to the scheduler */
    const char *isa; /* CPU: NULL for the best this machine has, or "avx512", "avx2", "neon", "generic" (for tests) */
    int ordinal;     /* which accelerator */
    bool share;      /* an ordinal beyond the last counts on from the first: several ranks use one */
    bool deterministic; /* only kernels that give the same bits on every run; the CPU's always do */
} qd_device_config;
qd_device_config qd_device_config_default(void);

typedef struct qd_device_caps {
    const char *name;        /* "cpu" */
    const char *isa;         /* "avx512", "avx2", "neon", "generic", "sm_90" */
    const char *blas;        /* what computes matrix products: "packed kernels", "cuBLAS 13.0" */
    int threads;
    int64_t workspace_bytes; /* held for kernels as long as the device lives */
    int count;               /* such devices in this machine; ranks may share one */
    bool host_memory;        /* the host can read and write device memory: addresses are plain pointers */
    /* What products can do in the same pass; see qd_matmul_args. The op lists are written for
     * it. */
    bool fused_residual, fused_gelu, fused_bias_grad;
} qd_device_caps;

/* kind: "cpu" or "cuda". QD_UNSUPPORTED with the reason when this build or machine has no such
 * device. */
qd_status qd_device_create(const char *kind, const qd_device_config *config, qd_device **device);
void qd_device_destroy(qd_device *device);
const qd_device_caps *qd_device_get_caps(const qd_device *device);

/* Zeroed memory, aligned to 64 bytes or better. bytes == 0 gives a valid empty allocation. */
qd_status qd_device_alloc(qd_device *device, int64_t bytes, void **address);
void qd_device_free(qd_device *device, void *address, int64_t bytes);
/* Counts memory that somebody else has given for this device's buffers, or with a negative number
 * its return. */
void qd_device_adopt(qd_device *device, int64_t bytes);
int64_t qd_device_allocated(const qd_device *device); /* bytes now held through qd_device_alloc, or adopted */

/* What the accelerator (or the machine) has, and what of it is free now. */
qd_status qd_device_memory(qd_device *device, int64_t *free_bytes, int64_t *total_bytes);
/* Library workspaces and the like by name, for the accountant's page: "cuBLAS workspace 64.0 MiB,
 * ...". */
void qd_device_describe_workspace(const qd_device *device, qd_strbuf *text);

/* Host memory that copies to and from the device reach directly (page-locked); plain memory on the
 * CPU. */
qd_status qd_host_alloc(qd_device *device, int64_t bytes, void **address);
void qd_host_free(qd_device *device, void *address);

/* Two streams: kernels of the step run on the first, communication on the second. Work on one
 * stream runs in order. */
qd_stream *qd_device_compute_stream(qd_device *device);
qd_stream *qd_device_comm_stream(qd_device *device);
qd_device *qd_stream_device(qd_stream *stream);
qd_status qd_stream_wait(qd_stream *stream); /* the host waits until all enqueued work has run */

/* Events order streams, also of different devices of this process, and take times. An event that
 * was never recorded has happened. On the CPU everything has happened when a call returns; times
 * are those of recording. */
qd_status qd_event_create(qd_device *device, qd_event **event);
void qd_event_destroy(qd_event *event); /* NULL is legal */
qd_status qd_event_record(qd_event *event, qd_stream *stream);
/* later work of the stream runs after the event; the host does not wait */
qd_status qd_stream_wait_event(qd_stream *stream, qd_event *event);
qd_status qd_event_wait(qd_event *event);                           /* the host waits */
qd_status qd_event_done(qd_event *event, bool *done);
qd_status qd_event_seconds(qd_event *from, qd_event *to, double *seconds); /* both have happened */

/* Makes memory of `other` reachable for kernels and copies of `device`. QD_UNSUPPORTED where the
 * two cannot. */
qd_status qd_device_reach(qd_device *device, qd_device *other);
/* For libraries that bring their own calls (NCCL): the device becomes current in the calling
 * thread, and the stream in the library's terms (a cudaStream_t); NULL on the CPU. */
qd_status qd_device_make_current(qd_device *device);
void *qd_stream_native(qd_stream *stream);

/* Host to device, device to host or within the device, ordered on the stream; host memory must stay
 * valid until then. */
qd_status qd_copy(qd_stream *stream, void *to, const void *from, int64_t bytes);
qd_status qd_fill_zero(qd_stream *stream, void *to, int64_t bytes);

/* ---- kernel arguments ---- */

/* c (m, n) = op(a) · op(b) [+ c if accumulate] [+ bias (n)]; op(a) is (m, k), op(b) is (k, n).
 * a is stored (m, k) with row stride lda, or (k, m) if trans_a; b (k, n), or (n, k) if trans_b.
 * Accumulation is in fp32; a bf16 c is rounded once per call.
 * In the same pass, where the device announces it:
 *   residual   (m, n) with c's type and row stride is added as well; it may not be c
 *   gelu       QD_MATMUL_GELU: aux (m, n) = the sum with bias, c = GELU (tanh form) of it
 *              QD_MATMUL_GELU_GRAD: c = (op(a) · op(b)) times the derivative of GELU at aux (m, n)
 *              aux has c's type and row stride
 *   bias_grad  (m) = sum over k of op(a) [+ bias_grad if accumulate]: the bias gradient beside dW = dyᵀ · x; it has c's
 *              type */
typedef enum qd_matmul_gelu { QD_MATMUL_NO_GELU, QD_MATMUL_GELU, QD_MATMUL_GELU_GRAD } qd_matmul_gelu;
typedef struct qd_matmul_args {
    const void *a, *b, *bias; /* bias may be NULL; it has b_dtype */
    void *c;
    int64_t m, n, k, lda, ldb, ldc;
    bool trans_a, trans_b, accumulate;
    qd_dtype a_dtype, b_dtype, c_dtype; /* QD_F32 or QD_BF16 */
    const void *residual;
    qd_matmul_gelu gelu;
    void *aux;
    void *bias_grad;
} qd_matmul_args;

/* Devices whose library offers several algorithms per GEMM choose by timing. `calls`: the GEMMs a
 * run will make, addresses ignored. Those without a choice yet are timed (memory is taken for it
 * and given back); *searched says whether there were any. The choices are a text that other ranks,
 * or a later run on the same kind of device, take over; a text of another device or library version
 * is ignored. On devices without a choice the text is empty. */
typedef struct qd_tune_args {
    const qd_matmul_args *calls;
    const int64_t *times; /* how often a step makes each; NULL: once */
    int count;
    double seconds; /* all searches together, about; the GEMMs that take most of a step get most of it (device/tune_share.h).
                     * 0: none, the library's favourites are used; INFINITY: everything is tried */
    void (*begin)(void *context, int searches); /* called before the first search, if there are any; may be NULL */
    void *context;
} qd_tune_args;
qd_status qd_device_tune(qd_device *device, const qd_tune_args *args, bool *searched);
qd_status qd_device_tuning_get(qd_device *device, qd_strbuf *text);
qd_status qd_device_tuning_set(qd_device *device, const char *text);

/* grad (cols) = sum over rows of dy (rows, cols) [+ grad if accumulate], rows in ascending order
 * within fixed blocks. */
typedef struct qd_bias_grad_args {
    const void *dy;
    void *grad;
    int64_t rows, cols;
    bool accumulate;
    qd_dtype dtype, grad_dtype;
} qd_bias_grad_args;

/* LayerNorm (rms false) or RMSNorm over the last dimension. If `add` is set: sum = x + add is
 * written to `sum` and normalised instead of x. y = (x - mean) * rstd * gamma + beta. mean is NULL
 * for RMSNorm; beta may be NULL. */
typedef struct qd_norm_forward_args {
    const void *x, *add, *gamma, *beta;
    void *sum, *y;
    float *mean, *rstd; /* (rows) */
    int64_t rows, cols;
    float eps;
    bool rms;
    qd_dtype dtype, param_dtype;
} qd_norm_forward_args;

/* dx = gradient through the norm [+ add, the residual branch's gradient, if not NULL; add may equal
 * dx]. add_grad and dx_grad: sums over rows of add and of dx, which are gradients of biases that
 * were added to the residual stream. dgamma, dbeta, add_grad and dx_grad (each may be NULL) are
 * added to if accumulate, else overwritten. */
typedef struct qd_norm_backward_args {
    const void *dy, *x, *gamma, *add;
    const float *mean, *rstd;
    void *dx, *dgamma, *dbeta, *add_grad, *dx_grad;
    int64_t rows, cols;
    bool rms, accumulate;
    qd_dtype dtype, param_dtype, grad_dtype;
} qd_norm_backward_args;

/* Rotates pairs (i, i + head_dim/2) of `heads` heads in each row of x, in place, by the angle of
 * the row's position (positions[row], or row % seq if NULL). table: (max positions, head_dim/2, 2)
 * fp32, cosine then sine. inverse: the backward pass. */
typedef struct qd_rope_args {
    void *x;
    const float *table;
    const int32_t *positions;
    int64_t rows, seq, row_stride; /* row_stride in elements */
    int heads, head_dim;
    bool inverse;
    qd_dtype dtype;
} qd_rope_args;

/* Causal self-attention of `batch` sequences of `seq` rows. q, k, v and their gradients are strided
 * views of one or several buffers: element (row, head, i) is at row * stride + head * head_dim + i.
 * Query head h uses key head h / (heads / kv_heads). Row t sees rows max(doc_start[row], 0) .. t of
 * its sequence (doc_start: position within the sequence at which the row's document begins; NULL:
 * 0). Memory linear in seq: scores are never stored. lse: (batch, heads, seq), log of the sum of
 * exponentials of the scaled scores. */
typedef struct qd_attention_args {
    const void *q, *k, *v;
    void *o; /* forward: output; backward: input */
    float *lse;
    const int32_t *doc_start; /* (batch * seq) or NULL */
    int64_t batch, seq, q_stride, k_stride, v_stride, o_stride;
    int heads, kv_heads, head_dim;
    float scale;
    qd_dtype dtype;
    /* backward only; dq, dk, dv are overwritten and have the strides of q, k, v; d_o that of o */
    const void *d_o;
    void *dq, *dk, *dv;
    float *delta; /* (batch, heads, seq) scratch; attention_delta: output, rowsum(d_o * o) of each head */
} qd_attention_args;

/* Causal attention of some rows of each sequence against keys and values of others, for sequences
 * whose rows are shared out over ranks. q holds q_seq rows of each of `batch` sequences, k and v
 * k_seq rows; runs say at which positions they stand (host memory; ascending positions, each row in
 * one run). A row at position t sees the keys at positions max(doc_start, 0) .. t, if there are
 * any. Views, heads and scale as above. Forward: o (fp32) and lse are a running result: the keys of
 * this call are merged in by their log-sum-exp, so that calls for all parts of the keys, in any
 * order, give the attention over all. begin: nothing is there yet, both are overwritten. A row that
 * has seen no key yet has o 0 and lse minus infinity. Backward: lse is the final one, delta what
 * attention_delta gives. dq, dk, dv are fp32 and accumulated into. */
typedef struct qd_attention_part_args {
    const void *q, *k, *v;
    float *o, *lse;           /* lse: (batch, heads, q_seq) */
    const int32_t *doc_start; /* (batch * q_seq), positions, or NULL */
    const qd_row_run *q_runs, *k_runs;
    int q_run_count, k_run_count;
    int64_t batch, q_seq, k_seq, q_stride, k_stride, v_stride, o_stride;
    int heads, kv_heads, head_dim;
    float scale;
    bool begin;
    qd_dtype dtype;
    /* backward only; d_o has the stride of o */
    const void *d_o;
    const float *delta; /* (batch, heads, q_seq) */
    float *dq, *dk, *dv;
    int64_t dq_stride, dk_stride, dv_stride;
} qd_attention_part_args;

/* Attention of new rows of one sequence against a cache of earlier ones, for generation. Row r of
 * q, k, v stands at position past + r: its key and value are first stored in the caches, (context,
 * kv_heads * head_dim) each, then it sees positions 0 .. past + r. past + rows must not exceed
 * context. */
typedef struct qd_attention_cached_args {
    const void *q, *k, *v;
    void *o, *k_cache, *v_cache;
    int64_t rows, past, context, q_stride, k_stride, v_stride, o_stride;
    int heads, kv_heads, head_dim;
    float scale;
    qd_dtype dtype;
} qd_attention_cached_args;

/* gelu: x (rows, cols) -> y (rows, cols). swiglu: x (rows, 2*cols) = [gate | up], y = silu(gate) *
 * up (rows, cols). Backward: dx from dy and x; dx may equal x (gelu: also dy). If y is given, it
 * becomes the forward result again, which needs a dx apart from x. */
typedef struct qd_activation_args {
    qd_activation kind;
    const void *x, *dy;
    void *y, *dx;
    int64_t rows, cols;
    qd_dtype dtype;
} qd_activation_args;

/* Rows of a matrix into another: to[r * to_stride + c] [+]= from[r * from_stride + c], converted to
 * nearest even. */
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

/* y = x * mask / (1 - p); element (row, col) is kept if the Philox draw for (seed, site, step,
 * (first_row + row) * cols + col) is at least p, so forward, backward and any layout agree.
 * first_row: global index of row 0. y may equal x. */
typedef struct qd_dropout_args {
    const void *x;
    void *y;
    int64_t rows, cols, first_row;
    float p;
    uint64_t seed, step;
    uint32_t site;
    qd_dtype dtype;
} qd_dropout_args;

/* y (rows, cols) = token_table[tokens[row]] [+ position_table[positions[row] or row % seq]]. Of the
 * vocabulary's rows the table holds `held` from `first` on (held 0: all); tokens of other rows
 * count as rows of zeros. */
typedef struct qd_embedding_forward_args {
    const int32_t *tokens, *positions;
    const void *token_table, *position_table; /* position_table may be NULL */
    void *y;
    int64_t rows, cols, seq, vocab, first, held;
    qd_dtype dtype, param_dtype;
} qd_embedding_forward_args;

/* Tables' gradients += rows of dy, rows in ascending order for each table row. No atomics. first,
 * held: as above. */
typedef struct qd_embedding_backward_args {
    const int32_t *tokens, *positions;
    const void *dy;
    void *token_grad, *position_grad; /* either may be NULL */
    int64_t rows, cols, seq, vocab, first, held;
    qd_dtype dtype, grad_dtype;
} qd_embedding_backward_args;

/* logits (rows, vocab) with row stride ld, fp32 or bf16. losses[row] = -log
 * softmax(logits)[target], 0 if target < 0. If grad: logits become (softmax - onehot) * scale (0
 * where target < 0), columns beyond vocab up to ld are set to 0. */
typedef struct qd_cross_entropy_args {
    void *logits;
    const int32_t *targets;
    float *losses;
    int64_t rows, vocab, ld;
    float scale;
    bool grad;
    qd_dtype dtype;
} qd_cross_entropy_args;

/* The same where ranks have the logits of a part of the tokens each, columns [first, first + vocab)
 * of `all`, in three stages between which the ranks take the maximum of `top` and the sum of
 * `sums`:
 *   MAX   top[row] = maximum of the row's logits
 *   SUM   sums[2 row] = sum of e^(logit - top), sums[2 row + 1] = the target's logit - top if the rank has it, else 0
 *   GRAD  losses[row] = log sums[2 row] - sums[2 row + 1], 0 if target < 0; if grad: logits become gradients as
 * above */
typedef enum qd_cross_entropy_stage { QD_CROSS_ENTROPY_MAX, QD_CROSS_ENTROPY_SUM, QD_CROSS_ENTROPY_GRAD } qd_cross_entropy_stage;
typedef struct qd_cross_entropy_part_args {
    qd_cross_entropy_stage stage;
    void *logits;
    const int32_t *targets; /* not in MAX */
    float *top, *sums, *losses;
    int64_t rows, vocab, ld, first, all;
    float scale;
    bool grad;
    qd_dtype dtype;
} qd_cross_entropy_part_args;

/* *total += sum of losses in ascending order, in double; *counted += number of targets >= 0. */
typedef struct qd_loss_sum_args {
    const float *losses;
    const int32_t *targets;
    int64_t rows;
    double *total, *counted;
} qd_loss_sum_args;

/* out[row] = sum of squares of row (rows, cols), in double, in an order fixed by cols. Not finite
 * stays not finite. next: another matrix, or NULL; small ones take less time together. */
typedef struct qd_row_squares_args {
    const void *x;
    double *out;
    int64_t rows, cols;
    qd_dtype dtype;
    const struct qd_row_squares_args *next;
} qd_row_squares_args;

/* sums[r.sum] = sum of x over the run r and those of the same sum that follow it, in an order fixed
 * by the number of elements, however they are cut into runs; on the CPU one after another. Sums
 * without a run are left alone. */
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

/* The norm of all gradients, from the sums of squares of each parameter (added in ascending order
 * on the CPU, in one fixed by `count` elsewhere), and the factor that gradients are to be
 * multiplied with. Gradients were scaled for `planned` tokens, the loss counts those that had a
 * target: norm = root of the sum * planned / counted. factor = planned / counted, times clip / norm
 * or so where the norm is above clip (0: never); NaN if the loss, a sum or the norm is not
 * finite. */
typedef struct qd_grad_norm_args {
    const double *sums, *loss; /* loss: its sum, tokens counted */
    int64_t count;
    double planned, clip;
    double *out; /* norm, factor, the first of the sums that is not finite or -1 */
} qd_grad_norm_args;

/* A stretch of equally laid out parameter, gradient and state buffers, in elements. */
typedef struct qd_param_range {
    int64_t offset, count;
    bool decay; /* weight decay applies */
} qd_param_range;

/* Decoupled weight decay (AdamW). Gradient g * *grad_scale, which is in device memory, as a float.
 * master is the fp32 parameter; a `param` of bf16 is another buffer, into which the new value is
 * rounded. Addresses are those of element 0, whether a buffer has it or not. bias_correction{1,2} =
 * 1 - beta^step. If grad_scale is not finite nothing is done. Coefficients are double because 1 -
 * beta would lose half of its digits in fp32; moments decay by it, as x - x*(1 - beta), because a
 * beta rounded to fp32 (0.99999999 is 1) would decay at another rate. rest, if given, takes the
 * place of master: the fp32 values are in two parts, `param` (bf16), which is read too, and what it
 * lacks (qd_f32_rest). */
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

/* As above; the momentum buffer `m` may be NULL when momentum is 0: m = momentum*m + g; p -= lr*(m
 * + weight_decay*p). */
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

/* Muon, in steps: `momentum` makes the matrix that is orthogonalized, optim/muon.h orthogonalizes
 * it with products, unit_norm and axpby, matrix_update applies the result. n elements, one after
 * another. m = momentum*m + (1 - momentum)*g; out = m, or with nesterov momentum*m + (1 -
 * momentum)*g; g = grad * *grad_scale. out may be NULL. If grad_scale is not finite nothing is
 * done. */
typedef struct qd_momentum_args {
    const void *grad;
    float *m, *out;
    int64_t n;
    double momentum;
    const double *grad_scale; /* device memory */
    bool nesterov;
    qd_dtype grad_dtype;
} qd_momentum_args;

/* x (rows, cols) fp32 becomes x / max(root of the sum of row_squares, eps); row_squares (rows) are
 * added in ascending order. */
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

/* master = master*(1 - decay) - rate*direction; `param`, if it is another buffer, gets the new
 * value rounded. If grad_scale is given and not finite nothing is done. */
typedef struct qd_matrix_update_args {
    void *param;
    float *master;
    const float *direction;
    int64_t n;
    double rate, decay;
    const double *grad_scale; /* device memory, or NULL */
    qd_dtype param_dtype;
} qd_matrix_update_args;

/* to = from, n elements, converted to nearest even. */
typedef struct qd_cast_args {
    const void *from;
    void *to;
    int64_t n;
    qd_dtype from_dtype, to_dtype;
} qd_cast_args;

/* ---- between ranks that are threads of one process ----
 * Addresses may belong to several devices of one kind that reach each other (qd_device_reach).
 * Unlike other kernels these may be called by a second thread while the rank's own thread enqueues
 * kernels. */

/* For each segment and each output j: outs[j][out + i] = reduction of sources[0][in + i] ..
 * sources[n-1][in + i], along the pairwise tree of device/sum.h, with its bits. An output may be
 * one of the sources if in == out. */
#define QD_SUM_RANKS_MOST 64 /* sources, outputs */
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

/* Copies pieces that do not overlap. The array is host memory, read before the call returns. */
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
    QD_EXPERT_KERNEL_TABLE(X)

typedef struct qd_kernels {
#define QD_KERNEL_SLOT(slot, args) qd_status (*slot)(qd_stream * stream, const args *a);
    QD_KERNEL_TABLE(QD_KERNEL_SLOT)
#undef QD_KERNEL_SLOT
} qd_kernels;

const qd_kernels *qd_device_kernels(const qd_device *device);

#endif
