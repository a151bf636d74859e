/* Causal attention as cuDNN operation graphs: the chains of GEMMs, reductions and element-wise
 * operations that its fused attention engines recognize. Scores and probabilities are virtual
 * tensors: they are never stored in memory.
 *
 *   forward   S = scale · Q·Kᵀ, masked above the diagonal;  M = max S, E = exp(S - M), Σ = sum E
 *             P = E / Σ;  O = P·V;  lse = M + log Σ
 *   backward  P = exp(S - lse);  delta = sum dO·O;  dV = Pᵀ·dO;  dS = P · (dO·Vᵀ - delta) · scale
 *             dK = dSᵀ·Q;  dQ = dS·K
 *
 * The forward pass gives either lse or, for the largest scores of heads, M and Σ: cuDNN has engines
 * for both, but before 9.21 none that give all three.
 *
 * With a soft-cap, S is cap · tanh(scale · Q·Kᵀ / cap), and dS is multiplied by 1 - tanh².
 *
 * cuDNN expects the second operand of a GEMM as (k, n): K and, in the backward pass, V are declared
 * transposed. */
#include "device/cuda/attention/attention_cudnn_impl.h"

#include <string.h>

typedef cudnnBackendDescriptor_t descriptor;

qd_status qd_cudnn_fail_at(const char *file, int line, const char *function, const char *call, cudnnStatus_t error)
{
    char words[512] = "";
    cudnnGetLastErrorString(words, sizeof words);
    qd_status status = error == CUDNN_STATUS_ALLOC_FAILED ? QD_NO_MEMORY : QD_SYSTEM;
    return qd_fail_at(file, line, function, status, "cuDNN: %s: %s%s%s", call, cudnnGetErrorString(error),
                      *words ? ": " : "", words);
}

/* The functions below record the first failure in the graph and do nothing after it. */
#define CHECK(g, call)                                                                                      \
    do {                                                                                                    \
        cudnnStatus_t check_error = (g)->status == QD_OK ? (call) : CUDNN_STATUS_SUCCESS;                   \
        if (check_error != CUDNN_STATUS_SUCCESS)                                                            \
            (g)->status = qd_cudnn_fail_at(__FILE__, __LINE__, __func__, #call, check_error);               \
    } while (0)

static descriptor make(qd_cudnn_graph *g, cudnnBackendDescriptorType_t type)
{
    if (g->status == QD_OK && g->made_count == QD_CUDNN_DESCRIPTORS)
        g->status = QD_FAIL(QD_UNSUPPORTED, "attention graph: more than %d descriptors", QD_CUDNN_DESCRIPTORS);
    descriptor made = NULL;
    CHECK(g, cudnnBackendCreateDescriptor(type, &made));
    if (made)
        g->made[g->made_count++] = made;
    return made;
}

static void set(qd_cudnn_graph *g, descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t count, const void *values)
{
    CHECK(g, cudnnBackendSetAttribute(d, name, type, count, values));
}

static void link(qd_cudnn_graph *g, descriptor d, cudnnBackendAttributeName_t name, descriptor to)
{
    if (to)
        set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &to);
}

static void finalize(qd_cudnn_graph *g, descriptor d)
{
    CHECK(g, cudnnBackendFinalize(d));
}

typedef struct layout {
    int64_t dim[4], stride[4]; /* (batch, head, row, column) */
} layout;

enum tensor_kind { IN_MEMORY, SCALAR, INSIDE };

static descriptor make_tensor(qd_cudnn_graph *g, enum tensor_kind kind, int64_t uid, cudnnDataType_t type, layout at)
{
    int64_t alignment = 16;
    bool yes = true;
    descriptor d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, at.dim);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, at.stride);
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (kind == INSIDE)
        set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (kind == SCALAR)
        set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    finalize(g, d);
    return d;
}

static descriptor in_memory(qd_cudnn_graph *g, int64_t uid, cudnnDataType_t type, layout at)
{
    return make_tensor(g, IN_MEMORY, uid, type, at);
}

static descriptor inside(qd_cudnn_graph *g, cudnnDataType_t type, layout at)
{
    return make_tensor(g, INSIDE, g->next_virtual++, type, at);
}

static descriptor scalar(qd_cudnn_graph *g, int64_t uid)
{
    return make_tensor(g, SCALAR, uid, CUDNN_DATA_FLOAT, (layout){{1, 1, 1, 1}, {1, 1, 1, 1}});
}

static void add_operation(qd_cudnn_graph *g, descriptor d)
{
    finalize(g, d);
    if (g->status == QD_OK && g->operation_count == QD_CUDNN_OPERATIONS)
        g->status = QD_FAIL(QD_UNSUPPORTED, "attention graph: more than %d operations", QD_CUDNN_OPERATIONS);
    if (g->status == QD_OK)
        g->operations[g->operation_count++] = d;
}

/* c = a · b, accumulated in fp32 */
static void gemm(qd_cudnn_graph *g, descriptor a, descriptor b, descriptor c)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    descriptor how = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    finalize(g, how);
    descriptor d = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    link(g, d, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    link(g, d, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    link(g, d, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    link(g, d, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    add_operation(g, d);
}

/* Element-wise operation; operands that the mode does not use are NULL. axis: of the index to
 * generate, or -1. */
typedef struct pointwise_args {
    cudnnPointwiseMode_t mode;
    cudnnDataType_t compute;
    int64_t axis;
    descriptor x, b, t, y;
    descriptor dy, dx; /* of modes that are gradients, instead of y */
} pointwise_args;

static void pointwise(qd_cudnn_graph *g, pointwise_args a)
{
    descriptor how = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &a.mode);
    set(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &a.compute);
    if (a.mode == CUDNN_POINTWISE_GEN_INDEX)
        set(g, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &a.axis);
    finalize(g, how);
    descriptor d = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    link(g, d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    link(g, d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a.x);
    link(g, d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, a.y);
    link(g, d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, a.b);
    link(g, d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, a.t);
    link(g, d, CUDNN_ATTR_OPERATION_POINTWISE_DYDESC, a.dy);
    link(g, d, CUDNN_ATTR_OPERATION_POINTWISE_DXDESC, a.dx);
    add_operation(g, d);
}

static void map(qd_cudnn_graph *g, cudnnPointwiseMode_t mode, descriptor x, descriptor b, descriptor y)
{
    pointwise(g, (pointwise_args){.mode = mode, .compute = CUDNN_DATA_FLOAT, .x = x, .b = b, .y = y});
}

/* y = reduction of x over the dimensions in which y is shorter */
static void reduce(qd_cudnn_graph *g, cudnnReduceTensorOp_t mode, descriptor x, descriptor y)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    descriptor how = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    set(g, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    finalize(g, how);
    descriptor d = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    link(g, d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    link(g, d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    link(g, d, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    add_operation(g, d);
}

/* y is x with other dimensions */
static void reshape(qd_cudnn_graph *g, descriptor x, descriptor y)
{
    descriptor d = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    link(g, d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    link(g, d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_operation(g, d);
}

/* A view (batch, heads, seq, dim) of a buffer with rows of `stride` elements. */
static layout heads_view(const qd_attention_shape *s, int64_t heads, int64_t dim, int64_t stride)
{
    return (layout){{s->batch, heads, s->seq, dim}, {s->seq * stride, dim, stride, 1}};
}

static layout transposed(layout at)
{
    return (layout){{at.dim[0], at.dim[1], at.dim[3], at.dim[2]}, {at.stride[0], at.stride[1], at.stride[3], at.stride[2]}};
}

/* (batch, heads, seq, columns), contiguous */
static layout packed(const qd_attention_shape *s, int64_t columns)
{
    return (layout){{s->batch, s->heads, s->seq, columns},
                    {s->heads * s->seq * columns, s->seq * columns, columns, 1}};
}

static descriptor scores(qd_cudnn_graph *g, const qd_attention_shape *s)
{
    return inside(g, CUDNN_DATA_FLOAT, packed(s, s->seq));
}

/* x where `larger` (row or column) is >= or > `smaller`, -infinity elsewhere */
static descriptor mask_where(qd_cudnn_graph *g, const qd_attention_shape *s, descriptor x, cudnnPointwiseMode_t compare,
                             descriptor larger, descriptor smaller)
{
    descriptor visible = inside(g, CUDNN_DATA_BOOLEAN, packed(s, s->seq)), y = scores(g, s);
    pointwise(g, (pointwise_args){.mode = compare, .compute = CUDNN_DATA_BOOLEAN, .x = larger, .b = smaller, .y = visible});
    pointwise(g, (pointwise_args){.mode = CUDNN_POINTWISE_BINARY_SELECT, .compute = CUDNN_DATA_FLOAT, .x = x,
                                  .b = scalar(g, QD_CUDNN_MASKED), .t = visible, .y = y});
    return y;
}

/* The row (axis 2) or column (axis 3) of each score. */
static descriptor index_of(qd_cudnn_graph *g, const qd_attention_shape *s, descriptor x, int64_t axis)
{
    descriptor y = inside(g, CUDNN_DATA_INT32, packed(s, s->seq));
    pointwise(g, (pointwise_args){.mode = CUDNN_POINTWISE_GEN_INDEX, .compute = CUDNN_DATA_FLOAT, .axis = axis, .x = x, .y = y});
    return y;
}

/* scores where column <= row and, with a window, column + window > row; -infinity elsewhere. Two
 * masks, because engines recognize this form and skip tiles outside. */
static descriptor mask(qd_cudnn_graph *g, const qd_attention_shape *s, descriptor x)
{
    descriptor y = mask_where(g, s, x, CUDNN_POINTWISE_CMP_GE, index_of(g, s, x, 2), index_of(g, s, x, 3));
    if (s->window == 0)
        return y;
    descriptor row = index_of(g, s, y, 2), column = index_of(g, s, y, 3), end = scores(g, s);
    map(g, CUDNN_POINTWISE_ADD, column, scalar(g, QD_CUDNN_WINDOW), end);
    return mask_where(g, s, y, CUDNN_POINTWISE_CMP_GT, end, row);
}

/* cap · tanh(x / cap); *ratio = x / cap, for the backward pass. Without a soft-cap: x. */
static descriptor soften(qd_cudnn_graph *g, const qd_attention_shape *s, descriptor x, descriptor *ratio)
{
    if (!s->capped)
        return x;
    descriptor cap = scalar(g, QD_CUDNN_CAP), bounded = scores(g, s), y = scores(g, s);
    *ratio = scores(g, s);
    map(g, CUDNN_POINTWISE_DIV, x, cap, *ratio);
    map(g, CUDNN_POINTWISE_TANH_FWD, *ratio, NULL, bounded);
    map(g, CUDNN_POINTWISE_MUL, bounded, cap, y);
    return y;
}

static void build_forward(qd_cudnn_graph *g, const qd_attention_shape *s)
{
    const cudnnDataType_t half = CUDNN_DATA_BFLOAT16, full = CUDNN_DATA_FLOAT;
    descriptor q = in_memory(g, QD_CUDNN_Q, half, heads_view(s, s->heads, s->head_dim, s->q_stride));
    descriptor kt = in_memory(g, QD_CUDNN_K, half, transposed(heads_view(s, s->kv_heads, s->head_dim, s->k_stride)));
    descriptor v = in_memory(g, QD_CUDNN_V, half, heads_view(s, s->kv_heads, s->v_dim, s->v_stride));
    descriptor o = in_memory(g, QD_CUDNN_O, half, heads_view(s, s->heads, s->v_dim, s->o_stride));

    descriptor raw = scores(g, s), scaled = scores(g, s);
    gemm(g, q, kt, raw);
    map(g, CUDNN_POINTWISE_MUL, raw, scalar(g, QD_CUDNN_SCALE), scaled);
    descriptor ratio = NULL, masked = mask(g, s, soften(g, s, scaled, &ratio));

    descriptor most = s->maxima ? in_memory(g, QD_CUDNN_MOST, full, packed(s, 1)) : inside(g, full, packed(s, 1));
    descriptor sum = s->maxima ? in_memory(g, QD_CUDNN_SUM, full, packed(s, 1)) : inside(g, full, packed(s, 1));
    descriptor less = scores(g, s), e = scores(g, s), p = inside(g, half, packed(s, s->seq));
    reduce(g, CUDNN_REDUCE_TENSOR_MAX, masked, most);
    map(g, CUDNN_POINTWISE_SUB, masked, most, less);
    map(g, CUDNN_POINTWISE_EXP, less, NULL, e);
    reduce(g, CUDNN_REDUCE_TENSOR_ADD, e, sum);
    if (!s->maxima) {
        descriptor log = inside(g, full, packed(s, 1)), lse = in_memory(g, QD_CUDNN_LSE, full, packed(s, 1));
        map(g, CUDNN_POINTWISE_LOG, sum, NULL, log);
        map(g, CUDNN_POINTWISE_ADD, most, log, lse);
    }
    map(g, CUDNN_POINTWISE_DIV, e, sum, p);
    gemm(g, p, v, o);
}

/* grad (batch, kv_heads, seq, dim) = x (batch, heads, seq, seq) · y (batch, heads, seq, dim),
 * summed over the query heads that share a key head */
static void gemm_by_key_head(qd_cudnn_graph *g, const qd_attention_shape *s, descriptor x, descriptor y, int64_t dim, descriptor grad)
{
    if (s->heads == s->kv_heads) {
        gemm(g, x, y, grad);
        return;
    }
    descriptor each = inside(g, CUDNN_DATA_BFLOAT16, packed(s, dim));
    gemm(g, x, y, each);
    reduce(g, CUDNN_REDUCE_TENSOR_ADD, each, grad);
}

static void build_backward(qd_cudnn_graph *g, const qd_attention_shape *s)
{
    const cudnnDataType_t half = CUDNN_DATA_BFLOAT16, full = CUDNN_DATA_FLOAT;
    layout q_at = heads_view(s, s->heads, s->head_dim, s->q_stride), k_at = heads_view(s, s->kv_heads, s->head_dim, s->k_stride);
    layout v_at = heads_view(s, s->kv_heads, s->v_dim, s->v_stride), o_at = heads_view(s, s->heads, s->v_dim, s->o_stride);
    descriptor q = in_memory(g, QD_CUDNN_Q, half, q_at), kt = in_memory(g, QD_CUDNN_K, half, transposed(k_at));
    descriptor vt = in_memory(g, QD_CUDNN_V, half, transposed(v_at)), o = in_memory(g, QD_CUDNN_O, half, o_at);
    descriptor d_o = in_memory(g, QD_CUDNN_D_O, half, o_at), lse = in_memory(g, QD_CUDNN_LSE, full, packed(s, 1));
    descriptor dq = in_memory(g, QD_CUDNN_DQ, half, q_at), dk = in_memory(g, QD_CUDNN_DK, half, k_at);
    descriptor dv = in_memory(g, QD_CUDNN_DV, half, v_at), delta = in_memory(g, QD_CUDNN_DELTA, full, packed(s, 1));
    descriptor scale = scalar(g, QD_CUDNN_SCALE);
    layout across = packed(s, s->seq);
    across.stride[2] = 1;
    across.stride[3] = s->seq; /* (batch, heads, seq of keys, seq of queries) */

    /* delta = sum of dO · O along the head; the factor 1 replaces the dropout factor of the
     * expected chain */
    descriptor both = inside(g, full, packed(s, s->v_dim)), sums = inside(g, full, packed(s, 1));
    map(g, CUDNN_POINTWISE_MUL, d_o, o, both);
    reduce(g, CUDNN_REDUCE_TENSOR_ADD, both, sums);
    map(g, CUDNN_POINTWISE_MUL, sums, scalar(g, QD_CUDNN_ONE), delta);

    /* P, then dV = Pᵀ·dO */
    descriptor raw = scores(g, s), scaled = scores(g, s), less = scores(g, s), p = scores(g, s);
    gemm(g, q, kt, raw);
    map(g, CUDNN_POINTWISE_MUL, raw, scale, scaled);
    descriptor ratio = NULL, softened = soften(g, s, scaled, &ratio);
    map(g, CUDNN_POINTWISE_SUB, softened, lse, less);
    descriptor masked = mask(g, s, less);
    map(g, CUDNN_POINTWISE_EXP, masked, NULL, p);
    descriptor pt = inside(g, half, across);
    reshape(g, p, pt);
    gemm_by_key_head(g, s, pt, d_o, s->v_dim, dv);

    /* dS, then dK = dSᵀ·Q */
    descriptor dp = scores(g, s), centred = scores(g, s), by_p = scores(g, s), ds = scores(g, s);
    gemm(g, d_o, vt, dp);
    map(g, CUDNN_POINTWISE_SUB, dp, delta, centred);
    map(g, CUDNN_POINTWISE_MUL, centred, p, by_p);
    if (s->capped) {
        /* Times 1 - tanh². Not on P before: that needs fewer registers, but the engine then takes
         * the product for P in dV = Pᵀ·dO as well. */
        descriptor through = scores(g, s);
        pointwise(g, (pointwise_args){.mode = CUDNN_POINTWISE_TANH_BWD, .compute = full, .x = ratio, .dy = by_p, .dx = through});
        by_p = through;
    }
    map(g, CUDNN_POINTWISE_MUL, by_p, scale, ds);
    descriptor dst = inside(g, half, across);
    reshape(g, ds, dst);
    gemm_by_key_head(g, s, dst, q, s->head_dim, dk);

    /* dQ = dS·K */
    descriptor k = inside(g, half, k_at);
    reshape(g, kt, k);
    if (s->deterministic) {
        gemm(g, ds, k, dq);
    } else {
        descriptor dq_sum = in_memory(g, QD_CUDNN_DQ_SUM, full, packed(s, s->head_dim));
        gemm(g, ds, k, dq_sum);
        map(g, CUDNN_POINTWISE_IDENTITY, dq_sum, NULL, dq);
    }
}

qd_status qd_cudnn_graph_create(cudnnHandle_t handle, const qd_attention_shape *shape, qd_cudnn_graph *graph)
{
    memset(graph, 0, sizeof *graph);
    graph->next_virtual = QD_CUDNN_VIRTUAL;
    (shape->backward ? build_backward : build_forward)(graph, shape);
    graph->graph = make(graph, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(graph, graph->graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, graph->operation_count,
        graph->operations);
    if (handle)
        set(graph, graph->graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    finalize(graph, graph->graph);
    qd_status status = graph->status;
    if (status != QD_OK)
        qd_cudnn_graph_destroy(graph);
    return status;
}

void qd_cudnn_graph_destroy(qd_cudnn_graph *graph)
{
    for (int i = graph->made_count - 1; i >= 0; i--)
        cudnnBackendDestroyDescriptor(graph->made[i]);
    memset(graph, 0, sizeof *graph);
}
