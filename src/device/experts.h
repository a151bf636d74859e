/* Kernel arguments for mixture-of-experts blocks and for query/key norms. Part of device.h.
 *
 * An assignment is a pair (row, j), j < per_token: the row's j-th choice of an expert. Assignments
 * that are carried out are numbered by expert, then row, then j; this number is their place. An
 * expert may have none. */
#ifndef QD_DEVICE_EXPERTS_H
#define QD_DEVICE_EXPERTS_H

#include <quadrille/types.h>

/* RMSNorm of queries and keys per head. x (rows, row_stride): `heads` queries, then kv_heads keys,
 * of head_dim each; the remaining columns are copied. Each head's vector becomes x * rstd * gamma,
 * rstd = 1 / sqrt(mean(x²) + eps); plus_one: the factor is 1 + gamma. rstd: (rows, heads +
 * kv_heads). Backward: d (rows, row_stride) is replaced in place, from the gradient of y to that of
 * x; gradients of the gammas are accumulated into if accumulate, else overwritten. */
typedef struct qd_head_norm_args {
    const void *x, *q_gamma, *k_gamma;
    void *y;
    float *rstd;
    int64_t rows, row_stride;
    int heads, kv_heads, head_dim;
    float eps;
    bool plus_one;
    qd_dtype dtype, param_dtype;
    void *d, *q_grad, *k_grad; /* backward only */
    bool accumulate;
    qd_dtype grad_dtype;
} qd_head_norm_args;

/* How experts are chosen. Scores are the softmax or sigmoid of the logits. Experts form `groups`
 * equal groups. A group's score is the sum of its group_best highest (score + bias); the top_groups
 * groups with the highest score are eligible. Of their experts the per_token highest (score + bias)
 * are chosen; ties go to the lowest index. Weights are scores without bias, divided by their sum if
 * normalised, times scale. */
typedef struct qd_route_rule {
    int experts, per_token, groups, top_groups, group_best;
    bool sigmoid, normalised;
    float scale;
} qd_route_rule;

/* logits (rows, experts) -> choice, weight (rows, per_token), best first. load (loads, experts) =
 * number of rows that chose each expert, per sequence: row r belongs to sequence (first_row + r) /
 * load_rows. */
typedef struct qd_route_args {
    const float *logits;
    const void *bias; /* (experts) or NULL */
    int32_t *choice;
    float *weight, *load;
    int64_t rows, first_row, load_rows, loads;
    qd_route_rule rule;
    qd_dtype bias_dtype;
} qd_route_args;

/* d_logits (fp32 or bf16) from d_weight and from two auxiliary losses of the router:
 *   balance  aux * sum over rows of sum over experts of f[e] * p[row][e],
 *            p: scores divided by their sum, f[e] = load[e] * load_scale of the row's sequence
 *   z        z * sum over rows of (log sum exp logits)² */
typedef struct qd_route_grad_args {
    const float *logits, *weight, *d_weight, *load;
    const int32_t *choice;
    void *d_logits;
    int64_t rows, first_row, load_rows;
    float aux, load_scale, z;
    qd_route_rule rule;
    qd_dtype grad_dtype;
} qd_route_grad_args;

/* choice (rows, per_token) -> place (rows, per_token), from (rows * per_token): the assignment at
 * each place, count (experts). limit > 0 is the capacity of an expert: surplus assignments get
 * place -1, the last ones, or with `least` those of least weight (of equal ones the last). */
typedef struct qd_route_plan_args {
    const int32_t *choice;
    const float *weight;
    int32_t *place, *from, *count;
    int64_t rows, limit;
    int experts, per_token;
    bool least;
} qd_route_plan_args;

/* total (experts) += number of assignments per expert. */
typedef struct qd_route_load_args {
    const int32_t *choice;
    float *total;
    int64_t assignments;
    int experts;
} qd_route_load_args;

/* y[place] = x[row] [* weight[assignment]], for all places. With `old` (backward of combine) also
 * d_weight[assignment] = <x[row], sum over copies of old[copy][place]>, 0 for assignments without a
 * place. `place` may be NULL without `old`; a GPU then reads each row once per choice. */
typedef struct qd_permute_args {
    const void *x;
    const int32_t *from, *place, *count; /* count (experts): its sum is the number of places */
    const float *weight;                 /* NULL: 1 */
    void *y;
    const void *old; /* (copies, copy_rows, cols) or NULL */
    float *d_weight;
    int64_t rows, cols;
    int64_t copy_rows; /* 0: rows * per_token */
    int per_token, experts, copies;
    qd_dtype dtype;
} qd_permute_args;

/* y[row] = [add[row]] + sum over j of [weight] * sum over copies of x[copy][place], added in this
 * order. */
typedef struct qd_combine_args {
    const void *x, *add; /* x (copies, copy_rows, cols) */
    const int32_t *place;
    const float *weight; /* NULL: 1 */
    void *y;
    int64_t rows, cols;
    int64_t copy_rows; /* 0: rows * per_token */
    int per_token, copies;
    qd_dtype dtype;
} qd_combine_args;

/* Grouped GEMM: one matrix b_e per expert. Rows of a come in `sources` blocks, one per sending
 * rank; within a block they are sorted by expert: counts[s * count_stride + e] rows for e <
 * experts. Of this list the call covers rows [begin, begin + rows): row 0 of a and c is row `begin`
 * of the list. Rows beyond the end of the list are not touched.
 *   by rows     c (rows, n) = a (rows, k) · op(b_e);
 *               b (experts, k, n), or (experts, n, k) if trans_b
 *   by experts  b_e (n, k) = c (rows, n)ᵀ · a (rows, k), sources in ascending order; 0 for an
 *               expert without rows. accumulate: added to b. squares (experts, n), if set: sums of
 *               squares of b's rows as stored
 * By rows a bias, then SwiGLU can be fused, bit-identical to the separate kernels:
 *   bias        (experts, n): added to the rows of c, after these have been rounded
 *   active      n = 2 w; also active (rows, w) = silu(gate) * up, where gate and up are the first
 *               and the last w columns of c
 *   gate_up     c (rows, n) is the gradient of such an `active` and undefined afterwards; gate_up
 *               (rows, 2 n) is an input, d_gate_up its gradient; active (rows, n), if set, is
 *               recomputed
 * Their rows beyond the end of the list are undefined. Without these and without squares, matrices
 * can be parts of others (adapters): rows of a and c are a_stride and c_stride elements apart,
 * matrices of experts b_stride (0: k, n and n k); and by rows the result can be added to c
 * (add_rows). */
typedef struct qd_grouped_args {
    const void *a;
    void *b, *c;
    void *active, *d_gate_up; /* NULL: no SwiGLU; types are c's */
    const void *gate_up;
    const void *bias; /* may be NULL */
    double *squares;  /* may be NULL */
    const int32_t *counts;
    int64_t count_stride, begin, rows, n, k;
    int64_t a_stride, b_stride, c_stride;
    int sources, experts;
    bool trans_b, by_experts, accumulate, add_rows;
    float alpha, limit; /* limit > 0: SwiGLU is clamped, as in qd_activation_args */
    qd_dtype a_dtype, b_dtype, c_dtype, bias_dtype;
} qd_grouped_args;

/* bias -= rate * sign(total - mean) in fp32 (`bias`), rounded into `param` if that is another
 * buffer. If grad_scale is set and not finite, nothing is written. rest: replaces bias, as in
 * qd_adamw_args. */
typedef struct qd_expert_bias_args {
    float *bias, *total;
    int16_t *rest;
    void *param;
    int64_t experts;
    double mean, rate;
    const double *grad_scale; /* device memory, or NULL */
    qd_dtype param_dtype;
} qd_expert_bias_args;

/* Hierarchical dispatch (spec/layout/nodes.h): one copy of a row for each node that has experts of
 * the row. Consecutive experts are on the same node, equally many per node. Copies are numbered by
 * node, then by row. An assignment with `kept` < 0 is not carried out.
 *   place   (rows, nodes): number of the copy, or -1
 *   from    row * nodes + node of each copy
 *   copies  (nodes): number of copies per node
 *   counts  (experts + nodes): `count`, then `copies`
 *   chosen  (copies, 2 * per_token): the row's choices as indices of the node's experts, -1 for
 *           experts elsewhere, then all its weights */
typedef struct qd_node_plan_args {
    const int32_t *choice, *kept; /* (rows, per_token) */
    const int32_t *count;         /* (experts) */
    const float *weight;          /* (rows, per_token) */
    int32_t *place, *from, *copies, *counts, *chosen;
    int64_t rows;
    int experts, nodes, per_token;
} qd_node_plan_args;

/* d_weight (rows, per_token) from that of the copies, (copies, per_token): each choice takes it
 * from the copy that was sent to its node; 0 where `kept` < 0. */
typedef struct qd_node_weights_args {
    const int32_t *choice, *kept; /* (rows, per_token) */
    const int32_t *place;         /* (rows, nodes) */
    const float *copies;
    float *d_weight;
    int64_t rows;
    int experts, nodes, per_token;
} qd_node_weights_args;

/* Places for one dispatch round of a node's relayed rows, sorted by expert, then by row. Round: of
 * each expert's assignments, in order of rows, take[e] starting at number taken[e]. place (rows,
 * per_token): -1 for all others; from: the assignment at each place; count (experts) = take. The
 * first `relayed` of `rows` rows are present. weight (relayed, per_token), or NULL: the weights
 * that arrived with the choices. */
typedef struct qd_relay_plan_args {
    const int32_t *chosen;       /* (relayed, 2 * per_token), from node_plan */
    const int32_t *taken, *take; /* (experts) */
    int32_t *place, *from, *count;
    float *weight;
    int64_t rows, relayed;
    int experts, per_token;
} qd_relay_plan_args;

/* to[i] = from[i] where place[i] >= 0. */
typedef struct qd_relay_keep_args {
    const int32_t *place;
    const float *from;
    float *to;
    int64_t n;
} qd_relay_keep_args;

/* gate: y = each row of x times the sigmoid of its gate. gate_backward: from dy, that of y, the
 * gradients dx of x and d_gate (rows) of the gates; dx may equal dy. */
typedef struct qd_gate_args {
    const void *x, *dy;
    const float *gate; /* (rows) */
    void *y, *dx, *d_gate;
    int64_t rows, cols;
    qd_dtype dtype;
} qd_gate_args;

#define QD_EXPERT_KERNEL_TABLE(X)                                                                           \
    X(head_norm, qd_head_norm_args)                                                                         \
    X(head_norm_backward, qd_head_norm_args)                                                                \
    X(route, qd_route_args)                                                                                 \
    X(route_grad, qd_route_grad_args)                                                                       \
    X(route_plan, qd_route_plan_args)                                                                       \
    X(route_load, qd_route_load_args)                                                                       \
    X(permute, qd_permute_args)                                                                             \
    X(combine, qd_combine_args)                                                                             \
    X(grouped, qd_grouped_args)                                                                             \
    X(expert_bias, qd_expert_bias_args)                                                                     \
    X(node_plan, qd_node_plan_args)                                                                         \
    X(node_weights, qd_node_weights_args)                                                                   \
    X(relay_plan, qd_relay_plan_args)                                                                       \
    X(relay_keep, qd_relay_keep_args)                                                                       \
    X(gate, qd_gate_args)                                                                                   \
    X(gate_backward, qd_gate_args)
#endif
